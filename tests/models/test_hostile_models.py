"""Models from outside that are broken or malicious: one message that says what is wrong, and nothing is executed."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_files import small_model, vocabulary_of, write_model
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from arpo.config.schema import Model
from arpo.errors import ArpoError
from arpo.models import checks, load
from arpo.models.load import load_model

pytestmark = pytest.mark.slow
Change = Callable[[Path], object]


def refused(base: Path, directory: Path, change: Change) -> str:
    """The message about the model after a change to its directory."""
    shutil.copytree(base, directory)
    change(directory)
    with pytest.raises(ArpoError) as error:
        load_model(Model(device="cpu", path=str(directory)))
    assert str(directory) in str(error.value) and len(str(error.value)) < 1000
    return str(error.value)


def config(**values: Any) -> Change:
    def change(directory: Path) -> None:
        path = directory / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))

    return change


def write(name: str, content: str | bytes) -> Change:
    return lambda directory: (directory / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def header(change: Callable[[dict[str, Any]], object], size: int | None = None) -> Change:
    """Change the header of the weights."""

    def apply(directory: Path) -> None:
        path = directory / "model.safetensors"
        content = path.read_bytes()
        end = 8 + struct.unpack("<Q", content[:8])[0]
        values = json.loads(content[8:end])
        change(values)
        text = json.dumps(values).encode()
        path.write_bytes(struct.pack("<Q", len(text) if size is None else size) + text + content[end:])

    return apply


def index(name: str) -> Change:
    def apply(directory: Path) -> None:
        (directory / "model.safetensors").rename(directory / "part.safetensors")
        names = dict.fromkeys(load_file(directory / "part.safetensors"), name)
        (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))

    return apply


def drop_tensor(directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    first = next(name for name in tensors if "norm" in name)
    tensors["unused"] = tensors.pop(first)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def pipe(name: str) -> Change:
    def apply(directory: Path) -> None:
        (directory / name).unlink(missing_ok=True)
        os.mkfifo(directory / name)

    return apply


def folder(name: str) -> Change:
    def apply(directory: Path) -> None:
        (directory / name).unlink(missing_ok=True)
        (directory / name).mkdir()

    return apply


def first(values: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = next(value for key, value in values.items() if key != "__metadata__")
    return found


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (config(hidden_size=10**9), r"config.json has hidden_size = 1000000000, expected a whole number from 1 to"),
        (config(num_hidden_layers=10**7), "config.json has num_hidden_layers = 10000000"),
        (config(vocab_size=10**12), "config.json has vocab_size = 1000000000000"),
        (config(hidden_size=-1), "config.json has hidden_size = -1"),
        (config(hidden_size="64"), "config.json has hidden_size = '64'"),
        (config(hidden_size=64.0), "config.json has hidden_size = 64.0"),
        (config(rms_norm_eps=float("nan")), "config.json has rms_norm_eps = nan, expected a finite number"),
        (config(text_config={"hidden_size": 10**9}), "config.json has hidden_size = 1000000000"),
        (config(vocab_size=10**6), r"describes a model of [\d,]+ weights, but its files hold only"),
        (config(hidden_size=2**17, intermediate_size=2**20), r"describes a model of [\d,]+ weights, but its files"),
        (config(hidden_size=60), "could not be loaded"),
        (config(num_attention_heads=7), "could not be loaded"),
        (config(num_hidden_layers=1000), r"describes a model of [\d,]+ weights, but its files hold only"),
        (config(model_type="unheard-of"), "its type 'unheard-of' is not supported, only llama, qwen2, .*: The checkp"),
        (config(model_type="bert"), "could not be loaded: its type 'bert' is not supported, only llama, qwen2, qwen3"),
        (config(model_type="t5"), "its type 't5' is not supported, only llama, qwen2, qwen3"),
        (config(model_type=[1]), r"its type \[1\] is not supported"),
        (
            config(rope_parameters={"rope_type": "unheard-of"}),
            "not be loaded",
        ),
        (write("config.json", "[" * 100_000), "config.json is not JSON: it is nested too deeply"),
        (write("config.json", '{"a":' * 200 + "1" + "}" * 200), "config.json is nested too deeply"),
        (write("config.json", "[]"), "config.json holds no JSON object"),
        (write("config.json", '{"vocab_size": ' + "9" * 5000 + "}"), "config.json is not JSON"),
        (write("config.json", b"\xff\xfe"), "config.json is not JSON"),
        (write("tokenizer_config.json", "[" * 100_000), "tokenizer_config.json is not JSON: it is nested too deeply"),
        (write("tokenizer.json", "[" * 100_000), "its tokenizer cannot be read from tokenizer.json: .*recursion"),
        (write("tokenizer.json", "{}"), "its tokenizer cannot be read from tokenizer.json"),
        (lambda path: (path / "tokenizer.json").unlink(), "it has no tokenizer.json: copy it from the model"),
        (write("generation_config.json", "[" * 100_000), "generation_config.json is not JSON"),
        (pipe("tokenizer.json"), "tokenizer.json: is a pipe"),
        (pipe("generation_config.json"), "generation_config.json: is a pipe"),
        (pipe("model.safetensors"), "model.safetensors: is a pipe"),
        (folder("model.safetensors"), "could not be loaded: .*irectory"),
        (folder("tokenizer.json"), "could not be loaded: .*irectory"),
        (lambda path: (path / "model.safetensors").unlink(), "it has no model.safetensors"),
        (lambda path: os.truncate(path / "model.safetensors", 1000), "model.safetensors is damaged"),
        (lambda path: os.truncate(path / "model.safetensors", 10**5), "model.safetensors is damaged"),
        (write("model.safetensors", b""), "model.safetensors is damaged"),
        (write("model.safetensors", b"garbage" * 100), "model.safetensors is damaged"),
        (header(lambda values: None, 2**60), "model.safetensors is damaged"),
        (header(lambda values: first(values).update(data_offsets=[0, 2**60])), "model.safetensors is damaged"),
        (header(lambda values: first(values).update(data_offsets=[8, 4])), "model.safetensors is damaged"),
        (header(lambda values: first(values).update(shape=[2**40, 2**40])), "model.safetensors is damaged"),
        (header(lambda values: first(values).update(shape=[-1])), "model.safetensors is damaged"),
        (header(lambda values: first(values).update(dtype="PICKLE")), "model.safetensors is damaged"),
        (header(lambda values: first(values).update(shape=first(values)["shape"][::-1])), "could not be loaded"),
        (drop_tensor, "its files hold no weights of the right shape for 'model.*norm"),
        (
            index("../part.safetensors"),
            "names '../part.safetensors', which is not a safetensors file of this dir",
        ),
        (index("/etc/passwd"), "names '/etc/passwd', which is not a safetensors file of this dir"),
        (index("pytorch_model.bin"), "names 'pytorch_model.bin', which is not a safetensors file"),
        (index("absent.safetensors"), "absent.safetensors"),
        (write("model.safetensors.index.json", "[" * 100_000), None),
    ],
)
def test_a_broken_model_is_refused(change: Change, message: str | None, base: Path, tmp_path: Path) -> None:
    if message is None:  # the index does not count beside a single file
        shutil.copytree(base, tmp_path / "model")
        change(tmp_path / "model")
        load_model(Model(device="cpu", path=str(tmp_path / "model")))
        return
    said = refused(base, tmp_path / "model", change)
    assert re.search(message, said), said


class _Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, ("executed",))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt"])
def test_a_pickle_is_never_read(name: str, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def change(directory: Path) -> None:
        (directory / "model.safetensors").unlink()
        (directory / name).write_bytes(pickle.dumps(_Bomb()))

    assert f"{name} is a pickle, which can run code when it is read" in refused(base, tmp_path / "model", change)
    assert not Path("executed").exists()


def test_a_hub_model_with_only_a_pickle(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_bytes((base / "config.json").read_bytes())
    monkeypatch.setattr(load, "_hub_error", lambda name: None)

    def cached_file(name: str, file: str, **_: Any) -> str | None:
        return str(tmp_path / file) if (tmp_path / file).exists() else None

    monkeypatch.setattr(load, "cached_file", cached_file)
    with pytest.raises(ArpoError, match=r"no model.safetensors, perhaps only a pickle .* save_pretrained, which gives"):
        load_model(Model(device="cpu", path="nobody/pickled"))


def test_code_in_a_model_is_never_executed(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(base, tmp_path / "model")
    names = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model", "AutoTokenizer": ["evil.T", "evil.T"]}
    (tmp_path / "model" / "evil.py").write_text("import os\nos.mkdir('executed')\n")
    config(auto_map=names)(tmp_path / "model")
    path = tmp_path / "model" / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "auto_map": names}))
    load_model(Model(device="cpu", path=str(tmp_path / "model")))  # of a known family: its own code is not needed
    config(model_type="evil")(tmp_path / "model")
    with pytest.raises(ArpoError, match="could not be loaded"):
        load_model(Model(device="cpu", path=str(tmp_path / "model")))
    assert not Path("executed").exists()


def test_links_to_files_elsewhere_are_followed(base: Path, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    for file in base.iterdir():
        (tmp_path / "model" / file.name).symlink_to(file)  # as in the cache of the hub
    linked, plain = (load_model(Model(device="cpu", path=str(path)))[0] for path in (tmp_path / "model", base))
    assert all(torch.equal(a, b) for a, b in zip(linked.parameters(), plain.parameters(), strict=True))


def test_a_model_that_does_not_fit_into_memory(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "available_memory", lambda: 1000)
    with pytest.raises(ArpoError, match=r"needs about .* of memory as float32, and this machine has 1.0 kB of RAM"):
        load_model(Model(device="cpu", path=str(base)))
    assert checks.show_bytes(3.2e12) == "3.2 TB" and checks.show_bytes(17) == "17 bytes"
    monkeypatch.undo()
    assert checks.available_memory() > 0


def test_a_model_for_a_gpu_needs_memory_there_and_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "available_memory", lambda: 1000)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10, 10**6))
    checks.require_memory(500_000, torch.bfloat16, torch.device("cuda"))
    with pytest.raises(ValueError, match=r"needs about 2.0 MB of memory as bfloat16, and the GPU has 1.0 MB$"):
        checks.require_memory(1_000_000, torch.bfloat16, torch.device("cuda"))


def test_weights_in_another_dtype_need_memory_here_too(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "available_memory", lambda: 1000)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10**9, 10**9))
    settings = AutoConfig.from_pretrained(base)
    load._require_weights(base, settings, torch.float32, torch.device("cuda"))  # as they are stored
    with pytest.raises(ValueError, match=r"of memory as bfloat16, and this machine has 1.0 kB of RAM free"):
        load._require_weights(base, settings, torch.bfloat16, torch.device("cuda"))


def test_a_tokenizer_with_more_tokens_than_the_model(base: Path, tmp_path: Path, tokenizer: Any) -> None:
    def change(directory: Path) -> None:
        tensors = load_file(directory / "model.safetensors")
        name = next(name for name in tensors if "embed_tokens" in name)
        rows = tensors[name].shape[0] // 2
        tensors = {key: value[:rows].clone() if value.shape[0] == rows * 2 else value for key, value in tensors.items()}
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        config(vocab_size=rows)(directory)

    assert "its tokenizer has ids up to" in refused(base, tmp_path / "model", change)


def test_the_parts_that_an_index_names_are_loaded(base: Path, tmp_path: Path) -> None:
    shutil.copytree(base, tmp_path / "model")
    index("part.safetensors")(tmp_path / "model")
    model, _ = load_model(Model(device="cpu", path=str(tmp_path / "model")))
    expected, _ = load_model(Model(device="cpu", path=str(base)))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected.parameters(), strict=True))


def test_an_adapter_of_an_absurd_rank(base: Path, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    model = load_model(Model(device="cpu", path=str(base)))[0]
    get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"])).save_pretrained(tmp_path)
    path = tmp_path / "adapter_config.json"
    saved = json.loads(path.read_text())
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"r": 10**9}, "its rank is 1000000000, expected a whole number from 1 to 1024"),
        ({"rank_pattern": {"q_proj": 10**9}}, "its rank is 1000000000, expected a whole number from 1 to 1024"),
        ({"r": 0}, "its rank is 0"),
        ({"r": "4"}, "its rank is '4'"),
        ({"target_modules": {"a": 1}}, "does not fit model.path"),
    ]
    for values, message in wrong:
        path.write_text(json.dumps({**saved, **values}))
        with pytest.raises(ArpoError, match=message):
            load_model(Model(device="cpu", path=str(base), adapter=str(tmp_path)))
    path.write_text("[" * 100_000)
    with pytest.raises(ArpoError, match="is not an adapter"):
        load_model(Model(device="cpu", path=str(base), adapter=str(tmp_path)))


def test_a_gguf_file_with_endless_tokens_or_too_many_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vocabulary = vocabulary_of("gemma3")
    model = small_model("gemma3", len(vocabulary.tokens))
    tokens = [*vocabulary.tokens[:-1], "a" * 10**6]
    write_model(tmp_path / "long.gguf", "gemma3", model, replace(vocabulary, tokens=tokens))
    with pytest.raises(ArpoError, match=r"long.gguf' could not be loaded: its tokens are too long"):
        load_model(Model(device="cpu", path=str(tmp_path / "long.gguf")))
    write_model(tmp_path / "large.gguf", "gemma3", model, vocabulary)
    monkeypatch.setattr(checks, "available_memory", lambda: 1000)
    with pytest.raises(ArpoError, match=r"large.gguf' could not be loaded: it needs about .* has 1.0 kB of RAM free"):
        load_model(Model(device="cpu", path=str(tmp_path / "large.gguf")))
