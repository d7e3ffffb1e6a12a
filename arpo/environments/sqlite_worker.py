"""Runs SQL that a model wrote, in a process of its own with limits on time, memory and files.

    python sqlite_worker.py      # a request in, a reply out, again and again

A request is a JSON object and the bytes of a database; the reply is one too. Both parts are preceded by their lengths.
Every request gets a new connection, and the changed database is in the reply. So a reply depends on the database and
the SQL alone: the clock stands still, and `random()` gives the same numbers each time.

Guarantees: a request takes at most `seconds` of CPU time and `memory` bytes. SQL cannot open or write a file or load an
extension, nor make a virtual table unless it is the script of a task ("trusted"). If a statement fails, or a
transaction is left open, the database stays as it was.
Not covered: bugs of SQLite. This file imports nothing of the package.
"""

from __future__ import annotations

import contextlib
import json
import math
import random
import re
import resource
import signal
import sqlite3
import struct
import sys
import time
from collections.abc import Iterator
from typing import IO, Any

LENGTHS = struct.Struct("<QQ")
NOW = "2026-01-01 00:00:00"  # what `date('now')` and the like are asked at
STEPS = 10_000  # of SQLite's machine, between two looks at the clock
MAX_VALUE_BYTES = 1 << 20
LIMITS = {
    sqlite3.SQLITE_LIMIT_LENGTH: MAX_VALUE_BYTES,
    sqlite3.SQLITE_LIMIT_ATTACHED: 0,
    sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: 200,
    sqlite3.SQLITE_LIMIT_WORKER_THREADS: 0,
}
PRAGMAS = ("table_info", "table_xinfo", "table_list", "index_list", "index_info", "index_xinfo", "foreign_key_list")
TIME_FUNCTIONS = ("date", "time", "datetime", "julianday", "unixepoch", "strftime", "timediff")
READING = (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE)
FORBIDDEN_FUNCTIONS = ("load_extension", "fts3_tokenizer")
NO_OTHER_FILES = "ATTACH, DETACH and VACUUM are not allowed"
OUT_OF_MEMORY = {"error": "out of memory"}


class _Denied(Exception):
    """The SQL may not do this."""


def write_message(stream: IO[bytes], header: dict[str, Any], data: bytes) -> None:
    """Write a JSON object and the bytes of a database."""
    text = json.dumps(header).encode()
    stream.write(LENGTHS.pack(len(text), len(data)))
    stream.write(text)
    stream.write(data)
    stream.flush()


def read_message(stream: IO[bytes]) -> tuple[dict[str, Any], bytes]:
    """Read what `write_message` wrote; EOFError at the end."""
    text_bytes, data_bytes = LENGTHS.unpack(_read(stream, LENGTHS.size))
    return json.loads(_read(stream, text_bytes)), _read(stream, data_bytes)


def _read(stream: IO[bytes], count: int) -> bytes:
    data = stream.read(count)
    if len(data) < count:
        raise EOFError
    return data


def split_statements(sql: str) -> Iterator[str]:
    """The statements of a script."""
    pending = ""
    for part in sql.split(";"):
        pending += part + ";"
        if sqlite3.complete_statement(pending):
            yield pending
            pending = ""
    if re.sub(r"--[^\n]*|/\*.*?(\*/|$)|\s", "", pending[:-1], flags=re.DOTALL):
        yield pending[:-1]


def open_database(connection: sqlite3.Connection, data: bytes, max_bytes: int) -> None:
    """Give a new connection a copy of the database, which cannot become larger than `max_bytes`."""
    connection.text_factory = lambda text: text.decode("utf-8", "replace")
    if data:
        connection.deserialize(data)
    (page_size,) = connection.execute("PRAGMA page_size").fetchone()
    connection.execute(f"PRAGMA max_page_count = {max(1, max_bytes // page_size)}")
    connection.execute("PRAGMA temp_store = MEMORY")


def restrict(connection: sqlite3.Connection, seconds: float, denied: list[str], actions: set[int]) -> None:
    """Limit what SQL can do on a connection; what it does, and what is denied, is added to `actions` and `denied`."""
    connection.execute("PRAGMA foreign_keys = ON")
    _fix_functions(connection)
    for limit, value in LIMITS.items():
        connection.setlimit(limit, value)

    def authorize(action: int, first: str | None, second: str | None, _database: Any, _trigger: Any) -> int:
        actions.add(action)
        reason = None
        if action in (sqlite3.SQLITE_ATTACH, sqlite3.SQLITE_DETACH):
            reason = NO_OTHER_FILES
        elif action in (sqlite3.SQLITE_CREATE_VTABLE, sqlite3.SQLITE_DROP_VTABLE):
            reason = "virtual tables are not allowed"
        elif action == sqlite3.SQLITE_PRAGMA and str(first).lower() not in PRAGMAS:
            reason = f"PRAGMA {first} is not allowed"
        elif action == sqlite3.SQLITE_FUNCTION and str(second).lower() in FORBIDDEN_FUNCTIONS:
            reason = f"{second}() is not allowed"
        if reason is None:
            return sqlite3.SQLITE_OK
        denied.append(reason)
        return sqlite3.SQLITE_DENY

    connection.set_authorizer(authorize)
    deadline = time.process_time() + seconds
    connection.set_progress_handler(lambda: time.process_time() > deadline, STEPS)


