"""Python sessions: state that stays from call to call, and branches, which must do what a replay does.

The oracle is one new interpreter in which all calls of a trajectory are executed. Attacks are in
`test_sandbox_attacks`.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sandboxes import MARKED, alive, children, family, in_thread, marked, opened, unique, until

import arpo.tools.sandbox.sandbox as module
from arpo.errors import ArpoError
from arpo.tools.sandbox.sandbox import TIERS, Call, CallCancelled, Sandbox, SandboxError, SandboxResult
from arpo.tools.sandbox.sessions import Session, SessionEnded, SessionPoint, Sessions

ORACLE = """
import ast, contextlib, io, json, sys, traceback  # numpy is imported before, as for a session
main, found = {"__name__": "__main__"}, []
for code in json.loads(sys.stdin.read()):
    printed, error = io.StringIO(), ""
    with contextlib.redirect_stdout(printed):
        try:
            body = ast.parse(code).body
            last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
            exec(compile(ast.Module(body, []), "", "exec"), main)
            value = None if last is None else eval(compile(ast.Expression(last.value), "", "eval"), main)
            if value is not None:
                print(repr(value))
        except Exception as raised:
            error = traceback.format_exception_only(raised)[-1].strip()
    found.append([printed.getvalue(), error])
print(json.dumps(found))
"""


@pytest.fixture(scope="module", params=TIERS)
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    """One that many tests share."""
    with contextlib.closing(opened(request.param, workers=4, max_output=10_000, packages=("numpy",))) as made:
        yield made


@pytest.fixture
def sessions(sandbox: Sandbox) -> Sessions:
    return Sessions(sandbox)


def oracle(sandbox: Sandbox, codes: list[str]) -> list[list[str]]:
    """What each of the calls prints, and its error."""
    result = sandbox.run(ORACLE, 60.0, json.dumps(codes))
    assert result.status == "ok", result
    return json.loads(result.stdout)  # type: ignore[no-any-return]


def shown(result: SandboxResult) -> list[str]:
    """The same of a call of a session."""
    assert result.status in ("ok", "error"), result
    return [result.stdout, result.stderr.rstrip("\n").rpartition("\n")[2]]


def walk(sessions: Sessions, point: SessionPoint, codes: list[str]) -> tuple[list[list[str]], list[SessionPoint]]:
    """Make calls, and return what they print and the points after them."""
    found, points = [], []
    for code in codes:
        result, point = sessions.run(point, code, 60.0)
        found.append(shown(result))
        points.append(point)
    return found, points


number = st.integers(0, 5)
statements = st.one_of(
    st.sampled_from(
        [
            "x",
            "x = x * 2 + 1",
            "items",
            "items.sort(); items",
            "items = items[::-1] + [len(items)]",
            "d[x] = items; d",
            "f(x)",
            "c = C(); c.add(2)",
            "c.add(1), C.total",
            "random.random(), random.getrandbits(70)",
            "random.shuffle(items); items",
            "np.random.rand(2).tolist(), np.random.randint(100)",
            "rng = np.random.default_rng(5)",
            "rng.integers(1000)",
            "g = (i * i for i in range(4))",
            "next(g)",
            "x += 1\nraise ValueError(x)",
            "try:\n    1 / 0\nexcept ZeroDivisionError as error:\n    print(error)\n    x -= 1",
            "del x",
            "undefined",
            "def broken(:",
            "import itertools, functools",
            "ticks = itertools.count(x)",
            "next(ticks)",
            "sorted((n, open(n).read()) for n in os.listdir() if os.path.isfile(n))",
            "os.makedirs('inner', exist_ok=True); os.chdir('inner')",
            "os.chdir('..')",
            "os.path.relpath(os.getcwd(), os.environ['HOME'])",
            "path = os.path.abspath('absolute')\nwith open(path, 'a') as file: file.write('y')",
            "open(path).read(), os.stat(path).st_size",
            "os.unlink(path)",
            "array = np.arange(5); array",
            "array *= 2; array.tolist()",
            "{'a', 'b', 'c', x}",
            "import fractions; half = fractions.Fraction(x, 2); half",
        ]
    ),
    st.builds("x = {}".format, number),
    st.builds("items.append({})".format, number),
    st.builds("d[{}] = len(d); d".format, number),
    st.builds("def f(a, b={}): return a + b + x".format, number),
    st.builds(
        "class C:\n    total = {}\n    def add(self, n):\n        self.total += n\n        return self.total".format,
        number,
    ),
    st.builds("with open('f{0}', 'a') as file: file.write('{0};')".format, number),
    st.builds("with open('f{0}', 'r+') as file: file.seek({0}); file.write('w')".format, number),
    st.builds("os.rename('f{}', 'f{}')".format, number, number),
    st.builds("import random; random.seed({})".format, number),
    st.builds("for i in range({}): print(i, x)".format, number),
)
BEGIN = "import os, random\nimport numpy as np\nx, items, d = 1, [3, 1, 2], {}"


@pytest.mark.slow
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(trunk=st.lists(statements, min_size=1, max_size=7), data=st.data())
def test_a_branch_does_what_a_replay_does(sandbox: Sandbox, trunk: list[str], data: st.DataObject) -> None:
    sessions = Sessions(sandbox)
    trunk = [BEGIN, *trunk]
    at = data.draw(st.integers(1, len(trunk)), label="branch after")
    branch = data.draw(st.lists(statements, min_size=1, max_size=4), label="branch")
    before, points = walk(sessions, sessions.open(), trunk[:at])
    branched, _ = walk(sessions, points[-1], branch)
    after, _ = walk(sessions, points[-1], trunk[at:])
    again, _ = walk(sessions, points[-1], branch)
    assert before + after == oracle(sandbox, trunk)
    assert before + branched == oracle(sandbox, trunk[:at] + branch)
    assert again == branched
    if sandbox.tier == "namespaces":
        assert sessions.replays == 0


@pytest.mark.slow
def test_a_branch_changes_nothing_of_the_other(sessions: Sessions) -> None:
    _, (point,) = walk(sessions, sessions.open(), ["import os\nx = [1]\nwith open('a', 'w') as f: f.write('1')"])
    for value in "23":
        change = f"x.append({value})\nwith open('a', 'a') as f: f.write('{value}')\nwith open('b', 'x') as f: pass"
        seen, _ = walk(sessions, point, [change, "x, open('a').read(), sorted(os.listdir())"])
        assert seen[-1] == [f"([1, {value}], '1{value}', ['a', 'b'])\n", ""]
    assert walk(sessions, point, ["x, open('a').read(), os.listdir()"])[0] == [["([1], '1', ['a'])\n", ""]]


def test_files_keep_what_they_are(sessions: Sessions) -> None:
    make = """
