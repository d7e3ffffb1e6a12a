"""Few-shot examples: traces that stand at the beginning of every prompt, as earlier turns of the conversation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from arpo.agent.formats import (
    CallFormat,
    ResultPlace,
    encode_example_turn,
    encode_next_question,
    encode_prompt,
    encode_result,
    place_after,
)
from arpo.agent.traces import read_traces
from arpo.data.rows import list_problems
from arpo.data.tasks import Trace
from arpo.errors import ArpoError
from arpo.types import Kind


def read_examples(source: str | None, fmt: CallFormat) -> tuple[Trace, ...]:
    """The traces that `rollout.examples` names; every row must be a trace."""
    if source is None:
        return ()
    traces, problems = read_traces(source, fmt)
    if problems or not traces:
        error = list_problems(problems) if problems else f"{source}: holds no traces"
        raise ArpoError(f"{error}\n(these are rollout.examples)")
    return traces


def encode_examples(
    traces: Sequence[Trace], tokenizer: Any, fmt: CallFormat, result_tokens: int, system: str | None = None
) -> tuple[int, ...]:
    """The token ids of the system prompt (by default that of the format) and the examples; empty without examples."""
    system = fmt.system_prompt() if system is None else system
    ids: list[int] = []
    for trace in traces:
        if trace.task.images or any(trace.images):
            raise ArpoError("rollout.examples: worked examples are text alone, and one has images; leave it out")
        if ids:
            ids += encode_next_question(tokenizer, ids, trace.task.question, fmt)
        else:
            ids += encode_prompt(tokenizer, trace.task.question, system, fmt)
        place = ResultPlace()
        for kind, text in trace.segments:
            if kind is Kind.MODEL:
                ids += encode_example_turn(tokenizer, text, fmt)
                place = place_after(fmt, text)
            else:
                ids += encode_result(tokenizer, fmt, text, result_tokens, place)[0]
    return tuple(ids)
