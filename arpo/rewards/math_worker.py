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
from collections.abc import Iterable
from typing import Any, NoReturn

WARM_UP = ((r"\frac{1}{2}", "0.5"), (r"\{1, 2\}", "2, 1"), ("[0, 1)", "x^2 + 1"), (r"2\sqrt{3}", r"\sqrt{12}"))
SYMPY_CODE = re.compile(  # what SymPy itself compiles: numbers, and products of powers of variables
    r"from sympy import \*|(?:Integer|Float) \('?[0-9][0-9.eE+-]*'? ?\)"
    r"|def monomial_[a-z]+\([ABk, ]+\):\n(?:[\s(),=+*<>:-]|\b(?:[abrABk][0-9]*|[0-9]|return|if|else|None)\b)*"
)
NAMED_OPERATION = re.compile(
    r"\\(?:operatorname\*?\{|i{0,2}|[bdopt])(sum|prod|int|lim|binom|choose|gcd|lcm|mod|max|min|sup|inf|det|div)(?![a-zA-Z])"
    r"|(?<=[\d)}])\s*(!)"
)
MIXED_NUMBER = re.compile(r"(?<![\d.])(\d+)\s+(\d+)\s*/\s*(\d+)(?![\d.])")
REPEATING = re.compile(r"(?<![\d,.])(\d*)\.(\d*)\\(?:overline|bar)\s*\{(\d+)\}(?!\d)")
# Two numbers side by side, which the library adds.
SIDE_BY_SIDE = re.compile(r"(?<![_\d])\d+(?:\s+\d|\s*(?:\\right)?\)?\s*(?:\\left)?\(\s*-?[\d.]+\s*(?:\\right)?\))")
FRACTION = re.compile(r"\\[a-z]*frac\s*\{?\s*-?\d|\d[\s)}]*(?:[/:]|\\over|\\div)[\s({-]*\d")
FORBIDDEN = ("subprocess.", "socket.connect", "os.system", "os.exec", "os.posix_spawn", "os.fork", "ctypes.")


def equal(prediction: str, golds: list[str]) -> bool:
    """Whether the answer equals one of the gold answers, and leaves no operation to be done."""
    from math_verify import verify

    prediction, *golds = map(_plain, (prediction, *golds))
    answer = _parse(prediction)
    pairs = ((gold, _parse(gold)) for gold in golds)
    return bool(answer) and any(
        not _restates(prediction, gold, right) and verify(right, answer, timeout_seconds=None) for gold, right in pairs
    )


def _restates(prediction: str, gold: str, right: list[Any]) -> bool:
    """Whether the answer has an operation that the gold answer does not have, such as 17*23 for 391."""
    sides = re.split(r"(?:=|\\approx)(?![^{]*\})", prediction)
    result = sides[-1] if sides[-1].strip() else prediction  # 17*23 = 391 leaves nothing to be done
    found, values = _values(_parse(result)), _values(right)
    if _named_operations(result) - _named_operations(gold) or _has_derivative(found) > _has_derivative(values):
        return True
    if not values or any(value.free_symbols for value in values):
        return False  # of words, and of an expression with variables, every form counts
    allowed = _operations(values)
    if allowed - {"sum", "product", "power"}:
        allowed.add("root")  # what the function of a reference comes to
    if _operations(found) - allowed:
        return True
    if SIDE_BY_SIDE.search(result) and not SIDE_BY_SIDE.search(gold):
        return True
    return bool(FRACTION.search(result)) and not FRACTION.search(gold) and all(map(_is_whole, values))


def _named_operations(text: str) -> set[str]:
    return {(match[1] or match[2]).replace("choose", "binom") for match in NAMED_OPERATION.finditer(text)}


def _has_derivative(values: list[Any]) -> bool:
    from sympy import Derivative, preorder_traversal  # type: ignore[import-untyped]

    return any(isinstance(node, Derivative) for value in values for node in preorder_traversal(value))


