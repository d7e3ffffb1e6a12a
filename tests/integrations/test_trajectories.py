"""Trees as JSON lines and as message nodes, and back."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from trees import TASK, model, prompt, tool, tree

from arpo.algorithm.advantage import compute_credits
from arpo.config.algorithm import Advantage
from arpo.errors import ArpoError
from arpo.integrations.rows import tree_row
from arpo.integrations.trajectories import (
    read_trajectories,
    trajectory_lines,
    trees_from_lines,
    write_trajectories,
)
from arpo.integrations.verifiers import from_message_nodes, to_message_nodes
from arpo.types import Decision, Kind, Reward, RolloutTree, ScoredTree, StopReason, Task

NODES = [
    prompt((1, 2)),
    model(0, (3, 4), "a call", (-0.25, -0.5)),
    tool(1, (9, 9), "found"),
    model(2, (5,), "one"),
    model(2, (6, 7, 8), "two"),
    model(0, (5,), "three"),
]


def scored(attribution: str = "hard", mask: tuple[bool, ...] = (True, True, True)) -> ScoredTree:
    """Three trajectories, two of which share a call; they earn 1, 0 and 0.5."""
    grown = tree(NODES, (3, 4, 5))
    decision = Decision(0.1, 0.7, 0.6, 0.9, 1, "entropy rose", 3)
    nodes = (*grown.nodes[:2], replace(grown.nodes[2], decision=decision), *grown.nodes[3:])
    rewards = (Reward(1.0, {"correct": 1.0}, "right"), Reward(0.0), Reward(0.5))
    one = ScoredTree(replace(grown, nodes=nodes), rewards, mask=mask)
    settings: dict[str, Any] = {"attribution": attribution}
    if attribution == "unbiased":
        settings |= {"baseline": "leave_one_out", "scale": "none"}
    return compute_credits([one], Advantage(**settings))[0]


def test_a_line_has_what_a_trainer_of_flat_trajectories_needs() -> None:
    first, second, third = trajectory_lines([scored()])
    a = 1.2247448713915892  # of rewards 1, 0, 0.5: (R - 0.5) / 0.408..
    assert first["prompt_ids"] == second["prompt_ids"] == third["prompt_ids"] == (1, 2)
    assert (first["completion_ids"], first["loss_mask"]) == ([3, 4, 9, 9, 5], [1, 1, 0, 0, 1])
    assert first["logprobs"] == [-0.25, -0.5, 0.0, 0.0, -1.0]
    assert first["advantages"] == pytest.approx([0, 0, 0, 0, a])  # the shared turn gets the mean of 1 and 0
    assert second["advantages"] == pytest.approx([0, 0, 0, 0, -a, -a, -a])
    assert (third["completion_ids"], third["reward"], third["weight"]) == ([5], 0.5, 1.0)
    shared = [[(node["id"], node["parent"], node["num_tokens"]) for node in line["nodes"]] for line in (first, second)]
    assert shared == [[(1, 0, 2), (2, 1, 2), (3, 2, 1)], [(1, 0, 2), (2, 1, 2), (4, 2, 3)]]
    assert first["messages"][1:] == [
        {"role": "assistant", "content": "a call"},
        {"role": "tool", "content": "found"},
        {"role": "assistant", "content": "one"},
    ]
    assert json.loads(json.dumps(first))["group"] == 0


@pytest.mark.parametrize("attribution", ["soft", "hard", "turn_value", "unbiased"])
@pytest.mark.parametrize("mask", [(True, True, True), (True, False, True)])
def test_what_is_written_is_read_back(attribution: str, mask: tuple[bool, ...], tmp_path: Path) -> None:
    trees = [scored(attribution, mask), ScoredTree(tree(NODES[:2], (1,), replace(TASK, id="q2", meta={"k": [1]})))]
    write_trajectories(tmp_path / "trees.jsonl", trees)
    assert len((tmp_path / "trees.jsonl").read_text().splitlines()) == 4
    assert read_trajectories(tmp_path / "trees.jsonl") == trees


def test_lines_of_others_become_trees_that_share_the_prompt() -> None:
    line = {
        "group": "g",
        "prompt_ids": [1, 2],
        "completion_ids": [3, 9, 5],
        "loss_mask": [1, 0, 1],
        "logprobs": [-0.1, 0.0, -0.2],
        "advantages": [0.5, 0.0, 0.7],
        "reward": 1.0,
        "messages": [
            {"role": "user", "content": "Well?"},
            {"role": "assistant", "content": "call"},
            {"role": "tool", "content": "found"},
            {"role": "assistant", "content": "answer"},
        ],
    }
    other = {**line, "completion_ids": [4], "loss_mask": [1], "logprobs": [-0.3], "advantages": [-1.0], "reward": 0.0}
    (found,) = trees_from_lines([line, other])
    assert found.tree.task.question == "Well?"
    kinds = [(node.kind, node.parent, node.tokens, node.text) for node in found.tree.nodes]
    assert kinds == [
        (Kind.PROMPT, None, (1, 2), ""),
        (Kind.MODEL, 0, (3,), "call"),
        (Kind.TOOL, 1, (9,), "found"),
        (Kind.MODEL, 2, (5,), "answer"),
        (Kind.MODEL, 0, (4,), "call"),
    ]
    assert [reward.total for reward in found.rewards] == [1.0, 0.0]
    assert [credit.by_node for credit in found.credits] == [{1: 0.5, 3: 0.7}, {4: -1.0}]
    assert tree_row(found, 0).advantages == (0.5, 0.0, 0.7)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"loss_mask": None}, "x.jsonl, line 2: it has no 'loss_mask'"),
        ({"logprobs": [-1.0]}, "x.jsonl, line 2: 5 completion_ids, but 1 logprobs"),
        ({"prompt_ids": [7]}, "the trajectories of group 0 do not have the same prompt_ids"),
    ],
)
def test_lines_that_do_not_fit_are_named(change: dict[str, Any], message: str) -> None:
    first, second, _ = trajectory_lines([scored()])
    line = {name: value for name, value in {**first, **change}.items() if value is not None}
    with pytest.raises(ArpoError, match=message):
        trees_from_lines([second, line], "x.jsonl")


def test_a_file_that_is_no_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"group": 0}\n{oh\n')
    with pytest.raises(ArpoError, match=r"x\.jsonl, line 2: this is no JSON"):
        read_trajectories(tmp_path / "x.jsonl")


def test_a_line_of_others_may_hold_any_character(tmp_path: Path) -> None:
    lines = [{**line, "prompt": "a\u2028b\x85c"} for line in trajectory_lines([scored()])]
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    (tmp_path / "x.jsonl").write_text(text, encoding="utf-8")
    (found,) = read_trajectories(tmp_path / "x.jsonl")
    assert found.tree.nodes[0].text == "a\u2028b\x85c"


def test_rows_leave_out_what_follows_the_last_turn_and_masked_leaves() -> None:
    grown = tree([*NODES[:3]], (2,))
    row = tree_row(ScoredTree(grown), 0)
    assert (row.nodes, row.tokens, row.mask, row.weight) == ((1,), (3, 4), (1, 1), 1.0)
    masked = tree_row(scored(mask=(False, True, True)), 0)
    assert (masked.mask, masked.advantages, masked.weight) == ((0,) * 5, (0.0,) * 5, 0.0)


def without_entropies(one: RolloutTree) -> list[tuple[Any, ...]]:
    """What message nodes keep of a tree."""
    return [(node.parent, node.kind, node.tokens, node.text, node.logprobs) for node in one.nodes[1:]]


def test_message_nodes_are_those_of_verifiers() -> None:
    nodes = to_message_nodes(scored().tree)
    assert [node["parent"] for node in nodes] == [None, 0, 1, 2, 2, 0]
    assert nodes[1] == {
        "parent": 0,
        "message": {
            "role": "assistant",
            "content": "a call",
            "tool_calls": [{"id": "call_2", "name": "search", "arguments": '{"query": "mira"}'}],
        },
        "sampled": True,
        "token_ids": [3, 4],
        "mask": [True, True],
        "logprobs": [-0.25, -0.5],
        "finish_reason": "tool_calls",
    }
    assert nodes[2]["message"] == {"role": "tool", "tool_call_id": "call_2", "content": "found"}
    assert (nodes[2]["mask"], nodes[2]["logprobs"], nodes[3]["finish_reason"]) == ([False, False], [], "stop")
    back = from_message_nodes(json.loads(json.dumps(nodes)), TASK)
    assert without_entropies(back) == without_entropies(scored().tree)
    assert [leaf.node for leaf in back.leaves] == [3, 4, 5]
    assert back.nodes[2].call is not None and back.nodes[2].call.args == {"query": "mira"}


def message_node(parent: int | None, role: str, tokens: list[int], before: int = 0, **more: Any) -> dict[str, Any]:
    """A node as verifiers writes it: a sampled message begins with `before` tokens of the template."""
    sampled = role == "assistant"
    mask = [sampled and place >= before for place in range(len(tokens))]
    message = {"role": role, "content": f"{role} {parent}", **more}
    return {
        "parent": parent,
        "message": message,
        "sampled": sampled,
        "token_ids": tokens,
        "mask": mask,
        "logprobs": [-0.5] * sum(mask),
        "finish_reason": "length" if sampled else None,
    }


def test_nodes_of_verifiers_become_a_tree_with_the_same_tokens_and_mask() -> None:
    call = {"id": "c1", "name": "search", "arguments": '{"query": "x"}'}
    nodes = [
        message_node(None, "system", [1]),
        message_node(0, "user", [2, 3]),
        message_node(1, "assistant", [50, 4, 5], 1, tool_calls=[call]),
        message_node(2, "tool", [6], tool_call_id="c1"),
        message_node(3, "assistant", [50, 7], 1),
        message_node(3, "assistant", [50, 8], 1),
    ]
    found = from_message_nodes(nodes)
    assert found.task.question == "user 0"
    assert [(node.kind, node.parent, node.tokens) for node in found.nodes] == [
        (Kind.PROMPT, None, (1, 2, 3, 50)),
        (Kind.MODEL, 0, (4, 5)),
        (Kind.TOOL, 1, (6, 50)),
        (Kind.MODEL, 2, (7,)),
        (Kind.MODEL, 2, (8,)),
    ]
    assert [trajectory.tokens for trajectory in found.trajectories] == [
        (1, 2, 3, 50, 4, 5, 6, 50, 7),
        (1, 2, 3, 50, 4, 5, 6, 50, 8),
    ]
    assert [leaf.stop_reason for leaf in found.leaves] == [StopReason.LENGTH] * 2
    (asked, _), *_ = found.trajectories[0].tool_calls
    assert (asked.name, dict(asked.args), asked.id) == ("search", {"query": "x"}, "c1")


def test_nodes_of_verifiers_that_are_no_tree_are_refused() -> None:
    two_roots = [message_node(None, "user", [1]), message_node(None, "user", [2])]
    with pytest.raises(ArpoError, match="there are 2 roots"):
        from_message_nodes(two_roots)
    torn = [message_node(None, "user", [1]), message_node(0, "assistant", [2, 3])]
    torn[1]["mask"] = [True, False]
    with pytest.raises(ArpoError, match="node 1 has tokens that were not sampled after some that were"):
        from_message_nodes(torn)
    other = [message_node(None, "user", [1]), message_node(0, "assistant", [2, 3], 1)]
    other.append(message_node(0, "assistant", [9, 3], 1))
    with pytest.raises(ArpoError, match="the children of node 0 begin with different templates"):
        from_message_nodes(other)


def test_a_task_may_be_given() -> None:
    found = from_message_nodes([message_node(None, "user", [1]), message_node(0, "assistant", [2])], Task("t", "Why?"))
    assert found.task == Task("t", "Why?")


def test_conversations_of_a_program_are_no_rows() -> None:
    grown = scored()
    nodes = (*grown.tree.nodes[:2], replace(grown.tree.nodes[2], context=0), *grown.tree.nodes[3:])
    apart = replace(grown, tree=replace(grown.tree, nodes=nodes))
    for convert in (lambda: list(trajectory_lines([apart])), lambda: to_message_nodes(apart.tree)):
        with pytest.raises(ArpoError, match="conversations of their own"):
            convert()
