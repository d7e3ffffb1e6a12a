"""Tools of an MCP server, started as a program (stdio) or reached at a URL (streamable HTTP), through the official SDK.

Guarantees: the connection lives in its own thread, so calls may come from any event loop. The tools stay as they were
first listed. A server that dies or hangs is restarted at the next call, once for all callers. A program gets a
minimal environment and `env`, not that of this process; its stderr is kept for error messages and never printed. The
keys that a server is given are in no result and no error message.
`close`, or the end of the interpreter, ends the thread and the program with its process group. A message takes bounded
memory, and one that is too long becomes an error of its request if that is known. The SDK sees only responses: requests
of the server are refused, notifications and invalid messages are dropped.
Not covered: isolation (a program runs with the rights of this process); a program that leaves its process group;
systems without process groups; sign-in by browser; anything of MCP but tools (a server that wants sampling, roots or
user input is refused).
"""

from __future__ import annotations

import asyncio
import atexit
import json
import math
import os
import re
import signal
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Self

import anyio
import httpx2
import mcp_types
from anyio.streams.memory import MemoryObjectSendStream
from mcp import Client, MCPError
from mcp.client import ClientSession
from mcp.client._transport import ReadStream, TransportStreams, WriteStream
from mcp.client.stdio import get_default_environment
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.message import SessionMessage
from pydantic import TypeAdapter, ValidationError

from arpo.config.masking import MASK, hide, mask_message, secrets_in
from arpo.errors import ArpoError
from arpo.tools.base import Tool, ToolError, ToolUnavailable, ToolUnresponsive
from arpo.types import ToolSpec

MAX_TOOLS = 1000
JOIN_SECONDS = 15.0  # longer than all time limits of closing together
SLACK_SECONDS = 1.0  # added to the timeout of a call, so that `call_tool` reports a timeout first
RESTART_PAUSES = (0.0, 0.5, 2.0)  # before each attempt to restart
MAX_MESSAGE_BYTES = 8 * 2**20
TOO_LARGE = f"the result is larger than {MAX_MESSAGE_BYTES // 2**20} MB; ask for less"
NOTES_BYTES = 4096
NOTES_LINES = 8
CLOSE_SECONDS = 2.0  # for an orderly end of the session
GRACE_SECONDS = 1.0  # for a program to exit by itself, and again after SIGTERM
STDERR_SECONDS = 0.1  # to read what a program wrote before it ended
SILENCE_SECONDS = 300.0  # between two chunks of an HTTP reply
_ENDS = 200  # bytes kept of each end of a line that is too long
_Result = mcp_types.CallToolResult | mcp_types.InputRequiredResult
_RESULT: TypeAdapter[_Result] = TypeAdapter(_Result)

# The id of a response, where the beginning or the end of its line leaves no doubt about it.
_ID = re.compile(rb'^\s*\{\s*(?:"jsonrpc"\s*:\s*"2\.0"\s*,\s*)?"id"\s*:\s*(\d+)\s*,|"id"\s*:\s*(\d+)\s*\}\s*$')


@dataclass(frozen=True, slots=True)
class ServerParams:
    """A program to start, or a URL; the timeouts, in seconds, are those of a call and of the start."""

    name: str
    command: str | None
    args: tuple[str, ...] = field(repr=False)
    env: Mapping[str, str] = field(repr=False)
    url: str | None = field(repr=False)
    headers: Mapping[str, str] = field(repr=False)
    timeout: float
    start_timeout: float


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
            specs, version = opened.result()
            self.tools = tuple(self._tool(spec, version) for spec in specs)
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
            try:
                return self._manager.without_secrets(await asyncio.wrap_future(future))
            except (ToolError, ToolUnavailable) as error:
                raise type(error)(self._manager.without_secrets(str(error))) from None

        try:
            return Tool(spec, run, timeout=self._manager.params.timeout, version=version, close=self.close)
        except ArpoError as error:
            raise ArpoError(f"{self._manager.title}: {error}; leave it out with `only`") from None


