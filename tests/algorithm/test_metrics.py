"""The numbers of a step, and how they and the trees are shown, on hand-made trees."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from rich.console import Console
from trees import TASK, model, prompt, searched, tool, tree, two_branches

import arpo.cli.display as display
from arpo.algorithm.metrics import rollout_metrics, tool_metrics
from arpo.cli.display import HEADER, print_tree, printable, step_line, tool_lines
from arpo.tools.stats import ToolStats
from arpo.types import Decision, Fault, Leaf, Node, Reward, RolloutTree, ScoredTree, StopReason, Task, ToolResult


def decided(node: Node, entropy: float, branches: int, initial: float = 0.5) -> Node:
    """The tool node with a decision about branching from it."""
    return replace(node, decision=Decision(initial, entropy, 0.25, 0.55, branches, "a reason", 20), seconds=1.5)


def scored(total: float, correct: float = 0.0, format_: float = 1.0) -> Reward:
    return Reward(total, {"format": format_, "accuracy": correct, "correct": correct, "bonus": 0.0})


def branched() -> RolloutTree:
    """`two_branches` with one branch opened at its tool result and entropies that can be told apart."""
    base = two_branches()
    nodes = list(base.nodes)
    nodes[1] = replace(nodes[1], entropies=(1.0, 2.0))
    nodes[2] = decided(nodes[2], entropy=0.75, branches=1)
    nodes[5] = replace(nodes[5], entropies=(0.0, 0.0, 0.0, 2.0))
    return RolloutTree(base.task, tuple(nodes), base.leaves)


def test_the_numbers_of_two_trees() -> None:
    broken = searched(fault=Fault.INFRA)
    first = (scored(1.1, 1.0), scored(0.0), scored(-1.0, format_=0.0))
    assert rollout_metrics([ScoredTree(branched(), first), ScoredTree(broken, (scored(0.3),))], 20) == {
        "reward": pytest.approx((1.1 + 0.0 - 1.0 + 0.3) / 4),
        "accuracy": 0.25,
        "format": 0.75,
        "informative_groups": 0.5,  # the first tree's rewards differ, the second has only one
        "questions": 2,
        "trajectories": 4,
        "tool_calls": 2,  # the shared one counts once
        "calls_per_trajectory": 0.75,  # 1 + 1 + 0 of the first tree, 1 of the second
        "tool_faults": 0,
        "infra_faults": 1,
        "branches": 1,
        "entropy_start": pytest.approx((1.5 + 0.5 + 0.5) / 3),  # turns that start at a prompt
        "entropy_after_tool": 0.75,
        "sampled_tokens": 2 + 3 + 1 + 4 + 2,
        "completion_tokens": ((2 + 3) + (2 + 1) + 4 + 2) / 4,
        "unique_tokens": 13 + 5,
        "total_tokens": (2 + 2 + 1 + 3) + (2 + 2 + 1 + 1) + (2 + 4) + 5,
        "tool_seconds": 1.5,
    }


def test_the_numbers_of_each_tool() -> None:
    def made(parent: int, name: str, result: ToolResult) -> Node:
        return replace(tool(parent, name=name), result=result)

    durations = [0.1 * n for n in range(1, 21)]
    nodes = [
        prompt([1]),
        *(made(0, "search", ToolResult("", seconds=seconds)) for seconds in reversed(durations)),
        made(0, "search", ToolResult("", seconds=99.0, cached=True)),
        made(0, "python", ToolResult("", Fault.TIMEOUT, 10.0)),
        made(0, "python", ToolResult("", Fault.MODEL, 2.0)),
        made(0, "nonsense", ToolResult("", Fault.MODEL, attempts=0)),
    ]
    assert tool_metrics([tree(nodes[:3], [1]), tree([nodes[0], *nodes[3:]], [1])]) == {
        "tool.python.calls": 2,
        "tool.python.cached": 0,
        "tool.python.model_faults": 1,
        "tool.python.timeout_faults": 1,
        "tool.python.infra_faults": 0,
        "tool.python.p50_seconds": 2.0,
        "tool.python.p95_seconds": 10.0,
        "tool.search.calls": 21,
        "tool.search.cached": 1,
        "tool.search.model_faults": 0,
        "tool.search.timeout_faults": 0,
        "tool.search.infra_faults": 0,
        "tool.search.p50_seconds": pytest.approx(1.0),
        "tool.search.p95_seconds": pytest.approx(1.9),
    }


def test_what_each_tool_did_is_a_table() -> None:
    stats = {"search": ToolStats(calls=12, cached=3, model=2, p50_seconds=0.25, p95_seconds=1.5), "python": ToolStats()}
    stats[""] = ToolStats(calls=1, model=1)
    assert tool_lines(stats) == [
        "tool                   calls  cached  model  timeout  infra   p50 s   p95 s",
        "search                    12       3      2        0      0   0.250   1.500",
        "(no such tool)             1       0      1        0      0   0.000   0.000",
    ]
    assert tool_lines({"search": ToolStats()}) == []


def test_whose_fault_a_failed_call_was() -> None:
    trees = [searched(fault=fault) for fault in (None, Fault.MODEL, Fault.TIMEOUT, Fault.INFRA, Fault.INFRA)]
    metrics = rollout_metrics([ScoredTree(tree, (scored(0.0),)) for tree in trees], 20)
    assert (metrics["tool_calls"], metrics["tool_faults"], metrics["infra_faults"]) == (5, 2, 2)


def test_entropies_at_the_start_are_those_of_the_probe() -> None:
    trees = [ScoredTree(branched(), (scored(0.0),) * 3)]
    found = [rollout_metrics(trees, count)["entropy_start"] for count in (1, 2, 3, 4, 9)]
    assert found == pytest.approx([0.5, 0.75, 0.75, 1.0, 1.0])  # turns of (1, 2) and (0, 0, 0, 2)


def test_without_tools_and_with_an_unsampled_path_the_numbers_are_zero() -> None:
    only_prompt = tree([prompt([1, 2, 3])], [0], end=StopReason.MAX_SECONDS)
    metrics = rollout_metrics([ScoredTree(only_prompt, (scored(-1.0, format_=0.0),))], 20)
    assert metrics == {
        "reward": -1.0,
        "accuracy": 0.0,
        "format": 0.0,
        "informative_groups": 0.0,
        "questions": 1,
        "trajectories": 1,
        "tool_calls": 0,
        "calls_per_trajectory": 0.0,
        "tool_faults": 0,
        "infra_faults": 0,
        "branches": 0,
        "entropy_start": 0.0,
        "entropy_after_tool": 0.0,
        "sampled_tokens": 0,
        "completion_tokens": 0.0,
        "unique_tokens": 3,
        "total_tokens": 3,
        "tool_seconds": 0,
    }


def test_several_branches_at_one_point_are_all_counted() -> None:
    nodes = [prompt(), model(0, [3]), decided(tool(1), 0.5, 2), model(2, [4]), model(2, [5]), model(2, [6])]
    nodes += [decided(tool(3), 0.25, 0), model(6, [7])]
    metrics = rollout_metrics([ScoredTree(tree(nodes, [4, 5, 7]), (scored(0.0),) * 3)], 20)
    assert (metrics["branches"], metrics["entropy_after_tool"], metrics["informative_groups"]) == (2, 0.375, 0.0)


# What a person sees.


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
    assert f"{HEADER}\n{step_line(12, numbers)}\n" == (
        "step reward right format  calls branches  entropy: start tool"
        "  tokens: unique/total  seconds: sample tools train\n"
        "  12   0.46   50%   100%    123        7            0.50 0.62"
        "            9.9k/14.1k             12.3   0.1   5.7\n"
    )
    assert step_line(12, {**numbers, "test_accuracy": 0.925}).endswith("  5.7  held-out accuracy 92.5%")


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
def test_nothing_can_steer_a_terminal_or_hide(text: str, shown: str) -> None:
    assert printable(text) == shown


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
    nodes = [
        prompt(text="Where was Mira born?"),
        model(0, [3], "<search>mira</search>"),
        decided(tool(1, text="<result>Mira: Kelso</result>\n"), entropy=0.75, branches=1),
        model(2, [4], "<answer>Kelso</answer>"),
        model(2, [5], "<answer>Rome</answer>"),
    ]
    shown = RolloutTree(
        TASK, tuple(nodes), (Leaf(4, StopReason.ANSWER), Leaf(3, StopReason.ANSWER), Leaf(1, StopReason.MAX_TOOL_CALLS))
    )
    assert [line.rstrip() for line in show(shown, [scored(0.0), scored(1.1), scored(-1.0)]).splitlines()] == [
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
    out = show(tree(nodes, [3], task), [scored(0.0)])
    literal = "[red]x[/red] [/] [link=http://e.vil]y[/link] \\x1b[2J\\x1b]0;title\\x07 \\u202e \\ud800 :smile:"
    assert out.count(literal) == 5
    assert f"right answer: {literal} or [bold]b\n" in out
    assert all(c.isprintable() or c == "\n" for c in out)
