"""Algorithms against each other: means over seeds, paired differences, and what an accuracy costs.

    rows(Comparison("world", "tool_calls", "grpo", ("grpo", "arpo"), (1, 2, 3), trials))

A trial is one training run: one algorithm, one seed. Intervals are Student's at 95 % over seeds, so they tell how far a
mean may be off because these seeds were drawn and not others; those of shares are cut at 0 and 1. A difference to the
baseline is taken seed by seed, over the seeds that both completed.

The cost ratio asks how much an algorithm spends until it is as good as the baseline. The level is the accuracy at which
the baseline's mean curve has made a share of its gain, the gain being that from its start to its end. The cost is where
a mean curve first reaches the level, and the ratio is the algorithm's cost by the baseline's. The whole gain (a share
of 1) is fragile: the end is one noisy measurement, and curves are flat there, so that a little more accuracy is a lot
of cost; and the more often a noisy curve is tested, the earlier it first touches a level. That is why the ratio is told
at half and three quarters too, and with an interval. A running maximum would change nothing, as it reaches a level
where the curve itself first does; a level at the baseline's maximum would, and would reward the luckiest test.

The interval of a ratio is a bootstrap: seeds are drawn with replacement, the same for both algorithms, and all is
computed anew from their curves. A draw in which the algorithm does not get there counts as an infinite ratio; one in
which the baseline gains nothing has none, and is taken to be below the lower end and above the upper one.

Promises: pure functions, the same numbers for the same trials. Only complete trials count; the others are named.
Does not cover: the spread of the test questions, which all seeds share, and corrections for many comparisons. With few
seeds the bootstrap is narrower than it should be.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from math import cos, inf, isfinite, pi, sin, sqrt, tan
from random import Random
from statistics import fmean, stdev
from typing import NamedTuple

LEVEL = 0.95
SHARES = (0.5, 0.75, 1.0)  # of the baseline's gain
DRAWS = 1000
ROUNDING = 1e-9  # accuracies that differ by less are the same
COSTS = ("tool_calls", "trajectories", "tokens", "seconds")
MATCHES = COSTS[:3]
Curve = list[tuple[float, float]]  # cost and accuracy


@dataclass(frozen=True, slots=True)
class Point:
    """What training has cost so far, and the held-out accuracy there."""

    step: int
    tool_calls: int
    trajectories: int
    tokens: int
    seconds: float
    accuracy: float


@dataclass(frozen=True, slots=True)
class Trial:
    """One run: its curve from the cold start on, what came out at the end, and why it is not complete, if so."""

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
                raise ValueError(f"{name}: a complete trial has a curve")
            return
        if self.curve[0].step or any(_cost(self.curve[0], cost) for cost in COSTS):
            raise ValueError(f"{name}: a curve begins at step 0, which costs nothing")
        if any(_cost(a, cost) > _cost(b, cost) for a, b in pairwise(self.curve) for cost in ("step", *COSTS)):
            raise ValueError(f"{name}: costs never fall")
        if not all(0 <= point.accuracy <= 1 and isfinite(point.seconds) for point in self.curve):
            raise ValueError(f"{name}: accuracies are from 0 to 1, and times finite")


@dataclass(frozen=True, slots=True)
class Comparison:
    """Algorithms, in the order to show them, on the same seeds and with equal budgets of `match`."""

    title: str
    match: str
    baseline: str
    algorithms: tuple[str, ...]
    seeds: tuple[int, ...]
    trials: tuple[Trial, ...]

    def __post_init__(self) -> None:
        if self.match not in MATCHES or self.baseline not in self.algorithms:
            raise ValueError(f"match is one of {', '.join(MATCHES)}, and the baseline one of the algorithms")
        keys = [(trial.algorithm, trial.seed) for trial in self.trials]
        wanted = [(algorithm, seed) for algorithm in self.algorithms for seed in self.seeds]
        if len(set(keys)) < len(keys) or len(set(wanted)) < len(wanted) or not set(keys) <= set(wanted):
            raise ValueError("a comparison has at most one trial of each of its algorithms and seeds")


class Mean(NamedTuple):
    """A mean over seeds and its interval; of one seed there is none."""

    mean: float
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True)
class Difference:
    """To the baseline, over so many shared seeds: the mean, and in how many seeds it was better or worse."""

    mean: Mean
    seeds: int
    better: int
    worse: int


@dataclass(frozen=True, slots=True)
class Ratio:
    """Cost by the baseline's; None if the level is not reached. An end may be infinite; of one seed there is none."""

    ratio: float | None
    low: float | None
    high: float | None
    seeds: int


