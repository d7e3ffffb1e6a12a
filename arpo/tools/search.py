"""Search over documents held in memory (BM25).

Promises: the same query on the same documents gives the same text, always: equal scores are ordered as the documents
are. A document that shares no word with the query is never returned.
Does not cover: stemming, synonyms, languages written without spaces, collections too large for memory.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from arpo.tools.base import Tool, ToolError, tool
from arpo.types import ArpoError, Document


def _without_jax(name: str) -> Any:
    """Import a module that would use JAX if it could: merely importing that takes three quarters of a GPU's memory."""
    before = sys.modules.get("jax")
    sys.modules["jax"] = None  # type: ignore[assignment]
    try:
        return importlib.import_module(name)
    finally:
        if before is None:
            del sys.modules["jax"]
        else:
            sys.modules["jax"] = before


bm25s = _without_jax("bm25s")

MAX_QUERY_CHARS = 1000
MAX_QUERY_WORDS = 32  # distinct known words; a query is a model's text, and each word costs one pass over its documents
_WORD = re.compile(r"\w+")


def build_search(documents: Sequence[Document], results: int = 3, max_chars: int = 1000) -> Tool:
    """The tool `search`: the `results` best documents for a query, one per line of at most `max_chars` characters."""
    lines = [_line(document, max_chars) for document in documents]
    vocabulary: dict[str, int] = {}
    word_ids = [
        [vocabulary.setdefault(word, len(vocabulary)) for word in _words(f"{document.title} {document.text}")]
        for document in documents
    ]
    if not vocabulary:
        raise ArpoError("search needs at least one document with a word in it")
    if results < 1:
        raise ArpoError(f"search must return at least 1 result, not {results}")
    index = bm25s.BM25()
    index.index((word_ids, vocabulary), create_empty_token=False, show_progress=False)

    @tool(quick=True)
    def search(query: str) -> str:
        """Search the document collection with a few key words; returns the best matching documents."""
        words = _words(query[:MAX_QUERY_CHARS])
        if not words:
            raise ToolError("the query is empty; give the words to search for")
        known = [vocabulary[word] for word in dict.fromkeys(words) if word in vocabulary][:MAX_QUERY_WORDS]
        if not known:
            return "No results."
        return "\n".join(lines[i] for i in _best(index.get_scores_from_ids(known), results))

    return search


def load_documents(path: str | Path) -> list[Document]:
    """Documents from a file of JSON lines, each with `text` and, optionally, `title`."""
    try:
        rows = Path(path).expanduser().read_bytes().split(b"\n")
    except OSError as error:
        raise ArpoError(f"cannot read the documents in {path}: {error.strerror}") from error
    documents = [_document(row, f"{path}, line {number}") for number, row in enumerate(rows, 1) if row.strip()]
    if not documents:
        raise ArpoError(f"{path} holds no documents; expected JSON lines with a `text` each")
    return documents


def _document(row: bytes, where: str) -> Document:
    try:
        value: Any = json.loads(row)
    except (ValueError, RecursionError) as error:
        raise ArpoError(f'{where}: expected a JSON object like {{"title": "...", "text": "..."}}: {error}') from error
    if not isinstance(value, dict):
        raise ArpoError(f"{where}: expected a JSON object, found {type(value).__name__}")
    title, text = value.get("title"), value.get("text")
    if not isinstance(text, str) or not text.strip():
        raise ArpoError(f"{where}: expected a non-empty string under `text`")
    if title is not None and not isinstance(title, str):
        raise ArpoError(f"{where}: expected a string under `title`, found {type(title).__name__}")
    return Document(title or "", text)


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def _line(document: Document, max_chars: int) -> str:
    title, text = " ".join(document.title.split()), " ".join(document.text.split())
    line = text if text.startswith(title) else f"{title}: {text}"
    return line if len(line) <= max_chars else f"{line[:max_chars]}..."


def _best(scores: np.ndarray[Any, Any], count: int) -> list[int]:
    """The documents with the highest scores above 0, best first, equal ones in their own order. Uses up `scores`."""
    best: list[int] = []
    while len(best) < count and scores[top := int(scores.argmax())] > 0:  # for few results far faster than sorting
        best.append(top)
        scores[top] = 0
    return best
