"""Task plug-ins: names that stand for generated tasks, their documents and a model made for them.

`data.train = "world"` and `model.path = "tiny"` name the built-in plug-in. It is loaded by its name, like an object of
the user's, and only when a configuration names it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from arpo.config.plugins import load_object
from arpo.config.schema import Config
from arpo.types import Document, Task

TASK_PLUGINS = {"world": "arpo.builtin.plugin:WORLD"}
"""What `data.train`, `data.test` and `data.mix.source` can name besides files."""
MODEL_PLUGINS = {"tiny": "arpo.builtin.plugin:WORLD"}
"""What `model.path` can name besides models that exist."""

Progress = Callable[[int, int, float], None]
"""Called with (step, steps, loss) while a model is made; step 0 announces it."""


class TaskPlugin(Protocol):
    """A source of tasks that are generated, not read."""

    def tasks(self, config: Config) -> tuple[tuple[Task, ...], tuple[Task, ...]]:
        """The training tasks and the test tasks."""
        ...

    def documents(self, config: Config) -> Sequence[Document]:
        """The documents that the search tool looks in."""
        ...

    def model(self, config: Config, progress: Progress) -> Path:
        """The directory of the model that goes with the tasks; it is made if it does not exist."""
        ...


def task_plugin(source: str) -> TaskPlugin | None:
    """The plug-in that a source of tasks names, or None if the source is a file or a data set."""
    return load_object("data.train", TASK_PLUGINS[source]) if source in TASK_PLUGINS else None


def model_plugin(path: str) -> TaskPlugin | None:
    """The plug-in that a model's path names, or None if it is the path of a model."""
    return load_object("model.path", MODEL_PLUGINS[path]) if path in MODEL_PLUGINS else None
