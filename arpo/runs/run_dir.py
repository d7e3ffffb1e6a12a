"""The run directory; the only code that writes or reads it.

    config.json                      the resolved configuration, without secrets; makes the directory a run
    config-until-step_000001.json    the configuration up to this step, if the run was resumed with other settings
    metrics.jsonl                    one line per record, appended
    trees/step_000001.jsonl.zst      one zstd frame with one JSON line per rollout tree (`zstd -dc` shows them)
    trees/step_000001.index.json     offsets and summaries of the frames; written last
    checkpoints/step_000001/         complete as soon as it has this name
    collapsed-1/                     a readable run: all records, and the trees, of steps that were rolled back
    tracker_wandb.json               a tracker's id for the run, and the last step sent to it
    run.lock                         held by the process that writes

Guarantees: one writer at a time. A crash of the process or the machine leaves every file whole except the last line of
metrics.jsonl, which readers skip. Readers need no lock and may read while a run is written.
Not covered: network file systems without flock, damage by other programs, the content of checkpoints.
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

from arpo.config.files import parse_json, read_limited, require_regular_file
from arpo.config.masking import masked
from arpo.errors import ArpoError
from arpo.runs.locks import LOCK_FILE, acquire_lock
from arpo.runs.storage import writing
from arpo.runs.trees import TreeEntry, pack_trees, unpack_tree
from arpo.types import ScoredTree

CONFIG_FILE, METRICS_FILE = "config.json", "metrics.jsonl"


class MetricsChunk(NamedTuple):
    """Whole lines of metrics.jsonl from byte `start` on. `inode` changes when the file is rewritten by a rollback."""

    start: int
    content: bytes
    inode: int


class TrackerState(NamedTuple):
    """A tracker's id for the run, and the last step that was sent to it."""

    id: str
    step: int


