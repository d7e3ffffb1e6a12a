"""`arpo plan`: predict a training step on other hardware."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from arpo.cli.display import console, print_hanging
from arpo.cli.options import ModelTarget, Overrides, load_model_config
from arpo.config.files import expand_user
from arpo.config.loading import load_config
from arpo.errors import ArpoError
from arpo.runs.run_dir import CONFIG_FILE, is_run_dir


def plan(
    target: ModelTarget,
    overrides: Overrides = None,
    gpus: Annotated[int, typer.Option(min=1, max=4096, help="number of GPUs")] = 1,
    model: Annotated[str | None, typer.Option(help="a size (14B), a name or a directory; default: model.path")] = None,
    gpu: Annotated[
        str, typer.Option(help="a100, h100, h200, l40s, a TOML file, or here: measure this machine")
    ] = "h100",
    network: Annotated[
        float | None, typer.Option(min=0.001, help="GB per second into a node; default: that of the GPU")
    ] = None,
    shared_by: Annotated[int, typer.Option(min=1, help="runs that share each GPU evenly")] = 1,
    staleness: Annotated[int, typer.Option(min=0, max=16, help="updates that sampling may lag behind")] = 0,
    source: Annotated[
        Path | None, typer.Option("--from", help="a run to take turn lengths, calls and tool times from")
    ] = None,
    assume: Annotated[
        list[str] | None, typer.Option(help="NAME=NUMBER instead of a guessed or measured value, like calls=2.5")
    ] = None,
    seed: Annotated[int, typer.Option(help="seed of the simulation")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="the whole plan as JSON")] = False,
) -> None:
    """Predict a training step on other hardware: time, memory, bottleneck, and the best split of the GPUs."""
    from arpo.plan import report
    from arpo.plan.planner import make_plan

    given, path = overrides or [], expand_user(target)
    own_run = is_run_dir(path)
    if own_run:  # with the model that it began with
        config = load_config(path / CONFIG_FILE, given, allow_masked=True)
    else:
        config = load_model_config(target, given, allow_masked=True)
    if source is not None and not is_run_dir(source):
        raise ArpoError(f"--from: {source} is not a run (a directory with config.json and metrics.jsonl)")
    found = make_plan(
        config,
        gpus=gpus,
        model=model,
        gpu=gpu,
        network=None if network is None else network * 1e9,
        shared_by=shared_by,
        staleness=staleness,
        run=source or (path if own_run else None),
        compare_with_run=own_run and source is None and gpus == 1 and not overrides,
        assumptions=assume or [],
        seed=seed,
    )
    if as_json:
        console.print(json.dumps(report.as_json(found), indent=2), soft_wrap=True)
        return
    for line in report.text_lines(found):
        print_hanging(line)
