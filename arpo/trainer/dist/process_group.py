"""The process group of one run under `torchrun`: rank 0 leads, the others execute its commands.

    with join_process_group(device) as group:
        group.collective("update", payload)    rank 0: all ranks do the same until the end of the block
        group.receive()                        other ranks: the next command and its payload
        group.post(message)                    other ranks: for rank 0, which takes it with
        group.poll()                           while they are in `receive`

Guarantees: messages are bytes, never pickles. While rank 0 works alone it sends a heartbeat every few seconds, so
silence means failure. A rank that dies or hangs ends the others with a message that says how to resume: at once if its
connections break, after `TIMEOUT` if they only fall silent. `post`, `poll` and `receive` may be called in any thread.
Not covered: continuing without the lost rank.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from arpo.errors import ArpoError, Diverged
from arpo.trainer.dist import launch

TIMEOUT = 600.0  # seconds without a message from another rank
HEARTBEAT = 20.0  # seconds between heartbeats of rank 0
_WAIT, _POLL, _END = "wait", "poll", "end"
_COMMANDS = (_WAIT, _POLL, _END, "open", "load", "update", "save", "sync", "sample", "cancel")
_LOSS_WORDS = ("gloo", "nccl", "connection closed", "connection reset", "broken pipe", "timed out", "timeout")
"""Words in the errors of collective operations, which have no type of their own."""


class ProcessGroup:
    """This process among the others; `handle` is a gloo group for commands, apart from the group used in training."""

    def __init__(self, handle: Any) -> None:
        self.handle, self.rank, self.world_size = handle, dist.get_rank(), dist.get_world_size()
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._in_collective = False
        self._lost: RuntimeError | None = None  # the next collective raises it
        self._posted: deque[bytes] = deque()

    @property
    def is_leader(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    @contextmanager
    def collective(self, command: str, payload: bytes = b"") -> Iterator[None]:
        """Rank 0 broadcasts a command and executes it in the block; the others only execute it."""
        with self._lock if self.is_leader else threading.Lock(), translate_dist_errors():
            self._in_collective = True
            if self._lost is not None:
                raise self._lost
            try:
                if self.is_leader:
                    self._broadcast(command, payload)
                yield
            except Diverged:  # raised on all ranks alike
                self._in_collective = False
                raise
            except RuntimeError as error:
                self._lost = error if is_lost_rank(error) else None
                raise
            self._in_collective = False

    def receive(self) -> tuple[str, bytes]:
        """The next command of rank 0 and its payload; "end" when the run is over."""
        with translate_dist_errors():
            while True:
                head = torch.zeros(2, dtype=torch.long)
                dist.broadcast(head, 0, group=self.handle)
                command, length = _COMMANDS[int(head[0])], int(head[1])
                body = torch.empty(length, dtype=torch.uint8)
                if length:
                    dist.broadcast(body, 0, group=self.handle)
                if command == _POLL:
                    self._exchange(self._posted.popleft() if self._posted else b"")
                elif command != _WAIT:
                    return command, body.numpy().tobytes()

    def post(self, message: bytes) -> None:
        """Leave a message for rank 0."""
        self._posted.append(message)

    def poll(self) -> list[bytes]:
        """On rank 0: the oldest message of each other rank that has left one."""
        with self.collective(_POLL):
            return self._exchange(b"")

    def _exchange(self, message: bytes) -> list[bytes]:
        """Send a message to rank 0, none if it is empty; returns those of all other ranks there."""
        length, found = torch.tensor([len(message)]), list[bytes]()
        if not self.is_leader:
            dist.gather(length, dst=0, group=self.handle)
            if message:
                dist.send(torch.frombuffer(bytearray(message), dtype=torch.uint8), 0, group=self.handle)
            return found
        lengths = [torch.zeros_like(length) for _ in range(self.world_size)]
        dist.gather(length, lengths, dst=0, group=self.handle)
        for rank, size in enumerate(lengths):
            if int(size):
                body = torch.empty(int(size), dtype=torch.uint8)
                dist.recv(body, rank, group=self.handle)
                found.append(body.numpy().tobytes())
        return found

    def all_sum(self, numbers: Mapping[str, float]) -> dict[str, float]:
        """Each value summed over all ranks, which must have the same names."""
        values = torch.tensor([numbers[name] for name in sorted(numbers)], dtype=torch.float64)
        dist.all_reduce(values, group=self.handle)
        return dict(zip(sorted(numbers), values.tolist(), strict=True))

    def _broadcast(self, command: str, payload: bytes = b"") -> None:
        dist.broadcast(torch.tensor([_COMMANDS.index(command), len(payload)]), 0, group=self.handle)
        if payload:
            dist.broadcast(torch.frombuffer(bytearray(payload), dtype=torch.uint8), 0, group=self.handle)

    def _send_heartbeats(self) -> None:
        while not self._stop.wait(HEARTBEAT):
            with self._lock:
                try:
                    self._broadcast(_WAIT)
                except RuntimeError as error:
                    self._lost = error
                    return

    def begin(self) -> None:
        """Start the heartbeats of rank 0."""
        if self.is_leader:
            threading.Thread(target=self._send_heartbeats, name="arpo-ranks", daemon=True).start()

    def end(self) -> None:
        """Rank 0 ends the others, unless a collective was interrupted: then they see its connection break."""
        self._stop.set()
        if self._in_collective or self._lost is not None:
            return
        if self.is_leader:
            with self._lock, suppress(RuntimeError):
                self._broadcast(_END)
        dist.destroy_process_group()


@contextmanager
def join_process_group(device: torch.device) -> Iterator[ProcessGroup]:
    """Join the other processes; `device` is that of this process."""
    timeout = timedelta(seconds=TIMEOUT)
    if device.type == "cuda":
        number, count = launch.local_rank(), torch.cuda.device_count()
        if number >= count:
            raise ArpoError(f"rank {launch.rank()} has no GPU: this machine has {count}; use --nproc-per-node {count}")
        torch.cuda.set_device(number)
    with translate_dist_errors():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timeout)
        group = ProcessGroup(dist.new_group(backend="gloo", timeout=timeout))
    group.begin()
    try:
        yield group
    finally:
        group.end()


@contextmanager
def translate_dist_errors() -> Iterator[None]:
    """Turn errors of collective operations into an ArpoError that says a rank was lost and how to resume."""
    try:
        yield
    except (RuntimeError, CheckpointException) as error:
        if not is_lost_rank(error):
            raise
        first = str(error).strip().partition("\n")[0][:200]
        raise ArpoError(
            f"rank {launch.rank()} (pid {os.getpid()}) lost another rank: it died, or did not answer for "
            f"{TIMEOUT:.0f} s ({first}). Its own output says why. Go on from the last checkpoint with --resume, on any "
            "number of ranks"
        ) from error


def is_lost_rank(error: BaseException) -> bool:
    """Whether this error means that another rank is gone; a checkpoint error counts by what the ranks raised."""
    if isinstance(error, CheckpointException):
        return any(is_lost_rank(seen) for seen, _ in error.failures.values())
    if isinstance(error, torch.OutOfMemoryError) or not isinstance(error, RuntimeError):
        return False
    return isinstance(error, dist.DistError) or any(word in str(error).lower() for word in _LOSS_WORDS)
