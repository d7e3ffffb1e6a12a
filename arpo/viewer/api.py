"""The viewer's API as functions that return JSON values; one for each kind of request.

    prompts(Folder(Path("runs")), "mine", 12)["trees"][0]["question"]

Guarantees: reading a tree, a step or the newest records does not depend on the size of the run, because files are read
by their indexes. Damaged records and trees are skipped and counted, or reported. NaN and infinity become null.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from arpo.config.algorithm import Branching
from arpo.config.loading import changes
from arpo.errors import ArpoError
from arpo.runs.locks import is_live
from arpo.runs.run_dir import CONFIG_FILE, RunDir
from arpo.runs.trees import tree_to_json
from arpo.types import ScoredTree
from arpo.viewer.evals import list_evals
from arpo.viewer.folder import Folder, NotFound

MAX_HITS = 200  # of a search
CONTEXT_CHARS = 60  # on each side of a hit
DEFAULT_STUDY_STEPS = 5
MAX_STUDY_STEPS = 200
MAX_CACHED_STUDIES = 20
DEFAULT_STUDY_BYTES = 16 << 20  # of compressed trees
STUDY_TOKENS = 50  # at the start of each turn


def runs(folder: Folder) -> dict[str, Any]:
    """The runs of the folder with their latest metrics, the comparisons, and the evaluations."""
    run_dirs, comparisons = folder.search()
    titles = [{"id": name, "title": _title(folder, name)} for name in comparisons]
    summaries = (_summarize_run(folder, name) for name in run_dirs)
    found = [run for run in summaries if run is not None]
    return {"root": folder.name, "runs": found, "comparisons": titles, "evals": list_evals(folder)}


def metrics(folder: Folder, run: str, after: int) -> dict[str, Any]:
    """The records from byte `after` on; all records, with `from` 0, if no line begins there.

    `file` changes when the run was rolled back: then all records must be requested again.
    """
    chunk = folder.open(run).metrics_since(after)
    records = [_parse_record(line) for line in chunk.content.split(b"\n")[:-1]]
    return {
        "records": [record for record in records if record is not None],
        "next": chunk.start + len(chunk.content),
        "from": chunk.start,
        "file": chunk.inode,
        "damaged": records.count(None),
    }


def evaluations(folder: Folder, run: str) -> dict[str, Any]:
    """The recorded evaluations on held-out questions, by step; damaged ones are left out and counted."""
    run_dir = folder.open(run)
    found = [_read_evaluation(folder, run_dir, step) for step in run_dir.evaluation_steps()]
    return {"evaluations": [one for one in found if one is not None], "damaged": found.count(None)}


def config(folder: Folder, run: str) -> dict[str, Any]:
    """The resolved configuration; secrets are masked."""
    return {"config": folder.open(run).config()}


def diff(folder: Folder, a: str, b: str) -> dict[str, Any]:
    """The settings that differ between two runs."""
    found = changes(config(folder, a)["config"], config(folder, b)["config"])
    return {"lines": [{"key": key, "a": left, "b": right} for key, left, right in found]}


def steps(folder: Folder, run: str) -> dict[str, Any]:
    """The steps with trees."""
    return {"steps": folder.open(run).tree_steps()}


def prompts(folder: Folder, run: str, step: int) -> dict[str, Any]:
    """Summaries of a step's trees, from the index alone."""
    entries = _open_trees(folder, run, step).tree_index(step)
    hidden = ("offset", "length")
    summaries = [{key: value for key, value in asdict(entry).items() if key not in hidden} for entry in entries]
    return {"trees": [{"n": number, **summary} for number, summary in enumerate(summaries)]}


def tree(folder: Folder, run: str, step: int, number: int) -> dict[str, Any]:
    """One tree with everything."""
    run_dir = _open_trees(folder, run, step)
    count = len(run_dir.tree_index(step))
    if number >= count:
        raise NotFound(f"no tree {number} in step {step}, which has {count} trees")
    return tree_to_json(run_dir.read_tree(step, number))


def image(folder: Folder, run: str, sha256: str) -> bytes:
    """The PNG of an image of the run's trees, named by its SHA-256."""
    return folder.image(folder.open(run).directory, sha256)


