"""Every command on a task of the user's own, with nothing set but what the task is: it runs, or says what to do."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from cli_runs import Arpo, mistake

from arpo.runs.run_dir import open_run_dir

SOURCE = '''
from arpo.environments.base import Environment
from arpo.tools.base import tool

@tool
def price(item: str, amount: int = 1) -> str:
    """The price of an item."""
    return str(len(item) * amount)

class Shop(Environment):
    def reset(self, task):
        self.bought = 0
        return f"You have {task.meta.get('scale', 5)} coins."

    @tool
    def buy(self, item: str) -> str:
        """Buy an item."""
        self.bought += 1
        return f"{self.bought} bought"

class Judged(Shop):
    def reward(self, trajectory):
        return self.bought - 1.0

def spent(trajectory, environment):
    return environment.bought - 1.0

def short(trajectory):
    return -len(trajectory.turns[-1]) / trajectory.task.meta["scale"]
'''
SMALL = """
model.path = "{model}"
data.train = "mine.jsonl"
rollout.num_trajectories = 2
rollout.max_tokens = 20
train.steps = 1
train.batch_size = 1
sft.epochs = 1
run.dir = "run"
"""
ROWS: list[dict[str, Any]] = [{"question": "What is a pen?", "scale": 10}, {"question": "And two?", "scale": 10}]
TRACE = {"question": "What is a pen?", "text": "<think>3</think><answer>\\boxed{3}</answer>"}
CASES = {
    "a tool of one's own": ('tools.enabled = ["mine.py:price"]', ["price"]),
    "no tools": ("tools.enabled = []", []),
    "a reward without answers": ('reward.function = "mine.py:short"', ["python"]),
    "an environment": ('environment.name = "mine.py:Shop"', ["buy"]),
    "an environment that judges, without answers": ('environment.name = "mine.py:Judged"', ["buy"]),
    "python": ("", ["python"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_every_command(case: str, arpo: Arpo, model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, tools = CASES[case]
    judged = "without answers" not in case
    Path("mine.jsonl").write_text("".join(json.dumps(row | ({"answer": "3"} if judged else {})) + "\n" for row in ROWS))
    Path("traces.jsonl").write_text(json.dumps(TRACE) + "\n")
    Path("mine.py").write_text(SOURCE)
    Path("my.toml").write_text(SMALL.format(model=model_dir) + settings + "\n")

    def said(*arguments: object) -> str:
        outcome = arpo(*arguments)
        assert outcome.code == 0, outcome
        return outcome.out

    assert "2 rows, 2 questions" in said("data", "check", "my.toml")
    trained = said("train", "my.toml")
    assert "2 of 2 trajectories were cut off by rollout.max_tokens=20" in trained and "done: 1 step;" in trained
    [metrics] = open_run_dir(Path("run")).read_metrics()
    assert ("accuracy" in metrics, "format" in metrics) == (judged, judged) and metrics["truncated"] == 1
    measure = "\naccuracy 0.0% (" if judged else "\nreward -"
    for target in ("my.toml", "run"):
        assert measure in said("eval", target, "data.test=mine.jsonl", "--samples", "2", "--k", "1,2")
        assert "4 of 4 answers already exist" in said("eval", target, "data.test=mine.jsonl", "--samples", "2")
    assert (
        mistake(arpo("eval", "my.toml"))
        == "data.test: there are no held-out questions; name a file of them, like data.test=test.jsonl"
    )
    tree = said("rollout", "my.toml")  # of a training question
    assert ROWS[0]["question"] in tree and tree.count(", reward -") == 2 and ("right answer: 3" in tree) == judged
    asked = said("rollout", "my.toml", "--ask", "How much?")
    assert "How much?" in asked and "reward" not in asked
    assert ("waiting for tools" in said("plan", "my.toml")) == bool(tools)
    assert "start of the reasoning" in said("entropy", "my.toml", "--questions", "1")
    assert "trajectory 2: length, reward -" in said("show", "run")
    problem = mistake(arpo("data", "sample", "my.toml", "--out", "sampled.jsonl"))
    assert ("no traces were found" if judged else "return Reward(total, ") in problem
    said("sft", "my.toml", "sft.data=traces.jsonl", "run.dir=sft")
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    assert f"tools: {', '.join(tools) or 'none'};" in said("chat", "my.toml")


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ("", "line 1: no column 'answer' or 'reward_model.ground_truth'"),
        ('tools.enabled = ["python", "search"]', "tools.search: name what to search"),
        ('reward.function = "mine.py:shrt"', "reward.function: mine.py has no shrt; did you mean short?"),
        ('reward.function = { "mine.py:short" = "much" }', "expected non-empty text or table of weights"),
        ('environment.name = "mine.py:Shop"', "mine.jsonl:1: has no answer to compare with"),
        ('reward.function = "mine.py:spent"', "it has a second parameter, the environment, but there is none"),
        (
            "eval.every = 1",
            "data.test: there are no held-out questions; name a file of them, like data.test=test.jsonl",
        ),
    ],
)
def test_what_cannot_work_is_said_before_anything_runs(
    settings: str, problem: str, arpo: Arpo, model_dir: Path
) -> None:
    answered = {"answer": "3"} if settings and "Shop" not in settings else {}
    Path("mine.jsonl").write_text("".join(json.dumps(row | answered) + "\n" for row in ROWS))
    Path("mine.py").write_text(SOURCE)
    Path("my.toml").write_text(SMALL.format(model=model_dir) + settings + "\n")
    assert problem in mistake(arpo("train", "my.toml"))
    assert not (Path("run") / "metrics.jsonl").exists()


def test_an_environment_without_tasks_asks_for_them(arpo: Arpo, model_dir: Path) -> None:
    Path("mine.py").write_text(SOURCE)
    Path("my.toml").write_text(f'model.path = "{model_dir}"\nenvironment.name = "mine.py:Judged"\n')
    assert mistake(arpo("train", "my.toml")).startswith("data.train: name the tasks of the environment")
