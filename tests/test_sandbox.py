"""What the sandbox does for its callers: outputs, limits, order, and that nothing is lost or left when parts of it die.

What confined code cannot do is in `test_sandbox_attacks`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

import arpo.tools.sandbox as module
from arpo.tools.jail import kernel, seccomp, walls
from arpo.tools.jail.workers import Call
from arpo.tools.sandbox import TIERS, Sandbox, SandboxBroken, SandboxResult
from arpo.types import ArpoError

ROOT = Path(__file__).parents[1]
MARKED = "import ctypes; ctypes.CDLL(None).prctl(15, b'{}', 0, 0, 0)\n"


def opened(tier: str, **limits: object) -> Sandbox:
    """A sandbox of a tier, or a skipped test that says why there is none."""
    sandbox = Sandbox(tier=tier, **limits)  # type: ignore[arg-type]
    try:
        sandbox.start()
    except ArpoError as error:
        assert "got through" not in str(error)
        pytest.skip(str(error))
    return sandbox


@pytest.fixture(scope="module", params=TIERS)
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    """One that many tests share."""
    with contextlib.closing(opened(request.param, workers=4, max_output=10_000)) as made:
        yield made


@pytest.fixture(params=TIERS)
def fresh(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sandbox]:
    """One of its own for a test that breaks it, with all its files under `tmp_path`."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with contextlib.closing(opened(request.param, workers=2, packages=())) as made:
        yield made
    assert list(tmp_path.glob("arpo-*")) == []


def marked(name: str, among: list[int] | None = None) -> list[int]:
    """Processes that gave themselves this name."""
    found = []
    for pid in among or map(int, filter(str.isdigit, os.listdir("/proc"))):
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/comm").read_text() == f"{name}\n":
                found.append(pid)
    return found


def until(condition: Callable[[], object], seconds: float = 5.0) -> bool:
    """Whether something becomes true in time."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True


def alive(pid: int) -> bool:
    """Whether a process is there and more than a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def children(pid: int) -> list[int]:
    """The processes that a process has started, oldest first."""
    with contextlib.suppress(OSError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def family(pid: int) -> list[int]:
    """A process and all below it."""
    return [pid, *(below for child in children(pid) for below in family(child))]


def zygote_pid(sandbox: Sandbox) -> int:
    """The process of the sandbox that this one has started."""
    assert until(lambda: sandbox._pools[False]._zygote)
    return sandbox._pools[False]._zygote.process.pid  # type: ignore[union-attr]


def line(pid: int, cell: int) -> list[int]:
    """The processes from one down to another below it; none if that is not there (any more)."""
    if pid == cell:
        return [pid]
    return next(([pid, *below] for child in children(pid) if (below := line(child, cell))), [])


def running(sandbox: Sandbox, name: str, but: frozenset[int] = frozenset()) -> dict[str, int]:
    """The processes that a running call of this name depends on, all below the sandbox's own."""
    found: list[int] = []

    def there() -> bool:
        for pid in set(marked(name, family(zygote_pid(sandbox)))) - but:
            found[:] = line(zygote_pid(sandbox), pid)
        return len(found) >= 3

    assert until(there)
    return {"guard": found[0], "zygote": found[-3], "worker": found[-2], "cell": found[-1]}


def in_thread(function: Callable[[], SandboxResult]) -> Future[SandboxResult]:
    """What a function returns, from a thread of its own."""
    done: Future[SandboxResult] = Future()

    def work() -> None:
        try:
            done.set_result(function())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return done


# What a call gives


@pytest.mark.parametrize(
    ("code", "stdout"),
    [
        ("1 + 1", "2\n"),
        ("x = 3\nx * 2", "6\n"),
        ("'text'", "'text'\n"),
        ("None", ""),
        ("print('once')", "once\n"),
        ("x = 5", ""),
        ("1\n2", "2\n"),
        ("for i in range(3): i", ""),
        ("1 + 1\n# the end\n\n", "2\n"),
        ("", ""),
        ("# nothing", ""),
        ("from __future__ import annotations\ndef f(x: y): ...\nf.__annotations__", "{'x': 'y'}\n"),
        ("__name__", "'__main__'\n"),
        ("__builtins__.__name__", "'builtins'\n"),
        ("import sys; sys.argv", "['']\n"),
    ],
)
def test_the_last_expression_is_shown_on_demand(sandbox: Sandbox, code: str, stdout: str) -> None:
    shown = sandbox.run(code, show_last=True)
    assert (shown.stdout, shown.stderr, shown.status, shown.truncated) == (stdout, "", "ok", False)
    plain = sandbox.run(code)
    assert (plain.stdout, plain.status) == (stdout if "print" in code else "", "ok")


@pytest.mark.parametrize(
    ("code", "stderr"),
    [
        (
            "def f(x):\n    return 1 / x\nf(0)",
            "Traceback (most recent call last):\n  line 3, in <module>\n    f(0)\n  line 2, in f\n    return 1 / x\n"
            "ZeroDivisionError: division by zero\n",
        ),
        (
            "import json\njson.loads('{')",
            "Traceback (most recent call last):\n  line 2, in <module>\n    json.loads('{')\n",
        ),
        ("raise ValueError('one\\ntwo')", "ValueError: one\ntwo\n"),
        ("import sys; sys.exit('bye')", "bye\n"),
        ("class E(Exception):\n  def __str__(self): 1 / 0\nraise E", "<exception str() failed>\n"),
    ],
)
def test_errors_are_told_in_few_lines(sandbox: Sandbox, code: str, stderr: str) -> None:
    result = sandbox.run(code)
    assert (result.status, result.stdout) == ("error", "")
    assert stderr in result.stderr
    assert "zygote" not in result.stderr


def test_wrong_syntax_is_told_with_its_place(sandbox: Sandbox) -> None:
    result = sandbox.run("x = 1\ny = = 2\n")
    assert (result.status, result.stdout) == ("error", "")
    assert result.stderr == "  line 2\n    y = = 2\n        ^\nSyntaxError: invalid syntax\n"


def test_a_long_traceback_is_cut_in_the_middle(sandbox: Sandbox) -> None:
    result = sandbox.run("def f(n): return f(n + 1)\nf(0)")
    assert result.status == "error"
    assert result.stderr.count("  line ") == 6
    assert " more ...\n" in result.stderr
    assert "RecursionError" in result.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("", "ok"),
        ("raise SystemExit", "ok"),
        ("raise SystemExit(0)", "ok"),
        ("import sys; sys.exit(256)", "ok"),
        ("import sys; sys.exit(2)", "error"),
        ("import os; os._exit(0)", "ok"),
        ("raise KeyboardInterrupt", "error"),
        ("raise MemoryError", "memory"),
        ("x = [0] * 10**10", "memory"),
        ("import ctypes; ctypes.string_at(0)", "killed"),
        ("import sys; sys.stdout.close()", "ok"),
        ("import sys; sys.stdout = None", "ok"),
    ],
)
def test_how_it_ended(sandbox: Sandbox, code: str, status: str) -> None:
    assert sandbox.run(code).status == status


