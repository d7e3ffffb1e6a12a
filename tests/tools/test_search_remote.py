"""Search by retrieval servers and web search engines: requests, and hostile replies."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import re
import socket
import threading
import time
from base64 import b64encode
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from arpo.errors import ArpoError
from arpo.tools import executor
from arpo.tools.base import Tool, ToolUnavailable
from arpo.tools.cache import ToolCache
from arpo.tools.executor import Toolset
from arpo.tools.search import PROVIDERS, Document, build_search, http_search, web_search
from arpo.tools.search import remote as remote_module
from arpo.types import Fault, ToolCall

KEY = "sk-secret-4711"


@dataclass
class Server:
    """Answers every request with `status` and `body`, after `delay` seconds, and keeps what was asked."""

    url: str = ""
    status: int = 200
    body: bytes = b"{}"
    headers: dict[str, str] = field(default_factory=dict)
    delay: float = 0.0
    over: threading.Event = field(default_factory=threading.Event)
    requests: list[dict[str, Any]] = field(default_factory=list)

    def answer(self, value: Any) -> None:
        """Answer with JSON from now on."""
        self.body = json.dumps(value).encode()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A server on this machine; the environment names no proxy and all keys."""
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for provider in PROVIDERS.values():
        monkeypatch.setenv(provider.variable, f" {KEY}\n")
    served = Server()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            at = urlsplit(self.path)
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            served.requests.append(
                {
                    "method": self.command,
                    "path": at.path,
                    "params": parse_qs(at.query),
                    "headers": {name.lower(): value for name, value in self.headers.items()},
                    "json": json.loads(body) if body else None,
                }
            )
            served.over.wait(served.delay)
            self.send_response(served.status)
            for name, value in served.headers.items():
                self.send_header(name, value)
            self.end_headers()
            with contextlib.suppress(ConnectionError):  # whoever asked may have heard enough
                self.wfile.write(served.body)

        do_POST = do_GET

        def log_message(self, *args: Any) -> None: ...

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    served.url = f"http://127.0.0.1:{http.server_port}/here"
    yield served
    served.over.set()
    http.shutdown()
    http.server_close()
    thread.join()


def ask(tool: Tool, query: str = "mira tolven") -> str:
    async def wait() -> str:
        return await tool.run(query=query)

    return asyncio.run(wait())


def failure(tool: Tool, query: str = "mira tolven") -> str:
    """What the tool says when it is unavailable."""
    with pytest.raises(ToolUnavailable) as error:
        ask(tool, query)
    return str(error.value)


# A retrieval server.


def test_secrets_of_the_url_are_in_no_result(server: Server) -> None:
    url = server.url.replace("http://", "http://me:kanarie4711@") + "?index=wiki18&api_key=canary-0815-x"
    basic = b64encode(b"me:kanarie4711").decode()
    echo = {"title": f"Basic {basic}", "text": "kanarie4711 asks wiki18 for canary-0815-x"}
    server.answer({"result": [[{"document": echo}]]})
    assert ask(http_search(url)) == "Basic (masked): (masked) asks wiki18 for (masked)"
    assert "kanarie" not in http_search(url).version and "canary" not in http_search(url).version
    assert http_search(url).version == http_search(url.replace("0815", "4711")).version
    assert http_search(url).version != http_search(url.replace("wiki18", "wiki21")).version  # of what is cached
    (request,) = server.requests
    assert (request["headers"]["authorization"], request["params"]["api_key"]) == (f"Basic {basic}", ["canary-0815-x"])


def test_retrieval_speaks_search_r1(server: Server) -> None:
    server.answer(
        {
            "result": [
                [
                    {"document": {"id": "7", "contents": '"Mira Tolven"\nBorn in\nUpper Kelso.'}, "score": 12.5},
                    {"document": {"title": "Anwen", "text": "A river."}, "score": 3},
                    {"contents": "no title"},
                    {"title": "T", "text": "bare", "contents": '"X"\nnot this'},
                ]
            ]
        }
    )
    text = ask(http_search(server.url, results=4), "mira\ud800 tolven")
    assert text.split("\n") == ["Mira Tolven: Born in Upper Kelso.", "Anwen: A river.", "no title", "T: bare"]
    (request,) = server.requests
    assert (request["method"], request["path"]) == ("POST", "/here")
    assert request["json"] == {"queries": ["mira? tolven"], "topk": 4, "return_scores": True}
    assert request["headers"]["content-type"] == "application/json"


