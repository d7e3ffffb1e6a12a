"""Reward functions of the user's own, one or several with weights, as one reward function.

    def short(trajectory): return -len(trajectory.tool_calls)               # a number is the whole reward
    def right(trajectory, environment): return Reward(1.0, {"correct": 1.0})  # also sees the final state

Guarantees: everything that a function returns is checked. An error in one is an `ArpoError` that names the function,
the line and the task; only ToolUnavailable passes, which an environment raises that broke. Coroutine functions are run
to their end.
Not covered: a function that hangs.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import traceback
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from numbers import Real
from typing import Any

from arpo.config.plugins import GIVEN
from arpo.errors import ArpoError
from arpo.rewards.hierarchical import NoVerdict, RewardFn
from arpo.tools.base import ToolUnavailable
from arpo.types import Reward, Task, Trajectory

SETTING = "reward.function"


def wants_environment(function: Callable[..., Any]) -> bool:
    """Whether a reward function is called with (trajectory, environment): it has a second positional parameter.

    A second parameter with a default counts only if it is named `environment`.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # of some callables that are not written in Python
        return False
    positional = [each for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    return len(positional) > 1 and (
        positional[1].default is inspect.Parameter.empty or positional[1].name == "environment"
    )


def apply_reward(function: RewardFn, trajectory: Trajectory, environment: Any = None) -> Reward:
    """The reward of a trajectory, by a function with or without the final state of its environment."""
    return function(trajectory, environment) if wants_environment(function) else function(trajectory)


def custom_reward(function: Callable[..., Any], name: str = "") -> RewardFn:
    """The reward that one function gives, a number or a `Reward`; `name` is how messages call it."""
    shown = name.removeprefix(GIVEN) or function_name(function)
    if wants_environment(function):
        return lambda trajectory, environment: _call(function, shown, trajectory, environment)
    return lambda trajectory: _call(function, shown, trajectory)


def weighted_reward(
    functions: Sequence[Callable[..., Any]], weights: Sequence[float], names: Sequence[str] = ()
) -> RewardFn:
    """The weighted sum of several functions. Its parts are theirs, and each one's own value under its name."""
    parts_of = [function_name(function) for function in functions]
    for part in parts_of:
        if parts_of.count(part) > 1:
            how = ": write it with `def`" if part == "<lambda>" else ""
            raise ArpoError(f"{SETTING}: two functions are named {part}; rename one of them{how}")
    rewards = list(map(custom_reward, functions, names or parts_of))

    def reward(trajectory: Trajectory, environment: Any = None) -> Reward:
        total, parts, notes = 0.0, dict[str, float](), list[str]()
        for part, function, weight in zip(parts_of, rewards, weights, strict=True):
            value = apply_reward(function, trajectory, environment)
            own = {part: value.total, **value.parts}
            for shared in own.keys() & parts.keys():
                raise ArpoError(f"{SETTING}: {part} and another function both give the part {shared!r}; rename one")
            total, parts = total + weight * value.total, {**parts, **own}
            notes += [value.note] if value.note else []
        return Reward(total, parts, "; ".join(notes))

    return reward if any(map(wants_environment, rewards)) else lambda trajectory: reward(trajectory)


def function_name(function: Callable[..., Any]) -> str:
    """The name of a function, also of a `functools.partial` of one, or of the class of another callable."""
    while isinstance(function, partial):
        function = function.func
    return str(getattr(function, "__name__", type(function).__name__))


def call_user(setting: str, name: str, task: Task, function: Callable[..., Any], *args: Any) -> Any:
    """What a user's function returns; an error in it becomes an `ArpoError` that says where it is."""
    try:
        value = function(*args)
        return asyncio.run(_wait(value)) if inspect.isawaitable(value) else value
    except (ArpoError, NoVerdict, ToolUnavailable):
        raise
    except Exception as error:
        raise ArpoError(
            f"{setting}: {name} raised {_describe(error)} for {task.id}{_place(error, function)}"
        ) from error


async def _wait(value: Awaitable[Any]) -> Any:
    return await value


def _call(function: Callable[..., Any], name: str, *args: Any) -> Reward:
    task: Task = args[0].task
    value = call_user(SETTING, name, task, function, *args)
    number = _plain_number(value)
    given: Any = Reward(float(number)) if isinstance(number, Real) else value
    if not isinstance(given, Reward):
        hint = "; is a `return` missing?" if value is None else ""
        raise ArpoError(
            f"{SETTING}: {name} returned {value!r:.100} for {task.id}, expected a number or an arpo.Reward{hint}"
        )
    total, parts = _plain_number(given.total), {part: _plain_number(each) for part, each in given.parts.items()}
    if not all(isinstance(each, Real) and math.isfinite(each) for each in (total, *parts.values())):
        raise ArpoError(f"{SETTING}: {name} returned {value!r:.200} for {task.id}, expected finite numbers")
    if not isinstance(given.note, str):
        raise ArpoError(f"{SETTING}: {name} returned {value!r:.200} for {task.id}, expected a text as its note")
    return Reward(float(total), {part: float(each) for part, each in parts.items()}, given.note)


def _plain_number(value: Any) -> Any:
    """The number in a scalar of numpy or torch; any other value as it is."""
    is_scalar = getattr(value, "shape", None) == () and hasattr(value, "item")
    return value.item() if is_scalar else value


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _place(error: Exception, function: Callable[..., Any]) -> str:
    """Where the error was raised: in the function's own file if it is in the traceback, else in the deepest frame."""
    frames = traceback.extract_tb(error.__traceback__)[1:]  # the first is of `call_user`
    own = getattr(getattr(inspect.unwrap(function), "__code__", None), "co_filename", None)
    frame = ([frame for frame in frames if frame.filename == own] or frames)[-1:]
    return f" ({frame[0].filename}:{frame[0].lineno})" if frame else ""
