"""From the rewards of one tree's paths to the advantage that each model node gets on each path. Pure functions.

    A_i  = (R_i - mean R) / std R                      over the kept leaves of the tree
    soft = every model node of path i gets A_i for path i
    hard = a model node gets, for every path through it, the mean of these paths' A

Promises: leaves with `keep` False take part in no mean and are marked so; a group whose rewards are all
the same gets zeros. The population standard deviation is used.
Does not cover: how tokens are weighted in the loss (see the batch).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import compress
from math import fsum, sqrt

from arpo.types import Credit, Kind, Reward, RolloutTree

_SMALLEST_STD = 1e-8


def group_advantages(rewards: Sequence[float]) -> tuple[float, ...]:
    """Rewards shifted to mean 0 and scaled to standard deviation 1; all zeros if they do not differ."""
    if not rewards:
        return ()
    mean = fsum(rewards) / len(rewards)
    std = sqrt(fsum((reward - mean) ** 2 for reward in rewards) / len(rewards))
    if std < _SMALLEST_STD:
        return (0.0,) * len(rewards)
    return tuple((reward - mean) / std for reward in rewards)


def attribute(
    tree: RolloutTree, advantages: Sequence[float], attribution: str, keep: Sequence[bool] | None = None
) -> tuple[Credit, ...]:
    """One credit per leaf, in order; `attribution` is "soft" or "hard"; an advantage of a leaf not kept is not read."""
    if attribution not in ("soft", "hard"):
        raise ValueError(f"unknown attribution {attribution!r}; use soft or hard")
    keep = _all_or(tree, keep)
    _one_per_leaf(tree, advantages)
    paths = [[i for i in tree.path(leaf.node) if tree.nodes[i].kind is Kind.MODEL] for leaf in tree.leaves]
    through: dict[int, list[float]] = defaultdict(list)
    for path, advantage in compress(zip(paths, advantages, strict=True), keep):
        for node in path:
            through[node].append(advantage)
    hard = {node: fsum(values) / len(values) for node, values in through.items()}
    return tuple(
        Credit(advantage, {node: hard[node] if attribution == "hard" else advantage for node in path})
        if kept
        else Credit(0.0, {}, kept=False)
        for path, advantage, kept in zip(paths, advantages, keep, strict=True)
    )


def credit(
    tree: RolloutTree, rewards: Sequence[Reward], attribution: str, keep: Sequence[bool] | None = None
) -> tuple[Credit, ...]:
    """The credits of a tree's leaves from their rewards, normalised over the leaves that are kept."""
    keep = _all_or(tree, keep)
    _one_per_leaf(tree, rewards)
    group = iter(group_advantages([reward.total for reward in compress(rewards, keep)]))
    return attribute(tree, [next(group) if kept else 0.0 for kept in keep], attribution, keep)


def _all_or(tree: RolloutTree, keep: Sequence[bool] | None) -> Sequence[bool]:
    if keep is None:
        return (True,) * len(tree.leaves)
    _one_per_leaf(tree, keep)
    return keep


def _one_per_leaf(tree: RolloutTree, values: Sequence[object]) -> None:
    if len(values) != len(tree.leaves):
        raise ValueError(f"{len(values)} values for {len(tree.leaves)} leaves")
