"""Metrics of a run that planning starts from."""

from __future__ import annotations

from typing import Any


def record(**changed: Any) -> dict[str, Any]:
    """Two questions of two paths: prompts of 10, one call each with a result of 5, 8 tokens written on a path."""
    return {
        "trajectories": 4, "questions": 2, "completion_tokens": 8.0, "tool_calls": 4, "calls_per_trajectory": 1.0,
        "branches": 1, "sampled_tokens": 32, "unique_tokens": 72, "total_tokens": 92, "computed_tokens": 36,
        "engine_prefill_tokens": 34, "tool.a.calls": 3, "tool.a.p50_seconds": 1.0, "tool.a.p95_seconds": 2.0,
        "tool.b.calls": 1, "tool.b.p50_seconds": 3.0, "tool.b.p95_seconds": 6.0, **changed,
    }  # fmt: skip
