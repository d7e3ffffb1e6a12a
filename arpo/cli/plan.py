"""`arpo plan`: what a step would take on other machines."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from arpo.cli.base import Overrides
from arpo.cli.display import console
from arpo.config.loading import load_config
from arpo.errors import ArpoError
from arpo.runs.run_dir import CONFIG_FILE, is_run_dir, open_run_dir


def plan(
    target: Annotated[Path, typer.Argument(help="a TOML file with settings, or a run's directory")],
    overrides: Overrides = None,
    gpus: Annotated[int, typer.Option(min=1, max=4096, help="how many GPUs there are")] = 1,
    model: Annotated[str | None, typer.Option(help="a size (14B), a name or a directory; else model.path")] = None,
    gpu: Annotated[str, typer.Option(help="a100, h100, h200, l40s, a TOML file, or here: this machine")] = "h100",
    network: Annotated[float | None, typer.Option(min=0.001, help="GB a second into a node, in place of GPU's")] = None,
    shared_by: Annotated[int, typer.Option(min=1, help="runs that share each GPU evenly")] = 1,
    staleness: Annotated[int, typer.Option(min=0, max=16, help="updates that sampling may lag behind; 0: none")] = 0,
    source: Annotated[Path | None, typer.Option("--from", help="a run whose turns, calls and tools are taken")] = None,
    assume: Annotated[
        list[str] | None, typer.Option(help="NAME=NUMBER in place of what was guessed or measured, like calls=2.5")
    ] = None,
    seed: Annotated[int, typer.Option(help="of the simulation")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="the whole plan as JSON")] = False,
) -> None:
    """Predict a training step on other machines: its time, its memory, its bottleneck, the best split of GPUs."""
    from arpo.plan import report
    from arpo.plan.hardware import find_hardware
    from arpo.plan.planner import Planner, Setup
    from arpo.plan.shape import find_shape

    own_run = is_run_dir(target)
    config = load_config(target / CONFIG_FILE if own_run else target, overrides or [])
    shape = find_shape(model or config.model.path)
    load, sources, records = _load(config, source or (target if own_run else None), assume or [])
    hardware = find_hardware(gpu, shape.width, shape.inner)
    if network is not None:
        hardware = replace(hardware, network=network * 1e9)
    setup = Setup(config, load, shape, hardware.shared(shared_by) if shared_by > 1 else hardware, gpus, staleness, seed)
    planner = Planner(setup)
    planner.best()  # says what to do if nothing fits
    measured = _measured(records) if own_run and source is None and gpus == 1 and not overrides else None
    options = planner.options()
    if as_json:
        console.print(json.dumps(report.as_json(planner, sources, measured, options), indent=2))
    else:
        for line in report.text_lines(planner, sources, measured, options):
            console.print(line)


def _load(config: Any, source: Path | None, given: Sequence[str]) -> tuple[Any, dict[str, str], list[dict[str, Any]]]:
    """The load, where each of its values comes from, and the records of the run that it was taken from."""
    from arpo.plan.fit import fit
    from arpo.plan.load import ASSUMED, assume, guess_load, load_of_run, turn_spread

    from_settings = ("concurrency", "tool_limit", "tool_blocks")
    sources = {name: "from the settings" if name in from_settings else "guessed" for name in ASSUMED}
    records: list[dict[str, Any]] = []
    if source is None:
        load = guess_load(config)
    else:
        if not is_run_dir(source):
            raise ArpoError(f"--from: {source} is not a run (a directory with config.json and metrics.jsonl)")
        log = open_run_dir(source)
        records, spread = log.read_metrics(), turn_spread(log)
        load = load_of_run(config, records, spread)
        branches = sum(r["branches"] for r in records) / sum(r["questions"] for r in records)
        load = fit(load, branches)
        known = set(ASSUMED) - set(from_settings) - ({"spread"} if spread is None else set())
        sources |= dict.fromkeys(known, f"from {source}")
    load = assume(load, given)
    return load, sources | {text.partition("=")[0]: "given" for text in given}, records


def _measured(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Mean seconds of the steps; what recording CUDA graphs took, once, is left out."""
    count = len(records)
    sampling = sum(float(r["rollout_seconds"]) - float(r.get("engine_graph_seconds", 0.0)) for r in records) / count
    return {"rollout_seconds": sampling, "train_seconds": sum(float(r["train_seconds"]) for r in records) / count}
