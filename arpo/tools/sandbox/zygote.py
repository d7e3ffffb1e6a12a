"""The process that confined code is forked from, and the workers that fork it.

The supervisor starts `main` with an empty environment. The zygote sets up the isolation, imports common modules, and
forks a worker for every socket that it receives. A worker serves one call at a time and has a spawner, which keeps a
confined process (`_ConfinedProcess`) ready that waits for the code. When it has ended, or its time is up, everything in
its PID namespace is killed, and the spawner forks the next one, with new scratch. Confined processes are copies of the
spawner, which never sees a byte of a call, so they inherit none. The status of a call comes from `waitpid` and goes
over sockets that the confined process never holds.

On another message the zygote forks the worker of a session instead (`session_worker`).

A request is the header `REQUEST` (bytes of code, bytes of stdin, seconds, flags) and the bytes; a response is
`RESPONSE` (status, seconds, truncated, bytes of stdout, bytes of stderr) and the bytes.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
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

from arpo.tools.sandbox import figures, interpreter, isolation, linux, scratch, session_worker
from arpo.tools.sandbox.streams import CHUNK, ERROR, KILLED, MEMORY, OK, Streams

REQUEST, WAIT_STATUS = struct.Struct("!IId?"), struct.Struct("i")
MAX_CODE, MAX_STDIN = 1 << 20, 1 << 24
WORKER, SESSION = b"w", b"s"  # what the supervisor asks the zygote for
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
    pid_namespace, proc, base_memory = zygote
    control.sendall(b"ok")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no zombies of workers
    while True:
        message, fds, _, _ = socket.recv_fds(control, 1, 1)
        if not message:
            break
        if os.fork() == 0:
            control.close()
            supervisor = socket.socket(fileno=fds[0])
            if message == SESSION:
                session_worker.run(settings, supervisor, proc, base_memory)
            _worker(settings, supervisor, pid_namespace, base_memory)
        os.close(fds[0])
    if settings["tier"] != "namespaces":  # which end with the zygote; else wait for the workers, which end as well
        with contextlib.suppress(ChildProcessError):
            os.waitpid(-1, 0)
        scratch.remove(settings["root"])
    os._exit(0)


def _set_up(settings: dict[str, Any]) -> tuple[int, int, int] | None:
    """Set up isolation and imports; return descriptors of our PID namespace (or -1) and /proc, and the address space.

    With namespaces, the process that entered them stays outside as a guard and returns None when the other has ended.
    """
    pid_namespace = -1
    os.umask(0o022)
    isolation.be_killed_first()
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
    proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    sys.path[:] = [*sys.path[1:], *settings["path"]]  # the first entry was only needed to find this module
    for name in PRELOADED.split():
        importlib.import_module(name)
    for name in settings["imports"]:
        with contextlib.suppress(Exception):  # the code that imports it will see the error
            importlib.import_module(name)
            exec(_SYMPY_WARM_UP if name == "sympy" else "", {})
    if figures.PACKAGE in settings["imports"]:
        figures.prepare()
    random.seed(0)
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
    interpreter.warm_up()
    gc.collect()
    gc.freeze()  # objects made so far are shared with every call; do not touch them
    return pid_namespace, proc, base_memory


def _worker(settings: dict[str, Any], supervisor: socket.socket, pid_namespace: int, base_memory: int) -> NoReturn:
    """Serve one call after the other until the supervisor closes the connection."""
    namespaces = settings["tier"] == "namespaces"
    folder = isolation.scratch_dir(settings["readable"]) if namespaces else f"{settings['root']}/{os.urandom(8).hex()}"
    try:
        linux.die_with_parent()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        if not namespaces:
            os.mkdir(folder, 0o700)
        spawner, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        spawner_pid = os.fork()
        if spawner_pid == 0:
            spawner.close()
            supervisor.close()
            _spawner(settings, theirs, folder, pid_namespace, base_memory)
        theirs.close()
        try:
            while (process := _ConfinedProcess.receive(spawner, settings["output"])) and (
                request := _receive(supervisor)
            ):
                response = process.serve(supervisor, request, settings)
                if not namespaces:
                    scratch.remove(process.folder)
                supervisor.sendall(response)
        finally:
            os.kill(spawner_pid, signal.SIGKILL)
            os.waitpid(spawner_pid, 0)
            if not namespaces:
                scratch.remove(folder)
    except ConnectionError:  # the supervisor closed the connection during a call
        pass
    except BaseException as error:
        _print_error("worker", error)
    os._exit(1)


def _spawner(
    settings: dict[str, Any], worker: socket.socket, folder: str, pid_namespace: int, base_memory: int
) -> NoReturn:
    """Make confined processes for a worker, one after the other.

    They are copies of this process. It must hold nothing of a call: the kernel writes the wait status to memory that
    they do not inherit, from where it goes to the worker.
    """
    try:
        linux.die_with_parent()
        namespaces = settings["tier"] == "namespaces"
        memory, limit = base_memory + settings["memory"], settings["scratch"]
        confinement = isolation.Confinement(settings["tier"], memory, limit, settings["readable"])
        status = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE)
        status.madvise(mmap.MADV_DONTFORK)
        place = os.environ["HOME"] = os.environ["TMPDIR"] = folder
        if namespaces:
            linux.unshare(linux.NEW_MOUNT)
        while True:
            if namespaces:
                isolation.mount_scratch(folder, limit)
            else:
                place = os.environ["HOME"] = os.environ["TMPDIR"] = f"{folder}/{os.urandom(8).hex()}"
                os.mkdir(place, 0o700)
            pid, fds = _spawn(confinement, place, pid_namespace)
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("4i", *fds))
            worker.sendmsg([f"{pid} {place}".encode()], [rights])
            for fd in fds:
                os.close(fd)
            linux.wait_into(pid, status)
            if namespaces:
                linux.unmount(folder)
            worker.send(memoryview(status)[: WAIT_STATUS.size])
    except ConnectionError:  # the worker has ended
        pass
    except BaseException as error:
        _print_error("spawner", error)
    os._exit(1)


def _spawn(confinement: isolation.Confinement, folder: str, pid_namespace: int) -> tuple[int, list[int]]:
    """Fork a process, wait until it is confined; return its pid and stdin, stdout, stderr and pidfd for the worker."""
    theirs_in, stdin = os.pipe()
    out, theirs_out = os.pipe()
    err, theirs_err = os.pipe()
    for fd in (stdin, out, err):
        os.fchmod(fd, 0)  # cannot be opened again through /proc
    if pid_namespace >= 0:
        linux.setns(pid_namespace, linux.NEW_PID)
        linux.unshare(linux.NEW_PID)
    pid = os.fork()
    if pid == 0:
        _run_confined(confinement, folder, (theirs_in, theirs_out, theirs_err))
    for fd in (theirs_in, theirs_out, theirs_err):
        os.close(fd)
    if os.read(out, 1) != b"r":
        raise RuntimeError(f"a process could not be confined: {os.read(err, 1000).decode(errors='replace')}")
    return pid, [stdin, out, err, os.pidfd_open(pid)]


def _print_error(who: str, error: BaseException) -> None:
    with contextlib.suppress(OSError):
        print(f"{who}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)


def _receive(supervisor: socket.socket) -> bytearray:
    """Return the next complete request; nothing when the supervisor has closed the connection."""
    data, needed = bytearray(), REQUEST.size
    while len(data) < needed:
        part = supervisor.recv(CHUNK)
        if not part:
            return bytearray()
        data += part
        if len(data) >= REQUEST.size:
            code, stdin, _, _ = REQUEST.unpack_from(data)
            needed = REQUEST.size + int(code) + int(stdin)
    return data


class _ConfinedProcess:
    """A process that is confined and waits for its code."""

    def __init__(self, spawner: socket.socket, pid: int, folder: str, fds: list[int], max_output: int) -> None:
        self.spawner, self.pid, self.folder = spawner, pid, folder
        stdin, out, err, self.pidfd = fds
        self.streams = Streams(stdin, out, err, max_output)

    @classmethod
    def receive(cls, spawner: socket.socket, max_output: int) -> _ConfinedProcess:
        """Return the next process that the spawner has made."""
        message, fds, _, _ = socket.recv_fds(spawner, 4096, 4)
        if not message:
            raise ConnectionError("the spawner has ended")
        pid, _, folder = message.decode().partition(" ")
        return cls(spawner, int(pid), folder, fds, max_output)

    def serve(self, supervisor: socket.socket, request: bytearray, settings: dict[str, Any]) -> bytes:
        """Run the request and return the response."""
        if select.select([self.pidfd], [], [], 0)[0]:
            raise RuntimeError("a process was killed while it waited for its code")
        disk = None
        if settings["tier"] != "namespaces":
            disk = scratch.DiskMonitor(self.folder, settings["scratch"], self.pid)
        seconds = REQUEST.unpack_from(request)[2]
        started, spawner = time.monotonic(), self.spawner.fileno()
        try:  # the spawner sends the status of a process that has ended
            deadline = started + seconds
            forced = self.streams.watch(supervisor, request, deadline, disk, (spawner,), lambda ready: True)
        finally:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
            ended = self.spawner.recv(WAIT_STATUS.size)
            if disk:
                disk.close()
        took = time.monotonic() - started
        self.streams.drain()
        self.streams.close()
        os.close(self.pidfd)
        if not ended:
            raise ConnectionError("the spawner has ended")
        (wait_status,) = WAIT_STATUS.unpack(ended)
        by_signal = os.WTERMSIG(wait_status) if os.WIFSIGNALED(wait_status) else 0
        if (
            forced is None and by_signal == signal.SIGKILL and settings["tier"] != "none"
        ):  # the code cannot have sent it
            raise RuntimeError("a call was killed from outside; when memory runs out, the kernel does that")
        if forced is not None:
            status = forced
        elif by_signal:
            status = KILLED
        else:
            status = {interpreter.OK: OK, interpreter.MEMORY: MEMORY}.get(os.WEXITSTATUS(wait_status), ERROR)
        return self.streams.response(status, took)


def _run_confined(confinement: isolation.Confinement, folder: str, fds: tuple[int, int, int]) -> NoReturn:
    """In the new process: confine it, wait for the code, run it."""
    try:
        for number, fd in enumerate(fds):
            os.dup2(fd, number)
        os.chdir(folder)
        confinement.apply(folder)
        os.closerange(3, 1024)
        os.write(1, b"r")
        code, _, _, show_last = REQUEST.unpack(_read_exactly(REQUEST.size))
        text = _read_exactly(code)
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
