"""Calls of tools: faults, retries, timeouts, cancellation, slots, shared calls and counters."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
import json
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import clock
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image as pillow

import arpo.tools.executor as calling
from arpo.data.images import MAX_PIXELS, encode_image
from arpo.errors import ArpoError
from arpo.tools.base import Tool, ToolError, ToolTimeout, ToolUnavailable, tool
from arpo.tools.cache import ToolCache
from arpo.tools.executor import MAX_DURATIONS, ToolCounters, Toolset, ToolStats, call_tool, pause_before_retry
from arpo.types import Fault, ToolCall, ToolResult


def call(tool_: Tool, /, **args: Any) -> ToolResult:
    return asyncio.run(call_tool({tool_.spec.name: tool_}, ToolCall(tool_.spec.name, args)))


def timed(tool_: Tool) -> ToolResult:
    """A call of an async tool by a clock that is exact."""
    return clock.run(call_tool({tool_.spec.name: tool_}, ToolCall(tool_.spec.name, {})))


@tool
async def forecast(city: str, days: int = 1) -> str:
    """The weather in a city."""
    return f"{city} {days}"


@tool(quick=True)
def rain(city: str) -> str:
    """Whether it rains in a city."""
    return "no"


def make(run: Any, **limits: Any) -> Tool:
    async def probe() -> Any:
        """Probe."""
        return await run()

    return tool(**limits)(probe)


def failing(*errors: BaseException | None) -> tuple[Any, list[float]]:
    """A coroutine function that raises these one after another (None: succeeds), and when it was called."""
    times: list[float] = []

    async def run() -> str:
        times.append(time.perf_counter())
        error = errors[min(len(times), len(errors)) - 1]
        if error is not None:
            raise error
        return "fine"

    return run, times


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """No pauses before another attempt."""
    monkeypatch.setattr(calling, "FIRST_PAUSE_SECONDS", 0.0)


# One call.


def test_a_good_call() -> None:
    result = call(forecast, city="Kelso", days=3)
    assert (result.text, result.fault, result.attempts, result.cached) == ("Kelso 3", None, 1, False)
    assert result.seconds > 0
    assert timed(make(lambda: asyncio.sleep(0.25, "done"))).seconds == pytest.approx(0.25)


def test_wrong_arguments_are_explained_and_nothing_is_run() -> None:
    result = call(forecast, city=3)
    assert result.text == (
        "Error: forecast: argument city must be string, not integer; it takes city (string), days (integer)."
    )
    assert (result.fault, result.attempts) == (Fault.MODEL, 0)


def test_malformed_and_unknown_calls_are_the_models_fault() -> None:
    tools = {"forecast": forecast, "rain": rain}
    malformed = asyncio.run(call_tool(tools, ToolCall("forecast", {"city": "a"}, error="Error: no opening tag")))
    assert (malformed.text, malformed.fault, malformed.attempts) == ("Error: no opening tag", Fault.MODEL, 0)
    assert len(asyncio.run(call_tool(tools, ToolCall("", {}, error="x" * 9000))).text) == 500
    unknown = asyncio.run(call_tool(tools, ToolCall("forcast", {})))
    assert unknown.text == "Error: there is no tool 'forcast'. Did you mean forecast? Available: forecast, rain."
    assert (unknown.fault, unknown.attempts) == (Fault.MODEL, 0)
    assert "Did you mean" not in asyncio.run(call_tool(tools, ToolCall("zzz", {}))).text


def test_only_infrastructure_is_retried_with_growing_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calling._jitter, "random", lambda: 0.5)
    run, times = failing(ToolUnavailable("down"), ConnectionResetError(), None)
    result = timed(make(run))
    assert (result.text, result.fault, result.attempts, len(times)) == ("fine", None, 3, 3)
    assert [times[1] - times[0], times[2] - times[1]] == pytest.approx([0.05, 0.1])


@given(st.integers(1, 10_000), st.floats(0, 1, exclude_max=True))
@settings(deadline=None)
def test_pauses_grow_up_to_a_bound(attempts: int, uniform: float) -> None:
    bound = 0.1
    for _ in range(attempts - 1):
        bound = min(5.0, 2 * bound)
    assert pause_before_retry(attempts, uniform) == pytest.approx(uniform * bound)


class OwnBase(BaseException):
    """Not even an Exception."""


@pytest.mark.parametrize(
    "error",
    [
        ToolUnavailable("down"), OSError("down"), TimeoutError("down"), RuntimeError("down"),
        ValueError("down"), TypeError("down"), OverflowError("down"), IndexError("down"), UnicodeError("down"),
        SystemExit("down"), KeyboardInterrupt("down"), GeneratorExit("down"), asyncio.CancelledError("down"),
        OwnBase("down"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("quick", [False, True])
def test_a_broken_tool_is_retried_and_never_the_models_fault(error: BaseException, quick: bool, at_once: None) -> None:
    run, times = failing(error)
    result = call(make(run, retries=3, quick=quick))
    assert (result.fault, result.attempts, len(times)) == (Fault.INFRA, 4, 4)
    named = "" if isinstance(error, ToolUnavailable) else f"{type(error).__name__}: "
    assert result.text == f"Error: probe is unavailable: {named}down"


class Unprintable(ToolError):
    """Even its text fails."""

    def __str__(self) -> str:
        raise SystemExit


class NoText(RuntimeError):
    """Its text is none."""

    __str__ = Unprintable.__str__


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ToolError("no such city"), "Error: no such city"),
        (ToolError("x" * 9000), "Error: " + "x" * 9000),  # a tool may have much to say of what went wrong
        (ToolError("x" * 30_000), "Error: " + "x" * 19_993 + "\n[output cut: the first 20000 of 30007 characters]"),
        (Unprintable(), "Error: "),
    ],
)
def test_what_the_tool_calls_a_mistake_is_the_models_fault_and_final(error: Exception, text: str) -> None:
    run, times = failing(error)
    result = call(make(run))
    assert (result.text, result.fault, result.attempts, len(times)) == (text, Fault.MODEL, 1, 1)


def test_where_a_tool_failed_is_logged_once(caplog: pytest.LogCaptureFixture, at_once: None) -> None:
    def parse(text: str) -> str:
        """Parse it."""
        return json.loads(text)

    line = parse.__code__.co_firstlineno + 2
    toolset = Toolset([tool(parse)])
    for _ in range(2):
        assert asyncio.run(toolset.call(ToolCall("parse", {"text": "<html>"}))).fault is Fault.INFRA
    [message] = caplog.messages
    assert message.startswith("tool parse failed: JSONDecodeError: Expecting value")
    assert f"(test_executor.py, line {line}); raise ToolError if the model's arguments are to blame" in message


def test_a_time_limit_of_the_tool_itself_is_a_timeout_with_its_message() -> None:
    run, times = failing(ToolTimeout("stopped after 3 seconds; printed: x"))
    result = call(make(run, max_chars=20))
    assert (result.fault, result.attempts, len(times)) == (Fault.TIMEOUT, 1, 1)
    assert result.text == "Error: stopped after\n[output cut: the first 20 of 42 characters]"


def test_the_text_of_a_broken_tool_is_bounded() -> None:
    result = call(make(failing(KeyError("x" * 9000))[0], retries=0))
    assert result.text == ("Error: probe is unavailable: KeyError: '" + "x" * 9000)[:500]
    assert call(make(failing(NoText())[0], retries=0)).text == "Error: probe is unavailable: NoText"
    surrogate = call(make(failing(OSError("\ud800\0"))[0], retries=0))
    assert surrogate.text == "Error: probe is unavailable: OSError: ?"


def test_ctrl_c_is_not_the_tools_where_no_event_loop_handles_it() -> None:
    async def main() -> None:
        handler = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            await call_tool({"probe": make(failing(KeyboardInterrupt())[0], quick=True)}, ToolCall("probe", {}))
        finally:
            signal.signal(signal.SIGINT, handler)

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(main())


def test_timeout_is_not_retried() -> None:
    result = timed(make(lambda: asyncio.sleep(30), timeout=0.05))
    assert (result.text, result.fault, result.attempts) == (
        "Error: probe took longer than 0.05 seconds.",
        Fault.INFRA,
        1,
    )
    assert result.seconds == pytest.approx(0.05)


def test_a_timeout_stays_a_timeout_whatever_the_tool_does() -> None:
    async def disguised() -> str:
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            raise ValueError("stopped") from None
        return ""

    assert timed(make(disguised, timeout=0.02)).fault is Fault.INFRA


def test_a_cancelled_tool_has_time_to_clean_up() -> None:
    cleaned: list[int] = []

    async def tidy() -> str:
        try:
            await asyncio.sleep(30)
        finally:
            await asyncio.sleep(0.02)
            cleaned.append(1)
        return ""

    async def main() -> None:
        tools = {"probe": make(tidy, timeout=0.03)}
        await call_tool(tools, ToolCall("probe", {}))
        assert len(cleaned) == 1
        task = asyncio.create_task(call_tool(tools, ToolCall("probe", {})))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(cleaned) == 2

    clock.run(main())


@pytest.mark.slow
def test_a_tool_that_ignores_cancellation_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(calling, "CLEANUP_SECONDS", 0.05)

    async def main() -> tuple[ToolResult, float]:
        release, started = asyncio.Event(), time.monotonic()

        async def stubborn() -> str:
            while not release.is_set():
                with contextlib.suppress(asyncio.CancelledError):
                    await release.wait()
            raise OSError("late")

        toolset = Toolset([make(stubborn, timeout=0.05, concurrency=1)])
        results = [await call_tool(toolset, ToolCall("probe", {})) for _ in range(2)]  # its slot is free again
        task = asyncio.create_task(call_tool(toolset, ToolCall("probe", {})))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        release.set()
        return results[1], time.monotonic() - started

    result, seconds = clock.run(main())
    assert result.fault is Fault.INFRA
    assert seconds == pytest.approx(2 * (0.05 + 0.05) + 0.01 + 0.05)
    gc.collect()
    assert caplog.messages == ["tool probe failed: took longer than 0.05 seconds"]  # and no word of its late error


def test_output_is_sanitized() -> None:
    def giving(value: Any, **limits: Any) -> Tool:
        async def give() -> Any:
            return value

        return make(give, **limits)

    assert call(giving("a\0b\ud800c")).text == "ab?c"
    assert call(giving(42)).text == "42"
    cut = call(giving("x" * 11, max_chars=10))
    assert (cut.text, cut.fault) == ("x" * 10 + "\n[output cut: the first 10 of 11 characters]", None)
    assert call(giving("x" * 10, max_chars=10)).text == "x" * 10
    nothing = call(giving(None, retries=0))
    assert (nothing.fault, "returned nothing" in nothing.text) == (Fault.INFRA, True)


class Nasty(str):
    """A text that cannot be used."""

    def __str__(self) -> str:
        return self

    def __len__(self) -> int:
        raise SystemExit

    encode = __format__ = __getitem__ = __len__  # type: ignore[assignment]


@pytest.mark.parametrize("quick", [False, True])
def test_output_that_is_no_text_is_contained(quick: bool) -> None:
    def giving(value: Any) -> ToolResult:
        return call(make(lambda: asyncio.sleep(0, value), quick=quick, retries=0))

    assert (giving(Nasty("a\0b")).text, giving(Nasty("")).fault) == ("ab", None)
    assert giving(Unprintable()).text == "Error: probe is unavailable: SystemExit"
    assert giving(10**5000).fault is Fault.INFRA  # too many digits to print
    assert call(make(failing(ToolError(Nasty("a")))[0], quick=quick)).text == "Error: a"


# Cancellation.


def raising() -> str:
    raise ToolUnavailable("stopped")


@pytest.mark.parametrize("after", [None, raising, lambda: "late"])
def test_a_cancelled_caller_is_cancelled(after: Callable[[], str] | None) -> None:
    """Also if the tool makes something else of it."""

    async def main() -> tuple[list[str], ToolStats]:
        seen: list[str] = []

        async def hang() -> str:
            seen.append("started")
            try:
                await asyncio.sleep(30)
            except asyncio.CancelledError:
                seen.append("stopped")
                if after is None:
                    raise
                return after()
            return ""

        toolset = Toolset([make(hang)])
        task = asyncio.create_task(call_tool(toolset, ToolCall("probe", {})))
        await asyncio.sleep(0.01)
        assert toolset.stats()["probe"].in_flight == 1
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return seen, replace(toolset.stats()["probe"], wait_seconds=0.0)

    assert clock.run(main()) == (["started", "stopped"], ToolStats(calls=1, cancelled=1))


def test_a_cancelled_caller_of_a_quick_tool_is_cancelled() -> None:
    async def main() -> ToolStats:
        toolset, started = Toolset([make(lambda: wait(), quick=True)]), asyncio.Event()

        async def wait() -> None:
            started.set()
            await asyncio.Event().wait()

        task = asyncio.create_task(call_tool(toolset, ToolCall("probe", {})))
        await started.wait()
        task.cancel()
        await asyncio.wait({task}, timeout=60)
        assert task.cancelled()
        return replace(toolset.stats()["probe"], wait_seconds=0.0)

    assert asyncio.run(main()) == ToolStats(calls=1, cancelled=1)


def test_a_task_that_was_cancelled_before_may_still_call() -> None:
    async def main() -> ToolResult:
        with contextlib.suppress(asyncio.CancelledError):
            asyncio.current_task().cancel()  # type: ignore[union-attr]
            await asyncio.sleep(1)
        return await call_tool({"probe": make(failing(ToolError("no"))[0])}, ToolCall("probe", {}))

    assert asyncio.run(main()).text == "Error: no"


def test_a_cancellation_inside_the_tool_is_not_the_callers(at_once: None) -> None:
    run, _ = failing(asyncio.CancelledError())
    result = call(make(run, retries=1))
    assert (result.fault, result.attempts) == (Fault.INFRA, 2)


# Threads and the event loop.


def named(name: str) -> int:
    """How many threads of this name there are."""
    return sum(thread.name == name for thread in threading.enumerate())


def test_a_plain_function_does_not_block_the_loop() -> None:
    release = threading.Event()

    @tool
    def slow() -> str:
        """Wait."""
        return str(release.wait(60))

    async def main() -> str:
        task = asyncio.create_task(call_tool({"slow": slow}, ToolCall("slow", {})))
        await asyncio.sleep(0.02)  # only possible while the function waits elsewhere
        assert not task.done()
        release.set()
        return (await task).text

    assert asyncio.run(main()) == "True"


def test_functions_that_hang_hold_up_neither_others_nor_the_end() -> None:
    release = threading.Event()

    @tool(timeout=0.1)
    def hang() -> str:
        """Wait."""
        return str(release.wait(600))

    @tool(timeout=60)
    def fine() -> str:
        """Answer."""
        return "fine"

    async def main() -> tuple[list[ToolResult], ToolResult]:
        toolset = Toolset([hang, fine])
        hung = await asyncio.gather(*(call_tool(toolset, ToolCall("hang", {})) for _ in range(40)))
        return hung, await call_tool(toolset, ToolCall("fine", {}))

    try:
        hung, good = asyncio.run(main())
        assert {result.fault for result in hung} == {Fault.INFRA}
        assert (good.text, good.fault) == ("fine", None)
        assert named("arpo-tool-hang") == 40  # nobody has waited for them
    finally:
        release.set()


def test_a_thread_has_the_callers_context_and_never_keeps_the_process_alive() -> None:
    who: contextvars.ContextVar[str] = contextvars.ContextVar("who")

    @tool
    def where() -> str:
        """Where."""
        return f"{who.get()} {threading.current_thread().daemon}"

    async def main() -> str:
        who.set("me")
        return (await call_tool({"where": where}, ToolCall("where", {}))).text

    assert asyncio.run(main()) == "me True"


def test_a_thread_that_ends_late_logs_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whether the event loop is still there or not."""
    uncaught: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", uncaught.append)
    releases = [threading.Event(), threading.Event()]

    @tool(timeout=0.02)
    def late(number: int) -> str:
        """Come late."""
        return str(releases[number].wait(60))

    async def main() -> None:
        for number in (0, 1):
            assert (await call_tool({"late": late}, ToolCall("late", {"number": number}))).fault is Fault.INFRA
        releases[0].set()
        while named("arpo-tool-late") > 1:
            await asyncio.sleep(0.001)

    asyncio.run(main())
    releases[1].set()
    for thread in threading.enumerate():
        if thread.name == "arpo-tool-late":
            thread.join()
    assert (uncaught, set(caplog.messages)) == ([], {"tool late failed: took longer than 0.02 seconds"})


