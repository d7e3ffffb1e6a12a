"""The cold start: the base model that comes with the package imitates traces of the toy world.

It takes about half a minute on two cores. The result is a Hugging Face directory in the cache, named by a hash of
everything it depends on, and is made once.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import os
import random
import shutil
from collections.abc import Callable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from arpo.agent.formats import build_format
from arpo.builtin.imitation import batch_rows, imitate, trace_rows
from arpo.builtin.traces import TRACES_PER_WORLD, CallTool, write_traces
from arpo.builtin.world import World, build_world
from arpo.config.schema import Config, Model
from arpo.data.plugin import Progress
from arpo.errors import ArpoError
from arpo.models.load import load_model
from arpo.models.save import save_pretrained
from arpo.tools.base import Tool
from arpo.tools.build import python_tool
from arpo.tools.executor import call_tool
from arpo.tools.search import build_search
from arpo.types import ToolCall

RECIPE = 1  # raise this when the same settings should give another model


def cache_dir() -> Path:
    """The directory of cold-started models: $ARPO_CACHE, else in the user's cache."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(os.environ.get("ARPO_CACHE") or Path(base) / "arpo")


def cold_start(config: Config, progress: Progress) -> Path:
    """The directory of the cold-started model; it is trained now if the cache does not have it."""
    world = build_world(config.world)
    directory = cache_dir() / f"tiny-{_fingerprint(config, world)}"
    if not (directory / "config.json").is_file():
        unfinished = directory.with_name(f"{directory.name}.{os.getpid()}.tmp")
        try:
            unfinished.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ArpoError(f"{cache_dir()}: {error.strerror}; set ARPO_CACHE to a folder to write to") from None
        save_pretrained(*train_from_base(config, world, progress), unfinished)
        try:
            unfinished.rename(directory)
        except OSError:  # another process was faster; its model is the same
            shutil.rmtree(unfinished)
    return directory


def train_from_base(config: Config, world: World, progress: Progress) -> tuple[Any, Any]:
    """The base model after imitating traces of the world's difficulty, and its tokenizer."""
    settings = config.coldstart
    with resources.as_file(resources.files("arpo.builtin").joinpath("base")) as base:
        model, tokenizer = load_model(Model(path=str(base), device="cpu"))  # the same result on every machine
    progress(0, settings.steps, math.nan)
    traces = write_traces(world, settings.traces, tool_caller(config), settings.seed, config.world.difficulty)
    rows = trace_rows(
        traces, tokenizer, build_format("tags", [tool.spec for tool in world_tools(config, world).values()])
    )
    batches = batch_rows(lambda: rows, settings.batch_tokens, random.Random(settings.seed))
    imitate(model, batches, settings.steps, settings.lr, progress)
    return model.eval(), tokenizer


def world_tools(config: Config, world: World) -> dict[str, Tool]:
    """The tools that the world's questions need: search in its documents, and Python, one call at a time."""
    search = build_search(world.documents, config.tools.search_results)
    return {"search": search, "python": python_tool(config.tools, blocking=True)}


def tool_caller(config: Config) -> Callable[[World], CallTool]:
    """For a world, a function that calls its real tools and remembers their results, since traces repeat calls."""

    def for_world(world: World) -> CallTool:
        tools: Mapping[str, Tool] = world_tools(config, world)
        results: dict[tuple[str, str], str] = {}

        def call(name: str, argument: str) -> str:
            if (name, argument) not in results:
                made = ToolCall(name, {tools[name].spec.main_argument: argument})
                results[name, argument] = asyncio.run(call_tool(tools, made)).text
            return results[name, argument]

        return call

    return for_world


def _fingerprint(config: Config, world: World) -> str:
    """A hash of what the model is made from: the recipe, the settings, a sample of the traces, the base."""
    settings = config.coldstart
    traces = write_traces(world, TRACES_PER_WORLD, tool_caller(config), settings.seed, config.world.difficulty)
    digest = hashlib.sha256(f"{RECIPE} {settings.model_dump_json()} {torch.__version__} {traces!r}".encode())
    base = resources.files("arpo.builtin").joinpath("base")
    for name in sorted(path.name for path in base.iterdir()):
        digest.update(base.joinpath(name).read_bytes())
    return digest.hexdigest()[:16]
