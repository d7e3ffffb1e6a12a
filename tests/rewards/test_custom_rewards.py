"""Reward functions of the user's own: what they may return and take, several with weights, parts as metrics, errors."""

from __future__ import annotations

import asyncio
import functools
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import tensor
from trees import searched

from arpo.algorithm.metrics import rollout_metrics
from arpo.cli.display import step_line
from arpo.config.loading import config_from_resolved, load_config
from arpo.config.schema import Rewards
from arpo.errors import ArpoError
from arpo.evaluation.evaluate import Evaluation
from arpo.rewards import (
    NoVerdict,
    Scorer,
    apply_reward,
    build_reward,
    custom_reward,
    reward_metrics,
    wants_environment,
    weighted_reward,
    with_overlong_penalty,
)
from arpo.training.collapse import find_warnings
from arpo.training.loop import _outcome
from arpo.types import Reward, ScoredTree, Task, Trajectory

TREE = replace(searched(), task=Task("q7", "How long?", meta={"limit": 4}))
TRAJECTORY = TREE.trajectories[0]


def right(trajectory: Trajectory) -> Reward:
    return Reward(1.0, {"correct": 1.0})


def limit(trajectory: Trajectory) -> float:
    return trajectory.task.meta["limit"] / 2


def state(trajectory: Trajectory, environment: Any) -> float:
    return float(environment["count"])


class Callable_:
    def __call__(self, trajectory: Trajectory) -> int:
        return 3

    def seeing(self, trajectory: Trajectory, state: Any) -> int:
        return 4


@pytest.mark.parametrize(
    ("function", "wanted"),
    [
        (lambda t: 0, False),
        (lambda t, e: 0, True),
        (lambda t, environment=None: 0, True),
        (lambda t, scale=0.5: 0, False),
        (lambda t, *more: 0, False),
        (lambda t, *, environment: 0, False),
        (Callable_(), False),
        (Callable_().seeing, True),
        (functools.partial(state, environment={}), False),
        (functools.partial(lambda scale, t, e: 0, 2), True),
        (max, False),
    ],
)
def test_a_second_positional_parameter_is_the_environment(function: Any, wanted: bool) -> None:
    assert wants_environment(function) is wanted


def test_the_environment_reaches_those_who_want_it() -> None:
    states = {"count": 5}
    for function, total in ((state, 5.0), (limit, 2.0), (Callable_(), 3.0), (Callable_().seeing, 4.0)):
        reward = custom_reward(function)
        assert wants_environment(reward) is wants_environment(function)
        assert apply_reward(reward, TRAJECTORY, states) == Reward(total)
    both = weighted_reward([limit, state], [1.0, 0.5])
    assert wants_environment(both) and not wants_environment(weighted_reward([limit, right], [1.0, 1.0]))
    assert apply_reward(both, TRAJECTORY, states) == Reward(4.5, {"limit": 2.0, "state": 5.0})
    penalized = with_overlong_penalty(both, 0.5, 10**6)
    assert wants_environment(penalized)
    assert apply_reward(penalized, TRAJECTORY, states).total == 4.5
    assert not wants_environment(with_overlong_penalty(custom_reward(limit), 0.5, 10**6))


@pytest.mark.parametrize("value", [1, True, 0.25, np.float32(0.25), np.int64(2), np.True_, np.array(0.5), tensor(0.5)])
def test_any_number_is_a_reward_without_parts(value: Any) -> None:
    reward = custom_reward(lambda trajectory: value)(TRAJECTORY)
    assert reward == Reward(float(value)) and type(reward.total) is float


def test_numbers_of_parts_become_floats() -> None:
    parts: dict[str, Any] = {"correct": np.True_, "len": tensor(3)}
    reward = custom_reward(lambda trajectory: Reward(1, parts))(TRAJECTORY)
    assert reward == Reward(1.0, {"correct": 1.0, "len": 3.0}) and type(reward.parts["len"]) is float


def test_what_is_no_number_is_an_error_that_says_so() -> None:
    for value, message in (
        (None, "measure returned None for .*, expected a number or an arpo.Reward; is a `return` missing?"),
        (np.array([0.5]), "measure returned .*, expected a number or an arpo.Reward$"),
        (tensor(float("nan")), "measure returned .*, expected finite numbers"),
    ):
        with pytest.raises(ArpoError, match=message):
            custom_reward(lambda trajectory, value=value: value, "object:measure")(TRAJECTORY)


