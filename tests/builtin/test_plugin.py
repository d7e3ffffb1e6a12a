"""The toy world is a plug-in: found by its name, and never imported by a configuration that does not name it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from traces import sum_row, write_model, write_rows

from arpo.config.loading import load_config
from arpo.config.schema import Data
from arpo.data.task_set import TaskSet, load_task_set, model_plugin, task_plugin

WORK = """
import asyncio, sys
from pathlib import Path
from arpo.cli.chat import open_agent
from arpo.config.loading import load_config
from arpo.config.schema import Data
from arpo.tools.build import build_tools
from arpo.training.export import export_model
from arpo.training.loop import open_training
from arpo.training.sft import open_sft, train_sft

without_tasks = load_config(Path("run.toml"), ["data.train=none", 'tools.enabled=["python"]', "reward.bonus=0"])
with open_sft(without_tasks) as run:
    asyncio.run(train_sft(run))
export_model(Path("run"), Path("exported"))
with open_agent(without_tasks) as agent:
    assert list(agent.tools) == ["python"]
config = load_config(Path("run.toml"), ["run.dir=other"])
with build_tools(config) as tools:
    assert list(tools) == ["search", "python"]
with open_training(config):
    pass
print(*sorted(name for name in sys.modules if name.startswith("arpo.builtin")))
"""
SETTINGS = """
model.path = "model"
model.device = "cpu"
data.train = "questions.jsonl"
tools.search = "documents.jsonl"
sft.data = "traces.jsonl"
sft.epochs = 1
train.lora_rank = 2
run.dir = "run"
"""


@pytest.mark.slow
def test_a_run_that_does_not_name_the_world_never_imports_it(tmp_path: Path) -> None:
    """Fine-tuning, exporting an adapter with its base, chatting, building tools and opening a training run."""
    write_model(tmp_path / "model")
    write_rows(tmp_path / "traces.jsonl", [sum_row(1, 2), sum_row(3, 4)])
    write_rows(tmp_path / "questions.jsonl", [{"question": "1 + 1?", "answer": "2"}])
    write_rows(tmp_path / "documents.jsonl", [{"title": "One", "text": "A number."}])
    (tmp_path / "run.toml").write_text(SETTINGS)
    done = subprocess.run([sys.executable, "-c", WORK], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == ""
    assert json.loads((tmp_path / "exported" / "config.json").read_text())["model_type"] == "llama"


def test_names_of_plugins() -> None:
    assert task_plugin("world") is not None and task_plugin("labyrinth") is not None
    assert task_plugin("tiny") is task_plugin("world.jsonl") is model_plugin("world", Data()) is None


def test_the_built_in_model_is_that_of_the_training_tasks() -> None:
    assert model_plugin("tiny", Data()) is model_plugin("tiny", Data(train="mine.jsonl")) is task_plugin("world")
    for data in (Data(train="labyrinth"), Data(test="labyrinth")):
        assert model_plugin("tiny", data) is task_plugin("labyrinth")
    assert model_plugin("Qwen/Qwen3-0.6B", Data(train="labyrinth")) is None


def test_the_world_fills_a_task_set() -> None:
    config = load_config(None, ["world.entities=60", "world.train_questions=6", "world.test_questions=2"])
    tasks = load_task_set(config)
    assert [(source.name, len(source.tasks)) for source in tasks.sources] == [("world", 6)]
    assert (len(tasks.train), len(tasks.test), tasks.notes) == (6, 2, ())
    assert task_plugin("world").tasks(config) == (tasks.train, tasks.test)  # type: ignore[union-attr]
    assert TaskSet().train == ()
