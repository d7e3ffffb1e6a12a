"""Passages from files: JSON lines, a JSON list, parquet, or tab-separated triples of a knowledge base.

Guarantees: JSON lines and parquet are read as a stream. Invalid rows are reported by number with what was expected,
up to 20 at once, and then the whole file is refused. A row has a `text`, or `contents` as in Search-R1's corpora
(`"Title"`, a line break, the text), and may have a `title`; other columns are ignored.

Triples (`subject TAB relation TAB object`, in files named .tsv or .txt) become one passage per subject with all its
facts. So a subject is found by its name even where a question paraphrases the relation ("other half" for `spouse`), and
all values of a relation are read at once. The name is in title and text, so the passage ranks above those that only
mention it. Underscores become spaces.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from arpo.data.rows import RawRow, read_rows, reading
from arpo.errors import ArpoError
from arpo.types import Document

MAX_PROBLEMS = 20
MAX_SUBJECT_CHARS = 1000  # of one passage; further facts go into another passage
EXPECTED = '{"title": "...", "text": "..."}'


def load_documents(path: str | Path) -> list[Document]:
    """Return all passages of a file."""
    return [document for document, _ in read_corpus(path)]


def read_corpus(path: str | Path) -> Iterator[tuple[Document, float]]:
    """Yield the passages of a file, each with the share of the file read so far."""
    triples = Path(path).suffix in (".tsv", ".txt")
    problems: list[str] = []
    empty = True
    for row in _triples(path) if triples else read_rows(str(path), columns=("title", "text", "contents")):
        empty = False
        try:
            document = _document(row.value if triples else row.parse())
        except ValueError as error:
            problems.append(f"{path}, {row.place}: {error}")
            if len(problems) == MAX_PROBLEMS:
                break
        else:
            if not problems:
                yield document, row.share
    if problems:
        more = [f"(only the first {MAX_PROBLEMS} are shown)"] if len(problems) == MAX_PROBLEMS else []
        raise ArpoError("\n".join(problems + more))
    if empty:
        raise ArpoError(f"{path} holds no documents; expected rows like {EXPECTED}")


def subject_passages(triples: Iterable[Sequence[str]]) -> Iterator[tuple[Document, float]]:
    """Yield the passages of triples by subject, each with the share of subjects done."""
    subjects: dict[str, dict[str, dict[str, None]]] = {}
    for triple in triples:
        subject, relation, value = (" ".join(field.replace("_", " ").split()) for field in triple)
        subjects.setdefault(subject, {}).setdefault(relation, {})[value] = None
    for number, (subject, relations) in enumerate(subjects.items(), 1):
        for part in _parts(relations):
            yield Document(subject, f"{subject}: {part}"), number / len(subjects)


def split_contents(contents: str) -> tuple[str, str]:
    """Split `"Title"`, a line break and the text into title and text; anything else has no title."""
    first, _, rest = contents.partition("\n")
    first = first.strip()
    quoted = len(first) > 1 and first[0] == first[-1] == '"'
    return (first[1:-1], rest) if quoted and rest.strip() else ("", contents)


def _triples(path: str | Path) -> Iterator[RawRow]:
    """Yield one row per subject, and each invalid line as a tuple of its fields."""
    triples: list[Sequence[str]] = []
    with reading(path, "triples") as file:
        lines = file.read_bytes().split(b"\n")
    for number, text in enumerate(lines, 1):
        try:
            fields = tuple(" ".join(field.split()) for field in text.decode().split("\t"))
        except UnicodeDecodeError:
            fields = ("not UTF-8",)
        if len(fields) == 3 and all(fields):
            triples.append(fields)
        elif any(fields):
            yield RawRow("line", number, fields)
    for number, (passage, share) in enumerate(subject_passages(triples), 1):
        yield RawRow("passage", number, {"title": passage.title, "text": passage.text}, share)


def _parts(relations: dict[str, dict[str, None]]) -> Iterator[str]:
    """Yield `relation: value, value; relation: value` in parts of limited length."""
    part = ""
    for relation, values in relations.items():
        joint = f"; {relation}: "
        for value in values:
            if part and len(part) + len(joint) + len(value) > MAX_SUBJECT_CHARS:
                yield part
                part = ""
            part += f"{joint}{value}" if part else f"{relation}: {value}"
            joint = ", "
    yield part


def _document(row: Any) -> Document:
    if isinstance(row, tuple):
        raise ValueError(f"expected subject TAB relation TAB object, found {' | '.join(row)[:100]!r}")
    title, text = row.get("title"), row.get("text")
    if text is None and isinstance(contents := row.get("contents"), str):
        inner, text = split_contents(contents)
        title = inner if title is None else title
    if not isinstance(text, str) or not text.strip():
        raise ValueError("expected a non-empty string under `text` (or `contents`)")
    if title is not None and not isinstance(title, str):
        raise ValueError(f"expected a string under `title`, found {type(title).__name__}")
    title = title or ""
    try:
        (title + text).encode()
    except UnicodeEncodeError:
        raise ValueError("holds half a character (a lone surrogate)") from None
    return Document(title, text)
