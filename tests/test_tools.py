"""Tools: what the model is told, what becomes of a failure, arithmetic and search."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import arpo.tools.base as base
from arpo.tools.base import Tool, ToolError, ToolUnavailable, call_tool, tool
from arpo.tools.calculator import calculator
from arpo.tools.search import Document, build_search, load_documents
from arpo.types import ArpoError, Fault, ToolCall, ToolResult


def call(tool_: Tool, /, **args: Any) -> ToolResult:
    return asyncio.run(call_tool({tool_.spec.name: tool_}, ToolCall(tool_.spec.name, args)))


@tool
async def forecast(city: str, days: int = 1, hours: list[float] | None = None, metric: bool = True) -> str:
    """The weather
    in a city.

    Not shown to the model.
    """
    return f"{city} {days} {hours} {metric}"


def test_a_signature_becomes_a_schema() -> None:
    assert forecast.spec.name == "forecast"
    assert forecast.spec.description == "The weather in a city."
    assert forecast.spec.main_argument == "city"
    assert forecast.spec.schema == {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer", "default": 1},
            "hours": {"type": ["array", "null"], "items": {"type": "number"}},
            "metric": {"type": "boolean", "default": True},
        },
        "required": ["city"],
        "additionalProperties": False,
    }
    assert (forecast.timeout, forecast.retries, forecast.max_chars) == (10.0, 2, 20_000)


def no_docstring(city: str) -> str:
    return city


def no_hint(city) -> str:  # type: ignore[no-untyped-def]
    """Weather."""
    return str(city)


def bad_hint(city: dict[str, str]) -> str:
    """Weather."""
    return str(city)


def unnamed(*cities: str) -> str:
    """Weather."""
    return str(cities)


@pytest.mark.parametrize("function", [no_docstring, no_hint, bad_hint, unnamed])
def test_a_function_that_cannot_be_described_is_refused(function: Any) -> None:
    with pytest.raises(TypeError, match=f"tool {function.__name__}"):
        tool(function)


def test_a_good_call() -> None:
    result = call(forecast, city="Kelso", days=3, hours=[1, 2.5])
    assert (result.text, result.fault, result.attempts) == ("Kelso 3 [1, 2.5] True", None, 1)
    assert 0 < result.seconds < 1


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({}, "'city' is missing; it takes city (string), days (integer), hours (array or null), metric (boolean)"),
        ({"city": 3}, "argument city must be string, not integer"),
        ({"city": "a", "days": "2"}, "argument days must be integer, not string"),
        ({"city": "a", "days": True}, "argument days must be integer, not boolean"),
        ({"city": "a", "days": 1.0}, "argument days must be integer, not number"),
        ({"city": "a", "hours": [1, "x"]}, "argument hours[1] must be number, not string"),
        ({"city": "a", "hours": {}}, "argument hours must be array or null, not object"),
        ({"city": "a", "days": None}, "argument days must be integer, not null"),
        ({"city": "a", "wind": 1}, "unexpected argument 'wind'; it takes city (string), "),
    ],
)
def test_wrong_arguments_are_explained_and_nothing_is_run(args: dict[str, Any], message: str) -> None:
    result = call(forecast, **args)
    assert message in result.text and result.text.startswith("Error: forecast: ")
    assert (result.fault, result.attempts) == (Fault.MODEL, 0)


def test_malformed_and_unknown_calls_are_the_models_fault() -> None:
    tools = {"forecast": forecast, "calculator": calculator}
    malformed = asyncio.run(call_tool(tools, ToolCall("forecast", {"city": "a"}, error="Error: no opening tag")))
    assert (malformed.text, malformed.fault, malformed.attempts) == ("Error: no opening tag", Fault.MODEL, 0)
    unknown = asyncio.run(call_tool(tools, ToolCall("forcast", {})))
    assert unknown.text == "Error: there is no tool 'forcast'. Did you mean forecast? Available: forecast, calculator."
    assert unknown.fault is Fault.MODEL
    assert "Did you mean" not in asyncio.run(call_tool(tools, ToolCall("zzz", {}))).text


def make(run: Any, **limits: Any) -> Tool:
    async def probe() -> Any:
        """Probe."""
        return await run()

    return tool(**limits)(probe)


def failing(*errors: BaseException | None) -> tuple[Any, list[float]]:
    """A coroutine function that raises these one after another (None: succeeds), and when it was called."""
    times: list[float] = []

    async def run() -> str:
        times.append(time.perf_counter())
        error = errors[min(len(times), len(errors)) - 1]
        if error is not None:
            raise error
        return "fine"

    return run, times


def test_only_infrastructure_is_retried_with_growing_pauses() -> None:
    run, times = failing(ToolUnavailable("down"), ConnectionResetError(), None)
    result = call(make(run))
    assert (result.text, result.fault, result.attempts, len(times)) == ("fine", None, 3, 3)
    assert times[1] - times[0] >= 0.1 and times[2] - times[1] >= 0.2


@pytest.mark.parametrize(
    "error", [ToolUnavailable("down"), OSError("down"), TimeoutError("down"), RuntimeError("down")]
)
def test_infrastructure_that_stays_down(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "FIRST_BACKOFF_SECONDS", 0.0)
    run, times = failing(error)
    result = call(make(run, retries=3))
    assert (result.fault, result.attempts, len(times)) == (Fault.INFRA, 4, 4)
    assert result.text == f"Error: probe is unavailable: {type(error).__name__}: down"


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ToolError("no such city"), "Error: no such city"),
        (ValueError("bad"), "Error: ValueError: bad"),
        (KeyError(), "Error: KeyError"),
        (ValueError("x" * 9000), ("Error: ValueError: " + "x" * 9000)[:500]),
        (ToolError("x" * 9000), ("Error: " + "x" * 9000)[:500]),
    ],
)
def test_bad_input_is_the_models_fault_and_final(error: Exception, text: str) -> None:
    run, times = failing(error)
    result = call(make(run))
    assert (result.text, result.fault, result.attempts, len(times)) == (text, Fault.MODEL, 1, 1)


def test_timeout_is_not_retried() -> None:
    result = call(make(lambda: asyncio.sleep(30), timeout=0.05))
    assert (result.text, result.fault, result.attempts) == (
        "Error: probe took longer than 0.05 seconds.",
        Fault.TIMEOUT,
        1,
    )
    assert 0.05 <= result.seconds < 1


def test_a_cancelled_caller_is_cancelled() -> None:
    async def main() -> list[str]:
        seen: list[str] = []

        async def hang() -> None:
            seen.append("started")
            try:
                await asyncio.sleep(30)
            finally:
                seen.append("stopped")

        task = asyncio.create_task(call_tool({"probe": make(hang)}, ToolCall("probe", {})))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return seen

    assert asyncio.run(main()) == ["started", "stopped"]


def test_a_cancellation_inside_the_tool_is_not_the_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "FIRST_BACKOFF_SECONDS", 0.0)
    run, _ = failing(asyncio.CancelledError())
    result = call(make(run, retries=1))
    assert (result.fault, result.attempts) == (Fault.INFRA, 2)


def test_a_plain_function_does_not_block_the_loop() -> None:
    release = threading.Event()

    @tool
    def slow() -> str:
        """Wait."""
        return str(release.wait(5))

    async def main() -> str:
        task = asyncio.create_task(call_tool({"slow": slow}, ToolCall("slow", {})))
        await asyncio.sleep(0.02)  # only possible while the function waits elsewhere
        assert not task.done()
        release.set()
        return (await task).text

    assert asyncio.run(main()) == "True"


def test_a_quick_function_runs_on_the_loop() -> None:
    @tool(quick=True)
    def where() -> str:
        """Where."""
        return threading.current_thread().name

    assert call(where).text == threading.current_thread().name


def test_stop_iteration_in_a_thread_is_an_error_and_not_a_hang() -> None:
    @tool(timeout=5, retries=0)
    def stops() -> str:
        """Stop."""
        return str(next(iter([])))

    result = call(stops)
    assert (result.text, result.fault) == ("Error: stops is unavailable: RuntimeError: StopIteration", Fault.INFRA)


def giving(value: Any, **limits: Any) -> Tool:
    async def give() -> Any:
        return value

    return make(give, **limits)


def test_output_is_made_harmless() -> None:
    assert call(giving("a\0b\ud800c")).text == "ab?c"
    assert call(giving(42)).text == "42"
    cut = call(giving("x" * 11, max_chars=10))
    assert (cut.text, cut.fault) == ("x" * 10 + "\n[output cut: the first 10 of 11 characters]", None)
    assert call(giving("x" * 10, max_chars=10)).text == "x" * 10


# The calculator.


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1 + 2 * 3", "7"),
        ("(1,250 - 48) * 3 / 7", "515.1428571"),
        ("1,234,567 + 0", "1234567"),
        ("0.1 + 0.2", "0.3"),
        ("6 / 3", "2"),
        ("10**20 / 10", "10000000000000000000"),
        ("7 / 2", "3.5"),
        ("-7 // 2", "-4"),
        ("7 % 4", "3"),
        ("2 ** 10", "1024"),
        ("2 ** -1", "0.5"),
        ("- -3", "3"),
        ("+5", "5"),
        ("2 ** 100", str(2**100)),
        ("2.5e15 * 2", "5000000000000000"),
        ("1e300 * 10", "1e+301"),
        ("-0.0", "0"),
        ("5 × 3 − 1 ÷ 1", "14"),  # noqa: RUF001
        ("1 ** 99999999999", "1"),
        ("(" * 50 + "1" + ")" * 50, "1"),
    ],
)
def test_calculator(expression: str, value: str) -> None:
    assert call(calculator, expression=expression).text == value


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("9**9**9", "too large"),
        ("9**9999", "too large"),
        ("10**400 / 3", "too large"),
        ("1e999", "too large"),
        ("1.79769313486231570e308", "too large"),  # finite, but not once rounded
        ("1 / 0", "division by zero"),
        ("1 % 0", "division by zero"),
        ("(-8) ** 0.5", "no real fractional power"),
        ("2 ^ 3", "for powers write **"),
        ("2(3)", "every multiplication with *"),
        ("1,2", "comma"),
        ("", "empty"),
        ("1 +", "not a complete expression"),
        ("__import__('os')", "cannot use 'i'"),
        ("1" * 201, "longer than 200"),
        ("(" * 51 + "1" + ")" * 51, "parentheses"),
        ("-" * 199 + "1", "nested more than 50 deep"),
        ("...", "only numbers"),
    ],
)
def test_calculator_says_what_is_wrong(expression: str, message: str) -> None:
    result = call(calculator, expression=expression)
    assert message in result.text and result.fault is Fault.MODEL


@given(st.one_of(st.text(alphabet="0123456789.,eE_+-*/%() ", max_size=220), st.text(max_size=60)))
@example("9**9**9**9")
@example("(((" * 70)
@example("**".join("9" * 60))
def test_calculator_raises_only_tool_error_and_ends(expression: str) -> None:
    started = time.perf_counter()
    try:
        float(asyncio.run(calculator.run(expression=expression)))  # type: ignore[arg-type]
    except ToolError as error:
        assert str(error)
    except OverflowError:
        pass  # from float() here: an exact integer larger than any float
    assert time.perf_counter() - started < 0.5


# Search.

DOCUMENTS = [
    Document("Mira Tolven", "Mira Tolven was born in Upper Kelso."),
    Document("Upper Kelso", "A town on the\n river Anwen."),
    Document("", "The river Anwen is long."),
    Document("Twin B", "identical words"),
    Document("Twin A", "identical words"),
]


def test_search_ranks_and_formats() -> None:
    search = build_search(DOCUMENTS)
    assert (search.spec.name, search.spec.main_argument) == ("search", "query")
    assert call(search, query="born: MIRA?").text == "Mira Tolven was born in Upper Kelso."
    assert call(search, query="upper kelso").text.split("\n") == [
        "Upper Kelso: A town on the river Anwen.",
        "Mira Tolven was born in Upper Kelso.",
    ]
    assert call(search, query="river long").text.startswith("The river Anwen is long.\n")


def test_equal_scores_keep_the_order_of_the_documents() -> None:
    assert call(build_search(DOCUMENTS), query="identical words").text.split("\n") == [
        "Twin B: identical words",
        "Twin A: identical words",
    ]
    assert call(build_search(DOCUMENTS, results=1), query="words identical").text == "Twin B: identical words"


def test_search_without_a_match_or_a_query() -> None:
    search = build_search(DOCUMENTS)
    assert call(search, query="zebra").text == "No results."
    for query in ("", " ?!"):
        result = call(search, query=query)
        assert (result.text, result.fault) == (
            "Error: the query is empty; give the words to search for",
            Fault.MODEL,
        )


def test_search_limits() -> None:
    assert call(build_search(DOCUMENTS, max_chars=5), query="mira").text == "Mira ..."
    assert len(call(build_search(DOCUMENTS * 9, results=7), query="mira " * 9000).text.split("\n")) == 7
    with pytest.raises(ArpoError, match="at least one document"):
        build_search([])
    with pytest.raises(ArpoError, match="at least 1 result"):
        build_search(DOCUMENTS, results=0)


def test_load_documents(tmp_path: Path) -> None:
    path = tmp_path / "docs.jsonl"
    path.write_text('{"title": "T", "text": "a"}\n\n{"text": "b\\u2028c"}\n', encoding="utf-8")
    assert load_documents(path) == [Document("T", "a"), Document("", "b\u2028c")]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (b"{", "expected a JSON object like"),
        (b"\xff", "expected a JSON object like"),
        (b"[1]", "expected a JSON object, found list"),
        (b'{"title": "T"}', "expected a non-empty string under `text`"),
        (b'{"text": " "}', "expected a non-empty string under `text`"),
        (b'{"text": "a", "title": 3}', "expected a string under `title`, found int"),
    ],
)
def test_a_bad_document_is_named_by_file_and_line(row: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "docs.jsonl"
    path.write_bytes(json.dumps({"text": "fine"}).encode() + b"\n" + row)
    with pytest.raises(ArpoError) as error:
        load_documents(path)
    assert str(error.value).startswith(f"{path}, line 2: {message}")


def test_documents_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(ArpoError, match="No such file"):
        load_documents(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ArpoError, match="holds no documents"):
        load_documents(tmp_path / "empty.jsonl")
