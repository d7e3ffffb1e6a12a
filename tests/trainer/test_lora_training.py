"""Training a LoRA adapter or a bfloat16 model: what engine and trainer compute, what changes, what a run leaves."""

from __future__ import annotations

import asyncio
import io
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from models import FAMILIES, VOCAB, Letters, logits_of, make_model, plain_numbers
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from training_runs import config_for as any_config
from training_runs import context_of, even_share, with_reward

import arpo.builtin.cold_start
from arpo.cli.main import main
from arpo.cli.options import load_model_config
from arpo.config.loading import load_config
from arpo.config.schema import Config, Model, Train
from arpo.engine.local.engine import LocalEngine
from arpo.errors import ArpoError
from arpo.models.load import load_trainable
from arpo.models.lora import add_adapter, disable_adapter, has_adapter, load_adapter, merge_adapter, save_adapter
from arpo.models.resolve import checkpoint_model_settings
from arpo.runs.manifest import write_manifest
from arpo.runs.run_dir import open_run_dir as read_run
from arpo.trainer.optimizer import Optimizer
from arpo.training.context import RolloutContext, open_context
from arpo.training.loop import evaluate_policy, open_training, train
from arpo.training.sampler import LocalSampler
from arpo.types import Completion, RolloutTree, SamplingParams