import os
os.makedirs("a/b")
with open("a/b/file", "wb") as f: f.write(b"x" * 100_000)
os.link("a/b/file", "twin")
os.symlink("a/b/file", "link")
os.symlink("/nowhere", "dangling")
with open("sparse", "wb") as f: f.truncate(50_000_000)
with open("odd \\udcff\\n", "w") as f: f.write("odd")
def look():
    seen = [(name, os.lstat(name)) for name in sorted(os.listdir())]
    return [(name, oct(info.st_mode), info.st_size, info.st_nlink, info.st_mtime_ns) for name, info in seen]
before = look()
"""
    if sessions._sandbox.tier == "namespaces":
        make += "os.chmod('a/b/file', 0); os.chmod('a', 0); before = look()"
    _, (point,) = walk(sessions, sessions.open(), [make])
    check = "assert look() == before, (look(), before)\nos.readlink('link'), os.readlink('dangling')"
    assert walk(sessions, point, [check])[0] == [["('a/b/file', '/nowhere')\n", ""]]
    write = "os.chmod('twin', 0o600) if os.path.exists('/tmp') and not os.access('twin', 2) else 0\n"
    write += "with open('twin', 'ab') as f: f.write(b'y')\nos.lstat('twin').st_size, os.stat('twin').st_nlink"
    assert walk(sessions, point, [write])[0] == [["(100001, 2)\n", ""]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("while True: pass", "timeout"),
        ("import os; os._exit(0)", "killed"),
        ("import ctypes; ctypes.string_at(0)", "killed"),
        ("while True: print('x' * 1000)", "killed"),
        ("file = open('left', 'w')", "refused"),
        ("import os; os.dup(1)", "refused"),
        (
            "import mmap\nwith open('m', 'wb+') as f:\n    f.write(b'x'); f.flush()\n"
            "    m = mmap.mmap(f.fileno(), 1, access=mmap.ACCESS_COPY)",
            "refused",
        ),
        ("import os\nfor n in range(1100): os.mkdir(str(n))", "refused"),
    ],
)
def test_a_call_that_is_not_kept_leaves_the_state_as_it_was(sessions: Sessions, code: str, status: str) -> None:
    _, (point,) = walk(sessions, sessions.open(), ["x = 1"])
    result, after = sessions.run(point, f"x = 2\n{code}", 0.5 if status == "timeout" else 60.0)
    if result.status == "killed" and status == "refused" and sessions._sandbox.tier == "landlock":
        status = "killed"  # for too many files
    assert (result.status, after is point) == (status, True), result
    assert walk(sessions, after, ["x"])[0] == [["1\n", ""]]


def test_a_file_that_is_only_mapped_is_refused(sessions: Sessions) -> None:
    if sessions._sandbox.tier == "landlock":
        pytest.skip("in this tier there is no copy of the files, so they need not stay as they are")
    code = """