def _values(parsed: list[Any]) -> list[Any]:
    """The expressions of a parsed answer; of x = 5 the right side."""
    expressions = [expression for expression in parsed if not isinstance(expression, str)]
    return [each.rhs if getattr(each, "rel_op", "") == "==" and each.lhs.is_Symbol else each for each in expressions]


def _operations(values: list[Any]) -> set[str]:
    """Operations on numbers alone, except those of a way to write one number: -2, 3/4, 5%, 6*10^7, e^8."""
    from sympy import Add, Function, Mul, Pow, exp, preorder_traversal

    found: set[str] = set()
    for node in (node for value in values for node in preorder_traversal(value)):
        if isinstance(node, Add) and _any_twice(map(_irrational_factors, node.args)):
            found.add("sum")
        elif isinstance(node, Mul):
            numbers = [arg for arg in node.args if arg.is_Number and abs(arg) != 1]
            constants = filter(None, map(_constant_base, node.args))
            if len(numbers) > 1 or sum(map(_is_power_of_ten, node.args)) > 1 or _any_twice(constants):
                found.add("product")
        elif isinstance(node, Pow) and node.base.is_Number and node.exp.is_Number:
            if not node.exp.is_Integer:
                found.add("root")
            elif node.exp != -1 and not _is_power_of_ten(node):
                found.add("power")
        elif isinstance(node, Function) and not isinstance(node, exp) and not node.free_symbols:
            found.add(type(node).__name__)
    return found


def _any_twice(values: Iterable[Any]) -> bool:
    found = list(values)
    return len(set(found)) < len(found)


def _irrational_factors(term: Any) -> tuple[str, ...]:
    """What distinguishes terms that do not add up to one: none of 2/3, pi of 2*pi/3."""
    if _is_literal(term):
        return ()
    return tuple(sorted(f for arg in term.args for f in _irrational_factors(arg))) if term.is_Mul else (str(term),)


def _constant_base(factor: Any) -> Any:
    """The pi or e of which this factor is a power, or None."""
    from sympy import E, exp

    while factor.is_Pow:
        factor = factor.base
    return E if isinstance(factor, exp) else factor if factor.is_NumberSymbol else None


def _is_power_of_ten(node: Any) -> bool:
    return bool(node.is_Pow and node.base == 10 and node.exp.is_Integer)


def _is_literal(node: Any) -> bool:
    """Whether this is one number: also a fraction, a percentage, or scientific notation."""
    if node.is_Mul:
        return all(map(_is_literal, node.args))
    percent = type(node).__name__ == "UnevaluatedExpr"
    return bool(node.is_Number or percent or (node.is_Pow and node.base.is_Number and node.exp.is_Integer))


def _is_whole(value: Any) -> bool:
    """Whether this is a whole number, or a tuple, set, interval or matrix of some."""
    from sympy import preorder_traversal

    nodes = list(preorder_traversal(value))
    divides = any(node.is_Function or (node.is_Pow and node.exp.is_negative) for node in nodes)
    return not divides and all(node.is_Integer for node in nodes if not node.args and node.is_number)


def _plain(answer: str) -> str:
    answer = answer.replace("{:}", ":").replace(r"\varnothing", r"\emptyset")
    answer = REPEATING.sub(_as_fraction, answer)
    for sign in ("$", "\\(", "\\)", "\\[", "\\]"):  # math delimiters; here the box delimits
        answer = answer.replace(sign, " ")
    return MIXED_NUMBER.sub(r"\1\\frac{\2}{\3}", answer)


def _as_fraction(match: re.Match[str]) -> str:
    """A repeating decimal: 0.1(6) is 15/90."""
    whole, fixed, period = match.groups()
    value = int(whole + fixed + period) - int(whole + fixed or "0")
    return f"\\frac{{{value}}}{{{'9' * len(period) + '0' * len(fixed)}}}"


def _parse(answer: str) -> Any:
    from math_verify import LatexExtractionConfig, parse

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
