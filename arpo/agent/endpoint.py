"""A chat endpoint for programs on this machine: just enough HTTP for the clients of OpenAI's API.

    async with open_endpoint() as server:
        key = server.register(answer)             # answer: a coroutine function from the request's JSON to a `Reply`
        ...                                       # POST server.base_url/chat/completions, Authorization: Bearer KEY
        server.unregister(key)                    # from now on the key is refused, and its requests are cancelled

Guarantees: it listens on 127.0.0.1 only. Every key is random and leads to one trajectory; without a known key there is
no answer. A client that goes away cancels its request. No request can raise here; reporting errors that are not the
request's fault is up to `answer`.
Not covered: HTTP beyond a request with Content-Length at a time per connection; TLS.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any, NamedTuple

from arpo.agent.messages import BadRequest, Reply

MODEL = "arpo"  # the model's name at the endpoint
MAX_BODY = 32 * 2**20  # bytes of a request
MAX_HEAD = 2**16
REASONS = {200: "OK", 400: "Bad Request", 401: "Unauthorized", 404: "Not Found", 413: "Content Too Large"}
AnswerFn = Callable[[Any], Awaitable[Reply]]
"""Answers the JSON of a request; BadRequest with the reason if it does not."""


class _HttpRequest(NamedTuple):
    method: str
    path: str
    key: str
    body: bytes


class _Refused(Exception):
    """A request that is answered with an error."""

    def __init__(self, status: int, text: str, is_last: bool = False) -> None:
        super().__init__(text)
        self.status, self.is_last = status, is_last  # the last one of its connection


class ChatServer:
    """The keys that are known, and what is being answered for each."""

    def __init__(self) -> None:
        self._answers: dict[str, AnswerFn] = {}
        self._running: dict[str, set[asyncio.Task[Reply]]] = {}
        self.port = 0

    @property
    def base_url(self) -> str:
        """The address that clients are given."""
        return f"http://127.0.0.1:{self.port}/v1"

    def register(self, answer: AnswerFn) -> str:
        """A new key, whose requests `answer` answers."""
        key = f"arpo-{secrets.token_urlsafe(24)}"
        self._answers[key], self._running[key] = answer, set()
        return key

    async def unregister(self, key: str) -> None:
        """Refuse a key from now on, and cancel what is being answered for it."""
        del self._answers[key]
        running = self._running.pop(key)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of one connection until it is closed."""
        with suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            while True:
                try:
                    request = await _read_http(reader)
                    response = await self._respond(request, reader)
                except _Refused as refused:
                    response = _error(refused.status, str(refused))
                    if refused.is_last:
                        await _close_after(response, reader, writer)
                        break
                writer.write(response)
                await writer.drain()
        writer.close()

    async def _respond(self, request: _HttpRequest, reader: asyncio.StreamReader) -> bytes:
        answer = self._answers.get(request.key)
        if answer is None:
            raise _Refused(401, "this key is not known, or its trajectory has ended")
        if (request.method, request.path) == ("GET", "/v1/models"):
            model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "arpo"}
            return _response(200, {"object": "list", "data": [model]})
        if (request.method, request.path) != ("POST", "/v1/chat/completions"):
            raise _Refused(404, f"there is no {request.method} {request.path}; there is POST /v1/chat/completions")
        try:
            body = json.loads(request.body)
        except (ValueError, RecursionError) as error:
            raise _Refused(400, f"the request is not JSON: {error}") from None
        task = asyncio.ensure_future(answer(body))
        running = self._running[request.key]
        running.add(task)
        try:
            await self._wait(task, reader)
            reply = task.result()
        except BadRequest as error:
            raise _Refused(400, str(error)) from None
        except asyncio.CancelledError:
            if task.cancelled():
                raise ConnectionAbortedError from None
            raise
        finally:
            running.discard(task)
        return _stream(reply) if body.get("stream") else _response(200, reply.body(MODEL))

    async def _wait(self, task: asyncio.Task[Reply], reader: asyncio.StreamReader) -> None:
        """Wait for an answer, or until the client has gone, which cancels it."""
        gone = asyncio.ensure_future(reader.read(1))
        try:
            await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():  # no client sends anything before it has its answer
                task.cancel()
                await asyncio.wait({task})
        finally:
            gone.cancel()
            await asyncio.gather(gone, return_exceptions=True)


@asynccontextmanager
async def open_endpoint() -> AsyncIterator[ChatServer]:
    """A server on a free port of 127.0.0.1; at the end of the block all its connections are closed."""
    chat, connections = ChatServer(), set[asyncio.Task[Any]]()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        connections.add(task)
        try:
            await chat.serve(reader, writer)
        except asyncio.CancelledError:
            writer.close()
        finally:
            connections.discard(task)

    server = await asyncio.start_server(connected, "127.0.0.1", 0, limit=MAX_HEAD)
    chat.port = server.sockets[0].getsockname()[1]
    try:
        yield chat
    finally:
        server.close()
        open_now = list(connections)
        for task in open_now:
            task.cancel()
        await asyncio.gather(*open_now, return_exceptions=True)


async def _read_http(reader: asyncio.StreamReader) -> _HttpRequest:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    words = head[0].split(" ")
    if len(words) != 3:
        raise ConnectionAbortedError("no HTTP")
    pairs = (line.partition(":") for line in head[1:] if line)
    headers: Mapping[str, str] = {name.strip().lower(): value.strip() for name, _, value in pairs}
    length = headers.get("content-length", "0")
    known = "transfer-encoding" not in headers and length.isdecimal() and len(length) < 20
    if not known or int(length) > MAX_BODY:  # where the next request begins is not known, or too far away
        raise _Refused(413, f"send a Content-Length of at most {MAX_BODY:,} bytes", is_last=True)
    body = await reader.readexactly(int(length))
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return _HttpRequest(words[0], words[1].partition("?")[0], key.strip() if scheme.lower() == "bearer" else "", body)


async def _close_after(response: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Send a response, and read what the client still sends: it reads the response when it has sent everything."""
    writer.write(response)
    await writer.drain()
    writer.write_eof()
    while await reader.read(MAX_HEAD):
        pass


def _response(status: int, value: Any, kind: str = "application/json") -> bytes:
    content = value if isinstance(value, bytes) else json.dumps(value).encode()
    head = f"HTTP/1.1 {status} {REASONS[status]}\r\nContent-Type: {kind}\r\nContent-Length: {len(content)}\r\n\r\n"
    return head.encode() + content


def _error(status: int, text: str) -> bytes:
    return _response(status, {"error": {"message": text, "type": "invalid_request_error", "code": None}})


def _stream(reply: Reply) -> bytes:
    """The reply as server-sent events: all of it in one piece, for it is known only when it is complete."""
    whole = reply.body(MODEL)
    (choice,) = whole.pop("choices")
    usage, delta = whole.pop("usage"), choice["message"]
    for number, call in enumerate(delta.get("tool_calls", ())):
        call["index"] = number
    whole["object"] = "chat.completion.chunk"
    chunks = [
        {**whole, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
        {**whole, "choices": [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}]},
        {**whole, "choices": [], "usage": usage},
    ]
    events = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks] + ["data: [DONE]\n\n"]
    return _response(200, "".join(events).encode(), "text/event-stream")
