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
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import Any, TypeVar

from arpo.errors import ArpoError
from arpo.tools.threads import DaemonThreads

T = TypeVar("T")
CLOSE_SECONDS = 10.0


class _Call:
    """A function that the caller's thread has to call, once at most."""

    def __init__(self, function: Callable[[], object]) -> None:
        self._function, self._started = function, False
        self.done: Future[None] = Future()

    def __call__(self) -> None:
        """Call the function, unless Ctrl-C has interrupted an earlier attempt."""
        if not self._started:
            self._started = True
            try:
                self._function()
            except KeyboardInterrupt:
                raise  # `run` comes back to this call
            except Exception as error:
                self.done.set_exception(error)
            except BaseException:  # such as SystemExit: the caller's thread ends
                self.done.set_result(None)
                raise
        if not self.done.done():
            self.done.set_result(None)


class LoopThread:
    """Runs one coroutine at a time."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._loop.set_default_executor(DaemonThreads())
        self._thread = threading.Thread(target=self._loop.run_forever, name="arpo-loop", daemon=True)
        self._thread.start()
        self._running: dict[str, Future[Any]] = {}  # "work": what ends with the work that runs now
        self._task: asyncio.Task[Any] | None = None
        self._wake: queue.SimpleQueue[None] | None = None  # tells the caller to look; None: no caller waits
        self._call: _Call | None = None  # what the caller has to do: one thing at most, since the loop waits for it

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of the work. Raises asyncio.CancelledError if it was cancelled by `cancel`."""
        ended: Future[asyncio.Task[T]] = Future()
        wake = queue.SimpleQueue[None]()
        interrupted = False
        while True:
            # Ctrl-C is raised between any two instructions: after the queue has given an item, too. So every line may
            # be run a second time, and the queue only says that there is something to look at.
            try:
                self._start(work, ended, wake)
                if interrupted:
                    self.cancel()
                while not ended.done():
                    if (call := self._call) is not None and not call.done.done():
                        call()
                    else:
                        wake.get()
                if not interrupted:
                    return ended.result().result()
                if not (task := ended.result()).cancelled():
                    task.exception()  # it ended in another way at the same moment
                raise KeyboardInterrupt
            except KeyboardInterrupt:
                if interrupted:
                    self._leave(wake)
                    raise
                interrupted = True
            except BaseException:  # an error of the work, or SystemExit of a callback while the work goes on
                if not ended.done() and self._running.get("work") is ended:
                    self._leave(wake)
                    self.cancel()
                raise

    def _leave(self, wake: queue.SimpleQueue[None]) -> None:
        """Nobody waits for the work any more: what it gives to `in_caller` is dropped."""
        if self._wake is wake:
            self._wake = None

    def _start(
        self, work: Coroutine[Any, Any, T], ended: Future[asyncio.Task[T]], wake: queue.SimpleQueue[None]
    ) -> None:
        """Start the work on the loop, unless it has been started."""

        def end(task: asyncio.Task[T]) -> None:
            del self._running["work"]
            ended.set_result(task)
            wake.put(None)

        def start() -> None:
            if ended.running() or ended.done():
                return
            ended.set_running_or_notify_cancel()
            self._call, self._wake = None, wake
            self._task = self._loop.create_task(work)
            self._task.add_done_callback(end)

        if ended.running() or ended.done():
            return
        if not self._thread.is_alive():
            work.close()
            raise ArpoError("this agent is closed; open it again")
        if self._running.setdefault("work", ended) is not ended:
            work.close()
            raise ArpoError(
                "this agent is busy with another call; in a callback of train(), call trainer.stop(), and the rest "
                "after train() has returned"
            )
        self._loop.call_soon_threadsafe(start)

    def cancel(self) -> None:
        """Cancel what is running, from any thread; `run` then raises asyncio.CancelledError."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(lambda: self._task is not None and self._task.cancel())

    def in_caller(self, function: Callable[[], object]) -> None:
        """Call a function in the thread that waits in `run`, and wait for it; its error is raised here."""
        if threading.current_thread() is not self._thread:
            function()
            return
        if (wake := self._wake) is None:
            return
        call = self._call = _Call(function)
        wake.put(None)
        while self._wake is wake:  # until a second Ctrl-C
            if wait([call.done], timeout=1.0).done:
                return call.done.result()

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
