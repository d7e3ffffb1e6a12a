"""Compares maths answers with math-verify in a process of its own.

    python math_worker.py SECONDS MEMORY_MB      # a line of JSON in, a line of JSON out, again and again

It imports math-verify once and writes "ready". Every job runs in a fork with a time and a memory limit; the time limit
holds even if the parent is gone. No answer changes how the next one is judged.

Guarantees: no input is evaluated as Python, except plain numbers, which SymPy reads that way: answers are parsed as
LaTeX by a grammar, and a fork that tries to compile other source text than numbers and SymPy's own, to start a program,
to connect or to write to a file is stopped.
Not covered: bugs of the interpreter. This file imports nothing of the package.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import re
import resource
import signal
import sys
from typing import Any, NoReturn

WARM_UP = ((r"\frac{1}{2}", "0.5"), (r"\{1, 2\}", "2, 1"), ("[0, 1)", "x^2 + 1"), (r"2\sqrt{3}", r"\sqrt{12}"))
SYMPY_CODE = re.compile(  # what SymPy itself compiles: numbers, and products of powers of variables
    r"from sympy import \*|(?:Integer|Float) \('?[0-9][0-9.eE+-]*'? ?\)"
    r"|def monomial_[a-z]+\([ABk, ]+\):\n(?:[\s(),=+*<>:-]|\b(?:[abrABk][0-9]*|[0-9]|return|if|else|None)\b)*"
)
FORBIDDEN = ("subprocess.", "socket.connect", "os.system", "os.exec", "os.posix_spawn", "os.fork", "ctypes.")


def equal(prediction: str, golds: list[str]) -> bool:
    """Whether the answer equals one of the gold answers."""
    from math_verify import verify

    answer = _parse(prediction)
    return bool(answer) and any(verify(_parse(gold), answer, timeout_seconds=None) for gold in golds)


def _parse(answer: str) -> Any:
    from math_verify import LatexExtractionConfig, parse

    for sign in ("$", "\\(", "\\)", "\\[", "\\]"):  # math delimiters; here the box delimits
        answer = answer.replace(sign, " ")
    # Only LaTeX: the library reads plain expressions with Python's own `eval`.
    return parse(f"\\boxed{{{answer}}}", [LatexExtractionConfig(boxed_match_priority=0)], parsing_timeout=None)


def _forbid(event: str, args: tuple[Any, ...]) -> None:
    """Raise on forbidden events: an audit hook, which cannot be removed."""
    text = event == "compile" and args[0] is not None and args[1] == "<string>" and not _is_sympy_code(args[0])
    writing = event == "open" and args[2] is not None and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    if text or writing or event.startswith(FORBIDDEN):
        raise RuntimeError(f"{event} is not allowed")


def _is_sympy_code(source: Any) -> bool:
    text = source.decode("utf-8", "replace") if isinstance(source, bytes) else str(source)
    return SYMPY_CODE.fullmatch(text.strip()) is not None


def confine(seconds: float, memory_mb: int) -> None:
    """Limit time, memory and actions of this process from now on."""
    sys.addaudithook(_forbid)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    limits = {resource.RLIMIT_AS: memory_mb * 2**20, resource.RLIMIT_FSIZE: 0, resource.RLIMIT_CORE: 0}
    for limit, value in limits.items():
        with contextlib.suppress(OSError, ValueError):  # not every system has all of them
            resource.setrlimit(limit, (value, value))


def _judge(job: dict[str, Any], out: int, seconds: float, memory_mb: int) -> NoReturn:
    """Judge one answer in the fork, write the verdict and exit."""
    code = 1
    try:
        confine(seconds, memory_mb)
        try:
            verdict = {"equal": equal(job["prediction"], job["golds"]), "reason": ""}
        except MemoryError:
            verdict = {"equal": False, "reason": "memory"}
        except Exception:
            verdict = {"equal": False, "reason": "error"}
        os.write(out, json.dumps(verdict).encode())
        code = 0
    finally:
        os._exit(code)


def answer(job: dict[str, Any], seconds: float, memory_mb: int) -> bytes:
    """The verdict on a job as JSON, whatever happens to its fork."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        _judge(job, theirs, seconds, memory_mb)
    os.close(theirs)
    with os.fdopen(ours, "rb") as pipe:
        written = pipe.read()
    _, status = os.waitpid(pid, 0)
    if os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0 and written:
        return written
    timeout = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM
    return json.dumps({"equal": False, "reason": "timeout" if timeout else "died"}).encode()


def main() -> None:
    """Answer jobs from standard input until it ends."""
    seconds, memory_mb = float(sys.argv[1]), int(sys.argv[2])
    logging.disable()
    out = os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a library prints is no verdict
    importlib.import_module("sympy.physics.units")  # otherwise imported during a job
    for prediction, gold in WARM_UP:
        equal(prediction, [gold])
    out.write(b'"ready"\n')
    for line in sys.stdin.buffer:
        out.write(answer(json.loads(line), seconds, memory_mb) + b"\n")


if __name__ == "__main__":
    main()
