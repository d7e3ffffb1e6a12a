"""A file system that refuses to write: one message that says which file, why, and what to do."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest
from cli_runs import Arpo, mistake
from safetensors import SafetensorError

from arpo.cli import training as arpo_training
from arpo.runs.run_dir import create_run_dir, open_run_dir, write_atomically
from arpo.runs.storage import StorageError, disk_error, writing

FULL = "No space left on device"
SPACE = r"The file system /\S* has [\d.]+ [GM]B free of [\d.]+ [GM]B: free some space there, .* --resume"


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (OSError(errno.ENOSPC, FULL), FULL + r"\. " + SPACE),
        (SafetensorError(f"Error while serializing: I/O error: {FULL} (os error 28)"), FULL + r"\. " + SPACE),
        (Exception(f"{FULL} (os error 28)"), FULL + r"\. " + SPACE),  # as tokenizers raises it
        (shutil.Error([("a", "b", f"[Errno 28] {FULL}: 'b'")]), FULL + r"\. " + SPACE),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), r"Disk quota exceeded\. " + SPACE),
        (OSError(errno.EROFS, "Read-only file system"), r"Read-only file system\. Make .* writable"),
        (PermissionError(errno.EACCES, "Permission denied"), r"Permission denied\. Make .* writable"),
        (OSError(errno.EIO, "Input/output error"), r"Input/output error\. The disk reports an error"),
        (OSError(errno.EFBIG, "File too large"), r"File too large\. .*ulimit"),
        (FileNotFoundError(errno.ENOENT, "No such file or directory"), r"was deleted or moved"),
    ],
)
def test_errors_of_the_file_system_are_told_in_one_message(tmp_path: Path, error: Exception, says: str) -> None:
    with pytest.raises(StorageError, match=says) as caught, writing(tmp_path / "file"):
        raise error
    assert str(caught.value).startswith(f"{tmp_path / 'file'}: cannot be written: ")
    assert "\n" not in str(caught.value)


def test_other_errors_are_not_the_file_systems() -> None:
    for error in (ValueError("no"), RuntimeError("CUDA out of memory"), OSError(errno.ECONNREFUSED, "refused")):
        with pytest.raises(type(error)) as caught, writing(Path("file")):
            raise error
        assert caught.value is error
        assert disk_error(error) is None
    assert disk_error(FileNotFoundError(errno.ENOENT, "gone")) is None  # a file that was to be read


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_while_a_record_is_written(tmp_path: Path) -> None:
    with create_run_dir(tmp_path / "run", {"rollout": {}}) as run:
        (tmp_path / "run" / "metrics.jsonl").symlink_to("/dev/full")
        with pytest.raises(StorageError, match=rf"metrics\.jsonl: cannot be written: {FULL}"):
            run.append_metrics(1, {"reward": 0.5})


def test_half_a_file_or_checkpoint_is_removed_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, FULL)

    def write(folder: Path) -> None:
        (folder / "half").write_text("half")
        raise OSError(errno.ENOSPC, FULL)

    with create_run_dir(tmp_path / "run", {"rollout": {}}) as run:
        with pytest.raises(StorageError, match="step_000001: cannot be written"):
            run.commit_checkpoint(1, write, keep=1)
        assert list((tmp_path / "run" / "checkpoints").iterdir()) == []
        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(StorageError, match=r"new\.json: cannot be written"):
            write_atomically(tmp_path / "new.json", b"{}")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert open_run_dir(tmp_path / "run").checkpoint_steps() == []


def test_any_command_on_a_full_disk_ends_with_one_message(arpo: Arpo, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, FULL)

    monkeypatch.setattr(arpo_training, "load_config", full)
    said = mistake(arpo("train", "small.toml"))
    assert FULL in said and "repeat the command" in said and "Traceback" not in said
