"""The agent as an MCP server that a client starts, with the SDK's own client and real processes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mcp")

from mcp import StdioServerParameters
from mcp.client.client import Client

ROOT = Path(__file__).parents[2]
AGENT = str(ROOT / "tests" / "support" / "mcp_agent.py")
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["auto", "legacy"])
def test_a_client_starts_the_agent_and_asks_it_several_questions_at_once(mode: Any) -> None:
    told: list[str | None] = []

    async def on_progress(progress: float, total: float | None, message: str | None) -> None:
        told.append(message)

    async def main() -> list[Any]:
        server = StdioServerParameters(command=sys.executable, args=[AGENT], env=ENVIRONMENT)
        async with Client(server, mode=mode) as client:
            [tool] = (await client.list_tools()).tools
            assert (tool.name, list(tool.input_schema["properties"])) == ("ask", ["question"])
            asking = [
                client.call_tool("ask", {"question": f"Say number {number}."}, progress_callback=on_progress)
                for number in range(5)
            ]
            results = await asyncio.gather(*asking)
            return [(result.is_error, result.content[0].text) for result in results]  # type: ignore[union-attr]

    assert asyncio.run(main()) == [(False, str(number)) for number in range(5)]
    assert told == ["calls search"] * 5


def start(*command: str) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, *command], stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=ENVIRONMENT
    )


def send(process: subprocess.Popen[str], number: int, method: str, **params: Any) -> None:
    assert process.stdin is not None
    process.stdin.write(json.dumps({"jsonrpc": "2.0", "id": number, "method": method, "params": params}) + "\n")
    process.stdin.flush()


def shake_hands(process: subprocess.Popen[str]) -> None:
    info = {"name": "test", "version": "0"}
    send(process, 0, "initialize", protocolVersion="2025-06-18", capabilities={}, clientInfo=info)
    assert process.stdin is not None and process.stdout is not None
    assert json.loads(process.stdout.readline())["id"] == 0
    process.stdin.write('{"jsonrpc": "2.0", "method": "notifications/initialized"}\n')


@pytest.mark.slow
@pytest.mark.parametrize("how", ["stdin is closed", "signal", "long message"])
def test_the_server_ends_with_its_client_also_in_the_middle_of_a_call(how: str) -> None:
    with start(AGENT) as process:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        shake_hands(process)
        send(process, 7, "tools/call", name="ask", arguments={"question": "Say number 4711."})
        reply = json.loads(process.stdout.readline())
        assert (reply["id"], reply["result"]["content"][0]["text"]) == (7, "4711")
        send(process, 1, "tools/call", name="ask", arguments={"question": "Think forever."})
        while (line := process.stderr.readline()) != "hanging\n":
            assert line, "it ended"
        if how == "signal":
            process.send_signal(signal.SIGTERM)
        elif how == "long message":
            send(process, 2, "tools/call", name="ask", arguments={"question": "long " * 300_000})
        else:
            process.stdin.close()
        shown = process.stderr.read()
        assert shown.endswith("ended\n") and "Traceback" not in shown
        assert ("a message has more than 1,000,000 bytes" in shown) == (how == "long message")
        assert process.wait() == 0
        assert all("jsonrpc" in json.loads(line) for line in process.stdout)


@pytest.mark.slow
def test_the_command_writes_nothing_but_messages_to_stdout(model_dir: Path) -> None:
    settings = ["tools.enabled=[]", "rollout.max_tokens=20"]
    with start("-m", "arpo", "serve", str(model_dir), "--mcp-stdio", *settings) as process:
        assert process.stdout is not None
        shake_hands(process)
        send(process, 1, "tools/call", name="ask", arguments={"question": "Where was Mira Tolven born?"})
        reply = json.loads(process.stdout.readline())
        assert reply["id"] == 1 and isinstance(reply["result"]["content"][0]["text"], str)
        rest, shown = process.communicate()  # closes stdin
        assert (process.returncode, rest) == (0, "") and "Traceback" not in shown
