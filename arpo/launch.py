"""How many processes train together, as `torchrun` tells each of them in its environment. Nothing heavy is imported."""

from __future__ import annotations

import os


def ranks() -> int:
    """Processes of this run; 1 without `torchrun`."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    """Which of them this is; 0 leads."""
    return int(os.environ.get("RANK", "0"))


def device_number() -> int:
    """Which of its machine's GPUs belongs to this process."""
    return int(os.environ.get("LOCAL_RANK", "0"))
