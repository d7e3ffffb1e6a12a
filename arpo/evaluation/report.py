"""What an evaluation came to, for people and programs: results.json, results.md, results.svg, a table on the terminal.

    write_results(directory, Results("Qwen3-8B", {"gsm8k": summarise(samples, (1, 3))}, failures))

Promises: pure functions of the results, but for `write_results` and `show_results`; files appear whole. Names come from
outside and are escaped wherever they are shown. The picture is plain SVG, made here.
Does not cover: comparing evaluations with each other.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from arpo.cli.display import console
from arpo.data.benchmarks import BENCHMARKS
from arpo.data.published import published_for
from arpo.evaluation.samples import Sample
from arpo.evaluation.statistics import LEVEL, Estimate, Summary
from arpo.runs.run_dir import write_atomically
from arpo.text import markdown_cell, markdown_table, printable

INTERVAL = f"{LEVEL:.0%} Wilson interval over questions"
METRICS = {"math": "maths equality", "f1": "token F1", "em": "exact match", "judge": "LLM judge", "choice": "choice"}
COLOURS = ("#4f9bd0", "#86bde2", "#aed4ec", "#cde5f4", "#e1eef6")  # score, then pass@k; the last for all further ones
LEFT, RIGHT, WIDTH, ROW, GAP, HEAD = 180, 120, 500, 18, 14, 64  # of the picture


@dataclass(frozen=True, slots=True)
class Results:
    """An agent's name, what came out by benchmark, and the answers that failed."""

    agent: str
    summaries: Mapping[str, Summary]
    failures: Sequence[Sample] = ()

    @property
    def ks(self) -> list[int]:
        """Every k of which there is a pass@k."""
        return sorted({k for summary in self.summaries.values() for k in summary.pass_at})


def write_results(directory: Path, results: Results) -> None:
    """Write the three files."""
    texts = {
        "results.json": json.dumps(results_json(results), indent=2, allow_nan=False) + "\n",
        "results.md": markdown(results),
        "results.svg": picture(results),
    }
    for name, text in texts.items():
        write_atomically(directory / name, text.encode("utf-8"))


def results_json(results: Results) -> dict[str, Any]:
    """Everything, for programs; shares are from 0 to 1."""
    return {
        "agent": results.agent,
        "interval": INTERVAL,
        "benchmarks": {
            name: {
                "title": BENCHMARKS[name].title,
                "metric": BENCHMARKS[name].metric,
                **asdict(summary),
                "published": [asdict(row) for row in published_for(name)],
            }
            for name, summary in results.summaries.items()
        },
        "failures": [
            {"benchmark": each.benchmark, "task": each.task, "number": each.number, "reason": each.failed}
            for each in results.failures
        ],
    }


def markdown(results: Results) -> str:
    """A table with a row per benchmark, what is published beside it, and the levels below."""
    ks = results.ks
    published = {name: found for name in results.summaries if (found := published_for(name))}
    head = ["benchmark", "metric", "score, %", *(f"pass@{k}, %" for k in ks), "questions", "answers"]
    head += ["tool calls", "tokens", "right format, %", "seconds"]
    rows = []
    for name, summary in results.summaries.items():
        row = [BENCHMARKS[name].title, METRICS[BENCHMARKS[name].metric], *_estimates(summary, ks)]
        row += [f"{summary.questions:,}", f"{summary.answers:,}", *_means(summary)]
        if published:
            row.append("; ".join(f"{p.method} {p.model} {p.measure} {p.percent:g}" for p in published.get(name, ())))
        rows.append(row)
    if published:
        head.append("published, %")
    parts = [f"# Evaluation of {markdown_cell(results.agent)}", "", *markdown_table(head, rows), ""]
    parts += [f"In brackets: {INTERVAL}. Tool calls, tokens the model wrote and seconds are means per answer."]
    if published:
        sources = sorted({each.source for group in published.values() for each in group})
        parts += [f"Published figures: {', '.join(sources)}; their tools, judge and samples of the sets may differ."]
    if results.failures:
        parts += [f"{len(results.failures):,} answers failed for no fault of the model's and are left out."]
    levels = [
        [
            BENCHMARKS[name].title,
            markdown_cell(level),
            *_estimates(summary, ks),
            f"{summary.questions:,}",
            *_means(summary)[:1],
        ]
        for name, whole in results.summaries.items()
        for level, summary in whole.levels.items()
    ]
    if levels:
        head = ["benchmark", "level", "score, %", *(f"pass@{k}, %" for k in ks), "questions", "tool calls"]
        parts += ["", "## By level", "", *markdown_table(head, levels)]
    return "\n".join(parts) + "\n"


