"""The block tree against a simple model: the text that each block must hold."""

from __future__ import annotations

import random
from collections import Counter
from itertools import count
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from arpo.engine.local.blocks import Block, BlockTree, common_prefix_length

SIZE = 3
TEXT = st.lists(st.integers(0, 1), min_size=1, max_size=14)


def slow_common(a: Any, b: Any) -> int:
    """Length of the common prefix, one by one."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def walk(tree: BlockTree) -> dict[int, tuple[int, list[int]]]:
    """Every block in the tree by number: its parent's number, and all text from the root to its end."""
    found: dict[int, tuple[int, list[int]]] = {}

    def visit(block: Block, before: list[int]) -> None:
        for first, children in block.children.items():
            assert children
            for child in children:
                assert child.index not in found and child.parent is block and child.tokens[0] == first
                found[child.index] = block.index, [*before, *child.tokens]
                visit(child, [*before, *child.tokens])

    visit(tree.root, [])
    return found


class Blocks(RuleBasedStateMachine):
    """Sequences start, share, fork, grow and end; the model knows which text every block must hold."""

    @initialize(blocks=st.integers(2, 9))
    def build(self, blocks: int) -> None:
        self.blocks, self.tree = blocks, BlockTree(blocks, SIZE)
        self.forget()

    def forget(self) -> None:
        self.texts: dict[int, list[int]] = {}  # by block number: everything from the start of the sequence
        self.parents: dict[int, int] = {}
        self.left: dict[int, int] = {}  # when a block was last released
        self.users: Counter[int] = Counter()
        self.sequences: list[list[Block]] = []
        self.time = count(1)

    def hold(self, blocks: list[Block]) -> None:
        self.tree.acquire(blocks)
        self.users.update(block.index for block in blocks)

    def release(self, blocks: list[Block]) -> None:
        self.tree.release(blocks)
        now = next(self.time)
        for block in blocks:
            self.users[block.index] -= 1
            self.left[block.index] = now

    def grow(self, parent: Block) -> Block | None:
        """Allocate in both; the model says which index it must be."""
        free = [n for n in range(self.blocks) if n not in self.texts and not self.users[n]]
        leaves = [n for n in self.texts if not self.users[n] and n not in self.parents.values()]
        expected = min(free) if free else min(leaves, key=lambda n: self.left[n], default=None)
        block = self.tree.allocate(parent)
        assert (block and block.index) == expected
        if block is None:
            return None
        self.texts.pop(block.index, None)
        self.parents.pop(block.index, None)
        self.users[block.index] += 1
        return block

    def fill(self, block: Block, tokens: list[int]) -> None:
        assert block.parent is not None
        self.tree.fill(block, tokens)
        before = self.texts.get(block.index, self.texts.get(block.parent.index, []))
        self.texts[block.index] = [*before, *tokens]
        self.parents[block.index] = block.parent.index

    @rule(known=st.none() | st.integers(0, 8), tokens=TEXT, copy=st.booleans())
    def start(self, known: int | None, tokens: list[int], copy: bool) -> None:
        tokens = [*self.texts.get(known, []), *tokens] if known is not None else tokens
        blocks, tail = self.tree.match_prefix(tokens)
        self.check_match(tokens, blocks, tail)
        self.hold(blocks)
        if tail is not None:
            block, shared = tail
            writable = not block.ref_count and shared == len(block.tokens)
            self.hold([block])
            if writable and not copy:
                blocks = [*blocks, block]
            else:
                twin = self.grow(blocks[-1] if blocks else self.tree.root)
                self.release([block])
                if twin is not None:
                    self.fill(twin, tokens[len(blocks) * SIZE :][:shared])
                    blocks = [*blocks, twin]
        self.sequences.append(blocks)
        self.write(blocks, tokens[sum(len(block.tokens) for block in blocks) :])

    @rule(tokens=TEXT)
    def start_alone(self, tokens: list[int]) -> None:
        """One that computes what others are computing at the same time."""
        self.sequences.append([])
        self.write(self.sequences[-1], tokens)

    def check_match(self, tokens: list[int], blocks: list[Block], tail: tuple[Block, int] | None) -> None:
        numbers = [block.index for block in blocks]
        for i, number in enumerate(numbers):
            assert self.texts[number] == tokens[: (i + 1) * SIZE]
            assert self.parents[number] == (numbers[i - 1] if i else -1)
        known = max((slow_common(text, tokens) for text in self.texts.values()), default=0)
        assert len(blocks) * SIZE + (tail[1] if tail else 0) == known
        if tail is None:
            return
        block, shared = tail
        parent = numbers[-1] if numbers else -1
        assert 0 < shared < SIZE and self.parents[block.index] == parent
        assert slow_common(self.texts[block.index], tokens) == known
        ready = [n for n, text in self.texts.items() if text == tokens[:known] and not self.users[n] and known % SIZE]
        if any(self.parents[n] == parent for n in ready):
            assert block.index in ready

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), tokens=TEXT)
    def extend(self, data: st.DataObject, tokens: list[int]) -> None:
        self.write(data.draw(st.sampled_from(self.sequences)), tokens)

    def write(self, blocks: list[Block], tokens: list[int]) -> None:
        """Continue a sequence in its own last block or in new ones."""
        while tokens:
            room = SIZE - len(blocks[-1].tokens) if blocks else 0
            if not room:
                block = self.grow(blocks[-1] if blocks else self.tree.root)
                if block is None:
                    assert self.tree.num_available == 0
                    return
                blocks.append(block)
                room = SIZE
            self.fill(blocks[-1], tokens[:room])
            tokens = tokens[room:]

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), more=st.booleans())
    def stop(self, data: st.DataObject, more: bool) -> None:
        blocks = data.draw(st.sampled_from(self.sequences))
        if more and (not blocks or len(blocks[-1].tokens) == SIZE):
            empty = self.grow(blocks[-1] if blocks else self.tree.root)  # released with nothing in it
            blocks += [empty] if empty else []
        self.sequences = [other for other in self.sequences if other is not blocks]
        self.release(blocks)

    @precondition(lambda self: not any(self.users.values()))
    @rule()
    def clear(self) -> None:
        self.tree.clear()
        self.forget()

    @invariant()
    def the_tree_is_the_model(self) -> None:
        found = walk(self.tree)
        assert {number: text for number, (_, text) in found.items()} == self.texts
        assert {number: parent for number, (parent, _) in found.items()} == self.parents
        held = [number for number, users in self.users.items() if users]
        assert self.tree.num_available == self.blocks - len(held)
        for blocks in self.sequences:
            assert all(block.ref_count == self.users[block.index] for block in blocks)


