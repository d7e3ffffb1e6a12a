"""Scoring in threads while other trees are sampled, and pass@k."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import CancelledError
from itertools import combinations
from statistics import fmean

import pytest
from trees import model, prompt, searched, tree

from arpo.evaluation.evaluate import Evaluation, pass_at_k
from arpo.rewards import Scorer
from arpo.types import Fault, Reward, RolloutTree, ScoredTree, StopReason, Task, Trajectory


def sampled(number: int, leaves: int = 2) -> RolloutTree:
    """A tree of its own, whose trajectories all end at once."""
    return tree([prompt(), model(0, [number])], [1] * leaves, task=Task(str(number), "Why?", ("x",)))


def test_rewards_come_in_order_whatever_is_done_first() -> None:
    trees = [sampled(number, leaves=1 + number % 3) for number in range(12)]
    at_once = most = seen = 0
    lock, together = threading.Lock(), threading.Barrier(3)

    def reward(trajectory: Trajectory) -> Reward:
        nonlocal at_once, most, seen
        number = int(trajectory.task.id)
        with lock:
            seen += 1
            first = seen <= 3
            at_once += 1
            most = max(most, at_once)
        if first:
            together.wait(60)
        time.sleep(0.02 if number % 2 else 0.001)
        with lock:
            at_once -= 1
        return Reward(float(number))

    async def score() -> list[ScoredTree]:
        with Scorer(reward, 3) as scorer:
            return (await asyncio.gather(*map(scorer.score, reversed(trees))))[::-1]

    assert asyncio.run(score()) == [ScoredTree(trees[n], (Reward(float(n)),) * (1 + n % 3)) for n in range(12)]
    assert most == 3


def test_the_event_loop_goes_on_while_a_tree_is_scored() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def reward(trajectory: Trajectory) -> Reward:
        begun.set()
        assert go_on.wait(60)
        return Reward(1.0)

    async def score() -> ScoredTree:
        with Scorer(reward, 1) as scorer:
            scoring = asyncio.create_task(scorer.score(searched()))
            while not begun.is_set():
                await asyncio.sleep(0.001)  # other trees are sampled here
            go_on.set()
            return await scoring

    assert asyncio.run(score()) == ScoredTree(searched(), (Reward(1.0),))


ODD = [StopIteration(), SystemExit(3), KeyboardInterrupt(), GeneratorExit(), asyncio.CancelledError(), CancelledError()]


@pytest.mark.parametrize("error", [ValueError("a bug"), *ODD])
def test_an_error_of_the_reward_function_is_raised_by_score(error: BaseException) -> None:
    def reward(trajectory: Trajectory) -> Reward:
        if trajectory.task.id == "1":
            raise error
        return Reward(1.0)

    async def score() -> None:
        with Scorer(reward, 2) as scorer:
            await asyncio.wait_for(asyncio.gather(*(scorer.score(sampled(number)) for number in range(3))), 60)

    with pytest.raises((ValueError, RuntimeError), match=f"a bug|{type(error).__name__}"):
        asyncio.run(score())


def test_leaving_waits_for_nothing_and_ends_the_threads() -> None:
    before, go_on = threading.active_count(), threading.Event()
    calls: list[str] = []

    def reward(trajectory: Trajectory) -> Reward:
        calls.append(trajectory.task.id)
        go_on.wait(600)
        return Reward(1.0)

    async def leave() -> None:
        with Scorer(reward, 2) as scorer:
            scoring = [asyncio.create_task(scorer.score(sampled(number, leaves=1))) for number in range(5)]
            await asyncio.sleep(0)  # all of them have handed in their trajectories
        assert not any(task.done() for task in scoring)

    started = time.monotonic()
    asyncio.run(leave())
    assert time.monotonic() - started < 60
    go_on.set()
    deadline = time.monotonic() + 60
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.005)
    assert threading.active_count() <= before
    assert len(calls) <= 2  # the rest was dropped


@pytest.mark.parametrize("mask_faults", [True, False])
def test_spoiled_trajectories_are_masked_if_asked_for(mask_faults: bool) -> None:
    """By a broken tool, by a worker that was lost, by a judge that was unavailable; not by the model's own mistakes."""
    lost, unavailable = StopReason.WORKER_LOST, {"judge.unavailable": 1.0}
    cases = [
        (searched(), {}, True), (searched(fault=Fault.INFRA), {}, False), (searched(end=lost), {}, False),
        (searched(fault=Fault.MODEL), {}, True), (searched(), unavailable, False),
        (searched(), {"judge.long": 1.0}, True),
    ]  # fmt: skip

    async def score(one: RolloutTree, parts: dict[str, float]) -> ScoredTree:
        with Scorer(lambda trajectory: Reward(0.0, parts), 1, mask_faults) as scorer:
            return await scorer.score(one)

    for one, parts, valid in cases:
        assert asyncio.run(score(one, parts)).mask == (valid or not mask_faults,)


@pytest.mark.parametrize("n", range(1, 7))
def test_pass_at_k_equals_a_count_over_all_subsets(n: int) -> None:
    for c in range(n + 1):
        right = [True] * c + [False] * (n - c)
        for k in range(1, n + 1):
            assert pass_at_k(n, c, k) == pytest.approx(fmean(any(chosen) for chosen in combinations(right, k)))


def test_pass_at_k_known_values() -> None:
    assert pass_at_k(4, 1, 2) == 0.5
    assert pass_at_k(10_000, 1, 5_000) == pytest.approx(0.5)
    for n, c, k in ((3, 4, 1), (3, -1, 1), (3, 1, 4), (3, 1, 0), (0, 0, 1)):
        with pytest.raises(ValueError, match="means nothing"):
            pass_at_k(n, c, k)


def test_an_evaluation_knows_its_pass_at_k_and_what_was_not_judged() -> None:
    right, wrong = Reward(1.0, {"correct": 1.0}), Reward(0.0, {"correct": 0.0, "judge.timeout": 1.0})
    rewards = (right, wrong, wrong, wrong), (wrong,) * 4
    result = Evaluation(tuple(ScoredTree(sampled(number, 4), given) for number, given in enumerate(rewards)))
    assert (result.pass_at(1), result.pass_at(2), result.pass_at(4)) == (0.125, 0.25, 0.5)
    assert result.faults == {"judge.timeout": 7.0}
