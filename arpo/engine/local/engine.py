"""The local engine: samples from a Hugging Face causal LM in this process, sharing the trainer's weights.

Requests join and leave at every step; one background task runs the model. Keys and values live in a cache of fixed size
whose blocks are shared by all sequences with the same prefix, so continuing after a tool result costs only the new
tokens, and a branch costs the copy of one block. When the cache is full, requests wait. Entropies are exact (full
vocabulary). Given its seed, a request yields the same tokens whatever else is in the batch, up to rounding of logits.

`scheduler` decides what a step computes, `runner` computes it; this file is their asynchronous interface.
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

from arpo.engine.base import Capabilities, OnToken, check_request
from arpo.engine.local.kv_cache import BLOCK_SIZE, KVCache, kv_bytes_per_token
from arpo.engine.local.runner import StepOutput, build_runner
from arpo.engine.local.scheduler import Batch, Request, Scheduler
from arpo.engine.stops import TurnEnds
from arpo.errors import ArpoError
from arpo.models.checks import show_bytes
from arpo.models.network import check_supported
from arpo.models.vision import vision_tower
from arpo.types import Completion, SamplingParams

PREFILL_TOKENS = {"cpu": 512, "cuda": 16384}
"""Prompt tokens computed per step: enough to keep the device busy, few enough not to delay decoding."""
MAX_PREFILL_DELAY = {"cpu": 0, "cuda": 8}
"""Decode steps for which prompts may wait: a step without prefill can replay a CUDA graph, which is much faster."""


class LocalEngine:
    """Engine for `model`, a Hugging Face causal LM; runs at most `max_num_seqs` sequences at a time.

    `kv_cache_tokens`: size of the KV cache; default: a full context for every sequence, or less if memory is short.
    `threaded`: run the model in its own thread, so that tools and timers are not blocked. Turn it off where no
    tool needs the event loop: steps of small models are then a third faster.
    `end_tokens`: the tokens that end a turn; default: `arpo.models.end_tokens`.
    """

    unreachable = False  # it runs in this process

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        max_num_seqs: int = 128,
        kv_cache_tokens: int | None = None,
        prefill_tokens: int | None = None,
        threaded: bool = True,
        end_tokens: frozenset[int] | None = None,
    ) -> None:
        check_supported(model.config)
        devices = {parameter.device for parameter in model.parameters()}
        device = next(iter(devices))
        if len(devices) > 1 or device.type not in PREFILL_TOKENS:
            found = ", ".join(sorted(map(str, devices)))
            raise ArpoError(f"the local engine needs the whole model on one CPU or CUDA device, not on {found}")
        context = model.config.max_position_embeddings
        num_blocks = (kv_cache_tokens or default_kv_cache_tokens(model, max_num_seqs)) // BLOCK_SIZE
        if num_blocks < 2:
            raise ArpoError(f"rollout.kv_cache_tokens: the engine needs room for at least {2 * BLOCK_SIZE} tokens")
        size = num_blocks * BLOCK_SIZE * kv_bytes_per_token(model.config, next(model.parameters()).dtype)
        if size > total_memory(device):
            raise ArpoError(
                f"rollout.kv_cache_tokens: {num_blocks * BLOCK_SIZE:,} tokens take {show_bytes(size)}, and this device "
                f"has {show_bytes(total_memory(device))}: give fewer, or 0 for as many as fit"
            )
        self._cache = KVCache(model.config, num_blocks, next(model.parameters()).dtype, device)
        self._runner = build_runner(model, self._cache, max_num_seqs)
        prefill = prefill_tokens or PREFILL_TOKENS[device.type]
        self._scheduler = Scheduler(num_blocks, max_num_seqs, context, prefill, MAX_PREFILL_DELAY[device.type])
        self._in_step, self._threaded = False, threaded
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="arpo-engine")
        self._loop_task: asyncio.Task[None] | None = None
        self._turn_ends = TurnEnds(model, tokenizer, end_tokens)
        self.version = 0
        self._tower = vision_tower(model)
        self.capabilities = Capabilities(context, model.config.vocab_size, exact_entropy=True)

    @property
    def kv_cache_tokens(self) -> int:
        """Tokens that the KV cache holds."""
        return self._cache.num_tokens

    async def generate(
        self, prefix: Sequence[int], params: SamplingParams, *, on_token: OnToken | None = None
    ) -> Completion:
        """Sample one turn after `prefix`."""
        num_ids = None if self._tower is None else self._tower.num_ids
        check_request(self.capabilities, prefix, params, num_ids)
        max_length = min(len(prefix) + params.max_tokens, self.capabilities.max_context)
        if max_length > self.kv_cache_tokens:
            raise ArpoError(
                f"{len(prefix)} tokens and up to {max_length - len(prefix)} new ones can never fit into the KV cache "
                f"of {self.kv_cache_tokens}: raise rollout.kv_cache_tokens, or lower rollout.max_tokens"
            )
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        request = Request(list(prefix), params, max_length, on_token, future, random.Random(params.seed), len(prefix))
        self._scheduler.waiting.append(request)
        if self._loop_task is None or self._loop_task.done():
            self._loop_task = asyncio.create_task(self._run_loop())
        try:
            return await future
        except asyncio.CancelledError:
            if not self._in_step:  # else it is removed when the step is done
                self._scheduler.finish(request)
            raise

    async def sync_weights(self, version: int) -> None:
        """Drop all keys and values: the shared weights have changed and are now policy version `version`."""
        requests = [*self._scheduler.running, *self._scheduler.waiting]
        if not all(request.future.done() for request in requests):
            raise RuntimeError("weights may not change while requests are being sampled")
        if requests and self._loop_task is not None:  # cancelled requests whose step is not done yet
            await asyncio.wait([self._loop_task])
        self._scheduler.reset_prefix_cache()
        self._runner.sync_weights()
        self.version = version

    def stats(self) -> dict[str, float]:
        """Return counters since the last call: prefix tokens computed and cached, preemptions, CUDA graphs captured."""
        scheduler, (graphs, seconds) = self._scheduler, self._runner.graph_stats()
        counts = {
            "prefill_tokens": scheduler.prefill_tokens,
            "cached_tokens": scheduler.cached_tokens,
            "preemptions": scheduler.preemptions,
        }
        scheduler.prefill_tokens = scheduler.cached_tokens = scheduler.preemptions = 0
        return {**counts, "graphs": graphs, "graph_seconds": seconds}

    async def _run_loop(self) -> None:
        """Run steps until no request is left. Only this task runs the model."""
        scheduler = self._scheduler
        try:
            while scheduler.running or scheduler.waiting:
                await asyncio.sleep(0)  # let other tasks add requests to this step
                batch = scheduler.schedule()
                if batch is not None:
                    self._process(batch, await self._run_step(batch))
        except BaseException as error:  # also if the event loop ends and cancels this task
            self._abort_all(error)
            if not isinstance(error, Exception):
                raise
            self._cache.reset()

    def _abort_all(self, error: BaseException) -> None:
        """Fail every request and drop the prefix cache: the step may have written only part of its keys and values."""
        for request in [*self._scheduler.waiting, *self._scheduler.running]:
            if isinstance(error, asyncio.CancelledError):
                request.future.cancel()
            elif not request.future.done():
                request.future.set_exception(error)
            self._scheduler.finish(request)
        self._scheduler.reset_prefix_cache()

    async def _run_step(self, batch: Batch) -> StepOutput:
        if not self._threaded:
            return self._runner.run(batch)
        self._in_step = True
        try:
            return await asyncio.get_running_loop().run_in_executor(self._executor, self._runner.run, batch)
        finally:
            self._in_step = False

    def _process(self, batch: Batch, output: StepOutput) -> None:
        """Append the sampled tokens to their requests and complete those that are finished."""
        self._scheduler.mark_computed(batch)
        if not all(map(math.isfinite, output.logprobs)):
            raise ArpoError("the model's output is not a number: its weights are broken, or its dtype overflows")
        requests = [batch.requests[i] for i in batch.sampling_rows.tolist()]
        sampled = zip(requests, output.tokens, output.logprobs, output.entropies, strict=True)
        for request, token, logprob, entropy in sampled:
            request.tokens.append(token)
            request.logprobs.append(logprob)
            request.entropies.append(entropy)
            if request.on_token is not None and not request.future.done():
                try:
                    request.on_token(token, logprob, entropy)
                except Exception as error:  # a caller's mistake must not fail the other requests
                    request.future.set_exception(error)
        if output.cut_logprobs is not None and output.cut_entropies is not None:
            for request, logprob, entropy in zip(requests, output.cut_logprobs, output.cut_entropies, strict=True):
                if request.params.top_p < 1 or request.params.top_k > 0:
                    request.cut_logprobs.append(logprob)
                    request.cut_entropies.append(entropy)
        for request in requests:
            finish, stop = self._turn_ends.check(
                request.tokens, request.num_prefix_tokens, request.params.stop, request.max_length
            )
            if finish is not None and not request.future.done():
                request.future.set_result(request.completion(finish, stop, self.version))
        for request in [*self._scheduler.running, *self._scheduler.waiting]:  # some were cancelled meanwhile
            if request.future.done():
                self._scheduler.finish(request)


def total_memory(device: torch.device) -> int:
    """Return the bytes of memory of a GPU, or of this machine."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def default_kv_cache_tokens(model: Any, max_num_seqs: int) -> int:
    """Return the tokens of a full context for every sequence, at most a quarter of RAM or half of free GPU memory."""
    parameter = next(model.parameters())
    if parameter.is_cuda:
        memory = torch.cuda.mem_get_info(parameter.device)[0] // 2
    else:
        memory = total_memory(parameter.device) // 4
    context = -(-int(model.config.max_position_embeddings) // BLOCK_SIZE) * BLOCK_SIZE
    wanted = max(max_num_seqs * context, 2 * BLOCK_SIZE)
    return min(wanted, memory // kv_bytes_per_token(model.config, parameter.dtype))
