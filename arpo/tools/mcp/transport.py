"""The wire to an MCP server: a program's pipes or HTTP, as the streams that the SDK's client reads and writes.

Promises: a message takes bounded memory however long it is, and one that is too long becomes an error of its request
if it tells which that is; the SDK sees nothing but answers: what a server asks for is refused, its notifications and
whatever is no message are dropped; a program's errors are noted, never printed; when the streams are closed, the
program and everything in its process group has ended.

Does not cover: a program that leaves its process group, systems without process groups.
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
    from mcp.client._transport import ReadStream, TransportStreams, WriteStream
    from mcp.shared.message import SessionMessage
    from mcp_types import JSONRPCError, JSONRPCMessage, JSONRPCRequest, JSONRPCResponse

MAX_MESSAGE_BYTES = 8 * 2**20
TOO_LARGE = f"the result is larger than {MAX_MESSAGE_BYTES // 2**20} MB; ask for less"
NOISE_BYTES = 4096
NOISE_LINES = 8
GRACE_SECONDS = 1.0  # that a program gets to end by itself, and again when it was told to
LAST_WORDS_SECONDS = 0.1  # for what a program wrote before it ended
SILENCE_SECONDS = 300.0  # after which an HTTP reply that began is given up
_ENDS = 200  # bytes kept of either end of a line that is too long

# The id of an answer, where the beginning or the end of its line leaves no doubt about it.
_ID = re.compile(rb'^\s*\{\s*(?:"jsonrpc"\s*:\s*"2\.0"\s*,\s*)?"id"\s*:\s*(\d+)\s*,|"id"\s*:\s*(\d+)\s*\}\s*$')


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a server is: a program to start, or a URL. Times are in seconds: of a call, of a start."""

    name: str
    command: str | None
    args: tuple[str, ...]
    env: Mapping[str, str] = field(repr=False)
    url: str | None
    headers: Mapping[str, str] = field(repr=False)
    timeout: float
    start_timeout: float


class Wire:
    """The streams of one connection: whether they are over, how many answers came, and what may explain a failure."""

    def __init__(self) -> None:
        self.over = asyncio.Event()
        self.answers = 0
        self._noise = b""

    @asynccontextmanager
    async def open(self, endpoint: Endpoint) -> AsyncIterator[TransportStreams]:
        """The SDK's pair of streams; leaving it ends the connection, and the program if it is one."""
        streams = _program(endpoint, self) if endpoint.url is None else _http(endpoint, endpoint.url, self)
        async with streams as (read, write):
            yield _Answers(read, write, self), write

    def note(self, noise: bytes | str) -> None:
        """Keep what may explain a failure."""
        more = noise if isinstance(noise, bytes) else f"\n{noise}\n".encode(errors="replace")
        self._noise = (self._noise + more[-NOISE_BYTES:])[-NOISE_BYTES:]

    def last_words(self) -> str:
        """The last of what was noted, in lines of their own, safe to print."""
        lines = [line for line in self._noise.decode(errors="replace").splitlines() if line.strip()]
        clean = ("".join(char if char.isprintable() else " " for char in line) for line in lines[-NOISE_LINES:])
        return "".join(f"\n  {line[-200:]}" for line in clean)


def reason(error: BaseException) -> str:
    """Why a connection failed, in one line: of all the errors that task groups collect, ours or else the first."""
    leaves = _leaves(error)
    leaf = next((leaf for leaf in leaves if isinstance(leaf, ArpoError)), leaves[0])
    if isinstance(leaf, ArpoError):
        return str(leaf)
    if isinstance(leaf, ValidationError):
        first = leaf.errors(include_url=False)[0]
        value = first["input"]
        name = f" (of {value['name']!r})" if isinstance(value, dict) and "name" in value else ""
        return f"it sent what is not MCP: {'.'.join(map(str, first['loc']))}{name}: {first['msg']}"[:500]
    return (str(leaf) or type(leaf).__name__)[:500]


def _leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in _leaves(inner)]
    return [error]


class _Answers:
    """What the SDK reads of a server: its answers."""

    def __init__(
        self, read: ReadStream[SessionMessage | Exception], write: WriteStream[SessionMessage], wire: Wire
    ) -> None:
        self._read, self._write, self._wire = read, write, wire

    def __aiter__(self) -> _Answers:
        return self

    async def __anext__(self) -> SessionMessage | Exception:
        from mcp.shared.message import SessionMessage
        from mcp_types import JSONRPCNotification, JSONRPCRequest

        async for item in self._read:
            if isinstance(item, Exception):
                self._wire.note(str(item)[:_ENDS])
            elif isinstance(item.message, JSONRPCRequest):
                await self._write.send(SessionMessage(_refusal(item.message)))
            elif not isinstance(item.message, JSONRPCNotification):
                self._wire.answers += 1
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
        self._wire.over.set()
        return await self._read.__aexit__(*error)


