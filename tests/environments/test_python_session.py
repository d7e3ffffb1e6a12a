"""The Python session as an environment: what the model reads, branches, and what stays after a failed call."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import pytest

from arpo.agent.agent import Agent
from arpo.agent.formats import build_format
from arpo.algorithm.rollout import sample_tree
from arpo.config.algorithm import Branching
from arpo.config.schema import Config, Rollout
from arpo.engine.scripted import ScriptedEngine
from arpo.environments.build import build_pool
from arpo.environments.python_session import PythonSession
from arpo.environments.states import EnvironmentTools, State, StatePool
from arpo.errors import ArpoError
from arpo.rewards import Scorer
from arpo.tools.executor import Toolset
from arpo.types import Fault, Reward, Task, ToolCall, ToolResult, Trajectory

TASK = Task("t", "What is x?")
Run = Callable[[State, str], Awaitable[ToolResult]]


@pytest.fixture(params=[False, True], ids=["async", "blocking"])
def pool(request: pytest.FixtureRequest) -> StatePool:
    try:
        return StatePool(partial(PythonSession, timeout=60.0, max_result_tokens=100, blocking=request.param))
    except ArpoError as error:
        pytest.skip(str(error))


def runner(pool: StatePool) -> Run:
    """Makes calls of the tool `python`."""
    tools = Toolset(pool.tools.values())
    return lambda state, code: tools.call(ToolCall("python", {"code": code}), TASK, state)


def test_what_the_model_is_told(pool: StatePool) -> None:
    (tool,) = pool.tools.values()
    assert tool.spec.name == "python"
    assert "Variables, imports and files are kept from one call to the next" in tool.spec.description
    assert list(tool.spec.schema["properties"]) == ["code"]
    assert tool.timeout > 60


def test_state_stays_along_a_trajectory_and_forks_with_a_branch(pool: StatePool) -> None:
    async def tree() -> list[str]:
        run, found = runner(pool), []
        async with pool.open(TASK) as root:
            trunk = root.branch()
            await run(trunk, "import random\nx = 40")
            await run(trunk, "x += 1")
            branch = trunk.branch()
            for state, more in ((trunk, 1), (branch, 5), (trunk, 1), (branch, 5)):
                found.append((await run(state, f"x += {more}; x")).text)
            a, b = await asyncio.gather(run(trunk, "random.random()"), run(branch, "random.random()"))
            assert a.text == b.text
            async with branch.final() as environment:
                assert isinstance(environment, PythonSession)
                assert len(environment.point.cells) == 5
        return found

    assert asyncio.run(tree()) == ["42", "46", "43", "51"]
    stats = pool.stats()
    assert (stats["forks"], stats["replays"], pool.live) == (1, 0, 0)


@pytest.mark.slow
def test_the_fault_of_a_failed_call_and_the_state_after_it() -> None:
    pool = StatePool(partial(PythonSession, timeout=3.0))

    async def calls() -> None:
        run = runner(pool)
        async with pool.open(TASK) as root:
            state = root.branch()
            assert (await run(state, "x = 1")).text.startswith("(no output")
            found = await run(state, "x = 2\nwhile True: pass")
            assert (found.fault, found.text) == (
                Fault.TIMEOUT,
                "Error: the code ran longer than 3 seconds and was stopped.",
            )
            found = await run(state, "x = 3\nfile = open('a', 'w')")
            assert found.fault is Fault.MODEL
            assert found.text.startswith("Error: the code left files open. Close them")
            assert (await run(state, "x")).text == "1"
            found = await run(state, "x = 4\n1 / 0")
            assert found.fault is Fault.MODEL
            assert found.text.startswith("Error: ZeroDivisionError: division by zero\n")
            assert (await run(state, "x")).text == "4"
            found = await run(state, "#" * 200_001)
            assert (found.fault, found.text) == (Fault.MODEL, "Error: the code is longer than 200000 characters")

    asyncio.run(calls())


def test_a_configuration_names_it() -> None:
    environment = {"name": "python", "settings": {"timeout": 3, "max_frozen": 5}}
    pool = build_pool(Config.model_validate({"environment": environment}))
    assert pool is not None
    assert pool.kind is PythonSession
    with pytest.raises(ArpoError, match=r"environment\.settings: python cannot be made with these: .*wrong"):
        build_pool(Config.model_validate({"environment": {"name": "python", "settings": {"wrong": 1}}}))


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["always", "posthoc_random"])
@pytest.mark.parametrize("max_frozen", [128, 2])
def test_every_branch_of_a_tree_has_its_own_variables(tokenizer: Any, policy: str, max_frozen: int) -> None:
    def script(prefix: str, seed: int) -> str:
        calls = prefix.count("</result>")
        if calls == 4:
            return "<think> Done.</think><answer>\\boxed{ 3}</answer>"
        code = "x = [0]" if calls == 0 else f"x.append(x[-1] + {seed % 100}); print(x)"
        return f"<think> More.</think><python>{code}</python>"

    def calls_made(trajectory: Trajectory, environment: PythonSession) -> Reward:
        return Reward(float(len(environment.point.cells)), {})

    pool = StatePool(partial(PythonSession, timeout=60.0, max_frozen=max_frozen))
    tools = EnvironmentTools(pool)
    engine = ScriptedEngine(tokenizer, script)
    agent = Agent(engine, tokenizer, tools, build_format("tags", [each.spec for each in tools.values()]))
    how = Rollout(num_trajectories=8, num_initial=2, max_tool_calls=6)
    with Scorer(calls_made, 2) as scorer:
        scored = asyncio.run(sample_tree(agent, TASK, how, Branching(policy=policy, branch_width=2), 0, scorer.score))  # type: ignore[arg-type]
    assert scored.tree.branch_points > 0
    assert len(scored.tree.leaves) == 8
    for trajectory in scored.tree.trajectories:
        x: list[int] = []
        for call, result in trajectory.tool_calls:
            if x:
                x.append(x[-1] + int(call.args["code"].split("+ ")[1].split(")")[0]))
                assert result.text == str(x)
            else:
                x = [0]
        assert len(x) == 4
    assert [reward.total for reward in scored.rewards] == [4.0] * 8
    assert pool.live == 0
    assert pool.stats()["replays"] == 0
