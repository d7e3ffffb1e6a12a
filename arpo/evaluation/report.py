"""The results of an evaluation: results.json, results.md, a figure, and a table for the terminal.

    write_results(directory, Results("Qwen3-8B", {"gsm8k": summarize(samples, (1, 3))}, failures))

Guarantees: everything but `write_results` is a pure function of the results. Files are written atomically. Untrusted
names are escaped wherever they are shown. Without matplotlib the figure is left out, and results.md says so.
Not covered: comparing evaluations with each other.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arpo.data.benchmarks import BENCHMARKS, published_for
from arpo.evaluation.samples import RESULT_FILES, Sample
from arpo.evaluation.statistics import RewardEstimate, Summary
from arpo.evaluation.student import LEVEL
from arpo.figures.style import INSTALL, figure_style, has_matplotlib, new_figure, render
from arpo.figures.text import markdown_cell, markdown_table, one_line, printable
from arpo.rewards.scorer import FORMAT_PARTS, PART_METRICS
from arpo.runs.run_dir import write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INTERVAL = f"{LEVEL:.0%} Wilson interval over questions"
METRICS = {
    **{"math": "math equality", "f1": "token F1", "em": "exact match", "judge": "LLM judge", "choice": "choice"},
    **{"number": "equal numbers", "reward": "reward"},
}
COLORS = ("#4f9bd0", "#86bde2", "#aed4ec", "#cde5f4", "#e1eef6")  # of the score, then of each pass@k; the last repeats
NO_FIGURE = f"No figure: it needs matplotlib ({INSTALL})."


@dataclass(frozen=True, slots=True)
class Results:
    """The agent's name, the summary of each set of questions, and the answers that failed.

    `metrics` say how the answers of sets that are not benchmarks are scored.
    """

    agent: str
    summaries: Mapping[str, Summary]
    failures: Sequence[Sample] = ()
    metrics: Mapping[str, str] = field(default_factory=dict)

    @property
    def ks(self) -> list[int]:
        """Every k for which there is a pass@k."""
        return sorted({k for summary in self.summaries.values() for k in summary.pass_at})

    @property
    def has_rewards(self) -> bool:
        """Whether a set is scored by a reward, and not by the metric of a benchmark."""
        return any(name not in BENCHMARKS for name in self.summaries)

    def title(self, name: str) -> str:
        """How a set is called in tables."""
        return BENCHMARKS[name].title if name in BENCHMARKS else "held-out questions"

    def metric(self, name: str) -> str:
        """How the answers of a set are scored."""
        return BENCHMARKS[name].metric if name in BENCHMARKS else self.metrics.get(name, "reward")


def write_results(directory: Path, results: Results) -> list[str]:
    """Write results.json, results.md and, with matplotlib, the figure as SVG and PNG; returns the file names."""
    figure: dict[str, bytes] = {}
    if has_matplotlib():
        with figure_style({"font.size": 9}):
            figure = render(draw_results(results))
    link = "![Score and pass@k by benchmark](results.png)" if figure else NO_FIGURE
    files = {
        "results.json": (json.dumps(results_json(results), indent=2, allow_nan=False) + "\n").encode("utf-8"),
        "results.md": f"{markdown(results)}\n{link}\n".encode(),
        **{f"results.{kind}": content for kind, content in figure.items()},
    }
    for name in (written := [name for name in RESULT_FILES if name in files]):
        write_atomically(directory / name, files[name])
    return written


def results_json(results: Results) -> dict[str, Any]:
    """Everything as JSON values; shares are from 0 to 1."""
    return {
        "agent": results.agent,
        "interval": INTERVAL,
        "benchmarks": {
            name: {
                "title": results.title(name),
                "metric": results.metric(name),
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
    """A table with a row per set and the published numbers beside it, and a table of the levels."""
    ks = results.ks
    published = {name: found for name in results.summaries if (found := published_for(name))}
    head = ["benchmark", "metric", "score, %", *(f"pass@{k}, %" for k in ks), "questions", "answers"]
    head += ["tool calls", "tokens", "correct format, %", "seconds", *(["mean reward"] if results.has_rewards else [])]
    rows = []
    for name, summary in results.summaries.items():
        metric = results.metric(name)
        row = [results.title(name), METRICS.get(metric, markdown_cell(metric)), *_estimates(summary, ks)]
        row += [f"{summary.questions:,}", f"{summary.answers:,}", *_means(summary)]
        row += [show_reward(summary.reward)] if results.has_rewards else []
        if published:
            row.append("; ".join(f"{p.method} {p.model} {p.measure} {p.percent:g}" for p in published.get(name, ())))
        rows.append(row)
    if published:
        head.append("published, %")
    parts = [f"# Evaluation of {markdown_cell(results.agent)}", "", *markdown_table(head, rows), ""]
    rewards = "; of rewards Student's" if results.has_rewards else ""
    parts += [f"In brackets: {INTERVAL}{rewards}. Tool calls, generated tokens and seconds are means per answer."]
    if published:
        sources = sorted({each.source for group in published.values() for each in group})
        parts += [f"Published numbers: {', '.join(sources)}; their tools, judge and subsets may differ."]
    if results.failures:
        parts += [f"{len(results.failures):,} answers failed for reasons outside the model and are not counted."]
    levels = [
        [
            *(results.title(name), markdown_cell(level), *_estimates(part, ks), f"{part.questions:,}", _means(part)[0]),
            *([show_reward(part.reward)] if results.has_rewards else []),
        ]
        for name, summary in results.summaries.items()
        for level, part in summary.levels.items()
    ]
    if levels:
        head = ["benchmark", "level", "score, %", *(f"pass@{k}, %" for k in ks), "questions", "tool calls"]
        head += ["mean reward"] if results.has_rewards else []
        parts += ["", "## By level", "", *markdown_table(head, levels)]
    return "\n".join(parts) + "\n"


def results_table(results: Results) -> tuple[list[str], list[list[str]]]:
    """Head and rows of a shorter table for the terminal."""
    head = ["benchmark", "questions", "score %", *(f"pass@{k} %" for k in results.ks)]
    head += ["calls", "tokens", "format %", "seconds", *(["reward"] if results.has_rewards else [])]
    rows = []
    for name, summary in results.summaries.items():
        levels = [(f"  {one_line(level)}", part) for level, part in summary.levels.items()]
        for title, part in [(results.title(name), summary), *levels]:
            rows.append([title, f"{part.questions:,}", *_estimates(part, results.ks), *_means(part)])
            rows[-1] += [show_reward(part.reward)] if results.has_rewards else []
    return head, rows


def headline(summary: Summary) -> str:
    """The result of a set in a line: the accuracy, or the mean reward if the rewards do not say what is right."""
    over = f"over {summary.questions:,} question{'' if summary.questions == 1 else 's'}"
    if summary.accuracy is not None:
        value, low, high = (
            100 * part for part in (summary.accuracy.value, summary.accuracy.low, summary.accuracy.high)
        )
        return f"accuracy {value:.1f}% ({low:.1f} to {high:.1f}) {over}"
    if summary.reward is not None:
        return f"reward {show_reward(summary.reward)} {over}"
    return "no answers"


def parts_line(summary: Summary) -> str | None:
    """The mean reward, the means of its parts, named as metrics, and the format; None without answers."""
    if summary.reward is None:
        return None
    hidden = (*PART_METRICS, *FORMAT_PARTS)
    others = [f"reward_{part} {mean:.3f}" for part, mean in summary.parts.items() if part not in hidden]
    form = [] if summary.format is None else [f"correct format {summary.format:.1%}"]
    return printable(", ".join([f"mean reward {summary.reward.value:.3f}", *others, *form]))


def results_notes(results: Results) -> list[str]:
    """Lines about answers that could not be judged or that failed."""
    lines = [
        f"{name}: {count:,} answers count as wrong because they could not be judged: {fault}"
        for name, summary in results.summaries.items()
        for fault, count in summary.faults.items()
    ]
    lines += [
        f"{name}: {mean * summary.answers:,.0f} of {summary.answers:,} answers have a wrong format: {part}"
        for name, summary in results.summaries.items()
        for part, mean in summary.parts.items()
        if part in FORMAT_PARTS
    ]
    if results.failures:
        reason = printable(results.failures[0].failed or "")
        lines.append(f"{len(results.failures):,} answers failed and are not counted; the first failed because {reason}")
        lines.append("Run the same command again to retry them.")
    return lines if has_matplotlib() else [*lines, NO_FIGURE]


def draw_results(results: Results) -> Figure:
    """Bars of score and pass@k with their intervals; call it inside `figure_style`."""
    rows = len(results.summaries) * (1 + len(results.ks))
    figure = new_figure(8.5, 1.0 + 0.25 * rows + 0.2 * len(results.summaries))
    axes = figure.subplots()
    y, ticks = 0.0, {}
    for name, summary in results.summaries.items():
        bars = [("score", summary.score), *((f"pass@{k}", summary.pass_at.get(k)) for k in results.ks)]
        metric = results.metric(name)
        ticks[y + (len(bars) - 1) / 2] = f"{results.title(name)}\n{METRICS.get(metric, one_line(metric))}"
        for index, (label, found) in enumerate(bars):
            if found is not None:
                axes.barh(y, 100 * found.value, color=COLORS[min(index, len(COLORS) - 1)])
                axes.plot([100 * found.low, 100 * found.high], [y, y], color="#222222", marker="|", linewidth=1)
            value = "none" if found is None else f"{100 * found.value:.1f}"
            axes.text(1.02, y, f"{label} {value}", transform=axes.get_yaxis_transform(), va="center", clip_on=False)
            y += 1
        y += 0.8
    axes.set_yticks(list(ticks), list(ticks.values()))
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(y - 1.2, -0.7)
    axes.set_xlim(0, 100)
    axes.set_xlabel("%")
    figure.suptitle(f"{one_line(results.agent)[:80]}: score and pass@k; lines are {LEVEL:.0%} intervals")
    return figure


def _estimates(summary: Summary, ks: Sequence[int]) -> list[str]:
    return [
        "none" if found is None else f"{100 * found.value:.1f} ({100 * found.low:.1f} to {100 * found.high:.1f})"
        for found in (summary.score, *(summary.pass_at.get(k) for k in ks))
    ]


def show_reward(reward: RewardEstimate | None) -> str:
    """A mean reward with its interval, if it has one."""
    if reward is None:
        return "none"
    return f"{reward.value:.3f}" + ("" if reward.low is None else f" ({reward.low:.3f} to {reward.high:.3f})")


def _means(summary: Summary) -> list[str]:
    share = None if summary.format is None else 100 * summary.format
    values = ((summary.calls, 2), (summary.tokens, 0), (share, 1), (summary.seconds, 2))
    return ["none" if value is None else f"{value:,.{digits}f}" for value, digits in values]