TestBlocks = pytest.mark.slow(Blocks.TestCase)
TestBlocks.settings = settings(max_examples=150, stateful_step_count=25, deadline=None, derandomize=True)


def written(tree: BlockTree, tokens: list[int]) -> list[Block]:
    """A sequence written block by block, sharing nothing."""
    blocks: list[Block] = []
    for start in range(0, len(tokens), tree.block_size):
        block = tree.allocate(blocks[-1] if blocks else tree.root)
        assert block is not None
        tree.fill(block, tokens[start : start + tree.block_size])
        blocks.append(block)
    return blocks


def test_match_prefers_the_block_with_children() -> None:
    """Two sequences sampled the same beginning: continuing the second must find all of it."""
    tree = BlockTree(6, 2)
    written(tree, [1, 2, 3, 4])
    second = written(tree, [1, 2, 5, 6])
    assert tree.match_prefix([1, 2, 5, 6, 7]) == (second, None)


def test_an_idle_partial_block_is_preferred_to_one_in_use() -> None:
    tree = BlockTree(4, 4)
    busy, idle = written(tree, [1, 2, 3]), written(tree, [1, 2])
    tree.release(idle)
    assert tree.match_prefix([1, 2, 9]) == ([], (idle[0], 2))
    assert tree.match_prefix([1, 2, 3]) == ([], (busy[0], 3))
    tree.acquire(idle)
    assert tree.match_prefix([1, 2, 9])[1] == (busy[0], 2)


def test_an_idle_block_with_nothing_else_in_it_is_preferred() -> None:
    tree = BlockTree(4, 4)
    more, just = written(tree, [1, 2, 3]), written(tree, [1, 2])
    tree.release(more)
    tree.release(just)
    assert tree.match_prefix([1, 2, 9]) == ([], (just[0], 2))


def test_eviction_takes_the_least_recently_used_leaf() -> None:
    tree = BlockTree(4, 1)
    first, second = written(tree, [1, 2]), written(tree, [3, 4])
    tree.release(second)
    tree.release(first)
    order = [tree.allocate(tree.root) for _ in range(5)]
    numbers = [block and block.index for block in order]
    assert numbers == [second[1].index, second[0].index, first[1].index, first[0].index, None]


def test_using_a_block_again_delays_its_eviction() -> None:
    tree = BlockTree(2, 1)
    first, second = written(tree, [1]), written(tree, [2])
    tree.release(first)
    tree.release(second)
    tree.acquire(first)
    tree.release(first)
    assert tree.allocate(tree.root) is not None
    assert tree.match_prefix([1]) == (first, None)
    assert tree.match_prefix([2]) == ([], None)


def test_after_clear_everything_is_free() -> None:
    tree = BlockTree(5, 2)
    tree.release(written(tree, [1, 2, 3, 4, 5]))
    tree.clear()
    assert tree.num_available == 5
    assert tree.match_prefix([1, 2]) == ([], None)
    assert [block and block.index for block in (tree.allocate(tree.root) for _ in range(6))] == [0, 1, 2, 3, 4, None]


def test_the_common_prefix() -> None:
    rng = random.Random(0)
    for _ in range(300):
        a, b = ([rng.randrange(2) for _ in range(rng.randrange(12))] for _ in range(2))
        assert common_prefix_length(a, b) == slow_common(a, b)