@dataclass(frozen=True, slots=True)
class Row:
    """What an algorithm came to. Means are over all its complete seeds, or absent where some lack the number.

    `cost_ratio` is by share of the baseline's gain, in tool calls; None where there is no gain, or no shared seed.
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
    """A run that does not count, and why."""

    algorithm: str
    seed: int
    why: str


def rows(comparison: Comparison) -> tuple[Row, ...]:
    """One row per algorithm, in the order to show them."""
    base = complete(comparison, comparison.baseline)
    return tuple(_row(comparison, algorithm, base) for algorithm in comparison.algorithms)


def complete(comparison: Comparison, algorithm: str) -> tuple[Trial, ...]:
    """The trials of an algorithm that count, in order of the seeds."""
    found = {trial.seed: trial for trial in comparison.trials if trial.algorithm == algorithm and not trial.problem}
    return tuple(found[seed] for seed in comparison.seeds if seed in found)


def missing_runs(comparison: Comparison) -> tuple[MissingRun, ...]:
    """The runs that are not complete, or not there."""
    why = {(trial.algorithm, trial.seed): trial.problem for trial in comparison.trials}
    wanted = [(algorithm, seed) for algorithm in comparison.algorithms for seed in comparison.seeds]
    return tuple(MissingRun(*key, why.get(key, "not run")) for key in wanted if why.get(key, "not run"))


def cold_start(comparison: Comparison) -> float | None:
    """Mean accuracy before training, over all complete trials."""
    every = [trial for algorithm in comparison.algorithms for trial in complete(comparison, algorithm)]
    return fmean(trial.curve[0].accuracy for trial in every) if every else None


def mean_interval(values: Sequence[float]) -> Mean:
    """The mean of at least one value, and Student's interval around it; None for its ends if there is one value."""
    mean = fmean(values)
    if len(values) == 1:
        return Mean(mean, None, None)
    reach = student(len(values) - 1) * stdev(values) / sqrt(len(values))
    return Mean(mean, mean - reach, mean + reach)


def share_interval(shares: Sequence[float]) -> Mean:
    """The same for shares, whose mean is known to be from 0 to 1."""
    mean, low, high = mean_interval(shares)
    return Mean(mean, None if low is None else max(0.0, low), None if high is None else min(1.0, high))


@cache
def student(degrees: int) -> float:
    """Between minus and plus this lies 95 % of Student's distribution."""
    low, high = 0.0, pi / 2
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if _inside(middle, degrees) < LEVEL else (low, middle)
    return sqrt(degrees) * tan(high)


def _inside(angle: float, degrees: int) -> float:
    """Student's probability of |t| < sqrt(degrees) tan(angle): a finite sum, for whole degrees of freedom."""
    odd = degrees % 2
    term, total = cos(angle) if odd else 1.0, 0.0
    for power in range(odd, degrees - 1, 2):
        total += term
        term *= (power + 1) / (power + 2) * cos(angle) ** 2
    return 2 / pi * (angle + sin(angle) * total) if odd else sin(angle) * total


def on_grid(trials: Sequence[Trial], cost: str = "tool_calls") -> tuple[list[float], list[list[float]]]:
    """Every cost at which one of these was tested, and each one's accuracy there, up to where that one ends.

    Between tests accuracy is interpolated linearly; of tests at the same cost the last counts.
    """
    curves = [list({_cost(point, cost): point.accuracy for point in trial.curve}.items()) for trial in trials]
    grid = sorted({x for curve in curves for x, _ in curve})
    return grid, [[_at(curve, x) for x in grid if x <= curve[-1][0]] for curve in curves]


def mean_curve(trials: Sequence[Trial], cost: str = "tool_calls") -> Curve:
    """Accuracy against cost, averaged over trials, up to where the shortest ends; exact between its points too."""
    return _mean_curve(*on_grid(trials, cost))


