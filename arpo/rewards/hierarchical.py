"""The hierarchical reward: format first, then accuracy, then a bonus for using all the tools.

    R = Acc + bonus   if the format is right and Acc > 0
    R = 0             if the format is right and Acc = 0
    R = -1            otherwise

Guarantees: everything is read from the model's own nodes and from the calls and results recorded on tool nodes, never
from the text of a tool result. An answer that could not be judged counts as wrong, and `parts` has the reason:
{"judge.timeout": 1.0}.
Not covered: trajectories spoiled by a broken tool (`Scorer` can mask them).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from arpo.rewards.format import trajectory_format
from arpo.rewards.text import choice_match, exact_match, numbers_equal, token_f1
from arpo.types import Reward, Task, Trajectory

RewardFn = Callable[[Trajectory], Reward]

Accuracy = Callable[[str, Sequence[str], Task], float]
"""The score of a prediction, from 0 to 1, given the gold answers and the task. May raise NoVerdict."""

ACCURACIES: Mapping[str, Accuracy] = {
    "f1": lambda prediction, golds, _: token_f1(prediction, golds),
    "em": lambda prediction, golds, _: exact_match(prediction, golds),
    "number": lambda prediction, golds, _: numbers_equal(prediction, golds),
    "choice": lambda prediction, golds, _: choice_match(prediction, golds),
}
"""The accuracies that need nothing but the texts."""

FAULT_PREFIX = "judge."
UNAVAILABLE = "unavailable"


class NoVerdict(Exception):
    """An answer could not be judged. It counts as wrong, and the reason is counted."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def hierarchical_reward(accuracy: str | Accuracy, bonus: float, bonus_tools: Sequence[str]) -> RewardFn:
    """The reward with this accuracy, a name or a function; the bonus needs every one of `bonus_tools` to be used."""
    if isinstance(accuracy, str) and accuracy not in ACCURACIES:
        raise ValueError(f"unknown accuracy {accuracy!r}; use one of {', '.join(ACCURACIES)}")
    score = ACCURACIES[accuracy] if isinstance(accuracy, str) else accuracy
    required = frozenset(bonus_tools)

    def reward(trajectory: Trajectory) -> Reward:
        task, prediction = trajectory.task, trajectory.answer
        format_right, _ = trajectory_format(trajectory)
        acc, faults = 0.0, {}
        if prediction is not None:
            try:
                acc = score(prediction, task.answers, task)
            except NoVerdict as error:
                faults = {f"{FAULT_PREFIX}{error.reason}": 1.0}
        earned = bonus if format_right and acc > 0 and required and required <= _tools_used(trajectory) else 0.0
        parts = {"format": float(format_right), "accuracy": acc, "correct": float(acc == 1.0), "bonus": earned}
        return Reward(acc + earned if format_right else -1.0, {**parts, **faults})

    return reward


def unjudged(reward: Reward) -> bool:
    """Whether the judge was unavailable, so that the reward says nothing about its trajectory."""
    return f"{FAULT_PREFIX}{UNAVAILABLE}" in reward.parts


def _tools_used(trajectory: Trajectory) -> frozenset[str]:
    """Names of the tools that were called correctly and returned a result without a fault."""
    return frozenset(call.name for call, result in trajectory.tool_calls if call.error is None and result.fault is None)
