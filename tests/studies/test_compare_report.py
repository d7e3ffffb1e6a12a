"""The reports of a comparison: tables by hand, their width, hostile names, and results.json read back."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from comparisons import against, comparison, noisy, trial, tuning_run

from arpo.cli import study
from arpo.cli.main import main
from arpo.errors import ArpoError
from arpo.studies.compare.report import _ratio, comparison_json, markdown, missing_note, tables
from arpo.studies.compare.results import ArmSettings, Comparison, comparison_from_json, load_comparison, raw_json
from arpo.studies.compare.stats import Mean, rows


def two_seeds() -> Comparison:
    more: dict[str, object] = {"answers": ((2, 1), (2, 2)), "clip_fraction": 0.0123}
    whole = comparison(
        trial("grpo", 1, [(0, 0.2), (1000, 0.5)], pass_at={1: 0.5, 4: 0.75}),
        trial("grpo", 2, [(0, 0.2), (1000, 0.6)], pass_at={1: 0.6, 4: 0.75}),
        trial("arpo", 1, [(0, 0.2), (1000, 0.7)], pass_at={1: 0.7, 4: 0.8}, **more),
        trial("arpo", 2, [(0, 0.2), (1000, 0.3)], pass_at={1: 0.3, 4: 0.8}, **more),
    )
    arm = ArmSettings(8, 4, "entropy", 16, 2, 5e-4, 0.1)
    runs = (tuning_run("arpo", 8, 1000, 0.5), tuning_run("arpo", 4, 1000, 0.1), tuning_run("grpo", 8, 1000, 0.1))
    return replace(whole, settings={"arpo": arm}, budget=100, tuning=runs)


def body(whole: Comparison, title: str) -> list[list[str]]:
    """The rows of the table whose title begins like this."""
    return next(table.rows for table in tables(whole) if table.title.startswith(title))


def test_tables_for_people() -> None:
    whole = two_seeds()
    assert body(whole, "Tuning") == [
        ["arpo", "M=8", "35.0", "50.0", "yes"],
        ["arpo", "M=4", "15.0", "10.0", ""],
        ["grpo", "M=8", "15.0", "10.0", "yes"],
    ]
    assert body(whole, "Settings") == [
        ["grpo", "-", "-", "-", "-", "-", "-", "-", "-"],
        ["arpo", "8", "4", "entropy", "16", "2", "0.0005", "0.1", "1.23"],
    ]
    assert body(whole, "Final accuracy, and the difference to grpo") == [
        ["grpo", "2", "55.0 (2 seeds)", "-", "-", "-"],
        ["arpo", "2", "50.0 (2 seeds)", "-5.0 (2 seeds)", "1, 1", "0.874"],
    ]
    assert body(whole, "Final accuracy by seed") == [["grpo", "50.0", "60.0"], ["arpo", "70.0", "30.0"]]
    assert body(whole, "Noise") == [["grpo", "7.07", "-"], ["arpo", "28.28", "25.00"]]
    assert body(whole, "Answers") == [
        ["grpo", "75.0 (2 seeds)", "-", "-"],
        ["arpo", "80.0 (2 seeds)", "-", "-"],
    ]
    assert body(whole, "Cost") == [[name, "1,000", "500", "10,000", "2", "8.3"] for name in ("grpo", "arpo")]
    # levels: 0.2 + 0.5 * 0.35, ...; grpo's curves rise by 0.3 and 0.4 in 1000 calls, arpo's by 0.5 and 0.1
    assert body(whole, "Tool calls until a level is first reached") == [
        ["grpo", "37.5", "50 %", "2 of 2", "583", "438"],
        ["grpo", "46.2", "75 %", "2 of 2", "875", "656"],
        ["grpo", "55.0", "100 %", "1 of 2", "never", "875"],
        ["arpo", "37.5", "50 %", "1 of 2", "350", "never"],
        ["arpo", "46.2", "75 %", "1 of 2", "525", "never"],
        ["arpo", "55.0", "100 %", "1 of 2", "700", "never"],
    ]
    assert body(whole, "Tool calls until a level is first reached, divided by that of grpo") == [
        ["arpo", "37.5", "50 %", "1 of 2", "2 of 2", "1 of 2", "0.60 (1 seed)", "-"],
        ["arpo", "46.2", "75 %", "1 of 2", "2 of 2", "1 of 2", "0.60 (1 seed)", "-"],
        ["arpo", "55.0", "100 %", "1 of 2", "1 of 2", "0 of 2", "-", "-"],
    ]
    for unit in ("Sampled tokens", "Optimizer steps", "Wall time"):
        assert body(whole, unit)[0][-2] == "0.60 (1 seed)"
    shown = markdown(whole)
    assert "PARTIAL" not in shown and "only one seed" not in shown and "- Seeds: 1, 2. Accuracy before" in shown
    assert "on other seeds (1000)" in shown and "same budget of 100 tool calls" in shown


def test_comparisons_that_hold_are_marked() -> None:
    whole = against(
        [[(0, 0.2), (calls, 0.6)] for calls in (50, 51, 52, 49)], [[(0, 0.2), (100, 0.6)] for _ in range(4)], 0.5, 0.6
    )
    for row in body(whole, "Tool calls until a level is first reached, divided"):
        assert row[2:5] == ["4 of 4"] * 3
        assert row[5:] == ["0.50 (0.48 to 0.53)", "<0.001 *"]
    slow = replace(
        whole,
        trials=tuple(
            replace(each, algorithm={"grpo": "arpo", "arpo": "grpo"}[each.algorithm]) for each in whole.trials
        ),
    )
    assert body(slow, "Tool calls until a level is first reached, divided")[0][5] == "1.98 (1.90 to 2.06)"
    unsure = against([[(0, 0.2), (c, 0.6)] for c in (50, 90, 140)], [[(0, 0.2), (100, 0.6)]] * 3, 0.5)
    assert "*" not in body(unsure, "Tool calls until a level is first reached, divided")[0][-1]


def test_absolute_levels_have_no_share_of_a_gain() -> None:
    whole = replace(noisy(["grpo", "arpo"], 2), levels=(0.5, 0.6))
    for table in tables(whole):
        if "level" in table.title:
            assert "of gain" not in table.head and [row[1] for row in table.rows[:2]] == ["50.0", "60.0"]


def test_every_table_fits_into_100_columns() -> None:
    whole = noisy(["grpo", "reinforce++", "arpo-random"], 12)
    arm = ArmSettings(16, 8, "posthoc_entropy", 128, 16, 1e-06, 0.1)
    trials = tuple(replace(each, pass_at={1: 0.5, 3: 0.6, 5: 0.7}) for each in whole.trials)
    whole = replace(whole, settings=dict.fromkeys(whole.algorithms, arm), trials=trials)
    for title, head, lines in tables(whole):
        widths = [max(len(row[column]) for row in [head, *lines]) for column in range(len(head))]
        assert sum(widths) + 3 * len(widths) <= 102 and len(title) <= 100, title
        assert all(len(row) == len(head) for row in lines)
    by_seed = [table for table in tables(whole) if table.title.startswith("Final accuracy by seed")]
    assert [len(table.head) for table in by_seed] == [6, 6, 3]  # five seeds, five and two


def test_missing_runs_come_first() -> None:
    whole = noisy(["grpo", "ar|po"], 2)
    partial = replace(whole, trials=(*whole.trials[:2], trial("ar|po", 0, [], "out of *memory*\nat step 3")))
    lines = markdown(partial).splitlines()
    assert lines[2] == (
        "PARTIAL: 2 of 4 runs are missing: ar\\|po seed 0 (out of \\*memory\\* at step 3); ar\\|po seed 1 (not run)."
    )
    tuned = replace(whole, budget=100, tuning=(tuning_run("grpo", 4, 1000, 0.5, "collapsed"),))
    assert missing_note(tuned) == "PARTIAL: 1 of 5 runs are missing: grpo seed 1000 (tuning with M=4: collapsed)."
    assert body(tuned, "Tuning") == [["grpo", "M=4", "failed", "-", ""]]


def test_an_interval_has_three_seeds_and_ends_that_can_be_read() -> None:
    wide = Mean(1.81, 0.002, 2000.0)
    assert _ratio(wide, 3) == "1.81 (<0.01 to >100)" and _ratio(Mean(0.5, 0.25, 1.0), 3) == "0.50 (0.25 to 1.00)"
    assert (_ratio(wide, 2), _ratio(Mean(1.12, None, None), 1)) == ("1.81 (2 seeds)", "1.12 (1 seed)")
    assert _ratio(Mean(1234.5, 900.0, 1500.0), 3) == "1,234 (>100 to >100)"
    assert _ratio(Mean(0.0012, 0.001, 0.002), 3) == "0.001 (<0.01 to <0.01)"
    ends = enumerate((0.5, 0.6, 0.7))  # 4.303 standard errors of 0.1 / sqrt(3)
    three = comparison(*(trial("grpo", seed, [(0, 0.2), (9, end)]) for seed, end in ends))
    assert body(three, "Final accuracy, and")[0][:3] == ["grpo", "3", "60.0 (35.2 to 84.8)"]


def test_one_seed_has_no_intervals_and_says_so() -> None:
    whole = comparison(trial("grpo", 1, [(0, 0.2), (9, 0.5)]), trial("arpo", 1, [(0, 0.2), (9, 0.3)]))
    assert "| arpo | 1 | 30.0 (1 seed) | -20.0 (1 seed) | 0, 1 | - |" in markdown(whole)
    assert "There is only one seed" in markdown(whole) and "Student" not in markdown(whole)


def test_names_are_no_markup() -> None:
    names = ["grpo", "a|b", "`$x$` <b>&amp;", "[red]x[/red]\n# head\x1b[31m"]
    whole = noisy(names, 1, title="# <script>")
    shown = markdown(whole)
    assert "# \\# \\<script\\>" in shown
    wanted = [len(table.head) + 1 for table in tables(whole) for _ in (0, 1, *table.rows)]
    assert [row.replace("\\|", "").count("|") for row in shown.splitlines() if row.startswith("|")] == wanted
    assert "| \\`\\$x\\$\\` \\<b\\>\\&amp; |" in shown
    assert "| \\[red\\]x\\[/red\\] \\# head\\\\x1b\\[31m |" in shown


def test_the_terminal_shows_names_as_they_are() -> None:
    whole = noisy(["grpo", "[red]x[/red]\x1b\n"], 2)
    partial = replace(whole, trials=whole.trials[:-1])
    name = "[red]x[/red]\\x1b "
    assert missing_note(whole) == ""
    assert missing_note(partial) == f"PARTIAL: 1 of 4 runs are missing: {name} seed 1 (not run)."
    assert [row[:2] for row in body(partial, "Final accuracy, and")] == [["grpo", "2"], [name, "1 of 2"]]


def test_the_json_holds_everything() -> None:
    whole = replace(two_seeds(), algorithms=("grpo", "arpo", "x"))
    read = json.loads(json.dumps(comparison_json(whole), allow_nan=False))
    assert (read["complete"], read["baseline"], read["seeds"]) == (False, "grpo", [1, 2])
    assert read["missing"] == [{"algorithm": "x", "seed": seed, "why": "not run"} for seed in (1, 2)]
    grpo, arpo, other = read["results"]
    assert grpo["pass_at"]["4"] == {"mean": 0.75, "low": pytest.approx(0.75), "high": pytest.approx(0.75)}
    assert arpo["difference"]["mean"]["mean"] == pytest.approx(-0.05)
    assert arpo["difference"]["p"] == pytest.approx(0.874, abs=1e-3)
    assert arpo["difference"]["holm_p"] == 1.0  # two comparisons
    assert other["accuracy"] is None
    ratio = read["cost_ratios"][0]
    assert (ratio["algorithm"], ratio["cost"], ratio["level"]["fraction"]) == ("arpo", "tool_calls", 0.5)
    assert ratio["by_seed"] == {"1": pytest.approx(0.6)} and ratio["ratio"]["low"] is None
    assert read["trials"][0]["curve"][1]["tool_calls"] == 1000
    assert read["trials"][2]["answers"] == [[2, 1], [2, 2]]
    assert read["tuning_results"][0]["choice"] == {"M": 8} and read["tuning_results"][0]["chosen"] is True


@pytest.mark.parametrize("whole", [two_seeds(), noisy(["grpo", "arpo", "x|y"], 5)])
def test_the_same_tables_come_from_the_file(whole: Comparison, tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_text(json.dumps(comparison_json(whole)))
    read = load_comparison(path)
    assert read == whole
    assert tables(read) == tables(whole) and markdown(read) == markdown(whole)
    assert comparison_json(read) == comparison_json(whole)


def test_files_that_are_something_else_are_refused(tmp_path: Path) -> None:
    path, good = tmp_path / "results.json", json.loads(json.dumps(raw_json(two_seeds())))
    curve: list[dict[str, object]] = good["trials"][0]["curve"]
    bad = [
        {},
        {**good, "seeds": ["1"]},
        {**good, "trials": 3},
        {**good, "baseline": "x"},
        {**good, "algorithms": [3]},
        {**good, "trials": [{**good["trials"][0], "curve": [{**curve[0], "accuracy": True}]}]},
        {**good, "trials": [{**good["trials"][0], "curve": [{**curve[0], "tokens": 0.5}]}]},
        {**good, "trials": [{**good["trials"][0], "curve": [{**curve[0], "tokens": -1}]}]},
        {**good, "trials": [{**good["trials"][0], "curve": [{**curve[0], "tokens": 10**400}]}]},
        {**good, "trials": [{**good["trials"][0], "curve": [{**curve[0], "seconds": 1e308}]}]},
        {**good, "budget": 0},
        {**good, "settings": {"arpo": {"lr": 3}}},
    ]
    for content in bad:
        path.write_text(json.dumps(content))
        with pytest.raises(ArpoError, match=r"is not a results\.json of arpo compare"):
            load_comparison(path)
    path.write_text(json.dumps({**good, "format": 1}))
    with pytest.raises(ArpoError, match="another version of arpo"):
        load_comparison(path)
    path.write_text("nonsense")
    with pytest.raises(ArpoError, match="damaged"):
        load_comparison(path)


def test_every_number_can_be_computed_from_the_raw_numbers() -> None:
    """The accuracy of a row, its interval and a ratio, computed by hand from what the file holds."""
    raw = json.loads(json.dumps(raw_json(noisy(["grpo", "arpo"], 5))))
    assert comparison_from_json(raw) == noisy(["grpo", "arpo"], 5)
    ends = {
        name: [t["curve"][-1]["accuracy"] for t in raw["trials"] if t["algorithm"] == name] for name in ("grpo", "arpo")
    }
    found = rows(comparison_from_json(raw))[1]
    assert found.accuracy is not None and found.difference is not None
    assert found.accuracy.mean == pytest.approx(np.mean(ends["arpo"]))
    gaps = np.array(ends["arpo"]) - np.array(ends["grpo"])
    half_width = 2.77645 * np.std(gaps, ddof=1) / math.sqrt(5)
    assert found.difference.mean == pytest.approx(
        (gaps.mean(), gaps.mean() - half_width, gaps.mean() + half_width), rel=1e-4
    )


# The command line


def arpo(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """The exit code of the command."""
    monkeypatch.setattr(sys, "argv", ["arpo", *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    return int(end.value.code or 0)


def test_recompute_prints_what_the_comparison_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, path = two_seeds(), tmp_path / "results.json"
    path.write_text(json.dumps(comparison_json(whole)))
    study._print_comparison(whole)
    printed = capsys.readouterr().out
    assert arpo(monkeypatch, "compare", "--recompute", str(path)) == 0
    assert capsys.readouterr().out == printed and "0.60 (1 seed)" in printed and "Holm's p" in printed
    assert arpo(monkeypatch, "compare", "--recompute", str(path), "--levels", "0.25,0.3") == 0
    study._print_comparison(replace(whole, levels=(0.25, 0.3)))
    first, second = capsys.readouterr().out.split("Tuning, on seeds")[1:]
    assert first == second != printed


def test_recompute_says_that_runs_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "results.json"
    path.write_text(json.dumps(comparison_json(replace(two_seeds(), algorithms=("grpo", "arpo", "x")))))
    assert arpo(monkeypatch, "compare", "--recompute", str(path)) == 1
    assert capsys.readouterr().out.startswith("PARTIAL: 2 of 9 runs are missing: x seed 1 (not run)")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--recompute", "x.json", "--seeds", "3", "--jobs", "1"], "takes no jobs, seeds; --levels may be given"),
        (["my.toml", "--recompute", "x.json"], "takes no config;"),
        (["--recompute", "nowhere.json"], "nowhere.json"),
        ([], "CONFIG is missing"),
    ],
)
def test_mistakes_on_the_command_line(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert arpo(monkeypatch, "compare", *arguments) == 2
    assert message in capsys.readouterr().err


WITHOUT = """
import sys

sys.modules |= dict.fromkeys(("torch", "transformers", "matplotlib"))  # importing them fails
from arpo.cli.main import main

sys.argv = ["arpo", "compare", "--recompute", sys.argv[1]]
main()
"""


def test_recompute_needs_neither_torch_nor_matplotlib(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_text(json.dumps(comparison_json(two_seeds())))
    done = subprocess.run([sys.executable, "-c", WITHOUT, str(path)], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "divided by that of grpo" in done.stdout
    assert [each.name for each in tmp_path.iterdir()] == ["results.json"]
