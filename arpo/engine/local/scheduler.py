"""The scheduler: decides what the next step computes, over rows, blocks and a waiting queue. No tensors of the model.

First come, first served. A running request may always take one more token; if no block is left for it, the youngest
running request is preempted: it goes back to the head of the queue and later recomputes what was evicted meanwhile. The
oldest is never preempted, so all finish. Prompts are prefilled in chunks of at most `prefill_tokens` a step in total.

A request that starts reuses every cached block that holds a prefix of its tokens. A partly matching block is continued
in place if it is idle, else its start is copied (`Batch.block_copies`). A request that would share more with one whose
prompt is still being prefilled waits for that.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from arpo.engine.base import OnToken
from arpo.engine.local.blocks import Block, BlockTree, common_prefix_length
from arpo.engine.local.kv_cache import BLOCK_SIZE
from arpo.types import Completion, SamplingParams

WORTH_WAITING = BLOCK_SIZE // 2  # shared tokens; fewer are computed twice rather than waited for


@dataclass(slots=True, eq=False)
class Request:
    """All state of one request. `tokens` is the prefix followed by the sampled tokens."""

    tokens: list[int]
    params: SamplingParams
    max_length: int  # of prefix and completion
    on_token: OnToken | None
    future: asyncio.Future[Completion]
    rng: random.Random
    num_prefix_tokens: int
    considered: bool = False  # the scheduler has looked at it before
    logprobs: list[float] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)
    cut_logprobs: list[float] = field(default_factory=list)
    cut_entropies: list[float] = field(default_factory=list)
    num_computed: int = 0  # tokens whose keys and values are cached
    blocks: list[Block] = field(default_factory=list)
    row: int = -1

    @property
    def num_missing(self) -> int:
        """Tokens to compute before the next one can be sampled; 1 in decoding."""
        return len(self.tokens) - self.num_computed

    def completion(self, finish: str, stop: str | None, version: int) -> Completion:
        """Return the sampled turn."""
        return Completion(
            tuple(self.tokens[self.num_prefix_tokens :]),
            tuple(self.logprobs),
            tuple(self.entropies),
            finish,
            stop,
            version,
            tuple(self.cut_logprobs),
            tuple(self.cut_entropies),
        )


@dataclass(frozen=True, slots=True)
class Batch:
    """One step. Row r computes `counts[r]` tokens from position `starts[r]` on; `sampling_rows` get a new token."""

    requests: list[Request]
    tokens: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]
    block_table: npt.NDArray[np.int32]
    sampling_rows: npt.NDArray[np.int64]
    sampling_params: npt.NDArray[np.float64]  # [4, rows]: temperature, uniform, top-p, top-k
    block_copies: list[tuple[int, int]]

    @property
    def is_decode(self) -> bool:
        """Whether every row computes one token and gets one."""
        return len(self.tokens) == len(self.sampling_rows)

    @property
    def has_cuts(self) -> bool:
        """Whether any row uses top-p or top-k."""
        return bool((self.sampling_params[2] < 1).any() or (self.sampling_params[3] > 0).any())


class Scheduler:
    """Rows and blocks for requests: `num_blocks` blocks, `max_num_seqs` running requests.

    `max_prefill_delay`: decode steps for which waiting prompts may be held back.
    """

    def __init__(
        self, num_blocks: int, max_num_seqs: int, max_context: int, prefill_tokens: int, max_prefill_delay: int
    ) -> None:
        self.tree = BlockTree(num_blocks, BLOCK_SIZE)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # oldest first
        self.prefill_tokens = self.cached_tokens = self.preemptions = 0  # counters; prefix tokens computed and reused
        self._free_rows = list(range(max_num_seqs))[::-1]
        self._block_table = np.zeros((max_num_seqs, -(-max_context // BLOCK_SIZE)), dtype=np.int32)
        self._max_prefill_tokens, self._max_prefill_delay = prefill_tokens, max_prefill_delay
        self._decode_steps = 0  # since the last step with prefill
        self._block_copies: list[tuple[int, int]] = []

    def reset_prefix_cache(self) -> None:
        """Drop all cached blocks; no request may be running."""
        self.tree.clear()

    def finish(self, request: Request) -> None:
        """Remove a request; what it computed stays cached as long as there is room."""
        if request.row >= 0:
            self._stop(request)
        elif request in self.waiting:
            self.waiting.remove(request)

    def schedule(self) -> Batch | None:
        """Return the next step; None if there is nothing to do."""
        if not self.running and not self.waiting:
            return None
        prefills = self._should_prefill()
        self._decode_steps = 0 if prefills else self._decode_steps + 1
        budget = self._max_prefill_tokens if prefills else 0
        scheduled: list[tuple[Request, int]] = []
        for request in list(self.running):
            if request.row < 0:  # preempted in this loop
                continue
            missing = request.num_missing
            count = 1 if missing == 1 else min(missing, budget)
            if count and self._allocate(request, count):
                scheduled.append((request, count))
                budget -= count if missing > 1 else 0
        if budget or not prefills:
            self._admit(budget, scheduled)
        return self._batch(scheduled)

    def mark_computed(self, batch: Batch) -> None:
        """Record that the batch was computed: its tokens are in their blocks now."""
        for request, count in zip(batch.requests, batch.counts.tolist(), strict=True):
            start, end = request.num_computed, request.num_computed + count
            while start < end:
                stop = min(end, (start // BLOCK_SIZE + 1) * BLOCK_SIZE)
                self.tree.fill(request.blocks[start // BLOCK_SIZE], request.tokens[start:stop])
                start = stop
            request.num_computed = end

    def _should_prefill(self) -> bool:
        """Return whether this step may prefill prompts. Pure decode steps can be much faster, so prompts may wait."""
        decoding = sum(request.num_missing == 1 for request in self.running)
        pending = len(self.waiting) + len(self.running) - decoding
        return not decoding or self._decode_steps >= self._max_prefill_delay or pending * 4 >= decoding + 4

    def _allocate(self, request: Request, count: int) -> bool:
        """Allocate blocks for `count` more tokens, preempting younger requests; False if it was preempted itself."""
        while len(request.blocks) * BLOCK_SIZE < request.num_computed + count:
            block = self.tree.allocate(request.blocks[-1] if request.blocks else self.tree.root)
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

    def _admit(self, budget: int, scheduled: list[tuple[Request, int]]) -> None:
        """Start waiting requests, in order, while rows, blocks and the step's prefill budget last.

        In a step without prefill (`budget` is 0), only new requests are considered, and those start whose prefix is
        cached completely: forks.
        """
        postponed: list[Request] = []
        prefilling = [request for request, _ in scheduled if request.num_missing > 1]
        forks_only = not budget
        while self.waiting and self._free_rows and (budget or forks_only):
            request = self.waiting.popleft()
            if request.future.done():
                continue
            if forks_only and request.considered:
                postponed.append(request)
                continue
            request.considered = True
            known = request.tokens[:-1]  # the last token is always computed: its logits are needed
            blocks, partial = self.tree.match_prefix(known)
            shared = len(blocks) * BLOCK_SIZE + (partial[1] if partial else 0)
            if (forks_only and shared < len(known)) or any(
                common_prefix_length(known, other.tokens) > shared + WORTH_WAITING for other in prefilling
            ):
                postponed.append(request)
                continue
            self.tree.acquire(blocks)
            new_blocks = -(-len(request.tokens) // BLOCK_SIZE) - len(blocks)
            if new_blocks > self.tree.num_available - self._reserved_blocks():
                self.tree.release(blocks)
                postponed.append(request)
                break
            self._start(request, blocks, partial)
            missing = request.num_missing
            self.cached_tokens += request.num_computed
            self.prefill_tokens += missing - 1
            count = min(budget, missing) if missing > 1 else 1
            if not self._allocate(request, count):
                raise RuntimeError("blocks were reserved for a request and are gone")
            scheduled.append((request, count))
            if missing > 1:
                budget -= count
                prefilling.append(request)
        self.waiting.extendleft(reversed(postponed))

    def _reserved_blocks(self) -> int:
        """Return the number of running requests that may need one more block, which is left to them."""
        return sum(request.max_length - 1 > len(request.blocks) * BLOCK_SIZE for request in self.running)

    def _start(self, request: Request, blocks: list[Block], partial: tuple[Block, int] | None) -> None:
        """Give a request a row, the blocks it shares (acquired already), and the start of one more."""
        request.row = self._free_rows.pop()
        request.blocks, request.num_computed = [], len(blocks) * BLOCK_SIZE
        for block in blocks:
            self._append(request, block)
        self.running.append(request)
        if partial is None:
            return
        block, shared = partial
        if not block.ref_count and shared == len(block.tokens):  # idle, and nothing else in it: continue it
            self.tree.acquire([block])
            self._append(request, block)
            request.num_computed += shared
            return
        self.tree.acquire([block])  # so that it is not the one to be evicted
        copy = self.tree.allocate(blocks[-1] if blocks else self.tree.root)
        self.tree.release([block])
        if copy is not None:
            self._block_copies.append((block.index, copy.index))
            self.tree.fill(copy, block.tokens[:shared])
            self._append(request, copy)
            request.num_computed += shared

    def _append(self, request: Request, block: Block) -> None:
        self._block_table[request.row, len(request.blocks)] = block.index
        request.blocks.append(block)

    def _stop(self, request: Request) -> None:
        self.running.remove(request)
        self._free_rows.append(request.row)
        self.tree.release(request.blocks)
        request.blocks, request.row, request.num_computed = [], -1, 0

    def _batch(self, scheduled: list[tuple[Request, int]]) -> Batch | None:
        block_copies, self._block_copies = self._block_copies, []
        if not scheduled:
            return None
        requests = [request for request, _ in scheduled]
        sampling_rows = [i for i, (request, count) in enumerate(scheduled) if count == request.num_missing]
        params = [requests[i].params for i in sampling_rows]
        sampling_params = [
            [p.temperature for p in params],
            [requests[i].rng.random() for i in sampling_rows],
            [p.top_p for p in params],
            [p.top_k for p in params],
        ]
        width = max(-(-(r.num_computed + count) // BLOCK_SIZE) for r, count in scheduled)
        tokens = [token for r, count in scheduled for token in r.tokens[r.num_computed : r.num_computed + count]]
        return Batch(
            requests,
            np.array(tokens),
            np.array([r.num_computed for r in requests]),
            np.array([count for _, count in scheduled]),
            self._block_table[[r.row for r in requests], :width],
            np.array(sampling_rows, dtype=np.int64),
            np.array(sampling_params, dtype=np.float64),
            block_copies,
        )
