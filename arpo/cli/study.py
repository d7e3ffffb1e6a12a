"""`arpo compare` and `arpo entropy`: studies of algorithms and models."""

from __future__ import annotations

import asyncio
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from arpo.cli.display import ConsoleReporter, console, print_table
from arpo.cli.options import Overrides, load_model_config, require_questions
from arpo.config.files import expand_user
from arpo.errors import ArpoError
from arpo.figures.text import one_line
from arpo.runs.run_dir import is_run_dir, open_run_dir
from arpo.training.interrupt import run_async

if TYPE_CHECKING:
    from arpo.studies.compare.results import Comparison

ALGORITHMS = "presets or TOML files, like arpo,grpo,mine.toml; an unknown name lists the presets"


def compare(
    context: typer.Context,
    config: Annotated[
        Path | None, typer.Argument(help="a TOML file with settings; an algorithm's own settings override these")
    ] = None,
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
    levels: Annotated[
        str | None,
        typer.Option(help="accuracies to reach, like 0.7,0.8; default: 50, 75 and 100 % of the baseline's gain"),
    ] = None,
    tune: Annotated[
        str | None,
        typer.Option(
            help='tune every algorithm first, on other seeds: names of M, lr, batch, or values, "M=4,8;lr=2e-4,5e-4"'
        ),
    ] = None,
    tuning_seeds: Annotated[int, typer.Option(min=1, help="seeds for --tune, from 1000 on")] = 1,
    samples: Annotated[int, typer.Option(min=1, help="answers to each test question at the end, for pass@k")] = 5,
    jobs: Annotated[int, typer.Option(min=1, help="runs at the same time")] = 1,
    out: Annotated[Path | None, typer.Option(help="output directory; default: runs/compare-CONFIG")] = None,
    drop_models: Annotated[bool, typer.Option("--drop-models", help="delete the checkpoints of finished runs")] = False,
    recompute: Annotated[
        Path | None, typer.Option(help="print the tables of this results.json again, from the file alone")
    ] = None,
) -> None:
    """Compare algorithms over several seeds with the same budget. A stopped comparison can be resumed."""
    from arpo.studies.compare.results import load_comparison
    from arpo.studies.compare.runner import compare as run_comparison
    from arpo.studies.compare.runner import parse_levels, plan_from_options

    if recompute is not None:
        sources = {name: context.get_parameter_source(name) for name in context.params}
        given = {name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"}
        if others := sorted(given - {"recompute", "levels"}):
            raise ArpoError(f"--recompute: reads only the file and takes no {', '.join(others)}; --levels may be given")
        found = load_comparison(expand_user(recompute))
        return _print_comparison(replace(found, levels=parse_levels(levels)) if levels is not None else found)
    if config is None:
        raise ArpoError("CONFIG is missing: name a TOML file with settings, or --recompute with a results.json")
    from arpo.figures.style import require_matplotlib
    from arpo.studies.compare.report import write_comparison

    require_matplotlib()
    plan = plan_from_options(
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
        levels=levels,
        tune=tune,
        tuning_seeds=tuning_seeds,
    )
    try:
        found = run_async(run_comparison(plan, ConsoleReporter()))
    except asyncio.CancelledError:
        print(f"stopped; all runs are saved in {plan.out}, and the same command resumes them", file=sys.stderr)
        raise typer.Exit(130) from None
    write_comparison(plan.out, found)
    _print_comparison(found, plan.out)


def _print_comparison(found: Comparison, out: Path | None = None) -> None:
    """Print the tables of a comparison and where its files are; ends with code 1 if runs are missing."""
    from arpo.studies.compare import report

    missing = report.missing_note(found)
    if missing:
        console.print(missing)
    for title, head, rows in report.tables(found):
        console.print(title)
        print_table(head, rows)
    for note in report.reading_notes(found):
        console.print(note)
    if out is not None:
        console.print(f"The tables, the figures and every run are in {out}.")
    if missing:
        command = "the same command" if out is not None else "the comparison's command"
        console.print(f"PARTIAL: not every run finished; {command} tries these again.")
        raise typer.Exit(1)


def entropy(
    target: Annotated[
        str,
        typer.Argument(
            help="a run's directory (its saved trees are used) or a TOML file; a saved agent, a Hugging Face "
            "directory, a hub name or a .gguf file if data.test=... or data.train=... names questions"
        ),
    ],
    overrides: Overrides = None,
    steps: Annotated[str | None, typer.Option(help="for a run: only trees of these steps, like 1-10")] = None,
    sample: Annotated[bool, typer.Option(help="for a run: sample new trees with its last checkpoint")] = False,
    questions: Annotated[
        int | None, typer.Option(min=1, help="number of questions to sample new trees for; default: 100")
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="tokens of each turn to study")] = 50,
    out: Annotated[Path | None, typer.Option(help="output directory; default: entropy/NAME")] = None,
) -> None:
    """Study where a model is uncertain: entropy at the start and after tool results, and what branching gains."""
    given, path = overrides or [], expand_user(target)
    fresh = sample or not is_run_dir(path)
    if fresh and steps is not None:
        raise ArpoError("--steps selects saved trees of a run and cannot be combined with --sample")
    if not fresh and (given or questions is not None):
        raise ArpoError("settings and --questions apply to new trees: add --sample")
    config = load_model_config(target, given) if fresh else None
    if config is not None:
        require_questions(target, config)
    from arpo.figures.style import require_matplotlib
    from arpo.studies.entropy import report
    from arpo.studies.entropy import runner as study

    require_matplotlib()
    reporter = ConsoleReporter()
    if config is not None:
        from arpo.training.context import open_context

        out = study.make_output_dir(target, out)
        with closing(open_context(config, reporter)) as context:
            subject, found = run_async(study.study_model(target, context, questions or 100, tokens, reporter))
    else:
        run = open_run_dir(path)
        chosen = study.select_steps(run, steps)
        out = study.make_output_dir(target, out)
        subject, found = study.study_run(run, chosen, tokens, reporter)
    report.write_study(out, subject, found)
    for head, rows in (report.entropy_table(found), report.correlation_table(found)):
        print_table(head, [[one_line(cell) for cell in row] for row in rows])
    for line in report.terminal_lines(found):
        console.print(line)
    console.print(f"entropy.md, .json, .svg and .png are in {out}")
