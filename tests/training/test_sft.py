"""Supervised fine-tuning: it teaches the format, trains on the model's own tokens only, and resumes to the last bit."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import warm_process
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.nn import functional
from traces import formats, sum_row, sums_config, write_model, write_rows

import arpo.training.loop
import arpo.training.sft
from arpo.agent.traces import read_traces
from arpo.cli.display import ConsoleReporter
from arpo.config.schema import Config, Model
from arpo.errors import ArpoError
from arpo.evaluation.evaluate import Evaluation
from arpo.models.load import load_model
from arpo.models.resolve import load_policy
from arpo.runs.run_dir import open_run_dir as read_run
from arpo.trainer.trainer import Trainer
from arpo.training.context import open_context
from arpo.training.loop import evaluate_policy
from arpo.training.sampler import LocalSampler
from arpo.training.sft import objective, open_sft, plan_steps, train_sft
from arpo.training.sft_examples import SFTExample, encode_trace
from arpo.types import Kind

SUMS = [(1, 2), (13, 4), (5, 60), (7, 7), (20, 22), (9, 81)]
FAST = ("sft.lr=1e-2", "sft.batch_tokens=70", "sft.epochs=2", "sft.warmup_steps=3", "run.checkpoint_every=2")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model and six traces, of which two fit into a step of `FAST`."""
    write_model(tmp_path / "model")
    write_rows(tmp_path / "traces.jsonl", [sum_row(a, b) for a, b in SUMS])
    return tmp_path


def run_to_the_end(config: Config, resume: bool = False) -> int:
    with open_sft(config, resume) as run:
        return asyncio.run(train_sft(run))


def with_model(config: Config, **update: Any) -> Config:
    return config.model_copy(update={"model": config.model.model_copy(update=update)})


def examples_of(folder: Path, rows: Sequence[dict[str, Any]]) -> tuple[Any, list[SFTExample]]:
    model, tokenizer = load_model(Model(path=str(folder / "model"), device="cpu"))
    traces = read_traces(str(write_rows(folder / "some.jsonl", rows)), formats()).traces
    return model, [encode_trace(trace, tokenizer, formats(), 512) for trace in traces]


