"""What tests of runs on a cluster share: small settings, and what a run must have left behind."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import cluster_toys

import arpo
from arpo.config.schema import Config
from arpo.data.order import batch_tasks
from arpo.data.task_set import load_task_set
from arpo.runs.reporter import Reporter
from arpo.runs.run_dir import RunDir
from arpo.types import Kind

BASE = Path(arpo.__file__).parent / "builtin" / "base"  # the built-in model before its cold start
SMALL = [
    "model.device=cpu", "world.entities=60", "world.train_questions=40", "world.test_questions=4", "eval.questions=3",
    'tools.enabled=["search"]', "reward.bonus=0", "rollout.num_trajectories=4", "rollout.concurrency=4",
    "rollout.max_tokens=80",
    "rollout.max_tool_calls=2", "train.batch_size=6", "train.lr=1e-3", "branching.rule=stochastic",
    "run.checkpoint_every=1",
]  # fmt: skip


class Messages(Reporter):
    """Keeps what was reported."""

    def __init__(self) -> None:
        self.text = ""

    def message(self, text: str) -> None:
        self.text += f"{text}\n"


def toys_in(folder: Path) -> Path:
    """A folder with the reward, and what that leaves there."""
    (folder / "toys").mkdir(parents=True, exist_ok=True)
    shutil.copy(cluster_toys.__file__, folder / "toys" / "toys.py")
    return folder / "toys"


def tokens_of(log: RunDir, step: int) -> list[Any]:
    """The tokens of each tree's trajectories, sorted: which one ends first depends on what else is sampled."""
    return [
        sorted([node.tokens for node in trajectory.nodes] for trajectory in scored.tree.trajectories)
        for scored in log.read_trees(step)
    ]


def ages(log: RunDir) -> list[int]:
    """By how much the weights that sampled each tree were older than those that it trained; all of it by one."""
    found = []
    for step in log.tree_steps():
        for scored in log.read_trees(step):
            [version] = {n.policy_version for n in scored.tree.nodes if n.kind is Kind.MODEL}
            found.append(step - 1 - version)
    return found


def assert_all_there(log: RunDir, config: Config) -> None:
    """Every question of every step once, and metrics that add up to the saved trees."""
    sources = load_task_set(config).sources
    rows = log.read_metrics()
    assert [row["step"] for row in rows] == log.tree_steps() == list(range(1, config.train.steps + 1))
    for row in rows:
        trees = [scored.tree for scored in log.read_trees(row["step"])]
        wanted = batch_tasks(sources, config.train.batch_size, row["step"], config.seed)
        assert [tree.task.id for tree in trees] == [task.id for task in wanted]
        assert row["trajectories"] == sum(len(tree.leaves) for tree in trees) == 4 * config.train.batch_size
        assert row["tool_calls"] == sum(n.kind is Kind.TOOL for tree in trees for n in tree.nodes)
    assert sum(row["tool_calls"] for row in rows) > 10
