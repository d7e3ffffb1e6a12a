"""Accuracy of an agent on held-out questions: whole trajectories without branching, each sampled on its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import comb
from statistics import fmean

from arpo.agent.agent import Agent
from arpo.algorithm.rollout import sample_trees
from arpo.config.schema import Branching, Eval, Rollout
from arpo.rewards import RewardFn, Scorer, fault_metrics
from arpo.types import ScoredTree, Task, derive_seed


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The scored trees of an evaluation, and the metrics computed from them."""

    trees: tuple[ScoredTree, ...]

    @property
    def accuracy(self) -> float:
        """The share of answers that are right."""
        return self._mean("correct")

    @property
    def format_rate(self) -> float:
        """The share of trajectories in the right format."""
        return self._mean("format")

    @property
    def faults(self) -> dict[str, float]:
        """How many answers could not be judged, by reason; they count as wrong."""
        return fault_metrics(self.trees)

    @property
    def tool_calls(self) -> float:
        """Tool calls per trajectory."""
        return sum(one.tree.tool_calls for one in self.trees) / sum(len(one.tree.leaves) for one in self.trees)

    def pass_at(self, k: int) -> float:
        """Estimate of pass@k, the chance that one of k answers is right, over all questions."""
        right = [[reward.parts["correct"] == 1.0 for reward in one.rewards] for one in self.trees]
        return fmean(pass_at_k(len(answers), sum(answers), k) for answers in right)

    def by_kind(self) -> dict[str, float]:
        """Accuracy for each kind of question."""
        kinds: dict[str, list[float]] = {}
        for one in self.trees:
            kinds.setdefault(one.tree.task.kind or "all", []).extend(reward.parts["correct"] for reward in one.rewards)
        return {kind: fmean(values) for kind, values in sorted(kinds.items())}

    def _mean(self, part: str) -> float:
        return fmean(reward.parts[part] for one in self.trees for reward in one.rewards)


def evaluation_rollout(settings: Eval, rollout: Rollout, samples: int) -> Rollout:
    """The rollout settings of an evaluation: `samples` trajectories, all from the prompt, with its own sampling."""
    sampling = {name: getattr(settings, name) for name in ("temperature", "top_p", "top_k")}
    return rollout.model_copy(update={"num_trajectories": samples, "num_initial": samples, **sampling})


def select_tasks(tasks: Sequence[Task], settings: Eval, seed: int) -> tuple[Sequence[Task], list[int]]:
    """The questions of an evaluation, and the seed of each one's tree."""
    chosen = tasks[: settings.questions]
    return chosen, [derive_seed(seed, "eval", number) for number in range(len(chosen))]


async def evaluate(
    agent: Agent,
    tasks: Sequence[Task],
    seeds: Sequence[int],
    settings: Eval,
    rollout: Rollout,
    reward: RewardFn,
    workers: int = 8,
    slots: asyncio.Semaphore | None = None,
    on_tree: Callable[[ScoredTree], None] = lambda scored: None,
) -> Evaluation:
    """Ask each task `settings.samples` times, with its seed; `on_tree` is called after each task.

    Answers are scored in `workers` threads while other questions are still being asked.
    """
    rollout = evaluation_rollout(settings, rollout, settings.samples)
    never = Branching(policy="never")
    with Scorer(reward, workers) as scorer:
        trees = await sample_trees(agent, tasks, rollout, never, seeds, scorer.score, slots, on_tree)
    return Evaluation(tuple(trees))


def pass_at_k(n: int, c: int, k: int) -> float:
    """The chance that k of n samples, drawn without putting back, hold one of the c right ones: unbiased pass@k."""
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass@{k} of {n} samples, {c} of them right, means nothing")
    return 1.0 - comb(n - c, k) / comb(n, k)
