"""Pipes, devices and folders where a file is expected: one message and exit code 2, and no waiting."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from cli_runs import Arpo, mistake

FILE_SETTINGS = {
    "data.train": "train",
    "data.test": "train",
    "tools.search": "train",
    "tools.cache": "train",
    "rollout.examples": "train",
    "run.dir": "train",
    "model.path": "train",
    "model.adapter": "train",
    "reward.function": "train",
    "sft.data": "sft",
}


def _make(kind: str, name: str) -> None:
    if kind == "pipe":
        os.mkfifo(name)
    elif kind == "folder":
        Path(name).mkdir()
    else:
        Path(name).symlink_to("/dev/zero")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
@pytest.mark.parametrize("setting", list(FILE_SETTINGS))
def test_a_setting_that_names_no_regular_file(setting: str, kind: str, arpo: Arpo) -> None:
    suffix = {"reward.function": ".py", "data.test": ".json", "rollout.examples": ".jsonl"}.get(setting, "")
    _make(kind, f"odd{suffix}")
    if (setting, kind) in {("run.dir", "folder"), ("tools.search", "folder")}:
        Path("odd", "x").touch()
    value = "odd.py:reward" if setting == "reward.function" else f"odd{suffix}"
    assert "odd" in mistake(
        arpo(FILE_SETTINGS[setting], "small.toml", f"{setting}={value}", 'tools.enabled=["search"]', "reward.bonus=0")
    )


@pytest.mark.parametrize("kind", ["pipe", "device"])
@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl"])
def test_a_run_with_an_odd_file(name: str, kind: str, arpo: Arpo) -> None:
    Path("odd").mkdir()
    _make(kind, f"odd/{name}")
    if name != "config.json":
        Path("odd", "config.json").write_text('{"rollout": {}}')
    assert "odd" in mistake(arpo("show", "odd"))
    assert "odd" in mistake(arpo("plan", "odd"))


@pytest.mark.parametrize("kind", ["pipe", "device"])
@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
def test_data_that_is_no_regular_file(suffix: str, kind: str, arpo: Arpo) -> None:
    _make(kind, f"odd{suffix}")
    said = {"pipe": "is a pipe; write its content to a file first", "device": "is a device, expected a file"}[kind]
    assert said in mistake(arpo("data", "check", f"odd{suffix}"))


@pytest.mark.parametrize("command", ["train", "sft", "eval", "rollout", "chat", "plan", "entropy"])
def test_a_model_of_an_absurd_size_is_refused_by_every_command(command: str, arpo: Arpo) -> None:
    Path("odd").mkdir()
    Path("odd", "config.json").write_text('{"model_type": "llama", "hidden_size": 1000000000}')
    Path("traces.jsonl").write_text(
        '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "<answer>b</answer>"}]}\n'
    )
    given = ("odd",) if command == "chat" else ("small.toml", "model.path=odd")
    said = mistake(arpo(command, *given))
    assert "odd" in said and "hidden_size = 1000000000" in said
