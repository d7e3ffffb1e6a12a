"""Runs code that a model wrote in isolated processes.

    with Sandbox() as sandbox:
        sandbox.run("print(6 * 7)")      # SandboxResult(stdout="42\\n", stderr="", status="ok", ...)

`Sandbox` starts a zygote (`zygote`) with an empty environment, which sets up the isolation once, imports common
modules, and forks a new confined process for every call. Of the two tiers of isolation (`isolation`), the better one
that this machine allows is chosen, tested with a dozen attacks, and named in `tier`. Where neither works, `start`
refuses and says what is missing. A worker is a socket and serves one call at a time. One that fails is closed; one that
died while idle is not used. A zygote that has died, or whose worker did not answer in time, is replaced with all its
workers. Calls that keep state are in `sessions`.

Guarantees: no call sees the network, the machine's files, environment or processes, or traces of another call: its
memory, scratch and process are new. Nothing of a call is left when it returns. Its output cannot forge its status. The
same code gives the same output, unless it asks for the time, for entropy or for addresses of objects. A worker that
dies is replaced, and its call is made once more, as is a call that was killed from outside. Calls that run at once fit
into half of the machine's memory (each sandbox counts its own calls), and the kernel kills them first when memory runs
out.
Not covered: kernel bugs; fairness between calls that use much CPU or disk; side channels: time, the load of processor
and caches, and numbers that the kernel counts for all calls or for the whole machine (inode numbers of pipes, numbers
of file systems, how many processes the sandbox has started). In the tier "landlock", code can also ask for names, sizes
and times of files that it can guess, and which processes exist and how many files they have open. It sees the machine's
name, its own process id, and inode numbers on the disk, which depend on what other calls do. So two calls that agree on
how can pass bits to each other.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import secrets
import select
import site
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

from arpo.errors import ArpoError
from arpo.tools.sandbox import figures
from arpo.tools.sandbox.scratch import remove
from arpo.tools.sandbox.session_worker import FOLDER_SIZE
from arpo.tools.sandbox.streams import RESPONSE, STATUSES
from arpo.tools.sandbox.zygote import MAX_CODE, MAX_STDIN, REQUEST, SESSION, WORKER

T = TypeVar("T")
TIERS = ("namespaces", "landlock")
START_SECONDS = 60.0
GRACE_SECONDS = 10.0  # after the timeout of a call, before its worker counts as broken
SYSTEM_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/share/zoneinfo")
MAX_SECONDS = 86400
PACKAGES = ("numpy", "sympy", "mpmath")
FIGURES: dict[str, Any] = {"packages": (*PACKAGES, figures.PACKAGE), "max_output": 2 << 20}
"""What a sandbox needs whose calls print their figures (`figures`)."""
_START = """
import os, sys
sys.path.insert(0, sys.argv.pop(1))
register, os.register_at_fork = os.register_at_fork, lambda **_: None
from arpo.tools.sandbox.zygote import main
os.register_at_fork = register
main()
"""  # what `random` and `threading` do in every forked process is not needed, and would take much of its time
_ENVIRONMENT = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
_PROBES = """
import os, socket
def network(): socket.socket()
def local(): socket.socket(socket.AF_UNIX)
def process(): os.fork() or os._exit(0)
def program(): os.execv("/bin/true", ["true"])
def signals(): os.kill(PID, 0)
def passwords(): open("/etc/passwd").read()
def environment(): open("/proc/%d/environ" % PID).read()
def memory(): open("/proc/%d/mem" % PID, "rb").read(1)
def reads(): open(CANARY).read()
def writes(): open(CANARY, "r+").write("x")
def root(): os.mkdir("/arpo-probe"); os.rmdir("/arpo-probe")
def library(): open(os.__file__, "a")
through = []
for probe in (network, local, process, program, signals, passwords, environment, memory, reads, writes, root, library):
    try: probe()
    except OSError: pass
    else: through.append(probe.__name__)
for place in PLACES:  # looked at from outside
    try: open(place, "w")
    except OSError: pass
