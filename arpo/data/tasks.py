"""From rows to tasks: which column holds what, and what is wrong with rows that do not fit.

Two layouts need no settings: `question` (or `problem`) with `answer`, and verl's `prompt` with
`reward_model.ground_truth`. If the question is a list of messages, it is the one user message; a system message before
it is the task's own (`Task.system`). Images stand in the column `image` or `images`, or in the parts of the message
(`arpo.data.row_images` says which values are images).

A trace is a task with a worked solution; `arpo.agent.traces` reads traces, since that needs the call format.

Guarantees: every row becomes a task or a problem that names the row and says why. Answers are taken as written:
"[1, 3)" is a string, not a list. `Task.meta` has all columns of the row, as JSON can hold them, without its images.
Not covered: other files that a question needs; conversations with more than one question.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from arpo.config.files import expand_user, shown_path
from arpo.config.schema import Data, Mix
from arpo.data.images import IMAGE_PLACE, to_data_url
from arpo.data.row_images import RowImages, hold_images, looks_like_image, release_images
from arpo.data.rows import RawRow, image_folder, read_rows, refuse_bad_rows, source_name
from arpo.runs.json_values import json_value
from arpo.types import Image, Kind, Task

Row = Mapping[str, Any]
Segment = tuple[Kind, str]
"""Who wrote a piece of a trace (model or tool), and its text."""
FIELDS = ("question", "answer", "id", "kind", "images")
OPTIONAL = ("id", "kind", "images")
IMAGE_KEYS = ("image", "image_url", "url", "path")  # of a part of a message
ANSWER_MARK = "####"  # before the answer of a solution, as in GSM8K


@dataclass(frozen=True, slots=True)
class Columns:
    """For each field of a task the columns that may hold it, the first that exists; a dot leads into a column.

    A row must have the fields in `required`. If that has no answer, a row without a usable one has no answers.
    """

    question: tuple[str, ...] = ("question", "problem", "prompt")
    answer: tuple[str, ...] = ("answer", "reward_model.ground_truth")
    id: tuple[str, ...] = ("id",)
    kind: tuple[str, ...] = ("kind", "ability")
    images: tuple[str, ...] = ("image", "images")  # empty: columns and messages are read without images
    answer_after: str | None = None
    required: frozenset[str] = frozenset({"question", "answer"})
    settings: str | None = "data."  # the section in which the user can name columns
    in_python: bool = False  # for messages: the section is an argument
    image_dir: Path | None = None  # where paths of images may lead; None: the folder of the source
    image_urls: bool = False

    @staticmethod
    def named(given: Data | Mix, settings: str = "data.", answers: bool = True) -> Columns:
        """The columns that the user named, which rows must have, and the usual ones for other fields.

        `answers` says whether rows must have an answer although the user named no column for it.
        """
        chosen: dict[str, Any] = {name: (column,) for name in FIELDS if isinstance(column := getattr(given, name), str)}
        required = frozenset({"question", *chosen, *(["answer"] if answers or given.answer_after else [])})
        if given.images is False:
            chosen["images"] = ()
        image_dir = None if given.image_dir is None else expand_user(given.image_dir)
        more: dict[str, Any] = {"settings": settings, "image_dir": image_dir, "image_urls": given.image_urls}
        return Columns(**chosen, answer_after=given.answer_after, required=required, **more)


@dataclass(frozen=True, slots=True)
class Reading:
    """The tasks of a source, its problems, the rows left out on purpose, and how often each column was used.

    `unused_images` says of columns that seem to hold images in how many rows they were not used.
    """

    source: str
    tasks: tuple[Task, ...]
    problems: tuple[str, ...] = ()
    left_out: int = 0
    columns: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    unused: tuple[str, ...] = ()  # columns that no field of a task is read from; they are in its `meta`
    unused_images: Mapping[str, int] = field(default_factory=dict)

    @property
    def answer_mark(self) -> str | None:
        """What `data.answer_after` should probably be: most answers are solutions that end with this and the answer."""
        marked = sum(any(ANSWER_MARK in answer for answer in task.answers) for task in self.tasks)
        return ANSWER_MARK if self.tasks and 2 * marked > len(self.tasks) else None

    @property
    def rows(self) -> int:
        """The number of rows of the source."""
        return len(self.tasks) + len(self.problems) + self.left_out


@dataclass(frozen=True, slots=True)
class Trace:
    """A task and what follows its question: turns of the model and results of tools, alternating.

    `images` has those of each segment, if some have any; turns of the model have none.
    """

    task: Task
    segments: tuple[Segment, ...]
    images: tuple[tuple[Image, ...], ...] = ()

    def to_json(self) -> str:
        """One line of JSON with the segments as they are: read again, it gives the same tokens."""
        segments: list[dict[str, Any]] = [{"by": kind.value, "text": text} for kind, text in self.segments]
        row: dict[str, Any] = {"id": self.task.id, "question": self.task.question, "answer": list(self.task.answers)}
        for place, images in zip((row, *segments), (self.task.images, *self.images), strict=False):
            if images:
                place["images"] = [to_data_url(image) for image in images]
        return json.dumps({**row, "segments": segments}, ensure_ascii=False)


def read_tasks(source: str, columns: Columns, prepare: Callable[[Row], Row | None] | None = None) -> Reading:
    """Read every row of a file or data set. `prepare` may change a row, or return None to leave it out."""
    return _read(read_rows(source), shown_path(source), columns, prepare)


def tasks_from_rows(rows: Iterable[Row | Task], columns: Columns, source: str = "rows") -> Reading:
    """Read rows that are Python objects: a list of dicts, a data set of the `datasets` package, any iterable.

    A task among them is taken as it is. `source` names them in ids and messages.
    """
    numbered = (RawRow("row", number, row) for number, row in enumerate(rows, 1))
    return _read(numbered, source, replace(columns, in_python=True))


def _read(
    rows: Iterable[RawRow], source: str, columns: Columns, prepare: Callable[[Row], Row | None] | None = None
) -> Reading:
    tasks: list[Task] = []
    problems: list[str] = []
    left_out = 0
    parser = _RowParser(source, columns)
    present: dict[str, None] = {}  # columns, in their order
    for raw in rows:
        try:
            if isinstance(raw.value, Task):
                tasks.append(_check_answers(raw.value, columns))
                continue
            row = raw.parse() if prepare is None else prepare(raw.parse())
            if row is None:
                left_out += 1
            else:
                present |= dict.fromkeys(map(str, row))
                tasks.append(parser.parse(row, raw))
        except ValueError as error:
            problems.append(f"{source}, {raw.place}: {error}")
    read = {part for counts in parser.used.values() for name in counts for part in (name, name.partition(".")[0])}
    unused = tuple(name for name in present if name not in read)
    return Reading(source, tuple(tasks), tuple(problems), left_out, parser.used, unused, parser.unused_images)


def load_tasks(
    source: str, columns: Columns, bad_rows: str = "refuse", prepare: Callable[[Row], Row | None] | None = None
) -> Reading:
    """`read_tasks`, with an error for bad rows unless `bad_rows` is "skip", and if there are no tasks."""
    reading = read_tasks(source, columns, prepare)
    refuse_bad_rows(source, "questions", reading.tasks, reading.problems, bad_rows)
    return reading


def text_after(text: str, mark: str) -> str:
    r"""The text after the last `mark`, or inside the braces that follow it: "2" in "so \boxed{2}."."""
    _, found, rest = text.rpartition(mark)
    if not found:
        raise ValueError(f"no {mark!r} in {_short(text)}")
    rest = rest.strip()
    if not rest.startswith("{"):
        return rest
    depth = 0
    for place, letter in enumerate(rest):
        depth += (letter == "{") - (letter == "}")
        if depth == 0:
            return rest[1:place].strip()
    raise ValueError(f"the brace after {mark!r} is not closed in {_short(text)}")


def lookup(row: Row, column: str) -> Any:
    """The value of a column, or of a field inside one; KeyError if it does not exist."""
    if column in row:
        return row[column]
    first, dot, rest = column.partition(".")
    inner = row.get(first)
    if not dot or not isinstance(inner, Mapping):
        raise KeyError(column)
    return lookup(inner, rest)


def question_of(row: Row) -> str:
    """The question of a row, from the usual columns."""
    column, value = _find(row, Columns(settings=None), "question")
    return _question(value, column).text


def _plain(row: Row, change: Callable[[Any], Any]) -> dict[str, Any]:
    """The row as JSON can hold it, after a change to each value."""
    plain = {}
    for column, value in row.items():
        try:
            plain[str(column)] = json_value(change(value))
        except RecursionError:
            raise ValueError(f"column {str(column)!r}: it is nested too deeply") from None
        except ValueError as error:
            raise ValueError(f"column {str(column)!r}: {error}; convert the column, or remove it") from None
    return plain


class _RowParser:
    """Turns the rows of one source into tasks, and counts which columns were used."""

    def __init__(self, source: str, columns: Columns) -> None:
        self._source, self._columns = source, columns
        where = Path if columns.in_python else partial(image_folder, source)
        folder = where if columns.image_dir is None else partial(Path, columns.image_dir)
        self._images = RowImages(folder, columns.image_urls, columns.settings or "data.")
        self.used: dict[str, Counter[str]] = {name: Counter() for name in FIELDS if name != "images"}
        self.unused_images: Counter[str] = Counter()

    def parse(self, given: Row, raw: RawRow) -> Task:
        """The task of a row; ValueError if it does not fit."""
        columns, row = self._columns, _plain(given, hold_images)
        column, value = _find(row, columns, "question")
        asked = _question(value, column)
        self.used["question"][column] += 1
        answers: tuple[str, ...] = ()
        try:
            answer_column, value = _find(row, columns, "answer")
            answers = _answers(value, answer_column, columns.answer_after)
            self.used["answer"][answer_column] += 1
        except ValueError:
            if "answer" in columns.required:
                raise
        values = self._image_values(row, column, asked)
        place = f"{self._source}, {raw.place}"
        images = tuple(self._open(value, place, number, len(values)) for number, value in enumerate(values, 1))
        labels = {"id": f"{source_name(self._source)}:{raw.number}", "kind": ""}
        for label in labels:
            column, value = _find(row, columns, label)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, str | int | float):
                raise ValueError(f"column {column!r} should hold a text or a number, got {_short(value)}")
            labels[label] = str(value)
            self.used[label][column] += 1
        used = {id(value) for value in values}
        meta = _plain(row, lambda value: release_images(value, used))
        return Task(labels["id"], asked.text, answers, labels["kind"], meta, asked.system, images)

    def _image_values(self, row: Row, question_column: str, asked: _Asked) -> list[Any]:
        """The values of a row that are its images, in the order of their places in the question."""
        if not self._columns.images:
            if asked.images:
                refused = f"which {self._images.setting}images=false does not allow"
                raise ValueError(f"column {question_column!r} has images, {refused}")
            return []
        column, values = self._image_column(row)
        from_column = sum(value is None for value in asked.images)
        if asked.images and not from_column:  # all of them are in the messages
            column, values, found = "", [], list(asked.images)
        elif from_column:
            if from_column != len(values):
                raise ValueError(
                    f"column {question_column!r} has {from_column} images without content, and there are {len(values)} "
                    f"in {' or '.join(map(repr, self._columns.images))}"
                )
            rest = iter(values)
            found = [next(rest) if value is None else value for value in asked.images]
        else:
            found = values
        places = asked.text.count(IMAGE_PLACE)
        if found and places not in (0, len(found)):
            raise ValueError(f"the question has {places} places {IMAGE_PLACE}, but {len(found)} images")
        if found:
            self.used.setdefault("images", Counter())[column or question_column] += 1
        for name, value in row.items():
            if name not in (column.partition(".")[0], question_column.partition(".")[0]) and looks_like_image(value):
                self.unused_images[name] += 1
        return found

    def _image_column(self, row: Row) -> tuple[str, list[Any]]:
        """The column with the row's images, and these; no column if it has none."""
        if "images" in self._columns.required:
            column, value = _find(row, self._columns, "images")
            return column, [one for one in (value if isinstance(value, list) else [value]) if one not in (None, "")]
        for column in self._columns.images:
            value = row.get(column)
            values = [one for one in (value if isinstance(value, list) else [value]) if one not in (None, "")]
            if values and looks_like_image(values, any_url=True):
                return column, values
        return "", []

    def _open(self, value: Any, place: str, number: int, count: int) -> Image:
        which = "image" if count == 1 else f"image {number}"
        try:
            return self._images.open(value, f"{place}: {which}")
        except ValueError as error:
            raise ValueError(f"{which}: {error}") from None


