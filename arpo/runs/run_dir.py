"""The run directory; the only code that writes or reads it.

    config.json                      the resolved configuration, without secrets; makes the directory a run
    config-until-step_000001.json    the configuration up to this step, if the run was resumed with other settings
    metrics.jsonl                    one line per record, appended
    trees/step_000001.jsonl.zst      one zstd frame with one JSON line per rollout tree (`zstd -dc` shows them)
    trees/step_000001.index.json     offsets and summaries of the frames; written last
    images/SHA256.png                each image of these trees once
    evaluations/step_000000.json     accuracy on held-out questions after this step, in all and by kind of question
    checkpoints/step_000001/         complete as soon as it has this name
        model/, optimizer.safetensors or optimizer/, state.json      of the trainer
        run/config.json, run/metrics.jsonl                           the run's files at this step
        run/trees.json                                               the SHA-256 of its tree files
        manifest.json                                                the sizes and SHA-256 of all these; written last
    checkpoints/step_000001.damaged  set aside when the run was resumed
    collapsed-1/                     a readable run: all records, and the trees and evaluations of steps rolled back
    tracker_wandb.json               a tracker's id for the run, and the last step sent to it
    run.lock                         held by the process that writes

Guarantees: one writer at a time. A crash of the process or the machine leaves every file whole except the last line of
metrics.jsonl, which readers skip. Readers need no lock and may read while a run is written. Damage by other programs to
a checkpoint, and to the configuration and the metrics up to it, is found on resuming; the latter two are restored.
Not covered: network file systems without flock.
"""

from __future__ import annotations

import hashlib
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
from arpo.runs.manifest import find_damage, sha256_of, unverified, write_manifest
from arpo.runs.reporter import Reporter
from arpo.runs.storage import StorageError, writing
from arpo.runs.trees import IMAGE_NAME, TreeEntry, images_of, pack_trees, unpack_tree
from arpo.types import ScoredTree

