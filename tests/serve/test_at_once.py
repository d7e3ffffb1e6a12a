"""Many conversations at once: none lost, none mixed up, whatever clients, tools, the engine and the operator do."""

from __future__ import annotations

import asyncio
import copy
import json
import random
from typing import Any

import openai
import pytest
from agent_server import (
    BOUND,
    NAME,
    GatedEngine,
    answer,
    build_service,
    chat_body,
    error_of,
    exchange,
    port_of,
    read_reply,
    request_bytes,
    serving,
    until,
)
from openai import AsyncOpenAI

from arpo.agent.agent import Agent
from arpo.agent.conversation import Conversation
from arpo.agent.formats import build_format
from arpo.config.schema import Rollout
from arpo.engine.local.engine import LocalEngine
from arpo.serve.app import AgentServer
from arpo.serve.http import Refused
from arpo.serve.messages import ChatRequest
from arpo.serve.service import Service
from arpo.tools.base import ToolUnavailable, tool

CONVERSATIONS = 200


def client_of(server: AgentServer) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{server.url}v1", api_key="none", max_retries=0, timeout=BOUND)


def number_of(text: str) -> str:
    """The number that a client sent along: the last one in a prompt."""
    return text.rpartition("number ")[2].split(".")[0]


@tool(quick=True)
def double(text: str) -> str:
    """Twice a number."""
    return f"twice {text} is {2 * int(text)}"


def doubles(prefix: str, seed: int) -> str:
    """Double the client's number with the tool, and answer with what it said and the number."""
    asked = prefix.rpartition("<|im_start|>user")[2]
    number = number_of(asked.partition("<|im_end|>")[0])
    if "<result>" not in asked:
        return f"<think>{number}</think><double>{number}</double>"
    said = asked.partition("<result>")[2].partition("</result>")[0]
    return answer(f"{number}: {said}")


def question(number: int) -> list[Any]:
    return [{"role": "user", "content": f"Please double number {number}."}]


@pytest.mark.slow
def test_two_hundred_conversations_at_once_get_their_own_answers() -> None:
    async def ask(client: AsyncOpenAI, number: int) -> tuple[str, list[str]]:
        """Half of them stream, half of these with events; all ask again with what they got."""
        events = {"extra_body": {"arpo": {"events": True}}} if number % 4 == 1 else {}
        first: Any = await client.chat.completions.create(
            model=NAME, messages=question(number), stream=number % 2 == 1, **events
        )
        told: list[str] = []
        if number % 2 == 0:
            content = first.choices[0].message.content
        else:
            content = ""
            async for chunk in first:
                told += [chunk.arpo["text"]] if events and "text" in (getattr(chunk, "arpo", None) or {}) else []
                content += chunk.choices[0].delta.content or "" if chunk.choices else ""
        messages = [*question(number), {"role": "assistant", "content": content}, *question(number + 1000)]
        second = await client.chat.completions.create(model=NAME, messages=messages)
        return f"{content}, {second.choices[0].message.content}", told

    async def main() -> None:
        engine = GatedEngine(doubles)
        service = build_service(engine, double)
        async with serving(service) as server, client_of(server) as client:
            work = asyncio.gather(*(ask(client, number) for number in range(CONVERSATIONS)))
            await until(lambda: engine.waiting == CONVERSATIONS)  # all are in the engine now
            assert service.running == CONVERSATIONS
            engine.gate.set()
            found = await work
        for number, (content, told) in enumerate(found):
            other = number + 1000
            assert content == f"{number}: twice {number} is {2 * number}, {other}: twice {other} is {2 * other}"
            if number % 4 == 1:
                assert "".join(told).startswith(f"<think>{number}</think><double>{number}</double>twice {number} is")
            else:
                assert told == []
        assert service.metrics.ended.values == {("answer",): 2 * CONVERSATIONS}
        assert service.metrics.calls.values == {("double", "none"): 2 * CONVERSATIONS}

    asyncio.run(main())


