"""Requests and replies in OpenAI's form, with one field of our own: `arpo`.

    request = read_request(body, model, max_tokens)   # Refused, with the parameter's name, for what cannot be done
    body = completion(reply, head, events)         # a "chat.completion"; `chunk` is a piece of a stream

Guarantees: nothing that a client sends raises anything but Refused. A parameter that would change the answer and is not
supported is refused, never ignored.
Not covered: the client's own tools, several choices, log-probs, pictures and sound.
"""

from __future__ import annotations

import json
import math
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from arpo.serve.http import Refused
from arpo.types import StopReason

MAX_MESSAGES = 2000
MAX_TEMPERATURE = 2.0
FIELD = "arpo"
"""The field of our own: {"events": true} in a request, what the agent did in replies."""

IGNORED = frozenset(
    ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "parallel_tool_calls")
)
"""Parameters that change nothing in an answer of this server."""
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "stop": ([],),
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "modalities": (["text"],),
    "response_format": ({"type": "text"},),
}
"""Parameters that are accepted only with these values, which change nothing."""
FINISH_REASONS = {
    **dict.fromkeys((StopReason.ANSWER, StopReason.EOS, StopReason.DONE), "stop"),
    **dict.fromkeys((StopReason.LENGTH, StopReason.MAX_TOOL_CALLS, StopReason.MAX_SECONDS), "length"),
}


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """What a client asks for: the messages, as a first question and what was answered and asked next, and options."""

    question: str
    earlier: tuple[tuple[str, str], ...] = ()
    system: str = ""
    stream: bool = False
    include_usage: bool = False  # in the last chunk of a stream
    events: bool = False  # whether it wants to see the agent's work
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer: its text, why it ended, and what was counted."""

    content: str
    stop_reason: StopReason
    prompt_tokens: int
    completion_tokens: int
    tool_calls: int

    @property
    def finish_reason(self) -> str:
        """OpenAI's word for why it ended."""
        return FINISH_REASONS[self.stop_reason]

    @property
    def usage(self) -> dict[str, int]:
        """Tokens of the messages, and tokens that the model wrote in all turns."""
        total = self.prompt_tokens + self.completion_tokens
        counts = {"prompt_tokens": self.prompt_tokens, "completion_tokens": self.completion_tokens}
        return {**counts, "total_tokens": total}

    @property
    def facts(self) -> dict[str, Any]:
        """Why it ended, in our words, and how many calls it took."""
        return {"stop_reason": str(self.stop_reason), "tool_calls": self.tool_calls}


