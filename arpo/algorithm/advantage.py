"""Advantages: from the rewards of a step's trajectories to the advantage of each model node. Pure functions.

    A_i  = (R_i - mean R) / std R                      not divided if `scale` is "none"
           group          mean and std over the trajectories of the task
           leave_one_out  mean over the task's other trajectories; std as for group
           batch          mean and std over the trajectories of all tasks of the step
           tree           group, plus the same over the trajectories that share the first turn
    soft = every model node of trajectory i gets A_i
    hard = a model node gets the mean A of all trajectories through it

Guarantees: masked leaves take part in no mean and get no credit; a group with equal rewards gets zeros. The standard
deviation is that of the population.
Not covered: the weight of a token in the loss (see `arpo.algorithm.batch`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import compress
from math import fsum, sqrt

from arpo.config.schema import Advantage
from arpo.types import Credit, Kind, RolloutTree, ScoredTree

MIN_STD = 1e-8


def normalize(rewards: Sequence[float], scale: bool = True) -> tuple[float, ...]:
    """Rewards shifted to mean 0 and, if `scale`, to standard deviation 1; zeros if all are equal."""
    if not rewards:
        return ()
    mean = fsum(rewards) / len(rewards)
    std = sqrt(fsum((reward - mean) ** 2 for reward in rewards) / len(rewards))
    if std < MIN_STD:
        return (0.0,) * len(rewards)
    return tuple((reward - mean) / (std if scale else 1.0) for reward in rewards)


def compute_credits(trees: Sequence[ScoredTree], settings: Advantage) -> list[ScoredTree]:
    """The trees of a step with the credits of their leaves, computed from the rewards of unmasked leaves."""
    groups = [[reward.total for reward in compress(scored.rewards, scored.mask)] for scored in trees]
    advantages = _advantages(trees, groups, settings)
    credited: list[ScoredTree] = []
    for scored, own in zip(trees, advantages, strict=True):
        remaining = iter(own)
        per_leaf = [next(remaining) if used else 0.0 for used in scored.mask]
        credited.append(replace(scored, credits=attribute(scored.tree, per_leaf, settings.attribution, scored.mask)))
    return credited


def attribute(
    tree: RolloutTree, advantages: Sequence[float], attribution: str, mask: Sequence[bool] = ()
) -> tuple[Credit, ...]:
    """One credit per leaf from one advantage per leaf; the credit of a masked leaf is 0 and has no nodes."""
    if attribution not in ("soft", "hard"):
        raise ValueError(f"unknown attribution {attribution!r}; use soft or hard")
    if len(advantages) != len(tree.leaves):
        raise ValueError(f"{len(tree.leaves)} leaves, {len(advantages)} advantages")
    mask = ScoredTree(tree, mask=tuple(mask)).mask
    per_leaf = [advantage if used else 0.0 for advantage, used in zip(advantages, mask, strict=True)]
    model_nodes = [
        [index for index in trajectory.indices if tree.nodes[index].kind is Kind.MODEL] if used else []
        for trajectory, used in zip(tree.trajectories, mask, strict=True)
    ]
    through: dict[int, list[float]] = defaultdict(list)  # model node -> advantages of the trajectories through it
    for indices, advantage in zip(model_nodes, per_leaf, strict=True):
        for index in indices:
            through[index].append(advantage)
    mean = {index: fsum(values) / len(values) for index, values in through.items()}
    return tuple(
        Credit(advantage, {index: mean[index] if attribution == "hard" else advantage for index in indices})
        for indices, advantage in zip(model_nodes, per_leaf, strict=True)
    )


def _advantages(
    trees: Sequence[ScoredTree], groups: Sequence[Sequence[float]], settings: Advantage
) -> list[Sequence[float]]:
    """The advantages of each tree's unmasked leaves, whose rewards are `groups`."""
    scale = settings.scale == "std"
    if settings.baseline == "batch":
        every = iter(normalize([reward for group in groups for reward in group], scale))
        return [[next(every) for _ in group] for group in groups]
    advantages: list[Sequence[float]] = [normalize(group, scale) for group in groups]
    if settings.baseline == "leave_one_out":
        factors = [len(group) / max(1, len(group) - 1) for group in groups]  # R - mean of others = factor (R - mean)
        return [[factor * a for a in own] for factor, own in zip(factors, advantages, strict=True)]
    if settings.baseline == "tree":
        return [
            [across + within for across, within in zip(own, _within_first_turn(scored, group, scale), strict=True)]
            for own, scored, group in zip(advantages, trees, groups, strict=True)
        ]
    return advantages


def _within_first_turn(scored: ScoredTree, rewards: Sequence[float], scale: bool) -> list[float]:
    """The advantage of each unmasked leaf among those that share its first turn."""
    first_turns = [trajectory.indices[:2] for trajectory in compress(scored.tree.trajectories, scored.mask)]
    groups: dict[tuple[int, ...], list[float]] = defaultdict(list)
    for turn, reward in zip(first_turns, rewards, strict=True):
        groups[turn].append(reward)
    remaining = {turn: iter(normalize(group, scale)) for turn, group in groups.items()}
    return [next(remaining[turn]) for turn in first_turns]
