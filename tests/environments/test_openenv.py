"""OpenEnv adapter: an environment of that package in this process, and on its own server.

The server is of the same version, or, with ARPO_TEST_OPENENV, of that which this other Python has: `make test-openenv`.
"""

from __future__ import annotations

import asyncio
import os
import random
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from arpo.environments.openenv import OpenEnvironment, _Remote
from arpo.environments.states import StatePool
from arpo.errors import ArpoError
from arpo.tools.base import ToolError, ToolUnavailable
from arpo.tools.executor import Toolset
from arpo.types import Task, ToolCall

pytest.importorskip("openenv")
pytest.importorskip("websockets")
uvicorn = pytest.importorskip("uvicorn")

GAME = '''
import random
from openenv.core.env_server import Action, Environment, Observation, State
from pydantic import Field

class Guess(Action):
    """Guess the secret number."""
    number: int = Field(ge=1, le=100, description="the number")
    note: str = ""

class Said(Observation):
    text: str

class Game(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self.guesses = 0

    def reset(self, seed=None, episode_id=None, top=100, **rest):
        self.secret, self.guesses = random.Random(seed).randint(1, top), 0
        return Said(text=f"A number from 1 to {top}.")

    def step(self, action, timeout_s=None, **rest):
        if action.note == "crash":
            raise RuntimeError("crashed")
        self.guesses += 1
        if action.number == self.secret:
            return Said(text=f"Yes, after {self.guesses}.", done=True, reward=1.0)
        return Said(text="more" if action.number < self.secret else "less", reward=-0.1)

    @property
    def state(self):
        return State(step_count=self.guesses)
'''
APP = """
from openenv.core.env_server import create_fastapi_app
from game import Game, Guess, Said
app = create_fastapi_app(Game, Guess, Said, max_concurrent_envs=3)
"""
TASK = Task("t", "Guess.", ("",), meta={"seed": 3, "top": 50})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("openenv")
    (path / "game.py").write_text(GAME)
    (path / "app.py").write_text(APP)
    return path


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        os.environ.get("ARPO_TEST_OPENENV", sys.executable),
        "-m",
        "uvicorn",
        "app:app",
        "--port",
        str(port),
        "--log-level",
        "error",
    ]
    server = subprocess.Popen(command, cwd=folder, env={**os.environ, "PYTHONPATH": ""})
    try:
        while server.poll() is None:  # the test's own limit ends what hangs
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=10).close()
                break
            except OSError:
                time.sleep(0.1)
        assert server.poll() is None, "the server ended"
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait()


@pytest.fixture(params=["local", pytest.param("server", marks=pytest.mark.slow)])
def settings(request: pytest.FixtureRequest, folder: Path) -> dict[str, Any]:
    if request.param == "server":
        return {"url": request.getfixturevalue("url"), "reset_columns": ["top"]}
    return {"environment": f"{folder}/game.py:Game", "action": f"{folder}/game.py:Guess", "reset_columns": ["top"]}


def test_an_episode(settings: dict[str, Any]) -> None:
    environment = OpenEnvironment(**settings)
    try:
        assert environment.reset(TASK) == "A number from 1 to 50."
        low, high, steps = 1, 50, 0
        while not environment.done:
            middle, steps = (low + high) // 2, steps + 1
            said = environment.step({"number": middle})
            low, high = (middle + 1, high) if said == "more\nreward: -0.1" else (low, middle - 1)
        assert said == f"Yes, after {steps}.\nreward: 1\nThe episode is over."
        reward = environment.reward(None)  # type: ignore[arg-type]
        assert reward.total == pytest.approx(1 - 0.1 * (steps - 1)) and reward.parts == {"steps": steps}
        with pytest.raises(ToolError, match="the episode is over"):
            environment.step({"number": 1})
    finally:
        environment.close()


def test_the_tool_has_the_fields_of_the_action(settings: dict[str, Any]) -> None:
    (tool,) = OpenEnvironment(**settings).tools()
    assert tool.spec.description == "Guess the secret number." and tool.spec.main_argument == "number"
    assert set(tool.spec.schema["properties"]) == {"number", "note"}
    assert tool.checker.problem({"number": 5}) is None
    assert "at most 100" in str(tool.checker.problem({"number": 500}))