@dataclass(frozen=True, slots=True)
class ReplyHead:
    """What all pieces of a reply have in common."""

    model: str
    id: str = field(default_factory=lambda: f"chatcmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    def fields(self, kind: str) -> dict[str, Any]:
        """The fields at the top of a reply."""
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


def completion(reply: Reply, head: ReplyHead, events: Sequence[Mapping[str, Any]] | None = None) -> dict[str, Any]:
    """A whole reply; with what the agent did, if the client asked for it."""
    message = {"role": "assistant", "content": reply.content, "refusal": None}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": reply.finish_reason}
    body = {**head.fields("chat.completion"), "choices": [choice], "usage": reply.usage}
    return body if events is None else {**body, FIELD: {"events": list(events), **reply.facts}}


def chunk(
    head: ReplyHead, delta: Mapping[str, Any], finish: str | None = None, ours: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """A piece of a stream; `ours` is what the field of our own holds."""
    choice = {"index": 0, "delta": dict(delta), "logprobs": None, "finish_reason": finish}
    body = {**head.fields("chat.completion.chunk"), "choices": [choice]}
    return body if ours is None else {**body, FIELD: dict(ours)}


def usage_chunk(head: ReplyHead, reply: Reply) -> dict[str, Any]:
    """The last piece of a stream, if the client asked for it."""
    return {**head.fields("chat.completion.chunk"), "choices": [], "usage": reply.usage}


def error_body(refused: Refused) -> dict[str, Any]:
    """An error."""
    kind = "invalid_request_error"
    if refused.status == 429:
        kind = "rate_limit_error"
    elif refused.status >= 500:
        kind = "server_error"
    return {"error": {"message": str(refused), "type": kind, "param": refused.parameter, "code": refused.code}}


def dump(value: Mapping[str, Any]) -> bytes:
    """JSON in ASCII, on one line."""
    return json.dumps(value, separators=(",", ":"), default=str).encode("ascii")


def server_sent(value: Mapping[str, Any]) -> bytes:
    """A server-sent event."""
    return b"data: " + dump(value) + b"\n\n"


def read_request(body: bytes, model: str, max_tokens: int) -> ChatRequest:
    """The request in a body, for this model and at most this many tokens."""
    given = _read_json(body)
    given = {name: value for name, value in given.items() if value is not None}
    for name, value in given.items():
        if name in NEUTRAL and not any(_same(value, neutral) for neutral in NEUTRAL[name]):
            _refuse(name, _why_not(name), "unsupported_parameter")
        if name not in _READ and name not in NEUTRAL and name not in IGNORED:
            _refuse(name, f"there is no parameter {name!r}"[:200], "unknown_parameter")
    named = _typed(given, "model", str, "a text", None)
    if named is None:
        _refuse("model", f"the name of a model is missing; this server has {model!r}", "missing_required_parameter")
    if named != model:
        raise Refused(404, f"there is no model {named[:200]!r}; this server has {model!r}", "model_not_found", "model")
    question, earlier, system = _read_messages(given.get("messages"))
    stream = _typed(given, "stream", bool, "true or false", False)
    options = _typed(given, "stream_options", dict, "an object", {})
    ours = _typed(given, FIELD, dict, "an object", {})
    if unknown := set(ours) - {"events"}:
        _refuse(FIELD, f"has no field {min(unknown)!r}"[:200] + "; there is only events", "unknown_parameter")
    limit = _typed(given, "max_completion_tokens", int, "a number", _typed(given, "max_tokens", int, "a number", None))
    if limit is not None and not 1 <= limit <= max_tokens:
        name = "max_completion_tokens" if "max_completion_tokens" in given else "max_tokens"
        _refuse(name, f"got {limit}, expected 1 to {max_tokens}, the limit of this server")
    return ChatRequest(
        question,
        earlier,
        system,
        stream,
        stream and _typed(options, "include_usage", bool, "true or false", False),
        _typed(ours, "events", bool, "true or false", False),
        limit,
        _number(given, "temperature", 0.0, MAX_TEMPERATURE),
        _number(given, "top_p", 1e-6, 1.0),
        _seed(given),
    )


_READ = frozenset(
    {
        *("model", "messages", "stream", "stream_options", "max_tokens", "max_completion_tokens", "temperature"),
        *("top_p", "seed", FIELD),
    }
)


def _refuse(parameter: str, message: str, code: str | None = None) -> NoReturn:
    raise Refused(400, f"{parameter[:100]}: {message}", code, parameter[:100])


def _why_not(name: str) -> str:
    if name in ("tools", "functions", "tool_choice", "function_call"):
        return "the agent uses its own tools and cannot call those of a client; leave this out"
    return f"only {' or '.join(json.dumps(value) for value in NEUTRAL[name])} is supported; leave this out"


def _same(a: Any, b: Any) -> bool:
    """Whether two JSON values are equal; 1 is not true."""
    return isinstance(a, bool) == isinstance(b, bool) and bool(a == b)


def _read_json(body: bytes) -> dict[str, Any]:
    try:
        value = json.loads(body.decode("utf-8"), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)[:200]
        raise Refused(400, f"the body is not JSON in UTF-8: {reason}") from None
    if not isinstance(value, dict):
        raise Refused(400, "the body is JSON, but not an object")
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _typed(given: Mapping[str, Any], name: str, kind: type, expected: str, default: Any) -> Any:
    value = given.get(name)
    if value is None:
        return default
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        _refuse(name, f"got {_shown(value)}, expected {expected}")
    return value


def _number(given: Mapping[str, Any], name: str, least: float, most: float) -> float | None:
    value = given.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        _refuse(name, f"got {_shown(value)}, expected a number from {least:g} to {most:g}")
    return float(value)


def _seed(given: Mapping[str, Any]) -> int | None:
    seed: int | None = _typed(given, "seed", int, "a whole number", None)
    if seed is not None and not -(2**63) <= seed < 2**63:
        _refuse("seed", "expected a whole number of 64 bits")
    return seed


def _shown(value: Any) -> str:
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    if isinstance(value, float) and not math.isfinite(value):
        return "a number that is too large"
    return json.dumps(value)[:100]


def _read_messages(given: Any) -> tuple[str, tuple[tuple[str, str], ...], str]:
    """The first question, what was answered and asked next, and the system message."""
    if not isinstance(given, list) or not given:
        _refuse("messages", "expected a list with at least one message")
    if len(given) > MAX_MESSAGES:
        _refuse("messages", f"there are {len(given):,}; at most {MAX_MESSAGES:,} are read")
    system: list[str] = []
    turns: list[tuple[str, list[str]]] = []  # messages of one role in a row are one turn
    for number, message in enumerate(given):
        role, text = _read_message(f"messages[{number}]", message)
        if role == "system" and turns:
            _refuse(f"messages[{number}]", "system messages come first")
        if role == "system":
            system.append(text)
        elif turns and turns[-1][0] == role:
            turns[-1][1].append(text)
        else:
            turns.append((role, [text]))
    if not turns or turns[0][0] != "user" or turns[-1][0] != "user":
        _refuse("messages", "the first message after those of the system, and the last one, must be the user's")
    texts = ["\n\n".join(parts) for _, parts in turns]
    for number in range(0, len(texts), 2):
        if not texts[number].strip():
            _refuse("messages", "a message of the user's is empty")
    return texts[0], tuple(zip(texts[1::2], texts[2::2], strict=True)), "\n\n".join(system)


_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


def _read_message(place: str, message: Any) -> tuple[str, str]:
    if not isinstance(message, dict):
        _refuse(place, f"got {_shown(message)}, expected an object")
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        _refuse(f"{place}.role", f"got {_shown(role)}, expected one of {', '.join(_ROLES)}")
    if message.get("tool_calls") or message.get("function_call"):
        _refuse(place, "calls of a client's tools are not supported; the agent uses its own tools")
    text = _text(f"{place}.content", message.get("content"))
    try:
        text.encode()
    except UnicodeEncodeError:
        _refuse(f"{place}.content", "holds half a character (a lone surrogate)")
    return _ROLES[role], text


def _text(place: str, content: Any) -> str:
    """The text of a message: a string, or parts of type text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        _refuse(place, f"got {_shown(content)}, expected a text or a list of parts")
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        if not isinstance(text, str):
            _refuse(place, "expected parts of type text; the agent reads nothing else")
        texts.append(text)
    return "".join(texts)
