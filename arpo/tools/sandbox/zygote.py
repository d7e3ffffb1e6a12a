"""The process that confined code is forked from, and the workers that fork it.

The supervisor executes `main` with an empty environment. It builds the walls, imports what code usually needs, and then
forks a worker for every socket that it is sent. A worker serves one call at a time: a process that is already shut in
(`_Cell`) waits for the code; when it has ended, or its time is up, everything in its process namespace is gone, scratch
is emptied, the answer is sent, and the next one is made: a copy of the worker, but for the memory that holds the bytes
of calls. How a call ended is read from `waitpid` here and told over a socket that the confined process never holds.

A request is `HEAD` (bytes of code, bytes of stdin, seconds, flags) and the bytes; an answer is `TAIL` (status, seconds,
truncated, bytes of stdout, bytes of stderr) and the bytes.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import math
import mmap
import os
import random
import resource
import select
import signal
import socket
import struct
import sys
import time
from typing import Any, NoReturn

from arpo.tools.sandbox import cell, kernel, walls

HEAD, TAIL = struct.Struct("!IId?"), struct.Struct("!Bd?II")
STATUSES = ("ok", "error", "timeout", "memory", "killed")
OK, ERROR, TIMEOUT, MEMORY, KILLED = range(5)
MAX_CODE, MAX_STDIN, CHUNK = 1 << 20, 1 << 24, 1 << 16
FLOOD = 64  # more than this many times the kept output, and the call is ended
LOOK_AT_DISK_SECONDS = 0.05
USUAL = """
abc array base64 bisect calendar cmath collections contextlib copy csv dataclasses datetime decimal enum fractions
functools hashlib heapq io itertools json math numbers operator pprint queue random re secrets statistics string struct
textwrap threading time types typing unicodedata uuid zlib
"""
_FIRST_STEPS = """
from sympy import *
x, y = symbols("x y")
for equation in (x**2 - 2, x**2 + 2*x - 8, 2*x**2 + 3*x + 1, 3*x - 4, x**3 - 7*x + 6, Eq(x**2, 16), [2*x + y, x - y]):
    solve(equation)