def gradients(
    model: Any, examples: Sequence[SFTExample], config: Config
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """What one step would change the weights by, and its metrics."""
    trainer = Trainer(model, None, objective(config))
    found: dict[str, torch.Tensor] = {}

    def step(lr: float, max_grad_norm: float) -> float:
        found.update({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        model.zero_grad()
        return 1.0

    trainer.optimizer.step = step  # type: ignore[method-assign]
    metrics = trainer.update([example.scored_tree() for example in examples])
    return found, metrics


def plain_gradients(model: Any, examples: Sequence[SFTExample]) -> tuple[dict[str, torch.Tensor], float]:
    """The mean negative log-likelihood of the model's tokens, one trace at a time, straight from the definition."""
    own = sum(len(ids) for example in examples for kind, ids in example.segments if kind is Kind.MODEL)
    total = 0.0
    for example in examples:
        tokens = torch.tensor([token for _, ids in example.segments for token in ids])
        mine = torch.tensor([kind is Kind.MODEL for kind, ids in example.segments for _ in ids])
        logits = model(tokens[None]).logits[0]
        loss = functional.cross_entropy(logits[:-1][mine[1:]], tokens[1:][mine[1:]], reduction="sum") / own
        loss.backward()
        total += loss.item()
    found = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    return found, total


def evaluate(config: Config) -> Evaluation:
    context = open_context(config)
    return asyncio.run(evaluate_policy(LocalSampler(context), context.tasks, config))


@pytest.mark.slow
def test_it_teaches_how_to_call_tools(tmp_path: Path) -> None:
    """From no path in the right format to nearly all, on held-out questions; each answer comes after a real call."""
    write_model(tmp_path / "model", hidden=64, layers=2)
    pairs = [(a, b) for a in range(100) for b in range(100)]
    random.Random(0).shuffle(pairs)
    write_rows(tmp_path / "traces.jsonl", [sum_row(a, b) for a, b in pairs[:1000]])
    held_out = [{"question": f"What is {a} plus {b}?", "answer": str(a + b)} for a, b in pairs[1000:1060]]
    questions = write_rows(tmp_path / "test.jsonl", held_out)
    config = sums_config(
        tmp_path, "sft.lr=5e-3", "sft.batch_tokens=2000", "sft.epochs=8", "sft.warmup_steps=5",
        "run.checkpoint_every=1000",
        f"data.train={questions}", f"data.test={questions}",
    )  # fmt: skip
    before = evaluate(config)
    steps = run_to_the_end(config)
    after = evaluate(with_model(config, path=str(tmp_path / "run")))
    assert before.format_rate < 0.05
    assert after.format_rate > 0.95
    assert after.tool_calls > 0.95
    rows = read_run(tmp_path / "run").read_metrics()
    assert [row["step"] for row in rows] == [*range(1, steps + 1)]
    assert rows[0]["loss"] > 5 > 1 > rows[-1]["loss"]
    assert rows[-1]["epoch"] == 8


@pytest.mark.parametrize(
    "more",
    [(), ("train.max_microbatch_tokens=50",), ("train.max_microbatch_tokens=8", "train.gradient_checkpointing=true")],
)
def test_packed_traces_have_the_gradient_of_each_by_itself(folder: Path, more: tuple[str, ...]) -> None:
    """However they are packed and cut, and whatever the settings of reinforcement learning are."""
    rows = [sum_row(a, b) for a, b in SUMS]
    rows[2]["messages"][1]["content"] = "<think>Add. So add. Add!</think>"  # traces weigh by their tokens
    model, examples = examples_of(folder, rows)
    others = (
        "rollout.temperature=0.5",
        "loss.kl_coef=1",
        "loss.kind=gspo",
        "train.minibatches=3",
        "train.epochs=2",
        "loss.entropy_coef=0.1",
    )
    config = sums_config(folder, *others, *more)
    expected, loss = plain_gradients(model, examples)
    found, metrics = gradients(model, examples, config)
    assert metrics["loss"] == pytest.approx(loss, rel=1e-5)
    assert metrics["computed_tokens"] == sum(example.num_tokens for example in examples)
    assert metrics["trained_tokens"] == sum(len(i) for x in examples for kind, i in x.segments if kind is Kind.MODEL)
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-6)


def test_results_and_prompts_teach_nothing_but_through_attention(folder: Path) -> None:
    """Where attention passes nothing on, another result and another question change no gradient at all."""

    def row(question: str, result: str) -> dict[str, Any]:
        changed = sum_row(1, 2)
        changed["messages"][0]["content"] = question
        changed["messages"][2]["content"] = result
        return changed

    texts = [("What is 1 plus 2?", "3"), ("What is 1 plus 2?", "77 plus 8"), ("is 5 What?", "3")]
    model, examples = examples_of(folder, [row(*text) for text in texts])
    seeing = [gradients(model, [example], sums_config(folder))[0]["model.embed_tokens.weight"] for example in examples]
    assert not torch.equal(seeing[0], seeing[1]) and not torch.equal(seeing[0], seeing[2])
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
    blind = [gradients(model, [example], sums_config(folder)) for example in examples]
    assert blind[0][1]["loss"] == blind[1][1]["loss"] == blind[2][1]["loss"]
    for other in blind[1:]:
        for name in blind[0][0].keys() - {"model.layers.0.self_attn.o_proj.weight"}:
            torch.testing.assert_close(other[0][name], blind[0][0][name], rtol=1e-5, atol=1e-8)


@pytest.mark.slow
def test_a_run_has_the_settings_of_its_section(folder: Path) -> None:
    """The loss is that of the definition, not that of `[loss]`; the learning rate rises in `sft.warmup_steps` steps."""
    for number, more in enumerate(("sft.warmup_steps=0", "sft.warmup_steps=1000", "sft.lr=1e-5")):
        run_to_the_end(sums_config(folder, *FAST, "rollout.temperature=0.5", more, f"run.dir={folder / str(number)}"))
    rows = [what_it_left(folder / str(number))[1] for number in range(3)]
    with open_sft(sums_config(folder, *FAST, f"run.dir={folder / 'other'}")) as run:
        model, examples = run.checkpoints.trainer.model, [run.examples[n] for n in run.batches[0][1]]
    assert rows[0][0]["loss"] == pytest.approx(plain_gradients(model, examples)[1], rel=1e-5)
    assert rows[0][0]["traces"] == len(examples)
    assert rows[0][-1]["loss"] < 0.9 * rows[0][0]["loss"]
    for slow in rows[1:]:
        assert slow[0] == rows[0][0]
        assert slow[-1]["loss"] > 0.95 * slow[0]["loss"]


def what_it_left(directory: Path) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
    log = read_run(directory)
    _, checkpoint = log.latest_checkpoint() or (0, directory)
    metrics = [{k: v for k, v in row.items() if "seconds" not in k} for row in log.read_metrics()]
    files = sorted((checkpoint / "model").glob("*.safetensors"))
    return {**load_file(files[0]), **load_file(checkpoint / "optimizer.safetensors")}, metrics


def assert_same(a: Path, b: Path) -> None:
    (weights_a, metrics_a), (weights_b, metrics_b) = what_it_left(a), what_it_left(b)
    assert metrics_a == metrics_b
    assert weights_a.keys() == weights_b.keys()
    assert all(torch.equal(weights_a[name], weights_b[name]) for name in weights_a)


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("train.lora_rank=4",), ("model.dtype=bfloat16",)])
def test_resumed_equals_not_stopped_to_the_last_bit(folder: Path, more: tuple[str, ...]) -> None:
    straight = sums_config(folder, *FAST, *more)
    steps = run_to_the_end(straight)
    assert steps == 8  # 4 an epoch
    run_to_the_end(sums_config(folder, *FAST, *more, f"run.dir={folder / 'halves'}", "sft.epochs=1"))
    run_to_the_end(sums_config(folder, *FAST, *more, f"run.dir={folder / 'halves'}"), resume=True)
    assert_same(folder / "run", folder / "halves")
    assert what_it_left(folder / "run")[1][-1]["loss"] < what_it_left(folder / "run")[1][0]["loss"]


