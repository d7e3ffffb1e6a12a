"""The figures of a comparison: final accuracy, and accuracy against tool calls and training time.

    files = draw_comparison(comparison)   # final, curves and, for more than six algorithms, time; as .svg and .png

Guarantees: only complete trials are drawn. Algorithms differ in color, line style and marker. Untrusted names are drawn
literally, and long ones are shortened in the middle.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

from arpo.figures.style import BLACK, BLUE, GREEN, ORANGE, PINK, RED, figure_style, new_figure, render
from arpo.figures.text import printable
from arpo.studies.compare.results import Comparison, TrialResult
from arpo.studies.compare.stats import cold_start, complete, fraction_interval, on_grid

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_IN_ONE_PANEL = 6  # algorithms; more get a panel each
MAX_THIN_LINES = 3  # seeds that are drawn one by one; more are drawn as a band
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


class LineStyle(NamedTuple):
    """Color, dashes and marker of an algorithm's line."""

    color: str
    dashes: Any
    marker: str


BASELINE = LineStyle(BLACK, "-", "o")
OTHERS = (
    LineStyle(BLUE, "--", "s"),
    LineStyle(RED, "-.", "^"),
    LineStyle(GREEN, (0, (5, 1)), "D"),
    LineStyle(PINK, (0, (3, 1, 1, 1)), "v"),
    LineStyle(ORANGE, (0, (7, 2)), "P"),
)
GREY = LineStyle("#999999", "-", "")
COLD_START: Any = {"color": "#555555", "linestyle": ":", "linewidth": 1.5, "label": "cold start", "zorder": 1}


# Costs on the horizontal axis: the label, and the unit that the cost is divided by.
AXES = {"tool_calls": ("tool calls in training", 1.0), "seconds": ("minutes of training", 60.0)}


def draw_comparison(comparison: Comparison) -> dict[str, bytes]:
    """All figures as files, by file name; the final accuracies come first."""
    with figure_style(STYLE):
        figures = {"final": draw_final(comparison), **draw_curves(comparison)}
        return {f"{name}.{kind}": data for name, figure in figures.items() for kind, data in render(figure).items()}


def draw_curves(comparison: Comparison) -> dict[str, Figure]:
    """Accuracy against tool calls and against time, as means over seeds: one figure, or one for each of the two."""
    if len(comparison.algorithms) <= MAX_IN_ONE_PANEL:
        return {"curves": _two_panels(comparison)}
    names = {"curves": "tool_calls", "time": "seconds"}
    return {name: _small_multiples(comparison, cost) for name, cost in names.items()}


