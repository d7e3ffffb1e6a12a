"""Accuracy of an agent on held-out questions: whole trajectories without branching, each sampled on its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import comb
from statistics import fmean

from arpo.agent.agent import Agent
from arpo.algorithm.rollout import sample_trees
from arpo.config.algorithm import Branching
from arpo.config.schema import Eval, Rollout
from arpo.data.unread_images import without_image_data
from arpo.errors import ArpoError
from arpo.rewards import RewardFn, Scorer, fault_metrics, reward_metrics
from arpo.rewards.scorer import PART_METRICS
from arpo.types import Reward, ScoredTree, Task, derive_seed


@dataclass(frozen=True, slots=True, repr=False)
class Evaluation:
    """The scored trees of an evaluation, and the metrics computed from them. `print` shows pass@k for k in `ks`."""

    trees: tuple[ScoredTree, ...]
    ks: tuple[int, ...] = (1,)

    def __repr__(self) -> str:
        metrics = self.metrics
        shown = [f"accuracy {metrics['accuracy']:.1%}"] if "accuracy" in metrics else []
        shown += [f"pass@{k} {self.pass_at(k):.1%}" for k in self.ks if k > 1 and "accuracy" in metrics]
        shown += [f"{name} {value:.3f}" for name, value in metrics.items() if name != "accuracy"]
        shown.append(f"{self.tool_calls:.2f} tool calls per trajectory")
        trajectories = sum(len(one.tree.leaves) for one in self.trees)
        return f"<Evaluation of {len(self.trees)} tasks, {trajectories} trajectories: {', '.join(shown)}>"

    @property
    def metrics(self) -> dict[str, float]:
        """The mean reward and the means of its parts, named as those of a training step (`reward_metrics`)."""
        return reward_metrics([reward for one in self.trees for reward in one.rewards])

    @property
    def reward(self) -> float:
        """The mean reward."""
        return self.metrics["reward"]

    @property
    def accuracy(self) -> float:
        """The share of answers that are right; ArpoError if the rewards have no part "correct"."""
        return self._named("accuracy", "correct")

    @property
    def format_rate(self) -> float:
        """The share of trajectories in the right format; ArpoError if the rewards have no part "format"."""
        return self._named("format", "format")

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
        self._named("accuracy", "correct")
        right = [[reward.parts.get("correct") == 1.0 for reward in one.rewards] for one in self.trees]
        return fmean(pass_at_k(len(answers), sum(answers), k) for answers in right)

    def by_kind(self, metric: str = "accuracy") -> dict[str, float]:
        """A metric for each kind of question; as `accuracy`, ArpoError if it is not known."""
        if metric in PART_METRICS.values():
            self._named(metric, next(part for part, name in PART_METRICS.items() if name == metric))
        kinds: dict[str, list[Reward]] = {}
        for one in self.trees:
            kinds.setdefault(one.tree.task.kind or "all", []).extend(one.rewards)
        return {kind: reward_metrics(rewards).get(metric, 0.0) for kind, rewards in sorted(kinds.items())}

    def _named(self, metric: str, part: str) -> float:
        if metric not in (metrics := self.metrics):
            raise ArpoError(
                f"reward.function: {metric} is not known, since the rewards have no part {part!r}; "
                f'return Reward(total, {{"{part}": 1.0 or 0.0}})'
            )
        return metrics[metric]


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

    Answers are scored in `workers` threads while other questions are still being asked. The images of the trees have no
    content, so that those of all questions need not be in memory at once.
    """
    rollout = evaluation_rollout(settings, rollout, settings.samples)
    never = Branching(policy="never")
    with Scorer(reward, workers) as scorer:
        trees = await sample_trees(
            agent, tasks, rollout, never, seeds, scorer.score, slots, on_tree, keep=without_image_data
        )
    return Evaluation(tuple(trees))


def pass_at_k(n: int, c: int, k: int) -> float:
    """The chance that k of n samples, drawn without putting back, hold one of the c right ones: unbiased pass@k."""
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass@{k} of {n} samples, {c} of them right, means nothing")
    return 1.0 - comb(n - c, k) / comb(n, k)
