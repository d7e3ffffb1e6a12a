"""JSON schemas of functions, and the check of arguments against schemas."""

from __future__ import annotations

import json
import math
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from arpo.errors import ArpoError
from arpo.tools.base import Tool, tool
from arpo.tools.schema import Checker
from arpo.types import ToolSpec


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


TAKES = "; it takes city (string), days (integer), hours (array or null), metric (boolean)"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({}, "argument 'city' is missing"),
        ({"days": "2"}, "argument 'city' is missing"),
        ({"city": 3}, "argument city must be string, not integer"),
        ({"city": "a", "days": "2"}, "argument days must be integer, not string"),
        ({"city": "a", "days": True}, "argument days must be integer, not boolean"),
        ({"city": "a", "days": 1.0}, "argument days must be integer, not number"),
        ({"city": "a", "hours": [1, "x"]}, "argument hours[1] must be number, not string"),
        ({"city": "a", "hours": {}}, "argument hours must be array or null, not object"),
        ({"city": "a", "days": None}, "argument days must be integer, not null"),
        ({"city": "a", "wind": 1}, "unexpected argument 'wind'"),
        ({"city": ("a",)}, "argument city must be string, not tuple"),
    ],
)
def test_wrong_arguments_are_explained(args: dict[str, Any], message: str) -> None:
    assert forecast.checker.problem(args) == message + TAKES


@pytest.mark.parametrize(
    "args", [{"city": "a"}, {"city": "", "days": 3, "hours": [1, 2.5]}, {"city": "a", "hours": None}]
)
def test_right_arguments_are_let_through(args: dict[str, Any]) -> None:
    assert forecast.checker.problem(args) is None


def checker(properties: dict[str, Any], **more: Any) -> Checker:
    return Checker(ToolSpec("book", "Book.", {"type": "object", "properties": properties, **more}))


RULE = "which does not fit the schema's"
LONG = '[{"minItems": 1}, {"minItems": 2}]'
OPTIONAL = [{"type": "integer"}, {"type": "null"}]
POINT = {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"], "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "value", "problem", "takes"),
    [
        ({"enum": ["a", "b"]}, "c", 'argument x must be one of "a", "b", not "c"', 'one of "a", "b"'),
        ({"const": 1}, 2, "argument x must be 1, not 2", "1"),
        ({"type": "integer", "minimum": 1}, 0, "argument x must be at least 1, not 0", "integer"),
        ({"type": "number", "exclusiveMaximum": 1}, 1, "argument x must be less than 1, not 1", "number"),
        ({"type": "string", "minLength": 2}, "é", "argument x must have at least 2 characters, not 1", "string"),
        ({"type": "array", "maxItems": 1}, [1, 2], "argument x must have at most 1 items, not 2", "array"),
        ({"anyOf": OPTIONAL}, "1", "argument x must be integer or null, not string", "integer or null"),
        (POINT, {}, "argument 'x.x' is missing", "object"),
        (POINT, {"x": 1, "y": 2}, "unexpected argument 'x.y'", "object"),
        ({"type": "array", "items": POINT}, [{"x": "1"}], "argument x[0].x must be number, not string", "array"),
        ({"anyOf": [{"minItems": 1}, {"minItems": 2}]}, [], f"argument x is [], {RULE} anyOf: {LONG}", "any"),
        ({"uniqueItems": True}, [[1], {}, [1]], f"argument x is [[1], {{}}, [1]], {RULE} uniqueItems: true", "any"),
        (False, "a", '"a" stands where nothing is allowed', "any"),
    ],
)  # fmt: skip
def test_errors_in_other_schemas_are_explained(schema: Any, value: Any, problem: str, takes: str) -> None:
    assert checker({"x": schema}).problem({"x": value}) == f"{problem}; it takes x ({takes})"


def test_a_message_stays_short() -> None:
    wide = checker({"x": {"enum": ["long " * 100] * 3}}, additionalProperties=False)
    told = wide.problem({"x": "y" * 10_000})
    assert told is not None and len(told) < 700
    told = wide.problem({"y" * 10_000: 1})
    assert told is not None and len(told) < 500


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


BROKEN: list[Mapping[str, Any]] = [
    {"type": "strnig"},
    {"type": "array"},
    {"type": ["string", "null"]},
    {"properties": ["x"]},
    {"properties": {"x": {"minimum": "1"}}},
    {"properties": {"x": {"pattern": "("}}},
    {"properties": {"x": {"$ref": "#/$defs/nowhere"}}},
    {"properties": {"x": {"$ref": "http://127.0.0.1:9/schema.json"}}},
    {"properties": {"x": {"items": {"$dynamicRef": "file:///etc/passwd"}}}},
    {"properties": {"x": {"const": {1, 2}}}},
    {"$schema": ["http://json-schema.org/draft-07/schema#"]},
    {"$id": 5},
    {"properties": {"x": {"$ref": "#/$defs/\ud800"}}},
    {"properties": {"x": {"const": nested(100_000)}}},
]


