"""The numbers of an evaluation, with intervals.

A question's score is the mean over its answers, and its pass@k the unbiased estimate from them; a benchmark's is the
mean over questions. The interval is the 95 % percentile bootstrap over questions: means of 2,000 draws of as many
questions, with putting back, from a fixed seed. It tells how far the number may be off because these questions were
asked and not others of the kind, and a few answers were sampled of each.

Promises: the same samples give the same numbers, in whatever order they come; answers that failed are counted, never
scored.
Does not cover: small sets, where such an interval is too narrow. In simulations it holds the truth in 93 to 94 % of
cases with 100 questions; with 30 in 94 % in the middle of the scale, 91 % where one in twelve is wrong and 77 % where
one in 20 is. Where all questions score the same it has no width at all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

import numpy as np

from arpo.evaluate import pass_at_k
from arpo.samples import Sample

DRAWS, LEVEL, SEED = 2000, 0.95, 0
_AT_ONCE = 4_000_000  # numbers drawn in one go


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over so many questions, and the interval around it."""

    value: float
    low: float
    high: float
    questions: int


@dataclass(frozen=True, slots=True)
class Summary:
    """What came out of a benchmark, or of one level of it; the means after `pass_at` are over answers."""

    questions: int
    answers: int
    failed: int
    score: Estimate | None
    pass_at: Mapping[int, Estimate]
    format: float | None
    calls: float | None
    tokens: float | None
    seconds: float | None
    faults: Mapping[str, int]
    levels: Mapping[str, Summary] = field(default_factory=dict)


def summarise(samples: Iterable[Sample], ks: Sequence[int]) -> Summary:
    """The numbers of one benchmark; by level too, where it has several."""
    every = sorted(samples, key=lambda sample: sample.key)
    levels: dict[str, list[Sample]] = {}
    for sample in every:
        levels.setdefault(sample.level or "none", []).append(sample)
    several = sorted(levels.items()) if len(levels) > 1 else []
    return _summary(every, ks, {level: _summary(some, ks, {}) for level, some in several})


def _summary(samples: Sequence[Sample], ks: Sequence[int], levels: Mapping[str, Summary]) -> Summary:
    good = [sample for sample in samples if sample.failed is None]
    groups: dict[str, list[Sample]] = {}
    for sample in good:
        groups.setdefault(sample.task, []).append(sample)
    pass_at = {k: estimate(_passes(groups.values(), k)) for k in ks}
    counted = [sample.tokens for sample in good if sample.tokens is not None]
    return Summary(
        questions=len(groups),
        answers=len(good),
        failed=len(samples) - len(good),
        score=estimate([fmean(sample.score for sample in group) for group in groups.values()]),
        pass_at={k: found for k, found in pass_at.items() if found is not None},
        format=_mean([sample.format for sample in good]),
        calls=_mean([sample.calls for sample in good]),
        tokens=_mean(counted),
        seconds=_mean([sample.seconds for sample in good]),
        faults=dict(sorted(Counter(fault for sample in good for fault in sample.faults).items())),
        levels=levels,
    )


def _passes(groups: Iterable[Sequence[Sample]], k: int) -> list[float]:
    """pass@k of every question that has k answers."""
    right = [[sample.correct == 1.0 for sample in group] for group in groups]
    return [pass_at_k(len(answers), sum(answers), k) for answers in right if len(answers) >= k]


def estimate(values: Sequence[float]) -> Estimate | None:
    """The mean of these values, one per question, with its interval; None of none."""
    if not values:
        return None
    low, high = bootstrap(values)
    return Estimate(fmean(values), low, high, len(values))


def bootstrap(values: Sequence[float], draws: int = DRAWS, seed: int = SEED) -> tuple[float, float]:
    """The interval between the outer quantiles of the means of `draws` resamples."""
    values_Q = np.asarray(values, dtype=np.float64)
    random = np.random.default_rng(seed)
    count, means = len(values_Q), []
    step = max(1, _AT_ONCE // count)
    for start in range(0, draws, step):
        drawn_DQ = random.integers(0, count, (min(step, draws - start), count))
        means.append(values_Q[drawn_DQ].mean(axis=1))
    low, high = np.quantile(np.concatenate(means), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None
