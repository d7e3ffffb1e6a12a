"""An OpenEnv environment: one on a server, or an object in this process.

    [environment]
    name = "openenv"
    settings = {url = "http://localhost:8000"}       # or environment = "game.py:Game", action = "game.py:GameAction"

The tool `step` has the fields of the environment's action. `reset` is given the column `seed` of the task, or a seed
made of the task's id, and those of `reset_columns`. The trajectory ends when the environment is done, and the reward
is the sum of its rewards. Every trajectory has a session of its own on the server, which must allow enough of them.

The server is spoken to in OpenEnv's protocol: messages of JSON over a WebSocket. The package openenv is not needed.
Not covered: an environment that answers an impossible action with an exception. That counts as its own failure.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import lru_cache
from typing import Any

from arpo.config.plugins import load_object
from arpo.environments.base import Environment
from arpo.errors import ArpoError
from arpo.tools.base import Tool, ToolError, ToolUnavailable, as_coroutine
from arpo.types import Reward, Task, ToolSpec, Trajectory, derive_seed

MAX_MESSAGE_BYTES = 16 << 20
CONNECT_SECONDS = 10.0


class OpenEnvironment(Environment):
    """An environment of the server at `url`, or one that `environment` makes, whose actions are of the class `action`.

    Both are named as path/to/file.py:name. With `copyable` a branch starts with a deep copy of an environment in this
    process; else, and on a server, its actions are taken again. A step may take `timeout` seconds.
    """

    def __init__(
        self,
        url: str | None = None,
        environment: str | None = None,
        action: str | None = None,
        copyable: bool = False,
        reset_columns: Sequence[str] = (),
        timeout: float = 60.0,
    ) -> None:
        if (url is None) == (environment is None) or (environment is None) != (action is None):
            raise ArpoError("environment.settings: openenv needs either url, or environment and action")
        if url is not None and copyable:
            raise ArpoError("environment.settings: an environment on a server is not copyable")
        self.copyable, self._columns, self._timeout = copyable, tuple(reset_columns), timeout
        self._rewards = list[float]()
        self._session: _Remote | _Local
        if url is not None:
            self._session, self._schema = _Remote(url, timeout), _remote_schema(url)
        else:
            assert environment is not None and action is not None
            kind = load_object("environment.settings", action)
            self._session = _Local(load_object("environment.settings", environment), kind)
            self._schema = kind.model_json_schema()

    def reset(self, task: Task) -> str:
        """Start an episode; returns the first observation."""
        seed = task.meta.get("seed")
        given = {name: task.meta[name] for name in self._columns if name in task.meta}
        seed = derive_seed("openenv", task.id) % 2**31 if seed is None else int(seed)
        return self._observe(self._session.reset({**given, "seed": seed}))

    def close(self) -> None:
        """End the session."""
        self._session.close()

    def reward(self, trajectory: Trajectory) -> Reward:
        """The sum of the rewards."""
        return Reward(sum(self._rewards), {"steps": float(len(self._rewards))})

    def tools(self) -> list[Tool]:
        """The tool `step`, whose schema is that of the environment's actions."""

        def step(self: OpenEnvironment, /, **action: Any) -> str:
            return self.step(action)

        schema = {name: value for name, value in self._schema.items() if name not in ("title", "description")}
        schema["properties"] = {name: value for name, value in schema["properties"].items() if name != "metadata"}
        if not schema["properties"]:
            raise ArpoError("environment.settings: the environment's actions have no fields")
        described = " ".join(str(self._schema.get("description", "")).split("\n\n")[0].split())
        spec = ToolSpec("step", described or "Take an action; returns what is seen then.", schema)
        # The executor's own limit is larger, so that a slow server is not taken for a hanging thread.
        return [Tool(spec, as_coroutine(step, False), function=step, method=True, timeout=self._timeout + 10)]

    def step(self, action: Mapping[str, Any]) -> str:
        """Take an action; returns the observation, and the reward if there is one."""
        if self.done:
            raise ToolError("the episode is over")
        result = self._session.step(action)
        self._rewards.append(float(result.get("reward") or 0.0))
        said = "" if result.get("reward") is None else f"\nreward: {self._rewards[-1]:g}"
        text = self._observe(result) + said
        return text + "\nThe episode is over." * self.done

    def _observe(self, result: Mapping[str, Any]) -> str:
        """The observation as text: its only field if that is a text, else JSON."""
        self.done = bool(result.get("done"))
        fields = result.get("observation")
        if not isinstance(fields, dict):
            raise ToolUnavailable(f"the environment returned {fields!r:.100} as observation")
        fields = {name: value for name, value in fields.items() if name not in ("done", "reward", "metadata")}
        values = list(fields.values())
        return values[0] if len(values) == 1 and isinstance(values[0], str) else json.dumps(fields, ensure_ascii=False)


