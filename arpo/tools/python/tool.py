"""The tool `python`: runs code in the sandbox and returns output short enough for a model to read.

Guarantees: the value of the last expression is shown, as in a notebook. An error comes first, with the few lines of the
model's own code that led to it. Of long output the beginning and the end are kept. Calls share no state.
Not covered: packages that are not installed, plots, files to keep.
"""

from __future__ import annotations

from arpo.tools.base import CHARS_PER_TOKEN, Tool, ToolError, ToolTimeout, ToolUnavailable, tool
from arpo.tools.sandbox.sandbox import Sandbox, SandboxError, SandboxResult

MAX_CODE = 200_000  # characters
START_SECONDS = 60.0  # for restarting the sandbox, on top of the code's own time


def build_python(sandbox: Sandbox, timeout: float = 10.0, max_tokens: int = 512, blocking: bool = False) -> Tool:
    """Return the tool `python` over an open sandbox; output is cut to about `max_tokens`.

    With `blocking`, a call blocks the event loop, so that the order of events is the same in every run.
    """
    limit = max_tokens * CHARS_PER_TOKEN

    @tool(timeout=timeout + START_SECONDS, quick=blocking, concurrency=sandbox.workers)
    async def python(code: str) -> str:
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
        return format_result(result, timeout, limit)

    return python


def format_result(result: SandboxResult, timeout: float, limit: int) -> str:
    """Return what the model is shown; raise ToolError or ToolTimeout if the code failed."""
    printed = _shorten(result.stdout.rstrip("\n"), limit) + (" [output cut]" if result.truncated else "")
    if result.status == "ok":
        warned = _shorten(result.stderr.rstrip("\n"), limit // 4)
        shown = "\n".join(filter(None, (printed, warned)))
        return shown or "(no output: print what you want to see, or end with an expression)"
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
