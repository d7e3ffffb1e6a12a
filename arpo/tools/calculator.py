"""Arithmetic on numbers. The expression comes from a model and may be hostile: it is never run, only walked.

Promises: ToolError is the only exception, and every call ends within about a millisecond: length, nesting and the size
of every intermediate value are limited. Integers are exact; other numbers are shown to 10 significant digits.
Does not cover: functions (sqrt, sin), variables, units, complex numbers.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable
from typing import Any

from arpo.tools.base import ToolError, tool

MAX_CHARS = 200
MAX_DEPTH = 50
MAX_BITS = 4000  # about 1,200 digits: a result of this size is still printed in microseconds

_SPELLINGS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-"})  # noqa: RUF001 (what models write)
_FOREIGN = re.compile(r"[^0-9eE_.,+\-*/%() \t]")
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")
_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


@tool(quick=True)
def calculator(expression: str) -> str:
    """Evaluate arithmetic: numbers with + - * / // % ** and parentheses, for example (1,250 - 48) * 3 / 7."""
    try:
        return _show(_evaluate(_parse(expression), 0))
    except ZeroDivisionError:
        raise ToolError("division by zero") from None
    except OverflowError:
        raise ToolError("the number becomes too large") from None


def _parse(expression: str) -> ast.expr:
    text = expression.strip().translate(_SPELLINGS)
    if not text:
        raise ToolError("the expression is empty")
    if len(text) > MAX_CHARS:
        raise ToolError(f"the expression is longer than {MAX_CHARS} characters; split it into steps")
    foreign = _FOREIGN.search(text)
    if foreign is not None:
        hint = "; for powers write **" if foreign.group() == "^" else ""
        raise ToolError(f"cannot use {foreign.group()!r}; only numbers, + - * / // % ** and parentheses{hint}")
    if text.count("(") > MAX_DEPTH:
        raise ToolError(f"more than {MAX_DEPTH} parentheses; split it into steps")
    try:
        return ast.parse(_THOUSANDS.sub(lambda match: match.group().replace(",", ""), text), mode="eval").body
    except SyntaxError as error:
        raise ToolError(f"not a complete expression: {error.msg}") from None
    except (ValueError, RecursionError, MemoryError):
        raise ToolError("the expression cannot be read; split it into steps") from None


def _evaluate(node: ast.expr, depth: int) -> int | float:
    if depth > MAX_DEPTH:
        raise ToolError(f"nested more than {MAX_DEPTH} deep; split it into steps")
    match node:
        case ast.Constant(value=int() | float() as value):
            return _checked(value)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_evaluate(operand, depth + 1)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _evaluate(operand, depth + 1)
        case ast.BinOp(left=left, op=op, right=right):
            return _checked(_binary(op, _evaluate(left, depth + 1), _evaluate(right, depth + 1)))
        case ast.Call():
            raise ToolError("write every multiplication with *")
        case ast.Tuple():
            raise ToolError("a comma may only separate thousands, as in 1,250")
    raise ToolError("only numbers, + - * / // % ** and parentheses can be used")


def _binary(op: ast.operator, left: int | float, right: int | float) -> int | float:
    if isinstance(op, ast.Pow):
        return _power(left, right)
    if isinstance(op, ast.Div):
        exact = isinstance(left, int) and isinstance(right, int) and left % right == 0
        return left // right if exact else left / right
    result: int | float = _BINARY[type(op)](left, right)
    return result


def _power(base: int | float, exponent: int | float) -> int | float:
    if isinstance(base, int) and isinstance(exponent, int) and (base.bit_length() - 1) * exponent > MAX_BITS:
        raise OverflowError  # the result would have more bits than that; it is never computed
    result = base**exponent
    if isinstance(result, complex):
        raise ToolError("a negative number has no real fractional power")
    return result


def _checked(value: int | float) -> int | float:
    if value.bit_length() > MAX_BITS if isinstance(value, int) else not math.isfinite(value):
        raise OverflowError
    return value


def _show(value: int | float) -> str:
    if isinstance(value, int):
        return str(value)
    rounded = float(_checked(float(f"{value:.10g}")))
    return str(int(rounded)) if rounded.is_integer() and abs(rounded) < 1e16 else repr(rounded)
