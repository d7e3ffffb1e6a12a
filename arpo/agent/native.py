"""What a chat template writes around tool calls and their results, found by rendering examples.

    layout = find_layout(tokenizer, arguments)       # NotNative, with the reason, if this cannot be done exactly
    layout.first, layout.between, layout.last        # the template's text around results

A conversation with tools is rendered with slots for names, arguments and results. The texts between the slots are what
has to be appended to a sampled turn, so that a conversation that grows turn by turn has the text that the template
gives it as a whole.

Guarantees: a layout is returned only if the text that it gives equals the template's for one to three results in a
turn, for a second turn with calls, for a call after text, and for results that hold quotes, line breaks, spaces and
other characters; if earlier turns, with their thoughts, stay as they are; and if calls can be read back from what the
template writes.
Not covered: templates that depend on the words of a message, on the number of turns beyond that, or on the date.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from arpo.agent.call_syntax import SYNTAXES, ParsedCall, Syntax, parse_turn
from arpo.agent.chat_template import Chat, Rendered, render_chats
from arpo.models.end_tokens import end_texts

NAME, CALL_ID, PREVIOUS_ID, ARGUMENT = "slot_name", "slotid00", "slotprevious", "slot_argument"
VALUE, RESULT, CONTENT, QUESTION = "@@value@@", "@@result-{}@@", "@@content@@", "@@question@@"
THOUGHT = "@@thought-{}@@"
MAX_RESULTS = 3  # of a turn, in the conversations that are rendered
_PROBES = (f' {VALUE} "a"\t\\ é <b> & \'c\'\n\n{{"d": [1]}}\n ', f"<{VALUE}>", f'{{"{VALUE}": 1.0}}')

EXAMPLE_TOOL = {
    "type": "function",
    "function": {
        "name": NAME,
        "description": "A tool.",
        "parameters": {
            "type": "object",
            "properties": {ARGUMENT: {"type": "string", "description": "A text."}},
            "required": [ARGUMENT],
        },
    },
}


class NotNative(Exception):
    """Why a chat template's own call format cannot be used."""


TRANSFORMS: Mapping[str, Callable[[str], str]] = {
    "none": lambda text: text,
    "strip": str.strip,
    "json": lambda text: json.dumps(text, ensure_ascii=False)[1:-1],
    "json-ascii": lambda text: json.dumps(text)[1:-1],
}
"""What templates do to the text of a result."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The template's text around calls and results.

    In it, NAME and CALL_ID stand for those of the result's call, and PREVIOUS_ID for the id of the call before.
    """

    syntax: str  # its name, or "own" for a template of the tokenizer's
    parser: Mapping[str, Any]
    end: str  # the token that ends a turn with calls
    first: str  # from there to the first result
    between: str | None  # from one result to the next; None if there is only one call in a turn
    last: str  # from the last result to where the model goes on
    transform: str  # of results, one of TRANSFORMS
    call: str | None  # a call after text, with NAME and the arguments of the example; None if it cannot be written
    call_alone: str | None  # a call that is the whole turn
    alone: bool  # the template writes no text in a turn with calls, so a call counts only in a turn without
    opens_thoughts: bool = False  # the text before a turn ends with an open <think>

    def around(self, number: int, is_last: bool, name: str, call_id: str, previous_id: str) -> tuple[str, str]:
        """The text before and after a result, the turn's end token not included."""
        before = self.first if number == 0 else self.between or ""
        before = before.replace(NAME, name).replace(CALL_ID, call_id).replace(PREVIOUS_ID, previous_id)
        return before, self.last.replace(CALL_ID, call_id) if is_last else ""

    def example(self, name: str) -> str:
        """How a call is written, for a model that wrote one wrongly."""
        shown = (self.call_alone or "").replace(EXAMPLE_ARGS, "{...}").replace(NAME, name[:100])
        return shown or "as the system prompt says."

    def write_call(self, content: str, name: str, args: Mapping[str, Any]) -> str:
        """A turn with text and a call, as the template writes it; ValueError if that is not known."""
        layout = self.call if content.strip() else self.call_alone
        if layout is None:
            raise ValueError("the chat template writes arguments in a way that traces cannot be brought into")
        before, _, after = layout.partition(EXAMPLE_ARGS)
        args_text = json.dumps(args, ensure_ascii=False, default=str)
        return f"{content.rstrip()}{before.replace(NAME, name)}{args_text}{after.replace(NAME, name)}"