def test_no_more_is_shown_than_was_asked_for(server: Server) -> None:
    server.answer({"result": [[{"contents": f"hit {number} " + "word " * 999} for number in range(9)]]})
    lines = ask(http_search(server.url, results=2, max_tokens=30)).split("\n")
    assert [line[:6] for line in lines] == ["hit 0 ", "hit 1 "] and len("\n".join(lines)) <= 120
    server.answer({"result": [[]]})
    assert ask(http_search(server.url)) == "No results."


@pytest.mark.parametrize(
    "answer",
    [
        *(None, 3, "text", [], {}, {"result": None}, {"result": []}, {"result": {}}, {"result": "text"}),
        *({"result": [None]}, {"result": [{"a": 1}]}, {"result": ["text"]}, {"results": [[]]}),
    ],
)
def test_retrieval_answers_of_another_form(server: Server, answer: Any) -> None:
    server.answer(answer)
    assert failure(http_search(server.url)) == (
        f"{server.url} did not answer in Search-R1's form: a list under `result`"
    )


@pytest.mark.parametrize(
    "hits", [[None, 3, "text", []], [{"document": None}, {"document": [1]}], [{"contents": None, "text": 3}], [{}]]
)
def test_hits_without_text(server: Server, hits: list[Any]) -> None:
    server.answer({"result": [hits]})
    assert failure(http_search(server.url)) == f"{server.url} answered with hits that have no text"
    server.answer({"result": [[*hits, {"text": "fine", "title": {}}]]})
    assert ask(http_search(server.url)) == "fine"


@pytest.mark.parametrize(
    "body", [b"", b"<html>", b"\xff\xfe\x00", b'{"result": ', b"[" * 200_000, b'{"result": ' + b"9" * 5000 + b"}"]
)
def test_answers_that_are_not_json(server: Server, body: bytes) -> None:
    server.body = body
    assert failure(http_search(server.url)) == f"{server.url} did not answer with JSON"


@pytest.mark.parametrize("status", [200, 502])
def test_an_error_page_in_place_of_json_is_retried_and_not_cached(
    server: Server, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor, "FIRST_PAUSE_SECONDS", 0.0)
    server.status, server.body = status, b"<html>502 Bad Gateway</html>"
    call = ToolCall("search", {"query": "mira tolven"})
    with Toolset([http_search(server.url)], ToolCache(tmp_path / "c", "on")) as toolset:
        result = asyncio.run(toolset.call(call))
        assert (result.fault, result.attempts, len(server.requests)) == (Fault.INFRA, 3, 3)
        server.status = 200
        server.answer({"result": [[{"document": {"contents": "Mira\nleads it"}}]]})
        result = asyncio.run(toolset.call(call))
        assert (result.fault, result.cached) == (None, False)


def test_replies_that_are_too_large(server: Server) -> None:
    server.body = b" " * (remote_module.MAX_BYTES + 1)
    assert "sends more than 4,000,000 bytes" in failure(http_search(server.url))
    server.body, server.headers = gzip.compress(server.body), {"Content-Encoding": "gzip"}
    assert "sends more than 4,000,000 bytes" in failure(http_search(server.url))
    server.body = gzip.compress(b'{"result": [[{"text": "packed"}]]}')
    assert ask(http_search(server.url)) == "packed"
    server.body = b"not packed"
    assert failure(http_search(server.url)) == f"{server.url} sends a compression that cannot be read"


