"""Calls of tools: made, limited, retried, cached and counted in one place, where exceptions become results.

    with Toolset([search, python], ToolCache("answers.sqlite", "on")) as tools:
        result = await call_tool(tools, ToolCall("search", {"query": "Mira Tolven"}))

Guarantees: `call_tool` always returns text that the model can read (valid Unicode, no NUL, bounded length) and says
whose fault a failure was, and with it MAX_IMAGES images or fewer, if the tool returns some. Whatever a tool raises,
`SystemExit` and its own `CancelledError` too, is a failure of that call; only a cancellation of the caller and the
user's Ctrl-C pass. Only infrastructure failures are retried, after growing random pauses, and never after a timeout. At
its timeout, or if the caller is cancelled, a tool is cancelled and given a few seconds to clean up. Waiting for a free
slot does not count against the timeout. With a cache, identical concurrent calls of a cacheable tool are made once. A
quick tool runs without yielding to the event loop, so the order of events is the same in every run. Every call is
counted when it starts and again when it ends, so `calls` is always the sum of calls in flight, cancelled, failed (by
kind) and successful. A tool that ignores its cancellation does not keep the event loop from closing; `close` names it.
Not covered: limits across processes or event loops, each of which has its own slots; the thread of a plain function
that continues after its timeout, and a clean-up that takes too long: neither holds a slot any more. An async tool that
never yields blocks the event loop, and with it the process.
"""

from __future__ import annotations

import asyncio
import copy
import difflib
import logging
import random
import signal
import sys
import threading
import time
import traceback
from collections import Counter, defaultdict, deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

from arpo.data.images import encode_image
from arpo.errors import ArpoError
from arpo.tools.base import Tool, ToolError, ToolTimeout, ToolUnavailable, ToolUnresponsive
from arpo.tools.cache import CacheKey, ToolCache, build_key
from arpo.types import Fault, Image, Task, ToolCall, ToolResult, percentile

FIRST_PAUSE_SECONDS = 0.1
MAX_PAUSE_SECONDS = 5.0
CLEANUP_SECONDS = 5.0
MAX_ERROR_CHARS = 500
MAX_IMAGES = 8  # of one result
OWN_FILES = (Path(__file__).parent, Path(__file__).parents[1] / "environments" / "states.py")
MAX_DURATIONS = 1024  # percentiles are over the last runs
_jitter = random.Random()
_logger = logging.getLogger("arpo")


@dataclass(frozen=True, slots=True)
class ToolStats:
    """Calls of one tool so far. `cached` calls were answered without a run; `model`, `timeout`, `infra` failed.

    `wait_seconds` is the total time spent waiting for a free slot or for an identical call in flight. `p50_seconds` and
    `p95_seconds` are of whole runs, with retries and without that waiting.
    """

    calls: int = 0
    cached: int = 0
    model: int = 0
    timeout: int = 0
    infra: int = 0
    cancelled: int = 0
    in_flight: int = 0
    retries: int = 0
    wait_seconds: float = 0.0
    p50_seconds: float = 0.0
    p95_seconds: float = 0.0


@dataclass(slots=True)
class ToolCounters:
    """The mutable counters behind `ToolStats`."""

    calls: int = 0
    cached: int = 0
    cancelled: int = 0
    retries: int = 0
    wait_seconds: float = 0.0
    faults: Counter[Fault | None] = field(default_factory=Counter)  # of calls that ended; None: success
    durations: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_DURATIONS))

    def snapshot(self) -> ToolStats:
        """Return the current values."""
        ordered = sorted(self.durations)
        return ToolStats(
            calls=self.calls,
            cached=self.cached,
            model=self.faults[Fault.MODEL],
            timeout=self.faults[Fault.TIMEOUT],
            infra=self.faults[Fault.INFRA],
            cancelled=self.cancelled,
            in_flight=self.calls - self.cancelled - self.faults.total(),
            retries=self.retries,
            wait_seconds=self.wait_seconds,
            p50_seconds=percentile(ordered, 0.50),
            p95_seconds=percentile(ordered, 0.95),
        )


