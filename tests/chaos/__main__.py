"""Breaks whatever can break around a training run, and counts what survived. The last line is JSON.

    make chaos                                     # everything
    python tests/chaos kills files --kills 10      # some of it, smaller

The exit code is 1 if anything was lost. `docs/trust.md` has a table of results.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # set before torch is loaded; many small processes share the cores
sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
# For the server that forks training processes.
os.environ["PYTHONPATH"] = os.pathsep.join([*sys.path[:2], *filter(None, [os.environ.get("PYTHONPATH")])])

import clients
import disks
import faults
import files
import kills
import nodes
import states
from report import Report

PARTS: dict[str, Callable[[Path, argparse.Namespace, Report], None]] = {
    "kills": kills.run,
    "faults": faults.run,
    "files": files.run,
    "disks": disks.run,
    "clients": clients.run,
    "nodes": nodes.run,
    "states": states.run,
}


def main() -> None:
    """Run the parts that are named, or all of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"one of {', '.join(PARTS)}; default: all")
    parser.add_argument("--kills", type=int, default=50, help="training runs that are killed and resumed")
    parser.add_argument("--trajectories", type=int, default=128, help="that call tools at the same time")
    parser.add_argument("--calls", type=int, default=40, help="tool calls per trajectory")
    parser.add_argument("--state-calls", type=int, default=10_000, help="of an environment in branched trajectories")
    parser.add_argument("--clients", type=int, default=200, help="of the viewer; half of them vanish")
    parser.add_argument("--seed", type=int, default=0, help="of all random choices")
    options = parser.parse_args()
    if unknown := set(options.parts) - PARTS.keys():
        parser.error(f"there is no part {unknown.pop()!r}; there are: {', '.join(PARTS)}")
    report, started = Report(), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="arpo-chaos-") as folder:
        for name in options.parts or PARTS:
            directory = Path(folder, name)
            directory.mkdir()
            PARTS[name](directory, options, report)
    report.numbers |= {"seed": options.seed, "seconds": round(time.monotonic() - started)}
    print(report.table())
    print(json.dumps(report.numbers))
    sys.exit(0 if report.all_survived else 1)


if __name__ == "__main__":
    main()
