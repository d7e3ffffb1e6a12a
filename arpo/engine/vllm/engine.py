"""Sampling by vLLM in a process of its own that this one starts and ends: the Engine protocol over `AsyncLLM`.

Promises: token ids go in and come out, nothing is tokenised again; a turn ends where the local engine would end it;
log-probs are those of softmax(logits / temperature) before any cut, for requests at the temperature that the engine was
made for; nothing computed with older weights is used again, since each update empties the prefix cache and salts its
keys anew. Entropies are estimates from the likeliest tokens: `stats` tells how far off they may be.
Does not cover: log-probs of requests at another temperature (tests), which are those of temperature 1, or, in an engine
made for another temperature than 1, those after the cuts; weights that go over without a directory.
"""

from __future__ import annotations

import asyncio
import math
import os
import tempfile
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import aclosing, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from arpo.engine.base import OnToken
from arpo.engine.local.engine import default_kv_cache_tokens
from arpo.engine.local.kv_cache import token_bytes
from arpo.engine.vllm.completion import Sampled, Terms, logprobs_mode
from arpo.errors import ArpoError
from arpo.types import Completion, SamplingParams

Write = Callable[[Path], None]
"""Writes the weights as they are now, as a Hugging Face directory."""

BLOCK = {"cpu": 32, "cuda": 16}
"""Tokens whose keys and values are shared or not: the fewest that vLLM's kernels like."""
ENVIRONMENT = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_")
END_SECONDS = 60.0
RESETS = 500
RESET_PAUSE_SECONDS = 0.02


class VllmEngine:
    """Engine over vLLM for the model that `write` writes; `model` itself is only asked what it is.

    `temperature` is that of the requests whose log-probs count; the other options are as for the local engine.
    """

    down = False

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        write: Write,
        *,
        rows: int = 128,
        kv_cache_tokens: int | None = None,
        top_logprobs: int = 64,
        temperature: float = 1.0,
    ) -> None:
        require_vllm()
        self._terms = Terms(model, tokenizer, top_logprobs)
        self.capabilities = self._terms.capabilities
        self._write = write
        self._home = tempfile.TemporaryDirectory(prefix="arpo-vllm-")
        self._numbers, self._updates = count(), 0
        self._under_way = self._read = self._reused = 0
        self._streams: set[asyncio.Task[None]] = set()
        self.version = 0
        arguments = self._arguments(model, rows, kv_cache_tokens) | {"logprobs_mode": logprobs_mode(temperature)}
        with tempfile.TemporaryDirectory(dir=self._home.name) as first:
            write(Path(first))
            self._loop = asyncio.new_event_loop()
            thread = threading.Thread(target=self._loop.run_forever, name="arpo-vllm", daemon=True)
            thread.start()
            with _no_ranks():
                started = asyncio.run_coroutine_threadsafe(_start(first, arguments), self._loop)
                try:
                    self._started = [started.result()]
                except Exception as error:
                    self._loop.call_soon_threadsafe(self._loop.stop)
                    raise ArpoError(f"rollout.engine: vLLM did not start ({error}); its own output says why") from error
        self._finalizer = weakref.finalize(self, _shut_down, self._started, self._loop, thread, self._home)

    def close(self) -> None:
        """End vLLM's process. Happens by itself when the engine is no longer used, or at exit."""
        self._finalizer()

    async def generate(
        self, prefix: Sequence[int], params: SamplingParams, *, on_token: OnToken | None = None
    ) -> Completion:
        """Sample one turn after `prefix`."""
        turn = self._terms.turn(prefix, params, on_token)
        arrived: asyncio.Queue[Any] = asyncio.Queue()
        here = asyncio.get_running_loop()

        def put(item: Any) -> None:
            here.call_soon_threadsafe(arrived.put_nowait, item)

        self._under_way += 1
        stream = asyncio.run_coroutine_threadsafe(self._stream(turn.prefix, params, turn.limit, put), self._loop)
        try:
            cached = None
            while turn.finish is None:
                item = await arrived.get()
                if isinstance(item, Exception):
                    raise RuntimeError(f"vLLM failed: {type(item).__name__}: {item}") from item
                if item is None:
                    raise RuntimeError("vLLM ended a turn before its end")
                sampled, known = item
                if cached is None:
                    cached = known
                    self._reused += cached
                    self._read += len(turn.prefix) - cached
                for one in sampled:
                    if not math.isfinite(one.logprob):
                        raise ArpoError(
                            "the model's output is not a number: its weights are broken, or the number format overflows"
                        )
                    turn.add(one)
            return turn.completion(self.version)
        finally:
            self._under_way -= 1
            stream.cancel()  # if it is still under way, vLLM lets go of all it holds for it

    async def sync_weights(self, version: int) -> None:
        """Have vLLM load the weights as they are now, and forget all that was computed with older ones."""
        if self._under_way:
            raise RuntimeError("weights may not change while requests are being sampled")
        with tempfile.TemporaryDirectory(dir=self._home.name) as directory:
            await asyncio.to_thread(self._write, Path(directory))
            await self._there(self._reload(directory))
        self._updates += 1
        self.version = version

    def stats(self) -> dict[str, float]:
        """Since the last call: tokens of prefixes read and re-used; mean and largest possible error of entropies."""
        told = {"prefill_tokens": self._read, "cached_tokens": self._reused, **self._terms.tally.tell()}
        self._read = self._reused = 0
        return told

    @property
    def _llm(self) -> Any:
        return self._started[0]

    async def _there(self, work: Coroutine[Any, Any, None]) -> None:
        """Do this on vLLM's event loop."""
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    async def _reload(self, directory: str) -> None:
        if self._streams:  # cancelled ones
            await asyncio.wait(self._streams)
        await self._llm.collective_rpc("reload_weights", kwargs={"weights_path": directory})
        for _ in range(RESETS):  # refused while a cancelled request is being let go of
            if await self._llm.reset_prefix_cache():
                return
            await asyncio.sleep(RESET_PAUSE_SECONDS)
        raise RuntimeError("vLLM does not empty its prefix cache")

    async def _stream(
        self, prefix: tuple[int, ...], params: SamplingParams, limit: int, put: Callable[[Any], None]
    ) -> None:
        """Hand over what vLLM samples; None at the end."""
        task = asyncio.current_task()
        assert task is not None
        self._streams.add(task)
        try:
            wanted = _vllm_params(params, limit, self._terms)
            prompt = {"prompt_token_ids": list(prefix), "cache_salt": f"arpo-{self._updates}"}
            async with aclosing(self._llm.generate(prompt, wanted, f"arpo-{next(self._numbers)}")) as outputs:
                async for output in outputs:
                    put((_tokens(output.outputs[0]), output.num_cached_tokens or 0))
            put(None)
        except Exception as error:
            put(error)
        finally:
            self._streams.discard(task)

    def _arguments(self, model: Any, rows: int, kv_cache_tokens: int | None) -> dict[str, Any]:
        context, parameter = self.capabilities.max_context, next(model.parameters())
        device = parameter.device.type
        if device not in BLOCK:
            raise ArpoError(f"rollout.engine: vLLM runs on CPU and CUDA here, not on {device}; use local")
        blocks = -(-context // BLOCK[device]) + 1
        if kv_cache_tokens is not None and kv_cache_tokens < blocks * BLOCK[device]:
            raise ArpoError(
                f"rollout.kv_cache_tokens: vLLM needs room for a whole context, {blocks * BLOCK[device]:,} tokens here"
            )
        tokens = max(kv_cache_tokens or default_kv_cache_tokens(model, rows), blocks * BLOCK[device])
        return {
            "dtype": str(parameter.dtype).removeprefix("torch."),
            "max_model_len": context,
            "max_num_seqs": rows,
            "max_logprobs": self._terms.top,
            "block_size": BLOCK[device],
            "kv_cache_memory_bytes": tokens * token_bytes(model.config, parameter.dtype),
            "enforce_eager": device == "cpu",
            # What is free must be more than this share, though the room for keys and values is given above.
            **({"gpu_memory_utilization": 0.01} if device == "cuda" else {}),
        }


def require_vllm() -> None:
    """Raise if vLLM is not there."""
    for name, value in ENVIRONMENT.items():  # read by vLLM when it is first imported, and by what it starts
        os.environ.setdefault(name, value)
    try:
        from vllm import AsyncEngineArgs  # noqa: F401
    except ImportError as error:
        raise ArpoError(
            f"rollout.engine: vLLM cannot be imported ({error}); it needs an environment of its own: pip install "
            "vllm==0.32.0 there (on a CPU see docs/vllm.md), or use rollout.engine=local"
        ) from None


@contextmanager
def _no_ranks() -> Iterator[None]:
    """Hide from what is started here that this process is one of several (`torchrun`): vLLM would look for them."""
    hidden = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith(RANKS)}
    try:
        yield
    finally:
        os.environ.update(hidden)


