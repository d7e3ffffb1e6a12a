"""Runs code, as a script or as the cells of a notebook, in a process that is already confined.

A notebook cell prints the value of its last expression. A traceback shows only the frames of the code itself. The
process ends here: neither `run` (one piece of code) nor `serve_session` (one cell after the other) returns.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import ctypes
import gc
import io
import linecache
import os
import struct
import sys
import threading
import traceback
import types
from typing import NoReturn

FILENAME = "<python>"
OK, ERROR, MEMORY = 0, 1, 91  # exit codes
FORK, RUN, COLLECT = 1, 2, 3  # orders of the session worker to the process of a session
NO_FORK = 2  # what that says when it could not fork
CODE_SIZE = struct.Struct("!I")
MAX_FRAMES = 6


def run(code: bytes, show_last: bool) -> NoReturn:
    """Run the code, print its error to stderr, and exit."""
    status = ERROR
    try:
        status = _run(code, show_last, _new_main(), FILENAME)
        threading._shutdown()  # type: ignore[attr-defined]
    except MemoryError:
        status = MEMORY
    except BaseException as error:
        status = _report(error, FILENAME)
    _flush()
    os._exit(status)


def serve_session(pause: int, fork_flags: int, home: str) -> NoReturn:
    """Do what the session worker orders: fork, or run a cell from stdin. State stays from one cell to the next.

    `pause` is the system call that waits for an order, `home` the scratch directory, whatever the code does to $HOME. A
    fork is made by `clone` itself and not by `os.fork`, so that nothing that code has registered for forks runs, and
    random numbers go on as if there had been none.
    """
    libc, clone = ctypes.PyDLL(None), 56 if os.uname().machine == "x86_64" else 220
    main, calls, status, zero, directory = _new_main(), 0, OK, ctypes.c_long(0), home
    while True:
        try:
            order = libc.syscall(ctypes.c_long(pause), ctypes.c_long(status))
            if order == FORK:
                pid = libc.syscall(ctypes.c_long(clone), ctypes.c_long(fork_flags), zero, zero, zero, zero)
                status = OK if pid >= 0 else NO_FORK
            elif order == RUN:
                calls += 1
                _change_directory(home, directory)  # scratch is a new one
                status = _run(_read_code(), True, main, f"{FILENAME[:-1]} {calls}>")
                for thread in threading.enumerate():
                    if thread is not threading.current_thread() and not thread.daemon:
                        thread.join()
                directory = _working_directory(home)
            elif order == COLLECT:  # perhaps a file that is open belongs to an object that nobody uses any more
                gc.collect()
            else:
                os._exit(ERROR)
        except MemoryError:
            status = MEMORY
        except BaseException as error:
            status = _report(error, FILENAME)
        _flush()


def _change_directory(*paths: str) -> None:
    for path in paths:
        with contextlib.suppress(OSError):
            os.chdir(path)


def _working_directory(home: str) -> str:
    """Return the working directory, which becomes `home` if it was removed: it would stay in use."""
    try:
        return os.getcwd()
    except OSError:
        os.chdir(home)
        return home


def _read_code() -> bytes:
    size, data = CODE_SIZE.unpack(os.read(0, CODE_SIZE.size))[0], b""
    while len(data) < size:
        data += os.read(0, size - len(data))
    return data


def _flush() -> None:
    for stream in (sys.stdout, sys.__stdout__, sys.stderr):
        with contextlib.suppress(BaseException):  # the code may have closed or replaced it
            stream.flush()  # type: ignore[union-attr]


def warm_up() -> None:
    """Fill Python's caches with what every call needs; processes that are forked from this one share them."""
    main, sys.stdout = sys.modules["__main__"], io.StringIO()
    for _ in range(16):
        _run(b"x = 1\nprint(x)\nx", True, _new_main(), FILENAME)
    sys.modules["__main__"], sys.stdout = main, sys.__stdout__
    linecache.clearcache()


def _new_main() -> types.ModuleType:
    module = types.ModuleType("__main__")
    module.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = module
    sys.argv = [""]
    return module


def _run(code: bytes, show_last: bool, module: types.ModuleType, name: str) -> int:
    try:
        text = code.decode().removeprefix("\ufeff")
        linecache.cache[name] = (len(text), None, text.splitlines(True), name)
        tree = ast.parse(text, name)
        last = tree.body.pop() if show_last and tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, name, "exec", dont_inherit=True), module.__dict__)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), name, "eval", dont_inherit=True), module.__dict__)
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
        return _report(error, name)


def _report(error: BaseException, name: str) -> int:
    """Print the error; that can run the code's own methods, and fail."""
    try:
        sys.stderr.write(short_traceback(error, name))
    except MemoryError:
        return MEMORY
    except BaseException:
        with contextlib.suppress(OSError):
            os.write(2, f"{type(error).__name__}\n".encode(errors="replace"))
    return ERROR


def short_traceback(error: BaseException, name: str) -> str:
    """Format an error with the frames of the code itself, a few at most; a syntax error with its position.

    `name` is the file name of the code; what an earlier call of a session has defined has another one.
    """
    lines = traceback.format_exception_only(error)
    if isinstance(error, SyntaxError):
        return "".join(line.replace(f'File "{name}", ', "") for line in lines)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(FILENAME[:-1])]
    omitted = len(frames) - MAX_FRAMES
    if omitted > 0:
        frames = frames[: MAX_FRAMES // 2] + frames[-MAX_FRAMES // 2 :]
    where = ["" if frame.filename == name else f" of call {frame.filename[len(FILENAME) : -1]}" for frame in frames]
    shown = [
        f"  line {frame.lineno}{of}, in {frame.name}\n    {frame.line}\n"
        for frame, of in zip(frames, where, strict=True)
    ]
    if omitted > 0:
        shown.insert(MAX_FRAMES // 2, f"  ... {omitted} more ...\n")
    return "".join(["Traceback (most recent call last):\n", *shown, *lines])
