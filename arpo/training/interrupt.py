"""Run asynchronous work that Ctrl-C, SIGTERM or SIGHUP (a closed terminal) can stop: it is cancelled and can save."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Coroutine
from typing import TypeVar

from arpo.tools.threads import DaemonThreads
from arpo.trainer.dist import launch

T = TypeVar("T")
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run_async(work: Coroutine[None, None, T]) -> T:
    """Run the coroutine to its end. Ctrl-C, SIGTERM and SIGHUP cancel it; a second Ctrl-C or SIGTERM ends the process.

    SIGHUP has no effect where it is ignored (`nohup`), nor when it comes again: a shell and the kernel both send it.
    Raises asyncio.CancelledError if it was cancelled.
    """

    async def with_signals() -> T:
        loop, task = asyncio.get_running_loop(), asyncio.ensure_future(work)
        loop.set_default_executor(DaemonThreads())  # a tool that hangs in a thread must not keep the process alive

        def stop(number: signal.Signals) -> None:
            loop.remove_signal_handler(number)  # a second signal takes its default effect
            if launch.world_size() > 1:  # torchrun forwards a signal that this process already got
                for each in SIGNALS:
                    loop.remove_signal_handler(each)
                    signal.signal(each, signal.SIG_IGN)
            task.cancel()

        def hang_up(*_: object) -> None:  # at once, not when the loop has time: printing raises from now on
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
            _leave_terminal()
            loop.call_soon_threadsafe(stop, signal.SIGHUP)

        before = signal.getsignal(signal.SIGHUP)
        with contextlib.suppress(RuntimeError, ValueError):  # outside the main thread
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(number, stop, number)
            if before is not signal.SIG_IGN:
                signal.signal(signal.SIGHUP, hang_up)
        try:
            return await task
        finally:
            if signal.getsignal(signal.SIGHUP) is hang_up:
                signal.signal(signal.SIGHUP, before)

    try:
        return asyncio.run(with_signals())
    except KeyboardInterrupt:  # typer would swallow it, together with the message that `main` prints
        raise asyncio.CancelledError from None


def _leave_terminal() -> None:
    """Discard what is printed from now on to a terminal that is gone: printing would raise."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for output in (1, 2):
        try:
            os.write(output, b"")
        except OSError:
            os.dup2(nowhere, output)
    os.close(nowhere)
