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
from collections.abc import Iterable, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import AbstractContextManager
from statistics import fmean

from arpo.environments.base import Environment
from arpo.environments.states import State
from arpo.rewards.custom import apply_reward, wants_environment
from arpo.rewards.format import FormatFault
from arpo.rewards.hierarchical import FAULT_PREFIX, UNAVAILABLE, RewardFn, unjudged
from arpo.tools.base import ToolUnavailable
from arpo.types import Reward, RolloutTree, ScoredTree, StopReason, Trajectory

NOT_JUDGED = Reward(0.0, {f"{FAULT_PREFIX}{UNAVAILABLE}": 1.0})
PART_METRICS = {"correct": "accuracy", "format": "format"}
"""The parts whose means are metrics with names of their own."""
FORMAT_PARTS = frozenset(fault.part for fault in FormatFault)
"""The parts that say why a format is wrong."""


class Scorer(AbstractContextManager["Scorer"]):
    """Threads that apply one reward function; they start with the first tree.

    With `mask_faults`, trajectories that a broken tool, program, engine or judge spoiled are masked. Those of a
    program that did not ask the same again always are: they have no turns of their own.
    """

    def __init__(self, reward: RewardFn, workers: int, mask_faults: bool = False) -> None:
        self._reward, self._workers, self._mask_faults = reward, workers, mask_faults
        self._jobs: queue.SimpleQueue[tuple[Future[Reward], Trajectory, Environment | None] | None]
        self._jobs = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._closed = False

    async def score(self, tree: RolloutTree, states: Sequence[State] = ()) -> ScoredTree:
        """The tree with the rewards of its leaves, when all of them are known. `states` are the final ones.

        A reward function that sees the final state gets its environment. If this cannot be made any more, or the
        function raises ToolUnavailable, the trajectory counts as not judged.
        """
        while len(self._threads) < self._workers:
            self._threads.append(threading.Thread(target=self._work, name="arpo-reward", daemon=True))
            self._threads[-1].start()
        if states and wants_environment(self._reward):
            rewards = await self._score_states(tree, states)
        else:
            futures = [self._submit(trajectory) for trajectory in tree.trajectories]
            rewards = tuple([await asyncio.wrap_future(future) for future in futures])
        mask = tuple(
            trajectory.stop_reason is not StopReason.REPLAY_DIFFERS
            and not (self._mask_faults and (trajectory.infra_fault or unjudged(reward)))
            for trajectory, reward in zip(tree.trajectories, rewards, strict=True)
        )
        return ScoredTree(tree, rewards, mask=mask)

    async def _score_states(self, tree: RolloutTree, states: Sequence[State]) -> tuple[Reward, ...]:
        async def score_one(trajectory: Trajectory, state: State) -> Reward:
            try:
                async with state.final() as environment:
                    future = self._submit(trajectory, environment)
                    state.hold(future)
                    return await asyncio.wrap_future(future)
            except ToolUnavailable:
                return NOT_JUDGED

        try:
            async with asyncio.TaskGroup() as group:
                tasks = list(map(group.create_task, map(score_one, tree.trajectories, states)))
        except ExceptionGroup as several:
            raise several.exceptions[0] from several
        return tuple(task.result() for task in tasks)

    def _submit(self, trajectory: Trajectory, environment: Environment | None = None) -> Future[Reward]:
        future: Future[Reward] = Future()
        self._jobs.put((future, trajectory, environment))
        return future

    def __exit__(self, *error: object) -> None:
        self._closed = True
        for _ in self._threads:
            self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, trajectory, environment = job
            if self._closed or not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(apply_reward(self._reward, trajectory, environment))
            except ToolUnavailable:
                future.set_result(NOT_JUDGED)
            except BaseException as error:  # raised again by `score`, which must not look like Ctrl-C or an exit
                plain = isinstance(error, Exception) and not isinstance(error, StopIteration | CancelledError)
                named = RuntimeError(f"the reward function raised {type(error).__name__}")
                named.__cause__ = error  # its traceback says where
                future.set_exception(error if plain else named)


def reward_metrics(rewards: Sequence[Reward]) -> dict[str, float]:
    """The mean reward, and the mean of each part: `accuracy` of "correct", `format`, and `reward_PART` of the others.

    A part that only some of the rewards have counts as 0 in the others. Reasons why a format is wrong are counted:
    `{"format.no_answer": 3}`. `fault_metrics` counts what was not judged.
    """
    parts = dict.fromkeys(part for reward in rewards for part in reward.parts if not part.startswith(FAULT_PREFIX))
    means = {part: fmean(reward.parts.get(part, 0.0) for reward in rewards) for part in parts}
    reasons = {part: sum(each.parts.get(part, 0.0) for each in rewards) for part in parts if part in FORMAT_PARTS}
    named = {metric: means.pop(part) for part, metric in PART_METRICS.items() if part in means}
    others = {f"reward_{part}": mean for part, mean in means.items() if part not in FORMAT_PARTS}
    return {"reward": fmean(reward.total for reward in rewards), **named, **others, **reasons}


def fault_metrics(trees: Iterable[ScoredTree]) -> dict[str, float]:
    """How many answers could not be judged, by reason: `{"judge.timeout": 2}`."""
    parts = (part for scored in trees for reward in scored.rewards for part in reward.parts)
    found = Counter(part for part in parts if part.startswith(FAULT_PREFIX))
    return {name: float(count) for name, count in sorted(found.items())}
