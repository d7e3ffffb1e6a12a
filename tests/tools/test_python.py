"""The Python tool: what the model is shown, and whose fault a failure is."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from arpo.tools.base import ToolError, ToolTimeout
from arpo.tools.executor import Toolset, call_tool
from arpo.tools.python.tool import MAX_CODE, build_python, format_result
from arpo.tools.sandbox import zygote
from arpo.tools.sandbox.sandbox import Sandbox, SandboxResult
from arpo.types import Fault, ToolCall, ToolResult

LIMIT = 400


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox(workers=4) as opened:
        yield opened


@pytest.fixture(params=[True, False], ids=["blocking", "async"])
def toolset(sandbox: Sandbox, request: Any) -> Toolset:
    return Toolset([build_python(sandbox, timeout=60.0, max_tokens=LIMIT // 4, blocking=request.param)])


def ask(toolset: Toolset, code: str) -> ToolResult:
    return asyncio.run(call_tool(toolset, ToolCall("python", {"code": code})))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "shown"),
    [
        ("6 * 7", "42"),
        ("print('a')\nprint('b')", "a\nb"),
        ("x = 3\nx ** 2", "9"),
        ("'text'", "'text'"),
        ("print(1)\nNone", "1"),
        ("def f(n):\n    return n + 1\nf(2)", "3"),
        ("from sympy import symbols, solve\nx = symbols('x')\nsolve(x**2 - 9)", "[-3, 3]"),
        ("import numpy as np\nnp.arange(4).sum()", "np.int64(6)"),
        ("x = 1", "(no output: print what you want to see, or end with an expression)"),
        ("", "(no output: print what you want to see, or end with an expression)"),
        ("import sys; print('careful', file=sys.stderr); 5", "5\ncareful"),
    ],
)
def test_what_is_shown(toolset: Toolset, code: str, shown: str) -> None:
    result = ask(toolset, code)
    assert (result.text, result.fault) == (shown, None)


@pytest.mark.parametrize(
    ("code", "shown"),
    [
        ("1 / 0", "Error: ZeroDivisionError: division by zero\n  line 1, in <module>\n    1 / 0"),
        (
            "print('so far')\ndef f(x):\n    return [][x]\nf(1)",
            "Error: IndexError: list index out of range\n  line 4, in <module>\n    f(1)\n  line 3, in f\n"
            "    return [][x]\nPrinted before that:\nso far",
        ),
        ("import json\njson.loads('{')", "Error: json.decoder.JSONDecodeError: Expecting property name"),
        ("for i in range(3)\n    i", "Error: line 1\n    for i in range(3)\n"),
        ("raise SystemExit(3)", "Error: the code ended with an exit code other than 0"),
        ("raise SystemExit('no')", "Error: no"),
        ("import ctypes; ctypes.string_at(0)", "Error: the code crashed the interpreter"),
        ("a = [0] * 10**10", "Error: the code used more memory than it may."),
    ],
)
def test_a_mistake_in_the_code_comes_first_and_is_the_models(toolset: Toolset, code: str, shown: str) -> None:
    result = ask(toolset, code)
    assert result.text.startswith(shown)
    assert "/" not in result.text.replace("1 / 0", "")  # no path of this machine
    assert (result.fault, result.attempts) == (Fault.MODEL, 1)


@pytest.mark.slow
def test_running_too_long(sandbox: Sandbox) -> None:
    toolset = Toolset([build_python(sandbox, timeout=1.0)])
    result = ask(toolset, "print('begun')\nwhile True: pass")
    assert result.text == ("Error: the code ran longer than 1 seconds and was stopped.\nPrinted before that:\nbegun")
    assert (result.fault, result.attempts) == (Fault.TIMEOUT, 1)


def test_nothing_outlives_a_call_and_the_same_code_says_the_same(toolset: Toolset) -> None:
    assert ask(toolset, "x = 5\nopen('kept', 'w').write('x')").fault is None
    assert "NameError" in ask(toolset, "x").text
    assert "FileNotFoundError" in ask(toolset, "open('kept')").text
    drawn = "import random\nrandom.random(), list({'a', 'b', 'c'})"
    assert ask(toolset, drawn).text == ask(toolset, drawn).text


def test_long_output_keeps_its_ends(toolset: Toolset) -> None:
    text = ask(toolset, "print('first'); print('x' * 5000); print('last')").text
    assert text.startswith("first\nxxx")
    assert text.endswith("xxx\nlast")
    assert "characters left out" in text
    assert len(text) < LIMIT + 60


def test_truncated_output_is_marked(sandbox: Sandbox) -> None:
    cut = SandboxResult("x" * 10, "", "ok", 0.1, True)
    assert format_result(cut, 1.0, LIMIT) == "xxxxxxxxxx [output cut]"


@pytest.mark.parametrize(
    ("status", "error"), [("error", ToolError), ("memory", ToolError), ("killed", ToolError), ("timeout", ToolTimeout)]
)
def test_every_failure_has_a_message(status: str, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"Printed before that:\nabc$"):
        format_result(SandboxResult("abc\n", "Oops\n", status, 0.1, False), 1.0, LIMIT)


def test_code_that_is_too_long_is_refused(toolset: Toolset) -> None:
    result = ask(toolset, "#" * 300_000)
    assert (result.fault, "longer than" in result.text) == (Fault.MODEL, True)


def test_a_closed_sandbox_is_an_infrastructure_failure() -> None:
    with Sandbox(workers=1) as gone:
        tool = build_python(gone)
    result = asyncio.run(call_tool({"python": tool}, ToolCall("python", {"code": "1"})))
    assert (result.fault, result.attempts) == (Fault.INFRA, tool.retries + 1)


@pytest.mark.slow
def test_many_callers_share_the_workers(sandbox: Sandbox) -> None:
    toolset = Toolset([build_python(sandbox)])

    async def all_of_them() -> list[ToolResult]:
        return await asyncio.gather(*(call_tool(toolset, ToolCall("python", {"code": f"{n} + 1"})) for n in range(60)))

    assert [result.text for result in asyncio.run(all_of_them())] == [str(n + 1) for n in range(60)]
    assert toolset.stats()["python"].calls == 60


def test_limits_that_the_sandbox_refuses_are_not_the_models_fault(sandbox: Sandbox) -> None:
    for blocking in (True, False):
        toolset = Toolset([replace(build_python(sandbox, timeout=100_000.0, blocking=blocking), retries=0)])
        result = ask(toolset, "1")
        assert (result.fault, "between 0 and 86400 seconds" in result.text) == (Fault.INFRA, True)


def test_code_that_is_too_long_is_the_models_fault(sandbox: Sandbox) -> None:
    result = ask(Toolset([build_python(sandbox)]), "#" * (MAX_CODE + 1))
    assert (result.text, result.fault) == ("Error: the code is longer than 200000 characters", Fault.MODEL)
    assert 4 * MAX_CODE <= zygote.MAX_CODE  # whatever the characters, the sandbox takes it
