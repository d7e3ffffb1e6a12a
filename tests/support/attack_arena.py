"""Attacks on the sandbox, as data, and what looks at them from outside. Needs only the sandbox.

    python attack_arena.py TIER     # as the user who is to be protected; the last line is JSON: {attack: "" or why not}
    python attack_arena.py TIER session      # the same attacks in a Python session
    python attack_arena.py TIER branches     # attacks on the other branches of a session

Each script aims at one property. It ends in `held` when it could do nothing, or says what it could do; `-> memory`
names how it must end instead. `+` means that other calls are made meanwhile. After each script the arena is looked at:
files, sockets and processes outside must have noticed nothing, no process and no file of the call is left, and a plain
call must give what it gave before. A script must be harmless where it succeeds: it only touches what the arena made.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from attack_branches import BRANCH_SCRIPTS, LOOK, START
from attacks import SCRIPTS

from arpo.errors import ArpoError
from arpo.tools.sandbox import seccomp
from arpo.tools.sandbox.sandbox import Sandbox, SandboxError, SandboxResult
from arpo.tools.sandbox.sessions import Sessions

MARK = f"attack-{os.getpid()}"
HALVES = (b"what was said ", b"by another call")
SAID = b"".join(HALVES).decode()
LENGTHS, SECONDS = (3173, 2741), 57.3  # of that call
LIMITS = {"memory_mb": 64, "scratch_mb": 8, "max_output": 4096}
PRELUDE = """
import ctypes, errno, mmap, os, resource, select, signal, socket, struct, subprocess, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
libc.prctl(15, MARK, 0, 0, 0)  # the name by which it is found from outside
X86 = os.uname().machine == "x86_64"
NUMBERS = {"kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138),
    "pidfd_open": (434, 434), "pidfd_send_signal": (424, 424), "pidfd_getfd": (438, 438), "ptrace": (101, 117),
    "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272), "clone": (56, 220),
    "clone3": (435, 435), "unshare": (272, 97), "setns": (308, 268), "execve": (59, 221), "execveat": (322, 281),
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "open_tree": (428, 428),
    "fsopen": (430, 430), "io_uring_setup": (425, 425), "bpf": (321, 280), "perf_event_open": (298, 241),
    "userfaultfd": (323, 282), "keyctl": (250, 219), "add_key": (248, 217), "seccomp": (317, 277),
    "personality": (135, 92), "memfd_create": (319, 279), "shmget": (29, 194), "semget": (64, 190),
    "msgget": (68, 186), "mq_open": (240, 180), "setpriority": (141, 140), "sched_setaffinity": (203, 122),
    "sched_setscheduler": (144, 119), "ioprio_set": (251, 30), "prlimit64": (302, 261), "capset": (126, 91),
    "setresuid": (117, 147), "setgroups": (116, 159), "open_by_handle_at": (304, 265), "mknodat": (259, 33),
    "setxattr": (188, 5), "fchownat": (260, 54), "inotify_init1": (294, 26), "fanotify_init": (300, 262),
    "socket": (41, 198), "bind": (49, 200), "connect": (42, 203), "sendmsg": (46, 211), "fcntl": (72, 25),
    "ioctl": (16, 29), "prctl": (157, 167), "timer_create": (222, 107), "sethostname": (170, 161)}
def syscall(name, *args):
    number = name if isinstance(name, int) else NUMBERS[name][0 if X86 else 1]
    args = [ctypes.c_long(arg) if isinstance(arg, int) else arg for arg in args]
    ctypes.set_errno(0)
    result = libc.syscall(ctypes.c_long(number), *args)
    return -ctypes.get_errno() if result == -1 else result
def through(what):
    sys.stderr.write(f"got through: {what}")
    sys.stderr.flush()
    os._exit(1)
def refused(action, *args, **more):
    try:
        action(*args, **more)
    except OSError:
        return
    through(f"{action.__name__} {args}")
def forbidden(name, *args):
    result = syscall(name, *args)
    if result not in (-errno.EPERM, -errno.ENOSYS):
        through(f"{name} {args} gave {result}")
