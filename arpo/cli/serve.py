"""`arpo serve`: an agent for other programs, over HTTP or as an MCP server that a client starts."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from arpo.cli.display import console
from arpo.cli.options import ModelTarget, Overrides, load_model_config
from arpo.errors import ArpoError

if TYPE_CHECKING:
    from arpo.serve.app import AgentServer
    from arpo.serve.service import Service

# Defaults of a served agent: the temperature of a chat, and no bonus, which only training needs.
SERVE_SETTINGS = ("rollout.temperature=0.7", "reward.bonus=0")
PORT, HOST = 8000, "127.0.0.1"


def serve(
    model: ModelTarget,
    overrides: Overrides = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="the port; 0: any free port")] = PORT,
    host: Annotated[str, typer.Option(help="0.0.0.0 lets other machines use the agent, with a key")] = HOST,
    keys: Annotated[
        Path | None, typer.Option(help="a file with an API key on each line; default: those in ARPO_API_KEYS")
    ] = None,
    conversations: Annotated[int, typer.Option(min=1, max=65_536, help="conversations at once")] = 256,
    mcp: Annotated[bool, typer.Option("--mcp", help="also offer the agent as an MCP tool, at /mcp")] = False,
    mcp_stdio: Annotated[
        bool, typer.Option("--mcp-stdio", help="only an MCP tool, for a client that starts this command; no HTTP")
    ] = False,
) -> None:
    """Serve an agent to other programs: OpenAI's chat completions, with the agent's own tools behind them.

    Limits of an answer are settings: rollout.max_tokens, rollout.max_seconds and rollout.max_tool_calls. The
    temperature is 0.7 unless rollout.temperature=... is given here or a client asks for another one.
    """
    from arpo.cli.chat import open_agent
    from arpo.serve.app import AgentServer, require_keys
    from arpo.serve.keys import Keys, read_keys
    from arpo.serve.mcp import require_sdk
    from arpo.serve.service import Service

    if mcp_stdio and (mcp or keys is not None or (port, host) != (PORT, HOST)):
        raise ArpoError("--mcp-stdio: nothing is served over HTTP; leave out --mcp, --keys, --port and --host")
    if mcp or mcp_stdio:
        require_sdk()
    pipes = take_stdio() if mcp_stdio else None
    known = Keys() if mcp_stdio else read_keys(keys)
    require_keys(host, known)
    config = load_model_config(model, [*SERVE_SETTINGS, *(overrides or [])])
    if config.program.command or config.program.function is not None:
        raise ArpoError("serve: this agent is a program, which holds its own conversations; it cannot be served")
    with open_agent(config) as agent:
        name = Path(model).expanduser().resolve().name if Path(model).expanduser().exists() else model
        service = Service(agent, config.rollout, config.branching.probe_tokens, name, conversations)
        if pipes is not None:
            asyncio.run(run_over_pipes(service, *pipes))
            return
        server = AgentServer(service, known, host, mcp)
        note = f"tools: {', '.join(agent.tools) or 'none'}; {'keys are needed' if known else 'no key is needed'}"
        asyncio.run(run_server(server, port, f"{name}; {note}"))


def take_stdio() -> tuple[int, int]:
    """Stdin and stdout as new file descriptors; from now on everything else reads nothing, and writes to stderr."""
    sys.stdout.flush()
    pipes = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return pipes


async def run_over_pipes(service: Service, source: int, target: int) -> None:
    """Be an MCP server until the client closes stdin, or Ctrl-C or SIGTERM comes; then calls in progress are ended."""
    from arpo.serve.mcp import AgentTool

    stopped, _ = _prepare_loop()
    serving = asyncio.create_task(AgentTool(service).run_over_pipes(source, target))
    stopping = asyncio.create_task(stopped.wait())
    await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
    await service.stop(grace=0)
    if serving.done():
        stopping.cancel()
        await serving
    else:
        serving.cancel()
        await asyncio.wait({serving})


def _prepare_loop() -> tuple[asyncio.Event, asyncio.Event]:
    """Prepare the event loop of a server; the events are set by the first Ctrl-C or SIGTERM, and by the second one."""
    from arpo.tools.threads import DaemonThreads

    loop, stopped, hurry = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
    loop.set_default_executor(DaemonThreads())  # a tool that hangs in a thread must not keep the process alive

    def stop() -> None:
        (hurry if stopped.is_set() else stopped).set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    return stopped, hurry


async def run_server(server: AgentServer, port: int, note: str) -> None:
    """Serve until Ctrl-C or SIGTERM; a second one does not wait for conversations in progress."""
    from arpo.serve.app import GRACE_SECONDS

    stopped, hurry = _prepare_loop()
    await server.listen(port)
    console.print(f"{note}\nserving {server.url}v1  (Ctrl-C stops it)", markup=False, highlight=False, soft_wrap=True)
    await stopped.wait()
    if count := server.service.running:
        console.print(f"stopping: waiting up to {GRACE_SECONDS:.0f} s for {count} conversations; Ctrl-C ends them now")
    await server.stop(GRACE_SECONDS, hurry)
    console.print("stopped")
