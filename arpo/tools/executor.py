"""Calling tools: the one place where calls are made, limited, repeated, remembered, counted, and where an exception
becomes a result.

    with Toolbox([search, python], ToolCache("answers.sqlite", "on")) as tools:
        result = await call_tool(tools, ToolCall("search", {"query": "Mira Tolven"}))

Promises: `call_tool` always returns text that the model can read (valid Unicode, no NUL, bounded length) and says whose
fault a failure was; only failures of the infrastructure are retried, after growing random pauses. At its timeout, or
when the caller is cancelled, a tool is stopped and given a few seconds to clean up. Waiting for one of its slots takes
nothing from its timeout. Identical calls of a cacheable tool that are under way at the same time are made once, given a
cache. A quick tool is called without giving way to anything else, so the order of events is the same from run to run.

Does not cover: limits across processes or event loops, each of which has its own slots; the thread of a plain function
that goes on after its timeout, and a clean-up that takes too long: neither holds a slot any more.
"""

from __future__ import annotations

import asyncio
import difflib
import random
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Self

from arpo.errors import ArpoError
from arpo.tools.base import BAD_INPUT, Tool, ToolError, ToolTimeout, ToolUnavailable
from arpo.tools.cache import Answer, Question, ToolCache, question_of
from arpo.tools.stats import Tally, ToolStats
from arpo.types import Fault, ToolCall, ToolResult

FIRST_PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 5.0
CLEANUP_SECONDS = 5.0
MAX_ERROR_CHARS = 500
_jitter = random.Random()


@dataclass(frozen=True, slots=True)
class _LoopState:
    """What belongs to one event loop: the slots of its tools, and cacheable calls under way."""

    slots: Mapping[str, asyncio.Semaphore]
    flights: dict[bytes, asyncio.Future[ToolResult | None]] = field(default_factory=dict)


class Toolset(Mapping[str, Tool]):
    """A fixed set of tools by name, with what their calls share: slots, stored answers and counters."""

    def __init__(self, tools: Iterable[Tool], cache: ToolCache | None = None) -> None:
        self._tools: dict[str, Tool] = {}
        for tool in tools:
            if self._tools.setdefault(tool.spec.name, tool) is not tool:
                raise ArpoError(f"two tools are named {tool.spec.name!r}; leave one out or rename it")
        self.cache = cache
        self._tallies: defaultdict[str, Tally] = defaultdict(Tally)
        self._loops: dict[asyncio.AbstractEventLoop, _LoopState] = {}
        self._closed = False

    def __getitem__(self, name: str) -> Tool:
        return self._tools[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tools)

    def __len__(self) -> int:
        return len(self._tools)

    def stats(self) -> dict[str, ToolStats]:
        """Every tool's counters now, by name; calls of tools that do not exist are counted under ""."""
        names = [*self, ""] if "" in self._tallies else [*self]
        return {name: self._tallies[name].snapshot() for name in names}

    def close(self) -> None:
        """Release what the tools and the cache hold, each of them even if another fails; the first time only."""
        closed, self._closed = self._closed, True
        if closed:
            return
        with ExitStack() as stack:
            if self.cache is not None:
                stack.callback(self.cache.close)
            for close in dict.fromkeys(tool.close for tool in self.values()):  # tools may share one
                if close is not None:
                    stack.callback(close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _here(self) -> _LoopState:
        loop = asyncio.get_running_loop()
        if loop not in self._loops:
            self._loops = {other: state for other, state in self._loops.items() if not other.is_closed()}
            slots = {name: asyncio.Semaphore(tool.concurrency or sys.maxsize) for name, tool in self.items()}
            self._loops[loop] = _LoopState(slots)
        return self._loops[loop]


async def call_tool(tools: Mapping[str, Tool], call: ToolCall) -> ToolResult:
    """Do what the model asked for; whatever happens, the result is text. `attempts` is 0 if the call was unusable.

    A plain mapping of tools will do where nothing is to be shared between calls.
    """
    box = tools if isinstance(tools, Toolset) else Toolset(tools.values())
    tally = box._tallies[call.name if call.name in box else ""]
    tally.start()
    try:
        result = await _answer(box, tally, call)
    except BaseException:
        tally.cancel()
        raise
    tally.end(result)
    return result


def pause_before_retry(attempts: int, uniform: float) -> float:
    """Seconds to wait after so many failed attempts: a share, drawn from [0, 1), of a bound that doubles each time."""
    return uniform * min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2.0 ** min(attempts - 1, 30))


async def _answer(box: Toolset, tally: Tally, call: ToolCall) -> ToolResult:
    """The result of one call: what the model did wrong, what is stored, or what the tool says."""
    started = time.perf_counter()
    mistake = _mistake(box, call)
    if mistake is not None:
        return ToolResult(_clean(mistake[:MAX_ERROR_CHARS]), Fault.MODEL, time.perf_counter() - started, 0)
    tool, cache = box[call.name], box.cache
    if cache is None or (cache.mode == "on" and not tool.cacheable):
        return await _run(box, tally, tool, call.args)
    question = question_of(tool, call.args)
    if cache.mode == "replay":
        return _replay(cache, tool, question)
    if tool.cacheable:
        return await _run_once(box, cache, tally, tool, call.args, question)
    return _stored(cache, question, await _run(box, tally, tool, call.args))


# What is remembered.


