"""Statistics of a comparison: means over seeds, paired differences to a baseline, and the cost to reach an accuracy.

    rows(Comparison("world", "tool_calls", "grpo", ("grpo", "arpo"), (1, 2, 3), trials))

A trial is one training run: one algorithm with one seed. Intervals are Student's t at 95 % over seeds, clipped to 0..1
for fractions. They cover the choice of seeds. Differences to the baseline are paired by seed, over the seeds that both
completed.

The cost ratio says how much an algorithm spends until it is as good as the baseline. The target is the accuracy at
which the baseline's mean curve has made a fraction of its gain from start to end. The cost is where a mean curve first
reaches the target, and the ratio is the algorithm's cost divided by the baseline's. The full gain (fraction 1) is
fragile, since its end is one noisy measurement where curves are flat; so the ratio is also reported at 0.5 and 0.75.

The interval of a ratio is a bootstrap: seeds are drawn with replacement, the same seeds for both algorithms. A draw in
which the algorithm never reaches the target counts as an infinite ratio. A draw in which the baseline gains nothing has
no ratio; it counts as below the lower end and above the upper end.

Guarantees: pure functions; the same trials give the same numbers. Only complete trials count; the others are listed.
Not covered: the variance of the test questions, which all seeds share; multiple-comparison corrections. With few seeds
the bootstrap interval is too narrow.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from math import inf, isfinite, sqrt
from random import Random
from statistics import fmean, stdev
from typing import NamedTuple

from arpo.evaluation.student import LEVEL, student_t

GAIN_FRACTIONS = (0.5, 0.75, 1.0)  # of the baseline's gain
DRAWS = 1000  # of the bootstrap
ROUNDING = 1e-9  # smaller differences of accuracies count as equal
COSTS = ("tool_calls", "trajectories", "tokens", "seconds")
MATCHES = COSTS[:3]
Curve = list[tuple[float, float]]  # cost and accuracy


@dataclass(frozen=True, slots=True)
class Point:
    """The cost of training up to a step, and the held-out accuracy there."""

    step: int
    tool_calls: int
    trajectories: int
    tokens: int
    seconds: float
    accuracy: float


@dataclass(frozen=True, slots=True)
class TrialResult:
    """One training run: its curve from the cold start on, its final numbers, and why it is incomplete, if it is."""

    algorithm: str
    seed: int
    curve: tuple[Point, ...]
    pass_at: Mapping[int, float]
    format: float | None
    calls_per_question: float | None
    problem: str = ""

    def __post_init__(self) -> None:
        name = f"{self.algorithm}, seed {self.seed}"
        if not self.curve:
            if not self.problem:
                raise ValueError(f"{name}: a complete trial needs a curve")
            return
        if self.curve[0].step or any(_cost(self.curve[0], cost) for cost in COSTS):
            raise ValueError(f"{name}: a curve must begin at step 0 with cost 0")
        if any(_cost(a, cost) > _cost(b, cost) for a, b in pairwise(self.curve) for cost in ("step", *COSTS)):
            raise ValueError(f"{name}: costs must not decrease")
        if not all(0 <= point.accuracy <= 1 and isfinite(point.seconds) for point in self.curve):
            raise ValueError(f"{name}: accuracies must be from 0 to 1, and times finite")


@dataclass(frozen=True, slots=True)
class Comparison:
    """Algorithms, in display order, with the same seeds and equal budgets of `match`."""

    title: str
    match: str
    baseline: str
    algorithms: tuple[str, ...]
    seeds: tuple[int, ...]
    trials: tuple[TrialResult, ...]

    def __post_init__(self) -> None:
        if self.match not in MATCHES or self.baseline not in self.algorithms:
            raise ValueError(f"match must be one of {', '.join(MATCHES)}, and the baseline one of the algorithms")
        keys = [(trial.algorithm, trial.seed) for trial in self.trials]
        wanted = [(algorithm, seed) for algorithm in self.algorithms for seed in self.seeds]
        if len(set(keys)) < len(keys) or len(set(wanted)) < len(wanted) or not set(keys) <= set(wanted):
            raise ValueError("a comparison must have at most one trial for each of its algorithms and seeds")


class Mean(NamedTuple):
    """A mean over seeds and its interval, which is None for a single seed."""

    mean: float
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True)
class Difference:
    """Paired difference to the baseline: the mean, the number of pairs, and how many were better or worse."""

    mean: Mean
    seeds: int
    better: int
    worse: int


@dataclass(frozen=True, slots=True)
class Ratio:
    """Cost divided by the baseline's; None if the target is not reached. An end of the interval may be infinite."""

    ratio: float | None
    low: float | None
    high: float | None
    seeds: int


