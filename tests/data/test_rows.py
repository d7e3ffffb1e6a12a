"""Tasks from a file or the hub: what is read, and the messages for sources and rows that do not fit."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from questions import bare, rows, verl

from arpo.config.schema import Data, Mix
from arpo.data.rows import MAX_LINE_BYTES, MAX_PROBLEMS_SHOWN
from arpo.data.tasks import Columns, load_tasks, lookup, read_tasks, text_after
from arpo.errors import ArpoError
from arpo.types import Task


def write(tmp_path: Path, content: str | bytes) -> str:
    path = tmp_path / "questions.jsonl"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(path)


def load(path: str) -> tuple[Task, ...]:
    return bare(load_tasks(path, Columns()).tasks)


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
    columns = Columns.named(Data(question="Q", answer="gold"))
    assert bare(load_tasks(path, columns).tasks) == (Task("questions.jsonl:1", "Who?", ("Ada",)),)


def test_blank_lines_are_skipped_and_still_counted(tmp_path: Path) -> None:
    path = write(tmp_path, '\n  \n{"question": "Who?", "answer": "Ada"}\n\n')
    assert load(path) == (Task("questions.jsonl:3", "Who?", ("Ada",)),)


def test_crlf_and_a_missing_last_newline(tmp_path: Path) -> None:
    path = write(tmp_path, '{"question": "Who?", "answer": "Ada"}\r\n{"question": "Where?", "answer": "Rome"}')
    assert [task.question for task in load(path)] == ["Who?", "Where?"]


def test_only_a_newline_ends_a_line(tmp_path: Path) -> None:
    """JSON allows these separators inside a text, and `json.dumps(..., ensure_ascii=False)` writes them as they are."""
    question = "one\u2028two\u2029three\x85four"
    path = write(tmp_path, json.dumps({"question": question, "answer": "4"}, ensure_ascii=False))
    assert load(path) == (Task("questions.jsonl:1", question, ("4",)),)


def test_a_byte_order_mark_is_ignored(tmp_path: Path) -> None:
    path = write(tmp_path, b"\xef\xbb\xbf" + rows({"question": "Who?", "answer": "Ada"}).encode())
    assert load(path) == (Task("questions.jsonl:1", "Who?", ("Ada",)),)


def test_a_missing_file(tmp_path: Path) -> None:
    path = str(tmp_path / "none.jsonl")
    assert complaint(path) == f"{path}: there is no such file (relative paths in a settings file start in its folder)"


def test_a_directory(tmp_path: Path) -> None:
    assert complaint(str(tmp_path)) == f"{tmp_path}: is a directory, expected a file of JSON lines"


@pytest.mark.parametrize(
    ("name", "message"), [("a.jsonl", "line 1 is longer than 67 MB"), ("a.json", "is larger than")]
)
def test_a_line_and_a_file_have_a_largest_size(tmp_path: Path, name: str, message: str) -> None:
    with (tmp_path / name).open("wb") as file:
        file.truncate(2**40)  # zeros without a newline, which take no room on the disk
    with pytest.raises(ArpoError, match=rf"{name}: {message}"):
        load_tasks(str(tmp_path / name), Columns())


def test_the_longest_line(tmp_path: Path) -> None:
    row = b'{"question": "a", "answer": "b"'
    (tmp_path / "a.jsonl").write_bytes(row + b" " * (MAX_LINE_BYTES - len(row) - 2) + b"}\n" + row + b"}")
    assert [task.id for task in load_tasks(str(tmp_path / "a.jsonl"), Columns()).tasks] == ["a.jsonl:1", "a.jsonl:2"]


def test_a_file_that_is_not_utf8(tmp_path: Path) -> None:
    path = write(tmp_path, '{"question": "Où ?", "answer": "là"}\n'.encode("latin-1"))
    assert complaint(path).startswith(f"{path}, line 1: not JSON ('utf-8' codec can't decode byte 0xf9 in position ")


def test_a_wrong_column_names_what_is_there_and_the_setting(tmp_path: Path) -> None:
    path = write(tmp_path, rows({"text": "Who?", "answer": "Ada"}))
    assert complaint(path) == (
        f"{path}, line 1: no column 'question' or 'problem' or 'prompt' (there are: 'text', 'answer'); "
        "name the right one with data.question=..."
    )
    path = write(tmp_path, rows({"question": "Who?", "target": "Ada"}))
    assert complaint(path) == (
        f"{path}, line 1: no column 'answer' or 'reward_model.ground_truth' (there are: 'question', 'target'); "
        "name the right one with data.answer=..."
    )
    path = write(tmp_path, rows({}))
    assert complaint(path).startswith(
        f"{path}, line 1: no column 'question' or 'problem' or 'prompt' (there are: none)"
    )
    with pytest.raises(ArpoError, match=r"no column 'level' .*data\.mix\.kind="):
        path = write(tmp_path, rows({"question": "Who?", "answer": "Ada"}))
        load_tasks(path, Columns.named(Mix(source=path, kind="level"), "data.mix."))


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
        ({"question": "Who?", "answer": []}, "column 'answer' holds no answer"),
        (
            {"question": "Who?", "answer": None},
            "column 'answer' should hold a text, a number or a list of them, got None",
        ),
        (
            {"question": "Who?", "answer": float("nan")},
            "column 'answer' should hold a text, a number or a list of them, got None",
        ),
        (
            {"question": "Who?", "answer": True},
            "column 'answer' should hold a text, a number or a list of them, got True",
        ),
        (
            {"question": "Who?", "answer": " "},
            "column 'answer' is empty",
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


def test_all_problems_are_reported_together(tmp_path: Path) -> None:
    good = {"question": "Who?", "answer": "Ada"}
    path = write(tmp_path, rows(good, {"question": "", "answer": "Ada"}, good, [1], {"question": "Who?", "answer": []}))
    problems = [
        f"{path}, line 2: task 'questions.jsonl:2' has an empty question",
        f"{path}, line 4: expected a JSON object, got list",
        f"{path}, line 5: column 'answer' holds no answer",
    ]
    assert complaint(path).splitlines() == [*problems, "fix the rows, or leave them out with data.bad_rows=skip"]
    reading = load_tasks(path, Columns(), "skip")
    assert [task.id for task in reading.tasks] == ["questions.jsonl:1", "questions.jsonl:3"]
    assert (list(reading.problems), reading.rows) == (problems, 5)


def test_only_the_first_problems_are_shown(tmp_path: Path) -> None:
    path = write(tmp_path, rows(*({f"column {n}": 1} for n in range(1, MAX_PROBLEMS_SHOWN + 4))))
    told = complaint(path).splitlines()
    assert [line.partition(": no column")[0] for line in told[:MAX_PROBLEMS_SHOWN]] == [
        f"{path}, line {n}" for n in range(1, MAX_PROBLEMS_SHOWN + 1)
    ]
    assert told[MAX_PROBLEMS_SHOWN:] == ["and 3 more"]


@pytest.mark.parametrize("number", [2, 3, 4, 50])
def test_a_problem_of_many_rows_is_told_once(tmp_path: Path, number: int) -> None:
    path = write(tmp_path, rows({"question": "Who?"}, *[1] * number, {"question": "Who?"}))
    told = complaint(path).splitlines()
    ints = [line for line in told if "got int" in line]
    assert sum("no column 'answer'" in line for line in told) == 2
    if number <= 3:
        assert ints == [f"{path}, line {n}: expected a JSON object, got int" for n in range(2, number + 2)]
    else:
        same = f"(the same in {number - 1} more rows)"
        assert ints == [f"{path}, line 2: expected a JSON object, got int {same}"]


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_an_empty_file(tmp_path: Path, content: str) -> None:
    path = write(tmp_path, content)
    assert complaint(path) == f"{path}: holds no questions"


def test_only_bad_rows_are_an_error_even_with_skip(tmp_path: Path) -> None:
    path = write(tmp_path, rows([1], {"question": "Who?"}))
    with pytest.raises(ArpoError, match="line 1: expected a JSON object") as caught:
        load_tasks(path, Columns(), "skip")
    assert "data.bad_rows" not in str(caught.value)


# Columns.


def test_columns_inside_other_columns(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        rows({"in": {"text": "Who?", "gold": {"all": ["Ada"]}}, "a.b": 7, "level": 3}, {"in": "flat", "level": 1}),
    )
    columns = Columns.named(Data(question="in.text", answer="in.gold.all", id="a.b", kind="level"))
    reading = read_tasks(path, columns)
    assert bare(reading.tasks) == (Task("7", "Who?", ("Ada",), "3"),)
    assert reading.columns == {
        "question": {"in.text": 1}, "answer": {"in.gold.all": 1}, "id": {"a.b": 1}, "kind": {"level": 1},
    }  # fmt: skip
    assert reading.problems[0].startswith(f"{path}, line 2: no column 'in.text' (there are: 'in', 'level')")


def test_a_column_name_with_a_dot_takes_precedence() -> None:
    assert lookup({"a.b": 1, "a": {"b": 2}}, "a.b") == 1
    assert lookup({"a": {"b.c": 3}}, "a.b.c") == 3
    for column in ("b", "a.c", "a.b.c.d", "a."):
        with pytest.raises(KeyError):
            lookup({"a": {"b.c": 3, "x": None}}, column)


def test_verls_layout_is_known(tmp_path: Path) -> None:
    path = write(tmp_path, rows(verl("1 or 2?", "[1, 3)", "math"), verl("Who?", [" Ada Lom", "A. Lom "], id="q")))
    reading = load_tasks(path, Columns())
    assert bare(reading.tasks) == (
        # no list, though it looks like one
        Task("questions.jsonl:1", "1 or 2?", ("[1, 3)",), "math", system="You have tools."),
        Task("q", "Who?", ("Ada Lom", "A. Lom"), "qa", system="You have tools."),
    )
    assert {part: dict(used) for part, used in reading.columns.items()} == {
        "question": {"prompt": 2}, "answer": {"reward_model.ground_truth": 2}, "id": {"id": 1}, "kind": {"ability": 2},
    }  # fmt: skip


def test_an_answer_column_inside_another(tmp_path: Path) -> None:
    path = write(tmp_path, rows(verl("Who?", {"target": ["Ada"]})))
    assert "should hold a text, a number or a list of them, got {'target'" in complaint(path)
    columns = Columns.named(Data(answer="reward_model.ground_truth.target"))
    assert [task.answers for task in load_tasks(path, columns).tasks] == [("Ada",)]


USER, SYSTEM, ASSISTANT = ({"role": role, "content": f"{role}?"} for role in ("user", "system", "assistant"))


@pytest.mark.parametrize(
    ("prompt", "problem"),
    [
        ([], "should hold one user message, got messages of: none"),
        ([SYSTEM], "should hold one user message, got messages of: system"),
        ([USER, USER], "should hold one user message, got messages of: user, user"),
        ([USER, ASSISTANT], "should hold one user message, got messages of: user, assistant"),
        (["Who?"], "should hold text or messages, got ['Who?']"),
        ([{"role": "user"}], "should hold text or messages, got [{'role': 'user'}]"),
        (
            [{"role": "user", "content": [{"type": "image"}]}],
            "has 1 images without content, and there are 0 in 'image' or 'images'",
        ),
        (
            [{"role": "user", "content": [{"type": "audio"}]}],
            "should hold messages of text and images, got the part {'type': 'audio'}",
        ),
        ({"role": "user", "content": "Who?"}, "should hold text, got {'role': 'user', 'content': 'Who?'}"),
    ],
)
def test_messages_without_a_single_user_message(tmp_path: Path, prompt: Any, problem: str) -> None:
    path = write(tmp_path, rows({"prompt": prompt, "answer": "Ada"}))
    assert complaint(path) == f"{path}, line 1: column 'prompt' {problem}"


def test_ids_and_kinds_are_strings_or_numbers(tmp_path: Path) -> None:
    row = {"question": "Who?", "answer": "Ada"}
    path = write(tmp_path, rows({**row, "kind": 2.5, "id": None}, {**row, "kind": ["a"]}, {**row, "id": True}))
    reading = read_tasks(path, Columns())
    assert bare(reading.tasks) == (Task("questions.jsonl:1", "Who?", ("Ada",), "2.5"),)
    assert [problem.partition(": ")[2] for problem in reading.problems] == [
        "column 'kind' should hold a text or a number, got ['a']",
        "column 'id' should hold a text or a number, got True",
    ]


@pytest.mark.parametrize(
    ("text", "mark", "answer"),
    [
        ("He has 2+2 = <<2+2=4>>4.\n#### 4", "####", "4"),
        ("#### 3 no, #### 1,024 ", "####", "1,024"),
        ("It is $\\boxed{\\frac{1}{2}}$, of course.", "\\boxed", "\\frac{1}{2}"),
        ("\\boxed{1} or \\boxed{ 2 }", "\\boxed", "2"),
        ("Answer: {a} and b", "Answer:", "a"),
    ],
)
def test_the_answer_after_a_mark(text: str, mark: str, answer: str) -> None:
    assert text_after(text, mark) == answer


def test_an_answer_without_its_mark_is_a_problem(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        rows(*({"question": "How many?", "answer": answer} for answer in ("so #### 4", "so 4", "####", "#### {4", 4))),
    )
    reading = read_tasks(path, Columns.named(Data(answer_after="####")))
    assert [task.answers for task in reading.tasks] == [("4",)]
    assert [problem.partition(": ")[2] for problem in reading.problems] == [
        "no '####' in 'so 4'",
        "column 'answer' is empty",
        "the brace after '####' is not closed in '#### {4'",
        "no '####' in '4'",
    ]


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: (
            st.lists(inner) | st.dictionaries(st.sampled_from(["role", "content", "user", "question"]), inner)
        ),
        max_leaves=6,
    ),
    st.sampled_from(["question", "prompt", "answer", "reward_model", "id", "kind"]),
)
def test_any_row_is_a_task_or_a_problem(tmp_path_factory: pytest.TempPathFactory, value: Any, column: str) -> None:
    path = write(tmp_path_factory.mktemp("rows"), rows({"question": "Who?", "answer": "Ada", column: value}, value))
    reading = read_tasks(path, Columns())
    assert reading.rows == 2
    for task in reading.tasks:
        assert all(task.answers) and task.question


# Other kinds of files.


def test_a_json_list(tmp_path: Path) -> None:
    path = tmp_path / "questions.json"
    path.write_text(
        json.dumps([{"question": "Who?", "answer": "Ada"}, "Who?", {"question": "Where?", "answer": "Rome"}])
    )
    reading = read_tasks(str(path), Columns())
    assert [task.id for task in reading.tasks] == ["questions.json:1", "questions.json:3"]
    assert reading.problems == (f"{path}, item 2: expected a JSON object, got str",)
    path.write_text('{"question": "Who?"}')
    assert complaint(str(path)) == f"{path}: expected a JSON list of rows, got dict"
    path.write_text('{"question": "Who?"}\n{"question": "Who?"}')
    assert complaint(str(path)).startswith(f"{path}: expected a JSON list of rows (JSON lines end in .jsonl): ")


@pytest.mark.slow
def test_parquet_and_json_lines_give_the_same_tasks(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    values = [verl(f"What is {i}?", " " if i == 1500 else str(i), "math") for i in range(2100)]
    parquet.write_table(pyarrow.Table.from_pylist(values), tmp_path / "questions.parquet", row_group_size=700)
    table = read_tasks(str(tmp_path / "questions.parquet"), Columns())
    lines = read_tasks(write(tmp_path, rows(*values)), Columns())
    assert len(table.tasks) == 2099
    assert [(t.question, t.answers, t.kind) for t in table.tasks] == [
        (t.question, t.answers, t.kind) for t in lines.tasks
    ]
    assert table.tasks[0].id == "questions.parquet:1"
    assert [problem.partition(", ")[2].partition(":")[0] for problem in table.problems] == ["row 1501"]
    assert table.columns == lines.columns


def test_a_file_that_is_not_parquet(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    path = tmp_path / "questions.parquet"
    path.write_text("PAR1 but not really PAR1" * 10)
    assert complaint(str(path)).startswith(f"{path}: cannot be read as Parquet: ")
    path.unlink()
    assert "there is no such file" in complaint(str(path))


def test_a_damaged_parquet_file(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    path = tmp_path / "questions.parquet"
    values = [{"question": f"What is {i}?", "answer": str(i)} for i in range(500)]
    pytest.importorskip("pyarrow.parquet").write_table(pyarrow.Table.from_pylist(values), path)
    whole = path.read_bytes()
    for start in range(4, len(whole) - 8, len(whole) // 40):
        path.write_bytes(whole[:start] + b"\xff" * 20 + whole[start + 20 :])
        try:
            reading = read_tasks(str(path), Columns())
        except ArpoError as error:
            assert str(error).startswith(f"{path}: cannot be read as Parquet: ")
        else:
            assert reading.rows <= 500


def test_rows_left_out_on_purpose_are_counted(tmp_path: Path) -> None:
    path = write(tmp_path, rows(*({"question": q, "answer": "x"} for q in ("a", "b", "", "d"))))
    reading = read_tasks(path, Columns(), lambda row: None if row["question"] == "b" else row)
    assert [task.question for task in reading.tasks] == ["a", "d"]
    assert (len(reading.problems), reading.left_out, reading.rows) == (1, 1, 4)


def test_without_pyarrow_the_message_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.parquet").touch()
    assert "pip install pyarrow" in complaint(str(tmp_path / "a.parquet"))


# The hub.


class FakeHub:
    """Stands in for the datasets package: notes what is asked for and answers with two Arrow batches."""

    def __init__(self, *values: dict[str, Any]) -> None:
        self.values = values
        self.asked: list[tuple[str, str | None, str]] = []

    def load_dataset(self, name: str, config: str | None, *, split: str) -> Any:
        self.asked.append((name, config, split))
        if name == "gone":
            raise ConnectionError("Couldn't reach the Hub\nand much more")
        return self

    def with_format(self, kind: str) -> Any:
        assert kind == "arrow"
        return SimpleNamespace(iter=self.batches)

    def batches(self, batch_size: int) -> Any:
        pyarrow = pytest.importorskip("pyarrow")
        return iter([pyarrow.Table.from_pylist([value]) for value in self.values])


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    fake = FakeHub({"question": "Who?", "answer": "Ada"}, {"question": "Where?", "answer": "Rome"})
    monkeypatch.setitem(sys.modules, "datasets", fake)
    return fake


def test_a_data_set_of_the_hub(hub: FakeHub) -> None:
    assert load("hf:a/b") == (Task("a/b:1", "Who?", ("Ada",)), Task("a/b:2", "Where?", ("Rome",)))
    assert [task.id for task in load("hf:a/b:main:test")] == ["a/b:main:test:1", "a/b:main:test:2"]
    load("hf:a/b:dev")
    assert hub.asked == [("a/b", None, "train"), ("a/b", "main", "test"), ("a/b", None, "dev")]


@pytest.mark.parametrize("source", ["hf:", "hf:a:b:c:d", "hf:a::test", "hf:a:"])
def test_an_invalid_hub_name(hub: FakeHub, source: str) -> None:
    assert complaint(source) == f"{source}: expected hf:NAME, hf:NAME:SPLIT or hf:NAME:CONFIG:SPLIT"
    assert hub.asked == []


def test_a_hub_that_cannot_be_reached(hub: FakeHub) -> None:
    told = complaint("hf:gone")
    assert told.startswith(
        "hf:gone: cannot be loaded from the Hugging Face hub: Couldn't reach the Hub\nCheck the name; "
    )
    assert "hf auth login" in told


def test_without_datasets_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert complaint("hf:a/b") == ("hf:a/b: data sets of the hub need the datasets package: pip install datasets")


@pytest.mark.slow
def test_the_datasets_package_reads_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "test.jsonl").write_text(rows(verl("Who?", "Ada"), verl("Where?", "Rome", "place")))
    tasks = load(f"hf:{tmp_path / 'set'}:test")
    assert [(task.question, task.answers, task.kind) for task in tasks] == [
        ("Who?", ("Ada",), "qa"), ("Where?", ("Rome",), "place"),
    ]  # fmt: skip