import ctypes
with open("m", "wb+") as file:
    file.write(b"x" * 4096)
    file.flush()
    ctypes.CDLL(None).mmap(None, ctypes.c_size_t(4096), 3, 2, file.fileno(), ctypes.c_long(0))
"""
    result, _ = sessions.run(sessions.open(), code, 60.0)
    assert (result.status, "files open" in result.stderr) == ("refused", True)


@pytest.mark.slow
def test_a_thread_that_is_left_is_refused_and_one_that_ends_is_not(sessions: Sessions) -> None:
    if sessions._sandbox.tier == "landlock":
        pytest.skip("there are no threads in this tier")
    start = "import threading, time\nx = []\ndef run(seconds):\n    time.sleep(seconds); x.append(1)\n"
    _, (point,) = walk(sessions, sessions.open(), [start])
    thread = "threading.Thread(target=run, args=({},), daemon={}).start()"
    result, after = sessions.run(point, thread.format(600, True), 60.0)
    assert (result.status, after is point) == ("refused", True)
    assert "threads" in result.stderr
    assert walk(sessions, point, [thread.format(0.01, False), "x"])[0] == [["", ""], ["[1]\n", ""]]


def test_errors_show_the_lines_of_earlier_calls(sessions: Sessions) -> None:
    _, points = walk(sessions, sessions.open(), ["def f(y):\n    return 1 / y", "z = 0"])
    result, point = sessions.run(points[-1], "z = 5\nf(0)")
    assert result.stderr == (
        "Traceback (most recent call last):\n  line 2, in <module>\n    f(0)\n"
        "  line 2 of call 1, in f\n    return 1 / y\nZeroDivisionError: division by zero\n"
    )
    assert walk(sessions, point, ["z"])[0] == [["5\n", ""]]  # the state is what the code left
    result, point = sessions.run(point, "z = 6; import sys; sys.exit(3)")
    assert result.status == "error"
    assert walk(sessions, point, ["z"])[0] == [["6\n", ""]]


def test_an_error_that_holds_a_file_does_not_leave_it_open(sessions: Sessions) -> None:
    loop = "class A: pass\na = A(); a.me = a; a.file = open('a', 'w'); del a"
    assert walk(sessions, sessions.open(), [loop, "import os; os.listdir()"])[0] == [["", ""], ["['a']\n", ""]]


@pytest.mark.parametrize("code", ["os.environ.clear()", "os.environ['HOME'] = '/nowhere'"])
def test_a_session_does_not_need_its_environment(sessions: Sessions, code: str) -> None:
    codes = [f"import os; {code}", "with open('a', 'w') as file: file.write('1')", "open('a').read()"]
    assert walk(sessions, sessions.open(), codes)[0] == [["", ""], ["", ""], ["'1'\n", ""]]


def test_after_its_directory_is_removed_a_session_goes_on_in_scratch(sessions: Sessions) -> None:
    codes = ["import os; os.mkdir('a'); os.chdir('a'); os.rmdir('../a')", "os.getcwd() == os.environ['HOME']"]
    assert walk(sessions, sessions.open(), codes)[0] == [["", ""], ["True\n", ""]]


def test_limits_that_would_make_forks_fail_do_nothing(sessions: Sessions) -> None:
    limits = "import resource as r\nfor kind in (r.RLIMIT_NOFILE, r.RLIMIT_NPROC): r.setrlimit(kind, (0, 0))"
    assert walk(sessions, sessions.open(), [limits, "open('a', 'w').close()", "2"])[0] == [["", ""]] * 2 + [["2\n", ""]]


@pytest.mark.slow
def test_points_that_are_dropped_are_replayed(sandbox: Sandbox) -> None:
    sessions = Sessions(sandbox, max_frozen=1)
    first, (a, b) = walk(sessions, sessions.open(), ["import random; x = random.random()", "x += 1; x"])
    assert walk(sessions, a, ["x += 2; x"])[0] == [
        [oracle(sandbox, ["import random; x = random.random()", "x + 2"])[1][0], ""]
    ]
    assert sessions.replays >= 1
    assert walk(sessions, b, ["x"])[0] == [first[1]]
    with pytest.raises(ArpoError, match="max_frozen is 0"):
        Sessions(sandbox, max_frozen=0)


def test_a_replay_that_prints_something_else_is_an_error(sandbox: Sandbox) -> None:
    sessions = Sessions(sandbox)
    _, (point,) = walk(sessions, sessions.open(), ["import os; os.urandom(8)"])
    assert point.frozen
    point.frozen.session.close()
    with pytest.raises(SandboxError, match="could not be replayed: call 1 gave"):
        sessions.run(point, "1")


def session_workers(sandbox: Sandbox) -> list[int]:
    """Processes below the zygote with numpy, which sessions use."""
    zygote = sandbox._pools[("numpy",)]._zygote
    assert zygote is not None
    inner = children(zygote.process.pid)[0] if sandbox.tier == "namespaces" else zygote.process.pid
    return [pid for child in children(inner) for pid in family(child)]


@pytest.fixture(params=TIERS)
def fresh(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sandbox]:
    """One of its own, with all its files under `tmp_path`."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with contextlib.closing(opened(request.param, workers=2, packages=("numpy",))) as made:
        yield made
    assert list(tmp_path.glob("arpo-*")) == []