def test_a_wrong_action_is_the_models_fault_and_a_crash_is_not(settings: dict[str, Any]) -> None:
    environment = OpenEnvironment(**settings)
    environment.reset(TASK)
    with pytest.raises(ToolError):
        environment.step({"number": "many"})
    expected = ToolUnavailable if "url" in settings else RuntimeError
    with pytest.raises(expected, match="crashed"):
        environment.step({"number": 5, "note": "crash"})
    environment.close()


@pytest.mark.parametrize("copyable", [False, True])
def test_branches_go_their_own_ways(settings: dict[str, Any], copyable: bool) -> None:
    if copyable and "url" in settings:
        with pytest.raises(ArpoError, match="not copyable"):
            OpenEnvironment(**settings, copyable=True)
        return

    async def rollout() -> tuple[list[str], dict[str, float]]:
        pool = StatePool(lambda: OpenEnvironment(**settings, copyable=copyable))
        tools = Toolset(pool.tools.values())

        async def guess(state: Any, number: int) -> str:
            return (await tools.call(ToolCall("step", {"number": number}), TASK, state)).text

        async with pool.open(TASK) as root:
            first = root.branch()
            await guess(first, 1)
            second = first.branch()
            said = [await guess(first, number) for number in (2, 3)]
            for number in range(4, 51):
                if "Yes" in (text := await guess(second, number)):
                    return [*said, text], pool.stats()
        raise AssertionError("the number was not found")

    said, stats = asyncio.run(rollout())
    secret = random.Random(3).randint(1, 50)
    assert said == ["more\nreward: -0.1"] * 2 + [f"Yes, after {secret - 2}.\nreward: 1\nThe episode is over."]
    assert (stats["forks"], stats["replays"]) == ((1, 0) if copyable else (0, 1))


@pytest.mark.slow
def test_a_lost_connection_is_made_again(url: str) -> None:
    made: list[OpenEnvironment] = []

    def build() -> OpenEnvironment:
        made.append(OpenEnvironment(url, reset_columns=["top"]))
        return made[-1]

    async def rollout() -> list[str]:
        pool = StatePool(build)
        tools = Toolset(pool.tools.values())
        async with pool.open(TASK) as root:
            state = root.branch()
            said = []
            for number in (1, 2):
                said.append((await tools.call(ToolCall("step", {"number": number}), TASK, state)).text)
                made[-1].close()
            async with state.final() as environment:
                said.append(str(environment.reward(None)))  # type: ignore[arg-type]
        return said

    assert asyncio.run(rollout()) == ["more\nreward: -0.1"] * 2 + ["Reward(total=-0.2, parts={'steps': 2.0}, note='')"]
    assert len(made) == 3  # one to ask for the tools, and two sessions


@pytest.mark.parametrize("reply", ["", "[]", '{"type": "error", "data": "no"}', '{"type": "observation", "data": 3}'])
def test_a_reply_that_is_not_of_the_protocol_is_the_servers_failure(reply: str) -> None:
    session = _Remote("http://127.0.0.1:9", 1.0)
    session._socket = SimpleNamespace(send=lambda text: None, recv=lambda timeout: reply)
    with pytest.raises(ToolUnavailable, match="the environment's server failed"):
        session.step({"number": 1})


@pytest.mark.slow
def test_a_server_without_a_free_session_says_so(url: str) -> None:
    environments = [OpenEnvironment(url) for _ in range(4)]
    try:
        for environment in environments[:3]:
            environment.reset(TASK)
        with pytest.raises(ToolUnavailable, match="max_concurrent_envs"):
            environments[3].reset(TASK)
    finally:
        for environment in environments:
            environment.close()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "either url, or environment and action"),
        ({"environment": "a.py:b"}, "either url, or environment and action"),
        ({"url": "file:///etc/passwd"}, "starts with http"),
        ({"url": "http://127.0.0.1:9"}, "no OpenEnv server that can be reached"),
    ],
)
def test_settings_that_do_not_fit_are_an_error(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ArpoError, match=message):
        OpenEnvironment(**settings)
