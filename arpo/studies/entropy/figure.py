"""The picture of a study of entropies: entropy token by token on the left, what was decided after results on the right.

Promises: the same study gives the same bytes, whatever matplotlib's own settings are; tools' names are drawn as they
are, never as formulas; colours can be told apart by the colour-blind, and lines also by their dashes.
Does not cover: more than `MOST` kinds of places, or rare ones; the others are drawn and the rest counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from arpo.evaluation.statistics import Z
from arpo.figures.style import BLACK, BLUE, GREEN, ORANGE, PINK, RED, SKY, figure_style, new_figure, render
from arpo.figures.text import printable
from arpo.studies.entropy.study import BranchStats, Curve, Place, Study

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST = 7  # kinds of places
RARE = 0.02  # kinds that have a smaller share of all results are not drawn
LEAST = 0.05  # nor are positions that a smaller share of places reaches
COLOURS = (BLACK, BLUE, RED, GREEN, PINK, ORANGE, SKY)
DASHES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (7, 2)), (0, (1, 2)))
GREY = "#BBBBBB"
SIZE = (10.0, 5.0)  # inches


def draw(title: str, study: Study, edges: Sequence[float]) -> dict[str, bytes]:
    """The picture as `svg` and `png`; `edges` are those of the bins of dH."""
    with figure_style({"font.size": 9}):
        figure = new_figure(*SIZE)
        _compose(figure, title, study, edges)
        return render(figure)


def _compose(figure: Figure, title: str, study: Study, edges: Sequence[float]) -> None:
    shown = _shown(study)
    styles = {place: number for number, place in enumerate(shown)}
    grid = figure.add_gridspec(1, 2, width_ratios=[1.2, 1])
    figure.suptitle(_words(title, 120), fontsize=10, fontweight="bold")
    axes = figure.add_subplot(grid[0])
    for place, number in styles.items():
        _line(axes, place, study.curves[place], number)
    axes.axvspan(-0.5, study.probe - 0.5, color="#F2F2F2", zorder=0)
    axes.set_xlim(left=-0.5)
    axes.locator_params(axis="x", integer=True)
    axes.set_ylim(bottom=0)
    axes.set_xlabel(f"token of the turn (grey: the first {study.probe}, which are probed)")
    axes.set_ylabel("entropy, nats")
    axes.set_title("How unsure the model is, token by token", loc="left", fontsize=9)
    if shown:
        axes.legend(frameon=False, loc="best", handlelength=3.5, title="place (how many)", alignment="left")
    rest = len(study.curves) - len(shown)
    if rest:
        note = f"kinds of places not drawn: {rest}"
        axes.text(1, 1, note, transform=axes.transAxes, ha="right", va="bottom", fontsize=8)
    _decisions(figure, grid[1], study, [place for place in shown if place in study.looks], styles, edges)


def _shown(study: Study) -> list[Place]:
    """The start, and the most frequent of the others that are not rare."""
    count = {place: curve.first.count for place, curve in study.curves.items()}
    enough = RARE * sum(number for place, number in count.items() if place.kind != "start")
    often = [place for place in count if place.kind == "start" or count[place] >= enough]
    return sorted(often, key=lambda place: (place.kind != "start", -count[place]))[:MOST]


def _line(axes: Axes, place: Place, curve: Curve, number: int) -> None:
    """The means with a 95 % band; it has gaps where there is but one question."""
    most = max(mean.count for mean in curve.positions)
    means = [mean for mean in curve.positions if mean.count >= LEAST * most]
    x, y = list(range(len(means))), [mean.value for mean in means]
    reach = [float("nan") if mean.error is None else Z * mean.error for mean in means]
    label = f"{_words(place.label, 32)} ({curve.first.count:,})"
    colour = COLOURS[number]
    axes.plot(x, y, color=colour, linestyle=DASHES[number], marker="o", markersize=2.5, linewidth=1.6, label=label)
    low = [max(0.0, value - by) for value, by in zip(y, reach, strict=True)]
    high = [value + by for value, by in zip(y, reach, strict=True)]
    axes.fill_between(x, low, high, color=colour, alpha=0.18, linewidth=0)


def _decisions(
    figure: Figure, where: Any, study: Study, places: Sequence[Place], styles: dict[Place, int], edges: Sequence[float]
) -> None:
    """A histogram of dH for each kind of result, one below the other."""
    if not places:
        axes = figure.add_subplot(where)
        axes.set_axis_off()
        axes.text(0.5, 0.5, "no tool result was looked at", ha="center", transform=axes.transAxes)
        return
    first: Axes | None = None
    limit = study.threshold
    inside = limit is not None and edges[0] <= limit <= edges[-1]
    for row, cell in enumerate(where.subgridspec(len(places), 1)):
        axes = figure.add_subplot(cell, sharex=first)
        first = first or axes
        _histogram(axes, study.looks[places[row]], COLOURS[styles[places[row]]], edges)
        axes.set_title(_summary(places[row], study.looks[places[row]]), loc="left", fontsize=8)
        axes.axvline(0, color="#666666", linewidth=0.8)
        if limit is not None and inside:
            axes.axvline(limit, color="#000000", linewidth=1.2, linestyle="--")
        if row < len(places) - 1:
            axes.tick_params(labelbottom=False)
    said = "" if limit is None else f"; dashed: the threshold, {limit:g}" if inside else f"; the threshold is {limit:g}"
    axes.set_xlabel(f"dH = (H - H at the start) / ln V\ncoloured: branched{said}")


def _histogram(axes: Axes, looks: BranchStats, colour: str, edges: Sequence[float]) -> None:
    """Counts of results, those that were branched from in colour."""
    given = [
        [min(max(delta, edges[0]), edges[-1]) for delta in part] for part in (looks.branched_deltas, looks.other_deltas)
    ]
    axes.hist(given, bins=list(edges), stacked=True, color=[colour, GREY])
    axes.set_ylabel("results", fontsize=8)
    axes.locator_params(axis="y", integer=True, nbins=3)


def _summary(place: Place, looks: BranchStats) -> str:
    rose = "" if looks.rose is None else f", {looks.rose.value:.0%} above 0"
    return f"{_words(place.label, 28)}: {looks.looked:,} results{rose}, {looks.branched:,} branched"


def _words(text: str, most: int) -> str:
    """Text from outside on one line, cut to a length."""
    plain = printable(text).replace("\n", " ")
    return plain if len(plain) <= most else plain[: most - 1] + "…"
