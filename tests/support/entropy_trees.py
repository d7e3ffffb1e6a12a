"""Nodes with given entropies and branching decisions."""

from __future__ import annotations

from dataclasses import replace

from trees import model

from arpo.types import Decision, Node, Reward, Task

K = 2


WHY_NOT = "P is not above the threshold"


def wrote(parent: int, *entropies: float) -> Node:
    """A turn with these entropies."""
    return replace(model(parent, range(len(entropies))), entropies=entropies)


def looked(node: Node, delta: float, branches: int = 0, probed: int = K, reason: str = WHY_NOT) -> Node:
    """A tool node with a decision; H is 10 dH above 1."""
    reason = "branched" if branches else reason
    return replace(node, decision=Decision(1.0, 1.0 + 10 * delta, delta, 0.5, branches, reason, probed))


def earned(*totals: float) -> tuple[Reward, ...]:
    return tuple(Reward(total, {"correct": 0.0, "format": 1.0}) for total in totals)


def about(name: str) -> Task:
    return Task(name, f"What is {name}?", ("x",))
