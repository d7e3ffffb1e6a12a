"""Passages from files of every kind, and invalid rows."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from arpo.errors import ArpoError
from arpo.tools.search import Document, load_documents, memory_index


def test_load_documents(tmp_path: Path) -> None:
    path = tmp_path / "docs.jsonl"
    path.write_text('{"title": "T", "text": "a"}\n\n{"id": 3, "text": "b\\u2028c", "title": null}\n', encoding="utf-8")
    assert load_documents(path) == [Document("T", "a"), Document("", "b\u2028c")]


def test_contents_as_in_search_r1(tmp_path: Path) -> None:
    path = tmp_path / "docs.jsonl"
    contents = ['"Upper \\"K\\""\ntext\nmore', "no title\ntext", '"all"', '"T"\n ']
    path.write_text("\n".join(json.dumps({"id": "1", "contents": text}) for text in contents), encoding="utf-8")
    assert load_documents(path) == [
        Document('Upper \\"K\\"', "text\nmore"),
        Document("", "no title\ntext"),
        Document("", '"all"'),
        Document("", '"T"\n '),
    ]
    path.write_text(json.dumps({"title": "given", "contents": '"T"\ntext'}))
    assert load_documents(path) == [Document("given", "text")]


def test_a_json_list(tmp_path: Path) -> None:
    path = tmp_path / "docs.json"
    path.write_text('[{"title": "T", "text": "a"}, {"text": "b"}]')
    assert load_documents(path) == [Document("T", "a"), Document("", "b")]
    for content, message in (
        ('{"text": "a"}', "expected a JSON list of rows, got dict"),
        ("[1", "expected a JSON list of rows"),
        ('[{"text": "a"}, [3]]', "item 2: expected a JSON object, got list"),
        ("[]", "holds no documents"),
    ):
        path.write_text(content)
        with pytest.raises(ArpoError, match=message):
            load_documents(path)


def test_parquet(tmp_path: Path) -> None:
    pyarrow: Any = pytest.importorskip("pyarrow")
    parquet: Any = importlib.import_module("pyarrow.parquet")
    path = tmp_path / "docs.parquet"

    def write(**columns: list[Any]) -> Path:
        parquet.write_table(pyarrow.table(columns), path)
        return path

    assert load_documents(write(id=[1, 2], title=["T", None], text=["a", "b"])) == [
        Document("T", "a"),
        Document("", "b"),
    ]
    assert load_documents(write(contents=['"T"\na'])) == [Document("T", "a")]
    for columns, message in (
        ({"text": ["a", None, " "]}, "row 2: expected a non-empty string under `text`.*\n.*row 3: "),
        ({"title": ["T"], "body": ["a"]}, "row 1: expected a non-empty string under `text` .or `contents`."),
        ({"text": [1]}, "row 1: expected a non-empty string"),
    ):
        with pytest.raises(ArpoError, match=message):
            load_documents(write(**columns))
    path.write_bytes(b"PAR1 nonsense PAR1")
    with pytest.raises(ArpoError, match="cannot be read as Parquet"):
        load_documents(path)


def test_triples_become_one_passage_per_subject(tmp_path: Path) -> None:
    path = tmp_path / "kb.txt"
    path.write_text(
        "mira_tolven\tparents\tdara_tolven\nupper_kelso\tlocation\tnorth\nmira_tolven\tgender\tfemale\n\n"
        "mira_tolven\tparents\told_tolven\r\nmira_tolven\tparents\tdara_tolven\n"
    )
    assert load_documents(path) == [
        Document("mira tolven", "mira tolven: parents: dara tolven, old tolven; gender: female"),
        Document("upper kelso", "upper kelso: location: north"),
    ]
    index = memory_index(load_documents(path))
    for query in ("other half of mira tolven", "mira_tolven"):
        assert [document.title for document in index.search(query, 1)] == ["mira tolven"]


def test_many_facts_of_one_subject_make_several_passages(tmp_path: Path) -> None:
    path = tmp_path / "kb.tsv"
    path.write_text("".join(f"town\tcitizen\tperson_{number}\n" for number in range(200)))
    texts = [document.text for document in load_documents(path)]
    assert len(texts) > 1 and all(text.startswith("town: citizen: person ") for text in texts)
    assert all(len(text) <= 1000 + len("town: ") for text in texts)
    values = [value for text in texts for value in text.removeprefix("town: citizen: ").split(", ")]
    assert values == [f"person {number}" for number in range(200)]


def test_lines_that_are_not_triples(tmp_path: Path) -> None:
    path = tmp_path / "kb.txt"
    path.write_bytes(b"a\tb\tc\na\tb\n\t\t\na\t\tc\na\tb\tc\td\n\xff\tb\tc\n")
    with pytest.raises(ArpoError) as error:
        load_documents(path)
    assert [problem.split(": ")[0] for problem in str(error.value).split("\n")] == [
        f"{path}, line {number}" for number in (2, 4, 5, 6)
    ]
    assert "line 2: expected subject TAB relation TAB object, found 'a | b'" in str(error.value)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (b"{", "not JSON ("),
        (b"\xff", "not JSON ('utf-8' codec"),
        (b"[1]", "expected a JSON object, got list"),
        (b"[" * 100_000, "not JSON ("),
        (b'{"title": "T"}', "expected a non-empty string under `text`"),
        (b'{"text": " "}', "expected a non-empty string under `text`"),
        (b'{"contents": 3}', "expected a non-empty string under `text`"),
        (b'{"text": "a", "title": 3}', "expected a string under `title`, found int"),
        (b'{"text": "\\ud800"}', "holds half a character"),
    ],
)
def test_a_bad_document_is_reported_with_file_and_line(row: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "docs.jsonl"
    path.write_bytes(json.dumps({"text": "fine"}).encode() + b"\n" + row)
    with pytest.raises(ArpoError) as error:
        load_documents(path)
    assert str(error.value).startswith(f"{path}, line 2: {message}")


def test_bad_documents_are_reported_together_up_to_a_limit(tmp_path: Path) -> None:
    path = tmp_path / "docs.jsonl"
    path.write_text('{"text": "fine"}\n' + "1\n" * 3 + '{"text": "fine"}\n' + "2\n")
    with pytest.raises(ArpoError) as error:
        load_documents(path)
    assert [problem.split(": ")[0] for problem in str(error.value).split("\n")] == [
        f"{path}, line {number}" for number in (2, 3, 4, 6)
    ]
    path.write_text("1\n" * 30)
    with pytest.raises(ArpoError) as error:
        load_documents(path)
    assert str(error.value).split("\n")[-2:] == [
        f"{path}, line 20: expected a JSON object, got int",
        "(only the first 20 are shown)",
    ]


def test_missing_files_of_documents(tmp_path: Path) -> None:
    for name in ("none.jsonl", "none.json", "none.parquet", "none.txt"):
        with pytest.raises(ArpoError, match=f"{name}: there is no such file"):
            load_documents(tmp_path / name)
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ArpoError, match="holds no documents"):
        load_documents(tmp_path / "empty.jsonl")