class ToolState(Protocol):
    """The state of the environment that a trajectory's calls use: `arpo.environments.states.State`."""

    async def acquire(self, tool: Tool) -> Callable[..., Awaitable[Any]]:
        """The tool's function, bound to an environment that nobody else uses; raises ToolUnavailable."""
        ...

    async def release(self, call: ToolCall, outcome: Outcome | None) -> None:
        """Record the outcome of the call; None if it was cancelled."""
        ...


@dataclass(frozen=True, slots=True)
class _LoopState:
    """State of one event loop: the slots of each tool, and the cacheable calls in flight."""

    slots: Mapping[str, asyncio.Semaphore]
    in_flight: dict[bytes, asyncio.Future[ToolResult | None]] = field(default_factory=dict)


class Toolset(Mapping[str, Tool]):
    """A fixed set of tools by name, with what their calls share: slots, cache and counters."""

    def __init__(self, tools: Iterable[Tool], cache: ToolCache | None = None) -> None:
        self._tools: dict[str, Tool] = {}
        for tool in tools:
            if self._tools.setdefault(tool.spec.name, tool) is not tool:
                raise ArpoError(f"two tools are named {tool.spec.name!r}; leave one out or rename it")
        self.cache = cache
        self._counters: defaultdict[str, ToolCounters] = defaultdict(ToolCounters)
        self._loops: dict[asyncio.AbstractEventLoop, _LoopState] = {}
        self._logged: set[tuple[str, type[BaseException]]] = set()  # failures that were logged
        self._abandoned: dict[asyncio.Task[Any], str] = {}  # calls that ignored their cancellation, and their tools
        self._closed = False

    def __getitem__(self, name: str) -> Tool:
        return self._tools[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tools)

    def __len__(self) -> int:
        return len(self._tools)

    async def call(self, call: ToolCall, task: Task | None = None, state: ToolState | None = None) -> ToolResult:
        """Make a call and return its result, which is always text. `attempts` is 0 if the call was unusable.

        `task` is what is being solved, `state` the state of the environment that tools which are methods use.
        """
        counters = self._counters[call.name if call.name in self else ""]
        counters.calls += 1
        try:
            result = await self._result(call, task, state)
        except BaseException:
            counters.cancelled += 1
            raise
        counters.cached += result.cached
        counters.faults[result.fault] += 1
        return result

    def stats(self) -> dict[str, ToolStats]:
        """Return each tool's counters by name; calls of unknown tools are counted under ""."""
        names = [*self, ""] if "" in self._counters else [*self]
        return {name: self._counters[name].snapshot() for name in names}

    def close(self) -> None:
        """Close the tools and the cache, and log what went wrong with a tool; does nothing the second time."""
        closed, self._closed = self._closed, True
        if closed:
            return
        for close, name in {tool.close: name for name, tool in self.items()}.items():  # tools may share one
            try:
                if close is not None:
                    close()
            except BaseException as error:
                if _is_ctrl_c(error):
                    raise
                _logger.warning("tool %s: its close failed: %s", name, describe_error(error))
        for name in sorted(set(self._abandoned.values())):
            _logger.warning("tool %s: a call ignored its cancellation and never ended; it is not waited for", name)
        if self.cache is not None:
            self.cache.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _loop_state(self) -> _LoopState:
        loop = asyncio.get_running_loop()
        if loop not in self._loops:
            self._loops = {other: state for other, state in self._loops.items() if not other.is_closed()}
            slots = {name: asyncio.Semaphore(tool.concurrency or sys.maxsize) for name, tool in self.items()}
            self._loops[loop] = _LoopState(slots)
        return self._loops[loop]

    async def _result(self, call: ToolCall, task: Task | None, state: ToolState | None) -> ToolResult:
        """Check a call, then answer it from the cache or by running the tool."""
        started = time.perf_counter()
        mistake = _mistake(self, call)
        if mistake is not None:
            return ToolResult(_clean(mistake[:MAX_ERROR_CHARS]), Fault.MODEL, time.perf_counter() - started, 0)
        tool, cache = self[call.name], self.cache
        depends_on_more = tool.method or tool.task_argument is not None  # than on its arguments
        if cache is None or depends_on_more or (cache.mode == "on" and not tool.cacheable):
            return await self._run(tool, call, task, state)
        key = build_key(tool, call.args)
        if cache.mode == "replay":
            return _replay(cache, key)
        if tool.cacheable:
            return await self._run_once(cache, tool, call, key)
        return _store(cache, key, await self._run(tool, call))

    async def _run_once(self, cache: ToolCache, tool: Tool, call: ToolCall, key: CacheKey) -> ToolResult:
        """Return a cached result, that of an identical call in flight, or that of a call made now."""
        in_flight = self._loop_state().in_flight
        while True:
            started = time.perf_counter()
            cached = cache.get(key) if cache.mode == "on" else None
            if cached is not None:
                return _from_cache(cached, started)
            if key.digest not in in_flight:
                break
            try:
                shared = await asyncio.shield(in_flight[key.digest])
            finally:
                self._counters[key.tool].wait_seconds += time.perf_counter() - started
            if shared is not None:
                return replace(shared, seconds=0.0, attempts=1, cached=True)
        future = in_flight[key.digest] = asyncio.get_running_loop().create_future()
        result = None
        try:
            result = _store(cache, key, await self._run(tool, call))
            return result
        finally:  # after a cancellation, None tells those who wait to make the call themselves
            del in_flight[key.digest]
            future.set_result(result)

    async def _run(
        self, tool: Tool, call: ToolCall, task: Task | None = None, state: ToolState | None = None
    ) -> ToolResult:
        """Run the tool, with retries after infrastructure failures."""
        counters, slots = self._counters[tool.spec.name], self._loop_state().slots[tool.spec.name]
        started, waited, attempts = time.perf_counter(), 0.0, 0
        while True:
            attempts += 1
            asked = time.perf_counter()
            try:
                await slots.acquire()
            finally:
                waited += time.perf_counter() - asked
                counters.wait_seconds += time.perf_counter() - asked
            try:
                text, fault, error, images = await self._attempt(tool, call, task, state)
            finally:
                slots.release()
            if error is not None:
                self._log_once(tool.spec.name, error)
            if fault is not Fault.INFRA or not getattr(error, "retry", True) or attempts > tool.retries:
                break
            counters.retries += 1
            await asyncio.sleep(pause_before_retry(attempts, _jitter.random()))
        seconds = time.perf_counter() - started - waited
        counters.durations.append(seconds)
        return ToolResult(text, fault, seconds, attempts, images=images)

    async def _attempt(self, tool: Tool, call: ToolCall, task: Task | None, state: ToolState | None) -> Outcome:
        """Run the tool once; a method with an environment that the state provides."""
        if not tool.method:
            return await run_once(tool, tool.run, call.args, task, self._abandoned)
        if state is None:
            raise RuntimeError(f"tool {tool.spec.name} belongs to an environment and was called without a state")
        try:
            run = await state.acquire(tool)
        except ToolUnavailable as error:
            return _broken(tool.spec.name, error)
        outcome = None
        try:
            outcome = await run_once(tool, run, call.args, task, self._abandoned)
            return outcome
        finally:
            await state.release(call, outcome)

    def _log_once(self, name: str, error: BaseException) -> None:
        """Log where a tool failed, once for each tool and type of error."""
        if (name, type(error)) in self._logged:
            return
        self._logged.add((name, type(error)))
        if isinstance(error, ToolUnavailable):
            _logger.warning("tool %s failed: %s", name, _clean(_text(error)[:MAX_ERROR_CHARS]))
            return
        said = _clean(describe_error(error)[:MAX_ERROR_CHARS])
        hint = "raise ToolError if the model's arguments are to blame"
        _logger.warning("tool %s failed: %s (%s); %s", name, said, place_of(error), hint)


