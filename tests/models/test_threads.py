"""How many threads torch uses, and how they wait."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from arpo.models import threads


def _settings_of_openmp(**environment: str) -> str:
    """What OpenMP says about its settings when torch is loaded by the command line's modules."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_", "KMP_"))}
    done = subprocess.run(
        [sys.executable, "-c", "import arpo.cli.main, torch; torch.ones(4).sum()"],
        env={**kept, **environment, "OMP_DISPLAY_ENV": "VERBOSE"},
        stderr=subprocess.PIPE,
        check=True,
    )
    return done.stderr.decode()


@pytest.mark.slow
def test_threads_soon_sleep_while_they_wait_unless_the_user_says_otherwise() -> None:
    settings = _settings_of_openmp()
    if "GOMP_SPINCOUNT" not in settings:
        pytest.skip("this torch has an OpenMP that does not show its settings")
    assert "GOMP_SPINCOUNT = '10000'" in settings
    assert "GOMP_SPINCOUNT = '7'" in _settings_of_openmp(GOMP_SPINCOUNT="7")
    assert "GOMP_SPINCOUNT = '10000'" not in _settings_of_openmp(OMP_WAIT_POLICY="ACTIVE")


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 8),
        ({"cpu.max": "max 100000\n"}, 8),
        ({"cpu.max": "150000 100000\n"}, 2),
        ({"cpu.max": "10000 100000\n"}, 1),
        ({"cpu.max": "9900000 100000\n"}, 8),
        ({"cpu.max": "broken"}, 8),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 8),
        ({"cpu/cpu.cfs_quota_us": "300000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 3),
    ],
)
def test_a_quota_counts(files: dict[str, str], cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "CONTROL_GROUP", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    assert threads.usable_cores() == cores


def test_ranks_share_the_cores_and_omp_num_threads_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(threads, "usable_cores", lambda: 8)
    monkeypatch.setattr(torch, "get_num_threads", lambda: chosen[-1] if chosen else 64)
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.setenv("OMP_NUM_THREADS", "64")
    threads.set_num_threads()
    assert (chosen, threads.describe_threads()) == ([], "64 threads, as OMP_NUM_THREADS says")
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    threads.set_num_threads()
    assert chosen == [2]
    said = "2 threads on 8 usable cores for 4 ranks; OMP_NUM_THREADS sets another number"
    assert threads.describe_threads() == said
    threads.set_num_threads()
    assert chosen == [2]  # it only lowers the number
