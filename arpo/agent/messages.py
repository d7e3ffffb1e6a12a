"""Chat messages of a program that asks at an OpenAI-style endpoint: compared, turned into tokens, and answered.

    encoder = ChatEncoder(tokenizer, "auto")
    request = read_request({"messages": [{"role": "user", "content": "..."}], "tools": [...]})
    fmt = encoder.format(request)                          # the call format, with the tools of the request
    tokens = encoder.encode_start(fmt, request.messages, {})
    reply = encoder.build_reply(fmt, request, tokens, text, finish, stop, number=0)
    reply.body("arpo")                                     # what the endpoint sends back

Tools are described, and calls are found, as in rollouts: in the model's own format or in that of `rollout.format`.
Guarantees: sampled tokens are never tokenized again; where a message is a reply that was sampled before, its tokens are
used. Texts of messages cannot become control tokens. What a request asks for and cannot get is a `BadRequest`.
Not covered: images and other media; `response_format`; `tool_choice`, which is accepted and has no effect.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

from arpo.agent.answers import without_thoughts
from arpo.agent.formats import (
    CallFormat,
    NativeFormat,
    ResultPlace,
    build_format,
    drops_thoughts,
    encode_example_turn,
    encode_message,
    encode_prompt,
    encode_result,
)
from arpo.config.plugins import NO_OBJECTS, Objects
from arpo.config.section import MAX_TREE_TOKENS
from arpo.types import ToolCall, ToolSpec

FINISH = {"length": "length"}  # other reasons are "stop", or "tool_calls"
HARMLESS: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "logprobs": (False,),
    "response_format": ({"type": "text"},),
    "audio": (),
    "functions": ([],),
}
"""What the endpoint does not do, with the values that do not ask for it; null is one of them, too."""
MAX_STOPS = 16
MAX_FORMATS = 64  # call formats that are kept, by the tools of a request

_SURROGATE = re.compile("[\ud800-\udfff]")
_OPENING = re.compile(r"<[^>]*>|\[[^\]]*\]|\{")  # what a call starts with


class BadRequest(ValueError):
    """A request that cannot be answered; the text says why."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message, so that equal ones are equal: `calls` are (id, name, arguments as sorted JSON)."""

    role: str  # system, user, assistant or tool
    text: str
    calls: tuple[tuple[str, str, str], ...] = ()
    call_id: str = ""


@dataclass(frozen=True, slots=True)
class Request:
    """What a program asks for. Two equal requests are the same question."""

    messages: tuple[Message, ...]
    tools: str = "[]"  # as JSON, in the order in which the program describes them
    stop: tuple[str, ...] = ()
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Reply:
    """A sampled turn as the program sees it, with its exact tokens and text."""

    message: Message
    tokens: tuple[int, ...]
    text: str
    calls: tuple[ToolCall, ...]  # as they were found, in the order of the message's
    finish: str
    thoughts: str = ""
    prompt_tokens: int = 0

    def body(self, model: str) -> dict[str, Any]:
        """The reply as JSON of the chat API."""
        message: dict[str, Any] = {"role": "assistant", "content": self.message.text or None, "refusal": None}
        if self.thoughts:
            message["reasoning_content"] = self.thoughts
        if self.message.calls:
            message["tool_calls"] = [
                {
                    "id": call_id,
                    "type": "function",
                    "function": {"name": name, "arguments": json.dumps(dict(call.args))},
                }
                for (call_id, name, _), call in zip(self.message.calls, self.calls, strict=True)
            ]
        else:
            message["content"] = self.message.text
        count = len(self.tokens)
        usage = {"prompt_tokens": self.prompt_tokens, "completion_tokens": count}
        return {
            "id": "chatcmpl-arpo",
            "object": "chat.completion",
            "created": 0,
            "model": model,
            "choices": [{"index": 0, "message": message, "finish_reason": self.finish, "logprobs": None}],
            "usage": {**usage, "total_tokens": self.prompt_tokens + count},
        }


