"""The branching rule, by hand: H, dH and P as in the method, and every reason not to branch."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arpo.algorithm.branching import Donor, balanced_num_initial, decide
from arpo.config.algorithm import Branching
from arpo.config.loading import load_config
from arpo.errors import ArpoError
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


def num_initial(total: int, weight: float, initial: list[float], after: list[list[float]], **settings: Any) -> int:
    """N for a weight of entropies in nats, which dH divides by ln V."""
    branching = Branching(balance=weight * math.log(V), **settings)
    return balanced_num_initial(branching, total, initial, after, V)


def test_the_share_of_trajectories_from_the_prompt_follows_the_balance_of_entropies() -> None:
    assert num_initial(16, 1.0, [2.0, 0.0], [[1.0], [0.5, 1.5]]) == 8  # as unsure at its start as after its tools
    assert num_initial(16, 2.0, [1.0], [[0.5], [0.5, 0.5]]) == round(16 / (1 + math.exp(-2.0 * 0.5)))
    assert num_initial(16, 2.0, [0.5], [[1.0]]) == round(16 / (1 + math.exp(1.0)))
    assert num_initial(16, 1.0, [1.5], [[3.0], [0.0, 0.0, 0.0]]) == 8  # every result counts, however long its turn
    assert num_initial(16, 9.0, [3.0], []) == 16
    assert num_initial(16, 9.0, [], [[3.0]]) == 1
    assert num_initial(4, 0.0, [3.0], []) == 2
    assert num_initial(16, 2.0, [0.5, 9.0], [[1.0, 9.0]], probe_tokens=1) == round(16 / (1 + math.exp(1.0)))
    assert num_initial(16, 2.0, [0.5, 9.0], [[1.0, 9.0]], probe="first_token") == round(16 / (1 + math.exp(1.0)))


def test_by_the_sum_short_turns_change_less() -> None:
    settings = Branching(entropy_unit="sum", probe_tokens=3, alpha=0.5, beta=0.2)
    # 1 + 2 + 3 = 6 at the start; 4 + 5 = 9 after the result, whose turn has two tokens
    decision = decide(settings, [1.0, 2.0, 3.0, 9.0], [4.0, 5.0], V, 4, 0.0)
    assert decision.delta == pytest.approx(3 / math.log(V))
    assert decision.probability == pytest.approx(0.5 + 0.2 * 3 / math.log(V))
    assert (decision.initial_entropy, decision.entropy) == (2.0, 4.5)  # H is a mean in both units
    assert decide(settings, [1.0, 1.0, 1.0], [2.0], V, 4, 0.0).branches == 0  # 2 < 3, although the mean rose


@given(st.integers(1, 30), st.lists(st.floats(0, 5), min_size=30, max_size=30), st.lists(st.floats(0, 5), min_size=30))
def test_a_beta_by_the_sum_is_k_times_that_beta_by_the_mean(k: int, initial: list[float], after: list[float]) -> None:
    by_sum = decide(Branching(entropy_unit="sum", beta=0.2, probe_tokens=k), initial, after, V, 4, 0.0)
    by_mean = decide(Branching(beta=0.2 * k, probe_tokens=k), initial, after, V, 4, 0.0)
    assert by_sum.delta == pytest.approx(k * by_mean.delta, abs=1e-9)
    assert by_sum.probability == pytest.approx(by_mean.probability, abs=1e-9)


def test_aepos_balance_moves_n_away_from_half_of_m() -> None:
    aepo, vocab_size = load_config(None, ["preset=aepo"]).branching, 150_000
    assert (aepo.entropy_unit, aepo.balance, aepo.penalty) == ("sum", 0.5, 0.05)
    calm, unsure = [0.3] * 20, [1.1] * 20  # nats per token; the sums differ by 16 = 1.34 ln V
    mean = aepo.model_copy(update={"entropy_unit": "mean"})
    ways = [(calm, unsure), (unsure, calm), (calm, calm)]
    assert [balanced_num_initial(aepo, 16, start, [after], vocab_size) for start, after in ways] == [5, 11, 8]
    assert [balanced_num_initial(mean, 16, start, [after], vocab_size) for start, after in ways] == [8, 8, 8]
    assert 16 / (1 + math.exp(0.5 * 16 / math.log(150_000))) == pytest.approx(5.41, abs=0.01)


def test_the_first_token_decides_alone_if_only_it_is_probed() -> None:
    settings = Branching(probe="first_token", probe_tokens=20)
    assert settings.probe_length == 1 and Branching(probe_tokens=7).probe_length == 7
    decision = decide(settings, [1.0, 9.0], [2.0, 0.0, 0.0], V, 4, 0.0)
    assert (decision.initial_entropy, decision.entropy, decision.probed_tokens, decision.branches) == (1.0, 2.0, 1, 1)
    assert decision == decide(settings, [1.0], [2.0, 5.0], V, 4, 0.0)


def test_a_donors_entropy_change_decides_and_the_own_one_is_recorded() -> None:
    settings = Branching(policy="shuffled", alpha=0.5, beta=0.4, penalty=0.25)
    own_rises = decide(settings, [1.0], [3.0], V, 4, 0.0, donor=Donor(7, -0.1))
    assert own_rises.delta == pytest.approx(2 / math.log(V)) and own_rises.probability == pytest.approx(0.46)
    assert (own_rises.branches, own_rises.reason) == (0, "P is not above the threshold (by the dH of node 7)")
    own_falls = decide(settings, [3.0], [1.0], V, 4, 0.0, donor=Donor(8, 0.1))
    assert (own_falls.branches, own_falls.reason) == (1, "branched (by the dH of node 8)")
    assert own_falls.delta == pytest.approx(-2 / math.log(V))
    after_one = decide(settings, [3.0], [1.0], V, 4, 0.0, 1, donor=Donor(8, 0.1))
    assert after_one.probability == pytest.approx(0.54 * 0.75)
    by_chance = settings.model_copy(update={"rule": "stochastic", "penalty": 0.0})
    assert [decide(by_chance, [1.0], [1.0], V, 4, u, donor=Donor(8, 0.1)).branches for u in (0.53, 0.55)] == [1, 0]


def test_the_oracle_branches_where_it_is_told_to() -> None:
    settings = Branching(policy="oracle", branch_width=2)
    told = [decide(settings, [1.0], [1.0], V, 4, 0.99, decisive=value) for value in (True, False, None)]
    assert [(one.branches, one.probability) for one in told] == [(2, 1.0), (0, 0.0), (0, 0.0)]
    assert [one.reason for one in told] == [
        "branched",
        "the next choice is not decisive",
        "the environment could not say whether the next choice is decisive",
    ]
    assert decide(settings, [1.0], [1.0], V, 0, 0.99, decisive=True).reason == "the budget of trajectories is used up"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"policy": "shuffled", "balance": 1.0}, '"none" with branching.policy = "shuffled"'),
        ({"policy": "oracle", "balance": 1.0}, '"none" with branching.policy = "oracle"'),
        ({"policy": "random", "probe": "discarded"}, "only the policy entropy, without balance, can discard a probe"),
        ({"balance": 1.0, "probe": "discarded"}, "only the policy entropy, without balance, can discard a probe"),
    ],
)
def test_settings_that_do_not_go_together(settings: dict[str, Any], expected: str) -> None:
    with pytest.raises(ArpoError) as caught:
        load_config(None, [f"branching.{name}={value}" for name, value in settings.items()])
    assert expected in str(caught.value)
