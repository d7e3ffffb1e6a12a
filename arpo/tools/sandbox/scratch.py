"""Scratch directories that confined code has written to: clearing them, and limiting them on disk."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import stat
from collections.abc import Iterator

MAX_FILES, MAX_DEPTH = 1024, 64  # removing files takes time
MAX_WRITTEN = 16  # bytes written for each byte of scratch
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def clear(directory: str) -> None:
    """Empty a directory of any depth, by moving its contents up level by level."""
    os.chmod(directory, 0o777)
    root = os.open(directory, _DIRECTORY)
    new_names = (f"{os.urandom(8).hex()}{number}" for number in itertools.count())
    try:
        while names := os.listdir(root):
            for name in names:
                if _unlock_directory(name, root):
                    _lift(name, root, new_names)
                else:
                    os.unlink(name, dir_fd=root)
    finally:
        os.close(root)


def remove(directory: str) -> None:
    """Empty a directory and remove it, if it exists."""
    with contextlib.suppress(FileNotFoundError):
        try:
            os.rmdir(directory)
        except OSError as error:
            if error.errno != errno.ENOTEMPTY:
                raise
            clear(directory)
            os.rmdir(directory)


def _lift(name: str, root: int, new_names: Iterator[str]) -> None:
    """Move the contents of a directory one level up, and remove it."""
    below = os.open(name, _DIRECTORY, dir_fd=root)
    try:
        for inner in os.listdir(below):
            _unlock_directory(inner, below)
            os.rename(inner, next(new_names), src_dir_fd=below, dst_dir_fd=root)
    finally:
        os.close(below)
    os.rmdir(name, dir_fd=root)


def _unlock_directory(name: str, parent: int) -> bool:
    """Return whether this is a directory (not a link to one), and give its owner all permissions."""
    is_directory = stat.S_ISDIR(os.lstat(name, dir_fd=parent).st_mode)
    if is_directory:
        os.chmod(name, 0o700, dir_fd=parent)
    return is_directory


class DiskMonitor:
    """Limits what a process writes to a directory on disk, where no file system does."""

    def __init__(self, directory: str, limit: int, pid: int) -> None:
        self.directory, self.limit = directory, limit
        self.account = os.open(f"/proc/{pid}/io", os.O_RDONLY | os.O_CLOEXEC)

    def exceeded(self) -> bool:
        """Return whether it is more than the limit, or cannot be seen."""
        try:
            counts = os.pread(self.account, 4096, 0).split()
        except ProcessLookupError:  # it has ended
            return False
        written = int(counts[counts.index(b"wchar:") + 1])
        if written > MAX_WRITTEN * self.limit:  # unlinked files take up space, too
            return True
        total = 0
        try:
            for count, size in enumerate(_sizes(os.open(self.directory, _DIRECTORY), 0), 1):
                total += size
                if total > self.limit or count > MAX_FILES:
                    return True
        except OSError:
            return True
        return False

    def close(self) -> None:
        """Stop monitoring."""
        os.close(self.account)


def _sizes(directory: int, depth: int) -> Iterator[int]:
    """Yield the bytes on disk of everything below an open directory, and close it; OSError if something is hidden."""
    try:
        for name in os.listdir(directory):
            try:
                info = os.lstat(name, dir_fd=directory)
                yield info.st_blocks * 512
                if stat.S_ISDIR(info.st_mode):
                    if depth == MAX_DEPTH:
                        raise PermissionError("too deep")
                    yield from _sizes(os.open(name, _DIRECTORY, dir_fd=directory), depth + 1)
            except (FileNotFoundError, NotADirectoryError):  # removed in the meantime
                continue
    finally:
        os.close(directory)