async def call_tool(
    tools: Mapping[str, Tool], call: ToolCall, task: Task | None = None, state: ToolState | None = None
) -> ToolResult:
    """`Toolset.call`; a plain mapping of tools will do if calls share neither slots nor counters."""
    return await (tools if isinstance(tools, Toolset) else Toolset(tools.values())).call(call, task, state)


def pause_before_retry(attempts: int, uniform: float) -> float:
    """Seconds to wait after `attempts` failures: the share `uniform` in [0, 1) of a bound that doubles each time."""
    return uniform * min(MAX_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2.0 ** min(attempts - 1, 30))


def _replay(cache: ToolCache, key: CacheKey) -> ToolResult:
    started = time.perf_counter()
    try:
        cached = cache.get(key)
        if cached is None:
            raise ToolUnavailable("the recording that is replayed lacks this call")
    except ToolUnavailable as error:
        return ToolResult(_error(f"{key.tool} is unavailable: {error}"), Fault.INFRA)
    return _from_cache(cached, started)


def _from_cache(cached: ToolResult, started: float) -> ToolResult:
    return ToolResult(_clean(cached.text), cached.fault, time.perf_counter() - started, cached=True)


def _store(cache: ToolCache, key: CacheKey, result: ToolResult) -> ToolResult:
    """Return the result, after storing it if it would be the same another time. One with images is not stored."""
    if result.fault in (None, Fault.MODEL) and not result.images:
        cache.put(key, result)
    return result


