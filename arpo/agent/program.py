"""Programs: agents that somebody else wrote, run once per trajectory against a local chat endpoint.

    def my_agent(task, endpoint):
        client = openai.OpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key)
        ...
        return "the answer"                  # or a number: the reward; or an arpo.Reward; or nothing

What it returns is read by `read_output`. `arpo.agent.program_run` runs it and records what it asks.

Guarantees: a function runs in a thread of its own, a coroutine function on an event loop of its own, a command in a
process group of its own, which is killed when its trajectory ends.
Not covered: stopping a function. When its time is up it is left alone, and the endpoint does not answer it any more.
Isolation: a program is the user's own code and runs with all rights.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import os
import shutil
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Protocol

from arpo.config.plugins import NO_OBJECTS, Objects, load_object
from arpo.config.schema import Program as ProgramSettings
from arpo.errors import ArpoError
from arpo.tools.base import run_in_thread
from arpo.types import Reward, Task

MAX_ERROR = 2000  # characters of what a command wrote to stderr, in a message
MAX_OUTPUT = 2**20  # bytes of what a command writes to stdout


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a program asks the model. The key belongs to one trajectory."""

    base_url: str
    api_key: str = field(repr=False)
    model: str = "arpo"

    @property
    def environ(self) -> dict[str, str]:
        """The environment variables that OpenAI's clients read, and the model's name."""
        return {"OPENAI_BASE_URL": self.base_url, "OPENAI_API_KEY": self.api_key, "OPENAI_MODEL": self.model}


class Program(Protocol):
    """Something that can be run for a task."""

    async def run(self, task: Task, endpoint: Endpoint) -> Any:
        """What the program returns; any exception means that it failed."""


@dataclass(frozen=True, slots=True)
class FunctionProgram:
    """A function of (task, endpoint), plain or async."""

    function: Callable[..., Any]

    async def run(self, task: Task, endpoint: Endpoint) -> Any:
        """What the function returns."""

        def work() -> Any:
            value = self.function(task, endpoint)
            return asyncio.run(_wait(value)) if inspect.isawaitable(value) else value

        return await asyncio.wrap_future(run_in_thread(work, "arpo-program"))


@dataclass(frozen=True, slots=True)
class CommandProgram:
    """A command. It gets the task as JSON on stdin and the endpoint in its environment; its stdout is the answer."""

    command: tuple[str, ...]

    async def run(self, task: Task, endpoint: Endpoint) -> str:
        """What the command wrote to stdout, without white space around it."""
        row = {"id": task.id, "question": task.question, "kind": task.kind, "meta": dict(task.meta)}
        direct = {name: _with_local_hosts(os.environ.get(name, "")) for name in ("NO_PROXY", "no_proxy")}
        process = await asyncio.create_subprocess_exec(
            *self.command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, **direct, **endpoint.environ},
            start_new_session=True,
        )
        try:
            output, errors = await process.communicate(json.dumps(row).encode() + b"\n")
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        if process.returncode:
            said = errors.decode(errors="replace").strip()[-MAX_ERROR:]
            raise RuntimeError(f"the command ended with status {process.returncode}: {said}")
        if len(output) > MAX_OUTPUT:
            raise RuntimeError(f"the command wrote {len(output):,} bytes to stdout, at most {MAX_OUTPUT:,} are read")
        return output.decode(errors="replace").strip()


def _with_local_hosts(hosts: str) -> str:
    """The hosts that are asked without a proxy, with this machine among them."""
    return ",".join([*filter(None, [hosts]), "127.0.0.1", "localhost"])


async def _wait(value: Any) -> Any:
    return await value


def build_program(settings: ProgramSettings, objects: Objects = NO_OBJECTS) -> Program | None:
    """The program that the settings name; None without one."""
    if settings.command:
        if shutil.which(settings.command[0]) is None:
            raise ArpoError(f"program.command: there is no command {settings.command[0]!r}")
        return CommandProgram(settings.command)
    if settings.function is None:
        return None
    function = load_object("program.function", settings.function, objects)
    if not callable(function):
        raise ArpoError(f"program.function: {settings.function} is {function!r:.100}, expected a function")
    try:
        inspect.signature(function).bind("task", "endpoint")
    except TypeError:
        raise ArpoError(
            f"program.function: {settings.function} must take two arguments: the task, and the endpoint with base_url, "
            "api_key and model"
        ) from None
    except ValueError:  # no signature is known
        pass
    return FunctionProgram(function)


def read_output(value: Any) -> tuple[str | None, Reward | None]:
    """The answer or the reward that a program returned: a number is a reward, anything else is an answer.

    Values of other types become their JSON, or else their text. Without a value there is neither. A reward that is not
    finite is a ValueError.
    """
    if hasattr(value, "item") and getattr(value, "shape", None) == ():  # a scalar of numpy or torch
        value = value.item()
    if value is None or isinstance(value, str):
        return value, None
    if isinstance(value, Real):
        value = Reward(float(value))
    if isinstance(value, Reward):
        if not all(math.isfinite(number) for number in (value.total, *value.parts.values())):
            raise ValueError(f"it returned {value!r:.100}, expected finite numbers")
        return None, value
    if isinstance(value, Mapping | list | tuple):
        with suppress(TypeError, ValueError):
            return json.dumps(value, ensure_ascii=False), None
    return str(value), None
