"""The agent as a tool of an MCP server, with the SDK's own client."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

pytest.importorskip("mcp")

from agent_server import (
    NO_KEYS,
    GatedEngine,
    answer,
    build_service,
    exchange,
    port_of,
    request_bytes,
    serving,
    until,
)
from mcp.client.client import Client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared._httpx_utils import create_mcp_http_client

from arpo.errors import ArpoError
from arpo.serve.app import AgentServer
from arpo.serve.http import Exchange
from arpo.serve.keys import Keys, build_keys
from arpo.serve.service import Service

KEY = "sk-" + "4711" * 5
MODES = ("auto", "legacy")  # the protocol of 2026, without a handshake, and those before


def looks_it_up(prefix: str, seed: int) -> str:
    return answer("Upper Kelso") if "found:" in prefix else "<search>Mira</search>"


def use(service: Service, work: Callable[[Any, AgentServer], Awaitable[Any]], mode: str = "auto") -> Any:
    """What `work` makes of the SDK's client and a server."""

    async def main() -> Any:
        async with serving(service, with_mcp=True) as server, Client(f"{server.url}mcp", mode=mode) as client:
            return await work(client, server)

    return asyncio.run(main())


@pytest.mark.parametrize("mode", MODES)
def test_the_agent_is_one_tool_and_its_calls_are_progress(mode: str) -> None:
    told: list[tuple[float, str | None]] = []

    async def on_progress(progress: float, total: float | None, message: str | None) -> None:
        told.append((progress, message))

    async def work(client: Any, server: AgentServer) -> None:
        [tool] = (await client.list_tools()).tools
        assert (tool.name, tool.input_schema["required"]) == ("ask", ["question"])
        assert list(tool.input_schema["properties"]) == ["question"]
        assert "test/agent" in tool.description and "search" in tool.description
        result = await client.call_tool("ask", {"question": "Where was Mira born?"}, progress_callback=on_progress)
        assert (result.is_error, [part.text for part in result.content]) == (False, ["Upper Kelso"])

    service = build_service(looks_it_up)
    use(service, work, mode)
    assert told == [(1, "calls search")]
    assert service.metrics.ended.values == {("answer",): 1}


@pytest.mark.parametrize("mode", MODES)
def test_many_calls_at_once_get_their_own_answers(mode: str) -> None:
    def script(prefix: str, seed: int) -> str:
        return answer(prefix.rpartition("number ")[2].split(".")[0])

    async def work(client: Any, server: AgentServer) -> list[str]:
        async def ask(number: int) -> str:
            result = await client.call_tool("ask", {"question": f"Say number {number}."})
            text: str = result.content[0].text
            return text

        return list(await asyncio.gather(*map(ask, range(30))))

    assert use(build_service(script), work, mode) == [str(number) for number in range(30)]


def test_what_goes_wrong_is_the_result_of_the_tool() -> None:
    async def work(client: Any, server: AgentServer) -> None:
        async def ask(question: Any) -> tuple[bool, str]:
            result = await client.call_tool("ask", {"question": question})
            return result.is_error, result.content[0].text

        failed, text = await ask("Why does it break?")
        assert failed and "found no answer" in text and "max_tool_calls" in text
        failed, text = await ask(" ")
        assert failed and text.endswith("has an empty question")
        failed, text = await ask("long " * 5000)
        assert failed and "4096" in text
        server.service.max_conversations = 0
        failed, text = await ask("Why?")
        assert failed and "try again later" in text

    use(build_service(lambda *_: "<search>Mira</search>", max_tool_calls=1), work)


@pytest.mark.parametrize("mode", MODES)
def test_a_client_that_goes_away_ends_its_conversation(mode: str) -> None:
    engines: list[GatedEngine] = []

    async def main() -> None:
        engine = GatedEngine(looks_it_up)
        engines.append(engine)
        service = build_service(engine)
        async with serving(service, with_mcp=True) as server:

            async def ask() -> None:
                async with Client(f"{server.url}mcp", mode=mode) as client:
                    await client.call_tool("ask", {"question": "Where?"})

            asking = asyncio.ensure_future(ask())
            await until(lambda: engine.waiting == 1)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            await until(lambda: service.running == 0)
            assert service.metrics.ended.values == {("cancelled",): 1}

    asyncio.run(main())
    assert engines[0].cancelled == 1


