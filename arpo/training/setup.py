"""From a config to the things it names: questions, tools, model, agent."""

from __future__ import annotations

import atexit
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arpo.agent.formats import CallFormat, build_format
from arpo.agent.traces import encode_examples, read_examples
from arpo.algorithm.rollout import Agent
from arpo.builtin.cold_start import coldstart
from arpo.builtin.world import World, build_world
from arpo.cli.display import console, printable
from arpo.config.loading import config_from_resolved
from arpo.config.plugins import load_object, names_object
from arpo.config.schema import Config, Mcp, Model
from arpo.data.order import Part
from arpo.data.tasks import Columns, load_tasks
from arpo.engine.build import build_engine
from arpo.errors import ArpoError
from arpo.models.load import checkpoint_model_settings, load_trainable
from arpo.models.lora import has_adapter
from arpo.models.save import save_for_vllm
from arpo.net.keys import read_api_key
from arpo.runs.run_dir import is_run, open_run
from arpo.tools.base import Tool
from arpo.tools.cache import ToolCache
from arpo.tools.executor import Toolset
from arpo.tools.search import (
    PROVIDERS,
    build_search,
    http_search,
    index_search,
    load_documents,
    open_index,
    web_search,
)
from arpo.types import Task

if TYPE_CHECKING:
    from arpo.tools.mcp.server import McpServer
    from arpo.tools.sandbox.sandbox import Sandbox

Progress = Callable[[int, int, float], None]


@dataclass(frozen=True, slots=True)
class Bench:
    """Questions, tools and the world they may come from."""

    parts: tuple[Part, ...]
    test: tuple[Task, ...]
    tools: Toolset
    world: World

    @property
    def train(self) -> tuple[Task, ...]:
        """The training questions of all parts."""
        return tuple(task for part in self.parts for task in part.tasks)


def build_bench(config: Config) -> Bench:
    """Load the questions and build the tools; every mistake in them is found here, before any model is loaded."""
    world = build_world(config.world)
    settings = config.data
    prefix = "data.mix." if settings.mix else "data."
    parts = tuple(
        Part(mix.source, _tasks(mix.source, Columns.named(mix, prefix), settings.bad_rows, world.train), mix.weight)
        for mix in settings.training
    )
    source = settings.test or ("world" if _from_world(config) else None)
    try:
        test = _tasks(source, Columns.named(settings), settings.bad_rows, world.test) if source else ()
    except ArpoError as error:
        raise ArpoError(f"{error}\n(it is data.test; training can do without: data.test=none)") from None
    tools = build_tools(config, world)
    try:
        read_examples(config.rollout.examples, call_format(config, tools))
    except ArpoError:
        tools.close()
        raise
    return Bench(parts, test, tools, world)


def _tasks(source: str, columns: Columns, bad_rows: str, of_world: tuple[Task, ...]) -> tuple[Task, ...]:
    if source == "world":
        return of_world
    reading = load_tasks(source, columns, bad_rows)
    if reading.problems:
        console.print(f"{len(reading.problems):,} of {reading.rows:,} rows of {source} are left out:")
        console.print(printable(reading.complaint()))
    return reading.tasks


def _from_world(config: Config) -> bool:
    return any(mix.source == "world" for mix in config.data.training)


def fit_prompts(bench: Bench, agent: Agent, max_tokens: int | None) -> Bench:
    """Leave out training questions whose prompt is longer; a prompt that the model cannot hold is refused now."""
    for task in bench.test if max_tokens else (*bench.train, *bench.test):
        agent.prompt(task)
    if max_tokens is None:
        return bench
    limit = min(max_tokens, agent.engine.capabilities.max_context - 1)

    def short(task: Task) -> bool:
        return len(agent.encode(task.question)) <= limit

    parts = tuple(replace(part, tasks=tuple(filter(short, part.tasks))) for part in bench.parts)
    for before, after in zip(bench.parts, parts, strict=True):
        left_out, count = len(before.tasks) - len(after.tasks), len(before.tasks)
        if not after.tasks:
            raise ArpoError(
                f"data.max_prompt_tokens: none of the {count:,} prompts of {after.source} has {limit} or less"
            )
        if left_out:
            console.print(f"{left_out:,} of {count:,} questions of {after.source} are left out: over {limit} tokens")
    return replace(bench, parts=parts)


def build_tools(config: Config, world: World) -> Toolset:
    """The tools that the config enables, ready to be called; close them when done."""
    settings = config.tools
    wrong = [name for name in settings.enabled if name not in BUILT_IN and not names_object(name)]
    if wrong:
        there = f"{', '.join(BUILT_IN)}, or your own as path/to/file.py:name"
        raise ArpoError(f"tools.enabled: there is no tool {wrong[0]!r}; there are: {there}")
    with ExitStack() as opened:
        tools = [BUILT_IN[name](config, world) if name in BUILT_IN else _own(name) for name in settings.enabled]
        for server in settings.mcp:
            tools += opened.enter_context(_connect(server, settings.timeout)).tools
        box = Toolset(tools, ToolCache(settings.cache, settings.cache_mode) if settings.cache else None)
        missing = sorted(set(config.reward.bonus_tools) - set(box))
        if config.reward.bonus and missing and config.reward.function is None:
            names = ", ".join(missing)
            raise ArpoError(f"reward.bonus_tools: {names} is not among the tools, so the bonus could never be earned")
        opened.pop_all()  # from here on the box closes them
        return box


def call_format(config: Config, tools: Toolset) -> CallFormat:
    """How these tools are called."""
    return build_format(config.rollout.format, [tool.spec for tool in tools.values()])


def world_tools(config: Config, world: World) -> dict[str, Tool]:
    """All that a world's questions need: search in its documents, and Python, one call at a time."""
    found = config.tools.search_results
    return {"search": build_search(world.documents, found), "python": _python(config, world, blocking=True)}