def test_streams_are_kept_apart_and_in_order(sandbox: Sandbox) -> None:
    result = sandbox.run(
        "import sys\nfor i in range(3):\n  print(i)\n  print(-i, file=sys.stderr)\nprint('end', end='')"
    )
    assert (result.stdout, result.stderr) == ("0\n1\n2\nend", "0\n-1\n-2\n")


def test_what_was_printed_is_not_lost_with_the_stream(sandbox: Sandbox) -> None:
    code = "import io, sys\nprint('kept', end='')\nsys.stdout = io.StringIO()\nprint('lost')"
    assert sandbox.run(code).stdout == "kept"


def test_stdin(sandbox: Sandbox) -> None:
    assert sandbox.run("print(input() + input())", stdin="one\ntwo\n").stdout == "onetwo\n"
    ended = sandbox.run("input()")
    assert (ended.status, ended.stderr.splitlines()[-1]) == ("error", "EOFError: EOF when reading a line")


def test_a_big_stdin(sandbox: Sandbox) -> None:
    text = "ä" * 1_000_000
    assert sandbox.run("import sys; print(len(sys.stdin.read()))", stdin=text).stdout == "1000000\n"
    assert sandbox.run("print('unread')", stdin=text).stdout == "unread\n"
    assert sandbox.run("import os; os.close(0); print('closed')", stdin=text).stdout == "closed\n"
    assert sandbox.run("import time; time.sleep(9)", 0.1, text).status == "timeout"


@pytest.mark.parametrize(
    ("code", "stdout"),
    [
        ("print('grüße 漢字 🎉')", "grüße 漢字 🎉\n"),
        ("print('\ud800')", "?\n"),  # half a character cannot be sent
        ("print(1)\r\nif True:\r\n    print(2)\r\n", "1\n2\n"),
        ("\ufeffprint(3)", "3\n"),
        ("ä = 1; print(ä)", "1\n"),
        ("# " + "x" * 1_000_000 + "\nprint('long')", "long\n"),
        ("import os; os.write(1, b'\\xff\\xfe!\\n')", "\ufffd\ufffd!\n"),
        ("print('a\\0b')", "a\0b\n"),
    ],
)
def test_all_kinds_of_text(sandbox: Sandbox, code: str, stdout: str) -> None:
    assert sandbox.run(code) == SandboxResult(stdout, "", "ok", pytest.approx(0, abs=5), False)


