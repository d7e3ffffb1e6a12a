"""The server: routes, keys, and chat completions as one reply or as a stream of server-sent events.

    server = AgentServer(service, keys, "127.0.0.1", with_mcp=False)
    await server.listen(8000)
    await server.stop(grace=30)

Guarantees: without keys, the server listens on this machine only, and answers only requests that name it as their host
and send JSON, which pages of other sites cannot do. A client that goes away, or does not read, ends its conversation.
Stopping ends every conversation, and every client gets an answer or an error.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
from collections.abc import AsyncIterator
from functools import partial
from typing import Any
from urllib.parse import unquote

from arpo.errors import ArpoError
from arpo.net.hosts import LOCAL, known_host, server_url
from arpo.serve.http import SEND_SECONDS, Exchange, HttpServer, Refused
from arpo.serve.keys import HOW_TO, Keys
from arpo.serve.messages import (
    ChatRequest,
    Reply,
    ReplyHead,
    chunk,
    completion,
    dump,
    error_body,
    read_request,
    server_sent,
    usage_chunk,
)
from arpo.serve.metrics import KIND, Counter, render
from arpo.serve.service import Event, Service, append_event

JSON, EVENT_STREAM = "application/json", "text/event-stream; charset=utf-8"
SPARE_CONNECTIONS = 256  # beyond two for each conversation
KEEPALIVE_SECONDS = 15.0  # between comments in a stream in which nothing happens, so that no proxy closes it
GRACE_SECONDS = 30.0
_logger = logging.getLogger("arpo")


class Mailbox:
    """Events on their way to a client: put in by the conversation, taken out in batches."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._closed = False
        self._filled = asyncio.Event()

    def put(self, event: Event) -> None:
        """Add an event."""
        append_event(self._events, event)
        self._filled.set()

    def close(self) -> None:
        """There will be no more events."""
        self._closed = True
        self._filled.set()

    async def batches(self) -> AsyncIterator[list[Event]]:
        """The events as they come; an empty batch if none came for a while."""
        while self._events or not self._closed:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(KEEPALIVE_SECONDS):
                    await self._filled.wait()
            batch, self._events = self._events, []
            self._filled.clear()
            if batch or not self._closed:
                yield batch


