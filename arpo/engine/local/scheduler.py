"""Who computes what in the next step: rows, blocks and waiting, without a tensor of the model.

First come, first served. A running request may always take one more token; if no block is left for it, the youngest
running request goes back to the head of the queue and later computes again what was evicted meanwhile. The oldest is
never disturbed, so all finish. Prompts are read in chunks of at most `prefill_tokens` a step, over all requests.

A request that starts takes over every computed block that holds a prefix of its tokens. Of the block where it leaves
what is known, it continues an idle one in place, or copies its start (`Batch.copies`). One that would share more with a
request whose prompt is just being read waits until that is done.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from arpo.engine.base import OnToken
from arpo.engine.local.blocks import Block, BlockTree, common
from arpo.engine.local.kv_cache import BLOCK
from arpo.types import Completion, SamplingParams

WORTH_WAITING = BLOCK // 2  # tokens: less than that is computed twice rather than waited for


@dataclass(slots=True, eq=False)
class Request:
    """All state of one request. `tokens` is the prefix followed by what was sampled; `computed` of them are stored."""

    tokens: list[int]
    params: SamplingParams
    limit: int  # tokens it may have in the end
    on_token: OnToken | None
    done: asyncio.Future[Completion]
    rng: random.Random
    watched: frozenset[int]  # tokens after which it might be finished
    prefix: int = 0
    seen: bool = False  # by the scheduler
    logprobs: list[float] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)
    cut_logprobs: list[float] = field(default_factory=list)
    cut_entropies: list[float] = field(default_factory=list)
    computed: int = 0
    path: list[Block] = field(default_factory=list)
    row: int = -1

    def completion(self, finish: str, stop: str | None, version: int) -> Completion:
        """What the caller gets."""
        numbers = (self.logprobs, self.entropies, self.cut_logprobs, self.cut_entropies)
        logprobs, entropies, cut_logprobs, cut_entropies = map(tuple, numbers)
        sampled = tuple(self.tokens[self.prefix :])
        return Completion(sampled, logprobs, entropies, finish, stop, version, cut_logprobs, cut_entropies)


@dataclass(frozen=True, slots=True)
class Batch:
    """One step. Row r computes `counts[r]` tokens from position `starts[r]` on; `asking` rows get a new token."""

    requests: list[Request]
    tokens: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]
    table: npt.NDArray[np.int32]
    asking: npt.NDArray[np.int64]
    sampling: npt.NDArray[np.float64]  # temperature, uniform, top-p, top-k of the asking rows
    copies: list[tuple[int, int]]

    @property
    def decoding(self) -> bool:
        """Whether every row computes one token and gets one."""
        return len(self.tokens) == len(self.asking)

    @property
    def cuts(self) -> bool:
        """Whether top-p or top-k is on anywhere."""
        return bool((self.sampling[2] < 1).any() or (self.sampling[3] > 0).any())


class Scheduler:
    """Rows and blocks for requests: `blocks` blocks, `rows` requests at a time, prompts up to `context` tokens."""

    def __init__(self, blocks: int, rows: int, context: int, prefill_tokens: int, patience: int) -> None:
        self.tree = BlockTree(blocks, BLOCK)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # oldest first
        self.read = self.reused = self.preemptions = 0  # tokens of prefixes computed and found; requests put back
        self._free_rows = list(range(rows))[::-1]
        self._table = np.zeros((rows, -(-context // BLOCK)), dtype=np.int32)
        self._prefill_tokens, self._patience = prefill_tokens, patience
        self._plain_steps = 0  # since prompts were last read
        self._copies: list[tuple[int, int]] = []

    def clear(self) -> None:
        """Forget all that was computed; nobody may be running."""
        self.tree.clear()

    def finish(self, request: Request) -> None:
        """Take a request off its row, or out of the queue; what it computed is kept as long as there is room."""
        if request.row >= 0:
            self._stop(request)
        elif request in self.waiting:
            self.waiting.remove(request)

    def plan(self) -> Batch | None:
        """The next step; None if there is nothing to do."""
        if not self.running and not self.waiting:
            return None
        reading = self._reading()
        self._plain_steps = 0 if reading else self._plain_steps + 1
        left = self._prefill_tokens if reading else 0
        chosen: list[tuple[Request, int]] = []
        for request in list(self.running):
            if request.row < 0:  # went back to the queue a moment ago
                continue
            missing = len(request.tokens) - request.computed
            count = 1 if missing == 1 else min(missing, left)
            if count and self._make_room(request, count):
                chosen.append((request, count))
                left -= count if missing > 1 else 0
        if left or not reading:
            self._admit(left, chosen)
        return self._batch(chosen)

    def computed(self, batch: Batch) -> None:
        """The batch was computed: its tokens stand in their blocks now."""
        for request, count in zip(batch.requests, batch.counts.tolist(), strict=True):
            start, end = request.computed, request.computed + count
            while start < end:
                upto = min(end, (start // BLOCK + 1) * BLOCK)
                self.tree.fill(request.path[start // BLOCK], request.tokens[start:upto])
                start = upto
            request.computed = end

    def _reading(self) -> bool:
        """Whether this step reads prompts: where plain steps are much faster, not at every occasion."""
        decoding = sum(len(request.tokens) - request.computed == 1 for request in self.running)
        pending = len(self.waiting) + len(self.running) - decoding
        return not decoding or self._plain_steps >= self._patience or pending * 4 >= decoding + 4

    def _make_room(self, request: Request, count: int) -> bool:
        """Blocks for `count` more tokens, at the cost of younger requests; False if it had to go itself."""
        while len(request.path) * BLOCK < request.computed + count:
            block = self.tree.grow(request.path[-1] if request.path else self.tree.root)
            if block is not None:
                self._append(request, block)
                continue
            victim = self.running[-1]
            self._stop(victim)
            self.preemptions += 1
            self.waiting.appendleft(victim)
            if victim is request:
                return False
        return True

    def _admit(self, left: int, chosen: list[tuple[Request, int]]) -> None:
        """Start waiting requests, in order, while rows, blocks and the step's tokens last.

        In a step that reads no prompts (`left` is 0), only newcomers are looked at, and those start whose prefix is
        known: forks.
        """
        postponed: list[Request] = []
        reading = [request for request, _ in chosen if len(request.tokens) - request.computed > 1]
        forks_only = not left
        while self.waiting and self._free_rows and (left or forks_only):
            request = self.waiting.popleft()
            if request.done.done():
                continue
            if forks_only and request.seen:
                postponed.append(request)
                continue
            request.seen = True
            known = request.tokens[:-1]
            path, tail = self.tree.match(known)
            shared = len(path) * BLOCK + (tail[1] if tail else 0)
            if (forks_only and shared < len(known)) or any(
                common(known, other.tokens) > shared + WORTH_WAITING for other in reading
            ):
                postponed.append(request)
                continue
            self.tree.hold(path)
            new_blocks = -(-len(request.tokens) // BLOCK) - len(path)
            if new_blocks > self.tree.available - self._growing():
                self.tree.release(path)
                postponed.append(request)
                break
            self._start(request, path, tail)
            missing = len(request.tokens) - request.computed
            self.reused += request.computed
            self.read += missing - 1
            count = min(left, missing) if missing > 1 else 1
            if not self._make_room(request, count):
                raise RuntimeError("blocks were promised to a request and are gone")
            chosen.append((request, count))
            if missing > 1:
                left -= count
                reading.append(request)
        self.waiting.extendleft(reversed(postponed))

    def _growing(self) -> int:
        """Running requests that may need one more block: it is left to them."""
        return sum(request.limit - 1 > len(request.path) * BLOCK for request in self.running)

    def _start(self, request: Request, path: list[Block], tail: tuple[Block, int] | None) -> None:
        """Give a request a row, the blocks it shares (held already), and the start of one more."""
        request.row = self._free_rows.pop()
        request.path, request.computed = [], len(path) * BLOCK
        for block in path:
            self._append(request, block)
        self.running.append(request)
        if tail is None:
            return
        block, shared = tail
        if not block.users and shared == len(block.tokens):  # idle, and nothing else in it: write on
            self.tree.hold([block])
            self._append(request, block)
            request.computed += shared
            return
        self.tree.hold([block])  # so that it is not the one to be evicted
        copy = self.tree.grow(path[-1] if path else self.tree.root)
        self.tree.release([block])
        if copy is not None:
            self._copies.append((block.number, copy.number))
            self.tree.fill(copy, block.tokens[:shared])
            self._append(request, copy)
            request.computed += shared

    def _append(self, request: Request, block: Block) -> None:
        self._table[request.row, len(request.path)] = block.number
        request.path.append(block)

    def _stop(self, request: Request) -> None:
        self.running.remove(request)
        self._free_rows.append(request.row)
        self.tree.release(request.path)
        request.path, request.row, request.computed = [], -1, 0

    def _batch(self, chosen: list[tuple[Request, int]]) -> Batch | None:
        copies, self._copies = self._copies, []
        if not chosen:
            return None
        requests = [request for request, _ in chosen]
        asking = [i for i, (r, count) in enumerate(chosen) if r.computed + count == len(r.tokens)]
        params = [requests[i].params for i in asking]
        sampling = [
            [p.temperature for p in params],
            [requests[i].rng.random() for i in asking],
            [p.top_p for p in params],
            [p.top_k for p in params],
        ]
        longest = max(-(-(r.computed + count) // BLOCK) for r, count in chosen)
        tokens = [token for r, count in chosen for token in r.tokens[r.computed : r.computed + count]]
        return Batch(
            requests,
            np.array(tokens),
            np.array([r.computed for r in requests]),
            np.array([count for _, count in chosen]),
            self._table[[r.row for r in requests], :longest],
            np.array(asking, dtype=np.int64),
            np.array(sampling, dtype=np.float64),
            copies,
        )
