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
        at, start, tail = [self.root], 0, None
        while start < len(tokens):
            wanted = list(tokens[start : start + self.size])
            children = [child for block in at for child in block.children.get(wanted[0], ())]
            same = [child for child in children if child.tokens == wanted and len(wanted) == self.size]
            if not same:
                tail = _best(children, wanted, self.size)
                break
            at, start = same, start + self.size
        path: list[Block] = []
        block = tail[0].parent if tail else at[0]
        while block is not None and block is not self.root:
            path.append(block)
            block = block.parent
        return path[::-1], tail

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
        if len(self._idle) > 4 * self.blocks:  # most of them out of date
            self._idle = [entry for entry in self._idle if _is_idle(*entry)]
            heapq.heapify(self._idle)
        heapq.heappush(self._idle, (block.used, next(self._order), block))

    def _evict(self) -> bool:
        """Free the leaf that was left alone for longest."""
        while self._idle:
            entry = heapq.heappop(self._idle)
            block, parent = entry[2], entry[2].parent
            if parent is None or not _is_idle(*entry):
                continue
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


def _is_idle(used: int, _: int, block: Block) -> bool:
    """Whether this is still a leaf of the tree that nobody used since."""
    return not block.users and not block.children and block.used == used and block.parent is not None


def _best(blocks: Iterable[Block], wanted: list[int], size: int) -> tuple[Block, int] | None:
    """The block that starts with most of `wanted`; among equals, an idle one with nothing else in it."""
    best, rank = None, (0, False)
    for block in blocks:
        shared = common(block.tokens, wanted)
        block_rank = (shared, not block.users and shared == len(block.tokens) < size)
        if block_rank > rank:
            best, rank = block, block_rank
    return (best, rank[0]) if best else None


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
