"""The supervisor's side of the sandbox: zygotes, their workers, and one call on one of them.

A worker is a socket and serves one call at a time. A worker that fails is closed; one that died while idle is not used.
A zygote that has died, or whose worker did not answer in time, is replaced with all its workers.
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

from arpo.tools.sandbox.scratch import remove
from arpo.tools.sandbox.zygote import MAX_CODE, MAX_STDIN, REQUEST, RESPONSE, STATUSES

START_SECONDS = 60.0
GRACE_SECONDS = 10.0  # after the timeout of a call, before its worker counts as broken
SYSTEM_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/share/zoneinfo")
MAX_SECONDS = 86400
_START = "import sys; sys.path.insert(0, sys.argv.pop(1)); from arpo.tools.sandbox.zygote import main; main()"
_ENVIRONMENT = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


@dataclass(frozen=True, slots=True)
class SandboxResult:
    """Output of code and how it ended: ok, error, timeout, memory, or killed (a crash, too much output)."""

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

    def run_on(self, worker: socket.socket) -> SandboxResult:
        """Run this call on a worker; OSError if the worker fails."""
        with self._lock:
            if self.cancelled:
                raise OSError("cancelled")
            self._worker = worker
        try:
            worker.settimeout(self.timeout + GRACE_SECONDS)
            worker.sendall(self.request)
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
        self._lock = threading.Lock()
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

    def stderr_tail(self) -> str:
        """Return the end of the zygote's stderr."""
        with self._lock:
            return "" if self._zygote is None else self._zygote.stderr_tail()

    def close(self) -> None:
        """End the zygote and all workers; running calls fail."""
        with self._lock:
            self._closed = True
            for worker in self._busy:
                with contextlib.suppress(OSError):
                    worker.shutdown(socket.SHUT_RDWR)
            self._close_zygote()
            for folder in self._leftovers:
                remove(folder)

    def _take(self) -> tuple[Zygote, socket.socket]:
        with self._lock:
            if self._closed:
                raise ConnectionError("the sandbox was closed")
            if self._zygote is not None and not self._zygote.is_alive():
                self._close_zygote()
            self._zygote = self._zygote or Zygote(self._settings)
            while self._idle and _is_closed(self._idle[-1]):
                _close_socket(self._idle.pop())
            worker = self._idle.pop() if self._idle else self._zygote.new_worker()
            self._busy.add(worker)
            return self._zygote, worker

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

    def new_worker(self) -> socket.socket:
        """Return a socket to a new worker."""
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._control, [b"w"], [theirs.fileno()])
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
