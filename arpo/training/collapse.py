"""Signs that a run collapses, from its metrics. A pure function of the records so far.

    for sign in find_signs(log.read_metrics()):
        print(sign.text)

The mean over the last `WINDOW` steps is held against how the run was before: against its first steps, or, for what
should only rise, against its best stretch. A sign needs both: a change that matters (a ratio), and one that the noise
between steps does not explain (a multiple of its standard error). It stays until the change is no longer there. What
looks bad but goes with better answers, like longer ones, is none. Means of entropy, length and gradient are geometric.

Promises: whether a step has a sign depends on the records up to it and on nothing later; a sign begins at most
`WINDOW` - 1 steps before the step that shows it first; a value that is missing, null, NaN or infinite is left out, but
for loss and gradient, where it is a sign itself.
Does not cover: a reward that never rises; a decay slower than the thresholds; whether the reward pays for the right
thing; questions that become harder on purpose (a curriculum) look like a reward that falls.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean, median
from typing import Any

Record = Mapping[str, Any]

WINDOW = 5  # steps: one odd batch of questions is no sign, and few steps are lost before there is one
ENOUGH = 3  # values in a window that a mean may be taken of: steps that learnt nothing have no gradient
CERTAIN = 6.0  # standard errors: the best of thousands of windows and the worst lie that far apart by chance
LOST = 0.5  # of the best reward, or of the right format: no choice of questions explains that
FLAT = 0.1  # of the entropy at first: what is sampled is nearly always the same
WILD = 3.0  # times the entropy at first: learning makes a model surer, not less sure
RESIZED = 2.0  # times longer or shorter, with answers no better for it
STEEP = 10.0  # times the gradient at first: clipping then leaves little but the direction of noise
SMALLEST = 1e-3  # entropy or length that is told from 0: ratios are compared by logarithms
SOLVED = 0.9  # of answers right: a model that knows the answer may be sure of it

ENTROPY_FELL = (
    "entropy fell from {then} to {now}: the model writes the same every time and has little left to learn from; "
    "try loss.entropy_coef=0.001 or a lower train.lr"
)
ENTROPY_ROSE = (
    "entropy rose from {then} to {now}, and answers are no better for it: the model writes at random; "
    "try a lower loss.entropy_coef, if you set it, or a lower train.lr"
)
REWARD_FELL = (
    "reward fell from {then} to {now}: the model unlearns, unless a tool or a judge is broken (infra_faults, judge.* "
    "in the metrics); try a lower train.lr, or loss.kl_coef=0.01"
)
FORMAT_BROKE = (
    "the share of paths in the right format fell from {then} to {now}; try a lower train.lr, or loss.kl_coef=0.01, "
    "and see whether the reward asks for the format"
)
LONGER = (
    "what the model writes on a path grew from {then} to {now} (tokens), and answers are no better for it; "
    "see whether the reward pays for length, or try a lower train.lr"
)
SHORTER = (
    "what the model writes on a path shrank from {then} to {now} (tokens), and answers are no better for it; "
    "see whether the reward pays for brevity, or try a lower train.lr"
)
GRADIENT_ROSE = "the gradient's norm rose from {then} to {now}: training diverges; try a lower train.lr"


@dataclass(frozen=True, slots=True)
class CollapseWarning:
    """Something that points to a collapse: what, the first step that it was seen in, and a sentence for people."""

    name: str
    since_step: int
    text: str


@dataclass(frozen=True, slots=True)
class _Part:
    """The values of a metric in the steps with these numbers, counted from 0."""

    first: int
    last: int
    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return fmean(self.values)


class _Series:
    """One metric over the run, step by step; None where a step has no value."""

    def __init__(self, read: Callable[[Record], float | None]) -> None:
        self._read = read
        self._values: list[float | None] = []
        self._hops: list[float | None] = []  # how far each value is from the one before it
        self._last: float | None = None
        self._sum, self._count = 0.0, 0  # of the hops
        self._largest: tuple[float, ...] = ()  # two of them

    def add(self, record: Record) -> None:
        """One step more."""
        value = self._read(record)
        hop = None if value is None or self._last is None else abs(value - self._last)
        self._values.append(value)
        self._hops.append(hop)
        self._last = self._last if value is None else value
        if hop is not None:
            self._sum, self._count = self._sum + hop, self._count + 1
            self._largest = tuple(sorted((*self._largest, hop))[-2:])

    def part(self, first: int, last: int) -> _Part:
        """The values that these steps have."""
        return _Part(first, last, tuple(value for value in self._values[first : last + 1] if value is not None))

    def margin(self, then: _Part, now: _Part) -> float:
        """How far the newest window may be from an earlier part by chance. Two hops are no noise, as they may be the
        collapse: the one that leads into the window, and the largest of the others."""
        entry = next(n for n in range(now.first, now.last + 1) if self._values[n] is not None)
        into = self._hops[entry] or 0.0
        largest = self._largest[0] if into == self._largest[-1] else self._largest[-1]
        hops = self._count - (self._hops[entry] is not None) - 1
        deviation = (self._sum - into - largest) / hops * math.sqrt(math.pi) / 2  # of normal noise
        error = deviation * math.sqrt(1 / len(then.values) + 1 / len(now.values))
        return CERTAIN * (1 + (10 / hops) ** 2) * error  # few hops are a poor measure


@dataclass(slots=True)
class _Watch:
    """What is looked for in one metric: a change, from an earlier part to the newest window, that matters."""

    name: str
    series: _Series
    matters: Callable[[_Part, _Part], bool]
    text: str  # with {then} and {now}
    from_best: bool = False  # compare with the best window as well as with the first steps
    shown: Callable[[float], float] = float
    best: _Part | None = None  # of those that ended before the newest began
    then: _Part | None = None  # what the sign that there is now compares with
    since: int = 0

    def look(self, steps: Sequence[int]) -> CollapseWarning | None:
        """The sign that the newest step shows, if any. A sign stays until what it says is no longer so."""
        end = len(steps) - 1
        first = end - WINDOW + 1
        if self.from_best and first >= WINDOW:
            self._improve(self.series.part(first - WINDOW, first - 1))
        now = self.series.part(max(0, first), end)
        if first < 1 or len(now.values) < ENOUGH:
            self.then = None
        elif self.then is None or not self.matters(self.then, now):
            self.since = steps[first] if self.then is None else self.since
            self.then = self._compare(now)
        if self.then is None:
            return None
        text = self.text.format(then=self._say(self.then, steps), now=self._say(now, steps))
        return CollapseWarning(self.name, self.since, text)

    def _improve(self, window: _Part) -> None:
        if len(window.values) >= ENOUGH and (self.best is None or window.mean > self.best.mean):
            self.best = window

    def _compare(self, now: _Part) -> _Part | None:
        """What the newest window is surely different from, and in a way that matters."""
        sizes = range(min(WINDOW, now.first), 0, -1) if now.first <= WINDOW else [WINDOW]  # collapsed at once?
        starts = [self.series.part(0, size - 1) for size in sizes]
        for then in [self.best, *starts] if self.best else starts:
            if then.values and self.matters(then, now) and self._surely(then, now):
                return then
        return None

    def _surely(self, then: _Part, now: _Part) -> bool:
        return abs(now.mean - then.mean) > self.series.margin(then, now)

    def _say(self, part: _Part, steps: Sequence[int]) -> str:
        first, last = steps[part.first], steps[part.last]
        where = f"step {first}" if first == last else f"steps {first} to {last}"
        return f"{self.shown(part.mean):.3g} in {where}"


class CollapseDetector:
    """Looks at the records of a run, one by one and in order, for signs of a collapse."""

    def __init__(self) -> None:
        self._steps: list[int] = []
        self._bad: dict[str, list[int]] = {"gradient": [], "loss": []}  # numbers of steps where it is not finite
        reward, form, right = (_Series(partial(_number, name)) for name in ("reward", "format", "accuracy"))
        entropy, length = (_Series(partial(_log, name)) for name in ("entropy_start", "completion_tokens"))
        gradient = _Series(_log_gradient)
        self._series = (reward, form, right, entropy, length, gradient)

        def no_better(then: _Part, now: _Part) -> bool:
            """Whether answers are not right more often than then."""
            was, is_now = right.part(then.first, then.last), right.part(now.first, now.last)
            enough = was.values and len(is_now.values) >= ENOUGH
            return not enough or is_now.mean - was.mean <= right.margin(was, is_now)

        def unsolved(now: _Part) -> bool:
            values = right.part(now.first, now.last).values
            return not values or fmean(values) < SOLVED

        def lost(then: _Part, now: _Part) -> bool:
            return then.mean - now.mean > LOST * max(abs(value) for value in then.values)

        def flat(then: _Part, now: _Part) -> bool:
            return now.mean - then.mean < math.log(FLAT) and unsolved(now)

        def wild(then: _Part, now: _Part) -> bool:
            return now.mean - then.mean > math.log(WILD) and no_better(then, now)

        def longer(then: _Part, now: _Part) -> bool:
            return now.mean - then.mean > math.log(RESIZED) and no_better(then, now)

        def shorter(then: _Part, now: _Part) -> bool:
            return then.mean - now.mean > math.log(RESIZED) and no_better(then, now)

        def steeper(then: _Part, now: _Part) -> bool:
            return median(now.values) - then.mean > math.log(STEEP)  # one wild batch is clipped and forgotten

        self._watches = (
            _Watch("entropy fell", entropy, flat, ENTROPY_FELL, shown=math.exp),
            _Watch("entropy rose", entropy, wild, ENTROPY_ROSE, shown=math.exp),
            _Watch("reward fell", reward, lost, REWARD_FELL, from_best=True),
            _Watch("format broke", form, lost, FORMAT_BROKE, from_best=True),
            _Watch("longer", length, longer, LONGER, shown=math.exp),
            _Watch("shorter", length, shorter, SHORTER, shown=math.exp),
            _Watch("gradient rose", gradient, steeper, GRADIENT_ROSE, shown=math.exp),
        )

    def add(self, record: Record) -> tuple[CollapseWarning, ...]:
        """The signs that a run shows with this record as its last."""
        self._steps.append(record["step"])
        for series in self._series:
            series.add(record)
        found = [watch.look(self._steps) for watch in self._watches]
        found += [self._not_finite("gradient", "grad_norm", record), self._not_finite("loss", "loss", record)]
        return tuple(sign for sign in found if sign is not None)

    def _not_finite(self, what: str, metric: str, record: Record) -> CollapseWarning | None:
        """A sign as long as one of the last steps has such a value."""
        bad, number = self._bad[what], len(self._steps) - 1
        if metric in record and _number(metric, record) is None:
            bad.append(number)
        elif bad and bad[-1] <= number - WINDOW:
            bad.clear()
        return not_finite(what, self._steps[bad[0]]) if bad else None


def find_warnings(records: Iterable[Record]) -> tuple[CollapseWarning, ...]:
    """The signs that the last of these records, oldest first, shows."""
    watcher, signs = CollapseDetector(), tuple[CollapseWarning, ...]()
    for record in records:
        signs = watcher.add(record)
    return signs


def not_finite(what: str, step: int) -> CollapseWarning:
    """The sign that the gradient, or the loss, of a step is no number to learn from."""
    return CollapseWarning(
        f"{what} not finite",
        step,
        f"the {what} of step {step} is not a finite number: training diverged; try a lower train.lr",
    )


def last_healthy(records: Sequence[Record], signs: Sequence[CollapseWarning], checkpoints: Sequence[int]) -> int:
    """The newest of these checkpoints that neither these signs nor one of the next step put in doubt; 0 if none."""
    done = records[-1]["step"] if records else 0
    doubtful = min((sign.since_step for sign in signs), default=done + 1 - WINDOW + 1)
    return max((step for step in _unmarked(records, checkpoints) if step < doubtful), default=0)


def protected_checkpoints(
    records: Sequence[Record], signs: Sequence[CollapseWarning], checkpoints: Sequence[int]
) -> tuple[int, ...]:
    """Which of these must not be dropped: the last sound one, and the one that will be that when it is old enough."""
    sound = last_healthy(records, signs, checkpoints)
    younger = [step for step in _unmarked(records, checkpoints) if step > sound]
    return (sound, *younger[:1])


def _unmarked(records: Sequence[Record], checkpoints: Sequence[int]) -> list[int]:
    marked = {record["step"] for record in records if record.get("collapse_warnings")}
    return sorted(set(checkpoints) - marked)


def _number(name: str, record: Record) -> float | None:
    value = record.get(name)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _log(name: str, record: Record) -> float | None:
    value = _number(name, record)
    return None if value is None else math.log(max(value, SMALLEST))


def _log_gradient(record: Record) -> float | None:
    norm = _number("grad_norm", record)
    return math.log(norm) if norm else None  # 0: a step that learnt nothing