EXAMPLE_ARGS = json.dumps({ARGUMENT: VALUE})


def _assistant(calls: int, content: str, as_text: bool) -> dict[str, Any]:
    args: Any = {ARGUMENT: VALUE}
    function = {"name": NAME, "arguments": json.dumps(args) if as_text else args}
    listed = [{"id": f"{CALL_ID}{i}", "type": "function", "function": function} for i in range(1, calls + 1)]
    return {"role": "assistant", "content": content, "tool_calls": listed}


def _result(number: int, content: str | None = None) -> dict[str, Any]:
    text = RESULT.format(number) if content is None else content
    return {"role": "tool", "tool_call_id": f"{CALL_ID}{number}", "name": NAME, "content": text}


def example_chats(as_text: bool = False) -> dict[str, Chat]:
    """Every conversation from which a layout is found; arguments are JSON texts if `as_text`, else objects."""
    user, tools = {"role": "user", "content": QUESTION}, [EXAMPLE_TOOL]

    def exchange(calls: int = 1, content: str = "") -> list[dict[str, Any]]:
        return [_assistant(calls, content, as_text), *map(_result, range(1, calls + 1))]

    def thinking(number: int) -> str:
        return f"<think>\n{THOUGHT.format(number)}\n</think>\n\n{CONTENT}"

    chats = {
        "question": Chat([user], True, tools),
        "question without tools": Chat([user], True),
        "twice": Chat([user, *exchange(), *exchange()], True, tools),
        "text": Chat([user, *exchange(1, CONTENT)], True, tools),
        "thoughts": Chat([user, *exchange(1, thinking(1)), *exchange(1, thinking(2))], True, tools),
        "answered": Chat([user, *exchange(), {"role": "assistant", "content": CONTENT}], False, tools),
    }
    chats |= {f"results {n}": Chat([user, *exchange(n)], True, tools) for n in range(1, MAX_RESULTS + 1)}
    for number, probe in enumerate(_PROBES):
        chats[f"probe {number}"] = Chat([user, _assistant(1, "", as_text), _result(1, probe)], True, tools)
    return chats


def knows_tools(tokenizer: Any, arguments: Mapping[str, Any] | None = None) -> bool:
    """Whether the chat template describes the tools that it is given."""
    if not getattr(tokenizer, "chat_template", None):
        return False
    rendered = render_chats(tokenizer, example_chats(), arguments)
    return NAME in (rendered["question"].text or "") and rendered["question without tools"].text is not None


def find_layout(tokenizer: Any, arguments: Mapping[str, Any] | None = None) -> Layout:
    """The layout of the tokenizer's chat template; NotNative, with the reason, if there is none."""
    if not getattr(tokenizer, "chat_template", None):
        raise NotNative("the tokenizer has no chat template")
    template = json.dumps([tokenizer.get_chat_template(), getattr(tokenizer, "response_template", None), arguments])
    return _find_layout(_Key(tokenizer, template), json.dumps(arguments or {}))


class _Key:
    """A tokenizer that is equal to another one if their templates and special tokens are."""

    def __init__(self, tokenizer: Any, template: str) -> None:
        self.tokenizer, self.key = tokenizer, (template, json.dumps(tokenizer.special_tokens_map), len(tokenizer))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


