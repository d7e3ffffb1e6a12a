"""A checkpoint is a directory: `model/`, `optimizer.safetensors`, `state.json`. Nothing is pickled.

Where several ranks train, each writes its shards of the optimizer's state (`arpo.trainer.dist.shards`) into `optimizer/` in
place of the one file; any number of ranks can read either.

`model/` is in Hugging Face layout, or, where an adapter was trained, that adapter in PEFT's: its base is the one that
the run's settings name. A bfloat16 model lies there as the engine samples from it; the float32 weights that it was
rounded from are among the optimizer's.

All randomness of a run is derived from its seed and the step's number, so weights, optimizer and step are all there is
to save: a resumed run goes on as if it had not stopped, to the last bit on a CPU.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file

from arpo.errors import ArpoError
from arpo.models import lora
from arpo.trainer.trainer import Trainer


def save_checkpoint(trainer: Trainer, step: int, directory: Path) -> None:
    """Write everything a run needs to go on after `step`."""
    if lora.has_adapter(trainer.model):
        lora.save_adapter(trainer.model, directory / "model")
    else:
        save_pretrained(trainer.model, trainer.tokenizer, directory / "model")
    trainer.save_optimizer(directory)
    state = {"step": step, "optimizer_steps": trainer.optimizer.steps}
    (directory / "state.json").write_text(json.dumps(state))


def save_pretrained(model: object, tokenizer: object, directory: Path) -> None:
    """Write a plain Hugging Face directory."""
    model.save_pretrained(directory)  # type: ignore[attr-defined]
    tokenizer.save_pretrained(directory)  # type: ignore[attr-defined]


def save_untied(model: Any, tokenizer: Any, directory: Path) -> None:
    """Write a Hugging Face directory for vLLM: any adapter merged, and the output layer with weights of its own.

    On a CPU, vLLM packs the output layer anew only if it finds weights for it, so a tied one would stay as it was.
    """
    directory.mkdir(parents=True, exist_ok=True)
    config = copy.deepcopy(model.config)
    config.tie_word_embeddings = False
    config.architectures = [type(model).__name__]
    config.dtype = next(model.parameters()).dtype
    config.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    state = {name: tensor.cpu().contiguous() for name, tensor in lora.plain_state(model).items()}
    state["lm_head.weight"] = state["lm_head.weight"].clone()
    save_file(state, directory / "model.safetensors", metadata={"format": "pt"})


def model_settings(directory: Path) -> dict[str, str | None]:
    """What the settings of the section `model` must become to load a checkpoint's model in place of the run's first."""
    model = directory / "model"
    if (model / lora.CONFIG).is_file():
        return {"adapter": str(model)}
    return {"path": str(model), "adapter": None}


def load_checkpoint(trainer: Trainer, directory: Path) -> int:
    """Restore optimizer state into `trainer`, whose model was loaded from `directory`/model; returns the step."""
    try:
        state = json.loads((directory / "state.json").read_text())
        step, optimizer_steps = int(state["step"]), int(state["optimizer_steps"])
        trainer.load_optimizer(directory)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise ArpoError(f"the checkpoint {directory} is damaged: {error}") from error
    trainer.optimizer.steps = optimizer_steps
    return step
