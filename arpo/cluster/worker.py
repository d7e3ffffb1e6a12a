"""What an actor does, in a process of its own: it opens a session from the run's settings, and grows and scores trees.

Promises: what goes in and out is JSON, packed trees and safetensors, never a pickle of ours; a user's mistake and a bug
come back as text, marked as what they are. One tree is grown by one version of the weights, if whoever asks keeps to
it: `update` is for when nothing is being grown.
"""

from __future__ import annotations

import asyncio
import json
import os
import traceback
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save

from arpo.config.loading import config_from_resolved
from arpo.errors import ArpoError
from arpo.evaluation.evaluate import evaluate
from arpo.runs.trees import pack_trees
from arpo.training.sampler import Session, grow_here, open_session
from arpo.types import ScoredTree, Task

DONE, MISTAKE, BUG = "done", "mistake", "bug"
Reply = tuple[str, Any]
"""How it went, and what came of it: a value, or what to tell the user."""


class Worker:
    """Grows trees; opened with the run's settings, as JSON."""

    _session: Session
    _slots: asyncio.Semaphore

    async def open(self, settings: bytes, directory: str, cpus: int) -> Reply:
        """Load the model, the tools and all; files are named from `directory`, if that is here. Tells its pid."""

        async def work() -> int:
            if Path(directory).is_dir():
                os.chdir(directory)
            torch.set_num_threads(max(1, cpus))
            config = config_from_resolved(json.loads(settings))
            self._session = await asyncio.to_thread(open_session, config)
            self._slots = asyncio.Semaphore(config.rollout.concurrency)
            return os.getpid()

        return await _told(work)

    async def update(self, version: int, weights: Any) -> Reply:
        """Take over these weights, as `weights_of` made them."""

        async def work() -> None:
            put_weights(self._session.model, bytes(weights))
            await self._session.agent.engine.sync_weights(version)

        return await _told(work)

    async def grow(self, order: bytes) -> Reply:
        """Grow one tree and score it; returns it, packed, and what the engine did since the last time."""

        async def work() -> tuple[bytes, dict[str, float]]:
            task, seed, testing = decode_request(order)
            session = self._session
            if testing:
                [scored] = await _evaluate(session, task, seed, self._slots)
            else:
                [scored] = await grow_here(session, [task], [seed], self._slots)
            return pack_trees([scored])[0], session.agent.engine.stats()

        return await _told(work)


async def _evaluate(session: Session, task: Task, seed: int, slots: asyncio.Semaphore) -> Sequence[ScoredTree]:
    config, workers = session.config, session.config.reward.workers
    result = await evaluate(session.agent, [task], [seed], config.eval, config.rollout, session.reward, workers, slots)
    return result.trees


async def _told(work: Callable[[], Awaitable[Any]]) -> Reply:
    try:
        return DONE, await work()
    except ArpoError as error:
        return MISTAKE, str(error)
    except Exception:
        return BUG, traceback.format_exc()


def encode_request(task: Task, seed: int, testing: bool) -> bytes:
    """What `grow` is asked."""
    return json.dumps({"task": {**asdict(task), "meta": dict(task.meta)}, "seed": seed, "testing": testing}).encode()


def decode_request(order: bytes) -> tuple[Task, int, bool]:
    """The inverse."""
    data = json.loads(order)
    return Task(**{**data["task"], "answers": tuple(data["task"]["answers"])}), data["seed"], data["testing"]


def weights_of(model: Any) -> bytes:
    """All that training changes, as safetensors."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return save({name: p.detach().cpu().contiguous() for name, p in trained.items()})


@torch.no_grad()
def put_weights(model: Any, weights: bytes) -> None:
    """Overwrite what training changes."""
    given, trained = load(weights), {name: p for name, p in model.named_parameters() if p.requires_grad}
    if given.keys() != trained.keys():
        raise ValueError(f"other weights are trained here: {sorted(given.keys() ^ trained.keys())[:3]}")
    for name, parameter in trained.items():
        parameter.copy_(given[name])