def search(folder: Folder, run: str, step: int, text: str) -> dict[str, Any]:
    """Where a text occurs in a step's nodes, ignoring case; `more` says that there are further hits."""
    run_dir = _open_trees(folder, run, step)
    pattern, hits, damaged = re.compile(re.escape(text), re.IGNORECASE), list[dict[str, Any]](), 0
    for number in range(len(run_dir.tree_index(step))) if text else ():
        scored = _read_tree(run_dir, step, number)
        damaged += scored is None
        for index, node in enumerate(scored.tree.nodes if scored else ()):
            for match in pattern.finditer(node.text):
                if len(hits) == MAX_HITS:
                    return {"hits": hits, "more": True, "damaged": damaged}
                start, end = match.span()
                before, after = node.text[max(0, start - CONTEXT_CHARS) : start], node.text[end : end + CONTEXT_CHARS]
                hits.append({"n": number, "node": index, "before": before, "match": match[0], "after": after})
    return {"hits": hits, "more": False, "damaged": damaged}


def entropy(folder: Folder, run: str, wanted: str | None) -> dict[str, Any]:
    """The entropy study of these steps, "3" or "1-10", and its findings in words.

    By default it is of the last five steps with trees, or of fewer if their trees are large.
    """
    run_dir = folder.open(run)
    chosen = _select_steps(run_dir.tree_steps(), wanted)
    for step in chosen:
        _check_trees(folder, run_dir, step)
    if wanted is None:
        chosen = _limit_bytes(run_dir, chosen)
    key = (run, *((step, run_dir.tree_files(step)[1].stat().st_mtime_ns) for step in chosen))
    found = folder.study_cache.get(key)
    if found is None:
        found = _study(run_dir, _name(folder, run), chosen)
        if len(folder.study_cache) >= MAX_CACHED_STUDIES:
            folder.study_cache.clear()
        folder.study_cache[key] = found
    return found


def comparison(folder: Folder, name: str) -> dict[str, Any]:
    """The results of a comparison."""
    return folder.comparison(name)


def _study(run_dir: RunDir, name: str, chosen: Sequence[int]) -> dict[str, Any]:
    from arpo.studies.entropy.report import Subject, findings, study_json  # slow to import
    from arpo.studies.entropy.study import study

    settings = run_dir.config()
    try:
        branching = Branching.model_validate(settings.get("branching", {}))
        temperature = float(settings["rollout"]["temperature"])
    except (ValueError, KeyError, TypeError) as error:
        raise ArpoError(f"{run_dir.directory}: its settings are not those of this version: {error}") from error
    found = study(_read_trees(run_dir, chosen), branching, STUDY_TOKENS)
    which = f"steps {chosen[0]} to {chosen[-1]}" if len(chosen) > 1 else f"step {chosen[0]}"
    shown = study_json(Subject(name, f"trees of {which}", temperature), found)
    return {**shown, "findings": findings(found), "steps": list(chosen)}


def _select_steps(available: list[int], wanted: str | None) -> list[int]:
    if not available:
        raise NotFound("this run holds no trees (run.save_trees)")
    if wanted is None:
        return available[-DEFAULT_STUDY_STEPS:]
    match = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", wanted.strip())
    if match is None:
        raise ArpoError(f"steps: got {wanted[:50]!r}, expected a step or a range of them, like 1-10")
    first, last = int(match[1]), int(match[2] or match[1])
    chosen = [step for step in available if first <= step <= last]
    if not chosen:
        raise NotFound(f"steps {first} to {last}: there are trees of steps {available[0]} to {available[-1]}")
    if len(chosen) > MAX_STUDY_STEPS:
        raise ArpoError(f"steps {first} to {last}: {len(chosen)} have trees; the limit is {MAX_STUDY_STEPS}")
    return chosen


def _limit_bytes(run_dir: RunDir, chosen: Sequence[int]) -> list[int]:
    """The last of these steps whose trees can be studied quickly; at least one."""
    limited: list[int] = []
    size = 0
    for step in reversed(chosen):
        size += run_dir.tree_files(step)[0].stat().st_size
        if limited and size > DEFAULT_STUDY_BYTES:
            break
        limited.insert(0, step)
    return limited


