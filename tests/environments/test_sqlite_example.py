"""The SQLite example: its tasks are those that its script makes, and its reward tells right from wrong."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from arpo.config.plugins import load_object
from arpo.environments.sqlite import SqliteEnvironment
from arpo.types import Task

FOLDER = Path(__file__).parents[2] / "examples" / "sqlite"
ROWS = [json.loads(line) for line in (FOLDER / "tasks.jsonl").read_text().splitlines()]


def example(name: str) -> Any:
    return load_object("example", f"{FOLDER}/shop.py:{name}")


@pytest.mark.slow
def test_the_tasks_are_those_that_the_script_makes() -> None:
    rng = random.Random(1)
    assert [example("build_row")(rng) for _ in ROWS] == ROWS


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS[:3])
def test_only_the_right_query_is_rewarded(row: dict[str, Any]) -> None:
    shop, task = SqliteEnvironment(), Task("t", row["question"], (), meta=row)
    assert str(shop.reset(task)).startswith("The database:\nCREATE TABLE items")
    trajectory = SimpleNamespace(task=task)

    def reward(*queries: str) -> float:
        state = copy.deepcopy(shop)
        for query in queries:
            state.sql(query.format(**row))
        return float(example("reward")(trajectory, state))

    right = example("RIGHT")
    assert reward(right) == 1.0 and reward(f"SELECT * FROM items; {right}") == 1.0
    assert reward() == 0.0 and reward(right, right) == 0.0
    assert [reward(wrong) for wrong in example("WRONG")] == [0.0, 0.0]