CONFIG_FILE, METRICS_FILE = "config.json", "metrics.jsonl"
TREES_FILE = "trees.json"  # in a checkpoint: the SHA-256 of the run's tree files
_TREE_NAME = re.compile(r"step_(\d{6,})\.(?:index\.json|jsonl\.zst)(?:\.tmp)?")
MAX_IMAGES, MAX_IMAGES_BYTES = 100_000, 10 << 30  # stored in a run directory, in all
MAX_IMAGE_BYTES = 64 << 20  # of one
MAX_JSON_BYTES = 64 << 20  # of a tree index or the results of a comparison
RUN_FILES = "run"  # the folder in a checkpoint with the run's files at that step


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
        self._config = _read(directory / CONFIG_FILE) if lock else b""
        self._images_full = False  # and the user was told
        self._images: dict[str, int] | None = None  # names and sizes of the stored images, once they are needed
        self._trees: dict[str, str] = {}  # the SHA-256 of the tree files that this process wrote or checked
        self._metrics = bytearray(_whole_lines(_read(directory / METRICS_FILE)) if lock else b"")  # must be in the file
        self._opened = os.open(directory, os.O_RDONLY | os.O_DIRECTORY) if lock else None  # no other gets its inode

    def __enter__(self) -> RunDir:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the lock; the end of the process does so too."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None
        if self._opened is not None:
            os.close(self._opened)
            self._opened = None

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
        self._config = _dump(masked(config))
        write_atomically(self.directory / CONFIG_FILE, self._config)

    # --- metrics

    def append_metrics(self, step: int, values: Mapping[str, float | int | str]) -> bool:
        """Append a record; NaN and infinity become null. Returns whether the file was as this process had left it; if
        another program truncated or deleted it, all records are written again."""
        self._require_lock()
        record = {"step": step, **values}
        if record["step"] != step:
            raise ValueError("`step` is not a metric")
        line = (
            json.dumps({key: _finite(value) for key, value in record.items()}, allow_nan=False).encode("ascii") + b"\n"
        )
        path, before = self.directory / METRICS_FILE, len(self._metrics)
        self._metrics += line
        with writing(path), path.open("ab") as file:
            intact = file.tell() == before
            if intact:
                file.write(line)
        if not intact:
            write_atomically(path, self._metrics)
        return intact

    def update_metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Add values to the last record, which must be that of this step."""
        self._require_lock()
        *before, end = self._metrics.splitlines(keepends=True)
        last = json.loads(end)
        if last["step"] != step:
            raise ValueError(f"the last record is that of step {last['step']}, not of step {step}")
        self._write_metrics(b"".join(before) + json.dumps({**last, **values}).encode("ascii") + b"\n")

    def read_metrics(self) -> list[dict[str, Any]]:
        """All records without a truncated last line; any other damage is an error."""
        path = self.directory / METRICS_FILE
        lines = require_regular_file(path).read_bytes().split(b"\n")[:-1] if path.exists() else []
        return [_parse_line(path, number, line) for number, line in enumerate(lines, 1)]

    def _write_metrics(self, content: bytes) -> None:
        self._metrics = bytearray(content)
        write_atomically(self.directory / METRICS_FILE, content)

    def intact_records(self) -> list[dict[str, Any]]:
        """The records of a run opened for writing without damaged ones, which may follow the last checkpoint."""
        records = (_parse_record(line) for line in self._metrics.splitlines())
        return [record for record in records if record is not None]

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

    def write_trees(self, step: int, trees: Sequence[ScoredTree]) -> str | None:
        """Write the scored trees of a step, and their images; replaces older ones.

        Returns a warning for the user, once, when there is no more room for images.
        """
        self._require_lock()
        warning = self._write_images(trees)
        content, entries = pack_trees(trees)
        data, index = self.tree_files(step)
        data.parent.mkdir(exist_ok=True)
        index.unlink(missing_ok=True)  # an index must never describe other data
        for path, written in ((data, content), (index, _dump({"trees": [asdict(entry) for entry in entries]}))):
            write_atomically(path, written)
            self._trees[path.name] = hashlib.sha256(written).hexdigest()
        return warning

    def _write_images(self, trees: Sequence[ScoredTree]) -> str | None:
        """Store each image that is not there yet, as long as there is room; a warning says when there is none."""
        images = {image.sha256: image for scored in trees for image in images_of(scored.tree) if image.data}
        if not images or self._images_full:
            return None
        folder = self.directory / "images"
        folder.mkdir(exist_ok=True)
        if self._images is None:
            files = [path for path in folder.glob("*.png") if IMAGE_NAME.fullmatch(path.stem)]
            self._images = {path.stem: path.stat().st_size for path in files}
        size = sum(self._images.values())
        for name, image in images.items():
            if name in self._images:
                continue
            if len(self._images) >= MAX_IMAGES or size + len(image.data) > MAX_IMAGES_BYTES:
                self._images_full = True
                return (
                    f"{folder} holds {len(self._images):,} images of {size / 1e9:.1f} GB together: no more are stored. "
                    "Trees then name their images without holding them; training needs neither"
                )
            write_atomically(folder / f"{name}.png", image.data)
            self._images[name] = len(image.data)
            size += len(image.data)
        return None

    def read_image(self, sha256: str) -> bytes:
        """The PNG of an image of the run's trees; ArpoError if it is not stored or damaged."""
        return read_image(self.directory, sha256)

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

    # --- evaluations

    def write_evaluation(self, step: int, values: Mapping[str, Any]) -> None:
        """Write the evaluation of the weights after `step`, 0 before training; replaces an older one."""
        self._require_lock()
        path = self.evaluation_file(step)
        path.parent.mkdir(exist_ok=True)
        write_atomically(path, _dump({"step": step, **values}))

    def evaluation_steps(self) -> list[int]:
        """The steps with an evaluation, in order."""
        return _steps(self.directory / "evaluations", r"step_(\d{6,})\.json")

    def read_evaluation(self, step: int) -> dict[str, Any]:
        """The evaluation after `step`, with its accuracy on all questions and, under `by_kind`, on each kind."""
        path = self.evaluation_file(step)
        if not path.exists():
            raise ArpoError(f"{self.directory}: holds no evaluation of step {step}")
        return read_json(path)

    def evaluation_file(self, step: int) -> Path:
        """The path of the evaluation after `step`, whether it exists or not."""
        return self.directory / "evaluations" / f"{_step_name(step)}.json"

    def _evaluation_files_after(self, step: int) -> list[Path]:
        return [self.evaluation_file(later) for later in self.evaluation_steps() if later > step]

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
                _remove(leftover)
            temporary.mkdir()
            try:
                write(temporary)
                copies = temporary / RUN_FILES
                copies.mkdir()
                (copies / CONFIG_FILE).write_bytes(self._config)
                (copies / METRICS_FILE).write_bytes(self._metrics)
                (copies / TREES_FILE).write_bytes(_dump(self._trees))
                write_manifest(temporary, step)
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
        _remove(path.rename(path.with_name(path.name + ".tmp")))  # so that half a deletion does not look complete

    def set_aside(self, step: int) -> Path:
        """Rename a damaged checkpoint, so that it no longer counts as one; returns its new path."""
        self._require_lock()
        path = self.checkpoint_path(step)
        aside = path.with_name(path.name + ".damaged")
        if aside.exists() or aside.is_symlink():
            _remove(aside)
        return path.rename(aside)

    def _tree_paths(self) -> list[tuple[int, Path]]:
        """All tree files, indexes before their data, with their steps."""
        paths = sorted((self.directory / "trees").glob("step_*"))
        return [(int(found[1]), path) for path in paths if (found := _TREE_NAME.fullmatch(path.name))]

    # --- resuming

    def roll_back(self, step: int) -> None:
        """Delete records, trees, evaluations and checkpoints of later steps, as if the run was stopped at `step`."""
        self._require_lock()
        lines = ((line, _parse_record(line)) for line in self._metrics.splitlines(keepends=True))
        self._write_metrics(b"".join(line for line, record in lines if record and record["step"] <= step))
        for later in reversed([other for other in self.checkpoint_steps() if other > step]):
            self._delete_checkpoint(later)  # after a crash, one that is left has its own records
        for of_step, path in self._tree_paths():
            if of_step > step:
                path.unlink()
                self._trees.pop(path.name, None)
        for path in self._evaluation_files_after(step):
            path.unlink()

    def restore_records(self, step: int, with_config: bool) -> list[str]:
        """Compare the run's records and trees with what the checkpoint of `step` knows of them.

        Damaged records and, if it is wanted, the configuration are replaced by the checkpoint's. Returns what was found
        and done.
        """
        self._require_lock()
        path, notes = self.checkpoint_path(step), list[str]()
        source = f"was restored from the checkpoint of step {step}"
        if with_config:
            self._config = (path / RUN_FILES / CONFIG_FILE).read_bytes()
            write_atomically(self.directory / CONFIG_FILE, self._config)
            notes.append(f"{self.directory / CONFIG_FILE} was missing or damaged; it {source}")
        records = (path / RUN_FILES / METRICS_FILE).read_bytes()
        if not _continues(self._metrics, records):
            self._write_metrics(records)
            notes.append(f"{self.directory / METRICS_FILE} had lost or changed records; it {source}")
        trees, folder = read_json(path / RUN_FILES / TREES_FILE), self.directory / "trees"
        found = sha256_of(folder, [name for name in trees if (folder / name).is_file()])
        self._trees = {name: digest for name, digest in trees.items() if found.get(name) == digest}
        if lost := sorted(trees.keys() - self._trees.keys()):
            more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
            notes.append(f"{folder / lost[0]}{more}: saved trees are missing or damaged; training does not need them")
        return notes

    def archive_after(self, step: int) -> Path:
        """Copy all records, and the trees and evaluations of later steps, to a run `collapsed-N` inside this one.

        Returns its path.
        """
        self._require_lock()
        names = (self.directory / f"collapsed-{number}" for number in count(1))
        final = next(path for path in names if not path.exists())
        temporary = self.directory / "collapsed.tmp"
        shutil.rmtree(temporary, ignore_errors=True)
        (temporary / "trees").mkdir(parents=True)
        (temporary / "evaluations").mkdir()
        write_atomically(temporary / CONFIG_FILE, _dump(self.config()))
        write_atomically(temporary / METRICS_FILE, self._metrics)
        for of_step, path in self._tree_paths():
            if of_step > step:
                _link(path, temporary / "trees" / path.name)
        for path in self._evaluation_files_after(step):
            _link(path, temporary / "evaluations" / path.name)
        if (images := self.directory / "images").is_dir():
            (temporary / "images").mkdir()
            for path in images.glob("*.png"):
                _link(path, temporary / "images" / path.name)
        temporary.rename(final)
        _sync(self.directory)
        return final

    # --- trackers

    def tracker_state(self, name: str) -> TrackerState | None:
        """The state of a tracker; None if nothing was sent to it."""
        path = self.directory / f"tracker_{name}.json"
        if not path.exists():
            return None
        match read_json(path):
            case {"id": str(name), "step": int(step)}:
                return TrackerState(name, step)
        raise ArpoError(f"{path}: is damaged; delete it, and the tracker starts a new run")

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
        path = self.directory / LOCK_FILE
        if _is_same(self.directory, self._opened) and not path.exists():  # only the lock was deleted
            deleted, self._lock = self._lock, acquire_lock(self.directory)
            deleted.close()
        if not _is_same(self.directory, self._opened) or not _is_same(path, self._lock.fileno()):
            raise StorageError(
                f"{self.directory}: was deleted, moved or replaced while this run was writing to it. Put it back and "
                "continue with --resume, or begin again in another run.dir"
            )


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
        run_dir._config = _dump(masked(config))
        write_atomically(directory / CONFIG_FILE, run_dir._config)
    except BaseException:
        run_dir.close()
        raise
    return run_dir


