"""The chat client: requests, replies, errors, and keys that must not leak."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from chat_server import ChatServer, chat_server, said

pytest.importorskip("httpx2")

from arpo.errors import ArpoError
from arpo.net import chat as module
from arpo.net import http
from arpo.net.chat import ChatClient, Reply, read_reply
from arpo.net.http import HttpError
from arpo.types import SamplingParams

KEY = "sk-secret-4711"
STOPS = ("</search>", "</python>", "</answer>")
ASK = [{"role": "user", "content": "Where?"}]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ChatServer]:
    monkeypatch.setattr(http, "PAUSE_SECONDS", 0.01)
    monkeypatch.setenv("CHAT_KEY", f" {KEY}\n")
    with chat_server() as served:
        yield served


def chat(server: ChatServer, params: SamplingParams | None = None, **limits: Any) -> Reply:
    params = params or SamplingParams(100, 0.6, 0.95, STOPS, seed=7)
    return asyncio.run(ChatClient(server.url + "/", "m", "CHAT_KEY", **limits).chat(ASK, params))


def body(content: Any, finish: Any = "stop", **choice: Any) -> dict[str, Any]:
    return {"choices": [{"message": {"content": content}, "finish_reason": finish, **choice}]}


# One turn.


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (body("<search>mira"), Reply("<search>mira</search>", "stop", "</search>")),  # the usual: left out, unnamed
        (body("<search>mira", stop_reason="</search>"), Reply("<search>mira</search>", "stop", "</search>")),
        (body("<search>mira", stop_reason=None), Reply("<search>mira", "eos")),  # it says that there was none
        (body("<search>mira", stop_reason=151643), Reply("<search>mira", "eos")),
        (body("<search>mira", stop_reason="</evil>"), Reply("<search>mira", "eos")),
        (body("<search>mira</search>"), Reply("<search>mira</search>", "stop", "</search>")),  # kept
        (body("<search>a</search> <answer>b</answer>"), Reply("<search>a</search>", "stop", "</search>")),  # ignored
        (body("<search>a</search> more", "length"), Reply("<search>a</search>", "stop", "</search>")),
        (body("<search>mir", "length"), Reply("<search>mir", "length")),
        (body("nothing more"), Reply("nothing more", "eos")),
        (body("<python>1 <search>mira"), Reply("<python>1 <search>mira</search>", "stop", "</search>")),
        (body("<search>mira <answer>x"), Reply("<search>mira <answer>x</answer>", "stop", "</answer>")),
        (body(None), Reply("", "eos")),
        (body(7, "content_filter"), Reply("", "eos")),
        (body("a\ud800b"), Reply("a?b", "eos")),
        (body("x", usage=1), Reply("x", "eos")),
        ({**body("x"), "usage": {"prompt_tokens": 5, "completion_tokens": 2}}, Reply("x", "eos", None, 5, 2)),
        ({**body("x"), "usage": {"prompt_tokens": -5, "completion_tokens": True}}, Reply("x", "eos")),
    ],
)
def test_a_reply_ends_at_the_first_stop_string(answer: Any, expected: Reply) -> None:
    assert read_reply(answer, STOPS) == expected


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_separate_reasoning_comes_first_and_has_no_stop_strings(name: str) -> None:
    message = {"content": "<search>mira", name: " I could </search> for it. "}
    answer = {"choices": [{"message": message, "finish_reason": "stop"}]}
    text = "<think>I could </search> for it.</think><search>mira</search>"
    assert read_reply(answer, STOPS) == Reply(text, "stop", "</search>")


def test_the_request(server: ChatServer) -> None:
    server.reply = lambda request: said("x")
    chat(server)
    chat(server, SamplingParams(5, stop=("</a>", "</b>", "</c>", "</d>", "</e>"), seed=2**40 + 3, top_k=4))
    first, second = server.requests
    assert first == {
        "model": "m",
        "messages": ASK,
        "max_tokens": 100,
        "temperature": 0.6,
        "top_p": 0.95,
        "stop": list(STOPS),
        "seed": 7,
    }
    assert (second["stop"], second["seed"], second["top_k"]) == (["</a>", "</b>", "</c>", "</d>"], 3, 4)
    assert server.keys == [f"Bearer {KEY}"] * 2 and server.paths == ["/v1/chat/completions"] * 2
    asyncio.run(ChatClient(server.url, "m").chat(ASK, SamplingParams(5)))
    assert server.keys[-1] is None


@pytest.mark.parametrize(
    "trouble", [(429, b""), (500, b"x"), (503, b""), (408, b""), (200, b"{"), (200, {"choices": []})]
)
def test_temporary_failures_are_retried(server: ChatServer, trouble: Any) -> None:
    server.reply = lambda request: said("x") if len(server.requests) > module.RETRIES else trouble
    assert chat(server).text == "x"
    assert len(server.requests) == module.RETRIES + 1
    server.requests.clear()
    server.reply = lambda request: trouble
    with pytest.raises(HttpError, match=f"after {module.RETRIES + 1} attempts"):
        chat(server)
    assert len(server.requests) == module.RETRIES + 1


def test_pauses_grow_and_the_endpoint_may_ask_for_its_own(server: ChatServer, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr(http.asyncio, "sleep", sleep)
    headers = iter([{}, {"Retry-After": "7"}, {"Retry-After": "9999"}, {"Retry-After": "soon"}, {}])
    server.reply = lambda request: (429, b"", next(headers))
    with pytest.raises(HttpError, match="HTTP status 429"):
        chat(server)
    assert 0.005 <= pauses[0] <= 0.01 and pauses[1:3] == [7.0, http.MAX_PAUSE_SECONDS]
    assert 0.04 <= pauses[3] <= 0.08


def test_a_slow_endpoint_and_one_that_is_not_there(server: ChatServer) -> None:
    server.delay = 600
    with pytest.raises(HttpError, match=r"did not answer within 0\.1 seconds, after 2 attempts"):
        chat(server, timeout=0.1, retries=1)
    with pytest.raises(HttpError, match="cannot be reached"):
        asyncio.run(ChatClient("http://127.0.0.1:1/v1", "m", retries=1).chat(ASK, SamplingParams(5)))


def test_a_reply_without_end_is_not_read_to_the_end(server: ChatServer) -> None:
    server.reply = lambda request: (200, b"x" * 1_000_000)
    with pytest.raises(HttpError, match="more than 1,000 bytes"):
        chat(server, max_bytes=1000)
    assert len(server.requests) == 1


def test_a_refusal_quotes_the_endpoint_without_the_key(server: ChatServer) -> None:
    server.reply = lambda request: (400, f"context\n too \x1b[2Jlong for {KEY}".encode())
    with pytest.raises(HttpError) as caught:
        chat(server)
    assert (
        str(caught.value) == "the endpoint refuses the request with HTTP status 400: context too [2Jlong for (masked)"
    )
    assert len(server.requests) == 1


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_wrong_key_or_name_is_an_arpo_error(server: ChatServer, status: int) -> None:
    server.reply = lambda request: (status, KEY.encode())
    with pytest.raises(ArpoError, match=f"status {status}; check eval.endpoint, .* CHAT_KEY") as caught:
        chat(server)
    assert KEY not in str(caught.value) and len(server.requests) == 1


def test_keys_and_addresses_that_cannot_work(monkeypatch: pytest.MonkeyPatch) -> None:
    for url in ("localhost:8000", "ftp://x", "http://", "http://user:pw@host/v1", "http://[::1"):
        with pytest.raises(ArpoError, match="expected an address") as caught:
            ChatClient(url, "m")
        assert "pw" not in str(caught.value)
    with pytest.raises(ArpoError, match="CHAT_KEY is not set"):
        ChatClient("http://x/v1", "m", "CHAT_KEY")
    monkeypatch.setenv("CHAT_KEY", "two words")
    with pytest.raises(ArpoError, match="characters that no key has"):
        ChatClient("http://x/v1", "m", "CHAT_KEY")
    monkeypatch.setenv("CHAT_KEY", KEY)
    assert KEY not in repr(ChatClient("http://x/v1", "m", "CHAT_KEY"))