class AgentServer:
    """Serves one agent over HTTP and, if `with_mcp`, as a tool of an MCP server at /mcp."""

    def __init__(self, service: Service, keys: Keys, host: str = "127.0.0.1", with_mcp: bool = False) -> None:
        require_keys(host, keys)
        self.service, self._keys, self.host = service, keys, host
        self._requests = Counter("arpo_http_requests_total", "replies, by status", ("status",))
        connections = 2 * service.max_conversations + SPARE_CONNECTIONS
        self._http = HttpServer(self._handle, self._refuse, connections)
        self._mcp: Any = None
        self._open = contextlib.AsyncExitStack()
        if with_mcp:
            from arpo.serve.mcp import AgentTool

            self._mcp = AgentTool(service)

    @property
    def url(self) -> str:
        """The address of the server."""
        return server_url(self.host, self._http.port)

    async def listen(self, port: int) -> None:
        """Begin to listen; port 0 takes any free port."""
        if self._mcp is not None:
            await self._open.enter_async_context(self._mcp.running())
        try:
            await self._http.listen(self.host, port)
        except BaseException:
            await self._open.aclose()
            raise

    async def stop(self, grace: float = GRACE_SECONDS, hurry: asyncio.Event | None = None) -> None:
        """Take no more requests, let conversations end for `grace` seconds or until `hurry`, cancel the others."""
        self._http.stop_listening()
        await self.service.stop(grace, hurry)
        await self._http.close(SEND_SECONDS)
        await self._open.aclose()

    async def _handle(self, exchange: Exchange) -> None:
        head = exchange.head
        path, method = unquote(head.path), "GET" if head.method == "HEAD" else head.method
        if path == "/health":
            _require_method(method, "GET")
            await self._health(exchange)
            return
        self._require_access(exchange)
        if path == "/v1/chat/completions":
            _require_method(method, "POST")
            await self._chat(exchange)
        elif path == "/mcp" and self._mcp is not None:
            _require_method(head.method, "POST")  # it keeps no sessions: there is nothing to GET or DELETE
            await self._mcp.handle(exchange)
            self._requests.add(str(exchange.status))
        elif path == "/metrics":
            _require_method(method, "GET")
            metrics = vars(self.service.metrics).values()
            await self._send(exchange, KIND, render([*self.service.gauges(), self._requests, *metrics]))
        elif path == "/v1/models" or path.startswith("/v1/models/"):
            _require_method(method, "GET")
            await self._models(exchange, path.removeprefix("/v1/models").removeprefix("/"))
        else:
            raise Refused(404, f"there is nothing at {path[:200]}; requests go to /v1/chat/completions")

    def _require_access(self, exchange: Exchange) -> None:
        """Raise Refused unless the client has a key or, without keys, is a program on this machine."""
        headers = exchange.head.headers
        if not self._keys.accept(headers.get("authorization", "")):
            raise Refused(401, "the API key is missing or wrong; send Authorization: Bearer KEY", "invalid_api_key")
        if not self._keys and not known_host(headers.get("host", ""), self.host, self._http.port):
            raise Refused(403, "the request names another host; use the address that `arpo serve` printed")
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if exchange.head.method == "POST" and kind != JSON:
            raise Refused(415, f"send JSON, with Content-Type: {JSON}")

    async def _refuse(self, exchange: Exchange, refused: Refused) -> None:
        """Send an error in OpenAI's form."""
        headers = {"Retry-After": str(refused.retry_after)} if refused.retry_after is not None else {}
        if refused.status == 405:
            headers["Allow"] = refused.code or ""
        if refused.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        await exchange.send(refused.status, JSON, dump(error_body(refused)), **headers)
        self._requests.add(str(refused.status))

    async def _send(self, exchange: Exchange, kind: str, content: bytes) -> None:
        await exchange.send(200, kind, content)
        self._requests.add("200")

    async def _health(self, exchange: Exchange) -> None:
        await self._send(exchange, JSON, dump({"status": "ok"}))

    async def _models(self, exchange: Exchange, name: str) -> None:
        service = self.service
        model = {"id": service.name, "object": "model", "created": service.created, "owned_by": "arpo"}
        if name and name != service.name:
            raise Refused(404, f"there is no model {name[:200]!r}; this server has {service.name!r}", "model_not_found")
        await self._send(exchange, JSON, dump(model if name else {"object": "list", "data": [model]}))

    async def _chat(self, exchange: Exchange) -> None:
        service = self.service
        request = read_request(await exchange.read_body(), service.name, service.settings.max_tokens)
        if request.stream:
            await self._chat_stream(exchange, request)
            return
        events: list[Event] = []
        on_event = partial(append_event, events) if request.events else None
        reply = await exchange.while_connected(service.answer(request, on_event))
        body = completion(reply, ReplyHead(service.name), events if request.events else None)
        await self._send(exchange, JSON, dump(body))

    async def _chat_stream(self, exchange: Exchange, request: ChatRequest) -> None:
        mailbox = Mailbox()
        starting = self.service.start(request, mailbox.put if request.events else None)
        task = await exchange.while_connected(starting)
        task.add_done_callback(lambda _: mailbox.close())
        try:
            exchange.start_stream(200, EVENT_STREAM)
            await exchange.while_connected(self._write_stream(exchange, request, mailbox, task))
            self._requests.add("200")
        finally:
            task.cancel()

    async def _write_stream(
        self, exchange: Exchange, request: ChatRequest, mailbox: Mailbox, task: asyncio.Task[Reply]
    ) -> None:
        """Send the agent's work as it is done, if it was asked for, then the answer or the error."""
        head = ReplyHead(self.service.name)
        await exchange.write(server_sent(chunk(head, {"role": "assistant", "content": ""})))
        async for batch in mailbox.batches():
            pieces = [server_sent(chunk(head, {}, ours=event)) for event in batch]
            await exchange.write(b"".join(pieces) or b": waiting\n\n")
        try:
            reply = await self.service.result(task)
        except Refused as refused:
            await exchange.write(server_sent(error_body(refused)))
        except Exception:
            _logger.exception("an answer failed")
            await exchange.write(server_sent(error_body(Refused(500, "the server failed; its log says why"))))
        else:
            facts = reply.facts if request.events else None
            parts = [chunk(head, {"content": reply.content}), chunk(head, {}, reply.finish_reason, facts)]
            parts += [usage_chunk(head, reply)] if request.include_usage else []
            await exchange.write(b"".join(map(server_sent, parts)) + b"data: [DONE]\n\n")
        await exchange.end_stream()


def require_keys(host: str, keys: Keys) -> None:
    """Raise ArpoError if other machines could use the agent without a key."""
    if not keys and not is_local(host):
        raise ArpoError(
            f"--host {host}: other machines could use the agent and its tools without a key; {HOW_TO}, or listen on "
            "127.0.0.1"
        )


def is_local(host: str) -> bool:
    """Whether only this machine can reach a server that listens there."""
    if host in LOCAL:
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _require_method(method: str, wanted: str) -> None:
    if method != wanted:
        raise Refused(405, f"use {wanted} here", wanted)
