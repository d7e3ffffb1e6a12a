"""What is looked at: a folder, the runs and comparisons in it, and how they are named.

    folder = Folder(Path("runs"))
    folder.open("arpo/seed-0/run")       # a run to read

An id is a path relative to the folder, with "/" between names; "." is the folder itself.

Promises: only what a search of the folder finds is ever opened, whatever is asked for. Links are not followed, neither
to folders nor to files that lead out of it, and only plain files are read.
Does not cover: a folder that someone else changes while it is read; hard links.
"""

from __future__ import annotations

import os
import re
from collections.abc import Hashable, Iterator
from itertools import islice
from os.path import exists, isdir, isfile  # which, unlike those of Path, also answer where one may not look
from pathlib import Path
from typing import Any

from arpo.errors import ArpoError
from arpo.runs.locks import LOCK_FILE
from arpo.runs.run_dir import CONFIG_FILE, METRICS_FILE, RunDir, is_run_dir, open_run_dir, read_json

DEPTH = 8  # folders in folders that are searched
RESULTS = "results.json"
MOST_FOLDERS = 20_000  # that are searched
MOST_BYTES = 64 << 20  # of a config.json or results.json
SET_ASIDE = re.compile(r"collapsed-\d+")


class NotThere(ArpoError):
    """There is no such run, step or tree."""


class Folder:
    """A folder of runs; it is searched again when something is asked for that was not there."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self.studies: dict[Hashable, dict[str, Any]] = {}  # of entropies, by what was studied
        self._runs: dict[str, Path] = {}
        self._comparisons: dict[str, Path] = {}

    @property
    def name(self) -> str:
        """What to call it."""
        return self.root.name or str(self.root)

    def search(self) -> tuple[dict[str, Path], dict[str, Path]]:
        """The runs and the comparisons that are there now, by id."""
        runs, comparisons = dict[str, Path](), dict[str, Path]()
        for directory in islice(_directories(self.root, DEPTH), MOST_FOLDERS):
            name = directory.relative_to(self.root).as_posix()
            if _told(name) and self._is_run(directory):
                runs[name] = directory
            if _told(name) and self.plain(directory / RESULTS) and _is_comparison(directory / RESULTS):
                comparisons[name] = directory / RESULTS
        self._runs, self._comparisons = runs, comparisons
        return runs, comparisons

    def open(self, name: str) -> RunDir:
        """The run with this id."""
        directory = self._find("run", name)
        for part in (CONFIG_FILE, METRICS_FILE, LOCK_FILE, "trees"):
            self.check(directory / part)
        return open_run_dir(directory)

    def comparison(self, name: str) -> dict[str, Any]:
        """The results of the comparison with this id."""
        path = self._find("comparison", name)
        self.check(path)
        return read_json(path)

    def check(self, path: Path) -> None:
        """Refuse a path that leads out of the folder."""
        if not self._inside(path):
            raise NotThere(f"{path.name}: leads out of the folder that is shown")

    def plain(self, path: Path) -> bool:
        """Whether this is a file of ours, and not too large to be read at once."""
        try:
            return isfile(path) and self._inside(path) and path.stat().st_size <= MOST_BYTES
        except OSError:  # it has just gone
            return False

    def _inside(self, path: Path) -> bool:
        try:
            leads_in = path.resolve().is_relative_to(self.root)
        except (OSError, RuntimeError):  # links that go round in circles
            return False
        return leads_in and (isfile(path) or isdir(path) or not exists(path))

    def _is_run(self, directory: Path) -> bool:
        """A comparison keeps a run's settings beside it, in the same form: what was begun has a lock or records."""
        return _begun(directory) and self.plain(directory / CONFIG_FILE) and is_run_dir(directory)

    def _find(self, kind: str, name: str) -> Path:
        known = self._runs if kind == "run" else self._comparisons
        if name not in known or not exists(known[name]):
            known = self.search()[kind != "run"]
        if name not in known:
            raise NotThere(f"there is no {kind} {name[:200]!r}")
        return known[name]


def _directories(directory: Path, depth: int) -> Iterator[Path]:
    """The folder and all in it; of a run, only those that hold what was taken back."""
    yield directory
    inside = _begun(directory) and exists(directory / CONFIG_FILE)
    try:
        entries = sorted(os.scandir(directory), key=lambda entry: _natural(entry.name)) if depth else []
    except OSError:
        return
    for entry in entries:
        wanted = SET_ASIDE.fullmatch(entry.name) if inside else not entry.name.startswith(".")
        if wanted and entry.is_dir(follow_symlinks=False):
            yield from _directories(directory / entry.name, depth - 1)


def _begun(directory: Path) -> bool:
    return exists(directory / METRICS_FILE) or exists(directory / LOCK_FILE)


def _natural(name: str) -> list[tuple[bool, int, str]]:
    """Orders seed-2 before seed-10."""
    return [(part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in re.split(r"([0-9]+)", name)]


def _told(name: str) -> bool:
    """Whether a name is text that an address can hold."""
    return name.isascii() or name.encode("utf-8", "replace").decode() == name


def _is_comparison(path: Path) -> bool:
    try:
        found = read_json(path)
    except (ArpoError, OSError):
        return False
    return isinstance(found.get("trials"), list) and isinstance(found.get("algorithms"), list)
