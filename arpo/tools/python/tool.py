"""The tool `python`: runs code in the sandbox and returns output short enough for a model to read.

Guarantees: the value of the last expression is shown, as in a notebook. An error comes first, with the few lines of the
model's own code that led to it. Of long output the beginning and the end are kept. Calls share no state. Figures are
read like pictures from anywhere (`arpo.data.images`), since code can print what it wants in their place.
Not covered: packages that are not installed, files to keep; figures of code that failed.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

from arpo.data.images import encode_image, open_image, read_image, require_pillow
from arpo.tools.base import CHARS_PER_TOKEN, Tool, ToolError, ToolTimeout, ToolUnavailable, tool
from arpo.tools.sandbox.figures import split_figures
from arpo.tools.sandbox.sandbox import Sandbox, SandboxError, SandboxResult
from arpo.types import Image

MAX_CODE = 200_000  # characters
NO_OUTPUT = "(no output: print what you want to see, or end with an expression)"
FIGURES_SHOWN = "Figures of matplotlib that are open in the end are shown."
START_SECONDS = 60.0  # for restarting the sandbox, on top of the code's own time


MAX_SIDE = 1024  # of a figure, in pixels


def build_python(
    sandbox: Sandbox,
    timeout: float = 10.0,
    max_tokens: int = 512,
    blocking: bool = False,
    shows_figures: bool = False,
) -> Tool:
    """Return the tool `python` over an open sandbox; output is cut to about `max_tokens`.

    With `blocking`, a call blocks the event loop, so that the order of events is the same in every run. With
    `shows_figures`, figures that are open in the end are images of the result; the sandbox must print them.
    """
    limit = max_tokens * CHARS_PER_TOKEN
    if shows_figures:
        require_pillow()

    @tool(timeout=timeout + START_SECONDS, quick=blocking, concurrency=sandbox.workers)
    async def python(code: str) -> str | list[str | Image]:
        """Run Python code and see what it prints and the value of its last line.
        The standard library, numpy and sympy are there; nothing is kept from one call to the next.
        """
        if len(code) > MAX_CODE:
            raise ToolError(f"the code is longer than {MAX_CODE} characters")
        try:
            if blocking:
                result = sandbox.run(code, timeout, show_last=True)
            else:
                result = await sandbox.arun(code, timeout, show_last=True)
        except SandboxError as error:
            raise ToolUnavailable(str(error)) from error
        if not shows_figures:
            return format_result(result, timeout, limit)
        printed, found = split_figures(result.stdout)
        if blocking:
            images, notes = _read_figures(found)
        else:
            images, notes = await asyncio.to_thread(_read_figures, found)
        text = format_result(replace(result, stdout=printed), timeout, limit, "" if images or notes else NO_OUTPUT)
        shown = "\n".join(filter(None, (text, *notes)))
        return [shown, *images] if images else shown

    if shows_figures:
        return replace(python, spec=replace(python.spec, description=f"{python.spec.description}\n{FIGURES_SHOWN}"))
    return python


def _read_figures(found: list[bytes]) -> tuple[list[Image], list[str]]:
    """The figures that are pictures, and notes in place of the others."""
    images, notes = [], []
    for content in found:
        try:
            picture = open_image(read_image(content))
            picture.thumbnail((MAX_SIDE, MAX_SIDE))
            images.append(encode_image(picture))
        except ValueError as error:
            notes.append(f"[a figure cannot be shown: {error}]")
    return images, notes


def format_result(result: SandboxResult, timeout: float, limit: int, nothing: str = NO_OUTPUT) -> str:
    """Return what the model is shown, `nothing` if nothing was printed; raise ToolError or ToolTimeout on failure."""
    printed = _shorten(result.stdout.rstrip("\n"), limit) + (" [output cut]" if result.truncated else "")
    if result.status == "ok":
        warned = _shorten(result.stderr.rstrip("\n"), limit // 4)
        shown = "\n".join(filter(None, (printed, warned)))
        return shown or nothing
    before = f"\nPrinted before that:\n{_shorten(printed, limit // 2)}" if printed else ""
    if result.status == "timeout":
        raise ToolTimeout(f"the code ran longer than {timeout:g} seconds and was stopped.{before}")
    if result.status == "memory":
        raise ToolError(f"the code used more memory than it may.{before}")
    if result.status == "refused":  # of a session; it says why
        raise ToolError(f"{result.stderr}{before}")
    if result.status == "killed":
        raise ToolError(f"the code crashed the interpreter, or printed far too much.{before}")
    raise ToolError(f"{_error_first(_shorten(result.stderr, limit // 2))}{before}")


def _error_first(stderr: str) -> str:
    """Reorder a traceback: what went wrong, then where."""
    head, _, frames = stderr.rstrip("\n").partition("Traceback (most recent call last):\n")
    if not frames:
        return stderr.strip() or "the code ended with an exit code other than 0"
    lines = frames.split("\n")
    first = next((i for i, line in enumerate(lines) if not line.startswith("  ")), 0)
    return "\n".join([*lines[first:], *lines[:first], *([head.rstrip("\n")] if head else [])])


def _shorten(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    head, tail = text[: limit * 3 // 4], text[len(text) - limit // 4 :]
    return f"{head}\n[... {len(text) - len(head) - len(tail)} characters left out ...]\n{tail}"
