"""A checkpoint is a directory: `model/` in Hugging Face layout, `optimiser.safetensors`, `state.json`. Nothing is
pickled.

All randomness of a run is derived from its seed and the step's number, so weights, optimiser and step are all there is
to save: a resumed run goes on as if it had not stopped, to the last bit on a CPU.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from arpo.trainer.update import Trainer
from arpo.types import ArpoError


def save_checkpoint(trainer: Trainer, step: int, directory: Path) -> None:
    """Write everything a run needs to go on after `step`."""
    save_pretrained(trainer.model, trainer.tokenizer, directory / "model")
    save_file(_optimiser_tensors(trainer), directory / "optimiser.safetensors")
    state = {"step": step, "optimiser_steps": trainer.optimiser_steps}
    (directory / "state.json").write_text(json.dumps(state))


def save_pretrained(model: object, tokenizer: object, directory: Path) -> None:
    """Write a plain Hugging Face directory."""
    model.save_pretrained(directory)  # type: ignore[attr-defined]
    tokenizer.save_pretrained(directory)  # type: ignore[attr-defined]


def load_checkpoint(trainer: Trainer, directory: Path) -> int:
    """Restore optimiser state into `trainer`, whose model was loaded from `directory`/model; returns the step."""
    try:
        state = json.loads((directory / "state.json").read_text())
        saved = load_file(directory / "optimiser.safetensors")
    except (OSError, ValueError) as error:
        raise ArpoError(f"the checkpoint {directory} is damaged: {error}") from error
    for name, parameter in trainer.model.named_parameters():
        tensors = {key: saved[f"{key}/{name}"] for key in ("step", "exp_avg", "exp_avg_sq") if f"{key}/{name}" in saved}
        if tensors:
            trainer.optimiser.state[parameter] = {
                key: value if key == "step" else value.to(parameter.device) for key, value in tensors.items()
            }
    trainer.optimiser_steps = int(state["optimiser_steps"])
    return int(state["step"])


def _optimiser_tensors(trainer: Trainer) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for name, parameter in trainer.model.named_parameters():
        for key, value in trainer.optimiser.state.get(parameter, {}).items():
            tensors[f"{key}/{name}"] = torch.as_tensor(value).detach().cpu().contiguous()
    return tensors
