"""The loop: it learns a toy task, resumes as if it had never stopped, and never loses a run."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
import warm_process
from safetensors.torch import load_file
from training_runs import (
    SMALL,
    assert_same,
    config_for,
    even_share,
    run_to_the_end,
    what_it_left,
    with_credits_of,
    with_reward,
)

import arpo.training.loop
from arpo.agent.agent import Agent
from arpo.agent.formats import build_format
from arpo.algorithm.rollout import rollout
from arpo.builtin.model import build_model
from arpo.config.algorithm import Branching
from arpo.config.loading import load_config
from arpo.config.schema import Config, Rollout
from arpo.data.order import Source, batch_tasks
from arpo.data.task_set import load_task_set
from arpo.engine.local.engine import LocalEngine
from arpo.errors import ArpoError
from arpo.runs.reporter import Reporter
from arpo.runs.run_dir import open_run_dir as read_run
from arpo.trainer.checkpoint import load_checkpoint, save_checkpoint
from arpo.trainer.trainer import Trainer
from arpo.training.loop import Training, open_training, sample_step, train
from arpo.types import Reward, RolloutTree, ScoredTree, Task, Trajectory


@pytest.mark.slow
def test_resumed_equals_not_stopped_to_the_last_bit(model_path: Path, tmp_path: Path) -> None:
    run_to_the_end(config_for(model_path, tmp_path / "straight"))
    run_to_the_end(config_for(model_path, tmp_path / "halves", "train.steps=2"))
    run_to_the_end(config_for(model_path, tmp_path / "halves"), resume=True)
    assert_same(tmp_path / "straight", tmp_path / "halves")
    weights, metrics, _ = what_it_left(tmp_path / "straight")
    begun = load_file(model_path / "model.safetensors")
    assert not torch.equal(weights["model.layers.0.mlp.up_proj.weight"], begun["model.layers.0.mlp.up_proj.weight"])
    assert [row["step"] for row in metrics] == [1, 2, 3, 4]


@pytest.mark.slow
def test_stopping_saves_and_steps_after_the_checkpoint_are_done_again(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_to_the_end(config_for(model_path, tmp_path / "straight"))

    async def stop_in_step_four(training: Training, step: int, outcomes: Sequence[str]) -> list[ScoredTree]:
        if step == 4:
            asyncio.current_task().cancel()  # type: ignore[union-attr]
        return await sample_step(training, step, outcomes)

    with monkeypatch.context() as patch:
        patch.setattr(arpo.training.loop, "sample_step", stop_in_step_four)
        with pytest.raises(asyncio.CancelledError):
            run_to_the_end(config_for(model_path, tmp_path / "stopped"))
    log = read_run(tmp_path / "stopped")
    assert (log.latest_checkpoint() or (0,))[0] == 3  # not one of the regular ones
    with open(tmp_path / "stopped" / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "reward": 9}\n{"step": 5, "rew')  # what a crash may leave behind
    run_to_the_end(config_for(model_path, tmp_path / "stopped"), resume=True)
    assert_same(tmp_path / "straight", tmp_path / "stopped")


@pytest.mark.slow
def test_a_resumed_run_may_fit_into_less_memory_and_learn_more_slowly(model_path: Path, tmp_path: Path) -> None:
    run_to_the_end(config_for(model_path, tmp_path / "run", "train.steps=1"))
    less = (
        "train.max_microbatch_tokens=50",
        "train.gradient_checkpointing=true",
        "rollout.kv_cache_tokens=5000",
        "train.lr=1e-9",
    )
    before = what_it_left(tmp_path / "run")[0]
    run_to_the_end(config_for(model_path, tmp_path / "run", "train.steps=2", *less), resume=True)
    after, rows, _ = what_it_left(tmp_path / "run")
    assert len(rows) == 2 and rows[1]["optimizer_steps"] == 1
    assert all((after[name] - before[name]).abs().max() < 1e-6 for name in before)


@pytest.mark.slow
def test_several_minibatches_epochs_and_warmup_resume_too(model_path: Path, tmp_path: Path) -> None:
    more = ["train.minibatches=3", "train.epochs=2", "train.warmup_steps=5", "train.weight_decay=0.1"]
    run_to_the_end(config_for(model_path, tmp_path / "straight", *more))
    run_to_the_end(config_for(model_path, tmp_path / "halves", "train.steps=1", *more))
    run_to_the_end(config_for(model_path, tmp_path / "halves", *more), resume=True)
    assert_same(tmp_path / "straight", tmp_path / "halves")


def test_an_error_in_a_tool_or_engine_costs_no_finished_step(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken_in_step_two(training: Training, step: int, outcomes: Sequence[str]) -> list[ScoredTree]:
        if step == 2:
            raise RuntimeError("out of memory")
        return await sample_step(training, step, outcomes)

    with monkeypatch.context() as patch:
        patch.setattr(arpo.training.loop, "sample_step", broken_in_step_two)
        with pytest.raises(RuntimeError, match="out of memory"):
            run_to_the_end(config_for(model_path, tmp_path / "broken"))
    assert (read_run(tmp_path / "broken").latest_checkpoint() or (0,))[0] == 1


@pytest.mark.slow
def test_an_error_while_learning_saves_nothing_half_learnt(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step_optimiser = Trainer._step

    def broken_in_step_three(trainer: Trainer) -> float:
        if trainer.optimizer.steps == 7:  # the second of three mini-batches
            raise RuntimeError("out of memory")
        return step_optimiser(trainer)

    more = ["train.minibatches=3"]
    run_to_the_end(config_for(model_path, tmp_path / "whole", *more))
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_step", broken_in_step_three)
        with pytest.raises(RuntimeError, match="out of memory"):
            run_to_the_end(config_for(model_path, tmp_path / "broken", *more))
    assert (read_run(tmp_path / "broken").latest_checkpoint() or (0,))[0] == 2
    run_to_the_end(config_for(model_path, tmp_path / "broken", *more), resume=True)
    assert_same(tmp_path / "whole", tmp_path / "broken")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reward", "reason"),
    [
        (Reward(1.0, {"correct": 1.0}), "all trajectories were right. The questions are too easy"),
        (Reward(-1.0, {"correct": 0.0}), "all trajectories were wrong, and all of a question earned the same"),
        (Reward(0.5), "for every question, all trajectories earned the same. "),
    ],
)
def test_a_run_that_learned_nothing_says_why(
    reward: Reward, reason: str, model_path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with open_training(config_for(model_path, tmp_path / "run", "train.steps=1")) as training:
        asyncio.run(train(with_reward(training, lambda trajectory: reward)))
    [said] = [line for line in caplog.messages if line.startswith("nothing was learned: ")]
    assert said.removeprefix("nothing was learned: ").startswith(reason)


class Counter(Reporter):
    """Adds up what a run reports of its sampling."""

    def __init__(self) -> None:
        self.expected: list[int] = []
        self.counted: list[list[int]] = []

    def sampling_starts(self, trajectories: int) -> None:
        self.expected.append(trajectories)
        self.counted.append([0, 0, 0])

    def sampled(self, tokens: int = 0, tool_calls: int = 0, trajectories: int = 0) -> None:
        for place, more in enumerate((tokens, tool_calls, trajectories)):
            self.counted[-1][place] += more


@pytest.mark.slow
def test_progress_inside_a_step_counts_what_the_metrics_say_and_changes_nothing(
    model_path: Path, tmp_path: Path
) -> None:
    watched, plain, counter = tmp_path / "watched", tmp_path / "plain", Counter()
    with open_training(config_for(model_path, watched), reporter=counter) as training:
        asyncio.run(train(training))
    with open_training(config_for(model_path, plain)) as training:
        asyncio.run(train(training))
    assert_same(watched, plain)
    records = read_run(watched).read_metrics()
    assert counter.counted == [[m["sampled_tokens"], m["tool_calls"], m["trajectories"]] for m in records]
    assert counter.expected == [m["trajectories"] for m in records]


@pytest.mark.slow
def test_evaluations_on_the_way_are_logged_and_change_nothing(model_path: Path, tmp_path: Path) -> None:
    run_to_the_end(config_for(model_path, tmp_path / "plain"))
    run_to_the_end(config_for(model_path, tmp_path / "tested", "eval.every=2"))
    rows = read_run(tmp_path / "tested").read_metrics()
    assert [(row["step"], "test_accuracy" in row) for row in rows] == [(1, False), (2, True), (3, False), (4, True)]
    (a, plain, _), (b, tested, _) = (what_it_left(tmp_path / name) for name in ("plain", "tested"))
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert plain == [{key: row[key] for key in row if not key.startswith("test_")} for row in tested]


@pytest.mark.slow
def test_a_test_that_a_stop_left_out_is_made_up(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_to_the_end(config_for(model_path, tmp_path / "straight", "eval.every=2"))

    async def stopped(*_: Any) -> Any:
        raise asyncio.CancelledError

    with monkeypatch.context() as patch:
        patch.setattr(arpo.training.loop, "evaluate_policy", stopped)
        with pytest.raises(asyncio.CancelledError):
            run_to_the_end(config_for(model_path, tmp_path / "stopped", "eval.every=2"))
    assert "test_accuracy" not in read_run(tmp_path / "stopped").read_metrics()[-1]
    run_to_the_end(config_for(model_path, tmp_path / "stopped", "eval.every=2"), resume=True)
    assert_same(tmp_path / "straight", tmp_path / "stopped")


@pytest.mark.slow
def test_a_run_that_goes_on_with_other_settings_has_both(model_path: Path, tmp_path: Path) -> None:
    run_to_the_end(config_for(model_path, tmp_path / "run", "train.steps=2"))
    run_to_the_end(config_for(model_path, tmp_path / "run", "train.steps=2"), resume=True)
    assert not list((tmp_path / "run").glob("config-until-*"))  # nothing was changed
    run_to_the_end(config_for(model_path, tmp_path / "run", "train.steps=3", "train.lr=1e-9"), resume=True)
    log, before = read_run(tmp_path / "run"), tmp_path / "run" / "config-until-step_000002.json"
    assert (log.config()["train"]["lr"], log.config()["train"]["steps"]) == (1e-9, 3)
    assert (load_config(before).train.lr, load_config(before).train.steps) == (1e-3, 2)


@pytest.mark.slow
def test_another_seed_is_another_run(model_path: Path, tmp_path: Path) -> None:
    run_to_the_end(config_for(model_path, tmp_path / "a", "train.steps=1"))
    run_to_the_end(config_for(model_path, tmp_path / "b", "train.steps=1", "seed=1"))
    assert what_it_left(tmp_path / "a")[2] != what_it_left(tmp_path / "b")[2]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_cleanly_with_a_checkpoint(model_path: Path, tmp_path: Path, number: signal.Signals) -> None:
    directory = tmp_path / "run"
    config = tmp_path / "config.toml"
    config.write_text("")
    command = ["train", str(config), *SMALL, f"model.path={model_path}", f"run.dir={directory}"]
    command += ["train.steps=100000", "run.checkpoint_every=100000"]
    process = warm_process.start(warm_process.CLI, *command, output=tmp_path / "output.txt")
    try:
        metrics = directory / "metrics.jsonl"
        while process.is_alive() and not (metrics.exists() and metrics.read_text()):
            time.sleep(0.02)
        os.kill(process.pid or 0, number)
        process.join()
    finally:
        process.kill()
    said = (tmp_path / "output.txt").read_text()
    assert process.exitcode == 130
    assert "Traceback" not in said
    assert "--resume" in said
    log = read_run(directory)
    step, checkpoint = log.latest_checkpoint() or (0, directory)
    assert step == log.read_metrics()[-1]["step"] >= 1
    assert json.loads((checkpoint / "state.json").read_text())["step"] == step


@pytest.mark.slow
def test_it_learns_a_toy_task(tokenizer: Any) -> None:
    """From about half even tokens to nearly all, through rollouts, credits and updates as in a real run."""
    model = build_model(tokenizer, 32, 1, 128, seed=0).eval()
    config = load_config(
        None, ["train.lr=1e-2", "rollout.num_trajectories=8", "rollout.num_initial=4", "rollout.max_tokens=12"]
    )
    agent = Agent(LocalEngine(model, tokenizer), tokenizer, {}, build_format("tags", []))
    trainer = Trainer(model, tokenizer, config)
    shares = []

    async def learn() -> None:
        for step in range(35):
            tasks = [Task(str(i), f"Question {i}", ("x",)) for i in range(4)]
            trees = await asyncio.gather(
                *(rollout(agent, t, config.rollout, config.branching, 100 * step + i) for i, t in enumerate(tasks))
            )
            scored = with_credits_of(even_share, trees, config.advantage)
            trainer.update(scored)
            await agent.engine.sync_weights(step)
            shares.append(fmean(reward.total for one in scored for reward in one.rewards))

    asyncio.run(learn())
    assert 0.3 < shares[0] < 0.7
    assert fmean(shares[-3:]) > 0.9


@pytest.mark.slow
def test_engine_and_trainer_agree_on_log_probs(tokenizer: Any, model_path: Path, tmp_path: Path) -> None:
    run_to_the_end(config_for(model_path, tmp_path / "run", "train.steps=2", "rollout.temperature=0.8"))
    for row in read_run(tmp_path / "run").read_metrics():
        assert row["engine_mismatch"] < 1e-5
        assert row["ratio"] == pytest.approx(1.0, abs=1e-6)
        assert row["trained_tokens"] > 0


def test_later_minibatches_are_off_policy_by_what_the_earlier_ones_changed(model_path: Path, tmp_path: Path) -> None:
    run_to_the_end(config_for(model_path, tmp_path / "run", "train.steps=1", "train.minibatches=3", "train.lr=1e-2"))
    [row] = read_run(tmp_path / "run").read_metrics()
    assert row["optimizer_steps"] == 3
    assert abs(row["ratio"] - 1) > 1e-4
    assert row["kl_k3"] > 0


def test_every_step_draws_anew(model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []

    async def record(*given: Any, **named: Any) -> list[ScoredTree]:
        drawn.extend(given[4])
        return []

    monkeypatch.setattr("arpo.training.sampler.sample_trees", record)
    with open_training(config_for(model_path, tmp_path / "run")) as training:
        for step in (1, 2, 1):
            asyncio.run(sample_step(training, step))
    first, second, again = drawn[:3], drawn[3:6], drawn[6:]
    assert first == again
    assert len({*first, *second}) == 6


def test_logits_in_chunks_change_nothing(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    trees = asyncio.run(_some_trees(tokenizer))
    scored = with_credits_of(even_share, trees)
    weights = []
    for size in (2048, 5):
        monkeypatch.setattr("arpo.trainer.forward_backward.LOGITS_CHUNK", size)
        model = build_model(tokenizer, 32, 1, 128, seed=0).eval()
        Trainer(model, tokenizer, load_config(None, ["train.lr=0.01"])).update(scored)
        weights.append(model.model.layers[0].mlp.up_proj.weight.detach().clone())
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-4, atol=1e-6)


def test_paths_that_share_little_are_packed(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    trees = asyncio.run(_some_trees(tokenizer))
    scored = with_credits_of(even_share, trees)
    computed = {}
    for limit in (0.0, 1.0):
        monkeypatch.setattr("arpo.trainer.trainer.SHARING_PAYS", limit)
        model = build_model(tokenizer, 32, 1, 128, seed=0).eval()
        metrics = Trainer(model, tokenizer, load_config(None)).update(scored)
        computed[limit] = metrics["computed_tokens"], metrics["unshared_tokens"], metrics["grad_norm"]
    assert computed[0.0][0] == computed[0.0][1] == computed[1.0][1] > computed[1.0][0]
    assert computed[0.0][2] == pytest.approx(computed[1.0][2], rel=1e-4)


@pytest.mark.slow
def test_the_kl_term_holds_the_model_near_the_one_before_training(model_path: Path, tmp_path: Path) -> None:
    """Its distance grows from exactly 0, less so with a larger weight; a resumed run compares with the same model."""
    far = {}
    for kl in ("1e-9", "30"):
        more = (f"loss.kl_coef={kl}", "train.lr=1e-2", "run.checkpoint_every=1")
        run_to_the_end(config_for(model_path, tmp_path / kl, "train.steps=3", *more))
        rows = read_run(tmp_path / kl).read_metrics()
        assert rows[0]["reference_kl"] == pytest.approx(0.0, abs=1e-6) and rows[1]["reference_kl"] > 1e-5
        far[kl] = rows[2]["reference_kl"]
        run_to_the_end(config_for(model_path, tmp_path / f"{kl}-halves", "train.steps=2", *more))
        run_to_the_end(config_for(model_path, tmp_path / f"{kl}-halves", "train.steps=3", *more), resume=True)
        assert read_run(tmp_path / f"{kl}-halves").read_metrics()[2]["reference_kl"] == far[kl]
    assert far["30"] < 0.95 * far["1e-9"]


def test_micro_batches_do_not_change_the_gradient(tokenizer: Any) -> None:
    trees = asyncio.run(_some_trees(tokenizer))
    scored = with_credits_of(even_share, trees)
    norms, weights = [], []
    for size in (16, 100_000):
        model = build_model(tokenizer, 32, 1, 128, seed=0).eval()
        trainer = Trainer(model, tokenizer, load_config(None, [f"train.max_microbatch_tokens={size}"]))
        norms.append(trainer.update(scored)["grad_norm"])
        weights.append(model.model.layers[0].mlp.up_proj.weight.detach().clone())
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-4, atol=1e-7)


async def _some_trees(tokenizer: Any) -> list[RolloutTree]:
    model = build_model(tokenizer, 32, 1, 128, seed=0).eval()
    agent = Agent(LocalEngine(model, tokenizer), tokenizer, {}, build_format("tags", []))
    how = Rollout(num_trajectories=4, num_initial=4, max_tokens=12)
    return [await rollout(agent, Task(str(i), "Which?", ("x",)), how, Branching(), i) for i in range(3)]


def test_a_batch_with_nothing_to_learn_changes_nothing(tokenizer: Any) -> None:
    trees = asyncio.run(_some_trees(tokenizer))
    scored = with_credits_of(lambda trajectory: Reward(1.0, {}), trees)
    model = build_model(tokenizer, 32, 1, 128, seed=0).eval()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    metrics = Trainer(model, tokenizer, load_config(None, ["train.lr=0.1"])).update(scored)
    assert (metrics["optimizer_steps"], metrics["trained_tokens"]) == (0, 0)
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())


def test_checkpoints_round_trip_the_optimizer(tokenizer: Any, tmp_path: Path) -> None:
    trees = asyncio.run(_some_trees(tokenizer))
    scored = with_credits_of(even_share, trees)
    model = build_model(tokenizer, 32, 1, 128, seed=0).eval()
    trainer = Trainer(model, tokenizer, load_config(None))
    trainer.update(scored)
    save_checkpoint(trainer, 7, tmp_path)
    other = Trainer(model, tokenizer, load_config(None))
    assert load_checkpoint(other, tmp_path) == 7
    saved, loaded = trainer.optimizer.tensors(), other.optimizer.tensors()
    assert saved.keys() == loaded.keys()
    assert all(torch.equal(saved[key], loaded[key]) for key in saved)
    (tmp_path / "state.json").write_text("{")
    with pytest.raises(ArpoError, match="damaged"):
        load_checkpoint(other, tmp_path)


def test_batches_go_through_all_questions_before_any_comes_again() -> None:
    tasks = [Task(str(i), "q", ("a",)) for i in range(10)]
    sources = [Source("x", tuple(tasks))]
    drawn = [task.id for step in range(1, 6) for task in batch_tasks(sources, 4, step, seed=0)]
    assert sorted(drawn[:10]) == sorted(drawn[10:]) == sorted(task.id for task in tasks)
    assert drawn[:10] != drawn[10:]
    assert [t.id for t in batch_tasks(sources, 4, 3, seed=0)] == drawn[8:12]  # depends on the step alone


def test_data_mistakes_are_found_before_a_directory_is_made(tmp_path: Path) -> None:
    config = load_config(None, ["data.train=nowhere.jsonl", f"run.dir={tmp_path / 'run'}"])
    with pytest.raises(ArpoError, match=r"nowhere\.jsonl"), open_training(config):
        raise AssertionError("a run was opened")
    assert not (tmp_path / "run").exists()
    assert load_task_set(load_config(None, SMALL)).train


@pytest.mark.slow
def test_a_path_without_a_verdict_teaches_nothing_and_is_counted(model_path: Path, tmp_path: Path) -> None:
    def now_and_then(trajectory: Trajectory) -> Reward:
        number = trajectory.tree.leaves.index(trajectory.leaf)
        fault = {"judge.unavailable": 1.0} if number == 0 else {"judge.timeout": 1.0} if number == 1 else {}
        return Reward(float(number), {"correct": 0.0, "format": 1.0, **fault})

    for drop in (True, False):
        directory = tmp_path / str(drop)
        more = ("train.steps=1", "branching.policy=never", f"train.mask_infra_faults={str(drop).lower()}")
        with open_training(config_for(model_path, directory, *more)) as training:
            asyncio.run(train(with_reward(training, now_and_then)))
        log = read_run(directory)
        (row,) = log.read_metrics()
        assert (row["judge.unavailable"], row["judge.timeout"]) == (3.0, 3.0)
        masks = [scored.mask for scored in log.read_trees(1)]
        assert masks == [(not drop, True, True, True)] * 3


def test_mistakes_in_the_reward_are_found_before_a_model_is_loaded(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("arpo.training.loop.load_policy", lambda *_: pytest.fail("a model was loaded"))
    config = config_for(model_path, tmp_path / "run", "reward.accuracy=judge")
    with pytest.raises(ArpoError, match=r"reward\.judge_url"), open_training(config):
        raise AssertionError("a run was opened")
    assert not (tmp_path / "run").exists()


def test_samplers_elsewhere_never_need_a_checkpoint(model_path: Path, tmp_path: Path) -> None:
    """A worker that starts late loads the model before training, since checkpoints are deleted as training goes on."""
    config = config_for(model_path, tmp_path / "run", "train.steps=2")
    run_to_the_end(config)
    config = config.model_copy(update={"cluster": config.cluster.model_copy(update={"address": "somewhere"})})
    given = []

    def build_sampler(config: Config, model: Any) -> Any:
        given.append(config.model.path)

    with open_training(config, resume=True, build_sampler=build_sampler) as training:
        assert training.config.model.path != str(model_path)
    assert given == [str(model_path)]
