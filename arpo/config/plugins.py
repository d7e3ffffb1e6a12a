"""Python objects that a setting names: `package.module:name`, or `path/to/file.py:name`.

Promises: a file is run once per process, however many settings name it; whatever is wrong (no such file, an error in
it, no such name) is an ArpoError that names the setting.
Does not cover: trust. What is named here is the user's own code and runs with all rights.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from arpo.errors import ArpoError


def names_object(text: str) -> bool:
    """Whether a setting's value is written like the name of a Python object."""
    place, colon, name = text.rpartition(":")
    return bool(place and colon) and name.isidentifier()


def load_object(setting: str, text: str) -> Any:
    """The object that `text`, the value of `setting`, stands for."""
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
    path = Path(place).expanduser().resolve()
    known = f"arpo_file_{hashlib.sha256(str(path).encode()).hexdigest()[:16]}"
    if known in sys.modules:
        return sys.modules[known]
    if not path.is_file():
        raise ArpoError(f"{setting}: there is no file {place} (relative paths start in {Path.cwd()})")
    spec = importlib.util.spec_from_file_location(known, path)
    assert spec is not None and spec.loader is not None  # its name ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[known] = module  # before it runs: dataclasses and type hints look for it there
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[known]
        raise ArpoError(f"{setting}: {place} fails{_line(error, path)}: {_words(error)}") from error
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
    except Exception as error:
        raise ArpoError(f"{setting}: {place} cannot be imported: {_words(error)}") from error


def _line(error: Exception, path: Path) -> str:
    """Where in the file it went wrong."""
    if isinstance(error, SyntaxError):
        return f" in line {error.lineno}"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return f" in line {lines[-1]}" if lines else ""


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error.msg if isinstance(error, SyntaxError) else error}"
