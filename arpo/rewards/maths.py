r"""Comparison of maths answers: `\frac{2}{4}` and `0.5`, `(x+1)^2` and `x^2+2x+1`, `\{1,2\}` and `2, 1`.

    math_equal(r"\frac{2}{4}", "0.5")     # True
    with MathJudge(seconds=2) as judge:
        judge.verdict(answer, golds)      # Verdict(equal=False, reason="timeout")

Equal strings and plain numbers are decided here. Everything else goes to `math_worker.py`, a process that calls the
library math-verify, with limits on time and memory for each answer.

An answer that is equal but not worked out (`17 \cdot 23` for 391) is not right: docs/rewards.md has the rule.

Guarantees: whatever the answer is, there is a verdict within `seconds` (plus a grace period for a busy machine), and
nothing of it is evaluated. An answer that exceeds its limits or crashes the worker is not equal, with a reason:
"timeout", "memory", "error", "died" or "long". No process outlives this one by more than `seconds`, however it ends.
Not covered: what math-verify does not understand. Units are dropped: "5 cm" equals "5 m".
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import json
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from arpo.errors import ArpoError
from arpo.rewards.text import numbers_close, plain_number

MAX_CHARS = 2000  # of an answer; no real one is longer
SECONDS = 3.0
MEMORY_MB = 1024
WORKERS = 2
START_SECONDS = 120.0
GRACE_SECONDS = 20.0  # for a fork to be made and to die, on a busy machine
_WORKER = Path(__file__).with_name("math_worker.py")
_ENVIRONMENT = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "LANG", "LC_ALL")  # passed on; no API keys


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether an answer is right. If it could not be judged, `equal` is False and `reason` says why."""

    equal: bool
    reason: str = ""


def math_equal(prediction: str, gold: str) -> bool:
    """Whether two maths answers are equal; False if that cannot be decided."""
    return shared_judge().verdict(prediction, (gold,)).equal


@cache
def shared_judge(workers: int = WORKERS, seconds: float = SECONDS) -> MathJudge:
    """The judge that this process shares, closed at exit."""
    judge = MathJudge(workers, seconds)
    atexit.register(judge.close)
    return judge


def quick_verdict(prediction: str, gold: str) -> bool | None:
    """The verdict on equal strings and plain numbers; None on everything else."""
    answer, wanted = _without_spaces(prediction), _without_spaces(gold)
    if answer == wanted or not answer:
        return bool(answer)
    if "%" in answer + wanted:  # 50% is 0.5, but an answer in percent may well be 50
        return None
    value, target = plain_number(prediction), plain_number(gold)
    if value is None or target is None:
        return None
    divides = target.denominator == 1 and _is_fraction(answer) and not _is_fraction(wanted)  # 34/2 is not yet 17
    return numbers_close(value, target) and not divides


def _is_fraction(text: str) -> bool:
    return "/" in text or "frac" in text


def _without_spaces(text: str) -> str:
    return "".join(text.strip().strip("$").split())