_Listing = tuple[tuple[ToolSpec, ...], str]
"""The tools of a server, and its name and version."""


class _ConnectionManager:
    """The current connection to one server, and its restarts. Runs on the event loop of the background thread."""

    def __init__(self, params: ServerParams, only: tuple[str, ...]) -> None:
        self.title = f"MCP server {_shown(params.name)}"
        keys = {value.rpartition(" ")[2] for value in params.headers.values()}
        self._secrets = keys | secrets_in({"url": params.url, "args": params.args, "env": params.env})
        self.closing = asyncio.Event()
        self.params = params
        self._only = only  # after the first start: the tools that were listed
        self._mode = "auto"
        self._connection: Connection | None = None
        self._serving: asyncio.Task[None] | None = None
        self._starting: asyncio.Task[None] | None = None
        self._checking: asyncio.Task[None] | None = None
        self._error = ""

    def without_secrets(self, text: str) -> str:
        """A text of the server without the keys that it was given."""
        return hide(text, self._secrets)

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
        try:
            json.dumps(args, ensure_ascii=False, allow_nan=False).encode()
        except (ValueError, TypeError, RecursionError):
            raise ToolError("the arguments hold something that cannot be sent (half a character, NaN)") from None
        connection = await self._connected()
        assert connection.session is not None
        request = mcp_types.CallToolRequest(params=mcp_types.CallToolRequestParams(name=name, arguments=dict(args)))
        try:
            async with asyncio.timeout(self.params.timeout + SLACK_SECONDS):
                result = await connection.session.send_request(request, _RESULT)
        except MCPError as error:
            if error.code == mcp_types.INVALID_PARAMS:
                raise ToolError(error.message) from None
            if TOO_LARGE in error.message or f"exceeded the {MAX_MESSAGE_BYTES} byte limit" in error.message:
                raise ToolError(TOO_LARGE) from None
            if error.code != mcp_types.CONNECTION_CLOSED:
                raise ToolUnavailable(f"{self.title}: {error.message}") from None
            self._check_soon(connection)
            raise ToolUnavailable(f"{self.title}: {error.message}{connection.notes(self.without_secrets)}") from None
        except TimeoutError:
            self._check_soon(connection)
            raise ToolUnresponsive(f"{name} took longer than {self.params.timeout:g} seconds") from None
        except asyncio.CancelledError:
            self._check_soon(connection)
            raise
        except Exception as error:
            raise ToolUnavailable(f"{self.title}: {reason(error)}") from error
        if isinstance(result, mcp_types.InputRequiredResult):
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
        connection = self._connection
        return connection is not None and connection.session is not None and not connection.closed.is_set()

    async def _first(self, opened: Future[_Listing]) -> None:
        try:
            listing = await self._open()
        except BaseException as error:
            opened.set_exception(error)
        else:
            self._only = tuple(spec.name for spec in listing[0])
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
                        ready.set_result((specs, "" if info is None else f"{info.name} {info.version}".strip()))
                    await connection.closed.wait()
        except Exception as error:
            why = reason(error)
        connection.closed.set()
        if not ready.done():
            url = _shown(self.params.url or "")
            place = "" if url in self.title else f" at {url}"
            why = mask_message(self.without_secrets(why) + connection.notes(self.without_secrets))
            ready.set_exception(ArpoError(f"{self.title}{place}: {why}"))

    def _check_soon(self, connection: Connection) -> None:
        """After a failed call, check that the server still answers, and close the connection if not."""
        if not connection.closed.is_set() and (self._checking is None or self._checking.done()):
            self._checking = asyncio.create_task(self._check(connection))

    async def _check(self, connection: Connection) -> None:
        assert connection.session is not None
        responses = connection.responses
        try:
            async with asyncio.timeout(self.params.timeout):  # another call may keep it busy for that long
                await connection.session.send_ping()
        except MCPError as error:  # also an answer, unless the SDK made it
            if error.code == mcp_types.CONNECTION_CLOSED:
                connection.close()
        except TimeoutError:
            if connection.responses == responses:
                connection.note("[it did not answer a ping]")
                connection.close()


