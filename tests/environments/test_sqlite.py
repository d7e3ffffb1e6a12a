"""SQLite environment: what the tool answers, what hostile SQL cannot do, forks, and the comparisons for rewards."""

from __future__ import annotations

import asyncio
import copy
import random
import sqlite3
from collections import Counter
from pathlib import Path

import pytest

from arpo.environments.sqlite import MAX_CELL_CHARS, SqliteEnvironment, has_order
from arpo.environments.states import StatePool
from arpo.errors import ArpoError
from arpo.tools.base import ToolError, ToolTimeout
from arpo.tools.executor import Toolset
from arpo.types import Fault, Task, ToolCall

SCRIPT = """
CREATE TABLE people (id INTEGER PRIMARY KEY, name TEXT, age INT);
INSERT INTO people VALUES (1, 'Ann', 30), (2, 'Bob', 41);
CREATE TABLE pets (name TEXT, owner INT REFERENCES people(id));
"""
COUNT_FOREVER = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT count(*) FROM c"
LARGE_ROWS = "WITH RECURSIVE c(x) AS (SELECT zeroblob(1000000) UNION ALL SELECT x FROM c) SELECT x FROM c"


def opened(script: str = SCRIPT, **settings: object) -> SqliteEnvironment:
    environment = SqliteEnvironment(**settings)  # type: ignore[arg-type]
    environment.reset(Task("t", "Who?", ("Ann",), meta={"database": script}))
    return environment


def test_a_query_is_answered_with_a_table() -> None:
    environment = opened()
    assert environment.sql("SELECT name, age FROM people ORDER BY id") == "name | age\nAnn | 30\nBob | 41\n(2 rows)"
    assert environment.sql("UPDATE people SET age = age + 1") == "Done. 2 rows changed."
    assert environment.sql("SELECT age FROM people WHERE id = 1; -- her age") == "age\n31\n(1 row)"
    assert environment.sql("CREATE TABLE t (a); INSERT INTO t VALUES (';'); SELECT * FROM t") == "a\n;\n(1 row)"
    assert environment.sql("SELECT NULL, x'00ff', 'a\nb', 1.5") == (
        "NULL | x'00ff' | 'a\\nb' | 1.5\nNULL | x'00ff' | a\\nb | 1.5\n(1 row)"
    )


def test_what_is_shown_is_bounded() -> None:
    environment = opened(max_rows=2)
    environment.sql("INSERT INTO people(name) VALUES ('Cid')")
    assert environment.sql("SELECT id FROM people") == "id\n1\n2\n(2 rows shown, there are more)"
    assert environment.sql("SELECT hex(zeroblob(5000)) AS x") == f"x\n{'0' * MAX_CELL_CHARS}...\n(1 row)"


def test_the_schema_is_appended_to_the_question() -> None:
    task = Task("t", "Who?", ("Ann",), meta={"database": SCRIPT})
    assert SqliteEnvironment().reset(task) == (
        "The database:\nCREATE TABLE people (id INTEGER PRIMARY KEY, name TEXT, age INT);\n"
        "CREATE TABLE pets (name TEXT, owner INT REFERENCES people(id));"
    )
    assert SqliteEnvironment(show_schema=False).reset(task) is None


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("SELECT * FROM nobody", "no such table: nobody"),
        ("SELEC 1", 'near "SELEC": syntax error'),
        ("SELECT '\0'", "embedded null character"),
        ("INSERT INTO pets VALUES ('Rex', 9)", "FOREIGN KEY constraint failed"),
        ("BEGIN; DELETE FROM people", "a transaction was left open"),
        ("DELETE FROM people; SELECT 1 FROM nobody", "no such table"),
        ("ATTACH '{file}' AS other", "not allowed"),
        ("VACUUM INTO '{file}'", "not allowed"),
        ("SELECT load_extension('x')", "not allowed"),
        ("CREATE VIRTUAL TABLE f USING fts5(a)", "not allowed"),
        ("PRAGMA max_page_count = 1000000", "PRAGMA max_page_count is not allowed"),
        ("SELECT * FROM pragma_database_list", "PRAGMA database_list is not allowed"),
        ("PRAGMA writable_schema = 1", "not allowed"),
        ("SELECT length(zeroblob(1000000000))", "too big"),
        ("SELECT replace(hex(zeroblob(500000)), '0', hex(zeroblob(500000)))", "too big"),
        (f"CREATE TABLE big AS {LARGE_ROWS}", "database or disk is full"),
        ("SELECT 1" + " " * 20_000, "at most 20000 are allowed"),
    ],
)
def test_an_error_is_shown_and_changes_nothing(tmp_path: Path, query: str, message: str) -> None:
    environment = opened(max_mb=4)
    before = environment.database
    with pytest.raises(ToolError, match=message):
        environment.sql(query.replace("{file}", str(tmp_path / "x")))
    assert environment.database == before and not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("store", ["", "CREATE TEMP TABLE big AS "])
