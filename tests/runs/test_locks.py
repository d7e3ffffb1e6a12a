"""The lock of a directory."""

from __future__ import annotations

import fcntl
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
    with pytest.raises(ArpoError, match="another process"):
        acquire_lock(tmp_path)
    assert len(waits) == locks.TRIES - 1 > 0
    monkeypatch.setattr(locks.time, "sleep", lambda _: looking.close())  # who looks is done while the writer waits
    with acquire_lock(tmp_path):
        assert is_live(tmp_path)
    assert not is_live(tmp_path)
