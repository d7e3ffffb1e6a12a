"""Traces as training examples: the token ids that a rollout with the same turns and results would have."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Any

from arpo.agent.formats import CallFormat, encode_prompt, encode_result
from arpo.data.tasks import Trace
from arpo.types import Credit, Kind, Leaf, Node, RolloutTree, ScoredTree, StopReason, Task, ToolResult


@dataclass(frozen=True, slots=True)
class SFTExample:
    """A trace as token ids: the prompt, then the model's turns and the tools' results."""

    task: Task
    segments: tuple[tuple[Kind, array[int]], ...]

    @property
    def num_tokens(self) -> int:
        """Tokens of all segments."""
        return sum(len(ids) for _, ids in self.segments)

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
            for number, (kind, ids) in enumerate(self.segments)
        ]
        tree = RolloutTree(self.task, tuple(nodes), (Leaf(len(nodes) - 1, StopReason.ANSWER),))
        credit = Credit(1.0, {index: 1.0 for index, (kind, _) in enumerate(self.segments) if kind is Kind.MODEL})
        return ScoredTree(tree, credits=(credit,))


def encode_trace(trace: Trace, tokenizer: Any, fmt: CallFormat, result_tokens: int | None = None) -> SFTExample:
    """Tokenize a trace segment by segment, as a rollout does; results are cut to `result_tokens`, if given."""
    segments = [(Kind.PROMPT, array("i", encode_prompt(tokenizer, trace.task.question, fmt.instructions)))]
    for kind, text in trace.segments:
        if kind is Kind.MODEL:
            ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        else:
            ids = encode_result(tokenizer, fmt, text, len(text) if result_tokens is None else result_tokens)[0]
        segments.append((kind, array("i", ids)))
    return SFTExample(trace.task, tuple(segments))