@pytest.mark.parametrize("error", [StopIteration(), SystemExit(3), KeyboardInterrupt()])
def test_stop_iteration_is_an_error_and_not_a_hang(error: BaseException) -> None:
    @tool(timeout=60, retries=0)
    def stops() -> str:
        """Stop."""
        raise error

    result = call(stops)
    name = type(error).__name__
    assert (result.text, result.fault) == (f"Error: stops is unavailable: RuntimeError: {name}", Fault.INFRA)


@pytest.mark.parametrize("mode", ["none", "on", "record", "replay"])
def test_a_quick_tool_does_not_yield_to_the_event_loop(mode: Any, tmp_path: Path) -> None:
    """The order of events, and so a run, must not depend on how long things take."""

    @tool(quick=True, cacheable=True, concurrency=1)
    def where(x: int) -> str:
        """Where."""
        return threading.current_thread().name

    async def main(toolset: Toolset) -> None:
        others: list[int] = []
        asyncio.get_running_loop().call_soon(others.append, 1)
        results = [await call_tool(toolset, ToolCall("where", {"x": x})) for x in (1, 2, 1)]
        assert others == []
        assert {result.text for result in results} == {threading.current_thread().name}

    with Toolset([where], None if mode == "none" else ToolCache(tmp_path / "c", "record")) as toolset:
        asyncio.run(main(toolset))
    if mode in ("on", "replay"):
        with Toolset([where], ToolCache(tmp_path / "c", mode)) as toolset:
            asyncio.run(main(toolset))
            assert toolset.stats()["where"].cached == 3