def _check_answers(task: Task, columns: Columns) -> Task:
    if "answer" in columns.required and not task.answers:
        raise ValueError("the task has no answer to compare with")
    return task


def _find(row: Row, columns: Columns, name: str) -> tuple[str, Any]:
    """The column that holds a field, and its value; None if the field is optional and missing."""
    candidates: Sequence[str] = getattr(columns, name)
    for column in candidates:
        try:
            return column, lookup(row, column)
        except KeyError:
            continue
    if name in OPTIONAL and name not in columns.required:
        return "", None
    present = ", ".join(map(repr, row)) or "none"
    wanted = " or ".join(map(repr, candidates))
    hint = "" if columns.settings is None else f"; name the right one with {columns.settings}{name}=..."
    if hint and columns.in_python:
        own = ", or give a function as reward" if name == "answer" else ""
        hint = f'; name the right one with data={{"{name}": ...}}{own}'
    raise ValueError(f"no column {wanted} (there are: {present}){hint}")


@dataclass(frozen=True, slots=True)
class _Asked:
    """A question, its system message, and the images in its parts; None where one of a column belongs."""

    text: str
    system: str = ""
    images: Sequence[Any] = ()


def _question(value: Any, column: str) -> _Asked:
    """The question in a column: of a list of messages, the user's one, with the texts of system messages before."""
    system, images = "", list[Any]()
    if isinstance(value, list | tuple):
        if not all(isinstance(message, Mapping) and {"role", "content"} <= message.keys() for message in value):
            raise ValueError(f"column {column!r} should hold text or messages, got {_short(value)}")
        *before, last = [*value] or [{"role": "none"}]
        if last["role"] != "user" or any(message["role"] != "system" for message in before):
            roles = ", ".join(str(message["role"]) for message in value) or "none"
            raise ValueError(f"column {column!r} should hold one user message, got messages of: {roles}")
        system = "\n\n".join(_message_text(message["content"], column, None).strip() for message in before)
        value = _message_text(last["content"], column, images)
    if not isinstance(value, str):
        raise ValueError(f"column {column!r} should hold text, got {_short(value)}")
    return _Asked(value, system, images)


