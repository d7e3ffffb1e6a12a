"""The results of a comparison: results.json, results.md, figures, and tables for the terminal.

    write_comparison(directory, comparison)
    tables(load_comparison(directory / "results.json")) == tables(comparison)

Guarantees: everything but `write_comparison` is a pure function of the comparison, so results.json gives the same
tables again. Files are written atomically. Missing runs are reported before anything else. Untrusted names are escaped
wherever they are shown. With short names no table is wider than 100 characters.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, NamedTuple

from arpo.figures.text import markdown_cell, markdown_table, one_line
from arpo.runs.run_dir import write_atomically
from arpo.studies.compare import stats
from arpo.studies.compare.figures import draw_comparison
from arpo.studies.compare.results import COST_NAMES, Comparison, choice_label, raw_json

NONE = "-"
SEEDS_IN_A_TABLE = 5
SEEDS_OF_AN_INTERVAL = 3  # that of two seeds may span many orders of magnitude
CAPTIONS = {
    "final.png": "final accuracy",
    "curves.png": "accuracy against tool calls",
    "time.png": "accuracy against minutes of training",
}
INTERVALS = (
    "In brackets: 95 % intervals, Student's t over seeds. Differences and ratios are paired by seed, over the seeds "
    "that both completed. A ratio is the geometric mean over seeds; its interval is that of the mean log ratio. Where "
    "fewer than three seeds remain, their number is in the brackets: they say too little for an interval."
)
HOLM = (
    "Holm's p is that of a paired t test of no difference, adjusted for all comparisons of its table; * marks those "
    "that hold after it (at most 0.05). Intervals are not adjusted: a comparison whose interval leaves out 0 (or the "
    "ratio 1) need not hold."
)
REACHED = (
    "A ratio is over the seeds in which both the algorithm and the baseline reached the level. If these are not all, "
    "they are a selection: the ratio has no p and does not hold, but it counts as a comparison. A level that is "
    "reached before training has no ratio."
)
NOISE = (
    "Noise is that of one run's final accuracy: the standard deviation between seeds, which contains all but the "
    "choice of questions, and the standard error that comes from sampling answers alone."
)
COSTS = (
    "Costs are means over complete seeds. Calls per question and format are measured on held-out questions after "
    "training. Wall time is that of sampling and training; compare it only between runs that had the machine alone."
)
ONE_SEED = "There is only one seed, so there are no intervals, and another seed may reverse the order."
Escape = Callable[[str], str]


class Table(NamedTuple):
    """A table with its title; all cells are escaped."""

    title: str
    head: list[str]
    rows: list[list[str]]


def write_comparison(directory: Path, comparison: Comparison) -> None:
    """Write results.json, results.md and the figures."""
    numbers = json.dumps(comparison_json(comparison), indent=1, allow_nan=False) + "\n"
    write_atomically(directory / "results.json", numbers.encode("utf-8"))  # before drawing, which may fail
    figures = draw_comparison(comparison)
    links = "".join(f"\n![{CAPTIONS[name]}]({name})\n" for name in figures if name in CAPTIONS)
    for name, content in {**figures, "results.md": (markdown(comparison) + links).encode("utf-8")}.items():
        write_atomically(directory / name, content)


def comparison_json(comparison: Comparison) -> dict[str, Any]:
    """Everything as JSON values: the raw results and what is computed from them. Fractions are from 0 to 1."""
    missing = stats.missing_runs(comparison)
    return {
        **raw_json(comparison),
        "complete": not missing,
        "missing": _plain(missing),
        "reading": reading_notes(comparison),
        "results": _plain(stats.rows(comparison)),
        "cost_ratios": _plain(stats.cost_ratios(comparison)),
        "tuning_results": [{**_plain(each), "choice": dict(each.choice)} for each in _tuning_results(comparison)],
    }


def markdown(comparison: Comparison) -> str:
    """Missing runs, all tables, and how to read them."""
    missing = missing_note(comparison, markdown_cell)
    parts = [f"# {markdown_cell(comparison.title)}", "", *([missing, ""] if missing else [])]
    for title, head, body in tables(comparison, markdown_cell):
        parts += [f"**{title}**", "", *markdown_table(head, body), ""]
    return "\n".join([*parts, *(f"- {note}" for note in reading_notes(comparison, markdown_cell))]) + "\n"


def tables(comparison: Comparison, escape: Escape = one_line) -> list[Table]:
    """All tables of a comparison."""
    found = stats.rows(comparison)
    return [
        *_tuning_table(comparison, escape),
        _settings_table(comparison, found, escape),
        _accuracy_table(comparison, found, escape),
        *_seed_tables(comparison, escape),
        _noise_table(found, escape),
        _answers_table(found, escape),
        _cost_table(found, escape),
        *_reach_tables(comparison, escape),
        *_ratio_tables(comparison, escape),
    ]


def missing_note(comparison: Comparison, escape: Escape = one_line) -> str:
    """One line that names every missing run and why; empty if none is missing."""
    missing = stats.missing_runs(comparison)
    if not missing:
        return ""
    each = "; ".join(f"{escape(run.algorithm)} seed {run.seed} ({escape(run.why)})" for run in missing)
    total = len(comparison.algorithms) * len(comparison.seeds) + len(comparison.tuning)
    return f"PARTIAL: {len(missing)} of {total} runs are missing: {each}."


def reading_notes(comparison: Comparison, escape: Escape = one_line) -> list[str]:
    """How to read the tables."""
    start, several = stats.cold_start(comparison), len(comparison.seeds) > 1
    before = "" if start is None else f" Accuracy before training: {100 * start:.1f} %."
    unit = COST_NAMES[comparison.match]
    budget = f"of {unit}" if comparison.budget is None else f"of {comparison.budget:,} {unit}"
    seeds = ", ".join(map(str, comparison.seeds)) + ("." if several else f". {ONE_SEED}")
    notes = [f"Seeds: {seeds}{before} All runs have the same budget {budget}.", *([INTERVALS, HOLM] if several else [])]
    base = escape(comparison.baseline)
    if comparison.levels:
        notes.append("Levels are given accuracies, the same for all seeds.")
    elif stats.levels(comparison):
        notes.append(
            "Levels are accuracies, the same for all seeds: the mean accuracy before training plus 50, 75 and 100 % of "
            f"the mean gain of {base}."
        )
    else:
        notes.append(f"{base} gained nothing, so there are no levels to reach and no ratios; --levels can give some.")
    if comparison.tuning:
        used = ", ".join(map(str, dict.fromkeys(run.trial.seed for run in comparison.tuning)))
        notes.append(
            f"Every algorithm was tuned over the same grid with the same budget on other seeds ({used}). The settings "
            "with the highest mean accuracy over the budget, the area under the curve, were chosen."
        )
    return [*notes, REACHED, NOISE, COSTS]


def _tuning_results(comparison: Comparison) -> tuple[stats.TuningResult, ...]:
    if comparison.budget is None:
        return ()
    return stats.tuning_results(comparison.tuning, comparison.match, comparison.budget)


def _tuning_table(comparison: Comparison, escape: Escape) -> list[Table]:
    head = ["algorithm", "settings", "mean accuracy, %", "final accuracy, %", "chosen"]
    body = [
        [escape(each.algorithm), escape(choice_label(each.choice).replace(",", ", "))]
        + (["failed", NONE] if each.score is None or each.end is None else [_percent(each.score), _percent(each.end)])
        + ["yes" if each.chosen else ""]
        for each in _tuning_results(comparison)
    ]
    return [Table("Tuning, on seeds that are not reported", head, body)] if body else []


def _settings_table(comparison: Comparison, found: Sequence[stats.Row], escape: Escape) -> Table:
    head = ["algorithm", "M", "N", "branching", "tasks", "minibatches", "lr", "bonus", "clipped, %"]
    body = []
    for row in found:
        arm = comparison.settings.get(row.algorithm)
        cells = [NONE] * 7
        if arm is not None:
            cells = [str(arm.num_trajectories), str(arm.num_initial), escape(arm.branching), str(arm.batch_size)]
            cells += [str(arm.minibatches), f"{arm.lr:g}", f"{arm.bonus:g}"]
        clipped = NONE if row.clip_fraction is None else f"{100 * row.clip_fraction:.2f}"
        body.append([escape(row.algorithm), *cells, clipped])
    return Table("Settings, and the share of trained tokens that were clipped", head, body)


def _accuracy_table(comparison: Comparison, found: Sequence[stats.Row], escape: Escape) -> Table:
    seeds = len(comparison.seeds)
    head = ["algorithm", "seeds", "accuracy, %", "difference, points", "better, worse", "Holm's p"]
    body = []
    for row in found:
        gap = row.difference
        paired = [NONE] * 3
        if gap is not None:
            paired = [_mean(gap.mean, gap.seeds, "+"), f"{gap.better}, {gap.worse}", _holm(gap.holm_p)]
        count = str(row.seeds) if row.seeds == seeds else f"{row.seeds} of {seeds}"
        body.append([escape(row.algorithm), count, _mean(row.accuracy, row.seeds), *paired])
    return Table(f"Final accuracy, and the difference to {escape(comparison.baseline)}", head, body)


def _seed_tables(comparison: Comparison, escape: Escape) -> list[Table]:
    found = []
    for seeds in _chunks(comparison.seeds):
        body = []
        for name in comparison.algorithms:
            ends = {trial.seed: trial.curve[-1].accuracy for trial in stats.complete(comparison, name)}
            body.append([escape(name), *(_percent(ends[seed]) if seed in ends else NONE for seed in seeds)])
        found.append(Table("Final accuracy by seed, %", ["algorithm", *(f"seed {seed}" for seed in seeds)], body))
    return found


def _noise_table(found: Sequence[stats.Row], escape: Escape) -> Table:
    body = []
    for row in found:
        noise = [NONE if part is None else f"{100 * part:.2f}" for part in (row.seed_noise, row.answer_noise)]
        body.append([escape(row.algorithm), *noise])
    return Table(
        "Noise of one run's final accuracy, points", ["algorithm", "between seeds", "sampling of answers"], body
    )


def _answers_table(found: Sequence[stats.Row], escape: Escape) -> Table:
    ks = sorted({k for row in found for k in row.pass_at if k > 1})  # pass@1 is the accuracy
    head = ["algorithm", *(f"pass@{k}, %" for k in ks), "calls per question", "correct format, %"]
    body = []
    for row in found:
        share = NONE if row.format is None else _percent(row.format)
        cells = [*(_mean(row.pass_at.get(k), row.seeds) for k in ks), _number(row.calls_per_question, 2), share]
        body.append([escape(row.algorithm), *cells])
    return Table("Answers to held-out questions after training", head, body)


def _cost_table(found: Sequence[stats.Row], escape: Escape) -> Table:
    head = ["algorithm", "tool calls", "trajectories", "sampled tokens", "optimizer steps", "minutes"]
    body = []
    for row in found:
        minutes = None if row.seconds is None else row.seconds / 60
        numbers = [(row.tool_calls, 0), (row.trajectories, 0), (row.tokens, 0), (row.optimizer_steps, 0), (minutes, 1)]
        body.append([escape(row.algorithm), *(_number(value, digits) for value, digits in numbers)])
    return Table("Cost of a whole training run", head, body)


def _reach_tables(comparison: Comparison, escape: Escape) -> list[Table]:
    """What each seed spent, in the budget's unit, until it first reached a level."""
    found, wanted = [], stats.levels(comparison)
    for seeds in _chunks(comparison.seeds) if wanted else []:
        body = []
        for name in comparison.algorithms:
            curves = {trial.seed: trial.curve for trial in stats.complete(comparison, name)}
            for level in wanted:
                costs = {seed: stats.costs_to_reach(curve, level.accuracy) for seed, curve in curves.items()}
                reached = f"{sum(cost is not None for cost in costs.values())} of {len(costs)}"
                cells = [_reach(costs[seed], comparison.match) if seed in costs else NONE for seed in seeds]
                body.append([escape(name), *_level(level), reached, *cells])
        head = ["algorithm", *_level_head(comparison), "reached in", *(f"seed {seed}" for seed in seeds)]
        found.append(Table(f"{_capital(COST_NAMES[comparison.match])} until a level is first reached", head, body))
    return found


