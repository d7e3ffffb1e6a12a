"""Python objects named by a setting: `package.module:name`, or `path/to/file.py:name`.

A caller in Python gives objects themselves. The settings then name them, like `object:price`, and `Objects` holds what
these names mean; it is passed along with the settings.

Guarantees: a file is executed once per process, however many settings name it. Any failure (no such file, an error in
it, no such name) is an `ArpoError` that names the setting.
Not covered: isolation. The named code is the user's own and runs with all rights.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

from arpo.config.files import expand_user, no_such_file
from arpo.errors import ArpoError

Objects = Mapping[str, Any]
"""What was given as a Python object, by the name that the settings have for it: `{"object:price": price}`."""
GIVEN = "object:"  # begins the name of an object that was given
NO_OBJECTS: Objects = MappingProxyType({})


def require_given(setting: str, text: str, objects: Objects) -> None:
    """Raise if `text`, the value of `setting`, is the name of a given object that is not among `objects`."""
    if text.startswith(GIVEN) and text not in objects:
        raise ArpoError(
            f"{setting}: {text.removeprefix(GIVEN)} was given as a Python object, which no file of settings holds: "
            "give it again in Python, or name it here, as path/to/file.py:name or as a path"
        )


def names_object(text: str) -> bool:
    """Whether a setting's value has the form of an object's name."""
    place, _, name = text.rpartition(":")
    return bool(place) and name.isidentifier()


def load_object(setting: str, text: str, objects: Objects = NO_OBJECTS) -> Any:
    """Load the object that `text`, the value of `setting`, names; one of `objects`, if its name is there."""
    require_given(setting, text, objects)
    if text in objects:
        return objects[text]
    if not names_object(text):
        raise ArpoError(f"{setting}: got {text!r}, expected path/to/file.py:name or package.module:name")
    place, _, name = text.rpartition(":")
    module = _run_file(setting, place) if place.endswith(".py") else _import(setting, place)
    try:
        return getattr(module, name)
    except AttributeError:
        near = difflib.get_close_matches(name, vars(module), 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ArpoError(f"{setting}: {place} has no {name}{hint}") from None


def _run_file(setting: str, place: str) -> ModuleType:
    path = expand_user(place).resolve()
    module_name = f"arpo_file_{hashlib.sha256(str(path).encode()).hexdigest()[:16]}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    if not path.is_file():
        raise ArpoError(f"{setting}: {no_such_file(place)}")
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None and spec.loader is not None  # its name ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # before it runs: dataclasses look it up there
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[module_name]
        raise ArpoError(f"{setting}: {place} fails{_line(error, path)}: {_describe(error)}") from error
    return module


def _import(setting: str, place: str) -> ModuleType:
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{place}.".startswith(f"{error.name}."):
            raise ArpoError(f"{setting}: {place} cannot be imported: {error}") from error
        raise ArpoError(
            f"{setting}: there is no installed module {place}; install it, or name a file: path/to/file.py:name"
        ) from None
    except (Exception, SystemExit) as error:
        raise ArpoError(f"{setting}: {place} cannot be imported: {_describe(error)}") from error


def _line(error: BaseException, path: Path) -> str:
    """The line of the file that raised the error."""
    if isinstance(error, SyntaxError):
        return f" in line {error.lineno}"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return f" in line {lines[-1]}" if lines else ""


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error.msg if isinstance(error, SyntaxError) else error}"
