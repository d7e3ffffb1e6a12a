"""The results of a comparison: results.json, results.md, figures, and tables for the terminal.

    write_comparison(directory, comparison)

Guarantees: everything but `write_comparison` is a pure function of the comparison. Files are written atomically.
Missing runs are reported before anything else. Untrusted names are escaped wherever they are shown.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from math import isfinite
from pathlib import Path
from typing import Any

from arpo.figures.text import markdown_cell, markdown_table, one_line
from arpo.runs.run_dir import write_atomically
from arpo.studies.compare import stats
from arpo.studies.compare.figures import draw_comparison
from arpo.studies.compare.stats import Comparison

NONE = "-"
CAPTIONS = {
    "final.png": "final accuracy",
    "curves.png": "accuracy against tool calls",
    "time.png": "accuracy against minutes of training",
}
RATIO = (
    "The cost ratio is the number of tool calls until the mean curve first reaches a fraction of the baseline's gain "
    "in accuracy, divided by the baseline's number; - if the baseline gained nothing."
)
INTERVALS = (
    "In brackets: 95 % intervals, Student's t over seeds. Differences are paired by seed, over the seeds that both "
    f"completed. The interval of a cost ratio is a bootstrap over seeds ({stats.DRAWS:,} draws); it is rough with few "
    "seeds."
)
ONE_SEED = "There is only one seed, so there are no intervals, and another seed may reverse the order."
COSTS = (
    "Means over complete seeds. Tool calls, trajectories, tokens and minutes are those of a whole training run. Calls "
    "per question and format are measured on held-out questions after training."
)
Table = tuple[list[str], list[list[str]]]  # head and rows


def write_comparison(directory: Path, comparison: Comparison) -> None:
    """Write results.json, results.md and the figures."""
    numbers = json.dumps(comparison_json(comparison), indent=2, allow_nan=False) + "\n"
    write_atomically(directory / "results.json", numbers.encode("utf-8"))  # before drawing, which may fail
    figures = draw_comparison(comparison)
    links = "".join(f"\n![{CAPTIONS[name]}]({name})\n" for name in figures if name in CAPTIONS)
    for name, content in {**figures, "results.md": (markdown(comparison) + links).encode("utf-8")}.items():
        write_atomically(directory / name, content)


def comparison_json(comparison: Comparison) -> dict[str, Any]:
    """Everything as JSON values; fractions are from 0 to 1, and missing or infinite numbers are null."""
    missing = stats.missing_runs(comparison)
    return {
        "title": comparison.title,
        "match": comparison.match,
        "baseline": comparison.baseline,
        "algorithms": list(comparison.algorithms),
        "seeds": list(comparison.seeds),
        "complete": not missing,
        "missing": [run._asdict() for run in missing],
        "intervals": INTERVALS,
        "results": [_row_json(row) for row in stats.rows(comparison)],
        "trials": [asdict(trial) for trial in comparison.trials],
    }


def markdown(comparison: Comparison) -> str:
    """Missing runs, a table of accuracies, how to read it, and a table of costs."""
    found, missing = stats.rows(comparison), missing_note(comparison, markdown_cell)
    parts = [f"# {markdown_cell(comparison.title)}", "", *([missing, ""] if missing else [])]
    parts += [*markdown_table(*_accuracy_table(comparison, found, markdown_cell)), "", reading_note(comparison), ""]
    parts += [*markdown_table(*_cost_table(found, markdown_cell)), "", COSTS]
    return "\n".join(parts) + "\n"


def terminal_tables(comparison: Comparison) -> list[Table]:
    """The tables of accuracies and of costs, shorter than in Markdown."""
    found = stats.rows(comparison)
    return [_accuracy_table(comparison, found, one_line, short=True), _cost_table(found, one_line)]


def missing_note(comparison: Comparison, escape: Callable[[str], str] = one_line) -> str:
    """One line that names every missing run and why; empty if none is missing."""
    missing = stats.missing_runs(comparison)
    if not missing:
        return ""
    each = "; ".join(f"{escape(run.algorithm)} seed {run.seed} ({escape(run.why)})" for run in missing)
    return f"PARTIAL: {len(missing)} of {len(comparison.algorithms) * len(comparison.seeds)} runs are missing: {each}."


def reading_note(comparison: Comparison) -> str:
    """How to read the tables."""
    start = stats.cold_start(comparison)
    before = "" if start is None else f"Accuracy before training: {100 * start:.1f} %. "
    matched = f"All runs have the same budget of {comparison.match.replace('_', ' ')}."
    return f"{before}{matched} {RATIO} {INTERVALS if len(comparison.seeds) > 1 else ONE_SEED}"


def _accuracy_table(
    comparison: Comparison, found: Sequence[stats.Row], escape: Callable[[str], str], short: bool = False
) -> Table:
    """Accuracies and cost ratios; a short table has no pass@k and no intervals of ratios."""
    base, seeds = escape(comparison.baseline), len(comparison.seeds)
    ks = [] if short else sorted({k for row in found for k in row.pass_at})
    difference = "difference" if short else f"difference to {base}, points"
    head = ["algorithm", "seeds", "accuracy, %", difference, "better, worse seeds"]
    head += [*(f"pass@{k}, %" for k in ks), "tool calls"]
    head += [
        f"ratio at {100 * fraction:.0f} %" if short else f"cost ratio at {100 * fraction:.0f} % of {base}'s gain"
        for fraction in stats.GAIN_FRACTIONS
    ]
    body = []
    for row in found:
        bare = short or row.algorithm == comparison.baseline
        cells = [escape(row.algorithm), str(row.seeds) if row.seeds == seeds else f"{row.seeds} of {seeds}"]
        gap = row.difference
        paired = [NONE, NONE] if gap is None else [_mean(gap.mean, "+"), f"{gap.better}, {gap.worse}"]
        cells += [_mean(row.accuracy), *paired, *(_mean(row.pass_at.get(k)) for k in ks)]
        cells += [_number(row.tool_calls, 0), *(_ratio(ratio, bare) for ratio in row.cost_ratio.values())]
        body.append(cells)
    return head, body


def _cost_table(found: Sequence[stats.Row], escape: Callable[[str], str]) -> Table:
    head = ["algorithm", "tool calls", "trajectories", "tokens", "minutes", "calls per question", "correct format, %"]
    body = []
    for row in found:
        minutes = None if row.seconds is None else row.seconds / 60
        format_percent = None if row.format is None else 100 * row.format
        numbers = [(row.tool_calls, 0), (row.trajectories, 0), (row.tokens, 0), (minutes, 1)]
        numbers += [(row.calls_per_question, 2), (format_percent, 1)]
        body.append([escape(row.algorithm), *(_number(value, digits) for value, digits in numbers)])
    return head, body


def _mean(found: stats.Mean | None, sign: str = "") -> str:
    if found is None:
        return NONE
    mean, low, high = (None if part is None else f"{100 * part:{sign}.1f}" for part in found)
    return f"{mean} ({low} to {high})" if low is not None else f"{mean} ({NONE})"


def _ratio(found: stats.Ratio | None, bare: bool) -> str:
    """The ratio and, unless `bare`, its interval; an infinite upper end is shown as "none"."""
    if found is None:
        return NONE
    ratio = "not reached" if found.ratio is None else f"{found.ratio:.2f}"
    if bare or found.low is None or found.high is None or not isfinite(found.low):
        return ratio
    return f"{ratio} ({found.low:.2f} to {f'{found.high:.2f}' if isfinite(found.high) else 'none'})"


def _number(value: float | None, digits: int) -> str:
    return NONE if value is None else f"{value:,.{digits}f}"


def _row_json(row: stats.Row) -> dict[str, Any]:
    return asdict(row) | {
        "accuracy": row.accuracy and row.accuracy._asdict(),
        "difference": row.difference and {**asdict(row.difference), "mean": row.difference.mean._asdict()},
        "pass_at": {str(k): mean._asdict() for k, mean in row.pass_at.items()},
        "cost_ratio": {f"{key:g}": ratio and _finite(asdict(ratio)) for key, ratio in row.cost_ratio.items()},
    }


def _finite(values: dict[str, float | None]) -> dict[str, float | None]:
    return {name: value if value is not None and isfinite(value) else None for name, value in values.items()}
