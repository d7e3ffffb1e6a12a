"""The results of a signal study: results.json, results.md, a figure as SVG and PNG, and tables for the terminal.

    write_signal(directory, study)

Guarantees: the same study gives the same files, each written atomically, the numbers first. Untrusted names are escaped
wherever they are shown. A number that cannot be estimated is shown as - and is null in results.json.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from math import sqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arpo.evaluation.statistics import Z
from arpo.figures.style import BLUE, RED, figure_style, new_figure, render
from arpo.figures.text import markdown_cell, markdown_table, one_line
from arpo.runs.run_dir import write_atomically
from arpo.studies.entropy.study import RewardCorrelation
from arpo.studies.signal.branch_points import PREDICTORS, PredictorStats
from arpo.studies.signal.estimates import MIN_JACKKNIFE, Estimate, Floats
from arpo.studies.signal.runner import AlgorithmSignal, SignalStudy

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NONE = "-"
MAX_NAME = 14  # characters of an algorithm's name in the terminal
Table = tuple[list[str], list[list[str]]]  # head and rows
READING = (
    "SNR: squared norm of an algorithm's mean gradient over the trace of its covariance, for what 1,000 tool calls or "
    "100,000 sampled tokens buy. Cosine: of the mean gradient to the gradient of the expected reward, corrected for "
    "noise; 1 for an unbiased algorithm. Neither depends on the scale of a loss. 95 % intervals (jackknife over "
    "repeats) for these tasks: ± for a difference, x/÷ for a factor."
)


def write_signal(directory: Path, study: SignalStudy) -> None:
    """Write results.json, results.md, signal.svg and signal.png."""
    files = {
        "results.json": (json.dumps(signal_json(study), indent=1, allow_nan=False) + "\n").encode(),
        **{f"signal.{kind}": content for kind, content in draw_signal(study).items()},
        "results.md": markdown(study).encode(),
    }
    for name, content in files.items():
        write_atomically(directory / name, content)


def signal_json(study: SignalStudy) -> dict[str, Any]:
    """Everything as JSON values, with the raw numbers of every repeat."""
    return {
        "title": study.title,
        "seed": study.seed,
        "tasks": study.tasks,
        "repeats": study.repeats,
        "parameters": study.parameters,
        "sketch_dimension": study.sketch,
        "reference": {
            "trajectories": study.reference,
            "snr": _estimate_json(study.reference_snr),
            "gram": study.reference_gram.tolist(),
            "norms": _norms(study.reference_gram),
            "costs": [asdict(cost) for cost in study.reference_costs],
        },
        "algorithms": [_algorithm_json(each, study.repeats) for each in study.algorithms],
        "predictors": _predictors_json(study.predictors),
        "rewards_by_depth": [{"depth": depth, **asdict(found)} for depth, found in study.by_depth.items()],
    }


def markdown(study: SignalStudy) -> str:
    """The tables, and how to read them."""
    parts = [
        f"# Signal of the gradients: {markdown_cell(study.title)}",
        "",
        one_line(setup_line(study)),
        "",
        "![Signal-to-noise ratio per 1,000 tool calls, and cosine to the reference](signal.png)",
        "",
        *_markdown_table(*signal_table(study, markdown_cell)),
        "",
        READING,
        "",
        *(markdown_cell(line) for line in findings(study)),
        "",
        "## What predicts a useful branch point",
        "",
        'AUC for "a sibling earns something else"; 0.5 is chance, and ± what chance gives in 95 % of cases.',
        "",
        *_markdown_table(*predictor_table(study, markdown_cell)),
        "",
        "## Rewards below branch points",
        "",
        *_markdown_table(*correlation_table(study.by_depth)),
        "",
    ]
    return "\n".join(parts)


def setup_line(study: SignalStudy) -> str:
    """What was sampled, in a sentence."""
    kept = "whole" if study.sketch is None else f"sketched to {study.sketch:,} numbers"
    snr = "not measurable" if study.reference_snr is None else _with_factor(study.reference_snr)
    return (
        f"{study.tasks} tasks, {study.repeats} repeats, seed {study.seed}; gradients of {study.parameters:,} weights, "
        f"kept {kept}. Reference: {study.reference} trajectories of each task; SNR of one of its "
        f"{len(study.reference_gram)} blocks: {snr}."
    )


def signal_table(study: SignalStudy, escape: Callable[[str], str] | None = None) -> Table:
    """Head and rows of the main table, at most 100 characters wide."""
    head = ["algorithm", "cosine", "SNR per\n1,000 calls", "per 100k\ntokens", "informative\ngroups"]
    head += ["trajec-\ntories", "calls\na task", "tokens\na task"]
    rows = [
        [
            _name(each.name, escape),
            _with_difference(each.cosine),
            _with_factor(each.snr_per_1000_calls),
            NONE if each.snr_per_100k_tokens is None else _digits(each.snr_per_100k_tokens.value),
            f"{each.mean('informative_groups'):.0%}",
            f"{each.per_task('trajectories', study.tasks):.1f}",
            f"{each.per_task('tool_calls', study.tasks):.1f}",
            f"{each.per_task('sampled_tokens', study.tasks):,.0f}",
        ]
        for each in study.algorithms
    ]
    return head, rows


def predictor_table(study: SignalStudy, escape: Callable[[str], str] | None = None) -> Table:
    """Head and rows of the AUCs of all predictors, by algorithm that branches and for all trees together."""
    shown = [(_name(each.name, escape), each.predictors) for each in study.algorithms if each.predictors.compared]
    if len(shown) > 1:
        shown.append(("all", study.predictors))
    rows = [
        [
            name,
            f"{stats.compared:,}",
            f"{stats.informative / stats.compared:.0%}",
            *(NONE if stats.auc[each] is None else f"{stats.auc[each]:.2f}" for each in PREDICTORS),
            NONE if stats.chance_error is None else f"0.50 ± {Z * stats.chance_error:.2f}",
        ]
        for name, stats in shown
    ]
    columns = ["AUC of\n" + name.replace(" ", "\n") for name in PREDICTORS]
    return ["branch points of", "compared", "informative", *columns, "chance"], rows


def correlation_table(by_depth: Mapping[int, RewardCorrelation]) -> Table:
    """Head and rows of the intraclass correlations of rewards by depth."""
    rows = [
        [str(depth), NONE if found.icc is None else f"{found.icc:z.2f}", f"{found.branch_points:,}"]
        for depth, found in by_depth.items()
    ]
    return ["calls above the branch point", "intraclass correlation", "branch points"], rows


def findings(study: SignalStudy) -> list[str]:
    """Sentences: which algorithm has the most signal for its calls, and what could not be measured."""
    lines: list[str] = []
    ranked = sorted(
        ((each.snr_per_1000_calls, each.name) for each in study.algorithms if each.snr_per_1000_calls is not None),
        key=lambda pair: -pair[0].value,
    )
    if len(ranked) > 1:
        best, name = ranked[0]
        near = [other for estimate, other in ranked[1:] if not _clearly_below(estimate, best)]
        clearly = f"; not clearly below it: {', '.join(near)}" if near else ", clearly above all others"
        lines.append(f"Most signal per 1,000 tool calls: {name}{clearly}.")
    ratios = [f"{each.name} {_with_factor(each.ratio)}" for each in study.algorithms[1:] if each.ratio is not None]
    if ratios:
        lines.append(f"SNR per call over that of {study.algorithms[0].name}, paired by seed: {', '.join(ratios)}.")
    if not study.reference_is_measurable:
        lines.append("The reference is all noise, so there are no cosines: raise --reference or --tasks.")
    silent = [each.name for each in study.algorithms if each.snr is None]
    if silent:
        lines.append(f"No gradient, as every group earned equal rewards: {', '.join(silent)}.")
    weak = [each.name for each in study.algorithms if each.snr is not None and each.snr.low is None]
    if weak and study.repeats >= MIN_JACKKNIFE:
        lines.append(f"More noise than can be measured through: {', '.join(weak)}; raise --tasks or --repeats.")
    return lines


def terminal_tables(study: SignalStudy) -> list[Table]:
    """The tables to print, without empty ones."""
    tables = [signal_table(study), predictor_table(study), correlation_table(study.by_depth)]
    return [(head, rows) for head, rows in tables if rows]


def draw_signal(study: SignalStudy) -> dict[str, bytes]:
    """The figure as `svg` and `png`: SNR per 1,000 calls and cosine, by algorithm."""
    with figure_style({"font.size": 10, "axes.grid": True, "axes.axisbelow": True, "grid.color": "#e4e4e4"}):
        figure = new_figure(10.0, 1.8 + 0.45 * len(study.algorithms))
        left, right = figure.subplots(1, 2, sharey=True)
        figure.suptitle(one_line(study.title)[:100], fontsize=11, fontweight="bold")
        left.set_yticks(range(len(study.algorithms)), [_name(each.name) for each in study.algorithms])
        left.invert_yaxis()
        _draw_estimates(left, [each.snr_per_1000_calls for each in study.algorithms], BLUE)
        if all(each.snr is not None and each.snr.value > 0 for each in study.algorithms):
            _use_log_scale(left)
        left.set_xlabel("signal-to-noise ratio per 1,000 tool calls")
        _draw_estimates(right, [each.cosine for each in study.algorithms], RED)
        right.axvline(1, color="#666666", linewidth=0.8, linestyle="--")
        right.set_xlabel("cosine to the gradient of the expected reward")
        return render(figure)


def _draw_estimates(axes: Axes, estimates: Sequence[Estimate | None], color: str) -> None:
    for place, estimate in enumerate(estimates):
        if estimate is None:
            axes.annotate(NONE, (0, place), color=color, va="center")
            continue
        axes.plot(estimate.value, place, "o", color=color)
        if estimate.low is not None and estimate.high is not None:
            axes.plot([estimate.low, estimate.high], [place, place], "|-", color=color, markersize=9)
        axes.annotate(f"{estimate.value:.3g}", (estimate.value, place), (0, 5), textcoords="offset points", ha="center")


def _use_log_scale(axes: Axes) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter("{x:g}")  # the default would be a formula
    axes.xaxis.set_minor_formatter(NullFormatter())


def _algorithm_json(each: AlgorithmSignal, repeats: int) -> dict[str, Any]:
    return {
        "name": each.name,
        "snr": _estimate_json(each.snr),
        "snr_per_1000_calls": _estimate_json(each.snr_per_1000_calls),
        "snr_per_100k_tokens": _estimate_json(each.snr_per_100k_tokens),
        "cosine": _estimate_json(each.cosine),
        "snr_per_call_over_first": _estimate_json(each.ratio),
        "norms": _norms(each.gram[:repeats, :repeats]),
        "gram": each.gram.tolist(),
        "costs": [asdict(cost) for cost in each.costs],
        "predictors": _predictors_json(each.predictors),
    }


def _estimate_json(estimate: Estimate | None) -> dict[str, Any] | None:
    return None if estimate is None else asdict(estimate)


def _predictors_json(stats: PredictorStats) -> dict[str, Any]:
    return {**asdict(stats), "auc": {**stats.auc, "chance": 0.5}}


def _norms(gram: Floats) -> list[float]:
    return [sqrt(max(0.0, float(value))) for value in gram.diagonal()]


def _markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return markdown_table([cell.replace("-\n", "").replace("\n", " ") for cell in head], rows)


def _name(name: str, escape: Callable[[str], str] | None = None) -> str:
    """A name as it is shown: whole and escaped, or, without `escape`, printable and shortened."""
    if escape is not None:
        return escape(name)
    line = one_line(name)
    return line if len(line) <= MAX_NAME else line[: MAX_NAME - 1] + "…"


def _with_difference(estimate: Estimate | None) -> str:
    if estimate is None or estimate.high is None:
        return NONE if estimate is None else _digits(estimate.value)
    return f"{_digits(estimate.value)} ± {_digits(estimate.high - estimate.value)}"


def _with_factor(estimate: Estimate | None) -> str:
    if estimate is None or estimate.high is None:
        return NONE if estimate is None else _digits(estimate.value)
    return f"{_digits(estimate.value)} x/÷ {estimate.high / estimate.value:.2g}"


def _digits(value: float) -> str:
    """Two decimals, or fewer for large numbers."""
    decimals = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:z,.{decimals}f}"


def _clearly_below(estimate: Estimate, best: Estimate) -> bool:
    return estimate.high is not None and best.low is not None and estimate.high < best.low