def _replay(cache: ToolCache, tool: Tool, question: Question) -> ToolResult:
    started = time.perf_counter()
    try:
        answer = cache.get(question)
        if answer is None:
            raise ToolUnavailable("the recording that is replayed lacks this call")
    except ToolUnavailable as error:
        return ToolResult(_error(f"{tool.spec.name} is unavailable: {error}"), Fault.INFRA)
    return _remembered(answer, started)


async def _run_once(
    box: Toolset, cache: ToolCache, tally: Tally, tool: Tool, args: Mapping[str, Any], question: Question
) -> ToolResult:
    """A stored answer, that of an identical call under way, or that of a call made now."""
    flights = box._here().flights
    while True:
        started = time.perf_counter()
        answer = cache.get(question) if cache.mode == "on" else None
        if answer is not None:
            return _remembered(answer, started)
        if question.key not in flights:
            break
        try:
            shared = await asyncio.shield(flights[question.key])
        finally:
            tally.wait_seconds += time.perf_counter() - started
        if shared is not None:
            return replace(shared, seconds=0.0, attempts=1, cached=True)
    flight = flights[question.key] = asyncio.get_running_loop().create_future()
    result = None
    try:
        result = _stored(cache, question, await _run(box, tally, tool, args))
        return result
    finally:  # None, after a cancellation, tells those who wait to make the call themselves
        del flights[question.key]
        flight.set_result(result)


def _remembered(answer: Answer, started: float) -> ToolResult:
    return ToolResult(_clean(answer.text), answer.fault, time.perf_counter() - started, cached=True)


def _stored(cache: ToolCache, question: Question, result: ToolResult) -> ToolResult:
    """The result, after storing it if it would be the same another time."""
    if result.fault in (None, Fault.MODEL):
        cache.put(question, Answer(result.text, result.fault, result.seconds))
    return result


# Runs of the tool itself.


async def _run(box: Toolset, tally: Tally, tool: Tool, args: Mapping[str, Any]) -> ToolResult:
    """Run the tool, again and again as long as its failures are worth it."""
    slots = box._here().slots[tool.spec.name]
    started, waited, attempts = time.perf_counter(), 0.0, 0
    while True:
        attempts += 1
        asked = time.perf_counter()
        try:
            await slots.acquire()
        finally:
            waited += time.perf_counter() - asked
            tally.wait_seconds += time.perf_counter() - asked
        try:
            text, fault = await _attempt(tool, args)
        finally:
            slots.release()
        if fault is not Fault.INFRA or attempts > tool.retries:
            break
        tally.retries += 1
        await asyncio.sleep(pause_before_retry(attempts, _jitter.random()))
    seconds = time.perf_counter() - started - waited
    tally.durations.append(seconds)
    return ToolResult(_clean(text), fault, seconds, attempts)


async def _attempt(tool: Tool, args: Mapping[str, Any]) -> tuple[str, Fault | None]:
    """One run: what it says, and whose fault it is if that is an error."""
    name = tool.spec.name
    try:
        if tool.quick:
            return _cut(str(await tool.run(**args)), tool.max_chars), None
        task = await _finished(tool, args)
        if task is None:
            return f"Error: {name} took longer than {tool.timeout:g} seconds.", Fault.TIMEOUT
        if task.cancelled():  # not by us: nothing that the tool does is taken for a cancellation of its caller
            raise ToolUnavailable("it cancelled itself")
        return _cut(str(task.result()), tool.max_chars), None
    except ToolTimeout as error:
        return _cut(f"Error: {_text(error)}", tool.max_chars), Fault.TIMEOUT
    except ToolError as error:
        return _cut(f"Error: {_text(error)}", tool.max_chars), Fault.MODEL
    except BAD_INPUT as error:
        return _error(_describe(error)), Fault.MODEL
    except Exception as error:
        return _error(f"{name} is unavailable: {_describe(error)}"), Fault.INFRA


async def _finished(tool: Tool, args: Mapping[str, Any]) -> asyncio.Future[str] | None:
    """The tool's run, in a task of its own, when it has ended; None if it was stopped at its timeout.

    However badly a tool takes being stopped, nobody waits for it longer than CLEANUP_SECONDS.
    """
    task = asyncio.ensure_future(tool.run(**args))
    task.add_done_callback(lambda done: done.cancelled() or done.exception())  # an error that comes late is no news
    try:
        ended, _ = await asyncio.wait({task}, timeout=tool.timeout)
        return task if ended else None
    finally:
        if not task.done():  # too slow, or the caller was cancelled
            task.cancel()
            await asyncio.wait({task}, timeout=CLEANUP_SECONDS)


# What the model reads.


def _mistake(tools: Mapping[str, Tool], call: ToolCall) -> str | None:
    """What the model did wrong before any tool ran."""
    if call.error is not None:
        return call.error
    if call.name not in tools:
        near = difflib.get_close_matches(call.name[:100], tools, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        return f"Error: there is no tool {call.name[:100]!r}.{hint} Available: {', '.join(tools) or 'none'}."
    problem = tools[call.name].checker.problem(call.args)
    return None if problem is None else f"Error: {call.name}: {problem}."


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {_text(error)}".removesuffix(": ")


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return ""


def _error(message: str) -> str:
    return f"Error: {message}"[:MAX_ERROR_CHARS]


def _cut(text: str, max_chars: int) -> str:
    if len(text) <= max_chars:
        return text
    return f"{text[:max_chars]}\n[output cut: the first {max_chars} of {len(text)} characters]"


def _clean(text: str) -> str:
    return text.encode("utf-8", "replace").decode().replace("\0", "")
