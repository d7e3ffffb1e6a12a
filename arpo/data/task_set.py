"""The tasks of a configuration: training tasks by source, and test tasks, which are read from files or generated.

Plug-ins are names that stand for generated tasks, their documents, and a model made for them.
`data.train = "world"`, `"labyrinth"` or `"scenes"` names a built-in one, and `model.path = "tiny"` its model. They are
loaded like an object of the user's, and only when they are named.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from arpo.config.files import shown_path
from arpo.config.plugins import GIVEN, NO_OBJECTS, Objects, load_object, require_given
from arpo.config.schema import Config, Data
from arpo.data.order import Source
from arpo.data.rows import list_problems, refuse_bad_rows
from arpo.data.tasks import Columns, load_tasks, tasks_from_rows
from arpo.errors import ArpoError
from arpo.types import Document, Task

TASK_PLUGINS = {
    "world": "arpo.builtin.plugin:WORLD",
    "labyrinth": "arpo.builtin.plugin:LABYRINTH",
    "scenes": "arpo.builtin.plugin:SCENES",
}
"""What `data.train`, `data.test` and `data.mix.source` can name besides files."""
MODEL_PLUGINS = {"tiny": "arpo.builtin.plugin:WORLD"}
"""What `model.path` can name besides models that exist; the model is that of the training tasks' plug-in, if any."""
NO_TEST_TASKS = "data.test: there are no held-out questions; name a file of them, like data.test=test.jsonl"

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


def needs_answers(config: Config) -> bool:
    """Whether tasks must have answers to compare with: unless a reward of the user's own, an environment or a program
    judges.

    Whether an environment has a reward is known only when it is loaded; then `require_answers` checks the tasks.
    """
    judged = config.environment.name is not None or config.program.name is not None
    return config.reward.function is None and not judged


def require_answers(tasks: TaskSet) -> None:
    """Raise if a task has no answer, for rewards that compare with it."""
    missing = next((task for task in (*tasks.train, *tasks.test) if not task.answers), None)
    if missing is not None:
        raise ArpoError(
            f"{missing.id}: has no answer to compare with; name its column with data.answer, or a reward of your own "
            "with reward.function"
        )


def require_test_tasks(tasks: TaskSet) -> None:
    """Raise if there are no test tasks."""
    if not tasks.test:
        raise ArpoError(NO_TEST_TASKS)


def require_test_source(settings: Data) -> None:
    """Raise if no setting names test tasks; nothing is loaded for that."""
    if settings.test is None and not _plugin_names(settings):
        raise ArpoError(NO_TEST_TASKS)


def load_task_set(config: Config, objects: Objects = NO_OBJECTS) -> TaskSet:
    """Read or generate the training and test tasks that `config.data` names; `objects` may hold their rows."""
    settings, notes, answers = config.data, list[str](), needs_answers(config)
    prefix = "data.mix." if settings.mix else "data."
    if config.environment.name is not None and not (settings.train or settings.mix or settings.test):
        raise ArpoError("data.train: name the tasks of the environment: a file of questions, like train.jsonl")
    sources = []
    for mix in settings.training:
        plugin = task_plugin(mix.source)
        if plugin is None:
            tasks = _read(mix.source, Columns.named(mix, prefix, answers), settings.bad_rows, notes, objects)
        else:
            tasks = plugin.tasks(config)[0]
        sources.append(Source(shown_path(mix.source), tasks, mix.weight))
    try:
        test = _test_tasks(config, notes, objects)
    except ArpoError as error:
        raise ArpoError(f"{error}\n(this is data.test; training works without it: data.test=none)") from None
    return TaskSet(tuple(sources), test, tuple(notes))


def load_test_set(config: Config, objects: Objects = NO_OBJECTS) -> TaskSet:
    """Read or generate only the test tasks, which is all that an evaluation needs."""
    notes = list[str]()
    tasks = TaskSet((), _test_tasks(config, notes, objects), tuple(notes))
    require_test_tasks(tasks)
    return tasks


def plugin_of(settings: Data) -> TaskPlugin | None:
    """The plug-in among the sources of the tasks, if there is one."""
    names = _plugin_names(settings)
    return task_plugin(names[0]) if names else None


def _plugin_names(settings: Data) -> list[str]:
    return [name for name in (*settings.sources, *(mix.source for mix in settings.training)) if name in TASK_PLUGINS]


def _test_tasks(config: Config, notes: list[str], objects: Objects) -> tuple[Task, ...]:
    source = config.data.test
    plugin = plugin_of(config.data) if source is None else task_plugin(source)
    if plugin is not None:
        return plugin.tasks(config)[1]
    if source is None:
        return ()
    columns = Columns.named(config.data, answers=needs_answers(config))
    return _read(source, columns, config.data.bad_rows, notes, objects)


def _read(source: str, columns: Columns, bad_rows: str, notes: list[str], objects: Objects) -> tuple[Task, ...]:
    require_given("data.train" if columns.settings == "data." else "data.mix.source", source, objects)
    if source in objects:
        source, rows = source.removeprefix(GIVEN).split()[0], objects[source]
        reading = tasks_from_rows(rows, columns, source)
        refuse_bad_rows(source, "questions", reading.tasks, reading.problems, bad_rows)
    else:
        reading = load_tasks(source, columns, bad_rows)
    if reading.problems:
        notes.append(f"{len(reading.problems):,} of {reading.rows:,} rows of {shown_path(source)} are left out:")
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


def model_plugin(path: str, data: Data) -> TaskPlugin | None:
    """The plug-in whose model a path names, that of the training tasks if they have one; None for a model's path."""
    if path not in MODEL_PLUGINS:
        return None
    return plugin_of(data) or load_object("model.path", MODEL_PLUGINS[path])
