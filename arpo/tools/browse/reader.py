"""From the bytes of a page to readable text: a separate program, so that a page that takes too long can be killed.

    python reader.py < job      # a line of JSON, then the body; prints a line of JSON, null if it failed

Guarantees: memory and CPU time are limited, no files are written, and every page gets a new process, so that it cannot
affect the next one. The same job gives the same text, unless it comes close to a limit.
Not covered: isolation. A page that exploits the parser has the rights of the user.

This file imports nothing of the package, so that it starts quickly.
"""

from __future__ import annotations

import codecs
import contextlib
import json
import os
import re
import signal
import sys
from collections import Counter
from typing import Any

MAX_MEMORY = 2**30
MAX_CPU_SECONDS = 10
EXTRACT_CPU_SECONDS = 2.0  # to find the main text of a page
MAX_TITLE_CHARS = 200
PIECE_CHARS = 800  # longer paragraphs are split
CUT = "\n[cut]"
GAP = "[...]\n"
_BOMS = ((codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be"))
_META = re.compile(rb"<(?:meta|\?xml)\b[^>]{0,300}?(?:charset|encoding)\s*=\s*[\"']?\s*([\w.:-]{1,40})", re.IGNORECASE)
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_WORD = re.compile(r"\w+")
# Python has more encodings than the web, some of them slow or not for text.
_ENCODINGS = re.compile(
    r"utf-(8|16(-[lb]e)?)|iso8859-\d+|cp(12\d\d|866|874|932|949)|koi8-[ru]|mac-(roman|cyrillic)|tis-620|"
    r"big5(hkscs)?|gb(2312|k|18030)|shift_jis|euc_(jp|kr)|iso2022_jp"
)


class _Timeout(BaseException):
    """Raised by a signal; not an Exception, which libraries might catch."""


def _stop(*_: object) -> None:
    raise _Timeout


def read_page(body: bytes, html: bool, charset: str, question: str, max_chars: int) -> dict[str, str]:
    """Return title and text of a page, at most `max_chars` together."""
    text = _CONTROL.sub("", decode(body, charset))
    title, text = extract(text) if html else ("", text)
    title = shorten(" ".join(title.split()), min(MAX_TITLE_CHARS, max_chars // 4))
    text = select_text(normalize_spaces(text), question, max_chars - len(title) - 2)
    return {"title": replace_surrogates(title), "text": replace_surrogates(text)}


def decode(body: bytes, charset: str) -> str:
    """Decode by byte order mark, else the server's charset, else the page's own, else UTF-8."""
    for mark, name in _BOMS:
        if body.startswith(mark):
            return body[len(mark) :].decode(name, "replace")
    own = _META.search(body[:4096])
    for label in (charset, own[1].decode("ascii", "replace") if own else ""):
        with contextlib.suppress(LookupError, ValueError):
            name = codecs.lookup(label).name
            if name in ("ascii", "iso8859-1"):  # as browsers do
                name = "cp1252"
            if _ENCODINGS.fullmatch(name):
                return body.decode(name, "replace")
    return body.decode("utf-8", "replace")


def extract(html: str) -> tuple[str, str]:
    """Return title and main text of an HTML page, or all of its text if no main text is found in time."""
    import trafilatura

    html = f"<!doctype html>{html}"  # otherwise a page of a single paragraph is refused
    tree = trafilatura.load_html(html)
    if tree is None:
        return "", ""
    title = str(tree.findtext(".//title") or "")
    text = None
    before = signal.signal(signal.SIGVTALRM, _stop)
    # Repeated, because an exception raised in a destructor or a weakref callback is lost.
    signal.setitimer(signal.ITIMER_VIRTUAL, EXTRACT_CPU_SECONDS, EXTRACT_CPU_SECONDS)
    try:
        text = trafilatura.extract(tree, include_comments=False)
    except _Timeout:
        pass
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
    return title, text or trafilatura.html2txt(html)


def normalize_spaces(text: str) -> str:
    """Collapse spaces and empty lines, and strip line ends."""
    lines = [" ".join(line.split()) for line in text.splitlines()]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


def select_text(text: str, question: str, max_chars: int) -> str:
    """Return the text if it fits; else the pieces that share the rarest words with the question; else its head."""
    if len(text) <= max_chars:
        return text
    pieces = _pieces(text)
    words = set(_WORD.findall(question.lower()))
    shared = [sorted(words.intersection(_WORD.findall(piece.lower()))) for piece in pieces]
    frequencies = Counter(word for found in shared for word in found)
    if not frequencies:
        return fit(text, max_chars)
    scores = [sum(1 / frequencies[word] for word in found) for found in shared]
    order = sorted(range(len(pieces)), key=lambda i: -scores[i])
    left = max_chars - len(CUT)
    selected = {-1}  # no gap before the first piece
    for i in order:
        cost = len(pieces[i]) + 1 + len(GAP) * (1 - (i - 1 in selected) - (i + 1 in selected))
        if cost <= left:
            selected.add(i)
            left -= cost
    if len(selected) == 1:
        return shorten(pieces[order[0]], left) + CUT
    in_order = sorted(selected - {-1})
    return "\n".join(("" if i - 1 in selected else GAP) + pieces[i] for i in in_order) + CUT


def fit(text: str, max_chars: int) -> str:
    """Return the text, or its head with a note that it was cut."""
    return text if len(text) <= max_chars else shorten(text, max_chars - len(CUT)) + CUT


def shorten(text: str, max_chars: int) -> str:
    """Return the head of a text, up to a line end if at least half of the room is used, else up to a word."""
    if len(text) <= max_chars:
        return text
    head = text[: max(0, max_chars) + 1]
    for border in ("\n", " "):
        end = head.rfind(border)
        if end >= max_chars / 2:
            return head[:end].rstrip()
    return head[:-1]


def _pieces(text: str) -> list[str]:
    pieces: list[str] = []
    for line in text.split("\n"):
        start = 0
        while start < len(line):
            piece = shorten(line[start : start + PIECE_CHARS + 1], PIECE_CHARS)
            start += len(piece)
            pieces.append(piece.strip())
    return [piece for piece in pieces if piece]


def replace_surrogates(text: str) -> str:
    """Replace lone surrogates, which cannot be encoded."""
    return text.encode("utf-8", "replace").decode()


def main() -> None:
    """Read one job from stdin and write its result."""
    import resource

    limits = {"AS": MAX_MEMORY, "CPU": MAX_CPU_SECONDS, "FSIZE": 0, "CORE": 0}
    for name, value in limits.items():
        with contextlib.suppress(OSError, ValueError):  # not every system has all of them
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))
    out = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # keep what libraries print out of the answer
    job: dict[str, Any] = json.loads(sys.stdin.buffer.readline())
    body = sys.stdin.buffer.read()
    answer: dict[str, str] | None
    try:
        answer = read_page(body, **job)
    except ImportError:
        raise
    except Exception:
        answer = None
    out.write(json.dumps(answer).encode() + b"\n")
    out.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
