"""The tool `search(query)` over documents in memory, an index on disk, a retrieval server, or the web.

    build_search(documents)                           a few thousand documents, in memory
    index_search(open_index("wiki-index"))            built by `arpo index build`: millions of passages
    http_search("http://127.0.0.1:8000/retrieve")     a server of Search-R1's protocol
    web_search("brave")                               a search engine, with a key from the environment

Guarantees: the model cannot tell these apart by the tool's name, description, arguments or the form of its results.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from arpo.tools.base import Tool
from arpo.tools.search.build import build_index, memory_index
from arpo.tools.search.corpus import load_documents
from arpo.tools.search.dense import Embedder
from arpo.tools.search.index import Index, Mode, open_index
from arpo.tools.search.remote import PROVIDERS, http_search, web_search
from arpo.tools.search.tool import search_tool
from arpo.types import Document

__all__ = [
    "PROVIDERS",
    "Document",
    "Embedder",
    "Index",
    "Mode",
    "build_index",
    "build_search",
    "http_search",
    "index_search",
    "load_documents",
    "memory_index",
    "open_index",
    "web_search",
]


def build_search(documents: Sequence[Document], results: int = 3, max_tokens: int = 512) -> Tool:
    """Return the tool over documents in memory. Calls run on the event loop, one after the other."""
    index = memory_index(documents)
    return search_tool(
        lambda query: index.search(query, results), index.version("bm25"), results, max_tokens, quick=True
    )


def index_search(index: Index, results: int = 3, mode: Mode = "bm25", max_tokens: int = 512) -> Tool:
    """Return the tool over an index. Calls run in threads, one per core; an embedding model is loaded now."""
    version = index.version(mode)
    if mode != "bm25" and index.dense is not None:
        index.dense.load()
    cores = os.cpu_count() or 1
    return search_tool(
        lambda query: index.search(query, results, mode), version, results, max_tokens, concurrency=cores
    )
