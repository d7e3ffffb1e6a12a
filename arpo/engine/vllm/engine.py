"""Sampling by vLLM in a process that this one starts and ends: the Engine protocol over `AsyncLLM`.

Guarantees: token ids go in and come out, nothing is tokenized again; a turn ends where the local engine would end it;
log-probs are those of softmax(logits / temperature) before any cut, for requests at the engine's `temperature`; nothing
computed with older weights is reused, since each update empties the prefix cache and changes its salt. Entropies are
estimates from the most likely tokens; `stats` says how far off they may be.
Not covered: log-probs of requests at another temperature (evaluation), which are those of temperature 1, or, in an
engine for another temperature than 1, those after the cuts; transferring weights without a directory.
"""

from __future__ import annotations

import asyncio
import math
import os
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from arpo.engine.base import OnToken
from arpo.engine.local.engine import default_kv_cache_tokens
from arpo.engine.local.kv_cache import kv_bytes_per_token
from arpo.engine.vllm.completion import CompletionBuilder, SampledToken, logprobs_mode
from arpo.errors import ArpoError
from arpo.types import Completion, SamplingParams

BLOCK_SIZE = {"cpu": 32, "cuda": 16}
"""Tokens per block of vLLM's prefix cache: the smallest that its kernels support well."""
ENVIRONMENT = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
TORCHRUN_VARIABLES = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    *("GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_"),
)
SHUTDOWN_SECONDS = 60.0
RESET_ATTEMPTS = 500
RESET_PAUSE_SECONDS = 0.02


class VllmEngine:
    """Engine over vLLM; `save_weights` writes the weights that it loads, `model` only gives its config and dtype.

    `temperature` is that of the requests whose log-probs are trained on; other options are as for the local engine.
    """

    unreachable = False

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        save_weights: Callable[[Path], None],
        *,
        max_num_seqs: int = 128,
        kv_cache_tokens: int | None = None,
        top_logprobs: int = 64,
        temperature: float = 1.0,
        end_tokens: frozenset[int] | None = None,
    ) -> None:
        require_vllm()
        self._builder = CompletionBuilder(model, tokenizer, top_logprobs, end_tokens)
        self.capabilities = self._builder.capabilities
        self._save_weights = save_weights
        self._temp_dir = tempfile.TemporaryDirectory(prefix="arpo-vllm-")
        self._request_ids, self._updates = count(), 0
        self._in_flight = self._prefill_tokens = self._cached_tokens = 0
        self._streams: set[asyncio.Task[None]] = set()
        self.version = 0
        arguments = self._arguments(model, max_num_seqs, kv_cache_tokens)
        arguments["logprobs_mode"] = logprobs_mode(temperature)
        with tempfile.TemporaryDirectory(dir=self._temp_dir.name) as directory:
            save_weights(Path(directory))
            self._loop = asyncio.new_event_loop()
            thread = threading.Thread(target=self._loop.run_forever, name="arpo-vllm", daemon=True)
            thread.start()
            with _without_torchrun_variables():
                started = asyncio.run_coroutine_threadsafe(_start_vllm(directory, arguments), self._loop)
                try:
                    self._llm = [started.result()]  # in a list, so that shutting down can drop the last reference
                except Exception as error:
                    self._loop.call_soon_threadsafe(self._loop.stop)
                    raise ArpoError(f"rollout.engine: vLLM did not start ({error}); its own output says why") from error
        self._finalizer = weakref.finalize(self, _shut_down, self._llm, self._loop, thread, self._temp_dir)

    def close(self) -> None:
        """End vLLM's process. Also done when the engine is garbage-collected, and at exit."""
        self._finalizer()

    async def generate(
        self, prefix: Sequence[int], params: SamplingParams, *, on_token: OnToken | None = None
    ) -> Completion:
        """Sample one turn after `prefix`."""
        partial = self._builder.start(prefix, params, on_token)
        queue: asyncio.Queue[Any] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def put(item: Any) -> None:
            loop.call_soon_threadsafe(queue.put_nowait, item)

        self._in_flight += 1
        stream = asyncio.run_coroutine_threadsafe(
            self._stream(partial.prefix, params, partial.max_tokens, put), self._loop
        )
        try:
            cached = None
            while partial.finish is None:
                item = await queue.get()
                if isinstance(item, Exception):
                    raise RuntimeError(f"vLLM failed: {type(item).__name__}: {item}") from item
                if item is None:
                    raise RuntimeError("vLLM ended a turn before its end")
                tokens, num_cached = item
                if cached is None:
                    cached = num_cached
                    self._cached_tokens += cached
                    self._prefill_tokens += len(partial.prefix) - cached
                for token in tokens:
                    if not math.isfinite(token.logprob):
                        raise ArpoError(
                            "the model's output is not a number: its weights are broken, or its dtype overflows"
                        )
                    partial.add(token)
            return partial.completion(self.version)
        finally:
            self._in_flight -= 1
            stream.cancel()  # if it is not done yet, vLLM aborts the request

    async def sync_weights(self, version: int) -> None:
        """Make vLLM load the current weights and drop everything computed with older ones."""
        if self._in_flight:
            raise RuntimeError("weights may not change while requests are being sampled")
        with tempfile.TemporaryDirectory(dir=self._temp_dir.name) as directory:
            await asyncio.to_thread(self._save_weights, Path(directory))
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._reload(directory), self._loop))
        self._updates += 1
        self.version = version

    def stats(self) -> dict[str, float]:
        """Return counters since the last call: prefix tokens computed and cached, mean and largest entropy error."""
        counts = {"prefill_tokens": self._prefill_tokens, "cached_tokens": self._cached_tokens}
        self._prefill_tokens = self._cached_tokens = 0
        return {**counts, **self._builder.entropy_stats()}

    async def _reload(self, directory: str) -> None:
        if self._streams:  # cancelled ones
            await asyncio.wait(self._streams)
        await self._llm[0].collective_rpc("reload_weights", kwargs={"weights_path": directory})
        for _ in range(RESET_ATTEMPTS):  # refused while a cancelled request is being aborted
            if await self._llm[0].reset_prefix_cache():
                return
            await asyncio.sleep(RESET_PAUSE_SECONDS)
        raise RuntimeError("vLLM does not empty its prefix cache")

    async def _stream(
        self, prefix: tuple[int, ...], params: SamplingParams, max_tokens: int, put: Callable[[Any], None]
    ) -> None:
        """Pass on (tokens, number of cached prefix tokens) as vLLM samples; None at the end."""
        task = asyncio.current_task()
        assert task is not None
        self._streams.add(task)
        try:
            vllm_params = _vllm_params(params, max_tokens, self._builder)
            prompt = {"prompt_token_ids": list(prefix), "cache_salt": f"arpo-{self._updates}"}
            request_id = f"arpo-{next(self._request_ids)}"
            async with aclosing(self._llm[0].generate(prompt, vllm_params, request_id)) as outputs:
                async for output in outputs:
                    put((_sampled_tokens(output.outputs[0]), output.num_cached_tokens or 0))
            put(None)
        except Exception as error:
            put(error)
        finally:
            self._streams.discard(task)

    def _arguments(self, model: Any, max_num_seqs: int, kv_cache_tokens: int | None) -> dict[str, Any]:
        context, parameter = self.capabilities.max_context, next(model.parameters())
        device = parameter.device.type
        if device not in BLOCK_SIZE:
            raise ArpoError(f"rollout.engine: vLLM runs on CPU and CUDA here, not on {device}; use local")
        min_tokens = (-(-context // BLOCK_SIZE[device]) + 1) * BLOCK_SIZE[device]
        if kv_cache_tokens is not None and kv_cache_tokens < min_tokens:
            raise ArpoError(f"rollout.kv_cache_tokens: vLLM needs room for a whole context, {min_tokens:,} tokens here")
        tokens = max(kv_cache_tokens or default_kv_cache_tokens(model, max_num_seqs), min_tokens)
        return {
            "dtype": str(parameter.dtype).removeprefix("torch."),
            "max_model_len": context,
            "max_num_seqs": max_num_seqs,
            "max_logprobs": self._builder.top_logprobs,
            "block_size": BLOCK_SIZE[device],
            "kv_cache_memory_bytes": tokens * kv_bytes_per_token(model.config, parameter.dtype),
            "enforce_eager": device == "cpu",
            # vLLM wants at least this share to be free, even though the size of the KV cache is given above.
            **({"gpu_memory_utilization": 0.01} if device == "cuda" else {}),
        }


def require_vllm() -> None:
    """Raise if vLLM cannot be imported."""
    for name, value in ENVIRONMENT.items():  # read by vLLM when it is first imported, and by its processes
        os.environ.setdefault(name, value)
    try:
        from vllm import AsyncEngineArgs  # noqa: F401
    except ImportError as error:
        raise ArpoError(
            f"rollout.engine: vLLM cannot be imported ({error}); it needs an environment of its own: pip install "
            "vllm==0.32.0 there (on a CPU see docs/vllm.md), or use rollout.engine=local"
        ) from None


@contextmanager
def _without_torchrun_variables() -> Iterator[None]:
    """Hide the variables of `torchrun`: vLLM would take this process's ranks for its own."""
    hidden = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith(TORCHRUN_VARIABLES)}
    try:
        yield
    finally:
        os.environ.update(hidden)


async def _start_vllm(directory: str, arguments: dict[str, Any]) -> Any:
    """Start vLLM and return it; it belongs to the event loop on which this runs."""
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    return AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=directory,
            skip_tokenizer_init=True,
            enable_prefix_caching=True,
            disable_log_stats=True,
            use_tqdm_on_load=False,
            **arguments,
        )
    )


