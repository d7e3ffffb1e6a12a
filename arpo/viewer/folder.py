"""The folder that the viewer shows: its runs, comparisons and evaluations, and their ids.

    folder = Folder(Path("runs"), evals=Path("evals"))
    folder.open("arpo/seed-0/run")       # a run, read-only

An id is a path relative to the folder, with "/" between names; "." is the folder itself. `evals` is a second folder,
whose evaluations of runs in the first are shown, too; their ids begin with "../".

Guarantees: only what a search of the folders finds is opened, whatever is requested. Links to folders, and links that
lead out of the folders, are not followed; only regular files are read.
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
from arpo.evaluation.samples import FOLDER as SAMPLES
from arpo.evaluation.samples import SETTINGS, sample_files
from arpo.runs.locks import LOCK_FILE
from arpo.runs.run_dir import CONFIG_FILE, METRICS_FILE, RunDir, is_run_dir, open_run_dir, read_image, read_json

MAX_DEPTH = 8
MAX_FOLDERS = 20_000
MAX_BYTES = 64 << 20  # of a config.json or results.json
RESULTS_FILE = "results.json"
COLLAPSED = re.compile(r"collapsed-\d+")


class NotFound(ArpoError):
    """There is no such run, step, tree or evaluation."""


class Folder:
    """A folder of runs. It is searched again when an unknown id is requested."""

    def __init__(self, root: Path, evals: Path | None = None) -> None:
        self.root = root.resolve()
        self._evals = evals.resolve() if evals and not evals.resolve().is_relative_to(self.root) else None
        self.study_cache: dict[Hashable, dict[str, Any]] = {}  # entropy studies by run, steps and their times
        self._runs: dict[str, Path] = {}
        self._comparisons: dict[str, Path] = {}
        self._evaluations: dict[str, Path] = {}

    @property
    def name(self) -> str:
        """The name to show."""
        return self.root.name or str(self.root)

    def search(self) -> tuple[dict[str, Path], dict[str, Path]]:
        """The runs and the comparisons in the folder, by id."""
        runs, comparisons, evaluations = dict[str, Path](), dict[str, Path](), dict[str, Path]()
        for name, directory in _named_directories(self.root):
            if self._is_run(directory):
                runs[name] = directory
            if self._is_small_file(directory / RESULTS_FILE) and _is_comparison(directory / RESULTS_FILE):
                comparisons[name] = directory / RESULTS_FILE
            if self._is_evaluation(directory):
                evaluations[name] = directory
        self._runs, self._comparisons = runs, comparisons
        for name, directory in _named_directories(self._evals) if self._evals else ():
            if self._is_evaluation(directory) and self.evaluated_run(directory) is not None:
                evaluations[f"../{name}"] = directory
        self._evaluations = evaluations
        return runs, comparisons

    @property
    def evaluations(self) -> dict[str, Path]:
        """The evaluations that the last search found, by id."""
        return self._evaluations

    def evaluation(self, name: str) -> Path:
        """The directory of the evaluation with this id."""
        return self._find("evaluation", name)

    def image(self, directory: Path, sha256: str) -> bytes:
        """The PNG of an image that is stored with a run or an evaluation, named by its SHA-256."""
        if not re.fullmatch("[0-9a-f]{64}", sha256):
            raise NotFound("an image is named by its SHA-256, 64 hexadecimal digits")
        path = directory / "images" / f"{sha256}.png"
        self.require_inside(path)
        if not path.is_file():
            raise NotFound("this image is not stored with the run")
        content = read_image(directory, sha256)
        if not content.startswith(b"\x89PNG\r\n\x1a\n"):
            raise ArpoError(f"{path.name}: is no PNG")
        return content

    def evaluated_run(self, directory: Path) -> tuple[str, str] | None:
        """The run in the folder that an evaluation is of, and the path of its weights there; None if it has none."""
        try:
            model = read_json(directory / SETTINGS).get("model")
            for part in ("adapter", "path"):
                given = model.get(part) if isinstance(model, dict) else None
                path = Path(given).resolve() if isinstance(given, str) else self.root.parent
                for name, run in self._runs.items():
                    if path.is_relative_to(run):
                        return name, path.relative_to(run).as_posix()
        except (ArpoError, OSError, ValueError, RuntimeError):  # a path that none can have
            pass
        return None

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
            resolved = path.resolve()
            inside = any(resolved.is_relative_to(root) for root in (self.root, self._evals) if root)
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

    def _is_evaluation(self, directory: Path) -> bool:
        inside = self._is_small_file(directory / SETTINGS) and self._is_inside(directory / SAMPLES)
        return inside and bool(sample_files(directory))

    def _find(self, kind: str, name: str) -> Path:
        known = self._known(kind)
        if name not in known or not exists(known[name]):
            self.search()
            known = self._known(kind)
        if name not in known:
            raise NotFound(f"there is no {kind} {name[:200]!r}")
        return known[name]

    def _known(self, kind: str) -> dict[str, Path]:
        return {"run": self._runs, "comparison": self._comparisons, "evaluation": self._evaluations}[kind]


def _named_directories(root: Path) -> Iterator[tuple[str, Path]]:
    """The directories in a folder, with their ids."""
    for directory in islice(_directories(root, MAX_DEPTH), MAX_FOLDERS):
        if _is_text(name := directory.relative_to(root).as_posix()):
            yield name, directory


def _directories(directory: Path, depth: int) -> Iterator[Path]:
    """The directory and all inside it; inside a run only evaluations and those of rolled back steps."""
    yield directory
    inside_run = _has_started(directory) and exists(directory / CONFIG_FILE)
    try:
        entries = sorted(os.scandir(directory), key=lambda entry: _natural_order(entry.name)) if depth else []
    except OSError:
        return
    for entry in entries:
        wanted: object = not entry.name.startswith(".")
        if inside_run:
            wanted = COLLAPSED.fullmatch(entry.name) or exists(directory / entry.name / SETTINGS)
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