# The toolset.


def test_a_toolset_is_a_mapping_and_closes_everything_once(caplog: pytest.LogCaptureFixture) -> None:
    closed: list[str] = []

    def closing(name: str, error: BaseException | None = None) -> Callable[[], None]:
        def close() -> None:
            closed.append(name)
            if error is not None:
                raise error

        return close

    def named(name: str, close: Callable[[], None] | None) -> Tool:
        async def run() -> str:
            """Run."""
            return ""

        run.__name__ = name
        return tool(close=close)(run)

    shared = closing("shared")
    tools = [
        named("a", closing("a", SystemExit(1))),
        named("b", closing("b", OSError("stuck"))),
        named("c", None),
        *(named(name, shared) for name in "de"),
    ]
    with Toolset(tools) as toolset:
        assert (list(toolset), len(toolset), toolset["c"], "z" in toolset) == (
            ["a", "b", "c", "d", "e"],
            5,
            tools[2],
            False,
        )
    toolset.close()
    assert sorted(closed) == ["a", "b", "shared"]
    assert caplog.messages == ["tool a: its close failed: SystemExit: 1", "tool b: its close failed: OSError: stuck"]
    with pytest.raises(ArpoError, match="two tools are named 'a'"):
        Toolset([tools[0], named("a", None)])


