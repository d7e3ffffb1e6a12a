"""HTTP/1.1 on asyncio streams, for few routes and long replies.

    server = HttpServer(handle, refuse, max_connections=600)
    await server.listen("127.0.0.1", 8000)
    await server.close(seconds=30)

`handle(exchange)` answers one request: `await exchange.read_body()`, then `send`, or `start_stream` and `write`.
`refuse(exchange, refused)` sends an error.
`exchange.while_connected(work)` runs work that ends when the client goes away.

Guarantees: everything that a client decides is bounded: the head (`MAX_HEAD_BYTES`), the body (`MAX_BODY_BYTES`), the
time for both, the time for which it may leave a reply unread, and the number of connections. A request that could be
read in two ways (several lengths, both a length and a transfer encoding) is refused. An error of a handler is a reply
with status 500; the others go on.
Not covered: TLS, compression, request bodies in chunks (status 411) and pipelining (the connection is closed).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import socket
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, TypeVar

from arpo.errors import ArpoError
from arpo.net.hosts import listen_address

MAX_HEAD_BYTES = 32_768
MAX_BODY_BYTES = 1_000_000
IDLE_SECONDS = 75.0  # until a connection without a request is closed
READ_SECONDS = 30.0  # for a head, and for a body
SEND_SECONDS = 30.0  # for which a client may leave a full buffer unread
LINGER_SECONDS = 2.0  # for what is still being sent by a client that was refused, so that it reads why
BACKLOG = 1024
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_REQUEST_LINE = re.compile(r"([A-Z]{1,20}) ([!-~]{1,8000}) HTTP/1\.([01])")
_logger = logging.getLogger("arpo")
_T = TypeVar("_T")


class Refused(Exception):
    """A request that is answered with an error; `code` and `parameter` are for OpenAI's form of it."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        parameter: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.parameter, self.retry_after = status, code, parameter, retry_after


class ClientGone(Exception):
    """The client closed the connection, or does not read."""


@dataclass(frozen=True, slots=True)
class Head:
    """The first lines of a request; names of headers are in lower case."""

    method: str
    path: str
    headers: Mapping[str, str]
    version: int  # HTTP/1.x
    query: str = ""

    @property
    def keeps_alive(self) -> bool:
        """Whether the client wants to use the connection again."""
        wish = self.headers.get("connection", "").lower()
        return "close" not in wish and (self.version == 1 or "keep-alive" in wish)


def parse_head(raw: bytes) -> Head:
    """The head of a request, without the blank line after it; Refused if it is malformed."""
    first, *lines = raw.decode("latin-1").split("\r\n")
    match = _REQUEST_LINE.fullmatch(first)
    if match is None:
        raise Refused(400, "this is not an HTTP/1.1 request")
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        name, value = name.lower(), value.strip(" \t")
        if not colon or not _TOKEN.fullmatch(name) or re.search(r"[\0\r\n]", value):
            raise Refused(400, "a header of the request is malformed")
        if name in headers and name in ("content-length", "host", "authorization", "transfer-encoding"):
            raise Refused(400, f"the header {name} is there twice")
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    path, _, query = match[2].partition("?")
    return Head(match[1], path, headers, int(match[3]), query)


def body_length(head: Head) -> int:
    """The length of a request's body; Refused if it is too long or not given."""
    if "transfer-encoding" in head.headers:
        raise Refused(411, "send the body with a Content-Length, not in chunks")
    given = head.headers.get("content-length", "0")
    if not re.fullmatch("[0-9]{1,18}", given):
        raise Refused(400, "the header content-length is malformed")
    if int(given) > MAX_BODY_BYTES:
        raise Refused(413, f"the request has {int(given):,} bytes; at most {MAX_BODY_BYTES:,} are read")
    return int(given)


