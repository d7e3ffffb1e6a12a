"""The walls around confined code: what a worker builds once, and what every call's process shuts behind itself.

There are three tiers. "namespaces": an empty root with Python's libraries read-only, no network, no other process in
sight, scratch on a small file system in memory, plus all of the next tier. "landlock": the machine's own file system,
of which Landlock shows Python's libraries, and scratch on disk; a shorter list of system calls. "none" has no walls at
all, only limits on memory and files.

The second does not hide that a file or a process exists: code can ask for size and times of a path that it knows. What
root starts there keeps root's number, without any of root's rights.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import stat
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from arpo.tools.sandbox import kernel, seccomp

DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
HERE, ELSEWHERE = "/tmp", "/scratch"  # scratch, as the code sees it; elsewhere if Python itself lies in the first
MAX_FILES, MAX_OPEN, MAX_THREADS = 8192, 128, 64
NOBODY, INSIDE = 65534, 1000  # what root becomes, and the number it has inside
ON_DISK, MAX_DEPTH, MAX_WRITTEN = 1024, 64, 16  # files (removing them takes time), depth, bytes per byte of scratch
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
LANDLOCK_NEEDED = 3  # the first version that also guards against cutting files short


@dataclass(frozen=True, slots=True)
class Limits:
    """What one call may use: bytes of memory above what Python itself has, and bytes of scratch."""

    memory: int
    scratch: int


def missing(tier: str) -> str | None:
    """What this machine lacks for a tier, as far as can be told without trying; None if nothing."""
    if sys.platform != "linux":
        return "Linux is needed"
    if not seccomp.supported():
        return f"the list of system calls is only known for {' and '.join(seccomp.AUDIT_ARCH)}"
    version = kernel.landlock_version()
    if tier == "landlock" and version < LANDLOCK_NEEDED:
        found = f"version {version}" if version else "none"
        return f"Landlock version {LANDLOCK_NEEDED} is needed (Linux 6.2, switched on), there is {found}"
    return None


def enter_namespaces() -> None:
    """Leave the machine's users, mounts, processes, network, messages and names for private ones."""
    user, group = os.geteuid(), os.getegid()
    if user != 0:
        kernel.unshare(kernel.NEW_USER)
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"{INSIDE} {user} 1")
        _write("/proc/self/gid_map", f"{INSIDE} {group} 1")
    else:
        _with_mapper()
    kernel.unshare(kernel.NEW_MOUNT | kernel.NEW_PID | kernel.NEW_NET | kernel.NEW_IPC | kernel.NEW_UTS)


def _with_mapper() -> None:
    """As root: a helper outside maps root, who builds the walls, and nobody, who lives between them."""
    pid, (ready, tell) = os.getpid(), os.pipe()
    helper = os.fork()
    if helper == 0:
        try:
            os.close(tell)
            os.read(ready, 1)
            for name in ("uid_map", "gid_map"):
                _write(f"/proc/{pid}/{name}", f"0 0 1\n{INSIDE} {NOBODY} 1\n")
            os._exit(0)
        except OSError:
            os._exit(1)
    os.close(ready)
    kernel.unshare(kernel.NEW_USER)
    os.close(tell)
    if os.waitpid(helper, 0)[1] != 0:
        raise PermissionError("root may not map other users here")


def scratch_place(readable: list[str]) -> str:
    """Where scratch goes in the new root: it must not hide anything that is to be read."""
    return ELSEWHERE if any(f"{path}/".startswith(f"{HERE}/") for path in readable) else HERE


def build_root(at: str, readable: list[str]) -> None:
    """Build a root folder at `at` that holds `readable` and a few devices, nothing of it writable."""
    kernel.mount("none", "/", None, kernel.MS_RECURSIVE | kernel.MS_PRIVATE)
    kernel.mount("sandbox", at, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "size=1m,mode=755")
    for path in readable:
        target = at + path
        if os.path.lexists(target):
            continue
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if os.path.islink(path) and os.path.dirname(path) == "/":  # /lib -> usr/lib
            os.symlink(os.readlink(path), target)
            continue
        os.mkdir(target)
        kernel.bind(path, target, kernel.MS_READONLY | kernel.MS_NOSUID | kernel.MS_NODEV)
    for path in DEVICES:
        os.makedirs(os.path.dirname(at + path), exist_ok=True)
        _write(at + path, "")
        kernel.bind(path, at + path, kernel.MS_READONLY | kernel.MS_NOSUID | kernel.MS_NOEXEC)
    os.mkdir(at + scratch_place(readable))
    kernel.mount("none", at, None, kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_READONLY | kernel.MS_NOSUID)


def mount_scratch(place: str, limits: Limits) -> None:
    """A file system in memory at `place`, of limited size, for one worker."""
    kernel.unshare(kernel.NEW_MOUNT)
    flags = kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC
    kernel.mount("scratch", place, "tmpfs", flags, f"size={limits.scratch},nr_inodes={MAX_FILES},mode=777")


