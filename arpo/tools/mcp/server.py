"""Tools of any MCP server, started as a program (stdio) or reached at a URL (streamable HTTP), by the official SDK.

    with connect_mcp(name="files", command="npx", args=["-y", "@modelcontextprotocol/server-filesystem", "."]) as files:
        tools = files.tools

Promises: the connection lives in a thread of its own, so calls may come from any event loop; the tools stay as they
were announced; a server that dies or hangs is restarted at the next call, once for all callers; a program gets a
minimal environment and `env`, not that of this process; `close`, or the end of the interpreter, ends both thread and
program.

Does not cover: isolation (a program runs with the rights of this process), sign-in by browser, anything of MCP but
tools (a server that wants sampling, roots or a person's input is refused), and what `mcp_wire` does not.
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
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Self

from pydantic import TypeAdapter

from arpo.errors import ArpoError
from arpo.tools.base import Tool, ToolError, ToolUnavailable
from arpo.tools.mcp.transport import MAX_MESSAGE_BYTES, TOO_LARGE, Endpoint, Wire, reason
from arpo.types import ToolSpec

if TYPE_CHECKING:
    import mcp_types
    from mcp.client import ClientSession

MAX_TOOLS = 1000
CLOSE_SECONDS = 2.0  # for an orderly good-bye
JOIN_SECONDS = 15.0  # more than all limits of an end together
SLACK_SECONDS = 1.0  # that `call_tool` has to be the first to say that a call takes too long
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
    """Start the server `command`, or reach the one at `url`, and take its tools, or `only` those named."""
    if (command is None) == (url is None):
        raise ArpoError(f"MCP server {name}: give either `command` or `url`")
    if headers if url is None else (args or env):
        raise ArpoError(f"MCP server {name}: `args` and `env` go with `command`, `headers` with `url`")
    if url is not None and not url.startswith(("http://", "https://")):
        raise ArpoError(f"MCP server {name}: `url` must begin with http:// or https://")
    try:
        from mcp import Client  # noqa: F401
    except ImportError as error:
        raise ArpoError("MCP servers need another package: pip install 'arpo[mcp]'") from error
    for logger in ("mcp", "client"):  # the SDK's; without a handler Python would print what it logs
        logging.getLogger(logger).addHandler(logging.NullHandler())
    return McpServer(
        Endpoint(name, command, tuple(args), dict(env or {}), url, dict(headers or {}), timeout, start_timeout),
        tuple(only),
    )


class McpServer:
    """A running MCP server and its tools. Close it, or use it in a `with`."""

    tools: tuple[Tool, ...]

    def __init__(self, endpoint: Endpoint, only: tuple[str, ...]) -> None:
        self._link = _Link(endpoint, only)
        self._loop = asyncio.new_event_loop()
        opened: Future[_Offer] = Future()
        main = self._link.run(opened)
        self._thread = threading.Thread(target=_run, args=(self._loop, main), name=self._link.title, daemon=True)
        self._thread.start()
        atexit.register(self.close)
        try:
            self.tools = tuple(self._tool(spec, opened.result().version) for spec in opened.result().specs)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the connection, the program with everything that it started, and the thread. May be called twice."""
        atexit.unregister(self.close)
        with suppress(RuntimeError):  # the loop is closed already
            self._loop.call_soon_threadsafe(self._link.closing.set)
        self._thread.join(JOIN_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _tool(self, spec: ToolSpec, version: str) -> Tool:
        async def run(**args: Any) -> str:
            call = self._link.call(spec.name, args)
            try:
                future = asyncio.run_coroutine_threadsafe(call, self._loop)
            except RuntimeError:
                call.close()
                raise ToolUnavailable(f"{self._link.title} is closed") from None
            return await asyncio.wrap_future(future)

        try:
            return Tool(spec, run, timeout=self._link.endpoint.timeout, version=version, close=self.close)
        except ArpoError as error:
            raise ArpoError(f"{self._link.title}: {error}; leave it out with `only`") from None


def _run(loop: asyncio.AbstractEventLoop, main: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(main)


# On the background loop.


@dataclass(frozen=True, slots=True)
class _Offer:
    """What a server announces: its tools, its own name and version."""

    specs: tuple[ToolSpec, ...]
    version: str


class _Live(Wire):
    """One connection, from its start until it is over. Usable while it has a session and is not over."""

    def __init__(self, start_timeout: float) -> None:
        import anyio

        super().__init__()
        self.scope = anyio.CancelScope(deadline=anyio.current_time() + start_timeout)
        self.session: ClientSession | None = None

    def end(self) -> None:
        """Let it end: at once if it is still starting, else in good order."""
        self.over.set()
        self.scope.deadline = asyncio.get_running_loop().time() + (CLOSE_SECONDS if self.session else 0)


class _Link:
    """One server: its connection of the moment, and how to get the next one."""

    def __init__(self, endpoint: Endpoint, only: tuple[str, ...]) -> None:
        self.title = f"MCP server {_without_password(endpoint.name)}"
        self.closing = asyncio.Event()
        self.endpoint = endpoint
        self._only = only  # once started: what was announced
        self._mode = "auto"
        self._live: _Live | None = None
        self._serving: asyncio.Task[None] | None = None
        self._starting: asyncio.Task[None] | None = None
        self._checking: asyncio.Task[None] | None = None
        self._why = ""

    async def run(self, opened: Future[_Offer]) -> None:
        """Open the first connection, and keep the loop until it is time to close."""
        self._starting = asyncio.create_task(self._first(opened))
        await self.closing.wait()
        self._starting.cancel()
        self._why = f"{self.title} is closed"
        if self._live is not None and self._serving is not None:
            self._live.end()
            await asyncio.wait({self._serving})

    async def call(self, name: str, args: Mapping[str, Any]) -> str:
        """Call a tool; its result as text."""
        from mcp import MCPError
        from mcp_types import CallToolRequest, CallToolRequestParams, InputRequiredResult
        from mcp_types.jsonrpc import CONNECTION_CLOSED, INVALID_PARAMS

        try:
            json.dumps(args, ensure_ascii=False, allow_nan=False).encode()
        except (ValueError, TypeError, RecursionError):
            raise ToolError("the arguments hold something that cannot be sent (half a character, NaN)") from None
        live = await self._connected()
        assert live.session is not None
        request = CallToolRequest(params=CallToolRequestParams(name=name, arguments=dict(args)))
        try:
            async with asyncio.timeout(self.endpoint.timeout + SLACK_SECONDS):
                result = await live.session.send_request(request, _answer_type())
        except MCPError as error:
            if error.code == INVALID_PARAMS:
                raise ToolError(error.message) from None
            if TOO_LARGE in error.message or f"exceeded the {MAX_MESSAGE_BYTES} byte limit" in error.message:
                raise ToolError(TOO_LARGE) from None
            if error.code != CONNECTION_CLOSED:
                raise ToolUnavailable(f"{self.title}: {error.message}") from None
            self._suspect(live)
            raise ToolUnavailable(f"{self.title}: {error.message}{live.last_words()}") from None
        except TimeoutError:
            self._suspect(live)
            raise ToolError(f"{name} took longer than {self.endpoint.timeout:g} seconds") from None
        except asyncio.CancelledError:
            self._suspect(live)
            raise
        except Exception as error:
            raise ToolUnavailable(f"{self.title}: {reason(error)}") from error
        if isinstance(result, InputRequiredResult):
            raise ToolError("the tool asks for input that nobody can give here")
        if result.is_error:
            raise ToolError(_text(result) or "the tool failed and did not say why")
        return _text(result)

    async def _connected(self) -> _Live:
        """The connection; the first who finds it lost restarts it, the others wait for that."""
        patience = self.endpoint.timeout / 2  # more, and the call would look as if it had itself taken too long
        if self._checking is not None and (await asyncio.wait({self._checking}, timeout=patience))[1]:
            raise ToolUnavailable(f"{self.title} does not answer")
        if not self._usable() and not self.closing.is_set():
            if self._starting is None or self._starting.done():
                self._starting = asyncio.create_task(self._restart())
            await asyncio.wait({self._starting}, timeout=patience)
        if self._live is None or not self._usable():
            raise ToolUnavailable(self._why)
        return self._live

    def _usable(self) -> bool:
        return self._live is not None and self._live.session is not None and not self._live.over.is_set()

    async def _first(self, opened: Future[_Offer]) -> None:
        try:
            offer = await self._open()
        except BaseException as error:
            opened.set_exception(error)
        else:
            self._only = tuple(spec.name for spec in offer.specs)
            opened.set_result(offer)

    async def _restart(self) -> None:
        self._why = f"{self.title} is being restarted"
        for pause in RESTART_PAUSES:
            await asyncio.sleep(pause)
            try:
                await self._open()
                return
            except ArpoError as error:
                self._why = str(error)

    async def _open(self) -> _Offer:
        if self._serving is not None:
            await asyncio.wait({self._serving})  # the last program may still hold what the next one needs
        ready: asyncio.Future[_Offer] = asyncio.get_running_loop().create_future()
        self._live = _Live(self.endpoint.start_timeout)
        self._serving = asyncio.create_task(self._serve(self._live, ready))
        return await ready

    async def _serve(self, live: _Live, ready: asyncio.Future[_Offer]) -> None:
        """Hold one connection from start to end, in one task, as the SDK wants it."""
        from mcp import Client

        why = f"it was not ready within {self.endpoint.start_timeout:g} seconds"
        try:
            with live.scope:
                async with Client(live.open(self.endpoint), mode=self._mode, cache=None) as client:
                    specs = _specs(await _list(client.session), self._only)
                    info = client.server_info
                    self._mode = "auto" if client.session.initialize_result is None else "legacy"
                    live.scope.deadline = math.inf
                    live.session = client.session
                    if not ready.done():
                        ready.set_result(_Offer(specs, "" if info is None else f"{info.name} {info.version}".strip()))
                    await live.over.wait()
        except Exception as error:
            why = reason(error)
        live.over.set()
        if not ready.done():
            url = _without_password(self.endpoint.url or "")
            place = "" if url in self.title else f" at {url}"
            ready.set_exception(ArpoError(f"{self.title}{place}: {why}{live.last_words()}"))

    def _suspect(self, live: _Live) -> None:
        """A call went wrong: see whether the server answers at all, and end the connection if it does not."""
        if not live.over.is_set() and (self._checking is None or self._checking.done()):
            self._checking = asyncio.create_task(self._check(live))

    async def _check(self, live: _Live) -> None:
        from mcp import MCPError
        from mcp_types import CONNECTION_CLOSED

        assert live.session is not None
        answers = live.answers
        try:
            async with asyncio.timeout(self.endpoint.timeout):  # it may be busy with another call for that long
                await live.session.send_ping()
        except MCPError as error:  # an answer as good as any, unless the SDK itself gave it
            if error.code == CONNECTION_CLOSED:
                live.end()
        except TimeoutError:
            if live.answers == answers:
                live.note("[it did not answer a ping]")
                live.end()


def _without_password(url: str) -> str:
    return re.sub("//[^/@]*@", "//", url)


# What a server says, made ours.


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
    """The tools named in `only`, in that order; all of them if it is empty."""
    count = Counter(tool.name for tool in tools)
    if not tools:
        raise ArpoError("it has no tools")
    if max(count.values()) > 1:
        raise ArpoError(f"it has more than one tool of the name {count.most_common(1)[0][0]!r}")
    unknown = [name for name in only if name not in count]
    if unknown:
        raise ArpoError(f"it has no tool {', '.join(map(repr, unknown))}; it has {', '.join(count)}")
    found = {tool.name: tool for tool in tools}
    return tuple(
        ToolSpec(name, found[name].description or "", found[name].input_schema) for name in dict.fromkeys(only) or found
    )


@cache
def _answer_type() -> TypeAdapter[mcp_types.CallToolResult | mcp_types.InputRequiredResult]:
    from mcp_types import CallToolResult, InputRequiredResult

    return TypeAdapter(CallToolResult | InputRequiredResult)


def _text(result: mcp_types.CallToolResult) -> str:
    """Text as it is, notes in place of what is no text; structured content if there is neither."""
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
