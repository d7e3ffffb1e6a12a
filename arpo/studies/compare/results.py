"""The results of a comparison as data, and as the JSON from which every number of a report can be computed again.

    comparison = Comparison("world", "tool_calls", "grpo", ("grpo", "arpo"), (1, 2, 3), trials)
    load_comparison(Path("results.json")) == comparison

A trial is one training run: one algorithm with one seed. Its curve says what was spent and how accurate the model was.

Guarantees: `comparison_from_json(raw_json(x)) == x`. Values that cannot be are refused. No torch is needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import pairwise
from math import isfinite
from pathlib import Path
from typing import Any

from arpo.errors import ArpoError
from arpo.runs.run_dir import read_json

COSTS = ("tool_calls", "trajectories", "tokens", "optimizer_steps", "seconds")
MATCHES = COSTS[:3]
COST_NAMES = {
    "tool_calls": "tool calls",
    "trajectories": "trajectories",
    "tokens": "sampled tokens",
    "optimizer_steps": "optimizer steps",
    "seconds": "wall time",
}
FORMAT = 2  # of results.json
Choice = tuple[tuple[str, int | float], ...]  # tuned settings by short name, like (("M", 4), ("lr", 2e-4))


@dataclass(frozen=True, slots=True)
class Point:
    """The cost of training up to a step, and the held-out accuracy there."""

    step: int
    tool_calls: int
    trajectories: int
    tokens: int
    optimizer_steps: int
    seconds: float
    accuracy: float


@dataclass(frozen=True, slots=True)
class TrialResult:
    """One training run: its curve from the cold start on, its final numbers, and why it is incomplete, if it is.

    `answers` has, for each question of the final evaluation, how many answers there are and how many are right.
    `clip_fraction` is the mean over trained tokens.
    """

    algorithm: str
    seed: int
    curve: tuple[Point, ...]
    pass_at: Mapping[int, float]
    format: float | None
    calls_per_question: float | None
    problem: str = ""
    answers: tuple[tuple[int, int], ...] = ()
    clip_fraction: float | None = None

    def __post_init__(self) -> None:
        name = f"{self.algorithm}, seed {self.seed}"
        if any(not 0 <= right <= count for count, right in self.answers):
            raise ValueError(f"{name}: more answers are right than there are")
        if not self.curve:
            if not self.problem:
                raise ValueError(f"{name}: a complete trial needs a curve")
            return
        if self.curve[0].step or any(cost_of(self.curve[0], cost) for cost in COSTS):
            raise ValueError(f"{name}: a curve must begin at step 0 with cost 0")
        if any(cost_of(a, cost) > cost_of(b, cost) for a, b in pairwise(self.curve) for cost in ("step", *COSTS)):
            raise ValueError(f"{name}: costs must not decrease")
        if not all(0 <= point.accuracy <= 1 and isfinite(point.seconds) for point in self.curve):
            raise ValueError(f"{name}: accuracies must be from 0 to 1, and times finite")


@dataclass(frozen=True, slots=True)
class ArmSettings:
    """The settings of an algorithm's runs that say what a step costs and how it learns."""

    num_trajectories: int
    num_initial: int
    branching: str
    batch_size: int
    minibatches: int
    lr: float
    bonus: float


@dataclass(frozen=True, slots=True)
class TuningRun:
    """A run on a tuning seed, and the settings that it tried."""

    choice: Choice
    trial: TrialResult


@dataclass(frozen=True, slots=True)
class Comparison:
    """Algorithms, in display order, with the same seeds and equal budgets of `match`.

    `levels` are accuracies to reach; without any, fractions of the baseline's gain are used. `budget` is None if it
    is what the baseline spends with the same seed.
    """

    title: str
    match: str
    baseline: str
    algorithms: tuple[str, ...]
    seeds: tuple[int, ...]
    trials: tuple[TrialResult, ...]
    levels: tuple[float, ...] = ()
    budget: int | None = None
    settings: Mapping[str, ArmSettings] = field(default_factory=dict)
    tuning: tuple[TuningRun, ...] = ()

    def __post_init__(self) -> None:
        if self.match not in MATCHES or self.baseline not in self.algorithms:
            raise ValueError(f"match must be one of {', '.join(MATCHES)}, and the baseline one of the algorithms")
        keys = [(trial.algorithm, trial.seed) for trial in self.trials]
        wanted = [(algorithm, seed) for algorithm in self.algorithms for seed in self.seeds]
        if len(set(keys)) < len(keys) or len(set(wanted)) < len(wanted) or not set(keys) <= set(wanted):
            raise ValueError("a comparison must have at most one trial for each of its algorithms and seeds")
        if not all(0 < level <= 1 for level in self.levels) or len(set(self.levels)) < len(self.levels):
            raise ValueError("levels must be different accuracies above 0 and up to 1")
        if self.tuning and self.budget is None:
            raise ValueError("tuning needs a budget")
        if any(run.trial.seed in self.seeds or run.trial.algorithm not in self.algorithms for run in self.tuning):
            raise ValueError("tuning runs must have other seeds, and algorithms that are compared")


