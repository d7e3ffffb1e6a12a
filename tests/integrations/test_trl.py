"""TreeGRPOTrainer with the real TRL: gradients against arpo's own, batches against TRL's tool loop, and learning."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import trl_doors
import trl_ranks
from plain import plain_loss
from trl import GRPOConfig, GRPOTrainer
from trl_doors import DOORS, doors_dataset, doors_model, open_door, right_doors

import arpo
from arpo.algorithm.batch import build_batch
from arpo.config.algorithm import Loss
from arpo.config.loading import load_config
from arpo.engine.local.engine import LocalEngine
from arpo.errors import ArpoError
from arpo.integrations.trajectories import read_trajectories, write_trajectories
from arpo.integrations.trl import TreeGRPOTrainer, loss_arguments
from arpo.trainer.forward_backward import forward_backward
from arpo.types import Kind

pytestmark = pytest.mark.slow  # the small model is trained first
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


def test_never_branching_is_a_plain_grpo_trainer(tmp_path: Path) -> None:
    weights, histories = [], []
    for kind in (GRPOTrainer, TreeGRPOTrainer):
        trainer = make_trainer(tmp_path, "never", kind, max_steps=2)
        trainer.train()
        weights.append(dict(trainer.model.state_dict()))
        histories.append([{k: v for k, v in one.items() if "time" not in k} for one in trainer.state.log_history[:-1]])
    assert histories[0] == histories[1] and len(histories[0]) == 2
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


FAST = {"per_device_train_batch_size": 64, "num_generations": 16, "learning_rate": 1e-3, "adam_beta2": 0.95}
WARM = {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 5}


def test_a_small_model_learns(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, "arpo", max_steps=24, **FAST, **WARM, **loss_arguments("arpo"))
    trainer.train()
    history = [record for record in trainer.state.log_history if "reward" in record]
    rewards = [record["reward"] for record in history]
    assert sum(rewards[-6:]) / 6 > sum(rewards[:6]) / 6 + 0.05  # 0.10 to 0.16 in runs with four seeds
    assert sum(record["tree/branches"] for record in history) > 50
    assert sum(record["tree/tool_calls"] for record in history) < 2 * 64 * 24 - 50  # shared calls are made once


def test_the_same_run_gives_the_same_numbers_and_another_seed_others(tmp_path: Path) -> None:
    def train(seed: int) -> list[float]:
        trainer = make_trainer(tmp_path, "arpo", max_steps=2, seed=seed)
        trainer.train()
        return [record["grad_norm"] for record in trainer.state.log_history if "grad_norm" in record]

    first = train(1)
    assert train(1) == first != train(2)


def sampled_and_computed(trainer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The log-probs of a new batch as they were sampled, and as the trained model computes them."""
    batch = batch_of(trainer)
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    with torch.no_grad():
        computed, _, _ = trainer._get_per_token_logps_and_entropies(
            trainer.model, ids, mask, batch["completion_ids"].shape[1]
        )
    trained = (batch["completion_mask"] * batch["tool_mask"]) == 1
    return batch["sampling_per_token_logps"][trained], computed[trained]


def test_sampling_uses_the_weights_of_each_step(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, "arpo", temperature=0.8)
    for _ in range(3):
        sampled, computed = sampled_and_computed(trainer)
        assert torch.allclose(sampled, computed, atol=1e-4)
        with torch.no_grad():
            for parameter in trainer.model.parameters():
                parameter *= 1.1


def test_tools_are_called_as_trl_calls_them(tmp_path: Path) -> None:
    threads, loops = set[int](), set[int]()

    def locked(colour: str) -> str:
        threads.add(threading.get_ident())
        raise LookupError(f"{colour} is locked")

    async def waiting(colour: str) -> str:
        loops.add(id(asyncio.get_running_loop()))
        await asyncio.sleep(0)
        return f"behind {colour}"

    for function in (locked, waiting):  # the same description, so that prompts are those that the model knows
        function.__name__, function.__doc__ = open_door.__name__, open_door.__doc__
    trainer = make_trainer(tmp_path, tools=[locked])
    batch_of(trainer)
    results = [node.result for scored in trainer.trees for node in scored.tree.nodes if node.result is not None]
    errors = {str({"error": f"{door} is locked"}) for door in DOORS}
    assert results and {result.text for result in results if result.attempts} <= errors
    assert threads == {threading.get_ident()}
    assert trainer._metrics["train"]["tools/failure_frequency"] == [1.0]
    trainer = make_trainer(tmp_path, tools=[waiting])
    batch_of(trainer)
    assert loops == {id(trainer.async_loop)}
    assert trainer._metrics["train"]["tools/failure_frequency"][0] < 0.2


def test_sampling_works_where_an_event_loop_runs(tmp_path: Path) -> None:
    async def cell() -> Any:
        return batch_of(make_trainer(tmp_path))

    plain, notebook = batch_of(make_trainer(tmp_path)), asyncio.run(cell())
    assert torch.equal(plain["completion_ids"], notebook["completion_ids"])


