"""`arpo view`: runs in a browser, or as one file."""

from __future__ import annotations

import os
import sys
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from arpo.display import console
from arpo.types import ArpoError

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
    from arpo.view.folder import Folder

    place = place.expanduser()
    if not place.is_dir():
        raise ArpoError(f"{place}: there is no such folder; give {PLACE}")
    folder = Folder(place)
    if export is not None:
        from arpo.view.export import write_page

        note = write_page(folder, export.expanduser(), export_mb)
        console.print(f"written: {export}" + (f"\n{note} (--export-mb)" if note else ""))
        return
    from arpo.view.server import LOCAL, make_server

    server = make_server(folder, host, port)
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
