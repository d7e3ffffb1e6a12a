"""`arpo view`: runs in a browser, or as one file; `arpo show`: saved trees in the terminal."""

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

from arpo.cli.display import console, print_trajectory, print_tree, printable
from arpo.errors import ArpoError
from arpo.runs.run_dir import CONFIG_FILE, RunDir, is_run_dir, open_run_dir

PLACE = "a folder of runs, a run or a comparison"
SCREENS = ("DISPLAY", "WAYLAND_DISPLAY")  # without one, a browser would take over the terminal


def view(
    place: Annotated[Path, typer.Argument(help=PLACE)] = Path("runs"),
    port: Annotated[int, typer.Option(min=0, max=65535, help="where the page is served; 0 takes a free one")] = 8765,
    host: Annotated[str, typer.Option(help="0.0.0.0 lets other machines read the runs too")] = "127.0.0.1",
    open_page: Annotated[
        bool | None, typer.Option("--open/--no-open", help="show it in the browser; if neither, where there is one")
    ] = None,
    export: Annotated[
        Path | None, typer.Option(help="write one HTML file that holds it all, and serve nothing")
    ] = None,
    export_mb: Annotated[float, typer.Option(min=0.1, help="how large that file may get")] = 50,
) -> None:
    """See runs in a browser: curves, settings, rollout trees, entropies, comparisons. Nothing leaves this machine."""
    from arpo.viewer.folder import Folder

    place = place.expanduser()
    if not place.is_dir():
        raise ArpoError(f"{place}: there is no such folder; give {PLACE}")
    folder = Folder(place)
    if export is not None:
        from arpo.viewer.export import write_page

        note = write_page(folder, export.expanduser(), export_mb)
        console.print(f"written: {export}" + (f"\n{note} (--export-mb)" if note else ""))
        return
    from arpo.viewer.server import LOCAL, build_server

    server = build_server(folder, host, port)
    with server:
        count = len(folder.search()[0])
        console.print(f"{count} {'run' if count == 1 else 'runs'} in {place}: {server.url}  (Ctrl-C ends it)")
        if host not in LOCAL:
            console.print("Whoever can reach this address can read the runs.")
        if _wants_browser() if open_page is None else open_page:
            webbrowser.open(server.url)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            console.print("ended")


def _wants_browser() -> bool:
    return sys.stdout.isatty() and (sys.platform == "darwin" or any(map(os.environ.get, SCREENS)))


def show(
    run: Annotated[Path, typer.Argument(help="a run's directory")],
    step: Annotated[int | None, typer.Option(help="of which step; the last one with trees if not given")] = None,
    prompt: Annotated[int, typer.Option(help="which of the step's questions, counted from 0")] = 0,
    trajectory: Annotated[
        int | None, typer.Option(help="one trajectory of its tree as a conversation, counted from 1")
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="a table of the step's questions instead")] = False,
) -> None:
    """Show a tree that training saved: every decision, tool call, reward and advantage."""
    log = open_run_dir(_the_run(run.expanduser()))
    step = _the_step(log, step)
    entries = log.tree_index(step)
    if list_:
        _print_list(log, step)
        return
    if not 0 <= prompt < len(entries):
        raise ArpoError(f"--prompt {prompt}: step {step} has {len(entries)} questions, counted from 0; --list has them")
    scored = log.read_tree(step, prompt)
    tree, count = scored.tree, len(scored.tree.leaves)
    if trajectory is not None and not 1 <= trajectory <= count:
        raise ArpoError(
            f"--trajectory {trajectory}: question {prompt} of step {step} has {count} trajectories, counted from 1"
        )
    console.print(Text(f"step {step}, question {prompt} of {len(entries)}: {printable(tree.task.id)}", style="bold"))
    if trajectory is not None:
        print_trajectory(scored, trajectory - 1)
        return
    print_tree(scored)
    failed = sum(node.result is not None and node.result.fault is not None for node in tree.nodes)
    console.print(
        f"{count} trajectories, {tree.tool_calls} tool calls ({failed} failed), {tree.branch_points} branch points, "
        f"{tree.unique_tokens:,} tokens ({tree.total_tokens:,} without sharing)"
    )


def _the_run(directory: Path) -> Path:
    """The directory, if it holds a run; else whoever gave it is told of the runs inside."""
    if is_run_dir(directory):
        return directory
    inside = sorted(
        found.parent for depth in ("*", "*/*", "*/*/*") for found in directory.glob(f"{depth}/{CONFIG_FILE}")
    )
    runs = [str(found) for found in inside if is_run_dir(found)]
    more = f" and {len(runs) - 10} more" if len(runs) > 10 else ""
    hint = f"; runs in it: {', '.join(runs[:10])}{more}" if runs else ""
    raise ArpoError(f"{directory}: not a run (it has no {CONFIG_FILE} of one){hint}")


def _the_step(log: RunDir, wanted: int | None) -> int:
    there = log.tree_steps()
    if not there:
        raise ArpoError(f"{log.directory}: holds no trees; arpo train saves them unless run.save_trees=false")
    if wanted is not None and wanted not in there:
        which = f"steps {there[0]} to {there[-1]}" if len(there) > 1 else f"step {there[0]}"
        raise ArpoError(f"--step {wanted}: there are trees of {which}")
    return there[-1] if wanted is None else wanted


def _print_list(log: RunDir, step: int) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=f"step {step}", title_justify="left", expand=True)
    table.add_column("prompt", justify="right")
    table.add_column("task", overflow="fold")
    for name in ("reward", "trajectories", "branched"):
        table.add_column(name, justify="right")
    table.add_column("question", no_wrap=True, overflow="ellipsis", ratio=1)
    for number, entry in enumerate(log.tree_index(step)):
        mean = "" if entry.mean_reward is None else f"{entry.mean_reward:.2f}"
        task = Text(printable(entry.task))
        question = Text(printable(" ".join(entry.question.split())))
        table.add_row(str(number), task, mean, str(entry.num_trajectories), str(entry.branch_points), question)
    console.print(table, soft_wrap=False)
