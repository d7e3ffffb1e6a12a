"""The labyrinth: what calls do, that forks are independent, what it pays, and where its decisive choices are."""

from __future__ import annotations

import asyncio
import random
import re
from types import SimpleNamespace
from typing import Any

import pytest
from bench_labyrinth import CHOICES, TRAJECTORIES, sample_below_forks
from trees import model, prompt, tree

from arpo.agent.agent import Agent
from arpo.agent.formats import build_format
from arpo.algorithm.rollout import sample_tree
from arpo.config.algorithm import Branching
from arpo.config.schema import Rollout
from arpo.engine.scripted import ScriptedEngine
from arpo.environments.labyrinth import Labyrinth, decisive_forks
from arpo.environments.states import EnvironmentTools, StatePool
from arpo.errors import ArpoError
from arpo.rewards import Scorer
from arpo.tools.base import ToolError
from arpo.types import Fault, Kind, Node, RolloutTree, Task, ToolCall, ToolResult, Trajectory

TASK = Task(
    "small",
    "Find the way out. Room Gave. A note. Ways: West.",
    ("exit",),
    meta={
        "start": "Gave",
        "rooms": {
            "Gave": {"note": "The key is Steel. The way is East.", "ways": {"West": "Tido"}},
            "Tido": {"keys": ["Glass", "Steel"], "ways": {"South": "Toke"}, "locked": {"South": "Steel"}},
            "Toke": {"ways": {"North": "Nove", "East": "Zimi"}},
            "Nove": {"ways": {"Upper": "pit"}},
            "Zimi": {"ways": {"Lower": "exit"}},
        },
    },
)
SOLUTION = (("read", "note"), ("go", "West"), ("take", "Steel"), ("go", "South"), ("go", "East"), ("go", "Lower"))


def after(*calls: tuple[str, str]) -> Labyrinth:
    state = Labyrinth()
    state.reset(TASK)
    for name, argument in calls:
        state.act(name, argument)
    return state


def test_the_way_out() -> None:
    state = after()
    said = [state.act(name, argument) for name, argument in SOLUTION]
    assert said == [
        "The key is Steel. The way is East.",
        "Room Tido. Keys: Glass, Steel. Ways: South.",
        "Room Tido. Ways: South.",
        "Room Toke. Ways: North, East.",
        "Room Zimi. Ways: Lower.",
        "You are out.",
    ]
    assert state.done and state.solved


@pytest.mark.parametrize(
    "calls",
    [
        [("go", "West"), ("go", "South")],  # without a key
        [("go", "West"), ("take", "Glass"), ("go", "South")],
        [*SOLUTION[1:4], ("go", "North"), ("go", "Upper")],
        [("go", "East")],  # there is no such way
    ],
)
def test_mistakes_end_at_a_gate_in_a_pit_or_off_the_ways(calls: list[tuple[str, str]]) -> None:
    before, state = after(*calls[:-1]), after(*calls)
    assert not before.done
    assert (state.done, state.lost, state.solved) == (True, True, False)


@pytest.mark.parametrize(
    ("made", "call", "message"),
    [
        ((), ("take", "Steel"), "There is no key Steel here. Room Gave. A note. Ways: West."),
        ((), ("read", "book"), "There is nothing like that to read here. Room Gave. A note. Ways: West."),
        (SOLUTION[1:2], ("read", "note"), "There is nothing like that to read here"),
        (SOLUTION[1:3], ("take", "Glass"), "You carry the key Steel, and no second one."),
    ],
)
def test_impossible_calls_are_the_models_mistakes_and_change_nothing(
    made: tuple[tuple[str, str], ...], call: tuple[str, str], message: str
) -> None:
    state = after(*made)
    before = dict(vars(state))
    with pytest.raises(ToolError, match=message.replace(".", r"\.")):
        state.act(*call)
    assert vars(state) == before


