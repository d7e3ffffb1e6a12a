"""What predicts a useful branch point, on hand-made trees."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt

import pytest
from entropy_trees import K, about, earned, looked, wrote
from trees import prompt, tool, tree

from arpo.config.algorithm import Branching
from arpo.studies.entropy.study import TurnStart, study
from arpo.studies.signal.branch_points import BranchPoint, branch_points, predictor_stats
from arpo.types import Fault, Reward, ScoredTree


def scored(delta: float, *rewards: float, first: float = 0.7) -> ScoredTree:
    """One branch point with two continuations, and two trajectories elsewhere.

    The probed continuation, with the entropies of the decision, stands second: a branch may end its turn first.
    """
    height = 1 + 10 * delta
    nodes = [
        prompt(),
        wrote(0, 1.0, 1.0),
        looked(tool(1), delta, 1),
        wrote(2, first, 5.0),
        wrote(2, first, 2 * height - first, 9.0),
        wrote(0, 1.0),
        wrote(0, 1.0),
    ]
    return ScoredTree(tree(nodes, [3, 4, 5, 6], about("x")), earned(*rewards))


def test_a_branch_point_and_what_was_known_of_it() -> None:
    (point,) = branch_points(scored(0.1, 0, 1, 0, 0.5))
    assert point.informative
    assert point.predictors == {"dH": 0.1, "depth": 1, "first-token entropy": 0.7, "reward gap": 0.75}  # |1 - 0.25|
    (equal,) = branch_points(scored(0.1, 1, 1, 0, 0.5))
    assert not equal.informative


def test_depth_counts_the_calls_above_and_nested_trunks_their_mean() -> None:
    nodes = [
        prompt(),
        wrote(0, 1.0),
        looked(tool(1), 0.0, 1),
        wrote(2, 1.0, 1.0),  # the trunk of the first branch point, branched from again
        looked(tool(3), 0.3, 1),
        wrote(4, 4.0, 4.0),
        wrote(4, 2.0, 2.0),
        wrote(2, 3.0, 3.0),
        looked(tool(7), 0.5),  # not a branch point
        wrote(8, 1.0),
    ]
    points = branch_points(ScoredTree(tree(nodes, [5, 6, 9]), earned(1, 0, 0.5)))
    assert points == [
        BranchPoint(False, {"dH": 0.0, "depth": 1, "first-token entropy": 1.0}),  # 0.5 on both sides; none elsewhere
        BranchPoint(True, {"dH": 0.3, "depth": 2, "first-token entropy": 4.0, "reward gap": 0.5}),
    ]


def test_spoiled_trajectories_do_not_count() -> None:
    whole = scored(0.1, 0, 1, 0, 0.5)
    unjudged = replace(whole, rewards=(*whole.rewards[:2], Reward(9.0, {"judge.unavailable": 1.0}), whole.rewards[3]))
    (point,) = branch_points(unjudged)
    assert point.predictors["reward gap"] == 0.5
    nodes = list(whole.tree.nodes)
    nodes[2] = replace(tool(1, fault=Fault.INFRA), decision=nodes[2].decision)
    assert branch_points(replace(whole, tree=replace(whole.tree, nodes=tuple(nodes)))) == []


def test_aucs_by_hand_and_as_in_the_entropy_study() -> None:
    trees = [
        scored(0.3, 0, 1, 0, 0, first=0.1),  # informative; gap 1
        scored(0.1, 1, 0, 0, 0, first=0.2),  # informative; gap 0
        scored(0.2, 1, 1, 1, 1, first=0.3),  # gap 0
        scored(0.0, 0, 0, 1, 1, first=0.1),  # gap 1
        scored(-0.1, 1, 1, 0, 1, first=0.3),  # gap 0.5
    ]
    found = predictor_stats(trees)
    assert (found.compared, found.informative) == (5, 2)
    # dH: 0.3 is above all three, 0.1 above two; entropies: 0.1 ties with one, 0.2 is above one; gaps: 1 > 0, 0.5, = 1
    assert found.auc == pytest.approx(
        {"dH": 5 / 6, "depth": 0.5, "first-token entropy": 1.5 / 6, "reward gap": (2.5 + 0.5) / 6}
    )
    assert found.chance_error == pytest.approx(sqrt(6 / 72))
    other = study(trees, Branching(probe_tokens=K), tokens=K).by_tool[TurnStart("tool", "search")]
    assert (other.compared, other.informative, other.auc) == (5, 2, found.auc["dH"])


def test_without_points_of_both_kinds_there_is_no_auc() -> None:
    none = predictor_stats([])
    assert (none.compared, none.chance_error, set(none.auc.values())) == (0, None, {None})
    one = predictor_stats([scored(0.3, 0, 1, 0, 0)])
    assert (one.compared, one.informative, one.chance_error, one.auc["dH"]) == (1, 1, None, None)
