"""Reading answers from a model's last message."""

from __future__ import annotations

from pathlib import Path

import pytest

from arpo.agent.answers import build_answer_parser
from arpo.errors import ArpoError

MESSAGE = "<think>Is it \\boxed{1}?\n2</think>\n\nThe sum is \\boxed{42}.\nSo: 42\n"


@pytest.mark.parametrize(
    ("parse", "message", "answer"),
    [
        ("tag", "<think>a</think><answer>\\boxed{42}</answer>", "42"),
        ("tag", MESSAGE, None),
        ("tag", "<answer>42</answer>", None),
        ("boxed", MESSAGE, "42"),
        ("boxed", "<think>\\boxed{1}</think>none", None),
        ("boxed", "<think>it never ends \\boxed{1}", None),
        ("last_line", MESSAGE, "So: 42"),
        ("last_line", " \n ", None),
        ("final_message", MESSAGE, "The sum is \\boxed{42}.\nSo: 42"),
        ("final_message", "<think>only thoughts</think>", None),
        ("regex:So: (\\d+)", MESSAGE, "42"),
        ("regex:\\d+", MESSAGE, "42"),
        ("regex:x(\\d)?", "x", None),
        ("regex:nothing", MESSAGE, None),
    ],
)
def test_the_ways_to_read_an_answer(parse: str, message: str, answer: str | None) -> None:
    assert build_answer_parser(parse)(message) == answer


def test_a_pattern_that_backtracks_without_end_finds_nothing() -> None:
    assert build_answer_parser("regex:(a|aa)+$")("a" * 5000 + "b") is None


def test_a_function_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def last_word(message):\n    return message.split()[-1]\ndef wrong(message):\n    return 3\n"
    )
    assert build_answer_parser(f"{tmp_path / 'mine.py'}:last_word")("so it is 42") == "42"
    with pytest.raises(ArpoError, match=r"answer\.parse: .*:wrong should return a text or None, got int"):
        build_answer_parser(f"{tmp_path / 'mine.py'}:wrong")("x")


@pytest.mark.parametrize(
    ("parse", "error"),
    [("boxd", "'boxd' is none of tag, boxed, last_line"), ("regex:(", "'\\(' is not a regular expression")],
)
def test_mistakes_are_named(parse: str, error: str) -> None:
    with pytest.raises(ArpoError, match=error):
        build_answer_parser(parse)
