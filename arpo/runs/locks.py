"""The lock of a directory: one process writes there, and others can see that it does.

Promises: a lock ends with its process. Whoever only looks never keeps a writer out.
Does not cover: network file systems without flock.
"""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from typing import IO

from arpo.errors import ArpoError

LOCK = "run.lock"
TRIES = 5  # 20 ms apart: `is_live` holds the lock for a moment


def take_lock(directory: Path, what: str = "run", option: str = "run.dir") -> IO[str]:
    """The lock of a directory, held until it is closed; whoever meets one that is held is told what to change."""
    path = directory / LOCK
    try:
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
        raise ArpoError(
            f"{path}: another process (pid {holder}) is writing this {what}; stop it or choose another {option}"
        ) from None
    except OSError as error:
        raise ArpoError(f"{path}: cannot be locked: {error.strerror}") from error
    file.truncate(0)
    file.write(f"{os.getpid()}\n")
    file.flush()
    return file


def is_live(directory: Path) -> bool:
    """Whether a process holds the lock now."""
    try:
        with (directory / LOCK).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
