"""TreeGRPOTrainer with the real TRL: gradients against arpo's own, batches against TRL's tool loop, and learning."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from plain import plain_loss
from trl import GRPOConfig, GRPOTrainer
from trl_doors import DOORS, doors_dataset, doors_model, open_door, right_doors

from arpo.algorithm.advantage import compute_credits
from arpo.algorithm.batch import build_batch
from arpo.config.algorithm import Loss
from arpo.config.loading import load_config
from arpo.errors import ArpoError
from arpo.integrations.trl import TreeGRPOTrainer, loss_arguments
from arpo.trainer.forward_backward import forward_backward
from arpo.types import Kind, ScoredTree

GROUP, ROWS = 6, 12
SMALL: dict[str, Any] = {
    "per_device_train_batch_size": ROWS,
    "num_generations": GROUP,
    "max_completion_length": 160,
    "max_tool_calling_iterations": 3,
    "learning_rate": 5e-4,
    "lr_scheduler_type": "constant",
    "report_to": [],
    "bf16": False,
    "gradient_checkpointing": False,
    "use_cpu": True,
    "logging_steps": 1,
    "save_strategy": "no",
    "disable_tqdm": True,
}


def make_trainer(path: Path, branching: Any = "arpo", kind: Any = TreeGRPOTrainer, **changed: Any) -> Any:
    """A trainer of the small model on the rooms; `changed` are arguments of GRPOConfig, or of the trainer."""
    names = ("reward_funcs", "tools", "train_dataset", "eval_dataset", "model", "peft_config")
    own = {name: changed.pop(name) for name in names if name in changed}
    model, tokenizer = doors_model()
    arguments = {"model": model, "reward_funcs": right_doors, "tools": [open_door], "train_dataset": doors_dataset()}
    if issubclass(kind, TreeGRPOTrainer):
        own["branching"] = branching
    return kind(
        processing_class=tokenizer,
        args=GRPOConfig(output_dir=str(path), **{**SMALL, **changed}),
        **{**arguments, **own},
    )


def batch_of(trainer: Any, rows: int = ROWS) -> dict[str, Any]:
    """What TRL would train on: the scored batch of the first rooms."""
    dataset = trainer.train_dataset
    inputs = [dict(dataset[index]) for index in range(rows // GROUP) for _ in range(GROUP)]
    trainer.model.train()
    return trainer._generate_and_score_completions(inputs)  # type: ignore[no-any-return]


def gradients(model: Any) -> dict[str, torch.Tensor]:
    """The gradients of a model, taken from it."""
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    return found


def trl_gradients(trainer: Any, batch: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The gradients of TRL's loss."""
    trainer.current_gradient_accumulation_steps = 1
    trainer.compute_loss(trainer.model, batch).backward()
    return gradients(trainer.model)


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """The largest difference between two sets of gradients, relative to the largest entry."""
    assert a.keys() == b.keys()
    largest = max(float(value.abs().max()) for value in b.values())
    assert largest > 1e-4
    return max(float((a[name] - b[name]).abs().max()) for name in a) / largest


def uneven(completions: Sequence[Any], **_: Any) -> list[float]:
    """Different rewards for different first and last doors, so that most groups are informative."""
    return [
        0.3 * len(completion) + sum(0.7 ** (1 + DOORS.index(door)) for door in DOORS if door in str(completion[0]))
        for completion in completions
    ]


def sometimes(completions: Sequence[Any], **_: Any) -> list[float | None]:
    """`uneven`, but nothing for every fifth completion: these are masked."""
    return [None if number % 5 == 2 else reward for number, reward in enumerate(uneven(completions))]


def one_room(completions: Sequence[Any], doors: Sequence[Any], **_: Any) -> list[float]:
    """`uneven`, but nothing in the second room."""
    return [0.0 if own == ["blue", "red"] else r for own, r in zip(doors, uneven(completions), strict=True)]