@pytest.mark.slow
def test_two_hundred_conversations_with_a_model_are_those_of_one_after_another(tiny_model: Any, tokenizer: Any) -> None:
    """The engine's continuous batching behind the server, against a plain loop with the same seeds."""
    fmt = build_format("tags", [double.spec], tokenizer)
    settings = Rollout(max_tokens=12, temperature=0.7, concurrency=64)
    questions = [f"Where was Mira Tolven born {number}?" for number in range(CONVERSATIONS)]
    model = copy.deepcopy(tiny_model).double()  # so that what is sampled does not depend on rounding

    def agent(rows: int) -> Agent:
        return Agent(LocalEngine(model, tokenizer, max_num_seqs=rows), tokenizer, {"double": double}, fmt)

    async def one_by_one() -> list[str]:
        found, alone = [], agent(1)
        for number, text in enumerate(questions):
            conversation = Conversation(alone, settings, 2, number)
            await conversation.begin(text)
            prompt = len(conversation.tokens)
            await conversation.answer()
            found.append(tokenizer.decode(conversation.tokens[prompt:]))
        return found

    async def at_once() -> list[str]:
        service = Service(agent(64), settings, 2, NAME)

        async def ask(client: AsyncOpenAI, number: int) -> str:
            messages: list[Any] = [{"role": "user", "content": questions[number]}]
            reply: Any = await client.chat.completions.create(
                model=NAME, messages=messages, seed=number, extra_body={"arpo": {"events": True}}
            )
            return "".join(event["text"] for event in reply.arpo["events"] if event["type"] == "text")

        async with serving(service) as server, client_of(server) as client:
            found = await asyncio.gather(*(ask(client, number) for number in range(CONVERSATIONS)))
        assert not service.running
        return found

    expected, found = asyncio.run(one_by_one()), asyncio.run(at_once())
    for end in fmt.end_texts:
        expected = [text.removesuffix(end) for text in expected]
    assert found == expected
    assert len(set(found)) > CONVERSATIONS / 2


class PausingEngine(LocalEngine):
    """Stands still in each step, as if it were computing, while the gate is closed."""

    gate: asyncio.Event
    steps = 0

    async def _run_step(self, batch: Any) -> Any:
        self._in_step = True
        self.steps += 1
        await self.gate.wait()
        return await super()._run_step(batch)


@pytest.mark.parametrize("streaming", [False, True])
def test_clients_that_go_away_free_their_rows_in_the_engine(tiny_model: Any, tokenizer: Any, streaming: bool) -> None:
    """Two of three: one in a row, one in the queue or in a row. The third has its answer, and no row stays taken."""

    async def main() -> None:
        engine = PausingEngine(tiny_model, tokenizer, max_num_seqs=2)
        engine.gate = asyncio.Event()
        fmt = build_format("tags", [double.spec], tokenizer)
        service = Service(
            Agent(engine, tokenizer, {"double": double}, fmt), Rollout(max_tokens=9, concurrency=2), 2, NAME
        )
        async with serving(service) as server:
            scheduler = engine._scheduler
            host, writers = f"127.0.0.1:{port_of(server)}", list[asyncio.StreamWriter]()
            body = chat_body("Where was Mira Tolven born?", stream=streaming, arpo={"events": True})
            for count in (1, 2):
                _, writer = await asyncio.open_connection("127.0.0.1", port_of(server))
                writers.append(writer)
                writer.write(request_bytes("POST", "/v1/chat/completions", body, Host=host))
                await until(lambda count=count: len(scheduler.running) + len(scheduler.waiting) == count)  # type: ignore[misc]
            request = request_bytes("POST", "/v1/chat/completions", chat_body("Where was Mira Tolven born?"))
            third = asyncio.ensure_future(exchange(server, request))
            await until(lambda: engine.steps == 1 and service.running == 3)
            for writer in writers:
                writer.close()
            await until(lambda: service.running == 1)
            assert service.metrics.ended.values == {("cancelled",): 2}
            engine.gate.set()
            assert (await third)[0] == 200
            await until(lambda: engine._loop_task is not None and engine._loop_task.done())
            assert (scheduler.running, list(scheduler.waiting), len(scheduler._free_rows)) == ([], [], 2)
            assert sum(service.metrics.ended.values.values()) == 3

    asyncio.run(main())


