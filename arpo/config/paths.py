"""Where relative paths in settings start: in a file of settings in its folder, elsewhere in the current directory.

    absolute_paths({"data": {"train": "train.jsonl"}}, Path("/my"))      # {"data": {"train": "/my/train.jsonl"}}
    absolute_paths({"data": {"train": "hf:openai/gsm8k"}}, Path("/my"))  # the same: this is no file

So a run stores absolute paths and can be used from any directory.

`model.path` and `model.adapter` often name a run, and `run.dir` starts in the current directory: what is not in the
folder is looked for there. A `model.path` that is in neither place is a hub name.

Guarantees: names that are no paths stay as they are: built-in ones, "none", hub names, URLs, installed modules, Python
objects, ~ and ${NAME}. Values of a wrong type stay, too, and are reported when settings are validated.
Not covered: `run.dir`, which starts in the current directory; `environment.settings`; what columns of rows name.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from arpo.config.plugins import GIVEN, names_object
from arpo.config.schema import LABYRINTH, SCENES, WORLD

TASK_NAMES = (WORLD, LABYRINTH, SCENES)
SEARCH_NAMES = ("serper", "tavily", "brave")
MODEL_NAMES = ("tiny",)
"""What the settings of tasks, `tools.search` and `model.path` can name besides files."""
TEXT_SUFFIXES = (".txt", ".md")
"""How `prompt.system` ends if it is a file."""


def absolute_paths(values: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The settings with relative paths made absolute; they start in `folder`."""
    return {name: _section(name, value, folder) for name, value in values.items()}


def _section(name: str, value: Any, folder: Path) -> Any:
    if not isinstance(value, Mapping):
        return _preset(value, folder) if name == "preset" else value
    return {
        key: _RULES[f"{name}.{key}"](inner, folder) if f"{name}.{key}" in _RULES else inner
        for key, inner in value.items()
    }


def _absolute(path: str, folder: Path) -> str:
    return os.path.abspath(folder / path)


def _is_name(text: str) -> bool:
    """Whether a text is no path in any setting, or none that a folder changes."""
    return text in ("", "none") or text.startswith((GIVEN, "hf:", "~", "/")) or "://" in text or "${" in text


def _file(*names: str) -> Callable[[Any, Path], Any]:
    """The rule of a setting that is a file, or one of `names`."""

    def rule(value: Any, folder: Path) -> Any:
        return value if not isinstance(value, str) or value in names or _is_name(value) else _absolute(value, folder)

    return rule


def _preset(value: Any, folder: Path) -> Any:
    return _file()(value, folder) if isinstance(value, str) and value.endswith(".toml") else value


def _model(value: Any, folder: Path) -> Any:
    if not isinstance(value, str) or value in MODEL_NAMES or _is_name(value):
        return value
    inside = _absolute(value, folder)
    if os.path.exists(inside) or value.endswith(".gguf") or value.startswith(("./", "../")):
        return inside
    return _absolute(value, Path()) if os.path.exists(value) else value


def _code(value: Any, folder: Path) -> Any:
    """`path/to/file.py:name`, in a text, a list or the values of a table."""
    if isinstance(value, list | tuple):
        return [_code(each, folder) for each in value]
    if isinstance(value, Mapping):
        return {key: _code(each, folder) for key, each in value.items()}
    if not isinstance(value, str) or not names_object(value) or _is_name(value):
        return value
    place, _, name = value.rpartition(":")
    return f"{_absolute(place, folder)}:{name}" if place.endswith(".py") else value


def _functions(value: Any, folder: Path) -> Any:
    """The same in the keys of a table of weights."""
    return (
        {_code(key, folder): weight for key, weight in value.items()}
        if isinstance(value, Mapping)
        else _code(value, folder)
    )


def _system(value: Any, folder: Path) -> Any:
    is_file = isinstance(value, str) and "\n" not in value and value.endswith(TEXT_SUFFIXES)
    return _file()(value, folder) if is_file else value


def _words(value: Any, folder: Path) -> Any:
    """A command and its arguments: paths are the words that begin with a dot and a slash."""
    if isinstance(value, list | tuple):
        return [_words(each, folder) for each in value]
    return _absolute(value, folder) if isinstance(value, str) and value.startswith(("./", "../")) else value


def _tables(**rules: Callable[[Any, Path], Any]) -> Callable[[Any, Path], Any]:
    """The rule of a list of tables."""

    def table(value: Any, folder: Path) -> Any:
        if not isinstance(value, Mapping):
            return value
        return {key: rules[key](inner, folder) if key in rules else inner for key, inner in value.items()}

    def rule(value: Any, folder: Path) -> Any:
        return [table(each, folder) for each in value] if isinstance(value, list | tuple) else value

    return rule


_tasks = _file(*TASK_NAMES)
_RULES: dict[str, Callable[[Any, Path], Any]] = {
    "model.path": _model,
    "model.adapter": _model,
    "data.train": _tasks,
    "data.test": _tasks,
    "data.mix": _tables(source=_tasks),
    "data.image_dir": _file(),
    "sft.data": _file(),
    "tools.enabled": _code,
    "tools.search": _file(*SEARCH_NAMES),
    "tools.cache": _file(),
    "tools.mcp": _tables(command=_words, args=_words),
    "environment.name": _code,
    "program.function": _code,
    "program.command": _words,
    "prompt.system": _system,
    "answer.parse": _code,
    "rollout.examples": _file(),
    "reward.accuracy": _code,
    "reward.by_kind": _code,
    "reward.function": _functions,
    "reward.format": _code,
}