PRESETS = {  # name -> settings of the loss that GRPOConfig gets
    "arpo": None,
    "arpo-hard": None,
    "arpo-always": None,
    "arpo-paper": None,
    "tree-grpo": None,
    "tempo": None,
    "arpo+": None,
    "branpo": None,
    "trace": None,
    "dr-grpo": None,
    "rloo": None,
    "gspo": None,
    "cispo": None,
    "aepo": "arpo",  # TRL lacks clip_keeps_gradient, which says nothing at ratio 1
    "at2po": "arpo",  # TRL has no ratio of turns, which is 1
}


@pytest.mark.slow
@pytest.mark.parametrize("reward", [uneven, sometimes, one_room])
@pytest.mark.parametrize("preset", PRESETS)
def test_the_gradient_is_that_of_arpo_for_the_same_trees(preset: str, reward: Any, tmp_path: Path) -> None:
    loss_of = PRESETS[preset] or preset
    arguments = {**loss_arguments(loss_of), "beta": 0.0, "scale_rewards": "group"}
    trainer = make_trainer(tmp_path, preset, reward_funcs=reward, **arguments)
    found = trl_gradients(trainer, batch_of(trainer))
    config = load_config(None, arguments={"preset": preset})
    loss = load_config(None, arguments={"preset": loss_of}).loss
    batch = build_batch(trainer.trees, loss, 160, entropy_weight=config.advantage.entropy_weight)
    forward_backward(trainer.model, batch, loss, 1.0, 4096)
    assert distance(found, gradients(trainer.model)) < 2e-5
    used = [sum(scored.mask) for scored in trainer.trees]
    if reward is uneven and preset not in ("arpo+", "branpo"):
        assert used == [GROUP, GROUP]
    elif preset == "arpo+" and reward is one_room:
        assert used == [GROUP, GROUP // 2]  # the second tree was not informative, and not filled
    elif reward is sometimes:
        assert sum(used) < 2 * GROUP


@pytest.mark.slow
def test_the_gradient_is_that_of_arpo_where_ratios_are_clipped(tmp_path: Path) -> None:
    arguments = loss_arguments("arpo")
    trainer = make_trainer(tmp_path, "arpo-hard", reward_funcs=uneven, num_iterations=2, **arguments)
    batch = batch_of(trainer)
    assert batch["old_per_token_logps"].shape == batch["completion_ids"].shape
    old = {
        (number, index): node.logprobs
        for number, scored in enumerate(trainer.trees)
        for index, node in enumerate(scored.tree.nodes)
        if node.kind is Kind.MODEL
    }
    with torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        for parameter in trainer.model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    found = trl_gradients(trainer, batch)
    assert trainer._metrics["train"]["clip_ratio/region_mean"][-1] > 0.03
    plain_loss(trainer.model, trainer.trees, Loss(), 1.0, 160, old).backward()
    assert distance(found, gradients(trainer.model)) < 1e-3  # old log-probs of the engine, in float32


@pytest.mark.slow
def test_rows_of_the_batch_are_the_trajectories_of_the_trees(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, "arpo-always", reward_funcs=uneven)
    batch = batch_of(trainer)
    assert [len(scored.tree.leaves) for scored in trainer.trees] == [GROUP, GROUP]
    assert sum(scored.tree.branch_points for scored in trainer.trees) > 1
    trajectories = [
        (trajectory, credit)
        for scored in trainer.trees
        for trajectory, credit in zip(scored.tree.trajectories, scored.credits, strict=True)
    ]
    for row, (trajectory, credit) in enumerate(trajectories):
        prompt = batch["prompt_ids"][row][batch["prompt_mask"][row] == 1].tolist()
        completion = batch["completion_ids"][row][batch["completion_mask"][row] == 1].tolist()
        assert (*prompt, *completion) == trajectory.tokens
        trained = (batch["completion_mask"] * batch["tool_mask"])[row] == 1
        sampled = [node for node in trajectory.nodes if node.kind is Kind.MODEL]
        assert batch["completion_ids"][row][trained].tolist() == [token for node in sampled for token in node.tokens]
        expected = [credit.by_node[i] for i in trajectory.indices if trajectory.tree.nodes[i].kind is Kind.MODEL]
        by_token = [a for a, node in zip(expected, sampled, strict=True) for _ in node.tokens]
        assert batch["advantages"][row][trained].tolist() == pytest.approx(by_token)
        assert batch["advantages"][row][~trained].abs().sum() == 0
    assert int(batch["num_items_in_batch"]) == sum(each.completion_tokens for each, _ in trajectories)
    assert list(trainer._logs["advantages"]) == [credit.advantage for _, credit in trajectories]


def greedy(trainer: Any) -> dict[str, Any]:
    """A batch, and what the reward function was called with."""
    return batch_of(trainer)


@pytest.mark.slow
def test_without_branches_batches_and_calls_of_reward_functions_are_those_of_trl(tmp_path: Path) -> None:
    calls: list[dict[str, Any]] = []

    def record(**named: Any) -> list[float]:
        calls.append({name: named[name] for name in ("prompts", "completions", "completion_ids", "doors")})
        assert named["trainer_state"].global_step == 0 and callable(named["log_extra"])
        return uneven(named["completions"])

    batches = []
    for kind in (GRPOTrainer, TreeGRPOTrainer):
        trainer = make_trainer(tmp_path, "grpo", kind, reward_funcs=record, top_k=1)
        batches.append(batch_of(trainer))
        assert trainer._metrics["train"]["tools/call_frequency"] == [2.0]
        calls[-1]["metrics"] = {name: trainer._metrics["train"][name] for name in ("reward", "completions/mean_length")}
    theirs, ours = calls
    assert ours == theirs and len(ours["completions"]) == ROWS and len(ours["completions"][0]) == 5
    for name in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "tool_mask", "num_items_in_batch"):
        assert torch.equal(batches[0][name], batches[1][name]), name


