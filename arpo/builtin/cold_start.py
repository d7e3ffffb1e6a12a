"""The cold start: the base model that comes with the package imitates traces of the toy world or the labyrinth.

It takes about half a minute on two cores. The result is a Hugging Face directory in the cache, named by a hash of
everything it depends on, and is made once. Pretraining uses the same supervised training on token rows: only marked
tokens are trained on; rows of similar length are batched together and padded on the right.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import os
import random
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from importlib import resources
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from arpo.agent.formats import CallFormat, build_format
from arpo.builtin import labyrinth
from arpo.builtin.model import add_words
from arpo.builtin.traces import TRACES_PER_WORLD, CallTool, write_traces
from arpo.builtin.world import World, build_world
from arpo.config.files import remove_abandoned
from arpo.config.schema import Coldstart, Config, Model
from arpo.data.task_set import Progress
from arpo.data.tasks import Trace
from arpo.environments.labyrinth import Labyrinth
from arpo.errors import ArpoError
from arpo.models.load import load_model
from arpo.models.save import save_pretrained
from arpo.tools.base import Tool
from arpo.tools.build import python_tool
from arpo.tools.executor import call_tool
from arpo.tools.search import build_search
from arpo.training.sft_examples import encode_trace
from arpo.types import Kind, ToolCall

RECIPE = 1  # raise this when the same settings should give another model
LABYRINTH_LR_SCALE = 4
Row = tuple[list[int], list[bool]]
"""Token ids, and which of them are trained on."""


def cache_dir() -> Path:
    """The directory of cold-started models: $ARPO_CACHE, else in the user's cache."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(os.environ.get("ARPO_CACHE") or Path(base) / "arpo")


def cold_start(config: Config, progress: Progress) -> Path:
    """The directory of the model cold-started for the world; it is trained now if the cache does not have it."""
    world, settings = build_world(config.world), config.coldstart

    def write(count: int) -> list[list[Trace]]:
        return [write_traces(world, count, tool_caller(config), settings.seed, config.world.difficulty)]

    return _cold_start(settings, config.world.difficulty, write, list(world_tools(config, world).values()), progress)


def labyrinth_cold_start(config: Config, progress: Progress) -> Path:
    """The directory of the model cold-started for the labyrinth; it is trained now if the cache does not have it.

    The base knows neither its tags nor its sentences, so there are two stages, and larger steps than for the world.
    The first stage, in which half of the decisions follow the note, teaches to remember it; the second one the habits.
    """
    settings = config.coldstart.model_copy(update={"lr": LABYRINTH_LR_SCALE * config.coldstart.lr})
    stages = [config.labyrinth.model_copy(update={"difficulty": 0.5}), config.labyrinth]

    def write(count: int) -> list[list[Trace]]:
        return [labyrinth.write_traces(stage, count, settings.seed) for stage in stages]

    return _cold_start(settings, config.labyrinth.difficulty, write, Labyrinth().tools(), progress, labyrinth.WORDS)


def _cold_start(
    settings: Coldstart,
    difficulty: float,
    write: Callable[[int], list[list[Trace]]],
    tools: Sequence[Tool],
    progress: Progress,
    words: Mapping[str, str] | None = None,
) -> Path:
    """The directory of the base model after imitating traces, stage by stage; `words` become tokens."""
    directory = cache_dir() / f"tiny-{_fingerprint(settings, difficulty, write(TRACES_PER_WORLD), words)}"
    if not (directory / "config.json").is_file():
        unfinished = directory.with_name(f"{directory.name}.{os.getpid()}.tmp")
        try:
            unfinished.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ArpoError(f"{cache_dir()}: {error.strerror}; set ARPO_CACHE to a folder to write to") from None
        try:
            remove_abandoned(directory.parent.glob(f"{directory.name}.*.tmp"))
            save_pretrained(*_train_from_base(settings, write, tools, progress, words), unfinished)
            with suppress(OSError):  # another process was faster; its model is the same
                unfinished.rename(directory)
        finally:  # also after Ctrl-C
            shutil.rmtree(unfinished, ignore_errors=True)
    return directory


def _train_from_base(
    settings: Coldstart,
    write: Callable[[int], list[list[Trace]]],
    tools: Sequence[Tool],
    progress: Progress,
    words: Mapping[str, str] | None,
) -> tuple[Any, Any]:
    with resources.as_file(resources.files("arpo.builtin").joinpath("base")) as base:
        model, tokenizer = load_model(Model(path=str(base), device="cpu"))  # the same result on every machine
    if words:
        add_words(model, tokenizer, words, settings.seed)
    progress(0, settings.steps, math.nan)
    fmt, rng = build_format("tags", [tool.spec for tool in tools]), random.Random(settings.seed)
    stages = [trace_rows(traces, tokenizer, fmt) for traces in write(settings.traces)]
    batches = (islice(batch_rows(rows.copy, settings.batch_tokens, rng), settings.steps) for rows in stages)
    imitate(model, chain.from_iterable(batches), len(stages) * settings.steps, settings.lr, progress)
    return model.eval(), tokenizer