async def _start(directory: str, arguments: dict[str, Any]) -> Any:
    """vLLM, running; it belongs to the event loop that this is awaited on."""
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
    started: list[Any],
    loop: asyncio.AbstractEventLoop,
    thread: threading.Thread,
    home: tempfile.TemporaryDirectory[str],
) -> None:
    asyncio.run_coroutine_threadsafe(_end(started[0]), loop).result(END_SECONDS)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(END_SECONDS)
    started.clear()  # it must be gone before the modules are that it needs for that
    home.cleanup()


async def _end(llm: Any) -> None:
    """End vLLM's process and all that runs for it on this event loop."""
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    llm.shutdown()


def _vllm_params(params: SamplingParams, limit: int, terms: Terms) -> Any:
    from vllm import SamplingParams as VllmParams
    from vllm.sampling_params import RequestOutputKind

    return VllmParams(
        max_tokens=limit,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        seed=params.seed % 2**63,
        ignore_eos=True,
        stop_token_ids=sorted(terms.eos),
        detokenize=False,
        logprobs=terms.top,
        flat_logprobs=True,
        output_kind=RequestOutputKind.DELTA,
    )


def _tokens(output: Any) -> list[Sampled]:
    """The new tokens. At each place the sampled one stands first, then the likeliest, with it once more or without."""
    flat, found = output.logprobs, []
    for token, start, end in zip(output.token_ids, flat.start_indices, flat.end_indices, strict=True):
        known = dict(zip(flat.token_ids[start:end], flat.logprobs[start:end], strict=True))
        found.append(Sampled(token, known[token], tuple(known.values())))
    return found