class _TooSlow(ToolUnresponsive):
    """The time limit was reached here, not noticed by the tool."""


class Outcome(NamedTuple):
    """What came of one attempt: text, whose fault an error was, the error if it was the tool's, images."""

    text: str
    fault: Fault | None = None
    error: BaseException | None = None
    images: tuple[Image, ...] = ()


async def run_once(
    tool: Tool,
    run: Callable[..., Awaitable[Any]],
    args: Mapping[str, Any],
    task: Task | None,
    abandoned: dict[asyncio.Task[Any], str],
) -> Outcome:
    """Call `run`, which is the tool's own or bound to an environment, within the tool's limits."""
    name, hidden = tool.spec.name, {} if tool.task_argument is None else {tool.task_argument: task}

    async def answer() -> Outcome:
        result = await run(**copy.deepcopy(dict(args)), **hidden)  # a tool may change lists: the call stays as it is
        if result is None:
            raise ToolUnavailable("it returned nothing; a tool returns the text that the model is shown")
        parts = _parts(result)
        if not any(_is_image(part) for part in parts):
            return Outcome(_clean(_cut(_plain(result), tool.max_chars)))
        return _outcome(parts, tool) if tool.quick else await asyncio.to_thread(_outcome, parts, tool)

    outcome: Outcome
    outcome, error = await (capture(answer) if tool.quick else run_limited(answer, tool.timeout, name, abandoned))
    if error is None:
        return outcome
    if isinstance(error, ToolTimeout | ToolError):
        fault = Fault.TIMEOUT if isinstance(error, ToolTimeout) else Fault.MODEL
        return Outcome(_clean(_cut(f"Error: {_text(error)}", tool.max_chars)), fault)
    if isinstance(error, _TooSlow):
        return Outcome(_error(f"{name} {error}."), Fault.INFRA, error)
    return _broken(name, error)


def _parts(result: Any) -> Sequence[Any]:
    """What a tool returned, as a sequence."""
    return result if isinstance(result, list | tuple) else [result]


def _is_image(value: Any) -> bool:
    """Whether this is an image: ours, or a picture of Pillow, which is not imported for that."""
    pillow = sys.modules.get("PIL.Image")
    return isinstance(value, Image) or (pillow is not None and isinstance(value, pillow.Image))


def _outcome(parts: Sequence[Any], tool: Tool) -> Outcome:
    """Text and images of a result that has images: the texts in lines of their own, the images in their order."""
    text = "\n".join(_plain(part) for part in parts if not _is_image(part))
    found = [part for part in parts if _is_image(part)]
    if len(found) > MAX_IMAGES:
        text += f"\n[the first {MAX_IMAGES} of {len(found)} images]"
    images = tuple(one if isinstance(one, Image) else encode_image(one) for one in found[:MAX_IMAGES])
    return Outcome(_clean(_cut(text.strip("\n"), tool.max_chars)), images=images)