def forbid_other_files(connection: sqlite3.Connection, denied: list[str]) -> None:
    """Refuse ATTACH, and VACUUM INTO, which could read other databases and leave empty files."""

    def authorize(action: int, *_: Any) -> int:
        if action not in (sqlite3.SQLITE_ATTACH, sqlite3.SQLITE_DETACH):
            return sqlite3.SQLITE_OK
        denied.append(NO_OTHER_FILES)
        return sqlite3.SQLITE_DENY

    connection.set_authorizer(authorize)


def _fix_functions(connection: sqlite3.Connection) -> None:
    """Replace the functions whose results vary from call to call."""
    clock, numbers = sqlite3.connect(":memory:"), random.Random(0)

    def at_fixed_time(name: str, *args: Any) -> Any:
        at = 1 if name == "strftime" else 0
        texts = [arg.decode("utf-8", "replace") if isinstance(arg, bytes) else arg for arg in args]
        given = [NOW if isinstance(arg, str) and arg.lower() == "now" else arg for arg in texts] or [NOW]
        given += [NOW] if len(given) == at else []
        return clock.execute(f"SELECT {name}({', '.join('?' * len(given))})", given).fetchone()[0]

    def random_bytes(count: Any) -> bytes:
        wanted = int(count) if isinstance(count, (int, float)) else 1
        return numbers.randbytes(min(max(wanted, 1), MAX_VALUE_BYTES))

    known = {name for (name,) in clock.execute("SELECT name FROM pragma_function_list")}
    for name in known.intersection(TIME_FUNCTIONS):
        connection.create_function(name, -1, lambda *args, name=name: at_fixed_time(name, *args), deterministic=True)
    for name in ("date", "time", "datetime"):
        current = "current_" + name.replace("datetime", "timestamp")
        connection.create_function(current, 0, lambda name=name: at_fixed_time(name))
    connection.create_function("random", 0, lambda: numbers.getrandbits(64) - 2**63)
    connection.create_function("randomblob", 1, random_bytes)


def answer(request: dict[str, Any], data: bytes) -> tuple[dict[str, Any], bytes]:
    """The reply to a request: the last statement's result, or an error; and the database if it is another now."""
    connection = sqlite3.connect(":memory:", isolation_level=None, cached_statements=0)
    denied: list[str] = []
    actions: set[int] = set()
    try:
        open_database(connection, data, request["max_bytes"])
        if request["trusted"]:
            forbid_other_files(connection, denied)
        else:
            restrict(connection, request["seconds"], denied, actions)
        columns: list[str] | None = None
        rows: list[Any] = []
        changed = 0
        for statement in split_statements(request["sql"]):
            cursor = connection.execute(statement)
            columns = None if cursor.description is None else [each[0] for each in cursor.description]
            rows = cursor.fetchmany(request["max_rows"] + 1) if columns is not None else []
            changed = max(0, cursor.rowcount)
            cursor.close()
        if connection.in_transaction:
            raise _Denied("a transaction was left open; end it with COMMIT in the same call. Nothing was changed.")
        only_reads = not request["trusted"] and actions.issubset(READING)
        after = data if only_reads else connection.serialize()
        reply = {
            "columns": columns,
            "rows": [[_plain(value) for value in row] for row in rows[: request["max_rows"]]],
            "more": len(rows) > request["max_rows"],
            "changed": changed,
        }
        return reply, b"" if after == data else after
    except MemoryError:
        return OUT_OF_MEMORY, b""
    except (sqlite3.Error, sqlite3.Warning, _Denied, ValueError, OverflowError) as error:
        if isinstance(error, sqlite3.OperationalError) and str(error) == "interrupted":
            return {"timeout": True}, b""
        return {"error": denied[-1] if denied else str(error)}, b""
    finally:
        connection.set_authorizer(None)
        connection.set_progress_handler(None, 0)
        connection.close()


def _plain(value: Any) -> Any:
    return {"blob": value.hex()} if isinstance(value, bytes) else value


def _limit(what: int, value: int) -> None:
    with contextlib.suppress(OSError, ValueError):  # not every system has all of them
        resource.setrlimit(what, (value, resource.getrlimit(what)[1]))


def main() -> None:
    """Answer requests until there are no more."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    _limit(resource.RLIMIT_FSIZE, 0)
    _limit(resource.RLIMIT_CORE, 0)
    while True:
        _limit(resource.RLIMIT_AS, resource.getrlimit(resource.RLIMIT_AS)[1])
        try:
            request, data = read_message(sys.stdin.buffer)
        except EOFError:
            return
        _limit(resource.RLIMIT_AS, request["memory"])
        _limit(resource.RLIMIT_CPU, math.ceil(time.process_time() + request["seconds"]) + 1)  # SIGXCPU ends the process
        try:
            write_message(sys.stdout.buffer, *answer(request, data))
        except MemoryError:  # when the reply was made JSON: nothing has been written
            write_message(sys.stdout.buffer, OUT_OF_MEMORY, b"")


if __name__ == "__main__":
    main()