def test_memory_is_bounded(store: str) -> None:
    environment = opened(max_mb=1, seconds=60)
    with pytest.raises(ToolError, match="out of memory"):
        environment.sql(f"{store}{LARGE_ROWS} ORDER BY x")
    assert environment.sql("SELECT 1") == "1\n1\n(1 row)"


@pytest.mark.slow
@pytest.mark.parametrize("columns", [2, 4, 8, 16])
def test_a_reply_that_is_too_large_is_the_models_mistake(columns: int) -> None:
    environment = opened(seconds=60)
    query = f"{LARGE_ROWS.replace('1000000', '{}')} LIMIT 20".replace("SELECT x FROM c LIMIT", "SELECT {} FROM c LIMIT")
    values = ", ".join(["zeroblob(1000000)"] * columns)
    said = answer(environment, query.format(1, values))
    assert said.endswith("(20 rows)") or said == "Error: out of memory"
    assert said == "Error: out of memory" or columns < 4


@pytest.mark.slow
@pytest.mark.parametrize(
    "query",
    [
        f"DELETE FROM people; {COUNT_FOREVER}",
        "SELECT instr(hex(zeroblob(500000)), hex(zeroblob(250000)) || '1')",  # one step of SQLite's machine
    ],
)
def test_time_is_bounded(query: str) -> None:
    environment = opened(seconds=0.2)
    before = environment.database
    with pytest.raises(ToolTimeout, match="nothing was changed"):
        environment.sql(query)
    assert environment.database == before
    assert environment.sql("SELECT count(*) FROM people") == "count(*)\n2\n(1 row)"


def test_a_call_depends_on_the_database_and_the_query_alone() -> None:
    query = "SELECT random(), hex(randomblob(4)), datetime('now'), CURRENT_DATE, strftime('%s'), changes()"
    first, second = opened(), opened()
    second.sql("INSERT INTO people(name) VALUES ('Cid'); DELETE FROM people WHERE name = 'Cid'")
    assert first.sql(query) == second.sql(query)
    assert "| 2026-01-01 00:00:00 | 2026-01-01 | 1767225600 |" in first.sql(query)
    assert first.sql("SELECT date('2020-02-28', '+2 days')").splitlines()[1] == "2020-03-01"
    hidden = "SELECT date(x'6e6f77'), date(CAST('NOW' AS BLOB)), length(randomblob(NULL)), length(randomblob(2.5))"
    assert first.sql(hidden).splitlines()[1] == "2026-01-01 | 2026-01-01 | 1 | 2"
    first.sql("CREATE TEMP TABLE mine (a)")
    with pytest.raises(ToolError, match="no such table"):
        first.sql("SELECT * FROM mine")


def random_statement(rng: random.Random) -> str:
    name, age, key = rng.choice("abc"), rng.randrange(5), rng.randrange(1, 6)
    return rng.choice(
        [
            f"INSERT INTO people(name, age) VALUES ('{name}', {age})",
            f"INSERT INTO people VALUES ({key}, '{name}', {age})",  # may fail
            f"UPDATE people SET age = age + {age} WHERE id <= {key}",
            f"DELETE FROM people WHERE id = {key}",
            f"INSERT INTO pets VALUES ('{name}', (SELECT max(id) FROM people))",
            "CREATE TABLE IF NOT EXISTS more AS SELECT * FROM people",
            "CREATE INDEX i ON people(age)",  # fails the second time
        ]
    )


