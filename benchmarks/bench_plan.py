"""`arpo plan` against the steps that it predicts, on this machine's CPU.

    python benchmarks/bench_plan.py [--steps 8] [CONFIG] [key=value ...]

The machine is measured (`--gpu here`), a few steps are trained with one thread, and the plan predicts them from their
own metrics. Measured are CPU seconds of this process, so what else the machine does hardly counts; tools run in
processes of their own, so the time that the plan gives to tools is left out on both sides. The first step warms up and
is left out. The last line is a JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from arpo.config.loading import load_config
from arpo.plan.hardware import measure
from arpo.plan.planner import Planner, Setup
from arpo.plan.shape import find_shape
from arpo.plan.simulate import fit_branch_rate
from arpo.plan.workload import turn_spread, workload_from_metrics
from arpo.runs.run_dir import open_run_dir
from arpo.training import loop as training


def main() -> None:
    """Measure, train, predict, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", nargs="?", type=Path, default=Path("arpo/builtin/demo.toml"))
    parser.add_argument("overrides", nargs="*", default=[])
    parser.add_argument("--steps", type=int, default=8)
    args = parser.parse_args()
    torch.set_num_threads(1)
    training.time = SimpleNamespace(monotonic=time.process_time)  # type: ignore[attr-defined]
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "run"
        more = [f"run.dir={directory}", f"train.steps={args.steps}", "model.device=cpu"]
        config = load_config(args.config, [*args.overrides, *more])
        shape = find_shape(config.model.path)
        hardware = measure(shape.hidden, shape.intermediate)
        print(f"{asdict(hardware)}", file=sys.stderr)
        with training.open_training(config) as run:
            asyncio.run(training.train(run))
        log = open_run_dir(directory)
        records, spread = log.read_metrics()[1:], turn_spread(log)
    workload = workload_from_metrics(config, records, spread)
    workload = fit_branch_rate(workload, sum(r["branches"] for r in records) / sum(r["questions"] for r in records))
    option = Planner(Setup(config, workload, shape, hardware, 1)).best()
    mean = {name: sum(r[name] for r in records) / len(records) for name in records[0] if _number(records, name)}
    sampling = option.sampling - option.sampled.parts["tools"]
    answer: dict[str, Any] = {
        "sampling": ratio(sampling, mean["rollout_seconds"]),
        "training": ratio(option.update.seconds, mean["train_seconds"]),
        "sampled_tokens": ratio(option.sampled.sampled_tokens, mean["sampled_tokens"]),
        "read_tokens": ratio(option.sampled.prefill_tokens, mean["engine_prefill_tokens"]),
        "unique_tokens": ratio(option.sampled.unique_tokens, mean["unique_tokens"]),
        "tool_calls": ratio(option.sampled.tool_calls, mean["tool_calls"]),
        "branches": ratio(option.sampled.branches, mean["branches"]),
        "sampling_parts": option.sampled.parts,
        "hardware": asdict(hardware),
    }
    print(json.dumps(answer))


def ratio(predicted: float, measured: float) -> dict[str, float]:
    """Both numbers and the first over the second."""
    return {
        "predicted": predicted,
        "measured": measured,
        "ratio": predicted / measured if measured else float("nan"),
    }


def _number(records: list[dict[str, Any]], name: str) -> bool:
    return all(isinstance(r.get(name), int | float) for r in records)


if __name__ == "__main__":
    main()
