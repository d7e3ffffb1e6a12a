"""The style that all matplotlib figures share, and how figures are rendered to files.

Guarantees: with the same matplotlib, the same figure gives the same bytes, whatever the user's matplotlib settings.
Text is drawn literally, never as a formula.
Not covered: characters that matplotlib's default font lacks, such as Chinese ones. They are drawn as boxes.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from io import BytesIO
from typing import TYPE_CHECKING, Any

from arpo.errors import ArpoError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# The Okabe-Ito palette, which color-blind readers can tell apart.
BLACK, BLUE, RED, GREEN = "#000000", "#0072B2", "#D55E00", "#009E73"
PINK, ORANGE, SKY = "#CC79A7", "#E69F00", "#56B4E9"
STYLE: Any = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "text.parse_math": False,
    "svg.hashsalt": "arpo",
}
PNG_DPI = 150
INSTALL = "pip install matplotlib"


def has_matplotlib() -> bool:
    """Whether figures can be drawn."""
    return find_spec("matplotlib") is not None


def require_matplotlib() -> None:
    """Raise an ArpoError that says what to install if figures cannot be drawn."""
    if not has_matplotlib():
        raise ArpoError(f"figures need matplotlib: {INSTALL}")


@contextmanager
def figure_style(rc: Mapping[str, Any]) -> Iterator[None]:
    """Draw with the common style and these rcParams on top; the user's own matplotlib settings are ignored."""
    require_matplotlib()
    import matplotlib

    with matplotlib.rc_context(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"Glyph .* missing from")
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE | dict(rc))
        yield


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of this size in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def render(figure: Figure) -> dict[str, bytes]:
    """The figure as `svg` and `png` files."""
    files = {}
    for kind, metadata in (("svg", {"Date": None, "Creator": None}), ("png", {"Software": None})):
        buffer = BytesIO()
        figure.savefig(buffer, format=kind, dpi=PNG_DPI, metadata=metadata)
        files[kind] = buffer.getvalue()
    return files