def open_run_dir(directory: Path, write: bool = False) -> RunDir:
    """Open a run to read it or, with `write`, to continue it, which acquires the lock."""
    run = RunDir(directory, None)
    if not (directory / CONFIG_FILE).is_file() and not (write and run.checkpoint_steps()):  # which can restore it
        raise ArpoError(f"{directory}: not a run (it has no {CONFIG_FILE})")
    if not write:
        return run
    lock = acquire_lock(directory)
    metrics = directory / METRICS_FILE
    if metrics.exists():  # remove a truncated last line before anything is appended
        with writing(metrics):
            os.truncate(metrics, len(_whole_lines(require_regular_file(metrics).read_bytes())))
    run = RunDir(directory, lock)
    if is_run_dir(directory) and (config := run.config()) != read_json(directory / CONFIG_FILE):
        run._config = _dump(config)  # an old version saved secrets
        write_atomically(directory / CONFIG_FILE, run._config)
    return run


def require_good_weights(checkpoint: Path, reporter: Reporter) -> None:
    """Raise ArpoError if the model of a checkpoint is damaged; warn if it cannot be verified."""
    if note := unverified(checkpoint):
        reporter.warning(note)
    step = checkpoint_step(checkpoint)
    if problem := find_damage(checkpoint, step, under="model/"):
        raise ArpoError(
            f"the checkpoint {checkpoint} is damaged: {problem}. Put the file back from a copy, or use an older "
            "checkpoint; to train on, --resume goes back to the last good one"
        )


