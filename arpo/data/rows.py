"""Reads rows of tasks, traces and documents: JSON lines, a JSON list, Parquet, or a data set of the Hugging Face hub.

Guarantees: JSON lines and Parquet are streamed. A source that cannot be read is an `ArpoError` that says what to do.
No code of a data set is executed. A row knows its place in the source; a line that is not JSON is an error of that row.
Only regular files are read, and no line is longer than `MAX_LINE_BYTES`.
Not covered: folders of files, compressed files, rows of a Parquet file that unpack to more than fits into memory.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from arpo.config.files import expand_user, no_such_file, parse_json, read_limited, require_regular_file
from arpo.errors import ArpoError

HUB = "hf:"
MAX_PROBLEMS_SHOWN = 20
MAX_EQUAL_PROBLEMS = 3  # that are listed one by one
_PLACE = re.compile(r", (?:line|item|row) \d+:")
MAX_LINE_BYTES = 2**26
MAX_FILE_BYTES = 2**30  # of a file that is read at once; JSON lines and Parquet are streamed


class RawRow(NamedTuple):
    """One row as it is stored, and where."""

    unit: str  # "line", "item" or "row"
    number: int  # from 1
    value: Any  # bytes: a line of JSON, not parsed yet
    share: float = 0.0  # of the source that has been read

    @property
    def place(self) -> str:
        """Where the row is: "line 3"."""
        return f"{self.unit} {self.number}"

    def parse(self) -> dict[str, Any]:
        """The row as an object; ValueError if it is something else."""
        value = self.value
        if isinstance(value, bytes):
            try:
                value = parse_json(value.decode())
            except ValueError as error:
                raise ValueError(f"not JSON ({error})") from None
        if not isinstance(value, Mapping):
            expected = "a dict with columns" if self.unit == "row" else "a JSON object"
            raise ValueError(f"expected {expected}, got {type(value).__name__}")
        return dict(value)


def read_rows(source: str, columns: Collection[str] = ()) -> Iterator[RawRow]:
    """The rows of a file, or of "hf:NAME", "hf:NAME:SPLIT" or "hf:NAME:CONFIG:SPLIT".

    If `columns` are given, a Parquet file may be read without its other columns.
    """
    if source.startswith(HUB):
        return _hub(source)
    suffix = Path(source).suffix
    if suffix in (".csv", ".tsv", ".xlsx", ".arrow", ".gz", ".zip", ".zst"):
        raise ArpoError(f"{source}: this format is not supported; convert the file to .jsonl, .json or .parquet")
    if suffix == ".parquet":
        return _parquet(source, columns)
    return _json_list(source) if suffix == ".json" else _json_lines(source)


def source_name(source: str) -> str:
    """A short name for rows of this source: the name of the file or of the data set."""
    return source.removeprefix(HUB) if source.startswith(HUB) else Path(source).name


def image_folder(source: str) -> Path:
    """Where the paths of images in a source may lead: the folder of the file, or the hub's cache."""
    if not source.startswith(HUB):
        return expand_user(source).absolute().parent
    datasets: Any = importlib.import_module("datasets")
    return Path(datasets.config.HF_CACHE_HOME)


def list_problems(problems: Sequence[str]) -> str:
    """The first problems, one per line, and how many more there are; one that many rows have is told once."""
    rows: dict[str, list[str]] = {}
    for problem in problems:
        rows.setdefault(_PLACE.sub(":", problem, count=1), []).append(problem)
    lines: list[str] = []
    for same in rows.values():
        lines += same if len(same) <= MAX_EQUAL_PROBLEMS else [f"{same[0]} (the same in {len(same) - 1:,} more rows)"]
    more = len(lines) - MAX_PROBLEMS_SHOWN
    return "\n".join([*lines[:MAX_PROBLEMS_SHOWN], *([f"and {more} more"] if more > 0 else [])])


def refuse_bad_rows(source: str, what: str, kept: Sequence[object], problems: Sequence[str], bad_rows: str) -> None:
    """Raise if there are problems and `bad_rows` is "refuse", or if nothing is left; `what` names what is kept."""
    if problems and (bad_rows == "refuse" or not kept):
        hint = ["fix the rows, or leave them out with data.bad_rows=skip"] if kept else []
        raise ArpoError("\n".join([list_problems(problems), *hint]))
    if not kept:
        raise ArpoError(f"{source}: holds no {what}")