def _own(name: str) -> Tool:
    """A tool of the user's."""
    found = load_object("tools.enabled", name)
    if not isinstance(found, Tool):
        raise ArpoError(f"tools.enabled: {name} is no tool; put @tool (from arpo.tools.base) on the function")
    return found


def _search(config: Config, world: World) -> Tool:
    settings, source = config.tools, config.tools.search
    results, tokens = settings.search_results, settings.result_tokens
    if source is None:
        if not _from_world(config):
            raise ArpoError("tools.search: search needs somewhere to look when the questions are not the world's")
        return build_search(world.documents, results, tokens)
    if source in PROVIDERS:
        return web_search(source, results, tokens, timeout=settings.timeout)
    if source.startswith(("http://", "https://")):
        return http_search(source, results, tokens, timeout=settings.timeout)
    if Path(source).expanduser().is_dir():
        return index_search(open_index(source), results, settings.search_mode, tokens)
    return build_search(load_documents(source), results, tokens)


def _python(config: Config, world: World, blocking: bool | None = None) -> Tool:
    from arpo.tools.python.tool import build_python

    settings = config.tools
    sandbox = open_sandbox(settings.python_memory_mb, settings.unsafe_no_isolation)
    blocking = settings.python_blocks if blocking is None else blocking
    return build_python(sandbox, settings.timeout, settings.result_tokens, blocking)


@cache
def open_sandbox(memory_mb: int, unsafe_no_isolation: bool) -> Sandbox:
    """The sandbox of this process, which all that runs code in it share; closed at exit."""
    from arpo.tools.sandbox.sandbox import Sandbox

    sandbox = Sandbox(memory_mb=memory_mb, unsafe_no_isolation=unsafe_no_isolation)
    sandbox.start()
    atexit.register(sandbox.close)
    return sandbox


def _browse(config: Config, world: World) -> Tool:
    from arpo.tools.browse import build_browse, openai_condenser

    settings = config.tools
    if (settings.browse_url is None) != (settings.browse_model is None):
        raise ArpoError("tools.browse_url and tools.browse_model go together; give both or neither")
    condenser = None
    if settings.browse_url is not None and settings.browse_model is not None:
        condenser = openai_condenser(settings.browse_url, settings.browse_model)
    return build_browse(max_tokens=settings.result_tokens, timeout=settings.timeout, condense=condenser)


def _connect(server: Mcp, timeout: float) -> McpServer:
    from arpo.tools.mcp.server import connect_mcp

    headers = None
    if server.token_env is not None:
        headers = {"Authorization": f"Bearer {read_api_key(server.token_env, 'tools.mcp.token_env')}"}
    return connect_mcp(
        name=" ".join(filter(None, [server.url or server.command, *server.args[:1]])),
        command=server.command,
        args=server.args,
        env=server.env,
        url=server.url,
        headers=headers,
        only=server.only,
        timeout=timeout,
    )


BUILT_IN: dict[str, Callable[[Config, World], Tool]] = {"search": _search, "python": _python, "browse": _browse}
"""The tools that `tools.enabled` can name."""


def build_model(config: Config, bench: Bench, progress: Progress) -> tuple[Any, Any]:
    """The model and its tokenizer; the built-in model is made first if need be."""
    return load_trainable(find_model(config, bench, progress), config.train, config.seed)


def find_model(config: Config, bench: Bench, progress: Progress) -> Model:
    """Where the model is that the settings mean; the built-in model is made first if need be."""
    model = _of_run(config.model)
    if model.path != "tiny":
        return model
    if config.rollout.format != "tags":
        raise ArpoError('rollout.format: the built-in model ("tiny") was taught tags; use "tags" or another model.path')
    path = coldstart(config.coldstart, bench.world, lambda world: world_tools(config, world), progress)
    return model.model_copy(update={"path": str(path)})


def _of_run(model: Model) -> Model:
    """Where the path is a run's directory, its last checkpoint; an adapter comes with the base it was trained on."""
    directory = Path(model.path).expanduser()
    if not is_run(directory):
        return model
    log = open_run(directory)
    checkpoint = log.latest_checkpoint()
    if checkpoint is None:
        raise ArpoError(f"model.path: the run {model.path!r} has no checkpoint yet")
    trained = checkpoint_model_settings(checkpoint[1])
    if "path" in trained:
        return model.model_copy(update={"path": trained["path"]})
    if model.adapter is not None:
        raise ArpoError(f"model.adapter: the run {model.path!r} is an adapter itself; only one can be loaded")
    base = config_from_resolved(log.config()).model.path
    return _of_run(model.model_copy(update={"path": base})).model_copy(update=trained)


def build_agent(config: Config, bench: Bench, model: Any, tokenizer: Any, threaded: bool | None = None) -> Agent:
    """The agent that plays rollouts; its engine has a thread of its own (`threaded`) if some tool takes time."""
    if threaded is None:
        threaded = not all(tool.quick for tool in bench.tools.values())
    if config.rollout.engine == "vllm" and has_adapter(model) and config.model.dtype != "float32":
        raise ArpoError(
            "rollout.engine: vLLM gets an adapter merged into the model, and in 16 bits most of what was trained would "
            "be rounded away; use rollout.engine=local, model.dtype=float32, or train.lora_rank=0"
        )
    engine = build_engine(config.rollout, model, tokenizer, partial(save_for_vllm, model, tokenizer), threaded)
    fmt = call_format(config, bench.tools)
    traces, limit = read_examples(config.rollout.examples, fmt), config.tools.result_tokens
    return Agent(engine, tokenizer, bench.tools, fmt, limit, encode_examples(traces, tokenizer, fmt, limit))