def read_request(body: Any) -> Request:
    """The request in a JSON body."""
    if not isinstance(body, Mapping) or not isinstance(body.get("messages"), list) or not body["messages"]:
        raise BadRequest("messages: expected a list of messages")
    for name, harmless in HARMLESS.items():
        if body.get(name) is not None and body[name] not in harmless:
            raise BadRequest(f"{name}: this endpoint does not support {body[name]!r:.100}")
    messages = tuple(map(_read_message, body["messages"]))
    if messages[-1].role == "assistant":
        raise BadRequest("messages: the last one is the assistant's, so there is nothing to answer")
    tools = body.get("tools") or []
    if not isinstance(tools, list) or not all(map(_is_function, tools)):
        raise BadRequest("tools: expected a list of functions, whose parameters are a schema")
    stop = body.get("stop") or []
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or len(stop) > MAX_STOPS or not all(isinstance(each, str) and each for each in stop):
        raise BadRequest(f"stop: expected a text, or a list of at most {MAX_STOPS} that are not empty")
    limits = [body[name] for name in ("max_tokens", "max_completion_tokens") if body.get(name) is not None]
    if not all(isinstance(limit, int) and limit > 0 for limit in limits):
        raise BadRequest("max_tokens: expected a number of tokens from 1 on")
    written = _whole(json.dumps(tools, ensure_ascii=False))
    return Request(messages, written, tuple(map(_whole, stop)), min(limits, default=None))


