"""The local engine: samples from a Hugging Face causal LM in this process, sharing the trainer's weights.

Requests join and leave at every decode step; one background task drives the model. A request re-uses the keys and
values of the longest prefix that any row already holds, so continuing after a tool result costs the new tokens only,
and a branch costs one copy. Numbers are exact (full vocabulary). Given its seed, a request yields the same tokens
whatever else is in the batch, up to rounding of the logits.

Not covered: models whose layers do not all see the whole prefix (refused by name), chunked prefill, CUDA graphs.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch

from arpo.engine.base import Capabilities, OnToken
from arpo.engine.kvpool import KVPool, PoolView
from arpo.engine.sampling import sample
from arpo.engine.stops import StopFinder
from arpo.types import ArpoError, Completion, SamplingParams

SUPPORTED = ("llama", "qwen2", "qwen3")


@dataclass(slots=True)
class _Request:
    """All state of one request. `tokens` is the prefix followed by what was sampled."""

    tokens: list[int]
    prefix_length: int
    params: SamplingParams
    on_token: OnToken | None
    done: asyncio.Future[Completion]
    rng: random.Random
    logprobs: list[float] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)

    def completion(self, finish: str, stop: str | None, version: int) -> Completion:
        sampled = tuple(self.tokens[self.prefix_length :])
        return Completion(sampled, tuple(self.logprobs), tuple(self.entropies), finish, stop, version)


@dataclass(slots=True)
class _Row:
    """One row of the pool: the tokens whose keys and values it holds, and the request that is using it, if any."""

    held: list[int] = field(default_factory=list)
    request: _Request | None = None
    used: int = 0


class LocalEngine:
    """Engine over `model` (a Hugging Face causal LM) with room for `rows` sequences at a time.

    `threaded`: the model runs in a thread of its own, so that tools and timers go on meanwhile. Where no tool needs the
    event loop, it may be left out: on small models a step on the spot is a third faster.
    """

    def __init__(
        self, model: Any, tokenizer: Any, *, rows: int = 128, prefill_tokens: int = 8192, threaded: bool = True
    ) -> None:
        _check_supported(model.config)
        self._model, self._tokenizer = model, tokenizer
        self._device = next(model.parameters()).device
        self._pool = KVPool(model.config, rows, next(model.parameters()).dtype, self._device)
        self._rows = [_Row() for _ in range(rows)]
        self._active = 0  # rows [0, active) are being decoded
        self._waiting: deque[_Request] = deque()
        self._computing, self._threaded = False, threaded
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="arpo-engine")
        self._driver: asyncio.Task[None] | None = None
        self._prefill_tokens = prefill_tokens
        self._clock = count(1)
        self._finders: dict[tuple[str, ...], StopFinder] = {}
        self._eos = _eos_ids(model, tokenizer)
        self.version = 0
        self.capabilities = Capabilities(model.config.max_position_embeddings, model.config.vocab_size, True)

    async def generate(
        self, prefix: Sequence[int], params: SamplingParams, *, on_token: OnToken | None = None
    ) -> Completion:
        """Sample one turn after `prefix`."""
        limit = self.capabilities.max_context
        if not prefix or params.max_tokens < 1 or len(prefix) >= limit:
            raise ValueError(
                f"cannot sample {params.max_tokens} tokens after {len(prefix)} within a context of {limit}"
            )
        done: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        request = _Request(list(prefix), len(prefix), params, on_token, done, random.Random(params.seed))
        self._waiting.append(request)
        if self._driver is None or self._driver.done():
            self._driver = asyncio.create_task(self._drive())
        try:
            return await done
        except asyncio.CancelledError:
            self._drop(request)
            raise

    async def update_weights(self, version: int) -> None:
        """The shared weights changed: forget every key and value computed with older ones."""
        if self._active or self._waiting:
            raise RuntimeError("weights may not change while requests are being sampled")
        self._rows = [_Row() for _ in self._rows]
        self._pool.clear()
        self.version = version

    def _drop(self, request: _Request) -> None:
        """A caller went away: free what its request holds, now, or as soon as the step under way is done."""
        if request in self._waiting:
            self._waiting.remove(request)
        if not self._computing:
            self._release_if(lambda held: held is request)

    async def _drive(self) -> None:
        """The only task that touches rows and pool."""
        try:
            while self._waiting or self._active:
                await asyncio.sleep(0)  # whoever can run now joins this step
                first = self._admit()
                self._take(*(await self._in_thread(first) if self._threaded else self._compute(first)))
        except Exception as error:
            for request in [*self._waiting, *(row.request for row in self._rows if row.request)]:
                if not request.done.done():
                    request.done.set_exception(error)
            self._waiting.clear()
            self._active = 0
            self._rows = [_Row() for _ in self._rows]

    async def _in_thread(self, first: int) -> tuple[list[int], list[float], list[float]]:
        self._computing = True
        try:
            return await asyncio.get_running_loop().run_in_executor(self._worker, self._compute, first)
        finally:
            self._computing = False

    def _admit(self) -> int:
        """Give rows to waiting requests, in order; returns the first of these rows, whose prefixes are to be computed.

        A request that could copy much more from another one admitted in this very round waits for the next.
        """
        first, postponed, longest = self._active, [], 0
        while self._waiting and self._active < len(self._rows):
            request = self._waiting.popleft()
            wanted = request.tokens[:-1]
            source, shared = self._longest_prefix(wanted)
            rows_after = self._active - first + 1
            others = [row.request.tokens for row in self._rows[first : self._active] if row.request]
            if any(_common(wanted, other) > shared + 16 for other in others):
                postponed.append(request)
                continue
            if rows_after > 1 and rows_after * max(longest, len(wanted) - shared) > self._prefill_tokens:
                postponed.append(request)
                break
            longest = max(longest, len(wanted) - shared)
            self._place(request, source, shared)
        self._waiting.extendleft(reversed(postponed))
        return first

    def _longest_prefix(self, wanted: list[int]) -> tuple[int, int]:
        """The row that holds the longest prefix of `wanted`; among equals, an idle row that holds nothing else."""
        best, best_rank = 0, (0, False)
        for index, row in enumerate(self._rows):
            shared = _common(wanted, row.held)
            rank = (shared, row.request is None and shared == len(row.held))
            if rank > best_rank:
                best, best_rank = index, rank
        return best, best_rank[0]

    def _place(self, request: _Request, source: int, shared: int) -> None:
        """Put `request` on row `active`: take over an idle row that holds just its prefix, or fork into the oldest."""
        target = self._active
        if shared and source >= target and shared == len(self._rows[source].held):
            chosen = source
        else:
            chosen = min(range(target, len(self._rows)), key=lambda i: (self._rows[i].used, i))
            self._pool.copy(source, chosen, shared)
            self._rows[chosen] = _Row(request.tokens[:shared])
        self._swap(chosen, target)
        self._rows[target].request = request
        self._active += 1

    @torch.inference_mode()
    def _compute(self, first: int) -> tuple[list[int], list[float], list[float]]:
        """Prefixes of rows [first, active), then one token, log-prob and entropy for every active row."""
        self._prefill(first)
        return self._decode()

    def _prefill(self, first: int) -> None:
        """Compute the prefixes of rows [first, active), but for their last token, in one right-padded pass."""
        rows = self._rows[first : self._active]
        starts = [len(row.held) for row in rows]
        missing = [row.request.tokens[start:-1] for row, start in zip(rows, starts, strict=True) if row.request]
        width = max(map(len, missing), default=0)
        if not width:
            return
        tokens_BQ = torch.tensor([part + [0] * (width - len(part)) for part in missing], device=self._device)
        self._pool.reserve(max(starts) + width)
        self._forward(tokens_BQ, torch.tensor(starts, device=self._device), first, logits=False)
        for row, part in zip(rows, missing, strict=True):
            row.held.extend(part)

    def _decode(self) -> tuple[list[int], list[float], list[float]]:
        """One token, log-prob and entropy for every active row."""
        rows = self._rows[: self._active]
        requests = [row.request for row in rows if row.request is not None]
        if not requests:
            return [], [], []
        last_B1 = torch.tensor([[request.tokens[-1]] for request in requests], device=self._device)
        lengths_B = torch.tensor([len(row.held) for row in rows], device=self._device)
        self._pool.reserve(max(len(row.held) for row in rows) + 1)
        logits_BV = self._forward(last_B1, lengths_B, 0, logits=True)
        settings = [(r.params.temperature, r.params.top_p, r.rng.random()) for r in requests]
        temperature_B, top_p_B, uniform_B = torch.tensor(settings, dtype=torch.float64, device=self._device).unbind(1)
        token_B, logprob_B, entropy_B = sample(logits_BV, temperature_B.float(), top_p_B.float(), uniform_B)
        return token_B.tolist(), logprob_B.tolist(), entropy_B.tolist()

    def _take(self, tokens: list[int], logprobs: list[float], entropies: list[float]) -> None:
        """Hand the sampled tokens to their requests and release the rows of those that are finished."""
        rows = self._rows[: self._active]
        for row, token, logprob, entropy in zip(rows, tokens, logprobs, entropies, strict=True):
            if row.request is not None:
                row.held.append(row.request.tokens[-1])
                self._accept(row.request, token, logprob, entropy)
        self._release_if(lambda request: request.done.done())

    def _accept(self, request: _Request, token: int, logprob: float, entropy: float) -> None:
        """Take one sampled token, and settle the request when it is finished."""
        request.tokens.append(token)
        request.logprobs.append(logprob)
        request.entropies.append(entropy)
        if request.on_token is not None:
            try:
                request.on_token(token, logprob, entropy)
            except Exception as error:  # the caller's mistake must not take the others down
                if not request.done.done():
                    request.done.set_exception(error)
                return
        stop = self._finder(request.params.stop).find(request.tokens[request.prefix_length :])
        if token in self._eos:
            finish = "eos"
        elif stop is not None:
            finish = "stop"
        elif len(request.logprobs) == request.params.max_tokens or len(request.tokens) == self.capabilities.max_context:
            finish = "length"
        else:
            return
        if not request.done.done():
            request.done.set_result(request.completion(finish, stop, self.version))

    def _release_if(self, finished: Callable[[_Request], bool]) -> None:
        for index in reversed(range(self._active)):
            request = self._rows[index].request
            if request is not None and finished(request):
                self._release(index)

    def _release(self, index: int) -> None:
        """Make a row idle: it keeps its prefix, and the last active row takes its place."""
        last = self._active - 1
        self._rows[index].request = None
        self._rows[index].used = next(self._clock)
        self._swap(index, last)
        self._active = last

    def _swap(self, a: int, b: int) -> None:
        self._pool.swap(a, b, max(len(self._rows[a].held), len(self._rows[b].held)))
        self._rows[a], self._rows[b] = self._rows[b], self._rows[a]

    def _forward(self, tokens_BQ: torch.Tensor, starts_B: torch.Tensor, first: int, logits: bool) -> Any:
        """Run the model on rows [first, first + B); new tokens of row b stand at positions starts[b], ..."""
        width = tokens_BQ.shape[1]
        positions_BQ = starts_B.unsqueeze(1) + torch.arange(width, device=self._device)
        longest = int(positions_BQ.max()) + 1
        mask_B1QK = torch.arange(longest, device=self._device) <= positions_BQ[:, None, :, None]
        cache = PoolView(self._pool, first, positions_BQ, longest)
        network = self._model if logits else self._model.get_decoder()
        out = network(
            input_ids=tokens_BQ,
            attention_mask=mask_B1QK,
            position_ids=positions_BQ,
            past_key_values=cache,
            use_cache=True,
        )
        return out.logits[:, -1] if logits else None

    def _finder(self, stops: tuple[str, ...]) -> StopFinder:
        if stops not in self._finders:
            self._finders[stops] = StopFinder(self._tokenizer, stops)
        return self._finders[stops]


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common prefix."""
    low, high = 0, min(len(a), len(b))
    while low < high:  # a[:low] == b[:low] always holds
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _eos_ids(model: Any, tokenizer: Any) -> set[int]:
    declared = getattr(model.generation_config, "eos_token_id", None)
    ids = declared if isinstance(declared, list) else [declared]
    return {token for token in [*ids, tokenizer.eos_token_id] if token is not None}


def _check_supported(config: Any) -> None:
    layers = set(getattr(config, "layer_types", None) or ["full_attention"])
    if config.model_type not in SUPPORTED or layers != {"full_attention"}:
        raise ArpoError(
            f"the local engine cannot run a {config.model_type!r} model with layers {sorted(layers)}: "
            f"it supports {', '.join(SUPPORTED)} with full attention in every layer"
        )
    if (getattr(config, "rope_parameters", None) or {}).get("rope_type") in ("dynamic", "longrope"):
        raise ArpoError(
            "the local engine cannot run models whose rotary embedding changes with the length (dynamic RoPE)"
        )
