"""Linux system calls that Python does not offer; each raises OSError with its own name."""

from __future__ import annotations

import ctypes
import fcntl
import functools
import mmap
import os
import platform
import struct
from dataclasses import dataclass

NEW_MOUNT, NEW_UTS, NEW_IPC = 0x00020000, 0x04000000, 0x08000000
NEW_USER, NEW_PID, NEW_NET = 0x10000000, 0x20000000, 0x40000000
MS_READONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_REMOUNT, MS_BIND, MS_RECURSIVE, MS_PRIVATE = 32, 4096, 16384, 1 << 18
_ATTR = {MS_READONLY: 1, MS_NOSUID: 2, MS_NODEV: 4, MS_NOEXEC: 8}
_DETACH, _AT_RECURSIVE, _AT_FDCWD = 2, 0x8000, -100
_X86 = platform.machine() == "x86_64"
_SYS = {
    "seccomp": 317 if _X86 else 277,
    "pivot_root": 155 if _X86 else 41,
    "capset": 126 if _X86 else 91,
    "mount_setattr": 442,
    "landlock_create_ruleset": 444,
    "landlock_add_rule": 445,
    "landlock_restrict_self": 446,
}
_libc = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 1, 4, 38

# Landlock: all rights on files, by version of its interface
LANDLOCK_ALL = {1: 0x1FFF, 2: 0x3FFF, 3: 0x7FFF, 4: 0x7FFF, 5: 0xFFFF}
LANDLOCK_READ = 0x4 | 0x8  # read files (also needed to map a library), list directories
LANDLOCK_WRITE = 0xFFFF  # everything
LANDLOCK_FILE = 0x1 | 0x2 | 0x4 | 0x4000 | 0x8000  # what can be granted on something that is not a directory


def _check(result: int, what: str) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result


def _syscall(name: str, *args: object) -> int:
    return _check(_libc.syscall(ctypes.c_long(_SYS[name]), *args), name)


def unshare(flags: int) -> None:
    """Move to new namespaces of the kinds in `flags`."""
    _check(_libc.unshare(ctypes.c_int(flags)), "unshare")


def setns(fd: int, kind: int) -> None:
    """Enter the namespace that `fd` refers to."""
    _check(_libc.setns(ctypes.c_int(fd), ctypes.c_int(kind)), "setns")


def mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    """mount(2)."""
    encoded = None if kind is None else kind.encode()
    result = _libc.mount(
        os.fsencode(source), os.fsencode(target), encoded, ctypes.c_ulong(flags), options.encode() or None
    )
    _check(result, f"mount {target}")


def bind(source: str, target: str, flags: int) -> None:
    """Bind-mount `source` at `target`, recursively, with `flags` (MS_READONLY...)."""
    mount(source, target, None, MS_BIND | MS_RECURSIVE)
    attributes = sum(bit for flag, bit in _ATTR.items() if flags & flag)
    setting = struct.pack("QQQQ", attributes, 0, 0, 0)
    try:
        _syscall("mount_setattr", _AT_FDCWD, os.fsencode(target), _AT_RECURSIVE, setting, ctypes.c_size_t(len(setting)))
    except OSError as error:
        if error.errno != 38:  # ENOSYS: before Linux 5.12
            raise
        present = os.statvfs(target).f_flag & (MS_READONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC)
        mount("none", target, None, MS_REMOUNT | MS_BIND | flags | present)


def unmount(target: str) -> None:
    """Unmount what is mounted at `target`; it is gone when nothing uses it any more."""
    _check(_libc.umount2(os.fsencode(target), ctypes.c_int(_DETACH)), f"umount {target}")


def pivot_to(root: str) -> None:
    """Make `root` the root directory and unmount the old one."""
    os.chdir(root)
    _syscall("pivot_root", b".", b".")
    unmount(".")
    os.chdir("/")


def wait_into(pid: int, status: mmap.mmap) -> None:
    """Wait for a child and have the kernel write its wait status into `status`, and nowhere else."""
    _check(_libc.waitpid(ctypes.c_int(pid), (ctypes.c_int * 1).from_buffer(status), 0), "waitpid")