class MathJudge(contextlib.AbstractContextManager["MathJudge"]):
    """Judges answers, up to `workers` at a time. Thread-safe. A worker starts when it is needed."""

    def __init__(self, workers: int = WORKERS, seconds: float = SECONDS, memory_mb: int = MEMORY_MB) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise ArpoError("comparing maths answers needs math-verify: pip install math-verify")
        self._workers = [_Worker(seconds, memory_mb) for _ in range(workers)]
        self._idle: queue.LifoQueue[_Worker] = queue.LifoQueue()  # the last one used is warm
        for worker in self._workers:
            self._idle.put(worker)

    def verdict(self, prediction: str, golds: Sequence[str]) -> Verdict:
        """Whether the answer equals one of the gold answers."""
        quick = [quick_verdict(prediction, gold) for gold in golds]
        if True in quick:
            return Verdict(True)
        hard = [gold for gold, known in zip(golds, quick, strict=True) if known is None and len(gold) <= MAX_CHARS]
        if not hard:
            return Verdict(False)
        if len(prediction) > MAX_CHARS:
            return Verdict(False, "long")
        with self._worker() as worker:
            return worker.ask({"prediction": prediction, "golds": hard})

    def close(self) -> None:
        """End all workers, busy or not; answers at work, and later ones, are not equal."""
        for worker in self._workers:
            worker.stop()
        for _ in range(self._idle.qsize()):  # a busy one is cleaned up by the thread that it works for
            with contextlib.suppress(queue.Empty), self._worker(wait=False) as worker:
                worker.end()

    @contextlib.contextmanager
    def _worker(self, wait: bool = True) -> Iterator[_Worker]:
        worker = self._idle.get(block=wait)
        try:
            yield worker
        finally:
            self._idle.put(worker)

    def __exit__(self, *error: object) -> None:
        self.close()


class _Worker:
    """A process that is started, and restarted, when it is needed. One thread at a time may ask; any may stop it."""

    def __init__(self, seconds: float, memory_mb: int) -> None:
        self._seconds, self._memory_mb = seconds, memory_mb
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()  # held while the process starts or ends
        self._stopped = threading.Event()

    def ask(self, job: dict[str, Any]) -> Verdict:
        """The verdict of the process, which is ended if it does not answer in time."""
        process = self._running()
        if process is None:
            return Verdict(False, "died")
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(job).encode() + b"\n")
            process.stdin.flush()
            return Verdict(**json.loads(_read_line(process, self._seconds + GRACE_SECONDS)))
        except (OSError, ValueError) as error:
            self.end()
            return Verdict(False, "timeout" if isinstance(error, TimeoutError) else "died")
        except BaseException:  # an interrupt: a late reply must not answer the next job
            self.end()
            raise

    def stop(self) -> None:
        """Kill the process, and start no new one."""
        with self._lock:
            self._stopped.set()
            self._kill()

    def end(self) -> None:
        """Kill the process, if there is one, and free its resources."""
        with self._lock:
            self._kill()
            process, self._process = self._process, None
        if process is not None:
            assert process.stdin is not None and process.stdout is not None
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):
                    pipe.close()

    def _kill(self) -> None:
        if self._process is not None and self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)  # with the fork that may be at work

    def _running(self) -> subprocess.Popen[bytes] | None:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self.end()
        with self._lock:
            if self._stopped.is_set():
                return None
            process = self._process = _start(self._seconds, self._memory_mb)
        try:
            _read_line(process, START_SECONDS)
            return process
        except (OSError, ValueError):
            self.end()
            if self._stopped.is_set():
                return None
            raise ArpoError(
                f"the process that compares maths answers does not start; try: {sys.executable} -c 'import math_verify'"
            ) from None
        except BaseException:
            self.end()
            raise


def _start(seconds: float, memory_mb: int) -> subprocess.Popen[bytes]:
    environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
    return subprocess.Popen(
        [sys.executable, "-P", "-B", "-X", "utf8", str(_WORKER), str(seconds), str(memory_mb)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**environment, "PYTHONHASHSEED": "0"},  # equal answers get equal verdicts
        start_new_session=True,  # Ctrl-C is for the parent to handle
    )


def _read_line(process: subprocess.Popen[bytes], seconds: float) -> bytes:
    """The next line of the process; raises OSError if it ends before, TimeoutError if it takes too long."""
    assert process.stdout is not None
    poll = select.poll()
    poll.register(process.stdout, select.POLLIN)
    deadline = time.monotonic() + seconds
    line = b""
    while not line.endswith(b"\n"):
        if not poll.poll(max(0, 1000 * (deadline - time.monotonic()))):
            raise TimeoutError
        chunk = os.read(process.stdout.fileno(), 4096)
        if not chunk:
            raise ConnectionError
        line += chunk
    return line