@pytest.mark.slow
def test_never_branching_is_a_plain_grpo_trainer(tmp_path: Path) -> None:
    weights, histories = [], []
    for kind in (GRPOTrainer, TreeGRPOTrainer):
        trainer = make_trainer(tmp_path, "never", kind, max_steps=2)
        trainer.train()
        weights.append(dict(trainer.model.state_dict()))
        histories.append([{k: v for k, v in one.items() if "time" not in k} for one in trainer.state.log_history[:-1]])
    assert histories[0] == histories[1] and len(histories[0]) == 2
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


FAST = {"per_device_train_batch_size": 64, "num_generations": 16, "learning_rate": 2e-3, "adam_beta2": 0.95}


@pytest.mark.slow
def test_a_small_model_learns(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, "arpo", max_steps=30, **FAST, **loss_arguments("arpo"))
    trainer.train()
    history = [record for record in trainer.state.log_history if "reward" in record]
    rewards = [record["reward"] for record in history]
    assert sum(rewards[:4]) / 4 < 0.36
    assert sum(rewards[-4:]) / 4 > 0.5
    assert sum(record["tree/branches"] for record in history) > 200
    assert sum(record["tree/tool_calls"] for record in history) < 2 * 64 * 30 - 100  # shared calls are made once


@pytest.mark.slow
def test_the_same_run_gives_the_same_numbers_and_another_seed_others(tmp_path: Path) -> None:
    def train(seed: int) -> list[float]:
        trainer = make_trainer(tmp_path, "arpo", max_steps=3, seed=seed)
        trainer.train()
        return [record["grad_norm"] for record in trainer.state.log_history if "grad_norm" in record]

    first = train(1)
    assert train(1) == first != train(2)


def test_sampling_uses_the_weights_of_each_step(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, "arpo", max_steps=1)
    first = batch_of(trainer)
    with torch.no_grad():
        trainer.model.lm_head.weight.zero_()
    batch_of(trainer)
    nodes = [node for scored in trainer.trees for node in scored.tree.nodes if node.kind is Kind.MODEL]
    uniform = float(torch.tensor(1 / trainer.model.config.vocab_size).log())
    assert first["advantages"].shape == first["completion_ids"].shape
    assert all(logprob == pytest.approx(uniform, abs=1e-4) for node in nodes for logprob in node.logprobs)
