"""The system calls that confined code may make: an allow-list, compiled to a BPF program.

Everything else fails with EPERM: sockets, programs, processes, signals to others, shared memory, namespaces, keys,
tracing. Of some calls the arguments are checked. Without namespaces the list is shorter: no threads (nothing would
limit their number), no change of permissions or times (no file system would refuse it), no look at the space that is
left on the disk, and no disk space but by writing (the worker counts the bytes written).

Locks on files, and advice about them, would reach other calls through the libraries, which all calls share. They
succeed and do nothing: a call is alone with its own files. So does a limit on its own CPU time, which would have the
kernel kill it as if memory had run out. Futexes on a page of a library would also reach other calls, so only waiting,
which the C library needs to join a thread, is allowed on shared ones. Clocks and CPU affinities of other processes
cannot be read.

A session has two filters. `notify_program` stops a process at two calls and asks the session worker, which answers:
PAUSE, by which a process waits for orders, and a clone with exactly the flags FORK. `program(..., session=True)` is the
list as above, with these two added and with all left out that would connect a fork to its parent or run while its
process waits: shared memory and timers. The numbers of processes and of descriptors cannot be limited further, as a
fork, and new streams for it, would then fail: that succeeds and does nothing.
"""

from __future__ import annotations

import errno
import platform
import struct
from collections.abc import Sequence

ALLOW, NOTIFY, KILL = 0x7FFF0000, 0x7FC00000, 0x80000000
DENY, ABSENT, DO_NOTHING = 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS, 0x00050000
AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
X32_BIT = 0x40000000

# name, number on x86_64, number on aarch64 (- where it does not exist)
_TABLE = """
read 0 63, write 1 64, close 3 57, fstat 5 80, lseek 8 62, mprotect 10 226, munmap 11 215, brk 12 214,
rt_sigaction 13 134, rt_sigprocmask 14 135, rt_sigreturn 15 139, rt_sigpending 127 136, rt_sigtimedwait 128 137,
rt_sigsuspend 130 133, sigaltstack 131 132, pread64 17 67, pwrite64 18 68, readv 19 65, writev 20 66, preadv 295 69,
pwritev 296 70, sched_yield 24 124, mremap 25 216, msync 26 227, madvise 28 233, dup 32 23, dup2 33 -, dup3 292 24,
pause 34 -, nanosleep 35 101, getitimer 36 102, setitimer 38 103, alarm 37 -, getpid 39 172,
getppid 110 173, gettid 186 178, getuid 102 174, geteuid 107 175, getgid 104 176, getegid 108 177, getresuid 118 148,
getresgid 120 150, getgroups 115 158, getpgrp 111 -, uname 63 160, fsync 74 82, fdatasync 75 83, ftruncate 77 46,
getdents 78 -, getdents64 217 61, getcwd 79 17, chdir 80 49, fchdir 81 50, rename 82 -, renameat 264 38,
renameat2 316 276, mkdir 83 -, mkdirat 258 34, rmdir 84 -, creat 85 -, open 2 -, openat 257 56, link 86 -,
linkat 265 37, symlink 88 -, symlinkat 266 36, unlink 87 -, unlinkat 263 35, readlink 89 -, readlinkat 267 78, stat 4 -,
lstat 6 -, newfstatat 262 79, statx 332 291, access 21 -, faccessat 269 48, faccessat2 439 439, umask 95 166,
gettimeofday 96 169, getrusage 98 165, times 100 153, time 201 -, set_robust_list 273 99, rseq 334 293, exit 60 93,
exit_group 231 94, getrandom 318 278, poll 7 -, ppoll 271 73, select 23 -, pselect6 270 72, epoll_create 213 -,
epoll_create1 291 20, epoll_ctl 233 21, epoll_wait 232 -, epoll_pwait 281 22, eventfd 284 -, eventfd2 290 19, pipe 22 -,
pipe2 293 59, timerfd_create 283 85, timerfd_settime 286 86, timerfd_gettime 287 87, getcpu 309 168,
getrlimit 97 163, membarrier 324 283, copy_file_range 326 285, sendfile 40 71, shutdown 48 210, close_range 436 436,
restart_syscall 219 128
"""
_WITH_NAMESPACES = """
chmod 90 -, fchmod 91 52, fchmodat 268 53, fchmodat2 452 452, utime 132 -, utimes 235 -, futimesat 261 -,
utimensat 280 88, fallocate 285 47, statfs 137 43, fstatfs 138 44
"""  # only with namespaces
_ARGUMENT_CHECKED = """
fcntl 72 25, ioctl 16 29, prctl 157 167, prlimit64 302 261, clone 56 220, clone3 435 435, socketpair 53 199,
sendto 44 206, recvfrom 45 207, mmap 9 222, flock 73 32, fadvise64 221 223, futex 202 98, sched_getaffinity 204 123,
clock_gettime 228 113, clock_getres 229 114, clock_nanosleep 230 115
"""  # see below
_FCNTL = (0, 1, 2, 3, 4, 5, 1030, 1032)  # duplicates, flags, F_GETLK; not F_SETOWN, which sends signals
_FCNTL_LOCKS = (6, 7)  # F_SETLK, F_SETLKW
_IOCTL = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)  # terminal?, its size, bytes to read, blocking, close-on-exec
_PRCTL = (15, 16, 0x53564D41)  # names of threads and of memory
_THREAD, _SHARED, _PRIVATE, _MAP_KIND, _ANONYMOUS = 0x10000, 0x01, 0x02, 0x0F, 0x20
_FUTEX_PRIVATE, _FUTEX_OPERATION, _FUTEX_WAITS = 0x80, 0x7F, (0, 9)
_RLIMIT_CPU, _RLIMIT_NPROC, _RLIMIT_NOFILE = 0, 6, 7
_OF_A_PROCESS = 0x80000000  # the sign of a clock that belongs to a given process or thread
_TIMERS = "setitimer 38 103, alarm 37 -"
PAUSE = "getsid 124 156"  # stands for a call that does not exist: it never reaches the kernel's own getsid
FORK = 0x8000 | 17  # CLONE_PARENT | SIGCHLD: the child's parent is the session worker
_NEW_NAMESPACES = 0x7E020000

