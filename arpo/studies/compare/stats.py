"""Statistics of a comparison: means over seeds, differences to a baseline, and ratios of the cost to reach an accuracy.

    rows(comparison)          # accuracy of each algorithm, its noise, and the difference to the baseline
    cost_ratios(comparison)   # cost divided by the baseline's, for each algorithm, level of accuracy and kind of cost

**Intervals** are Student's t at 95 % over seeds. They cover the choice of seeds. Accuracies are clipped to 0..1.
Differences are paired by seed, over the seeds that both completed. Ratios are paired too: the interval is that of the
mean log ratio, so the ratio is a geometric mean.

**Levels** are accuracies, the same for all seeds: given ones, or the baseline's mean start plus a fraction of its mean
gain. What a run needs to reach a level is read from its own curve, between evaluations by a straight line. A ratio is
the mean over the seeds in which both got there; how many did is part of the result. If some did not, these seeds are a
selection, so the ratio has no p-value.

**P-values** are two-sided t tests of "no difference" (ratio 1), adjusted by Holm's method over the comparisons that
stand in one table: the final accuracies, or the ratios of one kind of cost. Comparisons without a p-value count.

**Noise** of one run's final accuracy: the standard deviation between seeds, which is all of it but the choice of
questions, and the part of it that comes from sampling answers.

Guarantees: pure functions; the same trials give the same numbers. Only complete trials count; the others are listed.
Not covered: the choice of test questions, which all seeds share; levels found in the same curves as the costs.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import exp, log, sqrt
from statistics import fmean, stdev
from typing import NamedTuple

from arpo.evaluation.statistics import answer_error, holm
from arpo.evaluation.student import LEVEL, student_t, two_sided_p
from arpo.studies.compare.results import COSTS, Choice, Comparison, Point, TrialResult, TuningRun, choice_label, cost_of

GAIN_FRACTIONS = (0.5, 0.75, 1.0)  # of the baseline's gain
RATIO_COSTS = ("tool_calls", "tokens", "optimizer_steps", "seconds")
ROUNDING = 1e-9  # smaller differences count as none
ALPHA = 1 - LEVEL


class Mean(NamedTuple):
    """A mean over seeds and its interval, which is None for a single seed."""

    mean: float
    low: float | None
    high: float | None


class Level(NamedTuple):
    """An accuracy to reach; `fraction` is that of the baseline's gain, None for a level that was given."""

    accuracy: float
    fraction: float | None


@dataclass(frozen=True, slots=True)
class Difference:
    """Paired difference to the baseline: the mean, the number of pairs, and how many were better or worse."""

    mean: Mean
    seeds: int
    better: int
    worse: int
    p: float | None
    holm_p: float | None = None


@dataclass(frozen=True, slots=True)
class CostRatio:
    """The cost of an algorithm to reach a level, divided by the baseline's.

    Of the `seeds` that both completed, the algorithm reached the level in `reached`, the baseline in
    `baseline_reached`, and `by_seed` has the ratio of those in which both did, unless one of the costs is 0. There is
    a p-value if these are all.
    """

    algorithm: str
    cost: str
    level: Level
    seeds: tuple[int, ...]
    reached: int
    baseline_reached: int
    by_seed: Mapping[int, float]
    ratio: Mean | None
    p: float | None
    holm_p: float | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """The results of one algorithm: means over its complete seeds, None where a seed lacks the number.

    `seed_noise` is the standard deviation of final accuracies between seeds, `answer_noise` the standard error of one
    of them that comes from sampling answers (root mean square over seeds).
    """

    algorithm: str
    seeds: int
    accuracy: Mean | None
    difference: Difference | None
    seed_noise: float | None
    answer_noise: float | None
    pass_at: Mapping[int, Mean]
    tool_calls: float | None
    trajectories: float | None
    tokens: float | None
    optimizer_steps: float | None
    seconds: float | None
    calls_per_question: float | None
    format: float | None
    clip_fraction: float | None


class MissingRun(NamedTuple):
    """A run that is incomplete or was not started, and why."""

    algorithm: str
    seed: int
    why: str


class TuningResult(NamedTuple):
    """Settings tried on the tuning seeds: mean accuracy over the budget and at the end, None if a run failed.

    `chosen` are those with the highest mean accuracy over the budget among all that the algorithm was tried with.
    """

    algorithm: str
    choice: Choice
    seeds: tuple[int, ...]
    score: float | None
    end: float | None
    problem: str
    chosen: bool


