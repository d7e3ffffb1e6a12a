"""The metrics of a step, on hand-made trees."""

from __future__ import annotations

from dataclasses import replace

import pytest
from trees import model, prompt, searched, tool, tree, two_branches

from arpo.algorithm.branching import BUDGET_USED_UP
from arpo.algorithm.metrics import bias_warnings, format_warnings, limit_warnings, rollout_metrics, tool_metrics
from arpo.config.algorithm import Advantage, Branching
from arpo.config.schema import Config, Rollout
from arpo.types import Decision, Fault, Node, Reward, RolloutTree, ScoredTree, StopReason, ToolResult


def decided(node: Node, entropy: float, branches: int, initial: float = 0.5) -> Node:
    """The tool node with a decision about branching from it."""
    return replace(node, decision=Decision(initial, entropy, 0.25, 0.55, branches, "a reason", 20), seconds=1.5)


def reward(total: float, correct: float = 0.0, format_: float = 1.0) -> Reward:
    return Reward(total, {"format": format_, "accuracy": correct, "correct": correct, "bonus": 0.0})


def branched() -> RolloutTree:
    """`two_branches` with one branch opened at its tool result and entropies that can be told apart."""
    base = two_branches()
    nodes = list(base.nodes)
    nodes[1] = replace(nodes[1], entropies=(1.0, 2.0))
    nodes[2] = decided(nodes[2], entropy=0.75, branches=1)
    nodes[5] = replace(nodes[5], entropies=(0.0, 0.0, 0.0, 2.0))
    return RolloutTree(base.task, tuple(nodes), base.leaves)


def test_metrics_of_two_trees() -> None:
    broken = searched(fault=Fault.INFRA)
    first = (reward(1.1, 1.0), reward(0.0), reward(-1.0, format_=0.0))
    mask = (True, True, False)
    scored = [ScoredTree(branched(), first, mask=mask), ScoredTree(broken, (reward(0.3),), mask=(False,))]
    assert rollout_metrics(scored, 20) == {
        "reward": pytest.approx((1.1 + 0.0 - 1.0 + 0.3) / 4),
        "accuracy": 0.25,
        "format": 0.75,
        "reward_accuracy": 0.25,
        "reward_bonus": 0.0,
        "informative_groups": 0.5,  # the first tree's rewards differ, the second has none that counts
        "questions": 2,
        "trajectories": 4,
        "truncated": 0.0,
        "masked_trajectories": 2,
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


def test_metrics_of_each_tool() -> None:
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


def test_whose_fault_a_failed_call_was() -> None:
    trees = [searched(fault=fault) for fault in (None, Fault.MODEL, Fault.TIMEOUT, Fault.INFRA, Fault.INFRA)]
    metrics = rollout_metrics([ScoredTree(tree, (reward(0.0),)) for tree in trees], 20)
    assert (metrics["tool_calls"], metrics["tool_faults"], metrics["infra_faults"]) == (5, 2, 2)


def test_entropies_at_the_start_are_those_of_the_probe() -> None:
    trees = [ScoredTree(branched(), (reward(0.0),) * 3)]
    found = [rollout_metrics(trees, count)["entropy_start"] for count in (1, 2, 3, 4, 9)]
    assert found == pytest.approx([0.5, 0.75, 0.75, 1.0, 1.0])  # turns of (1, 2) and (0, 0, 0, 2)


def test_a_trajectory_without_samples_has_zeros() -> None:
    only_prompt = tree([prompt([1, 2, 3])], [0], end=StopReason.MAX_SECONDS)
    metrics = rollout_metrics([ScoredTree(only_prompt, (reward(-1.0, format_=0.0),))], 20)
    assert metrics == {
        "reward": -1.0,
        "accuracy": 0.0,
        "format": 0.0,
        "reward_accuracy": 0.0,
        "reward_bonus": 0.0,
        "informative_groups": 0.0,
        "questions": 1,
        "trajectories": 1,
        "truncated": 1.0,
        "masked_trajectories": 0,
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
    metrics = rollout_metrics([ScoredTree(tree(nodes, [4, 5, 7]), (reward(0.0),) * 3)], 20)
    assert (metrics["branches"], metrics["entropy_after_tool"], metrics["informative_groups"]) == (2, 0.375, 0.0)


def test_the_commonest_reason_is_told_if_most_formats_are_wrong() -> None:
    def told(*reasons: str) -> dict[str, str]:
        rewards = [
            Reward(-1.0, {"format": 0.0, f"format.{reason}": 1.0}, f"wrong format: {number} {reason}")
            if reason
            else Reward(0.0, {"format": 1.0})
            for number, reason in enumerate(reasons)
        ]
        return format_warnings([ScoredTree(searched(), (one,)) for one in rewards])

    assert told("") == told("no_box", "") == told("mine", "mine") == {}
    assert told("no_think", "no_box", "", "no_box") == {
        "format.no_box": "3 of 4 trajectories have a wrong format; the commonest reason, in 2, is '1 no_box' "
        "(format.no_box in the metrics counts it)"
    }


def test_a_limit_that_cuts_off_most_trajectories_is_told() -> None:
    def told(*ends: StopReason) -> dict[str, str]:
        trees = [tree([prompt([1])], [0], end=end) for end in ends]
        return limit_warnings([ScoredTree(one, (reward(0.0),)) for one in trees], Rollout(max_tool_calls=7))

    calls, length, answer = StopReason.MAX_TOOL_CALLS, StopReason.LENGTH, StopReason.ANSWER
    assert told(calls, answer) == told(calls, length) == {}
    assert told(calls, calls, answer) == {
        "max_tool_calls": "2 of 3 trajectories were cut off by rollout.max_tool_calls=7 before an answer; raise it if "
        "the task needs more"
    }
    assert list(told(length, length, calls)) == ["max_tokens"]
    assert list(told(StopReason.MAX_SECONDS)) == ["max_seconds"]
    assert told(answer, StopReason.EOS, StopReason.WORKER_LOST) == {}


@pytest.mark.parametrize(
    ("attribution", "width", "reason", "branches", "told"),
    [
        ("unbiased", 1, BUDGET_USED_UP, 0, True),
        ("unbiased", 2, "branched", 1, True),
        ("unbiased", 2, "branched", 2, False),
        ("unbiased", 1, "P is not above tau", 0, False),
        ("soft", 1, BUDGET_USED_UP, 0, False),
    ],
)
def test_a_budget_that_makes_unbiased_trees_biased_is_told(
    attribution: str, width: int, reason: str, branches: int, told: bool
) -> None:
    advantage = {"attribution": attribution, "baseline": "leave_one_out", "scale": "none"}
    config = Config().model_copy(
        update={"advantage": Advantage(**advantage), "branching": Branching(branch_width=width)}
    )
    decision = Decision(0.0, 0.0, 0.0, 0.5, branches, reason, 1)
    nodes = [prompt([1]), model(0, [2]), replace(tool(1, [3]), decision=decision), model(2, [4])]
    found = bias_warnings([ScoredTree(tree(nodes, [3]), (reward(0.0),))], config)
    assert list(found) == (["attribution"] if told else [])
    assert all(text.startswith("1 of 1 trees wanted more branches") for text in found.values())
