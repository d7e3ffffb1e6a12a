"""The pipes of a confined process as the worker sees them: its stdin is fed, its outputs are read and limited."""

from __future__ import annotations

import math
import os
import select
import socket
import struct
import time
from collections.abc import Callable

from arpo.tools.sandbox import scratch

RESPONSE = struct.Struct("!Bd?II")
STATUSES = ("ok", "error", "timeout", "memory", "killed", "refused", "lost")
OK, ERROR, TIMEOUT, MEMORY, KILLED, REFUSED, LOST = range(7)
CHUNK = 1 << 16
MAX_OUTPUT_FACTOR = 64  # a call that prints so many times the kept output is killed
DISK_CHECK_SECONDS = 0.05


class Streams:
    """Our ends of a process's stdin, stdout and stderr; of each output, `limit` bytes are kept."""

    def __init__(self, stdin: int, out: int, err: int, limit: int) -> None:
        self.stdin, self.out, self.err = stdin, out, err
        self.outputs = {out: Output(limit), err: Output(limit)}
        for fd in (stdin, out, err):
            os.set_blocking(fd, False)  # whatever the code does to the other end

    def watch(
        self,
        supervisor: socket.socket,
        request: bytes | bytearray,
        deadline: float,
        disk: scratch.DiskMonitor | None,
        fds: tuple[int, ...],
        ended: Callable[[set[int]], bool],
    ) -> int | None:
        """Feed and read the process until it ends by itself (None) or has to be killed (the status).

        `ended` is asked whether it did when one of `fds` can be read.
        """
        poller = select.poll()
        for fd in (*fds, supervisor.fileno(), *self.outputs):
            poller.register(fd, select.POLLIN)
        if self.stdin >= 0:
            poller.register(self.stdin, select.POLLOUT)
        unsent = memoryview(request)
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
                except BlockingIOError:
                    pass
                except BrokenPipeError:  # it has closed its stdin
                    unsent = unsent[:0]
                if not unsent:
                    poller.unregister(self.stdin)
                    os.close(self.stdin)
                    self.stdin = -1
            for fd in ready & self.outputs.keys():
                self.outputs[fd].read(fd)
                if self.outputs[fd].ended:
                    poller.unregister(fd)
            if any(output.total > output.max_total for output in self.outputs.values()):
                return KILLED
            if not ready.isdisjoint(fds) and ended(ready):
                return None

    def drain(self) -> None:
        """Read what is left of the outputs of a process that has ended or waits."""
        for fd, output in self.outputs.items():
            while not output.ended and output.total < 4 * CHUNK + output.max_total and output.read(fd):
                pass

    def close(self) -> None:
        """Close our ends."""
        for fd in {self.stdin, self.out, self.err} - {-1}:
            os.close(fd)

    @staticmethod
    def empty_response(status: int) -> bytes:
        """Return the response of a call that did not run."""
        return RESPONSE.pack(status, 0.0, False, 0, 0)

    def response(self, status: int, seconds: float, note: str = "") -> bytes:
        """Return the response to the supervisor; a note is added to stderr."""
        cut = any(output.total > len(output.data) for output in self.outputs.values())
        out, err = (output.data for output in self.outputs.values())
        err += note.encode()
        return b"".join((RESPONSE.pack(status, seconds, cut, len(out), len(err)), out, err))


class Output:
    """The first `limit` bytes of an output, and the total number of its bytes."""

    def __init__(self, limit: int) -> None:
        self.data, self.limit, self.max_total = bytearray(), limit, MAX_OUTPUT_FACTOR * limit
        self.total, self.ended = 0, False

    def read(self, fd: int) -> bool:
        """Read what is available; return whether that was anything. No bytes mean that the output has ended."""
        try:
            part = os.read(fd, CHUNK)
        except BlockingIOError:  # the other end is still open, or something else has read it
            return False
        self.data += part[: self.limit - len(self.data)]
        self.total += len(part)
        self.ended = not part
        return bool(part)
