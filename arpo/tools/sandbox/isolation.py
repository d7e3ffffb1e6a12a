"""Confinement of code: what a worker sets up once, and what the process of each call does to confine itself.

There are three tiers. "namespaces": an empty root with Python's libraries read-only, no network, no other processes
visible, scratch on a small tmpfs, plus all of the next tier. "landlock": the machine's own file system, of which
Landlock lets through Python's libraries and scratch on disk, and a shorter list of system calls. "none": only limits
on memory and files.

"landlock" does not hide that a file or a process exists: code can ask for size and times of a path that it knows, also
below /proc, but opens none. Code started by root there keeps uid 0, without root's capabilities.
"""

from __future__ import annotations

import os
import resource
import socket
import sys
from contextlib import suppress

from arpo.tools.sandbox import linux, seccomp

DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
SCRATCH, SCRATCH_ELSEWHERE = "/tmp", "/scratch"  # as the code sees it; the second if Python itself is in /tmp
MAX_FILES, MAX_OPEN, MAX_THREADS = 8192, 128, 64
MAX_NODES = 128  # frozen processes of one session
NOBODY, INSIDE = 65534, 1000  # the uid that root changes to, and what it is mapped to inside
_SCRATCH_FLAGS = linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC
LANDLOCK_NEEDED = 3  # the first version that also covers truncation


def missing_support(tier: str) -> str | None:
    """Return what this machine lacks for a tier, as far as can be told without trying, or None."""
    if sys.platform != "linux":
        return "Linux is needed"
    if not seccomp.supported():
        return f"the list of system calls is only known for {' and '.join(seccomp.AUDIT_ARCH)}"
    version = linux.landlock_version()
    if tier == "landlock" and version < LANDLOCK_NEEDED:
        found = f"version {version}" if version else "none"
        return f"Landlock version {LANDLOCK_NEEDED} is needed (Linux 6.2, switched on), there is {found}"
    return None


def be_killed_first() -> None:
    """Have the kernel kill this process and its children first when memory runs out, where that is allowed."""
    with suppress(OSError):
        _write("/proc/self/oom_score_adj", "1000")


def enter_namespaces() -> None:
    """Move to new namespaces of users, mounts, processes, network, IPC and host names."""
    user, group = os.geteuid(), os.getegid()
    if user != 0:
        linux.unshare(linux.NEW_USER)
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"{INSIDE} {user} 1")
        _write("/proc/self/gid_map", f"{INSIDE} {group} 1")
    else:
        _enter_as_root()
    linux.unshare(linux.NEW_MOUNT | linux.NEW_PID | linux.NEW_NET | linux.NEW_IPC | linux.NEW_UTS)


def _enter_as_root() -> None:
    """Enter a user namespace as root; a helper outside maps root, which sets up, and nobody, which runs the code."""
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
    linux.unshare(linux.NEW_USER)
    os.close(tell)
    if os.waitpid(helper, 0)[1] != 0:
        raise PermissionError("root may not map other users here")


def scratch_dir(readable: list[str]) -> str:
    """Return where scratch is mounted in the new root; it must not hide a readable path."""
    return SCRATCH_ELSEWHERE if any(f"{path}/".startswith(f"{SCRATCH}/") for path in readable) else SCRATCH


def build_root(at: str, readable: list[str]) -> None:
    """Build a read-only root directory at `at` that holds `readable` and a few devices."""
    linux.mount("none", "/", None, linux.MS_RECURSIVE | linux.MS_PRIVATE)
    linux.mount("sandbox", at, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, "size=1m,mode=755")
    for path in readable:
        target = at + path
        if os.path.lexists(target):
            continue
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if os.path.islink(path) and os.path.dirname(path) == "/":  # /lib -> usr/lib
            os.symlink(os.readlink(path), target)
            continue
        os.mkdir(target)
        linux.bind(path, target, linux.MS_READONLY | linux.MS_NOSUID | linux.MS_NODEV)
    for path in DEVICES:
        os.makedirs(os.path.dirname(at + path), exist_ok=True)
        _write(at + path, "")
        linux.bind(path, at + path, linux.MS_READONLY | linux.MS_NOSUID | linux.MS_NOEXEC)
    os.mkdir(at + scratch_dir(readable))
    linux.mount("none", at, None, linux.MS_REMOUNT | linux.MS_BIND | linux.MS_READONLY | linux.MS_NOSUID)


