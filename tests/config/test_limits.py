"""No value of a setting, however odd, leads to anything but a clear message, and no number is without a limit."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest

from arpo.config.files import nesting_depth, parse_json, read_limited
from arpo.config.loading import load_config, settings_table
from arpo.errors import ArpoError

ODD_VALUES = (
    *("[" * 100_000, "{" * 100_000, "[" * 300 + "]" * 300, "{a=" * 300 + "1" + "}" * 300, '["["]', "[[]]", "{a={}}"),
    *("1e309", "-1e309", "-0", "-0.0", "nan", "inf", "-inf", "9" * 10_000, "1" + "0" * 400, "10e400", "1.5", "-1"),
    *("0x" + "f" * 5_000, "[0x" + "f" * 5_000 + "]", "{a=0x" + "f" * 5_000 + "}"),
    *("\0", "a\0b", '"a\\u0000b"', '["\\u0000"]', "\ud800", "\udcff", '"\\ud800"', "", "\n", "a\nb=1", "'''"),
    *("x" * 100_001, "true", "[]", "{}", "[1]", '[""]', "[{}]", "1979-05-27", "07:32:00", "none"),
    *(".", "..", "~", "~nobody-of-this-name", "~nobody-of-this-name/x.toml", "/dev/zero", ":", "a:b"),
)


@pytest.mark.slow
@pytest.mark.parametrize("key", [key for key, *_ in settings_table()])
def test_an_odd_value_is_taken_or_refused_with_a_short_message(key: str, tmp_path: Path) -> None:
    toml = tmp_path / "run.toml"
    for value in ODD_VALUES:
        try:
            load_config(None, [f"{key}={value}"])
        except ArpoError as error:
            assert len(str(error).encode()) < 2000, value[:20]
        if "\ud800" in value or "\udcff" in value:
            continue  # not UTF-8
        toml.write_text(f"{key} = {value}\n", encoding="utf-8")
        try:
            load_config(toml)
        except ArpoError as error:
            assert len(str(error).encode()) < 2000, value[:20]


@pytest.mark.parametrize(
    "text", ["a." * 100_000 + "a=1", "." * 50 + "=1", "=", "a" * 1_000_000 + "=1", "\0=1", "\ud800=1"]
)
def test_an_odd_name_of_a_setting_is_refused_with_a_short_message(text: str) -> None:
    with pytest.raises(ArpoError) as caught:
        load_config(None, [text])
    assert len(str(caught.value).encode()) < 2000


@pytest.mark.parametrize("suffix", ["toml", "json"])
@pytest.mark.parametrize("depth", [50, 300, 100_000])
def test_a_file_that_is_nested_too_deeply_is_refused(suffix: str, depth: int, tmp_path: Path) -> None:
    path = tmp_path / f"run.{suffix}"
    brackets = "[" * depth + "]" * depth
    path.write_text(f"tools.mcp = {brackets}" if suffix == "toml" else f'{{"tools": {{"mcp": {brackets}}}}}')
    with pytest.raises(ArpoError, match=r"run\.(toml|json): not valid (TOML|JSON): it is nested too deeply"):
        load_config(path)


def _numbers() -> list[str]:
    return [key for key, kind, *_ in settings_table() if "number" in kind]


@pytest.mark.parametrize("key", _numbers())
def test_every_number_has_limits_and_the_message_says_them(key: str) -> None:
    kind = next(kind for name, kind, *_ in settings_table() if name == key)
    assert (">= " in kind or "> " in kind) and "<= " in kind.replace(" < ", " <= ")
    for value in (-1, 10**16, "9" * 400):
        if key.startswith("data.mix."):
            continue  # inside a table
        if key == "train.max_grad_norm" and value == 10**16:
            continue  # a way to say: never
        with pytest.raises(
            ArpoError, match=f"command line: {key}: got .*, expected (list of 2, each a )?(whole )?number >"
        ):
            load_config(None, [f"{key}={value}"])


def test_a_billion_means_no_limit_where_it_takes_no_memory() -> None:
    for key in (
        *("train.steps", "train.warmup_steps", "eval.every", "eval.questions", "data.max_prompt_tokens"),
        *("run.checkpoint_every", "run.keep_checkpoints", "run.tracker_trees", "coldstart.steps", "sft.warmup_steps"),
    ):
        section, _, name = key.partition(".")
        assert load_config(None, [f"{key}=1000000000"]).resolved()[section][name] == 10**9


def test_the_trajectories_of_a_step_have_a_limit() -> None:
    assert load_config(None, ["train.batch_size=16384"]).train.batch_size * 16 == 2**18
    with pytest.raises(ArpoError) as caught:
        load_config(None, ["train.batch_size=16385"])
    assert str(caught.value) == (
        "command line: train.batch_size: got 16385, expected at most 16384, which makes 262144 trajectories per step: "
        "with fewer, take more steps"
    )
    with pytest.raises(ArpoError, match=r"command line: train.batch_size: got 65, .*at most 64"):
        load_config(None, ["train.batch_size=65", "rollout.num_trajectories=4096"])


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.toml")
    (tmp_path / "link.toml").symlink_to(tmp_path / "pipe.toml")
    (tmp_path / "zero.toml").symlink_to("/dev/zero")
    (tmp_path / "folder.toml").mkdir()
    with socket.socket(socket.AF_UNIX) as server:
        os.chdir(tmp_path)  # the name of a socket must be short
        server.bind("socket.toml")
        for name, message in {
            "pipe": "is a pipe; write its content to a file first",
            "link": "is a pipe; write its content to a file first",
            "zero": "is a device, expected a file",
            "socket": "is a socket, expected a file",
            "folder": "is a directory, expected a TOML file",
        }.items():
            with pytest.raises(ArpoError, match=message):
                load_config(Path(f"{name}.toml"))
            with pytest.raises(ArpoError, match=message):
                load_config(None, [f"preset={name}.toml"])


def test_a_file_of_settings_has_a_limit(tmp_path: Path) -> None:
    with (tmp_path / "huge.toml").open("wb") as file:
        file.truncate(2**40)  # takes no room on the disk
    with pytest.raises(ArpoError, match=r"huge\.toml: is larger than 17 MB, the limit"):
        load_config(tmp_path / "huge.toml")
    (tmp_path / "small").write_bytes(b"12345")
    assert read_limited(tmp_path / "small", 5) == b"12345"


def test_deep_json_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_json("[" * 100_000)
    assert nesting_depth(json.loads("[" * 40 + "]" * 40)) == 40
    assert nesting_depth({"a": [1, {"b": 2}]}) == 3 and nesting_depth(1) == 0