@pytest.mark.parametrize("calls", range(len(SOLUTION)))
def test_a_fork_and_its_origin_go_on_independently(calls: int) -> None:
    """Whatever either does, the other one is where replaying its own calls leads."""
    origin = after(*SOLUTION[:calls])
    fork = origin.fork()
    for name, argument in SOLUTION[calls:]:
        fork.act(name, argument)
    assert fork.solved and vars(origin) == vars(after(*SOLUTION[:calls]))
    again = origin.fork()
    for name, argument in SOLUTION[calls:]:
        origin.act(name, argument)
    assert origin.solved and vars(again) == vars(after(*SOLUTION[:calls]))


def test_other_tasks_are_refused() -> None:
    with pytest.raises(ArpoError, match="is no labyrinth"):
        Labyrinth().reset(Task("q1", "1 + 1?", ("2",)))


def played(*calls: tuple[str, str], error: str | None = None) -> Trajectory:
    nodes = [prompt()]
    for name, argument in calls:
        nodes += [model(len(nodes) - 1, [1]), called(len(nodes), name, argument)]
    if error is not None:
        nodes += [model(len(nodes) - 1, [1]), called(len(nodes), "go", "", error)]
    return tree(nodes, [len(nodes) - 1], TASK).trajectories[0]


def called(parent: int, name: str, argument: str, error: str | None = None, fault: Fault | None = None) -> Node:
    names = {"go": "way", "take": "key", "read": "what"}
    made = ToolCall(name, {names[name]: argument}, error)
    return Node(parent, Kind.TOOL, (9,), "", call=made, result=ToolResult("", fault))


def test_the_reward_is_that_of_the_final_state() -> None:
    reward = after(*SOLUTION).reward(played(*SOLUTION))
    assert (reward.total, reward.parts) == (1.0, {"correct": 1.0, "format": 1.0})
    lost = (("go", "West"), ("go", "South"))
    reward = after(*lost).reward(played(*lost))
    assert (reward.total, reward.parts) == (0.0, {"correct": 0.0, "format": 1.0})
    reward = after(*SOLUTION[:3]).reward(played(*SOLUTION[:3]))  # it stopped in the middle
    assert (reward.total, reward.parts) == (-1.0, {"correct": 0.0, "format": 0.0})
    reward = after(*SOLUTION).reward(played(*SOLUTION, error="malformed"))
    assert (reward.total, reward.parts) == (-1.0, {"correct": 1.0, "format": 0.0})


def forked_tree() -> RolloutTree:
    """Read, go to the keys (4); then the right key and the gate (8), or an impossible key (10), the wrong one (12)."""
    nodes = [
        prompt(),
        model(0, [1]),
        called(1, "read", "note"),
        model(2, [1]),
        called(3, "go", "West"),
        model(4, [1]),
        called(5, "take", "Steel"),
        model(6, [1]),
        called(7, "go", "South"),
        model(4, [1]),
        called(9, "take", "Paper", fault=Fault.MODEL),
        model(10, [1]),
        called(11, "take", "Glass"),
        model(12, [1]),
        called(13, "go", "", error="the call is empty", fault=Fault.MODEL),
        model(14, [1]),
        called(15, "go", "South"),
    ]
    return tree(nodes, [8, 16], TASK)


def test_decisive_forks_are_the_results_before_a_key_or_one_of_several_ways_is_chosen() -> None:
    assert decisive_forks(forked_tree()) == [4, 8, 10]


def test_decisive_forks_agree_with_replaying_each_prefix() -> None:
    grown = forked_tree()
    slow = []
    for index, node in enumerate(grown.nodes):
        made = [grown.nodes[i] for i in grown.prefix(index) if grown.nodes[i].kind is Kind.TOOL]
        calls = [n.call for n in made if n.call is not None and n.result is not None and n.result.fault is None]
        if node.kind is Kind.TOOL and after(*((call.name, next(iter(call.args.values()))) for call in calls)).decisive:
            slow.append(index)
    assert slow == decisive_forks(grown)


def test_the_tools_take_one_text_each() -> None:
    specs = {tool.spec.name: tool.spec for tool in Labyrinth().tools()}
    assert {name: list(spec.schema["properties"]) for name, spec in specs.items()} == {
        "go": ["way"],
        "take": ["key"],
        "read": ["what"],
    }


