"""All columns of a row reach `Task.meta`, from every kind of source, and survive files and messages as they are."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from questions import bare, rows, verl
from trees import searched

from arpo.config.schema import Config, Data, Rewards
from arpo.data.benchmarks import load_benchmark
from arpo.data.task_set import TaskSet, load_task_set, needs_answers, require_answers
from arpo.data.tasks import Columns, read_tasks, tasks_from_rows
from arpo.errors import ArpoError
from arpo.rewards import hierarchical_reward
from arpo.runs.json_values import json_value
from arpo.runs.trees import MAX_COLUMN_CHARS, pack_trees, unpack_tree
from arpo.training.requests import decode_request, encode_request
from arpo.types import Reward, ScoredTree, Task

ROW: dict[str, Any] = {
    "id": 3, "question": "What is in the table?", "answer": [1, 2.5], "kind": "sql",
    "schema": {"tables": ["a", "b"], "rows": {"a": 3}}, "big": 2**70, "nothing": None, "yes": True,
}  # fmt: skip
OPTIONAL = Columns.named(Data(), answers=False)


def stored(task: Task) -> Task:
    """The task after its tree was written to a file and read."""
    return unpack_tree(pack_trees([ScoredTree(replace(searched(), task=task), (Reward(0.0),))])[0]).tree.task


def sent(task: Task) -> Task:
    """The task after it was sent to a sampling worker."""
    return decode_request(encode_request(task, 0, False))[0]


def test_files_and_objects_give_the_same_tasks_with_all_columns(tmp_path: Path) -> None:
    more = verl("Who?", "Ada", extra=[1, {"x": None}])
    (tmp_path / "t.jsonl").write_text(rows(ROW, more))
    (tmp_path / "t.json").write_text(json.dumps([ROW, more]))
    lines, items = (read_tasks(str(tmp_path / name), Columns()) for name in ("t.jsonl", "t.json"))
    objects = tasks_from_rows([ROW, more], Columns(), source="t.jsonl")
    assert [task.meta for task in lines.tasks] == [ROW, more]
    assert lines.tasks == objects.tasks and lines.columns == objects.columns
    assert [task.meta for task in items.tasks] == [ROW, more]
    assert lines.tasks[0].answers == ("1", "2.5") and lines.tasks[1].id == "t.jsonl:2"
    for task in lines.tasks:
        assert sent(task) == stored(task) == task


def test_any_iterable_of_mappings_is_read_and_bad_rows_are_problems() -> None:
    class Lazy(Mapping[str, Any]):
        def __getitem__(self, key: str) -> Any:
            return {"question": "Who?", "answer": "Ada", "hint": "A."}[key]

        def __iter__(self) -> Iterator[str]:
            return iter(("question", "answer", "hint"))

        def __len__(self) -> int:
            return 3

    reading = tasks_from_rows(
        iter([Lazy(), "Who?", {"question": "Q?", "answer": "a", "image": object()}]), Columns(), source="mine"
    )
    assert reading.tasks == (Task("mine:1", "Who?", ("Ada",), "", {"question": "Who?", "answer": "Ada", "hint": "A."}),)
    assert reading.problems == (
        "mine, row 2: expected a dict with columns, got str",
        "mine, row 3: column 'image': a value of type object is neither text, number, list nor dict; "
        "convert the column, or remove it",
    )


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC), "2026-01-02T03:04:05+00:00"),
        (date(2026, 1, 2), "2026-01-02"),
        (time(3, 4), "03:04:00"),
        (timedelta(minutes=1.5), 90.0),
        (b"\x00\xff", "AP8="),
        (float("nan"), None),
        (float("-inf"), None),
        (Decimal("1.10"), "1.10"),
        (UUID(int=1), "00000000-0000-0000-0000-000000000001"),
        ((1, (2,)), [1, [2]]),
        ({1: {None: "x"}}, {"1": {"None": "x"}}),
        (np.array([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        (np.float32(0.5), 0.5),
        (np.array([1.0, np.nan]), [1.0, None]),
        (np.bool_(True), True),
        (-(2**70), -(2**70)),
    ],
    ids=repr,
)
def test_values_that_json_does_not_know(value: Any, plain: Any) -> None:
    assert json_value(value) == plain and type(json_value(value)) is type(plain)
    [task] = tasks_from_rows([{"question": "Q?", "answer": "a", "x": value}], Columns()).tasks
    assert task.meta["x"] == plain
    assert sent(task) == stored(task) == task


def test_values_without_a_json_form_are_problems() -> None:
    loop: list[Any] = []
    loop.append(loop)
    for value, why in ((loop, "nested too deeply"), (10**5000, "thousands of digits"), ({1, 2}, "type set")):
        [problem] = tasks_from_rows([{"question": "Q?", "answer": "a", "x": value}], Columns()).problems
        assert "column 'x': " in problem and why in problem


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), JSON, max_size=4))
def test_json_values_are_not_changed(columns: dict[str, Any]) -> None:
    row = {**columns, "question": "Q?", "answer": "a", "id": "1", "kind": "k"}
    [task] = tasks_from_rows([row], Columns()).tasks
    assert repr(task.meta) == repr(row)
    assert sent(task) == task


def test_a_huge_column_is_not_stored_with_every_tree() -> None:
    edge = "x" * (MAX_COLUMN_CHARS - 2)  # and two quotes
    [task] = tasks_from_rows([{"question": "Q?", "answer": "a", "edge": edge, "page": edge + "y"}], Columns()).tasks
    assert stored(task).meta == {**task.meta, "page": f"(left out: {MAX_COLUMN_CHARS + 1:,} characters)"}
    assert sent(task) == task
    assert stored(Task("1", "Q?", meta={"x": object()})).meta["x"].startswith("(left out: a value of type object")


@pytest.mark.slow
def test_parquet_values_become_plain(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    row = {"question": "Q?", "answer": "a", "at": datetime(2026, 1, 2), "raw": b"\x00", "d": Decimal("1.5"),
           "n": float("nan"), "list": [{"a": 1}], "big": 2**63 - 1}  # fmt: skip
    parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "t.parquet")
    [task] = read_tasks(str(tmp_path / "t.parquet"), Columns()).tasks
    assert task.meta == {**row, "at": "2026-01-02T00:00:00", "raw": "AA==", "d": "1.5", "n": None}
    assert sent(task) == stored(task) == task


@pytest.mark.slow
def test_a_data_set_of_the_datasets_package_is_an_iterable_of_rows() -> None:
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_list([{**ROW, "big": 1}, {**ROW, "big": 2}])
    tasks = tasks_from_rows(data, Columns()).tasks
    assert [task.meta["big"] for task in tasks] == [1, 2]
    assert tasks[0].meta["schema"] == ROW["schema"]


def test_a_benchmark_keeps_its_columns(tmp_path: Path) -> None:
    row = {"question": "1+1?", "answer": "It is 2.\n#### 2", "source": "mine"}
    (tmp_path / "gsm8k.jsonl").write_text(rows(row))
    [task] = load_benchmark("gsm8k", str(tmp_path / "gsm8k.jsonl"))
    assert task.answers == ("2",) and task.meta == row


@pytest.mark.parametrize("answer", [{}, {"answer": None}, {"answer": ""}, {"answer": []}, {"answer": {"tests": [1]}}])
def test_rows_without_a_usable_answer(answer: dict[str, Any]) -> None:
    row = {"question": "Write a sorting function.", **answer}
    assert len(tasks_from_rows([row], Columns()).problems) == 1
    reading = tasks_from_rows([row], OPTIONAL)
    assert bare(reading.tasks) == (Task("rows:1", row["question"]),) and reading.tasks[0].meta == row
    assert reading.columns["answer"] == {}
    assert len(tasks_from_rows([row], Columns.named(Data(answer="answer"), answers=False)).problems) == 1


def test_answers_are_taken_where_they_exist_though_they_are_not_needed() -> None:
    assert tasks_from_rows([{"question": "Q?", "answer": "a"}], OPTIONAL).tasks[0].answers == ("a",)


def test_answers_are_needed_where_they_are_compared_with(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(rows({"question": "Q?"}))
    data = Data(train=str(path), test=str(path))
    own = Config(data=data, reward=Rewards(function="rewards.py:mine"))
    assert not needs_answers(own) and needs_answers(Config(data=data))
    tasks = load_task_set(own)
    assert [task.answers for task in (*tasks.train, *tasks.test)] == [(), ()]
    with pytest.raises(ArpoError, match=r"line 1: no column 'answer'.*name the right one with data.answer"):
        load_task_set(Config(data=data))
    with pytest.raises(ArpoError, match=r"t.jsonl:1: has no answer .*reward.function"):
        require_answers(tasks)
    require_answers(TaskSet(test=(Task("1", "Q?", ("a",)),)))
    with pytest.raises(ArpoError, match=r"has no answer"):
        hierarchical_reward("f1", 0.0, ())(replace(searched(), task=tasks.train[0]).trajectories[0])
