"""The demo with pictures: its settings, and a run of two steps that has everything a longer one has."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest

import arpo.builtin.demo as demo
from arpo.builtin.scenes import KINDS, build_scenes
from arpo.config.loading import load_config
from arpo.runs.reporter import Reporter
from arpo.runs.run_dir import open_run_dir

CONFIG = Path(demo.__file__).with_name("vision_demo.toml")


def test_the_demo_uses_the_scenes_with_their_environment_and_the_preset() -> None:
    config = load_config(CONFIG)
    assert (config.preset, config.data.train, config.environment.name) == ("arpo", "scenes", "images")
    assert config.environment.settings == {"min_side": 64, "blocking": True}
    assert (config.tools.enabled, config.model.path) == ((), "tiny")
    own = load_config(None, ["data.train=scenes", "environment.name=m.py:Own"])
    assert own.environment.settings == {}
    assert load_config(None, ["environment.name=images"]).environment.settings == {}


def test_equally_many_questions_of_every_kind_are_held_out() -> None:
    config = load_config(CONFIG)
    tasks = build_scenes(config.scenes.model_copy(update={"train_tasks": 1}))[1]
    chosen = demo.choose_held_out(tasks, config.eval.questions)
    assert Counter(task.kind for task in chosen) == dict.fromkeys(KINDS, config.eval.questions // 3)


class Lines(Reporter):
    def __init__(self) -> None:
        self.messages: list[str] = []

    def message(self, text: str) -> None:
        self.messages.append(text)


@pytest.mark.slow
def test_a_short_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    short = ["train.steps=2", "train.batch_size=2", "eval.questions=3", "eval.samples=1", "scenes.train_tasks=4"]
    short += ["scenes.test_tasks=12", "rollout.num_trajectories=4"]

    def load(path: Path, overrides: list[str]) -> object:
        return load_config(path, [*overrides, *short])

    monkeypatch.setattr(demo, "load_config", load)
    reporter = Lines()
    demo.run_demo(3, asyncio.run, reporter, vision=True)
    run = open_run_dir(tmp_path / "runs/vision_demo")
    metrics = list(run.read_metrics())
    assert [record["step"] for record in metrics] == [1, 2]
    assert any(record["tool_calls"] > 0 for record in metrics)
    assert sorted(path.name for path in (run.directory / "evaluations").iterdir()) == [
        "step_000000.json",
        "step_000002.json",
    ]
    tree = next(iter(run.read_trees(1)))
    assert len(tree.tree.nodes[0].images) == 1
    crops = [
        node for scored in run.read_trees(1) for node in scored.tree.nodes if node.call and node.call.name == "crop"
    ]
    assert all(len(node.images) == 1 for node in crops if node.result and node.result.fault is None)
    said = "\n".join(reporter.messages)
    assert "zoom in with the tool crop" in said and "tool calls per answer" in said
    assert all(f"  {kind}" in said for kind in KINDS)
