"""The same task in TRL with plain GRPO and with rollout trees: tool calls and accuracy. JSON on the last line.

    python benchmarks/bench_trl.py [--steps 60] [--seeds 3] [--generations 16] [--arms grpo,arpo,arpo-random]

"grpo" is TRL's own GRPOTrainer, with its own sampling; the other arms are presets of TreeGRPOTrainer. All have the same
model, loss, optimizer, number of completions (--generations for each of 4 prompts a step) and seeds. The task is that
of `trl_doors`: two doors, one after the other. Every 10 steps the policy is evaluated without branching, on 32
completions per room. A tool call is one call of the function, however many trajectories share it; those of evaluations
are left out. About a minute of CPU time per run of 60 steps.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from statistics import fmean, stdev
from typing import Any

from transformers import PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl_doors import doors_dataset, doors_model, open_door, opened, right_doors

from arpo.integrations.trl import TreeGRPOTrainer, loss_arguments

EVERY, THRESHOLDS = 10, (0.4, 0.5, 0.6)


def solved(completions: list[Any], doors: list[list[str]], **_: Any) -> list[float]:
    """1 for the right doors in the right order."""
    return [float(opened(one) == tuple(wanted)) for one, wanted in zip(completions, doors, strict=True)]


class Meter(TrainerCallback):  # type: ignore[misc]
    """Counts calls of the tool, and records them with the accuracy of the policy."""

    def __init__(self) -> None:
        self.calls, self.points, self.trainer = 0, list[tuple[int, int, float]](), None

    def measure(self, step: int) -> None:
        """Evaluate the policy after this step; the calls of the evaluation do not count."""
        assert self.trainer is not None
        calls = self.calls
        accuracy = self.trainer.evaluate()["eval_rewards/solved/mean"]
        self.calls = calls
        self.points.append((step, calls, accuracy))

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Evaluate every few steps."""
        if state.global_step % EVERY == 0:
            self.measure(state.global_step)


def run(arm: str, seed: int, steps: int, generations: int) -> dict[str, Any]:
    """Train one arm with one seed."""
    meter = Meter()

    def door(colour: str) -> str:
        meter.calls += 1
        return open_door(colour)

    door.__name__, door.__doc__ = open_door.__name__, open_door.__doc__
    model, tokenizer = doors_model()
    with tempfile.TemporaryDirectory() as folder:
        args = GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=4 * generations,
            per_device_eval_batch_size=128,
            num_generations=generations,
            num_generations_eval=32,
            max_completion_length=160,
            max_tool_calling_iterations=3,
            max_steps=steps,
            learning_rate=1e-3,
            adam_beta2=0.95,
            lr_scheduler_type="constant_with_warmup",
            warmup_steps=5,  # without it, the first steps of Adam can destroy a model this small
            reward_weights=[1.0, 0.0],
            seed=seed,
            report_to=[],
            bf16=False,
            gradient_checkpointing=False,
            use_cpu=True,
            logging_strategy="no",
            save_strategy="no",
            disable_tqdm=True,
            **loss_arguments("arpo"),
        )
        kind, more = (GRPOTrainer, {}) if arm == "grpo" else (TreeGRPOTrainer, {"branching": arm})
        rows = doors_dataset()
        meter.trainer = kind(
            model,
            reward_funcs=[right_doors, solved],
            args=args,
            train_dataset=rows,
            eval_dataset=rows,
            processing_class=tokenizer,
            tools=[door],
            callbacks=[meter],
            **more,
        )
        meter.trainer.remove_callback(PrinterCallback)
        meter.measure(0)
        meter.trainer.train()
    reached = {
        str(share): next((calls for _, calls, acc in meter.points if acc >= share), None) for share in THRESHOLDS
    }
    return {"arm": arm, "seed": seed, "points": meter.points, "calls_to": reached}


def summary(runs: list[dict[str, Any]], arm: str) -> dict[str, Any]:
    """Means over the seeds of one arm, with standard deviations."""
    ends = [one["points"][-1] for one in runs if one["arm"] == arm]
    calls, accuracies = [calls for _, calls, _ in ends], [accuracy for *_, accuracy in ends]
    several = len(ends) > 1
    return {
        "tool_calls": fmean(calls),
        "accuracy": fmean(accuracies),
        "accuracy_std": stdev(accuracies) if several else None,
        "accuracies": accuracies,
        "calls_to": {
            str(share): [one["calls_to"][str(share)] for one in runs if one["arm"] == arm] for share in THRESHOLDS
        },
    }


def main() -> None:
    """Run all arms with all seeds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--generations", type=int, default=16)
    parser.add_argument("--arms", default="grpo,arpo,arpo-random")
    given = parser.parse_args()
    arms, runs = given.arms.split(","), list[dict[str, Any]]()
    for seed in range(given.seeds):
        for arm in arms:
            runs.append(run(arm, seed, given.steps, given.generations))
            shown = ", ".join(f"{step}: {accuracy:.2f}" for step, _, accuracy in runs[-1]["points"])
            print(f"{arm}, seed {seed}: {runs[-1]['points'][-1][1]} calls; accuracy after steps {shown}", flush=True)
    result = {**vars(given), "arms": {arm: summary(runs, arm) for arm in arms}}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
