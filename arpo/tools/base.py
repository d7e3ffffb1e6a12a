"""Tools that the model may call. `@tool` turns a function into one; `arpo.tools.executor` makes the calls.

    @tool(timeout=5, cacheable=True)
    def weather(city: str, days: int = 1) -> str:
        '''The weather forecast for a city.'''
        return ...

The exception that a tool raises says whose fault a failure is: ToolError the model's, ToolTimeout too (it asked for
something that takes too long), anything else, a ValueError too, the tool's own.
Not covered: isolation (a tool runs with all rights of this process), and stopping a plain function that hangs: its
thread continues after the timeout, so what may hang should be an async function. A quick tool cannot time out.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypedDict, Unpack, overload

from arpo.tools.schema import Checker, build_spec, is_method, task_argument
from arpo.types import ToolSpec


class ToolError(Exception):
    """The model asked for something impossible; it is shown the message, and the call is not retried."""


class ToolTimeout(Exception):
    """What the model asked for takes too long (its code, a page): it is shown the message, the call is not retried."""


class ToolUnavailable(Exception):
    """The tool is broken or unreachable: not the model's fault, and the call is retried."""

    retry = True


class ToolUnresponsive(ToolUnavailable):
    """The tool did not answer in time: not the model's fault, and not retried, which would take as long again."""

    retry = False


CHARS_PER_TOKEN = 4  # an estimate, as tools have no tokenizer; the exact cut is made when a result is encoded


@dataclass(frozen=True, slots=True)
class Tool:
    """Something the model can call: its spec, the coroutine function `run`, and its limits.

    `timeout` is seconds per attempt, `retries` the further attempts after an infrastructure failure, `max_chars` the
    length at which output is cut, `concurrency` the number of concurrent calls (0: any). `cacheable` means that the
    same arguments always give the same answer, as long as `version` (an index, a snapshot, the code) is the same.
    `close` releases the tool's resources.
    """

    spec: ToolSpec
    run: Callable[..., Awaitable[Any]]
    timeout: float = 10.0
    retries: int = 2
    max_chars: int = 20_000
    quick: bool = False  # never waits: called on the event loop itself
    concurrency: int = 0
    cacheable: bool = False
    version: str = ""
    close: Callable[[], None] | None = None
    function: Callable[..., Any] | None = None  # what `@tool` was put on
    method: bool = False  # its first argument is the object it belongs to
    task_argument: str | None = None  # the argument that receives the task; the model is not told of it
    checker: Checker = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.timeout <= 0 or self.retries < 0 or self.max_chars < 1 or self.concurrency < 0:
            raise ValueError(f"tool {self.spec.name}: a limit is out of range")
        if self.cacheable and (self.method or self.task_argument is not None):
            raise ValueError(
                f"tool {self.spec.name}: its result depends on more than its arguments, so leave out cacheable"
            )
        object.__setattr__(self, "checker", Checker(self.spec))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function itself, as if it had no `@tool`."""
        if self.function is None:
            raise TypeError(f"tool {self.spec.name} is not made of a function; await its run(...)")
        return self.function(*args, **kwargs)

    def __get__(self, instance: Any, owner: type | None = None) -> Tool:
        """The tool of an instance, if it was made of a method."""
        if instance is None or not self.method:
            return self
        assert self.function is not None
        return replace(self, run=partial(self.run, instance), function=partial(self.function, instance), method=False)


class Limits(TypedDict, total=False):
    """The fields of Tool that `@tool` takes."""

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

    A plain function runs in a thread. With `quick` it is called on the event loop, which suits functions that take
    microseconds and keeps the order of events the same in every run. An argument with the type `Task` receives the
    task that is being solved, with all columns of its row; the model is not told of it.
    """

    def make(function: Callable[..., Any]) -> Tool:
        return Tool(
            build_spec(function),
            as_coroutine(function, limits.get("quick", False)),
            function=function,
            method=is_method(function),
            task_argument=task_argument(function),
            **limits,
        )

    return make if function is None else make(function)


def as_coroutine(function: Callable[..., Any], quick: bool) -> Callable[..., Awaitable[Any]]:
    """The function as a coroutine function: in a thread of its own, or with `quick` on the event loop."""
    if inspect.iscoroutinefunction(function):
        return function

    async def on_loop(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    async def in_thread(*args: Any, **kwargs: Any) -> Any:
        name = f"arpo-tool-{getattr(function, '__name__', 'call')}"
        return await asyncio.wrap_future(run_in_thread(partial(function, *args, **kwargs), name))

    return on_loop if quick else in_thread


def run_in_thread(work: Callable[[], Any], name: str) -> Future[Any]:
    """Start `work` in a new thread, and return its future. In a pool, calls that hang would block others."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()  # from now on it cannot be cancelled, so a late result does no harm
    context = contextvars.copy_context()

    def run() -> None:
        try:
            future.set_result(context.run(work))
        except BaseException as error:  # exit() must not end the run, and no future can hold a StopIteration
            plain = isinstance(error, Exception) and not isinstance(error, StopIteration)
            future.set_exception(error if plain else RuntimeError(type(error).__name__))

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