def test_a_connection_that_is_closed_ends_its_conversation_before_anything_is_written_to_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written: list[bytes] = []
    write = Exchange.write

    async def recorded(exchange: Exchange, content: bytes) -> None:
        written.append(content)
        await write(exchange, content)

    monkeypatch.setattr(Exchange, "write", recorded)

    async def main() -> None:
        engine = GatedEngine(looks_it_up)
        service = build_service(engine)
        async with serving(service, with_mcp=True) as server:
            call = {"name": "ask", "arguments": {"question": "Where?"}}
            body = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": call}).encode()
            _, writer = await asyncio.open_connection("127.0.0.1", port_of(server))
            accept, host = "application/json, text/event-stream", f"127.0.0.1:{port_of(server)}"
            writer.write(request_bytes("POST", "/mcp", body, Host=host, Accept=accept))
            await until(lambda: engine.waiting == 1)
            before = len(written)
            writer.close()
            await until(lambda: engine.cancelled == 1 and service.running == 0)
            assert len(written) == before

    asyncio.run(main())


@pytest.mark.parametrize("method", ["tools/list", "tools/call"])
def test_a_connection_serves_one_call_after_another(method: str) -> None:
    async def main() -> None:
        async with serving(build_service(looks_it_up), with_mcp=True) as server:
            params = {"name": "ask", "arguments": {"question": "Where?"}} if method == "tools/call" else {}
            body = json.dumps({"jsonrpc": "2.0", "id": 1, "method": method, "params": params}).encode()
            accept, host = "application/json, text/event-stream", f"127.0.0.1:{port_of(server)}"
            reader, writer = await asyncio.open_connection("127.0.0.1", port_of(server))
            for _ in range(3):
                writer.write(request_bytes("POST", "/mcp", body, Host=host, Accept=accept))
                head = await reader.readuntil(b"\r\n\r\n")
                assert b"Connection: keep-alive" in head and b"Transfer-Encoding: chunked" in head
                assert b'"result":' in await reader.readuntil(b"\r\n0\r\n\r\n")
            writer.close()

    asyncio.run(main())


def test_a_port_that_is_taken_is_said_and_nothing_stays_open(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with serving(build_service(looks_it_up)) as server:
            other = AgentServer(build_service(looks_it_up), NO_KEYS, with_mcp=True)
            with pytest.raises(ArpoError, match="choose another --port"):
                await other.listen(port_of(server))

    asyncio.run(main())
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []


def test_a_key_is_needed_here_too() -> None:
    async def main() -> None:
        async with serving(build_service(looks_it_up), build_keys([KEY], "here"), with_mcp=True) as server:
            body = b'{"jsonrpc": "2.0", "id": 1, "method": "tools/list"}'
            assert (await exchange(server, request_bytes("POST", "/mcp", body)))[0] == 401
            headers = {"Authorization": f"Bearer {KEY}"}
            async with create_mcp_http_client(headers=headers) as http:
                transport = streamable_http_client(f"{server.url}mcp", http_client=http)
                async with Client(transport) as client:
                    assert (await client.call_tool("ask", {"question": "Where?"})).content[0].text == "Upper Kelso"  # type: ignore[union-attr]

    asyncio.run(main())


def test_there_is_no_such_server_unless_it_was_asked_for() -> None:
    async def main() -> None:
        async with serving(build_service(looks_it_up)) as server:
            assert (await exchange(server, request_bytes("POST", "/mcp", b"{}")))[0] == 404
        async with serving(build_service(looks_it_up), with_mcp=True) as server:
            assert (await exchange(server, request_bytes("POST", "/mcp", b"{")))[0] in (400, 406)
            for method in ("DELETE", "GET"):  # a stream of messages for a session, which there is not, would never end
                status, headers, _ = await exchange(server, request_bytes(method, "/mcp", Accept="text/event-stream"))
                assert (status, headers["allow"]) == (405, "POST")
            foreign = request_bytes("POST", "/mcp", b"{}", Host="evil.example")
            assert (await exchange(server, foreign))[0] == 403

    asyncio.run(main())


def test_without_the_sdk_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mcp.server.mcpserver", None)
    with pytest.raises(ArpoError, match=r"pip install mcp"):
        AgentServer(build_service(looks_it_up), NO_KEYS, with_mcp=True)
    assert isinstance(NO_KEYS, Keys)
