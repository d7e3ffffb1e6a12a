"""What a caller in Python sees of a job: lines in the log, and calls of their own functions.

Lines go to the logger "arpo" at the level INFO. Unless the program has set up logging, they are shown on stderr: `show`
sees to that. With `progress=False` their level is DEBUG; `logging.getLogger("arpo").setLevel(logging.WARNING)` hides
them, too.
"""

from __future__ import annotations

import difflib
import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TextIO

from arpo.api.thread import LoopThread
from arpo.api.tree import Tree
from arpo.errors import ArpoError
from arpo.runs import reporter as reporting
from arpo.types import ScoredTree

if TYPE_CHECKING:
    from arpo.evaluation.evaluate import Evaluation

FIRST_LINE_SECONDS, MAX_LINE_SECONDS = 2.0, 60.0  # of silence before a line of progress: doubled after each
SHOWN = {"reward": ".3f", "accuracy": ".1%", "test_accuracy": ".1%", "tool_calls": ".0f", "branches": ".0f"}
_logger = logging.getLogger("arpo")


class Callback:
    """Base class of callbacks: override the events that you need. They run in the thread that called `train`.

    An error in one of them ends training, after the last complete step is saved.
    """

    def on_step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """A training step was done."""

    def on_tree(self, tree: Tree) -> None:
        """A tree was sampled and scored for a training step."""

    def on_evaluation(self, evaluation: Evaluation) -> None:
        """An evaluation has ended: of `evaluate`, or during training (`eval.every`)."""

    def on_message(self, text: str) -> None:
        """A message, which is also logged."""

    def on_warning(self, text: str) -> None:
        """A warning, which is also logged."""


EVENTS = tuple(name for name in vars(Callback) if name.startswith("on_"))


class CallbackReporter(reporting.Reporter):
    """Logs, and calls callbacks, in the caller's thread."""

    has_bars = True  # its lines say how far a job is

    def __init__(self, callbacks: Sequence[Any], thread: LoopThread, level: int = logging.INFO) -> None:
        self._handlers = {event: [_handler(each, event) for each in callbacks] for event in EVENTS}
        self._thread, self._level = thread, level
        self._pace, self._trees = _Pace(), 0

    def message(self, text: str) -> None:
        """Log a message."""
        self._tell("on_message", text, log=text)

    def warning(self, text: str) -> None:
        """Log a warning."""
        self._tell("on_warning", text, log=text, level=logging.WARNING)

    @contextmanager
    def progress(self, what: str, total: int) -> Iterator[reporting.Progress]:
        """Log how far a job is, now and then; training logs its steps anyway."""
        yield reporting.Progress() if what == "training" else _LogProgress(self, what, total)

    def training_starts(self, kind: str) -> None:
        """Count trees from now on."""
        self._pace, self._trees = _Pace(), 0

    def training_step(self, kind: str, step: int, metrics: Mapping[str, Any]) -> None:
        """Log a training step."""
        shown = [f"{name} {metrics[name]:{how}}" for name, how in SHOWN.items() if name in metrics]
        seconds = sum(metrics.get(name, 0.0) for name in ("rollout_seconds", "train_seconds"))
        self._pace, self._trees = _Pace(), 0
        self._tell("on_step", step, metrics, log=f"step {step}: {', '.join(shown)}, {seconds:.1f} s")

    def tree(self, scored: ScoredTree) -> None:
        """Count a tree; a step that takes long says how many there are."""
        self._trees += 1
        line = f"sampling: trees done in this step: {self._trees}" if self._pace.due() else None
        self._tell("on_tree", Tree.of(scored), log=line)

    def evaluation(self, result: Any) -> None:
        """Pass on the result of an evaluation."""
        self._tell("on_evaluation", replace(result, trees=tuple(map(Tree.of, result.trees))))

    def _tell(self, event: str, *args: Any, log: str | None = None, level: int | None = None) -> None:
        handlers = [handler for handler in self._handlers[event] if handler is not None]

        def tell() -> None:
            if log is not None:
                _logger.log(self._level if level is None else level, "%s", log)
            for handler in handlers:
                handler(*args)

        if log is not None or handlers:
            self._thread.in_caller(tell)

    def log(self, text: str) -> None:
        """Log a line that no callback gets."""
        self._thread.in_caller(lambda: _logger.log(self._level, "%s", text))


class _Pace:
    """When a line of progress is due: after two seconds, then after twice as long, and so on."""

    def __init__(self) -> None:
        self._wait = FIRST_LINE_SECONDS
        self._next = time.monotonic() + self._wait

    def due(self) -> bool:
        if (now := time.monotonic()) < self._next:
            return False
        self._wait = min(2 * self._wait, MAX_LINE_SECONDS)
        self._next = now + self._wait
        return True


class _LogProgress(reporting.Progress):
    """Logs progress in lines."""

    def __init__(self, reporter: CallbackReporter, what: str, total: int) -> None:
        self._reporter, self._what, self._total, self._done, self._pace = reporter, what, total, 0, _Pace()

    def update(self, completed: int, total: int | None = None, note: str = "") -> None:
        self._done, self._total = completed, self._total if total is None else total
        if self._pace.due():
            self._reporter.log(f"{self._what}: {self._done} of {self._total}{f', {note}' if note else ''}")

    def advance(self) -> None:
        self.update(self._done + 1)


def as_callbacks(given: Any) -> tuple[Any, ...]:
    """The callbacks of an argument: several, one, or None."""
    if given is None:
        return ()
    return tuple(given) if isinstance(given, Iterable) else (given,)


def _handler(callback: Any, event: str) -> Callable[..., object] | None:
    """What a callback does at an event; a plain function is called at each step."""
    if isinstance(callback, type):
        raise ArpoError(f"callbacks: {callback.__name__} is a class; give an instance: {callback.__name__}()")
    methods = [name for name in dir(callback) if name.startswith("on_")]
    if not methods and callable(callback):
        return callback if event == "on_step" else None
    for name in methods:
        if name not in EVENTS:
            near = difflib.get_close_matches(name, EVENTS, 1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(EVENTS)}"
            raise ArpoError(f"callbacks: there is no event {name}; {hint}")
    if not methods:
        raise ArpoError(f"callbacks: got {callback!r:.100}, expected a function of (step, metrics) or an arpo.Callback")
    return getattr(callback, event, None)


class _Stderr(logging.StreamHandler[TextIO]):
    """Writes to what `sys.stderr` is at the moment: notebooks and tests replace it."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)
        self.setFormatter(logging.Formatter("%(message)s"))

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        """The current stderr."""
        return sys.stderr


def show() -> None:
    """Make the lines of this package visible, unless the program has set up logging for it."""
    if _logger.level == logging.NOTSET:
        _logger.setLevel(logging.INFO)
    if not _logger.hasHandlers():
        _logger.addHandler(_Stderr())
