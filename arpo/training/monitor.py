"""Watches a run for signs of a collapse: says so, keeps a checkpoint to go back to, and goes back there if asked to.

Promises: what it does depends on the run's records alone, so a resumed run does the same; a step that is taken back is
set aside, not lost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from arpo.cli.display import console
from arpo.errors import Collapsed
from arpo.training.checkpoints import CheckpointManager
from arpo.training.collapse import CollapseDetector, CollapseWarning, last_healthy, not_finite, protected_checkpoints


class CollapseMonitor:
    """Looks for signs of a collapse in every step's record, as train.on_collapse says."""

    def __init__(self, keeper: CheckpointManager, what: str) -> None:
        self._keeper, self._what = keeper, what
        self._records: list[dict[str, Any]] = []  # the steps done, and the signs that each showed
        self._watcher, self._signs = CollapseDetector(), tuple[CollapseWarning, ...]()
        for record in keeper.log.read_metrics() if what != "ignore" else ():
            self._add(record)
        self._told = {sign.name for sign in self._signs}  # when these steps were done

    def _add(self, record: Mapping[str, Any]) -> dict[str, str]:
        self._signs = self._watcher.add(record)
        shown = {"collapse_warnings": "\n".join(sign.text for sign in self._signs)} if self._signs else {}
        self._records.append({"step": record["step"], **shown})
        return shown

    def seen(self, step: int, values: Mapping[str, float | str]) -> dict[str, float | str]:
        """The values of a step, to be logged, with the signs it shows."""
        if self._what == "ignore":
            return {**values}
        return {**values, **self._add({"step": step, **values})}

    def check(self) -> None:
        """Say what is new, see to it that there is a checkpoint to go back to, or go back there."""
        for sign in self._signs:
            if sign.name not in self._told:
                console.print(f"warning: {sign.text}")
        self._told = {sign.name for sign in self._signs}
        if self._what == "stop" and self._signs:
            raise self._back(self._signs)
        if self._what != "ignore":
            self._keeper.spare = protected_checkpoints(self._records, self._signs, self._keeper.log.checkpoint_steps())

    def diverged(self, step: int) -> None:
        """Go back, if that is wanted, from a step that could not be learnt."""
        if self._what == "stop":
            raise self._back((*self._signs, not_finite("gradient", step)))

    def _back(self, signs: Sequence[CollapseWarning]) -> Collapsed:
        log = self._keeper.log
        step = last_healthy(self._records, signs, log.checkpoint_steps())
        aside = log.archive_after(step)
        log.roll_back(step)
        where = (
            f"to step {step}, the last checkpoint without a sign" if step else "to the start, no checkpoint being older"
        )
        return Collapsed(
            f"the run collapsed, first seen in step {min(sign.since_step for sign in signs)}.\n"
            + "\n".join(sign.text for sign in signs)
            + f"\nIt was taken back {where}; the records and trees of later steps are in {aside}. "
            "Change something (train.lr, loss.kl_coef and loss.entropy_coef may change), then go on with --resume."
        )