def test_text_that_is_no_code(sandbox: Sandbox) -> None:
    for code in ("a\0b", "\udc80\udcff(", "x = 'unclosed", "\x0c\x0b" * 10 + "?", "(" * 300):
        result = sandbox.run(code)
        assert result.status == "error", code
        assert "Error" in result.stderr


def test_what_is_too_much_is_refused(sandbox: Sandbox) -> None:
    for wrong in ({"code": "#" * (1 << 20) + "#"}, {"code": "", "stdin": "x" * ((1 << 24) + 1)}):
        with pytest.raises(ValueError, match="bytes"):
            sandbox.run(**wrong)
    for timeout in (0, -1, float("nan"), float("inf"), 1e9):
        with pytest.raises(ValueError, match="timeout"):
            sandbox.run("", timeout)


@pytest.mark.parametrize(("size", "cut"), [(9_999, False), (10_000, False), (10_001, True), (600_000, True)])
@pytest.mark.parametrize("stream", [1, 2])
def test_long_output_is_cut(sandbox: Sandbox, size: int, cut: bool, stream: int) -> None:
    code = f"import os\nleft = {size}\nwhile left: left -= os.write({stream}, (b'abc' * 999)[:left])"
    result = sandbox.run(code)
    kept = (result.stdout, result.stderr)[stream - 1]
    assert (result.status, result.truncated) == ("ok", cut)
    assert kept == ("abc" * size)[: min(size, 10_000)]


def test_a_flood_is_ended_at_once(sandbox: Sandbox) -> None:
    result = sandbox.run("while True: print('y' * 100)", 20)
    assert (result.status, result.truncated, len(result.stdout)) == ("killed", True, 10_000)
    assert result.seconds < 10


def test_time_is_up_when_it_is_up(sandbox: Sandbox) -> None:
    for code in ("while True: pass", "import time; time.sleep(60)"):
        began = time.monotonic()
        result = sandbox.run(f"print('kept')\nprint('half', end='', flush=True)\n{code}", 0.2)
        assert (result.stdout, result.status) == ("kept\nhalf", "timeout")
        assert 0.2 <= result.seconds < 1.0
        assert time.monotonic() - began < 2.0


def test_the_same_code_prints_the_same() -> None:
    codes = [
        "print({str(i) for i in range(50)}, hash('x'))",
        "import random; print(random.random(), random.sample(range(99), 5), random.Random(3).random())",
        "import numpy as np; print(np.random.rand(3), np.random.randint(0, 100, 5))",
        "import os; print(os.getcwd() == os.environ['HOME'], os.umask(0), sorted(os.environ.keys()))",
        "from sympy import *; print(FiniteSet(*symbols('a b c d e')), {symbols('x'), symbols('y'), pi, E})",
    ]
    seen = []
    for _ in range(2):
        with Sandbox(workers=2) as sandbox:
            for code in codes:
                seen.append([sandbox.run(code) for _ in range(2)])
    for number, code in enumerate(codes):
        outputs = {result.stdout for results in (seen[number], seen[number + len(codes)]) for result in results}
        assert len(outputs) == 1, code
        assert outputs != {""}, seen[number]


def test_packages_are_there_and_others_can_be_imported(sandbox: Sandbox) -> None:
    assert sandbox.run("import sys, sympy; print('numpy' in sys.modules, sympy.sqrt(8))").stdout == "True 2*sqrt(2)\n"
    assert sandbox.run("import difflib; print(difflib.SequenceMatcher(None, 'ab', 'ab').ratio())").stdout == "1.0\n"
    assert "ModuleNotFoundError" in sandbox.run("import torch_is_not_here").stderr


def test_scratch_can_be_worked_in(sandbox: Sandbox) -> None:
    code = """
import os, tempfile, pathlib, sqlite3, shutil, zipfile, json
pathlib.Path("a/b").mkdir(parents=True)
pathlib.Path("a/b/c.txt").write_text("hello")
os.rename("a/b/c.txt", "d.txt")
os.link("d.txt", "e.txt"); os.symlink("d.txt", "f.txt")
with tempfile.NamedTemporaryFile("w+") as file: file.write("x"); file.flush()
with tempfile.TemporaryFile() as file: file.write(b"x" * 100_000)
base = sqlite3.connect("base.db")
base.execute("create table t (x)"); base.execute("insert into t values (7)"); base.commit()
with zipfile.ZipFile("z.zip", "w") as archive: archive.writestr("n", "text")
shutil.rmtree("a")
print(open("f.txt").read(), base.execute("select x from t").fetchall(), sorted(os.listdir()))
"""
    result = sandbox.run(code)
    names = "['base.db', 'd.txt', 'e.txt', 'f.txt', 'z.zip']"
    assert (result.stdout, result.stderr) == (f"hello [(7,)] {names}\n", "")
    assert sandbox.run("import os; print(os.listdir())").stdout == "[]\n"


