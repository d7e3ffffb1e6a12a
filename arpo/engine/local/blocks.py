"""Prefix cache: a tree of KV-cache blocks that are shared, reference-counted and evicted. Pure Python, no tensors.

A sequence is split into blocks of `block_size` tokens. The ancestors of a block hold everything before it, so sequences
with a common prefix share its blocks. Inner blocks are full; a leaf may be partly filled, and only the one sequence
that owns it writes to it. What is written never changes until the block is evicted.

    blocks, partial = tree.match_prefix(tokens)     # full blocks that hold a prefix; the best start of one more block
    tree.acquire(blocks)                            # they may not be evicted now
    block = tree.allocate(blocks[-1] if blocks else tree.root)  # a new block; an idle one is evicted if none is free
    tree.fill(block, [5, 6])                        # its first tokens are computed
    tree.release([*blocks, block])                  # idle: cached until the room is needed

The caller must hold every ancestor of a block that it holds.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from itertools import count


class Block:
    """One block: its index in the KV cache, the tokens it holds so far, and how many sequences use it."""

    __slots__ = ("children", "index", "last_used", "parent", "ref_count", "tokens")

    def __init__(self, index: int, parent: Block | None) -> None:
        self.index, self.parent = index, parent
        self.tokens: list[int] = []
        self.children: dict[int, list[Block]] = {}  # by their first token
        self.ref_count, self.last_used = 0, 0


class BlockTree:
    """The blocks 0 .. `num_blocks` - 1, each of `block_size` tokens."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self._clock, self._order = count(1), count()
        self.clear()

    def clear(self) -> None:
        """Drop everything: all blocks are free."""
        self.root = Block(-1, None)
        self._free = list(range(self.num_blocks))  # a heap: low indices first keeps blocks in use close together
        self._idle: list[tuple[int, int, Block]] = []  # a heap by last use; entries may be out of date
        self._held = 0

    @property
    def num_available(self) -> int:
        """Blocks that can be allocated: free and idle ones."""
        return self.num_blocks - self._held

    def match_prefix(self, tokens: Sequence[int]) -> tuple[list[Block], tuple[Block, int] | None]:
        """Return the full blocks that hold a prefix of `tokens`, and the block that holds most of what follows.

        The latter comes with the number of tokens it shares, or is None. Of several such blocks, one that is idle and
        holds nothing else is preferred, because it can be written to.
        """
        level, start, partial = [self.root], 0, None
        while start < len(tokens):
            wanted = list(tokens[start : start + self.block_size])
            children = [child for block in level for child in block.children.get(wanted[0], ())]
            equal = [child for child in children if child.tokens == wanted and len(wanted) == self.block_size]
            if not equal:
                partial = _best_partial(children, wanted, self.block_size)
                break
            level, start = equal, start + self.block_size
        blocks: list[Block] = []
        block = partial[0].parent if partial else level[0]
        while block is not None and block is not self.root:
            blocks.append(block)
            block = block.parent
        return blocks[::-1], partial

    def acquire(self, blocks: Iterable[Block]) -> None:
        """Count one more sequence that uses these blocks."""
        for block in blocks:
            self._held += not block.ref_count
            block.ref_count += 1

    def release(self, blocks: Iterable[Block]) -> None:
        """Count one sequence less; blocks without one become idle and stay cached until their room is needed."""
        now = next(self._clock)
        for block in blocks:
            block.ref_count -= 1
            block.last_used = now
            if not block.ref_count:
                self._held -= 1
                if not block.tokens:  # nothing was computed, so there is nothing to cache
                    heapq.heappush(self._free, block.index)
                elif not block.children:
                    self._push_idle(block)

    def allocate(self, parent: Block) -> Block | None:
        """Return a new, empty block after `parent`, held by its one owner; None if every block is held."""
        if not self._free and not self._evict():
            return None
        block = Block(heapq.heappop(self._free), parent)
        self.acquire([block])
        return block

    def fill(self, block: Block, tokens: Sequence[int]) -> None:
        """Append tokens that were computed."""
        if not block.tokens and tokens and block.parent is not None:
            block.parent.children.setdefault(tokens[0], []).append(block)
        block.tokens.extend(tokens)

    def _push_idle(self, block: Block) -> None:
        if len(self._idle) > 4 * self.num_blocks:  # most of them out of date
            self._idle = [entry for entry in self._idle if _is_idle(*entry)]
            heapq.heapify(self._idle)
        heapq.heappush(self._idle, (block.last_used, next(self._order), block))

    def _evict(self) -> bool:
        """Free the least recently used leaf; False if there is none."""
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
            heapq.heappush(self._free, block.index)
            if parent is not self.root and not parent.ref_count and not parent.children:
                self._push_idle(parent)
            return True
        return False


def _is_idle(last_used: int, _: int, block: Block) -> bool:
    """Return whether an entry of the idle heap is up to date: a leaf that nobody has used since."""
    return not block.ref_count and not block.children and block.last_used == last_used and block.parent is not None


def _best_partial(blocks: Iterable[Block], wanted: list[int], block_size: int) -> tuple[Block, int] | None:
    """Return the block that starts with most of `wanted`; among equals, an idle one with nothing else in it."""
    best, best_rank = None, (0, False)
    for block in blocks:
        shared = common_prefix_length(block.tokens, wanted)
        rank = (shared, not block.ref_count and shared == len(block.tokens) < block_size)
        if rank > best_rank:
            best, best_rank = block, rank
    return (best, best_rank[0]) if best else None


def common_prefix_length(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the length of the common prefix of two sequences."""
    low, high = 0, min(len(a), len(b))
    while low < high:  # a[:low] == b[:low] always holds
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
