"""The states of environments: opened, used by one trajectory at a time, forked, replayed, and closed.

    pool = StatePool(factory, timeout=60, max_states=1024)
    async with pool.open(task) as root:           # the state at the prompt
        state = root.branch()                     # the state of a trajectory; this costs nothing yet
        result = await tools.call(call, task, state)
        other = state.branch()                    # the state of a branch, as it is now
        async with other.final() as environment:  # what a reward sees
            ...

A `State` is a position in the history of a task's calls. Several states may be at one position and share its
environment. A state that makes a call needs an environment of its own. It gets the one of the position, if nobody else
is there; a fork of it; or, if it cannot be forked, a new one, to which the recorded calls are made again (replay). The
trajectory that made the last call keeps its environment, and its branches get the new ones.

Guarantees: every environment that was made is closed exactly once, whatever fails or is cancelled. No environment is
used by two states, or by two calls at a time. At most `max_states` environments are alive: idle ones are dropped, the
least recently used first, and replayed when they are needed. A replay that gives another result than the recorded one
is an error of the environment, which is counted and logged.
Not covered: a method that never returns. Its environment is closed when it does, if the event loop still runs.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import random
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from inspect import iscoroutinefunction
from typing import Any

from arpo.environments.base import Environment, overrides
from arpo.tools.base import Tool, ToolUnavailable, ToolUnresponsive, run_in_thread
from arpo.tools.cache import ToolCache
from arpo.tools.executor import (
    Outcome,
    Toolset,
    capture,
    describe_error,
    pause_before_retry,
    place_of,
    run_limited,
    run_once,
)
from arpo.types import Fault, Image, Task, ToolCall

ATTEMPTS = 3  # to make an environment for the prompt or a branch
MAX_SHOWN = 200  # characters of a result in a message
_logger = logging.getLogger("arpo")


class ReplayDiffers(ToolUnavailable):
    """A call that was made again returned something else than before, so the state cannot be made anew."""

    retry = False


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """A call that was made, and what it returned."""

    call: ToolCall
    text: str
    fault: Fault | None
    images: tuple[Image, ...] = ()


@dataclass(slots=True, eq=False)
class _Live:
    """An environment that is alive, and the method that makes it or runs in it, or did so last."""

    history: _History
    environment: Environment | None = None  # None until it is made
    running: Future[Any] | None = None

    @property
    def busy(self) -> bool:
        """Whether a method still runs in it, perhaps one that nobody waits for any more."""
        return self.running is not None and not self.running.done()


@dataclass(slots=True, eq=False)
class _History:
    """What all states of a task share: the task, what `reset` returned, which states are open, what is being closed."""

    task: Task
    opening: str | None = None
    was_reset: bool = False
    open: set[State] = field(default_factory=set)
    closing: set[asyncio.Task[None]] = field(default_factory=set)

    def with_opening(self, task: Task) -> Task:
        """The task, with the text that `reset` returned appended to its question."""
        return task if not self.opening else replace(task, question=f"{task.question}\n\n{self.opening}")


@dataclass(slots=True, eq=False)
class _Position:
    """A point in a history: the calls that lead to it, how many states are there, and an idle environment if any."""

    history: _History
    calls: tuple[RecordedCall, ...] = ()
    states: int = 0
    live: _Live | None = None
    owner: State | None = None  # the trajectory whose environment it is; None at the prompt: anybody's
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # held while the environment here is forked


@dataclass(slots=True)
class _Counters:
    """Since they were last read. `seconds` is spent on making, forking and replaying environments."""

    live_max: int = 0
    opened: int = 0
    forks: int = 0
    replays: int = 0
    replayed_calls: int = 0
    dropped: int = 0
    differences: int = 0
    seconds: float = 0.0


class StatePool:
    """Makes and closes the environments of a run, and bounds their number. It is used by one event loop at a time."""

    def __init__(self, factory: Callable[[], Environment], timeout: float = 60.0, max_states: int = 1024) -> None:
        if max_states < 2:
            raise ValueError(f"max_states is {max_states}, but a fork needs two")
        self._factory, self._timeout, self._max_states = factory, timeout, max_states
        self._slots: dict[asyncio.AbstractEventLoop, asyncio.Semaphore] = {}
        self._idle: OrderedDict[_Position, None] = OrderedDict()  # with an environment; least recently used first
        self._closing: set[asyncio.Task[None]] = set()
        self._abandoned: dict[asyncio.Task[Any], str] = {}
        self._counters = _Counters()
        self._logged: set[str] = set()
        self.live = 0  # environments that were made and not closed yet
        prototype = factory()
        if not isinstance(prototype, Environment):
            raise TypeError(f"{prototype!r:.100} is not an Environment")
        self.kind = type(prototype)
        self.can_fork = overrides(self.kind, "fork") or prototype.copyable
        tools = prototype.tools()
        self.tools: Mapping[str, Tool] = {
            tool.spec.name: replace(tool, quick=True) if self.kind.quick else tool for tool in tools
        }

    @property
    def has_reward(self) -> bool:
        """Whether the environment comes with a reward."""
        return overrides(self.kind, "reward")

    @property
    def knows_decisive(self) -> bool:
        """Whether the environment can say which choices are decisive."""
        return overrides(self.kind, "decisive")

    def stats(self) -> dict[str, float]:
        """The counters since the last call."""
        counters, self._counters = self._counters, _Counters(live_max=self.live)
        return {name: float(value) for name, value in asdict(counters).items()}

    @asynccontextmanager
    async def open(self, task: Task) -> AsyncIterator[State]:
        """The state of `task` at the prompt. When the block ends, all states that branched off it are closed."""
        history = _History(task)
        try:
            yield State(self, _Position(history), is_root=True)
        finally:
            await asyncio.shield(self._close_all(history))

    # --- for `State`

    async def take(self, position: _Position, user: State) -> _Live:
        """An environment in the state of a position, for one user alone: the idle one there, a fork, or a replay."""
        async with position.lock:
            live, shared = position.live, position.states > 1
            may_have_it = not shared or (not self.can_fork and position.owner in (None, user))
            if live is not None and may_have_it:
                self._idle.pop(position)
                position.live = None
                return live
            if live is not None and self.can_fork:
                self._idle.pop(position)  # while it is forked it cannot be dropped
                try:
                    return await self._fork(live)
                finally:
                    if live.busy:  # the fork hangs, so nobody can use the original any more
                        position.live = None
                        self._start_closing(live)
                    else:
                        self._idle[position] = None
        return await self._replay(position)

    def put(self, position: _Position, live: _Live) -> None:
        """Leave an environment at a position."""
        position.live = live
        self._idle[position] = None

    async def clear(self, position: _Position) -> None:
        """Close the idle environment of a position where no state is any more."""
        if not position.states and position in self._idle:
            self._idle.pop(position)
            live, position.live = position.live, None
            assert live is not None
            await self.close(live)

    def slots(self) -> asyncio.Semaphore:
        """How many environments may be in use at a time: half, so that there is room for what they are forked from."""
        loop = asyncio.get_running_loop()
        if loop not in self._slots:
            self._slots = {loop: asyncio.Semaphore(self._max_states // 2)}
        return self._slots[loop]

    def bind(self, live: _Live, tool: Tool) -> Callable[..., Awaitable[Any]]:
        """A tool's function with its environment."""
        assert tool.function is not None
        return _in_thread(partial(tool.function, live.environment), tool.quick, live)

    async def close(self, live: _Live) -> None:
        """Close an environment when no method of it runs any more; waits for this, but not forever."""
        if self.kind.quick:
            await self._close(live)
        else:
            await asyncio.wait({self._start_closing(live)}, timeout=self._timeout)

    # --- making and closing environments

    async def _replay(self, position: _Position) -> _Live:
        """A new environment, reset, to which the calls of the position were made again."""
        history = position.history
        async with self._new(history) as live:
            await self._make("constructor", live, self._factory)
            assert live.environment is not None
            opening = await self._invoke(
                "reset", _in_thread(live.environment.reset, self.kind.quick, live), history.task
            )
            if opening is not None and not isinstance(opening, str):
                raise ToolUnavailable(f"the environment's reset returned {opening!r:.50}, expected a text or None")
            if history.was_reset and opening != history.opening:
                self._differs("reset", history.opening or "", opening or "")
            history.opening, history.was_reset = opening, True
            task = history.with_opening(history.task)  # which is what the calls were made with
            for made in position.calls:
                tool = self.tools[made.call.name]
                run = self.bind(live, tool)
                outcome = await run_once(tool, run, made.call.args, task, self._abandoned)
                if outcome.fault is Fault.INFRA:
                    raise _same_kind(
                        outcome.error, f"a call could not be made again: {outcome.text.removeprefix('Error: ')}"
                    )
                if (outcome.text, outcome.fault, outcome.images) != (made.text, made.fault, made.images):
                    before, now = (_described(one.text, one.images) for one in (made, outcome))
                    self._differs(f"{made.call.name} {dict(made.call.args)!r:.100}", before, now)
            self._counters.opened += 1
            self._counters.replays += bool(position.calls)
            self._counters.replayed_calls += len(position.calls)
        return live

    async def _fork(self, source: _Live) -> _Live:
        """A fork of an environment, by its own method or by deep copy."""
        original = source.environment
        assert original is not None
        own_fork = overrides(self.kind, "fork")
        async with self._new(source.history) as live:
            await self._make("fork", live, original.fork if own_fork else partial(copy.deepcopy, original), source)
            self._counters.forks += 1
        return live

    @asynccontextmanager
    async def _new(self, history: _History) -> AsyncIterator[_Live]:
        """Room for one more environment, which is closed if the block fails. Its time is counted."""
        started = time.monotonic()
        while self.live >= self._max_states:
            if self._idle:
                position, _ = self._idle.popitem(last=False)
                dropped, position.live = position.live, None
                assert dropped is not None
                self._counters.dropped += 1
                await self.close(dropped)
            elif self._closing:
                await asyncio.wait(self._closing, timeout=self._timeout, return_when=asyncio.FIRST_COMPLETED)
            else:
                raise ToolUnavailable(f"{self.live} environments are in use, which is environment.max_states")
        self.live += 1
        self._counters.live_max = max(self._counters.live_max, self.live)
        live = _Live(history)
        try:
            yield live
        except BaseException:
            await self.close(live)
            raise
        finally:
            self._counters.seconds += time.monotonic() - started

    async def _make(self, name: str, live: _Live, make: Callable[[], Any], source: _Live | None = None) -> None:
        """Put the environment that `make` returns into `live` even if nobody waits for it any more."""

        def store(made: Any) -> None:
            if not isinstance(made, Environment) or (source is not None and made is source.environment):
                raise ToolUnavailable(f"it returned {made!r:.50}, expected a new environment")
            live.environment = made

        async def make_async() -> None:
            store(await make())

        users = [live] if source is None else [live, source]
        run = make_async if iscoroutinefunction(make) else lambda: store(make())
        await self._invoke(name, _in_thread(run, self.kind.quick, *users))

    async def _invoke(self, name: str, run: Callable[..., Awaitable[Any]], *args: Any) -> Any:
        """The value of a method of an environment; ToolUnavailable if it fails or takes too long."""
        call = partial(run, *args)
        if self.kind.quick:
            value, error = await capture(call)
        else:
            value, error = await run_limited(call, self._timeout, f"{self.kind.__name__}.{name}", self._abandoned)
        if error is None:
            return value
        said = str(error) if isinstance(error, ToolUnavailable) else f"{describe_error(error)} ({place_of(error)})"
        raise _same_kind(error, f"the environment's {name} failed: {said}") from error

    def _start_closing(self, live: _Live) -> asyncio.Task[None]:
        task = asyncio.create_task(self._close(live))
        for closing in (self._closing, live.history.closing):
            closing.add(task)
            task.add_done_callback(closing.discard)
        return task

    async def _close_all(self, history: _History) -> None:
        await asyncio.gather(*[state.close() for state in history.open])
        if history.closing:  # a trajectory that was cancelled twice has not waited for it
            await asyncio.wait(history.closing, timeout=self._timeout)

    async def _close(self, live: _Live) -> None:
        try:
            if live.running is not None and live.busy:
                await asyncio.gather(asyncio.wrap_future(live.running), return_exceptions=True)
            if live.environment is not None:
                await self._invoke("close", _in_thread(live.environment.close, self.kind.quick, live))
        except ToolUnavailable as error:
            self.log_once("close", str(error))
        finally:
            self.live -= 1

    def _differs(self, call: str, before: str, now: str) -> None:
        self._counters.differences += 1
        said = f"{call} returned {now!r:.{MAX_SHOWN}} when it was made again, and {before!r:.{MAX_SHOWN}} at first"
        self.log_once("differs", f"{said}; an environment without fork must always do the same")
        raise ReplayDiffers(f"the state cannot be made again: {said}")

    def log_once(self, what: str, message: str) -> None:
        """Log the first message of a kind."""
        if what not in self._logged:
            self._logged.add(what)
            _logger.warning("environment %s: %s", self.kind.__name__, message)


