"""`make chaos`, small: every part that needs no cluster and no privileges runs, and nothing is lost."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SIZES = ["--kills=2", "--trajectories=32", "--calls=16", "--clients=20", "--state-calls=600"]


@pytest.mark.slow
@pytest.mark.parametrize("part", ["kills", "faults", "clients", "states"])
def test_a_small_chaos(part: str) -> None:
    command = [sys.executable, str(Path(__file__).parent), part, *SIZES]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    numbers = json.loads(done.stdout.splitlines()[-1])
    if part == "kills":
        assert numbers["kills"] == numbers["kills_exact"] == 2
    elif part == "faults":
        assert numbers["calls"] == 32 * 16 and numbers["faults"] > 100 and numbers["lost"] == 0
    elif part == "states":
        assert numbers["states_forked_calls"] >= 300 and numbers["states_replayed_calls"] >= 300
        assert numbers["states_forked_wrong"] == numbers["states_replayed_wrong"] == 0
    else:
        assert numbers["clients"] == numbers["clients_answered"] == 10
