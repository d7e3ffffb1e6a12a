"""The tasks of a configuration: training tasks by source, and test tasks, which are read from files or generated.

Plug-ins are names that stand for generated tasks, their documents and a model made for them. `data.train = "world"` and
`model.path = "tiny"` name the built-in one. It is loaded like an object of the user's, and only when it is named.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from arpo.config.plugins import load_object
from arpo.config.schema import Config, Data
from arpo.data.order import Source
from arpo.data.rows import list_problems
from arpo.data.tasks import Columns, load_tasks
from arpo.errors import ArpoError
from arpo.types import Document, Task

TASK_PLUGINS = {"world": "arpo.builtin.plugin:WORLD"}
"""What `data.train`, `data.test` and `data.mix.source` can name besides files."""
MODEL_PLUGINS = {"tiny": "arpo.builtin.plugin:WORLD"}
"""What `model.path` can name besides models that exist."""

Progress = Callable[[int, int, float], None]
"""Called with (step, steps, loss) while a model is made; step 0 announces it."""


@dataclass(frozen=True, slots=True)
class TaskSet:
    """Training tasks by source, test tasks, and notes for the user on what was left out."""

    sources: tuple[Source, ...] = ()
    test: tuple[Task, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def train(self) -> tuple[Task, ...]:
        """The training tasks of all sources."""
        return tuple(task for source in self.sources for task in source.tasks)


def load_task_set(config: Config) -> TaskSet:
    """Read or generate the training and test tasks that `config.data` names."""
    settings, notes = config.data, list[str]()
    prefix = "data.mix." if settings.mix else "data."
    sources = []
    for mix in settings.training:
        plugin = task_plugin(mix.source)
        if plugin is None:
            tasks = _read(mix.source, Columns.named(mix, prefix), settings.bad_rows, notes)
        else:
            tasks = plugin.tasks(config)[0]
        sources.append(Source(mix.source, tasks, mix.weight))
    try:
        test = _test_tasks(config, notes)
    except ArpoError as error:
        raise ArpoError(f"{error}\n(this is data.test; training works without it: data.test=none)") from None
    return TaskSet(tuple(sources), test, tuple(notes))


def plugin_of(settings: Data) -> TaskPlugin | None:
    """The plug-in among the sources of the training tasks, if there is one."""
    names = [mix.source for mix in settings.training if mix.source in TASK_PLUGINS]
    return task_plugin(names[0]) if names else None


def _test_tasks(config: Config, notes: list[str]) -> tuple[Task, ...]:
    source = config.data.test
    plugin = plugin_of(config.data) if source is None else task_plugin(source)
    if plugin is not None:
        return plugin.tasks(config)[1]
    return () if source is None else _read(source, Columns.named(config.data), config.data.bad_rows, notes)


def _read(source: str, columns: Columns, bad_rows: str, notes: list[str]) -> tuple[Task, ...]:
    reading = load_tasks(source, columns, bad_rows)
    if reading.problems:
        notes.append(f"{len(reading.problems):,} of {reading.rows:,} rows of {source} are left out:")
        notes.append(list_problems(reading.problems))
    return reading.tasks


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