def _ratio_tables(comparison: Comparison, escape: Escape) -> list[Table]:
    base, found = escape(comparison.baseline), []
    head = ["algorithm", *_level_head(comparison), "reached", "baseline", "both", "ratio", "Holm's p"]
    ratios = stats.cost_ratios(comparison)
    for cost in stats.RATIO_COSTS:
        body = []
        for each in (ratio for ratio in ratios if ratio.cost == cost):
            counts = (each.reached, each.baseline_reached, len(each.by_seed))
            cells = [
                escape(each.algorithm),
                *_level(each.level),
                *(f"{count} of {len(each.seeds)}" for count in counts),
            ]
            body.append([*cells, _ratio(each.ratio, len(each.by_seed)), _holm(each.holm_p)])
        if body:
            title = f"{_capital(COST_NAMES[cost])} until a level is first reached, divided by that of {base}"
            found.append(Table(title, head, body))
    return found


def _chunks(seeds: Sequence[int]) -> list[Sequence[int]]:
    return [seeds[start : start + SEEDS_IN_A_TABLE] for start in range(0, len(seeds), SEEDS_IN_A_TABLE)]


def _level_head(comparison: Comparison) -> list[str]:
    return ["level, %"] if comparison.levels else ["level, %", "of gain"]


def _level(level: stats.Level) -> list[str]:
    return [_percent(level.accuracy), *([] if level.fraction is None else [f"{100 * level.fraction:.0f} %"])]


