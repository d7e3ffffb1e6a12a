"""Traces: tasks with a worked solution, for supervised fine-tuning and for few-shot prompts.

`arpo.agent.traces` reads them from files, since that needs the call format.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from arpo.types import Kind, Task

Segment = tuple[Kind, str]
"""Who wrote a piece of a trace (model or tool), and its text."""


@dataclass(frozen=True, slots=True)
class Trace:
    """A task and what follows its question: turns of the model and results of tools, alternating."""

    task: Task
    segments: tuple[Segment, ...]

    def to_json(self) -> str:
        """One line of JSON with the segments as they are: read again, it gives the same tokens."""
        segments = [{"by": kind.value, "text": text} for kind, text in self.segments]
        row = {"id": self.task.id, "question": self.task.question, "answer": list(self.task.answers)}
        return json.dumps({**row, "segments": segments}, ensure_ascii=False)
