"""A LoRA adapter in PEFT's layout, merged into the model that it was made for. What comes back is a plain model.

Only safetensors are read; weights that would have to be unpickled are refused, and so is every other kind of adapter.
An adapter must fit: each of its tensors has a place in the model, and none that it should have is missing.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from arpo.types import ArpoError


def merge_adapter(model: Any, directory: Path) -> Any:
    """The model with the adapter in `directory` added to its weights."""
    try:
        from peft import LoraConfig, PeftModel
    except ImportError:
        raise ArpoError("model.adapter: an adapter needs one more package: pip install 'arpo[lora]'") from None
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


def _check(model: Any, directory: Path) -> None:
    try:
        settings = json.loads((directory / "adapter_config.json").read_text(encoding="utf-8"))
        kind = settings["peft_type"]
    except (OSError, ValueError, KeyError, TypeError):
        raise ArpoError(
            f"model.adapter: {str(directory)!r} is no adapter: give a directory that PEFT saved (adapter_config.json)"
        ) from None
    if kind != "LORA":
        raise ArpoError(f"model.adapter: {str(directory)!r} is a {kind} adapter; only LORA can be merged")
    weights = directory / "adapter_model.safetensors"
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