class Seal:
    """Everything prepared that can be, so that shutting a process in takes a few system calls."""

    def __init__(self, tier: str, limits: Limits, base_memory: int, readable: list[str], scratch: str) -> None:
        self.tier, self.limits, self.base_memory = tier, limits, base_memory
        self.ruleset = -1
        if tier != "none":
            apart = tier == "namespaces"
            self.program = seccomp.program(apart)
            if kernel.landlock_version() >= LANDLOCK_NEEDED:
                readable = ["/"] if apart else readable
                self.ruleset = kernel.landlock_rules([*readable, *DEVICES[1:]], [scratch, DEVICES[0]])

    def shut(self) -> None:
        """Confine this process, for good. What it does after this is the code's doing."""
        apart = self.tier == "namespaces"
        if apart and os.getuid() == 0:
            os.setgroups([])
            os.setresgid(INSIDE, INSIDE, INSIDE)
            os.setresuid(INSIDE, INSIDE, INSIDE)
        for kind, value in (
            (resource.RLIMIT_AS, self.base_memory + self.limits.memory),
            (resource.RLIMIT_FSIZE, self.limits.scratch),
            (resource.RLIMIT_NOFILE, MAX_OPEN),
            (resource.RLIMIT_CORE, 1),  # with 0, a program that collects core dumps would still be started
            (resource.RLIMIT_MEMLOCK, 0),
        ):
            allowed = resource.getrlimit(kind)[1]
            limit = value if allowed == resource.RLIM_INFINITY else min(value, allowed)
            resource.setrlimit(kind, (limit, limit))
        if self.tier == "none":
            kernel.die_with_parent()
            return
        if apart:
            kernel.unshare(kernel.NEW_USER)  # threads are counted per namespace: its own count, and its own limit
            resource.setrlimit(resource.RLIMIT_NPROC, (MAX_THREADS, MAX_THREADS))
        kernel.drop_capabilities()
        kernel.no_new_privileges()
        if not apart:
            kernel.let_look_in(True)  # for the worker, which counts what is written
        if self.ruleset >= 0:
            kernel.landlock_apply(self.ruleset)
        kernel.die_with_parent()
        kernel.install_filter(self.program)


def wipe(folder: str) -> None:
    """Empty a folder that confined code has filled, however deep: what lies below is moved up, level by level."""
    os.chmod(folder, 0o777)
    top = os.open(folder, _FOLDER)
    fresh = (f"{os.urandom(8).hex()}{number}" for number in itertools.count())
    try:
        while names := os.listdir(top):
            for name in names:
                if _opened_up(name, top):
                    _lift(name, top, fresh)
                else:
                    os.unlink(name, dir_fd=top)
    finally:
        os.close(top)


def remove(folder: str) -> None:
    """Empty a folder and remove it, if it is there."""
    with contextlib.suppress(FileNotFoundError):
        wipe(folder)
        os.rmdir(folder)


def _lift(name: str, top: int, fresh: Iterator[str]) -> None:
    """Move what a folder holds one level up, and remove it."""
    below = os.open(name, _FOLDER, dir_fd=top)
    try:
        for inner in os.listdir(below):
            _opened_up(inner, below)
            os.rename(inner, next(fresh), src_dir_fd=below, dst_dir_fd=top)
    finally:
        os.close(below)
    os.rmdir(name, dir_fd=top)


def _opened_up(name: str, parent: int) -> bool:
    """Whether this is a folder; if so, its owner may do all with it from now on. A link is not followed."""
    folder = stat.S_ISDIR(os.lstat(name, dir_fd=parent).st_mode)
    if folder:
        os.chmod(name, 0o700, dir_fd=parent)
    return folder


class Disk:
    """What a process puts into a folder on disk, where no file system limits it."""

    def __init__(self, folder: str, limit: int, pid: int) -> None:
        self.folder, self.limit = folder, limit
        self.account = open(f"/proc/{pid}/io")  # noqa: SIM115 (closed in `close`)

    def overfull(self) -> bool:
        """Whether it is more than the limit, or where nobody can see it."""
        self.account.seek(0)
        written = next(int(line.split()[1]) for line in self.account if line.startswith("wchar"))
        if written > MAX_WRITTEN * self.limit:  # files that have no name take up space, too
            return True
        total = 0
        try:
            for count, size in enumerate(_sizes(os.open(self.folder, _FOLDER), 0), 1):
                total += size
                if total > self.limit or count > ON_DISK:
                    return True
        except OSError:
            return True
        return False

    def close(self) -> None:
        """Look no more."""
        self.account.close()


def _sizes(folder: int, depth: int) -> Iterator[int]:
    """Bytes on disk of all that lies below an open folder, which is closed; OSError if something cannot be seen."""
    try:
        for name in os.listdir(folder):
            try:
                info = os.lstat(name, dir_fd=folder)
                yield info.st_blocks * 512
                if stat.S_ISDIR(info.st_mode):
                    if depth == MAX_DEPTH:
                        raise PermissionError("too deep")
                    yield from _sizes(os.open(name, _FOLDER, dir_fd=folder), depth + 1)
            except (FileNotFoundError, NotADirectoryError):  # gone in the meantime
                continue
    finally:
        os.close(folder)


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)
