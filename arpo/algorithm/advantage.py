"""From the rewards of a step's paths to the advantage that each model node gets on each path. Pure functions.

    A_i  = (R_i - mean R) / std R                      std is left out if `scale` is "none"
           group    mean and std over the kept leaves of the question's tree
           others   the mean over all of them but this one; std as for group
           batch    over the kept leaves of all trees
           tree     group, plus the same over the leaves that share the leaf's first turn
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

from arpo.config.schema import Advantage
from arpo.types import Credit, Kind, Reward, RolloutTree

_SMALLEST_STD = 1e-8


def centred(rewards: Sequence[float], scaled: bool = True) -> tuple[float, ...]:
    """Rewards shifted to mean 0 and, if `scaled`, to standard deviation 1; all zeros if they do not differ."""
    if not rewards:
        return ()
    mean = fsum(rewards) / len(rewards)
    std = sqrt(fsum((reward - mean) ** 2 for reward in rewards) / len(rewards))
    if std < _SMALLEST_STD:
        return (0.0,) * len(rewards)
    return tuple((reward - mean) / (std if scaled else 1.0) for reward in rewards)


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
    trees: Sequence[RolloutTree],
    rewards: Sequence[Sequence[Reward]],
    settings: Advantage,
    keep: Sequence[Sequence[bool]] | None = None,
) -> list[tuple[Credit, ...]]:
    """The credits of all leaves of a step's trees from their rewards; leaves that are not kept take no part."""
    keep = [(True,) * len(tree.leaves) for tree in trees] if keep is None else keep
    totals: list[list[float]] = []
    for tree, group, kept in zip(trees, rewards, keep, strict=True):
        _one_per_leaf(tree, group)
        _one_per_leaf(tree, kept)
        totals.append([reward.total for reward in compress(group, kept)])
    scaled = settings.scale == "std"
    if settings.baseline == "batch":
        every = iter(centred([total for group in totals for total in group], scaled))
        values = [[next(every) for _ in group] for group in totals]
    elif settings.baseline == "leave_one_out":
        factors = [len(group) / max(1, len(group) - 1) for group in totals]  # R - mean of others = this times R - mean
        values = [[f * a for a in centred(group, scaled)] for f, group in zip(factors, totals, strict=True)]
    else:
        values = [list(centred(group, scaled)) for group in totals]
    if settings.baseline == "tree":
        for tree, earned, kept, own in zip(trees, totals, keep, values, strict=True):
            for place, within in enumerate(_within(tree, earned, kept, scaled)):
                own[place] += within
    credits = []
    for tree, kept, own in zip(trees, keep, values, strict=True):
        left = iter(own)
        credits.append(attribute(tree, [next(left) if k else 0.0 for k in kept], settings.attribution, kept))
    return credits


def _within(tree: RolloutTree, rewards: Sequence[float], keep: Sequence[bool], scaled: bool) -> list[float]:
    """What each kept leaf earned beyond those that share its first turn."""
    firsts = [tree.path(leaf.node)[:2] for leaf in compress(tree.leaves, keep)]
    groups: dict[tuple[int, ...], list[float]] = defaultdict(list)
    for first, reward in zip(firsts, rewards, strict=True):
        groups[first].append(reward)
    left = {first: iter(centred(group, scaled)) for first, group in groups.items()}
    return [next(left[first]) for first in firsts]


def _all_or(tree: RolloutTree, keep: Sequence[bool] | None) -> Sequence[bool]:
    if keep is None:
        return (True,) * len(tree.leaves)
    _one_per_leaf(tree, keep)
    return keep


def _one_per_leaf(tree: RolloutTree, values: Sequence[object]) -> None:
    if len(values) != len(tree.leaves):
        raise ValueError(f"{len(values)} values for {len(tree.leaves)} leaves")
