"""What an observer of a rollout is told: all events in their order make up the very tree that is returned."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, get_args

import clock
import pytest
from programs import program_agent, tool_loop

from arpo.agent.agent import Agent
from arpo.agent.formats import build_format
from arpo.algorithm.rollout import rollout, sample_tree
from arpo.config.algorithm import Branching
from arpo.config.schema import Rollout
from arpo.engine.scripted import Script, ScriptedEngine
from arpo.environments import Environment
from arpo.environments.states import EnvironmentTools, StatePool
from arpo.tools.base import Tool, ToolError, tool
from arpo.types import (
    BranchingDecided,
    CallStarted,
    Kind,
    Leaf,
    LeavesScored,
    Node,
    NodeAdded,
    Reward,
    RolloutEvent,
    RolloutTree,
    ScoredTree,
    StopReason,
    Task,
    TokenSampled,
    TrajectoryEnded,
)

TASK = Task("q1", "Where was Mira Tolven born?", ("Upper Kelso",))
SEARCH, BROKEN = "<think> Find it.</think><search> Mira</search>", "<think> Find it.</think><search> nothing</search>"
ANSWER, WRONG = "<answer>\\boxed{ yes}</answer>", "<answer>\\boxed{ no}</answer>"
POLICIES = [name for name in get_args(Branching.model_fields["policy"].annotation) if name != "oracle"]


@tool(quick=True)
def search(query: str) -> str:
    """Search."""
    if "nothing" in query:
        raise ToolError("nothing was found")
    return f"found: {query}"


def agent(tokenizer: Any, script: Script, *tools: Tool, delay: float = 0.0) -> Agent:
    chosen = {one.spec.name: one for one in tools or (search,)}
    engine = ScriptedEngine(tokenizer, script, delay=delay)
    return Agent(engine, tokenizer, chosen, build_format("tags", [one.spec for one in chosen.values()]))


def varied(prefix: str, seed: int) -> tuple[str, list[float]]:
    """Up to three calls, some of which fail, then a right or a wrong answer; entropies and all else from the seed."""
    rng = random.Random(seed)
    entropies = [rng.uniform(0, 4) for _ in range(6)]
    made = prefix.count("<result>")
    if made < 1 or (made < 3 and rng.random() < 0.6):
        return (SEARCH if rng.random() < 0.8 else BROKEN), entropies
    return (ANSWER if rng.random() < 0.4 else WRONG), entropies


async def score(tree: RolloutTree, states: object) -> ScoredTree:
    rewards = tuple(Reward(float("yes" in tree.nodes[leaf.node].text)) for leaf in tree.leaves)
    return ScoredTree(tree, rewards, mask=tuple(leaf.node % 5 > 0 for leaf in tree.leaves))


class Fold:
    """What events make up, and what must hold of every one of them."""

    def __init__(self, events: Sequence[RolloutEvent]) -> None:
        self.nodes: list[Node] = []
        self.leaves: list[Leaf] = []
        self.rewards: list[Reward] = []
        self.mask: list[bool] = []
        self._turns: dict[int, list[TokenSampled]] = {}
        self._calls: dict[int, CallStarted] = {}
        for event in events:
            self._add(event)
        assert not self._turns and not self._calls  # every token and every call has become part of a node

    def _add(self, event: RolloutEvent) -> None:
        match event:
            case TokenSampled(trajectory, parent):
                assert parent < len(self.nodes)
                self._turns.setdefault(trajectory, []).append(event)
            case CallStarted(trajectory, parent):
                assert self.nodes[parent].kind in (Kind.MODEL, Kind.TOOL) and trajectory not in self._turns
                self._calls[trajectory] = event
            case NodeAdded(trajectory, index, node):
                if trajectory is None:
                    assert (index, node.kind, len(self.nodes)) in ((0, Kind.PROMPT, 0), (0, Kind.PROMPT, 1))
                    self.nodes[:1] = [node]
                    return
                if node.kind is Kind.MODEL:
                    turn = self._turns.pop(trajectory)
                    assert {one.parent for one in turn} == {node.parent}
                    assert tuple(one.token for one in turn) == node.tokens
                    assert tuple(one.logprob for one in turn) == node.logprobs
                    assert tuple(one.entropy for one in turn) == node.entropies
                elif trajectory in self._calls:
                    call = self._calls.pop(trajectory)
                    assert (call.parent, call.call) == (node.parent, node.call)
                assert index == len(self.nodes) and node.decision is None
                self.nodes.append(node)
            case BranchingDecided(index, decision):
                assert self.nodes[index].kind is Kind.TOOL
                self.nodes[index] = replace(self.nodes[index], decision=decision)
            case TrajectoryEnded(_, leaf):
                assert leaf.node < len(self.nodes)
                self.leaves.append(leaf)
            case LeavesScored(rewards, mask):
                self.rewards += rewards
                self.mask += mask

    def tree(self, like: RolloutTree) -> RolloutTree:
        """The tree, with the task and the format of another."""
        return replace(like, nodes=tuple(self.nodes), leaves=tuple(self.leaves))


def observed(who: Agent, how: Rollout, branching: Branching, seed: int = 0) -> tuple[ScoredTree, list[RolloutEvent]]:
    """A tree that is the fold of its events, and equal to the one that nobody observes; and its events."""
    events: list[RolloutEvent] = []
    scored = clock.run(sample_tree(who, TASK, how, branching, seed, score, observer=events.append))
    assert clock.run(sample_tree(who, TASK, how, branching, seed, score)) == scored
    fold = Fold(events)
    assert ScoredTree(fold.tree(scored.tree), tuple(fold.rewards), mask=tuple(fold.mask)) == scored
    started = [event.trajectory for event in events if isinstance(event, TrajectoryEnded)]
    assert len(set(started)) == len(started) == len(scored.tree.leaves)
    return scored, events


@pytest.mark.parametrize("policy", POLICIES)
def test_the_events_of_every_policy_make_up_its_tree(tokenizer: Any, policy: Any) -> None:
    how = Rollout(num_trajectories=8, num_initial=3)
    branches = 0
    for seed in range(3):
        scored, _ = observed(agent(tokenizer, varied), how, Branching(policy=policy, probe_tokens=3), seed)
        branches += scored.tree.branch_points
    assert branches > 0 or policy == "never"


@pytest.mark.parametrize(
    "branching",
    [
        Branching(balance=2.0),
        Branching(fill="informative"),
        Branching(probe="discarded", probe_tokens=2),
        Branching(probe="first_token", policy="always", branch_width=2),
    ],
    ids=str,
)
def test_the_events_of_other_settings_make_up_the_tree(tokenizer: Any, branching: Branching) -> None:
    observed(agent(tokenizer, varied), Rollout(num_trajectories=6, num_initial=2), branching)


def test_the_events_of_a_trajectory_come_in_their_order(tokenizer: Any) -> None:
    def script(prefix: str, seed: int) -> tuple[str, list[float]]:
        return (ANSWER, [4.0]) if "<result>" in prefix else (SEARCH, [0.5])

    how, branching = Rollout(num_trajectories=2, num_initial=1), Branching(probe_tokens=2)
    scored, events = observed(agent(tokenizer, script), how, branching)
    kinds = [type(event).__name__ for event in events if getattr(event, "trajectory", 0) in (None, 0)]
    first, second = (len(scored.tree.nodes[index].tokens) for index in (1, 3))
    assert kinds == [
        "NodeAdded",
        *["TokenSampled"] * first,
        "NodeAdded",
        "CallStarted",
        "NodeAdded",
        *["TokenSampled"] * 2,
        "BranchingDecided",
        *["TokenSampled"] * (second - 2),
        "NodeAdded",
        "TrajectoryEnded",
        "LeavesScored",
    ]
    branch = [event for event in events if isinstance(event, TokenSampled) and event.trajectory == 1]
    assert {event.parent for event in branch} == {2} and len(branch) == second


def test_a_trajectory_that_is_cut_off_ends_with_the_tokens_that_were_sampled(tokenizer: Any) -> None:
    events: list[RolloutEvent] = []
    how = Rollout(num_trajectories=1, num_initial=1, max_tokens=5)
    tree = clock.run(rollout(agent(tokenizer, varied), TASK, how, Branching(), 0, observer=events.append))
    assert Fold(events).tree(tree) == tree
    assert [leaf.stop_reason for leaf in tree.leaves] == [StopReason.LENGTH]
    assert sum(isinstance(event, TokenSampled) for event in events) == 5


def test_a_trajectory_without_time_has_neither_tokens_nor_a_turn(tokenizer: Any) -> None:
    events: list[RolloutEvent] = []
    how = Rollout(num_trajectories=1, num_initial=1, max_seconds=1)
    tree = clock.run(rollout(agent(tokenizer, varied, delay=5), TASK, how, Branching(), 0, observer=events.append))
    assert events == [NodeAdded(None, 0, tree.nodes[0]), TrajectoryEnded(0, Leaf(0, StopReason.MAX_SECONDS))]


class Brittle(Environment):
    """Cannot be forked, and is not the same when it is made again: branches cannot be opened."""

    quick = True
    made: ClassVar[int] = 0

    def reset(self, task: Task) -> None:
        Brittle.made += 1
        self.number = Brittle.made

    @tool
    def look(self) -> str:
        """Look around."""
        return f" room {self.number}"


def test_a_branch_that_is_not_opened_changes_the_decision(tokenizer: Any) -> None:
    def script(prefix: str, seed: int) -> str:
        return ANSWER if "<result>" in prefix else "<think> Look.</think><look></look>"

    tools = EnvironmentTools(StatePool(Brittle))
    who = Agent(ScriptedEngine(tokenizer, script), tokenizer, tools, build_format("tags", [tools["look"].spec]))
    events: list[RolloutEvent] = []
    how, branching = Rollout(num_trajectories=2, num_initial=1), Branching(policy="always", probe_tokens=2)
    tree = asyncio.run(rollout(who, TASK, how, branching, 0, observer=events.append))
    assert Fold(events).tree(tree) == tree
    decided = [event.decision for event in events if isinstance(event, BranchingDecided) and event.node == 2]
    assert [one.branches for one in decided] == [1, 0] and "not opened" in decided[1].reason


def test_the_events_of_a_program_make_up_its_tree(tokenizer: Any) -> None:
    events: list[RolloutEvent] = []
    who = program_agent(ScriptedEngine(tokenizer, lambda prefix, seed: "Kelso"), tokenizer, tool_loop([], str))
    how = Rollout(num_trajectories=2, num_initial=1)
    tree = asyncio.run(rollout(who, TASK, how, Branching(policy="always"), 0, observer=events.append))
    assert Fold(events).tree(tree) == tree
    assert [event.index for event in events if isinstance(event, NodeAdded) and event.trajectory is None] == [0, 0]
