"""A small task with a tool, as Python objects and as the file that settings name; and a model that solves it."""

from __future__ import annotations

from typing import Any

from arpo.tools.base import ToolError, tool
from arpo.types import Trajectory

PRICES = {"apple": 40, "pear": 55}
ROWS = [
    {"question": "What do two pears cost?", "answer": 110, "fruit": "pear"},
    {"question": "What do two apples cost?", "answer": 80, "fruit": "apple"},
    {"question": "What do three apples cost?", "answer": 120, "fruit": "apple"},
]
SMALL: dict[str, Any] = {
    "rollout": {"num_trajectories": 4, "max_tokens": 40, "max_tool_calls": 2},
    "train": {"batch_size": 2, "lr": 1e-3},
    "eval": {"questions": 2},
}


@tool(quick=True)
def price(item: str) -> str:
    """Price of one piece of fruit, in cents."""
    if item not in PRICES:
        raise ToolError("there is no such fruit")
    return str(PRICES[item])


def even_tokens(trajectory: Trajectory) -> float:
    """A reward that any model can earn: the share of even token ids among those it sampled."""
    tokens = [token for node in trajectory.model_nodes for token in node.tokens]
    return sum(token % 2 == 0 for token in tokens) / len(tokens)


def solve(prefix: str, seed: int) -> tuple[str, list[float]]:
    """A scripted model: it looks up a price; afterwards it knows the answer, and is right with every second seed."""
    if "<result>" not in prefix:
        return "<think>look</think><price>pear</price>", [0.1]
    answer = "110" if seed % 2 else "55"
    return f"<think>so</think><answer>\\boxed{{{answer}}}</answer>", [2.0]
