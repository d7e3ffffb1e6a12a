"""Threads that nothing waits for: how many there are, and what happens when none can be started."""

from __future__ import annotations

import threading

import pytest

from arpo.tools import threads
from arpo.tools.threads import DaemonThreads

GUARD_SECONDS = 60


def test_calls_beyond_the_limit_wait_for_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "MAX_THREADS", 3)
    pool, running, release = DaemonThreads(), threading.Semaphore(0), threading.Event()

    def call(number: int) -> tuple[int, int]:
        running.release()
        release.wait(GUARD_SECONDS)
        return number, threading.get_ident()

    futures = [pool.submit(call, number) for number in range(8)]
    for _ in range(3):
        assert running.acquire(timeout=GUARD_SECONDS)
    assert sum(future.running() for future in futures) == 3
    release.set()
    results = [future.result(GUARD_SECONDS) for future in futures]
    assert [number for number, _ in results] == list(range(8))
    assert len({thread for _, thread in results}) <= 3
    assert pool.submit(call, 9).result(GUARD_SECONDS)[0] == 9
    pool.shutdown()


def test_a_thread_that_cannot_be_started_is_an_error_and_leaves_no_call(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, seen = DaemonThreads(), []

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            pool.submit(seen.append, "refused")
    pool.submit(seen.append, "made").result(GUARD_SECONDS)
    assert seen == ["made"]
    pool.shutdown()