@pytest.mark.parametrize("preset", ["arpo-always", "aepo", "arpo+"])
def test_evaluation_does_not_branch(preset: str, tmp_path: Path) -> None:
    trainer = make_trainer(
        tmp_path, preset, eval_dataset=doors_dataset(), num_generations_eval=5, per_device_eval_batch_size=20
    )
    metrics = trainer.evaluate()
    assert metrics["eval_tree/branches"] == 0
    assert [len(scored.tree.leaves) for scored in trainer.trees] == [5, 5, 5, 5]
    assert [sum(node.parent == 0 for node in scored.tree.nodes) for scored in trainer.trees] == [5, 5, 5, 5]
    assert 0 <= metrics["eval_reward"] <= 1
    assert trainer.model.training is False


def test_a_reward_of_several_functions_is_their_weighted_sum(tmp_path: Path) -> None:
    def one(completions: Sequence[Any], **_: Any) -> list[float]:
        return [1.0] * len(completions)

    async def two(completions: Sequence[Any], **_: Any) -> list[float | None]:
        return [None if len(completion) < 5 else 2.0 * number for number, completion in enumerate(completions)]

    trainer = make_trainer(tmp_path, reward_funcs=[one, two], reward_weights=[0.5, 0.25])
    batch_of(trainer)
    found = [reward.total for scored in trainer.trees for reward in scored.rewards]
    nodes = [len(each.nodes) for scored in trainer.trees for each in scored.tree.trajectories]
    assert found == [0.5 if count < 6 else 0.5 + 0.5 * number for number, count in enumerate(nodes)]


@pytest.mark.parametrize("preset", ["arpo", "trace", "arpo+"])
def test_what_reward_functions_log_is_in_the_row_of_its_completion(preset: str, tmp_path: Path) -> None:
    def logging_reward(completions: Sequence[Any], doors: Sequence[Any], log_extra: Any, **_: Any) -> list[float]:
        log_extra("seen", [str(completion) for completion in completions])
        return one_room(completions, doors)

    trainer = make_trainer(tmp_path, preset, reward_funcs=logging_reward)
    batch_of(trainer)
    shown, seen = list(trainer._logs["completion"]), list(trainer._logs["extra"]["seen"])
    filled = [number < len(scored.tree.leaves) for scored in trainer.trees for number in range(GROUP)]
    assert seen == [str(one) if real else None for one, real in zip(shown, filled, strict=True)]
    assert all(filled) == (preset != "arpo+")


