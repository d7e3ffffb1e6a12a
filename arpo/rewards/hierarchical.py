"""The hierarchical reward: a wrong format costs, a right answer pays, and using all the tools on the way pays a bonus.

    R = Acc + bonus   if the format is right and Acc > 0
    R = 0             if the format is right and Acc = 0
    R = -1            otherwise

Promises: everything is read from the model's own nodes and from the calls and results recorded on tool nodes, never
from the text of a tool result.
Does not cover: paths spoiled by a broken tool (leaving them out of training is the caller's decision).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from arpo.rewards.format import model_turns, tree_format
from arpo.rewards.text import answer_text, boxed, exact_match, numbers_equal, token_f1
from arpo.types import Kind, Leaf, Reward, RolloutTree, Task

RewardFn = Callable[[Task, RolloutTree, Leaf], Reward]

_ACCURACIES: dict[str, Callable[[str, Sequence[str]], float]] = {
    "f1": token_f1,
    "em": exact_match,
    "number": numbers_equal,
}


def make_reward(accuracy: str, bonus: float, bonus_tools: Sequence[str]) -> RewardFn:
    """The reward with this accuracy ("f1", "em" or "number"); `bonus` needs every one of `bonus_tools` used."""
    if accuracy not in _ACCURACIES:
        raise ValueError(f"unknown accuracy {accuracy!r}; use one of {', '.join(_ACCURACIES)}")
    score = _ACCURACIES[accuracy]
    wanted = frozenset(bonus_tools)

    def reward(task: Task, tree: RolloutTree, leaf: Leaf) -> Reward:
        right_format, _ = tree_format(tree, leaf)
        prediction = predicted_answer(tree, leaf)
        accurate = 0.0 if prediction is None else score(prediction, task.answers)
        earned = bonus if right_format and accurate > 0 and wanted and wanted <= tools_used(tree, leaf) else 0.0
        total = accurate + earned if right_format else -1.0
        parts = {
            "format": float(right_format),
            "accuracy": accurate,
            "correct": float(accurate == 1.0),
            "bonus": earned,
        }
        return Reward(total, parts)

    return reward


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
