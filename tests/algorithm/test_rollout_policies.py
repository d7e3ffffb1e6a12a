"""Policies that decide when trajectories have ended, or by the state alone, through `sample_tree`.

Every tree is replayed by a slow reference, round by round, from what stands in its nodes.
"""

from __future__ import annotations

import asyncio
import math
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import clock
import pytest

from arpo.agent.agent import Agent
from arpo.agent.formats import build_format
from arpo.algorithm.metrics import rollout_metrics
from arpo.algorithm.rollout import rollout, sample_tree
from arpo.config.algorithm import Branching
from arpo.config.schema import Rollout
from arpo.engine.scripted import Script, ScriptedEngine
from arpo.environments import Environment
from arpo.environments.states import EnvironmentTools, StatePool
from arpo.errors import ArpoError
from arpo.tools.base import Tool, tool
from arpo.types import Completion, Kind, Reward, RolloutTree, ScoredTree, Task, Trajectory

TASK = Task("q1", "Where was Mira Tolven born?", ("Upper Kelso",))
SEARCH, PYTHON = "<think> Find it.</think><search> Mira</search>", "<think> Sum.</think><python>1 + 1</python>"
ANSWER = "<think> Done.</think><answer>\\boxed{ yes}</answer>"
WRONG = "<think> Done.</think><answer>\\boxed{ no}</answer>"
K = 3


@tool(quick=True)
def search(query: str) -> str:
    """Search."""
    return f"found: {query}"


@tool(quick=True)
def python(code: str) -> str:
    """Run."""
    return "2"


def agent(tokenizer: Any, script: Script, tools: Sequence[Tool] = (search, python)) -> Agent:
    chosen = {one.spec.name: one for one in tools}
    format = build_format("tags", [one.spec for one in tools])
    return Agent(ScriptedEngine(tokenizer, script), tokenizer, chosen, format)


def varied(prefix: str, seed: int) -> tuple[str, list[float]]:
    """Up to four calls of two tools, then a right or a wrong answer; all drawn from the seed, and so are entropies."""
    rng = random.Random(seed)
    entropies = [rng.uniform(0, 4) for _ in range(6)]
    made = prefix.count("<result>")
    if made < 2 or (made < 4 and rng.random() < 0.5):
        return (SEARCH if rng.random() < 0.7 else PYTHON), entropies
    return (ANSWER if rng.random() < 0.4 else WRONG), entropies


def reward(text: str) -> Reward:
    return Reward(1.0 if "yes" in text else 0.0)


@dataclass
class Scores:
    """A score function that remembers which leaves it was asked for."""

    asked: list[int]

    async def __call__(self, tree: RolloutTree, states: object) -> ScoredTree:
        self.asked += [leaf.node for leaf in tree.leaves]
        return ScoredTree(tree, tuple(reward(tree.nodes[leaf.node].text) for leaf in tree.leaves))


def sampled(who: Agent, how: Rollout, branching: Branching, seed: int = 0) -> RolloutTree:
    scores = Scores([])
    scored = clock.run(sample_tree(who, TASK, how, branching, seed, scores))
    leaves = [leaf.node for leaf in scored.tree.leaves]
    assert scores.asked == leaves  # every leaf was scored once
    assert [one.total for one in scored.rewards] == [reward(scored.tree.nodes[leaf].text).total for leaf in leaves]
    return scored.tree


# --- a slow replay


