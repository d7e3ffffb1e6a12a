"""Runs one piece of code, as a script or as a notebook cell, in a process that is already confined.

A notebook cell prints the value of its last expression. A traceback shows only the frames of the code itself. The
process ends here: `run` does not return.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import io
import linecache
import os
import sys
import threading
import traceback
import types
from typing import NoReturn

FILENAME = "<python>"
OK, ERROR, MEMORY = 0, 1, 91  # exit codes
MAX_FRAMES = 6


def run(code: bytes, show_last: bool) -> NoReturn:
    """Run the code, print its error to stderr, and exit."""
    status = ERROR
    try:
        status = _run(code, show_last)
        threading._shutdown()  # type: ignore[attr-defined]
    except MemoryError:
        status = MEMORY
    except BaseException as error:
        status = _report(error)
    for stream in (sys.stdout, sys.__stdout__, sys.stderr):
        with contextlib.suppress(BaseException):  # the code may have closed or replaced it
            stream.flush()  # type: ignore[union-attr]
    os._exit(status)


def warm_up() -> None:
    """Fill Python's caches with what every call needs; processes that are forked from this one share them."""
    main, sys.stdout = sys.modules["__main__"], io.StringIO()
    for _ in range(16):
        _run(b"x = 1\nprint(x)\nx", True)
    sys.modules["__main__"], sys.stdout = main, sys.__stdout__
    linecache.clearcache()


def _run(code: bytes, show_last: bool) -> int:
    try:
        text = code.decode().removeprefix("\ufeff")
        linecache.cache[FILENAME] = (len(text), None, text.splitlines(True), FILENAME)
        module = types.ModuleType("__main__")
        module.__dict__["__builtins__"] = builtins
        sys.modules["__main__"] = module
        sys.argv = [""]
        tree = ast.parse(text, FILENAME)
        last = tree.body.pop() if show_last and tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, FILENAME, "exec", dont_inherit=True), module.__dict__)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), FILENAME, "eval", dont_inherit=True), module.__dict__)
            if value is not None:
                print(repr(value))
        return OK
    except MemoryError:
        return MEMORY
    except SystemExit as exiting:
        if exiting.code is None or isinstance(exiting.code, int):
            return (exiting.code or 0) & 0xFF
        print(exiting.code, file=sys.stderr)
        return ERROR
    except BaseException as error:
        return _report(error)


def _report(error: BaseException) -> int:
    """Print the error; that can run the code's own methods, and fail."""
    try:
        sys.stderr.write(short_traceback(error))
    except MemoryError:
        return MEMORY
    except BaseException:
        os.write(2, f"{type(error).__name__}\n".encode(errors="replace"))
    return ERROR


def short_traceback(error: BaseException) -> str:
    """Format an error with the frames of the code itself, a few at most; a syntax error with its position."""
    lines = traceback.format_exception_only(error)
    if isinstance(error, SyntaxError):
        return "".join(line.replace(f'File "{FILENAME}", ', "") for line in lines)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == FILENAME]
    omitted = len(frames) - MAX_FRAMES
    if omitted > 0:
        frames = frames[: MAX_FRAMES // 2] + frames[-MAX_FRAMES // 2 :]
    shown = [f"  line {frame.lineno}, in {frame.name}\n    {frame.line}\n" for frame in frames]
    if omitted > 0:
        shown.insert(MAX_FRAMES // 2, f"  ... {omitted} more ...\n")
    return "".join(["Traceback (most recent call last):\n", *shown, *lines])
