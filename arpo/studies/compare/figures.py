"""The pictures of a comparison: accuracy against what training cost, and accuracy at the end.

    draw_curves(comparison, directory)    # curves.svg, curves.png; of more than six algorithms time.svg, time.png too
    draw_bars(comparison, directory)      # final.svg, final.png

Promises: only complete trials are drawn; the same comparison gives the same bytes with the same matplotlib, whatever
the user's matplotlib settings. Colours are Okabe and Ito's, and line styles and markers differ too. Names come from
outside: they are shown as they are, never as mathematics or mark-up, and long ones are cut in the middle.
Does not cover: letters that matplotlib's own font lacks, such as Chinese; they become boxes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

from arpo.figures.style import BLACK, BLUE, GREEN, ORANGE, PINK, RED, figure_style, new_figure, render
from arpo.figures.text import printable
from arpo.runs.run_dir import write_atomically
from arpo.studies.compare.stats import Comparison, Trial, cold_start, complete, on_grid, share_interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TOGETHER = 6  # so many algorithms are drawn in one panel
SINGLE = 3  # up to so many seeds are drawn one by one, and more as a band
WIDTH = 10.0  # inches
STYLE: Any = {
    "font.size": 12,
    "axes.titlesize": 12,
    "figure.titlesize": 14,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e4e4e4",
    "legend.title_fontsize": 11,
}


class Look(NamedTuple):
    """How an algorithm's line is told from the others, also in grey."""

    colour: str
    line: Any
    marker: str


BASELINE = Look(BLACK, "-", "o")
LOOKS = (
    Look(BLUE, "--", "s"),
    Look(RED, "-.", "^"),
    Look(GREEN, (0, (5, 1)), "D"),
    Look(PINK, (0, (3, 1, 1, 1)), "v"),
    Look(ORANGE, (0, (7, 2)), "P"),
)
GREY = Look("#999999", "-", "")
COLD: Any = {"color": "#555555", "linestyle": ":", "linewidth": 1.5}


class View(NamedTuple):
    """What the horizontal axis of a panel shows: a cost, in units of so much."""

    cost: str
    words: str
    unit: float


CALLS = View("tool_calls", "tool calls in training", 1.0)
TIME = View("seconds", "minutes of training", 60.0)


def pictures(comparison: Comparison) -> tuple[str, ...]:
    """The names of the pictures, less their suffix; the most telling first."""
    return ("final", "curves") if len(comparison.algorithms) <= TOGETHER else ("final", "curves", "time")


def draw_curves(comparison: Comparison, directory: Path) -> tuple[Path, ...]:
    """Draw accuracy against tool calls and against wall time, as means over seeds; returns what was written."""
    with figure_style(STYLE):
        if len(comparison.algorithms) <= TOGETHER:
            return _save(_two_panels(new_figure(WIDTH, 5.2), comparison), directory / "curves")
        height = 1.5 + 2.1 * _shape(comparison)[0]
        calls = _save(_multiples(new_figure(WIDTH, height), comparison, CALLS), directory / "curves")
        return calls + _save(_multiples(new_figure(WIDTH, height), comparison, TIME), directory / "time")


def draw_bars(comparison: Comparison, directory: Path) -> tuple[Path, ...]:
    """Draw the final accuracy of each algorithm, the best first; returns what was written."""
    ends = {name: [trial.curve[-1].accuracy for trial in complete(comparison, name)] for name in comparison.algorithms}
    order = sorted(ends, key=lambda name: -fmean(ends[name]) if ends[name] else 1.0)
    with figure_style(STYLE):
        picture = new_figure(WIDTH, 2.2 + 0.42 * len(order))
        panel = picture.subplots()
        for place, name in enumerate(order):
            _dots(panel, place, ends[name], BASELINE if name == comparison.baseline else LOOKS[0])
        several = any(len(found) > 1 for found in ends.values())
        panel.plot([], [], "D", color="black", markersize=8, label="mean, 95 % interval" if several else "one seed")
        if several:
            panel.plot([], [], "o", color="black", markersize=5, markerfacecolor="white", label="one seed")
        panel.set_yticks(range(len(order)), [_label(comparison, name, 34) for name in order])
        panel.set_ylim(len(order) - 0.4, -0.6)
        panel.tick_params(axis="y", length=0)
        panel.grid(visible=False, axis="y")
        panel.spines["left"].set_visible(False)
        panel.set_xlabel("accuracy on held-out questions")
        panel.xaxis.set_major_formatter(_percent)
        _levels(panel, comparison, ends[comparison.baseline])
        picture.suptitle(_cut(comparison.title, 80))
        _legend(picture, panel)
        return _save(picture, directory / "final")


