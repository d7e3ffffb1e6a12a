"""Tools: plain functions that the model may call, and `call_tool`, the one place where an exception becomes a result.

Promises: `call_tool` always returns text that the model can read (valid Unicode, no NUL, bounded length) and says whose
fault a failure was; only failures of the infrastructure are retried; a cancelled caller is never held back.

    @tool(timeout=5)
    def weather(city: str, days: int = 1) -> str:
        '''The weather forecast for a city.'''
        return ...

Does not cover: isolation (a tool runs with all rights of this process) and stopping a plain function that hangs: its
thread goes on after the timeout, so what may hang should be an async function. A quick tool cannot time out at all.
"""

from __future__ import annotations

import asyncio
import difflib
import inspect
import time
import types
import typing
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, overload

from arpo.types import Fault, ToolCall, ToolResult, ToolSpec

FIRST_BACKOFF_SECONDS = 0.1
MAX_ERROR_CHARS = 500


class ToolError(Exception):
    """The model asked for something that cannot be done; the message is shown to it and the call is not retried."""


class ToolUnavailable(Exception):
    """The tool itself is broken or unreachable: not the model's fault, worth another attempt."""


BAD_INPUT = (ToolError, ValueError, TypeError, ArithmeticError, LookupError)
"""What a tool raises when the model's arguments are at fault. Anything else means that the tool itself is broken."""


@dataclass(frozen=True, slots=True)
class Tool:
    """Something the model can call: what it is told of it, the coroutine function that does it, and its limits.

    `timeout` is seconds per attempt, `retries` further attempts after a failure of the infrastructure, `max_chars` the
    longest output that is passed on.
    """

    spec: ToolSpec
    run: Callable[..., Awaitable[str]]
    timeout: float = 10.0
    retries: int = 2
    max_chars: int = 20_000
    quick: bool = False  # never waits: called on the event loop itself


@overload
def tool(function: Callable[..., Any], /) -> Tool: ...
@overload
def tool(
    *, timeout: float = ..., retries: int = ..., max_chars: int = ..., quick: bool = ...
) -> Callable[[Callable[..., Any]], Tool]: ...
def tool(
    function: Callable[..., Any] | None = None,
    /,
    *,
    timeout: float = 10.0,
    retries: int = 2,
    max_chars: int = 20_000,
    quick: bool = False,
) -> Tool | Callable[[Callable[..., Any]], Tool]:
    """Make a Tool of a function with type hints and a docstring, whose first paragraph is the description.

    A plain function runs in a thread; with `quick` it is called on the event loop itself, which is right for what takes
    microseconds and keeps the order of events exactly the same from run to run.
    """

    def make(function: Callable[..., Any]) -> Tool:
        return Tool(_spec(function), _coroutine(function, quick), timeout, retries, max_chars, quick)

    return make if function is None else make(function)


async def call_tool(tools: Mapping[str, Tool], call: ToolCall) -> ToolResult:
    """Do what the model asked for; whatever happens, the result is text. `attempts` is 0 if the tool was never run."""
    started = time.perf_counter()
    attempts = 0

    def result(text: str, fault: Fault | None = None) -> ToolResult:
        return ToolResult(_clean(text), fault, time.perf_counter() - started, attempts)

    mistake = _mistake(tools, call)
    if mistake is not None:
        return result(mistake[:MAX_ERROR_CHARS], Fault.MODEL)
    chosen = tools[call.name]
    while True:
        attempts += 1
        try:
            async with asyncio.timeout(chosen.timeout) as limit:
                return result(_cut(str(await chosen.run(**call.args)), chosen.max_chars))
        except BAD_INPUT as error:
            return result(_error(str(error) if isinstance(error, ToolError) else _describe(error)), Fault.MODEL)
        except (Exception, asyncio.CancelledError) as error:
            if isinstance(error, TimeoutError) and limit.expired():
                return result(f"Error: {call.name} took longer than {chosen.timeout:g} seconds.", Fault.TIMEOUT)
            if isinstance(error, asyncio.CancelledError) and _caller_cancelled():
                raise
            if attempts > chosen.retries:
                return result(_error(f"{call.name} is unavailable: {_describe(error)}"), Fault.INFRA)
        await asyncio.sleep(FIRST_BACKOFF_SECONDS * 2 ** (attempts - 1))


# What the model is told: signature -> JSON schema.

_JSON_TYPES: dict[Any, str] = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array"}


