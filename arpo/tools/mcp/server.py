"""Tools of an MCP server, started as a program (stdio) or reached at a URL (streamable HTTP), through the official SDK.

    with connect_mcp(name="files", command="npx", args=["-y", "@modelcontextprotocol/server-filesystem", "."]) as files:
        tools = files.tools

Guarantees: the connection lives in its own thread, so calls may come from any event loop. The tools stay as they were
first listed. A server that dies or hangs is restarted at the next call, once for all callers. A program gets a
minimal environment and `env`, not that of this process. `close`, or the end of the interpreter, ends the thread and
the program.
Not covered: isolation (a program runs with the rights of this process); sign-in by browser; anything of MCP but tools
(a server that wants sampling, roots or user input is refused); what `transport` does not cover.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import logging
import math
import re
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Self

from pydantic import TypeAdapter

from arpo.errors import ArpoError
from arpo.tools.base import Tool, ToolError, ToolUnavailable
from arpo.tools.mcp.transport import MAX_MESSAGE_BYTES, TOO_LARGE, Connection, ServerParams, reason
from arpo.types import ToolSpec

if TYPE_CHECKING:
    import mcp_types
    from mcp.client import ClientSession

MAX_TOOLS = 1000
JOIN_SECONDS = 15.0  # longer than all time limits of closing together
SLACK_SECONDS = 1.0  # added to the timeout of a call, so that `call_tool` reports a timeout first
RESTART_PAUSES = (0.0, 0.5, 2.0)  # before each attempt to restart


def connect_mcp(
    *,
    name: str,
    command: str | None = None,
    args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    url: str | None = None,
    headers: Mapping[str, str] | None = None,
    only: Sequence[str] = (),
    timeout: float = 30.0,
    start_timeout: float = 60.0,
) -> McpServer:
    """Start the program `command` or connect to `url`; use all tools of the server or `only` some."""
    if (command is None) == (url is None):
        raise ArpoError(f"MCP server {name}: give either `command` or `url`")
    if headers if url is None else (args or env):
        raise ArpoError(f"MCP server {name}: `args` and `env` go with `command`, `headers` with `url`")
    if url is not None and not url.startswith(("http://", "https://")):
        raise ArpoError(f"MCP server {name}: `url` must begin with http:// or https://")
    try:
        from mcp import Client  # noqa: F401
    except ImportError as error:
        raise ArpoError("MCP servers need another package: pip install mcp") from error
    for logger in ("mcp", "client"):  # of the SDK; without a handler Python prints its records
        logging.getLogger(logger).addHandler(logging.NullHandler())
    return McpServer(
        ServerParams(name, command, tuple(args), dict(env or {}), url, dict(headers or {}), timeout, start_timeout),
        tuple(only),
    )


class McpServer:
    """A running MCP server and its tools; also a context manager."""

    tools: tuple[Tool, ...]

    def __init__(self, params: ServerParams, only: tuple[str, ...]) -> None:
        self._manager = _ConnectionManager(params, only)
        self._loop = asyncio.new_event_loop()
        opened: Future[_Listing] = Future()
        self._thread = threading.Thread(target=self._run, args=(opened,), name=self._manager.title, daemon=True)
        self._thread.start()
        atexit.register(self.close)
        try:
            listing = opened.result()
            self.tools = tuple(self._tool(spec, listing.version) for spec in listing.specs)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the connection, the program with its process group, and the thread. May be called twice."""
        atexit.unregister(self.close)
        with suppress(RuntimeError):  # the loop is closed already
            self._loop.call_soon_threadsafe(self._manager.closing.set)
        self._thread.join(JOIN_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _run(self, opened: Future[_Listing]) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._manager.run(opened))

    def _tool(self, spec: ToolSpec, version: str) -> Tool:
        async def run(**args: Any) -> str:
            call = self._manager.call(spec.name, args)
            try:
                future = asyncio.run_coroutine_threadsafe(call, self._loop)
            except RuntimeError:
                call.close()
                raise ToolUnavailable(f"{self._manager.title} is closed") from None
            return await asyncio.wrap_future(future)

        try:
            return Tool(spec, run, timeout=self._manager.params.timeout, version=version, close=self.close)
        except ArpoError as error:
            raise ArpoError(f"{self._manager.title}: {error}; leave it out with `only`") from None


@dataclass(frozen=True, slots=True)
class _Listing:
    """The tools of a server, and its name and version."""

    specs: tuple[ToolSpec, ...]
    version: str


