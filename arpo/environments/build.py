"""The environment that a configuration names."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

from arpo.config.plugins import NO_OBJECTS, Objects, load_object, names_object
from arpo.config.schema import Config
from arpo.environments.base import Environment
from arpo.environments.states import EnvironmentTools, StatePool
from arpo.errors import ArpoError
from arpo.tools.build import build_tools
from arpo.tools.executor import Toolset

BUILT_IN = {
    "python": "arpo.environments.python_session:PythonSession",
    "sqlite": "arpo.environments.sqlite:SqliteEnvironment",
    "gymnasium": "arpo.environments.gymnasium:GymnasiumEnvironment",
    "openenv": "arpo.environments.openenv:OpenEnvironment",
    "labyrinth": "arpo.environments.labyrinth:Labyrinth",
    "images": "arpo.environments.images:ImageEnvironment",
}
"""What `environment.name` can name besides a class of the user's."""


def build_toolset(config: Config, objects: Objects = NO_OBJECTS) -> Toolset:
    """All tools that the config enables, those of its environment too; close them when done."""
    pool = build_pool(config, objects)
    return build_tools(config, objects, Toolset if pool is None else partial(EnvironmentTools, pool))


def build_pool(config: Config, objects: Objects = NO_OBJECTS) -> StatePool | None:
    """The pool of states of the environment that the config names; None without one."""
    settings, name = config.environment, config.environment.name
    if name is None:
        return None
    if name not in BUILT_IN and not names_object(name):
        known = f"{', '.join(BUILT_IN)}, or your own class as path/to/file.py:name"
        raise ArpoError(f"environment.name: there is no environment {name!r}; there are: {known}")
    factory: Any = load_object("environment.name", BUILT_IN.get(name, name), objects)
    if not callable(factory):
        raise ArpoError(f"environment.name: {name} is {factory!r:.100}, expected a class derived from arpo.Environment")
    if inspect.isclass(factory) and not issubclass(factory, Environment):
        raise ArpoError(
            f"environment.name: derive {factory.__name__} from arpo.Environment, and put @arpo.tool on the methods "
            "that the model may call"
        )
    try:
        inspect.signature(factory).bind(**settings.settings)
    except TypeError as error:
        raise ArpoError(f"environment.settings: {name} cannot be made with these: {error}") from None
    try:
        pool = StatePool(partial(factory, **settings.settings), settings.timeout, settings.max_states)
    except (ArpoError, ImportError):
        raise
    except Exception as error:
        raise ArpoError(f"environment.name: {name} cannot be made: {type(error).__name__}: {error}") from error
    methods = [
        key
        for key, value in vars(pool.kind).items()
        if inspect.isfunction(value) and not key.startswith("_") and not hasattr(Environment, key) and value.__doc__
    ]
    if methods and not pool.tools:
        raise ArpoError(f"environment.name: {name} has no tools; put @arpo.tool on those among {', '.join(methods)}")
    return pool
