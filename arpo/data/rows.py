"""Rows from where questions are kept: JSON lines, a JSON list, Parquet, or the Hugging Face hub.

Promises: a source that cannot be read is an `ArpoError` that says what to do; nothing that a data set brings along is
executed. A row comes with the place where it stands; whether it is a question is for `arpo.data.tasks` to say.
Does not cover: folders of files, compressed files, rows that must be streamed because they do not fit into memory.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from arpo.errors import ArpoError

HUB = "hf:"
Rows = Iterator[tuple[str, int, Any]]
"""(what it is counted in: "line", its number from 1, the row)."""


class JsonText(str):
    """A row that has not been parsed yet: a mistake in it is the row's, not the file's."""


def read_rows(source: str) -> Rows:
    """The rows of a file, or of "hf:NAME", "hf:NAME:SPLIT" or "hf:NAME:CONFIG:SPLIT"."""
    if source.startswith(HUB):
        return _hub(source)
    readers = {".parquet": _parquet, ".json": _json_list}
    if Path(source).suffix in (".csv", ".tsv", ".xlsx", ".arrow", ".gz", ".zip", ".zst"):
        raise ArpoError(f"{source}: cannot be read as it is; turn it into .jsonl, .json or .parquet")
    return readers.get(Path(source).suffix, _json_lines)(source)


def source_name(source: str) -> str:
    """A short name for rows of this source: the file's name, or the data set's."""
    return source.removeprefix(HUB) if source.startswith(HUB) else Path(source).name


def _content(path: str, expected: str) -> bytes:
    try:
        return Path(path).expanduser().read_bytes()
    except FileNotFoundError:
        raise ArpoError(f"{path}: there is no such file (relative paths start in {Path.cwd()})") from None
    except IsADirectoryError:
        raise ArpoError(f"{path}: is a directory, expected a file of {expected}") from None
    except OSError as error:
        raise ArpoError(f"{path}: cannot be read: {error.strerror}") from None


def read_text(path: str, expected: str) -> str:
    """The text of a file; `expected` says in messages what it should hold."""
    try:
        return _content(path, expected).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ArpoError(f"{path}: cannot be read as UTF-8 text: {error}") from None


def _json_lines(path: str) -> Rows:
    lines = read_text(path, "JSON lines").split("\n")  # not splitlines: JSON text may hold other line separators
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield "line", number, JsonText(line)


def _json_list(path: str) -> Rows:
    try:
        rows = json.loads(read_text(path, "JSON"))
    except (ValueError, RecursionError) as error:
        raise ArpoError(f"{path}: expected a JSON list of rows (JSON lines end in .jsonl): {error}") from None
    if not isinstance(rows, list):
        raise ArpoError(f"{path}: expected a JSON list of rows, got {type(rows).__name__}")
    for number, row in enumerate(rows, 1):
        yield "item", number, row


def _parquet(path: str) -> Rows:
    try:
        pyarrow: Any = importlib.import_module("pyarrow")
        parquet: Any = importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise ArpoError(f"{path}: reading Parquet needs pyarrow: pip install 'arpo[parquet]'") from None
    content = _content(path, "Parquet")
    try:
        yield from _batches(parquet.ParquetFile(pyarrow.BufferReader(content)).iter_batches(batch_size=1000))
    except (ValueError, OSError, pyarrow.ArrowException) as error:  # damaged, or of another kind
        raise ArpoError(f"{path}: cannot be read as Parquet: {_first_line(error)}") from None


def _hub(source: str) -> Rows:
    name, *rest = source.removeprefix(HUB).split(":")
    if not name or len(rest) > 2 or not all(rest):
        raise ArpoError(f"{source}: expected hf:NAME, hf:NAME:SPLIT or hf:NAME:CONFIG:SPLIT")
    config, split = ((None, "train"), (None, *rest), rest)[len(rest)]
    try:
        datasets: Any = importlib.import_module("datasets")
    except ImportError:
        raise ArpoError(f"{source}: data sets of the hub need the datasets package: pip install 'arpo[hub]'") from None
    try:
        rows = datasets.load_dataset(name, config, split=split).with_format("arrow")
    except Exception as error:  # of the network, the hub, the data set: of any kind
        raise ArpoError(
            f"{source}: cannot be had from the Hugging Face hub: {_first_line(error)}\n"
            "Check the name; if there is no network here, download the file elsewhere and name it instead; "
            "if the data set is gated, accept its terms on its page and log in with `hf auth login`"
        ) from None
    yield from _batches(rows.iter(batch_size=1000))


def _batches(batches: Iterator[Any]) -> Rows:
    """Rows of Arrow batches, as they are stored: nothing is decoded."""
    number = 0
    for batch in batches:
        for row in batch.to_pylist():
            number += 1
            yield "row", number, row


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
