"""The tool `search(query)`, whatever finds the passages.

Guarantees: the model sees the same tool and the same kind of text for every backend: one line per hit, `Title: text`,
all of them together within the budget.
Not covered: cutting by real tokens, which happens where the tokenizer is known; the budget here is an estimate.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Unpack

from arpo.errors import ArpoError
from arpo.tools.base import CHARS_PER_TOKEN, Limits, Tool, ToolError, tool
from arpo.tools.search.bm25 import split_words
from arpo.types import Document

DESCRIPTION = "Search the document collection with a few key words; returns the best matching documents."
MAX_QUERY_CHARS = 1000

Find = Callable[[str], Sequence[Document]] | Callable[[str], Awaitable[Sequence[Document]]]


def search_tool(find: Find, backend: str, results: int, max_tokens: int, **limits: Unpack[Limits]) -> Tool:
    """Return the tool `search` over a function that finds passages for a query.

    `backend` is the version of what is searched; `limits` are fields of Tool.
    """
    if results < 1:
        raise ArpoError(f"search must return at least 1 result, not {results}")
    if max_tokens < 1:
        raise ArpoError(f"search must be allowed at least 1 token of text, not {max_tokens}")
    any_find: Any = find

    async def search_async(query: str) -> str:
        return format_results((await any_find(_check_query(query)))[:results], max_tokens)

    def search_sync(query: str) -> str:
        return format_results(any_find(_check_query(query))[:results], max_tokens)

    search = search_async if inspect.iscoroutinefunction(find) else search_sync
    search.__name__, search.__doc__ = "search", DESCRIPTION
    limits["cacheable"], limits["version"] = True, f"{backend} {results} {max_tokens}"
    return tool(**limits)(search)


def format_results(documents: Sequence[Document], max_tokens: int) -> str:
    """Return one line per document, shortened to `max_tokens` together."""
    if not documents:
        return "No results."
    lines = [format_document(document) for document in documents]
    room = max_tokens * CHARS_PER_TOKEN - (len(lines) - 1)
    return "\n".join(map(shorten, lines, split_budget([len(text) for text in lines], max(0, room))))


def format_document(document: Document) -> str:
    """Return `Title: text` without line breaks; the title is left out if the text begins with it."""
    title, text = " ".join(document.title.split()), " ".join(document.text.split())
    return text if text.startswith(title) else f"{title}: {text}"


def split_budget(wanted: Sequence[int], total: int) -> list[int]:
    """Split `total`: each gets all it wants if that fits, else an equal share of what the others leave."""
    shares = [0] * len(wanted)
    for served, at in enumerate(sorted(range(len(wanted)), key=lambda at: wanted[at])):
        shares[at] = min(wanted[at], total // (len(wanted) - served))
        total -= shares[at]
    return shares


def shorten(text: str, size: int) -> str:
    """Return at most `size` characters of a text; a cut ends in "..." after a whole word, if one fits."""
    if len(text) <= size:
        return text
    head = text[: max(0, size - 3)]
    if not text[len(head)].isspace() and " " in head:
        head = head[: head.rindex(" ")]
    return f"{head.rstrip()}..."[:size]


def _check_query(query: str) -> str:
    query = query[:MAX_QUERY_CHARS]
    if not split_words(query):
        raise ToolError("the query is empty; give the words to search for")
    return query