def drop_capabilities() -> None:
    """Give up every capability, for good."""
    header = struct.pack("Ii", 0x20080522, 0)
    _syscall("capset", header, bytes(24))


def no_new_privileges() -> None:
    """Prevent all programs executed from now on from gaining privileges; Landlock and seccomp need it."""
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends."""
    _check(_libc.prctl(_PR_SET_PDEATHSIG, 9, 0, 0, 0), "prctl")


def set_dumpable(allowed: bool) -> None:
    """Set whether processes of the same user may read this one through /proc."""
    _check(_libc.prctl(_PR_SET_DUMPABLE, int(allowed), 0, 0, 0), "prctl")


def prepare_filter(program: bytes) -> tuple[bytes, object]:
    """Return a seccomp filter as `install_filter` needs it, and the buffer that it points to."""
    buffer = ctypes.create_string_buffer(program, len(program))
    return struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(buffer)), buffer


def install_filter(prepared: tuple[bytes, object]) -> None:
    """Install a seccomp filter for this process and its children."""
    _syscall("seccomp", 1, 0, prepared[0])


def install_listener(prepared: tuple[bytes, object]) -> int:
    """Install a seccomp filter for this process and its children; return a descriptor of what it asks about."""
    return _syscall("seccomp", 1, 8, prepared[0])


@dataclass(frozen=True, slots=True)
class Notification:
    """A system call of `pid` (a thread's number, if it has several) that waits for an answer."""

    id: int
    pid: int
    number: int
    argument: int


def receive_notification(listener: int) -> Notification:
    """Return the next call that waits for an answer; FileNotFoundError if its process was killed."""
    buffer = bytearray(80)
    fcntl.ioctl(listener, 0xC0502100, buffer)
    found, pid, _, number, _, _, argument = struct.unpack_from("QIIiIQQ", buffer)
    return Notification(found, pid, number, argument)


def answer_notification(
    listener: int, found: Notification, value: int = 0, error: int = 0, go_on: bool = False
) -> None:
    """Have the call return a value or fail, or make it (`go_on`); FileNotFoundError if its process was killed."""
    fcntl.ioctl(listener, 0xC0182101, struct.pack("QqiI", found.id, value, -error, int(go_on)))


def still_waits(listener: int, found: Notification) -> bool:
    """Return whether the process still waits, so that its number is still its own."""
    try:
        fcntl.ioctl(listener, 0x40082102, struct.pack("Q", found.id))
    except FileNotFoundError:
        return False
    return True


def give_descriptor(listener: int, found: Notification, ours: int, theirs: int) -> None:
    """Put a copy of our descriptor in the place of theirs, in the process that waits."""
    fcntl.ioctl(listener, 0x40182103, struct.pack("QIIII", found.id, 1, ours, theirs, 0))


@functools.cache
def landlock_version() -> int:
    """Return the version of Landlock's interface; 0 if there is none."""
    try:
        return _syscall("landlock_create_ruleset", None, ctypes.c_size_t(0), 1)
    except OSError:
        return 0


def landlock_rule(path: str, rights: int) -> bytes:
    """Return a rule that grants rights on a path, and all below it; keeps a descriptor of the path open."""
    granted = rights & LANDLOCK_ALL[min(landlock_version(), 5)]
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    return struct.pack("=Qi", granted if os.path.isdir(path) else granted & LANDLOCK_FILE, fd)


def landlock_restrict(rules: list[bytes]) -> None:
    """Deny this process and its children all files but those of the rules, and the network."""
    version = landlock_version()
    attributes = struct.pack("QQQ", LANDLOCK_ALL[min(version, 5)], 3 if version >= 4 else 0, 3 if version >= 6 else 0)
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    ruleset = _syscall("landlock_create_ruleset", attributes[:size], ctypes.c_size_t(size), 0)
    for rule in rules:
        _syscall("landlock_add_rule", ruleset, 1, rule, 0)
    _syscall("landlock_restrict_self", ruleset, 0)