def cost_of(point: Point, cost: str) -> float:
    """A cost of training up to a point."""
    return float(getattr(point, cost))


def choice_label(choice: Choice) -> str:
    """Tuned settings as text, like M=4,lr=0.0002."""
    return ",".join(f"{name}={value}" for name, value in choice)


def raw_json(comparison: Comparison) -> dict[str, Any]:
    """The comparison as JSON values; `comparison_from_json` reads them."""
    return {
        "format": FORMAT,
        "title": comparison.title,
        "match": comparison.match,
        "budget": comparison.budget,
        "baseline": comparison.baseline,
        "algorithms": list(comparison.algorithms),
        "seeds": list(comparison.seeds),
        "levels": list(comparison.levels),
        "settings": {name: asdict(arm) for name, arm in comparison.settings.items()},
        "tuning": [{"choice": dict(run.choice), **asdict(run.trial)} for run in comparison.tuning],
        "trials": [asdict(trial) for trial in comparison.trials],
    }


MAX_NUMBER = 10**18  # of costs; more is damage


def load_comparison(path: Path) -> Comparison:
    """The comparison in a results.json; ArpoError if the file is something else."""
    found = read_json(path)
    if "trials" in found and found.get("format") != FORMAT:
        raise ArpoError(
            f"{path}: was written by another version of arpo; the command that made it writes it again, without "
            "repeating finished runs"
        )
    try:
        return comparison_from_json(found)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise ArpoError(f"{path}: is not a results.json of arpo compare, or is damaged: {error!r}") from error


def comparison_from_json(found: Mapping[str, Any]) -> Comparison:
    """The comparison that `raw_json` wrote; LookupError, TypeError or ValueError for anything else."""
    return Comparison(
        title=_text(found["title"]),
        match=_text(found["match"]),
        baseline=_text(found["baseline"]),
        algorithms=tuple(map(_text, found["algorithms"])),
        seeds=tuple(map(_count, found["seeds"])),
        trials=tuple(map(_trial, found["trials"])),
        levels=tuple(map(_number, found["levels"])),
        budget=None if found["budget"] is None else _positive(found["budget"]),
        settings={name: _arm(values) for name, values in found["settings"].items()},
        tuning=tuple(
            TuningRun(tuple((name, _number(value)) for name, value in each["choice"].items()), _trial(each))
            for each in found["tuning"]
        ),
    )


def _trial(found: Mapping[str, Any]) -> TrialResult:
    return TrialResult(
        algorithm=_text(found["algorithm"]),
        seed=_count(found["seed"]),
        curve=tuple(_point(point) for point in found["curve"]),
        pass_at={int(k): _number(value) for k, value in found["pass_at"].items()},
        format=_optional(found["format"]),
        calls_per_question=_optional(found["calls_per_question"]),
        problem=_text(found["problem"]),
        answers=tuple(_pair(pair) for pair in found["answers"]),
        clip_fraction=_optional(found["clip_fraction"]),
    )


def _point(found: Mapping[str, Any]) -> Point:
    counts: dict[str, Any] = {name: _count(found[name]) for name in ("step", *COSTS) if name != "seconds"}
    return Point(**counts, seconds=_number(found["seconds"]), accuracy=_number(found["accuracy"]))


def _arm(found: Mapping[str, Any]) -> ArmSettings:
    values = {each.name: found[each.name] for each in fields(ArmSettings)}
    branching = _text(values.pop("branching"))
    return ArmSettings(branching=branching, **{name: _number(value) for name, value in values.items()})


def _pair(found: Sequence[Any]) -> tuple[int, int]:
    count, right = found
    return _count(count), _count(right)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"got {value!r}, expected a text")
    return value


def _number(value: Any) -> Any:
    """A finite number, as it is: whole numbers stay whole."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value) or abs(value) > MAX_NUMBER:
        raise TypeError(f"got {value!r}, expected a number")
    return value


def _positive(value: Any) -> int:
    if not _count(value):
        raise ValueError("got 0, expected a whole number above it")
    return _count(value)


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_NUMBER:
        raise TypeError(f"got {value!r:.100}, expected a whole number that is not negative")
    return value


def _optional(value: Any) -> float | None:
    return None if value is None else float(_number(value))
