"""`arpo view`: runs in a browser, or as one HTML file; `arpo show`: saved trees on the terminal."""

from __future__ import annotations

import os
import sys
import webbrowser
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.table import Table
from rich.text import Text

from arpo.cli.display import console, print_trajectory, print_tree
from arpo.cli.evaluation import EVALS_DIR
from arpo.config.files import expand_user
from arpo.errors import ArpoError
from arpo.figures.text import printable
from arpo.runs.run_dir import CONFIG_FILE, RunDir, is_run_dir, open_run_dir

FOLDER_HELP = "a folder of runs, a run, a comparison or a folder of evaluations"
DISPLAY_VARIABLES = ("DISPLAY", "WAYLAND_DISPLAY")  # without one, a text browser would take over the terminal


def view(
    folder: Annotated[Path, typer.Argument(help=FOLDER_HELP)] = Path("runs"),
    port: Annotated[int, typer.Option(min=0, max=65535, help="the port of the server; 0: any free port")] = 8765,
    host: Annotated[str, typer.Option(help="0.0.0.0 lets other machines read the runs, too")] = "127.0.0.1",
    open_page: Annotated[
        bool | None, typer.Option("--open/--no-open", help="open the page; default: if there is a browser")
    ] = None,
    playground: Annotated[
        bool | None,
        typer.Option(
            "--playground/--no-playground", help="let the page ask the agents of runs; default: on this machine only"
        ),
    ] = None,
    export: Annotated[Path | None, typer.Option(help="write one HTML file with everything instead of serving")] = None,
    export_mb: Annotated[float, typer.Option(min=0.1, help="maximal size of that file")] = 50,
) -> None:
    """See runs in a browser: curves, settings, rollout trees, entropies, comparisons; ask their agents and watch the
    tree grow. Nothing leaves this machine."""
    from arpo.viewer.folder import Folder

    folder = expand_user(folder)
    if not folder.is_dir():
        raise ArpoError(f"{folder}: there is no such folder; give {FOLDER_HELP}")
    runs = Folder(folder, evals=EVALS_DIR)
    if export is not None:
        from arpo.viewer.export import write_page

        note = write_page(runs, expand_user(export), export_mb)
        console.print(f"written: {export}" + (f"\n{note} (--export-mb)" if note else ""))
        return
    from arpo.net.hosts import LOCAL
    from arpo.viewer.playground import Playground
    from arpo.viewer.server import build_server

    chosen = None
    if playground is not None:
        chosen = Playground(runs, off="" if playground else "The Playground is off (--no-playground).")
    with build_server(runs, host, port, chosen) as server:
        count = len(runs.search()[0])
        found = f"{count} {'run' if count == 1 else 'runs'} in {folder}"
        if evaluations := len(runs.evaluations):
            found += f", {evaluations} {'evaluation' if evaluations == 1 else 'evaluations'}"
        console.print(f"{found}: {server.url}  (Ctrl-C stops it)")
        if host not in LOCAL:
            use = "" if server.playground.off else ", and have their agents use their tools (--playground)"
            console.print(f"Everyone who can reach this address can read the runs{use}.")
        if _has_browser() if open_page is None else open_page:
            webbrowser.open(server.url)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            console.print("stopped")


def _has_browser() -> bool:
    return sys.stdout.isatty() and (sys.platform == "darwin" or any(map(os.environ.get, DISPLAY_VARIABLES)))


def show(
    run: Annotated[Path, typer.Argument(help="a run directory")],
    step: Annotated[int | None, typer.Option(help="the step; default: the last one with trees")] = None,
    prompt: Annotated[int, typer.Option(help="the question of the step, counted from 0")] = 0,
    trajectory: Annotated[int | None, typer.Option(help="a trajectory as a conversation, counted from 1")] = None,
    list_: Annotated[bool, typer.Option("--list", help="list the questions of the step instead")] = False,
) -> None:
    """Show a saved tree: every decision, tool call, reward and advantage."""
    run_dir = resolve_run_dir(expand_user(run))
    step = _resolve_step(run_dir, step)
    entries = run_dir.tree_index(step)
    if list_:
        _print_list(run_dir, step)
        return
    if not 0 <= prompt < len(entries):
        raise ArpoError(
            f"--prompt {prompt}: step {step} has {len(entries)} questions, counted from 0; --list shows them"
        )
    scored = run_dir.read_tree(step, prompt)
    tree, count = scored.tree, len(scored.tree.leaves)
    if trajectory is not None and not 1 <= trajectory <= count:
        raise ArpoError(
            f"--trajectory {trajectory}: question {prompt} of step {step} has {count} trajectories, counted from 1"
        )
    console.print(Text(f"step {step}, question {prompt} of {len(entries)}: {printable(tree.task.id)}", style="bold"))
    if trajectory is not None:
        print_trajectory(scored, trajectory - 1, run_dir.directory / "images")
        return
    print_tree(scored, run_dir.directory / "images")
    failed = sum(node.result is not None and node.result.fault is not None for node in tree.nodes)
    console.print(
        f"{count} trajectories, {tree.tool_calls} tool calls ({failed} failed), {tree.branch_points} branch points, "
        f"{tree.unique_tokens:,} tokens ({tree.total_tokens:,} without sharing)"
    )


def resolve_run_dir(directory: Path) -> RunDir:
    """Open the run in a directory; the error for any other directory names the runs inside it."""
    if is_run_dir(directory):
        return open_run_dir(directory)
    configs = sorted(path for depth in ("*", "*/*", "*/*/*") for path in directory.glob(f"{depth}/{CONFIG_FILE}"))
    runs = [str(path.parent) for path in configs if is_run_dir(path.parent)]
    more = f" and {len(runs) - 10} more" if len(runs) > 10 else ""
    hint = f"; runs in it: {', '.join(runs[:10])}{more}" if runs else ""
    raise ArpoError(f"{directory}: not a run (it has no {CONFIG_FILE} of one){hint}")


def _resolve_step(run_dir: RunDir, wanted: int | None) -> int:
    steps = run_dir.tree_steps()
    if not steps:
        raise ArpoError(f"{run_dir.directory}: holds no trees; arpo train saves them unless run.save_trees=false")
    if wanted is not None and wanted not in steps:
        which = f"steps {steps[0]} to {steps[-1]}" if len(steps) > 1 else f"step {steps[0]}"
        raise ArpoError(f"--step {wanted}: there are trees of {which}")
    return steps[-1] if wanted is None else wanted


def _print_list(run_dir: RunDir, step: int) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=f"step {step}", title_justify="left", expand=True)
    table.add_column("prompt", justify="right")
    table.add_column("task", overflow="fold")
    for name in ("reward", "trajectories", "branch points"):
        table.add_column(name, justify="right")
    table.add_column("question", no_wrap=True, overflow="ellipsis", ratio=1)
    for number, entry in enumerate(run_dir.tree_index(step)):
        mean = "" if entry.mean_reward is None else f"{entry.mean_reward:.2f}"
        task = Text(printable(entry.task))
        question = Text(printable(" ".join(entry.question.split())))
        table.add_row(str(number), task, mean, str(entry.num_trajectories), str(entry.branch_points), question)
    console.print(table, soft_wrap=False)
