"""Checkpoints: a directory with `model/`, `optimizer.safetensors` and `state.json`. Nothing is pickled.

Where several ranks train, each writes its shards of the optimizer's state into `optimizer/` instead of the one file
(`arpo.trainer.dist.shards`); any number of ranks can read either.

`model/` is in Hugging Face layout or, where an adapter was trained, that adapter in PEFT's; the run's settings name its
base. A bfloat16 model is stored as the engine samples from it; its float32 master weights are in the optimizer's state.

All randomness of a run is derived from its seed and the step's number, so weights, optimizer and step are enough to
continue as if the run had not stopped, to the last bit on a CPU.
"""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import SafetensorError

from arpo.config.files import parse_json, read_limited
from arpo.errors import ArpoError
from arpo.models import lora
from arpo.models.save import save_pretrained
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


def load_checkpoint(trainer: Trainer, directory: Path) -> int:
    """Restore optimizer state into `trainer`, whose model was loaded from `directory`/model; returns the step."""
    try:
        state = parse_json(read_limited(directory / "state.json"))
        step, optimizer_steps = int(state["step"]), int(state["optimizer_steps"])
        trainer.load_optimizer(directory)
    except (OSError, ValueError, KeyError, TypeError, OverflowError, SafetensorError) as error:
        raise ArpoError(f"the checkpoint {directory} is damaged: {error}") from error
    trainer.optimizer.steps = optimizer_steps
    return step