def _summarize_run(folder: Folder, name: str) -> dict[str, Any] | None:
    """A run in the list of runs; None if it was deleted meanwhile."""
    try:
        run_dir = folder.open(name)
        settings = run_dir.config()
        content = run_dir.metrics_since().content
        started = (run_dir.directory / CONFIG_FILE).stat().st_mtime
    except (ArpoError, OSError):
        return None
    last, tested = _last_record(content, "step"), _last_record(content, "test_accuracy")
    model = settings.get("model")
    return {
        "id": name,
        "name": _name(folder, name),
        "steps": last.get("step", 0),
        "live": is_live(run_dir.directory),
        "started": datetime.fromtimestamp(started, UTC).isoformat(timespec="seconds"),
        "preset": _scalar(settings.get("preset")),
        "model": _scalar(model.get("path")) if isinstance(model, dict) else None,
        "reward": _scalar(last.get("reward")),
        "accuracy": _scalar(last.get("accuracy")),
        "test_accuracy": _scalar(tested.get("test_accuracy")),
        "has_trees": _has_trees(run_dir.directory),
        "kind": "sft" if "epoch" in last else "train",
    }


def _scalar(value: Any) -> str | float | None:
    """The value if it is a text or a number: one damaged run must not break the list."""
    return value if isinstance(value, str | int | float) else None


def _name(folder: Folder, name: str) -> str:
    return folder.name if name == "." else name.removesuffix("/run")  # `arpo compare` calls its runs ALGORITHM/SEED/run


def _title(folder: Folder, name: str) -> str:
    try:
        title = folder.comparison(name).get("title")
    except (ArpoError, OSError):
        title = None
    return title if isinstance(title, str) and title else _name(folder, name)


def _has_trees(directory: Path) -> bool:
    return next((directory / "trees").glob("step_*.index.json"), None) is not None


def _last_record(content: bytes, key: str) -> dict[str, Any]:
    """The last whole record with this key, searched from the end."""
    end = len(content)
    while (place := content.rfind(f'"{key}"'.encode(), 0, end)) >= 0:
        end = content.rfind(b"\n", 0, place) + 1
        record = _parse_record(content[end : content.find(b"\n", place)])
        if record is not None and key in record:
            return record
    return {}


def _parse_record(line: bytes) -> dict[str, Any] | None:
    """A line of metrics.jsonl; None if it is damaged."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) and isinstance(value.get("step"), int) else None


def _read_evaluation(folder: Folder, run_dir: RunDir, step: int) -> dict[str, Any] | None:
    """An evaluation as the page expects it; None if it is damaged."""
    folder.require_inside(run_dir.evaluation_file(step))
    try:
        record = run_dir.read_evaluation(step)
        kinds = {kind: _estimate(found) for kind, found in record["by_kind"].items()}
        return {"step": step, "accuracy": _estimate(record["accuracy"]), "by_kind": kinds}
    except (ArpoError, OSError, LookupError, TypeError, ValueError, AttributeError, OverflowError):
        return None


def _estimate(found: Any) -> dict[str, float]:
    """The numbers of an accuracy; raises if one is missing or no number."""
    shares = {name: float(found[name]) for name in ("value", "low", "high")}
    return {**shares, "questions": int(found["questions"])}


def _open_trees(folder: Folder, run: str, step: int) -> RunDir:
    run_dir = folder.open(run)
    _check_trees(folder, run_dir, step)
    return run_dir


def _check_trees(folder: Folder, run_dir: RunDir, step: int) -> None:
    for path in run_dir.tree_files(step):
        folder.require_inside(path)
        if not path.is_file():
            raise NotFound(f"there are no trees of step {step}")


def _read_tree(run_dir: RunDir, step: int, number: int) -> ScoredTree | None:
    try:
        return run_dir.read_tree(step, number)
    except ArpoError:
        return None


def _read_trees(run_dir: RunDir, chosen: Sequence[int]) -> Iterator[ScoredTree]:
    for step in chosen:
        for number in range(len(run_dir.tree_index(step))):
            scored = _read_tree(run_dir, step, number)
            if scored is not None:
                yield scored
