"""The built-in model: the base that comes with the package, after imitating traces of the world's difficulty.

The cold start takes about half a minute on two cores. Its result is a Hugging Face directory in the cache, named by a
hash of all that it depends on, and made once.
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
from arpo.builtin.imitate import Progress, batches_of, imitate, trace_rows
from arpo.builtin.traces import PER_WORLD, write_traces
from arpo.builtin.world import World
from arpo.config.schema import Coldstart, Config, Model
from arpo.errors import ArpoError
from arpo.models.load import load_model
from arpo.models.save import save_pretrained
from arpo.tools.base import Tool
from arpo.tools.build import python_tool
from arpo.tools.executor import call_tool
from arpo.tools.search import build_search
from arpo.types import ToolCall

ToolsFor = Callable[[World], Mapping[str, Tool]]  # the tools over a world's documents
MAX_CONTEXT = 512
RECIPE = 1  # to be raised when the same settings are to give another model


def cache_directory() -> Path:
    """Where made models are kept: $ARPO_CACHE, else the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(os.environ.get("ARPO_CACHE") or Path(base) / "arpo")


def coldstart(settings: Coldstart, world: World, tools_for: ToolsFor, progress: Progress) -> Path:
    """The built-in model's directory, made now if the cache does not hold it; `progress(step, steps, loss)`."""
    directory = cache_directory() / f"tiny-{_fingerprint(settings, world, tools_for)}"
    if not (directory / "config.json").is_file():
        unfinished = directory.with_name(f"{directory.name}.{os.getpid()}.tmp")
        try:
            unfinished.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ArpoError(f"{cache_directory()}: {error.strerror}; set ARPO_CACHE to a folder to write to") from None
        model, tokenizer = start_from_base(settings, world, tools_for, progress)
        save_pretrained(model, tokenizer, unfinished)
        try:
            unfinished.rename(directory)
        except OSError:  # another process was faster: its model is the same
            shutil.rmtree(unfinished)
    return directory


def start_from_base(settings: Coldstart, world: World, tools_for: ToolsFor, progress: Progress) -> tuple[Any, Any]:
    """The base after imitating traces of the world's difficulty."""
    with resources.as_file(resources.files("arpo.builtin").joinpath("base")) as base:
        model, tokenizer = load_model(Model(path=str(base), device="cpu"))  # the same everywhere
    progress(0, settings.steps, math.nan)
    traces = write_traces(
        world,
        settings.traces,
        lambda other: caller(tools_for(other)),
        settings.seed,
        difficulty=world.settings.difficulty,
    )
    rows = trace_rows(traces, tokenizer, build_format("tags", [tool.spec for tool in tools_for(world).values()]))
    rng = random.Random(settings.seed)
    imitate(model, batches_of(lambda: rows, settings.batch_tokens, rng), settings.steps, settings.lr, progress)
    return model.eval(), tokenizer


def world_tools(config: Config, world: World) -> dict[str, Tool]:
    """The tools that the world's questions need: search in its documents, and Python, one call at a time."""
    search = build_search(world.documents, config.tools.search_results)
    return {"search": search, "python": python_tool(config.tools, blocking=True)}


def caller(tools: Mapping[str, Tool]) -> Callable[[str, str], str]:
    """Calls a real tool and remembers its answers: the same look-ups come up again and again in traces."""
    known: dict[tuple[str, str], str] = {}

    def call(name: str, argument: str) -> str:
        if (name, argument) not in known:
            made = ToolCall(name, {tools[name].spec.main_argument: argument})
            known[name, argument] = asyncio.run(call_tool(tools, made)).text
        return known[name, argument]

    return call


def _fingerprint(settings: Coldstart, world: World, tools_for: ToolsFor) -> str:
    """A hash of what the model is made from: the recipe, the settings, a sample of the traces, the base."""
    traces = write_traces(
        world, PER_WORLD, lambda other: caller(tools_for(other)), settings.seed, world.settings.difficulty
    )
    digest = hashlib.sha256(f"{RECIPE} {settings.model_dump_json()} {torch.__version__} {traces!r}".encode())
    base = resources.files("arpo.builtin").joinpath("base")
    for name in sorted(path.name for path in base.iterdir()):
        digest.update(base.joinpath(name).read_bytes())
    return digest.hexdigest()[:16]
