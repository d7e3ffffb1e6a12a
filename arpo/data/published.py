"""Published results on the benchmarks, to hold one's own against; in percent.

Only what is published for a benchmark by itself is here. The authors used their own tools, samples of the larger sets
and judge, so a difference of some points may be due to these.
"""

from __future__ import annotations

from dataclasses import dataclass

ARPO, AEPO = "arXiv 2507.19849", "arXiv 2510.14545"


@dataclass(frozen=True, slots=True)
class Published:
    """One number: `Published("gaia", "ARPO", "Qwen3-14B", "pass@1", 43.7, ARPO)`."""

    benchmark: str
    method: str
    model: str
    measure: str
    percent: float
    source: str


def _deep_search(method: str, model: str, *percents: float) -> tuple[Published, ...]:
    names = ("gaia", "webwalker", "hle", "xbench")
    return tuple(
        Published(name, method, model, "pass@1", percent, ARPO) for name, percent in zip(names, percents, strict=True)
    )


PUBLISHED = (
    *_deep_search("GRPO", "Qwen3-8B", 32.0, 29.0, 7.8, 20.0),
    *_deep_search("ARPO", "Qwen3-8B", 38.8, 30.5, 8.8, 25.0),
    *_deep_search("GRPO", "Qwen3-14B", 36.9, 30.0, 8.6, 27.0),
    *_deep_search("ARPO", "Qwen3-14B", 43.7, 36.0, 10.0, 32.0),
    Published("gaia", "ARPO", "Qwen3-14B", "pass@5", 61.2, ARPO),
    Published("hle", "ARPO", "Qwen3-14B", "pass@5", 24.0, ARPO),
    Published("xbench", "ARPO", "Qwen3-14B", "pass@5", 59.0, ARPO),
    Published("gaia", "AEPO", "Qwen3-14B", "pass@1", 47.6, AEPO),
    Published("hle", "AEPO", "Qwen3-14B", "pass@1", 11.2, AEPO),
    Published("webwalker", "AEPO", "Qwen3-14B", "pass@1", 43.0, AEPO),
)
"""The deep-search sets. Of the ten others only averages over all of them are known to us."""


def published_for(benchmark: str) -> tuple[Published, ...]:
    """What is published for a benchmark."""
    return tuple(row for row in PUBLISHED if row.benchmark == benchmark)
