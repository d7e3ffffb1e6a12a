"""From the settings to the reward function that they name: the hierarchical one, or a user's own.

Guarantees: what cannot work (an unknown name, a missing library, an object that is no function, no key) is an ArpoError
now, not in the middle of a run. Everything a user's function returns is checked: a score is a number from 0 to 1, a
reward is finite. An error in one ends the run after the last complete step is saved.
Not covered: a user's function that hangs. It runs in a thread (see `Scorer`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from arpo.config.plugins import NO_OBJECTS, Objects, load_object
from arpo.config.schema import Rewards
from arpo.errors import ArpoError
from arpo.rewards.custom import (
    SETTING,
    apply_reward,
    call_user,
    custom_reward,
    function_name,
    wants_environment,
    weighted_reward,
)
from arpo.rewards.format import FormatCheck, FormatFault, check_format, shorten
from arpo.rewards.hierarchical import ACCURACIES, Accuracy, NoVerdict, RewardFn, hierarchical_reward
from arpo.rewards.judge import LlmJudge
from arpo.rewards.maths import shared_judge
from arpo.rewards.text import numbers_equal
from arpo.types import Reward, StopReason, Task, Trajectory


def build_reward(settings: Rewards, objects: Objects = NO_OBJECTS, parse: str | None = None) -> RewardFn:
    """The reward function that the settings describe; `parse` is `answer.parse`, on which the format depends."""
    if isinstance(settings.function, str):
        return custom_reward(_load_function(SETTING, settings.function, objects), settings.function)
    if settings.function is not None:
        names = list(settings.function)
        functions = [_load_function(SETTING, name, objects) for name in names]
        return weighted_reward(functions, list(settings.function.values()), names)
    default = _accuracy(settings.accuracy, settings, objects)
    by_kind = {kind: _accuracy(name, settings, objects) for kind, name in settings.by_kind.items()}
    return hierarchical_reward(
        lambda prediction, golds, task: by_kind.get(task.kind, default)(prediction, golds, task),
        settings.bonus,
        settings.bonus_tools,
        _format_check(settings.format, parse, objects),
    )


def with_overlong_penalty(reward: RewardFn, share: float, max_tokens: int) -> RewardFn:
    """The reward less a penalty that rises from 0 to 1 over the last `share` of the `max_tokens` of a trajectory.

    A trajectory that was cut off at the limit loses 1. The part "correct" does not change.
    """
    buffer = share * max_tokens

    def shaped(trajectory: Trajectory, environment: Any = None) -> Reward:
        plain = apply_reward(reward, trajectory, environment)
        length = sum(len(node.tokens) for node in trajectory.nodes[1:])
        excess = (length - max_tokens + buffer) / buffer
        penalty = 1.0 if trajectory.stop_reason is StopReason.LENGTH else min(1.0, max(0.0, excess))
        return Reward(plain.total - penalty, {**plain.parts, "overlong": -penalty}, plain.note)

    return shaped if wants_environment(reward) else lambda trajectory: shaped(trajectory)


def _accuracy(name: str, settings: Rewards, objects: Objects) -> Accuracy:
    if name == "number":
        return lambda prediction, golds, _: numbers_equal(prediction, golds, settings.tolerance)
    if name == "math":
        return _math_accuracy(settings)
    if name == "judge":
        if settings.judge_url is None or settings.judge_model is None:
            raise ArpoError('reward.judge_url and reward.judge_model are needed where reward.accuracy is "judge"')
        return LlmJudge(settings.judge_url, settings.judge_model, settings.judge_key_env, settings.workers)
    return ACCURACIES[name] if name in ACCURACIES else _user_accuracy(name, objects)


def _math_accuracy(settings: Rewards) -> Accuracy:
    judge = shared_judge(min(settings.workers, os.cpu_count() or 1), settings.math_seconds)

    def accuracy(prediction: str, golds: Sequence[str], task: Task) -> float:
        verdict = judge.verdict(prediction, golds)
        if verdict.reason:
            raise NoVerdict(verdict.reason)
        return float(verdict.equal)

    return accuracy


def _user_accuracy(name: str, objects: Objects) -> Accuracy:
    function = _load_function("reward.accuracy", name, objects)

    def accuracy(prediction: str, golds: Sequence[str], task: Task) -> float:
        score = call_user("reward.accuracy", name, task, function, prediction, golds, task)
        if not isinstance(score, int | float) or not 0 <= score <= 1:
            raise ArpoError(
                f"reward.accuracy: {name} returned {score!r:.100} for {task.id}, expected a number from 0 to 1"
            )
        return float(score)

    return accuracy


def _format_check(name: str, parse: str | None, objects: Objects) -> FormatCheck | None:
    if name == "none":
        return None
    if name == "auto":
        return lambda trajectory: check_format(trajectory, parse)
    function = _load_function("reward.format", name, objects)

    def check(trajectory: Trajectory) -> tuple[FormatFault, str] | None:
        wrong = call_user("reward.format", name, trajectory.task, function, trajectory)
        if wrong is None or wrong is True or wrong == "":
            return None
        if wrong is not False and not isinstance(wrong, str):
            raise ArpoError(
                f"reward.format: {name} returned {wrong!r:.100} for {trajectory.task.id}, expected what is wrong, as "
                "a text, or None; or whether the format is right"
            )
        return FormatFault.CUSTOM, shorten(" ".join(wrong.split())) if wrong else f"{function_name(function)} says so"

    return check


def _load_function(setting: str, name: str, objects: Objects) -> Callable[..., Any]:
    function: Any = load_object(setting, name, objects)
    if not callable(function):
        raise ArpoError(f"{setting}: {name} is {function!r:.100}, expected a function")
    return function  # type: ignore[no-any-return]