def test_an_event_loop_can_be_run_inside(sandbox: Sandbox) -> None:
    code = "import asyncio\nasync def f(): await asyncio.sleep(0.01); return 5\nprint(asyncio.run(f()))"
    assert sandbox.run(code).stdout == "5\n"


# Many callers


def test_many_threads_share_few_workers(sandbox: Sandbox) -> None:
    with ThreadPoolExecutor(16) as callers:
        results = list(callers.map(lambda n: sandbox.run(f"print({n} * {n})").stdout, range(100)))
    assert results == [f"{n * n}\n" for n in range(100)]
    assert len(sandbox._pools[False]._idle) <= sandbox.workers


def test_many_coroutines_share_few_workers(sandbox: Sandbox) -> None:
    async def all_of_them() -> list[SandboxResult]:
        return await asyncio.gather(*(sandbox.arun(f"print({n})", stdin="x") for n in range(50)))

    assert [result.stdout for result in asyncio.run(all_of_them())] == [f"{n}\n" for n in range(50)]


def test_a_cancelled_call_ends_at_once_and_leaves_nothing(fresh: Sandbox, tmp_path: Path) -> None:
    async def cancelled() -> float:
        code = f"{MARKED.format('arpo-cancel')}open('file', 'w').close()\nwhile True: pass"
        task = asyncio.create_task(fresh.arun(code, 60))
        assert await asyncio.to_thread(until, lambda: marked("arpo-cancel"))
        task.cancel()
        began = time.monotonic()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(until, lambda: not marked("arpo-cancel"), 1.0)
        results = await asyncio.gather(*(fresh.arun("print(1)") for _ in range(4)))
        assert [result.stdout for result in results] == ["1\n"] * 4
        return time.monotonic() - began

    assert asyncio.run(cancelled()) < 3.0
    assert until(lambda: len(list(tmp_path.glob("arpo-*/*"))) <= 2 and not list(tmp_path.glob("arpo-*/*/file")))


def test_a_call_that_is_cancelled_while_it_waits_never_runs(fresh: Sandbox) -> None:
    async def cancelled() -> None:
        busy = [asyncio.create_task(fresh.arun("import time; time.sleep(0.2)")) for _ in range(2)]
        waiting = asyncio.create_task(fresh.arun(f"{MARKED.format('arpo-never')}import time; time.sleep(5)"))
        await asyncio.sleep(0.05)
        waiting.cancel()
        await asyncio.gather(*busy)
        assert (await fresh.arun("print(1)")).stdout == "1\n"
        assert marked("arpo-never") == []

    asyncio.run(cancelled())


# When parts of it die


def test_closing_ends_calls_and_processes(fresh: Sandbox, tmp_path: Path) -> None:
    code = f"{MARKED.format('arpo-close')}open('file', 'w').close()\nimport time; time.sleep(30)"
    calls = [in_thread(lambda: fresh.run(code, 60)) for _ in range(3)]  # one more than there are workers
    assert until(lambda: len(marked("arpo-close")) == 2)
    below = family(zygote_pid(fresh))
    began = time.monotonic()
    fresh.close()
    assert time.monotonic() - began < 2.0
    for call in calls:
        with pytest.raises(SandboxBroken):
            call.result(2)
    assert until(lambda: not any(map(alive, below)), 1.0)
    assert list(tmp_path.glob("arpo-*")) == []
    with pytest.raises(SandboxBroken, match="not open"):
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


@pytest.mark.parametrize("which", ["worker", "zygote", "guard"])
def test_a_call_whose_worker_is_killed_is_made_again(fresh: Sandbox, which: str) -> None:
    fresh.run("")
    call = in_thread(lambda: fresh.run(f"{MARKED.format('arpo-again')}import time; time.sleep(0.2); print('done')"))
    victims = running(fresh, "arpo-again")
    below = family(zygote_pid(fresh))
    os.kill(victims[which], signal.SIGKILL)
    assert until(lambda: not alive(victims["cell"]), 1.0)
    assert call.result(10).stdout == "done\n"
    if which != "worker":
        assert until(lambda: not any(map(alive, below)), 1.0)


