"""The hierarchical reward: a wrong format costs, a right answer pays, and using all the tools on the way pays a bonus.

    R = Acc + bonus   if the format is right and Acc > 0
    R = 0             if the format is right and Acc = 0
    R = -1            otherwise

Promises: everything is read from the model's own nodes and from the calls and results recorded on tool nodes, never
from the text of a tool result.
An answer that could not be judged counts as wrong, and `parts` has the reason: {"judge.timeout": 1.0}.
Does not cover: paths spoiled by a broken tool (leaving them out of training is the caller's decision).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from arpo.rewards.format import trajectory_format
from arpo.rewards.text import choice_match, exact_match, numbers_equal, token_f1
from arpo.types import Reward, Task, Trajectory

RewardFn = Callable[[Trajectory], Reward]

Accuracy = Callable[[str, Sequence[str], Task], float]
"""How right a prediction is, from 0 to 1, given the gold answers and the task. May raise NoVerdict."""

ACCURACIES: Mapping[str, Accuracy] = {
    "f1": lambda prediction, golds, _: token_f1(prediction, golds),
    "em": lambda prediction, golds, _: exact_match(prediction, golds),
    "number": lambda prediction, golds, _: numbers_equal(prediction, golds),
    "choice": lambda prediction, golds, _: choice_match(prediction, golds),
}
"""Those that need nothing but the texts."""

FAULT_PREFIX = "judge."
UNAVAILABLE = "unavailable"


class NoVerdict(Exception):
    """An answer could not be judged, for this reason. It counts as wrong, and the reason is counted."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def build_reward(accuracy: str | Accuracy, bonus: float, bonus_tools: Sequence[str]) -> RewardFn:
    """The reward with this accuracy, a name or a function; `bonus` needs every one of `bonus_tools` used."""
    if isinstance(accuracy, str) and accuracy not in ACCURACIES:
        raise ValueError(f"unknown accuracy {accuracy!r}; use one of {', '.join(ACCURACIES)}")
    score = ACCURACIES[accuracy] if isinstance(accuracy, str) else accuracy
    wanted = frozenset(bonus_tools)

    def reward(trajectory: Trajectory) -> Reward:
        task = trajectory.task
        right_format, _ = trajectory_format(trajectory)
        prediction = trajectory.answer
        accurate, faults = 0.0, {}
        if prediction is not None:
            try:
                accurate = score(prediction, task.answers, task)
            except NoVerdict as none:
                faults = {f"{FAULT_PREFIX}{none.reason}": 1.0}
        earned = bonus if right_format and accurate > 0 and wanted and wanted <= tools_used(trajectory) else 0.0
        total = accurate + earned if right_format else -1.0
        parts = {
            "format": float(right_format),
            "accuracy": accurate,
            "correct": float(accurate == 1.0),
            "bonus": earned,
            **faults,
        }
        return Reward(total, parts)

    return reward


def unjudged(reward: Reward) -> bool:
    """Whether the judge was unavailable, so that this reward says nothing about its trajectory."""
    return f"{FAULT_PREFIX}{UNAVAILABLE}" in reward.parts


def tools_used(trajectory: Trajectory) -> frozenset[str]:
    """Names of the tools that were called correctly on this trajectory and returned a result without a fault."""
    return frozenset(call.name for call, result in trajectory.tool_calls if call.error is None and result.fault is None)
