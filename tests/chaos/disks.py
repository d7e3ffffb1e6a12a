"""Disks that are full, run out of inodes, are read-only or vanish: one clear message, and later an exact `--resume`.

Each run directory is a small tmpfs in a mount namespace, which an ordinary user may create on most systems. Where that
is not allowed, this part says so and counts nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import small_run
from report import Report

ROOMY = "size=400m,nr_inodes=10000,mode=755"
FULL = {
    "16 KB": "size=16k",
    "80 KB": "size=80k",
    "4 MB": "size=4m",
    "20 MB": "size=20m",
    "40 MB": "size=40m",
    "60 MB": "size=60m",
    "8 inodes": "size=400m,nr_inodes=8",
    "24 inodes": "size=400m,nr_inodes=24",
}


def run(folder: Path, options: argparse.Namespace, report: Report) -> None:
    """Train on one bad disk after another."""
    namespace = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--user", "--map-root-user", "--mount"]
    if subprocess.run([*namespace, "true"], capture_output=True).returncode:
        report.progress("disks: left out, this user may not create a mount namespace")
        return
    command = [sys.executable, __file__, str(folder)]
    inside = subprocess.run([*namespace, *command], stdout=subprocess.PIPE, text=True, check=True)
    results: dict[str, str] = json.loads(inside.stdout.splitlines()[-1])
    for name, problem in results.items():
        if problem:
            report.progress(f"disks: {name}: {problem}")
    good = sum(not problem for problem in results.values())
    note = f"{', '.join(results)}: one message, exit code 2, and an exact `--resume` once there is room"
    report.add("a disk that is full, read-only or gone", len(results), good, note)
    report.numbers |= {"disks": len(results), "disks_survived": good}


def _inside(folder: Path) -> dict[str, str]:
    """Try every disk; returns what went wrong with each, "" if nothing did."""
    reference = folder / "reference"
    if small_run.finish(small_run.start(reference)) != 0:
        raise SystemExit(f"the undisturbed run failed:\n{small_run.output_file(reference).read_text()}")
    undisturbed, results = small_run.contents(reference), {}
    for number, (name, options) in enumerate(FULL.items()):
        disk = folder / f"full-{number}"
        _mount(disk, options)
        problem = _refused(small_run.start(disk), disk)
        _remount(disk, ROOMY)
        results[f"full at {name}"] = problem or _resumed(disk, undisturbed)
    disk = folder / "read-only"
    _mount(disk, ROOMY)
    _remount(disk, "ro")
    problem = _refused(small_run.start(disk), disk)
    _remount(disk, "rw")
    half = small_run.finish(small_run.start(disk, "train.steps=3"))
    _remount(disk, "ro")
    problem = problem or ("cannot be trained on afterwards" if half else _refused(small_run.start(disk), disk))
    _remount(disk, "rw")
    results["read-only"] = problem or _resumed(disk, undisturbed)
    disk = folder / "gone"
    process = small_run.start(disk)
    while process.is_alive() and not (disk / "checkpoints" / "step_000002").exists():
        time.sleep(0.01)
    disk.rename(folder / "elsewhere")
    results["moved away while the run writes to it"] = _refused(process, disk) or _resumed(disk, undisturbed)
    return results


def _refused(process: small_run.BaseProcess, disk: Path) -> str:
    """What is wrong with how a run ended on a bad disk."""
    code, said = small_run.finish(process), small_run.output_file(disk).read_text()
    if code != 2 or "Traceback" in said or "error: " not in said:
        return f"exit code {code}: {said[-1500:]}"
    return ""


def _resumed(disk: Path, undisturbed: dict[str, object]) -> str:
    """What is wrong with the run after it was resumed on a good disk."""
    if small_run.finish(small_run.start(disk)) != 0:
        return f"was not resumed: {small_run.output_file(disk).read_text()[-1500:]}"
    found = small_run.contents(disk)
    differs = [name for name, value in undisturbed.items() if found.get(name) != value]
    return f"other {', '.join(differs)}" if differs else ""


def _mount(disk: Path, options: str) -> None:
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(disk)], check=True)


def _remount(disk: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", str(disk)], check=True)


if __name__ == "__main__":
    print(json.dumps(_inside(Path(sys.argv[1]))))
