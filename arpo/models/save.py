"""Writing a model as a Hugging Face directory."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from arpo.models.lora import merged_state_dict
from arpo.runs.storage import writing


def save_pretrained(model: Any, tokenizer: Any, directory: Path) -> None:
    """Write model and tokenizer as a plain Hugging Face directory."""
    with writing(directory):
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)


def save_for_vllm(model: Any, tokenizer: Any, directory: Path) -> None:
    """Write a Hugging Face directory for vLLM: any adapter merged, embeddings untied.

    On a CPU, vLLM repacks the output layer only if it finds weights for it; a tied one would keep its old weights.
    """
    config = copy.deepcopy(model.config)
    config.tie_word_embeddings = False
    config.architectures = [type(model).__name__]
    config.dtype = next(model.parameters()).dtype
    state = {name: tensor.cpu().contiguous() for name, tensor in merged_state_dict(model).items()}
    state["lm_head.weight"] = state["lm_head.weight"].clone()
    with writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
        config.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
        save_file(state, directory / "model.safetensors", metadata={"format": "pt"})
