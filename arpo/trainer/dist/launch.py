"""How many processes train together, as `torchrun` tells each of them in its environment. Nothing heavy is imported.

Other programs set some of these variables too. So there are several processes only where all that is needed to meet the
others is set: RANK, WORLD_SIZE and MASTER_ADDR, the numbers being numbers.
"""

from __future__ import annotations

import os


def ranks() -> int:
    """Processes of this run; 1 without `torchrun`."""
    count = _number("WORLD_SIZE")
    told = _number("RANK") is not None and "MASTER_ADDR" in os.environ
    return count if count and told else 1


def rank() -> int:
    """Which of them this is; 0 leads."""
    return (_number("RANK") or 0) if ranks() > 1 else 0


def device_number() -> int:
    """Which of its machine's GPUs belongs to this process."""
    return _number("LOCAL_RANK") or 0


def _number(name: str) -> int | None:
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() else None
