"""From the arguments of a call to settings. What is a Python object gets a name, which is what the settings hold.

    config, objects = resolve(model="tiny", tools=[price], reward=my_reward, train={"lr": 1e-5})
    config.tools.enabled         # ("object:price",)
    objects["object:price"]      # the Tool

Guarantees: nothing is loaded. What no setting can mean is an `ArpoError` that says what is expected.
"""

from __future__ import annotations

import difflib
import inspect
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from arpo.config.files import expand_user
from arpo.config.loading import load_config, settings_table
from arpo.config.plugins import GIVEN, Objects
from arpo.config.schema import Config, Mcp, Rewards
from arpo.data.tasks import Row
from arpo.errors import ArpoError
from arpo.rewards.custom import function_name
from arpo.tools.base import Tool, tool
from arpo.types import Reward, Task

if TYPE_CHECKING:
    import PIL.Image
    from transformers import PreTrainedModel

Section: TypeAlias = Mapping[str, Any]
"""Settings of one section by name; objects may stand where the settings have names."""
ModelArgument: TypeAlias = "str | os.PathLike[str] | PreTrainedModel | Section"
TasksArgument: TypeAlias = "str | os.PathLike[str] | Iterable[Row | Task]"
ToolArgument: TypeAlias = "Tool | Callable[..., Any] | str | Mcp"
ToolsArgument: TypeAlias = "Iterable[ToolArgument] | ToolArgument | Section"
ImagesArgument: TypeAlias = "str | os.PathLike[str] | bytes | PIL.Image.Image | Iterable[Any]"
RewardFunction: TypeAlias = "Callable[..., float | Reward]"
RewardArgument: TypeAlias = "str | RewardFunction | Sequence[str | RewardFunction] | Mapping[Any, float] | Section"
EnvironmentArgument: TypeAlias = "str | Callable[[], Any] | Section"
TRL_NAMES = {
    "train_dataset": "tasks",
    "dataset": "tasks",
    "eval_dataset": "test",
    "reward_funcs": "reward",
    "processing_class": "tokenizer",
    "args": "settings by section, like train={...}",
    "max_steps": "trainer.train(steps=...)",
    "learning_rate": 'train={"lr": ...}',
    "num_generations": 'rollout={"num_trajectories": ...}',
    "max_completion_length": 'rollout={"max_tokens": ...}',
    "beta": 'loss={"kl_coef": ...}',
}
"""What arguments of TRL's trainers are called here."""
ProgramArgument: TypeAlias = "str | Callable[..., Any] | Sequence[str] | Section"
NAMED = (
    *("model", "tokenizer", "tasks", "test", "tools", "reward", "environment", "program", "preset", "config", "seed"),
)


def resolve(
    *,
    model: ModelArgument | None = None,
    tokenizer: Any = None,
    tasks: TasksArgument | None = None,
    test: TasksArgument | None = None,
    tools: ToolsArgument | None = None,
    reward: RewardArgument | None = None,
    environment: EnvironmentArgument | None = None,
    program: ProgramArgument | None = None,
    preset: str | None = None,
    config: str | os.PathLike[str] | Config | None = None,
    seed: int | None = None,
    settings: Mapping[str, Any],
    known: Iterable[str] = (),
) -> tuple[Config, Objects]:
    """The configuration that these arguments describe, and the objects that it names.

    `settings` are sections, like `{"train": {"lr": 1e-5}}`; `known` are names of other arguments, for messages.
    """
    _check_names(settings, known)
    given = _Names()
    sections: dict[str, Any] = {name: _plain(value) for name, value in settings.items()}
    if model is not None:
        sections["model"] = _model(model, tokenizer, given)
    elif tokenizer is not None:
        raise ArpoError("tokenizer: this goes with a loaded model; a model that is named has its own")
    for name, rows in (("train", tasks), ("test", test)):
        if rows is not None:
            label = "tasks" if name == "train" else "test"
            sections["data"] = {**sections.get("data", {}), name: _tasks(label, rows, given)}
    if tools is not None:
        sections["tools"] = _tools(tools, given)
    if reward is not None:
        sections["reward"] = _reward(reward, given)
    if environment is not None:
        sections["environment"] = _environment(environment, given)
    if program is not None:
        sections["program"] = _program(program, given)
    sections |= {name: value for name, value in (("preset", preset), ("seed", seed)) if value is not None}
    if isinstance(config, Mapping):
        raise ArpoError("config: got settings by section; give them as arguments: arpo.Trainer(..., **settings)")
    base = config if config is None or isinstance(config, Config) else expand_user(path_text("config", config))
    return load_config(base, arguments=sections), given.objects


