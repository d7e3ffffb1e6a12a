"""TRL's GRPOTrainer with rollout trees: a model learns to look up prices and add them.

    pip install 'trl>=1.16,<1.17'
    python examples/trl_tree_grpo.py --model Qwen/Qwen3-0.6B --steps 200

Only the trainer's name and `branching="arpo"` differ from a script for TRL alone. With `--branching never` it is TRL's
own GRPOTrainer, for a comparison. The trees of the last step are written to OUTPUT/trees.jsonl, one trajectory a line.
"""

from __future__ import annotations

import argparse
import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from trl import GRPOConfig

from arpo.integrations.trajectories import write_trajectories
from arpo.integrations.trl import TreeGRPOTrainer, loss_arguments

PRICES = {"apple": 40, "pear": 55, "plum": 25, "melon": 310, "fig": 70, "lemon": 35}


def price(fruit: str) -> str:
    """
    Look up what one fruit costs.

    Args:
        fruit: The name of the fruit, like "pear".

    Returns:
        The price in cents.
    """
    if fruit not in PRICES:
        raise KeyError(f"there is no fruit {fruit!r}; there are {', '.join(PRICES)}")  # the model reads this
    return f"One {fruit} costs {PRICES[fruit]} cents."


def correct(completions: list[list[dict[str, Any]]], answer: list[int], **_: Any) -> list[float]:
    """1 if the last number in the final message is the answer."""
    numbers = [re.findall(r"\d+", messages[-1].get("content") or "") for messages in completions]
    return [float(bool(found) and int(found[-1]) == right) for found, right in zip(numbers, answer, strict=True)]


def questions() -> Dataset:
    """Two fruits in every question."""
    rows = [
        {
            "prompt": [{"role": "user", "content": f"What do one {a} and one {b} cost together, in cents?"}],
            "answer": PRICES[a] + PRICES[b],
        }
        for a, b in itertools.permutations(PRICES, 2)
    ]
    return Dataset.from_list(rows)


def main(arguments: Sequence[str] | None = None) -> TreeGRPOTrainer:
    """Train, and write the last trees."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="Qwen/Qwen3-0.6B")
    parser.add_argument("--branching", default="arpo", help="a preset, a TOML file, or never")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--generations", type=int, default=8)
    parser.add_argument("--max-completion-length", type=int, default=1024)
    parser.add_argument("--output", type=Path, default=Path("runs/trl"))
    given = parser.parse_args(arguments)
    trainer = TreeGRPOTrainer(
        given.model,
        reward_funcs=correct,
        train_dataset=questions(),
        tools=[price],
        branching=given.branching,
        args=GRPOConfig(
            output_dir=str(given.output),
            max_steps=given.steps,
            num_generations=given.generations,
            per_device_train_batch_size=given.generations,
            gradient_accumulation_steps=4,
            max_completion_length=given.max_completion_length,
            max_tool_calling_iterations=3,
            learning_rate=1e-6,
            logging_steps=1,
            report_to=[],
            use_cpu=not torch.cuda.is_available(),
            **loss_arguments("arpo"),
        ),
    )
    trainer.train()
    if trainer.trees:
        write_trajectories(given.output / "trees.jsonl", trainer.trees)
    return trainer


if __name__ == "__main__":
    main()
