"""Relative paths: where they start, and which texts are no paths."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from arpo.config.loading import differences, load_config
from arpo.config.paths import MODEL_NAMES, SEARCH_NAMES, TASK_NAMES, absolute_paths
from arpo.data.task_set import MODEL_PLUGINS, TASK_PLUGINS
from arpo.tools.search import PROVIDERS

TOML = """
preset = "presets/mine.toml"
model = { path = "base", adapter = "adapters/a" }
data = { train = "rows/train.jsonl", test = "../test.jsonl" }
sft.data = "traces.jsonl"
rollout.examples = "shots.jsonl"
environment.name = "shop.py:Shop"
program.command = ["python", "./agent.py", "plain.txt"]
answer.parse = "parse.py:last"
prompt.system = "system.md"
reward.accuracy = "mine.py:close"
reward.by_kind = { maths = "mine.py:equal", other = "em" }
reward.function = { "mine.py:short" = 0.5, "package.module:long" = 1.0 }
reward.format = "mine.py:check"

[tools]
enabled = ["python", "mine.py:price", "package.module:weigh"]
search = "index"
cache = "cache.sqlite"
mcp = [{ command = "./server", args = ["../data", "-v", "x/y"] }]
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder `settings` with a file of settings, a preset and a model; the current directory is another."""
    settings, here = tmp_path / "settings", tmp_path / "here"
    for name in (settings / "presets", settings / "base", here):
        name.mkdir(parents=True)
    (settings / "presets" / "mine.toml").write_text('reward.judge_model = "m"\ntools.cache = "unused"\n')
    (settings / "run.toml").write_text(TOML)
    monkeypatch.chdir(here)
    return settings


def test_paths_of_a_file_start_in_its_folder(folder: Path) -> None:
    config = load_config(Path("../settings/run.toml"))
    assert config.preset == f"{folder}/presets/mine.toml"
    assert config.reward.judge_model == "m"  # so the preset was found
    assert (config.model.path, config.data.train) == (f"{folder}/base", f"{folder}/rows/train.jsonl")
    assert config.model.adapter == "adapters/a"  # there is no such folder
    assert config.data.test == f"{folder.parent}/test.jsonl"
    assert (config.sft.data, config.rollout.examples) == (f"{folder}/traces.jsonl", f"{folder}/shots.jsonl")
    assert config.environment.name == f"{folder}/shop.py:Shop"
    assert config.program.command == ("python", f"{folder}/agent.py", "plain.txt")
    assert (config.answer.parse, config.prompt.system) == (f"{folder}/parse.py:last", f"{folder}/system.md")
    assert (config.reward.accuracy, config.reward.format) == (f"{folder}/mine.py:close", f"{folder}/mine.py:check")
    assert config.reward.by_kind == {"maths": f"{folder}/mine.py:equal", "other": "em"}
    assert config.reward.function == {f"{folder}/mine.py:short": 0.5, "package.module:long": 1.0}
    assert config.tools.enabled == ("python", f"{folder}/mine.py:price", "package.module:weigh")
    assert (config.tools.search, config.tools.cache) == (f"{folder}/index", f"{folder}/cache.sqlite")
    [server] = config.tools.mcp
    assert (server.command, server.args) == (f"{folder}/server", (f"{folder.parent}/data", "-v", "x/y"))
    assert config.run.dir == "runs/arpo"


def test_paths_of_a_preset_start_in_the_folder_of_the_preset(folder: Path) -> None:
    (folder / "run.toml").write_text('preset = "presets/mine.toml"\n')
    assert load_config(folder / "run.toml").tools.cache == f"{folder}/presets/unused"


def test_paths_of_the_command_line_and_of_python_start_in_the_current_directory(folder: Path) -> None:
    here, file = Path.cwd(), folder / "run.toml"
    assert load_config(file, ["data.train=mine.jsonl"]).data.train == f"{here}/mine.jsonl"
    assert load_config(file, arguments={"data": {"train": "mine.jsonl"}}).data.train == f"{here}/mine.jsonl"
    mix = 'data.mix=[{source="a.jsonl"}, {source="hf:b"}]'
    assert [each.source for each in load_config(None, [mix]).data.mix] == [f"{here}/a.jsonl", "hf:b"]
    with pytest.raises(Exception, match=r"other\.toml: there is no such file"):
        load_config(file, ["preset=other.toml"])


def test_a_run_stores_what_any_directory_can_use(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(folder / "run.toml")
    saved = folder / "config.json"
    saved.write_text(json.dumps(config.resolved()))
    monkeypatch.chdir("/")
    assert load_config(saved) == config


def test_a_model_is_in_the_folder_of_the_file_or_a_run_here_or_a_hub_name(folder: Path) -> None:
    def path(text: str) -> str:
        (folder / "one.toml").write_text(f'model.path = "{text}"\n')
        return load_config(folder / "one.toml").model.path

    assert path("base") == f"{folder}/base"
    assert path("runs/sft") == "runs/sft"
    Path("runs/sft").mkdir(parents=True)
    assert path("runs/sft") == f"{Path.cwd()}/runs/sft"
    assert path("model.gguf") == f"{folder}/model.gguf"  # not there, but no hub name either
    assert path("../other") == f"{folder.parent}/other"
    assert load_config(None, ["model.path=runs/sft"]).model.path == f"{Path.cwd()}/runs/sft"


NAMES: dict[str, list[Any]] = {
    "data.train": [
        "world",
        "labyrinth",
        "hf:openai/gsm8k:main:train",
        "object:tasks (2 rows)",
        "/a.jsonl",
        "~/a.jsonl",
    ],
    "data.test": ["none", "hf:a"],
    "model.path": ["tiny", "Qwen/Qwen3-0.6B", "object:Qwen2ForCausalLM", "/models/a", "~/models/a"],
    "tools.search": ["serper", "tavily", "brave", "http://localhost:1/retrieve", "none", "${INDEX}"],
    "tools.cache": ["none", "/c"],
    "tools.enabled": [["search", "python", "object:price", "package.module:price", "/a.py:b", "~/a.py:b"]],
    "tools.mcp": [[{"url": "https://host/mcp?key=${KEY}"}], [{"command": "npx", "args": ["-y", "@a/b", "a/b"]}]],
    "environment.name": ["sqlite", "package.module:Shop", "none"],
    "program.command": [["node", "agent.js"]],
    "prompt.system": ["You solve riddles.", "line one\nsee notes.md", "none"],
    "answer.parse": ["boxed", "regex:(.*):x", "none"],
    "reward.function": ["package.module:f", {"object:f": 1.0}, None],
    "reward.accuracy": ["f1", "judge"],
    "data.mix": [7, [7]],
    "run.dir": ["runs/mine"],
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in NAMES.items() for value in values])
def test_what_is_no_relative_path_stays(key: str, value: Any) -> None:
    section, name = key.split(".")
    assert absolute_paths({section: {name: value}}, Path("/folder")) == {section: {name: value}}


def test_the_names_are_those_that_exist() -> None:
    assert set(TASK_NAMES) == set(TASK_PLUGINS)
    assert set(SEARCH_NAMES) == set(PROVIDERS)
    assert set(MODEL_NAMES) == set(MODEL_PLUGINS)


def test_a_relative_path_of_an_older_run_is_one_in_the_current_directory(folder: Path) -> None:
    older, now = {"data": {"train": "a.jsonl"}}, load_config(None, ["data.train=a.jsonl"]).resolved()
    assert differences(older, {"data": {"train": now["data"]["train"]}}) == []
    assert differences(older, {"data": {"train": "/other/a.jsonl"}}) != []
