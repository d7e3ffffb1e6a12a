"""Whether maths answers are equal, found out where nothing can go wrong: a program of its own.

    python math_worker.py SECONDS MEMORY_MB      # a line of JSON in, a line of JSON out, again and again

It imports math-verify once and answers "ready". Every job is done by a fork of its own, which has a time and a memory
limit and dies by the former whether or not anybody is left to kill it. So no answer changes how the next one is judged.

Promises: nothing that is read here is ever evaluated as Python, but for plain numbers, since SymPy reads these so:
answers are parsed as LaTeX by a grammar, and a fork that tries to compile any source text but that of a number and
SymPy's own, to start a program, to connect or to write to a file is stopped.
Does not cover: isolation against bugs of the interpreter. The file imports nothing of the package.
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
OWN_CODE = re.compile(  # what SymPy compiles in the course of its work: numbers, and products of powers of variables
    r"from sympy import \*|(?:Integer|Float) \('?[0-9][0-9.eE+-]*'? ?\)"
    r"|def monomial_[a-z]+\([ABk, ]+\):\n(?:[\s(),=+*<>:-]|\b(?:[abrABk][0-9]*|[0-9]|return|if|else|None)\b)*"
)
FORBIDDEN = ("subprocess.", "socket.connect", "os.system", "os.exec", "os.posix_spawn", "os.fork", "ctypes.")


def equal(prediction: str, golds: list[str]) -> bool:
    """Whether the answer equals one of the others."""
    from math_verify import verify

    said = _parsed(prediction)
    return bool(said) and any(verify(_parsed(gold), said, timeout_seconds=None) for gold in golds)


def _parsed(answer: str) -> Any:
    from math_verify import LatexExtractionConfig, parse

    for sign in ("$", "\\(", "\\)", "\\[", "\\]"):  # what surrounds maths; the box does that here
        answer = answer.replace(sign, " ")
    # Only LaTeX: the library reads plain expressions with Python's own `eval`.
    return parse(f"\\boxed{{{answer}}}", [LatexExtractionConfig(boxed_match_priority=0)], parsing_timeout=None)


def _forbid(event: str, args: tuple[Any, ...]) -> None:
    """An audit hook, which cannot be taken away again."""
    text = event == "compile" and args[0] is not None and args[1] == "<string>" and not _own(args[0])
    writing = event == "open" and args[2] is not None and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    if text or writing or event.startswith(FORBIDDEN):
        raise RuntimeError(f"{event} is not for answers")


def _own(source: Any) -> bool:
    text = source.decode("utf-8", "replace") if isinstance(source, bytes) else str(source)
    return OWN_CODE.fullmatch(text.strip()) is not None


def confine(seconds: float, memory_mb: int) -> None:
    """Bound what this process may do from now on."""
    sys.addaudithook(_forbid)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    for what, value in ((resource.RLIMIT_AS, memory_mb * 2**20), (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_CORE, 0)):
        with contextlib.suppress(OSError, ValueError):  # not every system knows all of them
            resource.setrlimit(what, (value, value))


def _do(job: dict[str, Any], out: int, seconds: float, memory_mb: int) -> NoReturn:
    """The fork: judge one answer, tell it, end."""
    code = 1
    try:
        confine(seconds, memory_mb)
        try:
            told = {"equal": equal(job["prediction"], job["golds"]), "reason": ""}
        except MemoryError:
            told = {"equal": False, "reason": "memory"}
        except Exception:
            told = {"equal": False, "reason": "error"}
        os.write(out, json.dumps(told).encode())
        code = 0
    finally:
        os._exit(code)


def answer(job: dict[str, Any], seconds: float, memory_mb: int) -> dict[str, Any]:
    """What came of a job; whatever becomes of its fork, there is an answer."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        _do(job, theirs, seconds, memory_mb)
    os.close(theirs)
    with os.fdopen(ours, "rb") as pipe:
        told = pipe.read()
    _, status = os.waitpid(pid, 0)
    if os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0 and told:
        found: dict[str, Any] = json.loads(told)
        return found
    timeout = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM
    return {"equal": False, "reason": "timeout" if timeout else "died"}


def main() -> None:
    """Serve jobs from standard input until it ends."""
    seconds, memory_mb = float(sys.argv[1]), int(sys.argv[2])
    logging.disable()
    out = os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever a library prints is no answer
    importlib.import_module("sympy.physics.units")  # else imported in the middle of a job
    for prediction, gold in WARM_UP:
        equal(prediction, [gold])
    out.write(b'"ready"\n')
    for line in sys.stdin.buffer:
        out.write(json.dumps(answer(json.loads(line), seconds, memory_mb)).encode() + b"\n")


if __name__ == "__main__":
    main()