def mount_scratch(at: str, size: int) -> None:
    """Mount a new tmpfs of `size` bytes at `at`."""
    linux.mount("scratch", at, "tmpfs", _SCRATCH_FLAGS, f"size={size},nr_inodes={MAX_FILES},mode=777")


def freeze_scratch(at: str) -> None:
    """Make the file system mounted at `at` read-only, wherever else it is seen; OSError if a file is in use."""
    linux.mount("none", at, None, linux.MS_REMOUNT | linux.MS_READONLY | _SCRATCH_FLAGS)


class Confinement:
    """Confines a process with few system calls; everything that can be is prepared in advance.

    `max_memory` is the whole address space and `max_scratch` the size of scratch, in bytes. The process of a `session`
    asks its worker before it forks (`seccomp`).
    """

    def __init__(
        self, tier: str, max_memory: int, max_scratch: int, readable: list[str], session: bool = False
    ) -> None:
        self.tier, self.session = tier, session
        self.max_processes = MAX_THREADS + (MAX_NODES if session else 0)
        self.notify = linux.prepare_filter(seccomp.notify_program()) if session else None
        limits = {
            resource.RLIMIT_AS: max_memory,
            resource.RLIMIT_FSIZE: max_scratch,
            resource.RLIMIT_NOFILE: MAX_OPEN,
            resource.RLIMIT_CORE: 1,  # with 0, a handler of core dumps would still be started
            resource.RLIMIT_MEMLOCK: 0,
        }
        allowed = {kind: resource.getrlimit(kind)[1] % (1 << 64) for kind in limits}  # RLIM_INFINITY is -1
        self.limits = [(kind, min(limit, allowed[kind])) for kind, limit in limits.items()]
        self.rules: list[bytes] = []
        if tier != "none":
            namespaces = tier == "namespaces"
            self.filter = linux.prepare_filter(seccomp.program(namespaces, session=session))
            if linux.landlock_version() >= LANDLOCK_NEEDED:
                readable = [*(["/"] if namespaces else readable), *DEVICES[1:]]
                self.rules = [linux.landlock_rule(path, linux.LANDLOCK_READ) for path in readable]
                self.rules.append(linux.landlock_rule(DEVICES[0], linux.LANDLOCK_WRITE))

    def apply(self, scratch: str, worker: socket.socket | None = None) -> None:
        """Confine this process, which may write only to the directory `scratch`, for good.

        The worker of a session is sent the descriptor by which it is asked.
        """
        namespaces = self.tier == "namespaces"
        if namespaces and os.getuid() == 0:
            os.setgroups([])
            os.setresgid(INSIDE, INSIDE, INSIDE)
            os.setresuid(INSIDE, INSIDE, INSIDE)
        for kind, limit in self.limits:
            resource.setrlimit(kind, (limit, limit))
        if self.tier == "none":
            linux.die_with_parent()
            self._ask(worker)
            return
        if namespaces:
            linux.unshare(linux.NEW_USER)  # threads are counted and limited per user namespace
            resource.setrlimit(resource.RLIMIT_NPROC, (self.max_processes, self.max_processes))
        linux.drop_capabilities()
        linux.no_new_privileges()
        if not namespaces or self.session:
            linux.set_dumpable(True)  # for the worker, which counts the bytes written or the descriptors
        if self.rules:
            linux.landlock_restrict([*self.rules, linux.landlock_rule(scratch, linux.LANDLOCK_WRITE)])
        linux.die_with_parent()
        self._ask(worker)
        linux.install_filter(self.filter)

    def _ask(self, worker: socket.socket | None) -> None:
        """From now on, ask the worker of the session about what `seccomp.notify_program` names."""
        if worker is not None and self.notify is not None:
            linux.no_new_privileges()
            socket.send_fds(worker, [b"l"], [linux.install_listener(self.notify)])


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)
