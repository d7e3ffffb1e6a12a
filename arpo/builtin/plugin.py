"""The built-in task plug-in: questions and documents of the toy world, and the small model cold-started for them.

Light: torch is imported only when the model is asked for.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from arpo.builtin.world import build_world
from arpo.config.schema import Config
from arpo.data.task_set import Progress
from arpo.errors import ArpoError
from arpo.types import Document, Task

_cached_world = lru_cache(maxsize=4)(build_world)


class WorldPlugin:
    """The toy world of `config.world` as a `TaskPlugin`."""

    def tasks(self, config: Config) -> tuple[tuple[Task, ...], tuple[Task, ...]]:
        """The world's training and test questions."""
        world = _cached_world(config.world)
        return world.train, world.test

    def documents(self, config: Config) -> tuple[Document, ...]:
        """The world's documents, one per fact."""
        return _cached_world(config.world).documents

    def model(self, config: Config, progress: Progress) -> Path:
        """The directory of the cold-started model; it is made once and cached."""
        if config.rollout.format != "tags":
            raise ArpoError(
                'rollout.format: the built-in model ("tiny") was trained with tags; use "tags" or another model.path'
            )
        from arpo.builtin.cold_start import cold_start

        return cold_start(config, progress)


WORLD = WorldPlugin()
