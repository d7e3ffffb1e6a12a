"""From the settings to the reward function that they name: the hierarchical one, or a user's own.

Guarantees: what cannot work (an unknown name, a missing library, an object that is no function, no key) is an ArpoError
now, not in the middle of a run. Everything a user's function returns is checked: a score is a number from 0 to 1, a
reward is finite and has the parts that the metrics read.
Not covered: a user's function that raises or hangs. It runs in a thread (see `Scorer`); an error ends the run after the
last complete step is saved.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from typing import Any

from arpo.config.plugins import load_object
from arpo.config.schema import Rewards
from arpo.errors import ArpoError
from arpo.rewards.hierarchical import ACCURACIES, Accuracy, NoVerdict, RewardFn, hierarchical_reward
from arpo.rewards.judge import LlmJudge
from arpo.rewards.maths import shared_judge
from arpo.rewards.text import numbers_equal
from arpo.types import Reward, StopReason, Task, Trajectory

REQUIRED_PARTS = ("correct", "format")


def build_reward(settings: Rewards) -> RewardFn:
    """The reward function that the settings describe."""
    if settings.function is not None:
        return _user_reward(settings.function)
    default = _accuracy(settings.accuracy, settings)
    by_kind = {kind: _accuracy(name, settings) for kind, name in settings.by_kind.items()}
    return hierarchical_reward(
        lambda prediction, golds, task: by_kind.get(task.kind, default)(prediction, golds, task),
        settings.bonus,
        settings.bonus_tools,
    )


def with_overlong_penalty(reward: RewardFn, share: float, max_tokens: int) -> RewardFn:
    """The reward less a penalty that rises from 0 to 1 over the last `share` of the `max_tokens` of a trajectory.

    A trajectory that was cut off at the limit loses 1. The part "correct" does not change.
    """
    buffer = share * max_tokens

    def shaped(trajectory: Trajectory) -> Reward:
        plain = reward(trajectory)
        length = sum(len(node.tokens) for node in trajectory.nodes[1:])
        excess = (length - max_tokens + buffer) / buffer
        penalty = 1.0 if trajectory.stop_reason is StopReason.LENGTH else min(1.0, max(0.0, excess))
        return Reward(plain.total - penalty, {**plain.parts, "overlong": -penalty})

    return shaped


def _accuracy(name: str, settings: Rewards) -> Accuracy:
    if name == "number":
        return lambda prediction, golds, _: numbers_equal(prediction, golds, settings.tolerance)
    if name == "math":
        return _math_accuracy(settings)
    if name == "judge":
        if settings.judge_url is None or settings.judge_model is None:
            raise ArpoError('reward.judge_url and reward.judge_model are needed where reward.accuracy is "judge"')
        return LlmJudge(settings.judge_url, settings.judge_model, settings.judge_key_env, settings.workers)
    return ACCURACIES[name] if name in ACCURACIES else _user_accuracy(name)


def _math_accuracy(settings: Rewards) -> Accuracy:
    judge = shared_judge(min(settings.workers, os.cpu_count() or 1), settings.math_seconds)

    def accuracy(prediction: str, golds: Sequence[str], task: Task) -> float:
        verdict = judge.verdict(prediction, golds)
        if verdict.reason:
            raise NoVerdict(verdict.reason)
        return float(verdict.equal)

    return accuracy


def _user_accuracy(name: str) -> Accuracy:
    function = _load_function("reward.accuracy", name)

    def accuracy(prediction: str, golds: Sequence[str], task: Task) -> float:
        score = function(prediction, golds, task)
        if not isinstance(score, int | float) or not 0 <= score <= 1:
            raise ArpoError(
                f"reward.accuracy: {name} returned {score!r:.100} for {task.id}, expected a number from 0 to 1"
            )
        return float(score)

    return accuracy


def _user_reward(name: str) -> RewardFn:
    function = _load_function("reward.function", name)

    def reward(trajectory: Trajectory) -> Reward:
        value = function(trajectory)
        if not isinstance(value, Reward):
            raise ArpoError(
                f"reward.function: {name} returned {value!r:.100}, expected an arpo.types.Reward(total, parts)"
            )
        missing = [part for part in REQUIRED_PARTS if part not in value.parts]
        if missing:
            raise ArpoError(f"reward.function: {name} returned a Reward without the parts {', '.join(missing)}")
        numbers = (value.total, *value.parts.values())
        if not all(isinstance(number, int | float) and math.isfinite(number) for number in numbers):
            raise ArpoError(
                f"reward.function: {name} returned {value!r:.200} for {trajectory.task.id}, expected finite numbers"
            )
        return value

    return reward


def _load_function(setting: str, name: str) -> Callable[..., Any]:
    function: Any = load_object(setting, name)
    if not callable(function):
        raise ArpoError(f"{setting}: {name} is {function!r:.100}, expected a function")
    return function  # type: ignore[no-any-return]
