"""The agent as one tool of an MCP server, by the MCP SDK (`pip install mcp`): over HTTP at /mcp, or over pipes.

Over HTTP the SDK's application is called through ASGI for each request. It keeps no sessions, so a connection that is
closed is all that has to be noticed: it ends the call, and with it the conversation.

Over pipes, a client starts the server as its own process and writes messages to its stdin (`run_over_pipes`). Nothing
else may be written to its stdout; keeping others away from it is up to the caller.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

from arpo.errors import ArpoError
from arpo.serve.http import MAX_BODY_BYTES, Exchange, Refused
from arpo.serve.messages import ChatRequest
from arpo.serve.service import Event, Service

TOOL = "ask"
_logger = logging.getLogger("arpo")


def require_sdk() -> None:
    """Raise ArpoError if the MCP SDK is not there."""
    try:
        import mcp.server.mcpserver  # noqa: F401
    except ImportError:
        raise ArpoError("--mcp, --mcp-stdio: the MCP SDK is missing; pip install mcp") from None


class AgentTool:
    """The MCP server of a service."""

    def __init__(self, service: Service) -> None:
        require_sdk()
        from mcp.server.mcpserver import MCPServer
        from mcp.server.transport_security import TransportSecuritySettings

        self._service = service
        self._server: Any = MCPServer("arpo", log_level="ERROR")
        self._server.add_tool(self._build_tool(), name=TOOL, description=self._description(), structured_output=False)
        security = TransportSecuritySettings(enable_dns_rebinding_protection=False)  # AgentServer checks hosts and keys
        self._app: Any = self._server.streamable_http_app(stateless_http=True, transport_security=security)

    def running(self) -> contextlib.AbstractAsyncContextManager[None]:
        """The block in which requests can be handled."""
        block: contextlib.AbstractAsyncContextManager[None] = self._server.session_manager.run()
        return block

    async def run_over_pipes(self, source: int, target: int) -> None:
        """Answer the messages from one file descriptor, a line each, on another one, until the client closes it."""
        import anyio
        from mcp.server.stdio import stdio_server

        reader = asyncio.StreamReader(limit=MAX_BODY_BYTES)
        with os.fdopen(source, "rb", buffering=0) as incoming, os.fdopen(target, "w", encoding="utf-8") as outgoing:
            try:
                transport, _ = await asyncio.get_running_loop().connect_read_pipe(
                    lambda: asyncio.StreamReaderProtocol(reader), incoming
                )
            except ValueError:
                raise ArpoError("--mcp-stdio: stdin is a file; an MCP client gives a pipe") from None
            lines: Any = _read_lines(reader)
            try:
                async with stdio_server(lines, anyio.wrap_file(outgoing)) as streams:
                    server = self._server._lowlevel_server  # MCPServer itself takes no streams
                    await server.run(*streams, server.create_initialization_options())
            finally:
                transport.close()

    def _description(self) -> str:
        tools = ", ".join(self._service.agent.tools)
        uses = f" It uses these tools by itself: {tools}." if tools else ""
        return f"Ask the agent {self._service.name} a question and get its answer.{uses}"

    def _build_tool(self) -> Any:
        from mcp.server.mcpserver import Context
        from mcp.server.mcpserver.exceptions import ToolError

        service = self._service

        async def ask(question: str, ctx: Context) -> str:
            calls: asyncio.Queue[str | None] = asyncio.Queue()

            def on_event(event: Event) -> None:
                if event["type"] == "call":
                    calls.put_nowait(f"calls {event['name'] or 'nothing usable'}")

            try:
                task = await service.start(ChatRequest(question), on_event)
                task.add_done_callback(lambda _: calls.put_nowait(None))
                try:
                    number = 0
                    while (message := await calls.get()) is not None:
                        number += 1
                        await ctx.report_progress(number, None, message)
                    reply = await service.result(task)
                finally:
                    task.cancel()
            except Refused as refused:
                raise ToolError(str(refused)) from None
            if reply.finish_reason != "stop":
                rest = f"; its last words: {reply.content}" if reply.content else ""
                raise ToolError(f"the agent found no answer within its limits ({reply.stop_reason}){rest}")
            return reply.content

        ask.__annotations__.update(question=str, ctx=Context)
        return ask

    async def handle(self, exchange: Exchange) -> None:
        """Let the SDK answer a request."""
        body = await exchange.read_body()
        finish = await exchange.while_connected(self._call(exchange, body))
        await finish()

    async def _call(self, exchange: Exchange, body: bytes) -> Callable[[], Awaitable[None]]:
        """Call the SDK's application; returns what sends the end of the reply.

        The end is not sent here: a client that has all of a reply may send its next request, while the application
        still runs and the connection is watched.
        """
        head, pending = exchange.head, [{"type": "http.request", "body": body, "more_body": False}]
        headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in head.headers.items()]
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": f"1.{head.version}",
            "method": head.method,
            "scheme": "http",
            "path": head.path,
            "raw_path": head.path.encode("latin-1"),
            "query_string": head.query.encode("latin-1"),
            "root_path": "",
            "headers": headers,
            "client": None,
            "server": None,
        }
        started: dict[str, Any] = {}
        finish: list[Callable[[], Awaitable[None]]] = []
        ended = asyncio.Event()

        async def receive() -> dict[str, Any]:
            if pending:
                return pending.pop()
            await ended.wait()  # if the client goes away, all of this is cancelled
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                started.update(message)
                return
            content, more = message.get("body", b""), message.get("more_body", False)
            if not exchange.status:
                named = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in started["headers"]}
                kind = named.pop("content-type", "application/json")
                passed = {name: value for name, value in named.items() if name in ("allow", "mcp-session-id")}
                if not more:
                    finish.append(partial(exchange.send, started["status"], kind, content, **passed))
                    ended.set()
                    return
                exchange.start_stream(started["status"], kind, **passed)
            await exchange.write(content)
            if not more:
                finish.append(exchange.end_stream)
                ended.set()

        await self._app(scope, receive, send)
        if not finish:
            raise RuntimeError("the MCP SDK did not complete its reply")
        return finish[0]


async def _read_lines(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """The lines of a stream, until it ends or one is too long."""
    while True:
        try:
            line = await reader.readline()
        except ValueError:
            _logger.error("a message has more than %s bytes: the server ends", f"{MAX_BODY_BYTES:,}")
            return
        if not line:
            return
        yield line
