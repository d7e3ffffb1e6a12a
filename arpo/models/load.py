"""Loading a model and its tokenizer (a Hugging Face directory or hub name, or a GGUF file; with a LoRA adapter or
without), and saying plainly why it can't be done."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from arpo.config.schema import Model, Train
from arpo.errors import ArpoError
from arpo.models.gguf import load_gguf
from arpo.models.lora import add_adapter, load_adapter, merge_adapter
from arpo.types import derive_seed

transformers_logging.disable_progress_bar()  # loading is quick, and bars of our own say what matters


def pick_device(device: str) -> torch.device:
    """The device that a `model.device` setting means on this machine."""
    if device == "cuda" and not torch.cuda.is_available():
        raise ArpoError(
            "model.device is cuda, but torch sees no CUDA device: use model.device=cpu, or see `arpo doctor`"
        )
    return torch.device("cuda" if device == "cuda" or (device == "auto" and torch.cuda.is_available()) else "cpu")


def load_model(settings: Model) -> tuple[Any, Any]:
    """The causal LM (on its device, in evaluation mode: no dropout), merged with its adapter, and its tokenizer."""
    path = os.path.expanduser(settings.path)
    dtype = getattr(torch, settings.dtype)
    if path.lower().endswith(".gguf"):
        if not Path(path).is_file():
            raise ArpoError(f"model.path: there is no file {path!r}")
        model, tokenizer = load_gguf(Path(path), dtype)
    else:
        model, tokenizer = _load_hugging_face(path, dtype)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if settings.adapter is not None:
        model = merge_adapter(model, Path(settings.adapter).expanduser())
    dropout = {name: p.p for name, p in model.named_modules() if isinstance(p, torch.nn.Dropout) and p.p > 0}
    if dropout:
        raise ArpoError(f"model.path: {path!r} has dropout ({next(iter(dropout))}): its log-probs would not repeat")
    return model.to(pick_device(settings.device)).eval(), tokenizer


def load_trainable(settings: Model, train: Train, seed: int) -> tuple[Any, Any]:
    """The model as a run trains it, and its tokenizer: with `train.lora_rank`, frozen and beside it an adapter, which
    is a fresh one drawn from the run's seed, or that of `model.adapter`."""
    if not train.lora_rank:
        return load_model(settings)
    model, tokenizer = load_model(settings.model_copy(update={"adapter": None}))
    model = add_adapter(model, train.lora_rank, train.lora_alpha, train.lora_targets, derive_seed(seed, "lora"))
    if settings.adapter is not None:
        load_adapter(model, Path(settings.adapter).expanduser())
    return model, tokenizer


@contextmanager
def recomputing(model: Any) -> Iterator[None]:
    """Forward passes inside keep only what goes into each layer; backward passes compute the rest again."""
    model.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
    model.train()  # only then do the layers look; there is no dropout that it would turn on
    try:
        yield
    finally:
        model.eval()
        model.gradient_checkpointing_disable()


def _load_hugging_face(path: str, dtype: torch.dtype) -> tuple[Any, Any]:
    is_path = _looks_like_a_path(path)
    if is_path and not (Path(path) / "config.json").is_file():
        if (Path(path) / "adapter_config.json").is_file():
            raise ArpoError(
                f"model.path: {path!r} is an adapter, not a model: set model.adapter to it, and model.path to its base"
            )
        there = "it has no config.json" if Path(path).is_dir() else "there is no such directory"
        raise ArpoError(
            f'model.path: {path!r} is no model: {there}; give a Hugging Face directory, a hub name or "tiny"'
        )
    trouble = None if is_path else _hub_trouble(path)
    local = is_path or trouble is not None  # what was loaded before is still there without a network
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False, local_files_only=local)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, trust_remote_code=False, local_files_only=local)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        if trouble is not None:
            raise ArpoError(
                f"model.path: {path!r} is neither here nor to be had from the hub ({trouble}): "
                "give a directory that holds the model, or check name and network"
            ) from error
        raise ArpoError(f"model.path: {path!r} could not be loaded: {_first_line(error)}") from error
    return model, tokenizer


def _hub_trouble(name: str) -> str | None:
    """Why the hub does not have a model, asked once; loading itself would ask again and again for most of a minute."""
    try:
        HfApi().model_info(name, timeout=10)
    except Exception as error:  # its HTTP client differs between versions
        return _first_line(error)
    return None


def _looks_like_a_path(path: str) -> bool:
    """Hub names are `name` or `owner/name`; all else, and all that exists here at least in part, is a path."""
    return (
        path.startswith((".", "/"))
        or path.count("/") > 1
        or Path(path).exists()
        or Path(path).parent.name in (entry.name for entry in Path().iterdir() if entry.is_dir())
    )


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:300]
