"""What a long job reports while it runs: messages, progress, training steps.

Nothing below the command line prints. A job takes a `Reporter`; this base class writes messages to the `arpo` logger
and shows no progress, which suits scripts and notebooks. `arpo.cli.display.ConsoleReporter` prints to a terminal.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from arpo.types import ScoredTree

_logger = logging.getLogger("arpo")


class Progress:
    """The progress of one job; this base class shows nothing."""

    def update(self, completed: int, total: int | None = None, note: str = "") -> None:
        """Set how many units are done."""

    def advance(self) -> None:
        """Count one more unit as done."""


class Reporter:
    """Receives messages, progress and training steps."""

    has_bars = False  # whether progress is visible; where it is not, long jobs send messages instead

    def message(self, text: str) -> None:
        """Something the user should know."""
        _logger.info("%s", text)

    def warning(self, text: str) -> None:
        """Something that may be wrong."""
        _logger.warning("%s", text)

    @contextmanager
    def progress(self, what: str, total: int) -> Iterator[Progress]:
        """A job of `total` units; nothing is shown before the first update."""
        yield Progress()

    def training_starts(self, kind: str) -> None:
        """Steps of this kind ("train" or "sft") follow."""

    def training_step(self, kind: str, step: int, metrics: Mapping[str, Any]) -> None:
        """A training step was done."""
        shown = [f"{name} {metrics[name]:.4g}" for name in ("reward", "accuracy", "loss") if name in metrics]
        _logger.info("step %d: %s", step, ", ".join(shown))

    def sampling_starts(self, trajectories: int) -> None:
        """The trees of a training step are sampled next; they should have this many trajectories."""

    def sampled(self, tokens: int = 0, tool_calls: int = 0, trajectories: int = 0) -> None:
        """So many more tokens, tool calls and ends of trajectories were sampled; called for every token."""

    def tree(self, scored: ScoredTree) -> None:
        """A tree was sampled and scored for a training step."""

    def evaluation(self, result: Any) -> None:
        """An evaluation has ended: `arpo.evaluation.evaluate.Evaluation`."""


SILENT = Reporter()
