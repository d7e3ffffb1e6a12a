"""A run's directory: the only code that writes or reads it.

    config.json                      the resolved configuration; its presence makes the directory a run
    config-until-step_000001.json    what it was before, if the run was resumed after this step with other settings
    metrics.jsonl                    one line per record, appended
    trees/step_000001.jsonl.zst      one zstd frame, holding one JSON line, per rollout tree (`zstd -dc` shows them)
    trees/step_000001.index.json     where each frame lies and what is in it; written last
    checkpoints/step_000001/         complete as soon as it has this name
    collapsed-1/                     a run to read: all records, and the trees, of steps that were taken back
    tracker_wandb.json               of a tracker that the run is sent to: its name for the run, and the last step sent
    run.lock                         held by the process that writes

Promises: one writer at a time; a crash of process or machine leaves every file whole but for the last line of
metrics.jsonl, which readers leave out; readers need no lock and may look on while a run is being written.
Does not cover: network file systems without flock, damage by other programs, what is inside a checkpoint.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import IO, Any, NamedTuple

from arpo.errors import ArpoError
from arpo.runs.locks import LOCK, take_lock
from arpo.runs.trees import TreeEntry, pack_trees, unpack_tree
from arpo.types import ScoredTree

CONFIG_FILE, METRICS_FILE = "config.json", "metrics.jsonl"


class Lines(NamedTuple):
    """Whole lines of metrics.jsonl: where they begin, and which file it was. A run that is taken back has a new one."""

    start: int
    content: bytes
    file: int


class TrackerState(NamedTuple):
    """A tracker's id for the run, and the last step that was sent to it."""

    id: str
    step: int


