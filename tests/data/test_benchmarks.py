"""The benchmark registry: every set is read in its published columns and as a plain file; nothing needs the network."""

from __future__ import annotations

import base64
import json
import re
import sys
from itertools import cycle
from pathlib import Path
from typing import Any, get_args

import pytest
from questions import bare

from arpo.data.benchmarks import BENCHMARKS, Metric, load_benchmark
from arpo.errors import ArpoError
from arpo.types import Task

CANARY = "a key of its own"


def covered(text: str) -> str:
    return base64.b64encode(bytes(a ^ b for a, b in zip(text.encode(), cycle(CANARY.encode()), strict=False))).decode()


# One row in the columns of each set as it is published, and what must be read from it.
PUBLISHED: dict[str, tuple[dict[str, Any], Task]] = {
    "aime24": (
        {"id": 60, "problem": "Q?", "solution": "so 204", "answer": "204", "url": "", "year": "2024"},
        Task("60", "Q?", ("204",)),
    ),
    "aime25": ({"problem": "Q?", "answer": "70", "id": "0"}, Task("0", "Q?", ("70",))),
    "math500": (
        {"problem": "Q?", "solution": "..", "answer": "p - q", "subject": "Algebra", "level": 5, "unique_id": "t/1"},
        Task("t/1", "Q?", ("p - q",), "level 5"),
    ),
    "gsm8k": ({"question": "Q?", "answer": "2+2 = <<2+2=4>>4\n#### 4"}, Task("f.jsonl:1", "Q?", ("4",))),
    "math": (
        {"problem": "Q?", "level": "Level 2", "solution": "\\boxed{1}, so $\\boxed{\\frac{1}{2}}$.", "type": "Algebra"},
        Task("f.jsonl:1", "Q?", ("\\frac{1}{2}",), "Level 2"),
    ),
    "webwalker": (
        {"question": "Q?", "answer": "A", "root_url": "https://x", "info": {"difficulty_level": "easy"}},
        Task("f.jsonl:1", "Q?", ("A",), "easy"),
    ),
    "hotpotqa": (
        {"id": "dev_0", "question": "Q?", "golden_answers": ["yes"], "metadata": {"level": "hard"}},
        Task("dev_0", "Q?", ("yes",), "hard"),
    ),
    "2wiki": (
        {"id": "dev_0", "question": "Q?", "golden_answers": ["NYC", "New York"], "metadata": {"type": "inference"}},
        Task("dev_0", "Q?", ("NYC", "New York"), "inference"),
    ),
    "musique": (
        {"id": "d", "question": "Q?", "golden_answers": ["A", "B"], "metadata": {}},
        Task("d", "Q?", ("A", "B")),
    ),
    "bamboogle": ({"id": "t", "question": "Q?", "golden_answers": ["A"]}, Task("t", "Q?", ("A",))),
    "gaia": (
        {"task_id": "g", "Question": "Q?", "Level": "2", "Final answer": "17", "file_name": ""},
        Task("g", "Q?", ("17",), "level 2"),
    ),
    "hle": (
        {
            "id": "h",
            "question": "Q?",
            "image": "",
            "answer": "B",
            "answer_type": "multipleChoice",
            "category": "Physics",
        },
        Task("h", "Q?", ("B",), "Physics"),
    ),
    "xbench": (
        {"id": "1", "prompt": covered("谁?"), "answer": covered("肖亮"), "canary": CANARY},
        Task("1", "谁?", ("肖亮",)),
    ),
}


def file_of(tmp_path: Path, *rows: dict[str, Any]) -> str:
    path = tmp_path / "f.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def test_all_thirteen_benchmarks_are_described() -> None:
    assert set(BENCHMARKS) == set(PUBLISHED)
    assert len(BENCHMARKS) == 13
    for benchmark in BENCHMARKS.values():
        assert benchmark.source.startswith("hf:")
        assert benchmark.source.count(":") in (2, 3)  # the split is always said
        assert benchmark.metric in get_args(Metric)
        assert benchmark.size > 0
        assert benchmark.page.startswith("https://huggingface.co/datasets/") and ":" not in benchmark.page[8:]
    assert [name for name, benchmark in BENCHMARKS.items() if benchmark.gated] == ["gaia", "hle"]


