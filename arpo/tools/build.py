"""The tools that a configuration enables: search, python, browse, the user's own, and those of MCP servers."""

from __future__ import annotations

import atexit
import difflib
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

from arpo.config.files import expand_user
from arpo.config.plugins import NO_OBJECTS, Objects, load_object, names_object
from arpo.config.schema import Config, Mcp, Tools
from arpo.data.task_set import plugin_of
from arpo.errors import ArpoError
from arpo.net.keys import expand_variables, read_api_key
from arpo.tools.base import Tool
from arpo.tools.cache import ToolCache
from arpo.tools.executor import Toolset
from arpo.tools.search import PROVIDERS, build_search, http_search, index_search, load_documents, open_index, web_search

if TYPE_CHECKING:
    from arpo.tools.mcp.server import McpServer
    from arpo.tools.sandbox.sandbox import Sandbox


def build_tools(
    config: Config,
    objects: Objects = NO_OBJECTS,
    make_toolset: Callable[[Sequence[Tool], ToolCache | None], Toolset] = Toolset,
) -> Toolset:
    """Build the tools that the config enables, ready to be called; close them when done."""
    settings = config.tools
    unknown = [name for name in settings.enabled if name not in BUILT_IN and not names_object(name)]
    if unknown:
        known = f"{', '.join(BUILT_IN)}, or your own as path/to/file.py:name"
        near = difflib.get_close_matches(unknown[0], BUILT_IN, 1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ArpoError(f"tools.enabled: there is no tool {unknown[0]!r}{hint}; there are: {known}")
    with ExitStack() as opened:
        tools = [BUILT_IN[name](config) if name in BUILT_IN else _load_tool(name, objects) for name in settings.enabled]
        for server in settings.mcp:
            tools += opened.enter_context(_connect_mcp(server, settings.timeout)).tools
        toolset = make_toolset(tools, ToolCache(settings.cache, settings.cache_mode) if settings.cache else None)
        missing = sorted(set(config.reward.bonus_tools) - set(toolset))
        if config.reward.bonus and missing and config.reward.function is None:
            names = ", ".join(missing)
            raise ArpoError(
                f"reward.bonus_tools: {names} is not among the tools, so the bonus could never be earned; "
                "use reward.bonus=0, or name other tools"
            )
        opened.pop_all()  # from here on the toolset closes them
        return toolset


def python_tool(settings: Tools, blocking: bool) -> Tool:
    """The tool `python`; with `blocking`, each call holds up the event loop, so that runs repeat exactly."""
    from arpo.tools.python.tool import build_python

    shows_figures = settings.python_figures
    if shows_figures and find_spec("matplotlib") is None:
        raise ArpoError("tools.python_figures: there is no matplotlib; pip install matplotlib pillow")
    sandbox = open_sandbox(settings.python_memory_mb, settings.unsafe_no_isolation, shows_figures)
    return build_python(sandbox, settings.timeout, settings.max_result_tokens, blocking, shows_figures)


@cache
def open_sandbox(memory_mb: int, unsafe_no_isolation: bool, shows_figures: bool = False) -> Sandbox:
    """The sandbox of this process with these limits, started on first use and closed at exit."""
    from arpo.tools.sandbox.sandbox import FIGURES, Sandbox

    more = FIGURES if shows_figures else {}
    sandbox = Sandbox(memory_mb=memory_mb, unsafe_no_isolation=unsafe_no_isolation, **more)
    sandbox.start()
    atexit.register(sandbox.close)
    return sandbox


def _load_tool(name: str, objects: Objects) -> Tool:
    """A tool of the user's."""
    tool = load_object("tools.enabled", name, objects)
    if not isinstance(tool, Tool):
        raise ArpoError(f"tools.enabled: {name} is not a tool; put @tool (from arpo.tools.base) on the function")
    return tool


def _search(config: Config) -> Tool:
    settings, source = config.tools, config.tools.search
    results, tokens = settings.search_results, settings.max_result_tokens
    if source is None:
        plugin = plugin_of(config.data)
        if plugin is None:
            raise ArpoError(
                "tools.search: name what to search (a file of documents, an index, a server or a search engine), or "
                'leave search out, like tools.enabled=["python"]'
            )
        return build_search(plugin.documents(config), results, tokens)
    if source in PROVIDERS:
        return web_search(source, results, tokens, timeout=settings.timeout)
    if source.startswith(("http://", "https://")):
        return http_search(source, results, tokens, timeout=settings.timeout)
    if expand_user(source).is_dir():
        return index_search(open_index(source), results, settings.search_mode, tokens)
    return build_search(load_documents(source), results, tokens)


def _browse(config: Config) -> Tool:
    from arpo.tools.browse.condense import openai_condenser
    from arpo.tools.browse.tool import build_browse

    settings = config.tools
    if (settings.browse_url is None) != (settings.browse_model is None):
        raise ArpoError("tools.browse_url and tools.browse_model go together; give both or neither")
    condenser = None
    if settings.browse_url is not None and settings.browse_model is not None:
        condenser = openai_condenser(settings.browse_url, settings.browse_model)
    return build_browse(max_tokens=settings.max_result_tokens, timeout=settings.timeout, condense=condenser)


def _connect_mcp(server: Mcp, timeout: float) -> McpServer:
    from arpo.tools.mcp import connect_mcp

    headers = None
    if server.token_env is not None:
        headers = {"Authorization": f"Bearer {read_api_key(server.token_env, 'tools.mcp.token_env')}"}
    shown = server.model_dump()
    return connect_mcp(
        name=" ".join(filter(None, [shown["url"] or shown["command"], *shown["args"][:1]])),
        command=server.command,
        args=[expand_variables(text, "tools.mcp.args", only_keys=False) for text in server.args],
        env={name: expand_variables(text, "tools.mcp.env", only_keys=False) for name, text in server.env.items()},
        url=None if server.url is None else expand_variables(server.url, "tools.mcp.url"),
        headers=headers,
        only=server.only,
        timeout=timeout,
    )


BUILT_IN: dict[str, Callable[[Config], Tool]] = {
    "search": _search,
    "python": lambda config: python_tool(config.tools, config.tools.python_blocks),
    "browse": _browse,
}
"""The tools that `tools.enabled` can name."""
