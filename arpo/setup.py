"""From a config to the things it names: questions, tools, model, agent."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from arpo.coldstart import coldstart
from arpo.data.files import load_tasks
from arpo.data.world import World, make_world
from arpo.engine.local import LocalEngine
from arpo.render import make_format
from arpo.rollout import Agent
from arpo.settings import Config, Model
from arpo.tools.base import Tool
from arpo.tools.calculator import calculator
from arpo.tools.search import build_search, load_documents
from arpo.trainer.model import load_model
from arpo.types import ArpoError, Task

Progress = Callable[[int, int, float], None]


@dataclass(frozen=True, slots=True)
class Bench:
    """Questions, tools and the world they may come from."""

    train: tuple[Task, ...]
    test: tuple[Task, ...]
    tools: Mapping[str, Tool]
    world: World


def make_bench(config: Config) -> Bench:
    """Load the questions and build the tools; every mistake in them is found here, before any model is loaded."""
    world = make_world(config.world)
    columns = config.data.question, config.data.answer
    train = world.train if config.data.train == "world" else load_tasks(config.data.train, *columns)
    source = config.data.test or ("world" if config.data.train == "world" else None)
    test = world.test if source == "world" else load_tasks(source, *columns) if source else ()
    return Bench(train, test, make_tools(config, world), world)


def make_tools(config: Config, world: World) -> dict[str, Tool]:
    """The tools that the config enables, by name."""
    settings = config.tools
    known = world_tools(config, world)
    for key, names in (("tools.enabled", settings.enabled), ("reward.bonus_tools", config.reward.bonus_tools)):
        wrong = [name for name in names if name not in known]
        if wrong:
            raise ArpoError(f"{key}: there is no tool {wrong[0]!r}; there are: {', '.join(known)}")
    if config.reward.bonus and set(config.reward.bonus_tools) - set(settings.enabled):
        missing = ", ".join(sorted(set(config.reward.bonus_tools) - set(settings.enabled)))
        raise ArpoError(f"reward.bonus_tools: {missing} is not in tools.enabled, so the bonus could never be earned")
    if "search" in settings.enabled and settings.corpus is None and config.data.train != "world":
        raise ArpoError("tools.corpus: search needs documents (JSON lines) when data.train is a file")
    if settings.corpus is not None:
        known["search"] = build_search(load_documents(settings.corpus), settings.search_results)
    return {name: replace(known[name], timeout=settings.timeout) for name in settings.enabled}


def world_tools(config: Config, world: World) -> dict[str, Tool]:
    """All that a world's questions need: search in its documents, and a calculator."""
    return {"search": build_search(world.documents, config.tools.search_results), "calculator": calculator}


def make_model(config: Config, bench: Bench, progress: Progress) -> tuple[Any, Any]:
    """The model and its tokenizer; the built-in model is made first if need be."""
    if config.model.path != "tiny":
        return load_model(config.model)
    if config.rollout.format != "tags":
        raise ArpoError('rollout.format: the built-in model ("tiny") was taught tags; use "tags" or another model.path')
    path = coldstart(config.coldstart, bench.world, lambda world: world_tools(config, world), progress)
    return load_model(Model(path=str(path), device=config.model.device, dtype=config.model.dtype))


def make_agent(config: Config, bench: Bench, model: Any, tokenizer: Any) -> Agent:
    """The agent that plays rollouts, over the local engine."""
    threaded = not all(tool.quick for tool in bench.tools.values())
    engine = LocalEngine(model, tokenizer, rows=config.rollout.concurrency, threaded=threaded)
    fmt = make_format(config.rollout.format, [tool.spec for tool in bench.tools.values()])
    agent = Agent(engine, tokenizer, bench.tools, fmt, config.tools.result_tokens)
    for task in (*bench.train, *bench.test):
        agent.prompt(task)  # a prompt that does not fit is refused now, not in the middle of a run
    return agent
