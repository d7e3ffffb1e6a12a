"""The cache of tool results: three modes, one file for many processes, and disk errors."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import arpo.tools.cache as caching
from arpo.errors import ArpoError
from arpo.tools.base import Tool, ToolError, ToolUnavailable, tool
from arpo.tools.cache import CacheKey, ToolCache, build_key
from arpo.tools.executor import Toolset, _store, call_tool
from arpo.types import Fault, Image, ToolCall, ToolResult


@tool(cacheable=True)
async def look(word: str = "", number: float = 0, words: list[str] | None = None) -> str:
    """Look up."""
    return word


def question(word: str) -> CacheKey:
    return build_key(look, {"word": word})


def rows(path: Path) -> int:
    connection = sqlite3.connect(path)
    try:
        return int(connection.execute("SELECT count(*) FROM answers").fetchone()[0])
    finally:
        connection.close()


FINE = ToolResult("fine", None, 0.5)


# Questions.


def test_a_key_covers_everything_that_the_result_depends_on() -> None:
    def named(name: str, **fields: Any) -> Tool:
        async def run(a: int = 0, b: int = 0) -> str:
            """Run."""
            return ""

        run.__name__ = name
        return tool(**fields)(run)

    plain = build_key(named("t"), {"a": 1, "b": 2})
    assert (plain.tool, plain.version, plain.args) == ("t", "", '{"a":1,"b":2}')
    assert build_key(named("t", timeout=1, retries=0, quick=True), {"b": 2, "a": 1}) == plain
    others = [
        build_key(named("u"), {"a": 1, "b": 2}),
        build_key(named("t", version="2"), {"a": 1, "b": 2}),
        build_key(named("t", max_chars=5), {"a": 1, "b": 2}),
        build_key(named("t"), {"a": 1, "b": 3}),
        build_key(named("t"), {"a": 1}),
        build_key(named("t"), {"a": "1", "b": 2}),
    ]
    assert len({plain.digest, *(other.digest for other in others)}) == 1 + len(others)


# The store.


def test_put_is_visible_at_once_and_after_reopening(tmp_path: Path) -> None:
    path = tmp_path / "new" / "fol?der #%41" / "answers.sqlite"
    wrong = ToolResult("Error: \u2028 é \U0001f600", Fault.MODEL, 1e-9)
    cache = ToolCache(path, "on")
    assert cache.get(question("a")) is None
    cache.put(question("a"), ToolResult("older", None, 1.0))
    cache.put(question("a"), FINE)
    cache.put(question("\ud800"), wrong)
    assert (cache.get(question("a")), cache.get(question("\ud800"))) == (FINE, wrong)
    cache.close()
    cache.close()  # does nothing
    for mode in ("on", "record", "replay"):
        again = ToolCache(str(path), mode)  # type: ignore[arg-type]
        assert (again.get(question("a")), again.get(question("\ud800"))) == (FINE, wrong)
        assert again.get(question("b")) is None
        assert again.get(question("\ud800")).fault is Fault.MODEL  # type: ignore[union-attr]
        again.close()
        assert again.errors == 0
    assert rows(path) == 2


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.text(max_size=2), st.text(st.characters(exclude_categories=["Cs"]))),
        st.tuples(st.just("get"), st.text(max_size=2), st.just("")),
        st.tuples(st.just("open"), st.just(""), st.just("")),
    ),
    max_size=30,
)


@pytest.mark.slow
@given(STEPS)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_it_behaves_like_a_dictionary(steps: list[tuple[str, str, str]]) -> None:
    oracle: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        cache = ToolCache(Path(folder) / "c", "on")
        for what, word, text in steps:
            if what == "put":
                cache.put(question(word), ToolResult(text, None, 0.0))
                oracle[word] = text
            elif what == "get":
                found = cache.get(question(word))
                assert (found and found.text) == oracle.get(word)
            else:
                cache.close()
                cache = ToolCache(Path(folder) / "c", "on")
        cache.close()
        assert (rows(Path(folder) / "c"), cache.errors) == (len(oracle), 0)


def test_get_takes_microseconds_and_put_does_not_wait(tmp_path: Path) -> None:
    cache = ToolCache(tmp_path / "c", "on")
    questions = [question(str(n)) for n in range(300)]
    text = "word " * 1000

    def usual_seconds(step: Callable[[CacheKey], object]) -> float:
        """Those of most steps: a machine that is busy with other things holds up some."""
        moments = [time.perf_counter()]
        for one in questions:
            step(one)
            moments.append(time.perf_counter())
        return statistics.median(later - earlier for earlier, later in itertools.pairwise(moments))

    putting = usual_seconds(lambda one: cache.put(one, ToolResult(text, None, 0.0)))
    cache.close()
    cache = ToolCache(tmp_path / "c", "on")
    getting = usual_seconds(cache.get)
    assert all(cache.get(one) for one in questions)
    cache.close()
    assert max(putting, getting) < 1e-3


def test_a_locked_file_delays_neither_put_nor_get(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caching, "WRITE_TIMEOUT_SECONDS", 600.0)
    cache = ToolCache(tmp_path / "c", "on")
    other = sqlite3.connect(tmp_path / "c", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    started = time.perf_counter()
    cache.put(question("a"), FINE)
    time.sleep(0.05)  # the writer is waiting now
    cache.put(question("b"), FINE)
    assert (cache.get(question("a")), cache.get(question("b")), cache.get(question("c"))) == (FINE, FINE, None)
    assert time.perf_counter() - started < 60
    other.execute("COMMIT")
    other.close()
    cache.close()
    assert (rows(tmp_path / "c"), cache.errors) == (2, 0)


def test_a_newer_answer_is_found_while_the_older_one_is_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Meddling(sqlite3.Connection):
        def executemany(self, *args: Any) -> sqlite3.Cursor:
            if len(jobs) == 1:
                cache.put(question("a"), FINE)
            return super().executemany(*args)

    jobs: list[Any] = []
    cache = ToolCache(tmp_path / "c", "on")
    assert cache._writer is not None
    cache._writer.close()
    cache._writer = sqlite3.connect(tmp_path / "c", isolation_level=None, factory=Meddling)
    monkeypatch.setattr(cache._thread, "submit", jobs.append)
    cache.put(question("a"), ToolResult("older", None, 1.0))
    jobs[0]()
    assert cache.get(question("a")) == FINE
    jobs[1]()
    assert cache._pending == {}  # nothing is kept in memory once it is written
    assert (cache.get(question("a")), len(jobs), cache.errors) == (FINE, 2, 0)
    cache.close()


def test_other_readers_delay_neither_opening_nor_writing(tmp_path: Path) -> None:
    ToolCache(tmp_path / "c", "on").close()
    other = sqlite3.connect(tmp_path / "c", isolation_level=None, check_same_thread=False)
    other.execute("PRAGMA journal_mode = DELETE")
    other.execute("BEGIN")
    other.execute("SELECT count(*) FROM answers").fetchone()
    timer = threading.Timer(0.1, other.execute, ["COMMIT"])  # until then the file cannot be made ready for sharing
    timer.start()
    cache = ToolCache(tmp_path / "c", "on")
    timer.join()
    other.execute("BEGIN")
    other.execute("SELECT count(*) FROM answers").fetchone()
    cache.put(question("a"), FINE)
    cache.close()
    assert cache.errors == 0  # who had waited for the other, which goes on reading, would have given up
    other.close()


@pytest.mark.slow
def test_many_may_make_the_file_at_the_same_time(tmp_path: Path) -> None:
    """Without patience, about one round in fifteen fails."""
    for number in range(40):
        together, failed = threading.Barrier(8), []

        def open_and_close(path: Path, together: threading.Barrier, failed: list[Exception]) -> None:
            together.wait()
            try:
                ToolCache(path, "on").close()
            except Exception as error:
                failed.append(error)

        args = (tmp_path / str(number), together, failed)
        threads = [threading.Thread(target=open_and_close, args=args) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failed == []


# Files that are no cache.


def damaged(path: Path) -> None:
    ToolCache(path, "on").close()
    content = bytearray(path.read_bytes())
    content[100:] = b"\xff" * (len(content) - 100)
    path.write_bytes(content)


def foreign(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE answers (x)")
    connection.commit()
    connection.close()


def from_the_future(path: Path) -> None:
    ToolCache(path, "on").close()
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version = 3")
    connection.commit()
    connection.close()


@pytest.mark.parametrize("mode", ["on", "record", "replay"])
@pytest.mark.parametrize(
    "spoil", [damaged, foreign, from_the_future, lambda path: path.write_text("{}" * 500), Path.mkdir]
)
def test_a_file_that_is_no_cache_is_refused_and_left_alone(spoil: Any, mode: Any, tmp_path: Path) -> None:
    path = tmp_path / "c"
    spoil(path)
    before = path.read_bytes() if path.is_file() else None
    with pytest.raises(ArpoError, match=r"name another file, or delete this one|cannot store|no recording") as error:
        ToolCache(path, mode)
    assert str(path) in str(error.value)
    assert (path.read_bytes() if path.is_file() else None) == before


@pytest.mark.parametrize("mode", ["on", "record"])
def test_a_file_of_an_older_version_loses_its_faults_and_keeps_its_answers(mode: Any, tmp_path: Path) -> None:
    with Toolset([look], ToolCache(tmp_path / "c", "record")) as toolset:
        ask(toolset, "good")
        assert toolset.cache is not None
        toolset.cache.put(question("bad"), ToolResult("Error: JSONDecodeError", Fault.MODEL, 0.0))
    connection = sqlite3.connect(tmp_path / "c", isolation_level=None)
    connection.execute("PRAGMA user_version = 1")
    connection.close()
    with pytest.raises(ArpoError, match="an older version made it; mode on or record brings it up to date"):
        ToolCache(tmp_path / "c", "replay")
    ToolCache(tmp_path / "c", mode).close()
    cache = ToolCache(tmp_path / "c", "replay")
    assert cache.get(question("bad")) is None
    assert (cache.get(question("good")) or FINE).text == "good"
    cache.close()


@pytest.mark.parametrize("mode", ["on", "record"])
def test_a_failure_of_the_tools_own_is_never_stored(mode: Any, tmp_path: Path) -> None:
    @tool(cacheable=True, retries=0)
    async def look(word: str) -> str:
        """Read a reply that is no JSON."""
        return str(json.loads("<html>502</html>"))

    with Toolset([look], ToolCache(tmp_path / "c", mode)) as toolset:
        assert [(result.fault, result.cached) for result in ask(toolset, "a", "a")] == [(Fault.INFRA, False)] * 2
    assert rows(tmp_path / "c") == 0
    with Toolset([look], ToolCache(tmp_path / "c", "replay")) as toolset:
        (result,) = ask(toolset, "a")
        assert (result.fault, "lacks this call" in result.text) == (Fault.INFRA, True)


def test_mistakes_of_the_user(tmp_path: Path) -> None:
    with pytest.raises(ArpoError, match="on, record or replay, not 'off'"):
        ToolCache(tmp_path / "c", "off")  # type: ignore[arg-type]
    with pytest.raises(ArpoError, match="no recording to replay"):
        ToolCache(tmp_path / "c", "replay")
    (tmp_path / "file").touch()
    with pytest.raises(ArpoError, match="cannot store results"):
        ToolCache(tmp_path / "file" / "c", "on")
    assert not (tmp_path / "c").exists()


def test_an_empty_file_is_a_new_cache_but_no_recording(tmp_path: Path) -> None:
    (tmp_path / "c").touch()
    with pytest.raises(ArpoError, match="name another file"):
        ToolCache(tmp_path / "c", "replay")
    ToolCache(tmp_path / "c", "on").close()


def test_a_recording_is_read_where_nothing_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = ToolCache(tmp_path / "c", "record")
    cache.put(question("a"), FINE)
    cache.close()
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    cache = ToolCache(tmp_path / "c", "replay")
    assert cache.get(question("a")) == FINE
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
    cache.close()


# A disk that fails.


def spoil_table(path: Path) -> None:
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("ALTER TABLE answers RENAME TO gone")
    connection.close()


def ask(toolset: Toolset, *words: str, name: str = "look") -> list[ToolResult]:
    async def main() -> list[ToolResult]:
        return [await call_tool(toolset, ToolCall(name, {"word": word})) for word in words]

    return asyncio.run(main())


@pytest.mark.parametrize("mode", ["on", "record"])
def test_a_failing_disk_does_not_stop_a_run(mode: Any, tmp_path: Path) -> None:
    with Toolset([look], ToolCache(tmp_path / "c", mode)) as toolset:
        assert toolset.cache is not None
        ask(toolset, "a")
        spoil_table(tmp_path / "c")
        assert [(r.text, r.fault) for r in ask(toolset, "b", "b")] == [("b", None)] * 2
    assert toolset.cache.errors > 0
    assert [(r.text, r.fault) for r in ask(toolset, "d")] == [("d", None)]  # closed: no cache any more


def test_a_recording_that_cannot_be_read_is_a_failure_of_the_infrastructure(tmp_path: Path) -> None:
    with Toolset([look], ToolCache(tmp_path / "c", "record")) as toolset:
        ask(toolset, "a")
    with Toolset([look], ToolCache(tmp_path / "c", "replay")) as toolset:
        assert ask(toolset, "a")[0].cached
        spoil_table(tmp_path / "c")
        (result,) = ask(toolset, "a")
        assert (result.fault, result.cached) == (Fault.INFRA, False)
        assert "the recording cannot be read" in result.text
        assert toolset.cache is not None and toolset.cache.errors == 1


def test_a_batch_that_cannot_be_written_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caching, "WRITE_TIMEOUT_SECONDS", 0.05)
    cache = ToolCache(tmp_path / "c", "on")
    other = sqlite3.connect(tmp_path / "c", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    cache.put(question("a"), FINE)
    cache.close()
    assert cache.errors == 1
    other.close()


# Modes.


def clock(**fields: Any) -> tuple[Tool, list[str]]:
    """A tool that never says the same twice."""
    said: list[str] = []

    @tool(retries=0, **fields)
    async def look(word: str) -> str:
        """Look up."""
        said.append(f"{word} {len(said)}")
        if word == "down":
            raise ToolUnavailable("down")
        if word == "wrong":
            raise ToolError(said[-1])
        return said[-1]

    return look, said


def test_on_stores_only_what_is_cacheable(tmp_path: Path) -> None:
    changing, said = clock()
    with Toolset([changing], ToolCache(tmp_path / "c", "on")) as toolset:
        assert [r.text for r in ask(toolset, "a", "a")] == ["a 0", "a 1"]
    assert rows(tmp_path / "c") == 0
    steady, said = clock(cacheable=True)
    with Toolset([steady], ToolCache(tmp_path / "c", "on")) as toolset:
        assert [(r.text, r.cached) for r in ask(toolset, "a", "a", "down", "down")[:2]] == [
            ("a 0", False),
            ("a 0", True),
        ]
    assert (said, rows(tmp_path / "c")) == (["a 0", "down 1", "down 2"], 1)
    newer, said = clock(cacheable=True, version="2")
    with Toolset([newer], ToolCache(tmp_path / "c", "on")) as toolset:
        assert not ask(toolset, "a")[0].cached


@pytest.mark.parametrize("cacheable", [False, True])
def test_record_makes_every_call_and_replay_none(cacheable: bool, tmp_path: Path) -> None:
    changing, said = clock(cacheable=cacheable)
    words = ("a", "wrong", "down", "a", "b")
    with Toolset([changing], ToolCache(tmp_path / "c", "record")) as toolset:
        recorded = ask(toolset, *words)
        assert not any(result.cached for result in recorded)
        assert len(said) == 5
    for _ in range(2):
        with Toolset([changing], ToolCache(tmp_path / "c", "replay")) as toolset:
            replayed = ask(toolset, *words, "c")
            assert [(r.text, r.fault, r.cached, r.attempts) for r in replayed] == [
                ("a 3", None, True, 1),  # of two answers, the last
                ("Error: wrong 1", Fault.MODEL, True, 1),
                ("Error: look is unavailable: the recording that is replayed lacks this call", Fault.INFRA, False, 1),
                ("a 3", None, True, 1),
                ("b 4", None, True, 1),
                ("Error: look is unavailable: the recording that is replayed lacks this call", Fault.INFRA, False, 1),
            ]
            assert (len(said), toolset.stats()["look"].infra, toolset.stats()["look"].calls) == (5, 2, 6)
    with Toolset([changing], ToolCache(tmp_path / "c", "record")) as toolset:
        ask(toolset, "a")
    with Toolset([changing], ToolCache(tmp_path / "c", "replay")) as toolset:
        assert ask(toolset, "a")[0].text == "a 5"
        assert ask(toolset, "a", name="nothing")[0].fault is Fault.MODEL  # what is no call is refused as ever


def test_recording_shares_only_calls_of_cacheable_tools(tmp_path: Path) -> None:
    async def both(toolset: Toolset) -> list[bool]:
        made = [call_tool(toolset, ToolCall("look", {"word": "a"})) for _ in range(2)]
        return [result.cached for result in await asyncio.gather(*made)]

    for cacheable in (False, True):
        tool_, said = clock(cacheable=cacheable)
        with Toolset([tool_], ToolCache(tmp_path / "c", "record")) as toolset:
            assert asyncio.run(both(toolset)) == [False, cacheable]
        assert len(said) == (1 if cacheable else 2)


# Processes.

WRITER = """
import sys, time
from pathlib import Path
from arpo.tools.base import tool
from arpo.tools.cache import ToolCache, build_key
from arpo.types import ToolResult

