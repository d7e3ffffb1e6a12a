"""How much faster two machines sample than one when tools take time, and how long a killed actor is missed.

    python benchmarks/bench_cluster.py [--seconds 0.5] [--steps 4]

The machines are Ray nodes on this one, one CPU each, beside a head that samples nothing. One tree at a time per actor,
so that what is measured is the waiting. It prints seconds of sampling per step (the first, which waits for the actors,
is left out), then kills an actor in the midst of a step.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import tempfile
import threading
import time
from pathlib import Path
from statistics import fmean

import arpo.builtin
from arpo.cluster.ray_backend import connect
from arpo.cluster.sampler import RaySampler
from arpo.config.loading import load_config
from arpo.runs.run_dir import open_run_dir as read_run
from arpo.training.loop import open_training, train

TOOL = '''
import asyncio
from arpo.tools.base import tool

@tool
async def search(query: str) -> str:
    """Looks something up, slowly."""
    await asyncio.sleep({seconds})
    return "Nothing was found about " + query[:40]
'''
SETTINGS = [
    "model.device=cpu", "world.train_questions=40", "reward.bonus=0", "rollout.num_trajectories=4",
    "rollout.concurrency=4", "rollout.max_tokens=80", "rollout.max_tool_calls=2", "train.batch_size=8", "train.lr=1e-6",
    "branching.rule=stochastic",
]  # fmt: skip


def measure(folder: Path, address: str, steps: int, name: str, kill: bool = False) -> None:
    """One run; prints what it took."""
    base = Path(arpo.builtin.__file__).parent / "base"
    named = [f"model.path={base}", f"run.dir={folder / name}", f'tools.enabled=["{folder / "slow.py"}:search"]']
    config = load_config(None, [*named, *SETTINGS, f"train.steps={steps}", f"cluster.address={address}"])
    with connect(config) as build_sampler, open_training(config, build_sampler=build_sampler) as run:
        if kill:
            directory = run.checkpoints.run.directory
            threading.Thread(target=_kill, args=(run.sampler, directory), daemon=True).start()
        asyncio.run(train(run))
    rows = read_run(folder / name).read_metrics()[1:]
    seconds = [row["rollout_seconds"] for row in rows]
    busy, retried = fmean(row["cluster_busy"] for row in rows), sum(row["cluster_retried"] for row in rows)
    print(f"{name}: {fmean(seconds):.2f} s a step ({', '.join(f'{s:.1f}' for s in seconds)}), busy {busy:.0%}")
    print(f"{name}: {sum(row['tool_calls'] for row in rows)} calls, {retried:.0f} trees sampled again", flush=True)


def _kill(sampler: RaySampler, directory: Path) -> None:
    """Kill an actor in the second step and say when it is noticed and when another is there."""
    while not (directory / "metrics.jsonl").exists() or not (directory / "metrics.jsonl").read_text().strip():
        time.sleep(0.05)
    time.sleep(1.0)
    before = dict(sampler.pids)
    name, pid = next(iter(before.items()))
    started = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    while name in sampler.pids:
        time.sleep(0.01)
    print(f"killed: noticed after {time.monotonic() - started:.2f} s", flush=True)
    while len(sampler.pids) < len(before):
        time.sleep(0.01)
    print(f"killed: another is ready after {time.monotonic() - started:.2f} s", flush=True)


def main() -> None:
    """Measure with one node and with two."""
    from ray.cluster_utils import Cluster

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=0.5, help="that the tool takes")
    parser.add_argument("--steps", type=int, default=4)
    given = parser.parse_args()
    node = {"num_cpus": 1, "object_store_memory": 80 * 2**20}
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        (folder / "slow.py").write_text(TOOL.format(seconds=given.seconds))
        cluster = Cluster(initialize_head=True, head_node_args={**node, "num_cpus": 0, "include_dashboard": False})
        try:
            for nodes in (1, 2):
                cluster.add_node(**node)
                measure(folder, cluster.address, given.steps, f"{nodes}-nodes")
            measure(folder, cluster.address, given.steps, "2-nodes-one-killed", kill=True)
        finally:
            cluster.shutdown()


if __name__ == "__main__":
    main()
