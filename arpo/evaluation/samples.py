"""The answers of an evaluation on disk; the only code that writes or reads them.

    settings.json         the settings that answers depend on, written with the first answer; other settings are refused
    samples/gsm8k.jsonl   one line per answer: its numbers, and the tree under `tree` (see `arpo.runs.trees`)
    images/SHA256.png     each image of these trees once, up to `MAX_IMAGES_BYTES` in all
    run.lock              held by the process that writes

    results.json, ...     what `arpo.evaluation.report` makes of the answers, written last and each time anew

Guarantees: one writer at a time. A line is appended as soon as its answer is scored, so a kill costs only the answers
in progress and at most a truncated last line, which is dropped when the file is read. Answers spoiled by a broken tool
or judge are saved with the reason; of several lines for one answer the last counts. `read_page` and `read_answer` read
a page or a line, however long the file is, and change nothing.
Not covered: power cuts (lines are not synced to disk), files that other programs change.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from typing import IO, Any

from arpo.config.files import parse_json, read_limited, require_regular_file
from arpo.config.loading import differences
from arpo.errors import ArpoError
from arpo.rewards import fault_metrics, unjudged
from arpo.runs.locks import LOCK_FILE, acquire_lock
from arpo.runs.run_dir import MAX_IMAGES_BYTES, write_atomically
from arpo.runs.storage import writing
from arpo.runs.trees import MAX_TREE_BYTES, images_of, tree_from_json, tree_to_json
from arpo.types import ScoredTree, Task

SETTINGS, FOLDER, IMAGES = "settings.json", "samples", "images"
RESULT_FILES = ("results.json", "results.md", "results.svg", "results.png")
PAGE_BYTES = 64 << 20  # read for one page
HEAD_BYTES = 1 << 20  # of a line, to find its numbers and its question in
TREE_KEY = b', "tree": {"task": '  # no text holds these bytes: in JSON a quotation mark within one is escaped
Key = tuple[str, int]
"""A question's id and the number of the answer, counted from 0."""


class OtherSettings(ArpoError):
    """A directory holds answers of other settings."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One answer: its scores, what it took, and `failed`, the reason why it does not count, if any.

    `score`, `correct` and `format` are None if the reward has no such part. `tokens` is None if the endpoint did not
    count them; `faults` say why an answer that counts could not be judged. `stop` is the trajectory's stop reason, and
    `asked` a digest of the task, since an environment may add to the question.
    """

    benchmark: str
    task: str
    number: int
    level: str = ""
    score: float | None = None
    correct: float | None = None
    format: float | None = None
    calls: int = 0
    tokens: int | None = None
    seconds: float = 0.0
    faults: tuple[str, ...] = ()
    failed: str | None = None
    reward: float | None = None
    parts: Mapping[str, float] = field(default_factory=dict)
    stop: str = ""
    asked: str = ""

    @property
    def key(self) -> Key:
        """Identifies the answer within its benchmark."""
        return self.task, self.number


def build_sample(benchmark: str, task: Task, number: int, scored: ScoredTree, tokens: int | None) -> Sample:
    """The sample of a task's scored tree with one trajectory."""
    tree, (reward,), (trajectory,) = scored.tree, scored.rewards, scored.tree.trajectories
    spoiled = "a tool was unavailable" if trajectory.infra_fault else None
    if unjudged(reward):
        spoiled = "the judge was unavailable"
    faults = fault_metrics([scored])
    correct = reward.parts.get("correct")
    return Sample(
        benchmark=benchmark,
        task=task.id,
        number=number,
        level=task.kind,
        score=reward.parts.get("accuracy", correct),
        correct=correct,
        format=reward.parts.get("format"),
        calls=tree.tool_calls,
        tokens=tokens,
        seconds=sum(node.seconds for node in tree.nodes),
        faults=tuple(faults),
        failed=spoiled,
        reward=reward.total,
        parts={part: value for part, value in reward.parts.items() if part not in faults},
        stop=trajectory.stop_reason,
        asked=_digest(task),
    )


@dataclass(frozen=True, slots=True)
class SavedAnswer:
    """A line of a file of samples, without its tree: the byte where it begins, its numbers, and the question."""

    offset: int
    sample: Sample
    question: str


@dataclass(frozen=True, slots=True)
class AnswerPage:
    """Some of a file's answers. `next` is the byte after what was read; `more` says that lines follow there."""

    answers: tuple[SavedAnswer, ...]
    next: int
    more: bool
    damaged: int


