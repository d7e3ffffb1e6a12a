"""Rows of questions as they lie in files."""

from __future__ import annotations

import json
from typing import Any


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
