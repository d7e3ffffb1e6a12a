"""An SQLite database for each trajectory, which the model reads and changes with SQL.

    [environment]
    name = "sqlite"
    settings = {schema_column = "database"}      # this column has SQL that makes the tables, or the path of a file

The state is the bytes of a database. A call is made in another process (`sqlite_worker`), by a new connection to a copy
of it, and what it returns depends on the database and the SQL alone. So a fork only shares the bytes, and after an
error or a timeout the state is what it was. What belongs to a connection ends with the call: temporary tables,
transactions, `last_insert_rowid()`.
"""

from __future__ import annotations

import atexit
import os
import re
import signal
import sqlite3
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import closing, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from arpo.config.files import expand_user, require_regular_file
from arpo.environments.base import Environment
from arpo.environments.sqlite_worker import read_message, write_message
from arpo.errors import ArpoError
from arpo.tools.base import ToolError, ToolTimeout, ToolUnavailable, tool
from arpo.types import Task

MAX_QUERY_CHARS = 20_000
MAX_CELL_CHARS = 100
MAX_COMPARED_ROWS = 100_000
RESET_SECONDS = 30.0
MEMORY = 256 << 20  # of a worker, besides six times the largest database
_WORKER = Path(__file__).with_name("sqlite_worker.py")


class SqliteEnvironment(Environment):
    """A database, and the tool `sql`.

    `schema_column` is the column of a task with the SQL that makes and fills the tables, or with the path of an SQLite
    file, which is only read. With `show_schema` the tables are described after the question. A call may take `seconds`
    of CPU time, shows `max_rows` rows, and cannot make the database larger than `max_mb`.
    """

    copyable = True  # its state is immutable values

    def __init__(
        self,
        schema_column: str = "database",
        show_schema: bool = True,
        max_rows: int = 20,
        seconds: float = 2.0,
        max_mb: int = 16,
    ) -> None:
        if max_rows < 1 or seconds <= 0 or max_mb < 1:
            raise ArpoError("environment.settings: max_rows, seconds and max_mb must be positive")
        self._column, self._show_schema, self._max_rows = schema_column, show_schema, max_rows
        self._seconds, self._max_bytes = seconds, max_mb << 20
        self.initial = b""
        self.database = b""

    def reset(self, task: Task) -> str | None:
        """Make the task's database; returns the statements that made its tables."""
        source = task.meta.get(self._column)
        if not isinstance(source, str) or not source.strip():
            raise ArpoError(
                f"task {task.id}: column {self._column!r} must hold SQL that makes the tables, or the path of an "
                "SQLite file; name another column with environment.settings = {schema_column = ...}"
            )
        try:
            self.initial = self.database = _build_database(source, self._max_bytes)
            made = self.rows("SELECT sql FROM sqlite_schema WHERE sql IS NOT NULL ORDER BY rowid")
        except (sqlite3.Error, OSError, ToolError, ToolTimeout) as error:
            raise ArpoError(
                f"task {task.id}: its database cannot be made of column {self._column!r}: {error}"
            ) from None
        return "\n".join(["The database:", *(f"{statement};" for (statement,) in made)]) if self._show_schema else None

    @tool(timeout=60, concurrency=max(4, os.cpu_count() or 1))
    def sql(self, query: str) -> str:
        """Run SQL on the SQLite database; returns the result of the last statement.

        Each call is a session of its own. If a statement fails, the whole call changes nothing.
        """
        if len(query) > MAX_QUERY_CHARS:
            raise ToolError(f"the query has {len(query)} characters; at most {MAX_QUERY_CHARS} are allowed")
        reply, self.database = self._run(self.database, query, self._max_rows)
        if reply["columns"] is None:
            count = reply["changed"]
            return f"Done. {count} {'row' if count == 1 else 'rows'} changed."
        rows = [reply["columns"], *reply["rows"]]
        count, more = len(reply["rows"]), " shown, there are more" if reply["more"] else ""
        table = "\n".join(" | ".join(map(_cell, row)) for row in rows)
        return f"{table}\n({count} {'row' if count == 1 else 'rows'}{more})"

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        """All rows that a query gives now, for a reward; the database does not change. ToolError if it fails."""
        return self._rows(self.database, query)

    def same_rows(self, query: str, expected: str | Sequence[Sequence[Any]]) -> bool:
        """Whether a query gives these rows now, or those of another query; in any order, unless it has ORDER BY."""
        try:
            found = self.rows(query)
        except (ToolError, ToolTimeout):
            return False
        wanted = self.rows(expected) if isinstance(expected, str) else [tuple(row) for row in expected]
        ordered = has_order(expected if isinstance(expected, str) else query)
        return found == wanted if ordered else Counter(found) == Counter(wanted)

    def same_database(self, gold: str) -> bool:
        """Whether the tables have the contents that they would have after the SQL `gold`, rows in any order."""
        wanted = self._contents(self._run(self.initial, gold, 1)[1])
        try:
            return self._contents(self.database) == wanted
        except (ToolError, ToolTimeout):  # the model made tables that are too large to read
            return False

    def _contents(self, database: bytes) -> dict[str, tuple[list[Any], Counter[tuple[Any, ...]]]]:
        """The names of the columns and the rows of each table."""
        tables = "SELECT name, quote(name) FROM sqlite_schema WHERE type = 'table' AND name NOT GLOB 'sqlite_*'"
        found = {}
        for name, literal in self._rows(database, tables):
            identifier = '"' + name.replace('"', '""') + '"'
            columns = self._rows(database, f"SELECT name FROM pragma_table_info({literal})")
            found[name] = columns, Counter(self._rows(database, f"SELECT * FROM {identifier}"))
        return found

    def _rows(self, database: bytes, query: str) -> list[tuple[Any, ...]]:
        reply, _ = self._run(database, query, MAX_COMPARED_ROWS)
        if reply["more"]:
            raise ToolError(f"the query gives more than {MAX_COMPARED_ROWS} rows")
        return [tuple(bytes.fromhex(x["blob"]) if isinstance(x, dict) else x for x in row) for row in reply["rows"]]

    def _run(self, database: bytes, query: str, max_rows: int) -> tuple[dict[str, Any], bytes]:
        return _run_sql(database, query, max_rows, self._seconds, self._max_bytes)


