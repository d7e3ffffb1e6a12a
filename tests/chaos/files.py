"""Damaged files: every file of a run directory deleted, emptied, cut in half, or with one bit flipped, then `--resume`.

A run survives if it ends with the weights of the undisturbed run, and either everything else is equal as well or the
output names the damaged file; or if it is refused with a message that names the file. The viewer must answer, too.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import small_run
from report import Report

from arpo.viewer.folder import Folder
from arpo.viewer.server import answer

STOPPED_AT = 4


def run(folder: Path, options: argparse.Namespace, report: Report) -> None:
    """Damage one file after another of a run that was stopped, and resume it."""
    reference, stopped = folder / "reference", folder / "stopped"
    if small_run.finish(small_run.start(reference)) or small_run.finish(
        small_run.start(stopped, f"train.steps={STOPPED_AT}")
    ):
        raise SystemExit(f"the undisturbed run failed:\n{small_run.output_file(reference).read_text()}")
    undisturbed = small_run.contents(reference)
    cases = [(file, damage) for file in _kinds_of_files(stopped) for damage in DAMAGES]

    def one(number: int) -> str:
        file, damage = cases[number]
        directory = folder / f"run-{number}"
        shutil.copytree(stopped, directory)
        DAMAGES[damage](directory / file, random.Random(f"{options.seed}.{number}"))
        outcome = _view(directory) or _resume(directory, file, undisturbed)
        report.progress(f"{file}, {damage}: {outcome}")
        shutil.rmtree(directory)
        return outcome

    with ThreadPoolExecutor(2) as pool:
        outcomes = Counter(pool.map(one, range(len(cases))))
    good = sum(outcomes[outcome] for outcome in GOOD_OUTCOMES)
    note = "; ".join(f"{outcomes[outcome]} {outcome}" for outcome in GOOD_OUTCOMES)
    report.add("a damaged file of a run, then `--resume`", len(cases), good, note)
    report.numbers |= {"damaged_files": len(cases), "damaged_files_survived": good}


GOOD_OUTCOMES = ("exact", "exact weights, and said what is lost", "refused with the file's name")


def _kinds_of_files(directory: Path) -> list[Path]:
    """One file of each kind that this run has: those of the newest step, if there are several."""
    newest = f"step_{STOPPED_AT:06d}"
    found = sorted(path.relative_to(directory) for path in directory.rglob("*") if path.is_file())
    return [path for path in found if "step_" not in str(path) or newest in str(path)]


def _resume(directory: Path, file: Path, undisturbed: dict[str, Any]) -> str:
    code, output = small_run.finish(small_run.start(directory)), small_run.output_file(directory).read_text()
    named = file.name in output or str(file.parent) in output
    if code == 2 and "Traceback" not in output:
        return GOOD_OUTCOMES[2] if named else f"refused without the file's name: {output[-300:]}"
    if code != 0:
        return f"exit code {code}: {output[-500:]}"
    found = small_run.contents(directory)
    differs = [name for name, value in undisturbed.items() if found.get(name) != value]
    if not differs:
        return GOOD_OUTCOMES[0]
    if "weights" not in differs and named:
        return GOOD_OUTCOMES[1]
    return f"other {', '.join(differs)}, and the output does not say so: {output[-300:]}"


def _view(directory: Path) -> str:
    """What is wrong with the viewer's replies about this run; "" if nothing is."""
    folder = Folder(directory.parent)
    for request in ("metrics", "config", "steps", "entropy", "prompts", "tree"):
        query = f"run={directory.name}" + f"&step={STOPPED_AT}&n=0" * (request in ("prompts", "tree"))
        status, content = answer(folder, request, query)
        reply = json.loads(content)
        if status >= 500 or (status >= 400 and not reply.get("error")):
            return f"the viewer answers {status} to {request}"
    return ""


def _flip(path: Path, rng: random.Random) -> None:
    content = bytearray(path.read_bytes())
    if content:
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


DAMAGES: dict[str, Callable[[Path, random.Random], None]] = {
    "deleted": lambda path, rng: path.unlink(),
    "empty": lambda path, rng: os.truncate(path, 0),
    "half": lambda path, rng: os.truncate(path, path.stat().st_size // 2),
    "one bit flipped": _flip,
}
