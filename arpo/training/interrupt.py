"""Run asynchronous work that Ctrl-C or SIGTERM can stop: the work is cancelled and can save what it has."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Coroutine
from typing import TypeVar

from arpo.trainer.dist import launch

T = TypeVar("T")


def run_async(work: Coroutine[None, None, T]) -> T:
    """Run the coroutine to its end. Ctrl-C and SIGTERM cancel it; a second signal ends the process at once.

    Raises asyncio.CancelledError if it was cancelled.
    """

    async def with_signals() -> T:
        loop, task = asyncio.get_running_loop(), asyncio.ensure_future(work)

        def stop(number: signal.Signals) -> None:
            loop.remove_signal_handler(number)  # a second signal takes its default effect
            if launch.world_size() > 1:  # torchrun forwards a signal that this process already got
                for each in (signal.SIGINT, signal.SIGTERM):
                    loop.remove_signal_handler(each)
                    signal.signal(each, signal.SIG_IGN)
            task.cancel()

        with contextlib.suppress(NotImplementedError, RuntimeError):  # on Windows, or outside the main thread
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(number, stop, number)
        return await task

    try:
        return asyncio.run(with_signals())
    except KeyboardInterrupt:  # typer would swallow it, together with the message that `main` prints
        raise asyncio.CancelledError from None