class RunDir:
    """A run directory, from `create_run_dir` or `open_run_dir`. Only the holder of the lock may write."""

    def __init__(self, directory: Path, lock: IO[str] | None) -> None:
        self.directory = directory
        self._lock = lock

    def __enter__(self) -> RunDir:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the lock; the end of the process does so too."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def config(self) -> dict[str, Any]:
        """The resolved configuration of the last start; secrets are masked, even if an old version saved them."""
        path = self.directory / CONFIG_FILE
        try:
            config: dict[str, Any] = masked(read_json(path))
        except RecursionError:
            raise ArpoError(f"{path}: damaged: its tables are nested too deeply") from None
        return config

    def update_config(self, step: int, config: Mapping[str, Any]) -> None:
        """Replace the configuration from this step on; the old one is kept as config-until-STEP.json."""
        self._require_lock()
        write_atomically(self.directory / f"config-until-{_step_name(step)}.json", _dump(self.config()))
        write_atomically(self.directory / CONFIG_FILE, _dump(masked(config)))

    # --- metrics

    def append_metrics(self, step: int, values: Mapping[str, float | int | str]) -> None:
        """Append a record; NaN and infinity become null."""
        self._require_lock()
        record = {"step": step, **values}
        if record["step"] != step:
            raise ValueError("`step` is not a metric")
        line = json.dumps({key: _finite(value) for key, value in record.items()}, allow_nan=False)
        path = self.directory / METRICS_FILE
        with writing(path), path.open("a", encoding="ascii") as file:
            file.write(line + "\n")

    def update_metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Add values to the last record, which must be that of this step."""
        self._require_lock()
        *before, last = self.read_metrics()
        if last["step"] != step:
            raise ValueError(f"the last record is that of step {last['step']}, not of step {step}")
        lines = [json.dumps(record) + "\n" for record in (*before, {**last, **values})]
        write_atomically(self.directory / METRICS_FILE, "".join(lines).encode("ascii"))

    def read_metrics(self) -> list[dict[str, Any]]:
        """All records without a truncated last line; any other damage is an error."""
        path = self.directory / METRICS_FILE
        lines = require_regular_file(path).read_bytes().split(b"\n")[:-1] if path.exists() else []
        return [_parse_line(path, number, line) for number, line in enumerate(lines, 1)]

    def metrics_since(self, offset: int = 0) -> MetricsChunk:
        """The whole lines from this byte on; all lines if none begins there."""
        try:
            with require_regular_file(self.directory / METRICS_FILE).open("rb") as file:
                inode = os.fstat(file.fileno()).st_ino
                file.seek(max(0, offset - 1))
                if offset > 0 and file.read(1) != b"\n":
                    offset = file.seek(0)
                content = file.read()
        except FileNotFoundError:
            return MetricsChunk(0, b"", 0)
        return MetricsChunk(offset, content[: content.rfind(b"\n") + 1], inode)

    # --- trees

    def write_trees(self, step: int, trees: Sequence[ScoredTree]) -> None:
        """Write the scored trees of a step; replaces older ones."""
        self._require_lock()
        content, entries = pack_trees(trees)
        data, index = self.tree_files(step)
        data.parent.mkdir(exist_ok=True)
        index.unlink(missing_ok=True)  # an index must never describe other data
        write_atomically(data, content)
        write_atomically(index, _dump({"trees": [asdict(entry) for entry in entries]}))

    def tree_steps(self) -> list[int]:
        """The steps with trees, in order."""
        return _steps(self.directory / "trees", r"step_(\d{6,})\.index\.json")

    def tree_index(self, step: int) -> list[TreeEntry]:
        """Offsets and summaries of a step's trees, without reading the trees."""
        path = self.tree_files(step)[1]
        if not path.exists():
            raise ArpoError(f"{self.directory}: holds no trees of step {step}")
        try:
            return [TreeEntry(**entry) for entry in read_json(path)["trees"]]
        except (KeyError, TypeError) as error:
            raise ArpoError(f"{path}: damaged, or from another version: {error}") from error

    def read_tree(self, step: int, number: int) -> ScoredTree:
        """Tree `number` of a step, counted from 0; only its frame is read."""
        entries = self.tree_index(step)
        if not 0 <= number < len(entries):
            raise ArpoError(f"{self.directory}: no tree {number} in step {step}, which has {len(entries)} trees")
        return self._read_frames(step, [entries[number]])[0]

    def read_trees(self, step: int) -> list[ScoredTree]:
        """All trees of a step."""
        return self._read_frames(step, self.tree_index(step))

    def _read_frames(self, step: int, entries: Sequence[TreeEntry]) -> list[ScoredTree]:
        path, trees = self.tree_files(step)[0], []
        try:
            with require_regular_file(path).open("rb") as file:
                for entry in entries:
                    file.seek(entry.offset)
                    trees.append(unpack_tree(file.read(entry.length)))
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, MemoryError) as error:
            raise ArpoError(f"{path}: damaged, or from another version: {error}") from error
        return trees

    def tree_files(self, step: int) -> tuple[Path, Path]:
        """The paths of a step's tree file and of its index, whether they exist or not."""
        stem = self.directory / "trees" / _step_name(step)
        return stem.with_suffix(".jsonl.zst"), stem.with_suffix(".index.json")

    # --- checkpoints

    def checkpoint_path(self, step: int) -> Path:
        """The path of a step's checkpoint, whether it exists or not."""
        return self.directory / "checkpoints" / _step_name(step)

    def checkpoint_steps(self) -> list[int]:
        """The steps with a complete checkpoint, in order."""
        return _steps(self.directory / "checkpoints", r"step_(\d{6,})")

    def latest_checkpoint(self) -> tuple[int, Path] | None:
        """Step and path of the newest complete checkpoint."""
        steps = self.checkpoint_steps()
        return (steps[-1], self.checkpoint_path(steps[-1])) if steps else None

    def commit_checkpoint(
        self, step: int, write: Callable[[Path], None], keep: int, protected: Collection[int] = ()
    ) -> None:
        """Let `write` fill a new directory and make it the step's checkpoint; then delete all older checkpoints except
        the `keep` newest and those of `protected` steps."""
        self._require_lock()
        if keep < 1:
            raise ValueError(f"keep is {keep}: the new checkpoint would be deleted")
        final = self.checkpoint_path(step)
        if final.exists():
            raise ValueError(f"{final} exists; a complete checkpoint is never replaced")
        temporary = final.with_name(final.name + ".tmp")
        with writing(final):
            final.parent.mkdir(exist_ok=True)
            for leftover in final.parent.glob("*.tmp"):
                shutil.rmtree(leftover)
            temporary.mkdir()
            try:
                write(temporary)
            except BaseException:
                shutil.rmtree(temporary, ignore_errors=True)  # on a full disk, there is room again
                raise
            for folder, _, names in os.walk(temporary, topdown=False):
                for path in [*(Path(folder, name) for name in names), Path(folder)]:
                    _sync(path)
            if (self.directory / METRICS_FILE).exists():
                _sync(self.directory / METRICS_FILE)  # after a power cut, a checkpoint must not lack its records
            temporary.rename(final)
            _sync(final.parent)
            _sync(self.directory)
        older = [other for other in self.checkpoint_steps() if other < step]
        for other in older[: max(0, len(older) + 1 - keep)]:
            if other not in protected:
                self._delete_checkpoint(other)

    def delete_checkpoints(self) -> None:
        """Delete all checkpoints of a finished run of which only the metrics are needed."""
        self._require_lock()
        for step in self.checkpoint_steps():
            self._delete_checkpoint(step)

    def _delete_checkpoint(self, step: int) -> None:
        path = self.checkpoint_path(step)
        shutil.rmtree(path.rename(path.with_name(path.name + ".tmp")))  # so that half a deletion does not look complete

    # --- resuming

    def roll_back(self, step: int) -> None:
        """Delete records, trees and checkpoints of later steps, as if the run had been stopped at `step`."""
        self._require_lock()
        for later in reversed([other for other in self.checkpoint_steps() if other > step]):
            self._delete_checkpoint(later)  # first: a crash must not leave a checkpoint without its records
        kept = [json.dumps(record) + "\n" for record in self.read_metrics() if record["step"] <= step]
        write_atomically(self.directory / METRICS_FILE, "".join(kept).encode("ascii"))
        for path in sorted((self.directory / "trees").glob("step_*")):  # sorted: an index is deleted before its data
            if _step_of(path) > step:
                path.unlink()

    def archive_after(self, step: int) -> Path:
        """Copy all records and the trees of later steps to a run `collapsed-N` inside this one; returns its path."""
        self._require_lock()
        names = (self.directory / f"collapsed-{number}" for number in count(1))
        final = next(path for path in names if not path.exists())
        temporary = self.directory / "collapsed.tmp"
        shutil.rmtree(temporary, ignore_errors=True)
        (temporary / "trees").mkdir(parents=True)
        write_atomically(temporary / CONFIG_FILE, _dump(self.config()))
        if (self.directory / METRICS_FILE).exists():
            write_atomically(temporary / METRICS_FILE, (self.directory / METRICS_FILE).read_bytes())
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
            raise RuntimeError(f"{self.directory} was opened read-only")