@pytest.mark.parametrize("schema", BROKEN)
def test_a_broken_schema_is_found_when_the_tool_is_made(
    schema: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("no network")

    async def run() -> str:
        return ""

    monkeypatch.setattr(socket.socket, "connect", refuse)
    with pytest.raises(ArpoError, match="tool book: its schema is broken, so it cannot be used: "):
        Tool(ToolSpec("book", "Book.", schema), run)


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"type": "object"},
        {"$id": "https://a.invalid/", "properties": {"x": {"$ref": "#/$defs/A"}}, "$defs": {"A": {"type": "null"}}},
        {"$schema": "http://json-schema.org/draft-07/schema#", "properties": {"x": {"items": [{"type": "null"}]}}},
        {"$schema": "http://example.invalid/unheard-of", "properties": {"pattern": {"type": ["null", "array"]}}},
    ],
)  # fmt: skip
def test_unusual_schemas_work(schema: Mapping[str, Any]) -> None:
    check = Checker(ToolSpec("book", "Book.", schema))
    assert check.problem({}) is None
    assert check.problem({"x": None}) is None
    if "$defs" in schema:
        assert check.problem({"x": 1}) == "argument x must be null, not integer; it takes x (any)"


def test_nothing_is_ever_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reference that leads somewhere from the top of the schema, but out of it from where it stands."""

    def refuse(*_: Any) -> None:
        reached.append(1)
        raise OSError

    reached: list[int] = []
    monkeypatch.setattr(socket.socket, "connect", refuse)
    inner = {"$id": "c/", "properties": {"y": {"$ref": "b"}}}
    check = checker({"x": inner}, **{"$id": "http://127.0.0.1:9/a/", "$defs": {"B": {"$id": "b"}}})
    assert check.problem({"x": {"y": 1}}) == UNREADABLE
    assert reached == []


def test_a_schema_cannot_be_changed_later() -> None:
    schema: dict[str, Any] = {"properties": {"x": {"type": "string"}}}
    check = Checker(ToolSpec("book", "Book.", schema))
    schema["properties"]["x"]["type"] = "integer"
    assert check.problem({"x": "a"}) is None


UNREADABLE = "the arguments are not plain JSON, or too large or too deeply nested to check; it takes x (any)"


@pytest.mark.parametrize(
    "value", [math.nan, math.inf, nested(100_000), 10**5000, object(), {object(): 1}, b"a", {1, 2}], ids=type
)
def test_arguments_that_are_not_json_are_refused(value: Any) -> None:
    assert checker({"x": {}}).problem({"x": value}) == UNREADABLE


def test_regular_expressions_of_a_schema_are_not_run() -> None:
    check = checker(
        {"x": {"pattern": "^(a+)+$"}, "y": {"propertyNames": {"pattern": "^(a+)+$"}}},
        patternProperties={"^(a+)+$": {"type": "null"}},
        additionalProperties=False,
        unevaluatedProperties=False,
    )
    started = time.perf_counter()
    assert check.problem({"x": "a" * 40 + "!", "y": {"a" * 40 + "!": 1}, "a" * 40 + "!": 1}) is None
    assert time.perf_counter() - started < 60  # 2**40 steps are not made in that


def test_the_time_of_a_check_is_bounded() -> None:
    either = [{"properties": {"a": {"$ref": "#/$defs/E"}, "op": {"const": op}}} for op in ("and", "or", "not")]
    check = checker({"x": {"$ref": "#/$defs/E"}}, **{"$defs": {"E": {"anyOf": either}}})
    deep: Any = {"op": "xor"}
    for _ in range(60):
        deep = {"a": deep, "op": "xor"}
    started = time.process_time()
    assert check.problem({"x": deep}) == UNREADABLE
    assert check.problem({"x": {"op": "and", "a": {"op": "or"}}}) is None
    many = checker({"x": {"uniqueItems": True}})
    assert many.problem({"x": [{"a": i} for i in range(20_000)]}) is None
    numbers = checker({"x": {"items": {"type": "number"}}})
    assert numbers.problem({"x": ["a"] * 300_000}) == "argument x[0] must be number, not string; it takes x (any)"
    loop = checker({"x": {"$ref": "#/$defs/E"}}, **{"$defs": {"E": {"$ref": "#/$defs/E"}}})
    assert loop.problem({"x": 1}) == UNREADABLE
    assert time.process_time() - started < 20


def test_a_check_is_fast() -> None:
    """It takes as long as writing and reading the arguments five times; the measure is as slow as the machine."""
    args = {"city": "Upper Kelso", "days": 3}

    def seconds(what: Callable[[], object]) -> float:
        started = time.perf_counter()
        for _ in range(20):
            what()
        return time.perf_counter() - started

    rounds = [
        (seconds(lambda: forecast.checker.problem(args)), seconds(lambda: json.loads(json.dumps(args))))
        for _ in range(50)
    ]
    assert min(check for check, _ in rounds) < 25 * min(measure for _, measure in rounds)


# Against a plain check of types.

JSON = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3), st.sampled_from(["\ud800", 10**30])
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=2), inner, max_size=3)),
    max_leaves=6,
)


def fits(schema: Any, value: Any) -> bool:
    """The slow and obvious way."""
    if isinstance(value, float) and not math.isfinite(value):
        return False
    kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    if value is None:
        return "null" in kinds
    if isinstance(value, bool):
        return "boolean" in kinds
    if isinstance(value, str):
        return "string" in kinds
    if isinstance(value, int):
        return "integer" in kinds or "number" in kinds
    if isinstance(value, float):
        return "number" in kinds
    return isinstance(value, list) and "array" in kinds and all(fits(schema["items"], item) for item in value)


@given(st.dictionaries(st.sampled_from(["city", "days", "hours", "metric", "other"]), JSON, max_size=5))
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_the_check_agrees_with_a_plain_one_and_never_raises(args: dict[str, Any]) -> None:
    known = forecast.spec.schema["properties"]
    right = "city" in args and all(name in known and fits(known[name], value) for name, value in args.items())
    problem = forecast.checker.problem(args)
    assert (problem is None) == right
    assert problem is None or problem.endswith(TAKES)
