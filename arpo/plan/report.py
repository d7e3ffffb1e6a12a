"""A plan as text and as JSON values."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from arpo.plan.cost import Memory
from arpo.plan.planner import Option, Plan, Split, what_helps
from arpo.plan.workload import ASSUMABLE

PARTS = {
    "sampling: weights": "reading the weights in every decode step",
    "sampling: kv_cache": "reading the KV cache",
    "sampling: compute": "compute of sampling",
    "sampling: overhead": "overhead of decode steps: kernel launches, elementwise operations, host",
    "sampling: prefill": "prefill of prompts and tool results",
    "sampling: tools": "waiting for tools with nothing else to do",
    "training: compute": "compute of training",
    "training: elementwise": "elementwise operations of training, bound by memory bandwidth",
    "training: launch": "launching the kernels of training",
    "training: network": "gathering sharded weights over the network",
    "training: optimizer": "the optimizer step",
    "sync": "sending the new weights to the sampling GPUs",
}
GB = 1e9


def parts(option: Option) -> dict[str, float]:
    """What the seconds of sampling, training and sync are spent on."""
    scale = option.sampling / option.sampled.seconds if option.sampled.seconds else 0.0  # batches may overlap
    sampling = {f"sampling: {name}": scale * seconds for name, seconds in option.sampled.parts.items()}
    training = {f"training: {name}": seconds for name, seconds in asdict(option.update).items()}
    return {**sampling, **training, "sync": option.sync}


def bottleneck(option: Option, staleness: int) -> str:
    """One sentence: what most of the step is spent on. If sampling and training overlap, only the slower one counts."""
    seconds = {"sampling": option.sampling, "training": option.update.seconds, "sync": option.sync}
    counted = parts(option)
    if staleness > 0 and not option.split.shared:
        faster = "training" if seconds["sampling"] >= seconds["training"] else "sampling"
        counted = {name: value for name, value in counted.items() if not name.startswith(faster)}
    name, most = max(counted.items(), key=lambda each: each[1])
    side = name.partition(":")[0]
    text = f"{side} ({seconds[side] / option.step:.0%} of the step)"
    if side != "sync":
        text += f"; its largest part is {PARTS[name]} ({most / seconds[side]:.0%})"
    tail = option.sampled.tail / option.sampled.seconds if option.sampled.seconds else 0.0
    if side == "sampling" and tail > 0.2:
        text += f"; stragglers: for {tail:.0%} of the time less than a quarter of the rows are open"
    return text


def describe(split: Split) -> str:
    """A split in words."""
    replicas = f", {split.tensor_parallel} GPUs per replica" if split.tensor_parallel > 1 else ""
    if split.shared and split.sampling == 1:
        return f"one GPU samples and trains{replicas}"
    if split.shared:
        return f"all {split.sampling} sample, then all train{replicas}"
    return f"{split.sampling} sample, {split.training} train{replicas}"


def how_to_run(split: Split, node: int) -> str:
    """How to run a split on machines of `node` GPUs, in a line."""
    machines = f"--nnodes {-(-split.training // node)} " if split.training > node else ""
    ranks = f"torchrun {machines}--nproc-per-node {min(split.training, node)} -m arpo train"
    train = ranks if split.training > 1 else "arpo train"
    if split.shared and split.training == 1:
        return train
    if split.shared:
        return f"{train} CONFIG rollout.engine=local (docs/sharded.md)"
    if split.tensor_parallel == 1:
        return f"a Ray cluster with cluster.trainers={split.training} (docs/cluster.md)"
    servers = f"{split.replicas} vLLM server{'s' if split.replicas > 1 else ''}"
    return f"{servers} with --tensor-parallel-size {split.tensor_parallel}, and {train} (docs/vllm.md)"


def text_lines(plan: Plan) -> list[str]:
    """The whole plan as text."""
    setup, best = plan.planner.setup, plan.best
    workload, sampled, limit = setup.workload, best.sampled, setup.hardware.memory
    by_source: dict[str, list[str]] = {}
    for name in ASSUMABLE:
        value = getattr(workload, name)
        shown = str(value).lower() if isinstance(value, bool) else f"{value:.4g}"
        by_source.setdefault(plan.sources[name], []).append(f"{name} {shown}")
    lines = [
        f"{setup.shape.name} ({setup.shape.parameters / 1e9:.3g}B parameters, {setup.config.model.dtype}) on "
        f"{setup.gpus} x {setup.hardware.name}, staleness {setup.staleness}",
        "",
        f"per step: {workload.questions} questions x {workload.num_trajectories} trajectories; "
        f"{sampled.tool_calls:,} tool calls, {sampled.branches:,} branches; {sampled.sampled_tokens:,} tokens sampled, "
        f"{sampled.prefill_tokens:,} prefilled, {sampled.unique_tokens:,} unique of {sampled.total_tokens:,}",
        "",
        *(f"{source}: {', '.join(found)}" for source, found in by_source.items()),
        "",
        f"best of {len(plan.options)} split{'' if len(plan.options) == 1 else 's'}: {describe(best.split)}; "
        f"a replica has {best.open_trajectories} open trajectories",
        f"to run it: {how_to_run(best.split, setup.hardware.node)}",
        f"step {_seconds(best.step)}",
    ]
    sides = (("sampling", "rollout_seconds", best.sampling), ("training", "train_seconds", best.update.seconds))
    for side, metric, predicted in sides:
        note = ""
        if plan.measured is not None:
            measured = plan.measured[metric]
            ratio = predicted / measured if measured else float("nan")
            note = f"   measured {_seconds(measured)}, predicted / measured {ratio:.2f}"
        lines.append(f"  {side:9} {_seconds(predicted)}{note}")
        for part, seconds in parts(best).items():
            if part.startswith(side) and seconds >= 0.005 * predicted:
                lines.append(f"    {_seconds(seconds)}  {PARTS[part]}")
    whose = "each" if best.split.shared else "a sampling"
    lines += [
        f"  {'sync':9} {_seconds(best.sync)}",
        "",
        f"memory of {whose} GPU: {_memory(best.sampling_memory, limit)}",
    ]
    if not best.split.shared:
        lines += [f"memory of a training GPU: {_memory(best.training_memory, limit)}"]
    lines += ["", f"bottleneck: {bottleneck(best, setup.staleness)}", ""]
    lines += ["splits, fastest first (step = sampling, training, sync):"]
    for option in sorted(plan.options, key=lambda option: option.step)[:8]:
        times = f"{_seconds(option.sampling)}, {_seconds(option.update.seconds)}, {_seconds(option.sync)}"
        lines.append(f"  {_seconds(option.step)} = {times}  {describe(option.split)}")
    lines += ["", "what would change the step time most (each is predicted separately):"]
    for change, seconds in what_helps(plan.planner, best):
        lines.append(f"  {_seconds(seconds)} {seconds / best.step - 1:+.0%}  {change}")
    return lines


def _memory(memory: Memory, limit: float) -> str:
    held = ", ".join(f"{name} {size / GB:.3g}" for name, size in asdict(memory).items() if size)
    return f"{memory.total / GB:.3g} of {limit / GB:.0f} GB ({held}): fits"


def _seconds(seconds: float) -> str:
    return f"{seconds:8.1f} s" if seconds >= 10 else f"{seconds:8.3f} s"


def as_json(plan: Plan) -> dict[str, Any]:
    """The whole plan as JSON values, in seconds and bytes."""
    best, setup = plan.best, plan.planner.setup
    splits = sorted(plan.options, key=lambda option: option.step)
    return {
        "model": {**asdict(setup.shape), "parameters": setup.shape.parameters},
        "hardware": asdict(setup.hardware),
        "gpus": setup.gpus,
        "staleness": setup.staleness,
        "seed": setup.seed,
        "workload": asdict(setup.workload),
        "sources": dict(plan.sources),
        "best": {**asdict(best), "training": best.update.seconds, "parts": parts(best)},
        "bottleneck": bottleneck(best, setup.staleness),
        "splits": [{**asdict(option), "training": option.update.seconds} for option in splits],
        "helps": [{"change": change, "step": seconds} for change, seconds in what_helps(plan.planner, best)],
        "measured": None if plan.measured is None else dict(plan.measured),
    }
