"""A sampling worker in a process of its own: it opens a rollout context from the run's settings and samples trees.

Guarantees: requests and replies are JSON, packed trees and safetensors, never pickles of ours; a user's mistake and a
bug come back as text, marked as what they are. A tree is sampled by one policy version, as long as `update` is called
only while nothing is being sampled.
"""

from __future__ import annotations

import asyncio
import json
import os
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save

from arpo.config.loading import config_from_resolved
from arpo.errors import ArpoError
from arpo.runs.trees import pack_trees
from arpo.training.context import open_context
from arpo.training.sampler import LocalSampler
from arpo.types import Task

DONE, MISTAKE, BUG = "done", "mistake", "bug"
Reply = tuple[str, Any]
"""The outcome (DONE, MISTAKE or BUG), and its value or error message."""


class Worker:
    """Samples trees; opened with the run's settings as JSON."""

    _sampler: LocalSampler
    _slots: asyncio.Semaphore

    async def open(self, settings: bytes, directory: str, cpus: int) -> Reply:
        """Load tasks, tools and model; relative paths start at `directory`, if it exists here. Returns the pid."""

        async def work() -> int:
            if Path(directory).is_dir():
                os.chdir(directory)
            torch.set_num_threads(max(1, cpus))
            config = config_from_resolved(json.loads(settings))
            self._sampler = LocalSampler(await asyncio.to_thread(open_context, config))
            self._slots = asyncio.Semaphore(config.rollout.concurrency)
            return os.getpid()

        return await _reply(work)

    async def update(self, version: int, weights: Any) -> Reply:
        """Load these weights, as `weights_of` wrote them."""

        async def work() -> None:
            put_weights(self._sampler.context.model, bytes(weights))
            await self._sampler.sync_weights(version)

        return await _reply(work)

    async def sample(self, request: bytes) -> Reply:
        """Sample and score one tree; returns it packed, and the engine's counters since the last call."""

        async def work() -> tuple[bytes, dict[str, float]]:
            task, seed, evaluating = decode_request(request)
            sampler, slots = self._sampler, self._slots
            if evaluating:
                [scored] = (await sampler.evaluate([task], [seed], slots=slots)).trees
            else:
                [scored] = await sampler.sample([task], [seed], slots=slots)
            return pack_trees([scored])[0], sampler.context.agent.engine.stats()

        return await _reply(work)


async def _reply(work: Callable[[], Awaitable[Any]]) -> Reply:
    try:
        return DONE, await work()
    except ArpoError as error:
        return MISTAKE, str(error)
    except Exception:
        return BUG, traceback.format_exc()


def encode_request(task: Task, seed: int, evaluating: bool) -> bytes:
    """The request of `Worker.sample`."""
    values = {"task": {**asdict(task), "meta": dict(task.meta)}, "seed": seed, "evaluating": evaluating}
    return json.dumps(values).encode()


def decode_request(request: bytes) -> tuple[Task, int, bool]:
    """The inverse of `encode_request`."""
    data = json.loads(request)
    return Task(**{**data["task"], "answers": tuple(data["task"]["answers"])}), data["seed"], data["evaluating"]


def weights_of(model: Any) -> bytes:
    """The trained weights as safetensors."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return save({name: p.detach().cpu().contiguous() for name, p in trained.items()})


@torch.no_grad()
def put_weights(model: Any, weights: bytes) -> None:
    """Overwrite the trained weights."""
    given, trained = load(weights), {name: p for name, p in model.named_parameters() if p.requires_grad}
    if given.keys() != trained.keys():
        raise ValueError(f"the trained weights differ here: {sorted(given.keys() ^ trained.keys())[:3]}")
    for name, parameter in trained.items():
        parameter.copy_(given[name])
