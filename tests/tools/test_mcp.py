"""Tools of MCP servers: specs, results, and servers that misbehave, die or hang."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import math
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

pytest.importorskip("mcp")

from mcp_server import RAW_TOOLS, sdk_server

import arpo.tools.mcp.server as module
from arpo.config.loading import load_config
from arpo.errors import ArpoError
from arpo.tools.base import ToolUnavailable, ToolUnresponsive
from arpo.tools.build import build_tools
from arpo.tools.executor import Toolset, call_tool
from arpo.tools.mcp import connect_mcp
from arpo.tools.mcp.server import McpServer
from arpo.types import Fault, ToolCall, ToolResult

SCRIPT = str(Path(__file__).parents[1] / "support" / "mcp_server.py")


def run(server: McpServer, name: str, /, **args: Any) -> str:
    """One bare attempt, from a loop of its own."""
    [tool] = [tool for tool in server.tools if tool.spec.name == name]

    async def once() -> str:
        return await tool.run(**args)

    return asyncio.run(once())


def call(server: McpServer, name: str, /, *, within: float | None = None, **args: Any) -> ToolResult:
    """A call as a model makes it."""
    limits = {} if within is None else {"timeout": within}
    toolset = Toolset(replace(tool, **limits) for tool in server.tools)  # type: ignore[arg-type]
    return asyncio.run(call_tool(toolset, ToolCall(name, args)))


def raw(mode: str = "", counter: Path | None = None, name: str = "odd", **settings: Any) -> McpServer:
    args = [SCRIPT, "raw", mode, *([str(counter)] if counter else [])]
    return connect_mcp(
        name=name, command=sys.executable, args=args, **{"start_timeout": 300, "timeout": 120} | settings
    )


def alive(pid: int) -> bool:
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False).stdout
    return bool(state.strip()) and not state.startswith("Z")


def eventually(condition: Callable[[], bool], seconds: float = 60.0) -> bool:
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        time.sleep(0.02)
    return condition()


def counted(server: McpServer) -> Callable[[int], Awaitable[None]]:
    """A function that waits until so many requests were sent to the server, counted from now."""
    assert server._manager._connection is not None and server._manager._connection.session is not None
    session: Any = server._manager._connection.session
    send, seen = session.send_request, []

    async def counting(*args: Any, **more: Any) -> Any:
        seen.append(args)
        return await send(*args, **more)

    async def sent(count: int) -> None:
        while len(seen) < count:
            await asyncio.sleep(0.005)

    session.send_request = counting
    return sent


def threads() -> set[str]:
    return {thread.name for thread in threading.enumerate()}


def pid_of(server: McpServer) -> int:
    return int(run(server, "child").split()[1])


@pytest.fixture(scope="module")
def good() -> Iterator[McpServer]:
    with connect_mcp(
        name="good", command=sys.executable, args=[SCRIPT, "sdk"], timeout=120, start_timeout=300
    ) as server:
        yield server


@pytest.fixture(scope="module")
def odd() -> Iterator[McpServer]:
    with raw(timeout=120) as server:
        yield server


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GRACE_SECONDS", 0.1)
    monkeypatch.setattr(module, "RESTART_PAUSES", (0.0, 0.05, 0.05))


# What the model is told, and what it gets back.


def test_names_descriptions_and_schemas_arrive_as_the_server_has_them(good: McpServer) -> None:
    offered = asyncio.run(sdk_server().list_tools())
    expected = [(tool.name, tool.description, tool.input_schema) for tool in offered]
    assert [(tool.spec.name, tool.spec.description, tool.spec.schema) for tool in good.tools] == expected
    assert {(tool.timeout, tool.version) for tool in good.tools} == {(120, "test")}


def test_calls_come_from_any_event_loop(good: McpServer) -> None:
    assert call(good, "echo", text="grüße\nzwei").text == "grüße\nzwei"
    assert call(good, "add", a=2).text == "3"
    answers: list[str] = []
    thread = threading.Thread(target=lambda: answers.append(call(good, "add", a=2, b=5).text))
    thread.start()
    thread.join()
    assert answers == ["7"]


async def many(server: McpServer, name: str, count: int, **args: Any) -> list[ToolResult]:
    toolset = Toolset(server.tools)
    calls = (call_tool(toolset, ToolCall(name, {key: value(i) for key, value in args.items()})) for i in range(count))
    return await asyncio.gather(*calls)


def test_fifty_calls_at_a_time_get_their_own_answers(good: McpServer) -> None:
    results = asyncio.run(many(good, "echo", 50, text=str))
    assert [result.text for result in results] == [str(i) for i in range(50)]
    assert {result.attempts for result in results} == {1}


def test_an_error_of_a_tool_is_shown_to_the_model_and_not_tried_again(good: McpServer) -> None:
    result = call(good, "boom")
    assert (result.text, result.fault, result.attempts) == (
        "Error: Error executing tool boom: it went boom",
        Fault.MODEL,
        1,
    )


def test_a_tool_that_asks_for_user_input_gets_none(good: McpServer) -> None:
    result = call(good, "person")
    assert (result.text, result.fault) == ("Error: the tool asks for input that nobody can give here", Fault.MODEL)


def test_content_other_than_text_becomes_a_note(good: McpServer, odd: McpServer) -> None:
    assert call(good, "picture").text == "[image, 12 kB, not shown]"
    notes = "[resource file:///a, 2 kB, not shown]\n[link to file:///b, not shown]\n[audio, 1 kB, not shown]"
    assert call(odd, "mixed").text == f"one\n{notes}\ntwo"
    assert json.loads(call(odd, "structured").text) == {"grüße": [1, 2]}


def test_long_output_is_cut_and_a_huge_one_never_kept(good: McpServer, odd: McpServer) -> None:
    assert call(good, "big", size=30_000).text.startswith("x" * 20_000 + "\n[output cut")
    before = pid_of(odd)
    for order in ("head", "tail"):
        result = call(odd, "huge", size=module.MAX_MESSAGE_BYTES, order=order)
        assert (result.text, result.fault, result.attempts) == (f"Error: {module.TOO_LARGE}", Fault.MODEL, 1)
        assert call(odd, "huge", size=module.MAX_MESSAGE_BYTES - 200, order=order).fault is None
    assert pid_of(odd) == before
    with pytest.raises(ToolUnavailable, match="larger than 8 MB"):
        run(odd, "huge", size=module.MAX_MESSAGE_BYTES, order="hidden")
    assert pid_of(odd) != before


@pytest.mark.parametrize(
    ("code", "fault"), [(-32602, Fault.MODEL), (-32601, Fault.INFRA), (-32603, Fault.INFRA), (-32000, Fault.INFRA)]
)
def test_whose_fault_a_protocol_error_is(odd: McpServer, code: int, fault: Fault) -> None:
    before = pid_of(odd)
    result = call(odd, "error", code=code)
    assert (result.fault, result.attempts) == (fault, 1 if fault is Fault.MODEL else 3)
    assert "as you wish" in result.text
    assert pid_of(odd) == before


def test_an_invalid_result_is_the_servers_fault(odd: McpServer) -> None:
    result = call(odd, "odd")
    assert result.fault is Fault.INFRA
    assert "it sent an invalid message: content.0" in result.text


def test_arguments_that_cannot_be_sent_are_the_models_fault(good: McpServer, odd: McpServer) -> None:
    for server in (good, odd):
        result = call(server, "echo", text="half \ud800 a character")
        assert (result.fault, result.attempts) == (Fault.MODEL, 1)
        assert call(server, "echo", text="whole").text == "whole"


# Choosing tools; servers whose list cannot be used.


def test_only_some_tools_in_the_order_asked_for() -> None:
    with raw(only=["huge", "echo", "huge"]) as server:
        assert [tool.spec.name for tool in server.tools] == ["huge", "echo"]
        assert call(server, "echo", text="a").text == "a"
    with pytest.raises(ArpoError, match=r"MCP server odd: it has no tool 'Echo', 'x'; it has echo, huge, error"):
        raw(only=["echo", "Echo", "x"])
    with raw("broken", only=["echo"]) as server:
        assert len(server.tools) == 1
    with raw("pages") as server:
        assert [tool.spec.name for tool in server.tools] == [*RAW_TOOLS]
        assert server._manager._connection is not None
        assert server._manager._connection.scope.deadline == math.inf  # the limit of the start is over with it


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("duplicate", "several tools named 'echo'"),
        ("broken", "tool broken: its schema is broken"),
        ("lacking", "it sent an invalid message: tools.1.inputSchema .of 'lacking'.: Field required"),
        ("empty", "it has no tools"),
        ("endless", "longer than 1000, or does not end"),
        ("dies", "no license found\n  .exit code 1."),
    ],
)
def test_a_server_that_cannot_be_used_is_refused(mode: str, message: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ArpoError, match=message) as error:
        raw(mode, name="bad")
    assert str(error.value).startswith("MCP server bad: ")
    assert capfd.readouterr() == ("", "")
    assert "MCP server bad" not in threads()


def test_a_server_that_does_not_start_in_time(hurried: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ArpoError, match=r"^MCP server odd: it was not ready within 0\.1 seconds"):
        raw("silent", start_timeout=0.1)
    note = module.Connection.note

    def noted(live: Any, words: Any) -> None:
        note(live, words)
        live.scope.deadline = -math.inf  # the time is up when it has said something

    monkeypatch.setattr(module.Connection, "note", noted)
    with pytest.raises(ArpoError) as error:
        raw("silent")
    assert str(error.value) == "MCP server odd: it was not ready within 300 seconds\n   [31mI am  thinking"


def test_mistakes_in_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for settings in ({}, {"command": "a", "url": "http://b"}):
        with pytest.raises(ArpoError, match="MCP server x: give either `command` or `url`"):
            connect_mcp(name="x", **settings)
    for settings in ({"command": "a", "headers": {"b": "c"}}, {"url": "http://b", "env": {"b": "c"}}):
        with pytest.raises(ArpoError, match="`args` and `env` go with `command`"):
            connect_mcp(name="x", **settings)  # type: ignore[arg-type]
    with pytest.raises(ArpoError, match="must begin with http"):
        connect_mcp(name="x", url="localhost:80")
    with pytest.raises(ArpoError, match=r"MCP server x: .*No such file or directory: 'no-such-program'"):
        connect_mcp(name="x", command="no-such-program")
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(ArpoError, match=re.escape("pip install mcp")):
        connect_mcp(name="x", command="a")


def test_importing_the_package_does_not_import_the_sdk() -> None:
    code = "import sys, arpo.tools.mcp; print({'mcp', 'anyio', 'httpx2', 'torch'} & sys.modules.keys())"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


# Servers that misbehave.


@pytest.mark.slow
def test_invalid_messages_are_ignored(odd: McpServer, capfd: pytest.CaptureFixture[str]) -> None:
    before = pid_of(odd)
    assert call(odd, "garbage").text == "fine"
    assert call(odd, "flood").text == "fine"
    assert pid_of(odd) == before
    assert capfd.readouterr() == ("", "")


def test_requests_of_a_server_are_refused(odd: McpServer) -> None:
    answers = {answer["id"]: answer for answer in json.loads(call(odd, "ask").text)}
    assert answers.pop("ping")["result"] == {}
    assert {name: answer["error"]["code"] for name, answer in answers.items()} == dict.fromkeys(
        ["sampling/createMessage", "roots/list", "elicitation/create"], -32601
    )


def test_a_program_gets_a_minimal_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_KEY", "s3cret")
    with raw(env={"GIVEN": "yes"}) as server:
        seen = json.loads(call(server, "environment").text)
    assert seen["GIVEN"] == "yes"
    assert seen["PATH"] == os.environ["PATH"]
    assert "SECRET_KEY" not in seen


@pytest.mark.slow
def test_listed_tools_stay(tmp_path: Path, hurried: None) -> None:
    with raw("changed", tmp_path / "starts") as server:
        before = server.tools
        assert call(server, "renew").text == "changed"
        assert server.tools == before
        os.kill(pid_of(server), signal.SIGKILL)
        result = call(server, "echo", text="a")
    assert result.fault is Fault.INFRA
    assert "it has no tool 'echo'; it has other" in result.text


# Servers that die.


@pytest.mark.slow
def test_a_server_that_dies_is_restarted_by_the_next_call(good: McpServer) -> None:
    assert [run(good, "count").split()[0] for _ in range(2)] == ["1", "2"]
    with pytest.raises(ToolUnavailable, match="MCP server good: Connection closed"):
        run(good, "die")
    assert run(good, "count").split()[0] == "1"


def test_a_server_that_died_while_idle_costs_no_attempt(odd: McpServer) -> None:
    pid = pid_of(odd)
    os.kill(pid, signal.SIGKILL)
    assert eventually(lambda: not alive(pid))
    assert eventually(lambda: not odd._manager._usable())
    assert call(odd, "echo", text="a").attempts == 1


def test_many_callers_cause_one_restart(tmp_path: Path) -> None:
    starts = tmp_path / "starts"

    async def at_once(server: McpServer) -> list[ToolResult]:
        sent = counted(server)
        hanging = asyncio.create_task(many(server, "stuck", 1))
        await sent(1)
        waiting = asyncio.create_task(many(server, "echo", 20, text=str))
        await sent(21)
        os.kill(pid, signal.SIGKILL)
        results = await waiting
        hanging.cancel()
        return results

    with raw(counter=starts) as server:
        pid = pid_of(server)
        results = asyncio.run(at_once(replace_tool(server, "stuck", retries=0)))
        assert [result.text for result in results] == [str(i) for i in range(20)]
        assert {result.attempts for result in results} == {2}
        assert starts.read_text() == "xx"


def replace_tool(server: McpServer, name: str, **changes: Any) -> McpServer:
    server.tools = tuple(replace(tool, **changes) if tool.spec.name == name else tool for tool in server.tools)
    return server


def test_a_server_that_cannot_be_restarted_says_why(tmp_path: Path, hurried: None) -> None:
    starts = tmp_path / "starts"

    async def three() -> list[BaseException | str]:
        return await asyncio.gather(*(server.tools[0].run(text="a") for _ in range(3)), return_exceptions=True)

    with raw("once", starts) as server:
        os.kill(pid_of(server), signal.SIGKILL)
        assert eventually(lambda: not server._manager._usable())
        errors = asyncio.run(three())
        assert starts.read_text() == "x" * (1 + len(module.RESTART_PAUSES))
    assert {(type(error), str(error)) for error in errors} == {
        (ToolUnavailable, "MCP server odd: Connection closed\n  no license found\n  [exit code 1]")
    }


# Servers that hang.


def test_a_cancelled_call_is_cancelled_at_the_server(good: McpServer) -> None:
    before, pid = int(run(good, "cancelled")), run(good, "count").split()[1]

    async def give_up() -> None:
        sent = counted(good)
        task = asyncio.create_task(call_tool(Toolset(good.tools), ToolCall("hang", {})))
        await sent(1)
        await asyncio.to_thread(run, good, "count")  # it has got to that, and so to the call before it
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(give_up())
    assert eventually(lambda: int(run(good, "cancelled")) == before + 1)
    assert run(good, "count").split()[1] == pid


def test_a_call_that_hangs_is_cut_off_and_the_others_go_on(good: McpServer) -> None:
    pid = run(good, "count").split()[1]

    async def both() -> tuple[ToolResult, ToolResult]:
        limits = {"hang": 0.3, "echo": 60.0}
        toolset = Toolset(
            replace(tool, timeout=limits[tool.spec.name]) for tool in good.tools if tool.spec.name in limits
        )
        hang = asyncio.create_task(call_tool(toolset, ToolCall("hang", {})))
        await asyncio.sleep(0.1)
        return await call_tool(toolset, ToolCall("echo", {"text": "a"})), await hang

    echo, hang = asyncio.run(both())
    assert (echo.text, hang.fault, hang.attempts) == ("a", Fault.INFRA, 1)
    assert run(good, "count").split()[1] == pid


@pytest.mark.slow
def test_direct_calls_of_a_tool_time_out_too(monkeypatch: pytest.MonkeyPatch, hurried: None) -> None:
    monkeypatch.setattr(module, "SLACK_SECONDS", 0.0)
    with raw(timeout=0.3) as server, pytest.raises(ToolUnresponsive, match=r"stuck took longer than 0.3 seconds"):
        run(server, "stuck")


@pytest.mark.slow
def test_a_server_that_hangs_as_a_whole_is_replaced(hurried: None) -> None:
    with raw(timeout=1) as server:
        pid = pid_of(server)
        assert call(server, "stuck", within=0.2).fault is Fault.INFRA
        assert eventually(lambda: server._manager._checking is not None)
        with pytest.raises(ToolUnavailable, match="MCP server odd does not answer"):
            run(server, "echo", text="a")
        assert eventually(lambda: call(server, "echo", text="a").text == "a")
        assert not alive(pid)


def test_the_next_program_starts_when_the_last_one_is_gone(
    tmp_path: Path, hurried: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RESTART_PAUSES", (0.0,))
    with raw("exclusive", tmp_path / "lock") as server:
        with pytest.raises(ToolUnavailable, match="Connection closed"):
            run(server, "deaf")
        assert run(server, "echo", text="a") == "a"


class Session:
    """A session that never answers a ping."""

    async def send_ping(self) -> None:
        await asyncio.sleep(60)


@pytest.mark.parametrize("answers", [0, 1])
def test_a_server_that_is_only_busy_is_left_alone(answers: int) -> None:
    endpoint = module.ServerParams("x", "x", (), {}, None, {}, timeout=0.05, start_timeout=1)

    async def check() -> bool:
        live = module.Connection(1)
        live.session = Session()  # type: ignore[assignment]
        asyncio.get_running_loop().call_later(0.01, lambda: setattr(live, "responses", answers))
        await module._ConnectionManager(endpoint, ())._check(live)
        return live.closed.is_set()

    assert asyncio.run(check()) is (answers == 0)


# Nothing is left.


def test_close_leaves_neither_thread_nor_process(hurried: None) -> None:
    before = threads()
    server = raw("stubborn", name="last")
    child, pid = map(int, run(server, "child").split())
    assert alive(child) and alive(pid) and "MCP server last" in threads()
    server.close()
    assert not alive(pid) and not alive(child)
    assert eventually(lambda: threads() <= before)
    server.close()
    with pytest.raises(ToolUnavailable, match="MCP server last is closed"):
        run(server, "echo", text="a")


def test_nothing_is_started_while_closing() -> None:
    link = module._ConnectionManager(module.ServerParams("x", "x", (), {}, None, {}, timeout=1, start_timeout=1), ())

    async def late() -> None:
        link.closing.set()
        with pytest.raises(ToolUnavailable):
            await link.call("a", {})

    asyncio.run(late())
    assert link._starting is None


def test_close_wakes_those_who_wait(hurried: None) -> None:
    server = raw()

    async def wait() -> None:
        sent = counted(server)
        task = asyncio.create_task(many(replace_tool(server, "stuck", retries=0), "stuck", 1))
        await sent(1)
        await asyncio.to_thread(server.close)
        [result] = await asyncio.wait_for(task, 60)
        assert result.fault is Fault.INFRA

    asyncio.run(wait())


ENDS: dict[int, list[str]] = {0: [], -signal.SIGKILL: ["killed"]}


@pytest.mark.slow
def test_a_process_that_ends_without_closing_takes_the_server_along() -> None:
    script = f"""