@pytest.mark.parametrize("which", ["worker", "zygote"])
def test_a_call_whose_workers_are_killed_twice_fails(fresh: Sandbox, which: str) -> None:
    call = in_thread(lambda: fresh.run(f"{MARKED.format('arpo-twice')}import time; time.sleep(30)", 60))
    killed: frozenset[int] = frozenset()
    for _ in range(2):
        victims = running(fresh, "arpo-twice", killed)
        killed |= {victims["cell"]}
        os.kill(victims[which], signal.SIGKILL)
        assert until(lambda pid=victims["cell"]: not alive(pid), 1.0)
    with pytest.raises(SandboxBroken, match="no worker answered"):
        call.result(10)
    assert fresh.run("print('well')").stdout == "well\n"


def test_a_killed_process_of_the_code_is_no_fault_of_the_worker(fresh: Sandbox) -> None:
    call = in_thread(lambda: fresh.run(f"{MARKED.format('arpo-killed')}import time; time.sleep(30)", 60))
    os.kill(running(fresh, "arpo-killed")["cell"], signal.SIGKILL)
    assert call.result(5).status == "killed"


@pytest.mark.parametrize("which", ["workers", "zygote"])
def test_what_died_while_idle_is_not_used(fresh: Sandbox, which: str) -> None:
    with ThreadPoolExecutor(2) as callers:
        list(callers.map(lambda _: fresh.run("import time; time.sleep(0.1)"), range(2)))
    assert len(fresh._pools[False]._idle) == 2
    guard = zygote_pid(fresh)
    zygote = children(guard)[0] if fresh.tier == "namespaces" else guard
    below = family(zygote)[1:]
    for pid in children(zygote) if which == "workers" else [zygote]:
        os.kill(pid, signal.SIGKILL)
    assert until(lambda: not any(map(alive, below)))
    assert fresh._pools[False].run(Call("print('well')", 5.0, "", False)).stdout == "well\n"  # at the first attempt


def test_nothing_survives_the_supervisor(tmp_path: Path) -> None:
    for tier in TIERS:
        with contextlib.closing(opened(tier)):
            pass
        name = f"arpo-orphan-{tier[0]}"
        code = f"{MARKED.format(name)}open('file', 'w').write('x')\nwhile True: pass"
        script = (
            "from arpo.tools.sandbox import Sandbox\n"
            f"sandbox = Sandbox(tier={tier!r}, packages=())\nsandbox.start()\nsandbox.run({code!r}, 60)"
        )
        environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
        supervisor = subprocess.Popen([sys.executable, "-c", script], env=environment)
        assert until(lambda name=name: marked(name), 20)
        below = family(supervisor.pid)
        assert len(below) >= 4
        supervisor.kill()
        supervisor.wait()
        assert until(lambda below=below: not any(map(alive, below)), 2.0)
        assert until(lambda: not list(tmp_path.glob("arpo-*")), 2.0)


def test_a_process_forked_from_the_supervisor_keeps_nothing_alive(fresh: Sandbox) -> None:
    fresh.run("")
    holder = os.fork()
    if holder == 0:
        time.sleep(20)
        os._exit(0)
    try:
        below = family(zygote_pid(fresh))
        began = time.monotonic()
        fresh.close()
        assert time.monotonic() - began < 1.5
        assert until(lambda: not any(map(alive, below)), 1.0)
    finally:
        os.kill(holder, signal.SIGKILL)
        os.waitpid(holder, 0)


