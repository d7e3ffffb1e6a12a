"""An environment: tools that share a state. Every trajectory has its own, and a branch starts with a fork of it.

    class Counter(Environment):
        def reset(self, task: Task) -> None:
            self.count = 0

        @tool
        def count_up(self) -> str:
            '''Count one further.'''
            self.count += 1
            return f"You have made {self.count} calls."

Not covered: isolation. An environment runs with all rights of this process.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import ClassVar, Self

from arpo.tools.base import Tool
from arpo.types import Reward, Task, Trajectory


class Environment:
    """The state of one trajectory, and the tools that use it: its methods with `@tool`.

    An instance is made without arguments or with those of `environment.settings`, and `reset` once. Methods may be
    plain or async; plain ones run in a thread. Two methods of an instance never run at the same time.

    A branch needs the state as it was at its first node. This is the result of `fork`; if that is not defined, a
    `copy.deepcopy` if it is `copyable`; else a fresh instance to which the recorded calls are made again. Their
    results must then be the same as before.

    A tool that raises `ToolTimeout` must leave the state as it was before the call. After any error other than
    `ToolError` and `ToolTimeout` the state counts as broken: it is closed, and made anew from the recorded calls.
    """

    copyable: bool = False  # a deep copy is an independent state
    quick: ClassVar[bool] = False  # no method ever waits: called on the event loop itself, in the same order every time
    done: bool = False  # a tool sets it to end the trajectory after its result

    @property
    def decisive(self) -> bool | None:
        """Whether the next choice decides about the reward, for the branching policy "oracle"; None: not known.

        It is read on the event loop, must take no time and must not change the state.
        """
        return None

    def reset(self, task: Task) -> str | Awaitable[str | None] | None:
        """Prepare the state for a task. A text that is returned is appended to the question; it must not vary."""
        raise NotImplementedError

    def fork(self) -> Self | Awaitable[Self]:
        """An independent copy of the state as it is now."""
        raise NotImplementedError

    def close(self) -> Awaitable[None] | None:
        """Release what the state holds; called once."""

    def reward(self, trajectory: Trajectory) -> float | Reward:
        """The reward of a trajectory that ended in this state, used if no other reward is set."""
        raise NotImplementedError

    def tools(self) -> list[Tool]:
        """The tools, as functions whose first parameter, `self`, is the environment; asked once, before any reset."""
        found = {name: value for one in reversed(type(self).__mro__) for name, value in vars(one).items()}
        return [value for value in found.values() if isinstance(value, Tool)]


def overrides(kind: type[Environment], method: str) -> bool:
    """Whether an environment class defines an optional method itself."""
    return getattr(kind, method) is not getattr(Environment, method)