@pytest.mark.parametrize("limits", [{"timeout": 0}, {"retries": -1}, {"max_chars": 0}, {"concurrency": -1}])
def test_limits_out_of_range_are_refused(limits: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="tool probe: a limit"):
        make(None, **limits)


# Slots.


def test_waiting_for_a_slot_does_not_count_against_the_timeout() -> None:
    toolset = Toolset([make(lambda: asyncio.sleep(0.05, "done"), timeout=0.12, concurrency=1)])

    async def main() -> list[ToolResult]:
        return await asyncio.gather(*(call_tool(toolset, ToolCall("probe", {})) for _ in range(5)))

    for rounds in (1, 2):  # a second event loop, and waiting in it too
        results = clock.run(main())
        assert [(result.text, result.fault) for result in results] == [("done", None)] * 5
        assert [result.seconds for result in results] == pytest.approx([0.05] * 5)
        stats = toolset.stats()["probe"]
        assert (stats.calls, stats.in_flight, stats.timeout) == (5 * rounds, 0, 0)
        assert stats.wait_seconds == pytest.approx(rounds * 0.05 * (1 + 2 + 3 + 4))
    assert (stats.p50_seconds, stats.p95_seconds) == pytest.approx((0.05, 0.05))


def test_slots_come_back_from_timeouts_cancellations_and_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calling._jitter, "random", lambda: 0.999)
    behaviours: list[Callable[[], Any]] = []

    async def act() -> str:
        return str(await behaviours.pop(0)())

    toolset = Toolset([make(act, timeout=0.03, concurrency=1)])

    def start() -> asyncio.Task[ToolResult]:
        return asyncio.create_task(call_tool(toolset, ToolCall("probe", {})))

    async def main() -> None:
        behaviours[:] = [lambda: asyncio.sleep(9), lambda: asyncio.sleep(0, "second")]
        late, second = start(), start()
        assert (await second).text == "second"
        assert (await late).fault is Fault.INFRA

        behaviours[:] = [lambda: asyncio.sleep(9), lambda: asyncio.sleep(0, "third")]
        running, waiting, third = start(), start(), start()
        await asyncio.sleep(0.01)
        waiting.cancel()
        running.cancel()
        assert (await third).text == "third"

        behaviours[:] = [failing(OSError())[0], lambda: asyncio.sleep(0, "between"), lambda: asyncio.sleep(0, "again")]
        pausing, between = start(), start()
        assert (await between).text == "between"
        assert not pausing.done()
        assert ((await pausing).text, pausing.result().attempts) == ("again", 2)

    clock.run(main())
    stats = toolset.stats()["probe"]
    assert (stats.calls, stats.timeout, stats.cancelled, stats.infra, stats.retries) == (7, 0, 2, 1, 1)


