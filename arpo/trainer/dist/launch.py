"""The process group as `torchrun` describes it in environment variables. Imports nothing heavy.

Other programs set some of these variables too. There are several processes only where everything that is needed to
join them is set: RANK, WORLD_SIZE and MASTER_ADDR, with valid numbers.
"""

from __future__ import annotations

import os


def world_size() -> int:
    """The number of processes of this run; 1 without `torchrun`."""
    count = _number("WORLD_SIZE")
    complete = _number("RANK") is not None and "MASTER_ADDR" in os.environ
    return count if count and complete else 1


def rank() -> int:
    """The rank of this process; 0 leads."""
    return (_number("RANK") or 0) if world_size() > 1 else 0


def local_rank() -> int:
    """The index of this process's GPU on its machine."""
    return _number("LOCAL_RANK") or 0


def _number(name: str) -> int | None:
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() else None
