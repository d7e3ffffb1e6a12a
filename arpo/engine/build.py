"""The engine that the settings name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from arpo.config.schema import Rollout
from arpo.engine.base import Engine
from arpo.engine.local.engine import LocalEngine
from arpo.engine.vllm.completion import refuse_cuts
from arpo.errors import ArpoError


def build_engine(
    settings: Rollout, model: Any, tokenizer: Any, write: Callable[[Path], None], threaded: bool
) -> Engine:
    """The engine for a model; `write` writes its current weights for an engine that has a copy of its own."""
    kv_cache_tokens = settings.kv_cache_tokens or None
    if settings.engine == "local":
        if settings.servers:
            raise ArpoError("rollout.servers: these are for rollout.engine=vllm; the engine is local")
        return LocalEngine(
            model, tokenizer, rows=settings.concurrency, kv_cache_tokens=kv_cache_tokens, threaded=threaded
        )
    refuse_cuts(settings.temperature, settings.top_p, settings.top_k)
    if settings.servers:
        from arpo.engine.vllm.servers import PATIENCE_SECONDS, ServerEngine

        return ServerEngine(
            settings.servers,
            model,
            tokenizer,
            write,
            top_logprobs=settings.top_logprobs,
            temperature=settings.temperature,
            patience=min(PATIENCE_SECONDS, settings.max_seconds / 2),  # an outage ends the run, not path after path
        )
    from arpo.engine.vllm.engine import VllmEngine

    return VllmEngine(
        model,
        tokenizer,
        write,
        rows=settings.concurrency,
        kv_cache_tokens=kv_cache_tokens,
        top_logprobs=settings.top_logprobs,
        temperature=settings.temperature,
    )