@pytest.mark.parametrize("name", PUBLISHED)
def test_rows_as_they_are_published(tmp_path: Path, name: str) -> None:
    row, task = PUBLISHED[name]
    assert bare(load_benchmark(name, file_of(tmp_path, row))) == (task,)


@pytest.mark.parametrize("name", PUBLISHED)
def test_files_with_a_question_and_an_answer(tmp_path: Path, name: str) -> None:
    answer: Any = "#### 4" if name == "gsm8k" else ["4", "four"]
    expected = ("4",) if name == "gsm8k" else ("4", "four")
    assert bare(load_benchmark(name, file_of(tmp_path, {"question": "Q?", "answer": answer}))) == (
        Task("f.jsonl:1", "Q?", expected),
    )


@pytest.mark.parametrize(("name", "column"), [("gaia", "file_name"), ("hle", "image")])
def test_questions_that_need_a_file_or_an_image_are_left_out(tmp_path: Path, name: str, column: str) -> None:
    row, task = PUBLISHED[name]
    assert bare(load_benchmark(name, file_of(tmp_path, {**row, column: "x.png"}, row))) == (task,)


def test_musique_with_aliases_and_hotpotqa_in_their_original_layout(tmp_path: Path) -> None:
    row = {"id": "2hop", "question": "Q?", "answer": "G. Hall", "answer_aliases": ["Hall"], "answerable": True}
    assert bare(load_benchmark("musique", file_of(tmp_path, row))) == (Task("2hop", "Q?", ("G. Hall", "Hall")),)
    row = {"_id": "5a", "question": "Q?", "answer": "no", "level": "easy", "type": "bridge", "context": []}
    assert bare(load_benchmark("hotpotqa", file_of(tmp_path, row))) == (Task("5a", "Q?", ("no",), "easy"),)


@pytest.mark.parametrize(
    ("name", "change", "problem"),
    [
        ("math", {"solution": "no box"}, "no '\\\\boxed' in 'no box'"),
        ("math", {"solution": None}, "no column 'answer' (there are: 'problem', 'level', 'solution', 'type')\n"),
        ("gsm8k", {"answer": "4"}, "no '####' in '4'"),
        ("xbench", {"answer": "!" + covered("x")}, "line 1: "),
        ("xbench", {"answer": covered("ab谁")[:4]}, "line 1: "),
        ("xbench", {"answer": 3}, "expected encrypted text, got int"),
    ],
)
def test_a_row_that_does_not_fit_is_named(tmp_path: Path, name: str, change: dict[str, Any], problem: str) -> None:
    row, task = PUBLISHED[name]
    path = file_of(tmp_path, {**row, **change}, row)
    with pytest.raises(ArpoError) as caught:
        load_benchmark(name, path)
    assert f"{path}, line 1: " in str(caught.value) and problem in str(caught.value)
    second = load_benchmark(name, path, bad_rows="skip")
    assert [(t.question, t.answers) for t in second] == [(task.question, task.answers)]


def test_an_answer_in_an_fbox(tmp_path: Path) -> None:
    row = {**PUBLISHED["math"][0], "solution": "Thus \\fbox{4}."}
    assert load_benchmark("math", file_of(tmp_path, row))[0].answers == ("4",)
    row["answer"] = "four"  # where there is one, the solution is not looked at
    assert load_benchmark("math", file_of(tmp_path, row))[0].answers == ("four",)


def test_an_unknown_benchmark_and_one_that_cannot_be_downloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ArpoError, match="there is no benchmark 'gsm9k'; there are: aime24, aime25, "):
        load_benchmark("gsm9k")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ArpoError, match="pip install datasets") as caught:
        load_benchmark("gsm8k")
    assert "gated" not in str(caught.value)
    with pytest.raises(ArpoError, match=r"GAIA is gated: its terms are at https://huggingface.co/datasets/gaia-benc"):
        load_benchmark("gaia")


def test_the_table_in_the_docs_is_the_registry() -> None:
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")
    table = re.findall(r"^\| `(\w+)` \| ([\d,]+) \| (\S+?)( \(gated\))? \| (\w+) \|", page, flags=re.MULTILINE)
    assert [
        (name, int(size.replace(",", "")), source, bool(gated), metric) for name, size, source, gated, metric in table
    ] == [
        (name, b.size, b.page.removeprefix("https://huggingface.co/datasets/"), b.gated, b.metric)
        for name, b in BENCHMARKS.items()
    ]
