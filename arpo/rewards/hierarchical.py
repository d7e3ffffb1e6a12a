"""The hierarchical reward: format first, then accuracy, then a bonus for using all the tools.

    R = Acc + bonus   if the format is right and Acc > 0
    R = 0             if the format is right and Acc = 0
    R = -1            otherwise

Without a check of the format, R = Acc + bonus.

Guarantees: everything is read from the model's own nodes and from the calls and results recorded on tool nodes, never
from the text of a tool result. An answer that could not be judged counts as wrong, and `parts` has the reason:
{"judge.timeout": 1.0}. A wrong format has its reason there, too, {"format.no_answer": 1.0}, and in words in `note`.
Not covered: trajectories spoiled by a broken tool (`Scorer` can mask them).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from arpo.errors import ArpoError
from arpo.rewards.format import WRONG_FORMAT, FormatCheck, check_format
from arpo.rewards.text import choice_match, exact_match, numbers_equal, token_f1
from arpo.types import Reward, Task, Trajectory

RewardFn = Callable[..., Reward]
"""The reward of a (trajectory), or of a (trajectory, environment) with the final state; see `wants_environment`."""

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


def hierarchical_reward(
    accuracy: str | Accuracy, bonus: float, bonus_tools: Sequence[str], check: FormatCheck | None = check_format
) -> RewardFn:
    """The reward with this accuracy, a name or a function; the bonus needs every one of `bonus_tools` to be used.

    `check` looks at the format, which is not part of the reward if it is None.
    """
    if isinstance(accuracy, str) and accuracy not in ACCURACIES:
        raise ValueError(f"unknown accuracy {accuracy!r}; use one of {', '.join(ACCURACIES)}")
    score = ACCURACIES[accuracy] if isinstance(accuracy, str) else accuracy
    required = frozenset(bonus_tools)

    def reward(trajectory: Trajectory) -> Reward:
        task, prediction = trajectory.task, trajectory.answer
        if not task.answers:
            raise ArpoError(
                f"{task.id}: has no answer to compare with; name its column with data.answer, or a reward of your own "
                "with reward.function"
            )
        fault = None if check is None else check(trajectory)
        acc, faults = 0.0, {}
        if prediction is not None:
            try:
                acc = score(prediction, task.answers, task)
            except NoVerdict as error:
                faults = {f"{FAULT_PREFIX}{error.reason}": 1.0}
        earned = bonus if fault is None and acc > 0 and required and required <= _tools_used(trajectory) else 0.0
        form = {} if check is None else {"format": float(fault is None)}
        parts = {**form, "accuracy": acc, "correct": float(acc == 1.0), "bonus": earned, **faults}
        if fault is None:
            return Reward(acc + earned, parts)
        rule, words = fault
        return Reward(-1.0, {**parts, rule.part: 1.0}, f"{WRONG_FORMAT}{words}")

    return reward


def unjudged(reward: Reward) -> bool:
    """Whether the judge was unavailable, so that the reward says nothing about its trajectory."""
    return f"{FAULT_PREFIX}{UNAVAILABLE}" in reward.parts


def _tools_used(trajectory: Trajectory) -> frozenset[str]:
    """Names of the tools that were called correctly and returned a result without a fault."""
    return frozenset(call.name for call, result in trajectory.tool_calls if call.error is None and result.fault is None)
