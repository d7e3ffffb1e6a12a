"""GSM8K solutions as programs, and as traces whose programs were run."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from cli_runs import call
from traces import formats, write_rows

from arpo.agent.traces import read_traces
from arpo.cli.display import ConsoleReporter
from arpo.data.gsm8k import NoProgram, build_program
from arpo.errors import ArpoError
from arpo.rewards import format_ok
from arpo.training.collect import gsm8k_traces
from arpo.types import Kind

CLIPS = "Natalia sold clips to 48 of her friends in April, and then half as many clips in May. How many altogether?"
SOLD = "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\nShe sold 48+24 = <<48+24=72>>72 clips altogether.\n#### 72"


def program(question: str, solution: str) -> str:
    return build_program(question, solution).code


def test_results_of_earlier_steps_become_variables() -> None:
    found = build_program(CLIPS, SOLD)
    assert found.code == "v1 = 48/2\nv2 = 48+v1\nprint(v2)"
    assert found.thought == "Natalia sold 48/2 clips in May. She sold 48+24 clips altogether."
    assert found.answer == "72"


def test_numbers_that_the_question_names_stay() -> None:
    """It has 5 boxes of 4; the 20 that comes out is also a number of the question's."""
    solution = "<<5*4=20>>20\n<<20+20=40>>40\n<<40-3=37>>37\n#### 37"
    assert program("5 boxes of 4, and 20 more.", solution) == "v1 = 5*4\nv2 = 20+20\nv3 = v2-3\nprint(v3)"
    assert program("5 boxes of 4 twice.", solution) == "v1 = 5*4\nv2 = v1+v1\nv3 = v2-3\nprint(v3)"


@pytest.mark.parametrize(
    ("annotation", "line"),
    [
        ("<<$1,200*2=2400>>", "v1 = 1200*2"),
        ("<<50%*8=4>>", "v1 = (50/100)*8"),
        ("<<.5*8=4>>", "v1 = .5*8"),
        ("<<2x3=6>>", "v1 = 2*3"),
        ("<<(1+2)/4=.75>>", "v1 = (1+2)/4"),
        ("<<6\u00f72\u00d73=9>>", "v1 = 6/2*3"),
    ],
)
def test_annotations_are_written_as_python(annotation: str, line: str) -> None:
    value = annotation.rstrip(">").rpartition("=")[2]
    assert program("How many?", f"{annotation}{value}\n#### {value}") == f"{line}\nprint(v1)"


def test_the_last_step_that_gives_the_answer_is_printed() -> None:
    solution = "<<2*3=6>>6\n<<1+1=2>>2\n<<2+4=6>>6\n<<6*9=54>>54\n#### $6"
    assert program("4, 1 and 3", solution) == "v1 = 2*3\nv2 = 1+1\nv3 = v2+4\nprint(v3)"
    assert build_program("4, 1 and 3", "<<1000+500=1,500>>1,500\n#### 1,500").answer == "1500"


@pytest.mark.parametrize(
    ("solution", "reason"),
    [
        ("2 + 2 = 4", "no answer after ####"),
        ("2 + 2 = 4\n#### 4", "no annotated steps"),
        ("<<2+2=4>>4 + 1\n#### 5", "no step gives the answer"),
        ("<<2+a=4>>4\n#### 4", "not plain arithmetic"),
        ("<<__import__('os')=4>>4\n#### 4", "not plain arithmetic"),
        ("<<2+2=four>>\n#### four", "not a number"),
    ],
)
def test_solutions_without_a_program_have_a_reason(solution: str, reason: str) -> None:
    with pytest.raises(NoProgram, match=reason):
        build_program("How many?", solution)


def test_only_programs_with_correct_output_become_traces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        {"question": CLIPS, "answer": SOLD},
        {"question": "How many?", "answer": "<<2+2=5>>5\n#### 5"},
        {"question": "How many?", "answer": "<<2/0=5>>5\n#### 5"},
        {"question": "How many?", "answer": "<<007+1=8>>8\n#### 8"},
        {"question": "How many?", "answer": "Five.\n#### 5"},
        {"question": "How much of it?", "answer": "<<0.1+0.2=0.3>>0.3\n#### 0.3"},
        {"question": "How many?"},
    ]
    source = write_rows(tmp_path / "train.jsonl", rows)
    asyncio.run(gsm8k_traces(str(source), tmp_path / "out.jsonl", reporter=ConsoleReporter()))
    said = capsys.readouterr().out.replace("\n", " ")
    assert "2 of 7 solutions became traces" in said
    for reason in ("1 left out: the program prints", "2 left out: the program fails", "1 left out: no annotated steps"):
        assert reason in said
    assert "1 left out: no question and answer" in said
    reading = read_traces(str(tmp_path / "out.jsonl"), formats())
    assert reading.problems == ()
    assert [trace.task.id for trace in reading.traces] == ["train.jsonl:1", "train.jsonl:6"]
    assert [trace.task.answers for trace in reading.traces] == [("72",), ("0.3",)]
    assert [trace.segments[1] for trace in reading.traces] == [(Kind.TOOL, "72.0"), (Kind.TOOL, "0.30000000000000004")]
    text = "".join(
        f"<result>{text}</result>" if kind is Kind.TOOL else text for kind, text in reading.traces[0].segments
    )
    assert format_ok(text) == (True, "")
    assert text == (
        "<think>Natalia sold 48/2 clips in May. She sold 48+24 clips altogether.</think>"
        "<python>\nv1 = 48/2\nv2 = 48+v1\nprint(v2)\n</python><result>72.0</result>"
        "<think>The answer is 72.</think><answer>\\boxed{72}</answer>"
    )
    assert call("data", "traces", "gsm8k", source, "--out", tmp_path / "again.jsonl", "--limit", 6) == 0
    assert "2 of 6 solutions became traces" in capsys.readouterr().out
    assert (tmp_path / "again.jsonl").read_bytes() == (tmp_path / "out.jsonl").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again.jsonl", "out.jsonl", "train.jsonl"]
    assert json.loads((tmp_path / "out.jsonl").read_text().splitlines()[0])["messages"][0]["content"] == CLIPS


def test_existing_files_are_kept_and_no_empty_file_is_left(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "train.jsonl", [{"question": "How many?", "answer": "<<2+2=5>>5\n#### 5"}])
    with pytest.raises(ArpoError, match="prints another number"):
        asyncio.run(gsm8k_traces(str(source), tmp_path / "out.jsonl"))
    with pytest.raises(ArpoError, match="exists already"):
        asyncio.run(gsm8k_traces(str(source), source))
    assert [path.name for path in tmp_path.iterdir()] == ["train.jsonl"]