"""
PRIVATE_MAPS = """
def private(fd, size, real=mmap.mmap, **more):
    return real(fd, size, **({"flags": mmap.MAP_PRIVATE} if fd == -1 else {}) | more)
mmap.mmap = private  # sessions have no others
"""
PRELUDE_IN_SESSION = "W, MARK = {!r}, {!r}.encode()\n" + PRELUDE.replace("{", "{{").replace("}", "}}")
PLAIN_CALL = """
import builtins, json, os, random, sys, zlib
def shown(value): return value if isinstance(value, (str, int)) else type(value).__name__
here, folder, apart = os.getcwd(), os.stat("."), []
settings = sorted((name, value.replace(here, "HERE")) for name, value in os.environ.items())
seen = [[shown(getattr(builtins, name)) for name in dir(builtins)], sorted(sys.modules)]
listed = os.listdir()
if APART:  # a file system and processes of its own
    free = os.statvfs(".")
    open("new", "w").close()
    apart = [free.f_bfree, free.f_ffree, folder.st_ino, os.stat("new").st_ino, os.getpid()]
print(json.dumps([listed, apart, oct(folder.st_mode), folder.st_nlink, folder.st_size, folder.st_mtime > 1e9,
    os.umask(0), settings, random.random(), len(sys.path), sys.getrecursionlimit(),
    zlib.crc32(json.dumps(seen).encode())]))  # all of it fits into the output
