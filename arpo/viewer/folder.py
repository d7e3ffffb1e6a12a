"""The folder that the viewer shows: its runs and comparisons, and their ids.

    folder = Folder(Path("runs"))
    folder.open("arpo/seed-0/run")       # a run, read-only

An id is a path relative to the folder, with "/" between names; "." is the folder itself.

Guarantees: only what a search of the folder finds is opened, whatever is requested. Links to folders, and links that
lead out of the folder, are not followed; only regular files are read.
Not covered: a folder that someone else changes while it is read; hard links.
"""

from __future__ import annotations

import os
import re
from collections.abc import Hashable, Iterator
from itertools import islice
from os.path import exists, isdir, isfile  # unlike the methods of Path, these return False without permission
from pathlib import Path
from typing import Any

from arpo.errors import ArpoError
from arpo.runs.locks import LOCK_FILE
from arpo.runs.run_dir import CONFIG_FILE, METRICS_FILE, RunDir, is_run_dir, open_run_dir, read_json

MAX_DEPTH = 8
MAX_FOLDERS = 20_000
MAX_BYTES = 64 << 20  # of a config.json or results.json
RESULTS_FILE = "results.json"
COLLAPSED = re.compile(r"collapsed-\d+")


class NotFound(ArpoError):
    """There is no such run, step or tree."""


class Folder:
    """A folder of runs. It is searched again when an unknown id is requested."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self.study_cache: dict[Hashable, dict[str, Any]] = {}  # entropy studies by run, steps and their times
        self._runs: dict[str, Path] = {}
        self._comparisons: dict[str, Path] = {}

    @property
    def name(self) -> str:
        """The name to show."""
        return self.root.name or str(self.root)

    def search(self) -> tuple[dict[str, Path], dict[str, Path]]:
        """The runs and the comparisons in the folder, by id."""
        runs, comparisons = dict[str, Path](), dict[str, Path]()
        for directory in islice(_directories(self.root, MAX_DEPTH), MAX_FOLDERS):
            name = directory.relative_to(self.root).as_posix()
            if not _is_text(name):
                continue
            if self._is_run(directory):
                runs[name] = directory
            if self._is_small_file(directory / RESULTS_FILE) and _is_comparison(directory / RESULTS_FILE):
                comparisons[name] = directory / RESULTS_FILE
        self._runs, self._comparisons = runs, comparisons
        return runs, comparisons

    def open(self, name: str) -> RunDir:
        """The run with this id, read-only."""
        directory = self._find("run", name)
        for part in (CONFIG_FILE, METRICS_FILE, LOCK_FILE, "trees", "images", "evaluations"):
            self.require_inside(directory / part)
        return open_run_dir(directory)

    def comparison(self, name: str) -> dict[str, Any]:
        """The results of the comparison with this id."""
        path = self._find("comparison", name)
        self.require_inside(path)
        return read_json(path)

    def require_inside(self, path: Path) -> None:
        """Raise NotFound if a path leads out of the folder, or is a pipe or device."""
        if not self._is_inside(path):
            raise NotFound(f"{path.name}: leads out of the folder that is shown")

    def _is_inside(self, path: Path) -> bool:
        try:
            inside = path.resolve().is_relative_to(self.root)
        except (OSError, RuntimeError):  # a cycle of links
            return False
        return inside and (isfile(path) or isdir(path) or not exists(path))

    def _is_small_file(self, path: Path) -> bool:
        try:
            return isfile(path) and self._is_inside(path) and path.stat().st_size <= MAX_BYTES
        except OSError:  # deleted meanwhile
            return False

    def _is_run(self, directory: Path) -> bool:
        return _has_started(directory) and self._is_small_file(directory / CONFIG_FILE) and is_run_dir(directory)

    def _find(self, kind: str, name: str) -> Path:
        known = self._runs if kind == "run" else self._comparisons
        if name not in known or not exists(known[name]):
            known = self.search()[kind != "run"]
        if name not in known:
            raise NotFound(f"there is no {kind} {name[:200]!r}")
        return known[name]


def _directories(directory: Path, depth: int) -> Iterator[Path]:
    """The directory and all inside it; inside a run only those of rolled back steps."""
    yield directory
    inside_run = _has_started(directory) and exists(directory / CONFIG_FILE)
    try:
        entries = sorted(os.scandir(directory), key=lambda entry: _natural_order(entry.name)) if depth else []
    except OSError:
        return
    for entry in entries:
        wanted = COLLAPSED.fullmatch(entry.name) if inside_run else not entry.name.startswith(".")
        if wanted and entry.is_dir(follow_symlinks=False):
            yield from _directories(directory / entry.name, depth - 1)


def _has_started(directory: Path) -> bool:
    """Whether a run has a lock or records; `arpo compare` writes a config.json beside each run, too."""
    return exists(directory / METRICS_FILE) or exists(directory / LOCK_FILE)


def _natural_order(name: str) -> list[tuple[bool, int, str]]:
    """Sort key: seed-2 before seed-10."""
    return [(part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in re.split(r"([0-9]+)", name)]


def _is_text(name: str) -> bool:
    """Whether a name can be written in a URL."""
    return name.isascii() or name.encode("utf-8", "replace").decode() == name


def _is_comparison(path: Path) -> bool:
    try:
        found = read_json(path)
    except (ArpoError, OSError):
        return False
    return isinstance(found.get("trials"), list) and isinstance(found.get("algorithms"), list)