class Replay:
    """The tree as it was at some time: the nodes that were there."""

    def __init__(self, tree: RolloutTree) -> None:
        self.tree, self.known = tree, {0}
        self.children = {
            index: [other for other, node in enumerate(tree.nodes) if node.parent == index]
            for index in range(len(tree.nodes))
        }
        self.opened: dict[int, int] = {}

    def add_trajectory(self, source: int) -> None:
        """What the next trajectory from a node added: its first turn that is not known yet, and what first followed."""
        at: int | None = next(child for child in self.children[source] if child not in self.known)
        while at is not None:
            self.known.add(at)
            at = next(iter(self.children[at]), None)

    def results(self) -> list[int]:
        nodes = self.tree.nodes
        return [index for index in sorted(self.known) if nodes[index].kind is Kind.TOOL and self.children[index]]

    def leaves(self) -> list[int]:
        return [leaf.node for leaf in self.tree.leaves if leaf.node in self.known]

    def first_turn_after(self, result: int) -> Sequence[float]:
        return self.tree.nodes[self.children[result][0]].entropies

    def depth(self, index: int) -> int:
        return sum(self.tree.nodes[i].kind is Kind.TOOL for i in self.tree.prefix(index))

    def probe(self, entropies: Sequence[float]) -> float:
        return sum(entropies[:K]) / len(entropies[:K])

    def rise(self, result: int) -> float:
        start = self.tree.nodes[self.tree.prefix(result)[1]].entropies
        return self.probe(self.first_turn_after(result)) - self.probe(start)


Choose = Callable[[Replay], Callable[[int], float]]


def check_rounds(tree: RolloutTree, how: Rollout, size: int, budget: int, score_of: Choose) -> int:
    """Replay the rounds of a posthoc policy, and return how many there were."""
    replay = Replay(tree)
    for _ in range(how.num_initial):
        replay.add_trajectory(0)
    rounds = 0
    while budget:
        rounds += 1
        score = score_of(replay)
        order = sorted(replay.results(), key=lambda i: (-round(score(i), 9), replay.opened.get(i, 0), i))
        chosen = [index for index in order if score(index) > -math.inf][: min(size, budget)]
        for index in chosen:
            replay.add_trajectory(index)
            replay.opened[index] = replay.opened.get(index, 0) + 1
        budget -= len(chosen)
    assert replay.known == set(range(len(tree.nodes)))
    opened = {
        i: node.decision.branches for i, node in enumerate(tree.nodes) if node.decision and node.decision.branches
    }
    assert opened == replay.opened
    return rounds


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("penalty", [0.0, 0.7])
def test_posthoc_top_entropy_takes_the_highest_entropies_of_the_tree(tokenizer: Any, penalty: float, seed: int) -> None:
    how = Rollout(num_trajectories=12, num_initial=3, max_tool_calls=4)
    settings = Branching(policy="posthoc_top_entropy", penalty=penalty, round_size=2, probe_tokens=K)
    tree = sampled(agent(tokenizer, varied), how, settings, seed)
    assert len(tree.leaves) == 12

    def score_of(replay: Replay) -> Callable[[int], float]:
        return lambda i: replay.probe(replay.first_turn_after(i)) - penalty * replay.opened.get(i, 0)

    assert check_rounds(tree, how, 2, 9, score_of) == 5
    reasons = {node.decision.reason for node in tree.nodes if node.decision and node.decision.branches}
    assert reasons == {"largest entropy after all trajectories ended"}


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("per_call", [False, True])
def test_posthoc_outcome_takes_the_most_uncertain_results_anew_in_each_round(
    tokenizer: Any, per_call: bool, seed: int
) -> None:
    how = Rollout(num_trajectories=12, num_initial=4, max_tool_calls=4)
    settings = Branching(policy="posthoc_outcome", per_call=per_call, round_size=2, probe_tokens=K)
    tree = sampled(agent(tokenizer, varied), how, settings, seed)
    assert len(tree.leaves) == 12

    def score_of(replay: Replay) -> Callable[[int], float]:
        won = {leaf: reward(tree.nodes[leaf].text).total for leaf in replay.leaves()}
        middle = (max(won.values()) + min(won.values())) / 2
        share = sum(value > middle for value in won.values()) / len(won)

        def score(index: int) -> float:
            below = [leaf for leaf in won if index in tree.prefix(leaf)]
            wins = sum(won[leaf] > middle for leaf in below)
            a, b = 2 * share + wins, 2 * (1 - share) + len(below) - wins
            calls = sum(replay.depth(leaf) - replay.depth(index) for leaf in below) / len(below)
            return a * b / (a + b) / (a + b + 1) / (1 + calls if per_call else 1)

        return score

    assert check_rounds(tree, how, 2, 8, score_of) == 4
    reasons = {node.decision.reason for node in tree.nodes if node.decision and node.decision.branches}
    assert reasons == {"most uncertain outcome after all trajectories ended"}


