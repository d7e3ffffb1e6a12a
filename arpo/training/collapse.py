"""Collapse detection: warnings from a run's metrics, and what to do about them.

    for warning in find_warnings(run.read_metrics()):
        print(warning.text)

The detector compares the mean over the last `WINDOW` steps with the first steps of the run or, for metrics that should
only rise, with its best window. A warning needs a change that matters (a ratio) and that the noise between steps does
not explain (a multiple of its standard error). It stays until the change is gone. A change that comes with better
accuracy, such as longer completions, is no warning. Means of entropy, length and gradient norm are geometric.

Guarantees: the warnings of a step depend on the records up to that step only, so a resumed run has the same; a warning
begins at most `WINDOW` - 1 steps before the step that shows it first; a value that is missing, null, NaN or infinite is
left out, except for loss and gradient norm, where it is a warning itself. Steps that a run is rolled back over are
archived, not deleted.
Not covered: a reward that never rises; a decay slower than the thresholds; whether the reward pays for the right thing;
tasks that become harder on purpose (a curriculum) look like a falling reward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from arpo.errors import Collapsed
from arpo.runs.reporter import Reporter

if TYPE_CHECKING:
    from arpo.training.checkpoints import CheckpointManager

Record = Mapping[str, Any]

WINDOW = 5  # steps: one odd batch of tasks is no warning, and few steps are lost before there is one
MIN_VALUES = 3  # values that a window needs: steps without an update have no gradient
MIN_ERRORS = 6.0  # standard errors: the extremes of thousands of windows differ by nearly as much by chance
LOST_SHARE = 0.5  # of the best reward or format: more than the choice of tasks explains
ENTROPY_FALL = 0.1  # times the entropy at the start: samples are nearly all the same
ENTROPY_RISE = 3.0  # times the entropy at the start: training normally lowers it
LENGTH_CHANGE = 2.0  # times longer or shorter, without better answers
GRADIENT_RISE = 10.0  # times the gradient norm at the start: clipping leaves mostly noise
MIN_VALUE = 1e-3  # smallest entropy or length: ratios are compared by logarithms
SOLVED = 0.9  # accuracy from which low entropy is no warning

ENTROPY_FELL = (
    "entropy fell from {then} to {now}: the model always samples the same and has little left to learn from; "
    "try loss.entropy_coef=0.001 or a lower train.lr"
)
ENTROPY_ROSE = (
    "entropy rose from {then} to {now} without better answers: the model writes at random; "
    "try a lower loss.entropy_coef, if you set it, or a lower train.lr"
)
REWARD_FELL = (
    "reward fell from {then} to {now}: the model gets worse, unless a tool or a judge is broken (see infra_faults and "
    "judge.* in the metrics); try a lower train.lr, or loss.kl_coef=0.01"
)
FORMAT_BROKE = (
    "the share of trajectories in the right format fell from {then} to {now}; try a lower train.lr, or "
    "loss.kl_coef=0.01, and check that the reward asks for the format"
)
LONGER = (
    "completions grew from {then} to {now} (tokens) without better answers; "
    "check whether the reward pays for length, or try a lower train.lr"
)
SHORTER = (
    "completions shrank from {then} to {now} (tokens) without better answers; "
    "check whether the reward pays for brevity, or try a lower train.lr"
)
GRADIENT_ROSE = "the gradient norm rose from {then} to {now}: training diverges; try a lower train.lr"


@dataclass(frozen=True, slots=True)
class CollapseWarning:
    """A sign of collapse: its name, the first step that shows it, and a sentence for the user."""

    name: str
    since_step: int
    text: str


@dataclass(frozen=True, slots=True)
class Window:
    """The values of a metric in records `first` to `last`, counted from 0; records without a value are left out."""

    first: int
    last: int
    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        """The mean of the values."""
        return fmean(self.values)


class _Series:
    """One metric over the run, step by step; None where a step has no value."""

    def __init__(self, read: Callable[[Record], float | None]) -> None:
        self._read = read
        self._values: list[float | None] = []
        self._jumps: list[float | None] = []  # distance of each value from the one before it
        self._last: float | None = None
        self._sum, self._count = 0.0, 0  # of the jumps
        self._largest: tuple[float, ...] = ()  # the two largest jumps

    def add(self, record: Record) -> None:
        """Add one step."""
        value = self._read(record)
        jump = None if value is None or self._last is None else abs(value - self._last)
        self._values.append(value)
        self._jumps.append(jump)
        self._last = self._last if value is None else value
        if jump is not None:
            self._sum, self._count = self._sum + jump, self._count + 1
            self._largest = tuple(sorted((*self._largest, jump))[-2:])

    def window(self, first: int, last: int) -> Window:
        """The values of these steps."""
        return Window(first, last, tuple(value for value in self._values[first : last + 1] if value is not None))

    def margin(self, then: Window, now: Window) -> float:
        """How far the means of the newest and an earlier window may differ by chance.

        Two jumps do not count as noise, since they may be the collapse: the one into the window, and the largest other.
        """
        entry = next(n for n in range(now.first, now.last + 1) if self._values[n] is not None)
        into = self._jumps[entry] or 0.0
        largest = self._largest[0] if into == self._largest[-1] else self._largest[-1]
        jumps = self._count - (self._jumps[entry] is not None) - 1
        deviation = (self._sum - into - largest) / jumps * math.sqrt(math.pi) / 2  # for normal noise
        error = deviation * math.sqrt(1 / len(then.values) + 1 / len(now.values))
        return MIN_ERRORS * (1 + (10 / jumps) ** 2) * error  # few jumps are a poor estimate


@dataclass(slots=True)
class _Rule:
    """One kind of warning: a change of one metric, from an earlier window to the newest one, that matters."""

    name: str
    series: _Series
    matters: Callable[[Window, Window], bool]
    text: str  # with {then} and {now}
    from_best: bool = False  # compare with the best window, too
    shown: Callable[[float], float] = float  # from the series to the metric: exp for logarithms
    best: Window | None = None  # among the windows before the newest
    then: Window | None = None  # the window that the current warning compares with
    since: int = 0  # the step where the current warning begins

    def check(self, steps: Sequence[int]) -> CollapseWarning | None:
        """The warning of the newest step, if any. A warning stays until its change is gone."""
        end = len(steps) - 1
        first = end - WINDOW + 1
        if self.from_best and first >= WINDOW:
            self._update_best(self.series.window(first - WINDOW, first - 1))
        now = self.series.window(max(0, first), end)
        if first < 1 or len(now.values) < MIN_VALUES:
            self.then = None
        elif self.then is None or not self.matters(self.then, now):
            self.since = steps[first] if self.then is None else self.since
            self.then = self._compare(now)
        if self.then is None:
            return None
        text = self.text.format(then=self._describe(self.then, steps), now=self._describe(now, steps))
        return CollapseWarning(self.name, self.since, text)

    def _update_best(self, window: Window) -> None:
        if len(window.values) >= MIN_VALUES and (self.best is None or window.mean > self.best.mean):
            self.best = window

    def _compare(self, now: Window) -> Window | None:
        """The earlier window from which the newest one differs significantly and in a way that matters."""
        # A collapse right at the start leaves only a short healthy window.
        sizes = range(min(WINDOW, now.first), 0, -1) if now.first <= WINDOW else [WINDOW]
        starts = [self.series.window(0, size - 1) for size in sizes]
        for then in [self.best, *starts] if self.best else starts:
            if then.values and self.matters(then, now) and self._is_significant(then, now):
                return then
        return None

    def _is_significant(self, then: Window, now: Window) -> bool:
        return abs(now.mean - then.mean) > self.series.margin(then, now)

    def _describe(self, window: Window, steps: Sequence[int]) -> str:
        first, last = steps[window.first], steps[window.last]
        where = f"step {first}" if first == last else f"steps {first} to {last}"
        return f"{self.shown(window.mean):.3g} in {where}"


class CollapseDetector:
    """Finds warnings in the records of a run, which are added one by one in order."""

    def __init__(self) -> None:
        self._steps: list[int] = []
        self._bad: dict[str, list[int]] = {"gradient": [], "loss": []}  # records where it is not finite
        reward, form, accuracy = (_Series(partial(_number, name)) for name in ("reward", "format", "accuracy"))
        entropy, length = (_Series(partial(_log, name)) for name in ("entropy_start", "completion_tokens"))
        gradient = _Series(_log_gradient)
        self._series = (reward, form, accuracy, entropy, length, gradient)

        def no_better(then: Window, now: Window) -> bool:
            """Whether accuracy has not risen significantly; where rewards do not say what is correct, the reward."""
            quality = accuracy if accuracy.window(0, now.last).values else reward
            was, is_now = quality.window(then.first, then.last), quality.window(now.first, now.last)
            enough = was.values and len(is_now.values) >= MIN_VALUES
            return not enough or is_now.mean - was.mean <= quality.margin(was, is_now)

        def unsolved(then: Window, now: Window) -> bool:
            values = accuracy.window(now.first, now.last).values
            return fmean(values) < SOLVED if values else no_better(then, now)

        def dropped(then: Window, now: Window) -> bool:
            return then.mean - now.mean > LOST_SHARE * max(abs(value) for value in then.values)

        def entropy_fell(then: Window, now: Window) -> bool:
            return now.mean - then.mean < math.log(ENTROPY_FALL) and unsolved(then, now)

        def entropy_rose(then: Window, now: Window) -> bool:
            return now.mean - then.mean > math.log(ENTROPY_RISE) and no_better(then, now)

        def longer(then: Window, now: Window) -> bool:
            return now.mean - then.mean > math.log(LENGTH_CHANGE) and no_better(then, now)

        def shorter(then: Window, now: Window) -> bool:
            return then.mean - now.mean > math.log(LENGTH_CHANGE) and no_better(then, now)

        def gradient_rose(then: Window, now: Window) -> bool:
            return median(now.values) - then.mean > math.log(GRADIENT_RISE)  # one bad batch is clipped

        self._rules = (
            _Rule("entropy fell", entropy, entropy_fell, ENTROPY_FELL, shown=math.exp),
            _Rule("entropy rose", entropy, entropy_rose, ENTROPY_ROSE, shown=math.exp),
            _Rule("reward fell", reward, dropped, REWARD_FELL, from_best=True),
            _Rule("format broke", form, dropped, FORMAT_BROKE, from_best=True),
            _Rule("longer", length, longer, LONGER, shown=math.exp),
            _Rule("shorter", length, shorter, SHORTER, shown=math.exp),
            _Rule("gradient rose", gradient, gradient_rose, GRADIENT_ROSE, shown=math.exp),
        )

    def add(self, record: Record) -> tuple[CollapseWarning, ...]:
        """The warnings of the run with this record as its last."""
        self._steps.append(record["step"])
        for series in self._series:
            series.add(record)
        found = [rule.check(self._steps) for rule in self._rules]
        found += [self._not_finite("gradient", "grad_norm", record), self._not_finite("loss", "loss", record)]
        return tuple(warning for warning in found if warning is not None)

    def _not_finite(self, what: str, metric: str, record: Record) -> CollapseWarning | None:
        """A warning while one of the last `WINDOW` steps has a NaN, infinite or null value."""
        bad, number = self._bad[what], len(self._steps) - 1
        if metric in record and _number(metric, record) is None:
            bad.append(number)
        elif bad and bad[-1] <= number - WINDOW:
            bad.clear()
        return not_finite(what, self._steps[bad[0]]) if bad else None


def find_warnings(records: Iterable[Record]) -> tuple[CollapseWarning, ...]:
    """The warnings of the last of these records, which are given oldest first."""
    detector, warnings = CollapseDetector(), tuple[CollapseWarning, ...]()
    for record in records:
        warnings = detector.add(record)
    return warnings


def not_finite(what: str, step: int) -> CollapseWarning:
    """The warning that the gradient or the loss of a step is not finite."""
    return CollapseWarning(
        f"{what} not finite",
        step,
        f"the {what} of step {step} is not a finite number: training diverged; try a lower train.lr",
    )


def last_healthy(records: Sequence[Record], warnings: Sequence[CollapseWarning], checkpoints: Sequence[int]) -> int:
    """Step of the newest checkpoint before these warnings and before any that the next step may show; 0 if none."""
    done = records[-1]["step"] if records else 0
    doubtful = min((warning.since_step for warning in warnings), default=done + 1 - (WINDOW - 1))
    return max((step for step in _without_warning(records, checkpoints) if step < doubtful), default=0)


def protected_checkpoints(
    records: Sequence[Record], warnings: Sequence[CollapseWarning], checkpoints: Sequence[int]
) -> tuple[int, ...]:
    """Checkpoints that must not be deleted: the last healthy one, and the next one that may become it."""
    healthy = last_healthy(records, warnings, checkpoints)
    newer = [step for step in _without_warning(records, checkpoints) if step > healthy]
    return (healthy, *newer[:1])


def _without_warning(records: Sequence[Record], checkpoints: Sequence[int]) -> list[int]:
    """The checkpoints whose step has no warning, in order."""
    marked = {record["step"] for record in records if record.get("collapse_warnings")}
    return sorted(set(checkpoints) - marked)


def _number(name: str, record: Record) -> float | None:
    value = record.get(name)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _log(name: str, record: Record) -> float | None:
    value = _number(name, record)
    return None if value is None else math.log(max(value, MIN_VALUE))


def _log_gradient(record: Record) -> float | None:
    norm = _number("grad_norm", record)
    return math.log(norm) if norm else None  # 0: a step without an update


class CollapseMonitor:
    """Checks every step of a run as `train.on_collapse` says: warn, stop (and roll back), or ignore."""

    def __init__(self, checkpoints: CheckpointManager, on_collapse: str, reporter: Reporter) -> None:
        self._checkpoints, self._on_collapse, self._reporter = checkpoints, on_collapse, reporter
        self._records: list[dict[str, Any]] = []  # step and warnings of the steps done
        self._detector, self._warnings = CollapseDetector(), tuple[CollapseWarning, ...]()
        for record in checkpoints.run.read_metrics() if on_collapse != "ignore" else ():
            self._add(record)
        self._reported = {warning.name for warning in self._warnings}

    def annotate(self, step: int, metrics: Mapping[str, float | str]) -> dict[str, float | str]:
        """The metrics of a step with its warnings, ready to be logged."""
        if self._on_collapse == "ignore":
            return {**metrics}
        return {**metrics, **self._add({"step": step, **metrics})}

    def report(self) -> None:
        """Report new warnings."""
        for warning in self._warnings:
            if warning.name not in self._reported:
                self._reporter.warning(warning.text)
        self._reported = {warning.name for warning in self._warnings}

    def check(self) -> None:
        """Report new warnings; protect the last healthy checkpoint, or with "stop" return to it and raise Collapsed."""
        self.report()
        if self._on_collapse == "stop" and self._warnings:
            raise self._roll_back(self._warnings)
        if self._on_collapse != "ignore":
            steps = self._checkpoints.run.checkpoint_steps()
            self._checkpoints.protected = protected_checkpoints(self._records, self._warnings, steps)

    def diverged(self, step: int) -> None:
        """Handle a step whose update diverged: with "stop", roll back and raise Collapsed; otherwise do nothing."""
        if self._on_collapse == "stop":
            raise self._roll_back((*self._warnings, not_finite("gradient", step)))

    def _add(self, record: Record) -> dict[str, str]:
        self._warnings = self._detector.add(record)
        texts = "\n".join(warning.text for warning in self._warnings)
        shown = {"collapse_warnings": texts} if self._warnings else {}
        self._records.append({"step": record["step"], **shown})
        return shown

    def _roll_back(self, warnings: Sequence[CollapseWarning]) -> Collapsed:
        """Archive the steps after the last healthy checkpoint and return to it; returns the error to raise."""
        run = self._checkpoints.run
        step = last_healthy(self._records, warnings, run.checkpoint_steps())
        archive = run.archive_after(step)
        run.roll_back(step)
        target = f"step {step}, the last healthy checkpoint" if step else "the start: no checkpoint is older"
        return Collapsed(
            f"the run collapsed, first seen in step {min(warning.since_step for warning in warnings)}.\n"
            + "\n".join(warning.text for warning in warnings)
            + f"\nIt was rolled back to {target}. The records and trees of later steps are in {archive}. "
            "Change something (train.lr, loss.kl_coef and loss.entropy_coef may change), then continue with --resume."
        )