def checkpoint_step(directory: Path) -> int | None:
    """The step of a checkpoint, from its name; None if it is not named as one."""
    found = re.fullmatch(r"step_(\d{6,})", directory.name)
    return int(found[1]) if found else None


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
        raise ArpoError(
            f"{directory}: already holds a run; continue it (--resume, in Python resume=True) or choose another "
            "run.dir (output_dir)"
        )
    if RunDir(directory, None).checkpoint_steps():
        raise ArpoError(f"{directory}: holds a run that lost its {CONFIG_FILE}; --resume restores it from a checkpoint")
    if names - {LOCK_FILE, CONFIG_FILE + ".tmp"}:  # a crash in `create_run_dir` can leave these two
        raise ArpoError(f"{directory}: is not empty and holds no run; choose another run.dir")


def write_atomically(path: Path, content: bytes | bytearray) -> None:
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


def _is_same(path: Path, handle: int | None) -> bool:
    """Whether a path leads to the file or directory that was opened."""
    try:
        return handle is not None and os.path.samestat(path.stat(), os.fstat(handle))
    except OSError:
        return False


def _link(path: Path, copy: Path) -> None:
    """Hard-link a file, or copy it where the file system has no links."""
    try:
        copy.hardlink_to(path)
    except OSError:
        shutil.copyfile(path, copy)


def _remove(path: Path) -> None:
    """Delete a directory, or a link or file in its place."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _read(path: Path) -> bytes:
    return require_regular_file(path).read_bytes() if path.exists() else b""


def _whole_lines(content: bytes) -> bytes:
    return content[: content.rfind(b"\n") + 1]


def _continues(content: bytes | bytearray, records: bytes) -> bool:
    """Whether metrics begin with these records; values may have been added to the last one (`update_metrics`)."""
    lines, expected = content.splitlines(), records.splitlines()
    if not expected or lines[: len(expected)] == expected:
        return True
    if len(lines) < len(expected) or lines[: len(expected) - 1] != expected[:-1]:
        return False
    now, then = _parse_record(lines[len(expected) - 1]), _parse_record(expected[-1])
    return now is not None and then is not None and now == now | then


def _parse_record(line: bytes | bytearray) -> dict[str, Any] | None:
    """A line of metrics.jsonl; None if it is damaged."""
    try:
        record = parse_json(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else None


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _dump(value: Any) -> bytes:
    return (json.dumps(value, indent=2, allow_nan=False) + "\n").encode("ascii")


def read_image(directory: Path, sha256: str) -> bytes:
    """The PNG of an image stored with a run or an evaluation; ArpoError if it is not there or damaged."""
    if not IMAGE_NAME.fullmatch(sha256):
        raise ArpoError(f"an image is named by its SHA-256, not {sha256!r:.80}")
    path = directory / "images" / f"{sha256}.png"
    if not path.exists():
        raise ArpoError(f"{directory}: the image {sha256[:12]}... is not stored")
    content = read_limited(path, MAX_IMAGE_BYTES)
    if hashlib.sha256(content).hexdigest() != sha256:
        raise ArpoError(f"{path}: is damaged")
    return content


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; ArpoError if it is damaged."""
    return _parse_line(path, 1, read_limited(path, MAX_JSON_BYTES))


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


def _steps(folder: Path, pattern: str) -> list[int]:
    return sorted(int(found[1]) for path in folder.glob("step_*") if (found := re.fullmatch(pattern, path.name)))
