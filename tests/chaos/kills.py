"""Training runs killed with SIGKILL at a random moment and resumed: each must end as if nothing had happened.

Every second kill comes while a checkpoint is being written or an old one deleted, which takes too little of a run's
time to be hit by chance.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import small_run
from report import Report


@dataclass(frozen=True, slots=True)
class Reference:
    """The undisturbed run: what it left, how long it took, and how long checkpoints are unfinished."""

    contents: dict[str, Any]
    seconds: float
    write_seconds: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run that was killed."""

    writing: bool  # whether the kill left an unfinished checkpoint
    difference: str  # from the undisturbed run; "" if there is none


def run(folder: Path, options: argparse.Namespace, report: Report) -> None:
    """Kill and resume `options.kills` runs, two at a time."""
    reference = _undisturbed(folder / "reference")
    report.progress(f"undisturbed: {reference.seconds:.1f} s, {1000 * reference.write_seconds:.0f} ms a checkpoint")

    def one(number: int) -> Outcome:
        rng = random.Random(f"{options.seed}.{number}")
        outcome = _kill_and_resume(folder / f"run-{number}", reference, rng, while_writing=number % 2 == 1)
        report.progress(f"kill {number + 1}: {outcome.difference or 'exact'}")
        return outcome

    with ThreadPoolExecutor(2) as pool:
        outcomes = list(pool.map(one, range(options.kills)))
    exact = sum(not outcome.difference for outcome in outcomes)
    writing = sum(outcome.writing for outcome in outcomes)
    note = f"{writing} of them left an unfinished checkpoint; weights, optimizer, metrics and trees are bit-equal"
    report.add("`kill -9` of a training run, then `--resume`", options.kills, exact, note)
    report.numbers |= {"kills": options.kills, "kills_exact": exact, "kills_in_checkpoint": writing}


def _undisturbed(directory: Path) -> Reference:
    started = time.monotonic()
    process = small_run.start(directory)
    unfinished = 0.0
    while process.is_alive():
        seen = time.monotonic()
        writing = _is_writing(directory)
        time.sleep(0.001)
        unfinished += (time.monotonic() - seen) * writing
    seconds = time.monotonic() - started
    if small_run.finish(process) != 0:
        raise SystemExit(f"the undisturbed run failed:\n{small_run.output_file(directory).read_text()}")
    return Reference(small_run.contents(directory), seconds, unfinished / small_run.STEPS)


def _kill_and_resume(directory: Path, reference: Reference, rng: random.Random, while_writing: bool) -> Outcome:
    while True:
        process = small_run.start(directory)
        if while_writing:
            _wait_for_checkpoint(directory, rng.randint(1, small_run.STEPS), process)
            time.sleep(rng.uniform(0, reference.write_seconds))
        else:
            process.join(rng.uniform(0, reference.seconds))
        if process.is_alive():
            break
        if small_run.finish(process) != 0:
            return Outcome(False, f"failed undisturbed: {small_run.output_file(directory).read_text()[-500:]}")
        directory = directory.with_name(f"{directory.name}-again")  # it was faster than the kill
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join()
    writing = _is_writing(directory)
    if left := _session(process.pid or 0):
        return Outcome(writing, f"processes survived it: {left}")
    if small_run.finish(small_run.start(directory)) != 0:
        return Outcome(writing, f"was not resumed: {small_run.output_file(directory).read_text()[-500:]}")
    found = small_run.contents(directory)
    differs = [name for name, value in reference.contents.items() if found.get(name) != value]
    return Outcome(writing, f"other {', '.join(differs)}" if differs else "")


def _is_writing(directory: Path) -> bool:
    return any((directory / "checkpoints").glob("*.tmp"))


def _wait_for_checkpoint(directory: Path, step: int, process: BaseProcess) -> None:
    """Wait until the checkpoint of a step is begun, or the process has ended."""
    path = directory / "checkpoints" / f"step_{step:06d}.tmp"
    while process.is_alive() and not path.exists():
        time.sleep(0.0005)


def _session(pid: int) -> list[str]:
    """Names of the processes of a session that still live, after a while."""
    deadline = time.monotonic() + 30.0
    while True:
        found = []
        for entry in Path("/proc").glob("[0-9]*/stat"):
            try:
                name, _, rest = entry.read_text().partition(" (")[2].rpartition(") ")
            except OSError:  # it has ended
                continue
            state, _, _, session = rest.split()[:4]
            if int(session) == pid and state != "Z":
                found.append(name)
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.05)