def _dots(panel: Axes, place: int, ends: Sequence[float], look: Look) -> None:
    """One algorithm: mean and interval, dots of the seeds below, and the mean in words at the right."""
    if not ends:
        return
    mean, low, high = share_interval(ends)
    if low is not None and high is not None:
        panel.plot([low, high], [place, place], color=look.colour, linewidth=2.2, solid_capstyle="butt")
    panel.plot([mean], [place], "D", color=look.colour, markersize=8)
    if len(ends) > 1:
        heights = [place + 0.24] * len(ends)
        panel.plot(ends, heights, "o", color=look.colour, markersize=5, markerfacecolor="white")
    right = panel.get_yaxis_transform()
    panel.text(1.015, place, f"{100 * mean:.1f} %", transform=right, va="center", clip_on=False)


def _levels(panel: Axes, comparison: Comparison, base: Sequence[float]) -> None:
    start = cold_start(comparison)
    if start is None:
        panel.set_xlim(0, 1)
        return
    panel.axvline(start, **COLD, label="cold start", zorder=1)
    if base:
        label = f"{_cut(comparison.baseline, 24)}, the baseline"
        panel.axvline(fmean(base), color=GREY.colour, linewidth=1.2, label=label, zorder=1)


def _two_panels(picture: Figure, comparison: Comparison) -> Figure:
    panels = picture.subplots(1, 2, sharey=True)
    others = iter(LOOKS)
    looks = {name: BASELINE if name == comparison.baseline else next(others) for name in comparison.algorithms}
    for panel, view in zip(panels, (CALLS, TIME), strict=True):
        for name, look in looks.items():
            _line(panel, complete(comparison, name), view, look, _label(comparison, name, 24))
        _dress(panel, comparison, view)
        panel.set_xlabel(view.words)
    panels[0].set_ylabel("accuracy on held-out questions")
    picture.suptitle(_cut(comparison.title, 80))
    _legend(picture, panels[0], _seeds_in_words(comparison))
    return picture


def _multiples(picture: Figure, comparison: Comparison, view: View) -> Figure:
    """A panel for each algorithm but the baseline, which is in all of them."""
    rows, columns = _shape(comparison)
    grid = picture.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flatten().tolist()
    base = complete(comparison, comparison.baseline)
    names = [name for name in comparison.algorithms if name != comparison.baseline]
    for place, (panel, name) in enumerate(zip(grid, names, strict=False)):
        trials = complete(comparison, name)
        _line(panel, base, view, GREY, f"{_label(comparison, comparison.baseline, 24)}, the baseline")
        _line(panel, trials, view, LOOKS[0]._replace(line="-", marker=""), "the algorithm of the panel")
        _dress(panel, comparison, view)
        panel.set_title(f"{_label(comparison, name, 22)}\n{_final(trials)}", loc="left")
        panel.tick_params(labelbottom=place + columns >= len(names))
        panel.set_xlabel(view.words if place >= (rows - 1) * columns else "")
    for panel in grid[len(names) :]:
        panel.remove()
    picture.suptitle(_cut(comparison.title, 80))
    picture.supylabel("accuracy on held-out questions", fontsize=12)
    full = next((panel for panel, name in zip(grid, names, strict=False) if complete(comparison, name)), grid[0])
    _legend(picture, full, _seeds_in_words(comparison))
    return picture


def _shape(comparison: Comparison) -> tuple[int, int]:
    """Rows and columns of the small panels."""
    panels = len(comparison.algorithms) - 1
    columns = 3 if panels <= 9 else 4
    return ceil(panels / columns), columns


