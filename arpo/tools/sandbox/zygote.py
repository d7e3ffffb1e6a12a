"""The process that confined code is forked from, and the workers that fork it.

The supervisor starts `main` with an empty environment. The zygote sets up the isolation, imports common modules, and
forks a worker for every socket that it receives. A worker serves one call at a time: a process that is already
confined (`_ConfinedProcess`) waits for the code. When it has ended, or its time is up, everything in its PID
namespace is killed, scratch is cleared, the response is sent, and the next process is forked: a copy of the worker,
without the memory that holds the bytes of calls. The status of a call comes from `waitpid` and goes over a socket
that the confined process never holds.

A request is the header `REQUEST` (bytes of code, bytes of stdin, seconds, flags) and the bytes; a response is
`RESPONSE` (status, seconds, truncated, bytes of stdout, bytes of stderr) and the bytes.
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

from arpo.tools.sandbox import interpreter, isolation, linux, scratch

REQUEST, RESPONSE = struct.Struct("!IId?"), struct.Struct("!Bd?II")
STATUSES = ("ok", "error", "timeout", "memory", "killed")
OK, ERROR, TIMEOUT, MEMORY, KILLED = range(5)
MAX_CODE, MAX_STDIN, CHUNK = 1 << 20, 1 << 24, 1 << 16
MAX_OUTPUT_FACTOR = 64  # a call that prints so many times the kept output is killed
DISK_CHECK_SECONDS = 0.05
PRELOADED = """
abc array base64 bisect calendar cmath collections contextlib copy csv dataclasses datetime decimal enum fractions
functools hashlib heapq io itertools json math numbers operator pprint queue random re secrets statistics string struct
textwrap threading time types typing unicodedata uuid zlib
"""
_SYMPY_WARM_UP = """
from sympy import *
x, y = symbols("x y")
for equation in (x**2 - 2, x**2 + 2*x - 8, 2*x**2 + 3*x + 1, 3*x - 4, x**3 - 7*x + 6, Eq(x**2, 16), [2*x + y, x - y]):
    solve(equation)
