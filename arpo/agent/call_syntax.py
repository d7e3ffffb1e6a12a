"""The syntaxes in which models write tool calls, and reading calls from a model's turn.

A syntax is a `response_template` of transformers, which does the parsing. A tokenizer may bring its own; the ones here
serve those that bring none. Which of them a chat template writes is found by trying (`arpo.agent.native`).

Guarantees: `read_calls` never raises; a text that is no usable call becomes a `ToolCall` with an error for the model.
Only what the model wrote after its thoughts is read.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

from arpo.types import ToolCall

Syntax = Mapping[str, Any]
"""A `response_template` of transformers."""

MAX_TURN_CHARS = 200_000  # a longer turn is not searched for calls
_JSON_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_ANYWHERE = "\0"  # no text has it: what is parsed is the model's turn alone
_NAMED = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
_THOUGHTS = {"open": "<think>", "close": "</think>", "content": "text"}


def _syntax(**tool_calls: Any) -> Syntax:
    fields = {"thoughts": {**_THOUGHTS, "repeats": True}, "tool_calls": {"repeats": True, **tool_calls}}
    return {"start_anchor": _ANYWHERE, "fields": {**fields, "content": {"content": "text"}}}


SYNTAXES: Mapping[str, Syntax] = {
    # <tool_call>{"name": "f", "arguments": {...}}</tool_call>: Hermes, Qwen 2.5 and 3, SmolLM3; SmolLM2 writes a list
    "hermes": _syntax(open="<tool_call>", close="</tool_call>", content="json"),
    # <tool_call><function=f><parameter=x>1</parameter></function></tool_call>: Qwen 3.5 and Qwen3-Coder
    "qwen-xml": _syntax(
        open_pattern=r"<tool_call>\s*<function=(?P<name>[^\n>]+)>",
        close="</tool_call>",
        content="xml-inline",
        content_args={
            "tag_pattern": r"<parameter=(?P<key>[^<>\n]{1,200})>\n?(?P<value>(?:(?!<parameter=).)*?)\n?</parameter>"
        },
        transform=_NAMED,
    ),
    # <tool_call>f\n<arg_key>x</arg_key>\n<arg_value>1</arg_value></tool_call>: GLM 4.5
    "glm": _syntax(
        open_pattern=r"<tool_call>(?P<name>[^\s<{\[]+)\s*",
        close="</tool_call>",
        content="xml-inline",
        content_args={
            "tag_pattern": r"<arg_key>(?P<key>[^<]{1,200})</arg_key>\s*"
            r"<arg_value>(?P<value>(?:(?!<arg_key>).)*?)</arg_value>"
        },
        transform=_NAMED,
    ),
    # {"name": "f", "parameters": {...}}, alone in the message: Llama 3.1 to 3.3
    "llama": _syntax(
        open_pattern=r'\A\s*(?:<\|python_tag\|>\s*)?(?=\{\s*"(?:name|type)"\s*:)', close_pattern=r"\Z", content="json"
    ),
    # [TOOL_CALLS] [{"name": "f", "arguments": {...}, "id": "..."}]: Mistral up to 2024
    "mistral": _syntax(open_pattern=r"\[TOOL_CALLS\](?=\s*\[)", close_pattern=r"\Z", content="json"),
    # [TOOL_CALLS]f[ARGS]{...}: Mistral since 2025
    "mistral-args": _syntax(
        open_pattern=r"\[TOOL_CALLS\](?P<name>[^\[\s{]+)(?:\[CALL_ID\]\w+)?\[ARGS\]",
        close_pattern=r"(?=\[TOOL_CALLS\])|\Z",
        content="json",
        transform=_NAMED,
    ),
    # <|tool_call>call:f{x:<|"|>text<|"|>}<tool_call|>: Gemma 4
    "gemma": _syntax(
        open_pattern=r"<\|tool_call>call:(?P<name>[\w.-]+)",
        close="<tool_call|>",
        content="json",
        content_args={"string_delims": [['<|"|>', '<|"|>']], "unquoted_keys": True},
        transform=_NAMED,
    ),
}


class ParsedCall(NamedTuple):
    """A call as it stands in a turn: nothing is checked yet."""

    name: Any
    args: Any
    id: Any = None


class ParsedTurn(NamedTuple):
    """The calls of a turn, and whether anything else is in it, thoughts included."""

    calls: list[ParsedCall]
    has_text: bool


def parse_turn(
    text: str, syntax: Syntax, tools: Sequence[Mapping[str, Any]], opens_thoughts: bool = False
) -> ParsedTurn:
    """Parse a turn without its end token; ValueError if a call in it cannot be parsed.

    With `opens_thoughts` the turn begins inside of thoughts, which the prompt opened.
    """
    from transformers.utils.chat_parsing import parse_response

    thoughts, closed, rest = text.partition("</think>")
    turn = (rest if closed else "") if opens_thoughts else text
    try:
        message = parse_response(turn, dict(syntax), prefix="", tools=[dict(tool) for tool in tools])
    except (KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None
    listed = message.pop("tool_calls", None) or []
    calls = []
    for call in (call for each in listed for call in (each if isinstance(each, list) else [each])):
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict):
            raise ValueError("a call is not an object with a name and arguments")
        args = function.get("arguments", function.get("parameters"))
        calls.append(ParsedCall(function.get("name"), args, call.get("id")))
    has_thoughts = opens_thoughts and bool(thoughts.strip())
    return ParsedTurn(calls, has_thoughts or any(value for name, value in message.items() if name != "role"))


def read_calls(
    text: str, syntax: Syntax, tools: Sequence[Mapping[str, Any]], alone: bool, opens_thoughts: bool = False
) -> tuple[ToolCall, ...]:
    """The calls in a turn; if one cannot be parsed, a single call with the error. `alone`: not in a turn with text."""
    if len(text) > MAX_TURN_CHARS:
        return ()
    try:
        found, has_text = _parse_leniently(text, syntax, tools, opens_thoughts)
        json.dumps(found, ensure_ascii=False, allow_nan=False).encode()  # no NaN, no lone surrogates
    except ValueError as error:
        reason = str(error).strip().splitlines()[-1][:200] if str(error).strip() else type(error).__name__
        return (ToolCall("", {}, f"Error: the call could not be parsed ({reason}). Check its syntax."),)
    if alone and has_text and found:
        return (ToolCall("", {}, "Error: a call must be the whole message: write it without other text."),)
    names = [tool["function"]["name"] for tool in tools]
    checked = (check_call(call.name, call.args, names) for call in found)
    ids = (call.id if isinstance(call.id, str) and re.fullmatch(r"[\w-]{1,64}", call.id) else "" for call in found)
    return tuple(replace(call, id=call_id) for call, call_id in zip(checked, ids, strict=True))


def _parse_leniently(text: str, syntax: Syntax, tools: Sequence[Mapping[str, Any]], opens_thoughts: bool) -> ParsedTurn:
    """Parse a turn; JSON strings may hold line breaks, as models write them in code."""
    try:
        return parse_turn(text, syntax, tools, opens_thoughts)
    except ValueError:
        escaped = _JSON_STRING.sub(lambda found: found[0].replace("\n", "\\n").replace("\t", "\\t"), text)
        if escaped == text or syntax["fields"]["tool_calls"].get("content") != "json":
            raise
        return parse_turn(escaped, syntax, tools, opens_thoughts)


def bare_call(message: str) -> ParsedCall | None:
    """The call in a message that is nothing but a JSON object with a name and arguments, thoughts left out."""
    body = message.rpartition("</think>")[2].strip()
    body = body.removeprefix("```json").removesuffix("```").strip()
    if not body.startswith("{"):
        return None
    try:
        value = json.loads(body, strict=False)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()  # no NaN, no lone surrogates
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    given = [value[key] for key in ("arguments", "parameters") if key in value]
    return ParsedCall(value["name"], given[0]) if given else None


def check_call(name: Any, args: Any, names: Sequence[str]) -> ToolCall:
    """A call with this name and these arguments, or with an error if there is no such tool or they are no object."""
    if not isinstance(name, str):
        return ToolCall("", {}, "Error: the call has no name of a tool.")
    if name not in names:
        near = difflib.get_close_matches(name[:100], names, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        return ToolCall(name, {}, f"Error: there is no tool {name[:100]!r}.{hint} Available: {', '.join(names)}.")
    if args is None:
        args = {}
    if isinstance(args, str):
        with suppress(ValueError, RecursionError):
            args = json.loads(args, strict=False)
    if not isinstance(args, dict):
        return ToolCall(name, {}, f"Error: the arguments of {name} are not a JSON object with their names.")
    return ToolCall(name, args)
