"""The connection to an MCP server: pipes of a program or HTTP, as the streams that the SDK reads and writes.

Guarantees: a message takes bounded memory, and one that is too long becomes an error of its request if that is known.
The SDK sees only responses: requests of the server are refused, notifications and invalid messages are dropped.
The stderr of a program is kept for error messages and never printed. When the streams are closed, the program and its
process group have ended.
Not covered: a program that leaves its process group; systems without process groups.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from pydantic import ValidationError

from arpo.errors import ArpoError

if TYPE_CHECKING:
    import httpx2
    from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
    from mcp.client import ClientSession
    from mcp.client._transport import ReadStream, TransportStreams, WriteStream
    from mcp.shared.message import SessionMessage
    from mcp_types import JSONRPCError, JSONRPCMessage, JSONRPCRequest, JSONRPCResponse

MAX_MESSAGE_BYTES = 8 * 2**20
TOO_LARGE = f"the result is larger than {MAX_MESSAGE_BYTES // 2**20} MB; ask for less"
NOTES_BYTES = 4096
NOTES_LINES = 8
CLOSE_SECONDS = 2.0  # for an orderly end of the session
GRACE_SECONDS = 1.0  # for a program to exit by itself, and again after SIGTERM
STDERR_SECONDS = 0.1  # to read what a program wrote before it ended
SILENCE_SECONDS = 300.0  # between two chunks of an HTTP reply
_ENDS = 200  # bytes kept of each end of a line that is too long

# The id of a response, where the beginning or the end of its line leaves no doubt about it.
_ID = re.compile(rb'^\s*\{\s*(?:"jsonrpc"\s*:\s*"2\.0"\s*,\s*)?"id"\s*:\s*(\d+)\s*,|"id"\s*:\s*(\d+)\s*\}\s*$')


@dataclass(frozen=True, slots=True)
class ServerParams:
    """A program to start, or a URL; the timeouts, in seconds, are those of a call and of the start."""

    name: str
    command: str | None
    args: tuple[str, ...]
    env: Mapping[str, str] = field(repr=False)
    url: str | None
    headers: Mapping[str, str] = field(repr=False)
    timeout: float
    start_timeout: float


class Connection:
    """One connection, from its start until it is `closed`; it can be used once it has a `session`.

    `responses` counts the responses of the server. `scope` cancels the start after `start_timeout` seconds.
    """

    def __init__(self, start_timeout: float) -> None:
        import anyio

        self.closed = asyncio.Event()
        self.scope = anyio.CancelScope(deadline=anyio.current_time() + start_timeout)
        self.session: ClientSession | None = None
        self.responses = 0
        self._notes = b""

    @property
    def usable(self) -> bool:
        """Whether calls can be sent."""
        return self.session is not None and not self.closed.is_set()

    def close(self) -> None:
        """Let it end: at once if it is still starting, else in good order."""
        self.closed.set()
        self.scope.deadline = asyncio.get_running_loop().time() + (CLOSE_SECONDS if self.session else 0)

    @asynccontextmanager
    async def open(self, params: ServerParams) -> AsyncIterator[TransportStreams]:
        """Yield the SDK's pair of streams; leaving the block ends the connection and the program."""
        streams = _stdio(params, self) if params.url is None else _http(params, params.url, self)
        async with streams as (read, write):
            yield _Responses(read, write, self), write

    def note(self, text: bytes | str) -> None:
        """Keep something that may explain a failure."""
        more = text if isinstance(text, bytes) else f"\n{text}\n".encode(errors="replace")
        self._notes = (self._notes + more[-NOTES_BYTES:])[-NOTES_BYTES:]

    def notes(self) -> str:
        """Return the last notes, one per line, safe to print."""
        lines = [line for line in self._notes.decode(errors="replace").splitlines() if line.strip()]
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


class _Responses:
    """The part of a server's messages that the SDK reads: its responses."""

    def __init__(
        self, read: ReadStream[SessionMessage | Exception], write: WriteStream[SessionMessage], connection: Connection
    ) -> None:
        self._read, self._write, self._connection = read, write, connection

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> SessionMessage | Exception:
        from mcp.shared.message import SessionMessage
        from mcp_types import JSONRPCNotification, JSONRPCRequest

        async for item in self._read:
            if isinstance(item, Exception):
                self._connection.note(str(item)[:_ENDS])
            elif isinstance(item.message, JSONRPCRequest):
                await self._write.send(SessionMessage(_refusal(item.message)))
            elif not isinstance(item.message, JSONRPCNotification):
                self._connection.responses += 1
                return item
        raise StopAsyncIteration

    async def receive(self) -> SessionMessage | Exception:
        return await self.__anext__()

    async def aclose(self) -> None:
        await self._read.aclose()

    async def __aenter__(self) -> Self:
        await self._read.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> bool | None:
        self._connection.closed.set()
        return await self._read.__aexit__(*error)


