"""Short training runs with a reward that any model can earn, and what they leave behind."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from safetensors.torch import load_file

from arpo.algorithm.advantage import compute_credits
from arpo.config.algorithm import Advantage
from arpo.config.loading import load_config
from arpo.config.schema import Config
from arpo.rewards import RewardFn
from arpo.runs.run_dir import RunDir
from arpo.runs.run_dir import open_run_dir as read_run
from arpo.training.context import RolloutContext
from arpo.training.loop import Training, open_training, train
from arpo.training.sampler import LocalSampler
from arpo.types import Reward, RolloutTree, ScoredTree, Trajectory

SMALL = [
    "world.entities=60", "world.train_questions=12", "world.test_questions=4", "eval.questions=2", "train.batch_size=3",
    "train.steps=4", "rollout.num_trajectories=4", "rollout.max_tokens=40", "rollout.max_tool_calls=2", "train.lr=1e-3",
    "branching.rule=stochastic", "run.checkpoint_every=2",
]  # fmt: skip


def even_share(trajectory: Trajectory) -> Reward:
    """A reward that any model can earn: the share of even token ids among those it sampled."""
    tokens = [token for node in trajectory.model_nodes for token in node.tokens]
    share = fmean(token % 2 == 0 for token in tokens)
    return Reward(share, {"correct": share, "format": 1.0})


def config_for(model: Path, directory: Path, *more: str) -> Config:
    return load_config(None, [f"model.path={model}", "model.device=cpu", f"run.dir={directory}", *SMALL, *more])


def context_of(training: Training) -> RolloutContext:
    """The rollout context of a run that samples in this process."""
    assert isinstance(training.sampler, LocalSampler)
    return training.sampler.context


def with_reward(training: Training, reward: RewardFn = even_share) -> Training:
    """The run with another reward function."""
    return replace(training, sampler=LocalSampler(replace(context_of(training), reward=reward)))


def run_to_the_end(config: Config, resume: bool = False) -> None:
    with open_training(config, resume) as training:
        asyncio.run(train(with_reward(training)))


def with_credits_of(
    reward: RewardFn, trees: Sequence[RolloutTree], settings: Advantage | None = None
) -> list[ScoredTree]:
    """The trees with the rewards that a function gives, and the credits that follow."""
    scored = [ScoredTree(tree, tuple(map(reward, tree.trajectories))) for tree in trees]
    return compute_credits(scored, settings or Advantage())


def what_it_left(directory: Path) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]], list[Any]]:
    """Weights, metrics and trees, without anything that a clock measured."""
    run = read_run(directory)
    _, checkpoint = run.latest_checkpoint() or (0, directory)
    return load_file(checkpoint / "model" / "model.safetensors"), metrics_of(run), trees_of(run)


def metrics_of(run: RunDir) -> list[dict[str, Any]]:
    """The records, without anything that a clock measured."""
    return [{k: v for k, v in row.items() if "seconds" not in k} for row in run.read_metrics()]


def trees_of(run: RunDir) -> list[Any]:
    """The nodes of all trees, without anything that a clock measured."""
    return [
        [(n.kind, n.tokens, n.logprobs, n.entropies, n.decision, n.policy_version) for n in scored.tree.nodes]
        for number in run.tree_steps()
        for scored in run.read_trees(number)
    ]


def assert_same(a: Path, b: Path) -> None:
    weights_a, metrics_a, trees_a = what_it_left(a)
    weights_b, metrics_b, trees_b = what_it_left(b)
    assert metrics_a == metrics_b
    assert trees_a == trees_b
    assert weights_a.keys() == weights_b.keys()
    assert all(torch.equal(weights_a[name], weights_b[name]) for name in weights_a)