class RunDir:
    """One run directory; made by `create_run_dir` and `open_run_dir`. Only a log that holds the lock may write."""

    def __init__(self, directory: Path, lock: IO[str] | None) -> None:
        self.directory = directory
        self._lock = lock

    def __enter__(self) -> RunDir:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the lock back; the end of the process does so too."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def config(self) -> dict[str, Any]:
        """The resolved configuration, as the run was last started with it."""
        return read_json(self.directory / CONFIG_FILE)

    def update_config(self, step: int, config: Mapping[str, Any]) -> None:
        """From this step on the run has other settings; those before it are kept as config-until-STEP.json."""
        self._require_lock()
        write_atomically(self.directory / f"config-until-{_step_name(step)}.json", _dump(self.config()))
        write_atomically(self.directory / CONFIG_FILE, _dump(config))

    # --- metrics

    def append_metrics(self, step: int, values: Mapping[str, float | int | str]) -> None:
        """Add one record; NaN and infinity, which JSON lacks, become null."""
        self._require_lock()
        record = {"step": step, **values}
        if record["step"] != step:
            raise ValueError("`step` is not a metric")
        line = json.dumps({key: _finite(value) for key, value in record.items()}, allow_nan=False)
        with (self.directory / METRICS_FILE).open("a", encoding="ascii") as file:
            file.write(line + "\n")

    def update_metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Add to the last record, which is that of this step."""
        self._require_lock()
        *before, last = self.read_metrics()
        if last["step"] != step:
            raise ValueError(f"the last record is that of step {last['step']}, not of step {step}")
        lines = [json.dumps(record) + "\n" for record in (*before, {**last, **values})]
        write_atomically(self.directory / METRICS_FILE, "".join(lines).encode("ascii"))

    def read_metrics(self) -> list[dict[str, Any]]:
        """All records; a last line that was cut off while being written is left out, any other damage is an error."""
        path = self.directory / METRICS_FILE
        lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
        return [_parse_line(path, number, line) for number, line in enumerate(lines, 1)]

    def metrics_since(self, offset: int = 0) -> Lines:
        """The whole lines from this byte on; from the first one if no line of the file begins there."""
        try:
            with (self.directory / METRICS_FILE).open("rb") as file:
                number = os.fstat(file.fileno()).st_ino
                file.seek(max(0, offset - 1))
                if offset > 0 and file.read(1) != b"\n":
                    offset = file.seek(0)
                content = file.read()
        except FileNotFoundError:
            return Lines(0, b"", 0)
        return Lines(offset, content[: content.rfind(b"\n") + 1], number)

    # --- trees

    def write_trees(self, step: int, trees: Sequence[ScoredTree]) -> None:
        """Write a step's scored trees; replaces older ones."""
        self._require_lock()
        content, entries = pack_trees(trees)
        data, index = self.tree_files(step)
        data.parent.mkdir(exist_ok=True)
        index.unlink(missing_ok=True)  # an index never stands beside data it does not describe
        write_atomically(data, content)
        write_atomically(index, _dump({"trees": [asdict(entry) for entry in entries]}))

    def tree_steps(self) -> list[int]:
        """Steps whose trees are there, in order."""
        return _steps(self.directory / "trees", r"step_(\d{6,})\.index\.json")

    def tree_index(self, step: int) -> list[TreeEntry]:
        """What is in a step's tree file, without reading it."""
        path = self.tree_files(step)[1]
        if not path.exists():
            raise ArpoError(f"{self.directory}: holds no trees of step {step}")
        try:
            return [TreeEntry(**entry) for entry in read_json(path)["trees"]]
        except (KeyError, TypeError) as error:
            raise ArpoError(f"{path}: damaged, cannot be read: {error}") from error

    def read_tree(self, step: int, number: int) -> ScoredTree:
        """One tree of a step, counted from 0; only its own frame is read."""
        entries = self.tree_index(step)
        if not 0 <= number < len(entries):
            raise ArpoError(f"{self.directory}: no tree {number} in step {step}, which has {len(entries)} trees")
        return self._read_frames(step, [entries[number]])[0]

    def read_trees(self, step: int) -> list[ScoredTree]:
        """All trees of a step."""
        return self._read_frames(step, self.tree_index(step))

    def _read_frames(self, step: int, entries: Sequence[TreeEntry]) -> list[ScoredTree]:
        path, found = self.tree_files(step)[0], []
        try:
            with path.open("rb") as file:
                for entry in entries:
                    file.seek(entry.offset)
                    found.append(unpack_tree(file.read(entry.length)))
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, MemoryError) as error:
            raise ArpoError(f"{path}: damaged, cannot be read: {error}") from error
        return found

    def tree_files(self, step: int) -> tuple[Path, Path]:
        """Where the trees of a step are, or would be: their frames, and the index of these."""
        stem = self.directory / "trees" / _step_name(step)
        return stem.with_suffix(".jsonl.zst"), stem.with_suffix(".index.json")

    # --- checkpoints

    def checkpoint_path(self, step: int) -> Path:
        """Where the checkpoint of a step is, or would be."""
        return self.directory / "checkpoints" / _step_name(step)

    def checkpoint_steps(self) -> list[int]:
        """Steps with a complete checkpoint, in order."""
        return _steps(self.directory / "checkpoints", r"step_(\d{6,})")

    def latest_checkpoint(self) -> tuple[int, Path] | None:
        """The newest complete checkpoint."""
        steps = self.checkpoint_steps()
        return (steps[-1], self.checkpoint_path(steps[-1])) if steps else None

    def commit_checkpoint(
        self, step: int, write: Callable[[Path], None], keep: int, spare: Collection[int] = ()
    ) -> None:
        """Have `write` fill an empty folder, make it the step's checkpoint, then drop all but the `keep` newest and
        those of the steps in `spare`."""
        self._require_lock()
        if keep < 1:
            raise ValueError(f"keep is {keep}: the checkpoint just written would be dropped")
        final = self.checkpoint_path(step)
        if final.exists():
            raise ValueError(f"{final} exists; a complete checkpoint is never replaced")
        final.parent.mkdir(exist_ok=True)
        for leftover in final.parent.glob("*.tmp"):
            shutil.rmtree(leftover)
        temporary = final.with_name(final.name + ".tmp")
        temporary.mkdir()
        write(temporary)
        for folder, _, names in os.walk(temporary, topdown=False):
            for path in [*(Path(folder, name) for name in names), Path(folder)]:
                _sync(path)
        if (self.directory / METRICS_FILE).exists():
            _sync(self.directory / METRICS_FILE)  # the records of a checkpointed step outlive a power cut as it does
        temporary.rename(final)
        _sync(final.parent)
        _sync(self.directory)
        older = [other for other in self.checkpoint_steps() if other < step]
        for other in older[: max(0, len(older) + 1 - keep)]:
            if other not in spare:
                self._drop_checkpoint(other)

    def delete_checkpoints(self) -> None:
        """Delete them all: of a run that is finished and only its numbers are wanted."""
        self._require_lock()
        for step in self.checkpoint_steps():
            self._drop_checkpoint(step)

    def _drop_checkpoint(self, step: int) -> None:
        path = self.checkpoint_path(step)
        shutil.rmtree(path.rename(path.with_name(path.name + ".tmp")))  # half-deleted must not look complete

    # --- resuming

    def roll_back(self, step: int) -> None:
        """Drop records, trees and checkpoints of later steps: what stays is what a run stopped at `step` has."""
        self._require_lock()
        for later in reversed([other for other in self.checkpoint_steps() if other > step]):
            self._drop_checkpoint(later)  # first, so that a crash below cannot leave a checkpoint without its records
        kept = [json.dumps(record) + "\n" for record in self.read_metrics() if record["step"] <= step]
        write_atomically(self.directory / METRICS_FILE, "".join(kept).encode("ascii"))
        for path in sorted((self.directory / "trees").glob("step_*")):  # sorted: an index goes before its data
            if _step_of(path) > step:
                path.unlink()

    def archive_after(self, step: int) -> Path:
        """Copy what `roll_back` to this step would drop, but for checkpoints, and all records, to a run of its own."""
        self._require_lock()
        names = (self.directory / f"collapsed-{number}" for number in count(1))
        final = next(path for path in names if not path.exists())
        temporary = self.directory / "collapsed.tmp"
        shutil.rmtree(temporary, ignore_errors=True)
        (temporary / "trees").mkdir(parents=True)
        for name in (CONFIG_FILE, METRICS_FILE):
            if (self.directory / name).exists():
                write_atomically(temporary / name, (self.directory / name).read_bytes())
        for path in (self.directory / "trees").glob("step_*"):
            if _step_of(path) > step:
                _link(path, temporary / "trees" / path.name)
        temporary.rename(final)
        _sync(self.directory)
        return final

    # --- trackers

    def tracker_state(self, name: str) -> TrackerState | None:
        """The state of a tracker; None if nothing was sent to it."""
        path = self.directory / f"tracker_{name}.json"
        return TrackerState(**read_json(path)) if path.exists() else None

    def write_tracker_state(self, name: str, state: TrackerState | None) -> None:
        """Save the state of a tracker, or delete it; it survives crashes and is not rolled back."""
        self._require_lock()
        path = self.directory / f"tracker_{name}.json"
        if state is None:
            path.unlink(missing_ok=True)
        else:
            write_atomically(path, _dump(state._asdict()))

    def _require_lock(self) -> None:
        if self._lock is None:
            raise RuntimeError(f"{self.directory} was opened for reading")


