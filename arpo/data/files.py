"""Questions from a file of JSON lines. Every row that does not fit is named, all of them at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from arpo.types import ArpoError, Task

SHOWN = 10  # problems listed before "and N more"


def load_tasks(path: str, question: str, answer: str) -> tuple[Task, ...]:
    """Tasks from `path`. `question` and `answer` name the columns; an answer is a text, a number or a list of them."""
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8-sig")
        lines = text.split("\n")  # not splitlines: JSON text may hold other line separators
    except FileNotFoundError:
        raise ArpoError(f"{path}: there is no such file (relative paths start in {Path.cwd()})") from None
    except IsADirectoryError:
        raise ArpoError(f"{path}: is a directory, expected a file of JSON lines") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ArpoError(f"{path}: cannot be read as UTF-8 text: {error}") from None
    tasks: list[Task] = []
    problems: list[str] = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                tasks.append(_task(line, f"{Path(path).name}:{number}", question, answer))
            except ValueError as error:
                problems.append(f"{path}, line {number}: {error}")
    if problems:
        more = [f"and {len(problems) - SHOWN} more"] if len(problems) > SHOWN else []
        raise ArpoError("\n".join(problems[:SHOWN] + more))
    if not tasks:
        raise ArpoError(f"{path}: holds no questions")
    return tuple(tasks)


def _task(line: str, name: str, question: str, answer: str) -> Task:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON ({error})") from None
    if not isinstance(row, dict):
        raise ValueError(f"expected a JSON object, got {type(row).__name__}")
    for setting, column in (("data.question", question), ("data.answer", answer)):
        if column not in row:
            there = ", ".join(map(repr, row)) or "none"
            raise ValueError(f"no column {column!r} (there are: {there}); name the right one with {setting}=...")
    if not isinstance(row[question], str):
        raise ValueError(f"column {question!r} should hold text, got {row[question]!r}")
    answers = row[answer] if isinstance(row[answer], list) else [row[answer]]
    return Task(str(row.get("id", name)), row[question], tuple(_answer_text(value, answer) for value in answers))


def _answer_text(value: Any, column: str) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float) or not str(value).strip():
        raise ValueError(f"column {column!r} should hold a text, a number or a list of them, got {value!r}")
    return str(value)