import asyncio, os, sys
from arpo.tools.mcp import connect_mcp
server = connect_mcp(name="x", command=sys.executable, args=[{SCRIPT!r}, "raw"])
child = os.fork()
if not child:
    sys.exit()  # runs what is to be done at exit, without the thread
os.waitpid(child, 0)
tools = {{tool.spec.name: tool for tool in server.tools}}
print(asyncio.run(asyncio.wait_for(tools["child"].run(), 60)), flush=True)
if sys.argv[1:]:
    os.kill(os.getpid(), 9)
"""
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    runs = {
        code: subprocess.Popen([sys.executable, "-W", "ignore", "-c", script, *args], **pipes)
        for code, args in ENDS.items()
    }
    for code, process in runs.items():
        output, errors = process.communicate()
        child, pid = map(int, output.split())
        assert (process.returncode, errors) == (code, "")
        assert eventually(lambda pid=pid: not alive(pid))
        if code:  # nobody was left to end what the server had started
            os.kill(child, signal.SIGKILL)
        assert eventually(lambda child=child: not alive(child))


# The wire by itself.


@given(st.lists(st.binary(max_size=12) | st.sampled_from([b"\n", b"\n\n", b"abc\n"]), max_size=12))
@example([b"0123456789", b"0123456789", b"\nabc", b"\n"])
def test_lines_are_those_of_the_stream_and_long_ones_keep_their_ends(chunks: list[bytes]) -> None:
    limit, ends = 10, 3

    async def read() -> list[tuple[bytes, bool]]:
        stream = asyncio.StreamReader()
        reading = asyncio.create_task(collect(stream))
        for chunk in chunks:
            stream.feed_data(chunk)
            await asyncio.sleep(0)
        stream.feed_eof()
        return await reading

    async def collect(stream: asyncio.StreamReader) -> list[tuple[bytes, bool]]:
        return [item async for item in module._lines(stream)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MAX_MESSAGE_BYTES", limit)
        patch.setattr(module, "_ENDS", ends)
        found = asyncio.run(read())
    lines = [line for line in b"".join(chunks).split(b"\n")[:-1] if line.strip()]
    whole = [(line, True) if len(line) <= limit else (line[:ends] + line[-ends:], False) for line in lines]
    assert found == whole


@pytest.mark.parametrize(
    ("line", "number"),
    [
        ('{"jsonrpc": "2.0", "id": 7, "result": {"content"', 7),
        ('{"id":8,"result"', 8),
        ('{"result": {"id":1, ...more text"}, "jsonrpc":"2.0","id":9}', 9),
        ('{"result": {"id": 1, "a": 2}}', None),
        ('{"result": "\\"id\\":5}"}', None),
        ('{"params": {"id": 3}}', None),
    ],
)
def test_the_request_of_a_long_response(line: str, number: int | None) -> None:
    answer = module._too_long(line.encode())
    assert (None if answer is None else answer.id) == number


# HTTP.


def free_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def sdk_over_http(port: int) -> Iterator[str]:
    with subprocess.Popen([sys.executable, SCRIPT, "http", str(port)], stderr=subprocess.DEVNULL) as process:
        try:
            assert eventually(lambda: answers(port))
            yield f"http://127.0.0.1:{port}/mcp"
        finally:
            process.kill()


def answers(port: int) -> bool:
    with closing(socket.socket()) as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.slow
def test_a_server_over_http_from_start_to_restart(hurried: None) -> None:
    port = free_port()
    with sdk_over_http(port) as url:
        server = connect_mcp(name="web", url=url, timeout=60)
        assert call(server, "add", a=2, b=3).text == "5"
        assert call(server, "boom").fault is Fault.MODEL
        assert call(server, "picture").text == "[image, 12 kB, not shown]"
        assert call(server, "hang", within=0.2).fault is Fault.INFRA
        assert eventually(lambda: run(server, "cancelled") == "1")
        results = asyncio.run(many(server, "echo", 50, text=str))
        assert [result.text for result in results] == [str(i) for i in range(50)]
        assert run(server, "count").split()[0] == "1"
    gone = call(server, "count")
    assert gone.fault is Fault.INFRA
    assert f"MCP server web at {url}: All connection attempts failed" in gone.text
    with sdk_over_http(port):
        assert run(server, "count").split()[0] == "1"
        server.close()
    assert "MCP server web" not in threads()


@dataclass
class Web:
    """A server of 2025 over HTTP, by hand: what it was asked, and what it is to do wrong."""

    url: str = ""
    seen: list[tuple[str, Any]] = field(default_factory=list)
    session: int = 1
    token: str = ""
    compress: bool = False
    status: int = 200

    def asked(self, method: str) -> int:
        return sum(name == method for name, _ in self.seen)


@pytest.fixture
def web() -> Iterator[Web]:
    state = Web()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: Any) -> None:
            pass

        def reply(self, status: int, body: Any = None, **headers: str) -> None:
            data = b"" if body is None else json.dumps(body).encode()
            if state.compress:
                data, headers["Content-Encoding"] = gzip.compress(data), "gzip"
            self.send_response(status)
            for name, value in {**headers, "Content-Type": "application/json", "Content-Length": len(data)}.items():
                self.send_header(name, str(value))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self) -> None:
            self.reply(405)

        def do_DELETE(self) -> None:
            state.seen.append(("delete", dict(self.headers)))
            self.reply(200)

        def do_POST(self) -> None:
            message = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            method, number = message["method"], message.get("id")
            state.seen.append((method, {key.lower(): value for key, value in self.headers.items()}))
            if state.token and self.headers["Authorization"] != state.token:
                return self.reply(401)
            if method == "initialize":
                info = {"serverInfo": {"name": "web", "version": "1"}, "capabilities": {"tools": {}}}
                result: Any = {"protocolVersion": "2025-06-18", **info}
                return self.reply(200, answer(number, result), **{"Mcp-Session-Id": str(state.session)})
            if method == "server/discover":
                return self.reply(400)
            if self.headers["Mcp-Session-Id"] != str(state.session):
                return self.reply(404, {"jsonrpc": "2.0", "id": None, "error": {"code": -32600, "message": "gone"}})
            if number is None:
                return self.reply(202)
            if method == "tools/list":
                tool = {"name": "echo", "inputSchema": {"type": "object", "properties": {"size": {"type": "integer"}}}}
                return self.reply(200, answer(number, {"tools": [tool]}))
            if method == "tools/call":
                size = message["params"]["arguments"]["size"]
                text = {"type": "text", "text": "x" * size}
                return self.reply(state.status, answer(number, {"content": [text]}) if state.status == 200 else None)
            return self.reply(200, answer(number, {}))

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        state.url = f"http://127.0.0.1:{server.server_port}/mcp"
        yield state
        server.shutdown()


def answer(number: int, result: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": number, "result": result}


def test_headers_go_with_every_request_and_nowhere_else(web: Web) -> None:
    web.token = "Bearer s3cret"
    for headers in ({}, {"Authorization": "Bearer wrong"}):
        with pytest.raises(ArpoError, match=re.escape(f"MCP server w at {web.url}")) as error:
            connect_mcp(name="w", url=web.url.replace("//", "//user:s3cret@"), headers=headers)
        assert "[HTTP 401 Unauthorized]" in str(error.value)
        assert "s3cret" not in str(error.value) and "wrong" not in str(error.value)
    web.seen.clear()
    with connect_mcp(name="w", url=web.url, headers={"Authorization": web.token}) as server:
        assert call(server, "echo", size=3).text == "xxx"
    assert {headers.get("authorization", headers.get("Authorization")) for _, headers in web.seen} == {web.token}
    assert web.asked("delete") == 1
    assert "s3cret" not in repr(server._manager.params)


def test_keys_that_a_program_was_given_are_in_no_result_and_no_error() -> None:
    env = {"API_KEY": "kanarie4711", "MODE": "read-only"}
    with raw(env=env) as server:
        seen = json.loads(call(server, "environment").text)
        assert (seen["API_KEY"], seen["MODE"]) == ("(masked)", "read-only")
        assert call(server, "echo", text="to kanarie4711").text == "to (masked)"
    code = "import os, sys; sys.exit(f'no license\\n{sys.argv[1:]}\\n' + os.environ['API_KEY'] * 30)"
    args = ["-c", code, "--token", "kanarie4711", "https://me:kanarie4711@host/?k=kanarie4711"]
    with pytest.raises(ArpoError, match="no license") as error:
        connect_mcp(name="x", command=sys.executable, args=args, env=env)
    assert "(masked)" in str(error.value) and "4711" not in str(error.value)


def test_variables_of_the_environment_in_the_settings_of_a_server(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "kanarie4711")
    monkeypatch.setenv("WORDS", "two wörds")
    config = load_config(
        None,
        [
            "tools.enabled=[]",
            "reward.bonus=0.0",
            f'tools.mcp=[{{command = "{sys.executable}", args = ["{SCRIPT}", "raw", "x", "/dev/null", "${{MY_KEY}}"], '
            f'env = {{A_KEY = "${{MY_KEY}}", B = "$${{PORT}} ${{WORDS}}"}}, only = ["environment"]}}, '
            f'{{url = "{web.url}?key=${{MY_KEY}}"}}]',
        ],
    )
    assert "kanarie4711" not in str(config.resolved(reveal=True))
    with build_tools(config) as tools:
        seen = json.loads(asyncio.run(tools.call(ToolCall("environment", {}))).text)
        assert (seen["A_KEY"], seen["B"]) == ("(masked)", "${PORT} two wörds")
        assert "kanarie4711" not in repr(tools)
    monkeypatch.delenv("MY_KEY")
    with pytest.raises(ArpoError, match=r"tools\.mcp\.args: the environment variable MY_KEY is not set"):
        build_tools(config)


def test_a_server_that_lost_the_session_is_initialized_again_once(web: Web) -> None:
    with connect_mcp(name="w", url=web.url) as server:
        assert call(server, "echo", size=1).attempts == 1
        web.session = 2
        results = asyncio.run(many(server, "echo", 10, size=int))
        assert [result.text for result in results] == ["x" * i for i in range(10)]
        assert {result.attempts for result in results} <= {1, 2}
        assert (web.asked("initialize"), web.asked("server/discover")) == (2, 1)


def test_large_and_compressed_replies_and_http_errors(web: Web) -> None:
    with connect_mcp(name="w", url=web.url) as server:
        result = call(server, "echo", size=module.MAX_MESSAGE_BYTES)
        assert (result.text, result.fault) == (f"Error: {module.TOO_LARGE}", Fault.MODEL)
        web.status = 500
        assert call(server, "echo", size=1).fault is Fault.INFRA
        web.status = 200
        assert call(server, "echo", size=1).text == "x"
    web.compress = True
    with pytest.raises(ArpoError, match="compresses its replies"):
        connect_mcp(name="w", url=web.url)


def test_nothing_listens_at_the_url(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    url = f"http://127.0.0.1:{free_port()}/mcp"
    for name, title in (("w", f"w at {url}"), (url.replace("//", "//user:s3cret@"), url)):
        with pytest.raises(ArpoError) as error:
            connect_mcp(name=name, url=url)
        assert str(error.value) == f"MCP server {title}: All connection attempts failed"
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    for name in ("mcp.client.streamable_http", "client"):
        logging.getLogger(name).warning("the SDK complains")
    assert capfd.readouterr() == ("", "")


# A server by somebody else: ARPO_TEST_NPM_MCP is the index.js of @modelcontextprotocol/server-everything.


@pytest.mark.skipif("ARPO_TEST_NPM_MCP" not in os.environ, reason="no server from npm is installed")
@pytest.mark.parametrize("kind", ["stdio", "streamableHttp"])
def test_a_server_from_npm(kind: str) -> None:
    node = ["node", os.environ["ARPO_TEST_NPM_MCP"]]
    if kind == "stdio":
        with connect_mcp(name="npm", command=node[0], args=node[1:], timeout=10) as server:
            look_at_everything(server)
        return
    port = free_port()
    environment = {**os.environ, "PORT": str(port)}
    with subprocess.Popen([*node, kind], env=environment, stdout=-3, stderr=-3) as process:
        try:
            assert eventually(lambda: answers(port))
            with connect_mcp(name="npm", url=f"http://127.0.0.1:{port}/mcp", timeout=10) as server:
                look_at_everything(server)
        finally:
            process.kill()


def look_at_everything(server: McpServer) -> None:
    specs = {tool.spec.name: tool.spec for tool in server.tools}
    assert specs["get-sum"].schema["properties"]["a"] == {"type": "number", "description": "First number"}
    assert specs["echo"].description == "Echoes back the input string"
    assert call(server, "echo", message="grüße").text == "Echo: grüße"
    assert call(server, "get-sum", a=2, b=3.5).text == "The sum of 2 and 3.5 is 5.5."
    assert call(server, "get-sum", a="2", b=3).fault is Fault.MODEL
    assert re.search(r"\n\[image, \d+ kB, not shown\]\n", call(server, "get-tiny-image").text)
    assert json.loads(call(server, "get-structured-content", location="Chicago").text)["conditions"]
    assert call(server, "trigger-long-running-operation", within=0.3, duration=20, steps=2).fault is Fault.INFRA
    results = asyncio.run(many(server, "echo", 50, message=str))
    assert [result.text for result in results] == [f"Echo: {i}" for i in range(50)]