def _line(panel: Axes, trials: Sequence[Trial], view: View, look: Look, label: str) -> None:
    """The mean over seeds; single seeds as thin lines, or their interval as a band."""
    if not trials:
        return
    grid, values = on_grid(trials, view.cost)
    points = list(zip(grid, *values, strict=False))
    costs = [cost / view.unit for cost, *_ in points]
    band = [share_interval(accuracies) for _, *accuracies in points]
    if len(trials) > SINGLE:
        lows, highs = [each.low or 0.0 for each in band], [each.high or 0.0 for each in band]
        panel.fill_between(costs, lows, highs, color=look.colour, alpha=0.15, linewidth=0)
    elif len(trials) > 1:
        for trial in trials:
            places = [getattr(point, view.cost) / view.unit for point in trial.curve]
            accuracies = [point.accuracy for point in trial.curve]
            panel.plot(places, accuracies, color=look.colour, linewidth=0.8, alpha=0.45)
    panel.plot(
        costs,
        [each.mean for each in band],
        color=look.colour,
        linestyle=look.line,
        linewidth=2,
        marker=look.marker,
        markersize=6,
        markevery=0.13,
        label=label,
    )


def _dress(panel: Axes, comparison: Comparison, view: View) -> None:
    start = cold_start(comparison)
    if start is not None:
        panel.axhline(start, **COLD, label="cold start", zorder=1)
    panel.yaxis.set_major_formatter(_percent)
    panel.locator_params(axis="x", nbins=4, min_n_ticks=3)
    trials = [trial for name in comparison.algorithms for trial in complete(comparison, name)]
    top = max((getattr(trial.curve[-1], view.cost) / view.unit for trial in trials), default=0.0)
    panel.set_xlim(0, 1.02 * top or 1.0)
    panel.xaxis.set_major_formatter(_counts(top))


def _label(comparison: Comparison, name: str, length: int) -> str:
    """A name, and how many of its seeds are there if not all."""
    found, wanted = len(complete(comparison, name)), len(comparison.seeds)
    return _cut(name, length) + ("" if found == wanted else f" ({found} of {wanted} seeds)")


def _final(trials: Sequence[Trial]) -> str:
    return f"{100 * fmean(trial.curve[-1].accuracy for trial in trials):.1f} %" if trials else "no run is complete"


def _seeds_in_words(comparison: Comparison) -> str:
    most = max(len(complete(comparison, name)) for name in comparison.algorithms)
    if most <= 1:
        return "lines: one seed"
    if most <= SINGLE:
        return f"lines: means over {most} seeds; thin: single seeds"
    return f"lines: means over {most} seeds; bands: 95 % intervals"


def _cut(text: str, length: int) -> str:
    """One line of about so many characters; the middle is left out, since names often differ at their ends."""
    shown = " ".join(printable(text).split())
    if shown.startswith("_"):
        shown = " " + shown  # matplotlib leaves out labels that begin with it
    return shown if len(shown) <= length else f"{shown[: length // 2]}…{shown[-((length - 1) // 2) :]}"


def _percent(share: float, _: float) -> str:
    return f"{100 * share:.3g} %"


def _counts(top: float) -> Callable[[float, float], str]:
    """Numbers up to `top`, all in thousands or millions if they are so large."""
    unit, word = next(((u, w) for u, w in ((1e6, "M"), (1e3, "k")) if top >= 10 * u), (1.0, ""))
    return lambda value, _: f"{value / unit:,g}{word if value else ''}"


def _legend(picture: Figure, panel: Axes, note: str = "") -> None:
    """What the panel's lines are, below the picture, in as few rows as the names allow."""
    handles, labels = panel.get_legend_handles_labels()
    if not handles:
        return
    rows = ceil(len(labels) * (max(map(len, labels)) + 8) / 110)
    picture.legend(handles, labels, loc="outside lower center", ncols=ceil(len(labels) / rows), title=note or None)


def _save(picture: Figure, stem: Path) -> tuple[Path, ...]:
    paths = {kind: stem.with_suffix(f".{kind}") for kind in ("svg", "png")}
    for kind, content in render(picture).items():
        write_atomically(paths[kind], content)
    return tuple(paths.values())
