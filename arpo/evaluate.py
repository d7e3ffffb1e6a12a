"""Accuracy of an agent on held-out questions: whole paths, never a branch, each sampled on its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from arpo.rewards import RewardFn
from arpo.rollout import Agent, rollouts
from arpo.settings import Branching, Eval, Rollout
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
    def tool_calls(self) -> float:
        """Tool calls per path."""
        return sum(tree.tool_calls for tree in self.trees) / sum(len(tree.leaves) for tree in self.trees)

    def by_kind(self) -> dict[str, float]:
        """Accuracy for each kind of question."""
        kinds: dict[str, list[float]] = {}
        for tree, rewards in zip(self.trees, self.rewards, strict=True):
            kinds.setdefault(tree.task.kind or "all", []).extend(reward.parts["correct"] for reward in rewards)
        return {kind: fmean(values) for kind, values in sorted(kinds.items())}

    def _mean(self, part: str) -> float:
        return fmean(reward.parts[part] for rewards in self.rewards for reward in rewards)


async def evaluate(
    agent: Agent,
    tasks: Sequence[Task],
    settings: Eval,
    rollout_settings: Rollout,
    reward: RewardFn,
    seed: int,
    done: Callable[[], None] = lambda: None,
) -> Evaluation:
    """Ask the first `settings.questions` tasks, `settings.samples` times each; `done` is called after each."""
    how = rollout_settings.model_copy(
        update={
            "leaves": settings.samples,
            "initial": settings.samples,
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            "top_k": settings.top_k,
        }
    )

    chosen = tasks[: settings.questions]
    seeds = [derive_seed(seed, "eval", number) for number in range(len(chosen))]
    trees = await rollouts(agent, chosen, how, Branching(policy="never"), seeds, done)
    rewards = tuple(tuple(reward(tree.task, tree, leaf) for leaf in tree.leaves) for tree in trees)
    return Evaluation(tuple(trees), rewards)
