"""Scoring trees as they finish, in threads, while others are still being sampled.

    with Scorer(reward, workers=8) as scorer:
        trees = await rollouts(..., done=scorer.add)
        rewards = await scorer.rewards(trees)

Promises: rewards come in the order of the trees and their leaves, whatever was finished first; the first error of a
reward function is raised there; leaving the block forgets what is not done yet and waits for nothing.
Does not cover: stopping a reward function that is running. Its thread keeps nobody from leaving.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Self

from arpo.rewards.hierarchical import FAULT_PREFIX, RewardFn
from arpo.types import Leaf, Reward, RolloutTree


class Scorer:
    """Threads that apply one reward function; they start with the first tree."""

    def __init__(self, reward: RewardFn, workers: int) -> None:
        self._reward, self._count = reward, workers
        self._jobs: queue.SimpleQueue[tuple[Future[Reward], RolloutTree, Leaf] | None] = queue.SimpleQueue()
        self._scores: dict[int, tuple[RolloutTree, list[Future[Reward]]]] = {}  # the tree, too: its id must stay its
        self._threads: list[threading.Thread] = []
        self._closed = False

    def add(self, tree: RolloutTree) -> None:
        """Begin to score a finished tree. Returns at once."""
        if id(tree) in self._scores:
            return
        while len(self._threads) < self._count:
            self._threads.append(threading.Thread(target=self._work, name="arpo-reward", daemon=True))
            self._threads[-1].start()
        scores: list[Future[Reward]] = [Future() for _ in tree.leaves]
        self._scores[id(tree)] = tree, scores
        for score, leaf in zip(scores, tree.leaves, strict=True):
            self._jobs.put((score, tree, leaf))

    async def rewards(self, trees: Sequence[RolloutTree]) -> list[tuple[Reward, ...]]:
        """The rewards of each tree, one per leaf, when all are there; trees that were not added are scored now."""
        for tree in trees:
            self.add(tree)
        return [tuple([await asyncio.wrap_future(score) for score in self._scores[id(tree)][1]]) for tree in trees]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._closed = True
        for _ in self._threads:
            self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            score, tree, leaf = job
            if self._closed or not score.set_running_or_notify_cancel():
                continue
            try:
                score.set_result(self._reward(tree.task, tree, leaf))
            except (StopIteration, SystemExit) as error:  # asyncio carries neither as it is
                score.set_exception(RuntimeError(f"the reward function raised {type(error).__name__}"))
            except BaseException as error:  # told where the reward is asked for
                score.set_exception(error)


def fault_metrics(rewards: Iterable[Iterable[Reward]]) -> dict[str, float]:
    """How many answers could not be judged, by reason: `{"judge.timeout": 2}`."""
    found = Counter(
        part for group in rewards for reward in group for part in reward.parts if part.startswith(FAULT_PREFIX)
    )
    return {name: float(count) for name, count in sorted(found.items())}
