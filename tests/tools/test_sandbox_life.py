"""Cancelled calls, dying workers and zygotes, closing, and machines where the sandbox cannot start."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from sandboxes import (
    MARKED,
    ROOT,
    WAITING,
    alive,
    children,
    family,
    in_thread,
    marked,
    opened,
    running,
    unique,
    until,
    zygote_pid,
)

import arpo.tools.sandbox.sandbox as module
from arpo.errors import ArpoError
from arpo.tools.sandbox import isolation
from arpo.tools.sandbox.sandbox import TIERS, Call, Sandbox, SandboxError, SandboxResult, library_dirs


@pytest.fixture(params=TIERS)
def fresh(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sandbox]:
    """One of its own for a test that breaks it, with all its files under `tmp_path`."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with contextlib.closing(opened(request.param, workers=2, packages=())) as made:
        yield made
    assert list(tmp_path.glob("arpo-*")) == []


def test_a_cancelled_call_ends_at_once_and_leaves_nothing(fresh: Sandbox, tmp_path: Path) -> None:
    async def cancelled() -> None:
        code = f"{MARKED.format(unique('cancel'))}open('file', 'w').close()\nwhile True: pass"
        task = asyncio.create_task(fresh.arun(code, 600))
        assert await asyncio.to_thread(until, lambda: marked(unique("cancel")))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(until, lambda: not marked(unique("cancel")))
        results = await asyncio.gather(*(fresh.arun("print(1)") for _ in range(4)))
        assert [result.stdout for result in results] == ["1\n"] * 4

    asyncio.run(cancelled())
    assert until(lambda: len(list(tmp_path.glob("arpo-*/*"))) <= 2 and not list(tmp_path.glob("arpo-*/*/*/file")))


def test_a_call_that_is_cancelled_while_it_waits_never_runs(fresh: Sandbox) -> None:
    def mine(name: str) -> list[int]:
        return marked(name, family(zygote_pid(fresh)))

    async def cancelled() -> None:
        busy = [asyncio.create_task(fresh.arun(WAITING.format("arpo-busy"), 600)) for _ in range(2)]
        assert await asyncio.to_thread(until, lambda: len(mine("arpo-busy")) == 2)
        waiting = asyncio.create_task(fresh.arun(f"{MARKED.format(unique('never'))}import time; time.sleep(5)"))
        await asyncio.sleep(0.05)
        waiting.cancel()
        for pid in mine("arpo-busy"):
            os.kill(pid, signal.SIGUSR1)
        assert [result.stdout for result in await asyncio.gather(*busy)] == ["done\n"] * 2
        assert (await fresh.arun("print(1)")).stdout == "1\n"
        assert marked(unique("never")) == []

    asyncio.run(cancelled())


def test_closing_ends_calls_and_processes(fresh: Sandbox, tmp_path: Path) -> None:
    code = f"{MARKED.format(unique('close'))}open('file', 'w').close()\nimport time; time.sleep(600)"
    calls = [in_thread(lambda: fresh.run(code, 600)) for _ in range(3)]  # one more than there are workers
    assert until(lambda: len(marked(unique("close"))) == 2)
    below = family(zygote_pid(fresh))
    began = time.monotonic()
    fresh.close()
    assert time.monotonic() - began < 60
    for call in calls:
        with pytest.raises(SandboxError):
            call.result(60)
    assert until(lambda: not any(map(alive, below)))
    assert list(tmp_path.glob("arpo-*")) == []
    with pytest.raises(SandboxError, match="not open"):
        fresh.run("")


def test_it_can_be_opened_again_and_only_once(fresh: Sandbox) -> None:
    first = zygote_pid(fresh)
    fresh.start()
    assert zygote_pid(fresh) == first
    fresh.close()
    fresh.close()
    assert fresh.tier is None
    fresh.start()
    assert fresh.run("print(1)").stdout == "1\n"
    assert zygote_pid(fresh) != first


