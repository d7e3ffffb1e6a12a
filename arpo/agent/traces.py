"""Reading traces: rows of a file become conversations in the call format of the run.

A row has one of three layouts:

    {"messages": [...]}                     OpenAI's: one user message, then assistant and tool messages, alternating
    {"question": ..., "text": ...}          what follows the question, with tags and <result>...</result>; calls in
                                            tags are brought into the run's format
    {"question": ..., "segments": [...]}    the same in pieces, {"by": "model" or "tool", "text": ...}, taken verbatim

Of the last two, a row may have `images`, a list of data URLs, and so may a result among the segments.

Guarantees: every row becomes a trace or a problem that names the row and says why. Each turn of the model ends where
sampling would have stopped: at a call that can be parsed, or at the closed answer. A system message is the task's own.
Not covered: whether a call's arguments make sense and what a tool would return; several calls in one turn.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from arpo.agent.formats import ANSWER_STOP, CallFormat, TagFormat
from arpo.data.images import from_data_url
from arpo.data.rows import read_rows, source_name
from arpo.data.tasks import Row, Segment, Trace, question_of
from arpo.types import Image, Kind, Task, ToolCall

LAYOUTS = ("messages", "text", "segments")
_RESULT = re.compile(r"<result>(.*?)</result>", re.DOTALL)


class TraceReading(NamedTuple):
    """The traces of a source, and what is wrong with the other rows."""

    traces: tuple[Trace, ...]
    problems: tuple[str, ...]


def read_traces(source: str, fmt: CallFormat) -> TraceReading:
    """Read every row of a file or of a data set of the hub."""
    traces: list[Trace] = []
    problems: list[str] = []
    for row in read_rows(source):
        try:
            traces.append(_parse_trace(row.parse(), f"{source_name(source)}:{row.number}", fmt))
        except ValueError as error:
            problems.append(f"{source}, {row.place}: {error}")
    return TraceReading(tuple(traces), tuple(problems))


def check_segments(segments: Sequence[Segment], fmt: CallFormat) -> None:
    """Raise ValueError, with the reason, unless a rollout could have produced these turns and results."""
    if not segments or [kind for kind, _ in segments] != ([Kind.MODEL, Kind.TOOL] * len(segments))[: len(segments)]:
        raise ValueError("turns of the model and results of tools should alternate, the model first")
    for number, (kind, text) in enumerate(segments):
        if re.search("[\ud800-\udfff]", text):
            raise ValueError("a text holds half a character (a lone surrogate)")
        if kind is Kind.MODEL:
            _check_turn(text, number == len(segments) - 1, fmt)
    if segments[-1][0] is not Kind.MODEL:
        raise ValueError("nothing follows the last result; a trace should end with the answer")


def _check_turn(text: str, last: bool, fmt: CallFormat) -> None:
    if not fmt.stops or (last and fmt.answer != "tag"):
        _check_ended_turn(text, last, fmt)
        return
    found = [(text.index(stop), stop) for stop in fmt.stops if stop in text]
    place, stop = min(found, default=(0, None))
    if stop is None or text[place + len(stop) :].strip() or (stop == ANSWER_STOP) != last:
        calls = " or ".join(stop for stop in fmt.stops if stop != ANSWER_STOP) or "a call (there are no tools)"
        expected = ANSWER_STOP if last else calls
        found_stop = "holds neither a call nor an answer" if stop is None else f"stops at the first {stop}"
        raise ValueError(f"a turn {found_stop}, expected it to end with its first {expected}: {_short(text)}")
    _check_calls(fmt.find_calls(text, stop))


def _check_ended_turn(text: str, last: bool, fmt: CallFormat) -> None:
    """Check a turn of a format in which turns end with a token, not with a stop string."""
    calls = fmt.find_calls(text, None)
    if bool(calls) == last:
        what = "with a call is the last one" if calls else "that is not the last one holds no call"
        raise ValueError(f"a turn {what}: {_short(text)}")
    if last and not fmt.is_answered(text, None):
        raise ValueError(f"the last turn holds no answer that answer.parse={fmt.answer} can read: {_short(text)}")
    if len(calls) > 1:
        raise ValueError(f"{len(calls)} calls in one turn; only one at a time is supported in traces")
    _check_calls(calls)


def _check_calls(calls: Sequence[ToolCall]) -> None:
    for call in calls:
        if call.error is not None:
            raise ValueError(f"a call cannot be parsed: {call.error}")


def _parse_trace(row: Row, name: str, fmt: CallFormat) -> Trace:
    layouts = [layout for layout in LAYOUTS if row.get(layout) is not None]
    if len(layouts) != 1:
        got = ", ".join(layouts) or "none of them"
        raise ValueError(f"expected one of the columns {', '.join(LAYOUTS)}, got {got}")
    value = row[layouts[0]]
    shown: tuple[tuple[Image, ...], ...] = ()
    if layouts == ["messages"]:
        question, system, segments = _from_messages(value, fmt)
    else:
        question, system = question_of(row), ""
        segments = _from_text(value) if layouts == ["text"] else _from_segments(value)
        if layouts == ["segments"] and any(piece.get("images") for piece in value):
            shown = tuple(_images(piece) for piece in value)
        segments = [(kind, _translate(text, fmt) if kind is Kind.MODEL else text) for kind, text in segments]
    last = len(segments) - 1
    segments = [
        (kind, fmt.end_turn(text, number == last) if kind is Kind.MODEL else text)
        for number, (kind, text) in enumerate(segments)
    ]
    check_segments(segments, fmt)
    answer = row.get("answer")
    answers = tuple(map(str, answer if isinstance(answer, list) else [answer])) if answer else ()
    task = Task(str(row.get("id") or name), question, answers, system=system, images=_images(row))
    return Trace(task, tuple(segments), shown)


def _images(value: Mapping[str, Any]) -> tuple[Image, ...]:
    """The images of a row, or of a result in it: a list of texts as `Trace.to_json` writes them."""
    images = value.get("images") or []
    if not isinstance(images, list):
        raise ValueError(f"images should be a list, got {_short(images)}")
    if images and value.get("by") == "model":
        raise ValueError("a turn of the model has images")
    return tuple(map(from_data_url, images))


def _translate(text: str, fmt: CallFormat) -> str:
    """A turn in the run's format, if its call is written in tags; else as it stands."""
    tags = TagFormat(fmt.specs)
    stop = min(((text.index(stop), stop) for stop in tags.call_stops if stop in text), default=(0, None))[1]
    if fmt.name == tags.name or stop is None:
        return text
    [call] = tags.find_calls(text, stop)
    return text if call.error is not None else fmt.write_turn(text[: text.rindex(f"<{call.name}>")].rstrip(), call)


