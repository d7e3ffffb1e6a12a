"""The processes that `torchrun` started for one run: rank 0 leads, the others do what it says.

    with join_ranks(device) as ranks:
        ranks.jointly("learn", payload)    rank 0: from here to the end of the block all ranks do the same
        ranks.hear()                       others: the next thing to do, and its payload

Promises: what is said is bytes, never a pickle. While rank 0 is busy alone it says so every few seconds, so a silence
is a failure. A rank that dies, or hangs, ends the others with a message that says how to go on: at once if its
connections break, after `TIMEOUT` if they only fall silent.
Does not cover: going on without the rank that was lost.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from arpo.trainer.dist import launch
from arpo.errors import ArpoError, Diverged

TIMEOUT = 600.0  # seconds without a word from another rank
BEAT = 20.0  # seconds between words of a rank 0 that is busy
_WAIT, _END = "wait", "end"
_KINDS = (_WAIT, _END, "open", "load", "learn", "save")
_SIGNS = ("gloo", "nccl", "connection closed", "connection reset", "broken pipe", "timed out", "timeout")
"""Words in the errors of collective operations; they have no type of their own."""


class ProcessGroup:
    """This process among the others; `group` is for words, kept apart from what training sends."""

    def __init__(self, group: Any) -> None:
        self.group, self.rank, self.count = group, dist.get_rank(), dist.get_world_size()
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._together = False  # in the midst of something that all do
        self._lost: RuntimeError | None = None  # noticed while this rank was busy alone

    @property
    def leads(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    @contextmanager
    def collective(self, kind: str, payload: bytes = b"") -> Iterator[None]:
        """Rank 0 tells the others what to do, and does the same in the block; they only do it."""
        with self._lock if self.leads else threading.Lock(), translate_dist_errors():
            self._together = True
            if self._lost is not None:
                raise self._lost
            if self.leads:
                self._say(kind, payload)
            try:
                yield
            except Diverged:  # which all ranks see alike
                self._together = False
                raise
            self._together = False

    def receive(self) -> tuple[str, bytes]:
        """What rank 0 says next; "end" if it has nothing more to do."""
        with translate_dist_errors():
            while True:
                head = torch.zeros(2, dtype=torch.long)
                dist.broadcast(head, 0, group=self.group)
                kind, length = _KINDS[int(head[0])], int(head[1])
                body = torch.empty(length, dtype=torch.uint8)
                if length:
                    dist.broadcast(body, 0, group=self.group)
                if kind != _WAIT:
                    return kind, body.numpy().tobytes()

    def summed(self, numbers: Mapping[str, float]) -> dict[str, float]:
        """Each number summed over all ranks, which must have the same names."""
        values = torch.tensor([numbers[name] for name in sorted(numbers)], dtype=torch.float64)
        dist.all_reduce(values, group=self.group)
        return dict(zip(sorted(numbers), values.tolist(), strict=True))

    def _say(self, kind: str, payload: bytes = b"") -> None:
        dist.broadcast(torch.tensor([_KINDS.index(kind), len(payload)]), 0, group=self.group)
        if payload:
            dist.broadcast(torch.frombuffer(bytearray(payload), dtype=torch.uint8), 0, group=self.group)

    def _keep_beating(self) -> None:
        while not self._stop.wait(BEAT):
            with self._lock:
                try:
                    self._say(_WAIT)
                except RuntimeError as error:  # the next thing to be done together says so
                    self._lost = error
                    return

    def begin(self) -> None:
        """Rank 0 begins to say that it is there."""
        if self.leads:
            threading.Thread(target=self._keep_beating, name="arpo-ranks", daemon=True).start()

    def end(self) -> None:
        """Rank 0 lets the others go, unless they were left in the midst of something: these see its connection end."""
        self._stop.set()
        if self._together or self._lost is not None:
            return
        if self.leads:
            with self._lock, suppress(RuntimeError):
                self._say(_END)
        dist.destroy_process_group()


@contextmanager
def join_process_group(device: torch.device) -> Iterator[ProcessGroup]:
    """Meet the other processes; `device` is what this one computes on."""
    timeout = timedelta(seconds=TIMEOUT)
    if device.type == "cuda":
        number, there = launch.device_number(), torch.cuda.device_count()
        if number >= there:
            raise ArpoError(f"rank {launch.rank()} has no GPU: this machine has {there}; use --nproc-per-node {there}")
        torch.cuda.set_device(number)
    with translate_dist_errors():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timeout)
        ranks = ProcessGroup(dist.new_group(backend="gloo", timeout=timeout))
    ranks.begin()
    try:
        yield ranks
    finally:
        ranks.end()


@contextmanager
def translate_dist_errors() -> Iterator[None]:
    """Errors of collective operations inside say that another rank is lost, and how to go on."""
    try:
        yield
    except (RuntimeError, CheckpointException) as error:
        if not is_loss(error):
            raise
        first = str(error).strip().partition("\n")[0][:200]
        raise ArpoError(
            f"rank {launch.rank()} (pid {os.getpid()}) lost another rank: it died, or did not answer for "
            f"{TIMEOUT:.0f} s ({first}). Its own output says why. Go on from the last checkpoint with --resume, on any "
            "number of ranks"
        ) from error


def is_loss(error: BaseException) -> bool:
    """Whether this is what a rank sees when another one is gone; of a checkpoint's error, what the ranks saw counts."""
    if isinstance(error, CheckpointException):
        return any(is_loss(seen) for seen, _ in error.failures.values())
    if isinstance(error, torch.OutOfMemoryError) or not isinstance(error, RuntimeError):
        return False
    return isinstance(error, dist.DistError) or any(sign in str(error).lower() for sign in _SIGNS)
