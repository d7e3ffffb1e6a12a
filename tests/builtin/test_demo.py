"""What the demo tests and says: equally many questions of each kind, tables by hand, and no loss that goes unsaid."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import arpo.builtin.demo
from arpo.builtin.demo import choose_held_out, comparison_table, loss_line
from arpo.builtin.world import KINDS, build_world
from arpo.config.loading import load_config
from arpo.types import Task

CONFIG = Path(arpo.builtin.demo.__file__).with_name("demo.toml")


def estimated(value: float, questions: int = 50) -> dict[str, Any]:
    """An accuracy with an interval of 0.05 to both sides."""
    return {"value": value, "low": value - 0.05, "high": value + 0.05, "questions": questions}


def evaluation(hop1: float, total: float) -> dict[str, Any]:
    """An evaluation in which only one-hop questions and the sum over all kinds vary."""
    by_kind = {"hop1": estimated(hop1), "compare": estimated(1.0, 7)}
    return {"accuracy": estimated(total, 57), "by_kind": by_kind, "answers": 114, "format": 0.925, "tool_calls": 1.5}


def test_the_first_questions_of_each_kind_are_held_out() -> None:
    tasks = [Task(f"{kind}-{number}", "?", ("!",), kind) for number in range(3) for kind in reversed(KINDS)]
    chosen = choose_held_out(tasks, 13)
    assert [task.id for task in chosen] == [f"{kind}-{number}" for kind in KINDS for number in range(2)]
    few = choose_held_out(tasks[:8], 18)  # all that there are
    assert [task.id for task in few[:5]] == ["hop1-0", "hop2-0", "hop3-0", "sum-0", "difference-0"]
    assert [task.id for task in few[5:]] == ["difference-1", "compare-0", "compare-1"]


def test_the_demo_asks_equally_many_questions_of_every_kind() -> None:
    config = load_config(CONFIG)
    world = build_world(config.world)
    chosen = choose_held_out(world.test, config.eval.questions)
    assert Counter(task.kind for task in chosen) == dict.fromkeys(KINDS, config.eval.questions // len(KINDS))
    assert len(chosen) == config.eval.questions >= 300
    assert not {task.question for task in chosen} & {task.question for task in world.train}


def test_the_table_by_hand() -> None:
    assert comparison_table(evaluation(0.75, 0.6), evaluation(0.8, 0.651)) == [
        "held-out questions        n              before, %               after, %",
        "  hop1                   50    75.0 (70.0 to 80.0)    80.0 (75.0 to 85.0)",
        "  compare                 7  100.0 (95.0 to 105.0)  100.0 (95.0 to 105.0)",
        "all                      57    60.0 (55.0 to 65.0)    65.1 (60.1 to 70.1)",
        "right format, %                               92.5                   92.5",
        "tool calls per answer                         1.50                   1.50",
        "57 questions with 114 answers; in brackets 95 % Wilson intervals over questions.",
    ]


def test_a_kind_that_got_worse_is_named() -> None:
    assert loss_line(evaluation(0.75, 0.5), evaluation(0.75, 0.4)) == (
        "No kind of question is answered worse than before."
    )
    assert loss_line(evaluation(0.98, 0.5), evaluation(0.96, 0.9)) == (
        "Worse than before: hop1 (98.0% before, 96.0% after)."
    )