def has_order(query: str) -> bool:
    """Whether a query has an ORDER BY that is not inside brackets, a string or a comment."""
    text, inner = re.sub(r"'[^']*'|\"[^\"]*\"|--[^\n]*|/\*.*?(\*/|$)", "", query, flags=re.DOTALL), ""
    while text != inner:
        text, inner = re.sub(r"\([^()]*\)", "", text), text
    return re.search(r"\border\s+by\b", text, re.IGNORECASE) is not None


def _cell(value: Any) -> str:
    text = "NULL" if value is None else f"x'{value['blob']}'" if isinstance(value, dict) else str(value)
    text = text[: MAX_CELL_CHARS + 1].replace("\r", "\\r").replace("\n", "\\n")
    return text if len(text) <= MAX_CELL_CHARS else f"{text[:MAX_CELL_CHARS]}..."


def _build_database(source: str, max_bytes: int) -> bytes:
    """The database that a script makes, or that a file holds."""
    if "\n" in source or ";" in source:
        return _run_script(source, max_bytes)
    path = require_regular_file(expand_user(source.strip()))
    if path.stat().st_size > max_bytes:
        raise ToolError(f"{path} has {path.stat().st_size >> 20} MB, and max_mb allows {max_bytes >> 20}")
    with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as file:
        file.execute("SELECT * FROM sqlite_schema")  # an error that says what is wrong, if it is no database
        data = file.serialize()
    return data[:18] + b"\1\1" + data[20:]  # not in WAL mode, which needs a file


@lru_cache(maxsize=16)
def _run_script(script: str, max_bytes: int) -> bytes:
    return _run_sql(b"", script, 1, RESET_SECONDS, max_bytes, trusted=True)[1]


def _run_sql(
    database: bytes, query: str, max_rows: int, seconds: float, max_bytes: int, trusted: bool = False
) -> tuple[dict[str, Any], bytes]:
    """The reply of a worker, and the database after the query."""
    request = {
        "sql": query,
        "max_rows": max_rows,
        "seconds": seconds,
        "max_bytes": max_bytes,
        "memory": MEMORY + 6 * max_bytes,
        "trusted": trusted,
    }
    reply, changed = _take_worker().ask(request, database)
    if "timeout" in reply:
        raise ToolTimeout(f"the query takes more than {seconds:g} seconds; nothing was changed")
    if "error" in reply:
        raise ToolError(reply["error"])
    return reply, changed or database


class _Worker:
    """A process that runs SQL for one thread at a time."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", "-X", "utf8", str(_WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={"TZ": "UTC"},
            cwd="/",
            start_new_session=True,  # Ctrl-C is for the parent to handle
        )

    def ask(self, request: dict[str, Any], database: bytes) -> tuple[dict[str, Any], bytes]:
        """The reply of the process, which may serve another thread then, or has ended."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            write_message(self._process.stdin, request, database)
            reply = read_message(self._process.stdout)
        except (OSError, EOFError, ValueError):
            self.end()
            if self._process.returncode == -signal.SIGXCPU:
                return {"timeout": True}, b""
            raise ToolUnavailable(f"the process that runs SQL ended with code {self._process.returncode}") from None
        except BaseException:  # an interrupt: a late reply must not answer the next request
            self.end()
            raise
        with _lock:
            _idle.append(self)
        return reply

    def end(self) -> None:
        """End the process."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(OSError):  # what was not written yet
                pipe.close()
        self._process.terminate()
        self._process.wait()


_idle: list[_Worker] = []
_lock = threading.Lock()
os.register_at_fork(after_in_child=_idle.clear)


def _take_worker() -> _Worker:
    with _lock:
        return _idle.pop() if _idle else _Worker()


@atexit.register
def _end_workers() -> None:
    with _lock:
        while _idle:
            _idle.pop().end()
