"""The agents in examples/program, as their libraries run them, on a scripted model; those not installed are skipped."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from programs import EXAMPLES, load_example, program_agent, without_clock

from arpo.algorithm.rollout import rollout
from arpo.config.algorithm import Branching
from arpo.config.schema import Rollout
from arpo.engine.scripted import ScriptedEngine
from arpo.types import RolloutTree, StopReason, Task

LIBRARIES = {
    "plain": "json",
    "with_openai_agents": "agents",
    "with_langgraph": "langgraph",
    "with_smolagents": "smolagents",
}
TASK = Task("q1", "Where was Bose Biktag born?", ("North Emnes",))


def looks_up(prefix: str, seed: int) -> tuple[str, list[float]]:
    """A model that searches twice, in words of its own, and answers."""
    results = prefix.count("The birthplace of Bose Biktag is")
    if results < 2:
        return f"<think>{seed % 97}</think><search>birthplace of Bose Biktag</search>", [0.1 + results]
    return "<think>So.</think><answer>\\boxed{ North Emnes}</answer>", [3.0]


def tree_of(name: str, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> RolloutTree:
    pytest.importorskip(LIBRARIES[name])
    monkeypatch.syspath_prepend(str(EXAMPLES))
    agent = program_agent(ScriptedEngine(tokenizer, looks_up, max_context=100_000), tokenizer, load_example(name).agent)
    how = Rollout(num_trajectories=5, num_initial=2, max_tool_calls=8, max_tokens=50_000, concurrency=1)
    return asyncio.run(rollout(agent, TASK, how, Branching(policy="always", probe_tokens=2), 0))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "with_openai_agents", "with_langgraph"])
def test_an_agent_that_keeps_its_history_has_the_tree_of_the_plain_one(
    name: str, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever library runs it: the same tokens, branches and answers."""
    tree = tree_of(name, tokenizer, monkeypatch)
    assert [leaf.stop_reason for leaf in tree.leaves] == [StopReason.ANSWER] * 5
    assert {leaf.answer for leaf in tree.leaves} == {"North Emnes"}
    assert tree.branch_points == 3 and tree.tool_calls == 6
    assert without_clock(tree) == without_clock(tree_of("plain", tokenizer, monkeypatch))


@pytest.mark.slow
def test_an_agent_that_rewrites_its_history_has_conversations_of_its_own(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """smolagents: what it did stands in a text of its own, and its answer is a tool."""
    tree = tree_of("with_smolagents", tokenizer, monkeypatch)
    assert StopReason.REPLAY_DIFFERS not in {leaf.stop_reason for leaf in tree.leaves}
    assert any(node.context == -1 for node in tree.nodes) and tree.branch_points > 0
