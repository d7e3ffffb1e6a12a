"""The branching rule, by hand: H, dH and P as in the method, and every reason not to branch."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arpo.algorithm.branching import balanced_num_initial, decide
from arpo.config.schema import Branching
from arpo.types import Decision

V = 100  # ln V = 4.605


def test_values_by_hand() -> None:
    settings = Branching(alpha=0.5, beta=0.2, tau=0.5, probe_tokens=2)
    # H_initial = (1 + 3) / 2 = 2, H = (4 + 6) / 2 = 5 (the third token is beyond k), dH = 3 / ln 100, P = 0.5 + 0.2 dH
    delta = 3 / math.log(100)
    assert decide(settings, [1.0, 3.0, 9.0], [4.0, 6.0, 0.0], V, budget=4, uniform=0.9) == Decision(
        2.0, 5.0, delta, 0.5 + 0.2 * delta, branches=1, reason="branched", probed_tokens=2
    )


def test_threshold_is_strict_and_looks_at_the_sign_when_alpha_is_tau() -> None:
    settings = Branching()
    same = decide(settings, [1.0], [1.0], V, 4, 0.0)
    lower = decide(settings, [1.0], [0.5], V, 4, 0.0)
    higher = decide(settings, [1.0], [1.0 + 1e-6], V, 4, 0.0)
    assert [d.branches for d in (same, lower, higher)] == [0, 0, 1]
    assert same.reason == lower.reason == "P is not above the threshold"


def test_the_stochastic_rule_draws_with_probability_p() -> None:
    settings = Branching(rule="stochastic", alpha=0.5, beta=0.2)
    p = decide(settings, [1.0], [2.0], V, 4, 0.0).probability
    assert decide(settings, [1.0], [2.0], V, 4, p - 1e-9).branches == 1
    assert decide(settings, [1.0], [2.0], V, 4, p + 1e-9).reason == "not drawn"
    assert decide(Branching(rule="stochastic", alpha=0.0, beta=9.0), [2.0], [0.0], V, 4, 0.0).branches == 0  # P < 0
    assert decide(Branching(rule="stochastic", alpha=1.0, beta=9.0), [0.0], [4.0], V, 4, 0.9999).branches == 1  # P > 1


@pytest.mark.parametrize(
    ("settings", "entropies", "budget", "reason"),
    [
        (Branching(policy="never"), [4.0], 4, "the policy never branches"),
        (Branching(), [], 4, "nothing was sampled after the result"),
        (Branching(), [4.0], 0, "the budget of trajectories is used up"),
    ],
)
def test_reasons_not_to_branch(settings: Branching, entropies: list[float], budget: int, reason: str) -> None:
    decision = decide(settings, [1.0], entropies, V, budget, 0.0)
    assert (decision.branches, decision.reason) == (0, reason)


def test_width_is_cut_to_the_budget() -> None:
    assert [decide(Branching(branch_width=3), [1.0], [2.0], V, budget, 0.0).branches for budget in (5, 3, 2, 1)] == [
        3,
        3,
        2,
        1,
    ]


@given(st.lists(st.floats(0, math.log(V)), min_size=1), st.lists(st.floats(0, math.log(V)), min_size=1))
def test_delta_is_normalised(initial: list[float], entropies: list[float]) -> None:
    decision = decide(Branching(), initial, entropies, V, 4, 0.0)
    assert -1 - 1e-9 <= decision.delta <= 1 + 1e-9
    assert (decision.branches > 0) == (decision.probability > 0.5)


def test_controls_do_not_look_at_entropies() -> None:
    for entropies in ([0.0], [4.0]):
        drawn = [decide(Branching(policy="random", alpha=0.3), [2.0], entropies, V, 4, u) for u in (0.29, 0.31)]
        assert [(d.branches, d.reason, d.probability) for d in drawn] == [(1, "branched", 0.3), (0, "not drawn", 0.3)]
        always = decide(Branching(policy="always", branch_width=2), [2.0], entropies, V, 4, 0.999999)
        assert (always.branches, always.probability) == (2, 1.0)
        later = decide(Branching(policy="posthoc_random"), [2.0], entropies, V, 4, 0.0)
        assert (later.branches, later.reason) == (0, "the policy branches when all trajectories have ended")
        assert later.entropy == entropies[0]  # what was seen is recorded all the same
    assert decide(Branching(policy="always"), [2.0], [1.0], V, 0, 0.0).reason == "the budget of trajectories is used up"
    assert decide(Branching(policy="random"), [2.0], [], V, 4, 0.0).branches == 0


def test_consecutive_branches_lower_the_probability() -> None:
    settings = Branching(rule="stochastic", alpha=0.5, beta=0.0, penalty=0.3)
    chances = [decide(settings, [1.0], [1.0], V, 4, 0.9, count).probability for count in range(5)]
    assert chances == pytest.approx([0.5, 0.5 * 0.7, 0.5 * 0.4, 0.5 * 0.1, 0.0])
    negative = Branching(alpha=0.0, beta=1.0, penalty=0.5)
    assert decide(negative, [4.0], [1.0], V, 4, 0.9, 4).probability == 0.0  # and does not turn its sign


def test_the_share_of_trajectories_from_the_prompt_follows_the_balance_of_entropies() -> None:
    assert (
        balanced_num_initial(16, 1.0, [2.0, 0.0], [[1.0], [0.5, 1.5]]) == 8
    )  # as unsure at its start as after its tools
    assert balanced_num_initial(16, 2.0, [1.0], [[0.5], [0.5, 0.5]]) == round(16 / (1 + math.exp(-2.0 * 0.5)))
    assert balanced_num_initial(16, 2.0, [0.5], [[1.0]]) == round(16 / (1 + math.exp(1.0)))
    assert (
        balanced_num_initial(16, 1.0, [1.5], [[3.0], [0.0, 0.0, 0.0]]) == 8
    )  # every result counts the same, however long its turn
    assert balanced_num_initial(16, 9.0, [3.0], []) == 16
    assert balanced_num_initial(16, 9.0, [], [[3.0]]) == 1
    assert balanced_num_initial(4, 0.0, [3.0], []) == 2