def _shown(text: str) -> str:
    return mask_message(text).replace(f"{MASK}@", "")


async def _list(session: ClientSession) -> list[mcp_types.Tool]:
    tools: list[mcp_types.Tool] = []
    cursor: str | None = None
    while len(tools) <= MAX_TOOLS:
        page = await session.list_tools(params=mcp_types.PaginatedRequestParams(cursor=cursor))
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


def _text(result: mcp_types.CallToolResult) -> str:
    """Return the text of a result, with notes in place of other content; without text, its structured content."""
    blocks = result.content
    if result.structured_content is not None and not any(isinstance(block, mcp_types.TextContent) for block in blocks):
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(block.text if isinstance(block, mcp_types.TextContent) else _note(block) for block in blocks)


def _note(block: mcp_types.ContentBlock) -> str:
    if isinstance(block, mcp_types.ImageContent | mcp_types.AudioContent):
        return f"[{block.type}, {_kilobytes(len(block.data) * 3 // 4)}, not shown]"
    if isinstance(block, mcp_types.EmbeddedResource):
        content = block.resource
        size = len(content.blob) * 3 // 4 if isinstance(content, mcp_types.BlobResourceContents) else len(content.text)
        return f"[resource {str(content.uri)[:200]}, {_kilobytes(size)}, not shown]"
    return f"[link to {str(getattr(block, 'uri', 'nowhere'))[:200]}, not shown]"


def _kilobytes(size: int) -> str:
    return f"{math.ceil(size / 1000)} kB"


# The connection: pipes of a program or HTTP, as the streams that the SDK reads and writes.


class Connection:
    """One connection, from its start until it is `closed`; it can be used once it has a `session`.

    `responses` counts the responses of the server. `scope` cancels the start after `start_timeout` seconds.
    """

    def __init__(self, start_timeout: float) -> None:
        self.closed = asyncio.Event()
        self.scope = anyio.CancelScope(deadline=anyio.current_time() + start_timeout)
        self.session: ClientSession | None = None
        self.responses = 0
        self._notes = b""

    def close(self) -> None:
        """Let it end: at once if it is still starting, else in good order."""
        self.closed.set()
        self.scope.deadline = asyncio.get_running_loop().time() + (CLOSE_SECONDS if self.session else 0)

    @asynccontextmanager
    async def open(self, params: ServerParams) -> AsyncIterator[TransportStreams]:
        """Yield the SDK's pair of streams; leaving the block ends the connection and the program."""
        streams = _stdio(params, self) if params.url is None else _http(params, params.url, self)
        incoming, responses = anyio.create_memory_object_stream[SessionMessage | Exception](0)
        async with streams as (read, write), responses, anyio.create_task_group() as group:
            group.start_soon(self._forward, read, write, incoming)
            try:
                yield responses, write
            finally:
                group.cancel_scope.cancel()

    async def _forward(
        self,
        read: ReadStream[SessionMessage | Exception],
        write: WriteStream[SessionMessage],
        incoming: MemoryObjectSendStream[SessionMessage | Exception],
    ) -> None:
        """Pass on the responses of the server, refuse its requests, and drop everything else."""
        with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):  # the session has ended
            async with incoming:
                async for item in read:
                    if isinstance(item, Exception):
                        self.note(str(item)[:_ENDS])
                    elif isinstance(item.message, mcp_types.JSONRPCRequest):
                        await write.send(SessionMessage(_refusal(item.message)))
                    elif not isinstance(item.message, mcp_types.JSONRPCNotification):
                        self.responses += 1
                        await incoming.send(item)
        self.closed.set()

    def note(self, text: bytes | str) -> None:
        """Keep something that may explain a failure."""
        more = text if isinstance(text, bytes) else f"\n{text}\n".encode(errors="replace")
        self._notes = (self._notes + more[-NOTES_BYTES:])[-NOTES_BYTES:]

    def notes(self, without_secrets: Callable[[str], str]) -> str:
        """Return the last notes, one per line, safe to print."""
        lines = [line for line in without_secrets(self._notes.decode(errors="replace")).splitlines() if line.strip()]
        clean = ("".join(char if char.isprintable() else " " for char in line) for line in lines[-NOTES_LINES:])
        return "".join(f"\n  {line[-200:]}" for line in clean)


