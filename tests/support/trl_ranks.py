"""One rank of a training step in TRL, for each loss: writes its trees, and rank 0 the gradients of all ranks.

Started by torchrun with a folder, a preset and losses.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback
from trl import GRPOConfig
from trl_doors import DOORS, doors_dataset, doors_model, open_door

from arpo.integrations.trajectories import write_trajectories
from arpo.integrations.trl import TreeGRPOTrainer, loss_arguments


def by_first_door(completions: list[Any], **_: Any) -> list[float | None]:
    """A reward that depends on the first door; none for every fourth completion."""
    return [
        None if number % 4 == 3 else sum(0.7 ** (1 + DOORS.index(door)) for door in DOORS if door in str(one[0]))
        for number, one in enumerate(completions)
    ]


class Gradients(TrainerCallback):
    """Saves the gradients before the optimizer's step."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Save them, on rank 0."""
        if args.process_index == 0:
            model = getattr(model, "module", model)
            torch.save({name: each.grad.clone() for name, each in model.named_parameters()}, self.folder / "grads.pt")


def main(folder: Path, preset: str, loss: str) -> None:
    """One step of two prompts, one per rank."""
    model, tokenizer = doors_model(steps=20)
    trainer = TreeGRPOTrainer(
        model,
        reward_funcs=by_first_door,
        train_dataset=doors_dataset(),
        processing_class=tokenizer,
        tools=[open_door],
        branching=preset,
        callbacks=[Gradients(folder)],
        args=GRPOConfig(
            output_dir=str(folder / "out"),
            max_steps=1,
            per_device_train_batch_size=6,
            num_generations=6,
            max_completion_length=100,
            max_grad_norm=0.0,
            report_to=[],
            bf16=False,
            gradient_checkpointing=False,
            use_cpu=True,
            save_strategy="no",
            disable_tqdm=True,
            **loss_arguments(loss),
        ),
    )
    trainer.train()
    write_trajectories(folder / f"trees_{trainer.args.process_index}.jsonl", trainer.trees)


if __name__ == "__main__":
    for loss in sys.argv[3:]:
        folder = Path(sys.argv[1], loss)
        folder.mkdir(exist_ok=True)
        main(folder, sys.argv[2], loss)