"""


@dataclass(frozen=True, slots=True)
class Attack:
    """A script, how it may end ("held": it says so itself), and whether other calls are made meanwhile."""

    name: str
    ends: tuple[str, ...]
    meanwhile: bool
    code: str


NOT_IN_SESSIONS = {  # they end in another way there, or look at what is different there
    "bombs with threads",
    "learns of calls before it",
    "leaves timers behind",
    "leaves work for later",
    "leaves a thread behind",
    "exits early and says nothing",
    "exits early with an error",
    "puts files in place of its descriptors",
}


def attacks_of(tier: str, mode: str) -> list[Attack]:
    """The scripts for a tier that are made by calls, in a session, or on its other branches."""
    made = attacks(tier, BRANCH_SCRIPTS if mode == "branches" else SCRIPTS)
    return [attack for attack in made if mode != "session" or attack.name not in NOT_IN_SESSIONS]


def attacks(tier: str, scripts: str) -> Iterator[Attack]:
    """The scripts for a tier; `### name [tier] [+] [-> how it ends]` stands above each."""
    for heading, code in re.findall(r"^### (.*)\n((?:(?!### ).*\n)*)", scripts, re.MULTILINE):
        name, _, ends = heading.partition(" -> ")
        only = re.search(r" \[(\w+)\]", name)
        if only is None or only[1] == tier:
            plain = re.sub(r" \[\w+\]| \+", "", name).strip()
            yield Attack(plain, tuple(ends.split()) or ("held",), " +" in name, code)


class Arena:
    """What lies outside of the sandbox and must notice nothing."""

    def __init__(self, tier: str, folder: Path, session: bool = False) -> None:
        self.tier, self.session, self.signals = tier, session, 0
        self.secret = ctypes.create_string_buffer(b"a secret of the supervisor")
        self.canary, self.shared = folder / "canary", folder / "shared"
        self.canary.write_text("canary")
        self.canary.chmod(0o666)
        self.shared.mkdir()
        self.shared.chmod(0o777)
        (self.shared / "kept").write_text("kept")
        self.home_file = Path(os.path.expanduser("~"), f".{MARK}")
        self.home_file.write_text("private")
        self.sockets = {name: self._listener(name, folder) for name in ("tcp", "udp", "path", "abstract", "datagrams")}
        self.victim = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3000)"])
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGIO, signal.SIGURG):
            signal.signal(number, self._signalled)
        stdlib = sysconfig.get_path("stdlib")
        self.new = {
            name: f"{place}/{MARK}"
            for name, place in {
                "home": os.path.expanduser("~"),
                "root": "",
                "usr": "/usr",
                "etc": "/etc",
                "shm": "/dev/shm",
                "cwd": os.getcwd(),
                "stdlib": stdlib,
                "libraries": sysconfig.get_path("purelib"),
                "temporary": tempfile.gettempdir(),
                "shared": str(self.shared),
            }.items()
        }
        self.told = {
            "canary": str(self.canary),
            "shared": str(self.shared),
            "new": list(self.new.values()),
            "tcp": self.sockets["tcp"].getsockname()[1],
            "udp": self.sockets["udp"].getsockname()[1],
            "path": str(folder / "socket"),
            "abstract": f"\0{MARK}-abstract",
            "datagrams": f"\0{MARK}-datagrams",
            "supervisor": os.getpid(),
            "victim": self.victim.pid,
            "secret": [ctypes.addressof(self.secret), len(self.secret)],
            "stdlib": stdlib,
            "home": os.path.expanduser("~"),
            "home file": str(self.home_file),
            "denied": self._denied(),
            "halves": [half[::-1] for half in HALVES],
            "limits": LIMITS,
        }
        self.before = self.state()

    def _listener(self, name: str, folder: Path) -> socket.socket:
        kind = socket.SOCK_DGRAM if name in ("udp", "datagrams") else socket.SOCK_STREAM
        made = socket.socket(socket.AF_INET if name in ("tcp", "udp") else socket.AF_UNIX, kind)
        places = {"tcp": ("127.0.0.1", 0), "udp": ("127.0.0.1", 0), "path": str(folder / "socket")}
        made.bind(places.get(name, f"\0{MARK}-{name}"))
        if kind == socket.SOCK_STREAM:
            made.listen()
        if name == "path":
            os.chmod(folder / "socket", 0o777)
        made.setblocking(False)
        return made

    def _signalled(self, number: int, frame: object) -> None:
        self.signals += 1

    def _denied(self) -> list[int]:
        """Numbers of all calls that the list does not name."""
        machine, tables = os.uname().machine, [seccomp._TABLE, seccomp._ARGUMENT_CHECKED]
        tables += [seccomp._WITH_NAMESPACES] if self.tier == "namespaces" else []
        tables += [seccomp.PAUSE] if self.session else []
        named = {number for table in tables for number in seccomp.numbers(table, machine)}
        answered_before = {335, 336} if machine == "x86_64" else set()  # of probes: they kill whoever is not one
        return sorted(set(range(470)) - named - answered_before)

    def state(self) -> dict[str, object]:
        """All that an attack could have changed."""
        info = self.canary.stat()
        return {
            "canary": (self.canary.read_text(), info.st_mode, info.st_uid, info.st_nlink, info.st_mtime_ns),
            "attributes": os.listxattr(self.canary),
            "shared": sorted(os.listdir(self.shared)),
            "new files": [path for path in self.new.values() if os.path.lexists(path)],
            "heard": [name for name, listener in self.sockets.items() if heard(listener)],
            "victim": self.victim.poll(),
            "victim stopped": Path(f"/proc/{self.victim.pid}/stat").read_text().rpartition(")")[2].split()[0] in "TtZ",
            "signals": self.signals,
            "limits": [resource.getrlimit(kind) for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_CORE)],
            "priority": (os.getpriority(os.PRIO_PROCESS, 0), os.sched_getaffinity(0)),
            "secret": self.secret.value,
            "processes": named_processes(),
            "files": left_files(),
        }

    def looked_at(self, sandbox: Sandbox, attack: Attack) -> str:
        """Make an attack; why it did not fail as it should, or nothing."""
        private = PRIVATE_MAPS if self.session else ""
        code = f"W, MARK = {self.told!r}, {MARK!r}.encode()\n{PRELUDE}{private}{attack.code}"
        if attack.ends == ("held",):
            code += "\nprint('held')"
        try:
            if "halves" in attack.code:
                earlier_call(sandbox)
            seconds = 0.4 if attack.ends == ("timeout",) else 60.0

            def run() -> SandboxResult:
                return run_in_session(sandbox, code, seconds) if self.session else sandbox.run(code, seconds)

            result = beside_others(sandbox, run) if attack.meanwhile else run()
            self.wait_for_the_end()
            state, plain = self.state(), self.plain_call(sandbox)
        except SandboxError as error:
            return str(error)
        for name, value in state.items():
            if value != self.before[name]:
                return f"{name} outside: {value!r} instead of {self.before[name]!r}"
        good = ("ok", "refused", "killed") if self.session else ("ok",)  # it may leave files, or end the session
        ended = "held" if result.status in good and result.stdout == "held\n" else result.status
        if ended not in attack.ends or "got through" in result.stderr:
            return f"ended as {ended}: {result.stdout[:300]} {result.stderr[:600]}"
        return "" if plain == self.plain else f"a plain call gave {plain} instead of {self.plain}"

    def wait_for_the_end(self) -> None:
        """Wait until nothing is left of a session that nobody refers to any more; `state` says what is."""
        end = time.monotonic() + 60
        while self.session and (named_processes() or left_files()) and time.monotonic() < end:
            time.sleep(0.01)

    def looked_at_from_a_branch(self, sandbox: Sandbox, attack: Attack) -> str:
        """Make an attack in one branch; why another branch, another session or the arena noticed it, or nothing."""
        sessions = Sessions(sandbox)
        prefix, _, code = attack.code.rpartition("---\n")
        try:
            begin = f"{PRELUDE_IN_SESSION.format(self.told, MARK)}{START}"
            other = sessions.run(sessions.open(), begin, 60.0)[1]
            first, start = sessions.run(sessions.open(), begin, 60.0)
            if first.status != "ok":
                return f"it could not start: {first}"
            expected, sibling = sessions.run(start, LOOK, 60.0)
            point = start
            if prefix:
                result, point = sessions.run(start, prefix, 60.0)
                if result.status not in ("ok", "error"):
                    return f"the prefix ended as {result}"
            broken = "killed" in attack.ends  # the prefix may have made branches impossible
            unspoiled = None if broken else sessions.run(point, LOOK, 60.0)[0].stdout
            result, attacked = sessions.run(point, code, 1.0 if "timeout" in attack.ends else 60.0)
            ended = "held" if result.status == "ok" and result.stdout == "held\n" else result.status
            if ended not in attack.ends or "got through" in result.stderr:
                return f"ended as {ended}: {result.stdout[:300]} {result.stderr[:600]}"
            for name, place in (("start", start), ("sibling", sibling), ("other session", other)):
                seen = sessions.run(place, LOOK, 60.0)[0]
                if (seen.status, seen.stdout, seen.stderr) != (expected.status, expected.stdout, expected.stderr):
                    return f"{name}: {seen} instead of {expected}"
            second = sessions.run(point, LOOK, 1.0 if broken else 60.0)[0]
            if second.status == "ok" and second.stdout != (unspoiled or expected.stdout):
                return f"a second branch: {second} instead of {unspoiled or expected.stdout}"
            del start, sibling, other, point, attacked, place
            self.wait_for_the_end()
            state, plain = self.state(), self.plain_call(sandbox)
        except SandboxError as error:
            return str(error)
        for name, value in state.items():
            if value != self.before[name]:
                return f"{name} outside: {value!r} instead of {self.before[name]!r}"
        return "" if plain == self.plain else f"a plain call gave {plain} instead of {self.plain}"

    def sees_a_process(self, sandbox: Sandbox) -> bool:
        """Whether the mark of a process that is running would be noticed."""
        ends = "signal.signal(signal.SIGUSR1, lambda *_: os._exit(0))\ntime.sleep(60)"
        code = f"MARK = {MARK!r}.encode()\n{PRELUDE}\n{ends}"
        caller = threading.Thread(target=sandbox.run, args=(code, 60.0))
        caller.start()
        seen: list[str] = []
        while caller.is_alive() and not seen:
            seen = named_processes()
        while caller.is_alive():
            for pid in named_processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGUSR1)
        return bool(seen)

    def plain_call(self, sandbox: Sandbox) -> SandboxResult | str:
        """What a call that looks around prints."""
        result = sandbox.run(f"APART = {self.tier == 'namespaces'}\n{PLAIN_CALL}", 60.0)
        return result.stdout if result.status == "ok" and not result.truncated else result

    def close(self) -> None:
        """Take everything down."""
        self.victim.kill()
        self.victim.wait()
        for listener in self.sockets.values():
            listener.close()
        for path in (*self.new.values(), self.home_file):
            with contextlib.suppress(OSError):
                os.unlink(path)


def earlier_call(sandbox: Sandbox) -> None:
    """Make a call whose code, input, outputs, file names, length of outputs and time limit another looks for."""
    code = f"""