@dataclass(slots=True, eq=False)
class Exchange:
    """One request and the reply to it."""

    head: Head
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    closing: bool = False  # the connection is closed after this reply
    status: int = 0  # of the reply; 0 until it is begun
    _body_read: bool = False
    _in_chunks: bool = False

    async def read_body(self) -> bytes:
        """The body of the request; Refused if it is too long or too slow."""
        length = body_length(self.head)
        if length and self.head.headers.get("expect", "").lower() == "100-continue":
            self.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        try:
            async with asyncio.timeout(READ_SECONDS):
                body = await self.reader.readexactly(length)
        except TimeoutError:
            raise Refused(408, f"the request took more than {READ_SECONDS:.0f} seconds to arrive") from None
        except asyncio.IncompleteReadError:
            raise ClientGone from None
        self._body_read = True
        return body

    async def send(self, status: int, kind: str, content: bytes, **headers: str) -> None:
        """Send a whole reply; names of headers are written with _ for -."""
        self._begin(status, {"Content-Type": kind, "Content-Length": str(len(content)), **headers})
        if self.head.method != "HEAD":
            self.writer.write(content)
        await self._drain()

    def start_stream(self, status: int, kind: str, **headers: str) -> None:
        """Begin a reply whose length is not known yet."""
        self._in_chunks = self.head.version == 1
        if not self._in_chunks:
            self.closing = True
        chunked = {"Transfer-Encoding": "chunked"} if self._in_chunks else {}
        self._begin(status, {"Content-Type": kind, **chunked, **headers})

    async def write(self, content: bytes) -> None:
        """Send a piece of a stream; ClientGone if the client does not read."""
        if content:
            self.writer.write(b"%x\r\n%b\r\n" % (len(content), content) if self._in_chunks else content)
            await self._drain()

    async def end_stream(self) -> None:
        """Send the end of a stream."""
        if self._in_chunks:
            self.writer.write(b"0\r\n\r\n")
        await self._drain()

    async def while_connected(self, work: Coroutine[Any, Any, _T]) -> _T:
        """The result of the work, which is cancelled if the client goes away: then ClientGone."""
        task, watch = asyncio.ensure_future(work), asyncio.ensure_future(self._watch())
        try:
            await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise ClientGone
        finally:
            await _cancelled(task, watch)

    async def _watch(self) -> None:
        """Return when the client has closed the connection."""
        with contextlib.suppress(ConnectionError):
            while await self.reader.read(65_536):
                self.closing = True  # a second request before the reply to the first

    def _begin(self, status: int, headers: Mapping[str, str]) -> None:
        assert not self.status, "a reply was begun twice"
        self.status = status
        if not self._body_read and self.head.headers.get("content-length", "0") != "0":
            self.closing = True
        self.closing = self.closing or not self.head.keeps_alive or "transfer-encoding" in self.head.headers
        fixed = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
        fixed["Connection"] = "close" if self.closing else "keep-alive"
        lines = [f"{name.replace('_', '-')}: {value}" for name, value in {**fixed, **headers}.items()]
        reason = HTTPStatus(status).phrase
        self.writer.write("\r\n".join([f"HTTP/1.1 {status} {reason}", *lines, "", ""]).encode("latin-1"))

    async def _drain(self) -> None:
        try:
            async with asyncio.timeout(SEND_SECONDS):
                await self.writer.drain()
        except (TimeoutError, ConnectionError):
            self.writer.transport.abort()
            raise ClientGone from None


