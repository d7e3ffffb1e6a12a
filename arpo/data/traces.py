"""Traces: worked examples as conversations, for supervised fine-tuning and for prompts."""

from __future__ import annotations

from dataclasses import dataclass

from arpo.types import Kind, Task

Segment = tuple[Kind, str]
"""Who wrote a piece of a trace (model or tool), and its text."""


@dataclass(frozen=True, slots=True)
class Trace:
    """A task and what follows its question: turns of the model and results of tools, alternating."""

    task: Task
    segments: tuple[Segment, ...]
