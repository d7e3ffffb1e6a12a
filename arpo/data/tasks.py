"""From rows to tasks: which column holds what, and what is wrong with rows that do not fit.

Two layouts need no settings: `question` (or `problem`) with `answer`, and verl's `prompt` with
`reward_model.ground_truth`. If the question is a list of messages, it is the one user message; a system message before
it is the task's own (`Task.system`).

A trace is a task with a worked solution; `arpo.agent.traces` reads traces, since that needs the call format.

Guarantees: every row becomes a task or a problem that names the row and says why. Answers are taken as written:
"[1, 3)" is a string, not a list. `Task.meta` has all columns of the row, as JSON can hold them.
Not covered: images and files that a question needs; conversations with more than one question.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from arpo.config.schema import Data, Mix
from arpo.data.images import to_data_url
from arpo.data.rows import RawRow, read_rows, refuse_bad_rows, source_name
from arpo.runs.json_values import json_value
from arpo.types import Image, Kind, Task

Row = Mapping[str, Any]
Segment = tuple[Kind, str]
"""Who wrote a piece of a trace (model or tool), and its text."""
FIELDS = ("question", "answer", "id", "kind")


@dataclass(frozen=True, slots=True)
class Columns:
    """For each field of a task the columns that may hold it, the first that exists; a dot leads into a column.

    A row must have the fields in `required`. If that has no answer, a row without a usable one has no answers.
    """

    question: tuple[str, ...] = ("question", "problem", "prompt")
    answer: tuple[str, ...] = ("answer", "reward_model.ground_truth")
    id: tuple[str, ...] = ("id",)
    kind: tuple[str, ...] = ("kind", "ability")
    answer_after: str | None = None
    required: frozenset[str] = frozenset({"question", "answer"})
    settings: str | None = "data."  # the section in which the user can name columns
    in_python: bool = False  # for messages: the section is an argument

    @staticmethod
    def named(given: Data | Mix, settings: str = "data.", answers: bool = True) -> Columns:
        """The columns that the user named, which rows must have, and the usual ones for other fields.

        `answers` says whether rows must have an answer although the user named no column for it.
        """
        chosen: dict[str, Any] = {name: (column,) for name in FIELDS if (column := getattr(given, name)) is not None}
        required = frozenset({"question", *chosen, *(["answer"] if answers or given.answer_after else [])})
        return Columns(**chosen, answer_after=given.answer_after, required=required, settings=settings)


@dataclass(frozen=True, slots=True)
class Reading:
    """The tasks of a source, its problems, the rows left out on purpose, and how often each column was used."""

    source: str
    tasks: tuple[Task, ...]
    problems: tuple[str, ...] = ()
    left_out: int = 0
    columns: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

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
    return _read(read_rows(source), source, columns, prepare)


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
    used: dict[str, Counter[str]] = {name: Counter() for name in FIELDS}
    for raw in rows:
        try:
            if isinstance(raw.value, Task):
                tasks.append(_check_answers(raw.value, columns))
                continue
            row = raw.parse() if prepare is None else prepare(raw.parse())
            if row is None:
                left_out += 1
            else:
                tasks.append(_parse_task(_plain(row), f"{source_name(source)}:{raw.number}", columns, used))
        except ValueError as error:
            problems.append(f"{source}, {raw.place}: {error}")
    return Reading(source, tuple(tasks), tuple(problems), left_out, used)


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
    return _question(value, column)[0]


def _plain(row: Row) -> dict[str, Any]:
    plain = {}
    for column, value in row.items():
        try:
            plain[str(column)] = json_value(value)
        except ValueError as error:
            raise ValueError(f"column {str(column)!r}: {error}; convert the column, or remove it") from None
    return plain


def _parse_task(row: Row, name: str, columns: Columns, used: dict[str, Counter[str]]) -> Task:
    column, value = _find(row, columns, "question")
    question, system = _question(value, column)
    used["question"][column] += 1
    answers: tuple[str, ...] = ()
    try:
        column, value = _find(row, columns, "answer")
        answers = _answers(value, column, columns.answer_after)
        used["answer"][column] += 1
    except ValueError:
        if "answer" in columns.required:
            raise
    labels = {"id": name, "kind": ""}
    for label in labels:
        column, value = _find(row, columns, label)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise ValueError(f"column {column!r} should hold a text or a number, got {_short(value)}")
        labels[label] = str(value)
        used[label][column] += 1
    return Task(labels["id"], question, answers, labels["kind"], row, system)


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
    if name in ("id", "kind") and name not in columns.required:
        return "", None
    present = ", ".join(map(repr, row)) or "none"
    wanted = " or ".join(map(repr, candidates))
    hint = "" if columns.settings is None else f"; name the right one with {columns.settings}{name}=..."
    if hint and columns.in_python:
        own = ", or give a function as reward" if name == "answer" else ""
        hint = f'; name the right one with data={{"{name}": ...}}{own}'
    raise ValueError(f"no column {wanted} (there are: {present}){hint}")


def _question(value: Any, column: str) -> tuple[str, str]:
    """The question in a column, and its system message: of a list of messages, the user's one and the texts before."""
    system = ""
    if isinstance(value, list | tuple):
        if not all(isinstance(message, Mapping) and {"role", "content"} <= message.keys() for message in value):
            raise ValueError(f"column {column!r} should hold text or messages, got {_short(value)}")
        *before, last = [*value] or [{"role": "none"}]
        if last["role"] != "user" or any(message["role"] != "system" for message in before):
            roles = ", ".join(str(message["role"]) for message in value) or "none"
            raise ValueError(f"column {column!r} should hold one user message, got messages of: {roles}")
        value, system = last["content"], "\n\n".join(_message_text(message, column) for message in before)
    if not isinstance(value, str):
        raise ValueError(f"column {column!r} should hold text, got {_short(value)}")
    return value, system


def _message_text(message: Mapping[str, Any], column: str) -> str:
    """The text of a message, which may be in parts."""
    content = message["content"]
    if isinstance(content, list) and all(isinstance(p, Mapping) and isinstance(p.get("text"), str) for p in content):
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise ValueError(f"column {column!r} should hold text, got {_short(content)}")
    return content.strip()


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
