"""The results of an entropy study: entropy.json, entropy.md, a figure as SVG and PNG, and a table for the terminal.

    write_study(directory, Subject("runs/mine", "trees of steps 1 to 6", temperature=1.0), study(...))

Guarantees: the same study gives the same files, each written atomically. Intervals are at 95 %. Untrusted tool names
are escaped wherever they are shown. In the figure, lines differ in color and dashes.
Not covered: the figure shows at most `MAX_SHOWN` kinds of turn starts, and no rare ones; their number is noted.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from arpo.evaluation.statistics import Z
from arpo.figures.style import BLACK, BLUE, GREEN, ORANGE, PINK, RED, SKY, figure_style, new_figure, render
from arpo.figures.text import markdown_cell, markdown_table, one_line
from arpo.runs.run_dir import write_atomically
from arpo.studies.entropy.study import BranchStats, Curve, Mean, Study, TurnStart
from arpo.types import percentile

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_BINS = 40
MIN_QUESTIONS = 10  # for a finding; intervals from fewer are unreliable
BRANCH_HEADS = ["decisions", "dH > 0", "branched", "not branched because", "compared", "informative", "AUC of dH"]
MAX_SHOWN = 7  # kinds of turn starts
MIN_SHARE = 0.02  # of all results; rarer kinds are not drawn
MIN_REACHED = 0.05  # of the turns; positions that fewer turns reach are not drawn
COLORS = (BLACK, BLUE, RED, GREEN, PINK, ORANGE, SKY)
DASHES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (7, 2)), (0, (1, 2)))
GREY = "#BBBBBB"


@dataclass(frozen=True, slots=True)
class Subject:
    """What was studied: its name, which trees, and their sampling temperature."""

    name: str
    trees: str
    temperature: float


def write_study(directory: Path, subject: Subject, study: Study) -> None:
    """Write entropy.json, entropy.md, entropy.svg and entropy.png."""
    title = f"{subject.name}: {subject.trees}, temperature {subject.temperature:g}"
    files = {
        "entropy.json": (json.dumps(study_json(subject, study), indent=1, allow_nan=False) + "\n").encode(),
        "entropy.md": markdown(subject, study).encode(),
        **{f"entropy.{kind}": content for kind, content in draw_study(title, study, bin_edges(study)).items()},
    }
    for name, content in files.items():
        write_atomically(directory / name, content)


def study_json(subject: Subject, study: Study) -> dict[str, Any]:
    """Everything as JSON values: entropies in nats, dH in units of ln V."""
    edges = bin_edges(study)
    return {
        **asdict(subject),
        "tree_count": study.trees,
        "questions": study.questions,
        "groups": study.groups,
        "informative_groups": study.informative_groups,
        "probe_tokens": study.probe_tokens,
        "threshold": study.threshold,
        "turn_starts": [
            {
                **_start_json(start),
                "turns": curve.turns,
                "first_tokens": asdict(curve.first),
                "positions": [asdict(mean) for mean in curve.positions],
            }
            for start, curve in study.curves.items()
        ],
        "bins": edges,
        "decisions_by_tool": [{**_start_json(s), **_branch_json(stats, edges)} for s, stats in study.by_tool.items()],
        "decisions_by_call": [{"call": call, **_branch_json(stats, edges)} for call, stats in study.by_call.items()],
        "rewards_by_depth": [{"depth": depth, **asdict(found)} for depth, found in study.by_depth.items()],
    }


def findings(study: Study) -> list[str]:
    """One sentence for each kind of tool result: how the entropy after it differs from that at the start."""
    lines = []
    for start, stats in study.by_tool.items():
        if stats.rise is None or stats.rise.questions < MIN_QUESTIONS:
            continue
        low, high = _interval(stats.rise)
        word = "higher than" if low > 0 else "lower than" if high < 0 else "not clearly different from"
        lines.append(
            f"Entropy {start.label} is {word} at the start of the same trajectory: {_signed(stats.rise)} nats over the "
            f"first {study.probe_tokens} tokens."
        )
    return lines or [f"No tool returned results on {MIN_QUESTIONS} or more questions, so there are no findings."]


def markdown(subject: Subject, study: Study) -> str:
    """The findings and the tables."""
    parts = [
        f"# Entropy by start of the turn: {markdown_cell(subject.name)}",
        "",
        f"From {study.trees:,} trees of {study.questions:,} questions ({markdown_cell(subject.trees)}), in nats over "
        f"the full vocabulary, at temperature {subject.temperature:g}. In brackets: 95 % intervals over questions.",
        "",
        "![Entropy by position, and dH by tool](entropy.png)",
        "",
        *(f"- {markdown_cell(line)}" for line in findings(study)),
        "",
        *_markdown_table(*entropy_table(study)),
        "",
        "## Branch points",
        "",
        "A branch point is informative if its continuations (the probed trajectory and the new ones) have different "
        "mean rewards. It is compared if two or more of them have a valid reward. AUC of dH: the probability that an "
        "informative branch point has a larger dH than an uninformative one; 0.5 if dH predicts nothing.",
        "",
    ]
    by_tool = [[start.label.removeprefix("after "), *_branch_row(stats)] for start, stats in study.by_tool.items()]
    by_call = [[str(call), *_branch_row(stats)] for call, stats in study.by_call.items()]
    for head, rows in (("result of", by_tool), ("call in the trajectory", by_call)):
        parts += [*_markdown_table([head, *BRANCH_HEADS], rows), ""]
    parts += [
        "## Rewards below branch points",
        "",
        f"{_informative_groups(study)} The intraclass correlation is 1 if the turn after a branch point decides the "
        "reward, and about 0 if it makes no difference. It is measured at branch points (the prompt is one) with a "
        "continuation of two or more trajectories, and is below 0 if these differ more than unrelated ones.",
        "",
        *_markdown_table(*correlation_table(study)),
        "",
    ]
    return "\n".join(parts)


def entropy_table(study: Study) -> tuple[list[str], list[list[str]]]:
    """Head and rows of the table of entropies; labels are not escaped."""
    head = ["start of the turn", "count", "turns", f"H, first {study.probe_tokens} tokens", "H - H at the start"]
    rows = []
    for start, curve in study.curves.items():
        stats = study.by_tool.get(start)
        row = [start.label, f"{curve.first.count:,}", f"{curve.turns:,}", _plain(curve.first)]
        more = ["", "", ""] if stats is None else [_signed(stats.rise), _percent(stats.risen), f"{stats.branched:,}"]
        rows.append([*row, *more])
    return [*head, "dH > 0", "branched"], rows


def correlation_table(study: Study) -> tuple[list[str], list[list[str]]]:
    """Head and rows of the table of intraclass correlations."""
    rows = [
        [
            str(depth),
            "" if found.icc is None else f"{found.icc:z.2f}",
            f"{found.branch_points:,}",
            f"{found.trajectories:,}",
        ]
        for depth, found in study.by_depth.items()
    ]
    return ["calls above the branch point", "intraclass correlation", "branch points", "trajectories"], rows


def _informative_groups(study: Study) -> str:
    share = study.informative_groups / max(1, study.groups)
    return f"{share:.0%} of the {study.groups:,} groups are informative: their trajectories earned unequal rewards."


def terminal_lines(study: Study) -> list[str]:
    """The findings, and how many groups and branch points were informative."""
    lines = [*(one_line(line) for line in findings(study)), _informative_groups(study)]
    branched, compared, informative = (
        sum(getattr(stats, name) for stats in study.by_tool.values())
        for name in ("branched", "compared", "informative")
    )
    if compared:
        lines.append(
            f"{branched:,} branch points; {informative / compared:.0%} of the {compared:,} compared are informative."
        )
    return lines


def bin_edges(study: Study) -> list[float]:
    """Edges of at most `MAX_BINS` equal bins around 99 % of all dH, at multiples of a round width, so 0 is an edge."""
    deltas = [delta for stats in study.by_tool.values() for delta in (*stats.branched_deltas, *stats.other_deltas)]
    low, high = percentile(sorted(deltas), 0.005), percentile(sorted(deltas), 0.995)
    raw = max((high - low) / (MAX_BINS - 2), 1e-6)
    unit = 10.0 ** math.floor(math.log10(raw))
    width = next(unit * step for step in (1, 2, 5, 10) if unit * step >= raw)
    return [width * number for number in range(math.floor(low / width), math.floor(high / width) + 2)]


def _histogram(values: Sequence[float], edges: Sequence[float]) -> list[int]:
    """The number of values in each bin, lower edge included; the outermost bins also hold what lies beyond."""
    clipped = np.clip(np.asarray(values, dtype=np.float64), edges[0], edges[-1])
    return [int(count) for count in np.histogram(clipped, np.asarray(edges))[0]]


def _start_json(start: TurnStart) -> dict[str, str]:
    return {"label": start.label, **asdict(start)}


def _branch_json(stats: BranchStats, edges: Sequence[float]) -> dict[str, Any]:
    values = asdict(stats)
    branched, others = _histogram(values.pop("branched_deltas"), edges), _histogram(values.pop("other_deltas"), edges)
    return {**values, "branched": stats.branched, "branched_histogram": branched, "other_histogram": others}


def _branch_row(stats: BranchStats) -> list[str]:
    reasons = "; ".join(f"{reason}: {count:,}" for reason, count in stats.not_branched.items())
    informative = f"{stats.informative / stats.compared:.0%}" if stats.compared else ""
    auc = "" if stats.auc is None else f"{stats.auc:.2f}"
    row = [f"{stats.decisions:,}", _percent(stats.risen), f"{stats.branched:,}"]
    return [*row, reasons, f"{stats.compared:,}", informative, auc]


def _markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return markdown_table(head, [[markdown_cell(text) for text in row] for row in rows])


def _interval(mean: Mean) -> tuple[float, float]:
    half = Z * (mean.error or 0.0)
    return mean.value - half, mean.value + half


def _plain(mean: Mean) -> str:
    low, high = _interval(mean)
    return f"{mean.value:.3f}" if mean.error is None else f"{mean.value:.3f} ({max(0.0, low):.3f} to {high:.3f})"


def _signed(mean: Mean | None) -> str:
    if mean is None or mean.error is None:
        return "" if mean is None else f"{mean.value:+.3f}"
    low, high = _interval(mean)
    return f"{mean.value:+.3f} ({low:+.3f} to {high:+.3f})"


def _percent(mean: Mean | None) -> str:
    return "" if mean is None else f"{mean.value:.0%}"


def draw_study(title: str, study: Study, edges: list[float]) -> dict[str, bytes]:
    """The figure as `svg` and `png`; `edges` are the bin edges of dH."""
    with figure_style({"font.size": 9}):
        figure, shown = new_figure(10.0, 5.0), _shown(study)
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


def _draw_decisions(figure: Figure, cell: Any, study: Study, shown: Sequence[TurnStart], edges: list[float]) -> None:
    """A histogram of dH for each kind of result, one below the other; branched in color, the others in grey."""
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
        deltas = (stats.branched_deltas, stats.other_deltas)
        clipped = [[min(max(delta, edges[0]), edges[-1]) for delta in group] for group in deltas]
        axes.hist(clipped, bins=edges, stacked=True, color=[color, GREY])
        axes.set_ylabel("results", fontsize=8)
        axes.locator_params(axis="y", integer=True, nbins=3)
        risen = "" if stats.risen is None else f", {stats.risen.value:.0%} above 0"
        title = f"{_shorten(start.label, 28)}: {stats.decisions:,} results{risen}, {stats.branched:,} branched"
        axes.set_title(title, loc="left", fontsize=8)
        axes.axvline(0, color="#666666", linewidth=0.8)
        if limit is not None and inside:
            axes.axvline(limit, color="#000000", linewidth=1.2, linestyle="--")
        axes.tick_params(labelbottom=start is rows[-1][0])
    note = "" if limit is None else f"; dashed: the threshold, {limit:g}" if inside else f"; the threshold is {limit:g}"
    axes.set_xlabel(f"dH = (H - H at the start) / ln V\ncolored: branched{note}")


def _shorten(text: str, length: int) -> str:
    line = one_line(text)
    return line if len(line) <= length else line[: length - 1] + "…"