@pytest.mark.slow
def test_processes_end_when_nobody_refers_to_their_point(fresh: Sandbox, tmp_path: Path) -> None:
    sessions = Sessions(fresh)
    _, points = walk(sessions, sessions.open(), ["open('file', 'w').close()", "x = 1", "x = 2"])
    most = len(session_workers(fresh))
    assert most >= 2
    branch = walk(sessions, points[0], ["x = 3"])[1]
    points = points[-1:]
    gc.collect()
    if fresh.tier == "namespaces":  # worker, init, and two points
        assert until(lambda: len(session_workers(fresh)) == 4), session_workers(fresh)
    assert walk(sessions, points[0], ["x"])[0] == [["2\n", ""]]
    assert walk(sessions, branch[0], ["x"])[0] == [["3\n", ""]]
    del points, branch
    gc.collect()
    assert until(lambda: not session_workers(fresh))
    assert list(tmp_path.glob("arpo-*/*/file")) == []


@pytest.mark.slow
@pytest.mark.parametrize("which", ["point", "worker", "init", "zygote"])
def test_a_session_whose_processes_are_killed_is_replayed(fresh: Sandbox, which: str) -> None:
    sessions = Sessions(fresh)
    _, points = walk(sessions, sessions.open(), [MARKED.format(unique("point")) + "x = 1"])
    worker = session_workers(fresh)[0]
    victims = {
        "point": marked(unique("point"))[-1],
        "worker": worker,
        "zygote": fresh._pools[("numpy",)]._zygote.process.pid,
    }  # type: ignore[union-attr]
    if fresh.tier == "namespaces":
        victims["init"] = children(worker)[0]
    elif which == "init":
        pytest.skip("there is none in this tier")
    below = session_workers(fresh)
    os.kill(victims[which], signal.SIGKILL)
    seen = victims["point"] if which == "init" else victims[which]  # init ends when the worker does
    assert until(lambda: not alive(seen))
    assert walk(sessions, points[0], ["x += 1; x"])[0] == [["2\n", ""]]
    if which != "point":
        assert until(lambda: not any(map(alive, below)))


