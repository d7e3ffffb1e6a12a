"""Text from models, tools and users, made safe to show on a terminal, in a figure or in Markdown."""

from __future__ import annotations

from collections.abc import Sequence


def printable(text: str) -> str:
    """The text with characters that could control a terminal or hide (control, bidi, surrogate) written as escapes."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def one_line(text: str) -> str:
    """Printable text with line breaks replaced by spaces."""
    return printable(text).replace("\n", " ")


def markdown_cell(text: str) -> str:
    """The text as Markdown shows it literally: one line, special characters escaped."""
    return "".join(f"\\{c}" if c in "\\`*_[]<>|#$&~" else c for c in one_line(text))


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a Markdown table. Untrusted cells must have been through `markdown_cell`."""
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(cells) + " |" for cells in lines]
