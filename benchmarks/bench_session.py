"""A branch of a Python session: a fork of the frozen process against replay and a new interpreter. JSON at the end.

    python benchmarks/bench_session.py [--turns 8]

For 0, 1, 4 and 16 earlier calls, with numpy loaded, one more call is made from the same point: in a fork, after a
replay of the earlier calls in a new session, and in a new interpreter that executes all of them. The three take turns,
so that what else the machine does falls on all alike. CPU is that of this process and everything below it. It is
counted in hundredths of a second for each process that lives, so a replay, which makes new ones, is understated.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from bench_sandbox import cpu_seconds

from arpo.tools.sandbox.sandbox import Sandbox
from arpo.tools.sandbox.sessions import SessionPoint, Sessions

FIRST = "import numpy as np\nx = 0\ndata = np.arange(1000.0)"
EARLIER = "x += 1\ndata = np.sqrt(data + x)\ntotal = float(data.sum())"
CALL = "x += 1\nprint(x)"
EARLIER_CALLS = (0, 1, 4, 16)
FORKS, REPLAYS, FRESH = 40, 3, 3  # calls per turn, as CPU time is counted in hundredths of a second


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=8)
    options = parser.parse_args()
    found: dict[str, object] = {"cores": os.cpu_count(), "machine": platform.machine()}
    with Sandbox(tier="namespaces") as sandbox:
        found["tier"] = sandbox.tier
        sessions = Sessions(sandbox, max_frozen=10_000)
        held: list[object] = []  # sessions that end would take the CPU time they have used with them
        for earlier in EARLIER_CALLS:
            point = build(sessions, earlier)
            held.append(point)
            sides = {"fork": (fork, FORKS), "replay": (replay, REPLAYS), "fresh": (fresh, FRESH)}
            cpu, wall = dict.fromkeys(sides, 0.0), dict.fromkeys(sides, 0.0)
            for _ in range(options.turns):
                for side, (call, times) in sides.items():
                    kept, used, took = measure(lambda call=call, point=point: call(sessions, point), times)
                    held += kept if side == "replay" else []
                    cpu[side] += 1000 * used / options.turns
                    wall[side] += 1000 * took / options.turns
            for side in sides:
                print(f"{earlier:3} earlier calls  {side:7} {cpu[side]:8.2f} ms CPU {wall[side]:8.2f} ms")
                found[f"{side}_{earlier}_cpu_ms"] = round(cpu[side], 2)
                found[f"{side}_{earlier}_wall_ms"] = round(wall[side], 2)
            if earlier == EARLIER_CALLS[-1]:
                found["fork_ms"] = round(cpu["fork"], 2)
                found["replay_ratio"] = round(cpu["replay"] / cpu["fork"], 1)
                found["fresh_ratio"] = round(cpu["fresh"] / cpu["fork"], 1)
        found["frozen_mb"] = round(private_mb(sessions, point), 2)
    print(json.dumps(found))


def build(sessions: Sessions, earlier: int) -> SessionPoint:
    """A point after one call that loads numpy, and `earlier` more."""
    _, point = sessions.run(sessions.open(), FIRST, 60.0)
    for _ in range(earlier):
        _, point = sessions.run(point, EARLIER, 60.0)
    return point


def fork(sessions: Sessions, point: SessionPoint) -> object:
    """A branch of the frozen process."""
    return checked(*sessions.run(point, CALL, 60.0), point)


def replay(sessions: Sessions, point: SessionPoint) -> object:
    """A branch from a point whose process was dropped. What was built is returned, so that its CPU time is seen."""
    rebuilt = SessionPoint(point.cells)
    return rebuilt, checked(*sessions.run(rebuilt, CALL, 60.0), point)


def fresh(sessions: Sessions, point: SessionPoint) -> object:
    """A new interpreter, without any isolation, that executes all calls."""
    code = "\n".join([*(cell.code for cell in point.cells), CALL])
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    return checked_text(printed, point)


def checked(result: object, after: SessionPoint, point: SessionPoint) -> SessionPoint:
    checked_text(getattr(result, "stdout", ""), point)
    return after


def checked_text(printed: str, point: SessionPoint) -> None:
    if printed != f"{len(point.cells)}\n":
        raise SystemExit(f"wrong output: {printed!r}")


def measure(call: Callable[[], object], times: int) -> tuple[list[object], float, float]:
    """What some calls return, and CPU and wall seconds of one of them."""
    cpu, started = cpu_seconds(), time.perf_counter()
    found = [call() for _ in range(times)]
    took = time.perf_counter() - started
    return found, (cpu_seconds() - cpu) / times, took / times


def private_mb(sessions: Sessions, point: SessionPoint) -> float:
    """Megabytes of memory that a frozen process shares with no other."""
    name = f"bench-{os.getpid()}"
    held = sessions.run(point, f"import ctypes; ctypes.CDLL(None).prctl(15, b'{name}', 0, 0, 0)", 60.0)
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (place / "comm").read_text() == f"{name}\n":
                lines = (place / "smaps_rollup").read_text().splitlines()
                return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) / 1024
    raise SystemExit(f"there is no frozen process after {held}")


if __name__ == "__main__":
    main()