def test_a_worker_that_hangs_is_replaced(fresh: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("arpo.tools.jail.workers.GRACE_SECONDS", 0.2)
    call = in_thread(lambda: fresh.run(f"{MARKED.format('arpo-hang')}import time; time.sleep(0.1); print('done')", 0.3))
    worker = running(fresh, "arpo-hang")["worker"]
    os.kill(worker, signal.SIGSTOP)
    assert call.result(10).stdout == "done\n"
    assert until(lambda: not alive(worker))


def test_many_calls_leak_nothing(sandbox: Sandbox) -> None:
    def state() -> tuple[int, int]:
        guard = zygote_pid(sandbox)
        zygote = children(guard)[0] if sandbox.tier == "namespaces" else guard
        try:
            counts = [len(os.listdir(f"/proc/{pid}/fd")) for pid in (os.getpid(), zygote, *children(zygote))]
        except PermissionError:
            pytest.skip("only root may look into the workers")
        pages = [int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in (zygote, *children(zygote))]
        return max(counts), max(pages)

    def some_calls() -> None:
        for number in range(24):
            sandbox.run("print('x' * 5000)", stdin="x" * 1000)
            if number % 4 == 0:
                sandbox.run("import time; time.sleep(9)", 0.01, "x" * 1_000_000)
                sandbox.run("import os; os._exit(1)", 5, "x" * 1_000_000)

    some_calls()
    fds, pages = state()
    some_calls()
    some_calls()
    assert state()[0] <= fds + 8  # the next process may be on its way
    assert state()[1] <= pages + 300


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
                assert sandbox.run(code) == SandboxResult("", "", "ok", pytest.approx(0, abs=5), False)
                guard = zygote_pid(sandbox)
                os.kill(children(guard)[0] if tier == "namespaces" else guard, signal.SIGKILL)
                assert sandbox.run("print(1)").stdout == "1\n"
    finally:
        for fd in held:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


# What the code is shut into


def test_the_process_as_seen_from_outside(fresh: Sandbox) -> None:
    call = in_thread(lambda: fresh.run(f"{MARKED.format('arpo-seen')}import time; time.sleep(0.25)"))
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
        assert [mount[4] for mount in mounts if "ro" not in mount[5].split(",")] == ["/tmp"]
        assert len(mounts) > 5
        assert status["Uid"].split() == status["Gid"].split() == ["65534"] * 4
        assert status["Groups"].split() == []
    assert {int(status[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapAmb")} == {0}
    assert (status["NoNewPrivs"].strip(), status["Seccomp"].strip()) == ("1", "2")
    call.result(5)


def test_no_tier_no_sandbox() -> None:
    with pytest.raises(ArpoError, match="no sandbox tier 'castle'; use one of: namespaces, landlock"):
        Sandbox(tier="castle")
    with pytest.raises(SandboxBroken, match="not open"):
        Sandbox().run("")
    with pytest.raises(SandboxBroken, match="not open"):
        asyncio.run(Sandbox().arun(""))


WITHOUT = """
import struct, sys
from arpo.tools.jail import kernel, seccomp
from arpo.tools.sandbox import Sandbox
from arpo.types import ArpoError
unshare = 272 if seccomp.platform.machine() == "x86_64" else 97
code = [(0x20, 0, 0, 0), (0x15, 0, 1, unshare), (0x06, 0, 0, seccomp.DENY),
        (0x15, 0, 1, 444), (0x06, 0, 0, seccomp.ABSENT), (0x06, 0, 0, seccomp.ALLOW)]
kernel.no_new_privileges()
kernel.install_filter(b"".join(struct.pack("HBBI", *instruction) for instruction in code))
try:
    with Sandbox(unsafe_no_isolation=len(sys.argv) > 1, packages=(), scratch_mb=4) as sandbox:
        print(sandbox.tier, sandbox.run("print(6 * 7)").stdout)
        print(sandbox.run("while True: pass", 0.1).status, sandbox.run("x = [0] * 10**10").status)
        print(sandbox.run("import os; print(os.listdir())").stdout)
        left = sandbox.run("import subprocess; subprocess.Popen(['sleep', '1'], start_new_session=True); print(1)", 5)
        print(left.status, left.seconds < 0.9)
except ArpoError as error:
    print("refused:", error)
"""


def run_without(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Try to open a sandbox where neither namespaces nor Landlock can be had."""
    command = [sys.executable, "-c", WITHOUT, *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)


def test_where_nothing_isolates_it_refuses_and_says_what_is_missing() -> None:
    done = run_without()
    assert done.stdout.startswith("refused: code cannot be isolated on this machine: namespaces: "), done.stderr
    assert "unshare: Operation not permitted" in done.stdout
    assert "OSError: Landlock version 3 is needed (Linux 6.2, switched on), there is none" in done.stdout
    assert "tools.unsafe_no_isolation = true" in done.stdout


def test_without_isolation_only_on_demand_and_loudly() -> None:
    done = run_without("unsafe")
    assert done.stdout.split() == ["none", "42", "timeout", "memory", "[]", "ok", "True"], done.stderr
    assert "WARNING: NO ISOLATION. Code that a model writes runs with all your rights." in done.stderr


def test_on_a_machine_without_a_list_of_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    for tier in TIERS:
        assert walls.missing(tier) == "the list of system calls is only known for x86_64 and aarch64"


def test_a_probe_that_gets_through_closes_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PROBES", f"{MARKED.format('arpo-probe')}print('network')")
    sandbox = Sandbox(packages=())
    before = set(children(os.getpid()))
    with pytest.raises(ArpoError, match=r"namespaces: a probe got through \(ok\): network; landlock: .*network"):
        sandbox.start()
    assert sandbox.tier is None
    assert set(children(os.getpid())) <= before
    with pytest.raises(SandboxBroken):
        sandbox.run("")


def test_the_probes_notice_that_there_are_no_walls(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    sandbox = Sandbox(packages=())
    sandbox._wanted = ("none",)
    with contextlib.closing(sandbox):
        sandbox.start()
        assert "NO ISOLATION" in capsys.readouterr().err
        sandbox.tier = "namespaces"
        with pytest.raises(SandboxBroken, match="a probe got through"):
            sandbox._attack_itself()
        for unseen in ("for place in PLACES: open(place, 'w')", "open(CANARY, 'w').write('x')"):
            monkeypatch.setattr(module, "_PROBES", f"{unseen}\nprint('held')")
            with pytest.raises(SandboxBroken, match=r"a probe got through \(ok\): held .*arpo-"):
                sandbox._attack_itself()
    assert list(tmp_path.iterdir()) == []


# Walls, one by one


def test_wiping_follows_no_link_and_stops_at_nothing(tmp_path: Path) -> None:
    outside, folder = tmp_path / "outside", tmp_path / "folder"
    outside.mkdir()
    (outside / "kept").write_text("kept")
    folder.mkdir()
    (folder / "link").symlink_to(outside)
    (folder / "deep").mkdir()
    (folder / "deep" / "link").symlink_to(outside)
    (folder / "deep" / "file").symlink_to(outside / "kept")
    (folder / "dangling").symlink_to("/nowhere")
    (folder / "shut").mkdir()
    (folder / "shut" / "inner").mkdir()
    (folder / "shut" / "inner" / "file").write_text("x")
    (folder / "shut" / "inner").chmod(0)
    (folder / "shut").chmod(0)
    os.mkfifo(folder / "fifo")
    Path(os.fsdecode(bytes(folder) + b"/\xff\xfe\n")).write_text("x")
    here = os.open(folder, os.O_RDONLY)
    for _ in range(300):
        os.mkdir("d" * 50, dir_fd=here)
        below = os.open("d" * 50, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    folder.chmod(0)
    walls.wipe(str(folder))
    assert list(folder.iterdir()) == []
    assert [path.name for path in outside.iterdir()] == ["kept"]
    walls.remove(str(folder))
    walls.remove(str(folder))
    assert not folder.exists()


def test_what_is_put_on_disk_is_counted(tmp_path: Path) -> None:
    disk = walls.Disk(str(tmp_path), 1 << 20, os.getpid())
    disk.limit = 1 << 40
    assert not disk.overfull()  # what this process has ever written does not matter below
    disk.limit, allowed = 1 << 20, walls.MAX_WRITTEN
    try:
        walls.MAX_WRITTEN = 1 << 40
        (tmp_path / "a").mkdir()
        (tmp_path / "a" / "file").write_bytes(b"x" * 500_000)
        assert not disk.overfull()
        (tmp_path / "more").write_bytes(b"x" * 600_000)
        assert disk.overfull()
        (tmp_path / "more").unlink()
        assert not disk.overfull()
        deep = tmp_path / "/".join("d" * walls.MAX_DEPTH)
        deep.mkdir(parents=True)
        assert not disk.overfull()
        (deep / "deeper").mkdir()
        assert disk.overfull()
        shutil.rmtree(tmp_path / "d")
        for number in range(walls.ON_DISK - 2):
            (tmp_path / f"link{number}").symlink_to("x")
        assert not disk.overfull()
        (tmp_path / "one more").symlink_to("x")
        assert disk.overfull()
        (tmp_path / "one more").unlink()
        (tmp_path / "link0").unlink()
        (tmp_path / "way").symlink_to("/usr")
        assert not disk.overfull()
        walls.MAX_WRITTEN = 0
        assert disk.overfull()
    finally:
        walls.MAX_WRITTEN = allowed
        disk.close()


# The list of system calls


def decided(program: bytes, machine: str, number: int, *arguments: int, arch: int | None = None) -> int:
    """What a filter answers, by executing it."""
    arguments = (*arguments, 0, 0, 0, 0, 0, 0)[:6]
    data = struct.pack(
        "iIQ6Q", number if number < 1 << 31 else number - (1 << 32), arch or seccomp.AUDIT_ARCH[machine], 0, *arguments
    )
    code = list(struct.iter_unpack("HBBI", program))
    at = accumulator = 0
    while True:
        kind, yes, no, operand = code[at]
        at += 1
        if kind == 0x20:
            (accumulator,) = struct.unpack_from("I", data, operand)
        elif kind == 0x54:
            accumulator &= operand
        elif kind == 0x15:
            at += yes if accumulator == operand else no
        elif kind == 0x35:
            at += yes if accumulator >= operand else no
        else:
            assert kind == 0x06
            return int(operand)


FILTERS = [(machine, apart) for machine in seccomp.AUDIT_ARCH for apart in (True, False)]


@pytest.mark.parametrize(("machine", "apart"), FILTERS)
def test_the_filter_allows_what_the_tables_name(machine: str, apart: bool) -> None:
    program = seccomp.program(apart, machine)
    assert len(program) // 8 < 4096
    checked = set(seccomp.numbers(seccomp._CHECKED, machine))
    allowed = set(seccomp.numbers(seccomp._TABLE, machine))
    allowed |= set(seccomp.numbers(seccomp._APART, machine)) if apart else set()
    assert len(allowed) > 90
    assert not allowed & checked
    for number in set(range(600)) - checked:
        expected = seccomp.ALLOW if number in allowed else seccomp.DENY
        assert decided(program, machine, number) == expected, number
        assert decided(program, machine, number, *[(1 << 64) - 1] * 6) == expected, number
    for number in (*range(600), (1 << 30) - 1, (1 << 31) - 1, (1 << 32) - 1):
        assert decided(program, machine, number | 0x40000000) == seccomp.DENY
    for number in (10**4, 10**6, (1 << 30) - 1):
        assert decided(program, machine, number) == seccomp.DENY
    others = {0x40000003, 0x40000028, 0, 0xC000003E, 0xC00000B7, 0xC00000F3} - {seccomp.AUDIT_ARCH[machine]}
    for arch in others:
        assert {decided(program, machine, number, arch=arch or 1) for number in range(600)} == {seccomp.KILL}


@pytest.mark.parametrize(("machine", "apart"), FILTERS)
def test_the_filter_looks_at_arguments(machine: str, apart: bool) -> None:
    program = seccomp.program(apart, machine)
    names = [entry.split()[0] for entry in seccomp._CHECKED.split(",")]
    number = dict(zip(names, seccomp.numbers(seccomp._CHECKED, machine), strict=True))

    def allowed(name: str, *arguments: int) -> bool:
        return decided(program, machine, number[name], *arguments) == seccomp.ALLOW

    values = {*range(0, 70), 1024, 1025, 1026, 1030, 1031, 1032, *range(0x5400, 0x5460), 0x8901, 0x53564D41, 1 << 31}
    values |= {random.Random(0).getrandbits(32) for _ in range(300)}
    high = 1 << 32
    assert {value for value in values if allowed("fcntl", 5, value)} == {0, 1, 2, 3, 4, 5, 6, 7, 1030, 1032}
    assert {value for value in values if allowed("ioctl", 5, value)} == {0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451}
    assert {value for value in values if allowed("prctl", value)} == {15, 16, 0x53564D41}
    assert {value for value in values if allowed("prlimit64", value, 8)} == {0}
    assert not allowed("fcntl", 0, 8 + high)
    for name in ("sendto", "recvfrom"):
        assert allowed(name, 3, high, 5, 0, 0, 0)
        for address in (1, high, 1 << 63, (1 << 64) - 1):
            assert not allowed(name, 3, 0, 5, 0, address, 0)
    kinds = {(family, kind) for family in range(50) for kind in range(16) if allowed("socketpair", family, kind)}
    assert kinds == {(1, 1)}
    assert allowed("socketpair", 1, 1 | 0o2000000 | 0o4000)
    assert not allowed("socketpair", 1, 2 | 0o2000000)
    assert decided(program, machine, number["clone3"]) == seccomp.ABSENT
    thread = 0x3D0F00
    assert allowed("clone", thread) is apart
    assert allowed("clone", thread | high) is apart
    for flags in (0, 17, 0x100, 0x4111, *(1 << bit for bit in range(32) if bit != 16)):
        assert not allowed("clone", flags), hex(flags)
    for flag in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000):
        assert not allowed("clone", thread | flag)
    shared, shared_checked, private, anonymous = 1, 3, 2, 0x20
    assert allowed("mmap", 0, 4096, 7, private, 3)
    assert allowed("mmap", 0, 4096, 3, private | anonymous)
    assert allowed("mmap", 0, 4096, 3, shared | anonymous)
    for kind in (shared, shared_checked, shared | 0x4000):
        assert allowed("mmap", 0, 4096, 1, kind, 3) is apart


def test_the_filter_of_this_machine_is_installed_whole() -> None:
    assert seccomp.supported()
    assert seccomp.program(True) == seccomp.program(True, os.uname().machine)
    assert seccomp.program(True) != seccomp.program(False)
    assert kernel.landlock_version() >= 0
