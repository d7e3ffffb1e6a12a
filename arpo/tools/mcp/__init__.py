"""Tools of MCP servers.

    with connect_mcp(name="files", command="npx", args=["-y", "@modelcontextprotocol/server-filesystem", "."]) as files:
        tools = files.tools

Only `server` imports the SDK.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from arpo.errors import ArpoError
from arpo.net.http import mute_http_logs

if TYPE_CHECKING:
    from arpo.tools.mcp.server import McpServer


def connect_mcp(
    *,
    name: str,
    command: str | None = None,
    args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    url: str | None = None,
    headers: Mapping[str, str] | None = None,
    only: Sequence[str] = (),
    timeout: float = 30.0,
    start_timeout: float = 60.0,
) -> McpServer:
    """Start the program `command` or connect to `url`; use all tools of the server or `only` some."""
    if (command is None) == (url is None):
        raise ArpoError(f"MCP server {name}: give either `command` or `url`")
    if headers if url is None else (args or env):
        raise ArpoError(f"MCP server {name}: `args` and `env` go with `command`, `headers` with `url`")
    if url is not None and not url.startswith(("http://", "https://")):
        raise ArpoError(f"MCP server {name}: `url` must begin with http:// or https://")
    try:
        import mcp  # noqa: F401
    except ImportError as error:
        raise ArpoError("MCP servers need another package: pip install mcp") from error
    for logger in ("mcp", "client"):  # of the SDK; without a handler Python prints its records
        logging.getLogger(logger).addHandler(logging.NullHandler())
    mute_http_logs()
    from arpo.tools.mcp.server import McpServer, ServerParams

    return McpServer(
        ServerParams(name, command, tuple(args), dict(env or {}), url, dict(headers or {}), timeout, start_timeout),
        tuple(only),
    )