@dataclass(frozen=True, slots=True)
class Row:
    """The results of one algorithm: means over its complete seeds, None where a seed lacks the number.

    `cost_ratio` is in tool calls, by fraction of the baseline's gain; None if there is no gain or no shared seed.
    """

    algorithm: str
    seeds: int
    accuracy: Mean | None
    difference: Difference | None
    pass_at: Mapping[int, Mean]
    tool_calls: float | None
    trajectories: float | None
    tokens: float | None
    seconds: float | None
    calls_per_question: float | None
    format: float | None
    cost_ratio: Mapping[float, Ratio | None]


class MissingRun(NamedTuple):
    """A run that is incomplete or was not started, and why."""

    algorithm: str
    seed: int
    why: str


def rows(comparison: Comparison) -> tuple[Row, ...]:
    """One row per algorithm, in display order."""
    return tuple(_row(comparison, algorithm) for algorithm in comparison.algorithms)


def complete(comparison: Comparison, algorithm: str) -> tuple[TrialResult, ...]:
    """The complete trials of an algorithm, in the order of the seeds."""
    found = {trial.seed: trial for trial in comparison.trials if trial.algorithm == algorithm and not trial.problem}
    return tuple(found[seed] for seed in comparison.seeds if seed in found)


def missing_runs(comparison: Comparison) -> tuple[MissingRun, ...]:
    """The runs that are incomplete or were not started."""
    why = {(trial.algorithm, trial.seed): trial.problem for trial in comparison.trials}
    wanted = [(algorithm, seed) for algorithm in comparison.algorithms for seed in comparison.seeds]
    return tuple(MissingRun(*key, why.get(key, "not run")) for key in wanted if why.get(key, "not run"))


def cold_start(comparison: Comparison) -> float | None:
    """Mean accuracy before training, over all complete trials."""
    every = [trial for algorithm in comparison.algorithms for trial in complete(comparison, algorithm)]
    return fmean(trial.curve[0].accuracy for trial in every) if every else None


def mean_interval(values: Sequence[float]) -> Mean:
    """The mean of at least one value, and its Student t interval."""
    mean = fmean(values)
    if len(values) == 1:
        return Mean(mean, None, None)
    half_width = student_t(len(values) - 1) * stdev(values) / sqrt(len(values))
    return Mean(mean, mean - half_width, mean + half_width)


def fraction_interval(fractions: Sequence[float]) -> Mean:
    """`mean_interval` for values from 0 to 1; the interval is clipped to that range."""
    mean, low, high = mean_interval(fractions)
    return Mean(mean, None if low is None else max(0.0, low), None if high is None else min(1.0, high))


def on_grid(trials: Sequence[TrialResult], cost: str = "tool_calls") -> tuple[list[float], list[list[float]]]:
    """Every cost at which a trial was evaluated, and each trial's accuracy there (interpolated) up to its own end."""
    # Of evaluations at the same cost the last counts.
    curves = [list({_cost(point, cost): point.accuracy for point in trial.curve}.items()) for trial in trials]
    grid = sorted({x for curve in curves for x, _ in curve})
    return grid, [[_interpolate(curve, x) for x in grid if x <= curve[-1][0]] for curve in curves]


def mean_curve(grid: Sequence[float], values: Sequence[Sequence[float]]) -> Curve:
    """The mean over trials of what `on_grid` returns, up to the end of the shortest; exact between its points too."""
    return [(x, sum(ys) / len(ys)) for x, *ys in zip(grid, *values, strict=False)]  # zip stops at the shortest


