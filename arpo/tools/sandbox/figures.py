"""Figures of matplotlib as output: when a call has ended, those that are still open are printed as PNG in base64.

The zygote calls `prepare` for code that names matplotlib, if that is one of the sandbox's packages. What is printed is
output like any other: code can print the same by itself, so whoever reads it (`split_figures`) must trust none of it.
"""

from __future__ import annotations

import base64
import contextlib
import io
import os
import sys
import threading

PACKAGE = "matplotlib"
MARK = "figure/png;base64,"  # begins the line of a figure
MAX_FIGURES = 4
MAX_FIGURE_BYTES = 256 << 10
DPI = 80


def split_figures(stdout: str) -> tuple[str, list[bytes]]:
    """Output without the figures at its end, and these as bytes, which may be anything: at most MAX_FIGURES."""
    lines = stdout.split("\n")
    if lines and not lines[-1]:
        lines.pop()
    start = len(lines)
    while start > 0 and lines[start - 1].startswith(MARK):
        start -= 1
    figures = []
    for line in lines[start:][:MAX_FIGURES]:
        try:
            figures.append(base64.b64decode(line.removeprefix(MARK)))
        except ValueError:
            figures.append(b"")
    return ("\n".join(lines[:start]) + "\n" if start else ""), figures


def prepare() -> None:
    """Import matplotlib with everything that a figure needs, and have open figures printed when a call ends."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:  # for its cache of fonts, which stays in memory
        os.environ["MPLCONFIGDIR"] = folder
        import matplotlib

        matplotlib.use("agg")
        import matplotlib.pyplot

        matplotlib.pyplot.show = lambda *_, **__: None  # the figure stays open, and is printed in the end
        matplotlib.pyplot.figure().savefig(io.BytesIO(), format="png")
        matplotlib.pyplot.close("all")
    threading._register_atexit(_print_figures)  # type: ignore[attr-defined]


def _print_figures() -> None:
    """Print the open figures, first ones first; what goes wrong with one is a note."""
    pyplot = sys.modules.get("matplotlib.pyplot")
    numbers = pyplot.get_fignums() if pyplot is not None else []
    with contextlib.suppress(BaseException):  # the code may have closed or replaced it
        sys.stdout.flush()
    printed, notes = [], []
    for number in numbers[:MAX_FIGURES]:
        buffer = io.BytesIO()
        try:
            pyplot.figure(number).savefig(buffer, format="png", dpi=DPI)  # type: ignore[union-attr]
        except Exception as error:
            notes.append(f"[figure {number} cannot be drawn: {type(error).__name__}: {error}]"[:200])
            continue
        if buffer.tell() > MAX_FIGURE_BYTES:
            notes.append(f"[figure {number} is too large to be shown: {buffer.tell() >> 10} kB]")
        else:
            printed.append(MARK + base64.b64encode(buffer.getvalue()).decode())
    if len(numbers) > MAX_FIGURES:
        notes.append(f"[{len(numbers)} figures are open, and {MAX_FIGURES} are shown]")
    output = "".join(f"\n{line}" for line in [*notes, *printed])
    unwritten = memoryview(f"{output}\n".encode() if output else b"")
    while unwritten:
        unwritten = unwritten[os.write(1, unwritten) :]
