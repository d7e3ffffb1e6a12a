"""What all pictures share: that they can be drawn, their style, and how they are written.

Promises: the same picture gives the same bytes with the same matplotlib, whatever the user's matplotlib settings; text
is drawn as it is, never as a formula.
Does not cover: letters that matplotlib's own font lacks, such as Chinese; they become boxes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from io import BytesIO
from typing import TYPE_CHECKING, Any

from arpo.errors import ArpoError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which the colour-blind can tell apart.
BLACK, BLUE, RED, GREEN, PINK, ORANGE, SKY = (
    "#000000",
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
)
STYLE: Any = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "text.parse_math": False,
    "svg.hashsalt": "arpo",
}
DOTS = 150  # an inch, in a PNG


def require_figures() -> None:
    """Say what to install if pictures cannot be drawn."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ArpoError("pictures need matplotlib: pip install 'arpo[figures]'") from None


@contextmanager
def drawing(style: Mapping[str, Any]) -> Iterator[Callable[[float, float], Figure]]:
    """Within, pictures of a width and height (inches) can be made and saved, in this style."""
    require_figures()
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"Glyph .* missing from")
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE | dict(style))
        yield lambda width, height: Figure(figsize=(width, height), layout="constrained")


def saved(picture: Figure) -> dict[str, bytes]:
    """The picture as `svg` and `png`."""
    found = {}
    for kind, metadata in (("svg", {"Date": None, "Creator": None}), ("png", {"Software": None})):
        drawn = BytesIO()
        picture.savefig(drawn, format=kind, dpi=DOTS, metadata=metadata)
        found[kind] = drawn.getvalue()
    return found
