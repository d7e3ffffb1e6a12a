"""Loading a model: its sources, merged adapters, and error messages."""

from __future__ import annotations

import json
import shutil
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_files import small_model, vocabulary_of, write_model
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from safetensors.torch import load, save_file

from arpo.builtin.model import build_model
from arpo.config.schema import Model
from arpo.errors import ArpoError
from arpo.models.load import load_model, own_memory


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(5, 45).view(2, 20)).logits


def refused(**settings: str) -> str:
    with pytest.raises(ArpoError) as error:
        load_model(Model(device="cpu", **settings))
    return str(error.value)


@pytest.fixture(autouse=True)
def lookups(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Turn the network off; returns the hosts that are looked up."""
    seen: list[Any] = []

    def no_network(host: Any, *_: Any, **__: Any) -> None:
        seen.append(host)
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    return seen


def make_adapter(path: Path, model: Any, modules: list[str], **more: Any) -> Any:
    """Save a random adapter for a model; returns the PEFT model."""
    torch.manual_seed(2)
    wrapped = get_peft_model(model, LoraConfig(**{"r": 4, "target_modules": modules, "lora_dropout": 0.1, **more}))
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.1)
    wrapped.save_pretrained(path, save_embedding_layers=False)
    return wrapped.eval()


def plain(base: Path) -> Any:
    return load_model(Model(path=str(base), device="cpu"))[0]


@pytest.fixture
def adapter(tmp_path: Path, base: Path) -> Path:
    """An adapter for `base`."""
    make_adapter(tmp_path / "adapter", plain(base), ["q_proj", "down_proj"])
    return tmp_path / "adapter"


# Adapters.


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"use_rslora": True, "lora_alpha": 32},
        {"use_dora": True},
        {"r": 16, "rank_pattern": {"q_proj": 2, "v_proj": 2, "up_proj": 2}},
        {"rank_pattern": {"down_proj": 64}},
    ],
)
@pytest.mark.filterwarnings("ignore:The following rank_pattern keys:RuntimeWarning")
def test_a_merged_adapter_computes_what_peft_computes(more: dict[str, Any], base: Path, tmp_path: Path) -> None:
    wrapped = make_adapter(tmp_path / "adapter", plain(base), ["q_proj", "v_proj", "up_proj"], **more)
    model, _ = load_model(Model(path=str(base), adapter=str(tmp_path / "adapter"), device="cpu"))
    torch.testing.assert_close(logits(model), logits(wrapped), rtol=0, atol=1e-5)
    assert (logits(model) - logits(plain(base))).abs().max() > 1e-2


def test_what_comes_back_is_a_plain_model_that_can_be_trained(base: Path, adapter: Path, tmp_path: Path) -> None:
    model, tokenizer = load_model(Model(path=str(base), adapter=str(adapter), device="cpu"))
    expected = plain(base)
    assert type(model) is type(expected)
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in expected.named_parameters()]
    assert [str(module) for module in model.modules()] == [str(module) for module in expected.modules()]
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert not model.training
    model.save_pretrained(tmp_path / "saved")
    tokenizer.save_pretrained(tmp_path / "saved")
    assert sorted(path.name for path in (tmp_path / "saved").iterdir() if "adapter" in path.name) == []
    assert torch.equal(logits(plain(tmp_path / "saved")), logits(model))


def test_an_adapter_on_a_gguf_file(tmp_path: Path) -> None:
    vocabulary = vocabulary_of("qwen2")
    path = write_model(tmp_path / "x.gguf", "qwen2", small_model("qwen2", len(vocabulary.tokens)), vocabulary)
    wrapped = make_adapter(tmp_path / "adapter", plain(path), ["k_proj", "gate_proj"])
    model, tokenizer = load_model(Model(path=str(path), adapter=str(tmp_path / "adapter"), device="cpu"))
    torch.testing.assert_close(logits(model), logits(wrapped), rtol=0, atol=1e-5)
    assert tokenizer.eos_token == "<|im_end|>"


def test_an_adapter_in_bfloat16(base: Path, adapter: Path) -> None:
    model, _ = load_model(Model(path=str(base), adapter=str(adapter), device="cpu", dtype="bfloat16"))
    exact, _ = load_model(Model(path=str(base), adapter=str(adapter), device="cpu"))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    torch.testing.assert_close(logits(model).float(), logits(exact), rtol=0, atol=0.1)


def test_an_adapter_of_another_base(base: Path, tmp_path: Path, tokenizer: Any) -> None:
    others = {
        "wider": ({"hidden": 96, "layers": 2}, ["q_proj"], "size mismatch"),
        "deeper": (
            {"hidden": 64, "layers": 3},
            ["q_proj"],
            "only one of the two has 'base_model.model.model.layers.2.",
        ),
        "flatter": (
            {"hidden": 64, "layers": 1},
            ["q_proj"],
            "only one of the two has 'base_model.model.model.layers.1.",
        ),
    }
    for name, (sizes, modules, why) in others.items():
        make_adapter(tmp_path / name, build_model(tokenizer, max_context=256, seed=1, **sizes), modules)
        message = refused(path=str(base), adapter=str(tmp_path / name))
        assert message.startswith(f"model.adapter: {str(tmp_path / name)!r} does not fit model.path, so give the base ")
        assert why in message
        assert "\n" not in message
    vocabulary = vocabulary_of("qwen2")
    make_adapter(tmp_path / "names", small_model("qwen2", len(vocabulary.tokens)), ["q_proj"])
    settings = json.loads((tmp_path / "names" / "adapter_config.json").read_text())
    (tmp_path / "names" / "adapter_config.json").write_text(json.dumps(settings | {"target_modules": ["c_attn"]}))
    assert "c_attn" in refused(path=str(base), adapter=str(tmp_path / "names"))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_an_adapter_that_would_change_tied_embeddings(base: Path, tmp_path: Path) -> None:
    make_adapter(tmp_path / "adapter", plain(base), ["q_proj", "embed_tokens"])
    assert "train the adapter without embed_tokens and lm_head" in refused(
        path=str(base), adapter=str(tmp_path / "adapter")
    )


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_an_adapter_of_embeddings_alone(tmp_path: Path, tokenizer: Any) -> None:
    model = build_model(tokenizer, hidden=64, layers=1, max_context=256, seed=1)
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "base")
    wrapped = make_adapter(tmp_path / "adapter", plain(tmp_path / "base"), ["embed_tokens"], lora_dropout=0)
    merged, _ = load_model(Model(path=str(tmp_path / "base"), adapter=str(tmp_path / "adapter"), device="cpu"))
    torch.testing.assert_close(logits(merged), logits(wrapped), rtol=0, atol=1e-5)
    assert (logits(merged) - logits(plain(tmp_path / "base"))).abs().max() > 1e-2


def test_directories_that_are_not_adapters(base: Path, adapter: Path, tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere", base):
        assert refused(path=str(base), adapter=str(path)) == (
            f"model.adapter: {str(path)!r} is not an adapter: give a directory that PEFT saved (adapter_config.json)"
        )
    config = adapter / "adapter_config.json"
    whole = config.read_text()
    for content in ("{", "[]", "{}", '{"peft_type": "LORA", "r": "x"}'):
        config.write_text(content)
        assert refused(path=str(base), adapter=str(adapter)).startswith(f"model.adapter: {str(adapter)!r} ")
    config.write_text(whole)
    weights = adapter / "adapter_model.safetensors"
    tensors = load(weights.read_bytes())
    weights.write_bytes(b"\0" * 100)
    assert refused(path=str(base), adapter=str(adapter)).startswith(f"model.adapter: {str(weights)!r} is damaged")
    save_file(dict(list(tensors.items())[1:]), weights)
    assert "only one of the two has" in refused(path=str(base), adapter=str(adapter))
    weights.unlink()
    torch.save(tensors, adapter / "adapter_model.bin")  # a pickle
    assert refused(path=str(base), adapter=str(adapter)) == (
        f"model.adapter: {str(adapter)!r} has no adapter_model.safetensors: save the adapter again in that format"
    )


def test_another_kind_of_adapter(base: Path, tmp_path: Path) -> None:
    config = PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
    get_peft_model(plain(base), config).save_pretrained(tmp_path / "prompt", save_embedding_layers=False)
    assert refused(path=str(base), adapter=str(tmp_path / "prompt")) == (
        f"model.adapter: {str(tmp_path / 'prompt')!r} is a PROMPT_TUNING adapter; only LORA can be merged"
    )


def test_an_adapter_given_as_the_model(adapter: Path) -> None:
    assert refused(path=str(adapter)) == (
        f"model.path: {str(adapter)!r} is an adapter, not a model: set model.adapter to it, and model.path to its base"
    )


def test_without_the_peft_package(base: Path, adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    assert "pip install peft" in refused(path=str(base), adapter=str(adapter))
    plain(base)


def test_the_oracle_can_tell_adapters_apart(base: Path, adapter: Path) -> None:
    """PEFT's own way of loading gives what ours does: the adapter was not merged twice or scaled."""
    wrapped = PeftModel.from_pretrained(plain(base), adapter)
    model, _ = load_model(Model(path=str(base), adapter=str(adapter), device="cpu"))
    torch.testing.assert_close(logits(model), logits(wrapped.eval()), rtol=0, atol=1e-5)


# Files and hub names.


def test_a_gguf_file(tmp_path: Path, lookups: list[Any]) -> None:
    vocabulary = vocabulary_of("llama")
    original = small_model("llama", len(vocabulary.tokens))
    path = write_model(tmp_path / "Model.GGUF", "llama", original, vocabulary)
    model, tokenizer = load_model(Model(path=str(path), device="cpu"))
    torch.testing.assert_close(logits(model), logits(original), rtol=0, atol=1e-5)
    assert not model.training
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert tokenizer.pad_token == "<|endoftext|>"
    assert lookups == []


def test_a_gguf_file_that_is_not_there() -> None:
    assert refused(path="nowhere.gguf") == "model.path: there is no file 'nowhere.gguf'"


def test_a_hub_name_without_a_network_fails_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    began = time.monotonic()
    message = refused(path="nobody/no-such-model")
    assert time.monotonic() - began < 5
    assert message.startswith("model.path: 'nobody/no-such-model' is neither a local model nor available on the hub (")
    assert message.endswith("): give a directory that holds the model, or check name and network")


def test_a_directory_needs_no_network(base: Path, adapter: Path, lookups: list[Any]) -> None:
    load_model(Model(path=str(base), adapter=str(adapter), device="cpu"))
    assert lookups == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_weight_is_a_view_of_the_file(dtype: str, base: Path, tmp_path: Path) -> None:
    """The file may change, and where its tensors begin does not change how products are rounded."""
    moved = tmp_path / "model"
    shutil.copytree(base, moved)
    weights = load((base / "model.safetensors").read_bytes())
    save_file(weights, moved / "model.safetensors", {"format": "pt", "moves what follows": "by eight bytes or more"})
    model, _ = load_model(Model(path=str(moved), device="cpu", dtype=dtype))
    assert str(moved) not in Path("/proc/self/maps").read_text()
    assert {tensor.data_ptr() % 64 for tensor in (*model.parameters(), *model.buffers())} == {0}


def test_only_views_are_copied() -> None:
    block = torch.zeros(8)
    model = torch.nn.ParameterList([torch.zeros(4), block[4:], torch.frombuffer(bytearray(16), dtype=torch.float32)])
    before = [parameter.data_ptr() for parameter in model]
    own_memory(model)
    assert [p.data_ptr() == old for p, old in zip(model, before, strict=True)] == [True, False, False]


@pytest.mark.slow
def test_several_threads_load_at_once(base: Path) -> None:
    expected, initializer = plain(base).state_dict(), torch.nn.init.kaiming_uniform_
    for _ in range(3):
        with ThreadPoolExecutor(6) as threads:
            states = [model.state_dict() for model in threads.map(plain, [base] * 12)]
        for state in states:
            assert state.keys() == expected.keys()
            assert all(torch.equal(state[name], value) for name, value in expected.items())
    assert torch.nn.init.kaiming_uniform_ is initializer
