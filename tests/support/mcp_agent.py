"""An MCP server over stdin and stdout with a scripted model; what it runs writes to stdout, too."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

from agent_server import answer, build_service

from arpo.cli.serve import run_over_pipes, take_stdio
from arpo.tools.base import tool


@tool(quick=True)
def search(query: str) -> str:
    """Look it up."""
    print("noise of a tool", flush=True)
    subprocess.run(["echo", "noise of a command"], check=True)
    assert os.read(0, 1) == b""  # there is nothing on stdin: it is the client's
    return f"found: {query}"


@tool
async def hang(text: str) -> str:
    """Never ends."""
    print("hanging", file=sys.stderr, flush=True)
    await asyncio.Event().wait()
    return text


def script(prefix: str, seed: int) -> str:
    """Search for the number in the question, then answer with it."""
    asked = prefix.rpartition("<|im_start|>user")[2]
    if "forever" in asked:
        return "<hang>x</hang>"
    number = asked.partition("number ")[2].partition(".")[0]
    return answer(number) if "found:" in asked else f"<search>{number}</search>"


if __name__ == "__main__":
    pipes = take_stdio()
    print("noise")
    asyncio.run(run_over_pipes(build_service(script, search, hang), *pipes))
    print("ended", file=sys.stderr)
