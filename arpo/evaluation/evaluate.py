"""Accuracy of an agent on held-out questions: whole paths, never a branch, each sampled on its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import comb
from statistics import fmean

from arpo.algorithm.rollout import Agent, rollouts
from arpo.config.schema import Branching, Eval, Rollout
from arpo.rewards import RewardFn, Scorer, fault_metrics
from arpo.types import Reward, RolloutTree, Task, derive_seed


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What came out: every tree with its rewards, and the numbers made from them."""

    trees: tuple[RolloutTree, ...]
    rewards: tuple[tuple[Reward, ...], ...]

    @property
    def accuracy(self) -> float:
        """Share of answers that are right."""
        return self._mean("correct")

    @property
    def format_rate(self) -> float:
        """Share of paths in the right format."""
        return self._mean("format")

    @property
    def faults(self) -> dict[str, float]:
        """How many answers could not be judged, by reason; they count as wrong."""
        return fault_metrics(self.rewards)

    @property
    def tool_calls(self) -> float:
        """Tool calls per path."""
        return sum(tree.tool_calls for tree in self.trees) / sum(len(tree.leaves) for tree in self.trees)

    def pass_at(self, k: int) -> float:
        """Estimate of pass@k, the chance that one of k answers is right, over all questions."""
        right = [[reward.parts["correct"] == 1.0 for reward in rewards] for rewards in self.rewards]
        return fmean(pass_at_k(len(answers), sum(answers), k) for answers in right)

    def by_kind(self) -> dict[str, float]:
        """Accuracy for each kind of question."""
        kinds: dict[str, list[float]] = {}
        for tree, rewards in zip(self.trees, self.rewards, strict=True):
            kinds.setdefault(tree.task.kind or "all", []).extend(reward.parts["correct"] for reward in rewards)
        return {kind: fmean(values) for kind, values in sorted(kinds.items())}

    def _mean(self, part: str) -> float:
        return fmean(reward.parts[part] for rewards in self.rewards for reward in rewards)


def whole_trajectories(settings: Eval, rollout_settings: Rollout, paths: int) -> Rollout:
    """How so many paths are sampled for an evaluation, all from the prompt."""
    how = {name: getattr(settings, name) for name in ("temperature", "top_p", "top_k")}
    return rollout_settings.model_copy(update={"num_trajectories": paths, "num_initial": paths, **how})


def asked(tasks: Sequence[Task], settings: Eval, seed: int) -> tuple[Sequence[Task], list[int]]:
    """The questions of an evaluation, and the seed of each one's tree."""
    chosen = tasks[: settings.questions]
    return chosen, [derive_seed(seed, "eval", number) for number in range(len(chosen))]


async def evaluate(
    agent: Agent,
    tasks: Sequence[Task],
    settings: Eval,
    rollout_settings: Rollout,
    reward: RewardFn,
    seed: int,
    done: Callable[[], None] = lambda: None,
    workers: int = 8,
    seeds: Sequence[int] | None = None,
    slots: asyncio.Semaphore | None = None,
) -> Evaluation:
    """Ask the first `settings.questions` tasks, `settings.samples` times each; `done` is called after each.

    A question's seed is drawn from `seed` and its number, unless `seeds` are given. Answers are scored in `workers`
    threads while other questions are still being asked.
    """
    how = whole_trajectories(settings, rollout_settings, settings.samples)
    chosen, drawn = asked(tasks, settings, seed)
    with Scorer(reward, workers) as scorer:

        def finished(tree: RolloutTree) -> None:
            scorer.add(tree)
            done()

        given = agent, chosen, how, Branching(policy="never"), seeds or drawn, finished
        trees = await rollouts(*given, slots=slots)
        return Evaluation(tuple(trees), tuple(await scorer.rewards(trees)))


def pass_at_k(n: int, c: int, k: int) -> float:
    """The chance that k of n samples, drawn without putting back, hold one of the c right ones: unbiased pass@k."""
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass@{k} of {n} samples, {c} of them right, means nothing")
    return 1.0 - comb(n - c, k) / comb(n, k)
