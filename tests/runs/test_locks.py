"""The lock of a directory."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from arpo.errors import ArpoError
from arpo.runs import locks
from arpo.runs.locks import acquire_lock, is_live


def test_checking_whether_a_run_is_live_keeps_no_writer_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_live(tmp_path)
    acquire_lock(tmp_path).close()
    assert not is_live(tmp_path)
    looking = (tmp_path / "run.lock").open("rb")
    fcntl.flock(looking, fcntl.LOCK_SH)
    waits = []
    monkeypatch.setattr(locks.time, "sleep", waits.append)
    with pytest.raises(ArpoError, match="this program itself is writing this run"):
        acquire_lock(tmp_path)
    assert len(waits) == locks.TRIES - 1 > 0
    monkeypatch.setattr(locks.time, "sleep", lambda _: looking.close())  # who looks is done while the writer waits
    with acquire_lock(tmp_path):
        assert is_live(tmp_path)
    assert not is_live(tmp_path)


@pytest.mark.slow
def test_a_killed_process_leaves_no_lock_though_its_children_live(tmp_path: Path) -> None:
    code = """
import subprocess, sys, time
from pathlib import Path
from arpo.runs.locks import acquire_lock
lock = acquire_lock(Path(sys.argv[1]))
print(subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL).pid, flush=True)
time.sleep(600)
"""
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    try:
        assert is_live(tmp_path)
        with pytest.raises(ArpoError, match=f"another process \\(pid {process.pid}\\) is writing"):
            acquire_lock(tmp_path)
        process.kill()
        process.communicate()
        assert not is_live(tmp_path)
        acquire_lock(tmp_path).close()
    finally:
        process.kill()
        os.kill(child, signal.SIGKILL)
