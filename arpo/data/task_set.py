"""The tasks of a configuration: training tasks by source, and test tasks."""

from __future__ import annotations

from dataclasses import dataclass

from arpo.config.schema import Config, Data
from arpo.data.order import Source
from arpo.data.plugin import TASK_PLUGINS, TaskPlugin, task_plugin
from arpo.data.rows import list_problems
from arpo.data.tasks import Columns, load_tasks
from arpo.errors import ArpoError
from arpo.types import Task


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
