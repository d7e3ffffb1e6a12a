"""Rollout trees over an environment with state: every branch is told the right number, and all states are closed."""

from __future__ import annotations

import asyncio
import random
import re
import threading
import time
from collections.abc import Callable
from typing import Any, ClassVar

import pytest

from arpo.agent.agent import Agent
from arpo.agent.conversation import Conversation
from arpo.agent.formats import build_format
from arpo.algorithm.rollout import rollout, sample_tree, sample_trees
from arpo.config.algorithm import Branching
from arpo.config.schema import Rollout
from arpo.engine.scripted import Script, ScriptedEngine
from arpo.environments import Environment
from arpo.environments.states import EnvironmentTools, StatePool
from arpo.rewards import Scorer, custom_reward
from arpo.tools.base import ToolError, ToolUnavailable, tool
from arpo.types import Fault, Kind, Reward, RolloutTree, ScoredTree, StopReason, Task, Trajectory

TASK = Task("q1", "Count.", ("3",), meta={"start": 10})
COUNT = "<think> More.</think><count_up></count_up>"
ANSWER = "<think> Done.</think><answer>\\boxed{ 3}</answer>"
POLICIES = ["entropy", "always", "random", "posthoc_random", "posthoc_entropy", "never"]
POLICIES += ["shuffled", "posthoc_top_entropy", "posthoc_outcome"]


class Counter(Environment):
    """Counts its calls from the number in the task."""

    made: ClassVar[int] = 0
    closed: ClassVar[int] = 0

    def reset(self, task: Task) -> str | None:
        Counter.made += 1
        self.count = task.meta["start"]
        return "You may count."

    @tool
    def count_up(self) -> str:
        """Count one further."""
        self.count += 1
        return f" at {self.count} now"

    def reward(self, trajectory: Trajectory) -> float:
        return float(self.count)

    def close(self) -> None:
        Counter.closed += 1


class Forking(Counter):
    def fork(self) -> Forking:
        other = type(self)()
        other.reset(Task("copy", "Count.", meta={"start": self.count}))
        return other


class Quick(Forking):
    quick = True


def agent(tokenizer: Any, script: Script, kind: type[Environment], **limits: Any) -> Agent:
    tools = EnvironmentTools(StatePool(kind, **limits))
    engine = ScriptedEngine(tokenizer, script)
    return Agent(engine, tokenizer, tools, build_format("tags", [each.spec for each in tools.values()]))


def up_to(calls: int) -> Script:
    """Call `calls` times with rising entropy, sometimes one more, then answer."""

    def script(prefix: str, seed: int) -> str | tuple[str, list[float]]:
        made = prefix.count("now</result>")
        if made < calls or (made == calls and seed % 3 == 0):
            return COUNT, [0.5 + made]
        return ANSWER, [4.0]

    return script


def check_counts(tree: RolloutTree) -> int:
    """Every result of every trajectory must be the number of calls before it. Returns the number of calls."""
    for trajectory in tree.trajectories:
        said = [int(result.text.split()[1]) for _, result in trajectory.tool_calls if result.fault is None]
        assert said == list(range(11, 11 + len(said)))
    return tree.tool_calls


def final_count(trajectory: Trajectory, environment: Counter) -> Reward:
    return Reward(float(environment.count), {"calls": float(len(trajectory.tool_calls))})


def score_with(scorer: Scorer, agent: Agent, policy: str, seed: int = 0, balance: float | None = None) -> ScoredTree:
    how = Rollout(num_trajectories=8, num_initial=3, max_tool_calls=6)
    branching = Branching(policy=policy, branch_width=2, probe_tokens=2, balance=balance)  # type: ignore[arg-type]
    return asyncio.run(sample_tree(agent, TASK, how, branching, seed, scorer.score))


@pytest.fixture(autouse=True)
def fresh() -> None:
    Counter.made = Counter.closed = 0


@pytest.mark.parametrize("policy", [*POLICIES, "balanced"])
@pytest.mark.parametrize("kind", [Counter, Forking, Quick])
def test_every_branch_is_told_the_right_number_and_rewards_see_the_final_state(
    kind: type[Counter], policy: str, tokenizer: Any
) -> None:
    who = agent(tokenizer, up_to(3), kind, max_states=8)
    balance = 1.0 if policy == "balanced" else None
    with Scorer(final_count, 2) as scorer:
        scored = score_with(scorer, who, "entropy" if policy == "balanced" else policy, balance=balance)
    tree = scored.tree
    assert len(tree.leaves) == 8 and check_counts(tree) >= 9
    if policy != "never":
        assert tree.branch_points > 0 and tree.tool_calls < 24
    made = [len(trajectory.tool_calls) for trajectory in tree.trajectories]
    assert [reward.total for reward in scored.rewards] == [10 + calls for calls in made]
    assert tree.task.question == "Count.\n\nYou may count." and "You may count." in tree.nodes[0].text
    assert Counter.made == Counter.closed > 0 and who.tools.pool.live == 0  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", [Counter, Forking, Quick])
