"""An agent with a scripted model behind `arpo.serve`, on the event loop of the test, and raw requests to it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from conversations import CHAT, search

from arpo.agent.agent import Agent
from arpo.agent.formats import build_format
from arpo.config.schema import Rollout
from arpo.engine.base import Engine
from arpo.engine.scripted import Script, ScriptedEngine
from arpo.serve.app import AgentServer
from arpo.serve.keys import Keys
from arpo.serve.service import Service
from arpo.tools.base import Tool
from arpo.types import Completion

NAME = "test/agent"
END = "<|im_end|>"
NO_KEYS = Keys()
BOUND = 120.0  # seconds: only something that hangs takes so long


class GatedEngine(ScriptedEngine):
    """A script that waits before each turn until the gate is open; counts those who wait, and those who gave up."""

    def __init__(self, script: Script) -> None:
        super().__init__(CHAT, script)
        self.gate, self.waiting, self.cancelled = asyncio.Event(), 0, 0

    async def generate(self, prefix: Any, params: Any, *, on_token: Any = None) -> Completion:
        self.waiting += 1
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.waiting -= 1
        return await super().generate(prefix, params, on_token=on_token)


async def until(condition: Callable[[], bool]) -> None:
    """Wait until something is so."""
    async with asyncio.timeout(BOUND):
        while not condition():
            await asyncio.sleep(0.005)


def answer(text: str) -> str:
    """A final message of the model in the format tags."""
    return f"<answer>\\boxed{{{text}}}</answer>"


def build_service(
    script: Script | Engine,
    *tools: Tool,
    tokenizer: Any = CHAT,
    conversations: int = 256,
    context: int = 4096,
    **rollout: Any,
) -> Service:
    """A service whose model is a script or another engine, by default with a tool for searching."""
    chosen = {tool.spec.name: tool for tool in (tools or (search,))}
    fmt = build_format("tags", [tool.spec for tool in chosen.values()], tokenizer)
    engine = ScriptedEngine(tokenizer, script, max_context=context) if callable(script) else script
    agent = Agent(engine, tokenizer, chosen, fmt)
    return Service(agent, Rollout(**rollout), 2, NAME, conversations)


@asynccontextmanager
async def serving(service: Service, keys: Keys = NO_KEYS, **options: Any) -> AsyncIterator[AgentServer]:
    """A server at a free port, as long as the block lasts."""
    server = AgentServer(service, keys, **options)
    await server.listen(0)
    try:
        yield server
    finally:
        await server.stop(grace=0)


def port_of(server: AgentServer) -> int:
    """The port that a server listens on."""
    return int(server.url.rpartition(":")[2].strip("/"))


def request_bytes(method: str, path: str, body: bytes | None = None, **headers: str) -> bytes:
    """An HTTP request, byte by byte; a header that is None is left out."""
    given = {"Host": "127.0.0.1", **({} if body is None else {"Content-Type": "application/json"})}
    given |= {} if body is None else {"Content-Length": str(len(body))}
    given |= {name.replace("_", "-"): value for name, value in headers.items()}
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in given.items()), "", ""]
    return "\r\n".join(lines).encode() + (body or b"")


def chat_body(*questions: str, **options: Any) -> bytes:
    """The JSON of a request for a chat completion."""
    messages = [{"role": "user", "content": text} for text in questions]
    return json.dumps({"model": NAME, "messages": messages, **options}).encode()


async def read_reply(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    """Status, headers (names in lower case) and body of a reply with a length."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:] if line)}
    return int(head[0].split()[1]), headers, await reader.readexactly(int(headers.get("content-length", "0")))


async def exchange(server: AgentServer, request: bytes) -> tuple[int, dict[str, str], bytes]:
    """The reply to one raw request, on a connection of its own."""
    port = port_of(server)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request.replace(b"Host: 127.0.0.1\r\n", b"Host: 127.0.0.1:%d\r\n" % port))
    try:
        return await read_reply(reader)
    finally:
        writer.close()
        await writer.wait_closed()


def error_of(body: bytes) -> dict[str, Any]:
    """The error in a reply."""
    found: dict[str, Any] = json.loads(body)["error"]
    assert set(found) == {"message", "type", "param", "code"}
    return found
