"""What tests of traces share: sums as questions, their traces, and settings for a small model that learns them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from arpo.agent.formats import CallFormat, build_format
from arpo.builtin.model import build_model, build_tokenizer
from arpo.config.loading import load_config
from arpo.config.schema import Config
from arpo.models.save import save_pretrained
from arpo.tools.base import tool


@tool(quick=True)
def python(code: str) -> str:
    """Run Python code."""
    raise NotImplementedError


def formats(name: str = "tags") -> CallFormat:
    """The call format with the Python tool."""
    return build_format(name, [python.spec])


def sum_row(a: int, b: int) -> dict[str, Any]:
    """A sum, worked out with Python, as messages."""
    call = {"function": {"name": "python", "arguments": json.dumps({"code": f"{a} + {b}"})}}
    return {
        "id": f"{a}+{b}",
        "answer": str(a + b),
        "messages": [
            {"role": "user", "content": f"What is {a} plus {b}?"},
            {"role": "assistant", "content": "<think>Add.</think>", "tool_calls": [call]},
            {"role": "tool", "content": str(a + b)},
            {"role": "assistant", "content": f"<think>So.</think><answer>\\boxed{{{a + b}}}</answer>"},
        ],
    }


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    """A file of JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_model(path: Path, hidden: int = 32, layers: int = 1, context: int = 256) -> Path:
    """A random model whose tokenizer knows sums."""
    texts = [message["content"] for n in range(100) for message in sum_row(n, 99 - n)["messages"]]
    tokenizer = build_tokenizer(texts)
    save_pretrained(build_model(tokenizer, hidden, layers, context, seed=1), tokenizer, path)
    return path


def sums_config(folder: Path, *more: str) -> Config:
    """Settings for a run in `folder`/run that learns the sums in `folder`/traces.jsonl with `folder`/model."""
    return load_config(
        None,
        [
            f"model.path={folder / 'model'}",
            "model.device=cpu",
            'tools.enabled=["python"]',
            "tools.python_blocks=true",
            "reward.bonus=0",
            "reward.accuracy=number",
            f"sft.data={folder / 'traces.jsonl'}",
            f"run.dir={folder / 'run'}",
            "rollout.max_tokens=60",
            *more,
        ],
    )