@lru_cache(maxsize=16)
def _find_layout(key: _Key, arguments: str) -> Layout:
    tokenizer = key.tokenizer
    if not knows_tools(tokenizer, json.loads(arguments)):
        raise NotNative("its chat template does not describe tools")
    reasons = []
    for as_text in (False, True):
        rendered = render_chats(tokenizer, example_chats(as_text), json.loads(arguments))
        try:
            return _layout(rendered, end_texts(tokenizer), getattr(tokenizer, "response_template", None))
        except NotNative as error:
            reasons.append(str(error))
    raise NotNative(reasons[0])


def _layout(rendered: Mapping[str, Rendered], ends: Sequence[str], own: Syntax | None) -> Layout:
    one, question = rendered["results 1"], rendered["question"].text or ""
    if one.text is None:
        raise NotNative(f"its chat template cannot render a tool's result ({one.error})")
    end, first = _split_turn(one.text, ends)
    last = one.text.partition(RESULT.format(1))[2]
    two = rendered["results 2"].text
    between = None
    if two is not None:
        between = two.partition(RESULT.format(1))[2].partition(RESULT.format(2))[0]
        between = between.replace(f"{CALL_ID}1", PREVIOUS_ID).replace(f"{CALL_ID}2", CALL_ID)
    first, last = (text.replace(f"{CALL_ID}1", CALL_ID) for text in (first, last))
    if NAME in last:
        raise NotNative("its chat template names a tool after its result")
    alone, thinks = _calls_alone(rendered["text"].text), "<think>" in question.rpartition("</think>")[2]
    found = Layout("", {}, end, first, between, last, "none", None, None, alone, thinks)
    _check_results(rendered, found)
    _check_history(rendered, found, one.text)
    turns = [_turn(rendered[f"results {n}"].text, question, end) for n in (1, 2)]
    if rendered["twice"].text != one.text + (turns[0] or "") + end + result_text(found, _example_results(1)):
        raise NotNative("its chat template writes a second turn differently than the first")
    name, parser = _find_syntax(turns, own, found.opens_thoughts)
    call, call_alone = _written_calls(rendered["text"].text, turns[0], end)
    return replace(
        found, syntax=name, parser=parser, transform=_find_transform(rendered, found), call=call, call_alone=call_alone
    )


def _calls_alone(text: str | None) -> bool:
    """Whether the template leaves out text before a call, or puts it elsewhere."""
    return CONTENT not in (text or "").partition(VALUE)[0]


def result_text(layout: Layout, results: Sequence[tuple[str, str, str]]) -> str:
    """What is appended to a turn that ended with its end token: the results, each with the name and id of its call."""
    text = previous = ""
    for number, (name, call_id, result) in enumerate(results):
        before, after = layout.around(number, number == len(results) - 1, name, call_id, previous)
        text += before + TRANSFORMS[layout.transform](result) + after
        previous = call_id
    return text


def _split_turn(text: str, ends: Sequence[str]) -> tuple[str, str]:
    """The end token of the turn before the first result, and the text from there to the result."""
    before, found, _ = text.partition(RESULT.format(1))
    if not found:
        raise NotNative("its chat template leaves out a tool's result, or changes it")
    _, called, region = before.rpartition(VALUE)
    if not called:
        raise NotNative("its chat template leaves out a call's arguments")
    places = [(region.find(end), -len(end), end) for end in ends if end in region]
    if not places:
        raise NotNative("its chat template does not end the turn between a call and its result")
    place, _, end = min(places)
    return end, region[place + len(end) :]


def _example_results(count: int) -> list[tuple[str, str, str]]:
    return [(NAME, f"{CALL_ID}{n}", RESULT.format(n)) for n in range(1, count + 1)]


def _check_results(rendered: Mapping[str, Rendered], layout: Layout) -> None:
    """Raise unless the text after the turn is the layout's, however many results there are."""
    for count in range(1, MAX_RESULTS + 1 if layout.between is not None else 2):
        text = rendered[f"results {count}"].text or ""
        if not text.endswith(layout.end + result_text(layout, _example_results(count))):
            raise NotNative(f"its chat template writes {count} results of a turn differently than one")


