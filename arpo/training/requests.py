"""Requests for trees between processes, and the replies to them: JSON and packed trees, never pickles.

    request = encode_request(task, seed, evaluating=False)    where the run is
    outcome, value = await replies(sample)(request)           in a process that samples
    scored = restore_columns(unpack_tree(value), task)        where the run is

Guarantees: a user's mistake and a bug come back as text, marked as what they are.
"""

from __future__ import annotations

import functools
import json
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, replace
from statistics import fmean
from typing import Any

from arpo.config.masking import mask_message
from arpo.data.images import refuse_images
from arpo.errors import ArpoError
from arpo.types import ScoredTree, Task

DONE, MISTAKE, BUG = "done", "mistake", "bug"
Reply = tuple[str, Any]
"""The outcome (DONE, MISTAKE or BUG), and its value or error message."""


def replies(method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Reply]]:
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


def encode_request(task: Task, seed: int, evaluating: bool) -> bytes:
    """The request for one tree, as a line of JSON."""
    refuse_images(task.images, f"task {task.id!r}", "they are not sent to other processes")
    values: dict[str, Any] = {"task": {**asdict(task), "meta": dict(task.meta)}, "seed": seed, "evaluating": evaluating}
    del values["task"]["images"]
    return json.dumps(values).encode()


def decode_request(request: bytes) -> tuple[Task, int, bool]:
    """The inverse of `encode_request`."""
    data = json.loads(request)
    return Task(**{**data["task"], "answers": tuple(data["task"]["answers"])}), data["seed"], data["evaluating"]


def restore_columns(scored: ScoredTree, task: Task) -> ScoredTree:
    """The tree with all columns of its task: packed trees shorten long ones."""
    return replace(scored, tree=replace(scored.tree, task=replace(scored.tree.task, meta=task.meta)))


def merge_stats(stats: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Counters of several workers as one: maxima by their maximum, errors by their mean, all others by their sum."""
    ways = {name: max if name.endswith("_max") else fmean if name.endswith("_error") else sum for name in stats}
    return {name: float(ways[name](values)) for name, values in stats.items()}
