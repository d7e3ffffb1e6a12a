"""The answers of an evaluation on disk; the only code that writes or reads them.

    settings.json         the settings that answers depend on, written with the first answer; other settings are refused
    samples/gsm8k.jsonl   one line per answer: its numbers, and the tree under `tree` (see `arpo.runs.trees`)
    run.lock              held by the process that writes

Guarantees: one writer at a time. A line is appended as soon as its answer is scored, so a kill costs only the answers
in progress and at most a truncated last line, which is dropped when the file is read. Answers spoiled by a broken tool
or judge are saved with the reason; of several lines for one answer the last counts.
Not covered: power cuts (lines are not synced to disk), files that other programs change.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from arpo.config.files import parse_json, read_limited, require_regular_file
from arpo.config.loading import differences
from arpo.errors import ArpoError
from arpo.rewards import fault_metrics, unjudged
from arpo.runs.locks import LOCK_FILE, acquire_lock
from arpo.runs.run_dir import write_atomically
from arpo.runs.storage import writing
from arpo.runs.trees import tree_to_json
from arpo.types import ScoredTree, Task

SETTINGS, FOLDER = "settings.json", "samples"
Key = tuple[str, int]
"""A question's id and the number of the answer, counted from 0."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One answer: its scores, what it took, and `failed`, the reason why it does not count, if any.

    `tokens` is None if the endpoint did not count them; `faults` say why an answer that counts could not be judged.
    """

    benchmark: str
    task: str
    number: int
    level: str = ""
    score: float = 0.0
    correct: float = 0.0
    format: float = 0.0
    calls: int = 0
    tokens: int | None = None
    seconds: float = 0.0
    faults: tuple[str, ...] = ()
    failed: str | None = None

    @property
    def key(self) -> Key:
        """Identifies the answer within its benchmark."""
        return self.task, self.number


def build_sample(benchmark: str, number: int, scored: ScoredTree, tokens: int | None) -> Sample:
    """The sample of a scored tree with one trajectory."""
    tree, (reward,), (trajectory,) = scored.tree, scored.rewards, scored.tree.trajectories
    spoiled = "a tool was unavailable" if trajectory.infra_fault else None
    if unjudged(reward):
        spoiled = "the judge was unavailable"
    return Sample(
        benchmark=benchmark,
        task=tree.task.id,
        number=number,
        level=tree.task.kind,
        score=reward.parts["accuracy"],
        correct=reward.parts["correct"],
        format=reward.parts["format"],
        calls=tree.tool_calls,
        tokens=tokens,
        seconds=sum(node.seconds for node in tree.nodes),
        faults=tuple(fault_metrics([scored])),
        failed=spoiled,
    )


class SampleStore:
    """The samples in a locked directory; opened by `open_samples`, which closes the files."""

    def __init__(self, directory: Path, settings: Mapping[str, Any], stack: ExitStack) -> None:
        self.directory, self._settings, self._stack = directory, settings, stack
        self._files: dict[str, IO[bytes]] = {}

    def path(self, benchmark: str) -> Path:
        """The file with a benchmark's samples."""
        return self.directory / FOLDER / f"{benchmark}.jsonl"

    def read(self, benchmark: str, tasks: Sequence[Task]) -> dict[Key, Sample]:
        """All samples of a benchmark; deletes a truncated last line. Raises if a question differs from those given."""
        path, known = self.path(benchmark), {task.id: task for task in tasks}
        found: dict[Key, Sample] = {}
        if not path.exists():
            return found
        size = 0
        with require_regular_file(path).open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    break
                size += len(line)
                sample, asked = _parse(path, number, line)
                found[sample.key] = sample
                task = known.get(sample.task)
                if task is not None and asked != (task.question, list(task.answers)):
                    raise ArpoError(
                        f"{path}, line {number}: question {sample.task!r} differs from the one in the data set; "
                        "choose another --out"
                    )
        os.truncate(path, size)
        return found

    def append(self, sample: Sample, scored: ScoredTree) -> None:
        """Save an answer and its tree."""
        line = json.dumps({**asdict(sample), "tree": tree_to_json(scored)}, allow_nan=False) + "\n"
        if sample.benchmark not in self._files:
            if not (self.directory / SETTINGS).exists():
                content = json.dumps(self._settings, indent=2, allow_nan=False) + "\n"
                write_atomically(self.directory / SETTINGS, content.encode("ascii"))
            path = self.path(sample.benchmark)
            path.parent.mkdir(exist_ok=True)
            self._files[sample.benchmark] = self._stack.enter_context(path.open("ab"))
        file = self._files[sample.benchmark]
        with writing(self.path(sample.benchmark)):
            file.write(line.encode("ascii"))
            file.flush()


@contextmanager
def open_samples(directory: Path, settings: Mapping[str, Any]) -> Iterator[SampleStore]:
    """Create or continue an evaluation with these settings; the directory is locked inside the block."""
    require_same_settings(directory, settings)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ArpoError(f"{directory}: cannot be created: {error.strerror}") from error
    with acquire_lock(directory, "evaluation", "--out"), ExitStack() as stack:
        require_same_settings(directory, settings)  # another process may have been faster
        yield SampleStore(directory, settings, stack)


def require_same_settings(directory: Path, settings: Mapping[str, Any]) -> None:
    """Raise if the directory holds anything else, or answers with other settings."""
    if not directory.exists():
        return
    if not directory.is_dir():
        raise ArpoError(f"{directory}: is a file, expected a directory for the evaluation")
    path = directory / SETTINGS
    if not path.exists():
        if {each.name for each in directory.iterdir()} - {LOCK_FILE, SETTINGS + ".tmp"}:
            raise ArpoError(f"{directory}: is not empty and holds no evaluation; choose another --out")
        return
    try:
        changed = differences(parse_json(read_limited(path)), json.loads(json.dumps(settings)))
    except (ValueError, AttributeError):
        raise ArpoError(f"{path}: is damaged; choose another --out") from None
    if changed:
        listed = "\n".join(f"  {line}" for line in changed)
        raise ArpoError(
            f"{directory}: holds answers of other settings:\n{listed}\n"
            "Use the same settings to continue, or choose another --out"
        )


def _parse(path: Path, number: int, line: bytes) -> tuple[Sample, tuple[str, list[str]]]:
    """The sample in a line, and its question and right answers."""
    try:
        record = json.loads(line)
        task = record.pop("tree")["task"]
        return Sample(**{**record, "faults": tuple(record["faults"])}), (task["question"], task["answers"])
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        raise ArpoError(f"{path}: line {number} is damaged: {line[:60]!r}; choose another --out") from None
