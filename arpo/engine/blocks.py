"""Which block of the pool holds which tokens: a tree of blocks, shared, counted, evicted. Pure Python, no tensors.

A sequence is cut into blocks of `size` tokens. A block is a node whose ancestors hold everything before it, so
sequences with a common prefix share the nodes of that prefix. Inner nodes are full; a leaf may be filled in part, and
only the one sequence that owns it writes to it. What is written is never changed until the block is given to another.

    path, tail = tree.match(tokens)           # full nodes that hold a prefix; the best start of one more block
    tree.hold(path)                           # from now on they may not be evicted
    node = tree.grow(path[-1] if path else tree.root)   # a new block; an idle one is evicted if none is free
    tree.fill(node, [5, 6])                   # its first tokens are computed
    tree.release([*path, node])               # idle: kept for whoever comes next, until the room is needed

Every node on the way from the root to a held node is held as well, which is the caller's duty.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from itertools import count


class Block:
    """One block: its number in the pool, the tokens it holds so far, and how many sequences are using it."""

    __slots__ = ("children", "number", "parent", "tokens", "used", "users")

    def __init__(self, number: int, parent: Block | None) -> None:
        self.number, self.parent = number, parent
        self.tokens: list[int] = []
        self.children: dict[int, list[Block]] = {}  # by their first token
        self.users, self.used = 0, 0


class BlockTree:
    """The blocks numbered 0 .. `blocks` - 1, each of `size` tokens."""

    def __init__(self, blocks: int, size: int) -> None:
        self.blocks, self.size = blocks, size
        self._clock, self._order = count(1), count()
        self.clear()

    def clear(self) -> None:
        """Forget everything: all blocks are free."""
        self.root = Block(-1, None)
        self._free = list(range(self.blocks))  # a heap: low numbers first keeps what is in use close together
        self._idle: list[tuple[int, int, Block]] = []  # a heap by last use; entries may be out of date
        self._held = 0

    @property
    def available(self) -> int:
        """Blocks that can be had: free ones and those that nobody holds."""
        return self.blocks - self._held

    def match(self, tokens: Sequence[int]) -> tuple[list[Block], tuple[Block, int] | None]:
        """The full blocks that hold a prefix of `tokens`, and the block that holds most of what follows, if any.

        Of several such blocks, one that holds nothing else and is not in use comes first: it can be written on.
        """
        path: list[Block] = []
        at, start = self.root, 0
        while start < len(tokens):
            wanted = list(tokens[start : start + self.size])
            best, rank = None, (0, False)
            for child in at.children.get(wanted[0], ()):
                if child.tokens == wanted and len(wanted) == self.size:
                    best, rank = child, (self.size, False)
                    break
                shared = common(child.tokens, wanted)
                child_rank = (shared, not child.users and shared == len(child.tokens) < self.size)
                if child_rank > rank:
                    best, rank = child, child_rank
            if best is None:
                break
            if rank[0] < self.size:
                return path, (best, rank[0])
            path.append(best)
            at, start = best, start + self.size
        return path, None

    def hold(self, path: Iterable[Block]) -> None:
        """One more sequence uses these blocks."""
        for block in path:
            self._held += not block.users
            block.users += 1

    def release(self, path: Iterable[Block]) -> None:
        """One sequence less uses these blocks; those that nobody uses stay until their room is needed."""
        now = next(self._clock)
        for block in path:
            block.users -= 1
            block.used = now
            if not block.users:
                self._held -= 1
                if not block.tokens:  # nothing was computed: nothing to keep
                    heapq.heappush(self._free, block.number)
                elif not block.children:
                    self._offer(block)

    def grow(self, parent: Block) -> Block | None:
        """A new, empty block after `parent`, held by its one owner; None if every block is held."""
        if not self._free and not self._evict():
            return None
        block = Block(heapq.heappop(self._free), parent)
        self.hold([block])
        return block

    def fill(self, block: Block, tokens: Sequence[int]) -> None:
        """These tokens were computed and stand in the block from now on."""
        if not block.tokens and tokens and block.parent is not None:
            block.parent.children.setdefault(tokens[0], []).append(block)
        block.tokens.extend(tokens)

    def _offer(self, block: Block) -> None:
        heapq.heappush(self._idle, (block.used, next(self._order), block))

    def _evict(self) -> bool:
        """Free the leaf that was left alone for longest."""
        while self._idle:
            used, _, block = heapq.heappop(self._idle)
            if block.users or block.children or block.used != used or block.parent is None:
                continue
            parent = block.parent
            siblings = parent.children[block.tokens[0]]
            siblings.remove(block)
            if not siblings:
                del parent.children[block.tokens[0]]
            block.parent = None  # out of the tree
            heapq.heappush(self._free, block.number)
            if parent is not self.root and not parent.users and not parent.children:
                self._offer(parent)
            return True
        return False


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common prefix."""
    low, high = 0, min(len(a), len(b))
    while low < high:  # a[:low] == b[:low] always holds
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