class _ConnectionManager:
    """The current connection to one server, and its restarts. Runs on the event loop of the background thread."""

    def __init__(self, params: ServerParams, only: tuple[str, ...]) -> None:
        self.title = f"MCP server {_without_password(params.name)}"
        self.closing = asyncio.Event()
        self.params = params
        self._only = only  # after the first start: the tools that were listed
        self._mode = "auto"
        self._connection: Connection | None = None
        self._serving: asyncio.Task[None] | None = None
        self._starting: asyncio.Task[None] | None = None
        self._checking: asyncio.Task[None] | None = None
        self._error = ""

    async def run(self, opened: Future[_Listing]) -> None:
        """Open the first connection, then wait for `closing`."""
        self._starting = asyncio.create_task(self._first(opened))
        await self.closing.wait()
        self._starting.cancel()
        self._error = f"{self.title} is closed"
        if self._connection is not None and self._serving is not None:
            self._connection.close()
            await asyncio.wait({self._serving})

    async def call(self, name: str, args: Mapping[str, Any]) -> str:
        """Call a tool and return its result as text."""
        from mcp import MCPError
        from mcp_types import CallToolRequest, CallToolRequestParams, InputRequiredResult
        from mcp_types.jsonrpc import CONNECTION_CLOSED, INVALID_PARAMS

        try:
            json.dumps(args, ensure_ascii=False, allow_nan=False).encode()
        except (ValueError, TypeError, RecursionError):
            raise ToolError("the arguments hold something that cannot be sent (half a character, NaN)") from None
        connection = await self._connected()
        assert connection.session is not None
        request = CallToolRequest(params=CallToolRequestParams(name=name, arguments=dict(args)))
        try:
            async with asyncio.timeout(self.params.timeout + SLACK_SECONDS):
                result = await connection.session.send_request(request, _result_type())
        except MCPError as error:
            if error.code == INVALID_PARAMS:
                raise ToolError(error.message) from None
            if TOO_LARGE in error.message or f"exceeded the {MAX_MESSAGE_BYTES} byte limit" in error.message:
                raise ToolError(TOO_LARGE) from None
            if error.code != CONNECTION_CLOSED:
                raise ToolUnavailable(f"{self.title}: {error.message}") from None
            self._check_soon(connection)
            raise ToolUnavailable(f"{self.title}: {error.message}{connection.notes()}") from None
        except TimeoutError:
            self._check_soon(connection)
            raise ToolError(f"{name} took longer than {self.params.timeout:g} seconds") from None
        except asyncio.CancelledError:
            self._check_soon(connection)
            raise
        except Exception as error:
            raise ToolUnavailable(f"{self.title}: {reason(error)}") from error
        if isinstance(result, InputRequiredResult):
            raise ToolError("the tool asks for input that nobody can give here")
        if result.is_error:
            raise ToolError(_text(result) or "the tool failed and did not say why")
        return _text(result)

    async def _connected(self) -> Connection:
        """Return the connection; the first caller that finds it lost restarts it, the others wait."""
        patience = self.params.timeout / 2  # with more, the call itself would appear to time out
        if self._checking is not None and (await asyncio.wait({self._checking}, timeout=patience))[1]:
            raise ToolUnavailable(f"{self.title} does not answer")
        if not self._usable() and not self.closing.is_set():
            if self._starting is None or self._starting.done():
                self._starting = asyncio.create_task(self._restart())
            await asyncio.wait({self._starting}, timeout=patience)
        if self._connection is None or not self._usable():
            raise ToolUnavailable(self._error)
        return self._connection

    def _usable(self) -> bool:
        return self._connection is not None and self._connection.usable

    async def _first(self, opened: Future[_Listing]) -> None:
        try:
            listing = await self._open()
        except BaseException as error:
            opened.set_exception(error)
        else:
            self._only = tuple(spec.name for spec in listing.specs)
            opened.set_result(listing)

    async def _restart(self) -> None:
        self._error = f"{self.title} is being restarted"
        for pause in RESTART_PAUSES:
            await asyncio.sleep(pause)
            try:
                await self._open()
                return
            except ArpoError as error:
                self._error = str(error)

    async def _open(self) -> _Listing:
        if self._serving is not None:
            await asyncio.wait({self._serving})  # the last program may still hold resources that the next one needs
        ready: asyncio.Future[_Listing] = asyncio.get_running_loop().create_future()
        self._connection = Connection(self.params.start_timeout)
        self._serving = asyncio.create_task(self._serve(self._connection, ready))
        return await ready

    async def _serve(self, connection: Connection, ready: asyncio.Future[_Listing]) -> None:
        """Run one connection from start to end, in one task, as the SDK requires."""
        from mcp import Client

        why = f"it was not ready within {self.params.start_timeout:g} seconds"
        try:
            with connection.scope:
                async with Client(connection.open(self.params), mode=self._mode, cache=None) as client:
                    specs = _specs(await _list(client.session), self._only)
                    info = client.server_info
                    self._mode = "auto" if client.session.initialize_result is None else "legacy"
                    connection.scope.deadline = math.inf
                    connection.session = client.session
                    if not ready.done():
                        ready.set_result(_Listing(specs, "" if info is None else f"{info.name} {info.version}".strip()))
                    await connection.closed.wait()
        except Exception as error:
            why = reason(error)
        connection.closed.set()
        if not ready.done():
            url = _without_password(self.params.url or "")
            place = "" if url in self.title else f" at {url}"
            ready.set_exception(ArpoError(f"{self.title}{place}: {why}{connection.notes()}"))

    def _check_soon(self, connection: Connection) -> None:
        """After a failed call, check that the server still answers, and close the connection if not."""
        if not connection.closed.is_set() and (self._checking is None or self._checking.done()):
            self._checking = asyncio.create_task(self._check(connection))

    async def _check(self, connection: Connection) -> None:
        from mcp import MCPError
        from mcp_types import CONNECTION_CLOSED

        assert connection.session is not None
        responses = connection.responses
        try:
            async with asyncio.timeout(self.params.timeout):  # another call may keep it busy for that long
                await connection.session.send_ping()
        except MCPError as error:  # also an answer, unless the SDK made it
            if error.code == CONNECTION_CLOSED:
                connection.close()
        except TimeoutError:
            if connection.responses == responses:
                connection.note("[it did not answer a ping]")
                connection.close()


