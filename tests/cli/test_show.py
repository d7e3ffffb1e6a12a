"""`arpo show`: a saved tree, one trajectory of it, the list of a step, and error messages that say what exists."""

from __future__ import annotations

import itertools
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from cli_runs import Arpo
from trees import branched, searched

from arpo.cli import display
from arpo.cli.main import main
from arpo.runs.run_dir import create_run_dir
from arpo.types import Credit, Fault, Reward, RolloutTree, ScoredTree, Task, ToolResult


def outcome(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    """Exit code, and what was printed."""
    given, sys.argv = sys.argv, ["arpo", "show", *map(str, arguments)]
    code = 0
    try:
        main()
    except SystemExit as stop:
        code = int(stop.code or 0)
    finally:
        sys.argv = given
    printed = capsys.readouterr()
    return code, printed.out + printed.err


def with_results(tree: RolloutTree, *results: ToolResult) -> RolloutTree:
    waiting = iter(results)
    nodes = (replace(node, result=next(waiting)) if node.result else node for node in tree.nodes)
    return replace(tree, nodes=tuple(nodes))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run with trees of steps 2 and 5; the terminal is wide."""
    monkeypatch.setattr(display.console, "_width", 400)
    directory = tmp_path / "runs" / "mine"
    odd = replace(searched(result="\x1b[2J[bold]hm[/]"), task=Task("odd\u202e", "Who?", ("me", "you")))
    first = with_results(branched(), ToolResult("a result", seconds=0.25, cached=True))
    second = with_results(odd, ToolResult("", Fault.TIMEOUT, 2.5, 3))
    rewards = (Reward(0.5, {"format": 1.0, "correct": 0.25}), Reward(-1.0), Reward(1.0))
    credits = (Credit(0.5, {1: 0.125, 3: 0.5}), Credit(-1.5, {}), Credit(0.0, {}))
    scored = ScoredTree(first, rewards, credits, (True, True, False))
    with create_run_dir(directory, {"rollout": {}}) as run_dir:
        run_dir.write_trees(2, [scored])
        run_dir.write_trees(5, [scored, ScoredTree(second, rewards[:1], credits[:1])])
    return directory


def test_the_last_tree_is_shown_in_full(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = outcome(capsys, run)
    assert code == 0
    for part in (
        "step 5, question 0 of 2: q1",
        "[search: cached]",
        "[H 0.300, at the start 0.100, dH +0.1250, P 0.6000: P > tau]",
        "trajectory 1: answer, reward 0.50 (format 1, correct 0.25), advantage +0.500\n",
        "trajectory 2: answer, reward -1.00, advantage -1.500\n",
        "trajectory 3: answer, reward 1.00, advantage +0.000, left out of training\n",
        "right answer: Upper Kelso",
        "3 trajectories, 1 tool calls (0 failed), 1 branch points, 13 tokens (20 without sharing)",
    ):
        assert part in text
    assert outcome(capsys, run, "--step", 2)[1] == text.replace("step 5, question 0 of 2", "step 2, question 0 of 1")


def test_failed_calls_are_shown_and_text_is_escaped(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = outcome(capsys, run, "--prompt", 1)
    assert code == 0
    assert r"step 5, question 1 of 2: odd\u202e" in text
    assert r"\x1b[2J[bold]hm[/]" in text
    assert "[search: failed, timeout; 2.500 s, 3 attempts]" in text
    assert "(1 failed)" in text
    assert "\x1b" not in text


def test_a_trajectory_reads_as_a_conversation(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = outcome(capsys, run, "--trajectory", 1)
    assert code == 0
    heads = [line for line in text.splitlines() if line.startswith("---")]
    assert heads == [
        "--- prompt, 2 tokens",
        "--- model, 2 tokens, entropy 0.500, advantage +0.125",
        "--- tool, 1 tokens",
        "--- model, 3 tokens, entropy 0.500, advantage +0.500",
    ]
    assert text.index("question") < text.index("a result") < text.index("trajectory 1: answer")
    assert "trajectory 2" not in text


def test_the_list_has_every_question(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = outcome(capsys, run, "--list")
    assert code == 0
    rows = [line.strip().split(maxsplit=5) for line in text.splitlines()]
    assert ["0", "q1", "0.17", "3", "1", "Where was Mira Tolven born?"] in rows
    assert ["1", r"odd\u202e", "0.50", "1", "0", "Who?"] in rows


def test_errors_say_what_exists(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def told(*arguments: object) -> str:
        code, text = outcome(capsys, *arguments)
        assert code == 2
        return text

    assert told(run, "--step", 3) == "error: --step 3: there are trees of steps 2 to 5\n"
    assert told(run, "--prompt", 2) == (
        "error: --prompt 2: step 5 has 2 questions, counted from 0; --list shows them\n"
    )
    assert "--prompt -1: step 5 has 2" in told(run, "--prompt", -1)
    for number in (0, 4):
        assert f"--trajectory {number}: question 0 of step 5 has 3 trajectories, counted from 1" in told(
            run, "--trajectory", number
        )
    assert told(run.parent) == f"error: {run.parent}: not a run (it has no config.json of one); runs in it: {run}\n"
    assert told(run / "nowhere") == f"error: {run / 'nowhere'}: not a run (it has no config.json of one)\n"
    create_run_dir(run.parent / "new", {"rollout": {}}).close()
    assert "holds no trees; arpo train saves them unless run.save_trees=false" in told(run.parent / "new")


def overwrite(content: bytes, path: Path) -> None:
    path.write_bytes(content)


def replace_by_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.slow
def test_a_damaged_run_is_shown_as_far_as_it_goes_or_named(arpo: Arpo, trained: Path, tmp_path: Path) -> None:
    """By every command that reads runs; an exception would end this test."""
    damages: list[Callable[[Path], None]] = [
        Path.unlink,
        lambda path: os.truncate(path, 0),
        lambda path: os.truncate(path, path.stat().st_size // 2),
        *(partial(overwrite, content) for content in (b"\xff\x00{]\n" * 3, b"NaN\n", b"[" * 100_000)),
        replace_by_a_folder,
    ]
    names = ["config.json", "metrics.jsonl", "run.lock", "trees/step_000002.jsonl.zst", "trees/step_000002.index.json"]
    for number, (name, damage) in enumerate(itertools.product(names, damages)):
        run = shutil.copytree(trained, tmp_path / "runs" / str(number))
        damage(run / name)
        for command in (("show", run), ("show", run, "--list"), ("view", run, "--export", tmp_path / "page.html")):
            done = arpo(*command)
            assert done.code == 0 or (done.code == 2 and done.err.startswith("error: ")), (name, number, done)
