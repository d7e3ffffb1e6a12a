"""Tools: what the model may call. A plain function becomes one by `@tool`; calls are made by `arpo.tools.executor`.

    @tool(timeout=5, cacheable=True)
    def weather(city: str, days: int = 1) -> str:
        '''The weather forecast for a city.'''
        return ...

A tool tells whose fault a failure is by what it raises: ToolError and the rest of BAD_INPUT mean the model's, and so
does ToolTimeout; anything else is the tool's own.

Does not cover: isolation (a tool runs with all rights of this process) and stopping a plain function that hangs: its
thread goes on after the timeout, so what may hang should be an async function. A quick tool cannot time out at all.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypedDict, Unpack, overload

from arpo.tools.schema import Checker, spec_of
from arpo.types import ToolSpec


class ToolError(Exception):
    """The model asked for something that cannot be done; the message is shown to it and the call is not retried."""


class ToolTimeout(Exception):
    """The call ran into a time limit of the tool's own; the message is shown to the model, the call is not retried."""


class ToolUnavailable(Exception):
    """The tool itself is broken or unreachable: not the model's fault, worth another attempt."""


CHARS_PER_TOKEN = 4  # an estimate for tools, which know no tokenizer; the exact cut is made when a result is encoded
BAD_INPUT = (ToolError, ValueError, TypeError, ArithmeticError, LookupError)
"""What a tool raises when the model's arguments are at fault. Anything else means that the tool itself is broken."""


@dataclass(frozen=True, slots=True)
class Tool:
    """Something the model can call: what it is told of it, the coroutine function that does it, and its limits.

    `timeout` is seconds per attempt, `retries` further attempts after a failure of the infrastructure, `max_chars` the
    longest output that is passed on, `concurrency` how many calls may run at the same time (0: any number).
    `cacheable` says that the same arguments always deserve the same answer, and `version` names what that answer
    depends on besides the arguments: an index, a snapshot, the code itself. `close` releases what the tool holds.
    """

    spec: ToolSpec
    run: Callable[..., Awaitable[str]]
    timeout: float = 10.0
    retries: int = 2
    max_chars: int = 20_000
    quick: bool = False  # never waits: called on the event loop itself
    concurrency: int = 0
    cacheable: bool = False
    version: str = ""
    close: Callable[[], None] | None = None
    checker: Checker = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.timeout <= 0 or self.retries < 0 or self.max_chars < 1 or self.concurrency < 0:
            raise ValueError(f"tool {self.spec.name}: a limit is out of range")
        object.__setattr__(self, "checker", Checker(self.spec))


class Limits(TypedDict, total=False):
    """What `@tool` can be given: fields of Tool."""

    timeout: float
    retries: int
    max_chars: int
    quick: bool
    concurrency: int
    cacheable: bool
    version: str
    close: Callable[[], None] | None


@overload
def tool(function: Callable[..., Any], /) -> Tool: ...
@overload
def tool(**limits: Unpack[Limits]) -> Callable[[Callable[..., Any]], Tool]: ...
def tool(
    function: Callable[..., Any] | None = None, /, **limits: Unpack[Limits]
) -> Tool | Callable[[Callable[..., Any]], Tool]:
    """Make a Tool of a function with type hints and a docstring, whose first paragraph is the description.

    A plain function runs in a thread; with `quick` it is called on the event loop itself, which is right for what takes
    microseconds and keeps the order of events exactly the same from run to run.
    """

    def make(function: Callable[..., Any]) -> Tool:
        return Tool(spec_of(function), _coroutine(function, limits.get("quick", False)), **limits)

    return make if function is None else make(function)


def _coroutine(function: Callable[..., Any], quick: bool) -> Callable[..., Awaitable[Any]]:
    if inspect.iscoroutinefunction(function):
        return function

    async def on_the_loop(**args: Any) -> Any:
        return function(**args)

    async def in_a_thread(**args: Any) -> Any:
        return await _thread(lambda: function(**args), function.__name__)

    return on_the_loop if quick else in_a_thread


async def _thread(function: Callable[[], Any], name: str) -> Any:
    """The function's result, from a thread of its own: in a pool, calls that hang would hold up the others."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()
    context = contextvars.copy_context()

    def deliver(value: Any, error: Exception | None) -> None:
        if done.cancelled():  # nobody waits any more
            return
        if error is None:
            done.set_result(value)
        else:
            done.set_exception(error)

    def work() -> None:
        value: Any = None
        failure: Exception | None = None
        try:
            value = context.run(function)
        except StopIteration as error:  # a future cannot carry one
            failure = RuntimeError(type(error).__name__)
        except Exception as error:
            failure = error
        except BaseException as error:  # a tool that calls exit() does not end the run
            failure = RuntimeError(type(error).__name__)
        with contextlib.suppress(RuntimeError):  # the loop may be closed by now
            loop.call_soon_threadsafe(deliver, value, failure)

    threading.Thread(target=work, name=f"arpo-tool-{name}", daemon=True).start()
    return await done
