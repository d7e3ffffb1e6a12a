"""Advantages: values a person can check, and properties of the normalisation and the attribution."""

from __future__ import annotations

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trees import model, nested_branches, prompt, tree, two_branches

from arpo.algorithm.advantage import attribute, compute_credits, normalize
from arpo.config.schema import Advantage
from arpo.types import Credit, Kind, Reward, RolloutTree, ScoredTree

SCORES = st.lists(st.sampled_from([-1.0, 0.0, 0.3, 1.0, 1.1]), min_size=5, max_size=5)


def credit(
    trees: list[RolloutTree], rewards: list[list[Reward]], how: Advantage, masks: list[list[bool]] | None = None
) -> list[tuple[Credit, ...]]:
    """The credits of trees with these rewards."""
    masks = masks or [[True] * len(tree.leaves) for tree in trees]
    scored = [ScoredTree(t, tuple(r), mask=tuple(m)) for t, r, m in zip(trees, rewards, masks, strict=True)]
    return [one.credits for one in compute_credits(scored, how)]


def test_normalize_by_hand() -> None:
    assert normalize([1.0, 0.0, -1.0, 0.0]) == pytest.approx((math.sqrt(2), 0.0, -math.sqrt(2), 0.0))
    assert normalize([3.0, 1.0]) == (1.0, -1.0)


def test_no_difference_no_advantage() -> None:
    assert normalize([0.1] * 3) == (0.0, 0.0, 0.0)
    assert normalize([0.5, 0.5 + 1e-9]) == (0.0, 0.0)
    assert normalize([2.0]) == (0.0,)
    assert normalize([]) == ()


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=20), st.floats(-5, 5), st.floats(0.1, 5))
def test_normalized_rewards_have_mean_0_and_std_1_and_ignore_shift_and_scale(
    rewards: list[float], shift: float, scale: float
) -> None:
    rewards = [round(reward, 3) for reward in rewards]
    values = normalize(rewards)
    if len(set(rewards)) == 1:
        assert values == (0.0,) * len(rewards)
        return
    assert sum(values) == pytest.approx(0, abs=1e-6)
    assert sum(value**2 for value in values) / len(values) == pytest.approx(1)
    assert normalize([shift + scale * reward for reward in rewards]) == pytest.approx(values, abs=1e-6)


def test_soft_and_hard_on_two_branches() -> None:
    rollout, advantages = two_branches(), [2.0, -1.0, -1.0]
    assert attribute(rollout, advantages, "soft") == (
        Credit(2.0, {1: 2.0, 3: 2.0}),
        Credit(-1.0, {1: -1.0, 4: -1.0}),
        Credit(-1.0, {5: -1.0}),
    )
    assert attribute(rollout, advantages, "hard") == (
        Credit(2.0, {1: 0.5, 3: 2.0}),
        Credit(-1.0, {1: 0.5, 4: -1.0}),
        Credit(-1.0, {5: -1.0}),
    )


def test_hard_on_two_levels() -> None:
    credits = attribute(nested_branches(), [4.0, 2.0, 0.0, -2.0, -4.0], "hard")
    assert [dict(one.by_node) for one in credits] == [
        {1: 1.0, 3: 2.0, 5: 4.0},
        {1: 1.0, 3: 2.0, 6: 2.0},
        {1: 1.0, 3: 2.0, 7: 0.0},
        {1: 1.0, 8: -2.0},
        {9: -4.0},
    ]


HARD, SOFT = Advantage(attribution="hard"), Advantage()


def test_leaves_left_out_take_no_part() -> None:
    rollout, keep = two_branches(), [True, False, True]
    rewards = [Reward(1.0), Reward(-100.0), Reward(0.0)]
    assert credit([rollout], [rewards], HARD, [keep])[0] == (
        Credit(1.0, {1: 1.0, 3: 1.0}),
        Credit(0.0, {}),
        Credit(-1.0, {5: -1.0}),
    )
    assert attribute(rollout, [1.0, math.nan, -1.0], "hard", keep) == credit([rollout], [rewards], HARD, [keep])[0]
    assert credit([rollout], [rewards], SOFT, [[False] * 3])[0] == (Credit(0.0, {}),) * 3


def test_two_leaves_at_one_node_both_count() -> None:
    rollout = tree([prompt(), model(0, [3])], [1, 1])
    assert attribute(rollout, [3.0, 1.0], "hard") == (Credit(3.0, {1: 2.0}), Credit(1.0, {1: 2.0}))