@pytest.mark.parametrize(("every", "last"), [(100, 3), (2, 2)])  # the second was saved already
def test_stopping_saves_every_finished_step(
    folder: Path, monkeypatch: pytest.MonkeyPatch, every: int, last: int
) -> None:
    run_to_the_end(sums_config(folder, *FAST))
    step = arpo.training.sft._train_step
    stopped = sums_config(folder, *FAST, f"run.dir={folder / 'stopped'}", f"run.checkpoint_every={every}")

    def stop_in_the_last_step(run: arpo.training.sft.SFTRun, number: int) -> dict[str, float]:
        if number == last - 1:
            asyncio.current_task().cancel()  # type: ignore[union-attr]
        return step(run, number)

    with monkeypatch.context() as patch:
        patch.setattr(arpo.training.sft, "_train_step", stop_in_the_last_step)
        with pytest.raises(asyncio.CancelledError):
            run_to_the_end(stopped)
    assert (read_run(folder / "stopped").latest_checkpoint() or (0,))[0] == last
    run_to_the_end(stopped, resume=True)
    assert_same(folder / "run", folder / "stopped")


@pytest.mark.slow
def test_resuming_refuses_other_settings_and_the_other_command(folder: Path) -> None:
    config = sums_config(folder, *FAST, "sft.epochs=1")
    run_to_the_end(config)
    with (
        pytest.raises(ArpoError, match=r"sft\.warmup_steps: 3 -> 7"),
        open_sft(sums_config(folder, *FAST, "sft.warmup_steps=7", "sft.lr=0.02"), True),
    ):
        raise AssertionError("it was opened")
    questions = write_rows(folder / "questions.jsonl", [{"question": "What is 1 plus 2?", "answer": "3"}])
    other = sums_config(
        folder, *FAST, "sft.epochs=1", f"run.dir={folder / 'rl'}", f"data.train={questions}", "train.steps=1"
    )
    with arpo.training.loop.open_training(other) as run:
        asyncio.run(arpo.training.loop.train(run))
    for opened, wrong in ((open_sft, other), (arpo.training.loop.open_training, config)):
        with pytest.raises(ArpoError, match="begun by another command") as refused, opened(wrong, True):
            raise AssertionError("it was opened")
    assert run_to_the_end(config, resume=True) == 4 and refused  # the lock was given back, and there is nothing to do
    with pytest.raises(ArpoError, match="already holds a run"), open_sft(config):
        raise AssertionError("it was opened")


