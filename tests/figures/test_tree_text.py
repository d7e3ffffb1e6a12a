"""Trees as text: the layout by hand, and that untrusted text cannot control a terminal."""

from __future__ import annotations

from dataclasses import replace

from trees import branched, model, prompt, tool, tree

from arpo.figures.tree import sketch
from arpo.figures.tree_text import leaf_line, tree_text
from arpo.types import Credit, Fault, Reward, ScoredTree, Task


def test_every_node_is_below_its_parent() -> None:
    nodes = [
        prompt(),
        model(0, [1], "look it up\nat once"),
        tool(1, text="Kelso"),
        model(2, [2], "Upper"),
        model(2, [3], "Lower"),
        model(0, [4], "guess"),
    ]
    grown = tree(nodes, leaves=[3, 5, 4])
    scored = ScoredTree(grown, tuple(map(Reward, (1.0, 0.0, 0.5))))
    assert (
        tree_text(scored)
        == """\
Where was Mira Tolven born?
├─ look it up
│  │  at once
│  │  [1 tokens, mean entropy 0.500]
│  └─ Kelso
│     │  [search: 0.000 s]
│     ├─ Upper
│     │  │  [1 tokens, mean entropy 0.500]
│     │  └─ trajectory 1: answer, reward 1.00
│     └─ Lower
│        │  [1 tokens, mean entropy 0.500]
│        └─ trajectory 3: answer, reward 0.50
└─ guess
   │  [1 tokens, mean entropy 0.500]
   └─ trajectory 2: answer, reward 0.00
right answer: Upper Kelso"""
    )


def test_what_is_wrong_is_said_beside_the_reward() -> None:
    grown = tree([prompt(), model(0, [1], "x")], leaves=[1])
    scored = ScoredTree(grown, (Reward(-1.0, {"format": 0.0}, "wrong format: call: malformed,\n no \x1b tool"),))
    said = "wrong format: call: malformed, no \\x1b tool"
    assert leaf_line(scored, 0) == f"trajectory 1: answer, reward -1.00; {said}"
    credited = replace(scored, credits=(Credit(-0.5, {}),), mask=(False,))
    assert leaf_line(credited, 0) == (
        f"trajectory 1: answer, reward -1.00 (format 0), advantage -0.500, left out of training; {said}"
    )


def test_a_tree_without_rewards_shows_how_trajectories_ended() -> None:
    text = tree_text(ScoredTree(replace(branched(), task=Task("q", "Where?", ()))))
    assert [line.split("─ ")[1] for line in text.splitlines() if "trajectory" in line] == [
        "trajectory 1: answer",
        "trajectory 2: answer",
        "trajectory 3: answer",
    ]
    assert "right answer" not in text
    labels = [label.text for label in sketch(ScoredTree(branched())).labels]
    assert [text for text in labels if text.startswith("trajectory")][:1] == ["trajectory 1: answer"]


def test_the_text_is_printable() -> None:
    hostile = "\x1b[2J\u202e\x00"
    nodes = [prompt(), model(0, [1], hostile), tool(1, text=hostile, name=hostile, fault=Fault.MODEL)]
    text = tree_text(ScoredTree(tree(nodes, leaves=[2], task=Task("q", f"What{hostile}?", (hostile,)))))
    assert all(sign.isprintable() or sign == "\n" for sign in text)
    assert "failed, the model's mistake" in text


def test_a_deep_tree_needs_no_deep_recursion() -> None:
    nodes = [prompt()]
    for _ in range(1500):
        nodes += [model(len(nodes) - 1, [1], "again")]
        nodes += [tool(len(nodes) - 1)]
    assert tree_text(ScoredTree(tree(nodes, leaves=[3000]))).count("again") == 1500