def wander(prefix: str, seed: int) -> str:
    """Read the note, then take any key and go any way that the last room has."""
    if "</result>" not in prefix:
        return "<think> .</think><read> note</read>"
    if "You are" in prefix:
        return "<answer>"
    room = prefix.rpartition("Room")[2]
    keys, ways = (re.search(rf"{name}: ([^.]*)[.]", room) for name in ("Keys", "Ways"))
    name, found = ("take", keys) if keys is not None else ("go", ways)
    assert found is not None
    argument = random.Random(seed).choice(found[1].split(", "))
    return f"<think> .</think><{name}> {argument}</{name}>"


@pytest.mark.parametrize("policy", ["always", "posthoc_random"])
def test_trajectories_of_a_tree_earn_what_their_own_calls_lead_to(policy: str, tokenizer: Any) -> None:
    tools = EnvironmentTools(StatePool(Labyrinth))
    fmt = build_format("tags", [each.spec for each in tools.values()])
    agent = Agent(ScriptedEngine(tokenizer, wander), tokenizer, tools, fmt)
    how = Rollout(num_trajectories=16, num_initial=2, max_tool_calls=8)
    with Scorer(lambda trajectory, state: state.reward(trajectory), 1) as scorer:
        branching = Branching(policy=policy)  # type: ignore[arg-type]
        scored = asyncio.run(sample_tree(agent, TASK, how, branching, 0, scorer.score))
    alone = [
        after(*((call.name, next(iter(call.args.values()))) for call, _ in trajectory.tool_calls))
        for trajectory in scored.tree.trajectories
    ]
    assert len(alone) == 16 and all(state.done for state in alone)
    assert [reward.total for reward in scored.rewards] == [float(state.solved) for state in alone]
    assert 0 < sum(state.solved for state in alone) < 16
    forks = decisive_forks(scored.tree)
    seen = [index for index, node in enumerate(scored.tree.nodes) if re.search(r"s: \w+, \w+", node.text)]
    assert forks == seen and len(forks) > 2


def test_the_oracle_branches_exactly_at_the_decisive_forks(tokenizer: Any) -> None:
    tools = EnvironmentTools(StatePool(Labyrinth))
    fmt = build_format("tags", [each.spec for each in tools.values()])
    agent = Agent(ScriptedEngine(tokenizer, wander), tokenizer, tools, fmt)
    how = Rollout(num_trajectories=64, num_initial=3, max_tool_calls=8)
    with Scorer(lambda trajectory, state: state.reward(trajectory), 1) as scorer:
        branching = Branching(policy="oracle", fill="none")
        tree = asyncio.run(sample_tree(agent, TASK, how, branching, 0, scorer.score)).tree
    opened = [index for index, node in enumerate(tree.nodes) if node.decision and node.decision.branches]
    assert opened == decisive_forks(tree) and len(opened) > 3 and len(tree.leaves) == 3 + len(opened) < 64


def test_the_benchmark_samples_choices_below_the_forks(tokenizer: Any) -> None:
    """After a wrong key or a way, all else is forced: every reward is the same. After the right key it is not."""
    tools = EnvironmentTools(StatePool(Labyrinth))
    fmt = build_format("tags", [each.spec for each in tools.values()])
    agent = Agent(ScriptedEngine(tokenizer, wander), tokenizer, tools, fmt)
    rollout = Rollout(num_trajectories=8, num_initial=8, max_tool_calls=8)
    with Scorer(lambda trajectory, state: state.reward(trajectory), 1) as scorer:
        scored = asyncio.run(sample_tree(agent, TASK, rollout, Branching(policy="never"), 0, scorer.score))
    context: Any = SimpleNamespace(agent=agent, config=SimpleNamespace(rollout=rollout))
    below = asyncio.run(sample_below_forks(context, scored.tree, 0))
    assert set(below) == {"key", "way"}
    for classes in below.values():
        assert [len(rewards) for rewards in classes] == [TRAJECTORIES] * CHOICES
        assert {reward for rewards in classes for reward in rewards} == {0.0, 1.0}
    assert all(len(set(rewards)) == 1 for rewards in below["way"])
    assert any(len(set(rewards)) == 2 for rewards in below["key"])
