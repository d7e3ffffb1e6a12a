"""Traces as training examples: the token ids that a rollout with the same turns and results would have."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

from arpo.agent.formats import CallFormat, ResultPlace, encode_prompt, encode_result, place_after
from arpo.data.images import refuse_images
from arpo.data.tasks import Trace
from arpo.types import Credit, Image, Kind, Leaf, Node, RolloutTree, ScoredTree, StopReason, Task, ToolResult

if TYPE_CHECKING:
    from arpo.models.vision import VisionTower


@dataclass(frozen=True, slots=True)
class SFTExample:
    """A trace as token ids: the prompt, then the model's turns and the tools' results.

    `images` has those of each segment, if some have any.
    """

    task: Task
    segments: tuple[tuple[Kind, array[int]], ...]
    images: tuple[tuple[Image, ...], ...] = ()

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
                images=self.images[number] if self.images else (),
            )
            for number, (kind, ids) in enumerate(self.segments)
        ]
        tree = RolloutTree(self.task, tuple(nodes), (Leaf(len(nodes) - 1, StopReason.ANSWER),))
        credit = Credit(1.0, {index: 1.0 for index, (kind, _) in enumerate(self.segments) if kind is Kind.MODEL})
        return ScoredTree(tree, credits=(credit,))


def encode_trace(
    trace: Trace,
    tokenizer: Any,
    fmt: CallFormat,
    result_tokens: int | None = None,
    system: str | None = None,
    vision: VisionTower | None = None,
) -> SFTExample:
    """Tokenize a trace segment by segment, as a rollout does; results are cut to `result_tokens`, if given.

    Without a `system` prompt, the format's default one is used.
    """
    shown = (trace.task.images, *(trace.images or ((),) * len(trace.segments)))
    if vision is None:
        refuse_images([*chain(*shown)], f"trace {trace.task.id!r}", "this model cannot see")
    expanded = [[vision.expand(tokenizer, image) for image in images] if vision else [] for images in shown]
    system = fmt.system_prompt() if system is None else system
    prompt = encode_prompt(tokenizer, trace.task.question, system, fmt, expanded[0])
    segments = [(Kind.PROMPT, array("i", prompt))]
    place = ResultPlace()
    for (kind, text), images in zip(trace.segments, expanded[1:], strict=True):
        if kind is Kind.MODEL:
            place = place_after(fmt, text)
            ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        else:
            limit = len(text) if result_tokens is None else result_tokens
            ids = encode_result(tokenizer, fmt, text, limit, place, images)[0]
        segments.append((kind, array("i", ids)))
    return SFTExample(trace.task, tuple(segments), shown if any(shown) else ())
