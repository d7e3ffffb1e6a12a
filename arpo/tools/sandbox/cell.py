"""Running one piece of code as a script or as a notebook cell, in a process that is already shut in.

A notebook cell shows the value of its last expression. What went wrong is told in few lines: the frames that the code
itself wrote, and the error. The process ends here: `run` does not return.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import linecache
import os
import sys
import threading
import traceback
import types
from typing import NoReturn

NAME = "<python>"
OK, ERROR, MEMORY = 0, 1, 91  # exit codes
MAX_FRAMES = 6


def run(code: bytes, show_last: bool) -> NoReturn:
    """Run the code, say on stderr what went wrong, and end the process."""
    status = ERROR
    try:
        status = _run(code, show_last)
        threading._shutdown()  # type: ignore[attr-defined]
    except MemoryError:
        status = MEMORY
    except BaseException as error:
        status = _told(error)
    for stream in (sys.stdout, sys.__stdout__, sys.stderr):
        with contextlib.suppress(BaseException):  # the code may have closed or replaced it
            stream.flush()  # type: ignore[union-attr]
    os._exit(status)


def _run(code: bytes, show_last: bool) -> int:
    try:
        text = code.decode().removeprefix("\ufeff")
        linecache.cache[NAME] = (len(text), None, text.splitlines(True), NAME)
        module = types.ModuleType("__main__")
        module.__dict__["__builtins__"] = builtins
        sys.modules["__main__"] = module
        sys.argv = [""]
        tree = ast.parse(text, NAME)
        last = tree.body.pop() if show_last and tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, NAME, "exec", dont_inherit=True), module.__dict__)
        if isinstance(last, ast.Expr):
            _show(eval(compile(ast.Expression(last.value), NAME, "eval", dont_inherit=True), module.__dict__))
        return OK
    except MemoryError:
        return MEMORY
    except SystemExit as leaving:
        return _exit_code(leaving.code)
    except BaseException as error:
        return _told(error)


def _show(value: object) -> None:
    if value is not None:
        print(repr(value))


def _exit_code(code: object) -> int:
    if code is None or isinstance(code, int):
        return (code or 0) & 0xFF
    print(code, file=sys.stderr)
    return ERROR


def _told(error: BaseException) -> int:
    """Print the error; even printing it is the code's own doing, and may fail."""
    try:
        sys.stderr.write(short_traceback(error))
    except MemoryError:
        return MEMORY
    except BaseException:
        os.write(2, f"{type(error).__name__}\n".encode(errors="replace"))
    return ERROR


def short_traceback(error: BaseException) -> str:
    """The frames of the code itself, a few at most, and the error; for wrong syntax, the place."""
    lines = traceback.format_exception_only(error)
    if isinstance(error, SyntaxError):
        return "".join(line.replace(f'File "{NAME}", ', "") for line in lines)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == NAME]
    left_out = len(frames) - MAX_FRAMES
    if left_out > 0:
        frames = frames[: MAX_FRAMES // 2] + frames[-MAX_FRAMES // 2 :]
    told = [f"  line {frame.lineno}, in {frame.name}\n    {frame.line}\n" for frame in frames]
    if left_out > 0:
        told.insert(MAX_FRAMES // 2, f"  ... {left_out} more ...\n")
    return "".join(["Traceback (most recent call last):\n", *told, *lines])
