"""The sandbox for its callers: output, errors, limits, order, determinism, concurrency.

What happens when parts of it die is in `test_sandbox_life`, what code cannot do in `test_sandbox_attacks`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from sandboxes import opened

from arpo.errors import ArpoError
from arpo.tools.sandbox.sandbox import TIERS, Sandbox, SandboxError, SandboxResult


@pytest.fixture(scope="module", params=TIERS)
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    """One that many tests share."""
    with contextlib.closing(opened(request.param, workers=4, max_output=10_000)) as made:
        yield made


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
def test_tracebacks_are_short(sandbox: Sandbox, code: str, stderr: str) -> None:
    result = sandbox.run(code)
    assert (result.status, result.stdout) == ("error", "")
    assert stderr in result.stderr
    assert "zygote" not in result.stderr


def test_syntax_errors_have_their_position(sandbox: Sandbox) -> None:
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
def test_statuses(sandbox: Sandbox, code: str, status: str) -> None:
    assert sandbox.run(code).status == status


def test_streams_are_kept_apart_and_in_order(sandbox: Sandbox) -> None:
    result = sandbox.run(
        "import sys\nfor i in range(3):\n  print(i)\n  print(-i, file=sys.stderr)\nprint('end', end='')"
    )
    assert (result.stdout, result.stderr) == ("0\n1\n2\nend", "0\n-1\n-2\n")


def test_output_survives_a_closed_stream(sandbox: Sandbox) -> None:
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
    assert sandbox.run(code) == SandboxResult(stdout, "", "ok", pytest.approx(0, abs=60), False)


def test_text_that_is_not_code(sandbox: Sandbox) -> None:
    for code in ("a\0b", "\udc80\udcff(", "x = 'unclosed", "\x0c\x0b" * 10 + "?", "(" * 300):
        result = sandbox.run(code)
        assert result.status == "error", code
        assert "Error" in result.stderr


def test_code_and_stdin_that_are_too_long_are_refused(sandbox: Sandbox) -> None:
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


def test_too_much_output_ends_the_call_at_once(sandbox: Sandbox) -> None:
    result = sandbox.run("while True: print('y' * 100)", 600)
    assert (result.status, result.truncated, len(result.stdout)) == ("killed", True, 10_000)
    assert result.seconds < 60


@pytest.mark.slow
def test_timeouts_are_exact(sandbox: Sandbox) -> None:
    for code in ("while True: pass", "import time; time.sleep(600)"):
        began = time.monotonic()
        result = sandbox.run(f"print('kept')\nprint('half', end='', flush=True)\n{code}", 1.0)
        assert (result.stdout, result.status) == ("kept\nhalf", "timeout")
        assert 1.0 <= result.seconds < 60
        assert time.monotonic() - began < 60


@pytest.mark.slow
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


@pytest.mark.slow
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


def test_every_call_has_new_scratch(sandbox: Sandbox) -> None:
    code = """
import os
seen = os.stat(".")
print(os.getcwd(), seen.st_ino, seen.st_size, seen.st_nlink, oct(seen.st_mode), os.listdir())
for number in range(500): open(f"{number}" + "x" * 200, "w").close()
print(os.stat(f"0" + "x" * 200).st_ino)
"""
    with contextlib.closing(opened(sandbox.tier, workers=1, packages=())) as one_worker:
        seen = [one_worker.run(code).stdout.split() for _ in range(3)]
    if sandbox.tier == "namespaces":
        assert seen[0] == seen[1] == seen[2]  # inode numbers, too
    else:
        assert len({place for place, *_ in seen}) == 3
        assert seen[0][2:6] == seen[1][2:6] == seen[2][2:6]


def test_locks_do_nothing(sandbox: Sandbox) -> None:
    code = """
import fcntl, sqlite3
with open("file", "w") as first, open("file", "w") as second:
    fcntl.flock(first, fcntl.LOCK_EX)
    fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
    fcntl.lockf(first, fcntl.LOCK_EX)
for _ in range(2):
    with sqlite3.connect("base.db") as base:
        base.execute("create table if not exists t (x)"); base.execute("insert into t values (7)")
print(base.execute("select count(*) from t").fetchall())
"""
    result = sandbox.run(code)
    assert (result.stdout, result.stderr) == ("[(2,)]\n", "")


def test_an_event_loop_can_be_run_inside(sandbox: Sandbox) -> None:
    code = "import asyncio\nasync def f(): await asyncio.sleep(0.01); return 5\nprint(asyncio.run(f()))"
    assert sandbox.run(code).stdout == "5\n"


# Many callers


def test_many_threads_share_few_workers(sandbox: Sandbox) -> None:
    with ThreadPoolExecutor(16) as callers:
        results = list(callers.map(lambda n: sandbox.run(f"print({n} * {n})").stdout, range(100)))
    assert results == [f"{n * n}\n" for n in range(100)]
    assert len(sandbox._pools[()]._idle) <= sandbox.workers


def test_many_coroutines_share_few_workers(sandbox: Sandbox) -> None:
    async def all_of_them() -> list[SandboxResult]:
        return await asyncio.gather(*(sandbox.arun(f"print({n})", stdin="x") for n in range(50)))

    assert [result.stdout for result in asyncio.run(all_of_them())] == [f"{n}\n" for n in range(50)]


def test_without_a_tier_there_is_no_sandbox() -> None:
    with pytest.raises(ArpoError, match="no sandbox tier 'castle'; use one of: namespaces, landlock"):
        Sandbox(tier="castle")
    with pytest.raises(SandboxError, match="not open"):
        Sandbox().run("")
    with pytest.raises(SandboxError, match="not open"):
        asyncio.run(Sandbox().arun(""))