def test_settings_may_be_a_file_or_a_configuration(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(
        'preset = "arpo"\n[branching]\npolicy = "always"\nbranch_width = 2\n[rollout]\nnum_initial = 1\n'
        '[advantage]\nscale = "none"\n'
    )
    for branching in (file, str(file), load_config(file)):
        trainer = make_trainer(tmp_path, branching, scale_rewards="none")
        batch_of(trainer)
        assert all(sum(node.parent == 0 for node in scored.tree.nodes) < GROUP for scored in trainer.trees)
        assert trainer._require_config().rollout.num_initial == 1
        assert trainer._require_config().advantage.scale == "none"


REFUSED = {
    "use_vllm": ({"use_vllm": True}, "trees are sampled by arpo's local engine; for vLLM use arpo.Trainer"),
    "min_p": ({"min_p": 0.1}, "min_p = 0.1: trees are sampled by arpo's local engine, which has temperature"),
    "generation": ({"generation_kwargs": {"num_beams": 2}}, "generation_kwargs"),
    "tools": ({"tools": []}, "trees branch after tool results; give tools"),
    "scale": ({"scale_rewards": "batch"}, 'scale_rewards = "batch": advantages are computed as the preset says'),
    "normalize": ({"multi_objective_aggregation": "normalize_then_sum"}, "a trajectory has one reward"),
    "preset": ({"branching": "arpoo"}, "arpoo"),
    "kind": ({"branching": 3}, "branching: got 3, expected the name of a preset"),
    "split": (
        {"eval_dataset": doors_dataset(), "per_device_eval_batch_size": 4},
        "its 4 rows per eval batch are no multiple of 6 generations: change per_device_eval_batch_size",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_followed_is_refused(name: str, tmp_path: Path) -> None:
    changed, message = REFUSED[name]
    with pytest.raises(ArpoError, match=message):
        make_trainer(tmp_path, **changed)


def test_prompts_must_be_conversations(tmp_path: Path) -> None:
    dataset = doors_dataset().map(lambda row: {"prompt": "Leave."}, remove_columns=["prompt"])
    with pytest.raises(ArpoError, match="needs conversations"):
        batch_of(make_trainer(tmp_path, train_dataset=dataset))


def test_another_loss_than_the_presets_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "arpo"):
        make_trainer(tmp_path, "arpo", **loss_arguments("arpo"))
        assert caplog.text == ""
        make_trainer(tmp_path, "gspo")
        assert "epsilon=0.003 (is 0.2)" in caplog.text
        assert "importance_sampling_level='sequence' (is 'token')" in caplog.text
        make_trainer(tmp_path, "aepo")
        assert "TRL's loss has nothing like loss.clip_keeps_gradient of this preset" in caplog.text


def test_the_loss_of_a_preset_as_arguments_of_grpo_config() -> None:
    assert loss_arguments("arpo") == {
        "loss_type": "dapo",
        "epsilon": 0.2,
        "epsilon_high": 0.2,
        "delta": 3.0,
        "importance_sampling_level": "token",
        "beta": 0.0,
        "entropy_coef": 0.0,
        "scale_rewards": "group",
    }
    assert loss_arguments("cispo") == {
        "loss_type": "cispo",
        "epsilon_high": 5.0,
        "beta": 0.0,
        "entropy_coef": 0.0,
        "scale_rewards": "group",
    }
    assert loss_arguments("gspo")["importance_sampling_level"] == "sequence"
    assert loss_arguments("dr-grpo")["scale_rewards"] == "none"
    assert loss_arguments("reinforce++")["beta"] == 0.001
    with pytest.raises(ArpoError, match=r'nothing like loss\.kind = "turn"'):
        loss_arguments("at2po")


def test_an_adapter_is_sampled_from_and_trained(tmp_path: Path) -> None:
    from peft import LoraConfig

    trainer = make_trainer(
        tmp_path, max_steps=2, peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"]), reward_funcs=uneven
    )
    with torch.no_grad():
        for name, parameter in trainer.model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.5)
    sampled, computed = sampled_and_computed(trainer)
    assert torch.allclose(sampled, computed, atol=1e-4)
    before = {name: value.clone() for name, value in trainer.model.named_parameters() if "lora_B" in name}
    trainer.train()
    assert all(not torch.equal(before[name], dict(trainer.model.named_parameters())[name]) for name in before)


def test_prompt_tuning_is_refused(tmp_path: Path) -> None:
    from peft import PromptTuningConfig

    tuned = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    with pytest.raises(ArpoError, match="peft_config: prompt tuning and prefix tuning"):
        make_trainer(tmp_path, peft_config=tuned)


def test_what_is_saved_is_a_plain_model_and_training_resumes_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    evaluated = {"eval_dataset": doors_dataset(), "eval_strategy": "steps", "eval_steps": 1, "num_generations_eval": 2}
    whole = make_trainer(tmp_path, max_steps=2, save_strategy="steps", save_steps=1, **evaluated)
    whole.train()
    assert "arpo" not in (tmp_path / "checkpoint-1" / "config.json").read_text()
    again = make_trainer(tmp_path, max_steps=2)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert [record["step"] for record in again.state.log_history if "reward" in record] == [1, 2]
    weights = whole.model.state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in again.model.state_dict().items())


def test_the_engine_has_room_for_a_training_batch_if_evaluation_is_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = []

    class Engine(LocalEngine):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            sizes.append((named["max_num_seqs"], named["kv_cache_tokens"]))
            super().__init__(*arguments, **named)

    monkeypatch.setattr("arpo.integrations.trl.LocalEngine", Engine)
    evaluated = {"eval_dataset": doors_dataset(), "per_device_eval_batch_size": 2, "num_generations_eval": 2}
    make_trainer(tmp_path, **evaluated).evaluate()
    monkeypatch.setattr("arpo.integrations.trl.default_kv_cache_tokens", lambda *_: 1024)  # what fits into memory
    make_trainer(tmp_path, **evaluated).evaluate()
    (first, tokens), limited = sizes
    assert (first, limited) == (ROWS, (ROWS, 1024)) and tokens > ROWS * SMALL["max_completion_length"]


def test_trees_of_a_batch_can_be_written_and_read(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    batch_of(trainer)
    write_trajectories(tmp_path / "trees.jsonl", trainer.trees)
    assert read_trajectories(tmp_path / "trees.jsonl") == trainer.trees


def test_two_processes_have_the_gradient_of_their_trees_together(tmp_path: Path) -> None:
    losses = ("arpo", "arpo-paper")  # a mean over tokens, and over trajectories
    folders = [Path(trl_ranks.__file__).parent, Path(trl_doors.__file__).parent, Path(arpo.__file__).parents[1]]
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", trl_ranks.__file__]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders)), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command, str(tmp_path), "arpo-hard", *losses], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for loss in losses:
        trees = [tree for rank in range(2) for tree in read_trajectories(tmp_path / loss / f"trees_{rank}.jsonl")]
        assert [sum(scored.mask) for scored in trees] == [5, 5]
        assert trees[0].tree.task.question != trees[1].tree.task.question
        model, _ = doors_model(steps=20)
        settings = load_config(None, arguments={"preset": loss}).loss
        forward_backward(model, build_batch(trees, settings, 100), settings, 1.0, 4096)
        saved = torch.load(tmp_path / loss / "grads.pt", weights_only=True)
        assert distance(saved, gradients(model)) < 2e-5