def test_mistakes_are_named() -> None:
    rollout = two_branches()
    with pytest.raises(ValueError, match="unknown attribution"):
        attribute(rollout, [0.0] * 3, "medium")
    with pytest.raises(ValueError, match="3 leaves, 2 advantages"):
        attribute(rollout, [0.0] * 2, "soft")
    with pytest.raises(ValueError, match="3 leaves, 4 mask"):
        credit([rollout], [[Reward(0.0)] * 3], SOFT, [[True] * 4])
    with pytest.raises(ValueError, match="3 leaves, 1 rewards"):
        credit([rollout], [[Reward(0.0)]], SOFT)


@given(SCORES, st.lists(st.booleans(), min_size=5, max_size=5))
def test_hard_is_the_mean_of_soft_over_the_trajectories_through_a_node(scores: list[float], keep: list[bool]) -> None:
    rollout, rewards = nested_branches(), [Reward(score) for score in scores]
    soft, hard = (credit([rollout], [rewards], how, [keep])[0] for how in (SOFT, HARD))
    for index, node in enumerate(rollout.nodes):
        through = [i for i, leaf in enumerate(rollout.leaves) if keep[i] and index in rollout.prefix(leaf.node)]
        if node.kind is not Kind.MODEL:
            assert all(index not in one.by_node for one in (*soft, *hard))
            continue
        for leaf in through:
            assert soft[leaf].by_node[index] == soft[leaf].advantage
            mean = sum(soft[other].advantage for other in through) / len(through)
            assert hard[leaf].by_node[index] == pytest.approx(mean, abs=1e-12)


def slow_advantage(
    how: Advantage, number: int, leaf: int, totals: list[list[float]], keep: list[list[bool]], firsts: list[list[int]]
) -> float:
    """One trajectory's advantage, straight from its definition."""

    def against(others: list[float], spread: list[float]) -> float:
        std = statistics.pstdev(spread)
        if std < 1e-8:
            return 0.0
        return (totals[number][leaf] - statistics.fmean(others)) / (std if how.scale == "std" else 1.0)

    group = [r for r, kept in zip(totals[number], keep[number], strict=True) if kept]
    if how.baseline == "batch":
        every = [r for g, ks in zip(totals, keep, strict=True) for r, kept in zip(g, ks, strict=True) if kept]
        return against(every, every)
    if how.baseline == "leave_one_out":
        rest = [r for i, r in enumerate(totals[number]) if keep[number][i] and i != leaf]
        return against(rest, group) if rest else 0.0
    if how.baseline == "tree":
        same = [
            r for i, r in enumerate(totals[number]) if keep[number][i] and firsts[number][i] == firsts[number][leaf]
        ]
        return against(group, group) + against(same, same)
    return against(group, group)


@given(
    st.lists(st.tuples(SCORES, st.lists(st.booleans(), min_size=5, max_size=5)), min_size=1, max_size=3),
    st.sampled_from(["group", "leave_one_out", "batch", "tree"]),
    st.sampled_from(["std", "none"]),
)
def test_every_baseline_is_what_its_definition_says(
    groups: list[tuple[list[float], list[bool]]], baseline: str, scale: str
) -> None:
    how = Advantage.model_validate({"baseline": baseline, "scale": scale})
    totals, keep = [list(scores) for scores, _ in groups], [list(kept) for _, kept in groups]
    rollout = nested_branches()
    firsts = [[rollout.prefix(leaf.node)[1] for leaf in rollout.leaves]] * len(groups)
    credits = credit([rollout] * len(groups), [[Reward(r) for r in group] for group in totals], how, keep)
    for number, group in enumerate(credits):
        for leaf, one in enumerate(group):
            assert bool(one.by_node) == keep[number][leaf]
            if keep[number][leaf]:
                expected = slow_advantage(how, number, leaf, totals, keep, firsts)
                assert one.advantage == pytest.approx(expected, abs=1e-9)
                assert set(one.by_node.values()) == {one.advantage}


def test_within_a_tree_by_hand() -> None:
    rewards = [Reward(1.0), Reward(0.0), Reward(0.0)]  # the first two share their first turn
    found = [one.advantage for one in credit([two_branches()], [rewards], Advantage(baseline="tree", scale="none"))[0]]
    assert found == pytest.approx([2 / 3 + 1 / 2, -1 / 3 - 1 / 2, -1 / 3])


def test_a_trajectory_cut_off_before_its_first_turn_is_a_tree_of_its_own() -> None:
    rollout = tree([prompt(), model(0, [3])], [0, 1, 1])
    found = credit([rollout], [[Reward(1.0), Reward(1.0), Reward(0.0)]], Advantage(baseline="tree", scale="none"))[0]
    assert [one.advantage for one in found] == pytest.approx([1 / 3, 1 / 3 + 1 / 2, -2 / 3 - 1 / 2])