@pytest.mark.parametrize(
    ("status", "cause"),
    [
        (401, "access was refused"),
        (403, "access was refused"),
        (404, "there is nothing at this address"),
        (429, "too many requests"),
        (500, "the request failed"),
        (422, "the request failed"),
        (302, "the request failed"),
        (204, "the request failed"),
    ],
)
def test_statuses_are_reported(server: Server, status: int, cause: str) -> None:
    server.status, server.headers = status, {"Location": server.url + "/elsewhere"}
    assert failure(http_search(server.url)) == f"{server.url}: {cause} (HTTP status {status})"
    assert len(server.requests) == 1
    hint = "; check BRAVE_API_KEY" if status in (401, 403) else ""
    told = failure(web_search("brave", base_url=server.url))
    assert told == f"{server.url}: {cause} (HTTP status {status}){hint}"


def test_a_server_that_is_slow_or_not_there(server: Server) -> None:
    server.delay = 600
    tool = http_search(server.url, timeout=0.1)
    assert failure(tool) == f"{server.url} did not answer within 0.1 seconds"
    assert tool.timeout > 0.1  # its own limit comes first, and that is not the model's fault
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://user:{KEY}@127.0.0.1:{free.getsockname()[1]}/retrieve"
    told = failure(http_search(url))
    assert KEY not in told and told.endswith("/retrieve cannot be reached (ConnectError)")


@pytest.mark.parametrize("url", ["", "retrieve", "ftp://a/b", "http://", "http://[", "http://a:99999999/", "http:a"])
def test_invalid_addresses(url: str) -> None:
    with pytest.raises(ArpoError, match=r"expected an address like http://127\.0\.0\.1:8000/retrieve"):
        http_search(url)


# Web search.

HITS = [
    {"title": "Mira <b>T</b>", "TEXT": "born in <strong>Upper</strong> Kelso &amp; 1 < 2 &lt;b&gt;", "url": "http://a"},
    {"title": None, "TEXT": "second"},
    {"title": "third", "TEXT": {"no": "text"}},
    None,
]
SHOWN = ["Mira T: born in Upper Kelso & 1 < 2 <b>", "second", "third: "]
ANSWERS: dict[str, tuple[Any, str, tuple[Any, ...]]] = {
    "serper": ({"organic": "HITS"}, "snippet", ({}, {"organic": None}, {"organic": []})),
    "tavily": ({"results": "HITS"}, "content", ({}, {"results": None}, {"results": []})),
    "brave": ({"web": {"results": "HITS"}}, "description", ({}, {"web": None}, {"web": {}}, {"web": {"results": []}})),
}


def filled(provider: str, hits: Any) -> Any:
    """An answer of this provider's with these hits."""
    answer, text, _ = ANSWERS[provider]
    return json.loads(json.dumps(answer).replace('"HITS"', json.dumps(hits).replace("TEXT", text)))


@pytest.mark.parametrize("provider", PROVIDERS)
def test_web_results(server: Server, provider: str) -> None:
    server.answer(filled(provider, HITS))
    assert ask(web_search(provider, results=5, base_url=server.url)).split("\n") == SHOWN
    for nothing in ANSWERS[provider][2]:
        server.answer(nothing)
        assert ask(web_search(provider, base_url=server.url)) == "No results."


def test_requests_are_what_providers_document(server: Server) -> None:
    sent: dict[str, Any] = {}
    for provider in PROVIDERS:
        ask(web_search(provider, results=5, base_url=server.url), "who  is\nmira?")
        request = server.requests[-1]
        headers = {name: value for name, value in request["headers"].items() if KEY in value}
        sent[provider] = (request["method"], headers, request["params"], request["json"])
        assert request["headers"]["accept"] == "application/json"
        assert request["headers"].get("content-type") == (None if provider == "brave" else "application/json")
    assert sent == {
        "serper": ("POST", {"x-api-key": KEY}, {}, {"q": "who is mira?", "num": 5}),
        "tavily": ("POST", {"authorization": f"Bearer {KEY}"}, {}, {"query": "who is mira?", "max_results": 5}),
        "brave": ("GET", {"x-subscription-token": KEY}, {"q": ["who is mira?"], "count": ["5"]}, None),
    }
    assert {name: provider.url for name, provider in PROVIDERS.items()} == {
        "serper": "https://google.serper.dev/search",
        "tavily": "https://api.tavily.com/search",
        "brave": "https://api.search.brave.com/res/v1/web/search",
    }


