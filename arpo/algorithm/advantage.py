"""Advantages: from the rewards of a step's trajectories to the advantage of each model node. Pure functions.

    A_i  = (R_i - mean R) / std R
           group          mean and std over the trajectories of the task
           leave_one_out  mean over the task's other trajectories; std as for group
           batch          mean and std over the trajectories of all tasks of the step
           tree           group, plus the same over the trajectories that share the first turn
           `scale`        "none": not divided; "batch": divided by the std of R_i - mean R over the whole step

What a model node n gets on a trajectory i through it:

    soft          A_i
    hard          the mean of A over the trajectories through n
    prefix_value  A_i + V(n) - V(parent of n), with V the mean of A over the trajectories through a node (TEMPO)
    turn_value    Q(n): A_i at a leaf, and at any other node the mean of Q over its children (AT2PO)
    same_state    A_i + step_weight * S(n): the discounted return of n, normalized over the task's turns that follow the
                  same text (GiGPO)
    unbiased      R_i - b(n), with weight w_i for the trajectory: each branch point divides its weight equally among its
                  children. b(n) is the weighted mean reward of the leaves that are not below n, 0 if there are none

Guarantees: masked leaves take part in no mean and get no credit; a group with equal rewards gets zeros, except under
same_state, where the returns of turns further from the end are smaller, and under unbiased at nodes that all leaves are
below. The standard deviation is that of the population.
Not covered: the weight of a token in the loss (see `arpo.algorithm.batch`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import compress
from math import fsum, sqrt

from arpo.config.algorithm import Advantage
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
        if settings.attribution == "unbiased":
            credits = _unbiased(scored)
        elif settings.attribution == "same_state":
            credits = _same_state(scored, per_leaf, settings)
        else:
            credits = attribute(scored.tree, per_leaf, settings.attribution, scored.mask)
        credited.append(replace(scored, credits=credits))
    return credited


def attribute(
    tree: RolloutTree, advantages: Sequence[float], attribution: str, mask: Sequence[bool] = ()
) -> tuple[Credit, ...]:
    """One credit per leaf from one advantage per leaf; the credit of a masked leaf is 0 and has no nodes."""
    if attribution not in ("soft", "hard", "prefix_value", "turn_value"):
        raise ValueError(f"unknown attribution {attribution!r}; use soft, hard, prefix_value or turn_value")
    if len(advantages) != len(tree.leaves):
        raise ValueError(f"{len(tree.leaves)} leaves, {len(advantages)} advantages")
    mask = ScoredTree(tree, mask=tuple(mask)).mask
    per_leaf = [advantage if used else 0.0 for advantage, used in zip(advantages, mask, strict=True)]
    mean = {index: _mean(per_leaf, leaves) for index, leaves in _leaves_below(tree, mask).items()}
    value = _backed_up(tree, per_leaf, mask)
    rules: dict[str, Callable[[int, float], float]] = {
        "soft": lambda index, advantage: advantage,
        "hard": lambda index, advantage: mean[index],
        "prefix_value": lambda index, advantage: advantage + mean[index] - mean[_parent(tree, index)],
        "turn_value": lambda index, advantage: value[index],
    }
    rule = rules[attribution]
    return tuple(
        Credit(advantage, {index: rule(index, advantage) for index in indices})
        for indices, advantage in zip(_model_nodes(tree, mask), per_leaf, strict=True)
    )


def _same_state(scored: ScoredTree, advantages: Sequence[float], settings: Advantage) -> tuple[Credit, ...]:
    """GiGPO: each turn's advantage, plus that of its discounted return among the turns that follow the same text.

    A turn that several trajectories share counts once in its group, with the mean of their returns.
    """
    tree, model_nodes = scored.tree, _model_nodes(scored.tree, scored.mask)
    returns: dict[int, list[float]] = defaultdict(list)
    for indices, reward in zip(model_nodes, scored.rewards, strict=True):
        for turns_left, index in enumerate(reversed(indices)):
            returns[index].append(settings.gamma**turns_left * reward.total)
    groups: dict[str, list[int]] = defaultdict(list)  # text before the turn -> turns
    for index in returns:
        groups[tree.nodes[_parent(tree, index)].text].append(index)
    step: dict[int, float] = {}
    for group in groups.values():
        means = [fsum(returns[index]) / len(returns[index]) for index in group]
        step.update(zip(group, normalize(means, settings.scale != "none"), strict=True))
    return tuple(
        Credit(advantage, {index: advantage + settings.step_weight * step[index] for index in indices})
        for indices, advantage in zip(model_nodes, advantages, strict=True)
    )


def _unbiased(scored: ScoredTree) -> tuple[Credit, ...]:
    """Each leaf's reward minus the weighted mean reward of leaves that are not below the node; see docs/method.md."""
    tree, rewards = scored.tree, [reward.total for reward in scored.rewards]
    weights = _sampling_weights(tree, scored.mask)
    below = _leaves_below(tree, scored.mask)

    shift = next(compress(rewards, scored.mask), 0.0)  # so that equal rewards cancel without a rest

    def baseline(leaves: Sequence[int]) -> float:
        """The weighted mean reward of the leaves that are not among these; 0 if there are none."""
        others = sorted(weights.keys() - set(leaves))
        total = fsum(weights[leaf] for leaf in others)
        return shift + fsum(weights[leaf] * (rewards[leaf] - shift) for leaf in others) / total if others else 0.0

    model_nodes = _model_nodes(tree, scored.mask)
    baselines = {index: baseline(below[index]) for index in {i for indices in model_nodes for i in indices}}
    return tuple(
        Credit(
            rewards[leaf] - baseline([leaf]),
            {index: rewards[leaf] - baselines[index] for index in indices},
            weights[leaf],
        )
        if leaf in weights
        else Credit(0.0, {})
        for leaf, indices in enumerate(model_nodes)
    )


