"""HTTP by hand: what is read, what is refused, and what slow or rude clients get."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import clock
import pytest
from agent_server import (
    BOUND,
    answer,
    build_service,
    chat_body,
    error_of,
    exchange,
    port_of,
    read_reply,
    request_bytes,
    serving,
    until,
)
from hypothesis import given
from hypothesis import strategies as st

import arpo.serve.http as http
from arpo.serve.app import AgentServer
from arpo.serve.http import ClientGone, Exchange, Head, HttpServer, Refused, body_length, parse_head, read_head


def run(*requests: bytes, **options: Any) -> list[tuple[int, dict[str, str], bytes]]:
    """The replies to raw requests, each on a connection of its own."""

    async def main() -> list[tuple[int, dict[str, str], bytes]]:
        async with serving(build_service(lambda prefix, seed: answer("yes"), **options)) as server:
            return [await exchange(server, request) for request in requests]

    return asyncio.run(main())


def reader_of(content: bytes, ended: bool = True) -> asyncio.StreamReader:
    reader = asyncio.StreamReader(limit=http.MAX_HEAD_BYTES)
    reader.feed_data(content)
    if ended:
        reader.feed_eof()
    return reader


def test_a_head_is_a_line_and_headers_whose_names_have_no_case() -> None:
    head = parse_head(b"POST /v1/x?a=1&b HTTP/1.1\r\nHost: a:1\r\nX-One: \t1 \r\nx-one: 2\r\nConnection: Close")
    assert head == Head("POST", "/v1/x", {"host": "a:1", "x-one": "1, 2", "connection": "Close"}, 1, "a=1&b")
    assert not head.keeps_alive
    assert parse_head(b"GET / HTTP/1.1").keeps_alive and not parse_head(b"GET / HTTP/1.0").keeps_alive
    assert parse_head(b"GET / HTTP/1.0\r\nConnection: keep-alive").keeps_alive


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"GET /",
        b"GET / HTTP/2.0",
        b"get / HTTP/1.1",
        b"GET  / HTTP/1.1",
        b"GET /\xff HTTP/1.1",
        b"GET / HTTP/1.1\r\nno colon",
        b"GET / HTTP/1.1\r\nspace : 1",
        b"GET / HTTP/1.1\r\n folded: 1",
        b"GET / HTTP/1.1\r\na: 1\nb: 2",
        b"GET / HTTP/1.1\r\na: \0",
        b"GET / HTTP/1.1\r\nContent-Length: 1\r\ncontent-length: 1",
        b"GET / HTTP/1.1\r\nHost: a\r\nHost: b",
        b"GET / HTTP/1.1\r\nAuthorization: a\r\nAuthorization: b",
    ],
)
def test_a_malformed_head_is_refused(raw: bytes) -> None:
    with pytest.raises(Refused) as refused:
        parse_head(raw)
    assert refused.value.status == 400


@given(st.binary(max_size=200))
def test_no_head_raises_anything_else(raw: bytes) -> None:
    try:
        body_length(parse_head(b"POST / HTTP/1.1\r\n" + raw))
    except Refused as refused:
        assert refused.status in (400, 411, 413)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"content-length": "-1"}, 400),
        ({"content-length": "+1"}, 400),
        ({"content-length": "1_0"}, 400),
        ({"content-length": "9" * 30}, 400),
        ({"content-length": str(http.MAX_BODY_BYTES + 1)}, 413),
        ({"transfer-encoding": "chunked"}, 411),
        ({"transfer-encoding": "chunked", "content-length": "1"}, 411),
    ],
)
def test_a_length_that_is_wrong_too_large_or_missing_is_refused(headers: dict[str, str], status: int) -> None:
    with pytest.raises(Refused) as refused:
        body_length(Head("POST", "/", headers, 1))
    assert refused.value.status == status
    assert body_length(Head("POST", "/", {"content-length": str(http.MAX_BODY_BYTES)}, 1)) == http.MAX_BODY_BYTES


def test_a_client_that_sends_nothing_is_dropped_and_one_that_sends_slowly_is_told() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        started = loop.time()
        assert await read_head(reader_of(b"", ended=False)) is None
        assert loop.time() - started == pytest.approx(http.IDLE_SECONDS)
        started = loop.time()
        with pytest.raises(Refused) as refused:
            await read_head(reader_of(b"GET / HT", ended=False))
        assert (refused.value.status, loop.time() - started) == (408, pytest.approx(http.READ_SECONDS))
        head = Head("POST", "/", {"content-length": "5"}, 1)
        started = loop.time()
        with pytest.raises(Refused) as refused:
            await Exchange(head, reader_of(b"1234", ended=False), None).read_body()  # type: ignore[arg-type]
        assert (refused.value.status, loop.time() - started) == (408, pytest.approx(http.READ_SECONDS))

    clock.run(main())


def test_a_client_that_hangs_up_in_the_middle_of_a_request_is_gone() -> None:
    async def main() -> None:
        assert await read_head(reader_of(b"")) is None
        assert await read_head(reader_of(b"GET / HTTP/1.1\r\nHos")) is None
        with pytest.raises(ClientGone):
            await Exchange(Head("POST", "/", {"content-length": "5"}, 1), reader_of(b"1234"), None).read_body()  # type: ignore[arg-type]

    asyncio.run(main())


def test_a_client_that_does_not_read_is_dropped_after_a_while() -> None:
    class Stuck:
        """A writer whose buffer stays full."""

        aborted = False
        transport = property(lambda self: self)

        def write(self, content: bytes) -> None: ...

        async def drain(self) -> None:
            await asyncio.Event().wait()

        def abort(self) -> None:
            self.aborted = True

    async def main() -> None:
        loop, stuck = asyncio.get_running_loop(), Stuck()
        exchange = Exchange(Head("GET", "/", {}, 1), reader_of(b""), stuck)  # type: ignore[arg-type]
        exchange.start_stream(200, "text/plain")
        started = loop.time()
        with pytest.raises(ClientGone):
            await exchange.write(b"words")
        assert (stuck.aborted, loop.time() - started) == (True, pytest.approx(http.SEND_SECONDS))

    clock.run(main())


def test_errors_are_replies_in_openais_form() -> None:
    long = request_bytes("GET", "/health", X_Long="x" * http.MAX_HEAD_BYTES)
    replies = run(
        b"nonsense\r\n\r\n",
        long,
        request_bytes("GET", "/nowhere"),
        request_bytes("GET", "/v1/chat/completions"),
        request_bytes("POST", "/v1/chat/completions", b"", Content_Length=str(http.MAX_BODY_BYTES + 1)),
        request_bytes("POST", "/v1/chat/completions", b"{}", Content_Type="text/plain"),
        request_bytes("POST", "/v1/chat/completions", b"{"),
        request_bytes("OPTIONS", "/v1/chat/completions", Origin="https://evil.example"),
    )
    assert [status for status, _, _ in replies] == [400, 431, 404, 405, 413, 415, 400, 405]
    assert {error_of(body)["type"] for _, _, body in replies} == {"invalid_request_error"}
    assert replies[3][1]["allow"] == "POST"
    assert not any(name.startswith("access-control") for _, headers, _ in replies for name in headers)


def test_a_body_of_the_largest_size_is_read_and_a_larger_one_is_answered_while_it_is_being_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http, "LINGER_SECONDS", BOUND)
    space = chat_body("Why?")
    fits = b" " * (http.MAX_BODY_BYTES - len(space)) + space
    replies = run(
        request_bytes("POST", "/v1/chat/completions", fits), request_bytes("POST", "/v1/chat/completions", fits + b" ")
    )
    assert [status for status, _, _ in replies] == [200, 413]
    assert replies[1][1]["connection"] == "close"


def test_a_client_that_sends_far_too_much_before_it_reads_still_learns_why_it_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http, "LINGER_SECONDS", BOUND)

    async def main() -> int:
        async with serving(build_service(lambda prefix, seed: answer("yes"))) as server:
            port, size = port_of(server), 20 * http.MAX_BODY_BYTES
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            head = {"Host": f"127.0.0.1:{port}", "Content_Length": str(size)}
            writer.write(request_bytes("POST", "/v1/chat/completions", b"", **head).replace(b"Content_", b"Content-"))
            for _ in range(20):
                writer.write(b" " * http.MAX_BODY_BYTES)
                await writer.drain()
            status, _, _ = await read_reply(reader)
            writer.close()
            return status

    assert asyncio.run(main()) == 413


def test_a_connection_serves_one_request_after_another_until_the_client_wants_it_closed() -> None:
    async def main() -> list[tuple[int, str]]:
        async with serving(build_service(lambda prefix, seed: answer("yes"))) as server:
            port = port_of(server)
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            found = []
            for options in ({}, {}, {"Connection": "close"}):
                body = chat_body("Why?")
                writer.write(
                    request_bytes("POST", "/v1/chat/completions", body, **{"Host": f"127.0.0.1:{port}", **options})
                )
                status, headers, _ = await read_reply(reader)
                found.append((status, headers["connection"]))
            assert await reader.read() == b""
            writer.close()
            return found

    assert asyncio.run(main()) == [(200, "keep-alive"), (200, "keep-alive"), (200, "close")]


def test_a_second_request_before_the_first_reply_closes_the_connection_after_that() -> None:
    async def main() -> bytes:
        async with serving(build_service(lambda prefix, seed: answer("yes"))) as server:
            port = port_of(server)
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            request = request_bytes("POST", "/v1/chat/completions", chat_body("Why?"), Host=f"127.0.0.1:{port}")
            writer.write(request + request)
            content = await reader.read()
            writer.close()
            return content

    assert asyncio.run(main()).count(b"HTTP/1.1 200 OK") == 1


def test_head_has_no_body_and_a_client_of_1_0_gets_no_chunks() -> None:
    async def main() -> tuple[bytes, bytes]:
        async with serving(build_service(lambda prefix, seed: answer("yes"))) as server:
            old = request_bytes(
                "POST",
                "/v1/chat/completions",
                chat_body("Why?", stream=True),
                Host=f"127.0.0.1:{port_of(server)}",
            ).replace(b"HTTP/1.1", b"HTTP/1.0", 1)
            return await _everything(server, request_bytes("HEAD", "/health", Connection="close")), await _everything(
                server, old
            )

    head, old = asyncio.run(main())
    assert head.startswith(b"HTTP/1.1 200 OK\r\n") and head.endswith(b"\r\n\r\n") and b"Content-Length: 15" in head
    pieces = old.partition(b"\r\n\r\n")[2].split(b"\n\n")
    assert pieces[-2:] == [b"data: [DONE]", b""] and b"chunked" not in old
    assert json.loads(pieces[1].removeprefix(b"data: "))["choices"][0]["delta"] == {"content": "yes"}


async def _everything(server: AgentServer, request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port_of(server))
    writer.write(request)
    content = await reader.read()
    writer.close()
    return content


def test_connections_beyond_the_limit_are_told_to_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "LINGER_SECONDS", BOUND)

    async def main() -> None:
        async with serving(build_service(lambda prefix, seed: answer("yes"), conversations=1)) as server:
            limit = server._http.max_connections
            held = [await asyncio.open_connection("127.0.0.1", port_of(server)) for _ in range(limit)]
            for reader, writer in held[-1:]:  # all are accepted once the last one is answered
                writer.write(request_bytes("GET", "/health"))
                assert (await read_reply(reader))[0] == 200
            reader, writer = await asyncio.open_connection("127.0.0.1", port_of(server))
            for _ in range(20):  # it is told even if it reads only when it has sent everything
                writer.write(b" " * http.MAX_BODY_BYTES)
                await writer.drain()
            status, headers, body = await read_reply(reader)
            assert (status, headers["retry-after"], error_of(body)["type"]) == (503, "1", "server_error")
            writer.close()
            for _, other in held:
                other.close()

    asyncio.run(main())


def test_a_bug_in_a_handler_is_a_reply_and_the_server_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> list[int]:
        async with serving(build_service(lambda prefix, seed: answer("yes"))) as server:
            monkeypatch.setattr(server.service, "gauges", lambda: 1 / 0)
            request = request_bytes("GET", "/metrics")
            return [
                (await exchange(server, request))[0],
                (await exchange(server, request_bytes("GET", "/health")))[0],
            ]

    assert asyncio.run(main()) == [500, 200]


SENT = 50_000_000  # bytes, more than the buffers of the operating system hold


@asynccontextmanager
async def sending_much() -> AsyncIterator[tuple[HttpServer, asyncio.StreamReader]]:
    """A server that has sent and closed a long reply, which its client has not read yet."""

    async def handle(exchange: Exchange) -> None:
        exchange.writer.transport.set_write_buffer_limits(high=2 * SENT)  # so that nothing waits for the client
        exchange.closing = True
        await exchange.send(200, "text/plain", b"x" * SENT)

    async def refuse(exchange: Exchange, refused: Refused) -> None:
        raise refused

    server = HttpServer(handle, refuse, 10)
    await server.listen("127.0.0.1", 0)
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(request_bytes("GET", "/"))
    await reader.readuntil(b"\r\n\r\n")
    try:
        yield server, reader
    finally:
        writer.close()
        await server.close(BOUND)


def test_a_client_that_does_not_read_the_end_of_its_last_reply_is_dropped_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http, "SEND_SECONDS", 0.1)

    async def main() -> None:
        async with sending_much() as (server, reader):
            await until(lambda: not server._connections)
            with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
                await reader.readexactly(SENT)

    asyncio.run(main())


def test_a_server_that_stops_sends_the_rest_of_its_replies() -> None:
    async def main() -> None:
        async with sending_much() as (server, reader):
            closing = asyncio.ensure_future(server.close(BOUND))
            for _ in range(20):
                await asyncio.sleep(0)
            assert not closing.done() and len(server._connections) == 1
            assert await reader.readexactly(SENT) == b"x" * SENT
            await closing
            assert not server._connections

    asyncio.run(main())