def path_text(name: str, value: Any) -> str:
    """The text of an argument that is a path."""
    if not isinstance(value, str | os.PathLike):
        raise ArpoError(f"{name}: got {value!r:.100}, expected a path")
    return str(os.fspath(value))


def require_model(model: ModelArgument | None, config: object) -> None:
    """Raise if no argument names a model; the default of the settings is a model of the built-in world."""
    if model is None and config is None:
        raise ArpoError('model: give a model: a name, a directory or a loaded one; "tiny" is the built-in one')


def rows_of(label: str, rows: Any) -> list[Any]:
    """The rows of an argument that is no file."""
    if isinstance(rows, Mapping):
        splits = [repr(name) for name, value in rows.items() if _has_rows(value)]
        hint = f"give one of its values: {', '.join(splits)}" if splits else "if this is one row, put it into a list"
        raise ArpoError(f"{label}: got a {type(rows).__name__}, expected a list of rows; {hint}")
    if hasattr(rows, "to_dict") and hasattr(rows, "columns"):
        raise ArpoError(f'{label}: got a {type(rows).__name__}; give its rows: {label}=frame.to_dict("records")')
    try:
        return list(_undecoded(rows))
    except TypeError:
        raise ArpoError(
            f"{label}: got {rows!r:.100}, expected a list of rows, a data set, a list of arpo.Task or a file"
        ) from None


def _undecoded(rows: Any) -> Any:
    """A data set of the `datasets` package that gives its images as they are stored, not as pictures in memory."""
    for name, feature in (getattr(rows, "features", None) or {}).items() if hasattr(rows, "cast_column") else ():
        inner: Any = getattr(feature, "feature", None)
        if type(feature).__name__ == "Image":
            rows = rows.cast_column(name, type(feature)(decode=False))
        elif type(inner).__name__ == "Image":
            rows = rows.cast_column(name, type(feature)(type(inner)(decode=False)))
    return rows


def _has_rows(value: Any) -> bool:
    """Whether a value of a dict may be a split of a data set: a list of rows, not a column of one."""
    if isinstance(value, list | tuple):
        return all(isinstance(row, Mapping | Task) for row in value)
    return hasattr(value, "column_names")


class _Names:
    """Gives objects names that no other object of the same call has."""

    def __init__(self) -> None:
        self.objects: dict[str, Any] = {}

    def add(self, name: str, value: Any) -> str:
        """The name of an object in the settings; the same object has one name."""
        for number in range(1, len(self.objects) + 2):
            full = f"{GIVEN}{name}" if number == 1 else f"{GIVEN}{name}_{number}"
            if self.objects.setdefault(full, value) is value:
                return full
        raise AssertionError("one of the names is free")


def _check_names(settings: Mapping[str, Any], known: Iterable[str]) -> None:
    for name, value in settings.items():
        if name not in Config.model_fields or name in NAMED:
            raise ArpoError(f"{name}: there is no such argument; {_hint(name, known)}")
        if not isinstance(value, Mapping):
            raise ArpoError(f'{name}: got {value!r:.100}, expected settings by name, like train={{"lr": 1e-5}}')


