"""Results of tool calls, cached in an SQLite file: to save calls, and to repeat a run without making any.

    cache = ToolCache("answers.sqlite", "record")

- `on`: a cacheable tool is not called again for a stored call, and new results are stored.
- `record`: every call of every tool is made, and its result replaces an older one.
- `replay`: no tool is called; a call that is not stored fails.

Guarantees: a result is stored under the tool's name, version, `max_chars` and arguments; the last one wins. `get` sees
what this process has `put` at once, and what other processes have put soon after: any number may use the file, each
with its own ToolCache. A thread does the writing, so the event loop waits for at most one look-up. Once the file is
open, disk errors lose results and are counted in `errors`; only `get` raises, in a replay. From a file of an older
version the mistakes of the model are dropped when it is opened for writing: some were failures of a tool.
Not covered: timeouts and infrastructure failures, which are never stored, so a replay lacks these calls; tools that
answer the same call differently each time (a clock, a session): a replay repeats the last answer; results with images,
which are never stored; power cuts (the file stays intact, its last results may be lost); network file systems; expiry
(delete the file).
"""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args
from urllib.parse import quote

from arpo.config.files import expand_user, require_regular_file
from arpo.errors import ArpoError
from arpo.tools.base import Tool, ToolUnavailable
from arpo.types import Fault, ToolResult

Mode = Literal["on", "record", "replay"]
WRITE_TIMEOUT_SECONDS = 10.0  # waiting for other writers
READ_TIMEOUT_SECONDS = 0.5  # a reader practically never waits, and must not block the event loop
APPLICATION_ID = 0x6172706F  # "arpo": identifies our files
SCHEMA_VERSION = 2  # 1 has the same table, in which a tool's own failures may stand as the model's

_CREATE = (
    f"PRAGMA application_id = {APPLICATION_ID}",
    f"PRAGMA user_version = {SCHEMA_VERSION}",
    "CREATE TABLE answers (key BLOB PRIMARY KEY, tool TEXT NOT NULL, version TEXT NOT NULL, args TEXT NOT NULL,"
    " text TEXT NOT NULL, fault TEXT, seconds REAL NOT NULL)",
)
_SELECT = "SELECT text, fault, seconds FROM answers WHERE key = ?"
_STORE = "INSERT OR REPLACE INTO answers VALUES (?, ?, ?, ?, ?, ?, ?)"


@dataclass(frozen=True, slots=True)
class CacheKey:
    """One call; `digest` covers everything that its result depends on."""

    digest: bytes
    tool: str
    version: str
    args: str


def build_key(tool: Tool, args: Mapping[str, Any]) -> CacheKey:
    """Return the key of a call; the arguments must be plain JSON."""
    plain = json.dumps(dict(args), sort_keys=True, separators=(",", ":"), allow_nan=False)
    whole = json.dumps([tool.spec.name, tool.version, tool.max_chars, plain])
    return CacheKey(hashlib.sha256(whole.encode()).digest(), tool.spec.name, tool.version, plain)