print(" ".join(through) or "held")
"""


class CallCancelled(OSError):
    """The call was cancelled before it was sent."""


class SandboxError(Exception):
    """Two workers failed to answer: the machine's fault, not the code's."""


class Sandbox:
    """Runs code in new confined processes, up to `workers` at a time; use `with`, or `start` and `close`.

    A call may use `memory_mb` above what Python itself needs and `scratch_mb` of files. There are at most as many
    workers as half of the machine's memory has room for, and at least one. A call waits for a worker, and its time
    begins when it has got one. Of each output the first `max_output` bytes are kept. Code that names one of `packages`
    is forked from a process that has imported just those. `tier` demands one tier; `unsafe_no_isolation` allows to run
    without isolation where there is none.
    """

    def __init__(
        self,
        *,
        workers: int | None = None,
        memory_mb: int = 512,
        scratch_mb: int = 64,
        max_output: int = 65536,
        packages: Sequence[str] = PACKAGES,
        tier: str | None = None,
        unsafe_no_isolation: bool = False,
    ) -> None:
        if tier is not None and tier not in TIERS:
            raise ArpoError(f"there is no sandbox tier {tier!r}; use one of: {', '.join(TIERS)}")
        self.tier: str | None = None
        room = machine_memory() // 2 // ((memory_mb + scratch_mb) << 20)
        self.workers = max(1, min(workers or max(8, 2 * (os.cpu_count() or 1)), room))
        self._limits = {"memory": memory_mb << 20, "scratch": scratch_mb << 20, "output": max_output}
        self._packages = {name: re.compile(rf"\b{re.escape(name)}\b") for name in packages}
        self._allowed_tiers = (tier,) if tier else (*TIERS, "none") if unsafe_no_isolation else TIERS
        self.slots = threading.Semaphore(self.workers)
        self._threads: ThreadPoolExecutor | None = None
        self._pools: dict[tuple[str, ...], Pool] = {}  # by the packages that their zygotes have imported
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Choose the best tier that passes the self-test; ArpoError, naming what is missing, if there is none."""
        if self.tier is not None:
            return
        reasons = []
        for tier in self._allowed_tiers:
            try:
                self._pools = {}
                self.tier = tier
                self.self_test(self.run)
                break
            except (SandboxError, OSError) as error:
                self.close()
                reasons.append(f"{tier}: {error}")
        else:
            raise ArpoError(
                "code cannot be isolated on this machine: "
                + "; ".join(reasons)
                + ". Allow one of these, leave the python tool out, or accept the risk of running a model's code with "
                "all your rights: tools.unsafe_no_isolation = true"
            )
        self._threads = ThreadPoolExecutor(self.workers, thread_name_prefix="arpo-sandbox")
        if self.tier == "none":
            print("WARNING: NO ISOLATION. Code that a model writes runs with all your rights.", file=sys.stderr)

    def close(self) -> None:
        """End every process; running calls fail."""
        with self._lock:
            self.tier = None
            pools = list(self._pools.values())
        for pool in pools:
            pool.close()
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None

    def run(self, code: str, timeout: float = 10.0, stdin: str = "", show_last: bool = False) -> SandboxResult:
        """Run `code` for at most `timeout` seconds; `show_last` prints the value of its last expression."""
        return self._run(Call(code, timeout, stdin, show_last))

    async def arun(self, code: str, timeout: float = 10.0, stdin: str = "", show_last: bool = False) -> SandboxResult:
        """`run` for an event loop. A cancelled call ends at once, and nothing of it is left."""
        return await self.in_thread(self._run, Call(code, timeout, stdin, show_last))

    async def in_thread(self, run: Callable[[Call], T], call: Call) -> T:
        """Run a call in a thread of the sandbox; if that is cancelled, so is the call."""
        if self._threads is None:
            raise SandboxError("the sandbox is not open")
        try:
            return await asyncio.wrap_future(self._threads.submit(run, call))
        except asyncio.CancelledError:
            call.cancel()
            raise

    def _run(self, call: Call) -> SandboxResult:
        pool = self.pool(call.code)
        with self.slots:
            reason = ""
            for _ in range(2):
                try:
                    return pool.run(call)
                except OSError as error:
                    reason = str(error)
                if call.cancelled:
                    break
            raise SandboxError(f"no worker answered ({reason}){pool.stderr_tail()}")

    def pool(self, code: str) -> Pool:
        """Return the pool that has imported the packages the code names, and no more: small processes fork faster."""
        named = tuple(name for name, found in self._packages.items() if found.search(code))
        with self._lock:
            if self.tier is None:
                raise SandboxError("the sandbox is not open")
            if named not in self._pools:
                self._pools[named] = Pool({**self._limits, "tier": self.tier, "imports": named})
            return self._pools[named]

    def self_test(self, run: Callable[[str, float], SandboxResult]) -> None:
        """Attack the sandbox with code that `run` runs; SandboxError if one of the probes succeeds."""
        if self.tier == "none":
            return
        places = [f"{folder}/arpo-probe-{secrets.token_hex(8)}" for folder in (os.path.expanduser("~"), os.getcwd())]
        with tempfile.NamedTemporaryFile(prefix="arpo-canary-") as canary:
            given = f"CANARY, PLACES, PID = {canary.name!r}, {places!r}, {os.getpid()}\n"
            result = run(given + _PROBES, START_SECONDS)
            written = [place for place in places if os.path.lexists(place)]
            for place in written:
                os.unlink(place)
            written += [canary.name] * bool(canary.read())
        if written or result.status != "ok" or result.stdout != "held\n":
            output = " ".join([*f"{result.stdout}{result.stderr}".split(), *written])
            raise SandboxError(f"a probe got through ({result.status}): {output}")