def test_last_results_are_branched_from_in_their_state(kind: type[Counter], tokenizer: Any) -> None:
    who = agent(tokenizer, up_to(3), kind, max_states=8)
    with Scorer(lambda trajectory: Reward(0.0), 2) as scorer:  # a hard task
        tree = score_with(scorer, who, "posthoc_tail").tree
    assert len(tree.leaves) == 8 and check_counts(tree) < 24 and tree.branch_points >= 3
    assert Counter.made == Counter.closed > 0 and who.tools.pool.live == 0  # type: ignore[attr-defined]


def test_many_trees_at_once_with_faults_and_cancellations(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("arpo.tools.executor.FIRST_PAUSE_SECONDS", 0.0)
    rng = random.Random(5)

    class Faulty(Forking):
        quick = True

        @tool
        def count_up(self) -> str:
            """Count one further."""
            self.count += 1000
            chance = rng.random()
            if chance < 0.1:
                raise ValueError("broken")
            self.count -= 1000
            if chance < 0.15:
                raise ToolError("not now")
            self.count += 1
            return f" at {self.count} now"

    who = agent(tokenizer, up_to(4), Faulty, max_states=6)
    how = Rollout(num_trajectories=8, num_initial=2, max_tool_calls=8, concurrency=12)
    branching = Branching(policy="always", probe_tokens=2)

    async def main() -> list[RolloutTree]:
        whole = [asyncio.create_task(rollout(who, TASK, how, branching, seed)) for seed in range(20)]
        cut = [asyncio.create_task(rollout(who, TASK, how, branching, seed)) for seed in range(20)]
        for number, task in enumerate(cut):
            asyncio.get_running_loop().call_later(0.01 * number, task.cancel)
        ended = await asyncio.gather(*cut, return_exceptions=True)
        assert any(isinstance(one, asyncio.CancelledError) for one in ended)
        return list(await asyncio.gather(*whole))

    trees = asyncio.run(main())
    assert sum(map(check_counts, trees)) > 300
    faults = [node.result.fault for tree in trees for node in tree.nodes if node.result is not None]
    assert faults.count(Fault.MODEL) > 5
    assert Counter.made == Counter.closed and who.tools.pool.live == 0  # type: ignore[attr-defined]


def test_a_branch_whose_state_cannot_be_made_is_not_opened(tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    class Moody(Counter):
        @tool
        def count_up(self) -> str:
            """Count one further, and say something new."""
            self.count += 1
            return f" at {self.count} now</result>{random.random()}"

    for policy in ("always", "posthoc_random", "posthoc_entropy"):
        who = agent(tokenizer, up_to(2), Moody)
        with Scorer(final_count, 2) as scorer:
            scored = score_with(scorer, who, policy)
        tree = scored.tree
        assert len(tree.leaves) == 8 and tree.branch_points == 0  # all start at the prompt
        reasons = {node.decision.reason for node in tree.nodes if node.decision is not None}
        assert "a branch was not opened: the state there could not be made again" in reasons
        numbers = {node.tokens for node in tree.nodes if node.parent == 0}
        assert numbers and not any(trajectory.infra_fault for trajectory in tree.trajectories)
    assert Counter.made == Counter.closed


def test_a_tree_that_could_not_branch_is_filled_only_if_it_is_informative(tokenizer: Any) -> None:
    class Moody(Quick):
        def fork(self) -> Forking:
            if self.count > 10:
                raise OSError("no room")
            return super().fork()

    def script(prefix: str, seed: int) -> str | tuple[str, list[float]]:
        return (ANSWER, [1.0]) if "now</result>" in prefix else (COUNT, [1.0])

    how = Rollout(num_trajectories=4, num_initial=2)
    branching = Branching(policy="always", branch_width=2, probe_tokens=2, fill="informative")
    with Scorer(final_count, 1) as scorer:
        scored = asyncio.run(sample_tree(agent(tokenizer, script, Moody), TASK, how, branching, 0, scorer.score))
    assert [reward.total for reward in scored.rewards] == [11, 11]
    assert Counter.made == Counter.closed


def test_a_state_is_not_closed_while_a_reward_still_uses_it(tokenizer: Any) -> None:
    begun, closed_early, go_on = threading.Event(), [], threading.Event()

    class Watched(Counter):
        scoring = False

        def reward(self, trajectory: Trajectory) -> float:
            self.scoring = True
            begun.set()
            assert go_on.wait(60)
            self.scoring = False
            return 0.0

        def close(self) -> None:
            closed_early.append(self.scoring)
            super().close()

    async def main() -> None:
        who = agent(tokenizer, up_to(1), Watched)
        with Scorer(lambda trajectory, environment: Reward(environment.reward(trajectory)), 1) as scorer:
            how = Rollout(num_trajectories=2)
            sampling = asyncio.create_task(sample_tree(who, TASK, how, Branching(), 0, scorer.score))
            await asyncio.to_thread(begun.wait, 60)
            sampling.cancel()
            asyncio.get_running_loop().call_later(0.05, go_on.set)
            with pytest.raises(asyncio.CancelledError):
                await sampling
        assert who.tools.pool.live == 0  # type: ignore[attr-defined]

    asyncio.run(main())
    assert Counter.made == Counter.closed and not any(closed_early)


def test_trees_that_are_cancelled_have_closed_their_states_when_sampling_ends(tokenizer: Any) -> None:
    class Slow(Counter):
        def reset(self, task: Task) -> str | None:
            self.seconds = task.meta["seconds"]
            return super().reset(task)

        def close(self) -> None:
            time.sleep(self.seconds)
            super().close()

    async def main() -> None:
        who, scoring, all_there = agent(tokenizer, up_to(1), Slow), [], asyncio.Event()

        async def score(tree: RolloutTree, states: Any) -> ScoredTree:
            scoring.append(tree)
            if len(scoring) == 2:
                all_there.set()
            await asyncio.sleep(60)
            raise AssertionError

        tasks = [Task(f"{seconds}", "Count.", meta={"start": 0, "seconds": seconds}) for seconds in (0.0, 0.1)]
        work = sample_trees(who, tasks, Rollout(num_trajectories=2), Branching(), range(2), score)
        sampling = asyncio.create_task(work)
        await all_there.wait()
        sampling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sampling
        assert who.tools.pool.live == 0  # type: ignore[attr-defined]

    asyncio.run(main())
    assert Counter.made == Counter.closed


def test_an_environment_that_breaks_in_a_reward_does_not_end_the_run(tokenizer: Any) -> None:
    class Fragile(Quick):
        def reward(self, trajectory: Trajectory) -> float:
            raise ToolUnavailable("the world is gone")

    def reward(trajectory: Trajectory, environment: Counter) -> float:
        return environment.reward(trajectory)

    with Scorer(custom_reward(reward), 2, mask_faults=True) as scorer:
        scored = score_with(scorer, agent(tokenizer, up_to(1), Fragile), "never")
    assert not any(scored.mask) and all("judge.unavailable" in one.parts for one in scored.rewards)


def test_without_an_environment_for_the_task_all_trajectories_are_spoiled(tokenizer: Any) -> None:
    class Missing(Counter):
        def reset(self, task: Task) -> str | None:
            raise OSError("no such world")

    who = agent(tokenizer, up_to(2), Missing)
    with Scorer(final_count, 2, mask_faults=True) as scorer:
        scored = score_with(scorer, who, "entropy")
    assert {leaf.stop_reason for leaf in scored.tree.leaves} == {StopReason.ENVIRONMENT_FAILED}
    assert len(scored.tree.leaves) == 8 and len(scored.tree.nodes) == 1 and not any(scored.mask)
    assert all("judge.unavailable" in reward.parts for reward in scored.rewards)


def test_a_conversation_has_one_state_and_its_tools_see_the_task_that_the_model_sees(tokenizer: Any) -> None:
    class Chat(Counter):
        def reset(self, task: Task) -> str | None:
            return super().reset(TASK)

        @tool
        def count_up(self, task: Task) -> str:
            """Count one further."""
            self.count += 1
            return f" {task.question} at {self.count} now"

    async def main() -> None:
        who = agent(tokenizer, up_to(2), Chat)
        conversation = Conversation(who, Rollout(max_tool_calls=2), 2, seed=1)
        conversation.ask("Count.")
        assert (await conversation.answer()).tool_calls == 2
        shown = tokenizer.decode(conversation.tokens)
        assert shown.count("Count.\n\nYou may count. at 12 now") == 1
        assert conversation.state is not None
        for _ in range(2):  # the second one by replay
            assert await conversation.state.branch().try_prepare()
        await conversation.close()
        assert Counter.made == Counter.closed == 2 and who.tools.pool.live == 0  # type: ignore[attr-defined]

    asyncio.run(main())


def test_the_environment_can_end_a_trajectory(tokenizer: Any) -> None:
    class Ending(Quick):
        @tool
        def count_up(self) -> str:
            """Count one further, up to 12."""
            self.count += 1
            self.done = self.count == 12
            return f" at {self.count} now"

    who = agent(tokenizer, up_to(5), Ending)
    tree = asyncio.run(rollout(who, TASK, Rollout(num_trajectories=4), Branching(policy="always"), 0))
    assert {leaf.stop_reason for leaf in tree.leaves} == {StopReason.DONE}
    assert all(trajectory.nodes[-1].kind is Kind.TOOL for trajectory in tree.trajectories)
    assert all(len(trajectory.tool_calls) == 2 for trajectory in tree.trajectories)


def test_a_quick_environment_gives_the_same_tree_every_time(tokenizer: Any) -> None:
    def once(make: Callable[[], Agent]) -> list[RolloutTree]:
        how, branching = Rollout(num_trajectories=6), Branching(policy="random", probe_tokens=2)
        with Scorer(final_count, 1) as scorer:
            scored = asyncio.run(sample_trees(make(), [TASK] * 4, how, branching, range(4), scorer.score))
        return [one.tree for one in scored]

    first, second = (once(lambda: agent(tokenizer, up_to(3), Quick, max_states=4)) for _ in range(2))
    shape = [[(node.parent, node.text) for node in tree.nodes] for tree in first]
    assert shape == [[(node.parent, node.text) for node in tree.nodes] for tree in second]
    assert re.search("at 13 now", str(shape))