def _refusal(request: JSONRPCRequest) -> JSONRPCResponse | JSONRPCError:
    from mcp_types import METHOD_NOT_FOUND, ErrorData, JSONRPCError, JSONRPCResponse

    if request.method == "ping":
        return JSONRPCResponse(jsonrpc="2.0", id=request.id, result={})
    refused = ErrorData(code=METHOD_NOT_FOUND, message=f"{request.method[:100]} is not offered")
    return JSONRPCError(jsonrpc="2.0", id=request.id, error=refused)


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
    import anyio
    from mcp.client.stdio import get_default_environment
    from mcp.shared.message import SessionMessage

    transport, program = await asyncio.get_running_loop().subprocess_exec(
        _Program,
        str(params.command),
        *params.args,
        env={**get_default_environment(), **params.env},
        start_new_session=True,
    )
    assert program.stdin is not None and program.stdout is not None and program.stderr is not None
    incoming, read = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    write, outgoing = anyio.create_memory_object_stream[SessionMessage](0)
    errors = asyncio.create_task(_read_stderr(program.stderr, connection))
    async with anyio.create_task_group() as group:
        group.start_soon(_receive, program.stdout, incoming, connection)
        group.start_soon(_send, program.stdin, outgoing, incoming)
        group.start_soon(_close_on_exit, program, incoming)
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


async def _close_on_exit(program: _Program, incoming: MemoryObjectSendStream[SessionMessage | Exception]) -> None:
    await program.exited.wait()
    await asyncio.sleep(STDERR_SECONDS)
    await incoming.aclose()


async def _read_stderr(stderr: asyncio.StreamReader, connection: Connection) -> None:
    while chunk := await stderr.read(NOTES_BYTES):
        connection.note(chunk)


async def _receive(
    stdout: asyncio.StreamReader, incoming: MemoryObjectSendStream[SessionMessage | Exception], connection: Connection
) -> None:
    import anyio
    from mcp.shared.message import SessionMessage
    from mcp_types import JSONRPCNotification

    async with incoming:
        async for line, whole in _lines(stdout):
            message = _message(line) if whole else _too_long(line)
            if isinstance(message, JSONRPCNotification):
                continue
            if message is None and not whole:
                connection.note(f"[{TOO_LARGE}]")
                return
            if message is None:
                connection.note(line[:_ENDS].decode(errors="replace"))
                continue
            try:
                await incoming.send(SessionMessage(message))
            except (anyio.BrokenResourceError, anyio.ClosedResourceError):
                return


async def _send(
    stdin: asyncio.StreamWriter,
    outgoing: MemoryObjectReceiveStream[SessionMessage],
    incoming: MemoryObjectSendStream[SessionMessage | Exception],
) -> None:
    with suppress(OSError):
        async with outgoing:
            async for item in outgoing:
                stdin.write(item.message.model_dump_json(by_alias=True, exclude_unset=True).encode() + b"\n")
                await stdin.drain()
    await incoming.aclose()


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


def _message(line: bytes) -> JSONRPCMessage | None:
    from mcp_types import jsonrpc_message_adapter

    try:
        return jsonrpc_message_adapter.validate_json(line, by_name=False)
    except ValueError:
        return None


def _too_long(line: bytes) -> JSONRPCError | None:
    """Return an error in place of a response that is too long, if its request can be identified."""
    from mcp_types import INVALID_PARAMS, ErrorData, JSONRPCError

    found = _ID.search(line)
    if found is None:
        return None
    error = ErrorData(code=INVALID_PARAMS, message=TOO_LARGE)
    return JSONRPCError(jsonrpc="2.0", id=int(found[1] or found[2]), error=error)


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
    import httpx2
    from mcp.client.streamable_http import streamable_http_client

    async def check(response: httpx2.Response) -> None:
        if response.request.method == "POST" and response.is_error and response.status_code != 404:
            connection.note(f"[HTTP {response.status_code} {response.reason_phrase}]")
        if response.status_code == 404 and "mcp-session-id" in response.request.headers:
            connection.closed.set()  # the server has lost the session
        if response.headers.get("content-encoding", "identity") != "identity":
            raise httpx2.DecodingError("the server compresses its replies although it was asked not to")
        if not response.headers.get("content-type", "").lower().startswith("text/event-stream"):
            response.stream = _bounded(response.stream)

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


def _bounded(stream: Any) -> httpx2.AsyncByteStream:
    import httpx2

    class Bounded(httpx2.AsyncByteStream):
        async def __aiter__(self) -> AsyncIterator[bytes]:
            size = 0
            async for part in stream:
                size += len(part)
                if size > MAX_MESSAGE_BYTES:
                    raise httpx2.StreamError(TOO_LARGE)
                yield part

        async def aclose(self) -> None:
            await stream.aclose()

    return Bounded()