def _refusal(request: JSONRPCRequest) -> JSONRPCResponse | JSONRPCError:
    from mcp_types import METHOD_NOT_FOUND, ErrorData, JSONRPCError, JSONRPCResponse

    if request.method == "ping":
        return JSONRPCResponse(jsonrpc="2.0", id=request.id, result={})
    refused = ErrorData(code=METHOD_NOT_FOUND, message=f"{request.method[:100]} is not offered")
    return JSONRPCError(jsonrpc="2.0", id=request.id, error=refused)


# A program: one message per line.


class _Program(asyncio.subprocess.SubprocessStreamProtocol):
    """A program's pipes, and when it ended: its children may hold its pipes for longer."""

    def __init__(self) -> None:
        super().__init__(limit=2**16, loop=asyncio.get_running_loop())
        self.exited = asyncio.Event()

    def process_exited(self) -> None:
        super().process_exited()
        self.exited.set()


@asynccontextmanager
async def _program(endpoint: Endpoint, wire: Wire) -> AsyncIterator[TransportStreams]:
    import anyio
    from mcp.client.stdio import get_default_environment
    from mcp.shared.message import SessionMessage

    transport, program = await asyncio.get_running_loop().subprocess_exec(
        _Program,
        str(endpoint.command),
        *endpoint.args,
        env={**get_default_environment(), **endpoint.env},
        start_new_session=True,
    )
    assert program.stdin is not None and program.stdout is not None and program.stderr is not None
    incoming, read = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    write, outgoing = anyio.create_memory_object_stream[SessionMessage](0)
    errors = asyncio.create_task(_listen(program.stderr, wire))
    async with anyio.create_task_group() as group:
        group.start_soon(_receive, program.stdout, incoming, wire)
        group.start_soon(_send, program.stdin, outgoing, incoming)
        group.start_soon(_watch, program, incoming)
        try:
            yield read, write
        finally:
            with anyio.CancelScope(shield=True):
                await _stop(transport, program, wire)
                await asyncio.wait({errors}, timeout=LAST_WORDS_SECONDS)
            errors.cancel()
            transport.close()
            group.cancel_scope.cancel()
    for stream in (incoming, read, write, outgoing):
        stream.close()


async def _watch(program: _Program, incoming: MemoryObjectSendStream[SessionMessage | Exception]) -> None:
    await program.exited.wait()
    await asyncio.sleep(LAST_WORDS_SECONDS)
    await incoming.aclose()


async def _listen(stderr: asyncio.StreamReader, wire: Wire) -> None:
    while chunk := await stderr.read(NOISE_BYTES):
        wire.note(chunk)


async def _receive(
    stdout: asyncio.StreamReader, incoming: MemoryObjectSendStream[SessionMessage | Exception], wire: Wire
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
                wire.note(f"[{TOO_LARGE}]")
                return
            if message is None:
                wire.note(line[:_ENDS].decode(errors="replace"))
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
    """Lines and whether they are whole: of one that is too long, only its two ends."""
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
    """The answer to give instead of one that is too long, if it tells which request it belongs to."""
    from mcp_types import INVALID_PARAMS, ErrorData, JSONRPCError

    found = _ID.search(line)
    if found is None:
        return None
    error = ErrorData(code=INVALID_PARAMS, message=TOO_LARGE)
    return JSONRPCError(jsonrpc="2.0", id=int(found[1] or found[2]), error=error)


async def _stop(transport: asyncio.SubprocessTransport, program: _Program, wire: Wire) -> None:
    """End a program and its group: its input ends, it is told to end, it is killed."""
    assert program.stdin is not None
    with suppress(OSError):
        program.stdin.close()
    if await _ended(program):
        wire.note(f"[exit code {transport.get_returncode()}]")
    else:
        _signal(transport, signal.SIGTERM)
        await _ended(program)
    _signal(transport, signal.SIGKILL)  # whatever is left of the group, too
    await _ended(program)


async def _ended(program: _Program) -> bool:
    with suppress(TimeoutError):
        await asyncio.wait_for(program.exited.wait(), GRACE_SECONDS)
    return program.exited.is_set()


def _signal(transport: asyncio.SubprocessTransport, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(transport.get_pid(), number)  # it leads a group of its own


# HTTP: the SDK's client, with limits.


@asynccontextmanager
async def _http(endpoint: Endpoint, url: str, wire: Wire) -> AsyncIterator[TransportStreams]:
    import httpx2
    from mcp.client.streamable_http import streamable_http_client

    async def look(response: httpx2.Response) -> None:
        if response.request.method == "POST" and response.is_error and response.status_code != 404:
            wire.note(f"[HTTP {response.status_code} {response.reason_phrase}]")
        if response.status_code == 404 and "mcp-session-id" in response.request.headers:
            wire.over.set()  # the server has forgotten us
        if response.headers.get("content-encoding", "identity") != "identity":
            raise httpx2.DecodingError("the server compresses its replies although it was asked not to")
        if not response.headers.get("content-type", "").lower().startswith("text/event-stream"):
            response.stream = _bounded(response.stream)

    async with (
        httpx2.AsyncClient(
            headers={"accept-encoding": "identity", **endpoint.headers},
            timeout=httpx2.Timeout(endpoint.timeout, read=max(SILENCE_SECONDS, 2 * endpoint.timeout), pool=None),
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=20),
            event_hooks={"response": [look]},
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