class State:
    """The state of the environment as one trajectory sees it; `done`: the environment has ended the trajectory."""

    def __init__(self, pool: StatePool, position: _Position, done: bool = False, is_root: bool = False) -> None:
        self._pool, self._position, self.done, self._is_root = pool, position, done, is_root
        self._live: _Live | None = None  # while a call is made
        self._closed = False
        position.states += 1
        position.history.open.add(self)

    def with_opening(self, task: Task) -> Task:
        """The task, with the text that `reset` returned appended to its question."""
        return self._position.history.with_opening(task)

    def branch(self) -> State:
        """Another state at the same point, for another trajectory."""
        return State(self._pool, self._position, self.done)

    async def prepare(self) -> None:
        """Get an environment of its own now, and not with the first call; raises ToolUnavailable."""
        for attempt in range(1, ATTEMPTS + 1):
            try:
                await self._take()
                break
            except ToolUnavailable as error:
                if not isinstance(error, ReplayDiffers):  # this was logged
                    self._pool.log_once("prepare", str(error))
                if attempt == ATTEMPTS or not error.retry:
                    raise
                await asyncio.sleep(pause_before_retry(attempt, random.random()))
        await self._put(self._position.calls)

    async def try_prepare(self) -> bool:
        """`prepare`, and whether that was possible; the reason why not is logged."""
        try:
            await self.prepare()
            return True
        except ToolUnavailable:
            return False

    async def acquire(self, tool: Tool) -> Callable[..., Awaitable[Any]]:
        """The tool's function, bound to an environment that nobody else uses; raises ToolUnavailable."""
        return self._pool.bind(await self._take(), tool)

    async def release(self, call: ToolCall, outcome: Outcome | None) -> None:
        """Record the outcome of a call. After a failure, or if it was cancelled, the environment is closed."""
        calls = self._position.calls
        if outcome is None or outcome.fault is Fault.INFRA:
            await self._put(None)
        elif outcome.fault is Fault.TIMEOUT:  # the call left the state as it was
            await self._put(calls)
        else:
            await self._put((*calls, RecordedCall(call, outcome.text, outcome.fault, outcome.images)))

    @asynccontextmanager
    async def final(self) -> AsyncIterator[Environment]:
        """The environment itself, for a reward; nobody else uses it meanwhile. Raises ToolUnavailable.

        If the block fails or is cancelled, the environment is closed.
        """
        live, calls = await self._take(), None
        assert live.environment is not None
        try:
            yield live.environment
            calls = self._position.calls
        finally:
            await self._put(calls)

    async def decisive(self) -> bool | None:
        """Whether the environment says that the next choice is decisive; None: not known. Raises ToolUnavailable."""
        async with self.final() as environment:
            try:
                return environment.decisive
            except Exception as error:
                said = f"{describe_error(error)} ({place_of(error)})"
                raise ToolUnavailable(f"the environment's decisive failed: {said}") from error

    def hold(self, running: Future[Any]) -> None:
        """Close the environment that `final` gave only when `running`, which uses it in a thread, is done."""
        assert self._live is not None
        self._live.running = running

    async def close(self) -> None:
        """Give up the state; an environment that nobody needs any more is closed. May be called twice."""
        if self._closed:
            return
        self._closed = True
        self._position.history.open.discard(self)
        if self._position.owner is self:
            self._position.owner = None
        if self._live is None:
            self._position.states -= 1
            await self._pool.clear(self._position)

    async def _take(self) -> _Live:
        if self._closed:
            raise RuntimeError("the state is closed: its trajectory has ended")
        slots = self._pool.slots()
        await slots.acquire()
        try:
            self._live = await self._pool.take(self._position, self)
        except BaseException:
            slots.release()
            await self._pool.clear(self._position)  # if this state was closed meanwhile
            raise
        if not self._closed:
            self._position.states -= 1
        try:
            await self._pool.clear(self._position)  # others may have left while the environment was forked
        except BaseException:
            await self._put(None)
            raise
        return self._live

    async def _put(self, calls: tuple[RecordedCall, ...] | None) -> None:
        """Go to the position after `calls` with the environment, or without it back to where it was taken."""
        live, self._live = self._live, None
        assert live is not None and live.environment is not None
        self._pool.slots().release()
        if self._closed:
            calls = None
        elif calls is None:
            self._position.states += 1
        else:
            self.done = live.environment.done
            owner = None if self._is_root else self
            self._position = _Position(self._position.history, calls, states=1, owner=owner)
            self._pool.put(self._position, live)
        if calls is None:
            await self._pool.close(live)