_LOAD, _EQUAL, _AT_LEAST, _AND, _RETURN = 0x20, 0x15, 0x35, 0x54, 0x06
Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, operand


def supported() -> bool:
    """Return whether there is a list for this machine."""
    return platform.machine() in AUDIT_ARCH


def program(namespaces: bool, machine: str | None = None, session: bool = False) -> bytes:
    """Return the filter for code with or without namespaces."""
    machine = machine or platform.machine()
    code: list[Instruction] = [
        (_LOAD, 0, 0, 4),
        (_EQUAL, 1, 0, AUDIT_ARCH[machine]),
        (_RETURN, 0, 0, KILL),
        (_LOAD, 0, 0, 0),
        (_AT_LEAST, 0, 1, X32_BIT),
        (_RETURN, 0, 0, DENY),
    ]
    for number, block in _argument_checks(machine, namespaces, session):
        code += [(_EQUAL, 0, len(block), number), *block]
    allowed = {*numbers(_TABLE, machine), *(numbers(_WITH_NAMESPACES, machine) if namespaces else [])}
    if session:
        allowed = allowed - {*numbers(_TIMERS, machine)} | {*numbers(PAUSE, machine)}
    code += _search(_segments(sorted(allowed)))
    return _assemble(code)


def notify_program(machine: str | None = None) -> bytes:
    """Return the filter that asks the worker of a session about PAUSE and FORK, and allows everything else."""
    machine = machine or platform.machine()
    (clone,), (pause,) = numbers("clone 56 220", machine), numbers(PAUSE, machine)
    code: list[Instruction] = [
        (_LOAD, 0, 0, 4),
        (_EQUAL, 1, 0, AUDIT_ARCH[machine]),
        (_RETURN, 0, 0, ALLOW),  # the other filter kills it
        (_LOAD, 0, 0, 0),
        (_EQUAL, 0, 1, pause),
        (_RETURN, 0, 0, NOTIFY),
        (_EQUAL, 1, 0, clone),
        (_RETURN, 0, 0, ALLOW),
        (_LOAD, 0, 0, 16),
        (_EQUAL, 0, 1, FORK),
        (_RETURN, 0, 0, NOTIFY),
        (_RETURN, 0, 0, ALLOW),
    ]
    return _assemble(code)


def _assemble(code: Sequence[Instruction]) -> bytes:
    return b"".join(struct.pack("HBBI", *instruction) for instruction in code)


def numbers(table: str, machine: str) -> list[int]:
    """Return the system call numbers in one of the tables above."""
    column = 1 if machine == "x86_64" else 2
    found = [entry.split()[column] for entry in table.split(",")]
    return [int(number) for number in found if number != "-"]