def _shut_down(
    llm: list[Any],
    loop: asyncio.AbstractEventLoop,
    thread: threading.Thread,
    temp_dir: tempfile.TemporaryDirectory[str],
) -> None:
    asyncio.run_coroutine_threadsafe(_stop_vllm(llm[0]), loop).result(SHUTDOWN_SECONDS)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(SHUTDOWN_SECONDS)
    llm.clear()  # its destructor needs modules that are gone at interpreter exit
    temp_dir.cleanup()


async def _stop_vllm(llm: Any) -> None:
    """End vLLM's process and its tasks on this event loop."""
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    llm.shutdown()


def _vllm_params(params: SamplingParams, max_tokens: int, builder: CompletionBuilder) -> Any:
    from vllm import SamplingParams as VllmParams
    from vllm.sampling_params import RequestOutputKind

    return VllmParams(
        max_tokens=max_tokens,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        seed=params.seed % 2**63,
        ignore_eos=True,
        stop_token_ids=sorted(builder.turn_ends.eos),
        detokenize=False,
        logprobs=builder.top_logprobs,
        flat_logprobs=True,
        output_kind=RequestOutputKind.DELTA,
    )


def _sampled_tokens(output: Any) -> list[SampledToken]:
    """Return the new tokens. For each, vLLM lists the sampled token first, then the most likely ones."""
    flat, tokens = output.logprobs, []
    for token, start, end in zip(output.token_ids, flat.start_indices, flat.end_indices, strict=True):
        logprobs = dict(zip(flat.token_ids[start:end], flat.logprobs[start:end], strict=True))
        tokens.append(SampledToken(token, logprobs[token], tuple(logprobs.values())))
    return tokens