@pytest.mark.slow
def test_nothing_is_lost_when_clients_vanish_and_tools_and_the_engine_fail() -> None:
    """200 clients: some vanish before an answer, some in mid-stream, some meet a broken tool or engine."""
    chance = random.Random(0)
    fates = [chance.choice(["ask", "stream", "vanish", "vanish in stream", "tool", "engine"]) for _ in range(200)]

    @tool(quick=True)
    def maybe(text: str) -> str:
        """Fails for some."""
        if fates[int(text)] == "tool":
            raise ToolUnavailable("gone")
        return f"found {text}"

    def script(prefix: str, seed: int) -> str:
        asked = prefix.rpartition("<|im_start|>user")[2]
        number = number_of(asked.partition("<|im_end|>")[0])
        if fates[int(number)] == "engine":
            raise RuntimeError("the engine is broken")
        if "<result>" not in asked:
            return f"<maybe>{number}</maybe>"
        return answer(f"{number} {'unavailable' in asked}")

    async def vanish(server: AgentServer, number: int, streaming: bool, when: asyncio.Event) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port_of(server))
        body = chat_body(f"Tell number {number}.", stream=streaming, arpo={"events": True})
        writer.write(request_bytes("POST", "/v1/chat/completions", body, Host=f"127.0.0.1:{port_of(server)}"))
        if streaming:
            await reader.readuntil(b"data: ")
        await writer.drain()
        await when.wait()
        writer.close()

    async def one(client: AsyncOpenAI, server: AgentServer, number: int, all_there: asyncio.Event) -> str:
        fate, messages = fates[number], [{"role": "user", "content": f"Tell number {number}."}]
        create: Any = client.chat.completions.create
        if fate.startswith("vanish"):
            await vanish(server, number, "stream" in fate, all_there)
            return ""
        if fate == "engine":
            with pytest.raises(openai.InternalServerError):
                await create(model=NAME, messages=messages)
            return ""
        if fate == "stream":
            stream = await create(model=NAME, messages=messages, stream=True)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        content: str = (await create(model=NAME, messages=messages)).choices[0].message.content
        return content

    async def main() -> None:
        engine = GatedEngine(script)
        service = build_service(engine, maybe)
        async with serving(service) as server, client_of(server) as client:
            all_there = asyncio.Event()
            work = asyncio.gather(*(one(client, server, number, all_there) for number in range(len(fates))))
            await until(lambda: engine.waiting == len(fates))
            all_there.set()
            vanished = sum(fate.startswith("vanish") for fate in fates)
            await until(lambda: engine.cancelled == vanished and engine.waiting == len(fates) - vanished)
            engine.gate.set()
            found = await work
            await until(lambda: service.running == 0)
        expected = {"ask": "False", "stream": "False", "tool": "True"}
        assert found == [f"{n} {expected[fate]}" if fate in expected else "" for n, fate in enumerate(fates)]
        ended = {"answer": sum(fate in expected for fate in fates), "failed": fates.count("engine")}
        assert service.metrics.ended.values == {
            **{(end,): count for end, count in ended.items()},
            ("cancelled",): vanished,
        }
        assert min(vanished, *ended.values()) > 20

    asyncio.run(main())


