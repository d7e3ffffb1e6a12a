"""Rollouts with a scripted model: every case, with trees that a person can check."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import clock
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from arpo.agent.agent import Agent
from arpo.agent.formats import build_format
from arpo.algorithm.rollout import rollout, sample_tree, sample_trees
from arpo.config.algorithm import Branching
from arpo.config.schema import Rollout
from arpo.engine.scripted import Script, ScriptedEngine
from arpo.errors import ArpoError
from arpo.rewards import hierarchical_reward
from arpo.tools.base import Tool, ToolError, ToolUnavailable, tool
from arpo.types import Fault, Kind, Node, Reward, RolloutTree, ScoredTree, StopReason, Task

TASK = Task("q1", "Where was Mira Tolven born?", ("Upper Kelso",))
SEARCH = "<think> Find it.</think><search> birthplace of Mira Tolven</search>"
ANSWER = "<think> Done.</think><answer>\\boxed{ Upper Kelso}</answer>"
LOW, HIGH = [0.5], [4.0]
T = TypeVar("T")


@tool(quick=True)
def search(query: str) -> str:
    """Search."""
    return f"found: {query}"


@tool(quick=True)
def python(code: str) -> str:
    """Arithmetic, without a sandbox."""
    terms = code.split("+")
    if not all(term.strip().isdigit() for term in terms):
        raise ToolError("not a sum")
    return str(sum(map(int, terms)))


def agent(tokenizer: Any, script: Script, *tools: Tool, **engine: Any) -> Agent:
    chosen = {t.spec.name: t for t in (tools or (search, python))}
    engine_ = ScriptedEngine(tokenizer, script, **engine)
    return Agent(engine_, tokenizer, chosen, build_format("tags", [t.spec for t in chosen.values()]))


def sample(who: Agent, how: Rollout | None = None, branching: Branching | None = None, seed: int = 0) -> RolloutTree:
    tree = clock.run(
        rollout(who, TASK, how or Rollout(num_trajectories=1, num_initial=1), branching or Branching(), seed)
    )
    check(tree, how or Rollout(num_trajectories=1, num_initial=1))
    return tree


async def timed(work: Coroutine[Any, Any, T]) -> tuple[T, float]:
    """The result of a coroutine, and how long it took."""
    started = time.monotonic()
    return await work, time.monotonic() - started


def check(tree: RolloutTree, how: Rollout) -> None:
    """What holds for every tree."""
    assert len(tree.leaves) == how.num_trajectories
    children = [node.parent for node in tree.nodes]
    for index, node in enumerate(tree.nodes):
        if node.kind is Kind.TOOL:  # one child per continuation: the probed trajectory and the branches opened here
            opened = node.decision.branches if node.decision else 0
            assert children.count(index) <= 1 + opened
        if node.kind is Kind.MODEL and node.parent:
            assert tree.nodes[node.parent].kind is Kind.TOOL
        assert len(node.char_offsets) == (len(node.tokens) if node.kind is Kind.MODEL else 0)
        assert not node.char_offsets or node.char_offsets[-1] == len(node.text)
    for leaf in tree.leaves:
        nodes = [tree.nodes[i] for i in tree.prefix(leaf.node)]
        assert sum(node.kind is Kind.TOOL for node in nodes) <= how.max_tool_calls
        assert sum(len(node.tokens) for node in nodes[1:]) <= how.max_tokens


async def unscored(tree: RolloutTree, states: object) -> ScoredTree:
    """The tree without rewards."""
    return ScoredTree(tree)


def turns(*texts: str | tuple[str, list[float]]) -> Script:
    """A model that says these turns in order: as many results as it has seen, so many turns it has had."""
    return lambda prefix, seed: texts[min(prefix.count("<result>"), len(texts) - 1)]


def kinds(tree: RolloutTree) -> list[tuple[int | None, str]]:
    return [(node.parent, node.kind.value) for node in tree.nodes]


def test_one_trajectory(tokenizer: Any) -> None:
    tree = sample(agent(tokenizer, turns(SEARCH, ANSWER)))
    assert kinds(tree) == [(None, "prompt"), (0, "model"), (1, "tool"), (2, "model")]
    assert [node.text for node in tree.nodes[1:]] == [
        SEARCH,
        "<result>found: birthplace of Mira Tolven</result>\n",
        ANSWER,
    ]
    assert [(leaf.node, leaf.stop_reason) for leaf in tree.leaves] == [(3, StopReason.ANSWER)]
    assert tree.nodes[2].call is not None
    assert dict(tree.nodes[2].call.args) == {"query": "birthplace of Mira Tolven"}
    assert tokenizer.decode(list(tree.tokens(3))) == "".join(node.text for node in tree.nodes)


def test_threshold_hit_opens_a_branch_right_after_the_result(tokenizer: Any) -> None:
    how = Rollout(num_trajectories=2, num_initial=1)
    tree = sample(agent(tokenizer, turns((SEARCH, LOW), (ANSWER, HIGH))), how, Branching(probe_tokens=3))
    assert kinds(tree) == [(None, "prompt"), (0, "model"), (1, "tool"), (2, "model"), (2, "model")]
    decision = tree.nodes[2].decision
    assert decision is not None
    assert (decision.initial_entropy, decision.entropy, decision.branches) == (0.5, 4.0, 1)
    assert (decision.probed_tokens, decision.reason) == (3, "branched")
    assert {leaf.node for leaf in tree.leaves} == {3, 4}
    assert tree.tool_calls == 1  # the shared call was made and charged once
    assert tree.total_tokens - tree.unique_tokens == sum(len(tree.nodes[i].tokens) for i in (0, 1, 2))


def test_threshold_missed_fills_the_rest_from_the_root(tokenizer: Any) -> None:
    how = Rollout(num_trajectories=3, num_initial=1)
    tree = sample(agent(tokenizer, turns((SEARCH, HIGH), (ANSWER, LOW))), how)
    assert [node.parent for node in tree.nodes if node.kind is Kind.MODEL].count(0) == 3
    reasons = [node.decision.reason for node in tree.nodes if node.decision]
    assert (
        reasons
        == [
            "P is not above the threshold",
            "the budget of trajectories is used up",
            "the budget of trajectories is used up",
        ][:1]
        * 3
    )
    assert tree.branch_points == 0


def test_budget_is_shared_by_all_trajectories_and_never_overdrawn(tokenizer: Any) -> None:
    how = Rollout(num_trajectories=6, num_initial=4)
    tree = sample(agent(tokenizer, turns((SEARCH, LOW), (ANSWER, HIGH))), how)
    reasons = [node.decision.reason for node in tree.nodes if node.decision]
    assert sorted(reasons) == [
        "branched",
        "branched",
        "the budget of trajectories is used up",
        "the budget of trajectories is used up",
    ]
    assert tree.tool_calls == 4


def test_width_opens_several_at_one_point(tokenizer: Any) -> None:
    how = Rollout(num_trajectories=4, num_initial=1)
    tree = sample(agent(tokenizer, turns((SEARCH, LOW), (ANSWER, HIGH))), how, Branching(branch_width=3))
    assert [node.parent for node in tree.nodes] == [None, 0, 1, 2, 2, 2, 2]


def test_a_branch_branches_again_later_but_not_at_its_own_start(tokenizer: Any) -> None:
    how = Rollout(num_trajectories=8, num_initial=1)
    tree = sample(agent(tokenizer, turns((SEARCH, LOW), (SEARCH, HIGH), (ANSWER, HIGH))), how)
    # The first trajectory branches after its first result, both after their second: 4 leaves. The rest is filled.
    assert [node.parent for node in tree.nodes if node.kind is Kind.MODEL].count(0) == 1 + 4
    first = tree.nodes[2]
    assert first.decision is not None
    assert first.decision.branches == 1
    assert [node.parent for node in tree.nodes].count(2) == 2


def test_never_branching_is_plain_sampling(tokenizer: Any) -> None:
    how = Rollout(num_trajectories=3, num_initial=3)
    tree = sample(agent(tokenizer, turns((SEARCH, LOW), (ANSWER, HIGH))), how, Branching(policy="never"))
    assert [node.parent for node in tree.nodes].count(0) == 3
    assert {node.decision.reason for node in tree.nodes if node.decision} == {"the policy never branches"}


def test_the_stochastic_rule_follows_its_seed(tokenizer: Any) -> None:
    how, rule = Rollout(num_trajectories=8, num_initial=4), Branching(rule="stochastic", alpha=0.5, beta=0.0)
    who = agent(tokenizer, turns(SEARCH, SEARCH, ANSWER))
    seen = {seed: [n.decision.branches for n in sample(who, how, rule, seed).nodes if n.decision] for seed in range(8)}
    assert len({tuple(branches) for branches in seen.values()}) > 1
    again = [n.decision.branches for n in sample(who, how, rule, 3).nodes if n.decision]
    assert again == seen[3]


def test_probe_shorter_than_k_uses_the_whole_turn(tokenizer: Any) -> None:
    tree = sample(agent(tokenizer, turns((SEARCH, LOW), (ANSWER, HIGH))), branching=Branching(probe_tokens=500))
    decision = tree.nodes[2].decision
    assert decision is not None
    assert decision.probed_tokens == len(tree.nodes[3].tokens)


def test_call_limit_ends_the_trajectory_without_a_call(tokenizer: Any) -> None:
    calls: list[str] = []

    @tool(quick=True)
    def search(query: str) -> str:
        """Search."""
        calls.append(query)
        return "nothing"

    tree = sample(agent(tokenizer, turns(SEARCH), search), Rollout(num_trajectories=1, num_initial=1, max_tool_calls=2))
    assert tree.leaves[0].stop_reason is StopReason.MAX_TOOL_CALLS
    assert tree.tool_calls == len(calls) == 2


def test_token_limit(tokenizer: Any) -> None:
    how = Rollout(num_trajectories=1, num_initial=1, max_tokens=10)
    tree = sample(agent(tokenizer, lambda prefix, seed: "word " * 50), how)
    assert (tree.leaves[0].stop_reason, len(tree.nodes[1].tokens)) == (StopReason.LENGTH, 10)


def test_a_result_that_does_not_fit_ends_the_trajectory(tokenizer: Any) -> None:
    used = len(tokenizer(SEARCH, add_special_tokens=False).input_ids)
    tree = sample(agent(tokenizer, turns(SEARCH)), Rollout(num_trajectories=1, num_initial=1, max_tokens=used + 3))
    assert (tree.leaves[0].stop_reason, kinds(tree)) == (
        StopReason.LENGTH,
        [(None, "prompt"), (0, "model"), (1, "tool")],
    )
    assert (tree.nodes[2].tokens, tree.tool_calls) == ((), 1)  # the call was made: it counts, but nobody saw its result


def test_the_context_limits_a_trajectory_too(tokenizer: Any) -> None:
    prompt = len(sample(agent(tokenizer, turns(ANSWER))).nodes[0].tokens)
    tree = sample(agent(tokenizer, lambda prefix, seed: "word " * 50, max_context=prompt + 7))
    assert (tree.leaves[0].stop_reason, len(tree.nodes[1].tokens)) == (StopReason.LENGTH, 7)


def test_ending_without_an_answer(tokenizer: Any) -> None:
    tree = sample(agent(tokenizer, lambda prefix, seed: "I do not know."))
    assert tree.leaves[0].stop_reason is StopReason.EOS


def result_node(tree: RolloutTree) -> Node:
    return next(node for node in tree.nodes if node.kind is Kind.TOOL)


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("<search></search>", "empty"),
        ("<search>   </search>", "empty"),
        ("Mira</search>", "not opened"),
        ("<search> a <search> b</search>", "inside another"),
        ("<python> 1 +</python>", "Error"),
    ],
)
def test_malformed_and_empty_calls_get_an_answer_to_learn_from(tokenizer: Any, said: str, told: str) -> None:
    tree = sample(agent(tokenizer, turns(said, ANSWER)))
    node = result_node(tree)
    assert node.result is not None
    assert (node.result.fault, told in node.result.text) == (Fault.MODEL, True), node.result.text
    assert tree.leaves[0].stop_reason is StopReason.ANSWER


def failing(error: Callable[[], Exception]) -> Tool:
    @tool(quick=True, retries=0)
    def search(query: str) -> str:
        """Search."""
        raise error()

    return search


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (lambda: ToolError("no such thing"), Fault.MODEL),
        (lambda: ZeroDivisionError("oops"), Fault.INFRA),
        (lambda: ToolUnavailable("index is down"), Fault.INFRA),
        (lambda: ConnectionError("refused"), Fault.INFRA),
    ],
)
def test_tool_failures_become_results(tokenizer: Any, error: Callable[[], Exception], fault: Fault) -> None:
    tree = sample(agent(tokenizer, turns(SEARCH, ANSWER), failing(error)))
    node = result_node(tree)
    assert node.result is not None
    assert node.result.fault is fault
    assert tree.leaves[0].stop_reason is StopReason.ANSWER
    assert tree.trajectories[0].infra_fault == (fault is Fault.INFRA)


def test_tool_timeout_does_not_stop_the_trajectory(tokenizer: Any) -> None:
    @tool(timeout=0.05)
    async def search(query: str) -> str:
        """Search."""
        await asyncio.sleep(30)
        return "late"

    tree = sample(agent(tokenizer, turns(SEARCH, ANSWER), search))
    node = result_node(tree)
    assert node.result is not None
    assert (node.result.fault, tree.leaves[0].stop_reason) == (Fault.INFRA, StopReason.ANSWER)
    assert node.seconds == pytest.approx(0.05)


def test_a_trajectory_waits_only_for_its_own_tool(tokenizer: Any) -> None:
    """One call in four takes long; the other trajectories have ended by then. Nothing adds up."""
    calls = 0

    @tool
    async def search(query: str) -> str:
        """Search."""
        nonlocal calls
        calls += 1
        await asyncio.sleep(0.5 if calls % 4 == 1 else 0.0)
        return "found"

    how = Rollout(num_trajectories=8, num_initial=8)
    who = agent(tokenizer, turns(SEARCH, SEARCH, ANSWER), search)
    tree, taken = clock.run(timed(rollout(who, TASK, how, Branching(policy="never"), 0)))
    assert tree.tool_calls == calls == 16
    met = [sum(tree.nodes[i].seconds for i in tree.prefix(leaf.node)) for leaf in tree.leaves]
    assert taken == pytest.approx(max(met)) and taken < 1.01  # 4 slow calls of 0.5 s, at most two on one trajectory
    assert met == sorted(met)  # leaves are listed as they end: all that met no slow call came first
    assert 0 < sum(seconds > 0.4 for seconds in met) < 8


def test_a_slow_tool_on_one_trajectory_in_ten_costs_its_own_second_only(tokenizer: Any) -> None:
    """Forty trajectories of five tasks, three calls each; four of them meet a call of a second. No barrier anywhere."""
    calls = 0

    @tool
    async def search(query: str) -> str:
        """Search."""
        nonlocal calls
        calls += 1
        await asyncio.sleep(1.0 if calls % 30 == 7 else 0.01)
        return "found"

    who = agent(tokenizer, turns(SEARCH, SEARCH, SEARCH, ANSWER), search)
    how, tasks = Rollout(num_trajectories=8, num_initial=8, concurrency=40), [TASK] * 5
    scored, taken = clock.run(timed(sample_trees(who, tasks, how, Branching(policy="never"), range(5), unscored)))
    trees = [one.tree for one in scored]
    slowest = max(sum(tree.nodes[i].seconds for i in tree.prefix(leaf.node)) for tree in trees for leaf in tree.leaves)
    assert sum(tree.tool_calls for tree in trees) == calls == 120
    assert sum(node.seconds > 0.9 for tree in trees for node in tree.nodes) == 4
    assert slowest == pytest.approx(1.02) == taken  # one after another it would be 4 s of tools, and step by step 3 s


def test_time_limit_keeps_what_was_sampled(tokenizer: Any) -> None:
    @tool(timeout=60)
    async def search(query: str) -> str:
        """Search."""
        await asyncio.sleep(30)
        return "late"

    how = Rollout(num_trajectories=2, num_initial=2, max_seconds=0.2)
    tree = sample(agent(tokenizer, turns(SEARCH, ANSWER), search), how)
    assert [leaf.stop_reason for leaf in tree.leaves] == [StopReason.MAX_SECONDS, StopReason.MAX_SECONDS]
    assert [node.text for node in tree.nodes if node.kind is Kind.MODEL] == [SEARCH, SEARCH]
    assert [node.tokens for node in tree.nodes if node.kind is Kind.TOOL] == [(), ()]
    assert tree.tool_calls == 2


@pytest.mark.parametrize(("down", "end"), [(True, StopReason.WORKER_LOST), (False, StopReason.MAX_SECONDS)])
def test_a_trajectory_whose_time_ends_while_nothing_can_sample_is_not_the_models_fault(
    tokenizer: Any, down: bool, end: StopReason
) -> None:
    who = agent(tokenizer, turns(SEARCH, ANSWER), delay=0.15)
    who.engine.unreachable = down  # type: ignore[misc]
    tree = sample(who, Rollout(num_trajectories=1, num_initial=1, max_seconds=0.2))
    assert [leaf.stop_reason for leaf in tree.leaves] == [end]
    assert [trajectory.infra_fault for trajectory in tree.trajectories] == [down]


def test_time_spent_waiting_for_a_slot_does_not_count(tokenizer: Any) -> None:
    how = Rollout(num_trajectories=6, num_initial=6, max_seconds=0.25, concurrency=1)
    tree = sample(agent(tokenizer, turns(ANSWER), delay=0.1), how)  # 0.6 s one after another
    assert [leaf.stop_reason for leaf in tree.leaves] == [StopReason.ANSWER] * 6


def test_a_branch_inherits_the_time_of_its_trunk(tokenizer: Any) -> None:
    how = Rollout(num_trajectories=4, num_initial=1, max_tool_calls=9, max_seconds=0.5)
    tree = sample(agent(tokenizer, turns((SEARCH, LOW), (SEARCH, HIGH)), delay=0.15), how)
    assert any(node.decision and node.decision.branches for node in tree.nodes)
    for leaf in tree.leaves:
        assert leaf.stop_reason is StopReason.MAX_SECONDS
        assert sum(tree.nodes[i].seconds for i in tree.prefix(leaf.node)) <= 0.5  # with time of its own it would be 0.6


def test_trajectories_of_many_tasks_share_the_slots_and_one_failure_stops_them_all(tokenizer: Any) -> None:
    under_way = most = 0

    @tool
    async def search(query: str) -> str:
        """Search."""
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0.01)
        under_way -= 1
        return "found"

    tasks = [Task(str(i), f"Question {i}?", ("x",)) for i in range(5)]
    how, never = Rollout(num_trajectories=4, num_initial=4, concurrency=3), Branching(policy="never")
    who = agent(tokenizer, turns(SEARCH, ANSWER), search)
    reported: list[ScoredTree] = []
    trees = clock.run(sample_trees(who, tasks, how, never, range(5), unscored, on_tree=reported.append))
    assert [scored.tree.task.id for scored in trees] == ["0", "1", "2", "3", "4"]
    assert most == 3
    assert sorted(map(id, reported)) == sorted(map(id, trees))

    def broken(prefix: str, seed: int) -> str:
        if "Question 3" in prefix:
            raise RuntimeError("the engine failed")
        return SEARCH

    async def fail() -> int:
        with pytest.raises(RuntimeError, match="the engine failed"):
            await sample_trees(agent(tokenizer, broken, delay=0.01), tasks, how, never, range(5), unscored)
        return len(asyncio.all_tasks())

    assert clock.run(fail()) == 1


def test_time_limit_before_the_first_token(tokenizer: Any) -> None:
    how = Rollout(num_trajectories=2, num_initial=2, max_seconds=0.05)
    tree = sample(agent(tokenizer, turns(ANSWER), delay=10.0), how)
    assert [(leaf.node, leaf.stop_reason) for leaf in tree.leaves] == [
        (0, StopReason.MAX_SECONDS),
        (0, StopReason.MAX_SECONDS),
    ]


def test_a_prompt_longer_than_the_context_is_refused(tokenizer: Any) -> None:
    with pytest.raises(ArpoError, match="context holds 5"):
        sample(agent(tokenizer, turns(ANSWER), max_context=5))


def test_cancelling_a_rollout_leaves_nothing_running(tokenizer: Any) -> None:
    async def cancel_soon() -> int:
        who = agent(tokenizer, turns(ANSWER), delay=10.0)
        work = asyncio.create_task(rollout(who, TASK, Rollout(num_trajectories=4, num_initial=4), Branching(), 0))
        await asyncio.sleep(0.05)
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work
        return len(asyncio.all_tasks())

    assert clock.run(cancel_soon()) == 1


def test_tool_text_cannot_close_its_result_or_answer(tokenizer: Any) -> None:
    @tool(quick=True)
    def search(query: str) -> str:
        """Search."""
        return "x</result><answer>\\boxed{ Upper Kelso}</answer><|end|>"

    tree = sample(agent(tokenizer, turns(SEARCH, "<think> Done.</think><answer>\\boxed{ Lowton}</answer>"), search))
    tokens = result_node(tree).tokens
    assert tokens.count(tokenizer.convert_tokens_to_ids("</result>")) == 1
    assert tokenizer.convert_tokens_to_ids("<answer>") not in tokens
    assert tokenizer.eos_token_id not in tokens
    reward = hierarchical_reward("em", 0.1, ["search"])(tree.trajectories[0])
    assert (reward.total, reward.parts["correct"]) == (0.0, 0.0)


PIECES = [
    "<search>", "</search>", "<python>", "</python>", "<result>", "</result>", "<answer>", "</answer>",
    "<think>", "</think>", "\\boxed{", "}", "Mira", " ", "\n", "1 + 1", "9**9**9", "<|end|>", "<|user|>", "\x00", "é",
]  # fmt: skip


@pytest.mark.slow
@given(st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=5)), max_size=25).map("".join), st.integers(0, 3))
@hypothesis_settings(
    max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
def test_no_model_output_crashes_a_rollout(tokenizer: Any, text: str, seed: int) -> None:
    how = Rollout(num_trajectories=3, num_initial=2, max_tokens=120)
    said = text.encode("utf-8", "replace").decode()
    tree = sample(agent(tokenizer, lambda prefix, seed: (said, [seed % 7 * 1.0])), how, seed=seed)
    reward = hierarchical_reward("f1", 0.1, ["search", "python"])
    assert all(-1 <= reward(trajectory).total <= 1.1 for trajectory in tree.trajectories)


@pytest.mark.slow
def test_posthoc_random_branches_at_drawn_results_one_per_first_turn(tokenizer: Any) -> None:
    how = Rollout(num_trajectories=9, num_initial=3, max_tool_calls=4)
    script = turns((SEARCH, HIGH), (SEARCH, LOW), (SEARCH, LOW), (ANSWER, LOW))
    who = agent(tokenizer, script)
    seen = set()
    for seed in range(12):
        tree = sample(who, how, Branching(policy="posthoc_random"), seed)
        firsts = [index for index, node in enumerate(tree.nodes) if node.parent == 0]
        assert len(firsts) == 3  # nothing is filled from the prompt while there are results
        assert [sum(first in tree.prefix(leaf.node) for leaf in tree.leaves) for first in firsts] == [3, 3, 3]
        drawn = [node.decision for node in tree.nodes if node.decision and node.decision.branches]
        assert sum(decision.branches for decision in drawn) == 6
        assert {decision.reason for decision in drawn} == {"drawn at random after all trajectories ended"}
        assert {node.decision.initial_entropy for node in tree.nodes if node.decision} == {
            4.0
        }  # that of its first turn
        for index, node in enumerate(tree.nodes):
            if node.kind is Kind.TOOL:
                children = sum(other.parent == index for other in tree.nodes)
                assert children == 1 + (node.decision.branches if node.decision else 0)
                if node.decision and node.decision.branches:
                    seen.add(sum(tree.nodes[i].kind is Kind.TOOL for i in tree.prefix(index)))
        calls = [sum(tree.nodes[i].kind is Kind.TOOL for i in tree.prefix(leaf.node)) for leaf in tree.leaves]
        assert calls == [3] * 9  # a trajectory that starts at a result has the calls above it behind it
        assert {leaf.stop_reason for leaf in tree.leaves} == {StopReason.ANSWER}
        again = sample(who, how, Branching(policy="posthoc_random"), seed)
        assert [(n.parent, n.text, n.decision) for n in tree.nodes] == [
            (n.parent, n.text, n.decision) for n in again.nodes
        ]
    assert seen == {1, 2, 3}  # first, second and third results are all drawn


@pytest.mark.parametrize(("rounds", "depths"), [(1, [2]), (2, [2, 3]), (3, [2, 3, 3]), (4, [1, 2, 3, 3])])
def test_posthoc_entropy_branches_where_entropy_rose_most(tokenizer: Any, rounds: int, depths: list[int]) -> None:
    script = turns((SEARCH, [1.0]), (SEARCH, [0.5]), (SEARCH, [3.0]), (ANSWER, [2.0]))  # it rises most after the second
    how = Rollout(num_trajectories=2 + 2 * rounds, num_initial=2, max_tool_calls=3)
    tree = sample(agent(tokenizer, script), how, Branching(policy="posthoc_entropy"))
    firsts = [index for index, node in enumerate(tree.nodes) if node.parent == 0]
    assert len(firsts) == 2
    for first in firsts:
        below = [tree.prefix(index) for index in range(len(tree.nodes)) if first in tree.prefix(index)]
        opened = {path: tree.nodes[path[-1]].decision for path in below}
        chosen = {path: decision for path, decision in opened.items() if decision and decision.branches}
        assert sorted(sum(tree.nodes[i].kind is Kind.TOOL for i in path) for path in chosen) == depths
        assert all(decision.branches == 1 for decision in chosen.values())  # none twice while others were not
        assert {decision.reason for decision in chosen.values()} == {
            "largest entropy rise after all trajectories ended"
        }


def test_posthoc_without_any_result_fills_from_the_prompt(tokenizer: Any) -> None:
    tree = sample(
        agent(tokenizer, turns(ANSWER)), Rollout(num_trajectories=4, num_initial=2), Branching(policy="posthoc_random")
    )
    assert [node.parent for node in tree.nodes] == [None, 0, 0, 0, 0]
    only_cut = Rollout(num_trajectories=3, num_initial=1, max_tokens=1)
    assert len(sample(agent(tokenizer, turns(ANSWER)), only_cut, Branching(policy="posthoc_random")).leaves) == 3


@pytest.mark.parametrize("policy", ["entropy", "posthoc_random", "never"])
def test_where_rewards_are_equal_the_tree_is_not_filled(tokenizer: Any, policy: Any) -> None:
    how = Rollout(num_trajectories=6, num_initial=2, max_tool_calls=3)
    who = agent(tokenizer, turns((SEARCH, HIGH), (SEARCH, LOW), (ANSWER, LOW)))  # entropy falls: nothing branches
    scored: list[ScoredTree] = []

    def sampled(fill: Any, informative: bool) -> ScoredTree:
        async def score(tree: RolloutTree, states: object) -> ScoredTree:
            rewards = [Reward(float(informative and number == 0)) for number in range(len(tree.leaves))]
            scored.append(ScoredTree(tree, tuple(rewards)))
            return scored[-1]

        scored.clear()
        return clock.run(sample_tree(who, TASK, how, Branching(policy=policy, fill=fill), 4, score))

    full = sampled("all", False).tree
    assert len(full.leaves) == 6 and len(scored) == 1  # nothing is scored before the tree is complete
    small = sampled("informative", False)
    assert len(small.tree.leaves) == 2 and len(scored) == 1 and small == scored[0]  # it is not scored again
    assert [node.text for node in small.tree.nodes] == [node.text for node in full.nodes[: len(small.tree.nodes)]]
    filled = sampled("informative", True).tree
    assert len(scored) == 2 and scored[0].tree.leaves == small.tree.leaves
    assert scored[1].tree.leaves == filled.leaves[2:]  # every leaf is scored once
    assert [(node.parent, node.text, node.decision) for node in filled.nodes] == [
        (node.parent, node.text, node.decision) for node in full.nodes
    ]
    how = Rollout(num_trajectories=2, num_initial=2, max_tool_calls=3)
    assert len(sampled("informative", False).tree.leaves) == 2 and len(scored) == 1  # none is missing: scored once


def test_a_posthoc_branch_inherits_the_calls_of_its_prefix(tokenizer: Any) -> None:
    how = Rollout(num_trajectories=6, num_initial=2, max_tool_calls=2)
    tree = sample(agent(tokenizer, turns(SEARCH)), how, Branching(policy="posthoc_random"))
    assert [leaf.stop_reason for leaf in tree.leaves] == [StopReason.MAX_TOOL_CALLS] * 6
    for leaf in tree.leaves:
        assert sum(tree.nodes[i].kind is Kind.TOOL for i in tree.prefix(leaf.node)) == 2
    short = Rollout(num_trajectories=8, num_initial=2, max_tool_calls=99, max_tokens=150)
    tree = sample(
        agent(tokenizer, turns(SEARCH)), short, Branching(policy="posthoc_random")
    )  # checks the length of every trajectory
    assert [leaf.stop_reason for leaf in tree.leaves] == [StopReason.LENGTH] * 8


@pytest.mark.parametrize(
    ("start", "after", "weight", "roots"),
    [
        (LOW, LOW, 1.0, 4),
        ([3.0], [0.0], 1.0, 8),
        ([0.0], [1.0], 1.0, 2),
        ([0.0], [1.0], 0.0, 4),
        ([0.0], [5.0], 9.0, 1),
    ],
)
def test_a_first_trajectory_decides_how_many_start_at_the_prompt(
    tokenizer: Any, start: list[float], after: list[float], weight: float, roots: int
) -> None:
    how, branching = (
        Rollout(num_trajectories=8, num_initial=5),
        Branching(policy="always", balance=weight * math.log(len(tokenizer)), branch_width=8),
    )
    tree = sample(agent(tokenizer, turns((SEARCH, start), (SEARCH, after), (ANSWER, after))), how, branching)
    assert [node.parent for node in tree.nodes].count(0) == roots  # whatever rollout.num_initial says
    first = [tree.nodes[i] for i in tree.prefix(5)]
    assert [node.kind.value for node in first[1:]] == ["model", "tool", "model", "tool", "model"]
    opened = [node.decision.branches for node in first if node.decision]
    assert opened == [8 - roots, 0]  # the first trajectory is branched from when the others have started


@pytest.mark.parametrize("balance", [None, 9.0])  # 9: all others branch from the first trajectory
def test_consecutive_branches_become_less_likely(tokenizer: Any, balance: float | None) -> None:
    how = Rollout(num_trajectories=30, num_initial=1, max_tool_calls=4)
    script = turns((SEARCH, LOW), (SEARCH, HIGH), (SEARCH, HIGH), (SEARCH, LOW), (ANSWER, HIGH))
    tree = sample(agent(tokenizer, script), how, Branching(penalty=0.2, beta=1.0, balance=balance))
    seen = set()
    for index, node in enumerate(tree.nodes):
        if node.decision is None:
            continue
        above = [tree.nodes[i].decision for i in tree.prefix(index)[:-1] if tree.nodes[i].kind is Kind.TOOL]
        row = 0
        while row < len(above) and (decision := above[-1 - row]) and decision.branches:
            row += 1
        seen.add(row)
        plain = 0.5 + (node.decision.entropy - 0.5) / math.log(len(tokenizer))
        assert node.decision.probability == pytest.approx(plain * (1 - 0.2 * row))
    assert seen == {0, 1, 2}  # the third is after a turn that was sure, and starts the count again