def _argument_checks(machine: str, namespaces: bool, session: bool) -> list[tuple[int, list[Instruction]]]:
    names = [entry.split()[0] for entry in _ARGUMENT_CHECKED.split(",")]
    number = dict(zip(names, numbers(_ARGUMENT_CHECKED, machine), strict=True))
    pair: list[Instruction] = [
        (_LOAD, 0, 0, 16),
        (_EQUAL, 0, 4, 1),  # AF_UNIX
        (_LOAD, 0, 0, 24),
        (_AND, 0, 0, 0xF),
        (_EQUAL, 0, 1, 1),  # SOCK_STREAM: reaches only its peer
        (_RETURN, 0, 0, ALLOW),
        (_RETURN, 0, 0, DENY),
    ]
    only_read = (_RLIMIT_CPU, *((_RLIMIT_NPROC, _RLIMIT_NOFILE) if session else ()))
    limits: list[Instruction] = [
        (_LOAD, 0, 0, 16),
        (_EQUAL, 1, 0, 0),  # only its own limits
        (_RETURN, 0, 0, DENY),
        (_LOAD, 0, 0, 24),
        *((_EQUAL, len(only_read) - at, 0, limit) for at, limit in enumerate(only_read)),
        (_RETURN, 0, 0, ALLOW),
        (_LOAD, 0, 0, 32),  # a new limit?
        (_EQUAL, 0, 3, 0),
        (_LOAD, 0, 0, 36),
        (_EQUAL, 0, 1, 0),
        (_RETURN, 0, 0, ALLOW),
        (_RETURN, 0, 0, DO_NOTHING),
    ]
    futex: list[Instruction] = [
        *_masked(1, _FUTEX_PRIVATE, _FUTEX_PRIVATE, ALLOW, DENY)[:-1],
        (_LOAD, 0, 0, 24),
        (_AND, 0, 0, _FUTEX_OPERATION),
        *((_EQUAL, len(_FUTEX_WAITS) - at, 0, operation) for at, operation in enumerate(_FUTEX_WAITS)),
        (_RETURN, 0, 0, DENY),
        (_RETURN, 0, 0, ALLOW),
    ]
    clock = _masked(0, _OF_A_PROCESS, 0, ALLOW, DENY)
    clone: list[Instruction] = [(_RETURN, 0, 0, DENY)]
    if namespaces:
        fork: list[Instruction] = [(_LOAD, 0, 0, 16), (_EQUAL, 0, 1, FORK), (_RETURN, 0, 0, ALLOW)]
        clone = [*(fork if session else []), *_masked(0, _THREAD | _NEW_NAMESPACES, _THREAD, ALLOW, DENY)]
    mapping: list[Instruction] = [(_RETURN, 0, 0, ALLOW)]
    if session:
        mapping = _masked(3, _MAP_KIND, _PRIVATE, ALLOW, DENY)
    elif not namespaces:
        mapping = _masked(3, _SHARED | _ANONYMOUS, _SHARED, DENY, ALLOW)
    return [
        (number["fcntl"], _one_of(1, _FCNTL, _FCNTL_LOCKS)),
        (number["flock"], [(_RETURN, 0, 0, DO_NOTHING)]),
        (number["fadvise64"], [(_RETURN, 0, 0, DO_NOTHING)]),
        (number["ioctl"], _one_of(1, _IOCTL)),
        (number["prctl"], _one_of(0, _PRCTL)),
        (number["prlimit64"], limits),
        (number["clone"], clone),
        (number["clone3"], [(_RETURN, 0, 0, ABSENT)]),  # its flags cannot be checked; the C library falls back to clone
        (number["socketpair"], pair),
        (number["sendto"], _null(4)),
        (number["recvfrom"], _null(4)),
        (number["mmap"], mapping),
        (number["futex"], futex),
        (number["sched_getaffinity"], _masked(0, 0xFFFFFFFF, 0, ALLOW, DENY)),  # 0 is the caller
        *((number[name], clock) for name in ("clock_gettime", "clock_getres", "clock_nanosleep")),
    ]


def _one_of(argument: int, allowed: Sequence[int], do_nothing: Sequence[int] = ()) -> list[Instruction]:
    """Allow if the lower 32 bits of an argument are one of the values; do nothing if they are one of the others."""
    code: list[Instruction] = [(_LOAD, 0, 0, 16 + 8 * argument)]
    for values, action in ((do_nothing, DO_NOTHING), (allowed, ALLOW)):
        for value in values:
            code += [(_EQUAL, 0, 1, value), (_RETURN, 0, 0, action)]
    return [*code, (_RETURN, 0, 0, DENY)]


def _masked(argument: int, mask: int, value: int, equal: int, other: int) -> list[Instruction]:
    """Return `equal` if the lower 32 bits of an argument, under a mask, are the value."""
    load: Instruction = (_LOAD, 0, 0, 16 + 8 * argument)
    return [load, (_AND, 0, 0, mask), (_EQUAL, 0, 1, value), (_RETURN, 0, 0, equal), (_RETURN, 0, 0, other)]


def _null(argument: int) -> list[Instruction]:
    """Allow if a pointer is null."""
    return [
        (_LOAD, 0, 0, 16 + 8 * argument),
        (_EQUAL, 0, 3, 0),
        (_LOAD, 0, 0, 20 + 8 * argument),
        (_EQUAL, 0, 1, 0),
        (_RETURN, 0, 0, ALLOW),
        (_RETURN, 0, 0, DENY),
    ]


def _segments(allowed: Sequence[int]) -> list[tuple[int, int]]:
    """Return (first number, action) of every range of numbers with the same action, from 0 on."""
    actions = [ALLOW if number in allowed else DENY for number in range(allowed[-1] + 2)]
    return [(n, action) for n, action in enumerate(actions) if n == 0 or action != actions[n - 1]]


def _search(segments: Sequence[tuple[int, int]]) -> list[Instruction]:
    """Return a binary search for the range that holds the call's number."""
    if len(segments) == 1:
        return [(_RETURN, 0, 0, segments[0][1])]
    middle = len(segments) // 2
    left, right = _search(segments[:middle]), _search(segments[middle:])
    if len(left) > 255:
        raise ValueError("too many ranges for one jump")
    return [(_AT_LEAST, len(left), 0, segments[middle][0]), *left, *right]