@pytest.mark.parametrize("seed", range(6))
def test_posthoc_tail_takes_last_results_and_gives_hard_tasks_more(tokenizer: Any, seed: int) -> None:
    how = Rollout(num_trajectories=12, num_initial=4, max_tool_calls=4)
    settings = Branching(policy="posthoc_tail", round_size=3, probe_tokens=K, fill="none")
    tree = sampled(agent(tokenizer, varied), how, settings, seed)
    first = [reward(tree.nodes[leaf.node].text).total for leaf in tree.leaves[:4]]
    budget = math.ceil(8 * (1 - sum(first) / 4))
    assert len(tree.leaves) == 4 + budget

    def score_of(replay: Replay) -> Callable[[int], float]:
        last = {[i for i in tree.prefix(leaf) if tree.nodes[i].kind is Kind.TOOL][-1] for leaf in replay.leaves()}
        return lambda i: 0.0 if i in last else -math.inf

    check_rounds(tree, how, 3, budget, score_of)


def test_a_task_that_is_always_solved_gets_no_branch_at_its_tail(tokenizer: Any) -> None:
    how = Rollout(num_trajectories=8, num_initial=2)

    def size(answer: str) -> int:
        script: Script = lambda prefix, seed: SEARCH if "<result>" not in prefix else answer  # noqa: E731
        return len(sampled(agent(tokenizer, script), how, Branching(policy="posthoc_tail")).leaves)

    assert (size(ANSWER), size(WRONG)) == (2, 8)


