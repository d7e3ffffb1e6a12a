"""What the viewer shows, as values that JSON can hold: one function for each thing the page asks for.

    prompts(Folder(Path("runs")), "mine", 12)["trees"][0]["question"]

Promises: a tree, a step or the end of a run costs no more for what else the run holds; files are read by their indexes.
Lines of metrics.jsonl and trees that are damaged are left out and counted, or said. Numbers that JSON lacks are null.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from arpo.config.loading import changes, shareable
from arpo.config.schema import Branching
from arpo.errors import ArpoError
from arpo.runs.locks import is_live
from arpo.runs.run_dir import CONFIG_FILE, RunDir
from arpo.runs.trees import tree_to_json
from arpo.types import ScoredTree
from arpo.viewer.folder import Folder, NotThere

HITS = 200  # of a search
AROUND = 60  # characters shown on each side of a hit
ENTROPY_STEPS = 5  # whose entropies are shown unless others are asked for
MOST_STEPS = 200  # whose entropies are studied at once
STUDIES = 20  # that are kept, as a page asks for them again
QUICK_BYTES = 16 << 20  # of compressed trees that are studied unless others are asked for
TOKENS = 50  # after each place, in a study of entropies


def runs(folder: Folder) -> dict[str, Any]:
    """What is in the folder, with the last numbers of every run."""
    found, comparisons = folder.search()
    titles = [{"id": name, "title": _title(folder, name)} for name in comparisons]
    listed = (_listed(folder, name) for name in found)
    return {"root": folder.name, "runs": [run for run in listed if run is not None], "comparisons": titles}


def metrics(folder: Folder, run: str, after: int) -> dict[str, Any]:
    """The records from byte `after` on, or all if the file no longer has a line there: they begin at `from`.

    `file` changes when the run was taken back to an earlier step: then all is to be asked for again.
    """
    lines = folder.open(run).metrics_since(after)
    found = [_record(line) for line in lines.content.split(b"\n")[:-1]]
    return {
        "records": [record for record in found if record is not None],
        "next": lines.start + len(lines.content),
        "from": lines.start,
        "file": lines.inode,
        "damaged": found.count(None),
    }


def config(folder: Folder, run: str) -> dict[str, Any]:
    """The resolved configuration, without the environment of MCP servers."""
    return {"config": shareable(folder.open(run).config())}


def diff(folder: Folder, a: str, b: str) -> dict[str, Any]:
    """The settings in which two runs differ."""
    found = changes(config(folder, a)["config"], config(folder, b)["config"])
    return {"lines": [{"key": key, "a": left, "b": right} for key, left, right in found]}


def steps(folder: Folder, run: str) -> dict[str, Any]:
    """The steps that have trees."""
    return {"steps": folder.open(run).tree_steps()}


def prompts(folder: Folder, run: str, step: int) -> dict[str, Any]:
    """Summaries of a step's trees, from the index alone."""
    entries = _with_trees(folder, run, step).tree_index(step)
    hidden = ("offset", "length")
    summaries = [{key: value for key, value in asdict(entry).items() if key not in hidden} for entry in entries]
    return {"trees": [{"n": number, **summary} for number, summary in enumerate(summaries)]}


def tree(folder: Folder, run: str, step: int, number: int) -> dict[str, Any]:
    """One tree; its nodes say in `ends`, where it is known, up to which character each token goes."""
    log = _with_trees(folder, run, step)
    there = len(log.tree_index(step))
    if number >= there:
        raise NotThere(f"no tree {number} in step {step}, which has {there} trees")
    return tree_to_json(log.read_tree(step, number))


def search(folder: Folder, run: str, step: int, text: str) -> dict[str, Any]:
    """Where a text occurs in a step's nodes, in any case of letters; `more` says that there are further hits."""
    log = _with_trees(folder, run, step)
    wanted, hits, damaged = re.compile(re.escape(text), re.IGNORECASE), list[dict[str, Any]](), 0
    for number in range(len(log.tree_index(step))) if text else ():
        scored = _readable(log, step, number)
        damaged += scored is None
        for index, node in enumerate(scored.tree.nodes if scored else ()):
            for match in wanted.finditer(node.text):
                if len(hits) == HITS:
                    return {"hits": hits, "more": True, "damaged": damaged}
                first, last = match.span()
                before, after = node.text[max(0, first - AROUND) : first], node.text[last : last + AROUND]
                hits.append({"n": number, "node": index, "before": before, "match": match[0], "after": after})
    return {"hits": hits, "more": False, "damaged": damaged}


def entropy(folder: Folder, run: str, wanted: str | None) -> dict[str, Any]:
    """The pilot study of these steps, "3" or "1-10", with what it shows in words.

    Unless steps are named, it is of the last five that have trees, or of fewer where trees are large.
    """
    log = folder.open(run)
    chosen = _chosen(log.tree_steps(), wanted)
    for step in chosen:
        _check_trees(folder, log, step)
    if wanted is None:
        chosen = _quick(log, chosen)
    version = (run, *((step, log.tree_files(step)[1].stat().st_mtime_ns) for step in chosen))
    found = folder.studies.get(version)
    if found is None:
        found = _studied(log, _name(folder, run), chosen)
        if len(folder.studies) >= STUDIES:  # another thread may do so too
            folder.studies.clear()
        folder.studies[version] = found
    return found