@pytest.mark.slow
def test_a_cancelled_call_ends_and_the_state_is_as_before(fresh: Sandbox) -> None:
    sessions = Sessions(fresh)
    _, (point,) = walk(sessions, sessions.open(), ["x = 1"])

    async def cancelled() -> SandboxResult:
        loop = asyncio.create_task(sessions.arun(point, f"{MARKED.format(unique('loop'))}while True: pass", 600))
        assert await asyncio.to_thread(until, lambda: marked(unique("loop")))
        loop.cancel()
        with pytest.raises(asyncio.CancelledError):
            await loop
        assert await asyncio.to_thread(until, lambda: not marked(unique("loop")))
        return (await sessions.arun(point, "x"))[0]

    assert asyncio.run(cancelled()).stdout == "1\n"


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.slow
def test_calls_that_are_not_kept_leave_no_connections(fresh: Sandbox) -> None:
    sessions = Sessions(fresh)
    point = sessions.run(sessions.open(), "x = 1")[1]
    open_before = descriptors()
    for code in ("while True: pass", "import os; os._exit(0)", "file = open('a', 'w')") * 3:
        assert sessions.run(point, code, 1.0)[1] is point
    assert descriptors() <= open_before


@pytest.mark.slow
def test_a_call_that_is_cancelled_while_it_waits_leaves_its_session_as_it_is(fresh: Sandbox) -> None:
    sessions = Sessions(fresh)
    _, point = sessions.run(sessions.open(), "import os; os.urandom(8)")  # which no replay would give again
    first, second = (Call(code, 60.0, "", True) for code in ("1", "2"))
    start = sessions._frozen(point, second)
    second.cancel()
    with pytest.raises(CallCancelled):
        start.session.run(start, second, fresh.slots)
    sessions._give_back(point, start)
    assert sessions._run(point, first)[0].stdout == "1\n"
    with pytest.raises(SandboxError, match="no session answered"):
        sessions._run(point, second)
    assert sessions.replays == 0


def test_a_session_that_other_calls_end_is_not_a_failure(sessions: Sessions, monkeypatch: pytest.MonkeyPatch) -> None:
    point, run, left = sessions.run(sessions.open(), "x = 1")[1], Session.run, iter(range(5))

    def ended(session: Session, *arguments: object) -> object:
        if next(left, None) is not None:
            raise SessionEnded
        return run(session, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Session, "run", ended)
    assert walk(sessions, point, ["x"])[0] == [["1\n", ""]]


