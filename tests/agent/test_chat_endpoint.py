"""The endpoint that programs ask: keys, errors, streaming, and clients that go away."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import pytest
from programs import plain, program_agent

from arpo.agent.endpoint import ChatServer, open_endpoint
from arpo.agent.messages import BadRequest, Message, Reply
from arpo.algorithm.rollout import rollout
from arpo.config.algorithm import Branching
from arpo.config.schema import Rollout
from arpo.engine.scripted import ScriptedEngine
from arpo.types import StopReason, Task, ToolCall

ASKED = {"messages": [{"role": "user", "content": "hi"}]}
CALLING = Reply(
    Message("assistant", "", (("c0", "f", '{"x": 1}'),)), (1, 2), "raw", (ToolCall("f", {"x": 1}),), "tool_calls"
)


def request(port: int, key: str, path: str = "/v1/chat/completions", body: Any = ASKED, method: str = "POST") -> Any:
    """Status and content of one request."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection.request(method, path, data, {"Authorization": f"Bearer {key}"})
    response = connection.getresponse()
    content = response.read()
    connection.close()
    return response.status, content.decode() if response.getheader(
        "Content-Type"
    ) != "application/json" else json.loads(content)


@asynccontextmanager
async def serving(answer: Callable[[Any], Any]) -> AsyncIterator[tuple[ChatServer, str]]:
    async with open_endpoint() as server:
        yield server, server.register(answer)


async def always(body: Any) -> Reply:
    if body.get("refuse"):
        raise BadRequest("not this")
    return CALLING


def test_only_known_keys_are_answered_and_only_while_their_trajectory_runs() -> None:
    async def work() -> None:
        async with serving(always) as (server, key):
            ask = lambda *more, **named: asyncio.to_thread(request, server.port, *more, **named)  # noqa: E731
            status, reply = await ask(key)
            assert status == 200 and reply["choices"][0]["finish_reason"] == "tool_calls"
            call = reply["choices"][0]["message"]["tool_calls"][0]
            assert call == {"id": "c0", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
            assert (await ask("wrong"))[0] == (await ask(""))[0] == 401
            assert (await ask(key, body={**ASKED, "refuse": 1})) == (
                400,
                {"error": {"message": "not this", "type": "invalid_request_error", "code": None}},
            )
            assert (await ask(key, body=b"{"))[0] == 400 and (await ask(key, "/v1/other"))[0] == 404
            assert (await ask(key, "/v1/models", method="GET"))[1]["data"][0]["id"] == "arpo"
            other = server.register(always)
            await server.unregister(key)
            assert (await ask(key))[0] == 401 and (await ask(other))[0] == 200 and other != key

    asyncio.run(work())


@pytest.mark.parametrize(
    "header",
    ["Transfer-Encoding: chunked", f"Content-Length: {'9' * 5000}", "Content-Length: 99999999", "Content-Length: x"],
)
def test_a_request_without_a_usable_length_is_refused_at_once(header: str) -> None:
    """While the client waits with an open connection."""

    async def work() -> None:
        async with serving(always) as (server, key):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            head = f"POST /v1/chat/completions HTTP/1.1\r\nAuthorization: Bearer {key}\r\n{header}\r\n\r\n"
            writer.write(head.encode() + b"5\r\nhello\r\n")
            response = await reader.read()  # until the server ends it
            assert response.startswith(b"HTTP/1.1 413 ") and b"send a Content-Length" in response
            writer.close()

    asyncio.run(work())


def test_it_listens_on_this_machine_only() -> None:
    async def work() -> None:
        async with open_endpoint() as server:
            assert server.base_url == f"http://127.0.0.1:{server.port}/v1"
            with pytest.raises(OSError):  # another address of this machine
                await asyncio.open_connection("127.0.0.2", server.port)

    asyncio.run(work())


def test_a_stream_holds_the_same_reply() -> None:
    async def work() -> None:
        async with serving(always) as (server, key):
            status, text = await asyncio.to_thread(request, server.port, key, body={**ASKED, "stream": True})
            lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
            assert status == 200 and lines[-1] == "[DONE]"
            first, end, usage = map(json.loads, lines[:-1])
            assert first["choices"][0]["delta"]["tool_calls"][0]["function"]["name"] == "f"
            assert first["object"] == "chat.completion.chunk" and end["choices"][0]["finish_reason"] == "tool_calls"
            assert usage["usage"]["completion_tokens"] == 2

    asyncio.run(work())


def test_many_connections_are_answered_at_once_and_none_is_mixed_up() -> None:
    async def work() -> None:
        together = asyncio.Barrier(50)

        async def echo(body: Any) -> Reply:
            await together.wait()  # so all are here at the same time
            return Reply(Message("assistant", body["messages"][0]["content"]), (1,), "", (), "stop")

        async with serving(echo) as (server, key):
            asked = [{"messages": [{"role": "user", "content": f"number {n}"}]} for n in range(50)]
            threads = [asyncio.to_thread(request, server.port, key, body=body) for body in asked]
            loop = asyncio.get_running_loop()
            loop.set_default_executor(ThreadPoolExecutor(50))
            replies = await asyncio.gather(*threads)
            said = [reply["choices"][0]["message"]["content"] for _, reply in replies]
            assert said == [f"number {n}" for n in range(50)]

    asyncio.run(work())


def test_a_client_that_goes_away_and_asks_again_leaves_nothing_in_the_trajectory(tokenizer: Any) -> None:
    """The engine is cancelled, and the second answer follows what stood before the first request."""
    started, cancelled = threading.Event(), threading.Event()

    class Stuck(ScriptedEngine):
        first = True

        async def generate(self, *args: Any, **kwargs: Any) -> Any:
            if "again" in self._tokenizer.decode(list(args[0])) and self.first:
                self.first = False
                started.set()
                try:
                    await asyncio.Event().wait()
                finally:
                    cancelled.set()
            return await super().generate(*args, **kwargs)

    def program(task: Any, endpoint: Any) -> str:
        talk = [{"role": "user", "content": task.question}]
        talk += [plain.ask(endpoint, talk), {"role": "user", "content": "again"}]
        port = int(endpoint.base_url.split(":")[2].split("/")[0])
        connection = http.client.HTTPConnection("127.0.0.1", port)
        connection.request(
            "POST",
            "/v1/chat/completions",
            json.dumps({"messages": talk}),
            {"Authorization": f"Bearer {endpoint.api_key}"},
        )
        assert started.wait(60)
        connection.close()
        assert cancelled.wait(60)
        return str(plain.ask(endpoint, talk)["content"])

    agent = program_agent(Stuck(tokenizer, lambda prefix, seed: "reply"), tokenizer, program)
    how = Rollout(num_trajectories=1, num_initial=1)
    tree = asyncio.run(rollout(agent, Task("q", "What?"), how, Branching(policy="never"), 0))
    (trajectory,) = tree.trajectories
    assert (trajectory.stop_reason, trajectory.answer) == (StopReason.ANSWER, "reply")
    assert trajectory.turns == ("reply", "reply") and [node.context for node in trajectory.nodes] == [None] * 4
