"""A reward for runs on a cluster, loaded from a copy of this file: what is being scored can be seen, and held up.

Beside the copy: `busy-PID` while that process scores, with its parent's pid in it; `scored`, a byte for each
path; a file `hold` keeps all of them waiting.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from statistics import fmean

from arpo.types import Kind, Leaf, Reward, RolloutTree, Task

HERE = Path(__file__).parent


def even_share(task: Task, tree: RolloutTree, leaf: Leaf) -> Reward:
    """The share of even token ids on the path: any model can earn it."""
    pid = os.getpid()
    (HERE / f"busy-{pid}").write_text(str(os.getppid()))
    for _ in range(1200):
        if not (HERE / "hold").exists():
            break
        time.sleep(0.05)
    (HERE / f"busy-{pid}").unlink(missing_ok=True)
    with open(HERE / "scored", "ab") as file:
        file.write(b".")
    tokens = [t for i in tree.path(leaf.node) if tree.nodes[i].kind is Kind.MODEL for t in tree.nodes[i].tokens]
    share = fmean(token % 2 == 0 for token in tokens)
    return Reward(share, {"correct": share, "format": 1.0})
