"""The HTTP client by itself: what is bounded, which error is which, and when a request is repeated."""

from __future__ import annotations

import asyncio
import gzip
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from chat_server import Answer, ChatServer, chat_server

pytest.importorskip("httpx2")

from arpo.errors import ArpoError
from arpo.net import http
from arpo.net.http import HttpClient, HttpError, Rejected, TooLarge, Unavailable, Unreachable, retry

KEY = "sk-secret-4711"
REFUSAL = f" no\n\x1b[2J way, {KEY} ".encode()
BOMB = gzip.compress(b"\0" * 20_000_000)


@pytest.fixture
def server() -> Iterator[ChatServer]:
    with chat_server() as served:
        yield served


def request(server: ChatServer, answer: Answer, **options: Any) -> bytes:
    server.reply = lambda _: answer
    client = HttpClient(server.url, setting="a.b", timeout=60, max_bytes=1000, name="it", api_key=KEY)
    return asyncio.run(client.request("POST", "/x", json={}, **options))


def failure(server: ChatServer, answer: Answer, **options: Any) -> HttpError:
    with pytest.raises(HttpError) as caught:
        request(server, answer, **options)
    assert KEY not in str(caught.value) + repr(caught.value)
    return caught.value


def test_a_reply_is_returned_as_it_is(server: ChatServer) -> None:
    assert request(server, (200, b"x" * 1000)) == b"x" * 1000
    assert request(server, (200, gzip.compress(b"x" * 1000), {"Content-Encoding": "gzip"})) == b"x" * 1000
    assert request(server, (200, b"")) == b""
    assert (server.paths[-1], server.keys[-1]) == ("/v1/x", f"Bearer {KEY}")


@pytest.mark.parametrize(
    ("answer", "kind", "message"),
    [
        ((200, b"x" * 1001), TooLarge, "it sends more than 1,000 bytes"),
        ((200, b"x" * 50_000_000), TooLarge, "it sends more than 1,000 bytes"),
        ((200, BOMB, {"Content-Encoding": "gzip"}), TooLarge, "it sends more than 1,000 bytes"),
        ((200, b"no gzip", {"Content-Encoding": "gzip"}), Unavailable, "it sends a compression that cannot be read"),
        ((200, b"x", {"Content-Encoding": "br"}), Unavailable, "it sends a compression that cannot be read"),
        ((204, b""), Unavailable, "it answers with HTTP status 204"),
        ((302, b"", {"Location": "http://127.0.0.1:9/"}), Unavailable, "it answers with HTTP status 302"),
        ((503, b""), Unavailable, "it answers with HTTP status 503"),
        ((429, b""), Unavailable, "it answers with HTTP status 429"),
        ((400, REFUSAL), Rejected, "it refuses the request with HTTP status 400: no [2J way, (masked)"),
    ],
)  # fmt: skip
def test_failures(server: ChatServer, answer: Answer, kind: type[HttpError], message: str) -> None:
    error = failure(server, answer)
    assert (type(error), str(error)) == (kind, message)
    assert error.status == (None if answer[0] == 200 else answer[0])
    assert len(server.requests) == 1


def test_a_long_refusal_is_cut(server: ChatServer) -> None:
    error = failure(server, (404, b"word " * 100))
    assert len(str(error)) < 350 and error.status == 404


def test_timeouts_and_connections_that_fail(server: ChatServer) -> None:
    server.delay = 600
    for limit in ({"timeout": 0.1}, {"idle_timeout": 0.1}):
        error = failure(server, (200, b""), **limit)
        assert (type(error), str(error)) == (Unavailable, "it did not answer within 0.1 seconds")
    client = HttpClient("http://127.0.0.1:1/v1?key=1", setting="a.b", timeout=60, max_bytes=9)
    with pytest.raises(Unreachable, match=r"^http://127\.0\.0\.1:1/v1 cannot be reached \(ConnectError\)$"):
        asyncio.run(client.request("GET"))


@pytest.mark.parametrize(
    ("retry_after", "seconds"),
    [("7", 7.0), ("9" * 500, http.MAX_PAUSE_SECONDS), ("soon", None), ("-1", None), ("\u0663", None)],
)
def test_the_pause_that_a_server_asks_for(server: ChatServer, retry_after: str, seconds: float | None) -> None:
    header = retry_after.encode().decode("latin-1")
    error = failure(server, (429, b"", {"Retry-After": header}))
    assert isinstance(error, Unavailable) and error.retry_after == seconds


def test_only_unavailable_is_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr(http.asyncio, "sleep", sleep)
    monkeypatch.setattr(http._jitter, "uniform", lambda low, high: high)
    outcomes: list[Exception | None] = []

    async def attempt() -> str:
        outcome = outcomes.pop(0)
        if outcome is not None:
            raise outcome
        return "done"

    outcomes[:] = [Unavailable("a"), Unreachable("b"), Unavailable("c", 429, 5.0), None]
    assert asyncio.run(retry(attempt, 3)) == "done"
    assert pauses == [1.0, 2.0, 5.0]
    outcomes[:] = [Unavailable("a"), Unavailable("b", 503)]
    with pytest.raises(Unavailable, match=r"^b, after 2 attempts$") as caught:
        asyncio.run(retry(attempt, 1))
    assert caught.value.status == 503
    for final in (Rejected("no", 400), TooLarge("no"), ValueError("no")):
        outcomes[:] = [final]
        with pytest.raises(type(final), match=r"^no$"):
            asyncio.run(retry(attempt, 3))


@pytest.mark.parametrize("url", ["", "host", "ftp://host", "http://", "http://[", "http://a:0/", "http://u:p@host/v1"])
def test_addresses_that_cannot_work(url: str) -> None:
    with pytest.raises(ArpoError, match=r"^a\.b: got .* expected an address like http://localhost:8000/v1") as caught:
        HttpClient(url, setting="a.b", timeout=1, max_bytes=1)
    assert "u:p" not in str(caught.value)


def test_secrets_of_a_url_are_sent_but_not_shown(
    server: ChatServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MY_KEY", "kanarie4711")
    server.reply = lambda _: (400, b"no kanarie4711 at http://me:x@host/?a=kanari")
    for url in (f"{server.url}?key=kanarie4711", f"{server.url}?key=${{MY_KEY}}"):
        client = HttpClient(url, setting="a.b", timeout=60, max_bytes=1000)
        with caplog.at_level(logging.DEBUG), pytest.raises(HttpError) as caught:
            asyncio.run(client.request("POST", json={}))
        assert server.paths[-1] == "/v1?key=kanarie4711"
        assert str(caught.value).endswith("400: no (masked) at http://(masked)@host/?a=(masked)")
        assert "kanari" not in str(caught.value) + caplog.text + client.name
    monkeypatch.delenv("MY_KEY")
    with pytest.raises(ArpoError, match=r"^a\.b: the environment variable MY_KEY is not set"):
        HttpClient(url, setting="a.b", timeout=60, max_bytes=1000)
    for wrong in ("ftp://me:kanarie@host?key=kanarie", "me:kanarie@host", "http://me:kan/arie@host"):
        with pytest.raises(ArpoError, match="expected an address") as refused:
            HttpClient(wrong, setting="a.b", timeout=60, max_bytes=1000)
        assert "arie" not in str(refused.value)


def test_credentials_in_a_url_only_where_they_are_allowed() -> None:
    client = HttpClient("http://u:p@host/v1", setting="a.b", timeout=1, max_bytes=1, allow_userinfo=True)
    assert client.name == "http://host/v1"