def reason(error: BaseException) -> str:
    """Return why a connection failed, in one line; of a group of errors, an ArpoError or else the first."""
    errors = _flatten(error)
    leaf = next((leaf for leaf in errors if isinstance(leaf, ArpoError)), errors[0])
    if isinstance(leaf, ArpoError):
        return str(leaf)
    if isinstance(leaf, ValidationError):
        first = leaf.errors(include_url=False)[0]
        value = first["input"]
        name = f" (of {value['name']!r})" if isinstance(value, dict) and "name" in value else ""
        return f"it sent an invalid message: {'.'.join(map(str, first['loc']))}{name}: {first['msg']}"[:500]
    return (str(leaf) or type(leaf).__name__)[:500]


def _flatten(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in _flatten(inner)]
    return [error]


def _refusal(request: mcp_types.JSONRPCRequest) -> mcp_types.JSONRPCResponse | mcp_types.JSONRPCError:
    if request.method == "ping":
        return mcp_types.JSONRPCResponse(jsonrpc="2.0", id=request.id, result={})
    refused = mcp_types.ErrorData(code=mcp_types.METHOD_NOT_FOUND, message=f"{request.method[:100]} is not offered")
    return mcp_types.JSONRPCError(jsonrpc="2.0", id=request.id, error=refused)


# A program: one message per line.


class _Program(asyncio.subprocess.SubprocessStreamProtocol):
    """A program's pipes, and the event of its exit; its children may keep the pipes open."""

    def __init__(self) -> None:
        super().__init__(limit=2**16, loop=asyncio.get_running_loop())
        self.exited = asyncio.Event()

    def process_exited(self) -> None:
        super().process_exited()
        self.exited.set()


@asynccontextmanager
async def _stdio(params: ServerParams, connection: Connection) -> AsyncIterator[TransportStreams]:
    transport, program = await asyncio.get_running_loop().subprocess_exec(
        _Program,
        str(params.command),
        *params.args,
        env={**get_default_environment(), **params.env},
        start_new_session=True,
    )
    stdin, stdout, stderr = program.stdin, program.stdout, program.stderr
    assert stdin is not None and stdout is not None and stderr is not None
    incoming, read = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    write, outgoing = anyio.create_memory_object_stream[SessionMessage](0)

    async def send() -> None:
        with suppress(OSError):
            async with outgoing:
                async for item in outgoing:
                    stdin.write(item.message.model_dump_json(by_alias=True, exclude_unset=True).encode() + b"\n")
                    await stdin.drain()
        await incoming.aclose()

    async def receive() -> None:
        async with incoming:
            async for line, whole in _lines(stdout):
                message = _message(line) if whole else _too_long(line)
                if message is not None:
                    try:
                        await incoming.send(SessionMessage(message))
                    except (anyio.BrokenResourceError, anyio.ClosedResourceError):
                        return
                elif whole:
                    connection.note(line[:_ENDS].decode(errors="replace"))
                else:
                    connection.note(f"[{TOO_LARGE}]")
                    return

    async def read_stderr() -> None:
        while chunk := await stderr.read(NOTES_BYTES):
            connection.note(chunk)

    async def close_on_exit() -> None:
        await program.exited.wait()
        await asyncio.sleep(STDERR_SECONDS)
        await incoming.aclose()

    errors = asyncio.create_task(read_stderr())
    async with anyio.create_task_group() as group:
        for task in (send, receive, close_on_exit):
            group.start_soon(task)
        try:
            yield read, write
        finally:
            with anyio.CancelScope(shield=True):
                await _stop(transport, program, connection)
                await asyncio.wait({errors}, timeout=STDERR_SECONDS)
            errors.cancel()
            transport.close()
            group.cancel_scope.cancel()
    for stream in (incoming, read, write, outgoing):
        stream.close()