# Identical calls at the same time.


def counting(run: Callable[[int], Any], **limits: Any) -> tuple[Tool, list[str]]:
    calls: list[str] = []

    @tool(cacheable=True, **limits)
    async def look(word: str) -> str:
        """Look up."""
        calls.append(word)
        return str(await run(len(calls)))

    return look, calls


def looks(toolset: Toolset, *words: str) -> list[asyncio.Task[ToolResult]]:
    return [asyncio.create_task(call_tool(toolset, ToolCall("look", {"word": word}))) for word in words]


def test_identical_concurrent_calls_are_made_once(tmp_path: Path) -> None:
    look, calls = counting(lambda n: asyncio.sleep(0.03, f"answer {n}"))

    async def main(toolset: Toolset) -> list[ToolResult]:
        return await asyncio.gather(*looks(toolset, "a", "a", "b", "a"))

    with Toolset([look], ToolCache(tmp_path / "c", "on")) as toolset:
        first = clock.run(main(toolset))
        assert [r.text for r in first] == ["answer 1", "answer 1", "answer 2", "answer 1"]
        assert [(r.cached, r.attempts) for r in first] == [(False, 1), (True, 1), (False, 1), (True, 1)]
        assert [r.seconds for r in first] == pytest.approx([0.03, 0.0, 0.03, 0.0])
        assert [r.cached for r in clock.run(main(toolset))] == [True] * 4
        stats = toolset.stats()["look"]
        assert (calls, stats.calls, stats.cached, stats.retries) == (["a", "b"], 8, 6, 0)
        assert stats.wait_seconds == pytest.approx(2 * 0.03)
    clock.run(main(Toolset([look])))  # without a cache every call is made
    assert len(calls) == 2 + 4