@pytest.mark.slow
def test_a_replay_ends_when_its_call_is_cancelled(fresh: Sandbox) -> None:
    sessions = Sessions(fresh)
    _, points = walk(sessions, sessions.open(), [f"{MARKED.format(unique('slow'))}import time; time.sleep(1)", "2"])
    points[-1].frozen.session.close()  # type: ignore[union-attr]
    assert until(lambda: not marked(unique("slow")))

    async def cancelled() -> None:
        call = asyncio.create_task(sessions.arun(points[-1], "3"))
        assert await asyncio.to_thread(until, lambda: marked(unique("slow")))
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

    asyncio.run(cancelled())
    assert until(lambda: not fresh._pools[("numpy",)]._busy, 30)
    assert until(lambda: not marked(unique("slow")))


@pytest.mark.slow
def test_the_files_of_a_point_that_is_killed_are_released(fresh: Sandbox) -> None:
    if fresh.tier == "landlock":
        pytest.skip("there the files are those of the session")
    sessions = Sessions(fresh)
    root = sessions.open()  # is held, so that its process does not end as well
    _, (point,) = walk(sessions, root, [MARKED.format(unique("files")) + "open('a', 'w').close()"])
    worker = session_workers(fresh)[0]
    before = len(os.listdir(f"/proc/{worker}/fd"))
    os.kill(marked(unique("files"))[-1], signal.SIGKILL)
    assert until(lambda: len(os.listdir(f"/proc/{worker}/fd")) == before - 2)  # also that of the process
    assert not marked(unique("files"))
    assert walk(sessions, point, ["import os; os.listdir()"])[0] == [["['a']\n", ""]]


WORKER_FAILS = """
import json, socket, sys
from arpo.tools.sandbox import linux, session_worker
def fail(*_): raise OSError("no filter")
linux.install_filter = fail
session_worker.run(json.loads(sys.argv[1]), socket.socket(fileno=int(sys.argv[2])), -1, 1 << 32)
"""


def test_a_process_that_cannot_be_confined_ends_the_worker(tmp_path: Path) -> None:
    settings = {"tier": "landlock", "root": str(tmp_path), "readable": [], "memory": 1 << 30, "scratch": 1 << 20}
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-c", WORKER_FAILS, json.dumps(settings), str(theirs.fileno())]
    done = subprocess.run(command, pass_fds=[theirs.fileno()], capture_output=True, text=True, timeout=60)
    theirs.close()
    ours.close()
    assert "a process could not be confined: OSError: no filter" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_closing_ends_sessions_and_their_calls(fresh: Sandbox) -> None:
    sessions = Sessions(fresh)
    _, (point,) = walk(sessions, sessions.open(), ["x = 1"])
    call = in_thread(lambda: sessions.run(point, f"{MARKED.format(unique('end'))}while True: pass", 600)[0])
    assert until(lambda: marked(unique("end")))
    below = session_workers(fresh)
    fresh.close()
    with pytest.raises(SandboxError):
        call.result(60)
    assert until(lambda: not any(map(alive, below)))
    with pytest.raises(SandboxError, match="not open"):
        sessions.run(point, "x")


@pytest.mark.slow
def test_branches_of_many_sessions_run_at_once(sessions: Sessions) -> None:
    async def tree(number: int) -> list[str]:
        _, point = await sessions.arun(sessions.open(), f"x = {number}", 60.0)
        found = await asyncio.gather(*(sessions.arun(point, f"x += {more}; x", 60.0) for more in range(3)))
        return [result.stdout for result, _ in found]

    async def trees() -> list[list[str]]:
        return await asyncio.gather(*(tree(10 * number) for number in range(6)))

    assert asyncio.run(trees()) == [[f"{10 * number + more}\n" for more in range(3)] for number in range(6)]


def test_a_probe_that_gets_through_in_a_session_is_an_error(
    sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    sessions.start()
    monkeypatch.setattr(module, "_PROBES", "print('network')")
    with pytest.raises(ArpoError, match=r"sessions cannot be had .*a probe got through \(ok\): network"):
        sessions.start()