def terminal_table(results: Results) -> Table:
    """The same, shorter, for the terminal."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("benchmark", no_wrap=True)
    heads = ["questions", "score %", *(f"pass@{k} %" for k in results.ks), "calls", "tokens", "format %", "seconds"]
    for head in heads:
        table.add_column(head, justify="right")
    for name, summary in results.summaries.items():
        rows = [(BENCHMARKS[name].title, summary)]
        rows += [(f"  {printable(level)}", part) for level, part in summary.levels.items()]
        for title, part in rows:
            table.add_row(title, f"{part.questions:,}", *_estimates(part, results.ks), *_means(part))
    return table


def show_results(results: Results, tools: Sequence[str]) -> None:
    """Print the table, the lines about the tools, and what does not count or counts as wrong."""
    wide = console if console.is_terminal else Console(file=console.file, width=200, markup=False, emoji=False)
    wide.print(terminal_table(results), soft_wrap=False)
    for line in tools:
        console.print(line)
    for name, summary in results.summaries.items():
        for fault, count in summary.faults.items():
            console.print(f"{name}: {count:,} answers count as wrong because they could not be judged: {fault}")
    if results.failures:
        reason = printable(results.failures[0].failed or "")
        console.print(f"{len(results.failures):,} answers failed and are not counted, the first because {reason}")
        console.print("The same command asks for them again.")


def picture(results: Results) -> str:
    """Bars of score and pass@k with their intervals, as SVG."""
    ks, y, drawn = results.ks, HEAD, list[str]()
    for name, summary in results.summaries.items():
        bars = [("score", summary.score), *((f"pass@{k}", summary.pass_at.get(k)) for k in ks)]
        drawn.append(_words(LEFT - 10, y + ROW - 5, BENCHMARKS[name].title, "end", "bold"))
        drawn.append(_words(LEFT - 10, y + 2 * ROW - 5, METRICS[BENCHMARKS[name].metric], "end"))
        for place, (label, found) in enumerate(bars):
            drawn += _bar(y + place * ROW, label, found, COLOURS[min(place, len(COLOURS) - 1)])
        y += max(2, len(bars)) * ROW + GAP
    grid = []
    for percent in range(0, 101, 20):
        x = LEFT + WIDTH * percent / 100
        grid.append(f'<line x1="{x:.1f}" y1="{HEAD - 8}" x2="{x:.1f}" y2="{y - GAP}" stroke="#ddd"/>')
        grid.append(_words(x, HEAD - 12, f"{percent} %", "middle"))
    width = LEFT + WIDTH + RIGHT
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{y}" viewBox="0 0 {width} {y}" '
        'font-family="sans-serif" font-size="12" fill="#222">'
    )
    title = _words(10, 20, f"{results.agent}: score and pass@k; lines are 95 % intervals", "start", "bold")
    return "\n".join([head, f'<rect width="{width}" height="{y}" fill="#fff"/>', title, *grid, *drawn, "</svg>"]) + "\n"


def _bar(y: int, label: str, found: Estimate | None, colour: str) -> list[str]:
    """One bar, the line of its interval, and its value."""
    if found is None:
        return [_words(LEFT + 4, y + ROW - 5, f"{label}: none", "start")]
    x, low, high = (LEFT + WIDTH * share for share in (found.value, found.low, found.high))
    middle = y + ROW / 2
    bar = f'<rect x="{LEFT}" y="{y + 2}" width="{x - LEFT:.1f}" height="{ROW - 4}" fill="{colour}"/>'
    ends = "".join(f"M{end:.1f} {middle - 4}v8" for end in (low, high))
    line = f'<path d="M{low:.1f} {middle}H{high:.1f}{ends}" stroke="#222"/>'
    return [bar, line, _words(LEFT + WIDTH + 10, y + ROW - 5, f"{label} {100 * found.value:.1f}", "start")]


def _words(x: float, y: float, text: str, anchor: str, weight: str = "normal") -> str:
    shown = escape(printable(text).replace("\n", " "))
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}">{shown}</text>'


def _estimates(summary: Summary, ks: Sequence[int]) -> list[str]:
    return [_estimate(found) for found in (summary.score, *(summary.pass_at.get(k) for k in ks))]


def _estimate(found: Estimate | None) -> str:
    if found is None:
        return "none"
    return f"{100 * found.value:.1f} ({100 * found.low:.1f} to {100 * found.high:.1f})"


def _means(summary: Summary) -> list[str]:
    share = None if summary.format is None else 100 * summary.format
    values = ((summary.calls, 2), (summary.tokens, 0), (share, 1), (summary.seconds, 2))
    return ["none" if value is None else f"{value:,.{digits}f}" for value, digits in values]
