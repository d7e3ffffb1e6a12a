"""Made-up comparisons."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

from arpo.studies.compare.results import Comparison, Point, TrialResult, TuningRun
from arpo.studies.compare.stats import on_grid


def trial(
    algorithm: str, seed: int, curve: Sequence[tuple[int, float]], problem: str = "", **more: object
) -> TrialResult:
    """A run with these tool calls and accuracies; a trajectory has two calls, a call ten tokens and half a second.

    A training step has two optimizer steps.
    """
    points = tuple(
        Point(step, calls, calls // 2, 10 * calls, 2 * step, calls / 2, right)
        for step, (calls, right) in enumerate(curve)
    )
    given = {"pass_at": {}, "format": None, "calls_per_question": None, **more}
    return TrialResult(algorithm, seed, points, problem=problem, **given)  # type: ignore[arg-type]


def mean_of(trials: Sequence[TrialResult], cost: str = "tool_calls") -> list[tuple[float, float]]:
    """The mean curve of these runs, up to the end of the shortest."""
    grid, values = on_grid(trials, cost)
    return [(x, sum(ys) / len(ys)) for x, *ys in zip(grid, *values, strict=False)]


def comparison(*trials: TrialResult, baseline: str = "grpo", title: str = "a title") -> Comparison:
    """Of the algorithms and seeds of these runs, in the order in which they come."""
    algorithms = tuple(dict.fromkeys(each.algorithm for each in trials))
    return Comparison(title, "tool_calls", baseline, algorithms, tuple(sorted({t.seed for t in trials})), trials)


def noisy(names: Sequence[str], seeds: int, tests: int = 12, title: str = "a title") -> Comparison:
    """Learning curves as they look: they rise, flatten and shake; the first name is the baseline."""
    trials = []
    for place, name in enumerate(names):
        for seed in range(seeds):
            rng, calls, curve = Random(f"{place} {seed}"), 0, [(0, 0.4)]
            for test in range(1, tests):
                calls += rng.randrange(500, 1500)
                curve.append((calls, 0.8 - 0.02 * place - 0.4 * 0.7**test + rng.gauss(0, 0.01)))
            trials.append(trial(name, seed, curve, pass_at={1: 0.8, 4: 0.9}, format=0.9, calls_per_question=2.0))
    return comparison(*trials, baseline=names[0], title=title)


def against(own: list[list[tuple[int, float]]], base: list[list[tuple[int, float]]], *given: float) -> Comparison:
    """arpo and grpo with the seeds 1, 2, ...; with levels that are given."""
    trials = [trial("grpo", seed, curve) for seed, curve in enumerate(base, 1)]
    trials += [trial("arpo", seed, curve) for seed, curve in enumerate(own, 1)]
    return replace(comparison(*trials), levels=given)


def tuning_run(algorithm: str, m: int, seed: int, end: float, problem: str = "") -> TuningRun:
    """A run on a tuning seed that spends 100 calls, from 20 % to `end`."""
    return TuningRun((("M", m),), trial(algorithm, seed, [(0, 0.2), (100, end)], problem))
