"""A file system that refuses to write, told as one message: which file, why, and what to do.

    with writing(path):
        ...                              # StorageError if the disk is full, read-only, broken or gone

Guarantees: also errors that libraries wrap in types of their own are recognized, by the system's words for them.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from arpo.errors import ArpoError

AGAIN = "then repeat the command (a run continues with --resume)"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_BROKEN = (errno.EROFS, errno.EIO, errno.ESTALE)
_REFUSED = (errno.EACCES, errno.EPERM)
_GONE = (errno.ENOENT, errno.ENOTDIR)


class StorageError(ArpoError):
    """A file could not be written, because of the file system; nothing that the user set is wrong."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise StorageError if the file system refuses what the block writes to `path`, a file or a directory."""
    try:
        yield
    except StorageError:
        raise
    except Exception as error:  # safetensors, tokenizers and torch have their own types
        code = _code(error, _FULL + _BROKEN + _REFUSED + _GONE)
        if code is None:
            raise
        raise _storage_error(error, code, path) from error


def disk_error(error: Exception) -> StorageError | None:
    """The message for an error that only a full or broken disk causes, wherever it was raised; None for any other."""
    code = _code(error, (*_FULL, errno.EROFS, errno.EIO))
    return None if code is None else _storage_error(error, code, None)


def _code(error: Exception, codes: tuple[int, ...]) -> int | None:
    """The number of a system error, which other libraries have only as text; None if it is not one of `codes`."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno if error.errno in codes else None
    return next((code for code in codes if os.strerror(code) in str(error)), None)


def _storage_error(error: Exception, code: int, path: Path | None) -> StorageError:
    named = getattr(error, "filename", None)
    place = Path(os.fsdecode(named)) if isinstance(named, str | bytes) else path
    if isinstance(error, ArpoError):  # it says which rank
        head = str(error)
    else:
        head = f"{place}: cannot be written: {os.strerror(code)}" if place else os.strerror(code)
    return StorageError(f"{head}. {_advice(code, place)}")


def _advice(code: int, path: Path | None) -> str:
    if path is None:
        return f"Check the disks that are written to (`df` shows how full they are), {AGAIN}"
    folder = next((each for each in (path, *path.absolute().parents) if each.is_dir()), Path("/"))
    if code == errno.EFBIG:
        return f"Files of this size are not allowed (`ulimit -f` shows the limit): raise the limit, {AGAIN}"
    if code in _FULL:
        return f"{_space(folder)}: free some space there, {AGAIN}"
    if code in _REFUSED or code == errno.EROFS:
        return f"Make {folder} writable, {AGAIN}"
    if code in _GONE:
        return "Its directory was deleted or moved while it was written: put it back, or choose another one"
    return f"The disk reports an error (`dmesg` may say more): check it, {AGAIN}"


def _space(folder: Path) -> str:
    mount = next(each for each in (folder.resolve(), *folder.resolve().parents) if each.is_mount())
    stats = os.statvfs(folder)
    if stats.f_files and not stats.f_favail:
        return f"The file system {mount} can hold no more files"
    free, total = (blocks * stats.f_frsize for blocks in (stats.f_bavail, stats.f_blocks))
    return f"The file system {mount} has {_size(free)} free of {_size(total)}"


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
