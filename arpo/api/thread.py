"""An event loop in a thread of its own: asynchronous work for callers that are not, or that run a loop themselves.

    thread = LoopThread()
    result = thread.run(work())            # waits; Ctrl-C cancels the work, waits for its clean-up, and is raised again

Guarantees: what the work gives to `in_caller` runs in the thread that waits in `run`, while the loop waits for it. So
callbacks and output belong to the caller's thread, as notebooks need it. A second Ctrl-C waits for nothing.
"""

from __future__ import annotations

import asyncio
import queue
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeVar

from arpo.errors import ArpoError
from arpo.tools.threads import DaemonThreads

T = TypeVar("T")
CLOSE_SECONDS = 10.0


class LoopThread:
    """Runs one coroutine at a time."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._loop.set_default_executor(DaemonThreads())
        self._thread = threading.Thread(target=self._loop.run_forever, name="arpo-loop", daemon=True)
        self._thread.start()
        self._busy = threading.Lock()
        self._task: asyncio.Task[Any] | None = None
        self._calls: queue.SimpleQueue[Callable[[], None] | None] | None = None  # what the caller has to do

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of the work. Raises asyncio.CancelledError if it was cancelled by `cancel`."""
        if not self._thread.is_alive():
            work.close()
            raise ArpoError("this agent is closed; open it again")
        if not self._busy.acquire(blocking=False):
            work.close()
            raise ArpoError(
                "this agent is busy with another call; in a callback of train(), call trainer.stop(), and the rest "
                "after train() has returned"
            )
        calls = self._calls = queue.SimpleQueue[Callable[[], None] | None]()
        self._task = task = self._start(work, calls)
        interrupted = False
        while True:
            try:
                if (call := calls.get()) is None:
                    break
                call()
            except KeyboardInterrupt:
                if interrupted:
                    self._calls = None
                    raise
                interrupted = True
                self._loop.call_soon_threadsafe(task.cancel)
        if interrupted:
            if not task.cancelled():
                task.exception()  # it ended in another way at the same moment
            raise KeyboardInterrupt
        return task.result()

    def _start(
        self, work: Coroutine[Any, Any, T], calls: queue.SimpleQueue[Callable[[], None] | None]
    ) -> asyncio.Task[T]:
        started: Future[asyncio.Task[T]] = Future()

        def end(_: asyncio.Task[T]) -> None:
            self._busy.release()
            calls.put(None)

        def start() -> None:
            task = self._loop.create_task(work)
            task.add_done_callback(end)
            started.set_result(task)

        self._loop.call_soon_threadsafe(start)
        return started.result()

    def cancel(self) -> None:
        """Cancel what is running, from any thread; `run` then raises asyncio.CancelledError."""
        if self._task is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._task.cancel)

    def in_caller(self, function: Callable[[], object]) -> None:
        """Call a function in the thread that waits in `run`, and wait for it; its error is raised here."""
        calls = self._calls
        if threading.current_thread() is not self._thread:
            function()
            return
        done: Future[None] = Future()

        def call() -> None:
            try:
                function()
                done.set_result(None)
            except Exception as error:
                done.set_exception(error)
            except BaseException:  # Ctrl-C: `run` cancels the work
                done.set_result(None)
                raise

        if calls is not None:
            calls.put(call)
        while calls is not None and calls is self._calls:  # until a second Ctrl-C
            try:
                return done.result(timeout=1.0)
            except TimeoutError:
                if done.done():
                    raise  # of the function itself

    def close(self) -> None:
        """Cancel what is running, and end the thread."""
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            asyncio.run_coroutine_threadsafe(_end_tasks(), self._loop).add_done_callback(
                lambda _: self._loop.call_soon_threadsafe(self._loop.stop)
            )
            self._thread.join(CLOSE_SECONDS)
            if not self._thread.is_alive():
                self._loop.close()


async def _end_tasks() -> None:
    """Cancel all other tasks, as `asyncio.run` does at its end."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    loop = asyncio.get_running_loop()
    await loop.shutdown_asyncgens()
    await loop.shutdown_default_executor()


@contextmanager
def stoppable() -> Iterator[None]:
    """Within the block, SIGTERM and SIGHUP interrupt like Ctrl-C; then the program ends: the block raises SystemExit.

    Only in the main thread, and only where the signal would end the process.
    """
    received: list[int] = []

    def interrupt(number: int, frame: object) -> None:
        received.append(number)
        raise KeyboardInterrupt

    main = threading.current_thread() is threading.main_thread()
    changed = [one for one in (signal.SIGTERM, signal.SIGHUP) if main and signal.getsignal(one) is signal.SIG_DFL]
    for number in changed:
        signal.signal(number, interrupt)
    try:
        yield
    except KeyboardInterrupt:
        if received:
            raise SystemExit(128 + received[0]) from None
        raise
    finally:
        for number in changed:
            signal.signal(number, signal.SIG_DFL)
