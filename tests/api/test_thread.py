"""The event loop in a thread: results, calls in the caller's thread, Ctrl-C."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest

import arpo.api.thread as thread_module
from arpo.api.thread import LoopThread, stoppable
from arpo.errors import ArpoError


@pytest.fixture
def thread() -> Iterator[LoopThread]:
    made = LoopThread()
    yield made
    made.close()


def test_work_runs_elsewhere_and_its_calls_here(thread: LoopThread) -> None:
    seen: list[threading.Thread] = []

    async def work() -> threading.Thread:
        thread.in_caller(lambda: seen.append(threading.current_thread()))
        await asyncio.sleep(0)
        return threading.current_thread()

    assert thread.run(work()) is not threading.current_thread()
    assert seen == [threading.current_thread()]
    thread.in_caller(lambda: seen.clear())  # outside of `run`: at once
    assert seen == []


def test_it_works_while_the_caller_runs_a_loop(thread: LoopThread) -> None:
    async def work() -> int:
        await asyncio.sleep(0)
        return 3

    async def caller() -> int:
        return thread.run(work())

    assert asyncio.run(caller()) == 3


def test_errors_go_both_ways(thread: LoopThread) -> None:
    caught: list[str] = []

    def call() -> None:
        raise ValueError("in the caller")

    async def work() -> None:
        try:
            thread.in_caller(call)
        except ValueError as error:
            caught.append(str(error))
        raise KeyError("in the work")

    with pytest.raises(KeyError, match="in the work"):
        thread.run(work())
    assert caught == ["in the caller"]


def test_ctrl_c_waits_for_the_clean_up(thread: LoopThread) -> None:
    done: list[str] = []

    async def work() -> None:
        try:
            thread.in_caller(lambda: signal.raise_signal(signal.SIGINT))
            await asyncio.sleep(60)
        finally:
            thread.in_caller(lambda: done.append("saved"))

    with pytest.raises(KeyboardInterrupt):
        thread.run(work())
    assert done == ["saved"]
    assert thread.run(asyncio.sleep(0, "goes on")) == "goes on"


def test_ctrl_c_at_any_line(thread: LoopThread) -> None:
    """An interrupt is raised at each line in turn that the caller's thread runs: nothing hangs, nothing is lost."""

    class Interrupt:
        def __init__(self, at: int) -> None:
            self.left, self.where = at, ""

        def trace(self, frame: FrameType, event: str, arg: object) -> Any:
            if frame.f_code.co_filename not in (thread_module.__file__, __file__):
                return None
            if event == "line":
                self.left -= 1
                if self.left == 0:
                    self.where = f"{frame.f_code.co_name}:{frame.f_lineno}"
                    raise KeyboardInterrupt
            return self.trace

    interrupted = set()
    for at in range(1, 200):
        done: list[str] = []

        async def work(done: list[str] = done) -> str:
            try:
                thread.in_caller(lambda: done.append("called"))
                await asyncio.sleep(0)
                thread.in_caller(lambda: done.append("called again"))
                return "result"
            finally:
                thread.in_caller(lambda: done.append("saved"))

        coroutine, interrupt = work(), Interrupt(at)
        sys.settrace(interrupt.trace)
        try:
            result = thread.run(coroutine)
        except KeyboardInterrupt:
            result = "interrupted"
        finally:
            sys.settrace(None)
            coroutine.close()  # for an interrupt that came before it was started
        if result == "result":
            assert not interrupt.where and done == ["called", "called again", "saved"]
            break
        interrupted.add(interrupt.where)
        assert len(done) == len(set(done)), (interrupt.where, done)
        in_call = interrupt.where.startswith(("<lambda>", "__call__"))  # that call is not made again
        assert not done or done[-1] == "saved" or in_call, (interrupt.where, done)
        assert thread.run(asyncio.sleep(0, "goes on")) == "goes on", interrupt.where
    else:
        pytest.fail("it was interrupted at every line, and never came to its end")
    assert len(interrupted) > 20, interrupted


def test_a_second_ctrl_c_waits_for_nothing(thread: LoopThread) -> None:
    release, ended = threading.Event(), threading.Event()

    async def work() -> None:
        try:
            thread.in_caller(lambda: signal.raise_signal(signal.SIGINT))
            await asyncio.sleep(60)
        finally:
            thread.in_caller(lambda: signal.raise_signal(signal.SIGINT))
            release.wait()
            thread.in_caller(lambda: pytest.fail("nobody waits any more"))
            ended.set()

    with pytest.raises(KeyboardInterrupt):
        thread.run(work())
    with pytest.raises(ArpoError, match="busy"):
        thread.run(asyncio.sleep(0))
    release.set()
    assert ended.wait(60)


def test_a_callback_may_end_the_program(thread: LoopThread) -> None:
    ended = threading.Event()

    async def work() -> None:
        try:
            thread.in_caller(lambda: sys.exit(3))
            await asyncio.sleep(60)
        finally:
            thread.in_caller(lambda: pytest.fail("nobody waits any more"))
            ended.set()

    with pytest.raises(SystemExit) as caught:
        thread.run(work())
    assert caught.value.code == 3
    assert ended.wait(60)


def test_one_thing_at_a_time(thread: LoopThread) -> None:
    refused: list[str] = []

    def call() -> None:
        with pytest.raises(ArpoError, match="busy with another call") as caught:
            thread.run(asyncio.sleep(0))
        refused.append(str(caught.value))

    async def work() -> None:
        thread.in_caller(call)

    thread.run(work())
    assert len(refused) == 1


def test_cancel_and_close(thread: LoopThread) -> None:
    async def work() -> None:
        thread.in_caller(thread.cancel)
        await asyncio.sleep(60)

    with pytest.raises(asyncio.CancelledError):
        thread.run(work())
    thread.close()
    thread.close()
    thread.cancel()
    with pytest.raises(ArpoError, match="closed"):
        thread.run(asyncio.sleep(0))


def test_sigterm_interrupts_and_ends_the_program() -> None:
    with pytest.raises(SystemExit) as caught, stoppable():
        signal.raise_signal(signal.SIGTERM)
    assert caught.value.code == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    with pytest.raises(KeyboardInterrupt), stoppable():
        signal.raise_signal(signal.SIGINT)


def test_a_handler_of_the_programs_own_is_not_replaced() -> None:
    received: list[str] = []
    signal.signal(signal.SIGTERM, lambda *_: received.append("own"))
    try:
        with stoppable():
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    assert received == ["own"]


def test_outside_the_main_thread_no_signal_is_touched(thread: LoopThread) -> None:
    results: list[object] = []

    def other() -> None:
        with stoppable():
            results.append(signal.getsignal(signal.SIGTERM))
            results.append(thread.run(asyncio.sleep(0, 5)))

    worker = threading.Thread(target=other)
    worker.start()
    worker.join()
    assert results == [signal.SIG_DFL, 5]
