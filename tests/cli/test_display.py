"""What a person sees: a step as a line, tools as a table, trees as trees, and nothing that can steer the terminal."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from rich.console import Console
from trees import TASK, model, prompt, tool, tree

import arpo.cli.display as display
from arpo.cli.display import print_table, print_tree, printable, step_header, step_line, tool_lines
from arpo.tools.executor import ToolStats
from arpo.types import Decision, Leaf, Reward, RolloutTree, ScoredTree, StopReason, Task


def test_tool_table() -> None:
    stats = {"search": ToolStats(calls=12, cached=3, model=2, p50_seconds=0.25, p95_seconds=1.5), "python": ToolStats()}
    stats[""] = ToolStats(calls=1, model=1)
    assert tool_lines(stats) == [
        "tool                   calls  cached  model  timeout  infra   p50 s   p95 s",
        "search                    12       3      2        0      0   0.250   1.500",
        "(no such tool)             1       0      1        0      0   0.000   0.000",
    ]
    assert tool_lines({"search": ToolStats()}) == []


def test_a_step_is_one_line_under_the_header() -> None:
    numbers = {
        "reward": 0.456,
        "accuracy": 0.5,
        "format": 1.0,
        "tool_calls": 123,
        "branches": 7,
        "entropy_start": 0.5,
        "entropy_after_tool": 0.625,
        "unique_tokens": 9860,
        "total_tokens": 14100,
        "rollout_seconds": 12.34,
        "tool_seconds": 0.1,
        "train_seconds": 5.67,
    }
    assert f"{step_header()}\n{step_line(12, numbers)}\n" == (
        "step reward   acc format  calls branches  entropy: start tool"
        "  tokens: unique/total  seconds: sample tools train\n"
        "  12   0.46   50%   100%    123        7            0.50 0.62"
        "            9.9k/14.1k             12.3   0.1   5.7\n"
    )
    assert step_line(12, {**numbers, "test_accuracy": 0.925}).endswith("  5.7  held-out accuracy 92.5%")
    for width in (60, 80, 110, 160):
        lines = [step_header(width), *step_line(12, {**numbers, "test_accuracy": 0.925}, width).split("\n")]
        assert max(map(len, lines)) <= width and len(lines[0]) == len(lines[1].partition("  held-out")[0])
    assert step_line(12, {**numbers, "test_accuracy": 0.925}, 80) == (
        "  12   0.46   50%   100%    123        7             12.3   0.1   5.7\n     held-out accuracy 92.5%"
    )


def test_a_wide_table_is_printed_in_parts_that_break_no_word(monkeypatch: pytest.MonkeyPatch) -> None:
    head = ["algorithm", *(f"measurement{number}" for number in range(8))]
    rows = [["arpo", *("0.123456789" for _ in range(8))], ["tree-grpo", *("unreachable" for _ in range(8))]]
    for width, parts in ((80, 2), (160, 1)):
        out = io.StringIO()
        monkeypatch.setattr(display, "console", Console(file=out, force_terminal=True, color_system=None, width=width))
        print_table(head, rows)
        text = out.getvalue()
        assert max(map(len, text.splitlines())) <= width
        assert text.count("algorithm") == text.count("tree-grpo") == parts
        assert all(text.count(name) == 1 for name in head[1:]) and text.count("unreachable") == 8


def test_a_narrow_table_wraps_headings_and_neither_names_nor_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    head = ["benchmark", "questions", "score %", "pass@1 %", "calls", "tokens", "format %", "seconds"]
    row = ["held-out questions", "3", "0.0 (0.0 to 56.1)", "0.0 (0.0 to 56.1)", "0.00", "57", "0.0", "0.81"]
    out = io.StringIO()
    monkeypatch.setattr(display, "console", Console(file=out, force_terminal=True, color_system=None, width=80))
    print_table(head, [row])
    text = out.getvalue()
    assert max(map(len, text.splitlines())) <= 80 and "…" not in text
    assert text.count("held-out questions") == text.count("0.0 (0.0 to 56.1)") == 2
    assert all(word in text.split() for name in head for word in name.split())


def test_a_long_note_shortens_nothing_else_of_a_bar_and_a_bar_without_progress_is_not_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = io.StringIO()
    monkeypatch.setattr(display, "console", Console(file=out, force_terminal=True, width=80))
    with display.ConsoleReporter().progress("cold start", 150):
        pass
    assert "cold" not in out.getvalue()
    with display.ConsoleReporter().progress("training", 2) as bar:
        bar.update(0, note="0/16 trajectories, 0 calls, [b]1174 tokens/s and many more words")
    line = next(line for line in re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", out.getvalue()).split("\n") if "0/16" in line)
    assert re.search(r"training \S+ 0/2 \d:\d\d:\d\d left -:--:-- 0/16 trajectories, 0 calls, \[b\]1174 .*…", line)


def test_the_bar_of_a_step_says_what_was_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    out, reporter = io.StringIO(), display.ConsoleReporter()
    monkeypatch.setattr(display, "console", Console(file=out, force_terminal=True, width=160))
    monkeypatch.setattr(display, "NOTE_SECONDS", 0.0)
    with reporter.progress("training", 2) as bar:
        bar.update(0)
        reporter.sampling_starts(8)
        reporter.sampled(tokens=5)
        reporter.sampled(tool_calls=2, trajectories=3)
    assert "3/8 trajectories, 2 calls, " in out.getvalue()
    reporter.sampled(tokens=1)  # also when there is no bar any more


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain text, größe 日本 🙂", "plain text, größe 日本 🙂"),
        ("two\nlines", "two\nlines"),
        ("\x1b[31mred\x1b[0m", "\\x1b[31mred\\x1b[0m"),
        ("bell\a back\b return\r tab\t null\0", "bell\\x07 back\\x08 return\\r tab\\t null\\x00"),
        ("\x9b31m and \x85", "\\x9b31m and \\x85"),
        ("\u202egnp.exe\u2066", "\\u202egnp.exe\\u2066"),
        ("zero\u200bwidth\ufeff", "zero\\u200bwidth\\ufeff"),
        ("half \ud800 and \udfff", "half \\ud800 and \\udfff"),
        ("line\u2028paragraph\u2029", "line\\u2028paragraph\\u2029"),
        ("[red]x[/red]", "[red]x[/red]"),
        ("", ""),
    ],
)
def test_control_and_hidden_characters_are_escaped(text: str, shown: str) -> None:
    assert printable(text) == shown


@pytest.mark.slow
def test_every_character_can_be_shown() -> None:
    for start in range(0, 0x110000, 0x1000):
        text = printable("".join(map(chr, range(start, start + 0x1000))))
        assert all(c.isprintable() or c == "\n" for c in text)
        text.encode("utf-8")


Shown = Callable[[RolloutTree, list[Reward]], str]


@pytest.fixture(params=[False, True], ids=["plain", "terminal"])
def show(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shown]:
    """Prints a tree and returns what came out, in a file and on a terminal without colours."""
    out = io.StringIO()
    console = Console(
        file=out, force_terminal=request.param, color_system=None, highlight=False, soft_wrap=True, width=200
    )
    monkeypatch.setattr(display, "console", console)

    def run(shown: RolloutTree, rewards: list[Reward]) -> str:
        out.seek(0)
        out.truncate()
        print_tree(ScoredTree(shown, tuple(rewards)))
        return out.getvalue()

    yield run


def test_a_tree_is_shown_with_its_decisions_and_ends(show: Shown) -> None:
    decision = Decision(0.5, 0.75, 0.25, 0.55, 1, "a reason", 20)
    nodes = [
        prompt(text="Where was Mira born?"),
        model(0, [3], "<search>mira</search>"),
        replace(tool(1, text="<result>Mira: Kelso</result>\n"), decision=decision),
        model(2, [4], "<answer>Kelso</answer>"),
        model(2, [5], "<answer>Rome</answer>"),
    ]
    shown = RolloutTree(
        TASK, tuple(nodes), (Leaf(4, StopReason.ANSWER), Leaf(3, StopReason.ANSWER), Leaf(1, StopReason.MAX_TOOL_CALLS))
    )
    assert [line.rstrip() for line in show(shown, [Reward(0.0), Reward(1.1), Reward(-1.0)]).splitlines()] == [
        "Where was Mira born?",
        "└── <search>mira</search>",
        "    ├── trajectory 3: max_tool_calls, reward -1.00",
        "    └── <result>Mira: Kelso</result>",
        "        [H 0.750, at the start 0.500, dH +0.2500, P 0.5500: a reason]",
        "        ├── <answer>Kelso</answer>",
        "        │   └── trajectory 2: answer, reward 1.10",
        "        └── <answer>Rome</answer>",
        "            └── trajectory 1: answer, reward 0.00",
        "right answer: Upper Kelso",
    ]


HOSTILE = "[red]x[/red] [/] [link=http://e.vil]y[/link] \x1b[2J\x1b]0;title\a \u202e \ud800 :smile:"


def test_model_tool_and_question_text_is_shown_as_it_is(show: Shown) -> None:
    task = Task("q", "Who?", (HOSTILE, "[bold]b"))
    nodes = [prompt(text=HOSTILE), model(0, [3], HOSTILE), tool(1, text=HOSTILE), model(2, [4], HOSTILE)]
    out = show(tree(nodes, [3], task), [Reward(0.0)])
    literal = "[red]x[/red] [/] [link=http://e.vil]y[/link] \\x1b[2J\\x1b]0;title\\x07 \\u202e \\ud800 :smile:"
    assert out.count(literal) == 5
    assert f"right answer: {literal} or [bold]b\n" in out
    assert all(c.isprintable() or c == "\n" for c in out)
