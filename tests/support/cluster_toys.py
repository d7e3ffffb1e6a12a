"""A reward for runs on a cluster, loaded from a copy of this file: what is being scored can be seen, and held up.

Beside the copy: `busy-PID` while that process scores, with its parent's pid in it; `scored`, a byte for each
trajectory; a file `hold` keeps all of them waiting.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from statistics import fmean

from arpo.environments import Environment
from arpo.tools.base import tool
from arpo.types import Reward, Task, Trajectory

HERE = Path(__file__).parent


def even_share(trajectory: Trajectory) -> Reward:
    """The share of even token ids among those sampled: any model can earn it."""
    pid = os.getpid()
    (HERE / f"busy-{pid}").write_text(str(os.getppid()))
    for _ in range(1200):
        if not (HERE / "hold").exists():
            break
        time.sleep(0.05)
    (HERE / f"busy-{pid}").unlink(missing_ok=True)
    with open(HERE / "scored", "ab") as file:
        file.write(b".")
    tokens = [token for node in trajectory.model_nodes for token in node.tokens]
    share = fmean(token % 2 == 0 for token in tokens)
    return Reward(share, {"correct": share, "format": 1.0})


class Numbered(Environment):
    """Numbers the searches of each trajectory; the task's row says where to start."""

    quick = True

    def reset(self, task: Task) -> None:
        self.count = len(task.meta["plan"]["lookups"]) * 100

    def fork(self) -> Numbered:
        other = Numbered()
        other.count = self.count
        return other

    @tool
    def search(self, query: str) -> str:
        """Search."""
        self.count += 1
        return str(self.count)

    def reward(self, trajectory: Trajectory) -> Reward:
        share = self.count % 100 / 10
        return Reward(share, {"correct": share, "format": 1.0})