def _without_password(url: str) -> str:
    return re.sub("//[^/@]*@", "//", url)


async def _list(session: ClientSession) -> list[mcp_types.Tool]:
    from mcp_types import PaginatedRequestParams

    tools: list[mcp_types.Tool] = []
    cursor: str | None = None
    while len(tools) <= MAX_TOOLS:
        page = await session.list_tools(params=PaginatedRequestParams(cursor=cursor))
        tools += page.tools
        cursor = page.next_cursor
        if not cursor:
            return tools
        if not page.tools:
            break
    raise ArpoError(f"its list of tools is longer than {MAX_TOOLS}, or does not end")


def _specs(tools: Sequence[mcp_types.Tool], only: Sequence[str]) -> tuple[ToolSpec, ...]:
    """Return the tools named in `only`, in that order, or all of them if it is empty."""
    count = Counter(tool.name for tool in tools)
    if not tools:
        raise ArpoError("it has no tools")
    if max(count.values()) > 1:
        raise ArpoError(f"it has several tools named {count.most_common(1)[0][0]!r}")
    unknown = [name for name in only if name not in count]
    if unknown:
        raise ArpoError(f"it has no tool {', '.join(map(repr, unknown))}; it has {', '.join(count)}")
    found = {tool.name: tool for tool in tools}
    return tuple(
        ToolSpec(name, found[name].description or "", found[name].input_schema) for name in dict.fromkeys(only) or found
    )


@cache
def _result_type() -> TypeAdapter[mcp_types.CallToolResult | mcp_types.InputRequiredResult]:
    from mcp_types import CallToolResult, InputRequiredResult

    return TypeAdapter(CallToolResult | InputRequiredResult)


def _text(result: mcp_types.CallToolResult) -> str:
    """Return the text of a result, with notes in place of other content; without text, its structured content."""
    from mcp_types import TextContent

    blocks = result.content
    if result.structured_content is not None and not any(isinstance(block, TextContent) for block in blocks):
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(block.text if isinstance(block, TextContent) else _note(block) for block in blocks)


def _note(block: mcp_types.ContentBlock) -> str:
    from mcp_types import AudioContent, BlobResourceContents, EmbeddedResource, ImageContent

    if isinstance(block, ImageContent | AudioContent):
        return f"[{block.type}, {_kilobytes(len(block.data) * 3 // 4)}, not shown]"
    if isinstance(block, EmbeddedResource):
        content = block.resource
        size = len(content.blob) * 3 // 4 if isinstance(content, BlobResourceContents) else len(content.text)
        return f"[resource {str(content.uri)[:200]}, {_kilobytes(size)}, not shown]"
    return f"[link to {str(getattr(block, 'uri', 'nowhere'))[:200]}, not shown]"


def _kilobytes(size: int) -> str:
    return f"{math.ceil(size / 1000)} kB"
