"""The event loop in a thread: results, calls in the caller's thread, Ctrl-C."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Iterator

import pytest

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