def test_coroutine_functions_are_run_also_in_the_threads_of_a_scorer() -> None:
    async def slow(trajectory: Trajectory) -> float:
        await asyncio.sleep(0)
        return 0.5

    async def score() -> ScoredTree:
        with Scorer(custom_reward(slow), 2) as scorer:
            return await scorer.score(TREE)

    assert asyncio.run(score()).rewards == (Reward(0.5),) * len(TREE.leaves)


@given(st.lists(st.tuples(st.floats(-9, 9), st.floats(-9, 9)), min_size=1, max_size=5))
def test_several_functions_are_summed_with_their_weights(pairs: list[tuple[float, float]]) -> None:
    def fixed(number: int, value: float) -> Any:
        def function(trajectory: Trajectory) -> Reward:
            return Reward(value, {f"part{number}": -value})

        function.__name__ = f"fn{number}"
        return function

    functions = [fixed(number, value) for number, (value, _) in enumerate(pairs)]
    reward = weighted_reward(functions, [weight for _, weight in pairs])(TRAJECTORY)
    assert reward.total == pytest.approx(sum(value * weight for value, weight in pairs))
    expected = {f"fn{number}": value for number, (value, _) in enumerate(pairs)}
    assert reward.parts == {**expected, **{f"part{number}": -value for number, (value, _) in enumerate(pairs)}}


def test_names_that_clash_are_errors_that_say_so() -> None:
    with pytest.raises(ArpoError, match="two functions are named right; rename one of them"):
        weighted_reward([right, right], [1.0, 1.0])
    with pytest.raises(ArpoError, match="two functions are named <lambda>; rename one of them: write it with `def`"):
        weighted_reward([lambda trajectory: 1.0, lambda trajectory: 2.0], [1.0, 1.0])

    def correct(trajectory: Trajectory) -> float:
        return 0.0

    with pytest.raises(ArpoError, match="correct and another function both give the part 'correct'; rename one"):
        weighted_reward([right, correct], [1.0, 1.0])(TRAJECTORY)
    own = weighted_reward([lambda trajectory: Reward(2.0, {"<lambda>": 1.0})], [3.0])(TRAJECTORY)
    assert own == Reward(6.0, {"<lambda>": 1.0})  # its part, not its value


