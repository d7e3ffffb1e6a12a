"""A sampling worker in a process of its own: it opens a rollout context from the run's settings and samples trees.

Guarantees: requests and replies are JSON, packed trees and safetensors, never pickles of ours; a user's mistake and a
bug come back as text, marked as what they are. A tree is sampled by one policy version, as long as `update` is called
only while nothing is being sampled.
"""

from __future__ import annotations

import asyncio
import functools
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
from arpo.config.masking import mask_message
from arpo.data.images import refuse_images
from arpo.errors import ArpoError
from arpo.runs.trees import pack_trees
from arpo.training.context import open_context
from arpo.training.sampler import LocalSampler
from arpo.types import Task

DONE, MISTAKE, BUG = "done", "mistake", "bug"
Reply = tuple[str, Any]
"""The outcome (DONE, MISTAKE or BUG), and its value or error message."""


def _replies(method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Reply]]:
    """The method with a `Reply` for its value or error."""

    @functools.wraps(method)
    async def call(*args: Any) -> Reply:
        try:
            return DONE, await method(*args)
        except ArpoError as error:
            return MISTAKE, str(error)
        except Exception:
            return BUG, mask_message(traceback.format_exc())

    return call


class Worker:
    """Samples trees; opened with the run's settings as JSON."""

    _sampler: LocalSampler
    _slots: asyncio.Semaphore

    @_replies
    async def open(self, settings: bytes, directory: str, cpus: int) -> int:
        """Load tasks, tools and model; relative paths start at `directory`, if it exists here. Returns the pid."""
        if Path(directory).is_dir():
            os.chdir(directory)
        torch.set_num_threads(max(1, cpus))
        config = config_from_resolved(json.loads(settings), allow_masked=False)
        self._sampler = LocalSampler(await asyncio.to_thread(open_context, config))
        self._slots = asyncio.Semaphore(config.rollout.concurrency)
        return os.getpid()

    @_replies
    async def update(self, version: int, weights: Any) -> int:
        """Load weights from `weights_of`; returns their version."""
        load_weights(self._sampler.context.model, bytes(weights))
        await self._sampler.sync_weights(version)
        return version

    @_replies
    async def sample(self, request: bytes) -> tuple[bytes, dict[str, float]]:
        """Sample and score one tree; returns it packed, and the counters since the last call."""
        task, seed, evaluating = decode_request(request)
        if evaluating:
            [scored] = (await self._sampler.evaluate([task], [seed], slots=self._slots)).trees
        else:
            [scored] = await self._sampler.sample([task], [seed], slots=self._slots)
        return pack_trees([scored])[0], self._sampler.step_metrics(0)


def encode_request(task: Task, seed: int, evaluating: bool) -> bytes:
    """The request of `Worker.sample`."""
    refuse_images(task.images, f"task {task.id!r}", "they are not sent to workers")
    values: dict[str, Any] = {"task": {**asdict(task), "meta": dict(task.meta)}, "seed": seed, "evaluating": evaluating}
    del values["task"]["images"]
    return json.dumps(values).encode()


def decode_request(request: bytes) -> tuple[Task, int, bool]:
    """The inverse of `encode_request`."""
    data = json.loads(request)
    return Task(**{**data["task"], "answers": tuple(data["task"]["answers"])}), data["seed"], data["evaluating"]


def weights_of(model: Any) -> bytes:
    """The trained weights as safetensors."""
    return save({name: weight.detach().cpu().contiguous() for name, weight in _trained(model).items()})


@torch.no_grad()
def load_weights(model: Any, weights: bytes) -> None:
    """Overwrite the trained weights with those of `weights_of`."""
    loaded, trained = load(weights), _trained(model)
    if loaded.keys() != trained.keys():
        raise ValueError(f"other weights are trained here: {sorted(loaded.keys() ^ trained.keys())[:3]}")
    for name, weight in trained.items():
        weight.copy_(loaded[name])


def _trained(model: Any) -> dict[str, torch.Tensor]:
    return {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
