"""`arpo compare` and `arpo entropy`: studies of algorithms and models."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Annotated

import typer

from arpo.cli.base import Overrides, model_config, run_async
from arpo.cli.display import console, print_table, progress_bar
from arpo.errors import ArpoError
from arpo.runs.run_dir import is_run_dir

ALGORITHMS = "presets or TOML files, like arpo,grpo,mine.toml; an unknown name lists the presets"


def compare(
    config: Annotated[
        Path, typer.Argument(help="a TOML file with settings; an algorithm's own settings override these")
    ],
    overrides: Overrides = None,
    algorithms: Annotated[str, typer.Option(help=ALGORITHMS)] = "arpo,grpo,arpo-random",
    seeds: Annotated[int, typer.Option(min=1, help="runs of each algorithm; the first seed is the one in CONFIG")] = 3,
    match: Annotated[
        str, typer.Option(help="unit of the common budget: tool-calls, trajectories or tokens")
    ] = "tool-calls",
    budget: Annotated[
        int | None, typer.Option(min=1, help="the budget; default: what the baseline spends in train.steps steps")
    ] = None,
    baseline: Annotated[
        str | None, typer.Option(help="the algorithm to compare with; default: grpo if it is listed, else the first")
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="answers to each test question at the end, for pass@k")] = 5,
    jobs: Annotated[int, typer.Option(min=1, help="runs at the same time")] = 1,
    out: Annotated[Path | None, typer.Option(help="output directory; default: runs/compare-CONFIG")] = None,
    drop_models: Annotated[bool, typer.Option(help="delete the checkpoints of finished runs")] = False,
) -> None:
    """Compare algorithms over several seeds with the same budget. A stopped comparison can be resumed."""
    from arpo.figures.style import require_matplotlib
    from arpo.studies.compare import report
    from arpo.studies.compare import runner as comparison

    require_matplotlib()
    plan = comparison.plan_from_options(
        config,
        overrides or [],
        algorithms=algorithms,
        seeds=seeds,
        match=match,
        budget=budget,
        baseline=baseline,
        samples=samples,
        jobs=jobs,
        out=out,
        drop_models=drop_models,
    )
    try:
        with progress_bar("runs", 0) as bar:

            def show(progress: comparison.Progress) -> None:
                if progress.message:
                    console.print(progress.message)
                bar.update(bar.task_ids[0], completed=progress.done, total=progress.total, note=progress.running)

            found = run_async(comparison.compare(plan, show))
    except asyncio.CancelledError:
        print(f"stopped; all runs are saved in {plan.out}, and the same command resumes them", file=sys.stderr)
        raise typer.Exit(130) from None
    report.write_comparison(plan.out, found)
    if missing := report.missing_note(found):
        console.print(missing)
    for head, rows in report.terminal_tables(found):
        print_table(head, rows)
    console.print(report.reading_note(found))
    console.print(f"The tables, the figures and every run are in {plan.out}.")
    if any(trial.problem for trial in found.trials):
        console.print("PARTIAL: not every run finished; the same command tries these again.")
        raise typer.Exit(1)


def entropy(
    target: Annotated[
        str,
        typer.Argument(
            help="a run's directory (its saved trees are used) or a TOML file; a Hugging Face directory, a hub name or "
            "a .gguf file if data.test=... or data.train=... names questions"
        ),
    ],
    overrides: Overrides = None,
    steps: Annotated[str | None, typer.Option(help="of a run: trees of these steps only, like 1-10")] = None,
    sample: Annotated[bool, typer.Option(help="of a run: new trees, by its last checkpoint")] = False,
    questions: Annotated[int | None, typer.Option(min=1, help="new trees for so many; 100 if not given")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="tokens to look at after each place")] = 50,
    out: Annotated[Path | None, typer.Option(help="directory for the results; entropy/NAME if none")] = None,
) -> None:
    """Where a model is unsure: entropy at the start and after tool results, and what branching made of it."""
    given, path = overrides or [], Path(target).expanduser()
    fresh = sample or not is_run_dir(path)
    if fresh and steps is not None:
        raise ArpoError("--steps goes with the saved trees of a run, and not with --sample")
    if not fresh and (given or questions is not None):
        raise ArpoError("settings and --questions are for new trees: add --sample")
    questionless = path.suffix != ".toml" and not is_run_dir(path) and target != "tiny"
    if questionless and not any(each.startswith("data.") for each in given):
        raise ArpoError(
            f"{target} is no run and no TOML file, and a model alone has no questions: name some with data.test=... or "
            "data.train=..."
        )
    from arpo.studies.entropy.runner import study_model, study_run

    if fresh:
        study_model(target, model_config(target, given), questions or 100, tokens, out, run_async)
    else:
        study_run(path, steps, tokens, out)
