"""LoRA adapters in PEFT's layout: merged into the model that they were made for, or trained beside its frozen weights.

`merge_adapter` gives a plain model. `add_adapter` changes a model in place: its class stays, its weights are frozen,
and beside each linear layer of the wanted names lies an adapter in the model's own number format; engine and trainer
use it like any other model. `load_adapter` and `save_adapter` read and write it, `adapters_off` sets it aside.

Only safetensors are read; weights that would have to be unpickled are refused, and so is every other kind of adapter.
An adapter must fit: each of its tensors has a place in the model, and none that it should have is missing.
Does not cover: adapters of embeddings and output layers, dropout, several adapters at a time.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from arpo.errors import ArpoError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."  # of all names in an adapter's file
_NO_MATTER = {
    *("auto_mapping", "base_model_name_or_path", "revision", "peft_version", "task_type", "inference_mode"),
    *("lora_dropout", "init_lora_weights", "loftq_config", "eva_config", "corda_config", "lora_ga_config"),
    *("megatron_config", "megatron_core"),
}
"""Settings of an adapter that change nothing about what its weights compute."""


def add_adapter(model: Any, rank: int, alpha: int, targets: Sequence[str], seed: int) -> Any:
    """The model, with a fresh adapter that changes none of its numbers yet, and nothing else that can be trained."""
    _require_peft("train.lora_rank")
    from peft import LoraConfig, inject_adapter_in_model

    linear = [name for name, module in model.get_decoder().named_modules() if isinstance(module, torch.nn.Linear)]
    there = dict.fromkeys(name.rpartition(".")[2] for name in linear)
    for target in targets:
        if target not in there:
            raise ArpoError(f"train.lora_targets: the model has no layer {target!r}; it has {', '.join(there)}")
    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,
        target_modules=list(targets),
        task_type="CAUSAL_LM",
        base_model_name_or_path=model.name_or_path,
    )
    with torch.random.fork_rng(devices=[]):  # PEFT draws on the CPU, whatever the model's device
        torch.default_generator.manual_seed(seed)
        return inject_adapter_in_model(config, model).eval()


def has_adapter(model: Any) -> bool:
    """Whether the model came from `add_adapter`."""
    return hasattr(model, "peft_config")


def save_adapter(model: Any, directory: Path) -> None:
    """Write the adapter of `add_adapter`, as PEFT would."""
    directory.mkdir(parents=True, exist_ok=True)
    config = model.peft_config["default"].to_dict()
    text = json.dumps(config, indent=2, sort_keys=True, default=sorted)  # what JSON lacks are sets of names
    (directory / CONFIG).write_text(text + "\n", encoding="utf-8")
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in _tensors(model).items()}
    save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})


@torch.no_grad()
def load_adapter(model: Any, directory: Path) -> None:
    """Put the weights of an adapter in `directory` into that of `add_adapter`, which must be of the same make."""
    _check(model, directory)
    saved = json.loads((directory / CONFIG).read_text(encoding="utf-8"))
    ours = json.loads(json.dumps(model.peft_config["default"].to_dict(), default=sorted))
    for key, value in saved.items():
        value = sorted(value) if isinstance(value, list) else value
        if key not in _NO_MATTER and value != ours.get(key) and (value or ours.get(key)):
            raise ArpoError(
                f"model.adapter: {str(directory)!r} has {key} = {value}, and to go on training it, train.lora_rank, "
                f"lora_alpha and lora_targets must be as it was made (here: {ours.get(key)}); or set train.lora_rank=0 "
                "to have it merged"
            )
    tensors, places = load_file(directory / WEIGHTS), _tensors(model)
    odd = sorted(tensors.keys() ^ places.keys())
    if odd:
        raise ArpoError(_misfit(directory, f"only one of the two has {odd[0]!r}"))
    for name, place in places.items():
        if tensors[name].shape != place.shape:
            raise ArpoError(_misfit(directory, f"{name!r} is {(*tensors[name].shape,)}, not {(*place.shape,)}"))
        place.copy_(tensors[name])


@torch.no_grad()
def merged_state_dict(model: Any) -> dict[str, Tensor]:
    """All weights under the names that they have without an adapter; that of `add_adapter` is added to them."""
    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    if not has_adapter(model):
        return state
    from peft.tuners.lora import Linear

    plain = {name.replace(".base_layer.", "."): value for name, value in state.items() if ".lora_" not in name}
    for name, module in model.named_modules():
        if isinstance(module, Linear):
            plain[f"{name}.weight"] = plain[f"{name}.weight"] + module.get_delta_weight("default")
    return plain


@contextmanager
def adapters_off(model: Any) -> Iterator[None]:
    """Within, a model from `add_adapter` computes what it did without the adapter."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    try:
        for layer in layers:
            layer.enable_adapters(False)
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def merge_adapter(model: Any, directory: Path) -> Any:
    """The model with the adapter in `directory` added to its weights."""
    _require_peft("model.adapter")
    from peft import LoraConfig, PeftModel

    _check(model, directory)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what PEFT warns of is an error below
            config = LoraConfig.from_pretrained(str(directory))
            config.inference_mode = True
            config.megatron_config = None  # it would have a module imported that the file names
            wrapped = PeftModel(model, config, autocast_adapter_dtype=False)
            result = wrapped.load_adapter(str(directory), "default", autocast_adapter_dtype=False)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise ArpoError(_misfit(directory, " ".join(lines[:2])[:300])) from error
    odd = [*result.missing_keys, *result.unexpected_keys]
    if odd:
        raise ArpoError(_misfit(directory, f"only one of the two has {odd[0]!r}"))
    return wrapped.merge_and_unload().requires_grad_(True)  # PEFT freezes what it wraps


def _tensors(model: Any) -> dict[str, Tensor]:
    """The weights of the model's adapter, by their names in an adapter's file."""
    return {
        _PREFIX + name.replace(".default.", "."): parameter
        for name, parameter in model.named_parameters()
        if ".lora_A.default." in name or ".lora_B.default." in name
    }


def _require_peft(setting: str) -> None:
    try:
        import peft  # noqa: F401
    except ImportError:
        raise ArpoError(f"{setting}: an adapter needs one more package: pip install 'arpo[lora]'") from None


def _check(model: Any, directory: Path) -> None:
    try:
        settings = json.loads((directory / CONFIG).read_text(encoding="utf-8"))
        kind = settings["peft_type"]
    except (OSError, ValueError, KeyError, TypeError):
        raise ArpoError(
            f"model.adapter: {str(directory)!r} is no adapter: give a directory that PEFT saved (adapter_config.json)"
        ) from None
    if kind != "LORA":
        raise ArpoError(f"model.adapter: {str(directory)!r} is a {kind} adapter; only LORA can be merged")
    weights = directory / WEIGHTS
    if not weights.is_file():
        raise ArpoError(
            f"model.adapter: {str(directory)!r} has no adapter_model.safetensors: save the adapter again in that format"
        )
    try:
        with safe_open(weights, framework="pt") as tensors:
            names = list(tensors.keys())
    except SafetensorError as error:
        raise ArpoError(f"model.adapter: {str(weights)!r} is damaged: {error}") from error
    if model.config.tie_word_embeddings and any(".embed_tokens." in name or ".lm_head." in name for name in names):
        raise ArpoError(
            f"model.adapter: {str(directory)!r} changes embeddings that the model uses twice (tied), so it can't be "
            "merged: train the adapter without embed_tokens and lm_head"
        )


def _misfit(directory: Path, why: str) -> str:
    return f"model.adapter: {str(directory)!r} does not fit model.path, so give the base that it was made for: {why}"