@tool
def look(word: str) -> str:
    "Look up."

def question(word):
    return build_key(look, {"word": word})

path, me, gate, mode = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), sys.argv[4]
while not gate.exists():
    time.sleep(0.001)
cache = ToolCache(path, "on")
for n in range(300):
    cache.put(question(f"{me} {n}"), ToolResult(f"{me} {n}", None, 0.0))
    cache.put(question(f"both {n}"), ToolResult(f"both {n}", None, 0.0))
    found = cache.get(question(f"both {n}"))
    assert found is not None and found.text == f"both {n}"
    if n % 10 == 0:
        time.sleep(0.001)
if mode == "close":
    cache.close()
    assert cache.errors == 0
print("done")
"""


@pytest.mark.slow
def test_processes_share_one_file(tmp_path: Path) -> None:
    """Two close it; the third just ends."""
    gate = tmp_path / "gate"
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path / "c"), me, str(gate), mode],
            cwd=Path(__file__).parents[2],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for me, mode in (("x", "close"), ("y", "close"), ("z", "leave"))
    ]
    try:
        time.sleep(0.2)
        gate.touch()  # so that they also make the file at the same time
        assert [writer.communicate() for writer in writers] == [("done\n", "")] * 3
    finally:
        for writer in writers:
            writer.kill()
    assert rows(tmp_path / "c") == 4 * 300
    cache = ToolCache(tmp_path / "c", "replay")
    for word in [f"{me} {n}" for me in ("x", "y", "z", "both") for n in range(300)]:
        assert cache.get(question(word)) == ToolResult(word, None, 0.0)
    cache.close()


def test_a_writer_that_is_killed_leaves_a_cache_that_works_and_no_other_file(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        try:
            cache = ToolCache(tmp_path / "c", "on")
            cache.put(question("a"), FINE)
            cache._thread.shutdown(wait=True)  # written
            assert cache._writer is not None
            cache._writer.execute("BEGIN IMMEDIATE")
            cache._writer.execute("DELETE FROM answers")
            os.kill(os.getpid(), signal.SIGKILL)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    cache = ToolCache(tmp_path / "c", "on")
    assert cache.get(question("a")) == FINE
    cache.put(question("b"), FINE)
    cache.close()
    assert (rows(tmp_path / "c"), cache.errors) == (2, 0)
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_a_forked_process_must_open_its_own(tmp_path: Path) -> None:
    cache = ToolCache(tmp_path / "c", "on")
    cache.put(question("a"), FINE)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            cache.put(question("b"), FINE)
            harmless = cache.get(question("a")) is None and cache.errors == 2
            cache.close()
            own = ToolCache(tmp_path / "c", "on")
            own.put(question("c"), FINE)
            own.close()
            status = 0 if harmless and own.errors == 0 else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    cache.close()
    assert (rows(tmp_path / "c"), cache.errors) == (2, 0)


def test_a_result_with_images_is_not_stored() -> None:
    """It would come back without them."""
    stored: list[ToolResult] = []
    cache: Any = SimpleNamespace(put=lambda key, result: stored.append(result))
    seen = ToolResult("here", images=(Image("0" * 64, 1, 1, b"x"),))
    for result in (seen, ToolResult("here")):
        assert _store(cache, CacheKey(b"", "look", "", ""), result) is result
    assert stored == [ToolResult("here")]
