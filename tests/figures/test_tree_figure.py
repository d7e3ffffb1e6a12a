"""Pictures of trees: the layout, and that untrusted text never becomes markup."""

from __future__ import annotations

import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trees import branched, model, nested_branches, prompt, tool, tree

from arpo.figures.style import BLUE, ORANGE, RED
from arpo.figures.tree import GREY, MIN_WIDTH, PROMPT_WIDTH, WIDTH, sketch, tree_png, tree_svg
from arpo.types import Credit, Fault, Reward, RolloutTree, ScoredTree, Task

HOSTILE = "</title></svg><script>alert(1)</script>\x00\x1b[31m\u202e\ud800&amp;\"'"


def scored(grown: RolloutTree, used: bool = True) -> ScoredTree:
    count = len(grown.leaves)
    rewards = tuple(Reward(number / 4) for number in range(count))
    return ScoredTree(grown, rewards, tuple(Credit(number - 0.5, {}) for number in range(count)), (used,) * count)


def test_a_trajectory_is_a_row_and_a_node_as_wide_as_its_tokens() -> None:
    made = sketch(scored(branched()))
    nodes = [box for box in made.boxes if box.title]
    assert [box.color for box in nodes] == [GREY, BLUE, ORANGE, BLUE, BLUE, BLUE]
    scale = WIDTH / 6  # the longest trajectory has 2 + 1 + 3 tokens behind the prompt
    assert [box.width for box in nodes] == [PROMPT_WIDTH, *(scale * tokens for tokens in (2, 1, 3, 1, 4))]
    rows = sorted({box.y for box in nodes})
    assert [rows.index(box.y) for box in nodes] == [0, 0, 0, 0, 1, 2]
    assert nodes[3].x == nodes[4].x > nodes[2].x + nodes[2].width  # both follow the result
    assert all(box.x >= 0 and box.x + box.width < made.width and box.y + box.height < made.height for box in made.boxes)


def test_ends_and_branch_points_are_labeled() -> None:
    texts = [label.text for label in sketch(scored(branched())).labels]
    assert [text for text in texts if text.startswith("dH")] == ["dH +0.125, +1"]
    assert [text for text in texts if text.startswith("trajectory")] == [
        "trajectory 1: answer, reward 0.00, advantage -0.50",
        "trajectory 2: answer, reward 0.25, advantage +0.50",
        "trajectory 3: answer, reward 0.50, advantage +1.50",
    ]
    assert "right answer: Upper Kelso" in texts
    assert sum("masked" in label.text for label in sketch(scored(branched(), used=False)).labels) == 3


def test_trajectories_have_rows_of_their_own() -> None:
    """Also those that end at one node, or where another goes on."""
    shared = tree([prompt(), model(0, [1]), tool(1), model(2, [2]), model(0, [3])], leaves=[1, 1, 3, 4])
    for grown in (nested_branches(), shared):
        made = sketch(scored(grown))
        ends = [label.y for label in made.labels if label.text.startswith("trajectory")]
        assert len(set(ends)) == len(grown.leaves)
        assert max(ends) < made.height - 16


def test_failed_tools_are_red_and_the_smallest_node_is_visible() -> None:
    grown = tree([prompt(), model(0, [1] * 9999), tool(1, [], fault=Fault.MODEL), model(2, [])], leaves=[3])
    nodes = [box for box in sketch(scored(grown)).boxes if box.title]
    assert nodes[2].color == RED
    assert nodes[2].width == nodes[3].width == MIN_WIDTH


@given(st.text() | st.just(HOSTILE) | st.just("<b>" * 400_000))
def test_no_text_becomes_markup(text: str) -> None:
    grown = branched()
    plain = [element.tag for element in ElementTree.fromstring(tree_svg(scored(grown))).iter()]
    try:
        task = Task(text, "? " + text, (text,))
    except ValueError:  # half a character
        task = Task(text, "?", (text,))
    nodes = tuple(replace(node, text=text) for node in grown.nodes)
    svg = tree_svg(scored(replace(grown, task=task, nodes=nodes)))
    assert [element.tag for element in ElementTree.fromstring(svg).iter()] == plain
    assert "<script" not in svg
    assert len(svg) < 60_000
    svg.encode()
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f\u202a-\u202e\u2066-\u2069]", svg)


def test_long_text_is_cut_with_or_without_spaces() -> None:
    for letter in ("字", "a ", "\x00"):
        made = sketch(scored(replace(branched(), task=Task("q", "?" + letter * 9999, ("x",)))))
        assert (len(made.labels[0].text), made.labels[0].text[:4]) == (130, "q: ?")
        assert made.labels[0].text.endswith(" ...")


def test_a_png_has_the_same_size_whatever_it_shows() -> None:
    pytest.importorskip("matplotlib")
    png = tree_png(scored(replace(branched(), task=Task("$x$", HOSTILE.replace("\ud800", ""), ("$\\frac",)))))
    assert png.startswith(b"\x89PNG")
    made = sketch(scored(branched()))
    assert int.from_bytes(png[16:20]) == pytest.approx(made.width * 1.5, abs=2)
    assert int.from_bytes(png[20:24]) == pytest.approx(made.height * 1.5, abs=2)


def test_a_tree_without_trajectories_is_drawn() -> None:
    assert ElementTree.fromstring(tree_svg(scored(tree([prompt()], []))))
