"""Threads for an event loop that nothing waits for: an async tool may hang in one of them, and the process still ends.

    loop.set_default_executor(DaemonThreads())     # for `asyncio.to_thread`

asyncio's own executor is waited for when the loop closes, and once more when the process ends.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, ParamSpec, TypeVar

MAX_THREADS = 256
P = ParamSpec("P")
T = TypeVar("T")


class DaemonThreads(ThreadPoolExecutor):
    """An executor with as many daemon threads as there are calls at a time; idle ones are used again.

    Calls beyond MAX_THREADS wait for a thread.
    """

    def __init__(self) -> None:
        super().__init__()
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._started = 0

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Call a function in a thread; RuntimeError if none can be started."""
        future: Future[T] = Future()
        if not self._idle.acquire(blocking=False) and self._started < MAX_THREADS:
            threading.Thread(target=self._work, name="arpo-daemon", daemon=True).start()
            self._started += 1
        self._calls.put((future, partial(fn, *args, **kwargs)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Let the threads end after the calls that were submitted; waits for none."""
        for _ in range(self._started):
            self._calls.put(None)

    def _work(self) -> None:
        while (job := self._calls.get()) is not None:
            future, call = job
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as error:  # raised where the result is awaited
                    future.set_exception(error)
            del job, future, call  # or they would live until the next call
            self._idle.release()