def first_cost(curve: Curve, level: float) -> float | None:
    """The cost at which a curve first reaches a level; None if it never does."""
    if curve[0][1] >= level:
        return curve[0][0]
    for (x0, y0), (x1, y1) in pairwise(curve):
        if y1 >= level:
            return x0 + (x1 - x0) * (level - y0) / (y1 - y0)
    return None


def cost_ratios(trials: Sequence[TrialResult], base: Sequence[TrialResult]) -> dict[float, Ratio | None]:
    """The cost ratio for each gain fraction. Both sequences must hold the same seeds in the same order."""
    if not trials:
        return dict.fromkeys(GAIN_FRACTIONS)
    seeds = range(len(trials))
    mine, theirs = on_grid(trials), on_grid(base)

    @cache
    def ratios(drawn: tuple[int, ...]) -> list[float | None]:
        own, other = (mean_curve(grid, [values[seed] for seed in drawn]) for grid, values in (mine, theirs))
        return [_ratio(own, other, fraction) for fraction in GAIN_FRACTIONS]

    rng, points = Random(0), ratios(tuple(seeds))
    draws = [ratios(tuple(sorted(rng.choices(seeds, k=len(seeds))))) for _ in range(DRAWS)]
    found: dict[float, Ratio | None] = {}
    for fraction, point, drawn in zip(GAIN_FRACTIONS, points, zip(*draws, strict=True), strict=True):
        low, high = _percentiles(drawn) if len(seeds) > 1 else (None, None)
        found[fraction] = None if point is None else Ratio(None if point == inf else point, low, high, len(seeds))
    return found


def _percentiles(draws: Sequence[float | None]) -> tuple[float, float]:
    """The bootstrap interval; None stands for a draw without a ratio."""
    outside = round(len(draws) * (1 - LEVEL) / 2)
    lows = sorted(0.0 if ratio is None else ratio for ratio in draws)
    highs = sorted(inf if ratio is None else ratio for ratio in draws)
    return lows[outside], highs[-1 - outside]


def _ratio(mine: Curve, base: Curve, fraction: float) -> float | None:
    """The cost ratio; infinite if the target is not reached, None if the baseline gained nothing."""
    start, end = base[0][1], base[-1][1]
    if end - start < 10 * ROUNDING:
        return None
    target = start + fraction * (end - start) - ROUNDING
    base_cost, own_cost = first_cost(base, target), first_cost(mine, target)
    assert base_cost, "the baseline passes every level between its start and its end"
    return inf if own_cost is None else own_cost / base_cost


def _interpolate(curve: Sequence[tuple[float, float]], x: float) -> float:
    after = bisect_left(curve, x, key=lambda point: point[0])
    x1, y1 = curve[after]
    if x1 == x:
        return y1
    x0, y0 = curve[after - 1]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


def _row(comparison: Comparison, algorithm: str) -> Row:
    trials = complete(comparison, algorithm)
    ends = [trial.curve[-1] for trial in trials]
    base = {trial.seed: trial for trial in complete(comparison, comparison.baseline)}
    mine = [trial for trial in trials if trial.seed in base]
    theirs = [base[trial.seed] for trial in mine]
    difference = None
    if mine and algorithm != comparison.baseline:
        gaps = [own.curve[-1].accuracy - other.curve[-1].accuracy for own, other in zip(mine, theirs, strict=True)]
        better, worse = sum(gap > 0 for gap in gaps), sum(gap < 0 for gap in gaps)
        difference = Difference(mean_interval(gaps), len(gaps), better, worse)
    ks = sorted(set.intersection(*(set(trial.pass_at) for trial in trials))) if trials else []
    return Row(
        algorithm=algorithm,
        seeds=len(trials),
        accuracy=fraction_interval([end.accuracy for end in ends]) if ends else None,
        difference=difference,
        pass_at={k: fraction_interval([trial.pass_at[k] for trial in trials]) for k in ks},
        calls_per_question=_mean([trial.calls_per_question for trial in trials]),
        format=_mean([trial.format for trial in trials]),
        cost_ratio=cost_ratios(mine, theirs),
        **{cost: _mean([_cost(end, cost) for end in ends]) for cost in COSTS},
    )


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known and len(known) == len(values) else None


def _cost(point: Point, cost: str) -> float:
    return float(getattr(point, cost))