def test_bad_rows_are_refused_or_skipped_and_leave_no_run_behind(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long = sum_row(8, 9)
    long["messages"][1]["content"] = "<think>" + "Add. " * 200 + "</think>"
    rows = [sum_row(1, 2), {"question": "q", "text": "3"}, sum_row(3, 4), {}]
    write_rows(folder / "traces.jsonl", rows)
    with pytest.raises(ArpoError) as refused, open_sft(sums_config(folder)):
        raise AssertionError("it was opened")
    assert [line.partition(": ")[0] for line in str(refused.value).splitlines()[:2]] == [
        f"{folder / 'traces.jsonl'}, line 2",
        f"{folder / 'traces.jsonl'}, line 4",
    ]
    write_rows(folder / "traces.jsonl", [*rows, long])
    with open_sft(sums_config(folder, "data.bad_rows=skip"), reporter=ConsoleReporter()) as run:
        assert [example.task.id for example in run.examples] == ["1+2", "3+4"]
    said = capsys.readouterr().out
    assert "3 of 5 traces are left out" in said
    assert "8+9: has 6" in said and "the model's context holds 256" in said
    write_rows(folder / "traces.jsonl", [sum_row(1, 2), long])
    with pytest.raises(ArpoError, match="8\\+9: has"), open_sft(sums_config(folder, f"run.dir={folder / 'other'}")):
        raise AssertionError("it was opened")
    assert not (folder / "other").exists()


@given(
    counts=st.lists(st.integers(1, 50), min_size=1, max_size=40),
    batch=st.integers(1, 200),
    epochs=st.integers(1, 3),
    seed=st.integers(0, 9),
)
def test_every_epoch_takes_every_trace_once_in_batches_of_even_size(
    counts: list[int], batch: int, epochs: int, seed: int
) -> None:
    steps = plan_steps(counts, batch, epochs, seed)
    assert all(numbers for _, numbers in steps)
    for epoch in range(epochs):
        own = [numbers for done, numbers in steps if epoch < done <= epoch + 1]
        assert sorted(number for numbers in own for number in numbers) == [*range(len(counts))]
        assert len(own) <= -(-sum(counts) // batch)
        assert all(sum(counts[n] for n in numbers) < batch + max(counts) for numbers in own)
    assert [done for done, _ in steps] == sorted(done for done, _ in steps)
    assert steps[-1][0] == epochs
    assert plan_steps(counts, batch, epochs + 1, seed)[: len(steps)] == steps


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    first, second = (numbers for _, numbers in plan_steps([1] * 30, 30, 2, seed=0))
    assert first != second != [*range(30)]
    assert plan_steps([1] * 30, 30, 1, seed=1)[0][1] != first


@pytest.mark.slow
def test_a_run_is_a_model_for_another_one(folder: Path) -> None:
    """Its last checkpoint; for an adapter, on the base that it was trained on, merged or trained further."""
    plain, lora = (
        sums_config(folder, *FAST),
        sums_config(folder, *FAST, "train.lora_rank=4", f"run.dir={folder / 'lora'}"),
    )
    for config in (plain, lora):
        run_to_the_end(config)

    def weights(config: Config) -> dict[str, torch.Tensor]:
        model, _ = load_policy(config)
        return {name: p.detach() for name, p in model.named_parameters()}

    name = "model.layers.0.mlp.up_proj.weight"
    begun = weights(plain)[name]
    saved = load_file(folder / "run" / "checkpoints" / "step_000008" / "model" / "model.safetensors")
    assert torch.equal(weights(with_model(plain, path=str(folder / "run")))[name], saved[name])
    merged = weights(with_model(plain, path=str(folder / "lora")))[name]
    assert not torch.equal(merged, begun)
    further = weights(with_model(lora, path=str(folder / "lora")))
    assert torch.equal(further["model.layers.0.mlp.up_proj.base_layer.weight"], begun)
    a, b = (further[f"model.layers.0.mlp.up_proj.lora_{x}.default.weight"] for x in "AB")
    torch.testing.assert_close(begun + 8 * b @ a, merged)  # lora_alpha / lora_rank
    with pytest.raises(ArpoError, match="only one can be loaded"):
        weights(with_model(plain, path=str(folder / "lora"), adapter="x"))
    (folder / "empty").mkdir()
    (folder / "empty" / "config.json").write_text(json.dumps(plain.resolved()))
    with pytest.raises(ArpoError, match="has no checkpoint yet"):
        weights(with_model(plain, path=str(folder / "empty")))


@pytest.mark.slow
def test_ctrl_c_ends_cleanly_with_a_checkpoint(folder: Path) -> None:
    config = folder / "config.json"
    config.write_text(
        json.dumps(sums_config(folder, *FAST, "sft.epochs=1000", "run.checkpoint_every=100000").resolved())
    )
    process = warm_process.start(warm_process.CLI, "sft", str(config), output=folder / "output.txt")
    try:
        metrics = folder / "run" / "metrics.jsonl"
        while process.is_alive() and not (metrics.exists() and metrics.read_text()):
            time.sleep(0.02)
        os.kill(process.pid or 0, signal.SIGINT)
        process.join()
    finally:
        process.kill()
    said = (folder / "output.txt").read_text()
    assert process.exitcode == 130
    assert "Traceback" not in said
    assert "--resume" in said
    log = read_run(folder / "run")
    assert (log.latest_checkpoint() or (0,))[0] == log.read_metrics()[-1]["step"] >= 1
