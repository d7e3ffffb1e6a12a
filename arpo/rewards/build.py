"""From the settings to the reward that they name: one of ours, or a function of the user's.

Promises: what cannot work (an unknown name, a missing library, a function that is none, no key) is an ArpoError now,
not in the middle of a run. What a user's function returns is looked at each time: a score is a number from 0 to 1, a
reward is finite and has the parts that the metrics read.
Does not cover: a user's function that raises or hangs. It runs in a thread (see `score`); an error ends the run, whose
last whole step is saved first.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from typing import Any

from arpo.config.plugins import load_object
from arpo.config.schema import Rewards
from arpo.errors import ArpoError
from arpo.rewards.hierarchical import ACCURACIES, Accuracy, NoVerdict, RewardFn, build_reward
from arpo.rewards.judge import LlmJudge
from arpo.rewards.maths import shared_judge
from arpo.rewards.text import numbers_equal
from arpo.types import Reward, StopReason, Task, Trajectory

NEEDED_PARTS = ("correct", "format")


def reward_from(settings: Rewards) -> RewardFn:
    """The reward that the settings describe."""
    if settings.function is not None:
        return _own_reward(settings.function)
    return build_reward(_accuracy(settings), settings.bonus, settings.bonus_tools)


def overlong(reward: RewardFn, share: float, max_tokens: int) -> RewardFn:
    """The same reward, less what a path loses in the last `share` of the tokens it may have: from 0 up to 1 in all.

    A path that was cut off because it was too long loses 1. It stays as right as it was.
    """
    buffer = share * max_tokens

    def shaped(trajectory: Trajectory) -> Reward:
        given = reward(trajectory)
        length = sum(len(node.tokens) for node in trajectory.nodes[1:])
        excess = (length - max_tokens + buffer) / buffer
        lost = 1.0 if trajectory.stop_reason is StopReason.LENGTH else min(1.0, max(0.0, excess))
        return Reward(given.total - lost, {**given.parts, "overlong": -lost})

    return shaped


def _accuracy(settings: Rewards) -> Accuracy:
    usual = _named(settings.accuracy, settings)
    by_kind = {kind: _named(name, settings) for kind, name in settings.by_kind.items()}
    return lambda prediction, golds, task: by_kind.get(task.kind, usual)(prediction, golds, task)


def _named(name: str, settings: Rewards) -> Accuracy:
    if name == "number":
        return lambda prediction, golds, _: numbers_equal(prediction, golds, settings.tolerance)
    if name == "math":
        return _maths(settings)
    if name == "judge":
        if settings.judge_url is None or settings.judge_model is None:
            raise ArpoError('reward.judge_url and reward.judge_model are needed where reward.accuracy is "judge"')
        return LlmJudge(settings.judge_url, settings.judge_model, settings.judge_key_env, settings.workers)
    return ACCURACIES[name] if name in ACCURACIES else _own_accuracy(name)


def _maths(settings: Rewards) -> Accuracy:
    judge = shared_judge(min(settings.workers, os.cpu_count() or 1), settings.math_seconds)

    def accuracy(prediction: str, golds: Sequence[str], task: Task) -> float:
        verdict = judge.verdict(prediction, golds)
        if verdict.reason:
            raise NoVerdict(verdict.reason)
        return float(verdict.equal)

    return accuracy


def _own_accuracy(name: str) -> Accuracy:
    function = _function("reward.accuracy", name)

    def accuracy(prediction: str, golds: Sequence[str], task: Task) -> float:
        score = function(prediction, golds, task)
        if not isinstance(score, int | float) or not 0 <= score <= 1:
            raise ArpoError(
                f"reward.accuracy: {name} returned {score!r:.100} for {task.id}, expected a number from 0 to 1"
            )
        return float(score)

    return accuracy


def _own_reward(name: str) -> RewardFn:
    function = _function("reward.function", name)

    def reward(trajectory: Trajectory) -> Reward:
        given = function(trajectory)
        if not isinstance(given, Reward):
            raise ArpoError(
                f"reward.function: {name} returned {given!r:.100}, expected an arpo.types.Reward(total, parts)"
            )
        missing = [part for part in NEEDED_PARTS if part not in given.parts]
        if missing:
            raise ArpoError(f"reward.function: {name} returned a Reward without the parts {', '.join(missing)}")
        if not all(map(_finite, (given.total, *given.parts.values()))):
            raise ArpoError(
                f"reward.function: {name} returned {given!r:.200} for {trajectory.task.id}, expected finite numbers"
            )
        return given

    return reward


def _function(setting: str, name: str) -> Callable[..., Any]:
    function: Any = load_object(setting, name)
    if not callable(function):
        raise ArpoError(f"{setting}: {name} is {function!r:.100}, expected a function")
    return function  # type: ignore[no-any-return]


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