class SampleStore:
    """The samples in a locked directory; opened by `open_samples`, which closes the files."""

    def __init__(self, directory: Path, settings: Mapping[str, Any], stack: ExitStack) -> None:
        self.directory, self._settings, self._stack = directory, settings, stack
        self._files: dict[str, IO[bytes]] = {}
        self._image_bytes: int | None = None  # of all stored images, once one is to be stored

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
                if task is not None and asked not in (_digest(task), (task.question, list(task.answers))):
                    raise ArpoError(
                        f"{path}, line {number}: question {sample.task!r} differs from the one in the data set; "
                        "choose another --out"
                    )
        os.truncate(path, size)
        return found

    def append(self, sample: Sample, scored: ScoredTree) -> None:
        """Save an answer and its tree, and each image of the tree once, as long as there is room for them."""
        line = json.dumps({**asdict(sample), "tree": tree_to_json(scored)}, allow_nan=False) + "\n"
        if sample.benchmark not in self._files:
            if not (self.directory / SETTINGS).exists():
                content = json.dumps(self._settings, indent=2, allow_nan=False) + "\n"
                write_atomically(self.directory / SETTINGS, content.encode("ascii"))
            path = self.path(sample.benchmark)
            path.parent.mkdir(exist_ok=True)
            self._files[sample.benchmark] = self._stack.enter_context(path.open("ab"))
        self._write_images(scored)
        file = self._files[sample.benchmark]
        with writing(self.path(sample.benchmark)):
            file.write(line.encode("ascii"))
            file.flush()

    def _write_images(self, scored: ScoredTree) -> None:
        folder = self.directory / IMAGES
        for image in images_of(scored.tree):
            path = folder / f"{image.sha256}.png"
            if not image.data or path.exists():
                continue
            folder.mkdir(exist_ok=True)
            if self._image_bytes is None:
                self._image_bytes = sum(each.stat().st_size for each in folder.glob("*.png"))
            if self._image_bytes + len(image.data) <= MAX_IMAGES_BYTES:
                write_atomically(path, image.data)
                self._image_bytes += len(image.data)


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
        # Until there is an answer, results that count only failures may be all there is.
        own = {LOCK_FILE, *RESULT_FILES, *(f"{name}.tmp" for name in (SETTINGS, *RESULT_FILES))}
        if {each.name for each in directory.iterdir()} - own:
            raise ArpoError(f"{directory}: is not empty and holds no evaluation; choose another --out")
        return
    try:
        changed = differences(parse_json(read_limited(path)), json.loads(json.dumps(settings)))
    except (ValueError, AttributeError):
        raise ArpoError(f"{path}: is damaged; choose another --out") from None
    if changed:
        listed = "\n".join(f"  {line}" for line in changed)
        raise OtherSettings(
            f"{directory}: holds answers of other settings:\n{listed}\n"
            "Use the same settings to continue, or choose another --out"
        )


def first_usable(directory: Path, settings: Mapping[str, Any]) -> Path:
    """The first of DIR, DIR-2, DIR-3 and so on that holds no answers of other settings."""
    for number in count(1):
        candidate = directory if number == 1 else directory.with_name(f"{directory.name}-{number}")
        try:
            require_same_settings(candidate, settings)
        except OtherSettings:
            continue
        return candidate
    raise AssertionError("there is always a free number")


def sample_files(directory: Path) -> dict[str, Path]:
    """The files of samples in a directory by the names of their sets; empty if it holds no evaluation."""
    if not (directory / SETTINGS).is_file():
        return {}
    return {path.stem: path for path in sorted((directory / FOLDER).glob("*.jsonl"))}


def read_page(path: Path, after: int, limit: int, wanted: Callable[[Sample], bool]) -> AnswerPage:
    """The first `limit` answers that are wanted from a byte on; fewer if `PAGE_BYTES` hold fewer."""
    answers, damaged = list[SavedAnswer](), 0
    with require_regular_file(path).open("rb") as file:
        _seek_line(file, path, after)
        place = after
        while len(answers) < limit and place - after < PAGE_BYTES:
            head = rest = file.readline(HEAD_BYTES)
            while rest and not rest.endswith(b"\n"):
                rest = file.readline(HEAD_BYTES)
            if not rest:  # the end, or a line that is still being written
                return AnswerPage(tuple(answers), place, False, damaged)
            answer = _read_head(head, place)
            damaged += answer is None
            if answer is not None and wanted(answer.sample):
                answers.append(answer)
            place = file.tell()
        return AnswerPage(tuple(answers), place, file.read(1) != b"", damaged)


def read_answer(path: Path, offset: int) -> ScoredTree:
    """The tree in the line that begins at a byte."""
    with require_regular_file(path).open("rb") as file:
        _seek_line(file, path, offset)
        line = file.readline(MAX_TREE_BYTES)
    try:
        return tree_from_json(parse_json(line)["tree"])
    except (ValueError, TypeError, LookupError, AttributeError):
        raise ArpoError(f"{path}: the answer at byte {offset} is damaged") from None


def _seek_line(file: IO[bytes], path: Path, offset: int) -> None:
    file.seek(max(0, offset - 1))
    if offset and file.read(1) != b"\n":
        raise ArpoError(f"{path}: no answer begins at byte {offset}")


def _read_head(head: bytes, offset: int) -> SavedAnswer | None:
    """The numbers before the tree of a line, and its question; None if it is damaged."""
    numbers, _, tree = head.partition(TREE_KEY)
    try:
        record = parse_json(numbers + b"}")
        sample = Sample(**{**record, "faults": tuple(record["faults"])})
    except (ValueError, TypeError, LookupError):
        return None
    try:
        task, _ = json.JSONDecoder().raw_decode(tree.decode("ascii", "replace"))
        question = task["question"]
    except (ValueError, TypeError, LookupError, RecursionError):  # a task longer than what is searched
        question = ""
    return SavedAnswer(offset, sample, question)


def _digest(task: Task) -> str:
    """A digest of what is asked."""
    values: tuple[Any, ...] = (task.question, task.answers, task.kind, dict(task.meta), task.system)
    if task.images:  # by size: the hash is not known before they are read
        values += ([(image.width, image.height) for image in task.images],)
    return hashlib.sha256(json.dumps(values, default=str, sort_keys=True).encode()).hexdigest()[:16]


def _parse(path: Path, number: int, line: bytes) -> tuple[Sample, str | tuple[str, list[str]]]:
    """The sample in a line, and what was asked: a digest, or in older files the question and its answers."""
    try:
        record = json.loads(line)
        task = record.pop("tree")["task"]
        sample = Sample(**{**record, "faults": tuple(record["faults"])})
        return sample, sample.asked or (task["question"], task["answers"])
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        raise ArpoError(f"{path}: line {number} is damaged: {line[:60]!r}; choose another --out") from None
