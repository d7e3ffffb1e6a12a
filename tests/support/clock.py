"""A clock for tests that wait: it stands still while anything runs and jumps when all wait, so no machine is too slow.

    clock.run(main())    # as `asyncio.run`; what sleeps five seconds there takes exactly five, and no time at all

Only for what happens on one event loop: a thread or a process takes real time, and would find the clock far ahead.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest

T = TypeVar("T")


class _Jumping(selectors.DefaultSelector):
    """Does not wait until the next timer is due, but says that it is."""

    now = 1000.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or timeout <= 0:
            return super().select(timeout)
        ready = super().select(0)
        if not ready:
            self.now += timeout
        return ready


def run(main: Coroutine[Any, Any, T]) -> T:
    """What a coroutine returns, where time passes only while everything waits for it."""
    selector = _Jumping()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("monotonic", "perf_counter"):
            patch.setattr(time, name, lambda: selector.now)
        with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selector)) as runner:
            return runner.run(main)
