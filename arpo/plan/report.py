"""A plan as text for a person, and as values for JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from arpo.plan.cost import Memory
from arpo.plan.load import ASSUMED
from arpo.plan.planner import Option, Planner, Split, what_helps

WORDS = {
    "sampling: weights": "reading the weights once for every token of a path",
    "sampling: keys": "reading the keys and values of the paths",
    "sampling: arithmetic": "the arithmetic of sampling",
    "sampling: launching": "what a decode step takes beside reading and arithmetic",
    "sampling: reading": "reading prompts and tool results",
    "sampling: tools": "waiting for tools with nothing else to do",
    "training: arithmetic": "the arithmetic of training",
    "training: memory": "norms, rotations and sums in training, at the speed of memory",
    "training: launching": "launching the operations of training",
    "training: network": "collecting sharded weights over the network",
    "training: optimizer": "the optimizer step",
    "sync": "sending the new weights to those that sample",
}
UNIT = 1e9  # GB


def parts(option: Option) -> dict[str, float]:
    """Where the seconds of sampling, training and sync go; those of overlapping batches in proportion."""
    sampled, spent = option.sampled, option.update
    scale = option.sampling / sampled.seconds if sampled.seconds else 0.0
    found = {f"sampling: {name}": scale * seconds for name, seconds in sampled.parts.items()}
    for name in ("arithmetic", "memory", "launching", "network", "optimizer"):
        found[f"training: {name}"] = getattr(spent, name)
    return {**found, "sync": option.sync}


def bottleneck(option: Option, staleness: int) -> str:
    """One sentence: what most of the step goes to. Where the halves overlap, only the slower one counts."""
    sampling, training = option.sampling, option.update.seconds
    overlap = staleness > 0 and not option.split.shared
    counts = parts(option)
    if overlap:
        faster = "training" if sampling >= training else "sampling"
        counts = {name: seconds for name, seconds in counts.items() if not name.startswith(faster)}
    name, seconds = max(counts.items(), key=lambda each: each[1])
    side = name.partition(":")[0]
    whole = {"sampling": sampling, "training": training, "sync": option.sync}[side]
    text = f"{side} ({whole / option.step:.0%} of the step)"
    if side != "sync":
        text += f", and of that mostly {WORDS[name]} ({seconds / whole:.0%} of it)"
    tail = option.sampled.tail / option.sampled.seconds if option.sampled.seconds else 0.0
    if side == "sampling" and tail > 0.2:
        text += f"; for {tail:.0%} of the time less than a quarter of the rows are open: stragglers"
    return text


def describe(split: Split) -> str:
    """A split in words."""
    ways = f", {split.ways} GPUs to a replica" if split.ways > 1 else ""
    if split.shared:
        same = "one GPU samples and trains" if split.sampling == 1 else f"all {split.sampling} sample, then all train"
        return f"{same}{ways}"
    return f"{split.sampling} sample, {split.training} train{ways}"


def text_lines(
    planner: Planner, sources: Mapping[str, str], measured: Mapping[str, float] | None, options: Sequence[Option]
) -> list[str]:
    """The whole report."""
    setup = planner.setup
    best = min(options, key=lambda option: option.step)
    load, sampled = setup.load, best.sampled
    lines = [
        f"{setup.shape.name} ({setup.shape.parameters / 1e9:.3g}B weights, {setup.config.model.dtype}) on "
        f"{setup.gpus} x {setup.hardware.name}, staleness {setup.staleness}",
        "",
        f"a step: {load.questions} questions x {load.num_trajectories} paths; {sampled.calls:,} tool calls, "
        f"{sampled.branches:,} branches; {sampled.sampled:,} tokens sampled, {sampled.read:,} read, "
        f"{sampled.unique:,} unique of {sampled.total:,}",
        "",
        *_assumptions(planner, sources),
        "",
        f"best of {len(options)} splits: {describe(best.split)}; a replica has {best.paths} paths open",
        f"step {_s(best.step)}",
    ]
    names = {"rollout_seconds": best.sampling, "train_seconds": best.update.seconds}
    for label, name in (("sampling", "rollout_seconds"), ("training", "train_seconds")):
        seen = ""
        if measured is not None:
            ratio = names[name] / measured[name] if measured[name] else float("nan")
            seen = f"   measured {_s(measured[name])}, predicted / measured {ratio:.2f}"
        lines.append(f"  {label:9} {_s(names[name])}{seen}")
        for part, seconds in parts(best).items():
            if part.startswith(label) and seconds >= 0.005 * names[name]:
                lines.append(f"    {_s(seconds)}  {WORDS[part]}")
    lines += [f"  {'sync':9} {_s(best.sync)}", "", *_memory(planner, best), ""]
    lines += [f"bottleneck: {bottleneck(best, setup.staleness)}", ""]
    lines += ["splits, fastest first (step = sampling, training, sync):"]
    for option in sorted(options, key=lambda option: option.step)[:8]:
        lines.append(
            f"  {_s(option.step)} = {_s(option.sampling)}, {_s(option.update.seconds)}, {_s(option.sync)}  "
            f"{describe(option.split)}"
        )
    lines += ["", "what would change the step most (each predicted anew):"]
    for words, seconds in what_helps(planner, best):
        lines.append(f"  {_s(seconds)} {seconds / best.step - 1:+.0%}  {_counted(words)}")
    return lines


def _counted(words: str) -> str:
    return f"{words}, for two such steps" if words.startswith("half") else words


def _assumptions(planner: Planner, sources: Mapping[str, str]) -> list[str]:
    values = asdict(planner.setup.load)
    by_source: dict[str, list[str]] = {}
    for name in ASSUMED:
        by_source.setdefault(sources[name], []).append(f"{name} {_n(values[name])}")
    return [f"{source}: {', '.join(found)}" for source, found in by_source.items()]


def _n(value: float) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:.4g}"


def _memory(planner: Planner, best: Option) -> list[str]:
    limit = planner.setup.hardware.memory
    if best.split.shared:
        return [f"memory of each GPU: {_held(best.sampling_memory, limit)}"]
    return [
        f"memory of a GPU that samples: {_held(best.sampling_memory, limit)}",
        f"memory of a GPU that trains: {_held(best.training_memory, limit)}",
    ]


def _held(memory: Memory, limit: float) -> str:
    held = ", ".join(f"{name} {size / UNIT:.3g}" for name, size in asdict(memory).items() if size)
    return f"{memory.total / UNIT:.3g} of {limit / UNIT:.0f} GB ({held}): fits"


def _s(seconds: float) -> str:
    """Seconds with as many digits as they are worth."""
    return f"{seconds:8.1f} s" if seconds >= 10 else f"{seconds:8.3f} s"


def as_json(
    planner: Planner, sources: Mapping[str, str], measured: Mapping[str, float] | None, options: Sequence[Option]
) -> dict[str, Any]:
    """The same as values; seconds and bytes."""
    best, setup = min(options, key=lambda option: option.step), planner.setup
    return {
        "model": {**asdict(setup.shape), "parameters": setup.shape.parameters},
        "hardware": asdict(setup.hardware),
        "gpus": setup.gpus,
        "staleness": setup.staleness,
        "seed": setup.seed,
        "load": asdict(setup.load),
        "sources": dict(sources),
        "best": {**_option(best), "parts": parts(best), "sampled": asdict(best.sampled)},
        "bottleneck": bottleneck(best, setup.staleness),
        "splits": [_option(option) for option in sorted(options, key=lambda option: option.step)],
        "helps": [{"change": words, "step": seconds} for words, seconds in what_helps(planner, best)],
        "measured": None if measured is None else dict(measured),
    }


def _option(option: Option) -> dict[str, Any]:
    memory = {"sampling_memory": asdict(option.sampling_memory), "training_memory": asdict(option.training_memory)}
    return {
        "split": asdict(option.split),
        "paths": option.paths,
        "step": option.step,
        "sampling": option.sampling,
        "training": option.update.seconds,
        "sync": option.sync,
        **memory,
    }
