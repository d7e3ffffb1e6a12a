"""Long messages: while they become tokens, the server does everything else."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from agent_server import (
    BOUND,
    GatedEngine,
    answer,
    build_service,
    chat_body,
    error_of,
    exchange,
    port_of,
    request_bytes,
    serving,
    until,
)
from conversations import CHAT

from arpo.agent.encoding import LARGE_TEXT
from arpo.serve.http import Refused
from arpo.serve.messages import ChatRequest

LONG = "long " * (LARGE_TEXT // 5 + 1)


class GatedTokenizer:
    """Takes its time over long texts: until the gate is open."""

    def __init__(self) -> None:
        self.gate, self.working = threading.Event(), 0

    def __call__(self, text: Any, **options: Any) -> Any:
        if sum(map(len, [text] if isinstance(text, str) else text)) > LARGE_TEXT:
            self.working += 1
            assert self.gate.wait(BOUND)
        return CHAT(text, **options)

    def __len__(self) -> int:
        return len(CHAT)

    def __getattr__(self, name: str) -> Any:
        return getattr(CHAT, name)


@pytest.fixture
def tokenizer() -> Iterator[GatedTokenizer]:
    gated = GatedTokenizer()
    yield gated
    gated.gate.set()


def ask(server: Any, question: str, **options: Any) -> asyncio.Task[tuple[int, dict[str, str], bytes]]:
    request = request_bytes("POST", "/v1/chat/completions", chat_body(question, **options))
    return asyncio.ensure_future(exchange(server, request))


def test_others_are_answered_while_long_messages_become_tokens(tokenizer: GatedTokenizer) -> None:
    async def main() -> None:
        service = build_service(lambda *_: answer("yes"), tokenizer=tokenizer, context=100_000, conversations=3)
        async with serving(service) as server:
            long = [ask(server, LONG) for _ in range(2)]
            await until(lambda: tokenizer.working == 2)
            for _ in range(3):
                status, _, body = await ask(server, "Why?")
                assert (status, json.loads(body)["choices"][0]["message"]["content"]) == (200, "yes")
            assert (await exchange(server, request_bytes("GET", "/health")))[0] == 200
            third = ask(server, LONG, stream=True)
            await until(lambda: service.running == 3)
            assert (await ask(server, "Why?"))[0] == 429  # those that become tokens have their places
            third.cancel()
            await until(lambda: service.running == 2)
            assert not any(each.done() for each in long)
            tokenizer.gate.set()
            for status, _, body in await asyncio.gather(*long):
                assert (status, json.loads(body)["choices"][0]["message"]["content"]) == (200, "yes")
        assert service.metrics.ended.values == {("answer",): 5}

    asyncio.run(main())


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_too_long_for_the_context_is_refused_before_a_reply_begins(
    tokenizer: GatedTokenizer, stream: bool
) -> None:
    async def main() -> None:
        tokenizer.gate.set()
        async with serving(build_service(lambda *_: answer("yes"), tokenizer=tokenizer, context=300)) as server:
            status, _, body = await ask(server, LONG, stream=stream)
            assert (status, error_of(body)["code"]) == (400, "context_length_exceeded")
            assert tokenizer.working == 1 and server.service.running == 0

    asyncio.run(main())


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_meanwhile_gives_its_place_back(tokenizer: GatedTokenizer, stream: bool) -> None:
    async def main() -> None:
        service = build_service(lambda *_: answer("yes"), tokenizer=tokenizer, context=100_000)
        async with serving(service) as server:
            host = f"127.0.0.1:{port_of(server)}"
            _, writer = await asyncio.open_connection("127.0.0.1", port_of(server))
            writer.write(request_bytes("POST", "/v1/chat/completions", chat_body(LONG, stream=stream), Host=host))
            await until(lambda: tokenizer.working == 1)
            writer.close()
            await until(lambda: service.running == 0)
            tokenizer.gate.set()
            assert (await ask(server, "Why?"))[0] == 200
        assert service.metrics.started.values == {(): 1}

    asyncio.run(main())


@pytest.mark.parametrize("stream", [False, True])
def test_a_server_that_stops_meanwhile_says_so(tokenizer: GatedTokenizer, stream: bool) -> None:
    """Five long requests, of which some wait for a thread, and a short one in the engine, which is answered."""

    async def main() -> None:
        engine = GatedEngine(lambda *_: answer("yes"))
        service = build_service(engine, tokenizer=tokenizer)
        async with serving(service) as server:
            short = ask(server, "Why?")
            await until(lambda: engine.waiting == 1)
            long = [ask(server, LONG, stream=stream) for _ in range(5)]
            await until(lambda: service.running == 6 and tokenizer.working == 2)
            stopping = asyncio.ensure_future(server.stop(grace=BOUND))
            for status, headers, body in await asyncio.gather(*long):
                assert (status, headers["retry-after"], error_of(body)["type"]) == (503, "1", "server_error")
            assert not short.done()
            engine.gate.set()
            assert (await short)[0] == 200
            await stopping
        assert service.metrics.ended.values == {("answer",): 1}

    asyncio.run(main())


@pytest.mark.parametrize("rounds", range(4))
def test_nothing_begins_once_the_server_stops(rounds: int) -> None:
    """Whatever has happened of the beginning by then."""

    async def main() -> None:
        service = build_service(lambda *_: answer("yes"))
        starting = asyncio.ensure_future(service.start(ChatRequest("Why?")))
        for _ in range(rounds):
            await asyncio.sleep(0)
        begun = starting.done()
        service.stopping = True
        if begun:
            assert (await (await starting)).content == "yes"
            return
        with pytest.raises(Refused) as refused:
            await starting
        assert refused.value.status == 503 and service.running == 0

    asyncio.run(main())