def first_cost(curve: Curve, level: float) -> float | None:
    """The cost at which a curve first reaches a level, if it does."""
    if curve[0][1] >= level:
        return curve[0][0]
    for (x0, y0), (x1, y1) in pairwise(curve):
        if y1 >= level:
            return x0 + (x1 - x0) * (level - y0) / (y1 - y0)
    return None


def cost_ratios(trials: Sequence[Trial], base: Sequence[Trial]) -> dict[float, Ratio | None]:
    """By share of the gain: tool calls to get there, by the baseline's. Both hold the same seeds in the same order."""
    if not trials:
        return dict.fromkeys(SHARES)
    seeds = range(len(trials))
    mine, theirs = on_grid(trials), on_grid(base)

    @cache
    def ratios(drawn: tuple[int, ...]) -> list[float | None]:
        own, other = (_mean_curve(grid, [values[seed] for seed in drawn]) for grid, values in (mine, theirs))
        return [_ratio(own, other, share) for share in SHARES]

    rng, points = Random(0), ratios(tuple(seeds))
    draws = [ratios(tuple(sorted(rng.choices(seeds, k=len(seeds))))) for _ in range(DRAWS)]
    found: dict[float, Ratio | None] = {}
    for place, share in enumerate(SHARES):
        point = points[place]
        low, high = _percentiles([drawn[place] for drawn in draws]) if len(seeds) > 1 else (None, None)
        found[share] = None if point is None else Ratio(None if point == inf else point, low, high, len(seeds))
    return found


def _ratio(mine: Curve, base: Curve, share: float) -> float | None:
    """Infinite if the level is not reached; None if the baseline gained nothing."""
    start, end = base[0][1], base[-1][1]
    if end - start < 10 * ROUNDING:
        return None
    level = start + share * (end - start) - ROUNDING
    whole, part = first_cost(base, level), first_cost(mine, level)
    assert whole, "the baseline passes every level between its start and its end"
    return inf if part is None else part / whole


def _percentiles(draws: Sequence[float | None]) -> tuple[float, float]:
    outside = round(len(draws) * (1 - LEVEL) / 2)
    lows = sorted(0.0 if ratio is None else ratio for ratio in draws)
    highs = sorted(inf if ratio is None else ratio for ratio in draws)
    return lows[outside], highs[-1 - outside]


def _mean_curve(grid: Sequence[float], values: Sequence[Sequence[float]]) -> Curve:
    return [(x, sum(ys) / len(ys)) for x, *ys in zip(grid, *values, strict=False)]  # the shortest ends it


def _at(curve: Sequence[tuple[float, float]], x: float) -> float:
    after = bisect_left(curve, x, key=lambda point: point[0])
    x1, y1 = curve[after]
    if x1 == x:
        return y1
    x0, y0 = curve[after - 1]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


def _row(comparison: Comparison, algorithm: str, base: Sequence[Trial]) -> Row:
    trials = complete(comparison, algorithm)
    ends = [trial.curve[-1] for trial in trials]
    theirs = {trial.seed: trial for trial in base}
    pairs = [(trial, theirs[trial.seed]) for trial in trials if trial.seed in theirs]
    totals = {cost: fmean(_cost(end, cost) for end in ends) if ends else None for cost in COSTS}
    ks = sorted(set.intersection(*(set(trial.pass_at) for trial in trials))) if trials else []
    return Row(
        algorithm=algorithm,
        seeds=len(trials),
        accuracy=share_interval([end.accuracy for end in ends]) if ends else None,
        difference=_difference(pairs) if pairs and algorithm != comparison.baseline else None,
        pass_at={k: share_interval([trial.pass_at[k] for trial in trials]) for k in ks},
        calls_per_question=_mean([trial.calls_per_question for trial in trials]),
        format=_mean([trial.format for trial in trials]),
        cost_ratio=cost_ratios([mine for mine, _ in pairs], [base for _, base in pairs]),
        **totals,
    )


def _difference(pairs: Sequence[tuple[Trial, Trial]]) -> Difference:
    gaps = [mine.curve[-1].accuracy - base.curve[-1].accuracy for mine, base in pairs]
    return Difference(mean_interval(gaps), len(gaps), sum(gap > 0 for gap in gaps), sum(gap < 0 for gap in gaps))


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known and len(known) == len(values) else None


def _cost(point: Point, cost: str) -> float:
    return float(getattr(point, cost))