@pytest.mark.parametrize(
    ("seconds", "error", "fault"),
    [(0.02, OSError("down"), Fault.INFRA), (9, OSError("late"), Fault.INFRA), (0, ToolTimeout("long"), Fault.TIMEOUT)],
)
def test_a_failure_is_shared_but_not_stored(seconds: float, error: Exception, fault: Fault, tmp_path: Path) -> None:
    async def fail(n: int) -> str:
        await asyncio.sleep(seconds)
        raise error

    look, calls = counting(fail, retries=0, timeout=0.05)

    async def main() -> list[ToolResult]:
        return await asyncio.gather(*looks(toolset, "a", "a"))

    with Toolset([look], ToolCache(tmp_path / "c", "on")) as toolset:
        for rounds in (1, 2):
            results = clock.run(main())
            assert [(r.fault, r.cached) for r in results] == [(fault, False), (fault, True)]
            assert len(calls) == rounds


def test_the_models_own_mistake_is_stored(tmp_path: Path) -> None:
    async def fail(n: int) -> str:
        raise ToolError(f"no {n}")

    look, calls = counting(fail)

    async def main() -> list[ToolResult]:
        return [await task for task in looks(toolset, "a", "a")]

    with Toolset([look], ToolCache(tmp_path / "c", "on")) as toolset:
        results = asyncio.run(main())
    assert [(r.text, r.fault, r.cached) for r in results] == [
        ("Error: no 1", Fault.MODEL, False),
        ("Error: no 1", Fault.MODEL, True),
    ]
    assert len(calls) == 1


def test_a_cancelled_leader_leaves_the_call_to_those_who_wait(tmp_path: Path) -> None:
    look, calls = counting(lambda n: asyncio.sleep(0.03, f"answer {n}"))

    async def main() -> None:
        leader, *others = looks(toolset, "a", "a", "a", "a")
        await asyncio.sleep(0.01)
        leader.cancel()
        others[2].cancel()
        results = await asyncio.gather(*others[:2])
        assert [(r.text, r.cached) for r in results] == [("answer 2", False), ("answer 2", True)]
        assert leader.cancelled() and others[2].cancelled()

        leader, other = looks(toolset, "b", "b")
        await asyncio.sleep(0.01)
        other.cancel()  # must not reach the leader
        assert (await leader).text == "answer 3"

    with Toolset([look], ToolCache(tmp_path / "c", "on")) as toolset:
        clock.run(main())
        stats = toolset.stats()["look"]
    assert (calls, stats.calls, stats.cancelled, stats.cached) == (["a", "a", "b"], 6, 3, 1)


# Counting.


def test_percentiles_are_of_the_last_runs() -> None:
    assert ToolCounters().snapshot() == ToolStats()
    counters = ToolCounters()
    counters.durations.extend(range(10_000))
    assert len(counters.durations) == MAX_DURATIONS
    stats = counters.snapshot()
    last = sorted(range(10_000 - MAX_DURATIONS, 10_000))
    assert sum(x <= stats.p50_seconds for x in last) / len(last) == pytest.approx(0.5, abs=0.001)
    assert sum(x <= stats.p95_seconds for x in last) / len(last) == pytest.approx(0.95, abs=0.001)


