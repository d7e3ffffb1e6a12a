"""What happens to a run does not cost its finished steps: a closed terminal, a full disk."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import warm_process
from training_runs import SMALL

from arpo.runs.run_dir import open_run_dir as read_run

HANGUP = "import signal; signal.signal(signal.SIGHUP, signal.{}); " + warm_process.CLI
ENDLESS = ("train.steps=100000", "run.checkpoint_every=100000")


def command(model: Path, directory: Path, *more: str) -> list[str]:
    config = directory.parent / "config.toml"
    config.write_text("")
    return ["train", str(config), *SMALL, f"model.path={model}", f"run.dir={directory}", *more]


def wait_for_steps(process: BaseProcess, directory: Path, count: int = 1) -> None:
    metrics = directory / "metrics.jsonl"
    while process.is_alive() and not (metrics.exists() and metrics.read_text().count("\n") >= count):
        time.sleep(0.02)


def assert_saved(directory: Path) -> None:
    log = read_run(directory)
    assert (log.latest_checkpoint() or (0,))[0] == log.read_metrics()[-1]["step"] >= 1


@pytest.mark.slow
def test_a_closed_terminal_saves_the_run(model_path: Path, tmp_path: Path) -> None:
    ours, theirs = os.openpty()
    terminal = Path(os.ttyname(theirs))  # a session that opens it is controlled by it
    given = command(model_path, tmp_path / "run", *ENDLESS)
    process = warm_process.start(HANGUP.format("SIG_DFL"), *given, output=terminal)
    try:
        os.read(ours, 1)  # it has opened the terminal
        os.close(theirs)
        wait_for_steps(process, tmp_path / "run")
        os.close(ours)  # the kernel sends SIGHUP, and printing raises from now on
        process.join()
    finally:
        process.kill()
    assert process.exitcode in (130, 1)  # 1 if it was just printing
    assert_saved(tmp_path / "run")


@pytest.mark.slow
def test_hangups_save_once_and_are_ignored_under_nohup(model_path: Path, tmp_path: Path) -> None:
    for ignored in (False, True):
        directory = tmp_path / f"run-{ignored}"
        given, output = command(model_path, directory, *ENDLESS), tmp_path / "output.txt"
        code = HANGUP.format("SIG_IGN" if ignored else "SIG_DFL")
        process = warm_process.start(code, *given, output=output)
        try:
            wait_for_steps(process, directory)
            for _ in range(3):  # a shell and the kernel both send it
                os.kill(process.pid or 0, signal.SIGHUP)
            if ignored:
                wait_for_steps(process, directory, (directory / "metrics.jsonl").read_text().count("\n") + 2)
                assert process.is_alive() and read_run(directory).checkpoint_steps() == []
                os.kill(process.pid or 0, signal.SIGTERM)
            process.join()
        finally:
            process.kill()
        assert process.exitcode == 130, output.read_text()
        assert "--resume" in output.read_text() and "Traceback" not in output.read_text()
        assert_saved(directory)


@pytest.mark.slow
def test_a_reader_of_the_output_that_ends_costs_no_step(model_path: Path, tmp_path: Path) -> None:
    """As in `arpo train my.toml | head -1`."""
    os.mkfifo(tmp_path / "pipe")
    given = command(model_path, tmp_path / "run", *ENDLESS)
    process = warm_process.start(warm_process.CLI, *given, output=tmp_path / "pipe")
    try:
        with (tmp_path / "pipe").open() as pipe:
            wait_for_steps(process, tmp_path / "run")
            pipe.readline()
        process.join()
    finally:
        process.kill()
    assert process.exitcode == 1
    assert_saved(tmp_path / "run")


FULL_DISK = """
mount -t tmpfs -o size=$1 none "$2" || exit 77
shift 2
"$@" && exit 78
code=$?
echo "code $code"
mount -o remount,size=100m "$MOUNTED" && "$@" --resume
"""


@pytest.mark.slow
def test_a_full_disk_stops_a_run_that_continues_when_there_is_room(model_path: Path, tmp_path: Path) -> None:
    if not shutil.which("unshare") or subprocess.run(["unshare", "-Urm", "true"], capture_output=True).returncode:
        pytest.skip("a small file system of one's own needs user namespaces, which are not allowed here")
    disk = tmp_path / "disk"
    disk.mkdir()
    size = sum(file.stat().st_size for file in model_path.iterdir())
    given = command(model_path, tmp_path / "run", "train.steps=6", "run.checkpoint_every=1", f"run.dir={disk / 'run'}")
    done = subprocess.run(
        [
            "unshare",
            "-Urm",
            "sh",
            "-c",
            FULL_DISK,
            "sh",
            str(6 * size),
            str(disk),
            sys.executable,
            "-m",
            "arpo",
            *given,
        ],
        capture_output=True,
        text=True,
        env={**os.environ, "MOUNTED": str(disk)},
    )
    if done.returncode == 77:
        pytest.skip("a tmpfs cannot be mounted here")
    assert done.returncode == 0, done.stderr
    assert "code 2" in done.stdout and "done: 6 steps" in done.stdout
    assert f"The file system {disk} has " in done.stderr and "--resume" in done.stderr
    assert "Traceback" not in done.stderr and len(done.stderr.splitlines()) == 1