def rows(comparison: Comparison) -> tuple[Row, ...]:
    """One row per algorithm, in display order."""
    found = [_row(comparison, algorithm) for algorithm in comparison.algorithms]
    compared = [place for place, row in enumerate(found) if row.algorithm != comparison.baseline]
    adjusted = holm([_p_of(found[place].difference) for place in compared])
    for place, p in zip(compared, adjusted, strict=True):
        if (difference := found[place].difference) is not None:
            found[place] = replace(found[place], difference=replace(difference, holm_p=p))
    return tuple(found)


def complete(comparison: Comparison, algorithm: str) -> tuple[TrialResult, ...]:
    """The complete trials of an algorithm, in the order of the seeds."""
    found = {trial.seed: trial for trial in comparison.trials if trial.algorithm == algorithm and not trial.problem}
    return tuple(found[seed] for seed in comparison.seeds if seed in found)


def missing_runs(comparison: Comparison) -> tuple[MissingRun, ...]:
    """The runs that are incomplete or were not started; those of tuning come first."""
    tuning = [
        MissingRun(run.trial.algorithm, run.trial.seed, f"tuning with {choice_label(run.choice)}: {run.trial.problem}")
        for run in comparison.tuning
        if run.trial.problem
    ]
    why = {(trial.algorithm, trial.seed): trial.problem for trial in comparison.trials}
    wanted = [(algorithm, seed) for algorithm in comparison.algorithms for seed in comparison.seeds]
    return (*tuning, *(MissingRun(*key, why.get(key, "not run")) for key in wanted if why.get(key, "not run")))


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


def ratio_interval(ratios: Sequence[float]) -> Mean:
    """The geometric mean of at least one ratio, and the Student t interval of its logarithm."""
    mean, low, high = mean_interval([log(ratio) for ratio in ratios])
    return Mean(exp(mean), None if low is None else exp(low), None if high is None else exp(high))


def t_test(values: Sequence[float]) -> float | None:
    """The two-sided p-value of "the mean is 0"; None if the values do not vary, or there are fewer than two.

    Values that all are 0 have a p-value of 1.
    """
    if len(values) < 2:
        return None
    mean, spread = fmean(values), stdev(values)
    if spread < ROUNDING:
        return 1.0 if abs(mean) < ROUNDING else None
    return two_sided_p(mean / spread * sqrt(len(values)), len(values) - 1)


def on_grid(trials: Sequence[TrialResult], cost: str = "tool_calls") -> tuple[list[float], list[list[float]]]:
    """Every cost at which a trial was evaluated, and each trial's accuracy there (interpolated) up to its own end."""
    # Of evaluations at the same cost the last counts.
    curves = [list({cost_of(point, cost): point.accuracy for point in trial.curve}.items()) for trial in trials]
    grid = sorted({x for curve in curves for x, _ in curve})
    return grid, [[_interpolate(curve, x) for x in grid if x <= curve[-1][0]] for curve in curves]


def levels(comparison: Comparison) -> tuple[Level, ...]:
    """The levels of accuracy to reach: the given ones, or fractions of the baseline's gain; none if it gained nothing.

    Start and gain are means over the baseline's complete seeds.
    """
    if comparison.levels:
        return tuple(Level(accuracy, None) for accuracy in comparison.levels)
    base = complete(comparison, comparison.baseline)
    start, end = (fmean([trial.curve[at].accuracy for trial in base] or [0.0]) for at in (0, -1))
    if end - start < 10 * ROUNDING:
        return ()
    return tuple(Level(start + fraction * (end - start), fraction) for fraction in GAIN_FRACTIONS)


def costs_to_reach(curve: Sequence[Point], level: float) -> dict[str, float] | None:
    """The costs at which a curve first reaches a level; None if it never does."""
    before = curve[0]
    for point in curve:
        if point.accuracy >= level - ROUNDING:
            gain = point.accuracy - before.accuracy
            share = min(1.0, (level - before.accuracy) / gain) if gain > 0 else 1.0
            return {cost: cost_of(before, cost) * (1 - share) + cost_of(point, cost) * share for cost in COSTS}
        before = point
    return None


def cost_ratios(comparison: Comparison) -> tuple[CostRatio, ...]:
    """The cost ratios of every algorithm but the baseline: by kind of cost, then algorithm, then level."""
    names = [name for name in comparison.algorithms if name != comparison.baseline]
    wanted = levels(comparison)
    found: list[CostRatio] = []
    for cost in RATIO_COSTS:
        family = [_cost_ratio(comparison, name, level, cost) for name in names for level in wanted]
        adjusted = holm([ratio.p for ratio in family])
        found += [replace(ratio, holm_p=p) for ratio, p in zip(family, adjusted, strict=True)]
    return tuple(found)


