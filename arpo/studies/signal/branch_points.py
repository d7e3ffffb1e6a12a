"""What predicts a useful branch point: the AUC of several predictors for "a sibling earns something else".

A branch point is a tool result where branches were opened. It is informative if its continuations have different mean
rewards, as in `arpo.studies.entropy`. The predictors are known before the branches are sampled:

    dH                    the entropy rise, as recorded with the decision
    depth                 the number of tool calls up to the branch point
    first-token entropy   of the trunk's first token after the result
    reward gap            |mean reward of the trunk - mean reward of the trajectories elsewhere in the tree|

The trunk is the continuation that was probed: of all continuations, that whose first tokens have the mean entropy H of
the decision, or come closest to it. Trajectories that a broken tool or judge spoiled do not count.
Not covered: a trunk that was branched from again further down; its reward is the mean over all trajectories through it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import sqrt
from statistics import fmean

from arpo.rewards import unjudged
from arpo.studies.entropy.study import ROUNDING, auc, rewards_by_continuation
from arpo.types import Decision, Kind, RolloutTree, ScoredTree

PREDICTORS = ("dH", "depth", "first-token entropy", "reward gap")


@dataclass(frozen=True, slots=True)
class BranchPoint:
    """A branch point with two or more continuations; `predictors` lacks those that are not known."""

    informative: bool
    predictors: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class PredictorStats:
    """The AUC of each predictor over `compared` branch points, of which `informative` are informative.

    An AUC is None without points of both kinds. `chance_error` is the standard error of an AUC of 0.5, which is that
    of a predictor that knows nothing.
    """

    compared: int
    informative: int
    auc: Mapping[str, float | None]
    chance_error: float | None


def predictor_stats(trees: Iterable[ScoredTree]) -> PredictorStats:
    """The AUC of every predictor over all branch points of the trees."""
    points = [point for scored in trees for point in branch_points(scored)]
    positives, negatives = ([point for point in points if point.informative is kind] for kind in (True, False))
    found: dict[str, float | None] = {}
    for name in PREDICTORS:
        known = ([p.predictors[name] for p in kind if name in p.predictors] for kind in (positives, negatives))
        found[name] = auc(*known)
    p, n = len(positives), len(negatives)
    return PredictorStats(len(points), p, found, sqrt((p + n + 1) / (12 * p * n)) if p and n else None)


def branch_points(scored: ScoredTree) -> list[BranchPoint]:
    """The branch points of a tree whose continuations can be compared."""
    tree, classes = scored.tree, rewards_by_continuation(scored)
    earned = [
        (frozenset(trajectory.indices), reward.total)
        for trajectory, reward in zip(tree.trajectories, scored.rewards, strict=True)
        if not trajectory.infra_fault and not unjudged(reward)
    ]
    points: list[BranchPoint] = []
    for index, node in enumerate(tree.nodes):
        decision = node.decision
        if decision is None or not decision.branches or len(classes.get(index, ())) < 2:
            continue
        means = [fmean(rewards) for rewards in classes[index]]
        depth = sum(tree.nodes[i].kind is Kind.TOOL for i in tree.prefix(index))
        predictors = {"dH": decision.delta, "depth": float(depth)}
        trunk = _trunk(tree, index, decision)
        if trunk is not None:
            predictors["first-token entropy"] = tree.nodes[trunk].entropies[0]
            own = [reward for indices, reward in earned if trunk in indices]
            elsewhere = [reward for indices, reward in earned if index not in indices]
            if own and elsewhere:
                predictors["reward gap"] = abs(fmean(own) - fmean(elsewhere))
        points.append(BranchPoint(max(means) - min(means) > ROUNDING, predictors))
    return points


def _trunk(tree: RolloutTree, index: int, decision: Decision) -> int | None:
    """The turn after a result that was probed there; None if no turn follows."""
    turns = [i for i, node in enumerate(tree.nodes) if node.parent == index and node.entropies]
    probed = max(1, decision.probed_tokens)
    return min(turns, key=lambda i: abs(fmean(tree.nodes[i].entropies[:probed]) - decision.entropy), default=None)
