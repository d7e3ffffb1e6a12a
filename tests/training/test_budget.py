"""Dynamic sampling, informative filling, the overlong penalty, and budgets of a run."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from training_runs import assert_same, config_for, run_to_the_end, what_it_left, with_reward
from trees import model, prompt, tool, tree

from arpo.data.order import batch_tasks
from arpo.errors import ArpoError
from arpo.rewards import with_overlong_penalty
from arpo.runs.run_dir import open_run_dir as read_run
from arpo.trainer.trainer import Trainer
from arpo.training.loop import open_training, sample_step, train
from arpo.types import Reward, ScoredTree, StopReason, Trajectory, derive_seed


def alternating_reward(settled: set[str], counts: dict[str, int]) -> Any:
    """All trajectories of settled tasks earn the same; those of others earn 1, 0, 1, ... in turn."""

    def reward(trajectory: Trajectory) -> Reward:
        task = trajectory.task
        counts[task.id] = counts.get(task.id, 0) + 1
        right = 1.0 if task.id in settled else float(counts[task.id] % 2)
        return Reward(right, {"correct": right, "format": 1.0})

    return reward


@pytest.mark.slow
@pytest.mark.parametrize("open_questions", [0, 1, 2, 3, 5])
def test_uninformative_tasks_are_replaced(model_path: Path, tmp_path: Path, open_questions: int) -> None:
    config = config_for(
        model_path, tmp_path / "run", "train.dynamic_sampling_rounds=2", "reward.workers=1", "train.batch_size=3"
    )
    with open_training(config) as training:
        parts = training.tasks.sources
        first = batch_tasks(parts, 3, 5, config.seed)
        others = [batch_tasks(parts, 3, 4 * 2 + turn, derive_seed(config.seed, "resample")) for turn in (1, 2)]
        every = [task.id for task in (*first, *others[0], *others[1])]
        informative = set(list(dict.fromkeys(reversed(every)))[:open_questions])  # the last ones in the order of asking
        trees = asyncio.run(
            sample_step(with_reward(training, alternating_reward({t.id for t in parts[0].tasks} - informative, {})), 5)
        )
    expected: list[str] = []
    trained = 0
    for tasks in (first, *others):
        asked = [task.id for task in tasks if task.id not in expected][: 3 - trained]  # others, not the same again
        expected += asked
        trained += sum(name in informative for name in asked)
        if trained == 3:
            break
    assert [scored.tree.task.id for scored in trees] == expected
    assert sum(len({reward.total for reward in scored.rewards}) > 1 for scored in trees) == trained


def test_only_tasks_with_unequal_rewards_get_all_their_trajectories(model_path: Path, tmp_path: Path) -> None:
    changes = (
        "branching.policy=posthoc_random",
        "branching.fill=informative",
        "rollout.num_trajectories=6",
        "rollout.num_initial=2",
    )
    config = config_for(model_path, tmp_path / "run", *changes, "reward.workers=1", "train.batch_size=4")
    with open_training(config) as training:
        every = {task.id for part in training.tasks.sources for task in part.tasks}
        tasks = [task.id for task in batch_tasks(training.tasks.sources, 4, 1, config.seed)]
        disputed = {tasks[1], tasks[2]}
        trees = asyncio.run(sample_step(with_reward(training, alternating_reward(every - disputed, {})), 1))
    assert [(scored.tree.task.id, len(scored.rewards)) for scored in trees] == [
        (name, 6 if name in disputed else 2) for name in tasks
    ]


@pytest.mark.slow
def test_only_informative_tasks_are_trained_on_and_all_sampling_is_counted(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[list[str]] = []
    update = Trainer.update

    def spy(trainer: Trainer, trees: Sequence[ScoredTree]) -> dict[str, float]:
        given.append([scored.tree.task.id for scored in trees])
        return update(trainer, trees)

    monkeypatch.setattr(Trainer, "update", spy)
    config = config_for(
        model_path, tmp_path / "run", "train.dynamic_sampling_rounds=3", "reward.workers=1", "train.steps=1"
    )
    with open_training(config) as training:
        counts: dict[str, int] = {}
        every = {task.id for part in training.tasks.sources for task in part.tasks}
        only = sorted(every)[0]
        asyncio.run(train(with_reward(training, alternating_reward(every - {only}, counts))))
    log = read_run(tmp_path / "run")
    scored, record = log.read_trees(1), log.read_metrics()[0]
    assert record["trajectories"] == 4 * len(scored) and len(scored) > 3
    assert record["tool_calls"] == sum(one.tree.tool_calls for one in scored)
    trained = [one for one in scored if any(credit.advantage for credit in one.credits)]
    assert {one.tree.task.id for one in trained} <= {only}
    assert given == [[one.tree.task.id for one in trained]]
    assert (record["optimizer_steps"] > 0) == bool(trained)


@pytest.mark.slow
def test_a_resumed_run_repeats_dynamic_sampling_exactly(model_path: Path, tmp_path: Path) -> None:
    run_to_the_end(config_for(model_path, tmp_path / "straight", "train.dynamic_sampling_rounds=2", "preset=dapo"))
    run_to_the_end(
        config_for(model_path, tmp_path / "halves", "train.dynamic_sampling_rounds=2", "preset=dapo", "train.steps=2")
    )
    run_to_the_end(
        config_for(model_path, tmp_path / "halves", "train.dynamic_sampling_rounds=2", "preset=dapo"), resume=True
    )
    assert_same(tmp_path / "straight", tmp_path / "halves")


def test_dynamic_sampling_needs_a_baseline_per_task(model_path: Path, tmp_path: Path) -> None:
    config = config_for(model_path, tmp_path / "run", "train.dynamic_sampling_rounds=2", "advantage.baseline=batch")
    with (
        pytest.raises(ArpoError, match=r'train\.dynamic_sampling_rounds: use 0 with advantage\.baseline="batch"'),
        open_training(config),
    ):
        pass


def test_dynamic_sampling_excludes_a_curriculum(model_path: Path, tmp_path: Path) -> None:
    config = config_for(model_path, tmp_path / "run", "train.dynamic_sampling_rounds=2", "data.curriculum=2")
    with (
        pytest.raises(ArpoError, match=r"train\.dynamic_sampling_rounds: use 0 with data\.curriculum"),
        open_training(config),
    ):
        pass


@pytest.mark.slow
@pytest.mark.parametrize("what", ["trajectories", "sampled_tokens"])
def test_a_budget_ends_the_run_with_the_step_that_spends_it(model_path: Path, tmp_path: Path, what: str) -> None:
    run_to_the_end(config_for(model_path, tmp_path / "whole", "train.steps=6"))
    spent = [row[what] for row in what_it_left(tmp_path / "whole")[1]]
    assert all(spent)
    for name, budget in (("exact", sum(spent[:3])), ("above", sum(spent[:2]) + 1)):
        more = (f"train.budget={budget}", f"train.budget_unit={what}", "train.steps=1000", "run.checkpoint_every=1000")
        run_to_the_end(config_for(model_path, tmp_path / name, *more))
        log = read_run(tmp_path / name)
        assert [row[what] for row in log.read_metrics()] == spent[:3]
        assert (log.latest_checkpoint() or (0,))[0] == 3  # the end is saved, whenever checkpoints are due
        run_to_the_end(config_for(model_path, tmp_path / name, *more), resume=True)  # says that nothing is left to do
        assert len(log.read_metrics()) == 3


@pytest.mark.slow
def test_a_resumed_run_counts_what_was_spent_before(model_path: Path, tmp_path: Path) -> None:
    run_to_the_end(config_for(model_path, tmp_path / "run", "train.steps=2"))
    spent = sum(row["trajectories"] for row in read_run(tmp_path / "run").read_metrics())
    more = (f"train.budget={spent + 1}", "train.budget_unit=trajectories", "train.steps=50")
    run_to_the_end(config_for(model_path, tmp_path / "run", *more), resume=True)
    assert len(read_run(tmp_path / "run").read_metrics()) == 3


def test_the_overlong_penalty_grows_over_the_last_tokens() -> None:
    def plain(trajectory: Trajectory) -> Reward:
        return Reward(1.1, {"correct": 1.0, "format": 1.0})

    def lost(length: int, end: StopReason = StopReason.ANSWER) -> float:
        rollout = tree([prompt([1] * 7), model(0, [3] * (length - 2)), tool(1, [9]), model(2, [4])], [3], end=end)
        reward = with_overlong_penalty(plain, 0.2, 50)(rollout.trajectories[0])
        assert reward.parts == {"correct": 1.0, "format": 1.0, "overlong": pytest.approx(reward.total - 1.1)}
        return 1.1 - reward.total

    assert [lost(n) for n in (3, 39, 40)] == [0, 0, 0]
    assert [lost(n) for n in (41, 45, 49, 50)] == pytest.approx([0.1, 0.5, 0.9, 1.0])
    assert lost(20, StopReason.LENGTH) == pytest.approx(1.0)  # what it wanted to add did not fit
