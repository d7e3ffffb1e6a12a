r"""GSM8K's annotated solutions as programs: `48/2 = <<48/2=24>>24 clips` becomes a line of Python and a thought.

    Natalia sold 48/2 = <<48/2=24>>24 clips in May.               v1 = 48/2
    Natalia sold 48+24 = <<48+24=72>>72 clips altogether.         v2 = 48+v1
    #### 72                                                       print(v2)

A number that an earlier step gave, and that the question does not name, becomes that step's variable: what the program
computes need not be known to whoever writes it. For the same reason the thought is the solution without its results,
where these stand right behind their annotations.

Promises: nothing but numbers, brackets and the signs of arithmetic gets into a program. The same row gives the same
program. Does not cover: whether it is right; running it tells.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from arpo.data.tasks import text_after

_ANNOTATION = re.compile(r"<<([^<>=]*)=([^<>]*)>>")
_RESULT = re.compile(r"\s*\$?[\d.,]*\d")
_NUMBER = re.compile(r"(?<![\w.])(?:\d+(?:\.\d+)?|\.\d+)(?![\w.])")
_ARITHMETIC = re.compile(r"[-+*/().\d\s]+")


class NoProgram(ValueError):
    """A solution that no program can be made of, and why."""


@dataclass(frozen=True, slots=True)
class Program:
    """A solution: what to think, the code that computes the answer, and the answer."""

    thought: str
    code: str
    answer: str


def make_program(question: str, solution: str) -> Program:
    """The program of one row; raises NoProgram with a reason that can be counted."""
    try:
        answer = text_after(solution, "####").replace(",", "").lstrip("$")
    except ValueError:
        raise NoProgram("no answer after ####") from None
    if _value(answer) is None:
        raise NoProgram("the answer is not a number")
    steps = [(_expression(left), _plain(right)) for left, right in _ANNOTATION.findall(solution)]
    if not steps:
        raise NoProgram("no annotated steps")
    values = [_value(right) for _, right in steps]
    last = max((number for number, value in enumerate(values) if value == _value(answer)), default=None)
    if last is None:
        raise NoProgram("no step gives the answer")
    given = {_value(number) for number in _NUMBER.findall(_plain(question))}
    known: dict[float, str] = {}
    lines = []
    for number in range(last + 1):
        lines.append(f"v{number + 1} = {_NUMBER.sub(lambda found: _named(found[0], known), steps[number][0])}")
        value = values[number]
        if value is not None and value not in given:
            known[value] = f"v{number + 1}"
    lines.append(f"print(v{last + 1})")
    return Program(_thought(solution), "\n".join(lines), answer)


def _named(number: str, known: dict[float, str]) -> str:
    return known.get(float(number), number)


def _expression(text: str) -> str:
    """One side of an annotation as Python."""
    text = re.sub(r"(?<![\d.])(\d+(?:\.\d+)?|\.\d+)%", r"(\1/100)", _plain(text))
    text = text.replace("\u00d7", "*").replace("x", "*").replace("\u00f7", "/").strip()
    if not _ARITHMETIC.fullmatch(text):
        raise NoProgram("a step is not plain arithmetic")
    return text


def _plain(text: str) -> str:
    """Without dollar signs and commas in numbers."""
    return re.sub(r"(?<=\d),(?=\d{3})", "", text.replace("$", ""))


def _value(text: str) -> float | None:
    try:
        return float(text.strip().rstrip("%"))
    except ValueError:
        return None


def _thought(solution: str) -> str:
    lines = (_without_results(line).strip() for line in solution.rpartition("####")[0].splitlines())
    return " ".join(filter(None, lines))


def _without_results(line: str) -> str:
    """The line without its annotations, and without the numbers that stand right behind them."""
    text, *rest = re.split(r"<<[^<>]*>>", line)
    for part in rest:
        found = _RESULT.match(part)
        if found:
            text, part = text.rstrip(" $").removesuffix("=").rstrip(), part[found.end() :]
        text += part
    return text
