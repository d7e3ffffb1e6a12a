"""The figure of an entropy study: entropy token by token on the left, histograms of dH after tool results on the right.

Guarantees: the same study gives the same bytes. Untrusted tool names are drawn literally. Lines differ in color and
dashes.
Not covered: more than `MAX_SHOWN` kinds of turn starts, or rare ones; their number is noted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from arpo.evaluation.statistics import Z
from arpo.figures.style import BLACK, BLUE, GREEN, ORANGE, PINK, RED, SKY, figure_style, new_figure, render
from arpo.figures.text import one_line
from arpo.studies.entropy.study import BranchStats, Curve, Study, TurnStart

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_SHOWN = 7  # kinds of turn starts
MIN_SHARE = 0.02  # of all results; rarer kinds are not drawn
MIN_REACHED = 0.05  # of the turns; positions that fewer turns reach are not drawn
COLORS = (BLACK, BLUE, RED, GREEN, PINK, ORANGE, SKY)
DASHES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (7, 2)), (0, (1, 2)))
GREY = "#BBBBBB"


def draw_study(title: str, study: Study, edges: Sequence[float]) -> dict[str, bytes]:
    """The figure as `svg` and `png`; `edges` are the bin edges of dH."""
    with figure_style({"font.size": 9}):
        figure = new_figure(10.0, 5.0)
        shown = _shown(study)
        grid = figure.add_gridspec(1, 2, width_ratios=[1.2, 1])
        figure.suptitle(_shorten(title, 120), fontsize=10, fontweight="bold")
        _draw_curves(figure.add_subplot(grid[0]), study, shown)
        _draw_decisions(figure, grid[1], study, shown, edges)
        return render(figure)


def _shown(study: Study) -> list[TurnStart]:
    """The turn starts to draw: the prompt, and the most frequent of the others."""
    count = {start: curve.first.count for start, curve in study.curves.items()}
    enough = MIN_SHARE * sum(number for start, number in count.items() if start.kind != "prompt")
    frequent = [start for start in count if start.kind == "prompt" or count[start] >= enough]
    return sorted(frequent, key=lambda start: (start.kind != "prompt", -count[start]))[:MAX_SHOWN]


def _draw_curves(axes: Axes, study: Study, shown: Sequence[TurnStart]) -> None:
    for number, start in enumerate(shown):
        _draw_curve(axes, start, study.curves[start], number)
    axes.axvspan(-0.5, study.probe_tokens - 0.5, color="#F2F2F2", zorder=0)
    axes.set_xlim(left=-0.5)
    axes.locator_params(axis="x", integer=True)
    axes.set_ylim(bottom=0)
    axes.set_xlabel(f"token of the turn (grey: the {study.probe_tokens} probe tokens)")
    axes.set_ylabel("entropy, nats")
    axes.set_title("Entropy token by token", loc="left", fontsize=9)
    if shown:
        axes.legend(frameon=False, loc="best", handlelength=3.5, title="start of the turn (count)", alignment="left")
    if rest := len(study.curves) - len(shown):
        note = f"not drawn: {rest} rare kinds"
        axes.text(1, 1, note, transform=axes.transAxes, ha="right", va="bottom", fontsize=8)


def _draw_curve(axes: Axes, start: TurnStart, curve: Curve, number: int) -> None:
    """The means with a 95 % band, which has gaps where there is only one question."""
    most = max(mean.count for mean in curve.positions)
    means = [mean for mean in curve.positions if mean.count >= MIN_REACHED * most]
    x, y = list(range(len(means))), [mean.value for mean in means]
    half = [float("nan") if mean.error is None else Z * mean.error for mean in means]
    label = f"{_shorten(start.label, 32)} ({curve.first.count:,})"
    color = COLORS[number]
    axes.plot(x, y, color=color, linestyle=DASHES[number], marker="o", markersize=2.5, linewidth=1.6, label=label)
    low = [max(0.0, value - by) for value, by in zip(y, half, strict=True)]
    high = [value + by for value, by in zip(y, half, strict=True)]
    axes.fill_between(x, low, high, color=color, alpha=0.18, linewidth=0)


def _draw_decisions(
    figure: Figure, cell: Any, study: Study, shown: Sequence[TurnStart], edges: Sequence[float]
) -> None:
    """A histogram of dH for each kind of result, one below the other."""
    rows = [(start, COLORS[number]) for number, start in enumerate(shown) if start in study.by_tool]
    if not rows:
        axes = figure.add_subplot(cell)
        axes.set_axis_off()
        axes.text(0.5, 0.5, "no tool results", ha="center", transform=axes.transAxes)
        return
    first: Axes | None = None
    limit = study.threshold
    inside = limit is not None and edges[0] <= limit <= edges[-1]
    for (start, color), place in zip(rows, cell.subgridspec(len(rows), 1), strict=True):
        axes = figure.add_subplot(place, sharex=first)
        first = first or axes
        stats = study.by_tool[start]
        _draw_histogram(axes, stats, color, edges)
        risen = "" if stats.risen is None else f", {stats.risen.value:.0%} above 0"
        title = f"{_shorten(start.label, 28)}: {stats.decisions:,} results{risen}, {stats.branched:,} branched"
        axes.set_title(title, loc="left", fontsize=8)
        axes.axvline(0, color="#666666", linewidth=0.8)
        if limit is not None and inside:
            axes.axvline(limit, color="#000000", linewidth=1.2, linestyle="--")
        axes.tick_params(labelbottom=start is rows[-1][0])
    note = "" if limit is None else f"; dashed: the threshold, {limit:g}" if inside else f"; the threshold is {limit:g}"
    axes.set_xlabel(f"dH = (H - H at the start) / ln V\ncolored: branched{note}")


def _draw_histogram(axes: Axes, stats: BranchStats, color: str, edges: Sequence[float]) -> None:
    """Counts of results by dH, stacked: branched in color, the others in grey."""
    groups = (stats.branched_deltas, stats.other_deltas)
    clipped = [[min(max(delta, edges[0]), edges[-1]) for delta in group] for group in groups]
    axes.hist(clipped, bins=list(edges), stacked=True, color=[color, GREY])
    axes.set_ylabel("results", fontsize=8)
    axes.locator_params(axis="y", integer=True, nbins=3)


def _shorten(text: str, length: int) -> str:
    line = one_line(text)
    return line if len(line) <= length else line[: length - 1] + "…"
