"""Made-up comparisons."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from arpo.studies.compare.stats import Comparison, Curve, Point, TrialResult, mean_curve, on_grid


def trial(
    algorithm: str, seed: int, curve: Sequence[tuple[int, float]], problem: str = "", **more: object
) -> TrialResult:
    """A run with these tool calls and accuracies; a trajectory has two calls, a call ten tokens and half a second."""
    points = tuple(
        Point(step, calls, calls // 2, 10 * calls, calls / 2, right) for step, (calls, right) in enumerate(curve)
    )
    given = {"pass_at": {}, "format": None, "calls_per_question": None, **more}
    return TrialResult(algorithm, seed, points, problem=problem, **given)  # type: ignore[arg-type]


def mean_of(trials: Sequence[TrialResult], cost: str = "tool_calls") -> Curve:
    """The mean curve of these runs."""
    return mean_curve(*on_grid(trials, cost))


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
