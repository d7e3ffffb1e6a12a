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

from arpo.rewards.format import model_turns, tree_format
from arpo.rewards.text import answer_text, boxed, choice_match, exact_match, numbers_equal, token_f1
from arpo.types import Kind, Leaf, Reward, RolloutTree, Task

RewardFn = Callable[[Task, RolloutTree, Leaf], Reward]

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

    def reward(task: Task, tree: RolloutTree, leaf: Leaf) -> Reward:
        right_format, _ = tree_format(tree, leaf)
        prediction = predicted_answer(tree, leaf)
        accurate, faults = 0.0, {}
        if prediction is not None:
            try:
                accurate = score(prediction, task.answers, task)
            except NoVerdict as none:
                faults = {f"{FAULT_PREFIX}{none.reason}": 1.0}
        earned = bonus if right_format and accurate > 0 and wanted and wanted <= tools_used(tree, leaf) else 0.0
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
    """Whether the judge was unavailable, so that this reward says nothing of its path."""
    return f"{FAULT_PREFIX}{UNAVAILABLE}" in reward.parts


def predicted_answer(tree: RolloutTree, leaf: Leaf) -> str | None:
    """The boxed content of the answer in the model's last turn; None if the path does not end in one."""
    if tree.nodes[leaf.node].kind is not Kind.MODEL:
        return None
    answer = answer_text(model_turns(tree, leaf)[-1])
    return None if answer is None else boxed(answer)


def tools_used(tree: RolloutTree, leaf: Leaf) -> frozenset[str]:
    """Names of the tools that were called properly on this path and gave a result without a fault."""
    nodes = (tree.nodes[index] for index in tree.path(leaf.node))
    return frozenset(
        node.call.name
        for node in nodes
        if node.call is not None and node.call.error is None and node.result is not None and node.result.fault is None
    )