class EnvironmentTools(Toolset):
    """A toolset with the tools of an environment, and the pool of its states."""

    def __init__(self, pool: StatePool, tools: Iterable[Tool] = (), cache: ToolCache | None = None) -> None:
        super().__init__([*tools, *pool.tools.values()], cache)
        self.pool = pool


def pool_of(tools: Mapping[str, Tool]) -> StatePool | None:
    """The pool of states that goes with these tools, or None if no environment is among them."""
    return tools.pool if isinstance(tools, EnvironmentTools) else None


@asynccontextmanager
async def open_state(tools: Mapping[str, Tool], task: Task) -> AsyncIterator[State | None]:
    """The state at the prompt of a task, whose environment is yet to be made; None without an environment."""
    pool = pool_of(tools)
    if pool is None:
        yield None
    else:
        async with pool.open(task) as state:
            yield state


def _in_thread(function: Callable[..., Any], quick: bool, *users: _Live) -> Callable[..., Awaitable[Any]]:
    """A method as a coroutine function, in a thread unless `quick` or async. Until it ends, all `users` are busy."""

    async def run_async(*args: Any, **kwargs: Any) -> Any:
        future: Future[None] = Future()
        future.set_running_or_notify_cancel()
        for live in users:
            live.running = future
        try:
            return await function(*args, **kwargs)
        finally:
            future.set_result(None)

    async def run(*args: Any, **kwargs: Any) -> Any:
        work = partial(function, *args, **kwargs)
        if quick:
            return work()
        future = run_in_thread(work, "arpo-environment")
        for live in users:
            live.running = future
        return await asyncio.wrap_future(future)

    return run_async if iscoroutinefunction(function) else run


def _same_kind(error: BaseException | None, message: str) -> ToolUnavailable:
    """An error with another message, which is retried only if `error` is: not after a timeout."""
    return (ToolUnresponsive if isinstance(error, ToolUnresponsive) else ToolUnavailable)(message)


def _described(text: str, images: tuple[Image, ...]) -> str:
    """A result in words: its text, and its images by the beginnings of their hashes."""
    return text + "".join(f" [image {image.sha256[:8]}]" for image in images)
