"""`arpo compare`: algorithms side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from arpo.cli_base import Overrides, run_async
from arpo.display import console

ALGORITHMS = (
    "presets or TOML files, like arpo,grpo,mine.toml; `arpo compare` shows the presets if it knows none of them"
)


def compare(
    config: Annotated[Path, typer.Argument(help="a TOML file with settings; an algorithm's own lie above these")],
    overrides: Overrides = None,
    algorithms: Annotated[str, typer.Option(help=ALGORITHMS)] = "arpo,grpo,arpo-random",
    seeds: Annotated[int, typer.Option(min=1, help="runs of each algorithm; the first seed is the config's")] = 3,
    match: Annotated[str, typer.Option(help="what all spend alike: tool-calls, trajectories or tokens")] = "tool-calls",
    budget: Annotated[
        int | None, typer.Option(min=1, help="how much of it; not given: what the baseline spends in train.steps steps")
    ] = None,
    baseline: Annotated[
        str | None, typer.Option(help="what the others are compared with: grpo if it is among them, else the first")
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="answers to each test question at the end, for pass@k")] = 5,
    jobs: Annotated[int, typer.Option(min=1, help="runs at the same time")] = 1,
    out: Annotated[Path | None, typer.Option(help="directory for all of it; not given: runs/compare-CONFIG")] = None,
    drop_models: Annotated[bool, typer.Option(help="delete a run's model when its numbers are known")] = False,
) -> None:
    """Train with several algorithms and seeds on one budget, and tell them apart. A stopped comparison goes on."""
    from arpo.compare import compare as work
    from arpo.compare import the_plan
    from arpo.figures import need_figures
    from arpo.versus_report import show_comparison, write_comparison

    need_figures()
    plan = the_plan(
        config, overrides or [], algorithms, seeds, match, budget, baseline, samples, jobs, out, drop_models
    )
    found = run_async(work(plan))
    write_comparison(plan.out, found)
    show_comparison(found)
    console.print(f"The table, the pictures and every run are in {plan.out}.")
    if any(trial.problem for trial in found.trials):
        console.print("PARTIAL: not every run came to its end; the same command tries these again.")
        raise typer.Exit(1)