async def _cancelled(*tasks: asyncio.Future[Any]) -> None:
    """Cancel what is still running, and wait for it."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _close(writer: asyncio.StreamWriter) -> None:
    """Close a connection once everything written to it is sent; abort it if the client does not read."""
    writer.close()
    try:
        async with asyncio.timeout(SEND_SECONDS):
            await writer.wait_closed()
    except OSError:  # which a TimeoutError is
        writer.transport.abort()


async def read_head(reader: asyncio.StreamReader, idle: float = IDLE_SECONDS) -> Head | None:
    """The head of the next request; None if the client closed the connection, or sent nothing for `idle` seconds."""
    try:
        async with asyncio.timeout(idle):
            first = await reader.readexactly(1)
    except (TimeoutError, asyncio.IncompleteReadError):
        return None
    try:
        async with asyncio.timeout(READ_SECONDS):
            raw = first + await reader.readuntil(b"\r\n\r\n")
    except TimeoutError:
        raise Refused(408, f"the request took more than {READ_SECONDS:.0f} seconds to arrive") from None
    except asyncio.LimitOverrunError:
        raise Refused(431, f"the headers of the request have more than {MAX_HEAD_BYTES:,} bytes") from None
    except asyncio.IncompleteReadError:
        return None
    return parse_head(raw.removesuffix(b"\r\n\r\n"))


Handler = Callable[[Exchange], Awaitable[None]]
OnError = Callable[[Exchange, Refused], Awaitable[None]]
_NO_HEAD = Head("GET", "", {"connection": "close"}, 1)


@dataclass(slots=True, eq=False)
class HttpServer:
    """Calls `handle` for every request, and `refuse` to send a Refused that it raises."""

    handle: Handler
    refuse: OnError
    max_connections: int
    port: int = 0  # once it listens
    closing: bool = False
    _server: asyncio.Server | None = None
    _connections: dict[asyncio.Task[None], Exchange | None] = field(default_factory=dict)  # with a request in progress

    async def listen(self, host: str, port: int) -> None:
        """Begin to listen; port 0 takes any free port."""
        family, address = listen_address(host, port)
        try:
            self._server = await asyncio.start_server(
                self._serve, *address, family=family, limit=MAX_HEAD_BYTES, backlog=BACKLOG
            )
        except OSError as error:
            hint = "choose another --port, or 0 for a free one" if port else "choose another --host"
            raise ArpoError(f"{host}:{port}: cannot listen ({error.strerror}); {hint}") from None
        self.port = int(self._server.sockets[0].getsockname()[1])

    def stop_listening(self) -> None:
        """Take no new connections, and close those without a request."""
        self.closing = True
        if self._server is not None:
            self._server.close()
        for task, exchange in self._connections.items():
            if exchange is None:
                task.cancel()
            else:
                exchange.closing = True

    async def close(self, seconds: float) -> None:
        """Stop listening, wait for the requests in progress, and after `seconds` cancel those that are left."""
        self.stop_listening()
        if self._connections:
            await asyncio.wait(self._connections, timeout=seconds)
        await _cancelled(*self._connections)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if (connected := writer.get_extra_info("socket")) is not None:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        count = len(self._connections)
        if count >= 2 * self.max_connections:  # too many even to be told so
            writer.transport.abort()
            return
        self._connections[task] = None
        try:
            with contextlib.suppress(ClientGone, ConnectionError):
                if count >= self.max_connections:
                    exchange = self._connections[task] = Exchange(_NO_HEAD, reader, writer)
                    await self._refuse(exchange, Refused(503, "there are too many connections", retry_after=1))
                else:
                    while await self._serve_one(task, reader, writer):
                        self._connections[task] = None
            await _close(writer)
        except asyncio.CancelledError:
            if not self.closing:
                raise
        finally:
            del self._connections[task]
            writer.close()

    async def _serve_one(
        self, task: asyncio.Task[None], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        """Answer one request; whether another may follow."""
        try:
            head = await read_head(reader)
        except Refused as refused:
            await self._refuse(Exchange(_NO_HEAD, reader, writer), refused)
            return False
        if head is None:
            return False
        exchange = self._connections[task] = Exchange(head, reader, writer, closing=self.closing)
        try:
            await self.handle(exchange)
        except Refused as refused:
            await self._refuse(exchange, refused)
        except (ClientGone, ConnectionError):
            raise
        except Exception:
            _logger.exception("a request failed")
            await self._refuse(exchange, Refused(500, "the server failed; its log says why"))
        return not (exchange.closing or self.closing)

    async def _refuse(self, exchange: Exchange, refused: Refused) -> None:
        """Send an error and, where more of the request is on its way, read on for a moment: else it is never read."""
        if exchange.status:  # in mid-stream: all that is left is to end it
            exchange.writer.transport.abort()
            raise ClientGone
        await self.refuse(exchange, refused)
        if exchange.closing and exchange.writer.can_write_eof():
            with contextlib.suppress(TimeoutError, OSError):
                exchange.writer.write_eof()
                async with asyncio.timeout(LINGER_SECONDS):
                    while await exchange.reader.read(65_536):
                        pass
