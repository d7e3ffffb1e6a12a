"""What a study of entropies came to: entropy.json, entropy.md, a picture as SVG and PNG, a table on the terminal.

    write_study(directory, Subject("runs/mine", "trees of steps 1 to 6", temperature=1.0), study(...))

Promises: the same study gives the same files, each whole; intervals are at 95 %. Names of tools come from outside and
are escaped wherever they are shown.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from arpo.cli.display import console
from arpo.evaluation.statistics import Z
from arpo.figures.text import markdown_cell, markdown_table, printable
from arpo.runs.run_dir import write_atomically
from arpo.studies.entropy.figure import draw
from arpo.studies.entropy.study import BranchStats, Mean, Place, Study
from arpo.types import percentile

BINS = 40
FEW = 10  # questions; an interval from fewer is worth little
LOOKS_HEADS = ["looked at", "dH > 0", "branched", "not branched because", "compared", "told something", "foretold"]


@dataclass(frozen=True, slots=True)
class Subject:
    """What was studied: its name, which trees, and the temperature they were sampled at."""

    name: str
    trees: str
    temperature: float


def write_study(directory: Path, subject: Subject, study: Study) -> None:
    """Write the four files."""
    title = f"{subject.name}: {subject.trees}, temperature {subject.temperature:g}"
    files = {
        "entropy.json": (json.dumps(study_json(subject, study), indent=1, allow_nan=False) + "\n").encode(),
        "entropy.md": markdown(subject, study).encode(),
        **{f"entropy.{kind}": content for kind, content in draw(title, study, bins(study)).items()},
    }
    for name, content in files.items():
        write_atomically(directory / name, content)


def study_json(subject: Subject, study: Study) -> dict[str, Any]:
    """Everything, for programs: entropies in nats, dH in units of ln V."""
    edges = bins(study)
    return {
        **asdict(subject),
        "tree_count": study.trees,
        "questions": study.questions,
        "probe_tokens": study.probe,
        "threshold": study.threshold,
        "places": [
            {
                **_place(place),
                "turns": curve.turns,
                "first_tokens": asdict(curve.first),
                "positions": [asdict(mean) for mean in curve.positions],
            }
            for place, curve in study.curves.items()
        ],
        "bins": edges,
        "decisions_by_place": [{**_place(place), **_looks(looks, edges)} for place, looks in study.looks.items()],
        "decisions_by_call": [{"call": number, **_looks(looks, edges)} for number, looks in study.by_call.items()],
    }


def findings(study: Study) -> list[str]:
    """What the first tokens after each kind of result show, in a sentence each."""
    said = []
    for place, looks in study.looks.items():
        if looks.rise is None or looks.rise.questions < FEW:
            continue
        low, high = _interval(looks.rise)
        word = "higher than" if low > 0 else "lower than" if high < 0 else "neither clearly higher nor lower than"
        said.append(
            f"Entropy {place.label} is {word} at the start of the same path: {_signed(looks.rise)} nats over the first "
            f"{study.probe} tokens."
        )
    return said or [f"No tool gave results on {FEW} questions or more, so there is nothing to say."]


def markdown(subject: Subject, study: Study) -> str:
    """The tables and the sentences."""
    parts = [
        f"# Entropy by place: {markdown_cell(subject.name)}",
        "",
        f"From {study.trees:,} trees of {study.questions:,} questions ({markdown_cell(subject.trees)}), in nats over "
        f"the full vocabulary, at temperature {subject.temperature:g}. In brackets: 95 % intervals over questions.",
        "",
        "![Entropy by position, and dH by tool](entropy.png)",
        "",
        *(f"- {markdown_cell(line)}" for line in findings(study)),
        "",
        *markdown_table(_heads(study), [[markdown_cell(text) for text in row] for row in _place_rows(study)]),
        "",
        "## Where paths were opened",
        "",
        "A branch point told something if its continuations (the path that was probed, and the new ones) have "
        "different mean rewards; it is counted if two of them or more have a reward that says something. Foretold: "
        "the chance that one that told something has a higher dH than one that did not; 0.5 if dH says nothing.",
        "",
    ]
    for head, groups in (("result of", _by_label(study)), ("call on the path", _by_number(study))):
        parts += [*markdown_table([head, *LOOKS_HEADS], [[markdown_cell(text) for text in row] for row in groups]), ""]
    return "\n".join(parts)


def show_study(study: Study) -> None:
    """Print the table, then the sentences."""
    wide = console if console.is_terminal else Console(file=console.file, width=200, markup=False, emoji=False)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for number, head in enumerate(_heads(study)):
        table.add_column(head, justify="right" if number else "left", no_wrap=number == 0)
    for row in _place_rows(study):
        table.add_row(*(printable(text).replace("\n", " ") for text in row))
    wide.print(table, soft_wrap=False)
    points, compared, different = (
        sum(getattr(looks, name) for looks in study.looks.values()) for name in ("branched", "compared", "different")
    )
    for line in findings(study):
        console.print(printable(line).replace("\n", " "))
    if compared:
        console.print(f"{points:,} branch points; {different / compared:.0%} of {compared:,} told something.")


def bins(study: Study) -> list[float]:
    """Edges of at most `BINS` equal bins around 99 % of all dH, multiples of a round width: 0 never lies inside one."""
    deltas = [delta for looks in study.looks.values() for delta in (*looks.branched_deltas, *looks.other_deltas)]
    low, high = percentile(sorted(deltas), 0.005), percentile(sorted(deltas), 0.995)
    raw = max((high - low) / (BINS - 2), 1e-6)
    unit = 10.0 ** math.floor(math.log10(raw))
    width = next(unit * step for step in (1, 2, 5, 10) if unit * step >= raw)
    return [width * number for number in range(math.floor(low / width), math.floor(high / width) + 2)]


def _histogram(values: Sequence[float], edges: Sequence[float]) -> list[int]:
    """How many lie in each bin, its lower edge included; the outermost also hold what lies beyond."""
    inside = np.clip(np.asarray(values, dtype=np.float64), edges[0], edges[-1])
    return [int(count) for count in np.histogram(inside, np.asarray(edges))[0]]


def _place(place: Place) -> dict[str, str]:
    return {"place": place.label, **asdict(place)}


def _looks(looks: BranchStats, edges: Sequence[float]) -> dict[str, Any]:
    return {
        "looked": looks.looked,
        "branched": looks.branched,
        "not_branched": dict(looks.reasons),
        "rise": looks.rise and asdict(looks.rise),
        "rose": looks.rose and asdict(looks.rose),
        "branched_histogram": _histogram(looks.branched_deltas, edges),
        "other_histogram": _histogram(looks.other_deltas, edges),
        "compared": looks.compared,
        "different": looks.different,
        "foretold": looks.auc,
    }


def _heads(study: Study) -> list[str]:
    return ["place", "places", "turns", f"H, first {study.probe} tokens", "H - H at the start", "dH > 0", "branched"]


def _place_rows(study: Study) -> list[list[str]]:
    rows = []
    for place, curve in study.curves.items():
        looks = study.looks.get(place)
        row = [place.label, f"{curve.first.count:,}", f"{curve.turns:,}", _plain(curve.first)]
        seen = ["", "", ""] if looks is None else [_signed(looks.rise), _share(looks.rose), f"{looks.branched:,}"]
        rows.append([*row, *seen])
    return rows


def _by_label(study: Study) -> list[list[str]]:
    return [[place.label.removeprefix("after "), *_looks_row(looks)] for place, looks in study.looks.items()]


def _by_number(study: Study) -> list[list[str]]:
    return [[str(number), *_looks_row(looks)] for number, looks in study.by_call.items()]


def _looks_row(looks: BranchStats) -> list[str]:
    reasons = "; ".join(f"{reason}: {count:,}" for reason, count in looks.reasons.items())
    told = f"{looks.different / looks.compared:.0%}" if looks.compared else ""
    auc = "" if looks.auc is None else f"{looks.auc:.2f}"
    seen = [f"{looks.looked:,}", _share(looks.rose), f"{looks.branched:,}"]
    return [*seen, reasons, f"{looks.compared:,}", told, auc]


def _interval(mean: Mean) -> tuple[float, float]:
    reach = Z * (mean.error or 0.0)
    return mean.value - reach, mean.value + reach


def _plain(mean: Mean) -> str:
    low, high = _interval(mean)
    return f"{mean.value:.3f}" if mean.error is None else f"{mean.value:.3f} ({max(0.0, low):.3f} to {high:.3f})"


def _signed(mean: Mean | None) -> str:
    if mean is None or mean.error is None:
        return "" if mean is None else f"{mean.value:+.3f}"
    low, high = _interval(mean)
    return f"{mean.value:+.3f} ({low:+.3f} to {high:+.3f})"


def _share(mean: Mean | None) -> str:
    return "" if mean is None else f"{mean.value:.0%}"
