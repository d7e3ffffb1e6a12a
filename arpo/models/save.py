"""Writing a model as a Hugging Face directory."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from arpo.errors import ArpoError
from arpo.models.lora import has_adapter, merged_state_dict
from arpo.models.vision import vision_tower
from arpo.runs.storage import writing


def save_pretrained(model: Any, tokenizer: Any, directory: Path) -> None:
    """Write model and tokenizer as a plain Hugging Face directory."""
    if vision_tower(model) is not None:
        return _save_seeing(model, tokenizer, directory)
    with writing(directory):
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)


def _save_seeing(model: Any, tokenizer: Any, directory: Path) -> None:
    """Write text model, vision tower and processor as the directory of one model, any adapter merged."""
    tower = vision_tower(model)
    assert tower is not None
    with writing(directory):
        tokenizer.save_pretrained(directory)
        tower.save(merged_state_dict(model), model.generation_config, directory)


def save_merged(model: Any, tokenizer: Any, directory: Path) -> None:
    """Write a plain Hugging Face directory in which any adapter is merged into the weights."""
    if not has_adapter(model) or vision_tower(model) is not None:
        return save_pretrained(model, tokenizer, directory)
    state = {name: tensor.cpu().contiguous() for name, tensor in merged_state_dict(model).items()}
    with writing(directory):
        model.save_pretrained(directory, state_dict=state)
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


@contextmanager
def new_directory(directory: Path, replace_if: str | None = None) -> Iterator[Path]:
    """Yields a path to write to; what is there at the end of the block becomes `directory`.

    The directory must be new or empty, or hold the file `replace_if`; it is then replaced.
    """
    directory = directory.resolve()
    replaced = replace_if is not None and (directory / replace_if).is_file()
    if not replaced:
        require_empty(directory)
    exists = directory.is_dir() and not replaced
    with writing(directory):
        directory.parent.mkdir(parents=True, exist_ok=True)
        parent = directory if exists else directory.parent
        with tempfile.TemporaryDirectory(dir=parent, prefix=directory.name + ".") as temporary:
            complete = Path(temporary) / "model"
            yield complete
            _make_readable(complete)
            if exists:
                for file in sorted(complete.iterdir(), key=lambda file: file.name == "config.json"):
                    file.rename(directory / file.name)
            else:
                if replaced:
                    directory.rename(Path(temporary) / "replaced")
                complete.rename(directory)


def require_empty(directory: Path) -> None:
    """Raise if something is there that is not an empty directory."""
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ArpoError(f"{directory}: is not empty; choose a new directory")


def _make_readable(directory: Path) -> None:
    """Give all files the mode of a new file: safetensors are written with access for the owner only."""
    probe = directory.parent / "new"
    probe.touch()
    for file in directory.rglob("*"):
        if file.is_file():
            file.chmod(probe.stat().st_mode)
