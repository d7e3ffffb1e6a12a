"""The scheduler with a fake model: a KV cache of plain Python cells shows what every step would read."""

from __future__ import annotations

import random
from concurrent.futures import Future
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arpo.engine.local.kv_cache import BLOCK_SIZE
from arpo.engine.local.scheduler import WORTH_WAITING, Batch, Request, Scheduler
from arpo.types import SamplingParams

CONTEXT = 400


def request(tokens: list[int], new: int, seed: int = 0, **params: Any) -> Request:
    done: Any = Future()
    settled = SamplingParams(new, seed=seed, **params)
    return Request(list(tokens), settled, len(tokens) + new, None, done, random.Random(seed), len(tokens))


def text(length: int, seed: int = 0) -> list[int]:
    return [random.Random(f"{seed} {i // 7}").randrange(100) + i for i in range(length)]


class World:
    """A scheduler, and a KV cache in which each cell holds the whole text up to its token."""

    def __init__(self, blocks: int, rows: int, prefill: int = 64, prefill_delay: int = 0) -> None:
        self.scheduler = Scheduler(blocks, rows, CONTEXT, prefill, prefill_delay)
        self.blocks, self.prefill = blocks, prefill
        self.pool: dict[tuple[int, int], int] = {}
        self.uniform: dict[int, list[float]] = {}
        self.reading = 0  # prompt tokens of the last batch

    def step(self) -> Batch | None:
        """Schedule, check everything that the batch would read and write, and pretend to compute it."""
        scheduler = self.scheduler
        before = [(r, len(r.tokens) - r.num_computed) for r in scheduler.running]
        queue = list(scheduler.waiting)
        batch = scheduler.schedule()
        self.check_books()
        queue = [r for r, _ in before if r.row < 0] + queue  # preempted ones come first, all others stay in order
        assert list(scheduler.waiting) == [r for r in queue if r.row < 0 and not r.future.done()]
        if before:
            assert scheduler.running[0] is before[0][0]  # the oldest is never preempted
        if batch is None:
            return None
        chosen = {id(r) for r in batch.requests}
        assert len(chosen) == len(batch.requests)
        assert chosen >= {id(r) for r, missing in before if missing == 1 and r.row >= 0}  # each gets its next token
        for source, target in batch.block_copies:
            for offset in range(BLOCK_SIZE):
                self.pool[target, offset] = self.pool.get((source, offset), 0)
        self.compute(batch)
        scheduler.mark_computed(batch)
        self.check_books()
        for column, index in enumerate(batch.sampling_rows.tolist()):
            asking = batch.requests[index]
            self.uniform.setdefault(id(asking), []).append(batch.sampling_params[1, column])
            asking.tokens.append(hash((len(asking.tokens), asking.params.seed % 3)) % 5)
            if len(asking.tokens) == asking.max_length:
                asking.future.set_result(None)  # type: ignore[arg-type]
                scheduler.finish(asking)
        self.check_books()
        return batch

    def compute(self, batch: Batch) -> None:
        cells = {id(r): self.cells(r.tokens) for r in batch.requests}
        paths = {id(r): [b.index for b in r.blocks] for r in self.scheduler.running}
        counts, starts, written, self.reading = batch.counts.tolist(), batch.starts.tolist(), set(), 0
        assert len(batch.tokens) == sum(counts)
        assert batch.is_decode == (counts == [1] * len(counts) and len(batch.sampling_rows) == len(counts))
        at = 0
        for row, (r, start, count) in enumerate(zip(batch.requests, starts, counts, strict=True)):
            assert start == r.num_computed and count > 0
            assert batch.tokens[at : at + count].tolist() == r.tokens[start : start + count]
            at += count
            self.reading += count if len(r.tokens) - start > 1 else 0
            assert (row in batch.sampling_rows) == (start + count == len(r.tokens))
            for position in range(start, start + count):
                cell = int(batch.block_table[row, position // BLOCK_SIZE]), position % BLOCK_SIZE
                assert cell not in written
                written.add(cell)
                self.pool[cell] = cells[id(r)][position]
                assert all(cell[0] not in path for other, path in paths.items() if other != id(r))
        assert self.reading <= self.prefill
        for row, (r, start, count) in enumerate(zip(batch.requests, starts, counts, strict=True)):
            read = [
                self.pool[int(batch.block_table[row, i // BLOCK_SIZE]), i % BLOCK_SIZE] for i in range(start + count)
            ]
            assert read == cells[id(r)][: start + count]

    def cells(self, tokens: list[int]) -> list[int]:
        cells = [1]
        for token in tokens:
            cells.append(hash((cells[-1], token)))
        return cells[1:]

    def check_books(self) -> None:
        """Exactly the blocks of running requests are held, and each request has its own row."""
        running = self.scheduler.running
        held = {block.index for r in running for block in r.blocks}
        assert self.scheduler.tree.num_available == self.blocks - len(held)
        assert len({r.row for r in running}) == len(running) and all(r.row >= 0 for r in running)
        assert all(r.row < 0 and not r.blocks for r in self.scheduler.waiting)

    def finish_all(self, limit: int = 3000) -> list[Batch]:
        batches = []
        for _ in range(limit):
            if not self.scheduler.running and not self.scheduler.waiting:
                break
            batch = self.step()
            batches += [batch] if batch else []
        assert not self.scheduler.running and not self.scheduler.waiting
        assert self.scheduler.tree.num_available == self.blocks
        return batches


@pytest.mark.slow
@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    arrivals=st.lists(
        st.tuples(
            st.integers(0, 12),  # steps before it arrives
            st.integers(0, 7),  # the request whose text it continues
            st.integers(0, 120),  # how much of that
            st.integers(1, 90),  # own tokens of the prompt
            st.integers(1, 40),  # tokens to sample
            st.none() | st.integers(0, 20),  # steps until it is cancelled
        ),
        min_size=1,
        max_size=14,
    ),
    blocks=st.integers(8, 16),
    rows=st.integers(1, 6),
    prefill=st.integers(1, 100),
    prefill_delay=st.sampled_from([0, 3]),
)
def test_every_request_finishes_and_reads_its_own_prefix(
    arrivals: list[Any], blocks: int, rows: int, prefill: int, prefill_delay: int
) -> None:
    world = World(blocks, rows, prefill, prefill_delay)
    requests: list[Request] = []
    doomed: list[tuple[int, Request]] = []
    for number, (pause, parent, share, own, new, cancel) in enumerate(arrivals):
        for _ in range(pause):
            world.step()
            for left, r in doomed:
                if left == 0 and not r.future.done():
                    r.future.cancel()
                    world.scheduler.finish(r)
                    world.check_books()
            doomed = [(left - 1, r) for left, r in doomed if left > 0]
        prefix = requests[parent % number].tokens[:share] if number else []
        tokens = ([*prefix, *text(own, seed=number)])[: blocks * BLOCK_SIZE - new]
        requests.append(request(tokens, new, seed=number))
        world.scheduler.waiting.append(requests[-1])
        if cancel is not None:
            doomed.append((cancel, requests[-1]))
    world.finish_all()
    for r in requests:
        assert r.future.cancelled() or len(r.tokens) == r.max_length
        same = random.Random(r.params.seed)
        assert all(x == same.random() for x in world.uniform.get(id(r), []))  # preempted or not, one number per token


def test_preempted_requests_resume() -> None:
    """Six requests, each of which needs half of the cache in the end."""
    world = World(blocks=8, rows=6)
    for i in range(6):
        world.scheduler.waiting.append(request(text(30, seed=i), 90, seed=i))
    batches = world.finish_all()
    assert world.scheduler.preemptions > 0
    assert sum(len(batch.sampling_rows) for batch in batches) == 6 * 90


def test_finished_rows_are_used_again() -> None:
    world = World(blocks=20, rows=3)
    for i in range(9):
        world.scheduler.waiting.append(request(text(5, seed=i), 2, seed=i))
    assert [len(batch.requests) for batch in world.finish_all()] == [3] * 6


def test_first_come_first_served() -> None:
    world = World(blocks=30, rows=2)
    asked = [request(text(5, seed=i), 3, seed=i) for i in range(6)]
    world.scheduler.waiting.extend(asked)
    served = [r for batch in world.finish_all() for r in batch.requests]
    assert [r.params.seed for r in dict.fromkeys(served)] == list(range(6))


def test_a_request_waits_for_a_shared_prompt_in_prefill() -> None:
    world = World(blocks=40, rows=6, prefill=40)
    prompt = text(100)
    for i in range(4):
        world.scheduler.waiting.append(request([*prompt, 7, i], 3, seed=i))
    world.scheduler.waiting.append(request(text(10, seed=9), 3))  # shares nothing, so it need not wait
    batches = world.finish_all()
    assert [batch.counts.tolist() for batch in batches[:3]] == [[40], [40], [22, 10]]
    assert batches[2].starts.tolist() == [80, 0]
    assert batches[3].starts.tolist()[2:] == [101, 101, 101]  # the three others: nothing but their last token
    assert batches[3].counts.tolist() == [1, 1, 1, 1, 1]
    assert len(batches[3].block_copies) == 3
    assert len({source for source, _ in batches[3].block_copies}) == 1


@pytest.mark.parametrize(("shared", "waits"), [(WORTH_WAITING, False), (WORTH_WAITING + 1, True)])
def test_a_few_shared_tokens_are_not_worth_waiting_for(shared: int, waits: bool) -> None:
    world = World(blocks=20, rows=2)
    for i in range(2):
        world.scheduler.waiting.append(request([*text(shared), 1000 + i, 5], 2))
    assert len(world.finish_all()[0].requests) == (1 if waits else 2)


def test_an_idle_block_is_continued_and_one_in_use_is_copied() -> None:
    world = World(blocks=20, rows=3)
    first = request(text(10), 5)
    world.scheduler.waiting.append(first)
    world.finish_all()
    paused = [*first.tokens, 8, 9]
    going_on, beside = request(paused, 4), request([*first.tokens, 1], 4)
    world.scheduler.waiting.append(going_on)
    batch = world.step()
    assert batch is not None
    assert (batch.block_copies, batch.starts.tolist(), batch.counts.tolist()) == ([], [14], [3])
    world.scheduler.waiting.append(beside)
    batch = world.step()
    assert batch is not None
    assert [source for source, _ in batch.block_copies] == [going_on.blocks[0].index]
    assert batch.starts.tolist()[1] == 15
    world.finish_all()


def test_a_fork_of_a_long_prefix_takes_one_block_more() -> None:
    world = World(blocks=40, rows=8, prefill=400)
    prompt = text(10 * BLOCK_SIZE + 5)
    world.scheduler.waiting.append(request(prompt, 20))
    world.step()
    before = world.scheduler.tree.num_available
    world.scheduler.waiting.extend(request(prompt, 10, seed=i) for i in range(1, 5))
    batch = world.step()
    assert batch is not None
    assert batch.counts.tolist() == [1] * 5
    assert world.scheduler.tree.num_available == before - 4
    world.finish_all()


def test_block_copies_may_depend_on_one_another() -> None:
    """In a full cache, the source of one copy is evicted and becomes the target of the next."""
    world = World(blocks=3, rows=3)
    for i in range(2):
        world.scheduler.waiting.append(request(text(20, seed=i), 1))
        world.finish_all()
    for i in (1, 0):
        world.scheduler.waiting.append(request([*text(18, seed=i), 500], 2, seed=i))
    batch = world.step()
    assert batch is not None
    assert batch.block_copies == [(1, 2), (0, 1)]
    world.finish_all()


def test_a_long_prompt_does_not_block_decoding() -> None:
    world = World(blocks=40, rows=5, prefill=32)
    for i in range(3):
        world.scheduler.waiting.append(request(text(9, seed=i), 30, seed=i))
    world.step()
    long = request(text(300, seed=7), 2)
    world.scheduler.waiting.append(long)
    steps = 0
    while long.num_computed < 300:
        batch = world.step()
        assert batch is not None and len(batch.requests) == 4
        assert batch.counts.tolist()[:3] == [1, 1, 1] and set(batch.sampling_rows.tolist()) >= {0, 1, 2}
        steps += 1
    assert steps == -(-300 // 32)
    world.finish_all()


def test_prefill_is_delayed_for_a_limited_number_of_steps() -> None:
    world = World(blocks=60, rows=20, prefill_delay=4)
    for i in range(10):
        world.scheduler.waiting.append(request(text(4, seed=i), 40, seed=i))
    while len(world.scheduler.running) < 10 or world.reading:
        world.step()
    late = request(text(50, seed=99), 2)
    world.scheduler.waiting.append(late)
    batches = [world.step() for _ in range(6)]
    joined = [batch is not None and late in batch.requests for batch in batches]
    assert joined.index(True) in (3, 4)
    fork = request(late.tokens, 2)  # its prefix is cached: no reason to wait
    world.scheduler.waiting.append(fork)
    batch = world.step()
    assert batch is not None and fork in batch.requests and batch.is_decode
    world.finish_all()


def test_cancelled_requests_release_everything_at_once() -> None:
    world = World(blocks=20, rows=2, prefill=32)
    asked = [request(text(100, seed=i), 5, seed=i) for i in range(4)]
    world.scheduler.waiting.extend(asked)
    world.step()
    for r in asked[::-1]:
        r.future.cancel()
        world.scheduler.finish(r)
        world.check_books()
    assert world.scheduler.tree.num_available == 20
    assert world.step() is None
    world.scheduler.finish(asked[0])  # a second time: nothing to do
    again = [request(text(9, seed=i), 2, seed=i) for i in range(2)]
    world.scheduler.waiting.extend(again)
    assert len(world.finish_all()[0].requests) == 2  # both rows are free


def test_cancelled_while_waiting_is_never_started() -> None:
    world = World(blocks=20, rows=2)
    dead, alive = request(text(9), 2), request(text(9, seed=1), 2)
    dead.future.cancel()
    world.scheduler.waiting.extend([dead, alive])
    assert all(batch.requests == [alive] for batch in world.finish_all())


def test_a_batch_has_the_parameters_of_its_sampling_rows() -> None:
    world = World(blocks=20, rows=3, prefill=40)
    world.scheduler.waiting.append(request(text(9), 2, seed=4, temperature=0.7, top_p=0.9, top_k=3))
    world.scheduler.waiting.append(request(text(90, seed=1), 2, temperature=0.1, top_p=0.2))  # does not sample yet
    batch = world.step()
    assert batch is not None
    assert batch.sampling_rows.tolist() == [0]
    assert batch.sampling_params[:, 0].tolist() == [0.7, random.Random(4).random(), 0.9, 3.0]
    assert batch.has_cuts
    world.finish_all()
    for params, cuts in [({}, False), ({"top_p": 0.5}, True), ({"top_k": 1}, True)]:
        world.scheduler.waiting.append(request(text(5), 1, **params))
        batch = world.step()
        assert batch is not None and batch.has_cuts == cuts


def test_after_a_reset_nothing_is_shared() -> None:
    world = World(blocks=20, rows=3)
    world.scheduler.waiting.append(request(text(60), 2))
    world.finish_all()
    world.scheduler.reset_prefix_cache()
    world.scheduler.waiting.append(request(text(60), 2))
    assert world.finish_all()[0].counts.tolist() == [60]