def world_tools(config: Config, world: World) -> dict[str, Tool]:
    """The tools that the world's questions need: search in its documents, and Python, one call at a time."""
    search = build_search(world.documents, config.tools.search_results)
    return {"search": search, "python": python_tool(config.tools, blocking=True)}


def tool_caller(config: Config) -> Callable[[World], CallTool]:
    """For a world, a function that calls its real tools and remembers their results, since traces repeat calls."""

    def for_world(world: World) -> CallTool:
        tools = world_tools(config, world)
        thread = ThreadPoolExecutor(1)  # the caller's own may run an event loop already, as in a notebook

        @cache
        def call(name: str, argument: str) -> str:
            made = ToolCall(name, {tools[name].spec.main_argument: argument})
            return thread.submit(asyncio.run, call_tool(tools, made)).result().text

        return call

    return for_world


def _fingerprint(
    settings: Coldstart, difficulty: float, stages: list[list[Trace]], words: Mapping[str, str] | None
) -> str:
    """A hash of what the model is made from: the recipe, the settings, a sample of the traces, the base, new words.

    The sample is often the same for two difficulties that are close.
    """
    made_of = f"{RECIPE} {settings.model_dump_json()} {difficulty} {torch.__version__} {stages!r} {words!r}"
    digest = hashlib.sha256(made_of.encode())
    base = resources.files("arpo.builtin").joinpath("base")
    for name in sorted(path.name for path in base.iterdir()):
        digest.update(base.joinpath(name).read_bytes())
    return digest.hexdigest()[:16]


def imitate(model: Any, batches: Iterator[list[Row]], steps: int, lr: float, progress: Progress) -> None:
    """Train on `steps` batches, with a short warmup and a linear decay to 0."""
    optimizers = build_optimizers(model, lr)
    for step in range(steps):
        lr_scale = min(1.0, (step + 1) / 30) * (1 - step / steps)
        progress(step + 1, steps, _train_step(model, optimizers, next(batches), lr_scale))


def trace_rows(traces: Sequence[Trace], tokenizer: Any, fmt: CallFormat) -> list[Row]:
    """Traces as token rows, tokenized segment by segment as in a rollout."""
    examples = (encode_trace(trace, tokenizer, fmt) for trace in traces)
    return [
        (
            [token for _, ids in example.segments for token in ids],
            [kind is Kind.MODEL for kind, ids in example.segments for _ in ids],
        )
        for example in examples
    ]


def batch_rows(next_rows: Callable[[], list[Row]], batch_tokens: int, rng: random.Random) -> Iterator[list[Row]]:
    """Endless batches of rows of similar length, at most `batch_tokens` padded tokens each, in random order."""
    while True:
        rows = sorted(next_rows(), key=lambda row: len(row[0]))
        batches: list[list[Row]] = [[]]
        for row in rows:
            if (len(batches[-1]) + 1) * len(row[0]) > batch_tokens and batches[-1]:
                batches.append([])
            batches[-1].append(row)
        rng.shuffle(batches)
        yield from batches


def build_optimizers(model: Any, lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, where it learns faster here than AdamW; AdamW for the rest."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    rest = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    return [
        torch.optim.Muon(matrices, lr=7.5 * lr, weight_decay=0.0, momentum=0.95),
        torch.optim.AdamW(rest, lr=lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def _train_step(model: Any, optimizers: list[torch.optim.Optimizer], batch: list[Row], lr_scale: float) -> float:
    """One optimizer step at `lr_scale` times the base learning rate; returns the loss per token."""
    width = max(len(tokens) for tokens, _ in batch)
    tokens_BT = torch.tensor([tokens + [0] * (width - len(tokens)) for tokens, _ in batch], device=model.device)
    mask_BT = torch.tensor([trained + [False] * (width - len(trained)) for _, trained in batch], device=model.device)
    hidden_BTH = model.get_decoder()(input_ids=tokens_BT, use_cache=False).last_hidden_state
    trained_BT = mask_BT[:, 1:]
    logits_NV = model.get_output_embeddings()(hidden_BTH[:, :-1][trained_BT])
    loss = functional.cross_entropy(logits_NV, tokens_BT[:, 1:][trained_BT])
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group.setdefault("base_lr", group["lr"])
            group["lr"] = group["base_lr"] * lr_scale
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return loss.item()
