"""From a model's text to a tool's answer, in both formats: whatever it writes, it gets something to learn from."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arpo.agent.formats import CallFormat, ResultPlace, build_format, encode_result
from arpo.tools.base import tool
from arpo.tools.executor import Toolset, call_tool
from arpo.types import Fault, ToolCall, ToolResult


@tool(quick=True)
def search(query: str) -> str:
    """Search."""
    return f"found {query}"


@tool(quick=True)
def python(code: str, seconds: int = 1) -> str:
    """Run code."""
    return f"ran {code} {seconds}"


BOX = Toolset([search, python])
SPECS = [each.spec for each in BOX.values()]
TAGS, JSON = build_format("tags", SPECS), build_format("json", SPECS)
NAMES = ("search", "python", "tool_call", "think", "answer", "result", "browse")
MARKUP = [f"<{slash}{name}>" for name in NAMES for slash in ("", "/")]
PIECES = st.one_of(
    st.sampled_from([*MARKUP, '{"name": "search", "arguments": {"query": "a"}}', '{"name": ', "}", "null", "\n"]),
    st.text(max_size=12),
)
TURNS = st.lists(PIECES, max_size=10).map("".join)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=True) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


def answer(call: ToolCall) -> ToolResult:
    return asyncio.run(call_tool(BOX, call))


def stop_of(fmt: CallFormat, text: str) -> str | None:
    """The stop string at which an engine would have ended this turn."""
    found = [(text.find(stop), stop) for stop in fmt.stops if stop in text]
    return min(found)[1] if found else None


@pytest.mark.slow
@pytest.mark.parametrize("fmt", [TAGS, JSON], ids=["tags", "json"])
@settings(max_examples=300, deadline=None)
@given(text=TURNS)
def test_any_turn_gets_an_answer_or_is_no_call(fmt: CallFormat, text: str) -> None:
    stop = stop_of(fmt, text)
    calls = fmt.find_calls(text, stop)
    assert len(calls) == (stop is not None and stop != "</answer>")
    for call in calls:
        result = answer(call)
        assert result.fault in (None, Fault.MODEL)
        assert result.text.strip() and len(result.text) <= 20_100
        assert (result.attempts == 0) <= result.text.startswith("Error: ")
        result.text.encode()


@settings(max_examples=200, deadline=None)
@given(
    query=st.text(st.characters(exclude_characters="<", exclude_categories=("Cs", "Cc", "Z")), min_size=1, max_size=30)
)
def test_a_right_call_reaches_its_tool_unchanged(query: str) -> None:
    talk = "<think>I <search> for it</think>"
    [tagged] = TAGS.find_calls(f"{talk}<search>{query}</search>", "</search>")
    asked = json.dumps({"name": "search", "arguments": {"query": query}}, ensure_ascii=len(query) % 2 == 0)
    [as_json] = JSON.find_calls(f"{talk}<tool_call>\n{asked}\n</tool_call>", "</tool_call>")
    assert tagged == as_json == ToolCall("search", {"query": query})
    assert answer(tagged).text == f"found {query}"


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(name=st.sampled_from(["search", "python", "serch", "", "answer"]) | st.text(max_size=8), args=VALUES)
def test_any_json_call_is_answered_and_only_right_ones_run(name: str, args: Any) -> None:
    try:
        body = json.dumps({"name": name, "arguments": args})
    except ValueError:
        return
    [call] = JSON.find_calls(f"<tool_call>{body}</tool_call>", "</tool_call>")
    assert call is not None
    result = answer(call)
    right = (
        isinstance(args, dict)
        and name in BOX
        and (
            (name == "search" and args.keys() == {"query"} and isinstance(args["query"], str))
            or (
                name == "python"
                and {"code"} <= args.keys() <= {"code", "seconds"}
                and isinstance(args["code"], str)
                and type(args.get("seconds", 1)) is int
            )
        )
    )
    if not right:
        assert (result.fault, result.attempts) == (Fault.MODEL, 0)
        assert result.text.startswith("Error: ") and len(result.text) <= 500
    elif "\ud800" <= max(json.dumps(args, ensure_ascii=False), default="") <= "\udfff":
        assert result.fault is Fault.MODEL
    else:
        assert result.fault is None or "</tool_call>" in body


@pytest.mark.parametrize(
    ("fmt", "text", "told"),
    [
        (TAGS, "<search>a<search>b</search>", "inside another"),  # nested
        (TAGS, "<search>a<python>1</python>", "inside another"),
        (TAGS, "a</search>", "not opened"),  # malformed
        (TAGS, "<search> \n </search>", "is empty"),
        (JSON, '<tool_call>{"name": "search"}</tool_call>', "argument 'query' is missing"),
        (JSON, '<tool_call>{"name": "serch", "arguments": {}}</tool_call>', "Did you mean search?"),  # unknown
        (JSON, "<tool_call>search Mira</tool_call>", "not valid JSON"),
        (JSON, '<tool_call>{"name": "search", "arguments": {"query": 3}}</tool_call>', "must be string, not integer"),
        (
            JSON,
            '<tool_call>{"name": "search", "arguments": {"q": "a", "query": "b"}}</tool_call>',
            "unexpected argument",
        ),
        (JSON, '<tool_call><tool_call>{"name": "search"}</tool_call>', "inside another"),
    ],
)
def test_what_the_model_is_told(fmt: CallFormat, text: str, told: str) -> None:
    [call] = fmt.find_calls(text, stop_of(fmt, text))
    assert call is not None
    result = answer(call)
    assert (result.fault, result.attempts) == (Fault.MODEL, 0)
    assert told in result.text


def test_of_duplicated_calls_the_first_is_made() -> None:
    text = "<search>a</search><search>b</search>"
    assert TAGS.find_calls(text, "</search>") == (ToolCall("search", {"query": "a"}),)
    one = '<tool_call>{"name": "search", "arguments": {"query": "%s"}}</tool_call>'
    assert JSON.find_calls(one % "a" + one % "b", "</tool_call>") == (ToolCall("search", {"query": "a"}),)


@pytest.mark.parametrize("fmt", [TAGS, JSON], ids=["tags", "json"])
@settings(max_examples=150, deadline=None)
@given(text=TURNS)
def test_no_answer_of_a_tool_can_be_taken_for_the_models_words(tokenizer: Any, fmt: CallFormat, text: str) -> None:
    _, shown = encode_result(tokenizer, fmt, text, 1000)
    before, after = fmt.wrapper(tokenizer, ResultPlace())
    body = shown.removeprefix(before).removesuffix(after)
    known = [mark for mark in MARKUP if "browse" not in mark]
    assert not [mark for mark in known if mark in body]
    assert fmt.find_calls(body, stop_of(fmt, body)) == ()
