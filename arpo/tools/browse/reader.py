"""From a page's bytes to readable text: a program of its own, so that a page which takes too long can be killed.

    python reader.py < job      # a line of JSON, then the body; a line of JSON comes out, null if it failed

Promises: memory and CPU time are bounded by the system, nothing is written to files, and a page gets a fresh process,
so that it cannot change how the next one is read. The same job gives the same text, unless it comes close to a limit.
Does not cover: isolation. A page that takes over the parser has the rights of the user.

The file imports nothing of the package, which keeps its start short.
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
EXTRACT_CPU_SECONDS = 2.0  # to find the main part of a page
MAX_TITLE_CHARS = 200
PIECE_CHARS = 800  # longer paragraphs are chosen from piece by piece
CUT = "\n[cut]"
GAP = "[...]\n"
_BOMS = ((codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be"))
_META = re.compile(rb"<(?:meta|\?xml)\b[^>]{0,300}?(?:charset|encoding)\s*=\s*[\"']?\s*([\w.:-]{1,40})", re.IGNORECASE)
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_WORD = re.compile(r"\w+")
# Python knows more encodings than the web, some of them slow or no encodings of text at all.
_ENCODINGS = re.compile(
    r"utf-(8|16(-[lb]e)?)|iso8859-\d+|cp(12\d\d|866|874|932|949)|koi8-[ru]|mac-(roman|cyrillic)|tis-620|"
    r"big5(hkscs)?|gb(2312|k|18030)|shift_jis|euc_(jp|kr)|iso2022_jp"
)


class _TooLong(BaseException):
    """Raised in the middle of things, where an Exception might be caught."""


def _stop(*_: object) -> None:
    raise _TooLong


def read_page(body: bytes, html: bool, charset: str, question: str, max_chars: int) -> dict[str, str]:
    """Title and text of a page, at most `max_chars` long together."""
    text = _CONTROL.sub("", decode(body, charset))
    title, text = extract(text) if html else ("", text)
    title = shorten(" ".join(title.split()), min(MAX_TITLE_CHARS, max_chars // 4))
    text = choose(tidy(text), question, max_chars - len(title) - 2)
    return {"title": whole(title), "text": whole(text)}


def decode(body: bytes, charset: str) -> str:
    """Text by its byte order mark, else the server's charset, else the page's own, else UTF-8."""
    for mark, name in _BOMS:
        if body.startswith(mark):
            return body[len(mark) :].decode(name, "replace")
    own = _META.search(body[:4096])
    for wanted in (charset, own[1].decode("ascii", "replace") if own else ""):
        with contextlib.suppress(LookupError, ValueError):
            name = codecs.lookup(wanted).name
            if name in ("ascii", "iso8859-1"):  # what browsers take these for
                name = "cp1252"
            if _ENCODINGS.fullmatch(name):
                return body.decode(name, "replace")
    return body.decode("utf-8", "replace")


def extract(html: str) -> tuple[str, str]:
    """Title and main text of an HTML page; all of its text where no main part can be found, or not in time."""
    import trafilatura

    html = f"<!doctype html>{html}"  # without one, a page of a single paragraph is refused
    tree = trafilatura.load_html(html)
    if tree is None:
        return "", ""
    title = str(tree.findtext(".//title") or "")
    text = None
    before = signal.signal(signal.SIGVTALRM, _stop)
    # Again and again: an exception raised while a destructor or a weak reference's callback runs is lost.
    signal.setitimer(signal.ITIMER_VIRTUAL, EXTRACT_CPU_SECONDS, EXTRACT_CPU_SECONDS)
    try:
        text = trafilatura.extract(tree, include_comments=False)
    except _TooLong:
        pass
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
    return title, text or trafilatura.html2txt(html)


def tidy(text: str) -> str:
    """Single spaces, no blanks at line ends, at most one empty line in a row."""
    lines = [" ".join(line.split()) for line in text.splitlines()]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


def choose(text: str, question: str, max_chars: int) -> str:
    """The text if it fits; else its pieces that share the rarest words with the question, in order; else its head."""
    if len(text) <= max_chars:
        return text
    pieces = _pieces(text)
    words = set(_WORD.findall(question.lower()))
    shared = [sorted(words.intersection(_WORD.findall(piece.lower()))) for piece in pieces]
    spread = Counter(word for found in shared for word in found)
    if not spread:
        return fit(text, max_chars)
    scores = [sum(1 / spread[word] for word in found) for found in shared]
    order = sorted(range(len(pieces)), key=lambda i: -scores[i])
    left = max_chars - len(CUT)
    kept = {-1}  # so that there is no gap before the first piece
    for i in order:
        cost = len(pieces[i]) + 1 + len(GAP) * (1 - (i - 1 in kept) - (i + 1 in kept))
        if cost <= left:
            kept.add(i)
            left -= cost
    if len(kept) == 1:
        return shorten(pieces[order[0]], left) + CUT
    chosen = sorted(kept - {-1})
    return "\n".join(("" if i - 1 in kept else GAP) + pieces[i] for i in chosen) + CUT


def fit(text: str, max_chars: int) -> str:
    """The text, or its head with a note that it was cut."""
    return text if len(text) <= max_chars else shorten(text, max_chars - len(CUT)) + CUT


def shorten(text: str, max_chars: int) -> str:
    """The head of a text, ending with a line if that leaves at least half of the room used, else with a word."""
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


def whole(text: str) -> str:
    """Without half characters, which could not be written out."""
    return text.encode("utf-8", "replace").decode()


def _limit() -> None:
    import resource

    for what, value in (
        (resource.RLIMIT_AS, MAX_MEMORY),
        (resource.RLIMIT_CPU, MAX_CPU_SECONDS),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        with contextlib.suppress(OSError, ValueError):  # not every system knows all of them
            resource.setrlimit(what, (value, value))


def main() -> None:
    """Read one job from standard input and write what came of it."""
    _limit()
    out = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever a library prints is no answer
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