class _Local:
    """An environment in this process."""

    def __init__(self, factory: Any, kind: Any) -> None:
        self._environment, self._kind = factory(), kind

    def reset(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return self._result(self._environment.reset(**values))

    def step(self, action: Mapping[str, Any]) -> dict[str, Any]:
        from pydantic import ValidationError

        try:
            given = self._kind(**action)
        except ValidationError as error:
            raise ToolError("; ".join(each["msg"] for each in error.errors())) from None
        return self._result(self._environment.step(given))

    def close(self) -> None:
        self._environment.close()

    def _result(self, observation: Any) -> dict[str, Any]:
        fields = observation.model_dump(mode="json")
        return {"observation": fields, "reward": fields.get("reward"), "done": fields.get("done", False)}


class _Remote:
    """A session on a server: a WebSocket, opened by `reset`."""

    def __init__(self, url: str, timeout: float) -> None:
        self._url, self._timeout = "ws" + url.removeprefix("http").rstrip("/") + "/ws", timeout
        self._socket: Any = None
        self._opened = ExitStack()

    def reset(self, values: Mapping[str, Any]) -> dict[str, Any]:
        from websockets.exceptions import WebSocketException
        from websockets.sync.client import connect

        try:
            connection = connect(self._url, open_timeout=CONNECT_SECONDS, max_size=MAX_MESSAGE_BYTES)
            self._socket = self._opened.enter_context(connection)
        except (OSError, WebSocketException) as error:
            raise ToolUnavailable(f"{self._url}: no connection to the environment's server: {error}") from None
        return self._exchange("reset", values)

    def step(self, action: Mapping[str, Any]) -> dict[str, Any]:
        return self._exchange("step", action)

    def close(self) -> None:
        self._opened.close()  # the server ends the session

    def _exchange(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        from websockets.exceptions import WebSocketException

        try:
            with suppress(WebSocketException):  # a server that refuses the session sends the reason, and closes
                self._socket.send(json.dumps({"type": kind, "data": dict(data)}))
            reply = json.loads(self._socket.recv(timeout=self._timeout))
            said = reply["data"]
            if reply["type"] != "error":
                return dict(said)
            code, message = said.get("code"), str(said.get("message"))[:500]
        except (OSError, TimeoutError, WebSocketException, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ToolUnavailable(f"{self._url}: the environment's server failed: {error!r:.200}") from None
        if code == "VALIDATION_ERROR" and kind == "step":
            raise ToolError(message)
        if code == "CAPACITY_REACHED":
            message += "; let the server have more sessions (max_concurrent_envs), or lower environment.max_states"
        raise ToolUnavailable(f"{self._url}: {message} ({code})")


@lru_cache(maxsize=16)
def _remote_schema(url: str) -> dict[str, Any]:
    """The JSON schema of a server's actions."""
    try:
        import websockets  # noqa: F401
    except ImportError:
        raise ArpoError("environment.name: openenv needs one more package: pip install websockets") from None
    if not url.startswith(("http://", "https://")):
        raise ArpoError(f"environment.settings: url is {url!r}, expected one that starts with http:// or https://")
    try:
        with urllib.request.urlopen(url.rstrip("/") + "/schema", timeout=CONNECT_SECONDS) as reply:
            schema = json.loads(reply.read(MAX_MESSAGE_BYTES))["action"]
            if not isinstance(schema["properties"], dict):
                raise ValueError("the actions have no fields")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ArpoError(f"environment.settings: {url} is no OpenEnv server that can be reached: {error}") from None
    return dict(schema)
