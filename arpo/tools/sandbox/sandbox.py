"""Runs code that a model wrote in isolated processes.

    with Sandbox() as sandbox:
        sandbox.run("print(6 * 7)")      # SandboxResult(stdout="42\\n", stderr="", status="ok", ...)

`Sandbox` starts a zygote (`zygote`) with an empty environment, which sets up the isolation once, imports common
modules, and forks a new confined process for every call. Of the two tiers of isolation (`isolation`), the better one
that this machine allows is chosen, tested with a dozen attacks, and named in `tier`. Where neither works, `start`
refuses and says what is missing.

Guarantees: no call sees the network, the machine's files, environment or processes, or traces of another call.
Nothing of a call is left when it returns. Its output cannot forge its status. The same code gives the same output,
unless it asks for the time, for entropy or for addresses of objects. A worker that dies is replaced, and its call is
made once more.
Not covered: side channels, kernel bugs, and fairness between calls that use much CPU. In the tier "landlock", names,
sizes and times of files that the code can guess are not hidden.
"""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import sys
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from arpo.errors import ArpoError
from arpo.tools.sandbox.pool import START_SECONDS, Call, Pool, SandboxResult

TIERS = ("namespaces", "landlock")


class SandboxError(Exception):
    """Two workers failed to answer: the machine's fault, not the code's."""


class Sandbox:
    """Runs code in new confined processes, up to `workers` at a time; use `with`, or `start` and `close`.

    A call may use `memory_mb` above what Python itself needs and `scratch_mb` of files; of each output the first
    `max_output` bytes are kept. Code that names one of `packages` is forked from a process that has imported just
    those. `tier` demands one tier; `unsafe_no_isolation` allows to run without isolation where there is none.
    """

    def __init__(
        self,
        *,
        workers: int | None = None,
        memory_mb: int = 512,
        scratch_mb: int = 64,
        max_output: int = 65536,
        packages: Sequence[str] = ("numpy", "sympy", "mpmath"),
        tier: str | None = None,
        unsafe_no_isolation: bool = False,
    ) -> None:
        if tier is not None and tier not in TIERS:
            raise ArpoError(f"there is no sandbox tier {tier!r}; use one of: {', '.join(TIERS)}")
        self.tier: str | None = None
        self.workers = workers or max(8, 2 * (os.cpu_count() or 1))
        self._limits = {"memory": memory_mb << 20, "scratch": scratch_mb << 20, "output": max_output}
        self._packages = {name: re.compile(rf"\b{re.escape(name)}\b") for name in packages}
        self._allowed_tiers = (tier,) if tier else (*TIERS, "none") if unsafe_no_isolation else TIERS
        self._slots = threading.Semaphore(self.workers)
        self._threads: ThreadPoolExecutor | None = None
        self._pools: dict[tuple[str, ...], Pool] = {}  # by the packages that their zygotes have imported
        self._lock = threading.Lock()

    def __enter__(self) -> Sandbox:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Choose the best tier that passes the self-test; ArpoError, naming what is missing, if there is none."""
        if self.tier is not None:
            return
        reasons = []
        for tier in self._allowed_tiers:
            try:
                self._pools = {}
                self.tier = tier
                self._self_test()
                break
            except (SandboxError, OSError) as error:
                self.close()
                reasons.append(f"{tier}: {error}")
        else:
            raise ArpoError(
                "code cannot be isolated on this machine: "
                + "; ".join(reasons)
                + ". Allow one of these, leave the python tool out, or accept the risk of running a model's code with "
                "all your rights: tools.unsafe_no_isolation = true"
            )
        self._threads = ThreadPoolExecutor(self.workers, thread_name_prefix="arpo-sandbox")
        if self.tier == "none":
            print("WARNING: NO ISOLATION. Code that a model writes runs with all your rights.", file=sys.stderr)

    def close(self) -> None:
        """End every process; running calls fail."""
        with self._lock:
            self.tier = None
            pools = list(self._pools.values())
        for pool in pools:
            pool.close()
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None

    def run(self, code: str, timeout: float = 10.0, stdin: str = "", show_last: bool = False) -> SandboxResult:
        """Run `code` for at most `timeout` seconds; `show_last` prints the value of its last expression."""
        return self._run(Call(code, timeout, stdin, show_last))

    async def arun(self, code: str, timeout: float = 10.0, stdin: str = "", show_last: bool = False) -> SandboxResult:
        """`run` for an event loop. A cancelled call ends at once, and nothing of it is left."""
        if self._threads is None:
            raise SandboxError("the sandbox is not open")
        call = Call(code, timeout, stdin, show_last)
        try:
            return await asyncio.wrap_future(self._threads.submit(self._run, call))
        except asyncio.CancelledError:
            call.cancel()
            raise

    def _run(self, call: Call) -> SandboxResult:
        pool = self._pool(call.code)
        with self._slots:
            reason = ""
            for _ in range(2):
                try:
                    return pool.run(call)
                except OSError as error:
                    reason = str(error)
                if call.cancelled:
                    break
            raise SandboxError(f"no worker answered ({reason}){pool.stderr_tail()}")

    def _pool(self, code: str) -> Pool:
        """Return the pool that has imported the packages the code names, and no more: small processes fork faster."""
        named = tuple(name for name, found in self._packages.items() if found.search(code))
        with self._lock:
            if self.tier is None:
                raise SandboxError("the sandbox is not open")
            if named not in self._pools:
                self._pools[named] = Pool({**self._limits, "tier": self.tier, "imports": named})
            return self._pools[named]

    def _self_test(self) -> None:
        """Attack the sandbox; SandboxError if one of the probes succeeds."""
        if self.tier == "none":
            return
        places = [f"{folder}/arpo-probe-{secrets.token_hex(8)}" for folder in (os.path.expanduser("~"), os.getcwd())]
        with tempfile.NamedTemporaryFile(prefix="arpo-canary-") as canary:
            given = f"CANARY, PLACES, PID = {canary.name!r}, {places!r}, {os.getpid()}\n"
            result = self.run(given + _PROBES, START_SECONDS)
            written = [place for place in places if os.path.lexists(place)]
            for place in written:
                os.unlink(place)
            written += [canary.name] * bool(canary.read())
        if written or result.status != "ok" or result.stdout != "held\n":
            output = " ".join([*f"{result.stdout}{result.stderr}".split(), *written])
            raise SandboxError(f"a probe got through ({result.status}): {output}")


_PROBES = """
import os, socket
def network(): socket.socket()
def local(): socket.socket(socket.AF_UNIX)
def process(): os.fork() or os._exit(0)
def program(): os.execv("/bin/true", ["true"])
def signals(): os.kill(PID, 0)
def passwords(): open("/etc/passwd").read()
def environment(): open("/proc/%d/environ" % PID).read()
def memory(): open("/proc/%d/mem" % PID, "rb").read(1)
def reads(): open(CANARY).read()
def writes(): open(CANARY, "r+").write("x")
def root(): os.mkdir("/arpo-probe"); os.rmdir("/arpo-probe")
def library(): open(os.__file__, "a")
through = []
for probe in (network, local, process, program, signals, passwords, environment, memory, reads, writes, root, library):
    try: probe()
    except OSError: pass
    else: through.append(probe.__name__)
for place in PLACES:  # looked at from outside
    try: open(place, "w")
    except OSError: pass
print(" ".join(through) or "held")
"""