@dataclass(frozen=True, slots=True)
class SandboxResult:
    """Output of code and how it ended: ok, error, timeout, memory, or killed (a crash, too much output).

    A call of a session can also be "refused" (it left threads or open files) or "lost" (its point has died).
    """

    stdout: str
    stderr: str
    status: str
    seconds: float
    truncated: bool


class Call:
    """One request, and the socket of the worker that serves it."""

    def __init__(self, code: str, timeout: float, stdin: str, show_last: bool) -> None:
        text, data = code.encode("utf-8", "replace"), stdin.encode("utf-8", "replace")
        if len(text) > MAX_CODE or len(data) > MAX_STDIN:
            raise ValueError(f"code may have {MAX_CODE} bytes, and stdin {MAX_STDIN}")
        if not 0 < timeout <= MAX_SECONDS:
            raise ValueError(f"the timeout must be between 0 and {MAX_SECONDS} seconds, not {timeout}")
        self.code, self.timeout = code, timeout
        self.request = REQUEST.pack(len(text), len(data), timeout, show_last) + text + data
        self.cancelled = False
        self._lock = threading.Lock()
        self._worker: socket.socket | None = None

    def run_on(
        self, worker: socket.socket, request: bytes | None = None, timeout: float | None = None
    ) -> SandboxResult:
        """Run this call on a worker, or another request on the worker of a session; OSError if that fails."""
        with self._lock:
            if self.cancelled:
                raise CallCancelled("cancelled")
            self._worker = worker
        try:
            worker.settimeout((timeout or self.timeout) + GRACE_SECONDS)
            worker.sendall(self.request if request is None else request)
            status, seconds, truncated, out, err = RESPONSE.unpack(_receive(worker, RESPONSE.size))
            stdout, stderr = (_receive(worker, size).decode("utf-8", "replace") for size in (out, err))
        finally:
            with self._lock:
                self._worker = None
        return SandboxResult(stdout, stderr, STATUSES[status], seconds, truncated)

    def cancel(self) -> None:
        """Close the connection, on which the worker ends the code and itself."""
        with self._lock:
            self.cancelled = True
            if self._worker is not None:
                with contextlib.suppress(OSError):
                    self._worker.shutdown(socket.SHUT_RDWR)