async def run_limited(
    run: Callable[[], Awaitable[Any]], timeout: float, name: str, abandoned: dict[asyncio.Task[Any], str]
) -> tuple[Any, BaseException | None]:
    """`capture` in a task of its own, which is cancelled at the timeout or if the caller is cancelled.

    A task that ignores this is left behind after CLEANUP_SECONDS: `abandoned` then has its `name`, and the event loop
    can close without it.
    """
    task = asyncio.create_task(capture(run))
    try:
        await asyncio.wait({task}, timeout=timeout)
        if not task.done():
            return None, _TooSlow(f"took longer than {timeout:g} seconds")
        if task.cancelled():  # by the tool itself; the caller must not take that for its own cancellation
            return None, ToolUnavailable("it cancelled itself")
        return task.result()
    finally:
        if not task.done():  # too slow, or the caller was cancelled
            task.cancel()
            try:
                await asyncio.wait({task}, timeout=CLEANUP_SECONDS)
            finally:
                if not task.done():
                    abandoned[task] = name
                    task.add_done_callback(lambda done: abandoned.pop(done, None))
                    asyncio.tasks._unregister_task(task)  # else `asyncio.run` would wait for it
                    task._log_destroy_pending = False  # type: ignore[attr-defined]


async def capture(run: Callable[[], Awaitable[Any]]) -> tuple[Any, BaseException | None]:
    """The value of somebody else's coroutine, or its error.

    Nothing that it does raises here: in a task of its own, SystemExit would end the event loop.
    """
    task = asyncio.current_task()
    assert task is not None
    cancelled_before = task.cancelling()
    try:
        return await run(), None
    except BaseException as error:
        if isinstance(error, asyncio.CancelledError) and task.cancelling() > cancelled_before:
            raise
        if _is_ctrl_c(error):
            raise
        return None, error


def _broken(name: str, error: BaseException) -> Outcome:
    said = _text(error) if isinstance(error, ToolUnavailable) else describe_error(error)
    return Outcome(_error(f"{name} is unavailable: {said}"), Fault.INFRA, error)


def _is_ctrl_c(error: BaseException) -> bool:
    """Whether Ctrl-C raised this, and not a tool: while an event loop handles the signal, it raises nothing."""
    return (
        isinstance(error, KeyboardInterrupt)
        and threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )


def _mistake(tools: Mapping[str, Tool], call: ToolCall) -> str | None:
    """Return what is wrong with the call itself, in words for the model, or None."""
    if call.error is not None:
        return call.error
    if call.name not in tools:
        near = difflib.get_close_matches(call.name[:100], tools, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        return f"Error: there is no tool {call.name[:100]!r}.{hint} Available: {', '.join(tools) or 'none'}."
    problem = tools[call.name].checker.problem(call.args)
    return None if problem is None else f"Error: {call.name}: {problem}."


def place_of(error: BaseException) -> str:
    """Where in somebody else's code an error was raised: "tools.py, line 12"."""
    frames = traceback.extract_tb(error.__traceback__)
    others = (one.filename for one in frames if OWN_FILES[0] != Path(one.filename).parent)
    file = next((name for name in others if Path(name) != OWN_FILES[1]), __file__)
    place = next(frame for frame in reversed(frames) if frame.filename == file)
    return f"{Path(file).name}, line {place.lineno}"


def describe_error(error: BaseException) -> str:
    """The type and the text of an error."""
    return f"{type(error).__name__}: {_text(error)}".removesuffix(": ")


def _text(error: BaseException) -> str:
    try:
        return _plain(error)
    except BaseException:
        return ""


def _plain(value: object) -> str:
    """`str(value)`, and never one of a subclass, whose methods may raise."""
    return str.__str__(str(value))


def _error(message: str) -> str:
    return _clean(f"Error: {message}"[:MAX_ERROR_CHARS])


def _cut(text: str, max_chars: int) -> str:
    if len(text) <= max_chars:
        return text
    return f"{text[:max_chars]}\n[output cut: the first {max_chars} of {len(text)} characters]"


def _clean(text: str) -> str:
    return text.encode("utf-8", "replace").decode().replace("\0", "")