def test_refused_calls_are_counted_under_their_tool_if_there_is_one() -> None:
    toolset = Toolset([forecast, rain])

    async def main() -> None:
        await call_tool(toolset, ToolCall("forecast", {}))
        await call_tool(toolset, ToolCall("forecast", {"city": "a"}, error="malformed"))
        await call_tool(toolset, ToolCall("zzz", {}))
        await call_tool(toolset, ToolCall("", {}, error="malformed"))

    asyncio.run(main())
    assert toolset.stats() == {
        "forecast": ToolStats(calls=2, model=2),
        "rain": ToolStats(),
        "": ToolStats(calls=2, model=2),
    }


# Everything at once.

CALLS, WORKERS, SLOTS = 2000, 128, {"service": 8, "process": 6, "plain": 3, "lookup": 4}
PAUSES = {"slow": 0.02, "hang": 60.0}
active, most, counting_lock = Counter[str](), Counter[str](), threading.Lock()


@contextlib.contextmanager
def inside(name: str) -> Any:
    with counting_lock:
        active[name] += 1
        most[name] = max(most[name], active[name])
    try:
        yield
    finally:
        with counting_lock:
            active[name] -= 1


def outcome(behaviour: str) -> str:
    """What goes wrong now and then."""
    errors = {"down": ToolUnavailable("down"), "broken": RuntimeError("broken"), "wrong": ToolError("wrong")}
    if behaviour in errors:
        raise errors[behaviour]
    return "x" * 100_000 if behaviour == "huge" else "fine"


@tool(timeout=0.05, retries=1, concurrency=SLOTS["service"], max_chars=1000)
async def service(behaviour: str, number: int) -> str:
    """A remote service."""
    with inside("service"):
        await asyncio.sleep(PAUSES.get(behaviour, 0.0))
        return outcome(behaviour)


@tool(timeout=0.05, retries=1, concurrency=SLOTS["lookup"], cacheable=True, max_chars=1000)
async def lookup(behaviour: str, number: int) -> str:
    """Few distinct calls."""
    with inside("lookup"):
        await asyncio.sleep(PAUSES.get(behaviour, 0.0))
        return outcome(behaviour)


SCRIPTS = {"hang": "exec sleep 60", "down": "kill -9 $$", "broken": "exit 3", "slow": "sleep 0.02; echo fine"}


@tool(timeout=0.25, retries=1, concurrency=SLOTS["process"], max_chars=1000)
async def process(behaviour: str, number: int) -> str:
    """A worker process of its own."""
    with inside("process"):
        worker = await asyncio.create_subprocess_exec(
            "/bin/sh", "-c", f"exec 2>&-; {SCRIPTS.get(behaviour, 'echo fine')}", stdout=asyncio.subprocess.PIPE
        )
        try:
            output, _ = await worker.communicate()
        finally:
            if worker.returncode is None:
                worker.kill()
                await worker.wait()
        if worker.returncode:
            raise ToolUnavailable(f"the worker died with {worker.returncode}")
        return output.decode()


@tool(timeout=5, retries=1, concurrency=SLOTS["plain"], max_chars=1000)
def plain(behaviour: str, number: int) -> str:
    """A function in a thread."""
    with inside("plain"):
        time.sleep(PAUSES.get(behaviour, 0.001) if behaviour != "hang" else 0.05)
        return outcome(behaviour)


@tool(quick=True, retries=0, max_chars=1000)
def quick(behaviour: str, number: int) -> str:
    """On the loop."""
    return outcome(behaviour)


