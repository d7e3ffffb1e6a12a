"""The local engine: samples from a Hugging Face causal LM in this process, sharing the trainer's weights.

Requests join and leave at every step; one background task drives the model. Keys and values live in a pool of fixed
size whose blocks are shared by all that have the same prefix, so going on after a tool result costs the new tokens
only, and a branch costs one block's copy. When the pool is full, requests wait. Numbers are exact (full vocabulary).
Given its seed, a request yields the same tokens whatever else is in the batch, up to rounding of the logits.

`schedule` decides what a step computes, `runner` computes it, and this file is their asynchronous face.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from arpo.engine.base import Capabilities, OnToken
from arpo.engine.local.kv_cache import BLOCK, KVPool, token_bytes
from arpo.engine.local.runner import Columns, build_runner
from arpo.engine.local.scheduler import Batch, Request, Scheduler
from arpo.engine.stops import StopFinder, eos_ids
from arpo.errors import ArpoError
from arpo.models.network import check_supported
from arpo.types import Completion, SamplingParams

PREFILL_TOKENS = {"cpu": 512, "cuda": 16384}
"""Tokens of prompts that one step reads: enough to keep the device busy, few enough not to hold up the others."""
PATIENCE = {"cpu": 0, "cuda": 8}
"""Steps for which waiting prompts may be held back: a step without them is much faster where it can be replayed."""


class LocalEngine:
    """Engine over `model` (a Hugging Face causal LM) for `rows` sequences at a time.

    `kv_cache_tokens`: room for the keys and values of that many tokens; unset: enough for every row, or what memory allows.
    `threaded`: the model runs in a thread of its own, so that tools and timers go on meanwhile. Where no tool needs the
    event loop, it may be left out: on small models a step on the spot is a third faster.
    """

    down = False

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        rows: int = 128,
        kv_cache_tokens: int | None = None,
        prefill_tokens: int | None = None,
        threaded: bool = True,
    ) -> None:
        check_supported(model.config)
        self._model, self._tokenizer = model, tokenizer
        devices = {parameter.device for parameter in model.parameters()}
        device = next(iter(devices))
        if len(devices) > 1 or device.type not in PREFILL_TOKENS:
            where = ", ".join(sorted(map(str, devices)))
            raise ArpoError(f"the local engine needs the whole model on one CPU or CUDA device, not on {where}")
        context = model.config.max_position_embeddings
        blocks = (kv_cache_tokens or default_kv_cache_tokens(model, rows)) // BLOCK
        if blocks < 2:
            raise ArpoError(f"rollout.kv_cache_tokens: the engine needs room for at least {2 * BLOCK} tokens")
        self._pool = KVPool(model.config, blocks, next(model.parameters()).dtype, device)
        self._runner = build_runner(model, self._pool, rows)
        prefill = prefill_tokens or PREFILL_TOKENS[device.type]
        self._scheduler = Scheduler(blocks, rows, context, prefill, PATIENCE[device.type])
        self._computing, self._threaded = False, threaded
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="arpo-engine")
        self._driver: asyncio.Task[None] | None = None
        self._finders: dict[tuple[str, ...], tuple[StopFinder, frozenset[int]]] = {}
        self._eos = frozenset(eos_ids(model, tokenizer))
        self.version = 0
        self.capabilities = Capabilities(context, model.config.vocab_size, True)

    @property
    def kv_cache_tokens(self) -> int:
        """Tokens that the pool holds."""
        return self._pool.tokens

    async def generate(
        self, prefix: Sequence[int], params: SamplingParams, *, on_token: OnToken | None = None
    ) -> Completion:
        """Sample one turn after `prefix`."""
        context = self.capabilities.max_context
        if not prefix or params.max_tokens < 1 or len(prefix) >= context:
            raise ValueError(
                f"cannot sample {params.max_tokens} tokens after {len(prefix)} within a context of {context}"
            )
        vocab = self.capabilities.vocab_size
        if not 0 <= min(prefix) <= max(prefix) < vocab:
            raise ValueError(f"the prefix holds token {max(prefix)}, but the model's vocabulary ends before {vocab}")
        limit = min(len(prefix) + params.max_tokens, context)
        if limit > self.kv_cache_tokens:
            raise ArpoError(
                f"{len(prefix)} tokens and up to {limit - len(prefix)} new ones can never fit into the engine's "
                f"{self.kv_cache_tokens}: raise rollout.kv_cache_tokens, or lower rollout.max_tokens"
            )
        done: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        if params.stop not in self._finders:
            finder = StopFinder(self._tokenizer, params.stop)
            self._finders[params.stop] = finder, self._eos | finder.candidates
        watched, rng = self._finders[params.stop][1], random.Random(params.seed)
        request = Request(list(prefix), params, limit, on_token, done, rng, watched, len(prefix))
        self._scheduler.waiting.append(request)
        if self._driver is None or self._driver.done():
            self._driver = asyncio.create_task(self._drive())
        try:
            return await done
        except asyncio.CancelledError:
            if not self._computing:  # else as soon as the step under way is done
                self._scheduler.finish(request)
            raise

    async def sync_weights(self, version: int) -> None:
        """The shared weights changed: forget every key and value computed with older ones."""
        requests = [*self._scheduler.running, *self._scheduler.waiting]
        if not all(request.done.done() for request in requests):
            raise RuntimeError("weights may not change while requests are being sampled")
        if requests and self._driver is not None:  # cancelled ones, in a step that is under way
            await asyncio.wait([self._driver])
        self._scheduler.clear()
        self._runner.weights_changed()
        self.version = version

    def stats(self) -> dict[str, float]:
        """What was done since the last call: tokens read and re-used, requests put back, CUDA graphs recorded."""
        scheduler, (graphs, seconds) = self._scheduler, self._runner.recorded()
        counts = {
            "prefill_tokens": scheduler.read,
            "cached_tokens": scheduler.reused,
            "preemptions": scheduler.preemptions,
        }
        scheduler.read = scheduler.reused = scheduler.preemptions = 0
        return {**counts, "graphs": graphs, "graph_seconds": seconds}

    async def _drive(self) -> None:
        """The only task that runs the model."""
        scheduler = self._scheduler
        try:
            while scheduler.running or scheduler.waiting:
                await asyncio.sleep(0)  # whoever can run now joins this step
                batch = scheduler.plan()
                if batch is not None:
                    self._take(batch, await self._in_thread(batch) if self._threaded else self._runner.run(batch))
        except BaseException as error:  # cancelled as well: the event loop ends
            self._give_up(error)
            if not isinstance(error, Exception):
                raise
            self._pool.clear()

    def _give_up(self, error: BaseException) -> None:
        """Let go of every request, and of all that was computed: what was under way is half written."""
        for request in [*self._scheduler.waiting, *self._scheduler.running]:
            if isinstance(error, asyncio.CancelledError):
                request.done.cancel()
            elif not request.done.done():
                request.done.set_exception(error)
            self._scheduler.finish(request)
        self._scheduler.clear()

    async def _in_thread(self, batch: Batch) -> Columns:
        self._computing = True
        try:
            return await asyncio.get_running_loop().run_in_executor(self._worker, self._runner.run, batch)
        finally:
            self._computing = False

    def _take(self, batch: Batch, got: Columns) -> None:
        """Hand the sampled tokens to their requests and let go of those that are finished."""
        self._scheduler.computed(batch)
        tokens, logprobs, entropies, cut_logprobs, cut_entropies = got
        if not all(map(math.isfinite, logprobs)):
            raise ArpoError(
                "the model's output is not a number: its weights are broken, or the number format overflows"
            )
        asking = [batch.requests[i] for i in batch.asking.tolist()]
        for request, token, logprob, entropy in zip(asking, tokens, logprobs, entropies, strict=True):
            request.tokens.append(token)
            request.logprobs.append(logprob)
            request.entropies.append(entropy)
            if request.on_token is not None and not request.done.done():
                try:
                    request.on_token(token, logprob, entropy)
                except Exception as error:  # the caller's mistake must not take the others down
                    request.done.set_exception(error)
        if cut_logprobs is not None and cut_entropies is not None:
            for request, logprob, entropy in zip(asking, cut_logprobs, cut_entropies, strict=True):
                if request.params.top_p < 1 or request.params.top_k > 0:
                    request.cut_logprobs.append(logprob)
                    request.cut_entropies.append(entropy)
        for request in asking:
            if request.tokens[-1] in request.watched or len(request.tokens) == request.limit:
                self._settle(request)
        for request in [*self._scheduler.running, *self._scheduler.waiting]:  # some were cancelled meanwhile
            if request.done.done():
                self._scheduler.finish(request)

    def _settle(self, request: Request) -> None:
        """Complete a request whose last token may have ended it."""
        token, stop = request.tokens[-1], self._finders[request.params.stop][0].find(request.tokens[request.prefix :])
        if token in self._eos:
            finish = "eos"
        elif stop is not None:
            finish = "stop"
        elif len(request.tokens) == request.limit:
            finish = "length"
        else:
            return
        if not request.done.done():
            request.done.set_result(request.completion(finish, stop, self.version))


def default_kv_cache_tokens(model: Any, rows: int) -> int:
    """Room for every row to fill the context, in a quarter of the machine's memory or half of the GPU's free one."""
    parameter = next(model.parameters())
    if parameter.is_cuda:
        memory = torch.cuda.mem_get_info(parameter.device)[0] // 2
    else:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4
    longest = -(-int(model.config.max_position_embeddings) // BLOCK) * BLOCK
    return min(max(rows * longest, 2 * BLOCK), memory // token_bytes(model.config, parameter.dtype))