def _hint(name: str, known: Iterable[str]) -> str:
    """What an unknown argument may have meant: a setting of that name, an argument of another name."""
    found = [key.split(".") for key, *_ in settings_table() if key.endswith(f".{name}") and key.count(".") == 1]
    near = difflib.get_close_matches(name, [*NAMED, *known, *Config.model_fields], 1)
    meant = (
        [TRL_NAMES[name]] if name in TRL_NAMES else [f'{section}={{"{key}": ...}}' for section, key in found] or near
    )
    sections = ", ".join(field for field in Config.model_fields if field not in NAMED)
    return f"did you mean {' or '.join(meant)}?" if meant else f"settings are given by section, as dicts: {sections}"


def _plain(value: Any) -> Any:
    """A value as settings have it: paths become texts."""
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return os.fspath(value) if isinstance(value, Path) else value


def _model(model: Any, tokenizer: Any, given: _Names) -> Section:
    section = dict(model) if isinstance(model, Mapping) else {"path": model}
    path = section.get("path")
    if isinstance(path, str | os.PathLike) or path is None:
        if tokenizer is not None:
            raise ArpoError("tokenizer: this goes with a loaded model; a model that is named has its own")
        return {name: _plain(value) for name, value in section.items()}
    dtype = str(getattr(path, "dtype", "")).removeprefix("torch.")
    if dtype not in ("float32", "bfloat16"):
        raise ArpoError(
            f"model: got a {type(path).__name__}{f' in {dtype}' if dtype else ''}, expected a name, a directory or a "
            "causal LM of transformers in float32 or bfloat16"
        )
    if not hasattr(tokenizer, "get_vocab"):
        got = "" if tokenizer is None else f", got {tokenizer!r:.100}"
        raise ArpoError(f"tokenizer: a loaded model needs its tokenizer, like AutoTokenizer.from_pretrained(...){got}")
    if section.get("dtype", dtype) != dtype:
        raise ArpoError(
            f"model.dtype: the loaded model is in {dtype}; convert it with model.to(...), or leave this out"
        )
    return {**section, "path": given.add(type(path).__name__, (path, tokenizer)), "dtype": dtype}


def _tasks(label: str, rows: Any, given: _Names) -> str:
    if isinstance(rows, str | os.PathLike):
        return os.fspath(rows)
    kept = rows_of(label, rows)
    return given.add(f"{label} ({len(kept)} rows)", kept)


def _tools(tools: Any, given: _Names) -> Section:
    section = dict(tools) if isinstance(tools, Mapping) else {"enabled": tools}
    enabled = section.get("enabled")
    if enabled is None:
        return {name: _plain(value) for name, value in section.items()}
    single = isinstance(enabled, str | Mapping | Tool | Mcp) or not isinstance(enabled, Iterable)
    each = [enabled] if single else list(enabled)
    servers = [one for one in each if isinstance(one, Mcp)]
    names = [_tool(one, given) for one in each if not isinstance(one, Mcp)]
    if servers:
        known = [one.model_dump(context={"reveal": True}) for one in servers]
        section["mcp"] = [*section.get("mcp", ()), *known]
    return {**{name: _plain(value) for name, value in section.items()}, "enabled": names}


def _tool(one: Any, given: _Names) -> str:
    if isinstance(one, str):
        return one
    if not isinstance(one, Tool):
        if not callable(one):
            raise ArpoError(f"tools: got {one!r:.100}, expected functions, names of tools, or arpo.Mcp servers")
        if isinstance(one, type):
            raise ArpoError(f"tools: {one.__name__} is a class; give its bound methods, or the class as environment=")
        if not hasattr(one, "__name__"):
            raise ArpoError(f"tools: {one!r:.100} has no name; give a function with a name, type hints and a docstring")
        try:
            one = tool(one)
        except TypeError as error:
            raise ArpoError(f"tools: {error}") from None
    if one.method:
        name = one.spec.name
        raise ArpoError(f"tools: {name} is a method without its object; give the method of an instance: [shop.{name}]")
    return given.add(re.sub(r"\W", "_", one.spec.name), one)