def create_run_dir(directory: Path, config: Mapping[str, Any]) -> RunDir:
    """Create a run in a new or empty directory, and lock it."""
    require_unused(directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ArpoError(f"{directory}: cannot be created: {error.strerror}") from error
    run_dir = RunDir(directory, acquire_lock(directory))
    try:
        require_unused(directory)  # again: another process may have been faster
        write_atomically(directory / CONFIG_FILE, _dump(masked(config)))
    except BaseException:
        run_dir.close()
        raise
    return run_dir


def open_run_dir(directory: Path, write: bool = False) -> RunDir:
    """Open a run to read it or, with `write`, to continue it, which acquires the lock."""
    if not (directory / CONFIG_FILE).is_file():
        raise ArpoError(f"{directory}: not a run (it has no {CONFIG_FILE})")
    if not write:
        return RunDir(directory, None)
    lock = acquire_lock(directory)
    metrics = directory / METRICS_FILE
    if metrics.exists():  # remove a truncated last line before anything is appended
        os.truncate(metrics, require_regular_file(metrics).read_bytes().rfind(b"\n") + 1)
    run_dir = RunDir(directory, lock)
    if (config := run_dir.config()) != read_json(directory / CONFIG_FILE):  # an old version saved secrets
        write_atomically(directory / CONFIG_FILE, _dump(config))
    return run_dir


def is_run_dir(directory: Path) -> bool:
    """Whether a directory holds a run. Models have a config.json, too; that of a run has our settings."""
    try:
        return "rollout" in parse_json(read_limited(directory / CONFIG_FILE))
    except (OSError, ValueError, TypeError, ArpoError):
        return False


def require_unused(directory: Path) -> None:
    """Raise ArpoError unless the directory is new or empty."""
    if not directory.exists():
        return
    if not directory.is_dir():
        raise ArpoError(f"{directory}: is a file, expected a directory for the run")
    names = {path.name for path in directory.iterdir()}
    if CONFIG_FILE in names:
        raise ArpoError(f"{directory}: already holds a run; continue it (--resume) or choose another run.dir")
    if names - {LOCK_FILE, CONFIG_FILE + ".tmp"}:  # a crash in `create_run_dir` can leave these two
        raise ArpoError(f"{directory}: is not empty and holds no run; choose another run.dir")


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file that is either whole or absent, also after a crash."""
    temporary = path.with_name(path.name + ".tmp")
    with writing(path):
        try:
            with temporary.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        except OSError:
            temporary.unlink(missing_ok=True)  # on a full disk, there is room again
            raise
        temporary.replace(path)
        _sync(path.parent)


def _link(path: Path, copy: Path) -> None:
    """Hard-link a file, or copy it where the file system has no links."""
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
    """The JSON object in a file; ArpoError if it is damaged."""
    return _parse_line(path, 1, require_regular_file(path).read_bytes())


def _parse_line(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        value = parse_json(line)
    except ValueError:
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