def answer(environment: SqliteEnvironment, query: str) -> str:
    try:
        return str(environment.sql(query))
    except ToolError as error:
        return f"Error: {error}"


@pytest.mark.parametrize("seed", range(4))
def test_the_database_is_that_of_one_plain_connection(seed: int) -> None:
    rng, environment = random.Random(seed), opened()
    plain = sqlite3.connect(":memory:", isolation_level=None)
    plain.executescript(SCRIPT)
    plain.execute("PRAGMA foreign_keys = ON")
    for _ in range(15):
        statement = random_statement(rng)
        said = answer(environment, statement)
        try:
            plain.execute(statement)
        except sqlite3.Error as error:
            assert said == f"Error: {error}"
    for table in ("people", "pets"):
        assert environment.rows(f"SELECT * FROM {table}") == plain.execute(f"SELECT * FROM {table}").fetchall()


@pytest.mark.parametrize("seed", range(4))
def test_a_fork_equals_a_replay(seed: int) -> None:
    rng, environment = random.Random(seed), opened()
    statements = [random_statement(rng) for _ in range(8)]
    said = [answer(environment, statement) for statement in statements]
    fork, again = copy.deepcopy(environment), opened()
    assert [answer(again, statement) for statement in statements] == said
    more = [random_statement(rng) for _ in range(8)]
    assert [answer(fork, statement) for statement in more] == [answer(again, statement) for statement in more]
    assert fork.database == again.database
    assert environment.database != fork.database or not any("Done" in text for text in said)


def test_states_of_a_pool_branch() -> None:
    async def rollout() -> tuple[list[str], dict[str, float]]:
        pool = StatePool(SqliteEnvironment)
        tools = Toolset(pool.tools.values())
        task = Task("t", "Who?", ("Ann",), meta={"database": SCRIPT})

        async def call(state: object, query: str) -> str:
            return (await tools.call(ToolCall("sql", {"query": query}), task, state)).text  # type: ignore[arg-type]

        async with pool.open(task) as root:
            first = root.branch()
            await call(first, "DELETE FROM people WHERE id = 1")
            second = first.branch()
            await call(first, "DELETE FROM people")
            bad = await tools.call(ToolCall("sql", {"query": "x"}), task, second)
            assert bad.fault is Fault.MODEL
            count = "SELECT count(*) AS n FROM people"
            return [await call(first, count), await call(second, count)], pool.stats()

    texts, stats = asyncio.run(rollout())
    assert texts == ["n\n0\n(1 row)", "n\n1\n(1 row)"]
    assert stats["forks"] == 1 and stats["replays"] == 0


def test_a_file_is_read_and_never_changed(tmp_path: Path) -> None:
    path = tmp_path / "shop.sqlite"
    file = sqlite3.connect(path)
    file.execute("PRAGMA journal_mode = WAL")  # such a file cannot be opened from its bytes alone
    file.executescript(SCRIPT)
    environment = opened(str(path))  # while it is still open elsewhere
    environment.sql("DELETE FROM people")
    assert environment.rows("SELECT count(*) FROM people") == [(0,)]
    assert file.execute("SELECT count(*) FROM people").fetchone() == (2,)
    file.close()
    assert opened(str(path)).rows("SELECT count(*) FROM people") == [(2,)]


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        ({}, "column 'database' must hold SQL"),
        ({"database": 3}, "column 'database' must hold SQL"),
        ({"database": "CREATE TABEL t;"}, 'near "TABEL"'),
        ({"database": "/no/such/file.sqlite"}, "No such file"),
        ({"database": __file__}, "file is not a database"),
        ({"database": "ATTACH '{file}' AS other; CREATE TABLE t (a);"}, "ATTACH, DETACH and VACUUM are not allowed"),
        ({"database": "CREATE TABLE t (a); VACUUM INTO '{file}';"}, "ATTACH, DETACH and VACUUM are not allowed"),
    ],
)
def test_a_task_without_a_usable_database_is_an_error(meta: dict[str, object], message: str, tmp_path: Path) -> None:
    given = {
        name: value.replace("{file}", f"{tmp_path}/x") if isinstance(value, str) else value
        for name, value in meta.items()
    }
    with pytest.raises(ArpoError, match=message):
        SqliteEnvironment().reset(Task("t", "Who?", ("Ann",), meta=given))
    assert not list(tmp_path.iterdir())


