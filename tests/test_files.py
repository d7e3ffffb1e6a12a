"""Questions from a file: what is read, and what is said of a file that does not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from arpo.data.files import SHOWN, load_tasks
from arpo.types import ArpoError, Task


def write(tmp_path: Path, content: str | bytes) -> str:
    path = tmp_path / "questions.jsonl"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(path)


def rows(*values: Any) -> str:
    return "".join(json.dumps(value) + "\n" for value in values)


def load(path: str) -> tuple[Task, ...]:
    return load_tasks(path, "question", "answer")


def complaint(path: str) -> str:
    with pytest.raises(ArpoError) as caught:
        load(path)
    return str(caught.value)


def test_a_good_file_becomes_tasks_in_order(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        rows(
            {"question": "Where was Mira born?", "answer": "Upper Kelso"},
            {"question": "Who?", "answer": ["Ada Lom", "A. Lom"], "id": "q7"},
            {"question": "How many?", "answer": 42, "id": 3, "unused": None},
            {"question": "How much?", "answer": [1.5, "one and a half"]},
        ),
    )
    assert load(path) == (
        Task("questions.jsonl:1", "Where was Mira born?", ("Upper Kelso",)),
        Task("q7", "Who?", ("Ada Lom", "A. Lom")),
        Task("3", "How many?", ("42",)),
        Task("questions.jsonl:4", "How much?", ("1.5", "one and a half")),
    )


def test_other_columns_can_be_named(tmp_path: Path) -> None:
    path = write(tmp_path, rows({"Q": "Who?", "gold": "Ada"}))
    assert load_tasks(path, "Q", "gold") == (Task("questions.jsonl:1", "Who?", ("Ada",)),)


def test_blank_lines_are_skipped_and_still_counted(tmp_path: Path) -> None:
    path = write(tmp_path, '\n  \n{"question": "Who?", "answer": "Ada"}\n\n')
    assert load(path) == (Task("questions.jsonl:3", "Who?", ("Ada",)),)


def test_line_ends_of_windows_and_a_missing_last_one_are_fine(tmp_path: Path) -> None:
    path = write(tmp_path, '{"question": "Who?", "answer": "Ada"}\r\n{"question": "Where?", "answer": "Rome"}')
    assert [task.question for task in load(path)] == ["Who?", "Where?"]


def test_only_a_newline_ends_a_line(tmp_path: Path) -> None:
    """JSON allows these separators inside a text, and `json.dumps(..., ensure_ascii=False)` writes them as they are."""
    question = "one\u2028two\u2029three\x85four"
    path = write(tmp_path, json.dumps({"question": question, "answer": "4"}, ensure_ascii=False))
    assert load(path) == (Task("questions.jsonl:1", question, ("4",)),)


def test_a_byte_order_mark_is_no_problem(tmp_path: Path) -> None:
    path = write(tmp_path, b"\xef\xbb\xbf" + rows({"question": "Who?", "answer": "Ada"}).encode())
    assert load(path) == (Task("questions.jsonl:1", "Who?", ("Ada",)),)


def test_a_missing_file(tmp_path: Path) -> None:
    path = str(tmp_path / "none.jsonl")
    assert complaint(path) == f"{path}: there is no such file (relative paths start in {Path.cwd()})"


def test_a_directory(tmp_path: Path) -> None:
    assert complaint(str(tmp_path)) == f"{tmp_path}: is a directory, expected a file of JSON lines"


def test_a_file_that_is_not_utf8(tmp_path: Path) -> None:
    path = write(tmp_path, '{"question": "Où ?", "answer": "là"}\n'.encode("latin-1"))
    assert complaint(path).startswith(f"{path}: cannot be read as UTF-8 text: ")


def test_a_wrong_column_names_what_is_there_and_the_setting(tmp_path: Path) -> None:
    path = write(tmp_path, rows({"prompt": "Who?", "answer": "Ada"}))
    assert complaint(path) == (
        f"{path}, line 1: no column 'question' (there are: 'prompt', 'answer'); "
        "name the right one with data.question=..."
    )
    path = write(tmp_path, rows({"question": "Who?", "target": "Ada"}))
    assert complaint(path) == (
        f"{path}, line 1: no column 'answer' (there are: 'question', 'target'); name the right one with data.answer=..."
    )
    path = write(tmp_path, rows({}))
    assert complaint(path) == (
        f"{path}, line 1: no column 'question' (there are: none); name the right one with data.question=..."
    )


def test_bad_json_is_named_by_its_line(tmp_path: Path) -> None:
    path = write(tmp_path, rows({"question": "Who?", "answer": "Ada"}) + "{oops\n")
    assert complaint(path).startswith(f"{path}, line 2: not JSON (")


def test_json_nested_without_end_is_bad_json_too(tmp_path: Path) -> None:
    path = write(tmp_path, "[" * 200_000)
    assert complaint(path).startswith(f"{path}, line 1: not JSON (")


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (["Who?", "Ada"], "expected a JSON object, got list"),
        ({"question": 3, "answer": "Ada"}, "column 'question' should hold text, got 3"),
        ({"question": " \t", "answer": "Ada"}, "task 'questions.jsonl:1' has an empty question"),
        ({"question": "Who?", "answer": []}, "task 'questions.jsonl:1' has no answer"),
        (
            {"question": "Who?", "answer": None},
            "column 'answer' should hold a text, a number or a list of them, got None",
        ),
        (
            {"question": "Who?", "answer": True},
            "column 'answer' should hold a text, a number or a list of them, got True",
        ),
        (
            {"question": "Who?", "answer": " "},
            "column 'answer' should hold a text, a number or a list of them, got ' '",
        ),
        (
            {"question": "Who?", "answer": ["Ada", {}]},
            "column 'answer' should hold a text, a number or a list of them, got {}",
        ),
    ],
)
def test_a_row_that_does_not_fit(tmp_path: Path, row: Any, problem: str) -> None:
    path = write(tmp_path, rows(row))
    assert complaint(path) == f"{path}, line 1: {problem}"


def test_all_problems_are_told_at_once(tmp_path: Path) -> None:
    good = {"question": "Who?", "answer": "Ada"}
    path = write(tmp_path, rows(good, {"question": "", "answer": "Ada"}, good, [1], {"question": "Who?", "answer": []}))
    assert complaint(path).splitlines() == [
        f"{path}, line 2: task 'questions.jsonl:2' has an empty question",
        f"{path}, line 4: expected a JSON object, got list",
        f"{path}, line 5: task 'questions.jsonl:5' has no answer",
    ]


def test_of_very_many_problems_the_first_are_shown(tmp_path: Path) -> None:
    path = write(tmp_path, rows(*[1] * (SHOWN + 3)))
    told = complaint(path).splitlines()
    assert told[:SHOWN] == [f"{path}, line {n}: expected a JSON object, got int" for n in range(1, SHOWN + 1)]
    assert told[SHOWN:] == ["and 3 more"]


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_an_empty_file(tmp_path: Path, content: str) -> None:
    path = write(tmp_path, content)
    assert complaint(path) == f"{path}: holds no questions"
