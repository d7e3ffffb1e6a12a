"""Traces that are taught: rows of a file to conversations, and conversations to the tokens that a rollout would have.

A row has one of three layouts:

    {"messages": [...]}                     one message of the user's, then assistant and tool in turn (OpenAI's layout)
    {"question": ..., "text": ...}          what follows the question, in tags, with <result>...</result> in it
    {"question": ..., "segments": [...]}    the same in pieces, {"by": "model" or "tool", "text": ...}, taken verbatim

Promises: every row becomes a trace or a problem that names it and says why. In a trace each turn of the model's ends
where sampling would have stopped, at a call that can be read or at the closed answer; prompt, turns and results are
tokenised piece by piece, as in a rollout, and only the model's own tokens are marked as such. System messages are left
out: the prompt explains the tools.
Does not cover: whether a call's arguments make sense and what a tool would answer; several calls at a time.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from arpo.agent.formats import (
    ANSWER_STOP,
    CallFormat,
    encode_example_turn,
    encode_next_question,
    encode_prompt,
    encode_result,
)
from arpo.data.rows import read_rows, source_name
from arpo.data.tasks import Row, complaint, question_of
from arpo.data.traces import Segment, Trace
from arpo.errors import ArpoError
from arpo.types import Credit, Kind, Leaf, Node, RolloutTree, ScoredTree, StopReason, Task, ToolCall, ToolResult

LAYOUTS = ("messages", "text", "segments")
WRITERS = {"model": Kind.MODEL, "tool": Kind.TOOL}
_RESULT = re.compile(r"<result>(.*?)</result>", re.DOTALL)


@dataclass(frozen=True, slots=True)
class TraceReading:
    """What became of a source: its traces, and what is wrong with the other rows."""

    source: str
    traces: tuple[Trace, ...]
    problems: tuple[str, ...] = ()


def read_traces(source: str, fmt: CallFormat) -> TraceReading:
    """Read every row of a file, or of a data set of the hub."""
    traces: list[Trace] = []
    problems: list[str] = []
    for row in read_rows(source):
        try:
            traces.append(_trace(row.parse(), f"{source_name(source)}:{row.number}", fmt))
        except ValueError as error:
            problems.append(f"{source}, {row.place}: {error}")
    return TraceReading(source, tuple(traces), tuple(problems))


def require_traces(left: Sequence[object], problems: Sequence[str], source: str, bad_rows: str) -> None:
    """Raise if some rows do not fit and may not be skipped, or if nothing is left."""
    if problems and (bad_rows == "refuse" or not left):
        way_out = ["mend the rows, or leave them out with data.bad_rows=skip"] if left else []
        raise ArpoError("\n".join([complaint(problems), *way_out]))
    if not left:
        raise ArpoError(f"{source}: holds no traces")


def write_row(trace: Trace) -> str:
    """The trace as one line of JSON, in pieces: read again, it has the same tokens."""
    names = {kind: name for name, kind in WRITERS.items()}
    segments = [{"by": names[kind], "text": text} for kind, text in trace.segments]
    row = {"id": trace.task.id, "question": trace.task.question, "answer": list(trace.task.answers)}
    return json.dumps({**row, "segments": segments}, ensure_ascii=False)


def check_segments(segments: Sequence[Segment], fmt: CallFormat) -> None:
    """ValueError, saying why, unless a rollout could have written this: turns and results alternate, and so on."""
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
    found = [(text.index(stop), stop) for stop in fmt.stops if stop in text]
    place, stop = min(found, default=(0, None))
    if stop is None or text[place + len(stop) :].strip() or (stop == ANSWER_STOP) != last:
        calls = " or ".join(stop for stop in fmt.stops if stop != ANSWER_STOP) or "a call (there are no tools)"
        wanted = ANSWER_STOP if last else calls
        seen = "holds neither a call nor an answer" if stop is None else f"stops at the first {stop}"
        raise ValueError(f"a turn {seen}, expected it to end with its first {wanted}: {_short(text)}")
    call = None if last else fmt.find_call(text, stop)
    if call is not None and call.error is not None:
        raise ValueError(f"a call cannot be read: {call.error}")


def _trace(row: Row, name: str, fmt: CallFormat) -> Trace:
    there = [layout for layout in LAYOUTS if row.get(layout) is not None]
    if len(there) != 1:
        raise ValueError(f"expected one of the columns {', '.join(LAYOUTS)}, got {', '.join(there) or 'none of them'}")
    value = row[there[0]]
    if there == ["messages"]:
        question, segments = _from_messages(value, fmt)
    else:
        question = question_of(row)
        segments = _from_text(value) if there == ["text"] else _from_pieces(value)
    check_segments(segments, fmt)
    answers = row.get("answer")
    known = tuple(map(str, answers if isinstance(answers, list) else [answers])) if answers else ("unknown",)
    return Trace(Task(str(row.get("id") or name), question, known), tuple(segments))


def _from_pieces(value: Any) -> list[Segment]:
    if not isinstance(value, list) or not all(isinstance(piece, Mapping) for piece in value):
        raise ValueError('segments should be a list of {"by": ..., "text": ...}')
    for piece in value:
        if piece.get("by") not in WRITERS or not isinstance(piece.get("text"), str):
            raise ValueError(f'a segment should be {{"by": "model" or "tool", "text": ...}}, got {_short(piece)}')
    return [(WRITERS[piece["by"]], piece["text"]) for piece in value]


def _from_text(value: Any) -> list[Segment]:
    """Turns and results of a text in tags. Line breaks around a result belong to whoever wrote the file."""
    if not isinstance(value, str):
        raise ValueError(f"text should be a text, got {_short(value)}")
    first, *rest = _RESULT.split(value.strip())  # turns and results in turn
    segments = [(Kind.MODEL, first.rstrip())]
    for result, turn in zip(rest[::2], rest[1::2], strict=True):
        segments += [(Kind.TOOL, result.strip("\n")), (Kind.MODEL, turn.lstrip("\n").rstrip())]
    return segments if segments[-1][1] else segments[:-1]


def _from_messages(value: Any, fmt: CallFormat) -> tuple[str, list[Segment]]:
    if not isinstance(value, list) or not all(isinstance(message, Mapping) for message in value):
        raise ValueError("messages should be a list of objects with role and content")
    said = [message for message in value if message.get("role") != "system"]
    roles = [message.get("role") for message in said]
    if roles[:1] != ["user"] or not {*roles[1:]} <= {"assistant", "tool"}:
        shown = ", ".join(map(str, roles)) or "none"
        raise ValueError(f"expected one message of the user's, then assistant and tool in turn, got: {shown}")
    segments = [
        (Kind.TOOL, _content(message)) if message["role"] == "tool" else (Kind.MODEL, _written(message, fmt))
        for message in said[1:]
    ]
    return _content(said[0]), segments


def _written(message: Mapping[str, Any], fmt: CallFormat) -> str:
    """A turn of the assistant's, with its call as the model is to write it."""
    text, calls = _content(message), message.get("tool_calls") or []
    if len(calls) > 1:
        raise ValueError(f"{len(calls)} calls in one message; they are made one at a time")
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
        text += fmt.write_call(ToolCall(name, dict(args)))
    return text.rstrip()


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