def _reward(reward: Any, given: _Names) -> Section:
    if isinstance(reward, Mapping) and all(name in Rewards.model_fields for name in reward):
        section = dict(reward)
        for name in ("accuracy", "function", "format"):
            if name in section and not isinstance(section[name], str | None):
                section[name] = (
                    _functions(section[name], given) if name == "function" else _function(section[name], given)
                )
        return {name: _plain(value) for name, value in section.items()}
    if isinstance(reward, str) and ":" not in reward:
        return {"accuracy": reward, "function": None}  # settings know which there are; none of `config` counts
    return {"function": _functions(reward, given)}


def _functions(reward: Any, given: _Names) -> str | dict[str, float]:
    """One function, or several with their weights."""
    if not isinstance(reward, list | tuple | Mapping):
        return _function(reward, given)
    if not reward:
        raise ArpoError("reward: got no function; give at least one")
    weights = reward.items() if isinstance(reward, Mapping) else [(function, 1.0) for function in reward]
    return {_weighted(function, weight, given): float(weight) for function, weight in weights}


def _weighted(function: Any, weight: Any, given: _Names) -> str:
    """The name of one of several functions."""
    if isinstance(function, str) and ":" not in function:
        raise ArpoError(
            f"reward: {function!r} says how answers are compared, and is no function that could be added to others; "
            "compare answers in a function of yours (from arpo.rewards import token_f1, exact_match, numbers_equal)"
        )
    name = _function(function, given)
    if isinstance(weight, bool) or not isinstance(weight, Real):
        raise ArpoError(f"reward: the weight of {name.removeprefix(GIVEN)} is {weight!r:.100}, expected a number")
    return name


def _function(function: Any, given: _Names) -> str:
    if isinstance(function, str):
        return function
    if not callable(function):
        raise ArpoError(
            f"reward: got {function!r:.100}, expected a function of a trajectory, several with weights "
            "({correct: 1.0, short: 0.2}), or the name of an accuracy"
        )
    return given.add(re.sub(r"\W", "_", function_name(function)), function)


def _environment(environment: Any, given: _Names) -> Section:
    section = dict(environment) if isinstance(environment, Mapping) else {"name": environment}
    factory = section.get("name")
    if factory is not None and not isinstance(factory, str):
        if not callable(factory):
            raise ArpoError(
                f"environment: got {factory!r:.100}, expected a class or a function that makes one: every trajectory "
                "has an environment of its own"
            )
        if inspect.isclass(factory) and "settings" not in section:
            _require_no_arguments(factory)
        section["name"] = given.add(getattr(factory, "__name__", "environment").strip("<>"), factory)
    return {name: _plain(value) for name, value in section.items()}


def _program(program: Any, given: _Names) -> Section:
    section = dict(program) if isinstance(program, Mapping) else {"function": program}
    function = section.get("function")
    if isinstance(function, list | tuple):
        section = {**section, "function": None, "command": list(function)}
    elif callable(function):
        section["function"] = given.add(re.sub(r"\W", "_", function_name(function)), function)
    elif not isinstance(function, str | None):
        raise ArpoError(
            f"program: got {function!r:.100}, expected a function of (task, endpoint), a command as a list of words, "
            "or path/to/file.py:name"
        )
    return {name: _plain(value) for name, value in section.items()}


def _require_no_arguments(kind: type) -> None:
    try:
        inspect.signature(kind).bind()
    except TypeError as error:
        raise ArpoError(
            f"environment: {kind.__name__} cannot be made without arguments ({error}); give them as "
            f'environment={{"name": {kind.__name__}, "settings": {{...}}}}, or give a function that makes one'
        ) from None