def _spec(function: Callable[..., Any]) -> ToolSpec:
    name = function.__name__
    description = " ".join((inspect.getdoc(function) or "").split("\n\n")[0].split())
    if not description:
        raise TypeError(f"tool {name}: the docstring is what the model is told of it, and there is none")
    hints = typing.get_type_hints(function)
    properties: dict[str, Any] = {}
    required: list[str] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise TypeError(f"tool {name}: {parameter} cannot be given by name")
        if parameter.name not in hints:
            raise TypeError(f"tool {name}: argument {parameter.name} needs a type hint")
        schema = _schema(hints[parameter.name], f"tool {name}: argument {parameter.name}")
        if parameter.default is parameter.empty:
            required.append(parameter.name)
        elif parameter.default is not None:
            schema["default"] = parameter.default
        properties[parameter.name] = schema
    return ToolSpec(
        name,
        description,
        {"type": "object", "properties": properties, "required": required, "additionalProperties": False},
    )


def _schema(hint: Any, where: str) -> dict[str, Any]:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is list:
        return {"type": "array", "items": _schema(args[0], where)}
    if origin in (typing.Union, types.UnionType):
        others = [arg for arg in args if arg is not type(None)]
        if len(others) == 1:
            schema = _schema(others[0], where)
            return {**schema, "type": [schema["type"], "null"]}
    elif hint in _JSON_TYPES:
        return {"type": _JSON_TYPES[hint]}
    raise TypeError(f"{where} has type {hint}; use str, int, float, bool, list, or one of these | None")


def _coroutine(function: Callable[..., Any], quick: bool) -> Callable[..., Awaitable[Any]]:
    if inspect.iscoroutinefunction(function):
        return function

    def guarded(**args: Any) -> Any:
        try:
            return function(**args)
        except StopIteration as error:  # one that leaves a thread leaves its awaiter waiting for ever
            raise RuntimeError("StopIteration") from error

    async def on_the_loop(**args: Any) -> Any:
        return function(**args)

    async def in_a_thread(**args: Any) -> Any:
        return await asyncio.to_thread(guarded, **args)

    return on_the_loop if quick else in_a_thread


# What the model did wrong before any tool ran.


def _mistake(tools: Mapping[str, Tool], call: ToolCall) -> str | None:
    if call.error is not None:
        return call.error
    if call.name not in tools:
        near = difflib.get_close_matches(call.name[:100], tools, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        return f"Error: there is no tool {call.name[:100]!r}.{hint} Available: {', '.join(tools) or 'none'}."
    problem = _argument_problem(tools[call.name].spec.schema, call.args)
    return None if problem is None else f"Error: {call.name}: {problem}."


def _argument_problem(schema: Mapping[str, Any], args: Mapping[str, Any]) -> str | None:
    """What is wrong with the arguments, or None. Parts of a schema that `_schema` never writes are let through."""
    properties: Mapping[str, Any] = schema.get("properties", {})
    takes = ", ".join(f"{name} ({_type_name(value)})" for name, value in properties.items()) or "no arguments"
    for name in schema.get("required", ()):
        if name not in args:
            return f"argument {name!r} is missing; it takes {takes}"
    for name, value in args.items():
        if name in properties:
            problem = _type_problem(properties[name], value, name)
            if problem is not None:
                return problem
        elif not schema.get("additionalProperties", False):
            return f"unexpected argument {name[:100]!r}; it takes {takes}"
    return None


def _type_problem(schema: Mapping[str, Any], value: Any, where: str) -> str | None:
    allowed = schema.get("type")
    if allowed is None:
        return None
    found = _json_type(value)
    accepted = {found, "number"} if found == "integer" else {found}
    if accepted.isdisjoint([allowed] if isinstance(allowed, str) else allowed):
        return f"argument {where} must be {_type_name(schema)}, not {found}"
    if found == "array":
        for index, item in enumerate(value):
            problem = _type_problem(schema.get("items", {}), item, f"{where}[{index}]")
            if problem is not None:
                return problem
    return None


def _json_type(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, Mapping):
        return "object"
    return _JSON_TYPES.get(type(value), type(value).__name__)


def _type_name(schema: Mapping[str, Any]) -> str:
    allowed = schema.get("type", "any")
    return allowed if isinstance(allowed, str) else " or ".join(allowed)


# Text that is safe to pass on.


def _caller_cancelled() -> bool:
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _error(message: str) -> str:
    return f"Error: {message}"[:MAX_ERROR_CHARS]


def _cut(text: str, max_chars: int) -> str:
    if len(text) <= max_chars:
        return text
    return f"{text[:max_chars]}\n[output cut: the first {max_chars} of {len(text)} characters]"


def _clean(text: str) -> str:
    return text.encode("utf-8", "replace").decode().replace("\0", "")