solveset(sin(x)), simplify((x**2 - 4)/(x - 2)), factor(x**4 - 1), expand((x + y)**3), integrate(x*exp(x), x)
limit(1/x, x, oo), Matrix([[1, 2], [3, 4]]).inv(), Rational(3, 4), N(pi, 20), factorint(360), nsimplify(0.25)
summation(x, (x, 1, 10)), sympify("x + 1"), latex(x/y), diff(log(x))
"""  # sympy builds much of itself only when first used


def main() -> None:
    """Entry point; the settings are the one argument, as JSON."""
    settings = json.loads(sys.argv[1])
    control = socket.socket(fileno=settings["control"])
    try:
        zygote = _enter(settings)
    except Exception as error:
        control.sendall(f"no {type(error).__name__}: {error}"[:4000].encode())
        return
    if not zygote:
        return
    own_pids, base_memory = zygote
    control.sendall(b"ok")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # workers that end are not waited for
    while True:
        message, fds, _, _ = socket.recv_fds(control, 1, 1)
        if not message:
            _leave(settings)
        if os.fork() == 0:
            control.close()
            _worker(settings, socket.socket(fileno=fds[0]), own_pids, base_memory)
        os.close(fds[0])


def _leave(settings: dict[str, Any]) -> NoReturn:
    """With namespaces, ending ends all that is in them. Else the workers have been left, too: see them off."""
    if settings["tier"] != "namespaces":
        with contextlib.suppress(ChildProcessError):
            os.waitpid(-1, 0)
        walls.remove(settings["root"])
    os._exit(0)


def _enter(settings: dict[str, Any]) -> tuple[int, int] | None:
    """Build the walls and import; a descriptor of our process namespace (or -1), and the bytes of address space used.

    With namespaces, the process that entered them stays outside as a guard and returns None when all is over.
    """
    own_pids = -1
    os.umask(0o022)
    if settings["tier"] != "none" and (missing_runs := walls.missing(settings["tier"])):
        raise OSError(missing_runs)
    if settings["tier"] == "namespaces":
        walls.enter_namespaces()
        walls.build_root(settings["root"], settings["readable"])
        child = os.fork()
        if child:
            os.close(settings["control"])
            os.waitpid(child, 0)
            return None
        kernel.die_with_parent()
        own_pids = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
    sys.path[:] = [*sys.path[1:], *settings["path"]]  # the first was only there to find this module
    for name in USUAL.split():
        importlib.import_module(name)
    for name in settings["imports"]:
        with contextlib.suppress(Exception):  # code that imports it will see the error for itself
            importlib.import_module(name)
            exec(_FIRST_STEPS if name == "sympy" else "", {})
    if "numpy" in sys.modules:
        importlib.import_module("numpy.random").seed(0)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    with open("/proc/self/statm") as file:
        base_memory = int(file.read().split()[0]) * resource.getpagesize()
    if settings["tier"] == "namespaces":
        kernel.pivot_to(settings["root"])
        socket.sethostname("sandbox")
    elif settings["tier"] == "landlock":
        kernel.let_look_in(False)
    gc.collect()
    gc.freeze()  # what is there now is shared with every call: never touch it
    return own_pids, base_memory


def _worker(settings: dict[str, Any], supervisor: socket.socket, own_pids: int, base_memory: int) -> NoReturn:
    """Serve one call after the other until the supervisor hangs up."""
    try:
        kernel.die_with_parent()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        limits = walls.Limits(settings["memory"], settings["scratch"])
        apart = settings["tier"] == "namespaces"
        folder = walls.scratch_place(settings["readable"]) if apart else _own_folder(settings["root"])
        if apart:
            walls.mount_scratch(folder, limits)
        os.environ.update(HOME=folder, TMPDIR=folder)
        os.chdir(folder)
        seal = walls.Seal(settings["tier"], limits, base_memory, settings["readable"], folder)
        memory = _Memory(settings["output"])
        try:
            while True:
                waiting = _Cell(seal, own_pids)
                request = _receive(supervisor, memory.request)
                if request is None:
                    break
                answer = waiting.serve(supervisor, request, memory, None if apart else folder)
                walls.wipe(folder)
                if supervisor.sendmsg(answer) != sum(map(len, answer)):
                    break
        finally:
            if not apart:
                walls.remove(folder)
    except ConnectionError:  # the supervisor has left in the middle of a call
        pass
    except BaseException as error:
        with contextlib.suppress(OSError):
            print(f"worker: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    os._exit(1)


def _own_folder(root: str) -> str:
    folder = os.path.join(root, os.urandom(8).hex())
    os.mkdir(folder, 0o700)
    return folder


class _Memory:
    """Where a worker keeps the bytes of a call, which are not for the process of the next one."""

    def __init__(self, output: int) -> None:
        self.request = self._not_inherited(HEAD.size + MAX_CODE + MAX_STDIN)
        self.chunk = self._not_inherited(CHUNK)
        self.out, self.err = self._not_inherited(output), self._not_inherited(output)

    def _not_inherited(self, size: int) -> memoryview:
        area = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE)
        area.madvise(mmap.MADV_DONTFORK)
        return memoryview(area)[:size]


def _receive(supervisor: socket.socket, memory: memoryview) -> memoryview | None:
    """The next whole request; None when the supervisor has hung up."""
    received, wanted = 0, HEAD.size
    while received < wanted:
        count = supervisor.recv_into(memory[received:])
        if not count:
            return None
        received += count
        if received >= HEAD.size:
            code, stdin, _, _ = HEAD.unpack_from(memory)
            wanted = HEAD.size + int(code) + int(stdin)
    return memory[:wanted]


class _Cell:
    """A process that is shut in and waits for its code."""

    def __init__(self, seal: walls.Seal, own_pids: int) -> None:
        self.limits = seal.limits
        theirs_in, self.stdin = os.pipe()
        self.out, theirs_out = os.pipe()
        self.err, theirs_err = os.pipe()
        if own_pids >= 0:
            kernel.setns(own_pids, kernel.NEW_PID)
            kernel.unshare(kernel.NEW_PID)
        self.pid = os.fork()
        if self.pid == 0:
            _confined(seal, (theirs_in, theirs_out, theirs_err))
        for fd in (theirs_in, theirs_out, theirs_err):
            os.close(fd)
        self.pidfd = os.pidfd_open(self.pid)

    def serve(
        self, supervisor: socket.socket, request: memoryview, memory: _Memory, folder: str | None
    ) -> tuple[bytes, memoryview, memoryview]:
        """Run the request; its answer in parts. Watches a folder on disk, if scratch is there."""
        if os.read(self.out, 1) != b"r":
            raise RuntimeError(f"a process could not be shut in: {os.read(self.err, 1000).decode(errors='replace')}")
        if select.select([self.pidfd], [], [], 0)[0]:
            raise RuntimeError("a process was killed while it waited for its code")
        disk = None if folder is None else walls.Disk(folder, self.limits.scratch, self.pid)
        seconds = HEAD.unpack_from(request)[2]
        started = time.monotonic()
        kept = {self.out: _Kept(memory.out, memory.chunk), self.err: _Kept(memory.err, memory.chunk)}
        try:
            verdict = self._watch(supervisor, request, kept, started + seconds, disk)
        finally:
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
            _, how = os.waitpid(self.pid, 0)
            if disk:
                disk.close()
        took = time.monotonic() - started
        for fd, output in kept.items():
            os.set_blocking(fd, False)
            with contextlib.suppress(BlockingIOError):  # without walls, something may still hold the other end
                while not output.ended and output.total < 4 * CHUNK + output.flood:
                    output.read(fd)
        for fd in {self.stdin, self.out, self.err, self.pidfd} - {-1}:
            os.close(fd)
        status = _status(how) if verdict is None else verdict
        cut = any(output.total > len(output.data) for output in kept.values())
        out, err = (output.data[: output.total] for output in kept.values())
        return TAIL.pack(status, took, cut, len(out), len(err)), out, err

    def _watch(
        self,
        supervisor: socket.socket,
        request: memoryview,
        kept: dict[int, _Kept],
        deadline: float,
        disk: walls.Disk | None,
    ) -> int | None:
        """Feed and read the process until it has ended by itself (None), or must be (why)."""
        poller = select.poll()
        for fd in (self.pidfd, supervisor.fileno(), self.stdin, *kept):
            poller.register(fd, select.POLLOUT if fd == self.stdin else select.POLLIN)
        os.set_blocking(self.stdin, False)
        unsent = request
        look = time.monotonic() + LOOK_AT_DISK_SECONDS if disk else math.inf
        while True:
            now = time.monotonic()
            if now >= deadline:
                return TIMEOUT
            if disk and now >= look:
                if disk.overfull():
                    return KILLED
                look = time.monotonic() + LOOK_AT_DISK_SECONDS
            ready = {fd for fd, _ in poller.poll(1000 * max(0.0, min(deadline, look) - now))}
            if supervisor.fileno() in ready:  # nothing is sent during a call: it has hung up
                return KILLED
            if self.stdin in ready:
                unsent = self._feed(unsent)
                if not unsent:
                    poller.unregister(self.stdin)
                    os.close(self.stdin)
                    self.stdin = -1
            for fd in ready & kept.keys():
                kept[fd].read(fd)
                if kept[fd].ended:
                    poller.unregister(fd)
            if any(output.total > output.flood for output in kept.values()):
                return KILLED
            if self.pidfd in ready:
                return None

    def _feed(self, unsent: memoryview) -> memoryview:
        try:
            return unsent[os.write(self.stdin, unsent) :]
        except BrokenPipeError:  # it does not want to read
            return unsent[:0]


class _Kept:
    """The first bytes of an output, as many as `data` holds, and how many there were."""

    def __init__(self, data: memoryview, chunk: memoryview) -> None:
        self.data, self.chunk, self.flood = data, chunk, FLOOD * len(data)
        self.total, self.ended = 0, False

    def read(self, fd: int) -> None:
        """Take what is there; nothing means that the output has ended."""
        count = os.readv(fd, [self.chunk])
        room = self.data[self.total : self.total + count]
        room[:] = self.chunk[: len(room)]
        self.total += count
        self.ended = not count


def _status(how: int) -> int:
    if os.WIFSIGNALED(how):
        return KILLED
    return {cell.OK: OK, cell.MEMORY: MEMORY}.get(os.WEXITSTATUS(how), ERROR)


def _confined(seal: walls.Seal, fds: tuple[int, int, int]) -> NoReturn:
    """In the new process: shut it in, wait for the code, run it."""
    try:
        for number, fd in enumerate(fds):
            os.dup2(fd, number)
        seal.shut()
        os.closerange(3, 1024)
        os.write(1, b"r")
        code, _, _, show_last = HEAD.unpack(_read_exactly(HEAD.size))
        text = _read_exactly(code)
        random.seed(0)
    except BaseException as error:
        os.write(2, f"{type(error).__name__}: {error}".encode())
        os._exit(cell.ERROR)
    cell.run(text, show_last)


def _read_exactly(count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = os.read(0, count - len(data))
        if not part:
            os._exit(cell.ERROR)
        data += part
    return data