ALL = Train().lora_targets
PROMPT = [5, 6, 7, 9] * 12
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def with_adapter(family: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    return add_adapter(make_model(family).to(dtype), 4, 8, ALL, seed)


def sampled(model: Any) -> Completion:
    engine = LocalEngine(model, Letters(), max_num_seqs=2, kv_cache_tokens=256, threaded=False)
    return asyncio.run(engine.generate(PROMPT, SamplingParams(max_tokens=15)))


def weights_of(model: Any, adapter: bool) -> dict[str, Tensor]:
    """Adapter or base, by the names that they have without any adapter."""
    found = ((name, p.detach().clone()) for name, p in model.named_parameters() if (".lora_" in name) == adapter)
    return {name.replace(".base_layer.", "."): weight for name, weight in found}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def train_sft(model: Any, steps: int = 4) -> Optimizer:
    """A few steps of imitation: enough for an adapter to matter."""
    optimizer = Optimizer(model, 1e-2, 0.0)
    for step in range(steps):
        tokens = torch.randint(VOCAB, (2, 9), generator=torch.Generator().manual_seed(step)).to(model.device)
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        optimizer.step(1e-2, 1.0)
    return optimizer


# The model.


@pytest.mark.parametrize("family", FAMILIES)
def test_a_fresh_adapter_changes_nothing(family: str) -> None:
    base, model = make_model(family), with_adapter(family)
    assert type(model) is type(base)
    assert has_adapter(model)
    assert not has_adapter(base)
    for name in ("config", "dtype", "device"):
        assert getattr(model, name) == getattr(base, name)
    assert torch.equal(logits_of(model, PROMPT), logits_of(base, PROMPT))
    assert sampled(model) == sampled(base)
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    layers = base.config.num_hidden_layers
    assert len(trainable) == layers * len(ALL) * 2
    assert all(".lora_" in name for name in trainable)
    assert not any(module.training for module in model.modules())


@pytest.mark.parametrize("family", FAMILIES)
def test_only_the_adapter_is_trained_and_the_engine_samples_from_both(family: str, tmp_path: Path) -> None:
    base, model = make_model(family), with_adapter(family)
    begun = weights_of(model, adapter=True)
    train_sft(model)
    assert same(weights_of(model, adapter=False), weights_of(base, adapter=False))
    now = weights_of(model, adapter=True)
    assert all(not torch.equal(now[name], begun[name]) for name in begun)
    save_adapter(model, tmp_path)
    merged = merge_adapter(make_model(family), tmp_path)
    done = sampled(model)
    logprobs, entropies, _ = plain_numbers(merged, PROMPT, done.tokens, 1.0)
    assert done.logprobs == pytest.approx(logprobs, abs=1e-4)
    assert done.entropies == pytest.approx(entropies, abs=1e-4)
    assert done.logprobs != pytest.approx(plain_numbers(base, PROMPT, done.tokens, 1.0)[0], abs=1e-2)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
def test_an_engine_that_was_there_before_follows_the_training(device: str) -> None:
    model = with_adapter("qwen3").to(device)
    engine = LocalEngine(model, Letters(), max_num_seqs=2, kv_cache_tokens=256, threaded=False)

    async def twice() -> tuple[Completion, Completion]:
        first = await engine.generate(PROMPT, SamplingParams(max_tokens=15))
        train_sft(model)
        await engine.sync_weights(1)
        return first, await engine.generate(PROMPT, SamplingParams(max_tokens=15))

    first, second = asyncio.run(twice())
    base = make_model("qwen3").to(device)
    assert first.logprobs == pytest.approx(plain_numbers(base, PROMPT, first.tokens, 1.0)[0], abs=1e-4)
    assert second.logprobs == pytest.approx(plain_numbers(model, PROMPT, second.tokens, 1.0)[0], abs=1e-4)
    assert second.logprobs != pytest.approx(plain_numbers(base, PROMPT, second.tokens, 1.0)[0], abs=1e-2)
    assert engine.stats()["graphs"] == (1 if device == "cuda" else 0)  # recorded once: the weights stayed in place


def test_in_bfloat16_adapter_and_masters() -> None:
    model = with_adapter("qwen2", torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    tensors = train_sft(model).tensors()
    masters = {key.removeprefix("master/") for key in tensors if key.startswith("master/")}
    assert masters == {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert all(".lora_" in name for name in masters)


def test_the_seed_decides_about_the_adapter_and_nothing_else_does() -> None:
    torch.manual_seed(1)
    first = weights_of(with_adapter("qwen2"), adapter=True)
    state = torch.get_rng_state()
    torch.manual_seed(2)
    again, other = (weights_of(with_adapter("qwen2", seed=seed), adapter=True) for seed in (0, 1))
    assert same(first, again)
    assert not same(first, other)
    torch.manual_seed(1)
    make_model("qwen2")
    assert torch.equal(torch.get_rng_state(), state)  # nobody else's random numbers were used up


def test_without_the_adapter_it_is_the_base() -> None:
    model = with_adapter("llama")
    train_sft(model)
    taught, base = logits_of(model, PROMPT), logits_of(make_model("llama"), PROMPT)
    with disable_adapter(model):
        assert torch.equal(logits_of(model, PROMPT), base)
    assert torch.equal(logits_of(model, PROMPT), taught)
    with pytest.raises(KeyError), disable_adapter(model):
        raise KeyError
    assert torch.equal(logits_of(model, PROMPT), taught)
    begun = weights_of(model, adapter=True)
    train_sft(model, 1)  # still the same things can be trained
    assert not same(weights_of(model, adapter=True), begun)
    assert same(weights_of(model, adapter=False), weights_of(make_model("llama"), adapter=False))


def test_layers_that_are_not_there() -> None:
    with pytest.raises(ArpoError) as error:
        add_adapter(make_model("qwen2"), 4, 8, ["q_proj", "c_attn"], 0)
    assert str(error.value) == (
        "train.lora_targets: the model has no layer 'c_attn'; it has q_proj, k_proj, v_proj, o_proj, gate_proj, "
        "up_proj, down_proj"
    )
    with pytest.raises(ArpoError, match="no layer 'lm_head'"):
        add_adapter(make_model("qwen2"), 4, 8, ["lm_head"], 0)
    some = add_adapter(make_model("qwen2"), 4, 8, ["q_proj", "up_proj"], 0)
    assert {name.split(".")[4] for name in weights_of(some, adapter=True)} == {"q_proj", "up_proj"}


def test_without_the_peft_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ArpoError, match=r"train\.lora_rank: an adapter needs .* pip install peft"):
        with_adapter("llama")


# Its files.


def test_peft_reads_what_was_saved(tmp_path: Path) -> None:
    model = with_adapter("smollm2")
    train_sft(model)
    save_adapter(model, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    theirs = PeftModel.from_pretrained(make_model("smollm2"), tmp_path).eval()
    assert torch.equal(logits_of(theirs, PROMPT), logits_of(model, PROMPT))
    ours = with_adapter("smollm2", seed=9)
    load_adapter(ours, tmp_path)
    assert same(weights_of(ours, adapter=True), weights_of(model, adapter=True))
    save_adapter(ours, tmp_path / "again")
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / name).read_bytes()


def test_what_peft_saved_can_be_trained_on(tmp_path: Path) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        config = LoraConfig(r=4, lora_alpha=8, target_modules=list(ALL), lora_dropout=0.1, init_lora_weights=False)
        theirs = get_peft_model(make_model("smollm2"), config).eval()
    theirs.save_pretrained(tmp_path)
    model = with_adapter("smollm2")
    load_adapter(model, tmp_path)
    assert torch.equal(logits_of(theirs, PROMPT), logits_of(model, PROMPT))
    begun = weights_of(model, adapter=True)
    train_sft(model)
    assert not same(weights_of(model, adapter=True), begun)


@pytest.mark.parametrize(
    ("made", "told"),
    [
        ({"r": 2}, "has r = 2, "),
        ({"lora_alpha": 9}, "has lora_alpha = 9, "),
        ({"target_modules": ["q_proj"]}, r"has target_modules = \['q_proj'\], "),
        ({"use_rslora": True}, "has use_rslora = True, "),
        ({"use_dora": True}, "has use_dora = True, "),
        ({"layers_to_transform": [0]}, r"has layers_to_transform = \[0\], "),
    ],
)
def test_an_adapter_of_another_make_is_not_trained_on(made: dict[str, Any], told: str, tmp_path: Path) -> None:
    config = LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": list(ALL), **made})
    get_peft_model(make_model("smollm2"), config).save_pretrained(tmp_path)
    model = with_adapter("smollm2")
    begun = weights_of(model, adapter=True)
    with pytest.raises(ArpoError, match=told):
        load_adapter(model, tmp_path)
    assert same(weights_of(model, adapter=True), begun)


def test_an_adapter_of_another_model_or_a_damaged_one(tmp_path: Path) -> None:
    save_adapter(with_adapter("llama"), tmp_path)
    with pytest.raises(ArpoError, match=r"does not fit model\.path.* only one of the two has .*layers\.2\."):
        load_adapter(with_adapter("smollm2"), tmp_path)
    with pytest.raises(ArpoError, match=r"does not fit model\.path.*k_proj.* is \(24, 4\), not \(12, 4\)"):
        load_adapter(with_adapter("llama-gqa"), tmp_path)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    save_file(dict(list(tensors.items())[1:]), tmp_path / "adapter_model.safetensors")
    with pytest.raises(ArpoError, match="only one of the two has"):
        load_adapter(with_adapter("llama"), tmp_path)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"\0" * 100)
    with pytest.raises(ArpoError, match="is damaged"):
        load_adapter(with_adapter("llama"), tmp_path)
    (tmp_path / "adapter_config.json").unlink()
    with pytest.raises(ArpoError, match="is not an adapter"):
        load_adapter(with_adapter("llama"), tmp_path)


# Runs.

SMALL = [
    "world.entities=60", "world.train_questions=12", "world.test_questions=4", "eval.questions=2", "train.batch_size=2",
    "train.steps=2", "rollout.num_trajectories=3", "rollout.max_tokens=20", "rollout.max_tool_calls=2", "train.lr=1e-3",
    "branching.rule=stochastic", "eval.temperature=1.0",
]  # fmt: skip
LORA = ("train.lora_rank=4", "train.lora_alpha=8", "train.weight_decay=0.1")
BF16 = ("model.dtype=bfloat16", "train.lr=1e-4", "train.minibatches=2", "train.warmup_steps=3")
KINDS = {"lora": LORA, "bfloat16": BF16, "both": (*BF16, *LORA)}


def config_for(model: Path, directory: Path, *more: str) -> Config:
    return any_config(model, directory, *SMALL, *more)


def evaluate(context: RolloutContext) -> list[RolloutTree]:
    result = asyncio.run(evaluate_policy(LocalSampler(context), context.tasks, context.config))
    return [scored.tree for scored in result.trees]


def nodes_of(trees: Any) -> list[Any]:
    return [[(n.kind, n.tokens, n.logprobs, n.entropies) for n in tree.nodes] for tree in trees]


def run_to_the_end(config: Config, resume: bool = False) -> list[Any]:
    """Trains; what a test of the trained model came to."""
    with open_training(config, resume) as run:
        run = with_reward(run)
        asyncio.run(train(run))
        return nodes_of(evaluate(context_of(run)))


def what_it_left(directory: Path) -> tuple[dict[str, Tensor], list[dict[str, Any]], list[Any], bytes]:
    """Model, optimizer, metrics and trees, without anything that a clock measured."""
    log = read_run(directory)
    _, checkpoint = log.latest_checkpoint() or (0, directory)
    files = sorted(checkpoint.rglob("*.safetensors"))
    assert len(files) == 2
    tensors = {f"{file.name}/{key}": value for file in files for key, value in load_file(file).items()}
    metrics = [{k: v for k, v in row.items() if "seconds" not in k} for row in log.read_metrics()]
    trees = [nodes_of(scored.tree for scored in log.read_trees(number)) for number in log.tree_steps()]
    return tensors, metrics, trees, (checkpoint / "state.json").read_bytes()


def assert_same(a: Path, b: Path) -> None:
    (tensors_a, *rest_a), (tensors_b, *rest_b) = what_it_left(a), what_it_left(b)
    assert rest_a == rest_b
    assert same(tensors_a, tensors_b)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_trains_stops_resumes_and_is_evaluated(kind: str, model_path: Path, tmp_path: Path) -> None:
    more = KINDS[kind]
    tested = run_to_the_end(config_for(model_path, tmp_path / "straight", *more))
    run_to_the_end(config_for(model_path, tmp_path / "halves", "train.steps=1", *more))
    assert run_to_the_end(config_for(model_path, tmp_path / "halves", *more), resume=True) == tested
    assert_same(tmp_path / "straight", tmp_path / "halves")
    tensors, metrics, _, _ = what_it_left(tmp_path / "straight")
    assert [row["step"] for row in metrics] == [1, 2]
    assert all(row["trained_tokens"] > 0 for row in metrics)
    limit = 1e-5 if kind == "lora" else 0.05  # bfloat16 has 8 bits
    assert all(row["engine_mismatch"] < limit for row in metrics)
    with_masters = any("/master/" in key for key in tensors)
    assert with_masters == (kind != "lora")
    # The checkpoint is the model that was trained: it gives the very numbers of the test above.
    session = open_context(load_model_config(tmp_path / "straight", []))
    session = replace(session, reward=even_share)
    assert nodes_of(evaluate(session)) == tested
    session.close()
    fresh = open_context(config_for(model_path, tmp_path / "none", *more))
    assert nodes_of(evaluate(fresh)) != tested
    fresh.close()


@pytest.mark.slow
def test_the_checkpoint_of_an_adapter_is_small_and_fits_the_base(model_path: Path, tmp_path: Path) -> None:
    run_to_the_end(config_for(model_path, tmp_path / "run", "train.steps=1", *LORA))
    _, checkpoint = read_run(tmp_path / "run").latest_checkpoint() or (0, tmp_path)
    names = sorted(str(path.relative_to(checkpoint)) for path in checkpoint.rglob("*") if path.is_file())
    assert names == [
        "manifest.json", "model/adapter_config.json", "model/adapter_model.safetensors", "optimizer.safetensors",
        "run/config.json", "run/metrics.jsonl", "run/trees.json", "state.json",
    ]  # fmt: skip
    assert checkpoint_model_settings(checkpoint) == {"adapter": str(checkpoint / "model")}
    settings = json.loads((checkpoint / "model" / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(model_path)
    trained, _ = load_trainable(
        Model(path=str(model_path), adapter=str(checkpoint / "model")), Train(lora_rank=4, lora_alpha=8), 0
    )
    merged, _ = load_trainable(Model(path=str(model_path), adapter=str(checkpoint / "model")), Train(), 0)
    plain, _ = load_trainable(Model(path=str(model_path)), Train(), 0)
    assert not has_adapter(merged)
    fresh = [load_trainable(Model(path=str(model_path)), Train(lora_rank=4), seed)[0] for seed in (0, 0, 1)]
    first, again, other = (weights_of(model, adapter=True) for model in fresh)
    assert same(first, again)
    assert not same(first, other)
    torch.testing.assert_close(logits_of(trained, [5] * 9), logits_of(merged, [5] * 9), rtol=0, atol=1e-5)
    assert (logits_of(merged, [5] * 9) - logits_of(plain, [5] * 9)).abs().max() > 1e-4


def test_a_full_checkpoint_replaces_model_and_adapter(model_path: Path, tmp_path: Path) -> None:
    run_to_the_end(config_for(model_path, tmp_path / "run", "train.steps=1", *BF16))
    _, checkpoint = read_run(tmp_path / "run").latest_checkpoint() or (0, tmp_path)
    assert checkpoint_model_settings(checkpoint) == {"path": str(checkpoint / "model"), "adapter": None}
    weights = load_file(checkpoint / "model" / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}


@pytest.mark.slow
def test_an_adapter_may_be_trained_further_in_another_run(model_path: Path, tmp_path: Path) -> None:
    run_to_the_end(config_for(model_path, tmp_path / "first", "train.steps=1", *LORA))
    _, begun = read_run(tmp_path / "first").latest_checkpoint() or (0, tmp_path)
    more = (*LORA, f"model.adapter={begun / 'model'}")
    run_to_the_end(config_for(model_path, tmp_path / "straight", *more))
    run_to_the_end(config_for(model_path, tmp_path / "halves", "train.steps=1", *more))
    run_to_the_end(config_for(model_path, tmp_path / "halves", *more), resume=True)
    assert_same(tmp_path / "straight", tmp_path / "halves")
    with (
        pytest.raises(ArpoError, match=r"loss\.kl_coef: "),
        open_training(config_for(model_path, tmp_path / "other", *more, "loss.kl_coef=0.1")),
    ):
        raise AssertionError("a run was opened")
    with (
        pytest.raises(ArpoError, match="has r = 4"),
        open_training(config_for(model_path, tmp_path / "other", *more, "train.lora_rank=8")),
    ):
        raise AssertionError("a run was opened")
    assert not (tmp_path / "other").exists()


def test_an_adapter_of_the_built_in_model(model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arpo.builtin.cold_start, "cold_start", lambda *_: model_path)
    config = load_config(None, [f"run.dir={tmp_path / 'run'}", *SMALL, "train.steps=1", *LORA])
    tested = run_to_the_end(config)
    session = open_context(load_model_config(tmp_path / "run", []))
    assert nodes_of(evaluate(session)) == tested
    session.close()


@pytest.mark.slow
def test_gradient_checkpointing_changes_no_run(model_path: Path, tmp_path: Path) -> None:
    run_to_the_end(config_for(model_path, tmp_path / "kept", "train.steps=2", *LORA))
    run_to_the_end(
        config_for(model_path, tmp_path / "again", "train.steps=2", *LORA, "train.gradient_checkpointing=true")
    )
    assert_same(tmp_path / "kept", tmp_path / "again")


def test_a_checkpoint_whose_optimiser_is_another_models(model_path: Path, tmp_path: Path) -> None:
    run_to_the_end(config_for(model_path, tmp_path / "run", "train.steps=1", *BF16))
    _, checkpoint = read_run(tmp_path / "run").latest_checkpoint() or (0, tmp_path)
    file = checkpoint / "optimizer.safetensors"
    save_file({key: value for key, value in load_file(file).items() if "master/" not in key}, file)
    write_manifest(checkpoint, 1)
    with pytest.raises(ArpoError, match=r"is damaged: only one of .* has 'master/"):
        run_to_the_end(config_for(model_path, tmp_path / "run", *BF16), resume=True)


@pytest.mark.slow
def test_the_commands_take_a_run_with_an_adapter(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_to_the_end(config_for(model_path, tmp_path / "run", "train.steps=1", *KINDS["both"]))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO("Who?\n/quit\n"))
    for command, said in {"eval": "accuracy", "rollout": "trajectories", "chat": "tools: search, python"}.items():
        monkeypatch.setattr("sys.argv", ["arpo", command, str(tmp_path / "run"), "rollout.max_tokens=8"])
        try:
            main()
        except SystemExit as stop:
            assert not stop.code, (command, capsys.readouterr())
        assert said in capsys.readouterr().out


@pytest.mark.parametrize("again", [(), LORA], ids=["merged", "trained on"])
def test_an_adapter_of_the_built_in_model_can_be_built_on(
    again: tuple[str, ...], model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The base that such a run names is "tiny", which stands for a model that is made on the spot."""
    monkeypatch.setattr(arpo.builtin.cold_start, "cold_start", lambda *_: model_path)
    first, second = (config_for(Path("tiny"), tmp_path / name, "train.steps=1", *LORA) for name in ("a", "b"))
    run_to_the_end(first)
    config = config_for(tmp_path / "a", tmp_path / "b", "train.steps=1", *again)
    with open_training(config) as run:
        assert has_adapter(context_of(run).model) == bool(again)
        plain = make_plain(second, model_path)
        assert not torch.equal(
            logits_of(context_of(run).model, [5, 6, 7]), logits_of(plain, [5, 6, 7])
        )  # what was learnt is there


def make_plain(config: Config, path: Path) -> Any:
    return load_trainable(Model(path=str(path), device="cpu"), Train(), config.seed)[0]
