"""What tests of the sandbox share: opening one, and looking at its processes from outside."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import pytest

from arpo.errors import ArpoError
from arpo.tools.sandbox.sandbox import Sandbox, SandboxResult

ROOT = Path(__file__).parents[2]  # where the package can be found
MARKED = "import ctypes; ctypes.CDLL(None).prctl(15, b'{}', 0, 0, 0)\n"
WAITING = (  # until it gets the signal, so that a test can look at it for as long as it needs
    "import signal, sys, time\n"
    "signal.signal(signal.SIGUSR1, lambda *_: sys.exit(print('done')))\n"
    + MARKED
    + "while True: time.sleep(0.1)\n"  # a signal just before it would not end a long sleep
)


def opened(tier: str, **limits: object) -> Sandbox:
    """A sandbox of a tier, or a skipped test that says why there is none."""
    sandbox = Sandbox(tier=tier, **limits)  # type: ignore[arg-type]
    try:
        sandbox.start()
    except ArpoError as error:
        assert "got through" not in str(error)
        pytest.skip(str(error))
    return sandbox


def unique(name: str) -> str:
    """A name for processes, of 15 characters at most, that no other run of these tests uses."""
    return f"{name}-{os.getpid()}"


def marked(name: str, among: list[int] | None = None) -> list[int]:
    """Processes that gave themselves this name."""
    found = []
    for pid in among or map(int, filter(str.isdigit, os.listdir("/proc"))):
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/comm").read_text() == f"{name}\n":
                found.append(pid)
    return found


def until(condition: Callable[[], object], seconds: float = 60.0) -> bool:
    """Whether something becomes true in time, also on a busy machine."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True


def alive(pid: int) -> bool:
    """Whether a process is there and more than a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def children(pid: int) -> list[int]:
    """The processes that a process has started, oldest first."""
    with contextlib.suppress(OSError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def family(pid: int) -> list[int]:
    """A process and all below it."""
    return [pid, *(below for child in children(pid) for below in family(child))]


def zygote_pid(sandbox: Sandbox) -> int:
    """The process of the sandbox that this one has started."""
    assert until(lambda: sandbox._pools[()]._zygote)
    return sandbox._pools[()]._zygote.process.pid  # type: ignore[union-attr]


def line(pid: int, cell: int) -> list[int]:
    """The processes from one down to another below it; none if that is not there (any more)."""
    if pid == cell:
        return [pid]
    return next(([pid, *below] for child in children(pid) if (below := line(child, cell))), [])


def running(sandbox: Sandbox, name: str, but: frozenset[int] = frozenset()) -> dict[str, int]:
    """The processes that a running call of this name depends on, all below the sandbox's own."""
    found: list[int] = []

    def there() -> bool:
        for pid in set(marked(name, family(zygote_pid(sandbox)))) - but:
            found[:] = line(zygote_pid(sandbox), pid)
        return len(found) >= 4

    assert until(there)
    return {"guard": found[0], "zygote": found[-4], "worker": found[-3], "spawner": found[-2], "cell": found[-1]}


def in_thread(function: Callable[[], SandboxResult]) -> Future[SandboxResult]:
    """What a function returns, from a thread of its own."""
    done: Future[SandboxResult] = Future()

    def work() -> None:
        try:
            done.set_result(function())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return done