import sys
text = sys.stdin.read() * 99  # {SAID}
open(text[:{len(SAID)}], "w").close()
print(text[:{LENGTHS[0] - 1}])
sys.stderr.write(text[:{LENGTHS[1]}])
"""
    result = sandbox.run(code, SECONDS, SAID * 20)
    assert (len(result.stdout), len(result.stderr)) == LENGTHS, result


def heard(listener: socket.socket) -> bool:
    """Whether anything arrived."""
    try:
        if listener.type == socket.SOCK_STREAM:
            listener.accept()[0].close()
        else:
            listener.recv(100)
    except BlockingIOError:
        return False
    return True


def named_processes() -> list[str]:
    """Processes with a thread that bears the mark."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{pid}/task"):
                if Path(f"/proc/{pid}/task/{thread}/comm").read_text().strip() == MARK:
                    found.append(pid)
    return found


def left_files() -> list[str]:
    """What lies in scratch, where that is on disk: a worker has an empty folder for its next call, a session files."""
    found = []
    for place in Path(tempfile.gettempdir()).glob("arpo-sandbox-*/*"):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # it is being removed
            for name in os.listdir(place):
                of_next_call = re.fullmatch("[0-9a-f]{16}", name) is not None
                found += [f"{place}/{name}/{inner}" for inner in os.listdir(place / name)] if of_next_call else [name]
    return found