def _receive(worker: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = worker.recv(size - len(data))
        if not part:
            raise ConnectionError("a worker died")
        data += part
    return bytes(data)


class Pool:
    """The workers of one zygote, which is started on first use and again after it died."""

    def __init__(self, settings: dict[str, object]) -> None:
        self._settings = settings
        self._lock = threading.RLock()  # a session may be closed by the garbage collector, at any time
        self._zygote: Zygote | None = None
        self._idle: list[socket.socket] = []
        self._busy: set[socket.socket] = set()
        self._leftovers: list[str] = []  # directories of zygotes that died before they could remove them
        self._closed = False

    def run(self, call: Call) -> SandboxResult:
        """Run the call on an idle worker or a new one; OSError if the worker fails, which is then closed."""
        zygote, worker = self._take()
        healthy = False
        try:
            result = call.run_on(worker)
            healthy = True
        except TimeoutError:  # the worker should have ended the call itself
            zygote.process.kill()
            zygote.process.wait()
            raise
        finally:
            with self._lock:
                self._busy.discard(worker)
                if healthy and zygote is self._zygote:
                    self._idle.append(worker)
                else:
                    _close_socket(worker)
        return result

    def open_session(self) -> tuple[socket.socket, str]:
        """Return a connection to the worker of a new session, and its scratch directory; OSError if it fails."""
        with self._lock:
            zygote = self._living_zygote()
            worker = zygote.new_worker(SESSION)
            self._busy.add(worker)
        try:
            worker.settimeout(START_SECONDS)
            return worker, os.fsdecode(_receive(worker, FOLDER_SIZE).rstrip(b"\0"))
        except OSError:
            self.close_session(worker)
            raise

    def close_session(self, worker: socket.socket) -> None:
        """Close the connection to a session's worker, which ends with all processes of its session."""
        with self._lock:
            self._busy.discard(worker)
        _close_socket(worker)

    def stderr_tail(self) -> str:
        """Return the end of the zygote's stderr."""
        with self._lock:
            return "" if self._zygote is None else self._zygote.stderr_tail()

    def close(self) -> None:
        """End the zygote and all workers; running calls fail."""
        with self._lock:
            self._closed = True
            for worker in list(self._busy):
                with contextlib.suppress(OSError):
                    worker.shutdown(socket.SHUT_RDWR)
            self._close_zygote()
            for folder in self._leftovers:
                remove(folder)

    def _take(self) -> tuple[Zygote, socket.socket]:
        with self._lock:
            zygote = self._living_zygote()
            while self._idle and _is_closed(self._idle[-1]):
                _close_socket(self._idle.pop())
            worker = self._idle.pop() if self._idle else zygote.new_worker()
            self._busy.add(worker)
            return zygote, worker

    def _living_zygote(self) -> Zygote:
        if self._closed:
            raise ConnectionError("the sandbox was closed")
        if self._zygote is not None and not self._zygote.is_alive():
            self._close_zygote()
        self._zygote = self._zygote or Zygote(self._settings)
        return self._zygote

    def _close_zygote(self) -> None:
        while self._idle:
            _close_socket(self._idle.pop())
        if self._zygote is not None:
            self._zygote.close()
            self._leftovers += [self._zygote.folder] * os.path.isdir(self._zygote.folder)
        self._zygote = None


class Zygote:
    """The process that workers are forked from."""

    def __init__(self, settings: dict[str, object]) -> None:
        self.folder = os.path.realpath(tempfile.mkdtemp(prefix="arpo-sandbox-"))
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed in `close`)
        self._control, theirs = socket.socketpair()
        arguments = {
            **settings,
            "control": theirs.fileno(),
            "root": self.folder,
            "readable": library_dirs(),
            "path": [path for path in sys.path if path in site.getsitepackages()],
        }
        package_root = str(Path(__file__).parents[3])
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-S", "-P", "-B", "-X", "utf8", "-c", _START, package_root, json.dumps(arguments)],
                env=_ENVIRONMENT,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._log,
                cwd="/",
                start_new_session=True,
            )
        except OSError:
            os.rmdir(self.folder)
            raise
        finally:
            theirs.close()
        self._control.settimeout(START_SECONDS)
        try:
            answer = self._control.recv(4096).decode("utf-8", "replace")
        except OSError as error:
            answer = f"no {error}"
        if answer != "ok":
            tail = self.stderr_tail()
            self.close()
            remove(self.folder)
            raise ConnectionError((answer.removeprefix("no ") or "it died while starting") + tail)
        if settings["tier"] == "namespaces":  # which has its own root now
            with contextlib.suppress(OSError):
                os.rmdir(self.folder)

    def is_alive(self) -> bool:
        """Return whether it can still make workers."""
        return self.process.poll() is None and not _is_closed(self._control)

    def new_worker(self, kind: bytes = WORKER) -> socket.socket:
        """Return a socket to a new worker, or to the worker of a new session."""
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._control, [kind], [theirs.fileno()])
        return ours

    def stderr_tail(self) -> str:
        """Return the end of its stderr."""
        self._log.seek(max(0, os.fstat(self._log.fileno()).st_size - 2000))
        tail = self._log.read().decode("utf-8", "replace").strip()
        return f": {tail}" if tail else ""

    def close(self) -> None:
        """Close the connection and wait for the process to end."""
        _close_socket(self._control)
        try:
            self.process.wait(2)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._log.close()


def _close_socket(sock: socket.socket) -> None:
    """Close a connection, even if a forked process still holds it."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()


def _is_closed(sock: socket.socket) -> bool:
    """Return whether the other side of an idle connection has closed it."""
    poller = select.poll()
    poller.register(sock, select.POLLIN)
    return bool(poller.poll(0))


def library_dirs() -> list[str]:
    """Return the directories of Python, its packages and the libraries they need: all that confined code can read."""
    python = [sysconfig.get_path("stdlib"), f"{sys.base_prefix}/lib", f"{sys.prefix}/lib", *site.getsitepackages()]
    found = [path for path in (*python, *SYSTEM_LIBRARIES) if os.path.isdir(path)]
    return [path for path in dict.fromkeys(found) if not any(path.startswith(f"{other}/") for other in found)]


def machine_memory() -> int:
    """Return the bytes of memory that this process may use: those of the machine, or fewer if a cgroup limits it."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controller, path = line.split(":", 2)
            if controller in ("", "memory"):  # version 2 or 1
                group = Path("/sys/fs/cgroup", controller, path.lstrip("/"))
                for file in ("memory.max", "memory.limit_in_bytes"):
                    limits += [limit for folder in (group, *group.parents) if (limit := _number(folder / file))]
    return min(limits)


def _number(path: Path) -> int:
    """Return the number in a file; 0 if there is none."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # "max"
        return 0