def test_rows_are_compared_in_any_order_unless_one_is_asked_for() -> None:
    environment = opened()
    people = [["Bob", 41], ["Ann", 30]]
    assert environment.same_rows("SELECT name, age FROM people", people)
    assert environment.same_rows("SELECT name, age FROM people ORDER BY age DESC", people)
    assert not environment.same_rows("SELECT name, age FROM people ORDER BY age", people)
    assert not environment.same_rows("SELECT name FROM people", people)
    assert not environment.same_rows("SELECT name, age FROM people WHERE id = 1", people)
    assert not environment.same_rows("SELECT nothing", people)
    assert environment.same_rows("SELECT name FROM people", "SELECT name FROM people WHERE age > 1")
    assert not environment.same_rows("SELECT name FROM people", "SELECT name FROM people ORDER BY age DESC")
    with pytest.raises(ToolError):  # a mistake in the task is not the model's
        environment.same_rows("SELECT 1", "SELECT nothing")


def test_databases_are_compared_by_their_contents() -> None:
    gold = "UPDATE people SET age = 31 WHERE name = 'Ann'"
    environment = opened()
    assert not environment.same_database(gold)
    environment.sql("DELETE FROM people WHERE id = 1; INSERT INTO people VALUES (1, 'Ann', 31)")
    assert environment.same_database(gold)
    extra = copy.deepcopy(environment)
    extra.sql('CREATE TABLE "a ""b" (x)')
    assert not extra.same_database(gold) and extra.same_database(gold + '; CREATE TABLE "a ""b" (x)')
    renamed = copy.deepcopy(environment)
    renamed.sql("ALTER TABLE pets RENAME COLUMN name TO called")
    assert not renamed.same_database(gold)


@pytest.mark.parametrize(
    "query",
    [
        "CREATE TABLE big AS "
        "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c LIMIT 100001) SELECT x FROM c",
        "CREATE TABLE big (a, b AS (hex(zeroblob(400000)))); INSERT INTO big(a) "
        "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c LIMIT 2000) SELECT x FROM c",
    ],
)
def test_a_database_that_cannot_be_read_is_another_one(query: str) -> None:
    """An error here would end the training run."""
    environment = opened()
    environment.sql(query)
    assert not environment.same_database("DELETE FROM pets")
    with pytest.raises(ToolError):  # a mistake in the task is not the model's
        environment.same_database("DELETE FROM nothing")


def test_order_by_is_found_outside_of_brackets_strings_and_comments() -> None:
    ordered = ["SELECT a FROM t ORDER  BY lower(a)", "select a from t order\nby a limit 1"]
    ordered += ["SELECT a -- it's a name\nFROM t ORDER BY a -- isn't it?"]
    unordered = ["SELECT a FROM t", "SELECT a FROM (SELECT a FROM t ORDER BY (b))", "SELECT 'order by'"]
    unordered += ["SELECT a FROM t -- order by a", "SELECT a /* order\nby */ FROM t"]
    assert [has_order(query) for query in ordered] == [True] * 3
    assert [has_order(query) for query in unordered] == [False] * 5


def test_many_threads_ask_at_once() -> None:
    environment = opened()

    async def ask() -> list[str]:
        calls = [asyncio.to_thread(environment.rows, f"SELECT {number}") for number in range(12)]
        return [str(rows[0][0]) for rows in await asyncio.gather(*calls)]

    assert Counter(asyncio.run(ask())) == Counter(map(str, range(12)))
