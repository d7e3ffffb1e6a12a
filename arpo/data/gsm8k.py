r"""GSM8K's annotated solutions as Python programs: each `<<48/2=24>>` becomes a line of code.

    Natalia sold 48/2 = <<48/2=24>>24 clips in May.               v1 = 48/2
    Natalia sold 48+24 = <<48+24=72>>72 clips altogether.         v2 = 48+v1
    #### 72                                                       print(v2)

A number that an earlier step computed and that is not in the question becomes that step's variable, so that whoever
writes the program need not know intermediate results. The thought is the solution without those results, for the same
reason.

Guarantees: a program contains only numbers, brackets and arithmetic operators. The same row gives the same program.
Not covered: whether the program is correct; running it tells.
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
    """A solution that cannot be turned into a program, with the reason."""


@dataclass(frozen=True, slots=True)
class Program:
    """A solution: the thought, the code that computes the answer, and the answer."""

    thought: str
    code: str
    answer: str


def build_program(question: str, solution: str) -> Program:
    """The program of one row; raises `NoProgram` with one of a few reasons."""
    try:
        answer = text_after(solution, "####").replace(",", "").lstrip("$")
    except ValueError:
        raise NoProgram("no answer after ####") from None
    if _value(answer) is None:
        raise NoProgram("the answer is not a number")
    steps = [(_expression(left), _value(_clean(right))) for left, right in _ANNOTATION.findall(solution)]
    if not steps:
        raise NoProgram("no annotated steps")
    last = max((number for number, (_, value) in enumerate(steps) if value == _value(answer)), default=None)
    if last is None:
        raise NoProgram("no step gives the answer")
    given = {_value(number) for number in _NUMBER.findall(_clean(question))}
    variables: dict[float, str] = {}
    lines = []
    for number, (expression, value) in enumerate(steps[: last + 1], 1):
        code = _NUMBER.sub(lambda found: variables.get(float(found[0]), found[0]), expression)
        lines.append(f"v{number} = {code}")
        if value is not None and value not in given:
            variables[value] = f"v{number}"
    lines.append(f"print(v{last + 1})")
    return Program(_thought(solution), "\n".join(lines), answer)


def _expression(text: str) -> str:
    """The left side of an annotation as Python."""
    text = re.sub(r"(?<![\d.])(\d+(?:\.\d+)?|\.\d+)%", r"(\1/100)", _clean(text))
    text = text.replace("\u00d7", "*").replace("x", "*").replace("\u00f7", "/").strip()
    if not _ARITHMETIC.fullmatch(text):
        raise NoProgram("a step is not plain arithmetic")
    return text


def _clean(text: str) -> str:
    """The text without dollar signs and without commas in numbers."""
    return re.sub(r"(?<=\d),(?=\d{3})", "", text.replace("$", ""))


def _value(text: str) -> float | None:
    try:
        return float(text.strip().rstrip("%"))
    except ValueError:
        return None


def _thought(solution: str) -> str:
    """The solution without annotations and without the results right after them, in one line."""
    lines = []
    for line in solution.rpartition("####")[0].splitlines():
        text, *rest = re.split(r"<<[^<>]*>>", line)
        for part in rest:
            if found := _RESULT.match(part):
                text, part = text.rstrip(" $").removesuffix("=").rstrip(), part[found.end() :]
            text += part
        lines.append(text.strip())
    return " ".join(filter(None, lines))
