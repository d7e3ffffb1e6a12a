"""Building the engine that the settings name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from arpo.config.schema import Rollout
from arpo.engine.base import Engine
from arpo.engine.local.engine import LocalEngine
from arpo.engine.vllm.completion import check_sampling
from arpo.errors import ArpoError


def build_engine(
    settings: Rollout,
    model: Any,
    tokenizer: Any,
    save_weights: Callable[[Path], None],
    threaded: bool,
    end_tokens: frozenset[int] | None = None,
) -> Engine:
    """Return the engine for a model; `save_weights` writes its current weights for an engine with its own copy.

    `end_tokens`: the tokens that end a turn; default: `arpo.models.end_tokens`.
    """
    kv_cache_tokens = settings.kv_cache_tokens or None
    if settings.engine == "local":
        if settings.servers:
            raise ArpoError("rollout.servers: these are for rollout.engine=vllm; the engine is local")
        return LocalEngine(
            model,
            tokenizer,
            max_num_seqs=settings.concurrency,
            kv_cache_tokens=kv_cache_tokens,
            threaded=threaded,
            end_tokens=end_tokens,
        )
    check_sampling(settings.temperature, settings.top_p, settings.top_k)
    if settings.servers:
        from arpo.engine.vllm.servers import PATIENCE_SECONDS, ServerEngine

        return ServerEngine(
            settings.servers,
            model,
            tokenizer,
            save_weights,
            top_logprobs=settings.top_logprobs,
            temperature=settings.temperature,
            end_tokens=end_tokens,
            # Less than a trajectory's time limit: an outage ends the run, not one trajectory after another.
            patience=min(PATIENCE_SECONDS, settings.max_seconds / 2),
        )
    from arpo.engine.vllm.engine import VllmEngine

    return VllmEngine(
        model,
        tokenizer,
        save_weights,
        max_num_seqs=settings.concurrency,
        kv_cache_tokens=kv_cache_tokens,
        top_logprobs=settings.top_logprobs,
        temperature=settings.temperature,
        end_tokens=end_tokens,
    )
