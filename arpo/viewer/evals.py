"""The viewer's API for what `arpo eval` leaves: results of evaluations, and their answers with trees.

    answers(folder, "../mine-test", "test", after=0, kind=None, wrong=True)["answers"][0]["question"]

An answer is named by the byte where its line begins, so that files are read in pages and never as a whole.

Guarantees: of a file of answers, a page or a line is read. Results that are damaged, or not written yet, are told as
such; numbers and texts have these types, whatever a file says.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from arpo.errors import ArpoError
from arpo.evaluation.samples import SETTINGS, SavedAnswer, read_answer, read_page, sample_files
from arpo.runs.locks import is_live
from arpo.runs.run_dir import read_json
from arpo.runs.trees import tree_to_json
from arpo.viewer.folder import RESULTS_FILE, Folder, NotFound

PAGE_ANSWERS = 100
MAX_QUESTION_CHARS = 1000  # in a list
CHECKPOINT = re.compile(r"checkpoints/step_0*([0-9]{1,15})(?:/|$)")


def list_evals(folder: Folder) -> list[dict[str, Any]]:
    """The evaluations that the last search of the folder found, each with the numbers of its sets of questions."""
    return [_summarize(folder, name, directory, levels=False) for name, directory in folder.evaluations.items()]


def evaluation(folder: Folder, name: str) -> dict[str, Any]:
    """The numbers of one evaluation, by kind of question, too."""
    directory = folder.evaluation(name)
    return {**_summarize(folder, name, directory, levels=True), "coordinates": _coordinates(directory)}


def answers(folder: Folder, name: str, of: str, after: int, kind: str | None, wrong: bool) -> dict[str, Any]:
    """A page of the answers to a set of questions, from byte `after` on, without their trees."""
    path = _sample_file(folder, name, of)
    page = read_page(
        path,
        after,
        PAGE_ANSWERS,
        lambda sample: (kind is None or sample.level == kind) and not (wrong and sample.correct == 1.0),
    )
    shown = [_show_answer(each) for each in page.answers]
    return {"answers": shown, "next": page.next, "more": page.more, "damaged": page.damaged}


def answer(folder: Folder, name: str, of: str, at: int) -> dict[str, Any]:
    """The tree of the answer that begins at this byte."""
    return tree_to_json(read_answer(_sample_file(folder, name, of), at))


def image(folder: Folder, name: str, sha256: str) -> bytes:
    """The PNG of an image of the evaluation's trees, named by its SHA-256."""
    return folder.image(folder.evaluation(name), sha256)


def _coordinates(directory: Path) -> str | None:
    """How calls write the boxes of a crop; None if the settings do not say."""
    try:
        environment = read_json(directory / SETTINGS).get("environment") or {}
        if environment.get("name") == "images":
            return _text(environment.get("settings", {}).get("coordinates", "fraction")) or None
    except (ArpoError, OSError, AttributeError):
        pass
    return None


def _sample_file(folder: Folder, name: str, of: str) -> Path:
    files = sample_files(folder.evaluation(name))
    if of not in files:
        raise NotFound(f"this evaluation has no answers to {of[:200]!r}")
    folder.require_inside(files[of])
    return files[of]


def _summarize(folder: Folder, name: str, directory: Path, levels: bool) -> dict[str, Any]:
    results, problem = _read_results(folder, directory / RESULTS_FILE)
    found = results.get("benchmarks")
    sets = found if isinstance(found, dict) else {}
    run = folder.evaluated_run(directory)
    step = CHECKPOINT.match(run[1]) if run else None
    return {
        "id": name,
        "name": folder.name if name == "." else name.removeprefix("../"),
        "run": run and run[0],
        "step": int(step[1]) if step else None,
        "agent": _text(results.get("agent")),
        "live": is_live(directory),
        "problem": problem,
        "sets": [_summarize_set(each, sets.get(each), levels) for each in sample_files(directory)],
    }


def _read_results(folder: Folder, path: Path) -> tuple[dict[str, Any], str | None]:
    """The results, and why there are none."""
    try:
        folder.require_inside(path)
        return read_json(path), None
    except FileNotFoundError:
        return {}, "not finished: there are no results yet"
    except (ArpoError, OSError):
        return {}, "its results are damaged"


def _summarize_set(name: str, found: Any, levels: bool) -> dict[str, Any]:
    values = found if isinstance(found, dict) else {}
    kinds = values.get("levels")
    more = {}
    if levels:
        by_kind = kinds if isinstance(kinds, dict) else {}
        more["levels"] = {kind: _numbers(each) for kind, each in by_kind.items() if isinstance(each, dict)}
    return {
        "name": name,
        "title": _text(values.get("title")) or name,
        "metric": _text(values.get("metric")),
        **_numbers(values),
        **more,
    }


def _numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    plain = {name: _number(values.get(name)) for name in ("questions", "answers", "failed", "calls")}
    return plain | {name: _estimate(values.get(name)) for name in ("accuracy", "score", "reward")}


def _estimate(found: Any) -> dict[str, float | None] | None:
    """A mean with its interval, which one question may lack."""
    if not isinstance(found, dict) or _number(found.get("value")) is None:
        return None
    return {name: _number(found.get(name)) for name in ("value", "low", "high")}


def _show_answer(answer: SavedAnswer) -> dict[str, Any]:
    sample = answer.sample
    return {
        "at": answer.offset,
        "question": _text(answer.question)[:MAX_QUESTION_CHARS],
        "task": _text(sample.task),
        "kind": _text(sample.level),
        "stop": _text(sample.stop),
        "failed": None if sample.failed is None else _text(sample.failed),
        **{name: _number(getattr(sample, name)) for name in ("number", "correct", "reward", "calls", "tokens")},
    }


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _number(value: Any) -> float | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None