def _check_history(rendered: Mapping[str, Rendered], layout: Layout, one: str) -> None:
    """Raise unless earlier turns stay as they are when the conversation goes on."""
    twice, text, thoughts = (rendered[name].text or "" for name in ("twice", "text", "thoughts"))
    suffix = layout.end + result_text(layout, _example_results(1))
    if not (twice.startswith(one) and twice.endswith(suffix)):
        raise NotNative("its chat template changes earlier turns when the conversation goes on")
    if not layout.alone and not text.endswith(suffix):
        raise NotNative("its chat template writes results differently after a call with text")
    if not layout.alone and thoughts and not all(THOUGHT.format(n) in thoughts for n in (1, 2)):
        raise NotNative("its chat template drops the thoughts of earlier turns")
    answered = rendered["answered"].text or ""
    if not answered.startswith(one):
        raise NotNative("its chat template changes earlier turns when an answer follows")


def _turn(text: str | None, question: str, end: str) -> str | None:
    """The model's turn in a rendered conversation, without its end token; with the header if that is not as before."""
    if text is None:
        return None
    head = text.partition(RESULT.format(1))[0]
    if VALUE not in head or end not in head.rpartition(VALUE)[2]:
        raise NotNative("its chat template leaves out a call's arguments")
    turn = head[: head.rindex(VALUE) + head[head.rindex(VALUE) :].index(end)]
    return turn[len(question) :] if turn.startswith(question) else turn.partition(QUESTION)[2]


def _find_syntax(turns: Sequence[str | None], own: Syntax | None, thinks: bool) -> tuple[str, Mapping[str, Any]]:
    """The syntax in which calls are read back from the turns of one and two calls."""
    candidates = dict(SYNTAXES)
    if isinstance(own, Mapping):  # where the turn starts is known
        anchors = ("start_anchor", "start_anchor_pattern")
        own = {name: value for name, value in own.items() if name not in anchors} | {"start_anchor": "\0"}
        candidates = {"own": own, **candidates}
    for name, syntax in candidates.items():
        try:
            read = [None if turn is None else parse_turn(turn, syntax, [EXAMPLE_TOOL], thinks).calls for turn in turns]
        except Exception:  # a tokenizer's own response template comes from outside
            continue
        call = ParsedCall(NAME, {ARGUMENT: VALUE})
        expected = [None if turn is None else [call] * count for count, turn in enumerate(turns, 1)]
        if [found and [each._replace(id=None) for each in found] for found in read] == expected:
            return name, syntax
    raise NotNative("its chat template writes calls in a syntax that is not known")


def _find_transform(rendered: Mapping[str, Rendered], layout: Layout) -> str:
    """What the template does to the text of a result."""
    for name, transform in TRANSFORMS.items():
        before, after = layout.around(0, True, NAME, f"{CALL_ID}1", "")
        if all(
            (rendered[f"probe {number}"].text or "").endswith(layout.end + before + transform(probe) + after)
            for number, probe in enumerate(_PROBES)
        ):
            return name
    raise NotNative("its chat template rewrites the text of a tool's result")


def _written_calls(text: str | None, alone: str | None, end: str) -> tuple[str | None, str | None]:
    """A call after text, and alone, as the template writes them; None where the arguments are not written as JSON."""
    found: list[str | None] = []
    after_text = None
    if text is not None and CONTENT in text:
        rest = text.partition(CONTENT)[2]
        after_text = rest[: rest.rindex(VALUE) + rest[rest.rindex(VALUE) :].index(end)] if VALUE in rest else None
    for turn in (after_text, alone):
        usable = turn is not None and turn.count(EXAMPLE_ARGS) == 1 and not re.search(rf"{CALL_ID}\d", turn)
        found.append(turn if usable else None)
    return found[0], found[1]