def run_in_session(sandbox: Sandbox, code: str, seconds: float) -> SandboxResult:
    """Run the code as the second call of a session."""
    sessions = Sessions(sandbox)
    _, point = sessions.run(sessions.open(), "first = 1", 60.0)
    return sessions.run(point, code, seconds)[0]


def beside_others(sandbox: Sandbox, run: Callable[[], SandboxResult]) -> SandboxResult:
    """Make a call while another caller makes plain calls, all of which must succeed."""
    results: list[SandboxResult] = []
    attacker = threading.Thread(target=lambda: results.append(run()))
    attacker.start()
    while attacker.is_alive():
        other = sandbox.run("import os\nprint(1 + 1, os.listdir())", 60.0)
        if (other.status, other.stdout) != ("ok", "2 []\n"):
            attacker.join()
            return other
    return results[0]


def verdicts(tier: str, mode: str) -> dict[str, str]:
    """Make all attacks on one sandbox: for each, "" or why it got through. {"impossible": why} if there is none."""
    found: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="arpo-arena-") as place:
        tempfile.tempdir = place
        folder = Path(place)
        folder.chmod(0o755)
        os.environ["ARPO_SECRET"] = "a secret of the environment"
        sandbox = Sandbox(tier=tier, workers=2, packages=(), **LIMITS)
        try:
            sandbox.start()
        except ArpoError as error:
            return {"impossible": str(error)}
        arena = Arena(tier, folder, session=mode != "call")
        try:
            with contextlib.closing(sandbox):
                arena.plain = arena.plain_call(sandbox)
                found["a process can be seen from outside"] = "" if arena.sees_a_process(sandbox) else "it cannot"
                look = arena.looked_at_from_a_branch if mode == "branches" else arena.looked_at
                for attack in attacks_of(tier, mode):
                    found[attack.name] = look(sandbox, attack)
                    arena.before = arena.state()
        finally:
            arena.close()
        left = sorted(path.name for path in folder.glob("arpo-*"))
        found["nothing is left when it is closed"] = " ".join(left)
    return found


if __name__ == "__main__":
    print(json.dumps(verdicts(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "call")))