def _model_nodes(tree: RolloutTree, mask: Sequence[bool]) -> list[list[int]]:
    """The model nodes of each trajectory, in order; none if it is masked."""
    return [
        [index for index in trajectory.indices if tree.nodes[index].kind is Kind.MODEL] if used else []
        for trajectory, used in zip(tree.trajectories, mask, strict=True)
    ]


def _leaves_below(tree: RolloutTree, mask: Sequence[bool]) -> dict[int, list[int]]:
    """The unmasked leaves at or below each node that has any."""
    below: dict[int, list[int]] = defaultdict(list)
    for leaf in compress(range(len(mask)), mask):
        for index in tree.prefix(tree.leaves[leaf].node):
            below[index].append(leaf)
    return below


def _backed_up(tree: RolloutTree, advantages: Sequence[float], mask: Sequence[bool]) -> dict[int, float]:
    """The value of each node with unmasked leaves: the mean over its children, where a leaf's is its advantage."""
    children: dict[int, list[float]] = defaultdict(list)
    for leaf in compress(range(len(mask)), mask):
        children[tree.leaves[leaf].node].append(advantages[leaf])
    values: dict[int, float] = {}
    for index in reversed(range(len(tree.nodes))):
        if children[index]:
            values[index] = fsum(children[index]) / len(children[index])
            if index:
                children[_parent(tree, index)].append(values[index])
    return values


def _sampling_weights(tree: RolloutTree, mask: Sequence[bool]) -> dict[int, float]:
    """The weight of each unmasked leaf, together 1: every node divides its own equally among its children.

    Leaves that end at a node count among its children; a child without unmasked leaves does not.
    """
    below = _leaves_below(tree, mask)
    ends = [leaf.node for leaf in compress(tree.leaves, mask)]
    children = Counter(ends) + Counter(_parent(tree, index) for index in below if index)
    weight = {0: 1.0}
    for index in sorted(below.keys() - {0}):
        weight[index] = weight[_parent(tree, index)] / children[_parent(tree, index)]
    return {leaf: weight[end] / children[end] for leaf, end in zip(compress(range(len(mask)), mask), ends, strict=True)}


def _parent(tree: RolloutTree, index: int) -> int:
    parent = tree.nodes[index].parent
    assert parent is not None, "the prompt has no parent"
    return parent


def _mean(values: Sequence[float], chosen: Sequence[int]) -> float:
    return fsum(values[index] for index in chosen) / len(chosen)


def _advantages(
    trees: Sequence[ScoredTree], groups: Sequence[Sequence[float]], settings: Advantage
) -> list[Sequence[float]]:
    """The advantages of each tree's unmasked leaves, whose rewards are `groups`."""
    if settings.scale == "batch":
        unscaled = _advantages(trees, groups, settings.model_copy(update={"scale": "none"}))
        every = iter(_divided_by_std([advantage for own in unscaled for advantage in own]))
        return [[next(every) for _ in own] for own in unscaled]
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


def _divided_by_std(values: Sequence[float]) -> list[float]:
    """The values divided by their standard deviation; zeros if all are equal."""
    mean = fsum(values) / max(1, len(values))
    std = sqrt(fsum((value - mean) ** 2 for value in values) / max(1, len(values)))
    return [value / std if std >= MIN_STD else 0.0 for value in values]


def _within_first_turn(scored: ScoredTree, rewards: Sequence[float], scale: bool) -> list[float]:
    """The advantage of each unmasked leaf among those that share its first turn."""
    first_turns = [trajectory.indices[:2] for trajectory in compress(scored.tree.trajectories, scored.mask)]
    groups: dict[tuple[int, ...], list[float]] = defaultdict(list)
    for turn, reward in zip(first_turns, rewards, strict=True):
        groups[turn].append(reward)
    remaining = {turn: iter(normalize(group, scale)) for turn, group in groups.items()}
    return [next(remaining[turn]) for turn in first_turns]