def _is_function(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    return isinstance(function, Mapping) and isinstance(function.get("parameters") or {}, Mapping)


def _whole(text: str) -> str:
    """The text with a replacement character for each half of one, which no tokenizer takes."""
    return _SURROGATE.sub("\ufffd", text)


def _read_message(value: Any) -> Message:
    if not isinstance(value, Mapping):
        raise BadRequest(f"messages: got {value!r:.100}, expected an object")
    role, text = value.get("role"), _read_text(value.get("content"))
    role = "system" if role == "developer" else role
    if role not in ("system", "user", "assistant", "tool"):
        raise BadRequest(f"messages: there is no role {role!r:.50}")
    if role != "assistant":
        return Message(str(role), text, call_id=str(value.get("tool_call_id") or "") if role == "tool" else "")
    try:
        calls = [(str(call["id"]), call["function"]) for call in value.get("tool_calls") or ()]
        said = tuple((call_id, _whole(str(f["name"])), _sorted_json(f["arguments"])) for call_id, f in calls)
        return Message("assistant", text.strip(), said)
    except (KeyError, TypeError):
        raise BadRequest("messages: a tool call has no id, name or arguments") from None


def _read_text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return _whole(content or "")
    if isinstance(content, list) and all(isinstance(part, Mapping) and part.get("type") == "text" for part in content):
        return _whole("".join(str(part.get("text", "")) for part in content))
    raise BadRequest("messages: only text is supported as content")


def _sorted_json(arguments: Any) -> str:
    """Arguments in one spelling; as they are if they are no JSON."""
    try:
        value = json.loads(arguments) if isinstance(arguments, str) else arguments
        return _whole(json.dumps(value, sort_keys=True, ensure_ascii=False))
    except (ValueError, RecursionError):
        return _whole(str(arguments))


def continuation(request: Request, earlier: Request, reply: Reply) -> tuple[Message, ...] | None:
    """The messages that follow a reply, if the request continues that conversation; None if it does not."""
    known = (*earlier.messages, reply.message)
    same = request.tools == earlier.tools and request.messages[: len(known)] == known
    return request.messages[len(known) :] if same else None


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens that messages add to a conversation: the result of a call, or anything else."""

    tokens: tuple[int, ...]
    text: str  # of the tokens
    result: str  # what the messages say
    call: ToolCall | None = None


Turns = Mapping[Message, Reply]
"""Replies that were sampled before, by their message."""


@dataclass(frozen=True, slots=True)
class ChatEncoder:
    """Turns messages into tokens, in the call format that the settings name."""

    tokenizer: Any
    format_name: str
    answer: str | None = None
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    objects: Objects = field(default_factory=lambda: NO_OBJECTS)
    end_texts: tuple[str, ...] = ()
    _formats: dict[str, CallFormat] = field(default_factory=dict, compare=False, repr=False)

    def format(self, request: Request) -> CallFormat:
        """The call format with the tools of a request; an ArpoError if it cannot express them."""
        if request.tools not in self._formats:
            specs = [_spec(each["function"]) for each in json.loads(request.tools)]
            fmt = build_format(
                self.format_name, specs, self.tokenizer, self.answer, self.template_arguments, self.objects
            )
            ends = tuple(sorted({*fmt.end_texts, *self.end_texts}))
            if len(self._formats) >= MAX_FORMATS:
                self._formats.clear()
            self._formats[request.tools] = replace(fmt, end_texts=ends)
        return self._formats[request.tools]

    def encode_start(self, fmt: CallFormat, messages: Sequence[Message], turns: Turns) -> tuple[int, ...]:
        """The tokens of a whole conversation, up to where the model starts to write."""
        count = next((n for n, message in enumerate(messages) if message.role != "system"), len(messages))
        first = next((n for n, each in enumerate(messages[count:], count) if each.role != "user"), len(messages))
        if first == count:
            raise BadRequest("messages: the first one after the system's must be the user's")
        own = "\n\n".join(message.text for message in messages[:count]) or None
        question = "\n\n".join(message.text for message in messages[count:first])
        system = "" if own is None and (not fmt.specs or fmt.name == "native") else fmt.system_prompt(own)
        tokens = encode_prompt(self.tokenizer, question, system, fmt)
        more = self.encode_more(fmt, tokens, None, messages[first:], turns)
        return (*tokens, *(token for piece in more for token in piece.tokens))

    def continues(self, fmt: CallFormat, before: Sequence[Message], more: Sequence[Message], turns: Turns) -> bool:
        """Whether messages can be appended: the chat template does not change the turns before them."""
        if fmt.name != "native" or not any(message.role in ("user", "system") for message in more):
            return True
        thoughtful = any("</think>" in turns[message].text for message in before if message in turns)
        return not (thoughtful and drops_thoughts(self.tokenizer, fmt))

    def encode_more(
        self, fmt: CallFormat, history: Sequence[int], last: Reply | None, messages: Sequence[Message], turns: Turns
    ) -> list[Piece]:
        """What messages add to a conversation that ended with the turn `last`: one piece per tool result, or one."""
        tokens, pieces = list(history), list[Piece]()
        questions = [n for n, message in enumerate(messages) if message.role in ("user", "system")]
        drops = fmt.name == "native" and bool(questions) and drops_thoughts(self.tokenizer, fmt)
        place = 0
        for role, group in groupby(messages, key=lambda each: "user" if each.role == "system" else each.role):
            run = list(group)
            if role == "assistant":
                for number, message in enumerate(run, place):
                    last = self._turn(fmt, message, turns, drops and number < questions[-1])
                    pieces.append(Piece(last.tokens, last.text, message.text))
                    tokens += last.tokens
            elif role == "tool":
                added = self._results(fmt, run, last)
                pieces += added
                tokens += [token for piece in added for token in piece.tokens]
            else:
                text = "\n\n".join(message.text for message in run)
                ids = encode_message(self.tokenizer, tokens, text, fmt)
                pieces.append(Piece(ids, self.tokenizer.decode(list(ids)), text))
                tokens += ids
            place += len(run)
        if len({message.role for message in messages}) > 1:  # one piece of everything
            text, said = "".join(piece.text for piece in pieces), "\n\n".join(piece.result for piece in pieces)
            return [Piece(tuple(tokens[len(history) :]), text, said)]
        return pieces

    def _turn(self, fmt: CallFormat, message: Message, turns: Turns, drop_thoughts: bool) -> Reply:
        """An assistant's message as a turn: with the tokens that were sampled, or written as the format does."""
        known = turns.get(message)
        if known is not None and not (drop_thoughts and "</think>" in known.text):
            return known
        if known is not None:
            text, calls = known.text.rpartition("</think>")[2].lstrip("\n"), known.calls
        else:
            calls = tuple(_call(*call) for call in message.calls)
            if len(calls) > 1:
                raise BadRequest("messages: several calls in a message that was not sampled here")
            try:
                written = fmt.write_turn(message.text, calls[0] if calls else None)
            except ValueError as error:
                raise BadRequest(f"messages: {error}") from None
            text = fmt.end_turn(written, is_last=not calls)
        return Reply(message, tuple(encode_example_turn(self.tokenizer, text, fmt)), text, calls, "stop")

    def _results(self, fmt: CallFormat, results: Sequence[Message], last: Reply | None) -> list[Piece]:
        """The results of the calls of a turn, in the order of the calls."""
        ids = [] if last is None else [call_id for call_id, _, _ in last.message.calls]
        by_id = {message.call_id: message for message in results}
        if last is None or sorted(by_id) != sorted(ids) or len(ids) != len(results):
            raise BadRequest("messages: tool messages must answer each call of the message before them once")
        pieces: list[Piece] = []
        for number, (call_id, call) in enumerate(zip(ids, last.calls, strict=True)):
            previous = last.calls[number - 1] if number else None
            place = ResultPlace(call, number, len(ids), fmt.has_ended(last.text), previous)
            said = by_id[call_id].text
            pieces.append(Piece(*encode_result(self.tokenizer, fmt, said, MAX_TREE_TOKENS, place), said, call))
        return pieces

    def build_reply(
        self,
        fmt: CallFormat,
        request: Request,
        tokens: tuple[int, ...],
        text: str,
        finish: str,
        stop: str | None,
        number: int,
        prompt_tokens: int = 0,
    ) -> Reply:
        """The reply of a sampled turn, the `number`-th of its program. A call that cannot be used stays text."""
        own_stop = stop if finish == "stop" and stop in request.stop and stop not in fmt.stops else None
        said = text.partition(own_stop)[0] if own_stop else text
        message = fmt.message(said)
        found = fmt.find_calls(said, None if own_stop else stop) if finish != "length" and fmt.specs else ()
        calls = () if any(call.error for call in found) else found
        opened = isinstance(fmt, NativeFormat) and fmt.layout.opens_thoughts and "</think>" not in message
        content = "" if opened else without_thoughts(message)
        thoughts = message[: len(message) - len(content)].strip() if message.endswith(content) else ""
        if calls:
            content = _before_call(content, fmt, calls[0])
        listed = tuple(
            (f"call_{number}_{place}", call.name, json.dumps(dict(call.args), sort_keys=True, ensure_ascii=False))
            for place, call in enumerate(calls)
        )
        reason = "tool_calls" if calls else FINISH.get(finish, "stop")
        answer = Message("assistant", content.strip(), listed)
        return Reply(answer, tokens, text, calls, reason, _plain_thoughts(thoughts), prompt_tokens)


def _before_call(content: str, fmt: CallFormat, call: ToolCall) -> str:
    """The text before the first call of a turn; empty if the format does not say where that begins."""
    if isinstance(fmt, NativeFormat):
        opening = _OPENING.match((fmt.layout.call_alone or "").strip())
        mark = "" if opening is None else opening[0]
    else:
        mark = "<tool_call>" if fmt.name == "json" else f"<{call.name}>"
    return content.partition(mark)[0] if mark and mark in content else ""


def _plain_thoughts(thoughts: str) -> str:
    return thoughts.removeprefix("<think>").removesuffix("</think>").strip()


def _spec(function: Mapping[str, Any]) -> ToolSpec:
    schema = function.get("parameters") or {"type": "object", "properties": {}}
    return ToolSpec(str(function.get("name", "")), str(function.get("description") or ""), schema)


def _call(call_id: str, name: str, arguments: str) -> ToolCall:
    try:
        args = json.loads(arguments)
    except (ValueError, RecursionError):
        args = None
    if not isinstance(args, dict):
        raise BadRequest(f"messages: the arguments of a call of {name} are no JSON object")
    return ToolCall(name, args, id="")
