"""What a comparison came to, for people and programs: results.json, results.md, pictures, a table on the terminal.

    write_comparison(directory, comparison)

Promises: `markdown` and `comparison_json` are pure functions of the comparison; files appear whole. A comparison with
runs missing says so before anything else. Names come from outside and are escaped wherever they are shown.
Does not cover: the pictures themselves (`curves`), and the numbers (`versus`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from math import isfinite
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from arpo.cli.display import console
from arpo.figures.text import markdown_cell, markdown_table, printable
from arpo.runs.run_dir import write_atomically
from arpo.studies.compare.figures import draw_bars, draw_curves, pictures
from arpo.studies.compare.stats import (
    DRAWS,
    SHARES,
    Comparison,
    Difference,
    Mean,
    Ratio,
    Row,
    cold_start,
    missing_runs,
    rows,
)

NONE = "-"
WORDS = {"tool_calls": "tool calls", "trajectories": "trajectories", "tokens": "tokens"}
PICTURES = {
    "final": "accuracy at the end",
    "curves": "accuracy against tool calls",
    "time": "accuracy against minutes of training",
}
RATIO = (
    "A ratio compares the tool calls until the mean curve first reaches a share of the baseline's gain in accuracy "
    "with the baseline's own; - where the baseline gained nothing."
)
INTERVALS = (
    "In brackets: 95 % intervals, Student's t over seeds. Differences are taken seed by seed, over the seeds that both "
    f"completed. The interval of a ratio is a bootstrap over seeds ({DRAWS:,} draws), rough if they are few."
)
ONE_SEED = "One seed is an anecdote: there are no intervals, and another seed may turn the order around."
SPENT = (
    "Means over complete seeds. Tool calls, paths, tokens and minutes are those of a whole training run; calls a "
    "question and format are measured on held-out questions at its end."
)


def write_comparison(directory: Path, comparison: Comparison) -> None:
    """Write results.json, results.md and the pictures."""
    numbers = json.dumps(comparison_json(comparison), indent=2, allow_nan=False) + "\n"
    shown = "".join(f"\n![{PICTURES[name]}]({name}.png)\n" for name in pictures(comparison))
    write_atomically(directory / "results.json", numbers.encode("utf-8"))
    write_atomically(directory / "results.md", (markdown(comparison) + shown).encode("utf-8"))
    draw_bars(comparison, directory)
    draw_curves(comparison, directory)


def comparison_json(comparison: Comparison) -> dict[str, Any]:
    """Everything, for programs; shares are from 0 to 1, what there is not is null, and so is an open end of a ratio."""
    found = rows(comparison)
    return {
        "title": comparison.title,
        "match": comparison.match,
        "baseline": comparison.baseline,
        "algorithms": list(comparison.algorithms),
        "seeds": list(comparison.seeds),
        "complete": not missing_runs(comparison),
        "missing": [lack._asdict() for lack in missing_runs(comparison)],
        "intervals": INTERVALS,
        "results": [_row_json(row) for row in found],
        "trials": [asdict(trial) for trial in comparison.trials],
    }


def markdown(comparison: Comparison) -> str:
    """What is missing, a table of what was learned, how to read it, and a table of what it cost."""
    found = rows(comparison)
    head, body = _learned(comparison, found, markdown_cell)
    parts = [f"# {markdown_cell(comparison.title)}", ""]
    parts += [text for line in _partial(comparison, markdown_cell) for text in (line, "")]
    parts += [*markdown_table(head, body), "", _reading(comparison), ""]
    parts += markdown_table(*_spent(found, markdown_cell))
    parts += ["", SPENT]
    return "\n".join(parts) + "\n"


def show_comparison(comparison: Comparison) -> None:
    """Print the tables, and before them what is missing."""
    found = rows(comparison)
    wide = console if console.is_terminal else Console(file=console.file, width=200, markup=False, emoji=False)
    for line in _partial(comparison, _line):
        console.print(line)
    for head, body in (_learned(comparison, found, _line, short=True), _spent(found, _line)):
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for place, title in enumerate(head):
            table.add_column(title, justify="right" if place else "left")
        for cells in body:
            table.add_row(*cells)
        wide.print(table, soft_wrap=False)
    console.print(_reading(comparison))


def _partial(comparison: Comparison, shown: Callable[[str], str]) -> list[str]:
    """A line if runs are missing, with every one of them and why."""
    missing = missing_runs(comparison)
    if not missing:
        return []
    each = "; ".join(f"{shown(lack.algorithm)} seed {lack.seed} ({shown(lack.why)})" for lack in missing)
    wanted = len(comparison.algorithms) * len(comparison.seeds)
    return [f"PARTIAL: {len(missing)} of {wanted} runs are missing: {each}."]


def _reading(comparison: Comparison) -> str:
    start = cold_start(comparison)
    before = "" if start is None else f"Before training: {100 * start:.1f} %. "
    matched = f"All runs have the same budget of {WORDS[comparison.match]}."
    return f"{before}{matched} {RATIO} {INTERVALS if len(comparison.seeds) > 1 else ONE_SEED}"


def _learned(
    comparison: Comparison, found: Sequence[Row], shown: Callable[[str], str], short: bool = False
) -> tuple[list[str], list[list[str]]]:
    """Head and rows of the table of accuracies and ratios; names go through `shown`. Short: no pass@k, bare ratios."""
    base, wanted = shown(comparison.baseline), len(comparison.seeds)
    ks = [] if short else sorted({k for row in found for k in row.pass_at})
    points = "to baseline" if short else f"difference to {base}, points"
    head = ["algorithm", "seeds", "accuracy, %", points, "better, worse seeds"]
    head += [*(f"pass@{k}, %" for k in ks), "tool calls"]
    head += [
        f"ratio at {100 * share:.0f} %" if short else f"calls to {100 * share:.0f} % of {base}'s gain"
        for share in SHARES
    ]
    body = []
    for row in found:
        own = row.algorithm == comparison.baseline
        cells = [shown(row.algorithm), str(row.seeds) if row.seeds == wanted else f"{row.seeds} of {wanted}"]
        cells += [_mean(row.accuracy), *_difference(row.difference), *(_mean(row.pass_at.get(k)) for k in ks)]
        cells += [_number(row.tool_calls, 0), *(_ratio(row.cost_ratio[share], short or own) for share in SHARES)]
        body.append(cells)
    return head, body


def _spent(found: Sequence[Row], shown: Callable[[str], str]) -> tuple[list[str], list[list[str]]]:
    """Head and rows of the table of what training cost and how the agent works."""
    head = ["algorithm", "tool calls", "trajectories", "tokens", "minutes", "calls a question", "right format, %"]
    body = []
    for row in found:
        minutes = None if row.seconds is None else row.seconds / 60
        share = None if row.format is None else 100 * row.format
        costs = [_number(row.tool_calls, 0), _number(row.trajectories, 0), _number(row.tokens, 0), _number(minutes, 1)]
        body.append([shown(row.algorithm), *costs, _number(row.calls_per_question, 2), _number(share, 1)])
    return head, body


def _mean(found: Mean | None, sign: str = "") -> str:
    if found is None:
        return NONE
    mean, low, high = (None if part is None else f"{100 * part:{sign}.1f}" for part in found)
    return f"{mean} ({low or NONE} to {high or NONE})" if low or high else f"{mean} ({NONE})"


def _difference(found: Difference | None) -> list[str]:
    """The difference, and the seeds in which it was better or worse."""
    return [NONE, NONE] if found is None else [_mean(found.mean, "+"), f"{found.better}, {found.worse}"]


def _ratio(found: Ratio | None, bare: bool) -> str:
    """The ratio and, unless `bare`, its interval; where that is open, the level is not reached."""
    if found is None:
        return NONE
    ratio = "not reached" if found.ratio is None else f"{found.ratio:.2f}"
    if bare or found.low is None or found.high is None or not isfinite(found.low):
        return ratio
    return f"{ratio} ({found.low:.2f} to {f'{found.high:.2f}' if isfinite(found.high) else 'none'})"


def _number(value: float | None, digits: int) -> str:
    return NONE if value is None else f"{value:,.{digits}f}"


def _line(text: str) -> str:
    return printable(text).replace("\n", " ")


def _row_json(row: Row) -> dict[str, Any]:
    accuracy = None if row.accuracy is None else row.accuracy._asdict()
    difference = None if row.difference is None else {**asdict(row.difference), "mean": row.difference.mean._asdict()}
    pass_at = {str(k): mean._asdict() for k, mean in row.pass_at.items()}
    ratios = {f"{share:g}": found and _finite(asdict(found)) for share, found in row.cost_ratio.items()}
    changed = {"accuracy": accuracy, "difference": difference, "pass_at": pass_at, "cost_ratio": ratios}
    return asdict(row) | changed


def _finite(values: dict[str, float | None]) -> dict[str, float | None]:
    return {name: value if value is not None and isfinite(value) else None for name, value in values.items()}
