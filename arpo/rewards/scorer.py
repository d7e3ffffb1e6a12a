"""Scoring trees as they finish, in threads, while others are still being sampled.

    with Scorer(reward, workers=8) as scorer:
        scored = await scorer.score(tree)

Guarantees: rewards come in the order of the leaves; the first error of a reward function is raised by `score`; leaving
the block drops what has not been scored yet and waits for nothing.
Not covered: stopping a reward function that is running. Its thread does not keep the process alive.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import CancelledError, Future
from contextlib import AbstractContextManager

from arpo.rewards.hierarchical import FAULT_PREFIX, RewardFn, unjudged
from arpo.types import Reward, RolloutTree, ScoredTree, Trajectory


class Scorer(AbstractContextManager["Scorer"]):
    """Threads that apply one reward function; they start with the first tree.

    With `mask_faults`, trajectories that a broken tool, engine or judge spoiled are masked.
    """

    def __init__(self, reward: RewardFn, workers: int, mask_faults: bool = False) -> None:
        self._reward, self._workers, self._mask_faults = reward, workers, mask_faults
        self._jobs: queue.SimpleQueue[tuple[Future[Reward], Trajectory] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._closed = False

    async def score(self, tree: RolloutTree) -> ScoredTree:
        """The tree with the rewards of its leaves, when all of them are known."""
        while len(self._threads) < self._workers:
            self._threads.append(threading.Thread(target=self._work, name="arpo-reward", daemon=True))
            self._threads[-1].start()
        futures: list[Future[Reward]] = [Future() for _ in tree.leaves]
        for future, trajectory in zip(futures, tree.trajectories, strict=True):
            self._jobs.put((future, trajectory))
        rewards = tuple([await asyncio.wrap_future(future) for future in futures])
        mask = tuple(
            not (self._mask_faults and (trajectory.infra_fault or unjudged(reward)))
            for trajectory, reward in zip(tree.trajectories, rewards, strict=True)
        )
        return ScoredTree(tree, rewards, mask=mask)

    def __exit__(self, *error: object) -> None:
        self._closed = True
        for _ in self._threads:
            self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, trajectory = job
            if self._closed or not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(self._reward(trajectory))
            except BaseException as error:  # raised again by `score`, which must not look like Ctrl-C or an exit
                plain = isinstance(error, Exception) and not isinstance(error, StopIteration | CancelledError)
                named = RuntimeError(f"the reward function raised {type(error).__name__}")
                named.__cause__ = error  # its traceback says where
                future.set_exception(error if plain else named)


def fault_metrics(trees: Iterable[ScoredTree]) -> dict[str, float]:
    """How many answers could not be judged, by reason: `{"judge.timeout": 2}`."""
    parts = (part for scored in trees for reward in scored.rewards for part in reward.parts)
    found = Counter(part for part in parts if part.startswith(FAULT_PREFIX))
    return {name: float(count) for name, count in sorted(found.items())}
