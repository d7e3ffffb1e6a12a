"""The worker of one Python session: it holds the points, each a frozen process, and serves the calls from them.

The worker is forked from the zygote. Before it has seen a byte of a call, it forks the root of the session, a confined
process in which no code has run. A process of a session makes the system call PAUSE (`seccomp`) and waits for an order;
while it waits it is *frozen*: a point of the session. In the tier "namespaces" a call runs in a fork of the point it
starts from, so a point can be started from any number of times:

1. The worker orders the point to fork. It calls clone; the kernel asks the worker, which allows exactly one. The new
   process is the worker's child (CLONE_PARENT). Both pause.
2. Only now, so that the point never sees anything of the new process, the worker mounts new scratch, copies the files
   of the point into it, and gives the new process new stdin, stdout and stderr.
3. It runs the code and pauses: this is the new point. If it ends, takes too long, or leaves a thread or an open file,
   it is killed, and the session stays where it was.

Every process of a session in which code has run is hostile, also a point and a fork of it from its first instruction
on. Nothing that it says is believed, except for its output and whether the code raised. What is relied on is told by
the kernel: who asks (the number of the process in a notification), how many threads and descriptors it has (/proc), and
that it has ended. While a point is frozen nothing of it runs: it has one thread, which waits, and timers and signals
are not allowed. No memory can be shared, no descriptor survives a call, and the files of a point are on a file system
that is read-only from then on, so a fork has a copy of everything and reaches nothing of its parent, of other points
or of other sessions. All processes of a session are in one PID namespace, whose first process is the worker's
(`_fork_init`); when the worker ends, so do they. A session that breaks the protocol is ended with all its points; these
are then built again by replay (`sessions`).

Calls of one session run one at a time, as they share the place where scratch is mounted. Landlock, which cannot name
file systems that do not exist yet, leaves it to the read-only mounts that nothing else can be written to.

In the other tiers, without a PID namespace, nothing would end a hostile fork when the worker dies: the signal that a
process gets when its parent dies is not inherited. There the session is one process, which never forks. A call changes
it in place, and the point that it started from is lost; a branch is built by replay.

A request is `REQUEST`: what (`RUN` or `RELEASE`), the point to start from or to release, the new point's number, bytes
of code, seconds; and the code. The response to `RUN` is that of the zygote; the new point exists if the status is OK,
ERROR or MEMORY. LOST means that the point does not exist (any more).
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import select
import signal
import socket
import struct
import sys
import time
from dataclasses import dataclass
from typing import Any, NoReturn

from arpo.tools.sandbox import interpreter, isolation, linux, scratch, seccomp
from arpo.tools.sandbox.streams import ERROR, KILLED, LOST, MEMORY, OK, REFUSED, Streams

REQUEST = struct.Struct("!BQQId")
RUN, RELEASE = 1, 2
ROOT = 0  # the number of the root
FOLDER_SIZE = 4096  # bytes of the first message of a worker, which says where scratch is
FORK_SECONDS = 3.0  # a fork takes milliseconds; this is less than the supervisor waits after the time of a call
EXIT_SECONDS = 1.0  # for threads that have been joined
THREADS_LEFT = "the code left threads running. End them before the code ends; nothing of this call was kept."
FILES_LEFT = (
    "the code left files open. Close them (`with open(...)`) before the code ends; nothing of this call was kept."
)
TOO_MANY_FILES = (
    f"the code left more than {scratch.MAX_FILES} files, or folders deeper than {scratch.MAX_DEPTH}. Nothing of this "
    "call was kept."
)


@dataclass(slots=True)
class Point:
    """A process of the session; `waits` is the call by which it is frozen, `files` its scratch, -1 if that is empty."""

    pid: int
    pidfd: int
    waits: linux.Notification
    files: int = -1


class Broken(Exception):
    """A process broke the protocol, or died: the session is ended."""


def run(settings: dict[str, Any], supervisor: socket.socket, proc: int, base_memory: int) -> NoReturn:
    """Serve one session until the supervisor closes the connection."""
    try:
        linux.die_with_parent()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        session = Session(settings, supervisor, proc)
        try:
            session.open(base_memory)
            supervisor.sendall(os.fsencode(session.folder).ljust(FOLDER_SIZE, b"\0"))
            while session.serve():
                pass
        finally:
            session.close()
    except ConnectionError:  # the supervisor closed the connection during a call
        pass
    except BaseException as error:
        with contextlib.suppress(OSError):
            print(f"session worker: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    os._exit(1)


class Session:
    """The points of one session; `forks` says whether a call runs in a fork of its point."""

    def __init__(self, settings: dict[str, Any], supervisor: socket.socket, proc: int) -> None:
        self.settings, self.supervisor, self.proc = settings, supervisor, proc
        self.forks = settings["tier"] == "namespaces"
        self.folder = isolation.scratch_dir(settings["readable"])
        if not self.forks:
            self.folder = f"{settings['root']}/{os.urandom(8).hex()}"
        self.points: dict[int, Point] = {}
        self.listener, self.max_processes = -1, 0
        (self.pause,) = seccomp.numbers(seccomp.PAUSE, os.uname().machine)

    def open(self, base_memory: int) -> None:
        """Fork the root."""
        tier, readable = self.settings["tier"], self.settings["readable"]
        limit = self.settings["scratch"]
        confinement = isolation.Confinement(tier, base_memory + self.settings["memory"], limit, readable, session=True)
        self.max_processes = confinement.max_processes
        os.environ["HOME"] = os.environ["TMPDIR"] = self.folder
        if self.forks:
            linux.unshare(linux.NEW_MOUNT)
            linux.unshare(linux.NEW_PID)
            _fork_init()
        else:
            os.mkdir(self.folder, 0o700)
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            _run_root(confinement, self.folder, theirs, self.pause, self.forks)
        theirs.close()
        message, fds, _, _ = socket.recv_fds(ours, 1000, 1)
        if not fds:
            raise RuntimeError(f"a process could not be confined: {message.decode(errors='replace')}")
        self.listener = fds[0]
        message = ours.recv(1000)  # why it could not be confined after that, or nothing
        ours.close()
        pidfd = os.pidfd_open(pid)
        if message or self.listener not in _ready(self.listener, pidfd):
            raise RuntimeError(f"a process could not be confined: {message.decode(errors='replace')}")
        waits = linux.receive_notification(self.listener)
        if (waits.pid, waits.number) != (pid, self.pause):
            raise RuntimeError("a process did something else than wait")
        self.points[ROOT] = Point(pid, pidfd, waits)
        self._left_behind(self.points[ROOT])  # fails at once where /proc does not tell

    def close(self) -> None:
        """End every process and remove the files."""
        for point in self.points.values():
            _kill(point)
        if not self.forks:
            scratch.remove(self.folder)

    def serve(self) -> bool:
        """Serve one request; return whether there will be more."""
        self._release_dead_points()
        header = self._receive(REQUEST.size)
        if not header:
            return False
        what, start, new, size, seconds = REQUEST.unpack(header)
        if what == RELEASE:
            if start in self.points:
                self._release(self.points.pop(start))
            return True
        code = self._receive(size)
        if start not in self.points or len(self.points) >= isolation.MAX_NODES:
            self.supervisor.sendall(Streams.empty_response(LOST))
            return True
        try:
            self.supervisor.sendall(self._run(start, new, interpreter.CODE_SIZE.pack(size) + code, seconds))
        except Broken:  # no code has run in the root, so that it is not to blame
            self.supervisor.sendall(Streams.empty_response(LOST if start == ROOT else KILLED))
            return False
        return bool(self.points)

    def _release_dead_points(self) -> None:
        """Until there is a request, release points as they are killed: memory may be short, and they have files."""
        while self.supervisor.fileno() not in (
            ready := _ready(self.supervisor.fileno(), *(point.pidfd for point in self.points.values()))
        ):
            for number in [number for number, point in self.points.items() if point.pidfd in ready]:
                self._release(self.points.pop(number))

    def _receive(self, size: int) -> bytes:
        """Return so many bytes of the supervisor; nothing when it has closed the connection."""
        data = bytearray()
        while len(data) < size:
            part = self.supervisor.recv(size - len(data))
            if not part:
                return b""
            data += part
        return bytes(data)

    def _run(self, start: int, new: int, code: bytes, seconds: float) -> bytes:
        """Run code from a point; return the response. The time of the call begins when there is a process for it."""
        if not self.forks:
            return self._run_in(self.points.pop(start), new, code, seconds)
        process = self._fork(self.points[start])
        if process is None:
            self._release(self.points.pop(start))
            return Streams.empty_response(LOST)
        isolation.mount_scratch(self.folder, self.settings["scratch"])
        files = os.open(self.folder, scratch.DIRECTORY)
        try:
            if self.points[start].files >= 0:
                scratch.copy(self.points[start].files, files)
            response = self._run_in(process, new, code, seconds)
            if new in self.points and os.listdir(files):
                self.points[new].files, files = files, -1
            return response
        finally:
            if files >= 0:
                os.close(files)
            linux.unmount(self.folder)

    def _fork(self, point: Point) -> Point | None:
        """Have a point fork, and freeze both again; return the new process, or None if the point has died."""
        deadline = time.monotonic() + FORK_SECONDS
        try:
            linux.answer_notification(self.listener, point.waits, interpreter.FORK)
        except FileNotFoundError:
            return None
        child: Point | None = None
        frozen, allowed = False, False
        poller = select.poll()
        for fd in (self.listener, point.pidfd, self.supervisor.fileno()):
            poller.register(fd, select.POLLIN)
        while child is None or not frozen:
            ready = {fd for fd, _ in poller.poll(1000 * max(0.0, deadline - time.monotonic()))}
            if self.supervisor.fileno() in ready:
                raise ConnectionError
            if not ready or point.pidfd in ready:  # it took too long, or died
                raise Broken
            asked = self._next_notification()
            if asked is None:
                continue
            if asked.pid == point.pid and asked.number == self.pause and not frozen:
                if asked.argument == interpreter.NO_FORK or not allowed:
                    raise Broken
                point.waits, frozen = asked, True
            elif asked.pid == point.pid and asked.number != self.pause and not allowed and not frozen:
                allowed = True
                linux.answer_notification(self.listener, asked, go_on=True)
            elif asked.number == self.pause and allowed and child is None and not self._is_known(asked.pid):
                child = self._new_process(asked)
            else:
                self._refuse(asked)
        if self._left_behind(point) or self._left_behind(child):
            _kill(child)
            raise Broken
        self._take_streams(point)
        return child

    def _new_process(self, asked: linux.Notification) -> Point | None:
        """Return the process that pauses for the first time, unless that is only a thread of one."""
        try:
            pidfd = os.pidfd_open(asked.pid)
        except OSError:  # a thread, or dead
            self._refuse(asked)
            return None
        if not linux.still_waits(self.listener, asked):
            os.close(pidfd)
            return None
        return Point(asked.pid, pidfd, asked)

    def _run_in(self, process: Point, new: int, code: bytes, seconds: float) -> bytes:
        """Run code in a process, which becomes the new point or is killed; return the response."""
        started = time.monotonic()
        deadline = started + seconds
        streams = self._give_streams(process)
        disk = None if self.forks else scratch.DiskMonitor(self.folder, self.settings["scratch"], process.pid)
        paused, refusal, status = False, "", KILLED

        def ended(ready: set[int]) -> bool:
            """Whether the process waits again, or is dead; every other question is answered with no."""
            nonlocal paused
            if self.listener in ready and (asked := self._next_notification()) is not None:
                paused = asked.pid == process.pid and asked.number == self.pause
                if paused:
                    process.waits = asked
                else:
                    self._refuse(asked)
            return paused or process.pidfd in ready

        fds = (self.listener, process.pidfd)
        try:
            if self.forks:  # so that a call can have as many threads, however many points there are
                most = len(self.points) + isolation.MAX_THREADS
                resource.prlimit(process.pid, resource.RLIMIT_NPROC, (most, self.max_processes))
            linux.answer_notification(self.listener, process.waits, interpreter.RUN)
            forced = streams.watch(self.supervisor, code, deadline, disk, fds, ended)
            status = process.waits.argument & 0xFF
            refusal = self._left_behind(process) if paused and forced is None else ""
            if refusal == FILES_LEFT:
                linux.answer_notification(self.listener, process.waits, interpreter.COLLECT)
                paused = False
                forced = streams.watch(self.supervisor, b"", deadline, disk, fds, ended)
                refusal = self._left_behind(process) if paused and forced is None else ""
            if paused and forced is None and not refusal:
                refusal = self._freeze_files()
        except (FileNotFoundError, ProcessLookupError):  # it was killed
            forced = None
        finally:
            if disk:
                disk.close()
        streams.drain()
        if paused and forced is None and not refusal:
            self._take_streams(process)
            self.points[new] = process
            status = {interpreter.OK: OK, interpreter.MEMORY: MEMORY}.get(status, ERROR)
        else:
            died_of = _kill(process)
            if forced is not None:
                status = forced
            elif refusal:
                status = REFUSED
            else:  # a kill that is not ours comes from the kernel, when memory runs out, and not from the code
                status = LOST if died_of == signal.SIGKILL and self.settings["tier"] != "none" else KILLED
        streams.close()
        if forced is not None and status == KILLED and _is_closed(self.supervisor):
            raise ConnectionError
        return streams.response(status, time.monotonic() - started, refusal)

    def _give_streams(self, process: Point) -> Streams:
        """Replace stdin, stdout and stderr of a process that waits; return our ends."""
        theirs_in, stdin = os.pipe()
        out, theirs_out = os.pipe()
        err, theirs_err = os.pipe()
        for fd in (stdin, out, err):
            os.fchmod(fd, 0)  # cannot be opened again through /proc
        for number, fd in enumerate((theirs_in, theirs_out, theirs_err)):
            with contextlib.suppress(FileNotFoundError):  # it is dead, which is found out soon
                linux.give_descriptor(self.listener, process.waits, fd, number)
            os.close(fd)
        return Streams(stdin, out, err, self.settings["output"])

    def _take_streams(self, process: Point) -> None:
        """Replace stdin, stdout and stderr of a process that waits, whatever it has put there, by /dev/null.

        It is opened anew, as whoever shares an open file shares its flags.
        """
        null = os.open("/dev/null", os.O_RDWR)
        for number in range(3):
            with contextlib.suppress(FileNotFoundError):  # it is dead, which is found out soon
                linux.give_descriptor(self.listener, process.waits, null, number)
        os.close(null)

    def _left_behind(self, process: Point) -> str:
        """Return what a process that waits must not have: other threads, or open files; nothing if it has neither.

        While its only thread waits, nothing can change that.
        """
        with open(f"self/fdinfo/{process.pidfd}", opener=self._open_proc) as file:
            pid = next(int(line.split()[1]) for line in file if line.startswith("Pid:"))  # as /proc has it
        if pid <= 0:
            return ""  # it is dead, which is found out soon
        end = time.monotonic() + EXIT_SECONDS
        while len(self._list_proc(f"{pid}/task")) > 1:
            if time.monotonic() > end:
                return THREADS_LEFT
            time.sleep(0.0005)
        return FILES_LEFT if set(self._list_proc(f"{pid}/fd")) - {"0", "1", "2"} else ""

    def _open_proc(self, path: str, flags: int) -> int:
        return os.open(path, flags, dir_fd=self.proc)

    def _list_proc(self, path: str) -> list[str]:
        try:
            directory = self._open_proc(path, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:  # it is dead, which is found out soon
            return []
        try:
            return os.listdir(directory)
        finally:
            os.close(directory)

    def _freeze_files(self) -> str:
        """Make scratch read-only for good; return why that is not possible, or nothing."""
        if not scratch.is_small(self.folder):
            return TOO_MANY_FILES
        if self.forks:
            try:
                isolation.freeze_scratch(self.folder)
            except OSError as error:
                if error.errno != errno.EBUSY:
                    raise
                return FILES_LEFT  # a file that is mapped into memory
        return ""

    def _next_notification(self) -> linux.Notification | None:
        """Return the next question; None if who asked is dead."""
        try:
            return linux.receive_notification(self.listener)
        except FileNotFoundError:
            return None

    def _refuse(self, asked: linux.Notification) -> None:
        with contextlib.suppress(FileNotFoundError):
            linux.answer_notification(self.listener, asked, error=errno.EPERM)

    def _is_known(self, pid: int) -> bool:
        return any(point.pid == pid for point in self.points.values())

    def _release(self, point: Point) -> None:
        _kill(point)
        if point.files >= 0:
            os.close(point.files)


def _kill(point: Point) -> int:
    """End a process; return the signal that it died of, 0 if it has exited."""
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(point.pidfd, signal.SIGKILL)
    status = os.waitpid(point.pid, 0)[1]
    os.close(point.pidfd)
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


def _is_closed(supervisor: socket.socket) -> bool:
    return bool(select.select([supervisor], [], [], 0)[0])


def _ready(*fds: int) -> set[int]:
    """Wait until one of the descriptors can be read, or a process has ended; return those."""
    poller = select.poll()
    for fd in fds:
        poller.register(fd, select.POLLIN)
    return {fd for fd, _ in poller.poll()}


def _fork_init() -> None:
    """Fork the first process of the new PID namespace; return when it would end with this one."""
    ready, theirs = os.pipe()
    if os.fork() == 0:
        linux.die_with_parent()
        os.write(theirs, b"r")
        os.closerange(0, 1024)
        while True:
            signal.pause()
    os.close(theirs)
    if os.read(ready, 1) != b"r":
        raise RuntimeError("the first process of a session died")
    os.close(ready)


def _run_root(
    confinement: isolation.Confinement, folder: str, worker: socket.socket, pause: int, forks: bool
) -> NoReturn:
    """In the new process: confine it and wait for orders."""
    try:
        null = os.open("/dev/null", os.O_RDWR)
        for number in range(3):
            os.dup2(null, number)
        os.chdir("/" if forks else folder)
        confinement.apply("/" if forks else folder, worker)
    except BaseException as error:
        worker.send(f"{type(error).__name__}: {error}"[:1000].encode())
        os._exit(interpreter.ERROR)
    os.closerange(3, 1024)
    interpreter.serve_session(pause, seccomp.FORK, folder)
