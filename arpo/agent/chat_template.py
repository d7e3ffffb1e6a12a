"""Rendering the chat template of a model, which is a program from outside, in a process with limits.

    before = render_chats(tokenizer, {"question": ([{"role": "user", "content": "..."}], True)})["question"]

Guarantees: a template that does not end, or takes too much memory, is an ArpoError after a few seconds of CPU time. The
text is that of `tokenizer.apply_chat_template`. Each template is rendered once.
Not covered: templates that depend on the date. They give other prompts on other days.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from arpo.errors import ArpoError

Chat = tuple[list[dict[str, str]], bool]
"""Messages, and whether the start of the model's turn is added."""
CPU_SECONDS = 5
MEMORY_BYTES = 2**30
MAX_TEXT = 1_000_000  # characters of a rendered chat
WAIT_SECONDS = 120  # the worker's own limit counts CPU time; on a busy machine that takes longer
_ENVIRONMENT = ("PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "TZ")  # passed on; no API keys
_WORKER = Path(__file__).with_name("template_worker.py")


def render_chats(tokenizer: Any, chats: Mapping[str, Chat]) -> dict[str, str | None]:
    """The text of each chat in the tokenizer's chat template; None where the template raises an error."""
    try:
        template = tokenizer.get_chat_template()
    except ValueError:  # several templates, and none is the default
        return dict.fromkeys(chats)
    request = {"template": template, "tokens": tokenizer.special_tokens_map, "chats": list(chats.values())}
    return dict(zip(chats, _render(json.dumps(request)), strict=True))


@lru_cache(maxsize=32)
def _render(request: str) -> tuple[str | None, ...]:
    environment = {
        name: os.environ[name] for name in ("PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "TZ") if name in os.environ
    }
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-B", "-X", "utf8", str(_WORKER), *map(str, (CPU_SECONDS, MEMORY_BYTES, MAX_TEXT))],
            input=request.encode("ascii"),
            capture_output=True,
            env=environment,
            timeout=WAIT_SECONDS,
        )
    except subprocess.TimeoutExpired:
        done = None
    if done is not None and done.returncode == 0:
        return tuple(json.loads(done.stdout))
    error = done.stderr.decode(errors="replace").strip().splitlines() if done is not None else []
    if error and not error[-1].startswith("MemoryError"):
        raise ArpoError(f"the chat template cannot be rendered: {error[-1][:300]}")
    raise ArpoError(
        f"the model's chat template does not end: it takes more than {CPU_SECONDS} seconds, {MEMORY_BYTES / 2**30:.0f} "
        f"GiB or {MAX_TEXT:,} characters for a few words; give the tokenizer another one (chat_template.jinja)"
    )
