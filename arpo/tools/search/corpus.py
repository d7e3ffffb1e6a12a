"""Passages from files: JSON lines, a JSON list, parquet, or tab-separated triples of a knowledge base.

Promises: JSON lines and parquet are read as a stream; rows that do not fit are named by number with what was expected,
up to 20 at once, and then nothing is accepted.
A row has a `text`, or `contents` as in Search-R1's corpora (`"Title"`, a line break, the text), and may have a `title`;
other columns are not looked at.

Triples (`subject TAB relation TAB object`, in files named .tsv or .txt) become one passage per subject, with all that
is known of it. So it is found by its name even where a question puts the relation in other words ("other half" for
`spouse`), and all values of a relation are read at once. Its name is counted twice, so that it comes before those who
only mention it. Underscores become spaces.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from arpo.data.rows import RawRow, read_rows, reading
from arpo.errors import ArpoError
from arpo.types import Document

SHOWN = 20
MAX_SUBJECT_CHARS = 1000  # what is known of a subject beyond this goes into a further passage
EXPECTED = '{"title": "...", "text": "..."}'


def load_documents(path: str | Path) -> list[Document]:
    """All passages of a file."""
    return [document for document, _ in read_corpus(path)]


def read_corpus(path: str | Path) -> Iterator[tuple[Document, float]]:
    """The passages of a file one by one, each with the share of the file that has been read."""
    triples = Path(path).suffix in (".tsv", ".txt")
    problems: list[str] = []
    empty = True
    for row in _triples(path) if triples else read_rows(str(path), columns=("title", "text", "contents")):
        empty = False
        try:
            document = _document(row.value if triples else row.parse())
        except ValueError as error:
            problems.append(f"{path}, {row.place}: {error}")
            if len(problems) == SHOWN:
                break
        else:
            if not problems:
                yield document, row.share
    if problems:
        more = [f"(only the first {SHOWN} are shown)"] if len(problems) == SHOWN else []
        raise ArpoError("\n".join(problems + more))
    if empty:
        raise ArpoError(f"{path} holds no documents; expected rows like {EXPECTED}")


def subject_passages(triples: Iterable[Sequence[str]]) -> Iterator[tuple[Document, float]]:
    """The passages that triples become, subject by subject, each with the share of the subjects that are done."""
    subjects: dict[str, dict[str, dict[str, None]]] = {}
    for triple in triples:
        subject, relation, value = (" ".join(field.replace("_", " ").split()) for field in triple)
        subjects.setdefault(subject, {}).setdefault(relation, {})[value] = None
    for number, (subject, relations) in enumerate(subjects.items(), 1):
        for part in _parts(relations):
            yield Document(subject, f"{subject}: {part}"), number / len(subjects)


def split_contents(contents: str) -> tuple[str, str]:
    """Title and text of `"Title"`, a line break and the text; what looks otherwise has no title."""
    first, _, rest = contents.partition("\n")
    first = first.strip()
    quoted = len(first) > 1 and first[0] == first[-1] == '"'
    return (first[1:-1], rest) if quoted and rest.strip() else ("", contents)


def _triples(path: str | Path) -> Iterator[RawRow]:
    """One row per subject; a line that is no triple comes as a tuple of its fields, to be refused."""
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
    """`relation: value, value; relation: value`, in pieces of limited length."""
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