SOURCE = """
from arpo.types import Reward

def right(trajectory):
    return Reward(1.0, {"correct": 1.0})

def short(trajectory):
    return -len(trajectory.tool_calls)

def broken(trajectory):
    count = trajectory.task.meta["nothing"]
    return count

def deep(trajectory):
    return float("x")

def interrupted(trajectory):
    raise SystemExit(1)

def unsure(prediction, golds, task):
    return task.meta["nothing"]
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(SOURCE)
    return path


def test_a_table_in_the_settings(file: Path, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(f'[reward]\nfunction = {{ "{file}:right" = 1, "{file}:short" = 0.25 }}\n')
    config = load_config(tmp_path / "run.toml", [])
    calls = len(TRAJECTORY.tool_calls)
    assert calls and build_reward(config.reward)(TRAJECTORY) == Reward(
        1.0 - 0.25 * calls, {"right": 1.0, "correct": 1.0, "short": -calls}
    )
    assert config_from_resolved(config.resolved()) == config
    assert load_config(None, [f'reward.function={{"{file}:right"=2.0}}']).reward.function == {f"{file}:right": 2.0}
    assert load_config(None, ["reward.function=none"]).reward.function is None
    for wrong in ("{}", '{"a.py:b"="much"}', '{"a.py:b"=1e9}'):
        with pytest.raises(ArpoError, match=r"reward.function: got .*expected non-empty text or table of weights"):
            load_config(None, [f"reward.function={wrong}"])


def test_an_error_in_a_function_names_the_function_the_line_and_the_task(file: Path) -> None:
    def refused(settings: Rewards) -> str:
        with pytest.raises(ArpoError) as caught:
            build_reward(settings)(replace(TREE, task=Task("q7", "How?", ("x",))).trajectories[0])
        return str(caught.value)

    name = f"reward.function: {file}:broken raised KeyError: 'nothing' for q7 ({file}:11)"
    assert refused(Rewards(function=f"{file}:broken")) == name
    assert refused(Rewards(function={f"{file}:right": 1.0, f"{file}:broken": 1.0})) == name
    assert refused(Rewards(function=f"{file}:deep")).endswith(f"for q7 ({file}:15)")
    accuracy = refused(Rewards(accuracy=f"{file}:unsure"))
    assert accuracy == f"reward.accuracy: {file}:unsure raised KeyError: 'nothing' for q7 ({file}:21)"
    with pytest.raises(SystemExit):
        build_reward(Rewards(function=f"{file}:interrupted"))(TRAJECTORY)
    with pytest.raises(NoVerdict):
        custom_reward(lambda trajectory: (_ for _ in ()).throw(NoVerdict("unclear")))(TRAJECTORY)


def scored(*rewards: Reward, kind: str = "") -> ScoredTree:
    leaves = TREE.leaves[:1] * len(rewards)
    return ScoredTree(replace(TREE, leaves=leaves, task=Task("q", "How?", kind=kind)), rewards)


def test_every_part_is_a_metric_and_a_missing_part_counts_as_zero() -> None:
    rewards = [
        Reward(1.0, {"correct": 1.0, "speed": 3.0, "judge.timeout": 1.0}),
        Reward(0.5),
        Reward(0.0, {"speed": 0}),
    ]
    metrics = reward_metrics(rewards)
    assert metrics == {"reward": 0.5, "accuracy": fmean([1, 0, 0]), "reward_speed": 1.0}
    assert list(metrics)[:2] == ["reward", "accuracy"]
    found = rollout_metrics([scored(*rewards)], 5)
    assert {name: found.get(name) for name in (*metrics, "format")} == {**metrics, "format": None}
    assert reward_metrics([Reward(2.0), Reward(1.0)]) == {"reward": 1.5}


def test_an_evaluation_of_rewards_that_do_not_say_what_is_correct() -> None:
    result = Evaluation((scored(Reward(1.0), Reward(0.0), kind="a"), scored(Reward(4.0), Reward(3.0), kind="b")))
    assert result.metrics == {"reward": 2.0}
    assert result.by_kind("reward") == {"a": 0.5, "b": 3.5}
    for ask in (
        lambda: result.accuracy,
        lambda: result.pass_at(1),
        lambda: result.format_rate,
        lambda: result.by_kind(),
    ):
        with pytest.raises(ArpoError, match=r"the rewards have no part '(correct|format)'; return Reward\(total, "):
            ask()
    known = Evaluation((scored(Reward(1.0, {"correct": 1.0}), Reward(0.0)),))
    assert (known.accuracy, known.pass_at(1), known.pass_at(2), known.by_kind()) == (0.5, 0.5, 1.0, {"all": 0.5})


@pytest.mark.parametrize(
    ("rewards", "letter"),
    [
        ((Reward(0.3), Reward(0.3)), "0"),
        ((Reward(0.3), Reward(0.4)), "m"),
        ((Reward(0.3, {"correct": 1.0}), Reward(0.4, {"correct": 1.0})), "1"),
        ((Reward(0.3, {"correct": 1.0}), Reward(0.3)), "m"),
    ],
)
def test_a_curriculum_needs_no_correct_part(rewards: tuple[Reward, ...], letter: str) -> None:
    assert _outcome(scored(*rewards)) == letter


def test_a_step_without_accuracy_and_format_is_shown() -> None:
    names = "reward tool_calls branches entropy_start entropy_after_tool unique_tokens total_tokens rollout_seconds "
    numbers = dict.fromkeys((names + "tool_seconds train_seconds").split(), 1.0)
    line, full = step_line(1, numbers), step_line(1, {**numbers, "accuracy": 1.0, "format": 1.0})
    assert line.split()[:4] == ["1", "1.00", "-", "-"] and len(line) == len(full)
    assert step_line(1, {**numbers, "test_reward": 0.5}).endswith("  held-out reward 0.500")


@pytest.mark.parametrize(("gain", "names"), [(0.0, {"entropy fell", "longer"}), (1.0, set())])
def test_without_accuracy_the_reward_says_whether_a_run_gets_better(gain: float, names: set[str]) -> None:
    def record(step: int) -> dict[str, Any]:
        late, noise = step > 30, 0.01 * (step % 3)
        return {
            "step": step, "reward": 0.2 + noise + gain * late, "loss": 0.1, "grad_norm": 1.0 + noise,
            "entropy_start": (0.05 if late else 1.0) + noise / 10, "completion_tokens": (900 if late else 100) + noise,
        }  # fmt: skip

    assert {warning.name for warning in find_warnings(map(record, range(1, 61)))} == names