def _message_text(content: Any, column: str, images: list[Any] | None) -> str:
    """The text of a message, which may be in parts; `<image>` stands for each image, which is added to `images`."""
    if isinstance(content, list):
        content = "".join(_part_text(part, column, images) for part in content)
    if not isinstance(content, str):
        raise ValueError(f"column {column!r} should hold text, got {_short(content)}")
    return content


def _part_text(part: Any, column: str, images: list[Any] | None) -> str:
    """The text of one part of a message: OpenAI's `text` and `image_url`, Hugging Face's `text` and `image`."""
    if isinstance(part, Mapping):
        kind = part.get("type") or ("text" if isinstance(part.get("text"), str) else None)
        if kind in ("text", "input_text") and isinstance(part.get("text"), str):
            return str(part["text"])
        if kind in ("image", "image_url", "input_image") and images is not None:
            value = next((part[key] for key in IMAGE_KEYS if part.get(key) is not None), None)
            images.append(value.get("url") if isinstance(value, Mapping) else value)
            return IMAGE_PLACE
    raise ValueError(f"column {column!r} should hold messages of text and images, got the part {_short(part)}")


def _answers(value: Any, column: str, mark: str | None) -> tuple[str, ...]:
    texts = [_answer_text(each, column) for each in (value if isinstance(value, list | tuple) else [value])]
    if not texts:
        raise ValueError(f"column {column!r} holds no answer")
    return tuple(texts if mark is None else [_answer_text(text_after(text, mark), column) for text in texts])


def _answer_text(value: Any, column: str) -> str:
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not number and not isinstance(value, str):
        raise ValueError(f"column {column!r} should hold a text, a number or a list of them, got {_short(value)}")
    if not str(value).strip():
        raise ValueError(f"column {column!r} is empty")
    return str(value).strip()


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