def children() -> set[str]:
    lists = Path(f"/proc/{os.getpid()}/task").glob("*/children")
    return {child for file in lists for child in file.read_text().split()}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_every_call_is_accounted_for_whatever_goes_wrong(
    tmp_path: Path, at_once: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calling, "CLEANUP_SECONDS", 60.0)  # a busy machine may need that to end a process
    rng = random.Random(0)
    names = ["service", "process", "plain", "quick", "lookup", "nothing"]
    faults = ["hang", "down", "broken", "wrong", "huge", "slow"]
    calls = []
    for number in range(CALLS):
        name = rng.choices(names, [6, 1, 3, 6, 4, 1])[0]
        behaviour = rng.choice(faults) if rng.random() < 0.3 else "fine"
        number = rng.randrange(20) if name == "lookup" else number
        args = {"behaviour": behaviour, "number": number} if rng.random() > 0.02 else {"behavior": behaviour}
        calls.append(ToolCall(name, args, "malformed" if rng.random() < 0.01 else None))
    todo, results = iter(calls), []
    before = children(), threading.active_count()

    async def worker(toolset: Toolset) -> None:
        for made in todo:
            results.append((made, await call_tool(toolset, made)))

    async def main(toolset: Toolset) -> int:
        await asyncio.gather(*(worker(toolset) for _ in range(WORKERS)))
        return len(asyncio.all_tasks())

    with Toolset([service, process, plain, quick, lookup], ToolCache(tmp_path / "c", "on")) as toolset:
        assert asyncio.run(main(toolset)) == 1
        stats = toolset.stats()
        assert toolset.cache is not None and toolset.cache.errors == 0

    assert len(results) == CALLS
    assert all(len(result.text) <= 1100 for _, result in results)
    assert sum(entry.calls for entry in stats.values()) == CALLS
    for name, entry in stats.items():
        mine = [result for made, result in results if (made.name if made.name in toolset else "") == name]
        by_fault = Counter(result.fault for result in mine)
        assert (entry.calls, entry.model, entry.timeout, entry.infra, entry.in_flight, entry.cancelled) == (
            len(mine), by_fault[Fault.MODEL], by_fault[Fault.TIMEOUT], by_fault[Fault.INFRA], 0, 0
        )  # fmt: skip
        assert entry.cached == sum(result.cached for result in mine)
        assert entry.retries == sum(max(0, result.attempts - 1) for result in mine)
    seen = {result.fault for _, result in results}
    assert seen == {None, Fault.MODEL, Fault.INFRA}
    assert stats["lookup"].cached > 0 < stats["service"].wait_seconds
    assert active.total() == 0
    assert all(most[name] <= limit for name, limit in SLOTS.items())
    assert most["service"] == SLOTS["service"] and most["lookup"] == SLOTS["lookup"]  # they were needed
    deadline = time.monotonic() + 60
    while threading.active_count() > before[1] and time.monotonic() < deadline:
        time.sleep(0.01)  # a thread that has delivered its result is about to end
    assert children() <= before[0] and threading.active_count() <= before[1]


# Images.


RED, BLUE = (pillow.new("RGB", (2, 2), colour) for colour in ("red", "blue"))


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize(
    ("returned", "text", "images"),
    [
        (RED, "", [RED]),
        (encode_image(RED), "", [RED]),
        (["Before.", RED, 7, encode_image(BLUE)], "Before.\n7", [RED, BLUE]),
        ((RED, RED), "", [RED, RED]),
        (pillow.new("1", (2, 2), 1), "", [pillow.new("RGB", (2, 2), "white")]),
        (["no", "image"], "['no', 'image']", []),
        ([], "[]", []),
        ([["nested", 1]], "[['nested', 1]]", []),
        ({"a": 1}, "{'a': 1}", []),
        ([RED] * 10, "[the first 8 of 10 images]", [RED] * 8),
        (["x" * 40, RED], "x" * 30 + "\n[output cut: the first 30 of 40 characters]", [RED]),
    ],
)
def test_a_tool_returns_text_images_or_both(quick: bool, returned: Any, text: str, images: list[Any]) -> None:
    @tool(quick=quick, max_chars=30)
    def look() -> Any:
        """Look."""
        return returned

    result = call(look)
    assert (result.text, result.fault) == (text, None)
    assert result.images == tuple(encode_image(image) for image in images)


def test_an_image_that_is_too_large_is_the_tools_fault() -> None:
    @tool(retries=0)
    def look() -> Any:
        """Look."""
        return pillow.new("1", (MAX_PIXELS + 1, 1))

    result = call(look)
    assert (result.fault, result.images) == (Fault.INFRA, ())
    assert "16777217 x 1 pixels" in result.text


def test_results_with_images_are_shared_while_in_flight_but_not_cached(tmp_path: Path) -> None:
    calls = []

    @tool(cacheable=True)
    async def look(what: str) -> Any:
        """Look."""
        calls.append(what)
        await asyncio.sleep(0)
        return [what, RED] if what == "it" else what

    async def main(tools: Toolset) -> list[ToolResult]:
        made = [ToolCall("look", {"what": what}) for what in ("it", "it", "text")]
        together = await asyncio.gather(*(tools.call(one) for one in made))
        return [*together, *[await tools.call(one) for one in made]]

    with Toolset([look], ToolCache(tmp_path / "cache.sqlite", "on")) as tools:
        results = asyncio.run(main(tools))
    assert [result.cached for result in results] == [False, True, False, False, False, True]
    assert [len(result.images) for result in results] == [1, 1, 0, 1, 1, 0]
    assert calls == ["it", "text", "it", "it"]