solveset(sin(x)), simplify((x**2 - 4)/(x - 2)), factor(x**4 - 1), expand((x + y)**3), integrate(x*exp(x), x)
limit(1/x, x, oo), Matrix([[1, 2], [3, 4]]).inv(), Rational(3, 4), N(pi, 20), factorint(360), nsimplify(0.25)
summation(x, (x, 1, 10)), sympify("x + 1"), latex(x/y), diff(log(x))
"""  # sympy builds much of itself on first use


def main() -> None:
    """Entry point; the only argument is the settings as JSON."""
    settings = json.loads(sys.argv[1])
    control = socket.socket(fileno=settings["control"])
    try:
        zygote = _set_up(settings)
    except Exception as error:
        control.sendall(f"no {type(error).__name__}: {error}"[:4000].encode())
        return
    if not zygote:
        return
    pid_namespace, base_memory = zygote
    control.sendall(b"ok")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no zombies of workers
    while True:
        message, fds, _, _ = socket.recv_fds(control, 1, 1)
        if not message:
            break
        if os.fork() == 0:
            control.close()
            _worker(settings, socket.socket(fileno=fds[0]), pid_namespace, base_memory)
        os.close(fds[0])
    if settings["tier"] != "namespaces":  # which end with the zygote; else wait for the workers, which end as well
        with contextlib.suppress(ChildProcessError):
            os.waitpid(-1, 0)
        scratch.remove(settings["root"])
    os._exit(0)


def _set_up(settings: dict[str, Any]) -> tuple[int, int] | None:
    """Set up isolation and imports; return a descriptor of our PID namespace (or -1) and the address space in bytes.

    With namespaces, the process that entered them stays outside as a guard and returns None when the other has ended.
    """
    pid_namespace = -1
    os.umask(0o022)
    if settings["tier"] != "none" and (missing := isolation.missing_support(settings["tier"])):
        raise OSError(missing)
    if settings["tier"] == "namespaces":
        isolation.enter_namespaces()
        isolation.build_root(settings["root"], settings["readable"])
        child = os.fork()
        if child:
            os.close(settings["control"])
            os.waitpid(child, 0)
            return None
        linux.die_with_parent()
        pid_namespace = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
    sys.path[:] = [*sys.path[1:], *settings["path"]]  # the first entry was only needed to find this module
    for name in PRELOADED.split():
        importlib.import_module(name)
    for name in settings["imports"]:
        with contextlib.suppress(Exception):  # the code that imports it will see the error
            importlib.import_module(name)
            exec(_SYMPY_WARM_UP if name == "sympy" else "", {})
    if "numpy" in sys.modules:
        importlib.import_module("numpy.random").seed(0)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    with open("/proc/self/statm") as file:
        base_memory = int(file.read().split()[0]) * resource.getpagesize()
    if settings["tier"] == "namespaces":
        linux.pivot_to(settings["root"])
        socket.sethostname("sandbox")
    elif settings["tier"] == "landlock":
        linux.set_dumpable(False)
    gc.collect()
    gc.freeze()  # objects made so far are shared with every call; do not touch them
    return pid_namespace, base_memory


def _worker(settings: dict[str, Any], supervisor: socket.socket, pid_namespace: int, base_memory: int) -> NoReturn:
    """Serve one call after the other until the supervisor closes the connection."""
    try:
        linux.die_with_parent()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        namespaces = settings["tier"] == "namespaces"
        if namespaces:
            folder = isolation.scratch_dir(settings["readable"])
            isolation.mount_scratch(folder, settings["scratch"])
        else:
            folder = os.path.join(settings["root"], os.urandom(8).hex())
            os.mkdir(folder, 0o700)
        os.environ.update(HOME=folder, TMPDIR=folder)
        os.chdir(folder)
        memory, limit = base_memory + settings["memory"], settings["scratch"]
        confinement = isolation.Confinement(settings["tier"], memory, limit, settings["readable"], folder)
        buffers = _Buffers(settings["output"])
        try:
            while True:
                process = _ConfinedProcess(confinement, pid_namespace)
                request = _receive(supervisor, buffers.request)
                if request is None:
                    break
                response = process.serve(supervisor, request, buffers, None if namespaces else folder)
                scratch.clear(folder)
                if supervisor.sendmsg(response) != sum(map(len, response)):
                    break
        finally:
            if not namespaces:
                scratch.remove(folder)
    except ConnectionError:  # the supervisor closed the connection during a call
        pass
    except BaseException as error:
        with contextlib.suppress(OSError):
            print(f"worker: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    os._exit(1)


class _Buffers:
    """The bytes of a call in a worker, in memory that the process of the next call does not inherit."""

    def __init__(self, output: int) -> None:
        self.request = self._not_inherited(REQUEST.size + MAX_CODE + MAX_STDIN)
        self.chunk = self._not_inherited(CHUNK)
        self.out, self.err = self._not_inherited(output), self._not_inherited(output)

    def _not_inherited(self, size: int) -> memoryview:
        area = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE)
        area.madvise(mmap.MADV_DONTFORK)
        return memoryview(area)[:size]


def _receive(supervisor: socket.socket, buffer: memoryview) -> memoryview | None:
    """Return the next complete request; None when the supervisor has closed the connection."""
    received, needed = 0, REQUEST.size
    while received < needed:
        count = supervisor.recv_into(buffer[received:])
        if not count:
            return None
        received += count
        if received >= REQUEST.size:
            code, stdin, _, _ = REQUEST.unpack_from(buffer)
            needed = REQUEST.size + int(code) + int(stdin)
    return buffer[:needed]


class _ConfinedProcess:
    """A process that is confined and waits for its code."""

    def __init__(self, confinement: isolation.Confinement, pid_namespace: int) -> None:
        self.max_scratch = confinement.max_scratch
        theirs_in, self.stdin = os.pipe()
        self.out, theirs_out = os.pipe()
        self.err, theirs_err = os.pipe()
        if pid_namespace >= 0:
            linux.setns(pid_namespace, linux.NEW_PID)
            linux.unshare(linux.NEW_PID)
        self.pid = os.fork()
        if self.pid == 0:
            _run_confined(confinement, (theirs_in, theirs_out, theirs_err))
        for fd in (theirs_in, theirs_out, theirs_err):
            os.close(fd)
        self.pidfd = os.pidfd_open(self.pid)

    def serve(
        self, supervisor: socket.socket, request: memoryview, buffers: _Buffers, folder: str | None
    ) -> tuple[bytes, memoryview, memoryview]:
        """Run the request and return the parts of the response. Monitors `folder` if scratch is on disk."""
        if os.read(self.out, 1) != b"r":
            raise RuntimeError(f"a process could not be confined: {os.read(self.err, 1000).decode(errors='replace')}")
        if select.select([self.pidfd], [], [], 0)[0]:
            raise RuntimeError("a process was killed while it waited for its code")
        disk = None if folder is None else scratch.DiskMonitor(folder, self.max_scratch, self.pid)
        seconds = REQUEST.unpack_from(request)[2]
        started = time.monotonic()
        outputs = {self.out: _Output(buffers.out, buffers.chunk), self.err: _Output(buffers.err, buffers.chunk)}
        try:
            forced = self._watch(supervisor, request, outputs, started + seconds, disk)
        finally:
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
            _, wait_status = os.waitpid(self.pid, 0)
            if disk:
                disk.close()
        took = time.monotonic() - started
        for fd, output in outputs.items():
            os.set_blocking(fd, False)
            with contextlib.suppress(BlockingIOError):  # without isolation, something may still hold the other end
                while not output.ended and output.total < 4 * CHUNK + output.max_total:
                    output.read(fd)
        for fd in {self.stdin, self.out, self.err, self.pidfd} - {-1}:
            os.close(fd)
        if forced is not None:
            status = forced
        elif os.WIFSIGNALED(wait_status):
            status = KILLED
        else:
            status = {interpreter.OK: OK, interpreter.MEMORY: MEMORY}.get(os.WEXITSTATUS(wait_status), ERROR)
        cut = any(output.total > len(output.data) for output in outputs.values())
        out, err = (output.data[: output.total] for output in outputs.values())
        return RESPONSE.pack(status, took, cut, len(out), len(err)), out, err

    def _watch(
        self,
        supervisor: socket.socket,
        request: memoryview,
        outputs: dict[int, _Output],
        deadline: float,
        disk: scratch.DiskMonitor | None,
    ) -> int | None:
        """Feed and read the process until it ends by itself (None) or has to be killed (the status)."""
        poller = select.poll()
        for fd in (self.pidfd, supervisor.fileno(), self.stdin, *outputs):
            poller.register(fd, select.POLLOUT if fd == self.stdin else select.POLLIN)
        os.set_blocking(self.stdin, False)
        unsent = request
        next_check = time.monotonic() + DISK_CHECK_SECONDS if disk else math.inf
        while True:
            now = time.monotonic()
            if now >= deadline:
                return TIMEOUT
            if disk and now >= next_check:
                if disk.exceeded():
                    return KILLED
                next_check = time.monotonic() + DISK_CHECK_SECONDS
            ready = {fd for fd, _ in poller.poll(1000 * max(0.0, min(deadline, next_check) - now))}
            if supervisor.fileno() in ready:  # nothing is sent during a call: the connection was closed
                return KILLED
            if self.stdin in ready:
                try:
                    unsent = unsent[os.write(self.stdin, unsent) :]
                except BrokenPipeError:  # it has closed its stdin
                    unsent = unsent[:0]
                if not unsent:
                    poller.unregister(self.stdin)
                    os.close(self.stdin)
                    self.stdin = -1
            for fd in ready & outputs.keys():
                outputs[fd].read(fd)
                if outputs[fd].ended:
                    poller.unregister(fd)
            if any(output.total > output.max_total for output in outputs.values()):
                return KILLED
            if self.pidfd in ready:
                return None


class _Output:
    """The first bytes of an output, as many as `data` holds, and their total number."""

    def __init__(self, data: memoryview, chunk: memoryview) -> None:
        self.data, self.chunk, self.max_total = data, chunk, MAX_OUTPUT_FACTOR * len(data)
        self.total, self.ended = 0, False

    def read(self, fd: int) -> None:
        """Read what is available; nothing means that the output has ended."""
        count = os.readv(fd, [self.chunk])
        room = self.data[self.total : self.total + count]
        room[:] = self.chunk[: len(room)]
        self.total += count
        self.ended = not count


def _run_confined(confinement: isolation.Confinement, fds: tuple[int, int, int]) -> NoReturn:
    """In the new process: confine it, wait for the code, run it."""
    try:
        for number, fd in enumerate(fds):
            os.dup2(fd, number)
        confinement.apply()
        os.closerange(3, 1024)
        os.write(1, b"r")
        code, _, _, show_last = REQUEST.unpack(_read_exactly(REQUEST.size))
        text = _read_exactly(code)
        random.seed(0)
    except BaseException as error:
        os.write(2, f"{type(error).__name__}: {error}".encode())
        os._exit(interpreter.ERROR)
    interpreter.run(text, show_last)


def _read_exactly(count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = os.read(0, count - len(data))
        if not part:
            os._exit(interpreter.ERROR)
        data += part
    return data
