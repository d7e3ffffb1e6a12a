"""Where posthoc policies branch, by hand and against slow references; whose dH decides under "shuffled"."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trees import model, prompt, tool, tree

from arpo.algorithm.posthoc import (
    Candidate,
    candidates,
    choose_best,
    choose_per_first_turn,
    first_turns,
    outcome_scores,
    shuffled_donors,
    tail_budget,
)
from arpo.config.algorithm import Branching
from arpo.types import Decision, Kind, Node, RolloutTree


def decided(node: Node, entropy: float, branches: int = 0) -> Node:
    return replace(node, decision=Decision(0.5, entropy, entropy - 0.5, 0.0, branches, "", 1))


def grown() -> RolloutTree:
    """Two first turns. Below the first: result 2, branched from once, with another result 4 on the trunk; result 8 was
    the last word of its trajectory. Below the second: one result, 10.

        0 - 1 - 2 - 3 - 4 - 5 (leaf)
                2 - 6 (leaf)
        0 - 7 - 8 (leaf, not followed by a turn)
        0 - 9 - 10 - 11 (leaf)
    """
    nodes = [
        prompt(),
        model(0, [3]),
        decided(tool(1, [9]), 2.0, 1),
        model(2, [3]),
        decided(tool(3, [9]), 1.0),
        model(4, [3]),
        model(2, [4]),
        model(0, [5]),
        tool(7, [9]),
        model(0, [6]),
        decided(tool(9, [9]), 1.5),
        model(10, [3]),
    ]
    return tree(nodes, [5, 6, 8, 11])


def test_candidates_by_hand() -> None:
    assert candidates(grown(), [1.0, 0.0, -1.0, 0.5]) == [
        Candidate(2, 1, 2.0, 1.5, 1, (1.0, 0.0), 0.5, True),  # the last one of trajectory 6, one more call on that of 5
        Candidate(4, 1, 1.0, 0.5, 0, (1.0,), 0.0, True),
        Candidate(10, 9, 1.5, 1.0, 0, (0.5,), 0.0, True),
    ]
    masked = candidates(grown(), [1.0, 0.0, -1.0, 0.5], [False, True, True, True])
    assert [one.rewards for one in masked] == [(0.0,), (), (0.5,)]
    assert [one.rewards for one in candidates(grown())] == [(), (), ()]
    assert first_turns(grown()) == [1, 7, 9]


def test_a_result_before_the_last_is_not_the_last() -> None:
    full = grown()
    alone = replace(full, leaves=full.leaves[:1])
    assert [(one.node, one.is_last) for one in candidates(alone)] == [(2, False), (4, True), (10, False)]


def test_one_result_per_first_turn() -> None:
    results = candidates(grown())
    best = choose_per_first_turn(Branching(policy="posthoc_entropy"), [1, 7, 9], results, 9, random.Random(0))
    assert best == [4, 0, 10]  # 4 has no branch yet; nothing can be branched from below 7
    drawn = {
        tuple(choose_per_first_turn(Branching(policy="posthoc_random"), [1, 7, 9], results, 2, random.Random(seed)))
        for seed in range(20)
    }
    assert drawn == {(2, 0), (4, 0)}  # no more than the budget
    assert choose_per_first_turn(Branching(policy="posthoc_random"), [], [], 5, random.Random(0)) == [0]


def test_the_highest_entropy_less_a_penalty_per_branch() -> None:
    def chosen(penalty: float, round_size: int = 4, budget: int = 9) -> list[int]:
        settings = Branching(policy="posthoc_top_entropy", penalty=penalty, round_size=round_size)
        return choose_best(settings, candidates(grown()), (), budget)

    assert chosen(0.0) == [2, 10, 4]
    assert chosen(0.6) == [10, 2, 4]  # 2.0 - 0.6 < 1.5
    assert chosen(1.0) == [10, 4, 2]  # 2.0 - 1.0 = 1.0: of equal ones that with fewer branches
    assert chosen(0.0, round_size=2) == chosen(0.0, budget=2) == [2, 10]
    assert choose_best(Branching(policy="posthoc_top_entropy"), [], (), 3) == []


def test_the_last_results_with_the_fewest_branches() -> None:
    settings, full = Branching(policy="posthoc_tail"), grown()
    assert choose_best(settings, candidates(full), (), 9) == [4, 10, 2]
    alone = replace(full, leaves=full.leaves[:1])
    assert choose_best(settings, candidates(alone), (), 9) == [4]


def seen(node: int, *rewards: float, calls: float = 0.0, branches: int = 0) -> Candidate:
    return Candidate(node, 1, 0.0, 0.0, branches, rewards, calls)


def test_outcomes_by_hand() -> None:
    rewards = [1.0, 1.0, 0.0, -1.0]  # successes are above 0: two of four, so the prior is Beta(1, 1)
    results = [seen(2, 1.0, 0.0), seen(4, 1.0), seen(6, 1.0, 1.0), seen(8)]
    # Beta(2, 2): 4 / (4 * 5); Beta(2, 1): 2 / (3 * 4); Beta(3, 1): 3 / (4 * 5); Beta(1, 1): 1 / (2 * 3)
    assert outcome_scores(results, rewards) == pytest.approx({2: 0.2, 4: 1 / 6, 6: 0.15, 8: 1 / 6})
    assert choose_best(Branching(policy="posthoc_outcome"), results, rewards, 9) == [2, 4, 8, 6]
    rare = [1.0, 0.0, 0.0, 0.0]  # Beta(0.5, 1.5)
    assert outcome_scores([seen(2, 0.0), seen(4, 1.0)], rare) == pytest.approx({2: 0.5 * 2.5 / 12, 4: 1.5 * 1.5 / 12})


def test_a_cheap_sibling_is_preferred_if_calls_count() -> None:
    results = [seen(2, 1.0, 0.0, calls=3.0), seen(4, 1.0, calls=1.0)]
    rewards = [1.0, 0.0]
    assert choose_best(Branching(policy="posthoc_outcome"), results, rewards, 1) == [2]
    assert choose_best(Branching(policy="posthoc_outcome", per_call=True), results, rewards, 1) == [4]
    assert outcome_scores(results, rewards, per_call=True) == pytest.approx({2: 0.2 / 4, 4: 1 / 6 / 2})


def test_where_rewards_are_equal_or_missing_every_result_is_as_good() -> None:
    results = [seen(2, 1.0, branches=1), seen(4, 1.0)]
    assert choose_best(Branching(policy="posthoc_outcome"), results, [1.0, 1.0], 1) == [4]
    assert outcome_scores(results, [1.0, 1.0]) == {2: 0.0, 4: 0.0}
    assert outcome_scores([seen(2)], []) == pytest.approx({2: 1 / 6})


def test_the_score_is_the_mean_over_the_posterior() -> None:
    """The closed form against the density of the Beta distribution, integrated numerically."""
    rewards = [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    for successes, failures in ((3, 2), (2, 5), (4, 4)):
        found = outcome_scores([seen(2, *[1.0] * successes, *[0.0] * failures)], rewards)[2]
        a, b = 2 / 3 + successes, 4 / 3 + failures
        steps = [(step + 0.5) / 20_000 for step in range(20_000)]
        density = [p ** (a - 1) * (1 - p) ** (b - 1) for p in steps]
        slow = sum(p * (1 - p) * weight for p, weight in zip(steps, density, strict=True)) / sum(density)
        assert found == pytest.approx(slow, rel=1e-4)


@pytest.mark.parametrize(
    ("budget", "rewards", "given_out"),
    [
        (8, [0.0, 0.0], 8),
        (8, [1.0, 1.0], 0),
        (8, [1.0, 0.0], 4),
        (8, [-1.0, -1.0], 8),  # a wrong format is no worse than a wrong answer here
        (8, [1.1, 1.1, 1.1, 0.0], 2),
        (10, [0.7], 3),
        (8, [0.9], 1),  # rounded up
        (8, [], 8),
    ],
)
def test_hard_tasks_get_more(budget: int, rewards: list[float], given_out: int) -> None:
    assert tail_budget(budget, rewards) == given_out


def slow_candidates(of: RolloutTree, rewards: Sequence[float]) -> list[Candidate]:
    """Every node is compared with every trajectory."""
    found = []
    for index, node in enumerate(of.nodes):
        if node.decision is None:
            continue
        through = [one for one in of.trajectories if index in one.indices]
        further = [
            sum(of.nodes[i].kind is Kind.TOOL for i in one.indices[one.indices.index(index) + 1 :]) for one in through
        ]
        last = any(all(of.nodes[i].decision is None for i in one.indices if i > index) for one in through)
        own = tuple(
            reward for one, reward in zip(of.trajectories, rewards, strict=True) if index in of.prefix(one.leaf.node)
        )
        mean = sum(further) / len(further) if further else 0.0
        first = next(i for i in of.prefix(index) if of.nodes[i].parent == 0)
        found.append(
            Candidate(index, first, node.decision.entropy, node.decision.delta, node.decision.branches, own, mean, last)
        )
    return found


def random_tree(rng: random.Random) -> RolloutTree:
    nodes: list[Node] = [prompt()]
    for _ in range(rng.randrange(1, 40)):
        parents = [i for i, node in enumerate(nodes) if node.kind is not Kind.MODEL] if rng.random() < 0.6 else []
        turns = [i for i, node in enumerate(nodes) if node.kind is Kind.MODEL]
        if parents or not turns:
            nodes.append(model(rng.choice(parents or [0]), [3]))
        else:
            nodes.append(tool(rng.choice(turns), [9]))
    for index, node in enumerate(nodes):
        if node.kind is Kind.TOOL and any(other.parent == index for other in nodes):
            nodes[index] = decided(node, rng.choice([0.5, 1.0, 2.0]), rng.randrange(3))
    inner = {node.parent for node in nodes}
    return tree(nodes, [index for index in range(1, len(nodes)) if index not in inner])


@pytest.mark.parametrize("seed", range(40))
def test_candidates_and_choices_agree_with_a_slow_reference(seed: int) -> None:
    rng = random.Random(seed)
    of = random_tree(rng)
    rewards = [rng.choice([-1.0, 0.0, 1.0]) for _ in of.leaves]
    results = candidates(of, rewards)
    assert results == slow_candidates(of, rewards)
    high, low = max(rewards), min(rewards)
    good = [2 * reward > high + low for reward in rewards]
    for per_call in (False, True):
        left = {one.node: one for one in results}
        expected: list[int] = []
        while left and len(expected) < 3:
            best: list[Any] = []
            for one in left.values():
                s = sum(2 * reward > high + low for reward in one.rewards)
                a, b = 2 * sum(good) / len(good) + s, 2 * (1 - sum(good) / len(good)) + len(one.rewards) - s
                score = (a / (a + b)) * (b / (a + b + 1)) / ((1 + one.further_calls) if per_call else 1)
                best.append((round(score, 12), -one.branches, -one.node))
            expected.append(-max(best)[2])
            del left[expected[-1]]
        settings = Branching(policy="posthoc_outcome", per_call=per_call, round_size=3)
        assert choose_best(settings, results, rewards, 99) == expected


@given(st.lists(st.sampled_from("abc"), max_size=12), st.lists(st.sampled_from("abc"), max_size=4), st.integers(0, 99))
def test_dh_moves_within_its_class_and_never_stays(new: list[str], old: list[str], seed: int) -> None:
    undecided = dict(enumerate(new))
    before = {100 + number: kind for number, kind in enumerate(old)}
    donors = shuffled_donors(undecided, before, random.Random(seed))
    kinds = undecided | before
    assert sorted(donors) == list(undecided)
    assert all(kinds[node] == kinds[donor] for node, donor in donors.items())
    for kind in set(new):
        members = [node for node in undecided if undecided[node] == kind]
        given_to = [donors[node] for node in members]
        if len(members) > 1:
            assert sorted(given_to) == members  # each dH is used once
            assert all(node != donor for node, donor in donors.items() if node in members)
        elif kind in old:
            assert given_to[0] >= 100
        else:
            assert given_to == members


def test_every_shift_occurs() -> None:
    shifts = {shuffled_donors(dict.fromkeys(range(4), "x"), {}, random.Random(seed))[0] for seed in range(30)}
    assert shifts == {1, 2, 3}
