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
DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def clear(directory: str) -> None:
    """Empty a directory of any depth, by moving its contents up level by level."""
    os.chmod(directory, 0o777)
    root = os.open(directory, DIRECTORY)
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


def is_small(directory: str) -> bool:
    """Return whether a directory holds few enough files, none of them too deep, to be copied."""
    try:
        return sum(1 for _ in _sizes(os.open(directory, DIRECTORY), 0)) <= MAX_FILES
    except PermissionError:
        return False


def copy(source: int, target: int) -> None:
    """Copy everything below one open directory into another, which is empty, with owners, permissions and times.

    Files with several names stay one file. There are only directories, files and symbolic links.
    """
    _copy(source, target, {}, target, ())


def _copy(source: int, target: int, linked: dict[int, tuple[str, ...]], root: int, path: tuple[str, ...]) -> None:
    """`path` is that of the directory, `linked` that of each file with several names; they may be too long for one
    system call."""
    for name in os.listdir(source):
        info = os.lstat(name, dir_fd=source)
        if info.st_ino in linked:
            _link(root, linked[info.st_ino], name, target)
            continue
        if stat.S_ISDIR(info.st_mode):
            os.mkdir(name, 0o700, dir_fd=target)
            below, new = (os.open(name, DIRECTORY, dir_fd=parent) for parent in (source, target))
            try:
                _copy(below, new, linked, root, (*path, name))
            finally:
                os.close(below)
                os.close(new)
        elif stat.S_ISLNK(info.st_mode):
            os.symlink(os.readlink(name, dir_fd=source), name, dir_fd=target)
        else:
            _copy_file(name, source, target, info.st_size)
        os.chown(name, info.st_uid, info.st_gid, dir_fd=target, follow_symlinks=False)
        if not stat.S_ISLNK(info.st_mode):
            os.chmod(name, stat.S_IMODE(info.st_mode), dir_fd=target)
            if info.st_nlink > 1 and not stat.S_ISDIR(info.st_mode):
                linked[info.st_ino] = (*path, name)
        os.utime(name, ns=(info.st_atime_ns, info.st_mtime_ns), dir_fd=target, follow_symlinks=False)
    info = os.fstat(source)
    os.fchmod(target, stat.S_IMODE(info.st_mode))


def _link(root: int, path: tuple[str, ...], name: str, target: int) -> None:
    """Give the file at a path below `root` another name, in the directory `target`."""
    parent = os.dup(root)
    try:
        for folder in path[:-1]:
            below = os.open(folder, DIRECTORY, dir_fd=parent)
            os.close(parent)
            parent = below
        os.link(path[-1], name, src_dir_fd=parent, dst_dir_fd=target, follow_symlinks=False)
    finally:
        os.close(parent)


def _copy_file(name: str, source: int, target: int, size: int) -> None:
    """Copy the contents of a file, and leave its holes."""
    old = os.open(name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=source)
    new = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=target)
    try:
        os.ftruncate(new, size)
        end = 0
        while end < size:
            start = os.lseek(old, end, os.SEEK_DATA)
            end = os.lseek(old, start, os.SEEK_HOLE)
            os.lseek(new, start, os.SEEK_SET)
            while start < end:
                start += os.sendfile(new, old, start, end - start)
    except OSError as error:
        if error.errno != errno.ENXIO:  # no data from there on
            raise
    finally:
        os.close(old)
        os.close(new)


def _lift(name: str, root: int, new_names: Iterator[str]) -> None:
    """Move the contents of a directory one level up, and remove it."""
    below = os.open(name, DIRECTORY, dir_fd=root)
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
            for count, size in enumerate(_sizes(os.open(self.directory, DIRECTORY), 0), 1):
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
                    yield from _sizes(os.open(name, DIRECTORY, dir_fd=directory), depth + 1)
            except (FileNotFoundError, NotADirectoryError):  # removed in the meantime
                continue
    finally:
        os.close(directory)
