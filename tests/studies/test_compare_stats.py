"""The statistics of a comparison: by hand, against slow reference implementations, and with little data."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import product
from math import inf
from random import Random
from statistics import fmean

import numpy as np
import pytest
from comparisons import comparison, mean_of, noisy, trial
from hypothesis import given
from hypothesis import strategies as st

from arpo.studies.compare import stats
from arpo.studies.compare.report import comparison_json, markdown, missing_note, terminal_tables
from arpo.studies.compare.stats import (
    Comparison,
    Difference,
    Mean,
    Ratio,
    complete,
    cost_ratios,
    first_cost,
    fraction_interval,
    mean_interval,
    missing_runs,
    rows,
    student_t,
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


def test_the_cost_of_a_level_is_where_it_is_first_reached() -> None:
    curve = [(0.0, 0.2), (10.0, 0.6), (20.0, 0.4), (30.0, 0.9)]
    assert [first_cost(curve, level) for level in (0.1, 0.2, 0.5, 0.6, 0.7, 0.9, 0.95)] == [
        0.0,
        0.0,
        pytest.approx(7.5),
        10.0,
        pytest.approx(26.0),
        30.0,
        None,
    ]


# Cost ratios


def ratio(own: list[tuple[int, float]], base: list[tuple[int, float]]) -> list[Ratio | None]:
    """Of one seed each, by share of the gain."""
    return list(cost_ratios([trial("a", 1, own)], [trial("grpo", 1, base)]).values())


def test_ratios_by_hand() -> None:
    base = [(0, 0.2), (100, 0.6)]
    half = [(0, 0.2), (50, 0.6)]
    assert ratio(half, base) == [Ratio(pytest.approx(0.5), None, None, 1)] * 3
    assert ratio(base, base) == [Ratio(1.0, None, None, 1)] * 3
    slow = [(0, 0.2), (100, 0.3), (200, 0.5)]  # 0.4 at 150 of 50, 0.5 at 200 of 75, 0.6 never
    found = ratio(slow, base)
    assert found == [Ratio(pytest.approx(r), None, None, 1) for r in (3, 200 / 75)] + [Ratio(None, None, None, 1)]


def test_the_level_is_the_baselines_end_not_its_maximum() -> None:
    peak = [(0, 0.2), (50, 0.8), (100, 0.6)]
    assert ratio([(0, 0.2), (100, 0.6)], peak)[2] == Ratio(pytest.approx(100 / (50 * 0.4 / 0.6)), None, None, 1)


@pytest.mark.parametrize("base", [[(0, 0.4), (100, 0.4)], [(0, 0.4), (50, 0.9), (100, 0.3)], [(0, 0.4)]])
def test_there_is_no_ratio_to_a_baseline_that_gained_nothing(base: list[tuple[int, float]]) -> None:
    assert ratio([(0, 0.4), (100, 0.9)], base) == [None, None, None]


def test_rounding_is_no_gain_and_no_failure() -> None:
    shares = [0.1, 0.2, 0.3]
    flat = [trial("grpo", s, [(0, a), (100, b)]) for s, (a, b) in enumerate(zip(shares, shares[::-1], strict=True))]
    assert list(cost_ratios(flat, flat).values()) == [None, None, None]
    base = [trial("grpo", s, [(0, 0.05), (100, end)]) for s, end in enumerate(shares)]
    own = [trial("a", s, [(0, 0.05), (50, end)]) for s, end in enumerate(shares[::-1])]
    assert sum(shares[::-1]) < sum(shares)
    found = cost_ratios(own, base)[1.0]
    assert found is not None and found.ratio == pytest.approx(0.5)


def test_the_bootstrap_equals_that_over_all_draws_of_seeds() -> None:
    """Of three seeds there are 27 draws; the ends are the percentiles of all of them, up to chance."""
    whole = noisy(["grpo", "arpo"], 3)
    own, base = complete(whole, "arpo"), complete(whole, "grpo")
    slow: list[float] = []
    for drawn in product(range(3), repeat=3):
        mine, theirs = (mean_of([group[seed] for seed in drawn]) for group in (own, base))
        level = theirs[0][1] + 0.75 * (theirs[-1][1] - theirs[0][1])
        mine_cost, base_cost = first_cost(mine, level), first_cost(theirs, level)
        assert mine_cost is not None and base_cost is not None
        slow.append(mine_cost / base_cost)
    found = cost_ratios(own, base)[0.75]
    assert found is not None and found.low == pytest.approx(min(slow)) and found.high == pytest.approx(max(slow))


def test_the_bootstrap_gives_the_same_every_time() -> None:
    whole = noisy(["grpo", "arpo"], 7)
    own, base = complete(whole, "arpo"), complete(whole, "grpo")
    assert cost_ratios(own, base) == cost_ratios(own, base)


def test_an_end_is_open_where_a_draw_does_not_get_there() -> None:
    base = [trial("grpo", seed, [(0, 0.2), (100, 0.6)]) for seed in (1, 2)]
    own = [trial("a", 1, [(0, 0.2), (100, 0.9)]), trial("a", 2, [(0, 0.2), (100, 0.3)])]
    assert cost_ratios(own, base)[1.0] == Ratio(pytest.approx(1), pytest.approx(0.4 / 0.7), inf, 2)
    never = [trial("a", seed, [(0, 0.2), (100, 0.3)]) for seed in (1, 2)]
    assert cost_ratios(never, base)[1.0] == Ratio(None, inf, inf, 2)


def test_draws_without_a_gain_widen_both_ends() -> None:
    base = [trial("grpo", 1, [(0, 0.2), (100, 0.6)]), trial("grpo", 2, [(0, 0.2), (100, 0.2)])]
    found = cost_ratios([replace(each, algorithm="a") for each in base], base)[0.5]
    assert found == Ratio(1.0, 0.0, inf, 2)


# Rows


def test_the_ends_leave_out_as_many_draws_as_they_should() -> None:
    draws = [float(number) for number in Random(1).sample(range(1, 1001), k=1000)]
    assert stats._percentiles(draws) == (26.0, 975.0)  # 2.5 % of the draws lie outside at either end
    assert stats._percentiles([None] * 10 + draws[:990])[0] <= 26.0


def test_a_curve_that_begins_at_a_level_has_reached_it() -> None:
    assert first_cost([(0, 0.5), (10, 0.4), (20, 0.9)], 0.5) == 0


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
        trial("arpo", 2, [(0, 0.2), (200, 0.7)], pass_at={1: 0.7}),
        trial("arpo", 1, [(0, 0.2), (100, 0.4)], pass_at={1: 0.4}),
        trial("arpo", 3, [(0, 0.2), (50, 1.0)], "stopped"),
    ]
    base, own = rows(comparison(*given_trials))
    assert (base.algorithm, base.seeds, base.difference) == ("grpo", 3, None)
    assert base.accuracy is not None and base.accuracy.mean == pytest.approx(2 / 3)
    assert list(base.pass_at) == [1] and base.pass_at[1].mean == pytest.approx(2 / 3)
    assert (base.format, base.calls_per_question) == (None, 2.0)
    assert (base.tool_calls, base.trajectories, base.tokens, base.seconds) == (100, 50, 1000, 50)
    assert (own.algorithm, own.seeds, own.tool_calls, own.seconds) == ("arpo", 2, 150, 75)
    assert own.accuracy is not None and own.accuracy.mean == pytest.approx(0.55)
    reach = 12.7062 * 0.1  # the differences are -0.1 and 0.1
    expected = Mean(pytest.approx(0), pytest.approx(-reach, abs=1e-4), pytest.approx(reach, abs=1e-4))
    assert own.difference == Difference(expected, 2, better=1, worse=1)
    level = 0.55  # where the baseline ends, over the seeds that both completed
    assert own.cost_ratio[1.0] is not None and own.cost_ratio[1.0].seeds == 2
    shared = mean_of([given_trials[4], given_trials[3]])  # ends at 100 calls with (0.4 + 0.45) / 2
    assert shared[-1] == (100, pytest.approx(0.425)) and shared[-1][1] < level
    assert own.cost_ratio[1.0].ratio is None
    assert own.cost_ratio[0.5] is not None
    assert own.cost_ratio[0.5].ratio == pytest.approx(((0.375 - 0.2) / 0.225) / 0.5)


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
        assert set(row.cost_ratio.values()) == {None}
    assert markdown(none).count("| 0 of 1 | - |") == 2


def test_the_baseline_may_be_what_is_missing() -> None:
    found = rows(comparison(trial("arpo", 1, [(0, 0.2), (9, 0.8)]), trial("grpo", 1, [], "down")))
    assert found[0].difference is None and set(found[0].cost_ratio.values()) == {None}


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


# Reports


def test_a_table_for_people() -> None:
    shown = markdown(
        comparison(
            trial("grpo", 1, [(0, 0.2), (1000, 0.5)], pass_at={4: 0.75}),
            trial("grpo", 2, [(0, 0.2), (1000, 0.6)], pass_at={4: 0.75}),
            trial("arpo", 1, [(0, 0.2), (1000, 0.7)], pass_at={4: 0.8}),
            trial("arpo", 2, [(0, 0.2), (1000, 0.8)], pass_at={4: 0.8}),
        )
    )
    assert "PARTIAL" not in shown and "only one seed" not in shown
    lines = [line for line in shown.splitlines() if line.startswith(("| grpo", "| arpo"))]
    assert lines[0] == "| grpo | 2 | 55.0 (0.0 to 100.0) | - | - | 75.0 (75.0 to 75.0) | 1,000 | 1.00 | 1.00 | 1.00 |"
    assert lines[1] == (
        "| arpo | 2 | 75.0 (11.5 to 100.0) | +20.0 (+20.0 to +20.0) | 2, 0 | 80.0 (80.0 to 80.0) | 1,000 |"
        " 0.64 (0.60 to 0.67) | 0.64 (0.60 to 0.67) | 0.64 (0.60 to 0.67) |"
    )
    assert lines[2] == "| grpo | 1,000 | 500 | 10,000 | 8.3 | - | - |"


def test_missing_runs_come_first() -> None:
    whole = noisy(["grpo", "ar|po"], 2)
    partial = replace(whole, trials=(*whole.trials[:2], trial("ar|po", 0, [], "out of *memory*\nat step 3")))
    lines = markdown(partial).splitlines()
    assert lines[2] == (
        "PARTIAL: 2 of 4 runs are missing: ar\\|po seed 0 (out of \\*memory\\* at step 3); ar\\|po seed 1 (not run)."
    )


def test_one_seed_has_no_intervals_and_says_so() -> None:
    shown = markdown(comparison(trial("grpo", 1, [(0, 0.2), (9, 0.5)]), trial("arpo", 1, [(0, 0.2), (9, 0.3)])))
    assert "| arpo | 1 | 30.0 (-) | -20.0 (-) | 0, 1 | 9 | not reached | not reached | not reached |" in shown
    assert "There is only one seed" in shown and "Student" not in shown


def test_open_ends_of_intervals_are_shown() -> None:
    base = [trial("grpo", seed, [(0, 0.2), (100, 0.6)]) for seed in (1, 2)]
    own = [trial("arpo", 1, [(0, 0.2), (100, 0.9)]), trial("arpo", 2, [(0, 0.2), (100, 0.3)])]
    assert "| 1.00 (0.57 to none) |" in markdown(comparison(*base, *own))


def test_names_are_no_markup() -> None:
    names = ["grpo", "a|b", "`$x$` <b>&amp;", "[red]x[/red]\n# head\x1b[31m"]
    shown = markdown(noisy(names, 1, title="# <script>"))
    assert "# \\# \\<script\\>" in shown
    for row in (line for line in shown.splitlines() if line.startswith("|")):
        assert row.replace("\\|", "").count("|") in (8, 12)
    assert "| \\`\\$x\\$\\` \\<b\\>\\&amp; |" in shown
    assert "| \\[red\\]x\\[/red\\] \\# head\\\\x1b\\[31m |" in shown


def test_the_terminal_shows_the_same() -> None:
    whole = noisy(["grpo", "[red]x[/red]\x1b\n"], 2)
    partial = replace(whole, trials=whole.trials[:-1])
    name = "[red]x[/red]\\x1b "
    assert missing_note(whole) == ""
    assert missing_note(partial) == f"PARTIAL: 1 of 4 runs are missing: {name} seed 1 (not run)."
    accuracy, costs = terminal_tables(partial)
    for head, body in (accuracy, costs):
        assert [len(row) for row in body] == [len(head)] * 2
        assert [row[0] for row in body] == ["grpo", name]
    assert [row[1] for row in accuracy[1]] == ["2", "1 of 2"]
    assert "calls per question" in costs[0] and not any("pass@" in title for title in accuracy[0])


def test_the_json_holds_everything_and_no_infinity() -> None:
    base = [trial("grpo", seed, [(0, 0.2), (100, 0.6)], pass_at={1: 0.6}) for seed in (1, 2)]
    own = [trial("arpo", 1, [(0, 0.2), (100, 0.9)]), trial("arpo", 2, [(0, 0.2), (100, 0.3)])]
    whole: Comparison = comparison(*base, *own, trial("x", 1, [], "down"))
    read = json.loads(json.dumps(comparison_json(whole), allow_nan=False))
    assert (read["complete"], read["baseline"], read["seeds"]) == (False, "grpo", [1, 2])
    assert read["missing"] == [
        {"algorithm": "x", "seed": 1, "why": "down"},
        {"algorithm": "x", "seed": 2, "why": "not run"},
    ]
    grpo, arpo, other = read["results"]
    assert grpo["pass_at"] == {"1": {"mean": 0.6, "low": pytest.approx(0.6), "high": pytest.approx(0.6)}}
    assert arpo["difference"]["mean"]["mean"] == pytest.approx(0.0)
    assert arpo["cost_ratio"]["1"]["high"] is None and arpo["cost_ratio"]["1"]["low"] == pytest.approx(0.4 / 0.7)
    assert other["accuracy"] is None and other["cost_ratio"] == {"0.5": None, "0.75": None, "1": None}
    assert [each["problem"] for each in read["trials"]] == ["", "", "", "", "down"]
    assert read["trials"][0]["curve"][1]["tool_calls"] == 100
