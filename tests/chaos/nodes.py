"""A Ray node killed with everything on it, in the middle of a step: every tree is there, none twice."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import cluster_runs
from report import Report

from arpo.config.loading import load_config
from arpo.runs.run_dir import open_run_dir

STEPS = 4
BOUND = 300.0  # seconds; only what hangs reaches it
NODE = {"num_cpus": 1, "object_store_memory": 80 * 2**20}


def run(folder: Path, options: argparse.Namespace, report: Report) -> None:
    """Train on two sampling nodes, of which one is killed in the second step."""
    try:
        from ray.cluster_utils import Cluster
    except ImportError:
        report.progress("nodes: left out, Ray is not installed (pip install 'arpo[cluster]')")
        return
    from arpo.cluster.ray_backend import connect
    from arpo.training.loop import open_training, train

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    toys = cluster_runs.toys_in(folder)
    noticed = {"health_check_period_ms": 500, "health_check_failure_threshold": 4}
    head = {**NODE, "num_cpus": 0, "include_dashboard": False, "_system_config": noticed}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        doomed, _ = cluster.add_node(**NODE), cluster.add_node(**NODE)
        settings = [
            f"model.path={cluster_runs.BASE}", f"run.dir={folder / 'run'}", *cluster_runs.SMALL, f"train.steps={STEPS}",
            f"reward.function={toys / 'toys.py'}:even_share", f"cluster.address={cluster.address}",
        ]  # fmt: skip
        config = load_config(None, settings)
        killer = threading.Thread(target=_kill_node, args=(doomed, folder / "run", toys), daemon=True)
        killer.start()
        with connect(config) as build_sampler, open_training(config, build_sampler=build_sampler) as training:
            asyncio.run(train(training))
        killer.join(BOUND)
        cluster.remove_node(doomed, allow_graceful=False)
        retried = sum(row["cluster_retried"] for row in open_run_dir(folder / "run").read_metrics())
        try:
            cluster_runs.assert_all_there(open_run_dir(folder / "run"), config)
            survived = not killer.is_alive() and retried > 0
        except AssertionError:
            survived = False
    finally:
        cluster.shutdown()
    note = f"{retried:.0f} trees sampled again on the other node, every tree of {STEPS} steps there once"
    report.add("a Ray node killed in the middle of a step", 1, int(survived), note)
    report.numbers |= {"nodes_killed": 1, "nodes_survived": int(survived)}


def _kill_node(node: Any, directory: Path, toys: Path) -> None:
    """Kill the node's raylet and the actor that samples there, after the first step, while it scores a tree."""
    [process] = node.all_processes["raylet"]
    raylet = process.process.pid
    while not (directory / "metrics.jsonl").exists() or not (directory / "metrics.jsonl").read_text():
        time.sleep(0.05)
    (toys / "hold").touch()
    try:
        while not (victims := _busy(toys, raylet)):
            time.sleep(0.05)
        for pid in (raylet, *victims):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    finally:
        (toys / "hold").unlink()


def _busy(toys: Path, raylet: int) -> list[int]:
    """Processes of this node that score a tree now."""
    found = []
    for file in toys.glob("busy-*"):
        with suppress(FileNotFoundError):
            if file.read_text() == str(raylet):
                found.append(int(file.name.removeprefix("busy-")))
    return found
