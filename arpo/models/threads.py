"""The number of threads with which torch computes on a CPU.

It depends on the machine and the environment only, never on how busy the machine is: other numbers of threads may add
floating-point numbers in another order, and a run must be repeatable.
"""

from __future__ import annotations

import math
import os
from contextlib import suppress
from pathlib import Path

CONTROL_GROUP = Path("/sys/fs/cgroup")


def usable_cores() -> int:
    """The cores that this process may use: those of its affinity mask, or fewer if its control group has a quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(OSError, ValueError):  # no such control group, or no quota ("max", -1)
        if (CONTROL_GROUP / "cpu.max").exists():
            quota, period = (CONTROL_GROUP / "cpu.max").read_text().split()
        else:
            quota, period = ((CONTROL_GROUP / f"cpu/cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        if int(quota) > 0:
            cores = min(cores, math.ceil(int(quota) / int(period)))
    return max(1, cores)


def set_num_threads() -> None:
    """Let torch use no more threads than this process has cores; OMP_NUM_THREADS takes precedence."""
    import torch

    limit = max(1, usable_cores() // _local_ranks())
    if not os.environ.get("OMP_NUM_THREADS") and torch.get_num_threads() > limit:
        torch.set_num_threads(limit)


def describe_threads() -> str:
    """How many threads torch uses, why, and how to change it."""
    import torch

    number = torch.get_num_threads()
    threads = f"{number} thread{'s' if number > 1 else ''}"
    if os.environ.get("OMP_NUM_THREADS"):
        return f"{threads}, as OMP_NUM_THREADS says"
    shared = f" for {_local_ranks()} ranks" if _local_ranks() > 1 else ""
    return f"{threads} on {usable_cores()} usable cores{shared}; OMP_NUM_THREADS sets another number"


def _local_ranks() -> int:
    """The processes of this run on this machine, which share its cores."""
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(text) if text.isdecimal() and 1 <= int(text) <= 1024 else 1