def draw_final(comparison: Comparison) -> Figure:
    """The final accuracy of each algorithm, best first: mean, interval and single seeds."""
    ends = {name: [trial.curve[-1].accuracy for trial in complete(comparison, name)] for name in comparison.algorithms}
    order = sorted(ends, key=lambda name: -fmean(ends[name]) if ends[name] else 1.0)
    figure = new_figure(WIDTH, 2.2 + 0.42 * len(order))
    axes = figure.subplots()
    for row, name in enumerate(order):
        _draw_row(axes, row, ends[name], BASELINE if name == comparison.baseline else OTHERS[0])
    several = any(len(found) > 1 for found in ends.values())
    axes.plot([], [], "D", color="black", markersize=8, label="mean, 95 % interval" if several else "one seed")
    if several:
        axes.plot([], [], "o", color="black", markersize=5, markerfacecolor="white", label="one seed")
    axes.set_yticks(range(len(order)), [_label(comparison, name, 34) for name in order])
    axes.set_ylim(len(order) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    axes.spines["left"].set_visible(False)
    axes.set_xlabel("accuracy on held-out questions")
    axes.xaxis.set_major_formatter(_percent)
    start, baseline = cold_start(comparison), ends[comparison.baseline]
    if start is None:
        axes.set_xlim(0, 1)
    else:
        axes.axvline(start, **COLD_START)
    if baseline:
        label = f"{_shorten(comparison.baseline, 24)}, the baseline"
        axes.axvline(fmean(baseline), color=GREY.color, linewidth=1.2, label=label, zorder=1)
    figure.suptitle(_shorten(comparison.title, 80))
    _legend(figure, axes)
    return figure


def _draw_row(axes: Axes, row: int, ends: Sequence[float], style: LineStyle) -> None:
    """One algorithm: mean and interval, the seeds below, and the mean as text at the right."""
    if not ends:
        return
    mean, low, high = fraction_interval(ends)
    if low is not None and high is not None:
        axes.plot([low, high], [row, row], color=style.color, linewidth=2.2, solid_capstyle="butt")
    axes.plot([mean], [row], "D", color=style.color, markersize=8)
    if len(ends) > 1:
        axes.plot(ends, [row + 0.24] * len(ends), "o", color=style.color, markersize=5, markerfacecolor="white")
    axes.text(1.015, row, f"{100 * mean:.1f} %", transform=axes.get_yaxis_transform(), va="center", clip_on=False)


def _two_panels(comparison: Comparison) -> Figure:
    figure = new_figure(WIDTH, 5.2)
    panels = figure.subplots(1, 2, sharey=True)
    others = iter(OTHERS)
    styles = {name: BASELINE if name == comparison.baseline else next(others) for name in comparison.algorithms}
    for axes, cost in zip(panels, AXES, strict=True):
        for name, style in styles.items():
            _draw_curve(axes, complete(comparison, name), cost, style, _label(comparison, name, 24))
        _format_axes(axes, comparison, cost)
        axes.set_xlabel(AXES[cost][0])
    panels[0].set_ylabel("accuracy on held-out questions")
    figure.suptitle(_shorten(comparison.title, 80))
    _legend(figure, panels[0], _seeds_note(comparison))
    return figure


def _small_multiples(comparison: Comparison, cost: str) -> Figure:
    """A panel for each algorithm but the baseline, which is drawn in all of them."""
    names = [name for name in comparison.algorithms if name != comparison.baseline]
    columns = 3 if len(names) <= 9 else 4
    rows = ceil(len(names) / columns)
    figure = new_figure(WIDTH, 1.5 + 2.1 * rows)
    panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flatten().tolist()
    base = complete(comparison, comparison.baseline)
    for index, (axes, name) in enumerate(zip(panels, names, strict=False)):
        trials = complete(comparison, name)
        _draw_curve(axes, base, cost, GREY, f"{_label(comparison, comparison.baseline, 24)}, the baseline")
        _draw_curve(axes, trials, cost, OTHERS[0]._replace(dashes="-", marker=""), "the panel's algorithm")
        _format_axes(axes, comparison, cost)
        mean = f"{100 * fmean(trial.curve[-1].accuracy for trial in trials):.1f} %" if trials else "no complete run"
        axes.set_title(f"{_label(comparison, name, 22)}\n{mean}", loc="left")
        axes.tick_params(labelbottom=index + columns >= len(names))
        axes.set_xlabel(AXES[cost][0] if index >= (rows - 1) * columns else "")
    for axes in panels[len(names) :]:
        axes.remove()
    figure.suptitle(_shorten(comparison.title, 80))
    figure.supylabel("accuracy on held-out questions", fontsize=12)
    drawn = (axes for axes, name in zip(panels, names, strict=False) if complete(comparison, name))
    _legend(figure, next(drawn, panels[0]), _seeds_note(comparison))
    return figure


def _draw_curve(axes: Axes, trials: Sequence[TrialResult], cost: str, style: LineStyle, label: str) -> None:
    """The mean over seeds; few seeds as thin lines, more as a band of intervals."""
    if not trials:
        return
    grid, values = on_grid(trials, cost)
    points, unit = list(zip(grid, *values, strict=False)), AXES[cost][1]
    costs = [x / unit for x, *_ in points]
    means = [fraction_interval(accuracies) for _, *accuracies in points]
    if len(trials) > MAX_THIN_LINES:
        lows, highs = [each.low or 0.0 for each in means], [each.high or 0.0 for each in means]
        axes.fill_between(costs, lows, highs, color=style.color, alpha=0.15, linewidth=0)
    elif len(trials) > 1:
        for trial in trials:
            x = [getattr(point, cost) / unit for point in trial.curve]
            axes.plot(x, [point.accuracy for point in trial.curve], color=style.color, linewidth=0.8, alpha=0.45)
    y = [each.mean for each in means]
    marks: Any = {"marker": style.marker, "markersize": 6, "markevery": 0.13}
    axes.plot(costs, y, color=style.color, linestyle=style.dashes, linewidth=2, label=label, **marks)


def _format_axes(axes: Axes, comparison: Comparison, cost: str) -> None:
    start = cold_start(comparison)
    if start is not None:
        axes.axhline(start, **COLD_START)
    axes.yaxis.set_major_formatter(_percent)
    axes.locator_params(axis="x", nbins=4, min_n_ticks=3)
    trials = [trial for name in comparison.algorithms for trial in complete(comparison, name)]
    largest = max((getattr(trial.curve[-1], cost) / AXES[cost][1] for trial in trials), default=0.0)
    axes.set_xlim(0, 1.02 * largest or 1.0)
    axes.xaxis.set_major_formatter(_count_format(largest))


def _label(comparison: Comparison, name: str, length: int) -> str:
    """A name, with the number of complete seeds if some are missing."""
    found, wanted = len(complete(comparison, name)), len(comparison.seeds)
    return _shorten(name, length) + ("" if found == wanted else f" ({found} of {wanted} seeds)")


def _seeds_note(comparison: Comparison) -> str:
    most = max(len(complete(comparison, name)) for name in comparison.algorithms)
    if most <= 1:
        return "lines: one seed"
    single = most <= MAX_THIN_LINES
    return f"lines: means over {most} seeds; {'thin lines: single seeds' if single else 'bands: 95 % intervals'}"


def _shorten(text: str, length: int) -> str:
    """One line of at most this length; the middle is cut out, because names often differ at their ends."""
    shown = " ".join(printable(text).split())
    if shown.startswith("_"):
        shown = " " + shown  # matplotlib hides labels that begin with an underscore
    return shown if len(shown) <= length else f"{shown[: length // 2]}…{shown[-((length - 1) // 2) :]}"


def _percent(value: float, _: float) -> str:
    return f"{100 * value:.3g} %"


def _count_format(largest: float) -> Callable[[float, float], str]:
    """A tick formatter for numbers up to `largest`, in thousands or millions if that is large."""
    unit, suffix = next(((u, s) for u, s in ((1e6, "M"), (1e3, "k")) if largest >= 10 * u), (1.0, ""))
    return lambda value, _: f"{value / unit:,g}{suffix if value else ''}"


def _legend(figure: Figure, axes: Axes, note: str = "") -> None:
    """A legend below the figure, in as few rows as the labels allow."""
    handles, labels = axes.get_legend_handles_labels()
    if not handles:
        return
    rows = ceil(len(labels) * (max(map(len, labels)) + 8) / 110)
    figure.legend(handles, labels, loc="outside lower center", ncols=ceil(len(labels) / rows), title=note or None)
