"""Defaults that depend on other settings: tools, bonus and limits fit the task, whatever it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from arpo.cli.options import load_model_config
from arpo.config.loading import config_from_resolved, load_config, presets
from arpo.errors import ArpoError

BOTH, PYTHON = ("search", "python"), ("python",)


@pytest.mark.parametrize(
    ("given", "enabled", "bonus_tools"),
    [
        ([], BOTH, BOTH),
        (["data.train=world"], BOTH, BOTH),
        (["data.train=world", "data.test=q.jsonl"], BOTH, BOTH),
        (["data.test=world"], BOTH, BOTH),
        (["data.train=q.jsonl"], PYTHON, ()),
        (["data.test=q.jsonl"], PYTHON, ()),
        (["data.train=q.jsonl", "tools.search=serper"], BOTH, BOTH),
        (['data.mix=[{source="q.jsonl"}, {source="world"}]'], BOTH, BOTH),
        (['data.mix=[{source="q.jsonl"}]'], PYTHON, ()),
        (["tools.enabled=[]"], (), ()),
        (['tools.enabled=["python"]'], PYTHON, ()),
        (['tools.enabled=["/mine.py:price"]'], ("/mine.py:price",), ()),
        (['tools.enabled=["python", "browse", "search"]'], ("python", "browse", "search"), BOTH),
        (['tools.enabled=["browse"]', 'reward.bonus_tools=["browse"]'], ("browse",), ("browse",)),
        (["reward.bonus_tools=[]"], BOTH, ()),
        (["environment.name=mine.py:Shop"], (), ()),
        (["environment.name=mine.py:Shop", "tools.search=serper"], (), ()),
        (["environment.name=mine.py:Shop", 'tools.enabled=["python"]'], PYTHON, ()),
        (["data.train=labyrinth"], (), ()),
        (["data.test=labyrinth"], (), ()),
    ],
)
def test_tools_and_bonus(given: list[str], enabled: tuple[str, ...], bonus_tools: tuple[str, ...]) -> None:
    config = load_config(None, given)
    assert (config.tools.enabled, config.reward.bonus_tools) == (enabled, bonus_tools)
    saved = config_from_resolved(config.resolved())  # what was decided is saved with a run
    assert saved.resolved() == config.resolved()


def test_labyrinths_bring_their_environment_and_enough_calls() -> None:
    config = load_config(None, ["data.train=labyrinth", "labyrinth.horizon=9"])
    assert (config.environment.name, config.rollout.max_tool_calls) == ("labyrinth", 11)
    given = load_config(None, ["data.train=labyrinth", "environment.name=/m.py:Own", "rollout.max_tool_calls=4"])
    assert (given.environment.name, given.rollout.max_tool_calls) == ("/m.py:Own", 4)


def test_an_environment_allows_more_calls() -> None:
    name = "environment.name=mine.py:Shop"
    limits = [
        load_config(None, given).rollout.max_tool_calls for given in ([], [name], [name, "rollout.max_tool_calls=4"])
    ]
    assert limits == [3, 10, 4]


@pytest.mark.parametrize(
    ("model", "given", "enabled"),
    [
        ("tiny", [], BOTH),
        ("models/mine", [], PYTHON),
        ("models/mine", ["tools.search=serper"], BOTH),
        ("models/mine", ["tools.enabled=[]"], ()),
        ("models/mine", ["data.train=world"], BOTH),
        ("models/mine", ["environment.name=mine.py:Shop"], ()),
    ],
)
def test_a_model_alone_does_not_search_the_world(model: str, given: list[str], enabled: tuple[str, ...]) -> None:
    config = load_model_config(model, given)
    assert (config.model.path, config.tools.enabled) == (model, enabled)


@pytest.mark.parametrize(
    ("stored", "override", "enabled", "bonus_tools", "num_initial", "max_tool_calls"),
    [
        ([], [], BOTH, BOTH, 8, 3),
        ([], ['tools.enabled=["python"]'], PYTHON, (), 8, 3),
        ([], ["data.train=q.jsonl"], PYTHON, (), 8, 3),
        ([], ["rollout.num_trajectories=2"], BOTH, BOTH, 1, 3),
        ([], ["environment.name=mine.py:Shop"], (), (), 8, 10),
        (["preset=grpo"], ["rollout.num_trajectories=4"], BOTH, BOTH, 4, 3),
        (["rollout.num_initial=3"], ["rollout.num_trajectories=6"], BOTH, BOTH, 3, 3),
        (["data.train=labyrinth"], ["data.train=q.jsonl"], PYTHON, (), 8, 3),
        (["reward.bonus_tools=[]"], ["rollout.max_tool_calls=7"], BOTH, (), 8, 7),
    ],
)
def test_defaults_follow_what_overrides_a_whole_configuration(
    stored: list[str],
    override: list[str],
    enabled: tuple[str, ...],
    bonus_tools: tuple[str, ...],
    num_initial: int,
    max_tool_calls: int,
    tmp_path: Path,
) -> None:
    """A run's config.json, and a Config, hold every setting: those that nobody gave still follow the others."""
    config = load_config(None, stored)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config.resolved()))
    for base in (config, file):
        got = load_config(base, override)
        assert (got.tools.enabled, got.reward.bonus_tools) == (enabled, bonus_tools)
        assert (got.rollout.num_initial, got.rollout.max_tool_calls) == (num_initial, max_tool_calls)


@pytest.mark.parametrize("preset", presets())
def test_another_preset_replaces_that_of_a_complete_configuration(preset: str, tmp_path: Path) -> None:
    """It is as if the run had been started with it, but for what the command line says."""
    given = ["train.lr=2e-5", "rollout.num_trajectories=6"]
    first, wanted = load_config(None, ["preset=dapo", *given]), load_config(None, [f"preset={preset}", *given])
    file = tmp_path / "config.json"
    file.write_text(json.dumps(first.resolved()))
    for base in (first, file):
        assert load_config(base, [f"preset={preset}"]) == wanted
        assert load_config(base, arguments={"preset": preset}) == wanted
        assert load_config(base, [f"preset={preset}", "loss.clip_low=0.11"]).loss.clip_low == 0.11
    changed = load_config(first, ["loss.clip_high=0.4"])
    assert load_config(changed, ["preset=dapo"]) == changed  # its own: nothing is reset
    with pytest.raises(ArpoError, match='did you mean "grpo"'):
        load_config(first, ["preset=grop"])
    with pytest.raises(ArpoError, match='did you mean "grpo"'):
        load_config(first, ["preset=gpro"])
