"""Loading a model and its tokenizer, and saying plainly why it can't be done."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from arpo.settings import Model
from arpo.types import ArpoError

transformers_logging.disable_progress_bar()  # loading is quick, and bars of our own say what matters


def pick_device(device: str) -> torch.device:
    """The device that a `model.device` setting means on this machine."""
    if device == "cuda" and not torch.cuda.is_available():
        raise ArpoError(
            "model.device is cuda, but torch sees no CUDA device: use model.device=cpu, or see `arpo doctor`"
        )
    return torch.device("cuda" if device == "cuda" or (device == "auto" and torch.cuda.is_available()) else "cpu")


def load_model(settings: Model) -> tuple[Any, Any]:
    """The causal LM (on its device, in evaluation mode: no dropout) and its tokenizer."""
    path = os.path.expanduser(settings.path)
    if _looks_like_a_path(path) and not (Path(path) / "config.json").is_file():
        there = "it has no config.json" if Path(path).is_dir() else "there is no such directory"
        raise ArpoError(
            f'model.path: {path!r} is no model: {there}; give a Hugging Face directory, a hub name or "tiny"'
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
        model = AutoModelForCausalLM.from_pretrained(
            path, dtype=getattr(torch, settings.dtype), trust_remote_code=False
        )
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise ArpoError(f"model.path: {path!r} could not be loaded: {_first_line(error)}") from error
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    dropout = {name: p.p for name, p in model.named_modules() if isinstance(p, torch.nn.Dropout) and p.p > 0}
    if dropout:
        raise ArpoError(f"model.path: {path!r} has dropout ({next(iter(dropout))}): its log-probs would not repeat")
    return model.to(pick_device(settings.device)).eval(), tokenizer


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
