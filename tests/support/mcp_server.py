"""MCP servers for tests: one made with the SDK (`sdk`, `http PORT`), one by hand that misbehaves (`raw MODE FILE`)."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


def sdk_server() -> Any:
    """A decent server, with tools that fail in the usual ways."""
    import anyio
    from mcp.server.mcpserver import Image, MCPServer
    from mcp.server.mcpserver.exceptions import ToolError
    from mcp_types import InputRequiredResult, ListRootsRequest

    server = MCPServer("test", log_level="ERROR")
    state = {"count": 0, "cancelled": 0}

    @server.tool()
    def echo(text: str) -> str:
        """Say it again."""
        return text

    @server.tool(structured_output=False)
    def add(a: int, b: int = 1) -> str:
        """Add two numbers."""
        return str(a + b)

    @server.tool(structured_output=False)
    def boom() -> str:
        """Fail."""
        raise ToolError("it went boom")

    @server.tool(structured_output=False)
    def die() -> str:
        """End the whole server."""
        print("last words", file=sys.stderr, flush=True)
        os._exit(3)

    @server.tool(structured_output=False)
    async def hang(seconds: float = 1000.0) -> str:
        """Take long."""
        try:
            await anyio.sleep(seconds)
        except anyio.get_cancelled_exc_class():
            state["cancelled"] += 1
            raise
        return "done"

    @server.tool(structured_output=False)
    def cancelled() -> str:
        """How many calls of `hang` were cancelled."""
        return str(state["cancelled"])

    @server.tool(structured_output=False)
    def big(size: int) -> str:
        """Much text."""
        return "x" * size

    @server.tool(structured_output=False)
    def picture() -> Any:
        """No text."""
        return Image(data=b"\0" * 11_900, format="png")

    @server.tool(structured_output=False)
    def person() -> Any:
        """Ask somebody."""
        return InputRequiredResult(input_requests={"a": ListRootsRequest()})

    @server.tool(structured_output=False)
    def count() -> str:
        """How often this was called since the server started."""
        state["count"] += 1
        return f"{state['count']} {os.getpid()}"

    return server


OBJECT = {"type": "object", "properties": {}}
SIZE = {"type": "object", "properties": {"size": {"type": "integer"}, "order": {"type": "string"}}}
RAW_TOOLS = {
    "echo": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
    "huge": SIZE,
    "error": {"type": "object", "properties": {"code": {"type": "integer"}}},
    **dict.fromkeys(
        ["garbage", "flood", "ask", "stuck", "deaf", "environment", "child", "odd", "mixed", "structured", "renew"],
        OBJECT,
    ),
}


def say(message: Any) -> None:
    sys.stdout.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
    sys.stdout.flush()


def text(value: str) -> dict[str, Any]:
    return {"content": [{"type": "text", "text": value}]}


def raw_call(number: int, name: str, args: dict[str, Any]) -> dict[str, Any] | None:
    """The result of a tool, or None if it was written already."""
    if name == "echo":
        return text(args["text"])
    if name == "huge":
        result = json.dumps(text("x" * args["size"]))
        line = {
            "head": f'{{"jsonrpc": "2.0", "id": {number}, "result": {result}}}',
            "tail": f'{{"result":{result},"jsonrpc":"2.0","id":{number}}}',
            "hidden": f'{{"result":{result},"id":{number},"jsonrpc":"2.0"}}',
        }[args["order"]]
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
        return None
    if name == "garbage":
        sys.stdout.flush()
        os.write(1, b'\n\xff\xfe\x00\n{"half": \n[1, 2]\n42\n"text"\n{"jsonrpc": "2.0"}\n' + b"[" * 100_000 + b"\n")
        say({"id": 99_999, "result": {}})
        return text("fine")
    if name == "flood":
        note = {"method": "notifications/message", "params": {"level": "info", "data": "x" * 100}}
        line = json.dumps({"jsonrpc": "2.0", **note}) + "\n"
        sys.stdout.write(line * 20_000 + json.dumps({"jsonrpc": "2.0", "method": "notifications/tools/list_changed"}))
        sys.stdout.write("\n")
        return text("fine")
    if name == "ask":
        wishes = ["sampling/createMessage", "roots/list", "elicitation/create", "ping"]
        for wish in wishes:
            say({"id": wish, "method": wish, "params": {"messages": [], "maxTokens": 5}})
        return text(json.dumps([json.loads(sys.stdin.readline()) for _ in wishes]))
    if name == "stuck":
        time.sleep(1000)
    if name == "deaf":
        os.close(1)
        time.sleep(1000)
    if name == "environment":
        return text(json.dumps(dict(os.environ)))
    if name == "child":
        return text(f"{subprocess.Popen(['sleep', '1000']).pid} {os.getpid()}")
    if name == "odd":
        return {"content": [{"type": "smell", "data": 5}]}
    if name == "mixed":
        link = {"type": "resource_link", "uri": "file:///b", "name": "b"}
        inner = {"type": "resource", "resource": {"uri": "file:///a", "text": "y" * 1500}}
        sound = {"type": "audio", "data": "AAAA", "mimeType": "audio/wav"}
        return {"content": [{"type": "text", "text": "one"}, inner, link, sound, {"type": "text", "text": "two"}]}
    if name == "structured":
        return {"content": [], "structuredContent": {"grüße": [1, 2]}}
    if name == "renew":
        say({"method": "notifications/tools/list_changed"})
        return text("changed")
    say({"id": number, "error": {"code": args.get("code", -32603), "message": "as you wish"}})
    return None


def tools(mode: str, starts: int, cursor: str | None) -> dict[str, Any]:
    names = [{"name": name, "description": f"{name}.", "inputSchema": schema} for name, schema in RAW_TOOLS.items()]
    if mode == "duplicate":
        names.append(names[0])
    if mode == "broken":
        names[1] = {"name": "broken", "inputSchema": {"type": "object", "properties": {"a": {"type": 5}}}}
    if mode == "lacking":
        names[1] = {"name": "lacking"}
    if mode == "empty":
        names = []
    if mode == "changed" and starts > 1:
        names[0]["name"] = "other"
    if mode == "pages":
        at = int(cursor or 0)
        return {"tools": names[at : at + 5], **({"nextCursor": str(at + 5)} if at + 5 < len(names) else {})}
    return {"tools": names, **({"nextCursor": "again"} if mode == "endless" else {})}


def raw_server(mode: str, counter: str) -> None:
    """One message after the other, by hand, in the protocol of 2025."""
    starts = 1
    if counter:
        with open(counter, "a+", encoding="utf-8") as file:
            file.write("x")
        starts = len(Path(counter).read_text(encoding="utf-8"))
    if mode == "silent":
        print("\x1b[31mI am\0 thinking", file=sys.stderr, flush=True)
        time.sleep(1000)
    if mode == "dies" or (mode == "once" and starts > 1):
        sys.exit("no license found")
    if mode == "exclusive":
        lock = open(counter, "rb")  # noqa: SIM115
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            sys.exit("somebody else is here")
    if mode == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for line in sys.stdin:
        message = json.loads(line)
        number, method, params = message.get("id"), message.get("method"), message.get("params", {})
        if method == "initialize":
            info = {"serverInfo": {"name": "raw", "version": "1"}, "capabilities": {"tools": {}}}
            say({"id": number, "result": {"protocolVersion": "2025-06-18", **info}})
        elif method == "tools/list":
            say({"id": number, "result": tools(mode, starts, params.get("cursor"))})
        elif method == "tools/call":
            result = raw_call(number, params["name"], params.get("arguments", {}))
            if result is not None:
                say({"id": number, "result": result})
        elif method == "ping":
            say({"id": number, "result": {}})
        elif number is not None and method is not None:
            say({"id": number, "error": {"code": -32601, "message": "Method not found"}})
    if mode == "stubborn":
        time.sleep(1000)


if __name__ == "__main__":
    kind, *rest = sys.argv[1:]
    if kind == "raw":
        raw_server(rest[0] if rest else "", rest[1] if len(rest) > 1 else "")
    elif kind == "http":
        sdk_server().run("streamable-http", host="127.0.0.1", port=int(rest[0]))
    else:
        sdk_server().run("stdio")
