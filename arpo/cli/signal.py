"""`arpo signal`: how much of each algorithm's gradient is signal, before any training."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from arpo.cli.display import ConsoleReporter, console, print_table
from arpo.cli.options import Overrides
from arpo.cli.study import ALGORITHMS
from arpo.figures.text import one_line
from arpo.training.interrupt import run_async


def signal(
    config: Annotated[
        Path, typer.Argument(help="a TOML file with settings; an algorithm's own settings override these")
    ],
    overrides: Overrides = None,
    algorithms: Annotated[str, typer.Option(help=ALGORITHMS)] = "grpo,arpo,arpo-random,arpo+",
    tasks: Annotated[int, typer.Option(min=1, help="training tasks, the same for all algorithms")] = 24,
    repeats: Annotated[
        int, typer.Option(min=2, max=1000, help="independent sets of trees of each algorithm; intervals need 3")
    ] = 8,
    reference: Annotated[
        int, typer.Option(min=4, max=4096, help="independent trajectories of each task for the reference gradient")
    ] = 64,
    out: Annotated[Path | None, typer.Option(help="output directory; default: runs/signal-CONFIG")] = None,
) -> None:
    """Compare the gradients of algorithms on a frozen model: signal, noise and bias, before any training."""
    from arpo.figures.style import require_matplotlib
    from arpo.studies.entropy.runner import make_output_dir
    from arpo.studies.signal import report, runner
    from arpo.training.context import open_context

    require_matplotlib()
    plan = runner.plan_from_options(
        config,
        overrides or [],
        algorithms=algorithms,
        tasks=tasks,
        repeats=repeats,
        reference=reference,
        out=out,
    )
    make_output_dir(str(config), plan.out)
    reporter = ConsoleReporter()
    with closing(open_context(plan.base, reporter)) as context:
        study = run_async(runner.measure_signal(plan, context, reporter))
    report.write_signal(plan.out, study)
    console.print(one_line(report.setup_line(study)))
    for head, rows in report.terminal_tables(study):
        print_table(head, rows)
    for line in (*report.findings(study), report.READING):
        console.print(one_line(line))
    console.print(f"results.json, results.md, signal.svg and signal.png are in {plan.out}")