def comparison(folder: Folder, name: str) -> dict[str, Any]:
    """The results of a comparison."""
    return folder.comparison(name)


def _studied(log: RunDir, name: str, chosen: Sequence[int]) -> dict[str, Any]:
    from arpo.studies.entropy.report import Subject, findings, study_json
    from arpo.studies.entropy.study import study  # only here: they take as long to load as all the rest

    settings = log.config()
    try:
        branching = Branching.model_validate(settings.get("branching", {}))
        temperature = float(settings["rollout"]["temperature"])
    except (ValueError, KeyError, TypeError) as error:
        raise ArpoError(f"{log.directory}: its settings are not those of this version: {error}") from error
    found = study(_grown(log, chosen), branching, TOKENS)
    which = f"steps {chosen[0]} to {chosen[-1]}" if len(chosen) > 1 else f"step {chosen[0]}"
    shown = study_json(Subject(name, f"trees of {which}", temperature), found)
    return {**shown, "findings": findings(found), "steps": list(chosen)}


def _quick(log: RunDir, chosen: Sequence[int]) -> list[int]:
    """The last of these steps whose trees can be studied while someone waits; one at least."""
    kept: list[int] = []
    used = 0
    for step in reversed(chosen):
        used += log.tree_files(step)[0].stat().st_size
        if kept and used > QUICK_BYTES:
            break
        kept.insert(0, step)
    return kept


def _listed(folder: Folder, name: str) -> dict[str, Any] | None:
    """One line of the list; None if the run has just gone."""
    try:
        log = folder.open(name)
        settings = log.config()
        content = log.metrics_since().content
        started = (log.directory / CONFIG_FILE).stat().st_mtime
    except (ArpoError, OSError):
        return None
    last, tested = _last_record(content, "step"), _last_record(content, "test_accuracy")
    model = settings.get("model")
    return {
        "id": name,
        "name": _name(folder, name),
        "steps": last.get("step", 0),
        "live": is_live(log.directory),
        "started": datetime.fromtimestamp(started, UTC).isoformat(timespec="seconds"),
        "preset": _plain(settings.get("preset")),
        "model": _plain(model.get("path")) if isinstance(model, dict) else None,
        "reward": _plain(last.get("reward")),
        "accuracy": _plain(last.get("accuracy")),
        "test_accuracy": _plain(tested.get("test_accuracy")),
        "has_trees": _has_trees(log.directory),
        "kind": "sft" if "epoch" in last else "train",
    }


def _plain(value: Any) -> str | float | None:
    """What a list can show; one run must not break the list of all."""
    return value if isinstance(value, str | int | float) else None


def _name(folder: Folder, name: str) -> str:
    return folder.name if name == "." else name.removesuffix("/run")  # where `arpo compare` keeps them


def _title(folder: Folder, name: str) -> str:
    try:
        title = folder.comparison(name).get("title")
    except (ArpoError, OSError):
        title = None
    return title if isinstance(title, str) and title else _name(folder, name)


def _has_trees(directory: Path) -> bool:
    return next((directory / "trees").glob("step_*.index.json"), None) is not None


def _last_record(content: bytes, key: str) -> dict[str, Any]:
    """The last whole record that has this key, found from the end."""
    end = len(content)
    while (place := content.rfind(f'"{key}"'.encode(), 0, end)) >= 0:
        end = content.rfind(b"\n", 0, place) + 1
        record = _record(content[end : content.find(b"\n", place)])
        if record is not None and key in record:
            return record
    return {}


def _record(line: bytes) -> dict[str, Any] | None:
    """A line of metrics.jsonl; None if it is damaged."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or not isinstance(value.get("step"), int):
        return None
    return value


def _with_trees(folder: Folder, run: str, step: int) -> RunDir:
    log = folder.open(run)
    _check_trees(folder, log, step)
    return log


def _check_trees(folder: Folder, log: RunDir, step: int) -> None:
    for path in log.tree_files(step):
        folder.check(path)
        if not path.is_file():
            raise NotThere(f"there are no trees of step {step}")


def _readable(log: RunDir, step: int, number: int) -> ScoredTree | None:
    try:
        return log.read_tree(step, number)
    except ArpoError:
        return None


def _grown(log: RunDir, chosen: Sequence[int]) -> Iterator[ScoredTree]:
    for step in chosen:
        for number in range(len(log.tree_index(step))):
            scored = _readable(log, step, number)
            if scored is not None:
                yield scored


def _chosen(there: list[int], wanted: str | None) -> list[int]:
    if not there:
        raise NotThere("this run holds no trees (run.save_trees)")
    if wanted is None:
        return there[-ENTROPY_STEPS:]
    match = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", wanted.strip())
    if match is None:
        raise ArpoError(f"steps: got {wanted[:50]!r}, expected a step or a range of them, like 1-10")
    first, last = int(match[1]), int(match[2] or match[1])
    chosen = [step for step in there if first <= step <= last]
    if not chosen:
        raise NotThere(f"steps {first} to {last}: there are trees of steps {there[0]} to {there[-1]}")
    if len(chosen) > MOST_STEPS:
        raise ArpoError(f"steps {first} to {last}: {len(chosen)} have trees; ask for {MOST_STEPS} at most")
    return chosen