def _reach(costs: Mapping[str, float] | None, unit: str) -> str:
    return "never" if costs is None else f"{costs[unit]:,.0f}"


def _mean(found: stats.Mean | None, seeds: int, sign: str = "") -> str:
    """A mean of fractions, in percent."""
    if found is None:
        return NONE
    mean, low, high = (None if part is None else f"{100 * part:{sign}.1f}" for part in found)
    return f"{mean} {_brackets(low, high, seeds)}"


def _ratio(found: stats.Mean | None, seeds: int) -> str:
    if found is None:
        return NONE
    mean = f"{found.mean:.1g}" if found.mean < 0.005 else f"{found.mean:,.{2 if found.mean < 100 else 0}f}"
    low, high = (None if end is None else _end(end) for end in found[1:])
    return f"{mean} {_brackets(low, high, seeds)}"


def _brackets(low: str | None, high: str | None, seeds: int) -> str:
    """The interval, or of how few seeds a mean is."""
    if low is None or high is None or seeds < SEEDS_OF_AN_INTERVAL:
        return f"({seeds} seed{'' if seeds == 1 else 's'})"
    return f"({low} to {high})"


def _end(ratio: float) -> str:
    """The end of a ratio's interval, in at most five characters."""
    return "<0.01" if ratio < 0.01 else ">100" if ratio > 100 else f"{ratio:.2f}"


def _holm(p: float | None) -> str:
    """An adjusted p-value, with a star if the comparison holds."""
    if p is None:
        return NONE
    return ("<0.001" if p < 0.001 else f"{p:.3f}") + (" *" if p <= stats.ALPHA else "")


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"


def _number(value: float | None, digits: int) -> str:
    return NONE if value is None else f"{value:,.{digits}f}"


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


def _plain(value: Any) -> Any:
    """Dataclasses and named tuples as JSON objects, whatever they hold."""
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: _plain(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {name: _plain(part) for name, part in value._asdict().items()}
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, list | tuple) else value