def mean_accuracy(curve: Sequence[Point], cost: str, budget: float) -> float:
    """The area under accuracy against cost up to the budget, divided by the budget: the mean accuracy on the way."""
    area = 0.0
    for a, b in pairwise(curve):
        x0, x1 = cost_of(a, cost), cost_of(b, cost)
        if x1 > x0 and x0 < budget:
            end = min(x1, budget)
            at_end = a.accuracy + (b.accuracy - a.accuracy) * (end - x0) / (x1 - x0)
            area += (end - x0) * (a.accuracy + at_end) / 2
    return area / budget


def tuning_results(runs: Sequence[TuningRun], match: str, budget: float) -> tuple[TuningResult, ...]:
    """What each algorithm's settings gave on the tuning seeds; of equally good ones the first is chosen."""
    groups: dict[tuple[str, Choice], list[TrialResult]] = {}
    for run in runs:
        groups.setdefault((run.trial.algorithm, run.choice), []).append(run.trial)
    best: dict[str, tuple[float, Choice]] = {}
    found = []
    for (algorithm, choice), trials in groups.items():
        problem = "; ".join(f"seed {trial.seed}: {trial.problem}" for trial in trials if trial.problem)
        score = end = None
        if not problem:
            score = fmean(mean_accuracy(trial.curve, match, budget) for trial in trials)
            end = fmean(trial.curve[-1].accuracy for trial in trials)
            if algorithm not in best or score > best[algorithm][0]:
                best[algorithm] = score, choice
        seeds = tuple(trial.seed for trial in trials)
        found.append(TuningResult(algorithm, choice, seeds, score, end, problem, chosen=False))
    return tuple(
        each._replace(chosen=each.algorithm in best and best[each.algorithm][1] == each.choice) for each in found
    )


def _cost_ratio(comparison: Comparison, algorithm: str, level: Level, cost: str) -> CostRatio:
    mine, theirs = _pairs(comparison, algorithm)
    own = [costs_to_reach(trial.curve, level.accuracy) for trial in mine]
    base = [costs_to_reach(trial.curve, level.accuracy) for trial in theirs]
    by_seed = {
        trial.seed: a[cost] / b[cost]
        for trial, a, b in zip(mine, own, base, strict=True)
        if a is not None and b is not None and a[cost] > 0 and b[cost] > 0
    }
    ratios = list(by_seed.values())
    return CostRatio(
        algorithm=algorithm,
        cost=cost,
        level=level,
        seeds=tuple(trial.seed for trial in mine),
        reached=sum(each is not None for each in own),
        baseline_reached=sum(each is not None for each in base),
        by_seed=by_seed,
        ratio=ratio_interval(ratios) if ratios else None,
        p=t_test([log(ratio) for ratio in ratios]) if len(ratios) == len(mine) else None,
    )


def _pairs(comparison: Comparison, algorithm: str) -> tuple[list[TrialResult], list[TrialResult]]:
    """The trials of an algorithm and of the baseline with the seeds that both completed."""
    base = {trial.seed: trial for trial in complete(comparison, comparison.baseline)}
    mine = [trial for trial in complete(comparison, algorithm) if trial.seed in base]
    return mine, [base[trial.seed] for trial in mine]


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
    mine, theirs = _pairs(comparison, algorithm)
    difference = None
    if mine and algorithm != comparison.baseline:
        gaps = [own.curve[-1].accuracy - other.curve[-1].accuracy for own, other in zip(mine, theirs, strict=True)]
        better, worse = sum(gap > 0 for gap in gaps), sum(gap < 0 for gap in gaps)
        difference = Difference(mean_interval(gaps), len(gaps), better, worse, t_test(gaps))
    ks = sorted(set.intersection(*(set(trial.pass_at) for trial in trials))) if trials else []
    errors = _mean([None if (error := answer_error(trial.answers)) is None else error**2 for trial in trials])
    return Row(
        algorithm=algorithm,
        seeds=len(trials),
        accuracy=fraction_interval([end.accuracy for end in ends]) if ends else None,
        difference=difference,
        seed_noise=stdev(end.accuracy for end in ends) if len(ends) > 1 else None,
        answer_noise=None if errors is None else sqrt(errors),
        pass_at={k: fraction_interval([trial.pass_at[k] for trial in trials]) for k in ks},
        calls_per_question=_mean([trial.calls_per_question for trial in trials]),
        format=_mean([trial.format for trial in trials]),
        clip_fraction=_mean([trial.clip_fraction for trial in trials]),
        **{cost: _mean([cost_of(end, cost) for end in ends]) for cost in COSTS},
    )


def _p_of(difference: Difference | None) -> float | None:
    return None if difference is None else difference.p


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known and len(known) == len(values) else None
