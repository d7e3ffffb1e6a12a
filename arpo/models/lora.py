"""LoRA adapters in PEFT's format: merged into their base model, or trained while its weights are frozen.

`merge_adapter` returns a plain model. `add_adapter` changes a model in place: its class stays, its weights are frozen,
and each target linear layer gets an adapter in the model's own dtype; engine and trainer use it like any other model.

Guarantees: only safetensors are read, never pickles, and only LoRA adapters are accepted. An adapter must fit: each of
its tensors belongs to the model, and none is missing.
Not covered: adapters of embeddings and output layers, dropout, several adapters at a time.
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
from arpo.models.checks import read_object
from arpo.models.resolve import ADAPTER_CONFIG
from arpo.runs.storage import writing

WEIGHTS = "adapter_model.safetensors"
MAX_RANK = 1024  # or the model's hidden size, if that is larger
_PREFIX = "base_model.model."  # of all tensor names in an adapter file
_IRRELEVANT = {
    *("auto_mapping", "base_model_name_or_path", "revision", "peft_version", "task_type", "inference_mode"),
    *("lora_dropout", "init_lora_weights", "loftq_config", "eva_config", "corda_config", "lora_ga_config"),
    *("megatron_config", "megatron_core"),
}
"""Settings of an adapter that do not change what its weights compute."""


def add_adapter(model: Any, rank: int, alpha: int, targets: Sequence[str], seed: int) -> Any:
    """Freeze the model, add a new adapter (which does not change its output yet), and return it."""
    _require_peft("train.lora_rank")
    from peft import LoraConfig, inject_adapter_in_model

    linear = [name for name, module in model.get_decoder().named_modules() if isinstance(module, torch.nn.Linear)]
    layers = dict.fromkeys(name.rpartition(".")[2] for name in linear)
    for target in targets:
        if target not in layers:
            raise ArpoError(f"train.lora_targets: the model has no layer {target!r}; it has {', '.join(layers)}")
    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,
        target_modules=list(targets),
        task_type="CAUSAL_LM",
        base_model_name_or_path=model.name_or_path,
    )
    with torch.random.fork_rng(devices=[]):  # PEFT initializes on the CPU, whatever the model's device
        torch.default_generator.manual_seed(seed)
        return inject_adapter_in_model(config, model).eval()


def has_adapter(model: Any) -> bool:
    """Return whether the model has an adapter from `add_adapter`."""
    return hasattr(model, "peft_config")


def save_adapter(model: Any, directory: Path) -> None:
    """Write the model's adapter in PEFT's format."""
    config = model.peft_config["default"].to_dict()
    text = json.dumps(config, indent=2, sort_keys=True, default=sorted)  # sets become sorted lists
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in _adapter_tensors(model).items()}
    with writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
        (directory / ADAPTER_CONFIG).write_text(text + "\n", encoding="utf-8")
        save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})


@torch.no_grad()
def load_adapter(model: Any, directory: Path) -> None:
    """Copy the weights of the adapter in `directory` into the model's own, which must have the same settings."""
    _check_adapter(model, directory)
    saved = read_object(directory / ADAPTER_CONFIG)
    ours = json.loads(json.dumps(model.peft_config["default"].to_dict(), default=sorted))
    for key, value in saved.items():
        value = sorted(value) if isinstance(value, list) else value
        if key not in _IRRELEVANT and value != ours.get(key) and (value or ours.get(key)):
            raise ArpoError(
                f"model.adapter: {str(directory)!r} has {key} = {value}, but the settings give {ours.get(key)}: to "
                "continue training it, set train.lora_rank, lora_alpha and lora_targets as they were; to merge it, set "
                "train.lora_rank=0"
            )
    tensors, targets = load_file(directory / WEIGHTS), _adapter_tensors(model)
    mismatch = sorted(tensors.keys() ^ targets.keys())
    if mismatch:
        raise _misfit(directory, f"only one of the two has {mismatch[0]!r}")
    for name, target in targets.items():
        if tensors[name].shape != target.shape:
            raise _misfit(directory, f"{name!r} is {(*tensors[name].shape,)}, not {(*target.shape,)}")
        target.copy_(tensors[name])


@torch.no_grad()
def merged_state_dict(model: Any) -> dict[str, Tensor]:
    """Return the state dict of the plain model, with any adapter merged into it."""
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
def disable_adapter(model: Any) -> Iterator[None]:
    """Within the context, the model computes without its adapter."""
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
    """Return the model with the adapter in `directory` merged into its weights."""
    _require_peft("model.adapter")
    from peft import LoraConfig, PeftModel

    _check_adapter(model, directory)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what PEFT warns about is an error below
            config = LoraConfig.from_pretrained(str(directory))
            config.inference_mode = True
            config.megatron_config = None  # it would import a module that the file names
            wrapped = PeftModel(model, config, autocast_adapter_dtype=False)
            result = wrapped.load_adapter(str(directory), "default", autocast_adapter_dtype=False)
    except Exception as error:  # a broken adapter makes PEFT raise anything
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise _misfit(directory, " ".join(lines[:2])[:300]) from error
    mismatch = [*result.missing_keys, *result.unexpected_keys]
    if mismatch:
        raise _misfit(directory, f"only one of the two has {mismatch[0]!r}")
    return wrapped.merge_and_unload().requires_grad_(True)  # PEFT freezes what it wraps


def _adapter_tensors(model: Any) -> dict[str, Tensor]:
    """Return the weights of the model's adapter by their names in an adapter file."""
    return {
        _PREFIX + name.replace(".default.", "."): parameter
        for name, parameter in model.named_parameters()
        if ".lora_A.default." in name or ".lora_B.default." in name
    }


def _require_peft(setting: str) -> None:
    try:
        import peft  # noqa: F401
    except ImportError:
        raise ArpoError(f"{setting}: an adapter needs one more package: pip install peft") from None


def _check_adapter(model: Any, directory: Path) -> None:
    try:
        settings = read_object(directory / ADAPTER_CONFIG)
        kind = settings["peft_type"]
    except (OSError, ValueError, KeyError):
        raise ArpoError(
            f"model.adapter: {str(directory)!r} is not an adapter: give a directory that PEFT saved ({ADAPTER_CONFIG})"
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
    patterns, limit = settings.get("rank_pattern") or {}, max(MAX_RANK, model.get_input_embeddings().weight.shape[1])
    for rank in (settings.get("r"), *(patterns.values() if isinstance(patterns, dict) else [patterns])):
        if type(rank) is not int or not 1 <= rank <= limit:  # PEFT makes matrices of this rank before it looks
            raise _misfit(directory, f"its rank is {rank!r:.60}, expected a whole number from 1 to {limit}")
    if model.config.tie_word_embeddings and any(".embed_tokens." in name or ".lm_head." in name for name in names):
        raise ArpoError(
            f"model.adapter: {str(directory)!r} changes tied embeddings, so it cannot be merged: "
            "train the adapter without embed_tokens and lm_head"
        )


def _misfit(directory: Path, why: str) -> ArpoError:
    return ArpoError(
        f"model.adapter: {str(directory)!r} does not fit model.path, so give the base that it was trained on: {why}"
    )