async def _lines(stdout: asyncio.StreamReader) -> AsyncIterator[tuple[bytes, bool]]:
    """Yield lines and whether they are complete; of a line that is too long, only its two ends."""
    line, whole = bytearray(), True
    while chunk := await stdout.read(2**16):
        for number, part in enumerate(chunk.split(b"\n")):
            if number:
                if line.strip():
                    yield bytes(line), whole
                line, whole = bytearray(), True
            line += part
            if len(line) > MAX_MESSAGE_BYTES or not whole:
                del line[_ENDS:-_ENDS]
                whole = False


def _message(line: bytes) -> mcp_types.JSONRPCMessage | None:
    try:
        return mcp_types.jsonrpc_message_adapter.validate_json(line, by_name=False)
    except ValueError:
        return None


def _too_long(line: bytes) -> mcp_types.JSONRPCError | None:
    """Return an error in place of a response that is too long, if its request can be identified."""
    found = _ID.search(line)
    if found is None:
        return None
    error = mcp_types.ErrorData(code=mcp_types.INVALID_PARAMS, message=TOO_LARGE)
    return mcp_types.JSONRPCError(jsonrpc="2.0", id=int(found[1] or found[2]), error=error)


async def _stop(transport: asyncio.SubprocessTransport, program: _Program, connection: Connection) -> None:
    """End a program and its process group: close its stdin, then SIGTERM, then SIGKILL."""
    assert program.stdin is not None
    with suppress(OSError):
        program.stdin.close()
    if await _exited(program):
        connection.note(f"[exit code {transport.get_returncode()}]")
    else:
        _signal(transport, signal.SIGTERM)
        await _exited(program)
    _signal(transport, signal.SIGKILL)  # also what is left of the group
    await _exited(program)


async def _exited(program: _Program) -> bool:
    with suppress(TimeoutError):
        await asyncio.wait_for(program.exited.wait(), GRACE_SECONDS)
    return program.exited.is_set()


def _signal(transport: asyncio.SubprocessTransport, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(transport.get_pid(), number)  # it leads its own group


# HTTP: the SDK's client, with limits.


@asynccontextmanager
async def _http(params: ServerParams, url: str, connection: Connection) -> AsyncIterator[TransportStreams]:
    async def check(response: httpx2.Response) -> None:
        if response.request.method == "POST" and response.is_error and response.status_code != 404:
            connection.note(f"[HTTP {response.status_code} {response.reason_phrase}]")
        if response.status_code == 404 and "mcp-session-id" in response.request.headers:
            connection.closed.set()  # the server has lost the session
        if response.headers.get("content-encoding", "identity") != "identity":
            raise httpx2.DecodingError("the server compresses its replies although it was asked not to")
        if not response.headers.get("content-type", "").lower().startswith("text/event-stream"):
            response.stream = _Bounded(response.stream)

    async with (
        httpx2.AsyncClient(
            headers={"accept-encoding": "identity", **params.headers},
            timeout=httpx2.Timeout(params.timeout, read=max(SILENCE_SECONDS, 2 * params.timeout), pool=None),
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=20),
            event_hooks={"response": [check]},
        ) as client,
        streamable_http_client(url, http_client=client, max_sse_event_size=MAX_MESSAGE_BYTES) as streams,
    ):
        yield streams


class _Bounded(httpx2.AsyncByteStream):
    def __init__(self, stream: Any) -> None:
        self._stream = stream

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size = 0
        async for part in self._stream:
            size += len(part)
            if size > MAX_MESSAGE_BYTES:
                raise httpx2.StreamError(TOO_LARGE)
            yield part

    async def aclose(self) -> None:
        await self._stream.aclose()