# --- tokens


@dataclass(frozen=True, slots=True)
class SFTExample:
    """A trace as token ids, piece by piece, the prompt first."""

    task: Task
    pieces: tuple[tuple[Kind, array[int]], ...]

    @property
    def tokens(self) -> int:
        """All of them."""
        return sum(len(ids) for _, ids in self.pieces)

    def scored_tree(self) -> ScoredTree:
        """The tree of one trajectory that a rollout would have produced; every model token has advantage 1."""
        nodes = [
            Node(
                parent=number - 1 if number else None,
                kind=kind,
                tokens=tuple(ids),
                text="",
                logprobs=(0.0,) * len(ids) if kind is Kind.MODEL else (),
                entropies=(0.0,) * len(ids) if kind is Kind.MODEL else (),
                result=ToolResult("") if kind is Kind.TOOL else None,
            )
            for number, (kind, ids) in enumerate(self.pieces)
        ]
        tree = RolloutTree(self.task, tuple(nodes), (Leaf(len(nodes) - 1, StopReason.ANSWER),))
        credit = Credit(1.0, {index: 1.0 for index, (kind, _) in enumerate(self.pieces) if kind is Kind.MODEL})
        return ScoredTree(tree, credits=(credit,))


def encode_trace(trace: Trace, tokenizer: Any, fmt: CallFormat, result_tokens: int | None = None) -> SFTExample:
    """Tokenise a trace as a rollout would; results are cut to `result_tokens`, if given."""
    pieces = [(Kind.PROMPT, array("i", encode_prompt(tokenizer, trace.task.question, fmt.instructions)))]
    for kind, text in trace.segments:
        if kind is Kind.MODEL:
            ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        else:
            ids = encode_result(tokenizer, fmt, text, len(text) if result_tokens is None else result_tokens)[0]
        pieces.append((kind, array("i", ids)))
    return SFTExample(trace.task, tuple(pieces))


def read_examples(source: str | None, fmt: CallFormat) -> tuple[Trace, ...]:
    """The worked examples that `rollout.examples` names; every row must fit."""
    if source is None:
        return ()
    reading = read_traces(source, fmt)
    if reading.problems or not reading.traces:
        wrong = complaint(reading.problems) if reading.problems else f"{source}: holds no traces"
        raise ArpoError(f"{wrong}\n(these are rollout.examples)")
    return reading.traces


def encode_examples(traces: Sequence[Trace], tokenizer: Any, fmt: CallFormat, result_tokens: int) -> tuple[int, ...]:
    """Token ids of worked examples as earlier turns of the conversation, the system prompt first; none for none."""
    ids: list[int] = []
    for trace in traces:
        if ids:
            ids += encode_next_question(tokenizer, ids, trace.task.question)
        else:
            ids += encode_prompt(tokenizer, trace.task.question, fmt.instructions)
        for kind, text in trace.segments:
            if kind is Kind.MODEL:
                ids += encode_example_turn(tokenizer, text)
            else:
                ids += encode_result(tokenizer, fmt, text, result_tokens)[0]
    return tuple(ids)
