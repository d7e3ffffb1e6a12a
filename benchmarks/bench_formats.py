"""Which call format suits a model: well-formed calls, accuracy and pass@k. JSON on the last line.

    python benchmarks/bench_formats.py MODEL GSM8K.jsonl [--formats native,tags,json] [--shots 0,2] [--tasks 64]
        [--samples 8] [--steps 0] [--seeds 0] [--set KEY=VALUE ...]

MODEL is whatever `arpo chat` takes; GSM8K.jsonl is GSM8K's training file: its last rows are asked, its first rows are
trained on. The tool is Python. Two-shot prompts have the examples in `examples/gsm8k_shots.jsonl`. With `--steps`,
each combination is then trained with each of the seeds (`--set preset=...` names the algorithm), and asked again; one
without any informative group is not trained, since all advantages would be 0. A combination that the model's template
refuses is reported with the reason.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import arpo
from arpo.config.loading import load_config
from arpo.types import Fault

SHOTS = Path(__file__).parents[1] / "examples" / "gsm8k_shots.jsonl"
SETTINGS = (
    "rollout.max_tool_calls=3",
    "rollout.max_tokens=512",
    "rollout.num_trajectories=8",
    "rollout.concurrency=512",
    "data.answer_after=####",
    "train.batch_size=16",
    "train.lr=5e-6",
    "train.max_microbatch_tokens=4096",
    "eval.temperature=1.0",
    "eval.top_p=1.0",
)


def main() -> None:
    """Measure every combination of a format and a number of examples."""
    options = parse()
    rows = [json.loads(line) for line in options.questions.read_text().splitlines()]
    results = [
        result
        for shots in map(int, options.shots.split(","))
        for call_format in options.formats.split(",")
        for result in measure(options, rows, call_format, shots)
    ]
    what = {"model": Path(options.model).name, "tasks": options.tasks, "samples": options.samples}
    print(json.dumps(what | {"results": results}))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("questions", type=Path)
    parser.add_argument("--formats", default="native,tags,json")
    parser.add_argument("--shots", default="0,2")
    parser.add_argument("--tasks", type=int, default=64)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE")
    return parser.parse_args()


def measure(
    options: argparse.Namespace, rows: Sequence[dict[str, str]], call_format: str, shots: int
) -> Iterator[dict[str, Any]]:
    """The results of one combination, before training and after it for each seed."""
    test, train = rows[-options.tasks :], rows[: len(rows) - options.tasks]
    what = {"format": call_format, "shots": shots}
    examples = [f"rollout.examples={SHOTS}"] if shots else []
    config = load_config(None, [*SETTINGS, f"rollout.format={call_format}", *examples, *options.set])
    for seed in map(int, options.seeds.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            try:
                trainer = arpo.Trainer(
                    options.model,
                    tasks=train,
                    tools=["python"],
                    reward="number",
                    seed=seed,
                    output_dir=Path(folder) / "run",
                    progress=False,
                    config=config,
                )
            except arpo.ArpoError as error:
                yield shown(what | {"refused": str(error)})
                return
            with trainer:
                if seed == int(options.seeds.split(",")[0]):
                    before = ask(trainer, test, options.samples)
                    yield shown(what | {"steps": 0} | before)
                    if not before["informative_groups"]:
                        return
                if options.steps:
                    history = trainer.train(steps=options.steps)
                    calls = sum(step["tool_calls"] for step in history)
                    after = ask(trainer, test, options.samples)
                    yield shown(what | {"steps": options.steps, "seed": seed, "training_calls": calls} | after)


def ask(agent: arpo.Agent, rows: Sequence[dict[str, str]], samples: int) -> dict[str, Any]:
    """Accuracy, pass@k and what the calls were like."""
    evaluation = agent.evaluate(rows, samples=samples, k=(1, samples))
    trajectories = [one for tree in evaluation.trees for one in tree.trajectories]
    calls = [result for one in trajectories for _, result in one.tool_calls]
    well_formed = sum(result.attempts > 0 for result in calls)
    formats = [reward.parts["format"] for tree in evaluation.trees for reward in tree.rewards]
    right = [sum(reward.parts["correct"] > 0 for reward in tree.rewards) for tree in evaluation.trees]
    return {
        "accuracy": round(evaluation.accuracy or 0.0, 4),
        f"pass@{samples}": round(evaluation.pass_at(samples) or 0.0, 4),
        "informative_groups": round(sum(0 < each < samples for each in right) / len(right), 4),
        "trajectories_with_a_call": round(sum(bool(one.tool_calls) for one in trajectories) / len(trajectories), 4),
        "calls": len(calls),
        "well_formed": round(well_formed / len(calls), 4) if calls else None,
        "failed": sum(result.attempts > 0 and result.fault is Fault.MODEL for result in calls),
        "right_format": round(sum(formats) / len(formats), 4),
    }


def shown(result: dict[str, Any]) -> dict[str, Any]:
    """The result, which is printed as soon as it is there."""
    print(json.dumps(result), flush=True)
    return result


if __name__ == "__main__":
    main()
