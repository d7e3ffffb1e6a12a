"""What every kind of search has in common: what the model is told, what it may ask, and how hits are shown.

Promises: whatever finds the passages, the model sees the same tool and the same kind of text: one line per hit,
`Title: text`, all of them together within the budget.
Does not cover: cutting by real tokens, which happens where the tokenizer is known; the budget here is an estimate.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Unpack

from arpo.errors import ArpoError
from arpo.tools.base import CHARS_PER_TOKEN, Limits, Tool, ToolError, tool
from arpo.tools.search.bm25 import words
from arpo.types import Document

DESCRIPTION = "Search the document collection with a few key words; returns the best matching documents."
MAX_QUERY_CHARS = 1000

Find = Callable[[str], Sequence[Document]] | Callable[[str], Awaitable[Sequence[Document]]]


def search_tool(find: Find, results: int, max_tokens: int, **limits: Unpack[Limits]) -> Tool:
    """The tool `search` over whatever finds the `results` best passages for a query; `limits` are fields of Tool."""
    if results < 1:
        raise ArpoError(f"search must return at least 1 result, not {results}")
    if max_tokens < 1:
        raise ArpoError(f"search must be allowed at least 1 token of text, not {max_tokens}")
    any_find: Any = find

    async def search_later(query: str) -> str:
        return show((await any_find(_checked(query)))[:results], max_tokens)

    def search_now(query: str) -> str:
        return show(any_find(_checked(query))[:results], max_tokens)

    search = search_later if inspect.iscoroutinefunction(find) else search_now
    search.__name__, search.__doc__ = "search", DESCRIPTION
    version = limits.get("version", "")
    limits["version"] = f"{version} {results} {max_tokens}"
    return tool(**limits)(search)


def show(documents: Sequence[Document], max_tokens: int) -> str:
    """One line per document, cut where they would take more than `max_tokens` together."""
    if not documents:
        return "No results."
    lines = [line(document) for document in documents]
    room = max_tokens * CHARS_PER_TOKEN - (len(lines) - 1)
    return "\n".join(map(cut, lines, fair_shares([len(text) for text in lines], max(0, room))))


def line(document: Document) -> str:
    """`Title: text` without line breaks; the title is left out where the text begins with it."""
    title, text = " ".join(document.title.split()), " ".join(document.text.split())
    return text if text.startswith(title) else f"{title}: {text}"


def fair_shares(wanted: Sequence[int], total: int) -> list[int]:
    """What each gets of `total`: all that it wants if that fits, else an equal part of what the others leave."""
    shares = [0] * len(wanted)
    for served, at in enumerate(sorted(range(len(wanted)), key=lambda at: wanted[at])):
        shares[at] = min(wanted[at], total // (len(wanted) - served))
        total -= shares[at]
    return shares


def cut(text: str, size: int) -> str:
    """The text in at most `size` characters; what is cut ends in "..." behind a whole word, if one fits."""
    if len(text) <= size:
        return text
    kept = text[: max(0, size - 3)]
    if not text[len(kept)].isspace() and " " in kept:
        kept = kept[: kept.rindex(" ")]
    return f"{kept.rstrip()}..."[:size]


def _checked(query: str) -> str:
    query = query[:MAX_QUERY_CHARS]
    if not words(query):
        raise ToolError("the query is empty; give the words to search for")
    return query
