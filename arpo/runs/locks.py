"""Locks of directories: one process writes at a time, and others can see whether one does.

Guarantees: a lock ends with its process; checking it never keeps a writer out.
Not covered: network file systems without flock.
"""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from typing import IO

from arpo.config.files import require_regular_file
from arpo.errors import ArpoError
from arpo.runs.storage import writing

LOCK_FILE = "run.lock"
TRIES = 5  # 20 ms apart, because `is_live` holds the lock for a moment


def acquire_lock(directory: Path, what: str = "run", option: str = "run.dir") -> IO[str]:
    """Lock a directory until the returned file is closed; ArpoError if another process holds the lock."""
    path = directory / LOCK_FILE
    try:
        if path.exists():
            require_regular_file(path)
        file = path.open("a+", encoding="ascii")
        for left in reversed(range(TRIES)):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not left:
                    raise
                time.sleep(0.02)
    except BlockingIOError:
        holder = path.read_text(encoding="ascii").strip() or "unknown"
        who = "this program itself" if holder == str(os.getpid()) else f"another process (pid {holder})"
        raise ArpoError(f"{path}: {who} is writing this {what}; stop it or choose another {option}") from None
    except OSError as error:
        raise ArpoError(f"{path}: cannot be locked: {error.strerror}") from error
    with writing(path):
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
    return file


def is_live(directory: Path) -> bool:
    """Whether a process holds the lock."""
    try:
        with require_regular_file(directory / LOCK_FILE).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except (OSError, ArpoError):
        return False
    return False
