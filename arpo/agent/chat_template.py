"""Rendering the chat template of a model, which is a program from outside, in a process with limits.

    chat = Chat([{"role": "user", "content": "..."}])
    text = render_chats(tokenizer, {"question": chat}, {"enable_thinking": False})["question"].text

Guarantees: a template that does not end, or takes too much memory, is an ArpoError after a few seconds of CPU time. The
text is that of `tokenizer.apply_chat_template`. Each template is rendered once.
Not covered: templates that depend on the date. They give other prompts on other days.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from arpo.errors import ArpoError

CPU_SECONDS = 5
MEMORY_BYTES = 2**30
MAX_TEXT = 1_000_000  # characters of a rendered chat
WAIT_SECONDS = 120  # the worker's own limit counts CPU time; on a busy machine that takes longer
_ENVIRONMENT = ("PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "TZ")  # passed on; no API keys
_WORKER = Path(__file__).with_name("template_worker.py")


class Chat(NamedTuple):
    """Messages as Hugging Face templates take them, whether the start of the model's turn is added, and the tools."""

    messages: list[dict[str, Any]]
    add_generation_prompt: bool = True
    tools: list[dict[str, Any]] | None = None


class Rendered(NamedTuple):
    """The text of a chat, or the error that its template raised."""

    text: str | None
    error: str | None


def render_chats(
    tokenizer: Any, chats: Mapping[str, Chat], arguments: Mapping[str, Any] | None = None
) -> dict[str, Rendered]:
    """Each chat in the tokenizer's chat template, which gets these further arguments."""
    try:
        template = tokenizer.get_chat_template()
    except ValueError:
        return dict.fromkeys(chats, Rendered(None, "it has several templates, and none is the default"))
    tokens = {**tokenizer.special_tokens_map, **(arguments or {})}
    request = {"template": template, "arguments": tokens, "chats": list(chats.values())}
    return dict(zip(chats, _render(json.dumps(request)), strict=True))


@lru_cache(maxsize=32)
def _render(request: str) -> tuple[Rendered, ...]:
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-B", "-X", "utf8", str(_WORKER), *map(str, (CPU_SECONDS, MEMORY_BYTES, MAX_TEXT))],
            input=request.encode("ascii"),
            capture_output=True,
            env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
            timeout=WAIT_SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise ArpoError(
            f"the model's chat template was not rendered within {WAIT_SECONDS} seconds: try again when the machine is "
            "less busy"
        ) from None
    if done.returncode == 0:
        return tuple(Rendered(*pair) for pair in json.loads(done.stdout))
    error = (done.stderr.decode(errors="replace").strip().splitlines() or [""])[-1]
    if done.returncode == -signal.SIGXCPU or error.startswith("MemoryError"):
        raise ArpoError(
            f"the model's chat template does not end: it takes more than {CPU_SECONDS} seconds, "
            f"{MEMORY_BYTES / 2**30:.0f} GiB or {MAX_TEXT:,} characters for a few words; give the tokenizer another "
            "one (chat_template.jinja)"
        )
    if done.returncode < 0:
        error = f"its process was ended by {signal.Signals(-done.returncode).name}; if memory is short, free some"
    raise ArpoError(f"the model's chat template could not be rendered: {error[:300]}")
