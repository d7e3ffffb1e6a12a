"""A Python session: variables, imports and files stay from one call to the next, and fork with the branch.

Its state is a point of a session in the sandbox (`arpo.tools.sandbox.sessions`), which never changes: a call moves the
trajectory to a new point, and a fork shares the point. So a fork costs nothing, and the next call of each branch runs
in its own fork of the same frozen process.

Guarantees: code runs as in the stateless tool `python`, in the same sandbox, and the model reads errors in the same
form. Random numbers are seeded when a session starts. A call that takes too long, crashes or is refused leaves the
state as it was.
Not covered: threads and open files at the end of a call, which is then refused; shared memory and timers, which fail.
"""

from __future__ import annotations

from functools import cache
from typing import Self

from arpo.environments.base import Environment
from arpo.tools.base import CHARS_PER_TOKEN, Tool, ToolError, ToolUnavailable, tool
from arpo.tools.build import open_sandbox
from arpo.tools.python.tool import MAX_CODE, START_SECONDS, format_result
from arpo.tools.sandbox.sandbox import SandboxError
from arpo.tools.sandbox.sessions import Sessions
from arpo.types import Task


class PythonSession(Environment):
    """One tool, `python`, with a session for each trajectory.

    A call may take `timeout` seconds, and a session `memory_mb` above what Python itself needs. Output is cut to about
    `max_result_tokens`. At most `max_frozen` frozen processes are kept; other points are built again by replay. With
    `blocking`, a call blocks the event loop, so that the order of events is the same in every run.
    """

    def __init__(
        self,
        *,
        timeout: float = 10.0,
        memory_mb: int = 512,
        max_result_tokens: int = 512,
        max_frozen: int = 128,
        blocking: bool = False,
        unsafe_no_isolation: bool = False,
    ) -> None:
        self.timeout, self.limit, self.blocking = timeout, max_result_tokens * CHARS_PER_TOKEN, blocking
        self.sessions = open_sessions(memory_mb, unsafe_no_isolation, max_frozen)
        self.point = self.sessions.open()

    async def reset(self, task: Task) -> None:
        """Start with an empty session, whatever the task."""

    async def fork(self) -> Self:
        """Another session at the same point."""
        other = type(self).__new__(type(self))
        other.__dict__.update(self.__dict__)
        return other

    async def close(self) -> None:
        """Let go of the point; its process ends if no other session is there."""
        del self.point

    def tools(self) -> list[Tool]:
        """The tool `python`."""
        limits = tool(timeout=self.timeout + START_SECONDS, concurrency=self.sessions.workers)
        return [limits(type(self).python)]

    async def python(self, code: str) -> str:
        """Run Python code and see what it prints and the value of its last line.
        Variables, imports and files are kept from one call to the next. The standard library, numpy and sympy are
        there. Close files and end threads in the same call.
        """
        if len(code) > MAX_CODE:
            raise ToolError(f"the code is longer than {MAX_CODE} characters")
        try:
            if self.blocking:
                result, self.point = self.sessions.run(self.point, code, self.timeout)
            else:
                result, self.point = await self.sessions.arun(self.point, code, self.timeout)
        except SandboxError as error:
            raise ToolUnavailable(str(error)) from error
        return format_result(result, self.timeout, self.limit)


@cache
def open_sessions(memory_mb: int, unsafe_no_isolation: bool, max_frozen: int) -> Sessions:
    """The sessions of this process with these limits, in the sandbox that the tool `python` uses as well."""
    sessions = Sessions(open_sandbox(memory_mb, unsafe_no_isolation), max_frozen)
    sessions.start()
    return sessions
