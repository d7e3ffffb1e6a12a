"""Advantages: values a person can check, and properties of the normalisation and the attribution."""

from __future__ import annotations

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trees import model, nested_branches, prompt, tool, tree, two_branches

from arpo.algorithm.advantage import attribute, compute_credits, normalize
from arpo.config.algorithm import Advantage
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


def test_prefix_values_and_turn_values_on_two_levels() -> None:
    """Means of the advantages below: prompt 0, node 1: 1, node 3: 2. Backed up: node 3: 2, node 1: mean(2, -2)."""
    credits = attribute(nested_branches(), [4.0, 2.0, 0.0, -2.0, -4.0], "prefix_value")
    assert [dict(one.by_node) for one in credits] == [
        {1: 4.0 + 1, 3: 4.0 + 1, 5: 4.0 + 2},
        {1: 2.0 + 1, 3: 2.0 + 1, 6: 2.0 + 0},
        {1: 0.0 + 1, 3: 0.0 + 1, 7: 0.0 - 2},
        {1: -2.0 + 1, 8: -2.0 - 3},
        {9: -4.0 - 4},
    ]
    credits = attribute(nested_branches(), [4.0, 2.0, 0.0, -2.0, -4.0], "turn_value")
    assert [dict(one.by_node) for one in credits] == [
        {1: 0.0, 3: 2.0, 5: 4.0},
        {1: 0.0, 3: 2.0, 6: 2.0},
        {1: 0.0, 3: 2.0, 7: 0.0},
        {1: 0.0, 8: -2.0},
        {9: -4.0},
    ]


def test_turns_after_the_same_text_are_compared() -> None:
    """Returns: first turns 0.5 x mean(1, 0) and 0; after "a result" 1 and 0. A shared turn counts once."""
    rewards, how = [Reward(1.0), Reward(0.0), Reward(0.0)], Advantage(attribution="same_state", gamma=0.5, scale="none")
    found = credit([two_branches()], [rewards], how)[0]
    assert [one.advantage for one in found] == pytest.approx([2 / 3, -1 / 3, -1 / 3])
    assert found[0].by_node == pytest.approx({1: 2 / 3 + 0.125, 3: 2 / 3 + 0.5})
    assert found[1].by_node == pytest.approx({1: -1 / 3 + 0.125, 4: -1 / 3 - 0.5})
    assert found[2].by_node == pytest.approx({5: -1 / 3 - 0.125})
    scaled = credit([two_branches()], [rewards], how.model_copy(update={"scale": "std", "step_weight": 2.0}))[0]
    std = math.sqrt(2) / 3
    assert scaled[0].by_node == pytest.approx({1: 2 / 3 / std + 2, 3: 2 / 3 / std + 2})
    equal = credit([two_branches()], [[Reward(1.0)] * 3], how)[0]  # those further from the end earn less
    assert [dict(one.by_node) for one in equal] == [{1: -0.25, 3: 0.0}, {1: -0.25, 4: 0.0}, {5: 0.25}]


def test_turns_of_other_tasks_or_after_another_text_are_not_compared() -> None:
    first = tree([prompt(), model(0, [3]), tool(1, text="one"), model(2, [4])], [3])
    second = tree(
        [prompt(), model(0, [3]), tool(1, text="two"), model(2, [4]), tool(1, text="one"), model(4, [4])], [3, 5]
    )
    rewards = [[Reward(1.0)], [Reward(1.0), Reward(0.0)]]
    found = credit([first, second], rewards, Advantage(attribution="same_state"))
    assert found[0] == (Credit(0.0, {1: 0.0, 3: 0.0}),)
    assert found[1] == (Credit(1.0, {1: 1.0, 3: 1.0}), Credit(-1.0, {1: -1.0, 5: -1.0}))


NODES = ("soft", "hard", "prefix_value", "turn_value", "same_state")


def slow_turn(how: Advantage, node: int, leaf: int, own: dict[int, float], totals: list[float]) -> float:
    """The advantage of a turn on a trajectory, straight from its definition; `own` are those of unmasked leaves."""
    rollout = nested_branches()
    ways = {i: rollout.prefix(rollout.leaves[i].node) for i in own}

    def mean(at: int) -> float:
        return statistics.fmean(own[i] for i in own if at in ways[i])

    def backed_up(at: int) -> float:
        below = [
            i for i, other in enumerate(rollout.nodes) if other.parent == at and any(i in w for w in ways.values())
        ]
        return statistics.fmean([own[i] for i in own if ways[i][-1] == at] + [backed_up(child) for child in below])

    def turn_return(at: int) -> float:
        left = {i: sum(rollout.nodes[n].kind is Kind.MODEL for n in w if n > at) for i, w in ways.items() if at in w}
        return statistics.fmean(how.gamma**count * totals[i] for i, count in left.items())

    parent = rollout.nodes[node].parent
    assert parent is not None
    if how.attribution == "same_state":
        turns = [n for n in {n for w in ways.values() for n in w} if rollout.nodes[n].kind is Kind.MODEL]
        before = [rollout.nodes[rollout.nodes[n].parent or 0].text for n in turns]
        group = [turn_return(n) for n, text in zip(turns, before, strict=True) if text == rollout.nodes[parent].text]
        std = statistics.pstdev(group)
        return own[leaf] + ((turn_return(node) - statistics.fmean(group)) / std if std > 1e-8 else 0.0)
    rules = {"soft": own[leaf], "hard": mean(node), "turn_value": backed_up(node)}
    return rules.get(how.attribution, own[leaf] + mean(node) - mean(parent))


@given(SCORES, st.lists(st.booleans(), min_size=5, max_size=5), st.sampled_from(NODES))
def test_every_attribution_is_what_its_definition_says(scores: list[float], keep: list[bool], attribution: str) -> None:
    how, rollout = Advantage.model_validate({"attribution": attribution}), nested_branches()
    found = credit([rollout], [[Reward(score) for score in scores]], how, [keep])[0]
    own = {leaf: one.advantage for leaf, one in enumerate(found) if keep[leaf]}
    for leaf, one in enumerate(found):
        assert one.weight == 1.0
        way = rollout.prefix(rollout.leaves[leaf].node)
        assert list(one.by_node) == ([n for n in way if rollout.nodes[n].kind is Kind.MODEL] if keep[leaf] else [])
        for node, value in one.by_node.items():
            assert value == pytest.approx(slow_turn(how, node, leaf, own, scores), abs=1e-9)
    if attribution != "same_state" and len({score for score, used in zip(scores, keep, strict=True) if used}) < 2:
        assert not any(value for one in found for value in one.by_node.values())


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

    if how.scale == "batch":
        plain = how.model_copy(update={"scale": "none"})
        every = [
            slow_advantage(plain, n, i, totals, keep, firsts) for n, ks in enumerate(keep) for i in range(5) if ks[i]
        ]
        std = statistics.pstdev(every)
        return slow_advantage(plain, number, leaf, totals, keep, firsts) / std if std > 1e-8 else 0.0

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
    st.sampled_from(["std", "batch", "none"]),
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