@pytest.mark.parametrize("which", ["cell", "worker", "spawner", "zygote", "guard"])
def test_a_call_whose_worker_is_killed_is_made_again(fresh: Sandbox, which: str) -> None:
    fresh.run("")
    call = in_thread(lambda: fresh.run(WAITING.format("arpo-again"), 600))
    victims = running(fresh, "arpo-again")
    below = family(zygote_pid(fresh))
    os.kill(victims[which], signal.SIGKILL)
    assert until(lambda: not alive(victims["cell"]))
    os.kill(running(fresh, "arpo-again", frozenset({victims["cell"]}))["cell"], signal.SIGUSR1)
    assert call.result(60).stdout == "done\n"
    if which in ("zygote", "guard"):
        assert until(lambda: not any(map(alive, below)))


@pytest.mark.parametrize("which", ["cell", "worker", "spawner", "zygote"])
def test_a_call_whose_workers_are_killed_twice_fails(fresh: Sandbox, which: str) -> None:
    call = in_thread(lambda: fresh.run(f"{MARKED.format('arpo-twice')}import time; time.sleep(600)", 600))
    killed: frozenset[int] = frozenset()
    for _ in range(2):
        victims = running(fresh, "arpo-twice", killed)
        killed |= {victims["cell"]}
        os.kill(victims[which], signal.SIGKILL)
        assert until(lambda pid=victims["cell"]: not alive(pid))
    with pytest.raises(SandboxError, match="no worker answered"):
        call.result(60)
    assert fresh.run("print('well')").stdout == "well\n"


def test_a_process_that_is_killed_while_it_waits_is_not_blamed_on_the_code(fresh: Sandbox) -> None:
    fresh.run("")
    guard = zygote_pid(fresh)
    zygote = children(guard)[0] if fresh.tier == "namespaces" else guard
    assert until(lambda: all(map(children, children(zygote))))  # each worker has the next one ready
    waiting = [pid for pid in family(zygote) if not children(pid)]
    for pid in waiting:
        os.kill(pid, signal.SIGKILL)
    assert until(lambda: not any(map(alive, waiting)))
    assert fresh.run("print('well')").stdout == "well\n"


@pytest.mark.parametrize("which", ["workers", "zygote"])
def test_workers_that_died_while_idle_are_not_used(fresh: Sandbox, which: str) -> None:
    calls = [in_thread(lambda: fresh.run(WAITING.format("arpo-both"), 600)) for _ in range(2)]
    assert until(lambda: len(marked("arpo-both", family(zygote_pid(fresh)))) == 2)
    for pid in marked("arpo-both", family(zygote_pid(fresh))):
        os.kill(pid, signal.SIGUSR1)
    assert [call.result(60).stdout for call in calls] == ["done\n"] * 2
    assert until(lambda: len(fresh._pools[()]._idle) == 2)
    assert len(fresh._pools[()]._idle) == 2
    guard = zygote_pid(fresh)
    zygote = children(guard)[0] if fresh.tier == "namespaces" else guard
    below = family(zygote)[1:]
    for pid in children(zygote) if which == "workers" else [zygote]:
        os.kill(pid, signal.SIGKILL)
    assert until(lambda: not any(map(alive, below)))
    assert fresh._pools[()].run(Call("print('well')", 5.0, "", False)).stdout == "well\n"  # at the first attempt


@pytest.mark.slow
def test_nothing_survives_the_supervisor(tmp_path: Path) -> None:
    for tier in TIERS:
        with contextlib.closing(opened(tier)):
            pass
        name = unique(f"left-{tier[0]}")
        code = f"{MARKED.format(name)}open('file', 'w').write('x')\nwhile True: pass"
        script = (
            "from arpo.tools.sandbox.sandbox import Sandbox\n"
            f"sandbox = Sandbox(tier={tier!r}, packages=())\nsandbox.start()\nsandbox.run({code!r}, 600)"
        )
        environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
        supervisor = subprocess.Popen([sys.executable, "-c", script], env=environment)
        assert until(lambda name=name: marked(name))
        below = family(supervisor.pid)
        assert len(below) >= 4
        supervisor.kill()
        supervisor.wait()
        assert until(lambda below=below: not any(map(alive, below)))
        assert until(lambda: not list(tmp_path.glob("arpo-*")))