@pytest.mark.parametrize("policy", ["posthoc_top_entropy", "posthoc_outcome", "posthoc_tail", "shuffled"])
def test_without_any_result_the_prompt_is_branched_from(tokenizer: Any, policy: Any) -> None:
    how = Rollout(num_trajectories=5, num_initial=2)
    tree = sampled(agent(tokenizer, lambda prefix, seed: WRONG), how, Branching(policy=policy))
    assert [node.parent for node in tree.nodes] == [None, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("policy", ["posthoc_outcome", "posthoc_tail"])
def test_a_policy_that_needs_rewards_refuses_a_tree_that_is_not_scored(tokenizer: Any, policy: Any) -> None:
    with pytest.raises(ArpoError, match=f'"{policy}" chooses by rewards, and this tree is not scored'):
        clock.run(rollout(agent(tokenizer, varied), TASK, Rollout(), Branching(policy=policy), 0))


def test_masked_trajectories_are_no_evidence(tokenizer: Any) -> None:
    """Two trajectories with one result each: the rewards differ only by one that is masked."""
    script: Script = lambda prefix, seed: SEARCH if "<result>" not in prefix else ANSWER  # noqa: E731
    leaves: list[list[int]] = []

    async def score(tree: RolloutTree, states: object) -> ScoredTree:
        numbers = [len(leaves) * 10 + i for i in range(len(tree.leaves))]
        leaves.append(numbers)
        rewards = tuple(Reward(float(number == 1)) for number in numbers)
        return ScoredTree(tree, rewards, mask=tuple(number != 1 for number in numbers))

    how = Rollout(num_trajectories=4, num_initial=2)
    settings = Branching(policy="posthoc_outcome", round_size=1)
    scored = clock.run(sample_tree(agent(tokenizer, script), TASK, how, settings, 0, score))
    assert scored.mask == (True, False, True, True) and len(leaves) == 3
    opened = [node.decision.branches for node in scored.tree.nodes if node.decision]
    assert opened == [
        1,
        1,
    ]  # the masked one is as good a place as the other, and has fewer branches in the second round


# --- shuffled


@pytest.mark.parametrize("seed", range(6))
def test_under_shuffled_another_result_of_equal_depth_and_tool_decides(tokenizer: Any, seed: int) -> None:
    how = Rollout(num_trajectories=16, num_initial=6, max_tool_calls=4)
    settings = Branching(policy="shuffled", probe_tokens=K, alpha=0.5, beta=1.0, tau=0.55)
    tree = sampled(agent(tokenizer, varied), how, settings, seed)
    assert len(tree.leaves) == 16
    replay, scale = Replay(tree), math.log(len(tokenizer))
    budget, seen = 10, set()
    for _ in range(6):
        replay.add_trajectory(0)
    old: set[int] = set()
    while new := [index for index in replay.results() if index not in old]:
        kinds: dict[Any, list[int]] = {}
        for index in replay.results():
            call = tree.nodes[index].call
            assert call is not None
            kinds.setdefault((replay.depth(index), call.name), []).append(index)
        donors = {}
        for index in sorted(new, key=lambda i: (replay.depth(i), i)):
            decision = tree.nodes[index].decision
            assert decision is not None
            found = re.search(r"^(.*) \(by the dH of node (\d+)\)$", decision.reason)
            assert found is not None
            reason, donor = found[1], donors.setdefault(index, int(found[2]))
            alike = next(kind for kind in kinds.values() if index in kind)
            now = [other for other in alike if other in new]
            assert donor in (now if len(now) > 1 else alike)
            assert donor != index or alike == [index]
            assert decision.delta == pytest.approx(replay.rise(index) / scale)
            assert decision.probability == pytest.approx(0.5 + replay.rise(donor) / scale)
            wanted = decision.probability > 0.55
            assert decision.branches == (1 if wanted and budget else 0)
            assert reason == (
                ("branched" if budget else "the budget of trajectories is used up")
                if wanted
                else "P is not above the threshold"
            )
            budget -= decision.branches
            seen.add(donor == index)
        for kind in kinds.values():  # each dH is used once where there are several
            now = [index for index in kind if index in new]
            assert len(now) < 2 or sorted(donors[index] for index in now) == now
        old |= set(new)
        for index in sorted(new, key=lambda i: (replay.depth(i), i)):
            for _ in range(tree.nodes[index].decision.branches):  # type: ignore[union-attr]
                replay.add_trajectory(index)
        if set(replay.results()) == old:  # the rest was filled from the prompt
            for _ in range(sum(child not in replay.known for child in replay.children[0])):
                replay.add_trajectory(0)
                budget -= 1
    assert replay.known == set(range(len(tree.nodes)))
    assert False in seen
    again = sampled(agent(tokenizer, varied), how, settings, seed)
    assert [(n.parent, n.text, n.decision) for n in again.nodes] == [(n.parent, n.text, n.decision) for n in tree.nodes]


def test_shuffled_opens_as_many_branches_as_entropy_would(tokenizer: Any) -> None:
    """Six trajectories with one result each, two of which rise: two branches, but elsewhere."""
    how = Rollout(num_trajectories=8, num_initial=6, max_tool_calls=1)
    turns: list[int] = []

    def script(prefix: str, seed: int) -> tuple[str, list[float]]:
        if "<result>" not in prefix:
            return SEARCH, [1.0]
        turns.append(seed)
        return ANSWER, [2.0 if len(turns) in (2, 5) else 0.5]

    tree = sampled(agent(tokenizer, script), how, Branching(policy="shuffled", probe_tokens=K))
    results = [node.decision for node in tree.nodes if node.decision]
    assert [one.delta > 0 for one in results] == [False, True, False, False, True, False]
    assert [one.branches for one in results].count(1) == 2 and [node.parent for node in tree.nodes].count(0) == 6
    assert all(one.branches == (one.probability > 0.5) for one in results)
    assert [one.branches > 0 for one in results] != [one.delta > 0 for one in results]


def test_under_shuffled_shallow_results_get_the_budget_first(tokenizer: Any) -> None:
    """Two trajectories, one after the other, whose three results all rise: the budget goes to the first of each."""
    how = Rollout(num_trajectories=4, num_initial=2, max_tool_calls=3, concurrency=1)

    def script(prefix: str, seed: int) -> tuple[str, list[float]]:
        made = prefix.count("<result>")
        return (SEARCH if made < 3 else ANSWER), [1.0 + made]

    tree = sampled(agent(tokenizer, script), how, Branching(policy="shuffled"))
    opened = [one.branches for one in decisions(tree)]
    assert opened[:6] == [1, 0, 0, 1, 0, 0] and sum(opened) == 2


# --- the probe


def calm_then_sure(later: float) -> Script:
    """Entropy rises in the first token after the first result and falls after the second; then it is `later`."""

    def script(prefix: str, seed: int) -> tuple[str, list[float]]:
        made = prefix.count("<result>")
        return (SEARCH if made < 2 else ANSWER), [[1.0, 3.0], [2.0, later], [0.5, later]][made]

    return script


@pytest.mark.parametrize("later", [0.0, 4.0])
def test_the_first_token_after_a_result_decides_whatever_follows(tokenizer: Any, later: float) -> None:
    how = (
        Rollout(num_trajectories=3, num_initial=1, fill="all") if False else Rollout(num_trajectories=3, num_initial=1)
    )
    settings = Branching(probe="first_token", fill="none")
    tree = sampled(agent(tokenizer, calm_then_sure(later)), how, settings)
    assert len(tree.leaves) == 2  # nothing is filled
    found = [(one.initial_entropy, one.entropy, one.branches, one.probed_tokens) for one in decisions(tree)]
    assert found == [(1.0, 2.0, 1, 1), (1.0, 0.5, 0, 1), (1.0, 0.5, 0, 1)]
    by_turn = sampled(agent(tokenizer, calm_then_sure(later)), how, Branching(fill="none"))
    assert [one.branches for one in decisions(by_turn)] == ([0, 0] if later == 0 else [1, 1, 0])


@pytest.mark.parametrize(("probe", "token"), [("first_token", 0), ("trajectory", K - 1)])
def test_the_branch_starts_as_soon_as_the_last_probed_token_is_known(tokenizer: Any, probe: Any, token: int) -> None:
    started: list[tuple[int, int]] = []  # turn and token with which a trajectory was started

    class Watched(ScriptedEngine):
        turns = 0

        async def generate(self, prefix: Any, params: Any, *, on_token: Any = None) -> Completion:
            turn, self.turns, tokens = self.turns, self.turns + 1, 0

            def watch(*sampled: Any) -> None:
                nonlocal tokens
                before = len(asyncio.all_tasks())
                on_token(*sampled)
                started.extend([(turn, tokens)] * (len(asyncio.all_tasks()) - before))
                tokens += 1

            return await super().generate(prefix, params, on_token=watch)

    def script(prefix: str, seed: int) -> tuple[str, list[float]]:
        return (SEARCH, [1.0]) if "<result>" not in prefix else (ANSWER, [2.0])

    who = replace(agent(tokenizer, script), engine=Watched(tokenizer, script))
    tree = sampled(who, Rollout(num_trajectories=2, num_initial=1), Branching(probe=probe, probe_tokens=K))
    assert len(tree.leaves) == 2 and started == [(1, token)]


def decisions(tree: RolloutTree) -> list[Any]:
    return [node.decision for node in tree.nodes if node.decision is not None]


def test_a_discarded_probe_decides_and_is_not_in_the_tree(tokenizer: Any) -> None:
    how = Rollout(num_trajectories=3, num_initial=1)
    asked: list[tuple[int, int]] = []

    def script(prefix: str, seed: int) -> tuple[str, list[float]]:
        made = prefix.count("<result>")
        asked.append((made, seed))
        first = [one[0] for one in asked].count(made) == 1
        if made == 0:
            return SEARCH, [1.0]
        return ("<think> Hm,", [3.0]) if first else (ANSWER, [0.2])  # the probe comes first

    settings = Branching(probe="discarded", probe_tokens=2, fill="none")
    scores = Scores([])
    scored = clock.run(sample_tree(agent(tokenizer, script), TASK, how, settings, 0, scores))
    (decision,) = decisions(scored.tree)
    assert (decision.entropy, decision.initial_entropy, decision.branches) == (3.0, 1.0, 1)
    assert (decision.probed_tokens, decision.discarded_tokens) == (2, 2)
    assert [made for made, _ in asked] == [0, 1, 1, 1] and len({seed for _, seed in asked}) == 4
    assert [node.text for node in scored.tree.nodes[3:]] == [ANSWER, ANSWER]
    metrics = rollout_metrics([scored], settings.probe_length)
    in_tree = sum(len(node.tokens) for node in scored.tree.nodes if node.kind is Kind.MODEL)
    assert (metrics["sampled_tokens"], metrics["discarded_tokens"]) == (in_tree + 2, 2)


def test_without_a_fill_the_tree_keeps_its_roots(tokenizer: Any) -> None:
    how = Rollout(num_trajectories=6, num_initial=2)
    script: Script = lambda prefix, seed: (SEARCH, [2.0]) if "<result>" not in prefix else (ANSWER, [1.0])  # noqa: E731
    assert len(sampled(agent(tokenizer, script), how, Branching(fill="none")).leaves) == 2
    assert len(sampled(agent(tokenizer, script), how, Branching(fill="all")).leaves) == 6
    posthoc = Branching(policy="posthoc_random", fill="none")
    assert len(sampled(agent(tokenizer, script), how, posthoc).leaves) == 6


# --- the oracle


class Steps(Environment):
    """Every second choice is decisive. A task may not know it."""

    quick = True

    def reset(self, task: Task) -> None:
        self.count, self.known = 0, task.meta.get("known", True)

    @property
    def decisive(self) -> bool | None:
        return self.count % 2 == 1 if self.known else None

    def fork(self) -> Steps:
        other = type(self)()
        other.count, other.known = self.count, self.known
        return other

    @tool
    def step(self) -> str:
        """One step."""
        self.count += 1
        return f"at {self.count}"

    def reward(self, trajectory: Trajectory) -> float:
        return float(self.count)


class Silent(Steps):
    decisive = Environment.decisive


def stepping(tokenizer: Any, kind: type[Environment]) -> Agent:
    tools = EnvironmentTools(StatePool(kind))
    script: Script = lambda prefix, seed: "<think> On.</think><step></step>" if prefix.count("<result>") < 4 else ANSWER  # noqa: E731
    format = build_format("tags", [one.spec for one in tools.values()])
    return Agent(ScriptedEngine(tokenizer, script), tokenizer, tools, format)


def test_the_oracle_branches_exactly_where_the_environment_says(tokenizer: Any) -> None:
    how = Rollout(num_trajectories=40, num_initial=2, max_tool_calls=5)
    tree = sampled(stepping(tokenizer, Steps), how, Branching(policy="oracle", fill="none", probe_tokens=K))
    replay = Replay(tree)
    opened = {(replay.depth(i), node.decision.branches) for i, node in enumerate(tree.nodes) if node.decision}
    assert opened == {(1, 1), (2, 0), (3, 1), (4, 0)}
    assert len(tree.leaves) == 2 * 2 * 2 and len(decisions(tree)) == 2 + 4 + 4 + 8
    for trajectory in tree.trajectories:
        assert [result.text for _, result in trajectory.tool_calls] == ["at 1", "at 2", "at 3", "at 4"]
    reasons = {one.reason for one in decisions(tree)}
    assert reasons == {"branched", "the next choice is not decisive"}


def test_without_an_oracle_nothing_is_sampled(tokenizer: Any) -> None:
    def error(who: Agent, task: Task = TASK) -> str:
        with pytest.raises(ArpoError) as caught:
            clock.run(sample_tree(who, task, Rollout(), Branching(policy="oracle"), 0, Scores([])))
        return str(caught.value)

    def fail(prefix: str, seed: int) -> str:
        raise AssertionError("nothing may be sampled")

    assert "but there is no environment: use data.train=labyrinth" in error(agent(tokenizer, fail))
    assert "but Silent has no property decisive" in error(stepping(tokenizer, Silent))
    unknown = Task("q2", "Go.", meta={"known": False})
    assert "does not know the decisive choices of task q2" in error(stepping(tokenizer, Steps), unknown)
