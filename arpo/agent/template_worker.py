"""Renders a chat template in a process of its own, with limits on CPU time and memory.

    python template_worker.py CPU_SECONDS MEMORY_BYTES MAX_TEXT < request.json > reply.json

The request has the `template`, its `arguments` (special tokens and others), and `chats`: lists of messages, each with
whether a generation prompt is added and with the tools. The reply has a pair for each chat: its text and null, or null
and the error that the template raised.
A text of more than MAX_TEXT characters takes too much memory.

Guarantees: the process ends when a limit is reached, by SIGXCPU or a MemoryError. A template can import nothing, and
cannot open a file, start a program or connect. It sees what Hugging Face templates expect: `raise_exception`,
`strftime_now`, `dict.fromkeys`, `tojson` without HTML escapes, loop controls and the `generation` tag.
Not covered: bugs of the interpreter. This file imports nothing of the package.
"""

from __future__ import annotations

import json
import resource
import sys
from contextlib import nullcontext, suppress
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

_FORBIDDEN = ("open", "os.", "subprocess.", "socket.", "ctypes.", "shutil.", "import")


class _Generation(Extension):
    """`{% generation %}`, which marks what a model wrote; here it has no effect on the text."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Attributes(Namespace):
    """Jinja's `namespace`, without names that reach into Python."""

    def __init__(*args: Any, **values: Any) -> None:
        for name in dict(*args[1:], **values):
            _check_name(name)
        Namespace.__init__(*args, **values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if str(name).startswith("_"):
        raise SecurityError(f"a namespace cannot have {name!r}")


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _Dict:
    """`dict`, of which a template can use the constructor and `fromkeys`."""

    def __call__(self, *args: Any, **values: Any) -> dict[Any, Any]:
        return dict(*args, **values)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def _describe(error: Exception) -> str:
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return "".join(char for char in text if char.isprintable())[:200]


def _forbid(event: str, args: tuple[Any, ...]) -> None:
    """Raise on forbidden events: an audit hook, which cannot be removed."""
    if event.startswith(_FORBIDDEN):
        raise RuntimeError(f"{event} is not allowed")


def render(
    template: str,
    arguments: dict[str, Any],
    chats: list[tuple[list[dict[str, Any]], bool, list[dict[str, Any]] | None]],
    max_text: int,
) -> list[tuple[str | None, str | None]]:
    """The text of each chat, or the error that the template raises."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _raise,
        "strftime_now": lambda layout: datetime.now().strftime(layout),
        "dict": _Dict(),
        "namespace": _Attributes,
    }
    found: list[tuple[str | None, str | None]] = []
    compiled = None
    for messages, add_generation_prompt, tools in chats:
        given = {"tools": tools, "documents": None, "add_generation_prompt": add_generation_prompt}
        try:
            compiled = compiled or environment.from_string(template)
            text = compiled.render({**arguments, **given, "messages": messages})
        except MemoryError:
            raise
        except Exception as error:  # a template may raise anything
            found.append((None, _describe(error)))
            continue
        if len(text) > max_text:
            raise MemoryError
        found.append((text, None))
    return found


def set_limits(cpu_seconds: int, memory_bytes: int) -> None:
    """Limit CPU time and memory of this process."""
    with suppress(ValueError, OSError) if sys.platform == "darwin" else nullcontext():  # macOS may refuse this one
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds + 1))  # SIGXCPU, then SIGKILL


def main() -> None:
    """Render the request on standard input."""
    cpu_seconds, memory_bytes, max_text = map(int, sys.argv[1:])
    set_limits(cpu_seconds, memory_bytes)
    request = json.load(sys.stdin)
    warm_up = "{{ strftime_now('%d') | tojson | pprint | wordwrap }}{{ lipsum(n=1) }}{{ raise_exception('') }}"
    render(warm_up, {}, [([], False, None)], max_text)  # imports what is imported on first use
    sys.addaudithook(_forbid)
    json.dump(render(request["template"], request["arguments"], request["chats"], max_text), sys.stdout)


if __name__ == "__main__":
    main()
