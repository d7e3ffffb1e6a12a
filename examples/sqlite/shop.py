"""A small model learns to change an SQLite database: python examples/sqlite/shop.py (minutes on a CPU)."""

import random
from importlib import resources

import arpo
from arpo.agent.formats import build_format
from arpo.builtin.cold_start import batch_rows, imitate, trace_rows
from arpo.builtin.model import add_words
from arpo.config.schema import Model
from arpo.data.tasks import Trace
from arpo.environments.sqlite import SqliteEnvironment
from arpo.models.load import load_model
from arpo.types import Kind

ASKED, RIGHT = "Sell {count} of item {item}.", "UPDATE items SET stock = stock - {count} WHERE id = {item}"
WRONG = ("UPDATE items SET stock = {count} WHERE id = {item}", "UPDATE items SET stock = stock - {count}")
WORDS = dict.fromkeys(("UPDATE", " items", " SET", " stock", " WHERE", " id"), " head")  # new tokens, like this one


def build_row(rng: random.Random) -> dict:
    """A task: a question, the SQL that makes the database, and the SQL that makes the change."""
    asked = {"item": rng.randrange(10, 20), "count": rng.randrange(20, 50)}
    stock = ", ".join(f"({number}, {rng.randrange(100, 200)})" for number in range(10, 20))
    database = f"CREATE TABLE items (id INTEGER PRIMARY KEY, stock INT); INSERT INTO items VALUES {stock};"
    return {"question": ASKED.format(**asked), "database": database, "gold": RIGHT.format(**asked), **asked}


def reward(trajectory: arpo.Trajectory, environment: SqliteEnvironment) -> float:
    """1 if the database is what the right SQL makes of it."""
    return float(environment.same_database(trajectory.task.meta["gold"]))


def cold_start(rng: random.Random, shop: SqliteEnvironment) -> tuple:
    """The built-in model after imitating queries, of which two thirds are wrong, with their real results."""
    with resources.as_file(resources.files("arpo.builtin") / "base") as base:
        model, tokenizer = load_model(Model(path=str(base), device="cpu"))
    add_words(model, tokenizer, WORDS | {"<sql>": "<search>", "</sql>": "</search>"}, seed=0)
    traces = []
    for row in [build_row(rng) for _ in range(300)]:
        task, query = arpo.Task("", row["question"], (), meta=row), rng.choice((RIGHT, *WRONG)).format(**row)
        shop.reset(task)
        call, result = (Kind.MODEL, f"<sql>{query}</sql>"), (Kind.TOOL, shop.sql(query))
        traces.append(Trace(task, (call, result, (Kind.MODEL, "<answer>done</answer>"))))
    rows = trace_rows(traces, tokenizer, build_format("tags", [tool.spec for tool in shop.tools()]))
    imitate(model, batch_rows(rows.copy, 1024, rng), 150, 3e-3, lambda *_: None)
    return model.eval(), tokenizer


if __name__ == "__main__":
    rng = random.Random(0)
    model, tokenizer = cold_start(rng, SqliteEnvironment())
    rows = [build_row(rng) for _ in range(232)]
    rollout, train = {"num_trajectories": 8, "max_tool_calls": 2, "max_tokens": 96}, {"batch_size": 8, "lr": 5e-4}
    data = {"tasks": rows[:200], "test": rows[200:], "environment": lambda: SqliteEnvironment(show_schema=False)}
    trainer = arpo.Trainer(model, tokenizer=tokenizer, reward=reward, rollout=rollout, train=train, **data)
    print("before:", trainer.evaluate(samples=2))
    trainer.train(steps=10)
    print("after:", trainer.evaluate(samples=2))