def create_run_dir(directory: Path, config: Mapping[str, Any]) -> RunDir:
    """Start a run in a new or empty directory and lock it."""
    require_unused(directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ArpoError(f"{directory}: cannot be made: {error.strerror}") from error
    log = RunDir(directory, take_lock(directory))
    try:
        require_unused(directory)  # another process may have been faster
        write_atomically(directory / CONFIG_FILE, _dump(config))
    except BaseException:
        log.close()
        raise
    return log


def open_run_dir(directory: Path, write: bool = False) -> RunDir:
    """An existing run, to read or, with `write`, to go on with (takes the lock)."""
    if not (directory / CONFIG_FILE).is_file():
        raise ArpoError(f"{directory}: not a run (it has no {CONFIG_FILE})")
    if not write:
        return RunDir(directory, None)
    lock = take_lock(directory)
    metrics = directory / METRICS_FILE
    if metrics.exists():  # what is appended must not join a line that was cut off
        os.truncate(metrics, metrics.read_bytes().rfind(b"\n") + 1)
    return RunDir(directory, lock)


def is_run_dir(directory: Path) -> bool:
    """Whether a directory holds a run. Models keep a config.json too; that of a run has our settings in it."""
    try:
        return "rollout" in json.loads((directory / CONFIG_FILE).read_bytes())
    except (OSError, ValueError, TypeError, RecursionError):
        return False


def require_unused(directory: Path) -> None:
    """Raise if a new run must not be made in `directory`."""
    if not directory.exists():
        return
    if not directory.is_dir():
        raise ArpoError(f"{directory}: is a file, expected a directory for the run")
    names = {path.name for path in directory.iterdir()}
    if CONFIG_FILE in names:
        raise ArpoError(f"{directory}: already holds a run; go on with it (--resume) or choose another run.dir")
    if names - {LOCK, CONFIG_FILE + ".tmp"}:  # these two are all that a crash in `create_run_dir` can leave
        raise ArpoError(f"{directory}: is not empty and holds no run; choose another run.dir")


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file that is either whole or not there, whatever happens."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    _sync(path.parent)


def _link(path: Path, copy: Path) -> None:
    """The same file under another name; where the file system has no such thing, a copy."""
    try:
        copy.hardlink_to(path)
    except OSError:
        shutil.copyfile(path, copy)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _dump(value: Any) -> bytes:
    return (json.dumps(value, indent=2, allow_nan=False) + "\n").encode("ascii")


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object that a file holds."""
    return _parse_line(path, 1, path.read_bytes())


def _parse_line(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ArpoError(f"{path}: line {number} is damaged: {line[:60]!r}")
    return value


def _finite(value: float | int | str) -> float | int | str | None:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _step_name(step: int) -> str:
    return f"step_{step:06d}"


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step_").partition(".")[0])


def _steps(folder: Path, pattern: str) -> list[int]:
    return sorted(int(found[1]) for path in folder.glob("step_*") if (found := re.fullmatch(pattern, path.name)))