def test_long_queries_are_cut_to_what_providers_take(server: Server) -> None:
    for query, words, characters in (("a " * 400, 50, 99), ("abcdefghij " * 80, 37, 400)):
        ask(web_search("brave", base_url=server.url), query)
        (asked,) = server.requests[-1]["params"]["q"]
        assert (len(asked.split()), len(asked)) == (words, characters)


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("answer", [None, 3, "text", [1], "HITS of 3", "HITS of text", "HITS of {}"])
def test_web_answers_of_another_form(server: Server, provider: str, answer: Any) -> None:
    wrong = {"HITS of 3": 3, "HITS of text": "text", "HITS of {}": {"a": 1}}
    server.answer(filled(provider, wrong[answer]) if isinstance(answer, str) and answer in wrong else answer)
    assert failure(web_search(provider, base_url=server.url)) == f"{server.url} did not answer in {provider}'s form"


@pytest.mark.parametrize("provider", PROVIDERS)
def test_hostile_web_answers(server: Server, provider: str) -> None:
    tool = web_search(provider, base_url=server.url)
    server.answer(filled(provider, [3, {}, {"title": " ", "TEXT": ["x"]}]))
    assert "hits that have no text" in failure(tool)
    server.body = b"{" * 3
    assert "did not answer with JSON" in failure(tool)
    started = time.perf_counter()
    server.answer(filled(provider, [{"title": "<a" * 200_000, "TEXT": "<b" * 200_000 + "&#xD800;&#99999999;"}]))
    assert len(ask(tool)) <= 2048
    assert time.perf_counter() - started < 60  # looking for an end from every beginning takes hours


@pytest.mark.parametrize("provider", PROVIDERS)
def test_keys_are_in_no_result_error_or_repr(server: Server, provider: str) -> None:
    tool = web_search(provider, base_url=server.url)
    escaped = "".join(f"&#{ord(letter)};" for letter in KEY)
    server.answer(filled(provider, [{"title": f"your key {KEY}", "TEXT": f"{KEY} {escaped} {KEY[:3]}<b>{KEY[3:]}"}]))
    assert ask(tool) == "your key ***: *** *** ***"
    server.status, server.body = 401, KEY.encode()
    assert KEY not in failure(tool) + repr(tool)


def test_missing_and_invalid_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, provider in PROVIDERS.items():
        monkeypatch.setenv(provider.variable, " ")
        with pytest.raises(ArpoError, match=f"{name}: the environment variable {provider.variable} is not set"):
            web_search(name)
        for bad in (f"{KEY} {KEY}", f"{KEY}\r\nX-Evil: 1", f"{KEY}\u20ac"):
            monkeypatch.setenv(provider.variable, bad)
            with pytest.raises(ArpoError, match="holds characters that no key has") as error:
                web_search(name)
            assert KEY not in str(error.value)
    with pytest.raises(ArpoError, match="no search provider 'bing'; there are: serper, tavily, brave"):
        web_search("bing")


def test_more_results_than_providers_give(server: Server) -> None:
    with pytest.raises(ArpoError, match="at most 20 results, not 21"):
        web_search("serper", results=21)


def test_the_model_cannot_tell_backends_apart(server: Server) -> None:
    tools = [
        build_search([Document("", "a")]),
        http_search(server.url),
        *(web_search(provider, base_url=server.url) for provider in PROVIDERS),
    ]
    assert all(tool.spec == tools[0].spec for tool in tools)
    assert len({tool.version for tool in tools}) == len(tools)
    assert all(tool.cacheable for tool in tools)
    for tool in tools:
        with pytest.raises(Exception, match=r"^the query is empty; give the words to search for$"):
            ask(tool, " ?")
    assert not server.requests


def test_without_httpx2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "httpx2", None)
    with pytest.raises(ArpoError, match=re.escape("pip install httpx2")):
        http_search("http://127.0.0.1/retrieve")