def _from_segments(value: Any) -> list[Segment]:
    if not isinstance(value, list) or not all(isinstance(piece, Mapping) for piece in value):
        raise ValueError('segments should be a list of {"by": ..., "text": ...}')
    for piece in value:
        if piece.get("by") not in ("model", "tool") or not isinstance(piece.get("text"), str):
            raise ValueError(f'a segment should be {{"by": "model" or "tool", "text": ...}}, got {_short(piece)}')
    return [(Kind(piece["by"]), piece["text"]) for piece in value]


def _from_text(value: Any) -> list[Segment]:
    """Turns and results of a text with tags; line breaks around a result are layout and are dropped."""
    if not isinstance(value, str):
        raise ValueError(f"text should be a string, got {_short(value)}")
    first, *rest = _RESULT.split(value.strip())  # turns and results, alternating
    segments = [(Kind.MODEL, first.rstrip())]
    for result, turn in zip(rest[::2], rest[1::2], strict=True):
        segments += [(Kind.TOOL, result.strip("\n")), (Kind.MODEL, turn.lstrip("\n").rstrip())]
    return segments if segments[-1][1] else segments[:-1]


def _from_messages(value: Any, fmt: CallFormat) -> tuple[str, str, list[Segment]]:
    """The question, the system message and the segments of a conversation."""
    if not isinstance(value, list) or not all(isinstance(message, Mapping) for message in value):
        raise ValueError("messages should be a list of objects with role and content")
    messages = [message for message in value if message.get("role") != "system"]
    system = "\n\n".join(_content(message).strip() for message in value if message.get("role") == "system")
    roles = [message.get("role") for message in messages]
    if roles[:1] != ["user"] or not {*roles[1:]} <= {"assistant", "tool"}:
        shown = ", ".join(map(str, roles)) or "none"
        raise ValueError(f"expected one user message, then assistant and tool messages, got: {shown}")
    segments = [
        (Kind.TOOL, _content(message)) if message["role"] == "tool" else (Kind.MODEL, _assistant_text(message, fmt))
        for message in messages[1:]
    ]
    return _content(messages[0]), system, segments


def _assistant_text(message: Mapping[str, Any], fmt: CallFormat) -> str:
    """The text of an assistant message, with its tool call in the call format."""
    text, calls = _content(message), message.get("tool_calls") or []
    if len(calls) > 1:
        raise ValueError(f"{len(calls)} calls in one message; only one at a time is supported")
    made = None
    for call in calls:
        function = call.get("function") if isinstance(call, Mapping) else None
        name, args = (
            (function.get("name"), function.get("arguments")) if isinstance(function, Mapping) else (None, None)
        )
        if isinstance(args, str):
            try:
                args = json.loads(args)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"the arguments of a call are not JSON ({error})") from None
        if not isinstance(name, str) or not isinstance(args, Mapping):
            raise ValueError(f"a call should have a function with name and arguments, got {_short(call)}")
        made = ToolCall(name, dict(args))
    return fmt.write_turn(text, made).rstrip()


def _content(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if content is None and message.get("role") == "assistant":
        return ""
    if isinstance(content, list) and all(isinstance(p, Mapping) and isinstance(p.get("text"), str) for p in content):
        return "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise ValueError(f"the content of a message should be text, got {_short(content)}")
    return content


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:40]}...{text[-37:]}"