def test_a_process_forked_from_the_supervisor_keeps_nothing_alive(fresh: Sandbox) -> None:
    fresh.run("")
    holder = os.fork()
    if holder == 0:
        time.sleep(600)
        os._exit(0)
    try:
        below = family(zygote_pid(fresh))
        began = time.monotonic()
        fresh.close()
        assert time.monotonic() - began < 60
        assert until(lambda: not any(map(alive, below)))
    finally:
        os.kill(holder, signal.SIGKILL)
        os.waitpid(holder, 0)


@pytest.mark.slow
def test_a_worker_that_hangs_is_replaced(fresh: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("arpo.tools.sandbox.sandbox.GRACE_SECONDS", -590.0)  # ten seconds to find and stop it
    call = in_thread(lambda: fresh.run(WAITING.format("arpo-hang"), 600))
    found = running(fresh, "arpo-hang")
    os.kill(found["worker"], signal.SIGSTOP)
    monkeypatch.setattr("arpo.tools.sandbox.sandbox.GRACE_SECONDS", 10.0)
    os.kill(running(fresh, "arpo-hang", frozenset({found["cell"]}))["cell"], signal.SIGUSR1)
    assert call.result(60).stdout == "done\n"
    assert until(lambda: not alive(found["worker"]))


@pytest.mark.slow
def test_many_calls_leak_nothing(fresh: Sandbox) -> None:
    def state() -> tuple[int, int]:
        guard = zygote_pid(fresh)
        zygote = children(guard)[0] if fresh.tier == "namespaces" else guard
        workers = children(zygote)
        below = [zygote, *workers, *(spawner for worker in workers for spawner in children(worker))]
        try:
            counts = [len(os.listdir(f"/proc/{pid}/fd")) for pid in (os.getpid(), *below)]
        except PermissionError:
            pytest.skip("only root may look into the workers")
        pages = [int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in below]
        return max(counts), max(pages)

    def some_calls() -> None:
        for number in range(24):
            fresh.run("print('x' * 5000)", stdin="x" * 1000)
            if number % 4 == 0:
                fresh.run("import time; time.sleep(9)", 0.01, "x" * 1_000_000)
                fresh.run("import os; os._exit(1)", 5, "x" * 1_000_000)

    some_calls()
    fds, pages = state()
    some_calls()
    some_calls()
    assert state()[0] <= fds + 8  # the next process may be on its way
    assert state()[1] <= pages + 300
    assert fresh._pools[()].stderr_tail() == ""  # no worker has died


@pytest.mark.slow
def test_a_supervisor_with_many_open_files() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limits[1] < 2000:
        pytest.skip("this process may not open 2000 files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (2000, limits[1]))
    held = [os.open("/dev/null", os.O_RDONLY) for _ in range(1500)]
    try:
        for tier in TIERS:
            with contextlib.closing(opened(tier, packages=())) as sandbox:
                code = "import os\nfor fd in range(3, 3000):\n  try: os.fstat(fd); print(fd)\n  except OSError: pass"
                assert sandbox.run(code) == SandboxResult("", "", "ok", pytest.approx(0, abs=60), False)
                guard = zygote_pid(sandbox)
                os.kill(children(guard)[0] if tier == "namespaces" else guard, signal.SIGKILL)
                assert sandbox.run("print(1)").stdout == "1\n"
    finally:
        for fd in held:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_call_does_not_see_the_locks_of_another(fresh: Sandbox) -> None:
    lock = "from fcntl import *\nimport os, struct\nfile = open(os.__file__)\nlockf(file, LOCK_SH)\nflock(file, {0})\n"
    holder = in_thread(lambda: fresh.run(lock.format("LOCK_EX") + WAITING.format("arpo-locks"), 600))
    pid = running(fresh, "arpo-locks")["cell"]
    seen = "print(struct.unpack_from('h', fcntl(file, F_GETLK, struct.pack('hhqqixxxx', 1, 0, 0, 0, 0))))"
    assert fresh.run(lock.format("LOCK_EX | LOCK_NB") + seen).stdout == "(2,)\n"  # F_UNLCK
    os.kill(pid, signal.SIGUSR1)
    assert holder.result(60).stdout == "done\n"


def test_the_process_as_seen_from_outside(fresh: Sandbox) -> None:
    call = in_thread(lambda: fresh.run(WAITING.format("arpo-seen"), 600))
    pid = running(fresh, "arpo-seen")["cell"]
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    with contextlib.suppress(PermissionError):
        limits = Path(f"/proc/{pid}/limits").read_text()
        assert "Max core file size        1                    1" in limits
    if fresh.tier == "namespaces" and os.geteuid() == 0:
        for kind in ("user", "mnt", "pid", "net", "ipc", "uts"):
            assert os.readlink(f"/proc/{pid}/ns/{kind}") != os.readlink(f"/proc/self/ns/{kind}")
        assert status["NSpid"].split()[-1] == "1"
        mounts = [line.split() for line in Path(f"/proc/{pid}/mountinfo").read_text().splitlines()]
        writable = [mount[4] for mount in mounts if "ro" not in mount[5].split(",")]
        assert writable == [isolation.scratch_dir(library_dirs())]
        assert len(mounts) > 5
        assert status["Uid"].split() == status["Gid"].split() == ["65534"] * 4
        assert status["Groups"].split() == []
    assert {int(status[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapAmb")} == {0}
    assert (status["NoNewPrivs"].strip(), status["Seccomp"].strip()) == ("1", "2")
    assert Path(f"/proc/{pid}/oom_score_adj").read_text() == "1000\n"
    os.kill(pid, signal.SIGUSR1)
    assert call.result(60).stdout == "done\n"


def test_calls_that_run_at_once_fit_into_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def workers(machine_mb: int, **limits: int) -> int:
        monkeypatch.setattr(module, "machine_memory", lambda: machine_mb << 20)
        return Sandbox(**limits).workers  # type: ignore[arg-type]

    assert workers(8 * 576, memory_mb=512, scratch_mb=64) == 4
    assert workers(8 * 576 - 1, memory_mb=512, scratch_mb=64) == 3
    assert workers(8 * 576, memory_mb=512, scratch_mb=64, workers=2) == 2
    assert workers(8 * 576, memory_mb=512, scratch_mb=64, workers=5) == 4
    assert workers(100, memory_mb=512, scratch_mb=64, workers=5) == 1
    assert workers(1 << 30) == max(8, 2 * (os.cpu_count() or 1))


def test_a_call_without_room_in_memory_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "machine_memory", lambda: 1)
    with contextlib.closing(opened("landlock", workers=2, packages=())) as sandbox:
        first = in_thread(lambda: sandbox.run(WAITING.format("arpo-first"), 600))
        pid = running(sandbox, "arpo-first")["cell"]
        second = in_thread(lambda: sandbox.run("print('second')"))
        with pytest.raises(TimeoutError):
            second.result(0.05)
        os.kill(pid, signal.SIGUSR1)
        assert first.result(60).stdout == "done\n"
        assert second.result(60).stdout == "second\n"


def test_memory_is_limited_by_the_machine_and_by_cgroups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < module.machine_memory() <= machine
    monkeypatch.setattr(module, "Path", lambda *parts: tmp_path.joinpath(*(part.lstrip("/") for part in parts)))
    assert module.machine_memory() == machine  # nothing is known of cgroups
    files = {
        "proc/self/cgroup": "5:memory:/job\n3:cpu:/job\n0::/a/b:c\n",
        "sys/fs/cgroup/a/b:c/memory.max": "max\n",
        "sys/fs/cgroup/a/memory.max": "70000\n",
        "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "60000\n",
        "sys/fs/cgroup/cpu/job/memory.max": "50\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert module.machine_memory() == 60000
    (tmp_path / "sys/fs/cgroup/memory/memory.limit_in_bytes").unlink()
    assert module.machine_memory() == 70000


WITHOUT = """
import struct, sys
from arpo.tools.sandbox import linux, seccomp
from arpo.tools.sandbox.sandbox import Sandbox
from arpo.errors import ArpoError
unshare = 272 if seccomp.platform.machine() == "x86_64" else 97
code = [(0x20, 0, 0, 0), (0x15, 0, 1, unshare), (0x06, 0, 0, seccomp.DENY),
        (0x15, 0, 1, 444), (0x06, 0, 0, seccomp.ABSENT), (0x06, 0, 0, seccomp.ALLOW)]
linux.no_new_privileges()
linux.install_filter(linux.prepare_filter(b"".join(struct.pack("HBBI", *instruction) for instruction in code)))
try:
    with Sandbox(unsafe_no_isolation=len(sys.argv) > 1, packages=(), scratch_mb=4) as sandbox:
        print(sandbox.tier, sandbox.run("print(6 * 7)").stdout)
        print(sandbox.run("while True: pass", 0.1).status, sandbox.run("x = [0] * 10**10").status)
        print(sandbox.run("import os; print(os.listdir())").stdout)
        left = sandbox.run("import subprocess; subprocess.Popen(['sleep', '30'], start_new_session=True); print(1)")
        print(left.status, left.seconds < 20)
except ArpoError as error:
    print("refused:", error)
"""


def run_without(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Try to open a sandbox where neither namespaces nor Landlock can be had."""
    command = [sys.executable, "-c", WITHOUT, *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, env=environment)


@pytest.mark.slow
def test_without_isolation_start_refuses_and_says_what_is_missing() -> None:
    done = run_without()
    assert done.stdout.startswith("refused: code cannot be isolated on this machine: namespaces: "), done.stderr
    assert "unshare: Operation not permitted" in done.stdout
    assert "OSError: Landlock version 3 is needed (Linux 6.2, switched on), there is none" in done.stdout
    assert "tools.unsafe_no_isolation = true" in done.stdout


@pytest.mark.slow
def test_without_isolation_only_on_demand_and_loudly() -> None:
    done = run_without("unsafe")
    assert done.stdout.split() == ["none", "42", "timeout", "memory", "[]", "ok", "True"], done.stderr
    assert "WARNING: NO ISOLATION. Code that a model writes runs with all your rights." in done.stderr


def test_on_a_machine_without_a_list_of_system_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    for tier in TIERS:
        assert isolation.missing_support(tier) == "the list of system calls is only known for x86_64 and aarch64"


def test_a_probe_that_gets_through_closes_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PROBES", f"{MARKED.format('arpo-probe')}print('network')")
    sandbox = Sandbox(packages=())
    before = set(children(os.getpid()))
    with pytest.raises(ArpoError, match=r"namespaces: a probe got through \(ok\): network; landlock: .*network"):
        sandbox.start()
    assert sandbox.tier is None
    assert set(children(os.getpid())) <= before
    with pytest.raises(SandboxError):
        sandbox.run("")


def test_the_probes_notice_that_there_is_no_isolation(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    sandbox = Sandbox(packages=())
    sandbox._allowed_tiers = ("none",)
    with contextlib.closing(sandbox):
        sandbox.start()
        assert "NO ISOLATION" in capsys.readouterr().err
        sandbox.run("")  # its workers are not isolated, whatever `tier` says now
        sandbox.tier = "namespaces"
        with pytest.raises(SandboxError, match="a probe got through"):
            sandbox.self_test(sandbox.run)
        for unseen in ("for place in PLACES: open(place, 'w')", "open(CANARY, 'w').write('x')"):
            monkeypatch.setattr(module, "_PROBES", f"{unseen}\nprint('held')")
            with pytest.raises(SandboxError, match=r"a probe got through \(ok\): held .*arpo-"):
                sandbox.self_test(sandbox.run)
    assert list(tmp_path.iterdir()) == []
