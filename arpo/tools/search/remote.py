"""Search by a retrieval server of one's own, or by a web search engine.

Guarantees: replies are treated as hostile: they are bounded, only texts in the expected fields are used, and HTML tags
are dropped. Any failure is ToolUnavailable with its cause. An API key is sent only to its provider, redirects are not
followed, and neither the key nor the secrets of a server's URL are in an error, result or repr.
Not covered: whether an answer is true, and whether it is the same tomorrow.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from arpo.config.masking import masked
from arpo.errors import ArpoError
from arpo.net.http import HttpClient, HttpError
from arpo.net.keys import read_api_key
from arpo.tools.base import Tool, ToolUnavailable
from arpo.tools.search.corpus import split_contents
from arpo.tools.search.tool import search_tool
from arpo.types import Document

MAX_BYTES = 4_000_000  # of a reply, decompressed
MAX_WEB_RESULTS = 20  # allowed by every provider
MAX_WEB_WORDS, MAX_WEB_CHARS = 50, 400
_TAG = re.compile(r"</?[a-zA-Z][^<>]*>")
_CAUSES = {
    401: "access was refused",
    403: "access was refused",
    404: "there is nothing at this address",
    429: "too many requests",
}


@dataclass(frozen=True, slots=True)
class Provider:
    """A web search engine: its URL, the environment variable of its key, its requests and replies."""

    url: str
    variable: str
    request: Callable[[str, str, int], dict[str, Any]]  # key, query, results
    hits: Callable[[Any], Any]  # the list of hits in a reply, or None
    text: str  # the field of a hit that holds its text


PROVIDERS: Mapping[str, Provider] = {
    "serper": Provider(
        "https://google.serper.dev/search",
        "SERPER_API_KEY",
        lambda key, query, results: {
            "method": "POST",
            "headers": {"X-API-KEY": key},
            "json": {"q": query, "num": results},
        },
        lambda answer: answer.get("organic"),
        "snippet",
    ),
    "tavily": Provider(
        "https://api.tavily.com/search",
        "TAVILY_API_KEY",
        lambda key, query, results: {
            "method": "POST",
            "headers": {"Authorization": f"Bearer {key}"},
            "json": {"query": query, "max_results": results},
        },
        lambda answer: answer.get("results"),
        "content",
    ),
    "brave": Provider(
        "https://api.search.brave.com/res/v1/web/search",
        "BRAVE_API_KEY",
        lambda key, query, results: {
            "method": "GET",
            "headers": {"X-Subscription-Token": key},
            "params": {"q": query, "count": results},
        },
        lambda answer: None if answer.get("web") is None else answer["web"].get("results"),
        "description",
    ),
}


def http_search(url: str, results: int = 3, max_tokens: int = 512, timeout: float = 10.0) -> Tool:
    """Return the tool over a server of Search-R1's protocol; `url` is the whole address with `/retrieve`."""
    client = HttpClient(
        url,
        setting="tools.search",
        example="http://127.0.0.1:8000/retrieve",
        timeout=timeout,
        max_bytes=MAX_BYTES,
        allow_userinfo=True,
    )

    async def find(query: str) -> list[Document]:
        body = {"queries": [_clean(query)], "topk": results, "return_scores": True}
        answer = await _request(client, method="POST", json=body)
        try:
            hits = answer["result"][0]
        except (LookupError, TypeError):
            hits = None
        if not isinstance(hits, list):
            raise ToolUnavailable(f"{client.name} did not answer in Search-R1's form: a list under `result`")
        found = _with_text(map(_server_hit, hits), hits, client.name)
        return [Document(client.without_secrets(hit.title), client.without_secrets(hit.text)) for hit in found]

    return search_tool(find, masked(client.url, "url"), results, max_tokens, timeout=timeout + 1, concurrency=64)


def web_search(
    provider: str, results: int = 3, max_tokens: int = 512, timeout: float = 10.0, base_url: str | None = None
) -> Tool:
    """Return the tool over a web search engine (serper, tavily, brave), with the key from the environment."""
    if provider not in PROVIDERS:
        raise ArpoError(f"there is no search provider {provider!r}; there are: {', '.join(PROVIDERS)}")
    if results > MAX_WEB_RESULTS:
        raise ArpoError(f"a web search returns at most {MAX_WEB_RESULTS} results, not {results}")
    engine = PROVIDERS[provider]
    key = read_api_key(engine.variable, provider)
    client = HttpClient(base_url or engine.url, setting=provider, timeout=timeout, max_bytes=MAX_BYTES, trust_env=True)

    async def find(query: str) -> list[Document]:
        words = " ".join(_clean(query).split()[:MAX_WEB_WORDS])[:MAX_WEB_CHARS]
        answer = await _request(client, f"; check {engine.variable}", **engine.request(key, words, results))
        try:
            hits = engine.hits(answer)
        except (AttributeError, TypeError):
            hits = ""
        if not isinstance(hits, list | None):
            raise ToolUnavailable(f"{client.name} did not answer in {provider}'s form")
        found = _with_text((_web_hit(hit, engine.text) for hit in hits or []), hits or [], client.name)
        return [Document(hit.title.replace(key, "***"), hit.text.replace(key, "***")) for hit in found]

    return search_tool(find, provider, results, max_tokens, timeout=timeout + 1, concurrency=8)


async def _request(client: HttpClient, hint: str = "", **request: Any) -> Any:
    """Send a request and return the JSON in the reply; `hint` says what to do when access is refused."""
    try:
        return await client.request_json(**request)
    except HttpError as error:
        if error.status is None:
            raise ToolUnavailable(str(error)) from None
        cause = _CAUSES.get(error.status, "the request failed")
        raise ToolUnavailable(
            f"{client.name}: {cause} (HTTP status {error.status}){hint if error.status in (401, 403) else ''}"
        ) from None


def _clean(query: str) -> str:
    return query.encode("utf-8", "replace").decode().replace("\0", " ")


def _server_hit(hit: Any) -> Document | None:
    """Return a passage of Search-R1's server, with or without the object that holds its score."""
    document = hit.get("document", hit) if isinstance(hit, dict) else None
    if not isinstance(document, dict):
        return None
    if isinstance(document.get("contents"), str) and not isinstance(document.get("text"), str):
        title, text = split_contents(document["contents"])
        return Document(_text(document, "title") or title, text)
    return Document(_text(document, "title"), _text(document, "text"))


def _web_hit(hit: Any, text: str) -> Document | None:
    if not isinstance(hit, dict):
        return None
    return Document(*(html.unescape(_TAG.sub("", _text(hit, name))) for name in ("title", text)))


def _text(values: Mapping[str, Any], name: str) -> str:
    value = values.get(name)
    return value if isinstance(value, str) else ""


def _with_text(documents: Iterable[Document | None], hits: list[Any], name: str) -> list[Document]:
    """Return the documents with a text or title; ToolUnavailable if there are hits but none of these."""
    found = [document for document in documents if document and (document.title + document.text).strip()]
    if hits and not found:
        raise ToolUnavailable(f"{name} answered with hits that have no text")
    return found
