"""The sandbox against a new interpreter per call: calls per second and CPU per call. The last line is JSON.

    python benchmarks/bench_sandbox.py [--tier landlock] [--seconds 5]

Both sides get the same code and the same number of callers, in turns of a second each, so that what else the machine
does falls on both alike.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Callable

from arpo.tools.sandbox.sandbox import Sandbox

CODES = {
    "print": "print(1+1)",
    "sympy": "from sympy import symbols, solve\nx = symbols('x')\nprint(solve(x**2 - 5*x + 6))",
}
EXPECTED = {"print": "2\n", "sympy": "[2, 3]\n"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tier", choices=("namespaces", "landlock"), default=None)
    parser.add_argument("--seconds", type=float, default=8.0, help="for each side and each code")
    parser.add_argument("--callers", type=int, default=os.cpu_count())
    options = parser.parse_args()
    found: dict[str, object] = {"cores": os.cpu_count(), "machine": platform.machine(), "callers": options.callers}
    with Sandbox(tier=options.tier) as sandbox:
        found["tier"] = sandbox.tier
        for name, code in CODES.items():

            def confined(code: str = code) -> str:
                return sandbox.run(code).stdout

            def plain(code: str = code) -> str:
                command = [sys.executable, "-c", code]
                return subprocess.run(command, capture_output=True, text=True, check=True).stdout

            confined()  # its packages are imported by now, as they are during a run
            totals = {"sandbox": [0, 0.0, 0.0], "subprocess": [0, 0.0, 0.0]}
            for _ in range(max(1, round(options.seconds))):
                for side, call in (("sandbox", confined), ("subprocess", plain)):
                    calls, seconds, cpu = load(call, EXPECTED[name], options.callers, 1.0)
                    totals[side] = [a + b for a, b in zip(totals[side], (calls, seconds, cpu), strict=True)]
            for side, (calls, seconds, cpu) in totals.items():
                found[f"{name}_{side}_per_second"] = round(calls / seconds, 1)
                found[f"{name}_{side}_cpu_ms"] = round(1000 * cpu / calls, 2)
                print(f"{name:6} {side:11} {calls / seconds:8.1f} calls/s {1000 * cpu / calls:8.2f} ms CPU per call")
            ours, theirs = (totals[side][0] / totals[side][1] for side in ("sandbox", "subprocess"))
            found[f"{name}_ratio"] = round(ours / theirs, 2)
            print(f"{name:6} ratio       {ours / theirs:8.1f}x")
    print(json.dumps(found))


def load(call: Callable[[], str], expected: str, callers: int, seconds: float) -> tuple[int, float, float]:
    """Call from `callers` threads for a while: calls made, seconds taken, CPU seconds of us and all below us."""
    counts: list[int] = []
    started, cpu = time.perf_counter(), cpu_seconds()

    def work() -> None:
        made = 0
        while time.perf_counter() - started < seconds:
            if call() != expected:
                raise AssertionError("wrong output")
            made += 1
        counts.append(made)

    threads = [threading.Thread(target=work) for _ in range(callers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if len(counts) != callers:
        raise SystemExit("a call failed")
    return sum(counts), time.perf_counter() - started, cpu_seconds() - cpu


def cpu_seconds() -> float:
    """CPU time of this process, its living descendants, and all that these have waited for."""
    parents, used = {}, {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/stat") as file:
                fields = file.read().rpartition(")")[2].split()
        except OSError:
            continue
        parents[int(pid)], used[int(pid)] = int(fields[1]), sum(map(int, fields[11:15]))
    family = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= more
    return sum(used.get(pid, 0) for pid in family) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
