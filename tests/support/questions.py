"""Rows of questions as they lie in files."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from arpo.types import Task


def rows(*values: Any) -> str:
    """JSON lines."""
    return "".join(json.dumps(value) + "\n" for value in values)


def verl(question: str, gold: Any, ability: str = "qa", **more: Any) -> dict[str, Any]:
    """A row as verl and the released ARPO set have them."""
    return {
        "data_source": "mix",
        "prompt": [{"role": "system", "content": "You have tools."}, {"role": "user", "content": question}],
        "ability": ability,
        "reward_model": {"style": "rule", "ground_truth": gold},
        "extra_info": {"index": 0, "question": question, "split": "train"},
        **more,
    }


def bare(tasks: Iterable[Task]) -> tuple[Task, ...]:
    """The tasks without the columns of their rows."""
    return tuple(replace(task, meta={}) for task in tasks)