class ToolCache:
    """Cached results in one SQLite file."""

    def __init__(self, path: str | Path, mode: Mode) -> None:
        self.path, self.mode, self.errors = expand_user(path), mode, 0
        if mode not in get_args(Mode):
            raise ArpoError(f"the mode of a tool cache is on, record or replay, not {mode!r}")
        if mode == "replay" and not self.path.is_file():
            raise ArpoError(f"{self.path}: there is no recording to replay; make one with mode record")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self.path.exists():
                require_regular_file(self.path)
            self._writer = None if mode == "replay" else _open_writer(self.path)
            self._reader = _open_reader(self.path)
        except (OSError, sqlite3.OperationalError) as error:
            raise ArpoError(f"{self.path}: cannot store results of tools there: {error}") from error
        except sqlite3.DatabaseError as error:
            reason = f"is not a tool cache that can be read ({error})"
            raise ArpoError(f"{self.path} {reason}; name another file, or delete this one") from error
        self._process = os.getpid()
        self._lock = threading.Lock()  # guards the reader and `_pending`
        self._pending: dict[bytes, tuple[CacheKey, ToolResult]] = {}
        self._scheduled = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="arpo-tool-cache")  # at exit, Python waits for it

    def get(self, key: CacheKey) -> ToolResult | None:
        """Return text, fault and seconds of a stored result. None (in a replay: an error) if the file is unreadable."""
        try:
            self._check_process()
            with self._lock:
                waiting = self._pending.get(key.digest)
                if waiting is not None:
                    return waiting[1]
                row = self._reader.execute(_SELECT, (key.digest,)).fetchone()
            return row and ToolResult(str(row[0]), row[1] and Fault(row[1]), row[2])
        except (sqlite3.Error, ValueError) as error:
            self.errors += 1
            if self.mode == "replay":
                raise ToolUnavailable(f"the recording cannot be read: {error}") from error
            return None

    def put(self, key: CacheKey, result: ToolResult) -> None:
        """Store a result: visible to `get` at once, written to disk a little later."""
        try:
            self._check_process()
            with self._lock:
                if not self._scheduled:
                    self._thread.submit(self._write)  # raises RuntimeError after `close`
                    self._scheduled = True
                self._pending[key.digest] = (key, result)
        except (sqlite3.Error, RuntimeError):
            self.errors += 1

    def close(self) -> None:
        """Write pending results and close the file."""
        if os.getpid() != self._process:
            return
        self._thread.shutdown(wait=True)
        with self._lock:
            for connection in (self._reader, self._writer):
                if connection is not None:
                    connection.close()

    def _write(self) -> None:
        """Write all pending results in one transaction."""
        with self._lock:
            batch = list(self._pending.values())
            self._scheduled = False
        rows = [(k.digest, k.tool, k.version, k.args, r.text, r.fault, r.seconds) for k, r in batch]
        try:
            assert self._writer is not None
            with self._writer:
                self._writer.execute("BEGIN IMMEDIATE")
                self._writer.executemany(_STORE, rows)
        except sqlite3.Error:
            self.errors += len(rows)
        with self._lock:
            for entry in batch:
                if self._pending.get(entry[0].digest) is entry:
                    del self._pending[entry[0].digest]

    def _check_process(self) -> None:
        if os.getpid() != self._process:  # a forked process would damage the file through its parent's connection
            raise sqlite3.ProgrammingError("the cache was opened by another process; each must open its own")


def _open_writer(path: Path) -> sqlite3.Connection:
    """Open a connection that writes, and create the file if it does not exist."""
    connection = _connect(str(path), WRITE_TIMEOUT_SECONDS)
    deadline = time.monotonic() + WRITE_TIMEOUT_SECONDS
    while True:
        try:
            with connection:
                connection.execute("BEGIN IMMEDIATE")  # only one process at a time creates the table
                if not connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                    for statement in _CREATE:
                        connection.execute(statement)
                elif _format(connection) == [APPLICATION_ID, 1]:
                    connection.execute("DELETE FROM answers WHERE fault IS NOT NULL")
                    connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
            _check_format(connection)
            connection.execute("PRAGMA journal_mode = WAL")  # readers and the writer do not wait for each other
            connection.execute("PRAGMA synchronous = NORMAL")
            return connection
        except sqlite3.OperationalError as error:  # some of these statements ignore the connection's timeout
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def _open_reader(path: Path) -> sqlite3.Connection:
    """Open a read-only connection, which also works in a directory without write permission."""
    immutable = "" if os.access(path.parent, os.W_OK) else "&immutable=1"
    connection = _connect(f"file:{quote(str(path.absolute()))}?mode=ro{immutable}", READ_TIMEOUT_SECONDS)
    _check_format(connection)
    return connection


def _connect(address: str, timeout: float) -> sqlite3.Connection:
    return sqlite3.connect(
        address, timeout=timeout, isolation_level=None, check_same_thread=False, uri=address.startswith("file:")
    )


def _check_format(connection: sqlite3.Connection) -> None:
    found = _format(connection)
    if found == [APPLICATION_ID, 1]:
        raise sqlite3.DatabaseError("an older version made it; mode on or record brings it up to date")
    if found != [APPLICATION_ID, SCHEMA_VERSION]:
        raise sqlite3.DatabaseError("another program or version made it")
    connection.execute("SELECT key, tool, version, args, text, fault, seconds FROM answers LIMIT 1").fetchone()


def _format(connection: sqlite3.Connection) -> list[int]:
    return [connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version")]
