"""Samplers: what turns the tasks of a training step into scored trees, in this process or on a cluster.

Guarantees: with every sampler, a tree depends only on the task, the seed and the weights, and on the output and timing
of engine and tools.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from arpo.algorithm.rollout import Observer, sample_trees
from arpo.environments.states import pool_of
from arpo.evaluation.evaluate import Evaluation, evaluate
from arpo.rewards import Scorer
from arpo.runs.reporter import Reporter
from arpo.training.context import RolloutContext
from arpo.types import Kind, NodeAdded, RolloutEvent, ScoredTree, Task, TokenSampled, TrajectoryEnded

OnTree = Callable[[ScoredTree], None]
"""Called with each tree as soon as it is scored."""


def ignore(scored: ScoredTree) -> None:
    """Do nothing with a tree."""


def count_events(reporter: Reporter) -> Observer:
    """An observer of rollouts that tells the reporter how many tokens, tool calls and trajectories are done."""

    def observe(event: RolloutEvent) -> None:
        if isinstance(event, TokenSampled):
            reporter.sampled(tokens=1)
        elif isinstance(event, TrajectoryEnded):
            reporter.sampled(trajectories=1)
        elif isinstance(event, NodeAdded) and event.node.result is not None and event.node.result.attempts:
            reporter.sampled(tool_calls=1)

    return observe


def report_tree(reporter: Reporter, scored: ScoredTree) -> None:
    """Tell the reporter of a tree of a training step that another process sampled."""
    reporter.tree(scored)
    tree = scored.tree
    tokens = sum(len(node.tokens) for node in tree.nodes if node.kind is Kind.MODEL)
    reporter.sampled(tokens, tree.tool_calls, len(tree.leaves))


class Sampler(Protocol):
    """Samples and scores trees: here, on all ranks (`arpo.training.ranks`) or on a cluster (`arpo.cluster.sampler`)."""

    async def sync_weights(self, version: int) -> None:
        """Sample from the model's current weights from now on; they are policy version `version`."""
        ...

    async def sample(self, tasks: Sequence[Task], seeds: Sequence[int], step: int) -> list[ScoredTree]:
        """The scored trees of a step's tasks, in their order."""
        ...

    async def evaluate(self, tasks: Sequence[Task], seeds: Sequence[int], on_tree: OnTree = ignore) -> Evaluation:
        """The evaluation of the newest weights on these tasks, with the settings of `[eval]`."""
        ...

    def step_metrics(self, step: int) -> dict[str, float]:
        """Metrics of the step whose trees were just sampled."""
        ...

    def discarded_metrics(self) -> dict[str, float]:
        """Metrics of rollouts discarded at shutdown."""
        ...


class LocalSampler:
    """Samples in this process, one step at a time, with the engine that shares the trained model's weights."""

    def __init__(self, context: RolloutContext, on_tree: OnTree = ignore, observer: Observer | None = None) -> None:
        self.context, self._on_tree, self._observer = context, on_tree, observer

    async def sync_weights(self, version: int) -> None:
        """Drop what the engine computed with older weights; the weights themselves are shared."""
        await self.context.agent.engine.sync_weights(version)

    async def sample(
        self, tasks: Sequence[Task], seeds: Sequence[int], step: int = 0, slots: asyncio.Semaphore | None = None
    ) -> list[ScoredTree]:
        """The scored trees, `rollout.concurrency` trajectories (or `slots`) at a time; `step` is not used."""
        context, config = self.context, self.context.config
        with Scorer(context.reward, config.reward.workers, config.train.mask_infra_faults) as scorer:
            return await sample_trees(
                context.agent,
                tasks,
                config.rollout,
                config.branching,
                seeds,
                scorer.score,
                slots,
                self._on_tree,
                observer=self._observer,
            )

    async def evaluate(
        self,
        tasks: Sequence[Task],
        seeds: Sequence[int],
        on_tree: OnTree = ignore,
        slots: asyncio.Semaphore | None = None,
    ) -> Evaluation:
        """The evaluation of the current weights on these tasks."""
        context, config = self.context, self.context.config
        evaluation = await evaluate(
            context.agent,
            tasks,
            seeds,
            config.eval,
            config.rollout,
            context.reward,
            config.reward.workers,
            slots,
            on_tree,
        )
        self.step_metrics(0)  # starts the counters anew: an evaluation belongs to no training step
        return evaluation

    def step_metrics(self, step: int) -> dict[str, float]:
        """The counters of the engine and of the environment since the last call."""
        agent, pool = self.context.agent, pool_of(self.context.agent.tools)
        states = {} if pool is None else pool.stats()
        return {
            **{f"engine_{name}": value for name, value in agent.engine.stats().items()},
            **{f"environment_{name}": value for name, value in states.items()},
        }

    def discarded_metrics(self) -> dict[str, float]:
        """Empty: nothing is sampled ahead of training."""
        return {}