def test_a_stopping_server_ends_what_it_began_and_begins_nothing() -> None:
    async def main() -> None:
        engine = GatedEngine(lambda *_: answer("yes"))
        service = build_service(engine)
        async with serving(service) as server, client_of(server) as client:
            port, body = port_of(server), chat_body("Why?")
            idle = await asyncio.open_connection("127.0.0.1", port)
            busy = await asyncio.open_connection("127.0.0.1", port)
            request = request_bytes("POST", "/v1/chat/completions", body, Host=f"127.0.0.1:{port}")
            busy[1].write(request)
            messages: list[Any] = [{"role": "user", "content": "Why?"}]
            stream: Any = asyncio.ensure_future(
                client.chat.completions.create(model=NAME, messages=messages, stream=True)
            )
            await until(lambda: engine.waiting == 2)
            stopping = asyncio.ensure_future(server.stop(grace=BOUND))
            assert await idle[0].read() == b""  # a connection without a request is closed at once
            with pytest.raises(OSError):
                await asyncio.open_connection("127.0.0.1", port)
            with pytest.raises(Refused) as refused:
                await service.start(ChatRequest("Why?"))
            assert (refused.value.status, refused.value.retry_after) == (503, 1)
            assert not stopping.done()
            engine.gate.set()
            status, headers, content = await read_reply(busy[0])
            assert (status, headers["connection"]) == (200, "close")
            assert json.loads(content)["choices"][0]["message"]["content"] == "yes"
            pieces = [chunk.choices[0].delta.content or "" async for chunk in await stream]
            assert "".join(pieces) == "yes"
            await stopping
            assert service.metrics.ended.values == {("answer",): 2}
            for _, writer in (idle, busy):
                writer.close()

    asyncio.run(main())


@pytest.mark.parametrize("hurried", [False, True])
def test_what_does_not_end_in_time_is_cancelled_and_the_clients_are_told(hurried: bool) -> None:
    @tool
    async def hang(text: str) -> str:
        """Never ends."""
        await asyncio.Event().wait()
        return text

    async def main() -> None:
        calling = asyncio.Event()
        engine = GatedEngine(lambda prefix, seed: "<hang>x</hang>" if "tool" in prefix else answer("never"))
        service = build_service(engine, hang)
        async with serving(service) as server, client_of(server) as client:
            create: Any = client.chat.completions.create

            async def read_stream() -> list[Any]:
                stream = await create(
                    model=NAME,
                    messages=[{"role": "user", "content": "Why a tool?"}],
                    stream=True,
                    extra_body={"arpo": {"events": True}},
                )
                found = []
                async for chunk in stream:
                    if (getattr(chunk, "arpo", None) or {}).get("type") == "call":
                        calling.set()
                    found.append(chunk)
                return found

            streaming = asyncio.ensure_future(read_stream())
            await until(lambda: engine.waiting == 1)
            engine.gate.set()
            async with asyncio.timeout(BOUND):
                await calling.wait()
            engine.gate.clear()
            plain = asyncio.ensure_future(
                exchange(server, request_bytes("POST", "/v1/chat/completions", chat_body("Why?")))
            )
            await until(lambda: engine.waiting == 1)
            hurry = asyncio.Event()
            if hurried:
                hurry.set()
            await server.stop(grace=BOUND if hurried else 0, hurry=hurry)
            status, headers, body = await plain
            assert (status, headers["retry-after"], error_of(body)["type"]) == (503, "1", "server_error")
            with pytest.raises(openai.APIError, match="stopped before the answer was complete"):
                await streaming
            assert (service.running, engine.cancelled) == (0, 1)
            assert service.metrics.ended.values == {("cancelled",): 2}

    asyncio.run(main())


def test_a_full_server_says_when_to_come_back() -> None:
    async def main() -> None:
        engine = GatedEngine(lambda *_: answer("yes"))
        service = build_service(engine, conversations=1)
        async with serving(service) as server, client_of(server) as client:
            request = request_bytes("POST", "/v1/chat/completions", chat_body("Why?"))
            first = asyncio.ensure_future(exchange(server, request))
            await until(lambda: engine.waiting == 1)
            status, headers, body = await exchange(server, request)
            assert (status, headers["retry-after"], error_of(body)["code"]) == (429, "1", "rate_limit_exceeded")
            messages: list[Any] = [{"role": "user", "content": "Why?"}]
            with pytest.raises(openai.RateLimitError):
                await client.chat.completions.create(model=NAME, messages=messages, stream=True)
            engine.gate.set()
            assert (await first)[0] == 200
            assert (await exchange(server, request))[0] == 200

    asyncio.run(main())