@contextmanager
def reading(path: str | Path, expected: str) -> Iterator[Path]:
    """Yields the path with ~ expanded; file errors inside become an `ArpoError` that names the path."""
    try:
        yield require_regular_file(expand_user(path))
    except FileNotFoundError:
        raise ArpoError(no_such_file(path)) from None
    except IsADirectoryError:
        raise ArpoError(f"{path}: is a directory, expected a file of {expected}") from None
    except OSError as error:
        raise ArpoError(f"{path}: cannot be read: {error.strerror or error}") from None


def read_text(path: str, expected: str) -> str:
    """The text of a file; `expected` says in messages what it should hold."""
    with reading(path, expected) as file:
        try:
            return read_limited(file, MAX_FILE_BYTES).decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise ArpoError(f"{path}: cannot be read as UTF-8 text: {error}") from None


def _json_lines(path: str) -> Iterator[RawRow]:
    with reading(path, "JSON lines") as place, place.open("rb") as file:
        size, done = max(1, place.stat().st_size), 0
        # Only \n ends a line: JSON text may hold other line separators.
        for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES + 1), b""), 1):
            done += len(line)
            if len(line) > MAX_LINE_BYTES:
                raise ArpoError(
                    f"{path}: line {number} is longer than {MAX_LINE_BYTES / 1e6:.0f} MB; each row is a line of JSON"
                )
            line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if line.strip():
                yield RawRow("line", number, line, done / size)


def _json_list(path: str) -> Iterator[RawRow]:
    try:
        rows = parse_json(read_text(path, "JSON"))
    except ValueError as error:
        raise ArpoError(f"{path}: expected a JSON list of rows (JSON lines end in .jsonl): {error}") from None
    if not isinstance(rows, list):
        raise ArpoError(f"{path}: expected a JSON list of rows, got {type(rows).__name__}")
    for number, row in enumerate(rows, 1):
        yield RawRow("item", number, row, number / len(rows))


def _parquet(path: str, columns: Collection[str]) -> Iterator[RawRow]:
    try:
        pyarrow: Any = importlib.import_module("pyarrow")
        parquet: Any = importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise ArpoError(f"{path}: reading Parquet needs pyarrow: pip install pyarrow") from None
    with reading(path, "Parquet") as place, place.open("rb") as file:
        try:
            table = parquet.ParquetFile(file)
            chosen = [name for name in table.schema_arrow.names if name in columns] or None
            for row in _batches(table.iter_batches(batch_size=1000, columns=chosen)):
                yield row._replace(share=row.number / table.metadata.num_rows)
        except (ValueError, OSError, pyarrow.ArrowException) as error:  # damaged, or of another kind
            raise ArpoError(f"{path}: cannot be read as Parquet: {_first_line(error)}") from None


def _hub(source: str) -> Iterator[RawRow]:
    name, *rest = source.removeprefix(HUB).split(":")
    if not name or len(rest) > 2 or not all(rest):
        raise ArpoError(f"{source}: expected hf:NAME, hf:NAME:SPLIT or hf:NAME:CONFIG:SPLIT")
    config, split = ((None, "train"), (None, *rest), rest)[len(rest)]
    try:
        datasets: Any = importlib.import_module("datasets")
    except ImportError:
        raise ArpoError(f"{source}: data sets of the hub need the datasets package: pip install datasets") from None
    try:
        rows = datasets.load_dataset(name, config, split=split).with_format("arrow")
    except Exception as error:  # of the network, the hub, the data set: of any kind
        raise ArpoError(
            f"{source}: cannot be loaded from the Hugging Face hub: {_first_line(error)}\n"
            "Check the name; if there is no network here, download the file elsewhere and name it instead; "
            "if the data set is gated, accept its terms on its page and log in with `hf auth login`"
        ) from None
    yield from _batches(rows.iter(batch_size=1000))


def _batches(batches: Iterator[Any]) -> Iterator[RawRow]:
    """The rows of Arrow batches as they are stored; nothing is decoded."""
    number = 0
    for batch in batches:
        for row in batch.to_pylist():
            number += 1
            yield RawRow("row", number, row)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
