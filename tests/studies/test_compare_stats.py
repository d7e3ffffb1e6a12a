"""The statistics of a comparison: by hand, against slow reference implementations, and with little data."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from random import Random
from statistics import fmean, stdev

import numpy as np
import pytest
from comparisons import against, comparison, mean_of, noisy, trial, tuning_run
from hypothesis import given
from hypothesis import strategies as st

from arpo.evaluation.statistics import answer_error, holm
from arpo.evaluation.student import student_t, two_sided_p
from arpo.studies.compare import stats
from arpo.studies.compare.report import markdown, reading_notes, tables
from arpo.studies.compare.results import (
    Comparison,
    TuningRun,
)
from arpo.studies.compare.stats import (
    CostRatio,
    Difference,
    Level,
    Mean,
    complete,
    cost_ratios,
    costs_to_reach,
    fraction_interval,
    levels,
    mean_accuracy,
    mean_interval,
    missing_runs,
    ratio_interval,
    rows,
    t_test,
    tuning_results,
)

# Intervals


@pytest.mark.parametrize("degrees", [1, 2, 3, 4, 5, 6, 9, 10, 29, 30, 101])
def test_between_the_quantiles_lies_the_integral_of_the_density(degrees: int) -> None:
    x = np.linspace(0, student_t(degrees), 200_001)
    log_density = math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2) - math.log(degrees * math.pi) / 2
    density = np.exp(log_density - (degrees + 1) / 2 * np.log1p(x * x / degrees))
    assert 2 * np.trapezoid(density, x) == pytest.approx(0.95, abs=1e-8)


def test_quantiles_are_those_of_the_usual_tables() -> None:
    assert [round(student_t(n), 3) for n in (1, 2, 4, 9, 30)] == [12.706, 4.303, 2.776, 2.262, 2.042]


def test_intervals_by_hand() -> None:
    assert mean_interval([0.5]) == Mean(0.5, None, None)
    assert mean_interval([1.0, 3.0]) == pytest.approx((2.0, 2 - 12.7062, 2 + 12.7062), abs=1e-4)
    assert mean_interval([1.0, 2.0, 3.0]) == pytest.approx((2, 2 - 4.30265 / 3**0.5, 2 + 4.30265 / 3**0.5), abs=1e-4)
    assert fraction_interval([0.9, 1.0]) == Mean(pytest.approx(0.95), pytest.approx(0.3147, abs=1e-4), 1.0)
    assert fraction_interval([0.0, 0.1])[1:] == (0.0, pytest.approx(0.6853, abs=1e-4))
    assert fraction_interval([0.5]) == Mean(0.5, None, None)


@pytest.mark.parametrize("seeds", [2, 3, 5])
def test_intervals_hold_the_truth_as_often_as_they_say(seeds: int) -> None:
    rng = Random(seeds)
    found = [mean_interval([rng.gauss(0.7, 0.02) for _ in range(seeds)]) for _ in range(4000)]
    assert 0.94 <= fmean(low <= 0.7 <= high for _, low, high in found if low is not None and high is not None) <= 0.96


# P-values


@pytest.mark.parametrize(
    ("t", "degrees", "p"),
    [  # from tables of the t distribution: the quantiles at 5, 1 and 0.1 %, two-sided
        (12.7062, 1, 0.05),
        (4.30265, 2, 0.05),
        (2.77645, 4, 0.05),
        (9.92484, 2, 0.01),
        (4.60409, 4, 0.01),
        (31.5991, 2, 0.001),
        (8.61030, 4, 0.001),
        (2.04227, 30, 0.05),
        (0.0, 3, 1.0),
    ],
)
def test_p_values_are_those_of_the_usual_tables(t: float, degrees: int, p: float) -> None:
    assert two_sided_p(t, degrees) == pytest.approx(p, rel=1e-4)
    assert two_sided_p(-t, degrees) == two_sided_p(t, degrees)


@pytest.mark.parametrize("t", [0.1, 0.9, 3.0, 50.0])
def test_p_values_by_closed_forms(t: float) -> None:
    assert two_sided_p(t, 1) == pytest.approx(1 - 2 / math.pi * math.atan(t))
    assert two_sided_p(t, 2) == pytest.approx(1 - t / math.sqrt(2 + t * t))


def test_a_t_test_by_hand() -> None:
    assert t_test([1.0, 2.0, 3.0]) == pytest.approx(two_sided_p(2 * math.sqrt(3), 2))  # mean 2, deviation 1
    assert t_test([0.5]) is None and t_test([0.7 - 0.5, 0.8 - 0.6]) is None  # equal up to rounding: no noise is known
    assert t_test([0.0, 0.0]) == 1.0
    # the test rejects at 5 % exactly where the interval leaves out 0
    rng = Random(3)
    for _ in range(200):
        values = [rng.gauss(0.5, 0.5) for _ in range(4)]
        (_, low, high), p = mean_interval(values), t_test(values)
        assert low is not None and high is not None and p is not None and (p < 0.05) == (low > 0 or high < 0)


def test_holm_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03]) == [pytest.approx(0.03), pytest.approx(0.06), pytest.approx(0.06)]
    assert holm([0.2, 0.9, 0.001]) == [pytest.approx(0.4), pytest.approx(0.9), pytest.approx(0.003)]
    assert holm([0.01, None, None]) == [pytest.approx(0.03), None, None]  # a comparison that failed is one, too
    assert holm([]) == [] and holm([None]) == [None] and holm([0.7, 0.8]) == [1.0, 1.0]


@given(st.lists(st.floats(0, 1), min_size=1, max_size=6))
def test_holm_rejects_what_stepping_down_rejects(p_values: list[float]) -> None:
    """The plain procedure: compare the smallest with a/m, the next with a/(m-1), and stop at the first above."""
    alpha, rejected = 0.05, set()
    for rank, place in enumerate(sorted(range(len(p_values)), key=lambda place: p_values[place])):
        if p_values[place] * (len(p_values) - rank) > alpha:
            break
        rejected.add(p_values[place])
    assert {p for p, adjusted in zip(p_values, holm(p_values), strict=True) if (adjusted or 0) <= alpha} == rejected


# The noise of sampling answers


def test_the_error_of_answers_by_hand() -> None:
    # Shares 1/2 (of 2 answers) and 1: variances 0.25 / 1 and 0, so the error of the mean is sqrt(0.25) / 2.
    assert answer_error([(2, 1), (2, 2)]) == pytest.approx(0.25)
    assert answer_error([(5, 0), (5, 5)]) == 0.0
    assert answer_error([(5, 2)]) == pytest.approx(math.sqrt(0.4 * 0.6 / 4))
    assert answer_error([]) is None and answer_error([(5, 2), (1, 1)]) is None


@pytest.mark.parametrize("samples", [2, 3])
def test_the_error_of_answers_is_unbiased(samples: int) -> None:
    """Over all outcomes of sampling, weighted by their chances, the squared error has the variance as its mean."""
    chances = [0.2, 0.5, 0.9]
    first = second = estimated = 0.0
    for outcome in product(range(samples + 1), repeat=len(chances)):
        weight = math.prod(
            math.comb(samples, right) * p**right * (1 - p) ** (samples - right)
            for p, right in zip(chances, outcome, strict=True)
        )
        accuracy, error = sum(outcome) / samples / len(chances), answer_error([(samples, right) for right in outcome])
        assert error is not None
        first, second, estimated = (
            first + weight * accuracy,
            second + weight * accuracy**2,
            estimated + weight * error**2,
        )
    assert estimated == pytest.approx(second - first**2)


# Curves


def test_a_mean_curve_by_hand() -> None:
    first = trial("a", 1, [(0, 0.2), (10, 0.4), (30, 0.8)])
    second = trial("a", 2, [(0, 0.4), (20, 0.6)])
    assert mean_of([first, second]) == [
        (0, pytest.approx(0.3)),
        (10, pytest.approx((0.4 + 0.5) / 2)),
        (20, pytest.approx((0.6 + 0.6) / 2)),
    ]
    assert mean_of([first]) == [(0, 0.2), (10, 0.4), (30, 0.8)]
    assert [x for x, _ in mean_of([first, second], "seconds")] == [0, 5, 10]
    assert [x for x, _ in mean_of([first, second], "tokens")] == [0, 100, 200]


def test_of_tests_at_the_same_cost_the_last_counts() -> None:
    assert mean_of([trial("a", 1, [(0, 0.2), (5, 0.3), (5, 0.6), (5, 0.4)])]) == [(0, 0.2), (5, 0.4)]
    assert mean_of([trial("a", 1, [(0, 0.2), (0, 0.3)])]) == [(0, 0.3)]


curves = st.lists(st.tuples(st.integers(1, 50), st.floats(0, 1)), max_size=8).map(
    lambda gaps: [(0, 0.5), *((sum(gap for gap, _ in gaps[: n + 1]), right) for n, (_, right) in enumerate(gaps))]
)


@pytest.mark.slow
@given(st.lists(curves, min_size=1, max_size=4))
def test_a_mean_curve_is_the_mean_of_curves_everywhere(given_curves: list[list[tuple[int, float]]]) -> None:
    mean = mean_of([trial("a", seed, curve) for seed, curve in enumerate(given_curves)])
    end = min(curve[-1][0] for curve in given_curves)
    assert mean[0][0] == 0 and mean[-1][0] == end
    fine = np.linspace(0, end, 97)
    slow = np.mean([np.interp(fine, *zip(*curve, strict=True)) for curve in given_curves], axis=0)
    assert np.interp(fine, *zip(*mean, strict=True)) == pytest.approx(slow, abs=1e-9)


def calls_to_reach(curve: list[tuple[int, float]], level: float) -> float | None:
    found = costs_to_reach(trial("a", 1, curve).curve, level)
    return None if found is None else found["tool_calls"]


def test_the_cost_of_a_level_is_where_it_is_first_reached() -> None:
    curve = [(0, 0.2), (10, 0.6), (20, 0.4), (30, 0.9)]
    assert [calls_to_reach(curve, level) for level in (0.1, 0.2, 0.5, 0.6, 0.7, 0.9, 0.95)] == [
        0.0,
        0.0,
        pytest.approx(7.5),
        pytest.approx(10.0),
        pytest.approx(26.0),
        pytest.approx(30.0),
        None,
    ]
    assert calls_to_reach([(0, 0.5), (10, 0.4), (20, 0.9)], 0.5) == 0
    assert calls_to_reach([(0, 0.5), (10, 0.6), (20, 0.6)], 0.6 + 1e-12) == pytest.approx(10)  # rounding


def test_all_costs_are_those_of_the_same_moment() -> None:
    found = costs_to_reach(trial("a", 1, [(0, 0.2), (100, 0.4), (100, 0.6), (300, 0.6)]).curve, 0.5)
    expected = {"tool_calls": 100, "trajectories": 50, "tokens": 1000, "optimizer_steps": 3, "seconds": 50}
    assert found == pytest.approx(expected)  # halfway between the second and the third evaluation


@given(curves, st.floats(0.01, 1))
def test_a_level_is_reached_where_a_fine_search_finds_it(curve: list[tuple[int, float]], level: float) -> None:
    found = calls_to_reach(curve, level)
    x, y = zip(*curve, strict=True)
    fine = np.linspace(0, x[-1], 2001)
    at_or_above = fine[np.interp(fine, x, y) >= level]
    if found is None:
        assert max(y) < level
    else:
        assert np.interp(found, x, y) == pytest.approx(level, abs=1e-6) or found == 0
        assert not len(at_or_above) or found <= at_or_above[0] + 1e-6


# Cost ratios


def in_calls(whole: Comparison) -> list[CostRatio]:
    return [ratio for ratio in cost_ratios(whole) if ratio.cost == "tool_calls"]


def test_levels_are_fractions_of_the_mean_gain_of_the_baseline() -> None:
    whole = against([[(0, 0.1), (9, 0.2)]] * 2, [[(0, 0.2), (50, 0.9), (100, 0.5)], [(0, 0.4), (100, 0.9)]])
    assert levels(whole) == tuple(
        Level(pytest.approx(0.3 + f * 0.4), f) for f in (0.5, 0.75, 1.0)
    )  # from 0.3 to 0.7: the end counts, not the best
    assert levels(replace(whole, levels=(0.6, 0.7))) == (Level(0.6, None), Level(0.7, None))


@pytest.mark.parametrize("base", [[(0, 0.4), (100, 0.4)], [(0, 0.4), (50, 0.9), (100, 0.3)], [(0, 0.4)]])
def test_there_is_no_ratio_to_a_baseline_that_gained_nothing(base: list[tuple[int, float]]) -> None:
    whole = against([[(0, 0.4), (100, 0.9)]], [base])
    assert levels(whole) == () and cost_ratios(whole) == ()
    assert any("gained nothing" in note for note in reading_notes(whole))
    assert not any("divided by" in table.title for table in tables(whole))


def test_rounding_is_no_gain() -> None:
    shares = [0.1, 0.2, 0.3]
    flat = [[(0, a), (100, b)] for a, b in zip(shares, shares[::-1], strict=True)]
    assert levels(against(flat, flat)) == ()


def test_ratios_by_hand() -> None:
    base = [[(0, 0.2), (100, 0.6)], [(0, 0.2), (200, 0.6)]]
    own = [[(0, 0.2), (50, 0.6)], [(0, 0.2), (25, 0.6)]]  # ratios 1/2 and 1/8: their geometric mean is 1/4
    for found, fraction in zip(in_calls(against(own, base)), (0.5, 0.75, 1.0), strict=True):
        assert found.level.fraction == fraction and (found.reached, found.baseline_reached) == (2, 2)
        assert found.seeds == (1, 2) and found.by_seed == pytest.approx({1: 0.5, 2: 0.125})
        half_width = 12.7062 * math.log(4) / 2  # the logarithms differ by ln 4: their deviation is ln 4 / sqrt 2
        interval = (0.25, 0.25 * math.exp(-half_width), 0.25 * math.exp(half_width))
        assert found.ratio == pytest.approx(interval, rel=1e-4)
        t = math.log(0.25) / (math.log(4) / 2)
        assert found.p == pytest.approx(two_sided_p(t, 1)) == pytest.approx(0.2952, abs=1e-4)
        assert found.holm_p == pytest.approx(3 * 0.2952, abs=1e-3)  # three levels: three comparisons


def test_ratios_of_other_costs() -> None:
    own, base = [[(0, 0.2), (30, 0.4), (60, 0.6)]], [[(0, 0.2), (100, 0.6)]]
    found = {each.cost: each.by_seed[1] for each in cost_ratios(against(own, base, 0.6))}
    assert found == pytest.approx({"tool_calls": 0.6, "tokens": 0.6, "optimizer_steps": 2.0, "seconds": 0.6})
    assert len(cost_ratios(noisy(["grpo", "a", "b"], 3))) == 4 * 2 * 3  # costs, algorithms, levels


def test_only_seeds_in_which_both_got_there_have_a_ratio() -> None:
    up, half, down = [(0, 0.2), (100, 0.6)], [(0, 0.2), (50, 0.6)], [(0, 0.2), (100, 0.3)]
    found = in_calls(against([half, up, down, half], [up, up, up, down], 0.5))[0]
    assert (found.reached, found.baseline_reached, len(found.seeds)) == (3, 3, 4)
    assert found.by_seed == pytest.approx({1: 0.5, 2: 1.0})
    assert found.ratio == pytest.approx(ratio_interval([0.5, 1.0])) and found.ratio.mean == pytest.approx(0.5**0.5)
    assert found.p is None and found.holm_p is None  # a selection of seeds
    never = in_calls(against([down, down], [up, up], 0.5))[0]
    assert (never.reached, never.baseline_reached, never.ratio, never.p) == (0, 2, None, None)


def test_a_seed_that_begins_above_the_level_has_no_ratio() -> None:
    up, above = [(0, 0.2), (100, 0.6)], [(0, 0.5), (100, 0.6)]
    found = in_calls(against([up, above], [up, above], 0.4))[0]
    assert (found.reached, found.baseline_reached) == (2, 2) and found.by_seed == {1: pytest.approx(1.0)}
    assert found.ratio == Mean(pytest.approx(1.0), None, None) and found.p is None


def test_failed_comparisons_make_the_others_no_stronger() -> None:
    """A level that nobody reaches counts as a comparison."""
    rng = Random(5)
    own = [[(0, 0.2), (rng.randrange(45, 55), 0.6)] for _ in range(4)]
    base = [[(0, 0.2), (rng.randrange(95, 105), 0.6)] for _ in range(4)]
    alone, one = in_calls(against(own, base, 0.5))[0], in_calls(against(own, base, 0.5, 0.9))[0]
    assert alone.p is not None and alone.p == one.p
    assert alone.holm_p == alone.p and one.holm_p == pytest.approx(2 * alone.p)


@pytest.mark.parametrize("seeds", [3, 5])
def test_intervals_of_ratios_hold_the_truth_as_often_as_they_say(seeds: int) -> None:
    """Costs that vary by a factor: the interval covers the true ratio in 95 % of cases (a bootstrap of 3: 71 %)."""
    rng, covered, total = Random(seeds), 0, 3000
    for _ in range(total):
        base = [math.exp(rng.gauss(5, 0.3)) for _ in range(seeds)]
        own = [math.exp(rng.gauss(4.5, 0.3)) for _ in range(seeds)]
        _, low, high = ratio_interval([a / b for a, b in zip(own, base, strict=True)])
        assert low is not None and high is not None
        covered += low <= math.exp(-0.5) <= high
    assert 0.938 <= covered / total <= 0.962  # three standard errors


@pytest.mark.parametrize("false", [6, 3])
def test_holm_keeps_the_chance_of_any_false_claim(false: int) -> None:
    """Six algorithms against one baseline, of which some differ from it: claims about the others are rare."""
    rng, seeds, total, wrong, wrong_without = Random(false), 5, 1500, 0, 0
    for _ in range(total):
        base = [rng.gauss(0, 1) for _ in range(seeds)]
        p_values = [t_test([rng.gauss(0 if place < false else 8, 1) - b for b in base]) for place in range(6)]
        adjusted = holm(p_values)
        wrong += any(p is not None and p <= 0.05 for p in adjusted[:false])
        wrong_without += any(p is not None and p <= 0.05 for p in p_values[:false])
    assert wrong / total <= 0.05 + 0.017 < wrong_without / total  # three standard errors


# Rows


def test_seeds_that_ended_alike_are_neither_better_nor_worse() -> None:
    curve = [(0, 0.2), (10, 0.6)]
    better, worse = [(0, 0.2), (10, 0.7)], [(0, 0.1), (10, 0.5)]
    trials = [trial("b", 2, worse), trial("b", 0, curve), trial("b", 1, better)]  # not in the order of the seeds
    trials += [trial("a", seed, curve) for seed in (1, 0, 2)]
    found = Comparison("t", "tool_calls", "a", ("a", "b"), (0, 1, 2), tuple(trials))
    difference = rows(found)[1].difference
    assert difference is not None and (difference.better, difference.worse, difference.seeds) == (1, 1, 3)
    assert [one.seed for one in complete(found, "b")] == [0, 1, 2]
    assert stats.cold_start(found) == pytest.approx((0.2 * 5 + 0.1) / 6)


def test_rows_by_hand() -> None:
    given_trials = [
        trial("grpo", 1, [(0, 0.2), (100, 0.5)], pass_at={1: 0.5, 4: 0.7}, format=0.8, calls_per_question=2.0),
        trial("grpo", 2, [(0, 0.2), (100, 0.6)], pass_at={1: 0.6}, format=None, calls_per_question=3.0),
        trial("grpo", 3, [(0, 0.2), (100, 0.9)], pass_at={1: 0.9}, format=0.9, calls_per_question=1.0),
        trial("arpo", 2, [(0, 0.2), (200, 0.7)], pass_at={1: 0.7}, answers=((2, 1), (2, 2)), clip_fraction=0.1),
        trial("arpo", 1, [(0, 0.2), (100, 0.4)], pass_at={1: 0.4}, answers=((5, 0), (5, 5)), clip_fraction=0.3),
        trial("arpo", 3, [(0, 0.2), (50, 1.0)], "stopped"),
    ]
    base, own = rows(comparison(*given_trials))
    assert (base.algorithm, base.seeds, base.difference) == ("grpo", 3, None)
    assert base.accuracy is not None and base.accuracy.mean == pytest.approx(2 / 3)
    assert list(base.pass_at) == [1] and base.pass_at[1].mean == pytest.approx(2 / 3)
    assert (base.format, base.calls_per_question) == (None, 2.0)
    assert (base.tool_calls, base.trajectories, base.tokens, base.seconds) == (100, 50, 1000, 50)
    assert (base.optimizer_steps, base.clip_fraction, base.answer_noise) == (2, None, None)
    assert base.seed_noise == pytest.approx(stdev([0.5, 0.6, 0.9]))
    assert (own.algorithm, own.seeds, own.tool_calls, own.seconds) == ("arpo", 2, 150, 75)
    assert own.accuracy is not None and own.accuracy.mean == pytest.approx(0.55)
    assert own.clip_fraction == pytest.approx(0.2)
    assert own.answer_noise == pytest.approx(math.sqrt((0.25**2 + 0) / 2))  # of the runs 0.25 and 0
    reach = 12.7062 * 0.1  # the differences are -0.1 and 0.1
    expected = Mean(pytest.approx(0), pytest.approx(-reach, abs=1e-4), pytest.approx(reach, abs=1e-4))
    assert own.difference == Difference(expected, 2, better=1, worse=1, p=pytest.approx(1.0), holm_p=pytest.approx(1.0))


def test_differences_are_adjusted_over_the_table() -> None:
    whole = noisy(["grpo", "a", "b", "c"], 4)
    found = [row.difference for row in rows(whole)[1:]]
    plain = [difference.p for difference in found if difference is not None]
    assert [difference.holm_p for difference in found if difference is not None] == holm(plain)
    assert len(plain) == 3


def test_only_complete_runs_count_and_the_others_are_named() -> None:
    whole = noisy(["grpo", "arpo", "other"], 2)
    spoiled = trial("arpo", 1, [(0, 0.4), (10, 0.0)], "the machine stopped")
    partial = replace(whole, trials=(*whole.trials[:3], spoiled, whole.trials[4]))
    assert [tuple(run) for run in missing_runs(partial)] == [
        ("arpo", 1, "the machine stopped"),
        ("other", 1, "not run"),
    ]
    assert missing_runs(whole) == ()
    assert [row.seeds for row in rows(partial)] == [2, 1, 1]
    assert rows(partial)[1].accuracy == Mean(whole.trials[2].curve[-1].accuracy, None, None)
    assert rows(partial)[0] == rows(whole)[0]


def test_nothing_complete() -> None:
    none = comparison(trial("grpo", 1, [], "down"), trial("arpo", 1, [(0, 0.4)], "down"))
    for row in rows(none):
        assert (row.seeds, row.accuracy, row.difference, row.pass_at, row.tool_calls) == (0, None, None, {}, None)
    assert cost_ratios(none) == ()
    assert markdown(none).count("| 0 of 1 | - |") == 2


def test_the_baseline_may_be_what_is_missing() -> None:
    whole = comparison(trial("arpo", 1, [(0, 0.2), (9, 0.8)]), trial("grpo", 1, [], "down"))
    assert rows(whole)[0].difference is None and cost_ratios(whole) == ()
    found = in_calls(replace(whole, levels=(0.5,)))[0]
    assert (found.seeds, found.reached, found.ratio, found.p) == ((), 0, None, None)


# Tuning


def test_the_mean_accuracy_over_a_budget_by_hand() -> None:
    curve = trial("a", 1, [(0, 0.2), (50, 0.6), (150, 0.8)]).curve
    # 50 calls at 0.4 on average, then 50 from 0.6 to 0.7
    assert mean_accuracy(curve, "tool_calls", 100) == pytest.approx((50 * 0.4 + 50 * 0.65) / 100)
    assert mean_accuracy(curve, "tool_calls", 150) == pytest.approx((50 * 0.4 + 100 * 0.7) / 150)
    assert mean_accuracy(curve, "tokens", 1000) == pytest.approx(mean_accuracy(curve, "tool_calls", 100))


@given(curves.filter(lambda curve: len(curve) > 1), st.floats(0.05, 1))
def test_the_mean_accuracy_is_that_of_a_fine_grid(curve: list[tuple[int, float]], share: float) -> None:
    budget = share * curve[-1][0]
    fine = np.linspace(0, budget, 4001)
    slow = np.trapezoid(np.interp(fine, *zip(*curve, strict=True)), fine) / budget
    assert mean_accuracy(trial("a", 1, curve).curve, "tool_calls", budget) == pytest.approx(slow, abs=1e-3)


def test_the_best_settings_of_each_algorithm_are_chosen() -> None:
    runs = [
        *(tuning_run("grpo", 4, seed, end) for seed, end in ((1000, 0.5), (1001, 0.9))),
        *(tuning_run("grpo", 8, seed, end) for seed, end in ((1000, 0.6), (1001, 0.6))),
        *(tuning_run("arpo", 4, seed, end) for seed, end in ((1000, 0.6), (1001, 0.6))),
        *(tuning_run("arpo", 8, seed, end) for seed, end in ((1000, 0.6), (1001, 0.6))),  # the same: the first counts
    ]
    found = tuning_results(runs, "tool_calls", 100)
    assert [(each.algorithm, each.choice, each.chosen) for each in found] == [
        ("grpo", (("M", 4),), True),
        ("grpo", (("M", 8),), False),
        ("arpo", (("M", 4),), True),
        ("arpo", (("M", 8),), False),
    ]
    assert [each.score for each in found] == pytest.approx([0.45, 0.4, 0.4, 0.4])
    assert [each.end for each in found] == pytest.approx([0.7, 0.6, 0.6, 0.6])
    assert found[0].seeds == (1000, 1001)


def test_the_area_decides_not_the_end() -> None:
    early = TuningRun((("M", 4),), trial("a", 1000, [(0, 0.2), (10, 0.7), (100, 0.7)]))
    late = TuningRun((("M", 8),), trial("a", 1000, [(0, 0.2), (90, 0.2), (100, 0.8)]))
    assert [each.chosen for each in tuning_results([late, early], "tool_calls", 100)] == [False, True]


def test_settings_of_which_a_run_failed_are_not_chosen() -> None:
    runs = [tuning_run("a", 4, 1000, 0.9), tuning_run("a", 4, 1001, 0.9, "collapsed"), tuning_run("a", 8, 1000, 0.5)]
    bad, good = tuning_results(runs, "tool_calls", 100)
    assert (bad.score, bad.problem, bad.chosen) == (None, "seed 1001: collapsed", False)
    assert good.chosen
    assert not any(each.chosen for each in tuning_results(runs[:2], "tool_calls", 100))


@pytest.mark.parametrize(
    ("curve", "problem"),
    [([], ""), ([(5, 0.2)], ""), ([(0, 0.2), (9, 0.3), (8, 0.3)], ""), ([(0, math.nan)], ""), ([(0, 1.2)], "down")],
)
def test_curves_that_cannot_be_are_refused(curve: list[tuple[int, float]], problem: str) -> None:
    with pytest.raises(ValueError, match="a, seed 1"):
        trial("a", 1, curve, problem)


def test_comparisons_that_cannot_be_are_refused() -> None:
    good, other = trial("grpo", 1, [(0, 0.2)]), trial("a", 1, [(0, 0.2)])
    for match, baseline, algorithms, trials in (
        ("seconds", "grpo", ("grpo",), (good,)),
        ("trajectories", "a", ("grpo",), (good,)),
        ("trajectories", "grpo", ("grpo",), (good, good)),
        ("trajectories", "grpo", ("grpo",), (good, other)),
        ("trajectories", "grpo", ("grpo", "grpo"), (good,)),
    ):
        with pytest.raises(ValueError):
            Comparison("t", match, baseline, algorithms, (1,), trials)


def test_comparisons_that_cannot_be_for_other_reasons_are_refused() -> None:
    whole, run = noisy(["grpo"], 1), tuning_run("grpo", 4, 1000, 0.5)
    changes: tuple[dict[str, object], ...] = (
        {"levels": (0.5, 0.5)},
        {"levels": (0.0,)},
        {"levels": (1.5,)},
        {"tuning": (run,)},  # without a budget
        {"tuning": (replace(run, trial=replace(run.trial, seed=0)),), "budget": 9},  # a reported seed
        {"tuning": (replace(run, trial=replace(run.trial, algorithm="a")),), "budget": 9},
    )
    for change in changes:
        with pytest.raises(ValueError):
            replace(whole, **change)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="more answers are right"):
        trial("a", 1, [(0, 0.5)], answers=((2, 3),))
