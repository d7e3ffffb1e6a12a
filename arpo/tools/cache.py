"""Answers of tools, kept on disk: to save calls, and to repeat a run without making any.

    cache = ToolCache("answers.sqlite", "record")

- `on`: a cacheable tool is not called again for what is stored, and what it answers is stored.
- `record`: every call of every tool is made, and its answer stored in place of an older one.
- `replay`: no tool is ever called; a call that is not stored fails.

Promises: an answer belongs to the tool's name, version and longest output, and to the arguments; of several answers to
the same call the last is kept. What was put is found at once by this process, and soon by others: any number may use
the file at the same time, each with a ToolCache of its own. Writing is done by a thread, so the event loop waits for
one look-up at most. Once the file is open, a failing disk costs answers and is counted in `errors`; nothing raises but
`get` in a replay, where there is no other way to an answer.

Does not cover: timeouts and failures of the infrastructure, which are never stored, so that a replay lacks these calls;
a tool that answers the same call differently each time (a clock, a session): a replay repeats its last answer, always
the same, but not what the recorded run saw; power cuts (the file stays whole, its last answers may be gone); network
file systems; deleting what is old (delete the file).
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

from arpo.errors import ArpoError
from arpo.tools.base import Tool, ToolUnavailable
from arpo.types import Fault

Mode = Literal["on", "record", "replay"]
WRITE_WAIT_SECONDS = 10.0  # for other processes that write
READ_WAIT_SECONDS = 0.5  # a reader practically never waits, and the event loop must not
APPLICATION_ID = 0x6172706F  # "arpo": marks a file as ours
LAYOUT = 1

_CREATE = (
    f"PRAGMA application_id = {APPLICATION_ID}",
    f"PRAGMA user_version = {LAYOUT}",
    "CREATE TABLE answers (key BLOB PRIMARY KEY, tool TEXT NOT NULL, version TEXT NOT NULL, args TEXT NOT NULL,"
    " text TEXT NOT NULL, fault TEXT, seconds REAL NOT NULL)",
)
_SELECT = "SELECT text, fault, seconds FROM answers WHERE key = ?"
_STORE = "INSERT OR REPLACE INTO answers VALUES (?, ?, ?, ?, ?, ?, ?)"


@dataclass(frozen=True, slots=True)
class Question:
    """One call as the cache knows it; `key` stands for everything that the answer depends on."""

    key: bytes
    tool: str
    version: str
    args: str


@dataclass(frozen=True, slots=True)
class Answer:
    """What a tool answered to one call, and how long that took."""

    text: str
    fault: Fault | None
    seconds: float


def question_of(tool: Tool, args: Mapping[str, Any]) -> Question:
    """What these arguments, which must be plain JSON, ask of this tool."""
    plain = json.dumps(dict(args), sort_keys=True, separators=(",", ":"), allow_nan=False)
    whole = json.dumps([tool.spec.name, tool.version, tool.max_chars, plain])
    return Question(hashlib.sha256(whole.encode()).digest(), tool.spec.name, tool.version, plain)


class ToolCache:
    """Stored answers in one SQLite file."""

    def __init__(self, path: str | Path, mode: Mode) -> None:
        self.path, self.mode, self.errors = Path(path).expanduser(), mode, 0
        if mode not in get_args(Mode):
            raise ArpoError(f"answers of tools are kept in mode on, record or replay, not {mode!r}")
        if mode == "replay" and not self.path.is_file():
            raise ArpoError(f"{self.path}: there is no recording to replay; make one in mode record")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._writer = None if mode == "replay" else _writer(self.path)
            self._reader = _reader(self.path)
        except (OSError, sqlite3.OperationalError) as error:
            raise ArpoError(f"{self.path}: cannot keep answers of tools there: {error}") from error
        except sqlite3.DatabaseError as error:
            raise ArpoError(f"{self.path} {_not_ours(str(error))}") from error
        self._process = os.getpid()
        self._lock = threading.Lock()  # of the reader and of what is not written yet
        self._pending: dict[bytes, tuple[Question, Answer]] = {}
        self._scheduled = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="arpo-tool-cache")  # at exit, Python waits for it

    def get(self, question: Question) -> Answer | None:
        """What is stored for this call. A file that cannot be read holds nothing; in a replay, ToolUnavailable."""
        try:
            self._check_process()
            with self._lock:
                waiting = self._pending.get(question.key)
                if waiting is not None:
                    return waiting[1]
                row = self._reader.execute(_SELECT, (question.key,)).fetchone()
            return row and Answer(str(row[0]), row[1] and Fault(row[1]), row[2])
        except (sqlite3.Error, ValueError) as error:
            self.errors += 1
            if self.mode == "replay":
                raise ToolUnavailable(f"the recording cannot be read: {error}") from error
            return None

    def put(self, question: Question, answer: Answer) -> None:
        """Store an answer: for `get` at once, on the disk a little later."""
        try:
            self._check_process()
            with self._lock:
                if not self._scheduled:
                    self._thread.submit(self._write)  # RuntimeError once it is closed
                    self._scheduled = True
                self._pending[question.key] = (question, answer)
        except (sqlite3.Error, RuntimeError):
            self.errors += 1

    def close(self) -> None:
        """Write what is not written yet and let go of the file."""
        if os.getpid() != self._process:
            return
        self._thread.shutdown(wait=True)
        with self._lock:
            for connection in (self._reader, self._writer):
                if connection is not None:
                    connection.close()

    def _write(self) -> None:
        """Write all that is pending, in one transaction."""
        with self._lock:
            batch = list(self._pending.values())
            self._scheduled = False
        rows = [(q.key, q.tool, q.version, q.args, a.text, a.fault, a.seconds) for q, a in batch]
        try:
            assert self._writer is not None
            with self._writer:
                self._writer.execute("BEGIN IMMEDIATE")
                self._writer.executemany(_STORE, rows)
        except sqlite3.Error:
            self.errors += len(rows)
        with self._lock:
            for entry in batch:
                if self._pending.get(entry[0].key) is entry:
                    del self._pending[entry[0].key]

    def _check_process(self) -> None:
        if os.getpid() != self._process:  # a forked process would damage the file through its parent's connection
            raise sqlite3.ProgrammingError("the cache was opened by another process; each must open its own")


def _writer(path: Path) -> sqlite3.Connection:
    """A connection that may write, to a file that is made if need be."""
    connection = _connect(str(path), WRITE_WAIT_SECONDS)
    deadline = time.monotonic() + WRITE_WAIT_SECONDS
    while True:
        try:
            with connection:
                connection.execute("BEGIN IMMEDIATE")  # only one process at a time makes the table
                if not connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                    for statement in _CREATE:
                        connection.execute(statement)
            _check_ours(connection, path)
            connection.execute("PRAGMA journal_mode = WAL")  # readers and the writer do not wait for each other
            connection.execute("PRAGMA synchronous = NORMAL")
            return connection
        except sqlite3.OperationalError as error:  # of the changes made here, some do not wait by themselves
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def _reader(path: Path) -> sqlite3.Connection:
    """A connection that only reads, from a folder where nothing can be written too."""
    immutable = "" if os.access(path.parent, os.W_OK) else "&immutable=1"
    connection = _connect(f"file:{quote(str(path.absolute()))}?mode=ro{immutable}", READ_WAIT_SECONDS)
    _check_ours(connection, path)
    return connection


def _connect(address: str, wait: float) -> sqlite3.Connection:
    return sqlite3.connect(
        address, timeout=wait, isolation_level=None, check_same_thread=False, uri=address.startswith("file:")
    )


def _check_ours(connection: sqlite3.Connection, path: Path) -> None:
    found = [connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version")]
    if found != [APPLICATION_ID, LAYOUT]:
        raise ArpoError(f"{path} {_not_ours('another program or version made it')}")
    connection.execute("SELECT key, tool, version, args, text, fault, seconds FROM answers LIMIT 1").fetchone()


def _not_ours(reason: str) -> str:
    return f"holds no answers of tools that can be read ({reason}); name another file, or delete this one"
