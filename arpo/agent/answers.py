r"""Reading the answer from a model's last message.

    parse = build_answer_parser("boxed")
    parse(r"<think>..</think>It is \boxed{42}.")      # "42"

Guarantees: no message raises, except in a function of the user's. Thoughts in `<think>...</think>` are not part of an
answer, except for "tag", which has its own tags, and for functions, which get the whole message.
"""

from __future__ import annotations

from collections.abc import Callable

import regex

from arpo.config.plugins import NO_OBJECTS, Objects, load_object
from arpo.errors import ArpoError
from arpo.types import answer_text, boxed

AnswerParser = Callable[[str], str | None]
"""The answer in a model's last message, without special tokens; None if there is none."""

REGEX_SECONDS = 2.0  # for one message; a pattern that takes longer finds nothing
SETTING = "answer.parse"


def without_thoughts(message: str) -> str:
    """What follows the last thought of a message; nothing if that is not closed."""
    rest = message.rpartition("</think>")[2]
    return rest.partition("<think>")[0].strip()


def last_line(message: str) -> str | None:
    """The last line that is not blank."""
    lines = without_thoughts(message).splitlines()
    return lines[-1].strip() if lines else None


def boxed_answer(message: str) -> str | None:
    r"""The content of the last `\boxed{...}`."""
    return boxed(without_thoughts(message))


def tagged_answer(message: str) -> str | None:
    r"""The content of `\boxed{...}` in the last `<answer>...</answer>`."""
    answer = answer_text(message)
    return None if answer is None else boxed(answer)


PARSERS: dict[str, AnswerParser] = {
    "tag": tagged_answer,
    "boxed": boxed_answer,
    "last_line": last_line,
    "final_message": lambda message: without_thoughts(message) or None,
}

HOW_TO_ANSWER = {
    "tag": r"End with exactly one <answer>\boxed{...}</answer> that holds only the final answer.",
    "boxed": r"End with the final answer in \boxed{...}.",
    "last_line": "End with the final answer alone on the last line.",
}
"""What the default system prompt says about the answer."""


def build_answer_parser(parse: str, objects: Objects = NO_OBJECTS) -> AnswerParser:
    """The parser that `answer.parse` names."""
    if parse in PARSERS:
        return PARSERS[parse]
    if parse.startswith("regex:"):
        return _regex_parser(parse.removeprefix("regex:"))
    if ":" not in parse:
        known = ", ".join(PARSERS)
        raise ArpoError(f"{SETTING}: {parse!r} is none of {known}, regex:PATTERN and path/to/file.py:name")
    return _custom_parser(parse, load_object(SETTING, parse, objects))


def _regex_parser(pattern: str) -> AnswerParser:
    try:
        compiled = regex.compile(pattern, regex.DOTALL)
    except regex.error as error:
        raise ArpoError(f"{SETTING}: {pattern!r} is not a regular expression: {error}") from None

    def parse(message: str) -> str | None:
        try:
            matches = list(compiled.finditer(without_thoughts(message), timeout=REGEX_SECONDS))
        except TimeoutError:
            return None
        found = matches[-1][1 if compiled.groups else 0] if matches else None
        return None if found is None else found.strip()

    return parse


def _custom_parser(name: str, function: Callable[[str], object]) -> AnswerParser:
    def parse(message: str) -> str | None:
        answer = function(message)
        if answer is not None and not isinstance(answer, str):
            raise ArpoError(f"{SETTING}: {name} should return a text or None, got {type(answer).__name__}")
        return answer

    return parse
