"""The built-in task plug-ins: the toy world, the labyrinth and the scenes, each with the small model made for it.

Light: torch is imported only when the model is asked for.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from arpo.builtin.labyrinth import build_labyrinths
from arpo.builtin.scenes import build_scenes
from arpo.builtin.world import build_world
from arpo.config.schema import Config
from arpo.data.task_set import Progress
from arpo.errors import ArpoError
from arpo.types import Document, Task

_cached_labyrinths = lru_cache(maxsize=4)(build_labyrinths)
_cached_scenes = lru_cache(maxsize=4)(build_scenes)
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
        _require_tags(config)
        from arpo.builtin.cold_start import cold_start

        return cold_start(config, progress)


class LabyrinthPlugin:
    """The labyrinths of `config.labyrinth` as a `TaskPlugin`."""

    def tasks(self, config: Config) -> tuple[tuple[Task, ...], tuple[Task, ...]]:
        """The training and the test tasks."""
        return _cached_labyrinths(config.labyrinth)

    def documents(self, config: Config) -> tuple[Document, ...]:
        """None: there is nothing to search."""
        return ()

    def model(self, config: Config, progress: Progress) -> Path:
        """The directory of the cold-started model; it is made once and cached."""
        _require_tags(config)
        from arpo.builtin.cold_start import labyrinth_cold_start

        return labyrinth_cold_start(config, progress)


class ScenesPlugin:
    """The scenes of `config.scenes` as a `TaskPlugin`."""

    def tasks(self, config: Config) -> tuple[tuple[Task, ...], tuple[Task, ...]]:
        """The training and the test tasks."""
        return _cached_scenes(config.scenes)

    def documents(self, config: Config) -> tuple[Document, ...]:
        """None: there is nothing to search."""
        return ()

    def model(self, config: Config, progress: Progress) -> Path:
        """The directory of the vision model, which is part of the package (`arpo.builtin.vision`)."""
        _require_tags(config)
        return Path(__file__).with_name("vision_model")


def _require_tags(config: Config) -> None:
    if config.rollout.format not in ("auto", "tags"):
        raise ArpoError(
            'rollout.format: the built-in model ("tiny") was trained with tags; use "tags" or another model.path'
        )


WORLD = WorldPlugin()
LABYRINTH = LabyrinthPlugin()
SCENES = ScenesPlugin()
