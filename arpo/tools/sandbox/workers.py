"""The supervisor's side of the jail: zygotes, their workers, and one call made on one of them.

A worker is a socket. It is lent to one call at a time; one that fails is closed and never lent again, one that has died
while idle is not lent at all. A zygote that has died, or whose worker did not answer in time, is replaced with all its
workers.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import site
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path

from arpo.tools.sandbox.walls import remove
from arpo.tools.sandbox.zygote import HEAD, MAX_CODE, MAX_STDIN, STATUSES, TAIL

START_SECONDS = 60.0
GRACE_SECONDS = 10.0  # that a worker may be late with its answer before it counts as broken
SYSTEM = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/share/zoneinfo")
MAX_SECONDS = 86400
_BOOT = "import sys; sys.path.insert(0, sys.argv.pop(1)); from arpo.tools.sandbox.zygote import main; main()"
_ENVIRONMENT = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


@dataclass(frozen=True, slots=True)
class SandboxResult:
    """What code printed and how it ended: ok, error (it failed), timeout, memory, or killed (a crash, a flood)."""

    stdout: str
    stderr: str
    status: str
    seconds: float
    truncated: bool


class Call:
    """One request, and the socket of the worker that has it."""

    def __init__(self, code: str, timeout: float, stdin: str, show_last: bool) -> None:
        text, fed = code.encode("utf-8", "replace"), stdin.encode("utf-8", "replace")
        if len(text) > MAX_CODE or len(fed) > MAX_STDIN:
            raise ValueError(f"code may have {MAX_CODE} bytes, and stdin {MAX_STDIN}")
        if not 0 < timeout <= MAX_SECONDS:
            raise ValueError(f"the timeout must be between 0 and {MAX_SECONDS} seconds, not {timeout}")
        self.code, self.timeout = code, timeout
        self.request = HEAD.pack(len(text), len(fed), timeout, show_last) + text + fed
        self.cancelled = False
        self._lock = threading.Lock()
        self._worker: socket.socket | None = None

    def made_on(self, worker: socket.socket) -> SandboxResult:
        """Have a worker make this call; OSError if the worker fails."""
        with self._lock:
            if self.cancelled:
                raise OSError("cancelled")
            self._worker = worker
        try:
            worker.settimeout(self.timeout + GRACE_SECONDS)
            worker.sendall(self.request)
            status, seconds, truncated, out, err = TAIL.unpack(_exactly(worker, TAIL.size))
            stdout, stderr = (_exactly(worker, size).decode("utf-8", "replace") for size in (out, err))
        finally:
            with self._lock:
                self._worker = None
        return SandboxResult(stdout, stderr, STATUSES[status], seconds, truncated)

    def cancel(self) -> None:
        """Hang up: the worker then ends the code, and itself."""
        with self._lock:
            self.cancelled = True
            if self._worker is not None:
                with contextlib.suppress(OSError):
                    self._worker.shutdown(socket.SHUT_RDWR)


def _exactly(worker: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = worker.recv(size - len(data))
        if not part:
            raise ConnectionError("a worker died")
        data += part
    return bytes(data)


class Pool:
    """The workers of one zygote, which is started when first needed and again when it dies."""

    def __init__(self, settings: dict[str, object]) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._zygote: Zygote | None = None
        self._idle: list[socket.socket] = []
        self._busy: set[socket.socket] = set()
        self._left: list[str] = []  # folders of zygotes that died before they could remove them
        self._closed = False

    def run(self, call: Call) -> SandboxResult:
        """Make the call on an idle worker or a new one; OSError if that fails, and the worker is gone."""
        zygote, worker = self._take()
        works = False
        try:
            result = call.made_on(worker)
            works = True
        except TimeoutError:  # it should have ended the call itself
            zygote.process.kill()
            zygote.process.wait()
            raise
        finally:
            with self._lock:
                self._busy.discard(worker)
                if works and zygote is self._zygote:
                    self._idle.append(worker)
                else:
                    _hang_up(worker)
        return result

    def last_words(self) -> str:
        """What the zygote had to say of its troubles."""
        with self._lock:
            return "" if self._zygote is None else self._zygote.last_words()

    def close(self) -> None:
        """End the zygote and all workers; calls that are being made fail."""
        with self._lock:
            self._closed = True
            for worker in self._busy:
                with contextlib.suppress(OSError):
                    worker.shutdown(socket.SHUT_RDWR)
            self._drop()
            for folder in self._left:
                remove(folder)

    def _take(self) -> tuple[Zygote, socket.socket]:
        with self._lock:
            if self._closed:
                raise ConnectionError("the sandbox was closed")
            if self._zygote is not None and not self._zygote.lives():
                self._drop()
            self._zygote = self._zygote or Zygote(self._settings)
            while self._idle and _has_hung_up(self._idle[-1]):
                _hang_up(self._idle.pop())
            worker = self._idle.pop() if self._idle else self._zygote.new_worker()
            self._busy.add(worker)
            return self._zygote, worker

    def _drop(self) -> None:
        while self._idle:
            _hang_up(self._idle.pop())
        if self._zygote is not None:
            self._zygote.close()
            self._left += [self._zygote.folder] * os.path.isdir(self._zygote.folder)
        self._zygote = None


class Zygote:
    """The process that workers are forked from."""

    def __init__(self, settings: dict[str, object]) -> None:
        self.folder = os.path.realpath(tempfile.mkdtemp(prefix="arpo-sandbox-"))
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed in `close`)
        self._control, theirs = socket.socketpair()
        told = {
            **settings,
            "control": theirs.fileno(),
            "root": self.folder,
            "readable": libraries(),
            "path": [path for path in sys.path if path in site.getsitepackages()],
        }
        ours = str(Path(__file__).parents[3])
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-S", "-P", "-B", "-X", "utf8", "-c", _BOOT, ours, json.dumps(told)],
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
            words = self.last_words()
            self.close()
            remove(self.folder)
            raise ConnectionError((answer.removeprefix("no ") or "it died while starting") + words)
        if settings["tier"] == "namespaces":  # it has its own root now
            with contextlib.suppress(OSError):
                os.rmdir(self.folder)

    def lives(self) -> bool:
        """Whether it can still be asked for workers."""
        return self.process.poll() is None and not _has_hung_up(self._control)

    def new_worker(self) -> socket.socket:
        """A socket to a new worker."""
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._control, [b"w"], [theirs.fileno()])
        return ours

    def last_words(self) -> str:
        """The end of what it wrote to stderr."""
        self._log.seek(max(0, os.fstat(self._log.fileno()).st_size - 2000))
        words = self._log.read().decode("utf-8", "replace").strip()
        return f": {words}" if words else ""

    def close(self) -> None:
        """Hang up, and see that it is gone."""
        _hang_up(self._control)
        try:
            self.process.wait(2)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._log.close()


def _hang_up(sock: socket.socket) -> None:
    """Close a connection, even if a process that was forked from this one still holds it."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()


def _has_hung_up(sock: socket.socket) -> bool:
    """Whether the other side of a connection on which nothing is expected has closed it."""
    poller = select.poll()
    poller.register(sock, select.POLLIN)
    return bool(poller.poll(0))


def libraries() -> list[str]:
    """Folders that hold Python, its packages and the libraries they need: all that confined code can read."""
    python = [sysconfig.get_path("stdlib"), f"{sys.base_prefix}/lib", f"{sys.prefix}/lib", *site.getsitepackages()]
    found = [path for path in (*python, *SYSTEM) if os.path.isdir(path)]
    return [path for path in dict.fromkeys(found) if not any(path.startswith(f"{other}/") for other in found)]
