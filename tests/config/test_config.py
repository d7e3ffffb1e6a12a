"""Settings: precedence, resolution, and messages a person can act on."""

from __future__ import annotations

import json
import re
import tomllib
from importlib import resources
from pathlib import Path

import pytest
from pydantic import ValidationError

from arpo.config.loading import (
    RENAMED,
    RENAMED_VALUES,
    config_from_resolved,
    differences,
    load_config,
    presets,
    settings_table,
)
from arpo.config.schema import Config, Mcp
from arpo.errors import ArpoError

PRESETS = (
    '"aepo", "arpo", "arpo+", "arpo-always", "arpo-code", "arpo-hard", "arpo-paper", "arpo-random", "arpo-shuffled", '
    '"at2po", "branpo", "cispo", "dapo", "dr-grpo", "gigpo", "grpo", "gspo", "oracle", "reinforce++", '
    '"reinforce++-baseline", "rloo", "tempo", "trace", "tree-grpo"'
)
STATED = {  # what presets say even where it is the default, since it belongs to the algorithm
    "branching.rule",
    "branching.entropy_unit",
    "branching.alpha",
    "branching.beta",
    "branching.round_size",
    "loss.aggregation",
}


def _file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(text, encoding="utf-8")
    return path


def _error(path: Path | None, overrides: list[str] | None = None) -> str:
    with pytest.raises(ArpoError) as caught:
        load_config(path, overrides or [])
    return str(caught.value)


def test_the_defaults_are_those_of_the_paper() -> None:
    config = load_config(None)
    assert config == Config()
    assert (config.rollout.num_trajectories, config.rollout.num_initial) == (16, 8)
    assert (config.branching.alpha, config.branching.beta, config.branching.tau) == (0.5, 0.2, 0.5)
    assert config.tools.enabled == ("search", "python")


def test_an_algorithm_takes_precedence_over_the_file(tmp_path: Path) -> None:
    path = _file(
        tmp_path,
        "[branching]\npolicy = 'always'\nalpha = 0.1\n[advantage]\nscale = 'none'\n[loss]\n"
        "clip_high = 0.9\nkl_coef = 0.1\n"
        "[train]\ndynamic_sampling_rounds = 2\nlr = 1e-3\n[reward]\noverlong = 0.5\n",
    )
    config, plain = load_config(path, ["loss.clip_low=0.3"], "arpo"), Config()
    assert config.advantage == plain.advantage
    assert config.branching == plain.branching.model_copy(update={"alpha": 0.1})  # tuning is the file's
    assert config.loss == plain.loss.model_copy(update={"clip_low": 0.3, "kl_coef": 0.1})
    assert (config.train.dynamic_sampling_rounds, config.train.lr, config.reward.overlong) == (0, 1e-3, 0.0)
    assert load_config(path).branching.policy == "always"


def test_precedence_is_defaults_preset_file_command_line(tmp_path: Path) -> None:
    path = _file(tmp_path, 'preset = "arpo-hard"\n[rollout]\nnum_trajectories = 4\nmax_tool_calls = 5\n')
    config = load_config(path, ["rollout.num_trajectories=6"])
    assert config.advantage.attribution == "hard"  # preset
    assert (config.rollout.num_trajectories, config.rollout.max_tool_calls, config.rollout.max_tokens) == (6, 5, 4096)
    assert load_config(path, ["advantage.attribution=soft"]).advantage.attribution == "soft"
    assert load_config(path, ["preset=arpo"]).advantage.attribution == "soft"


def test_presets_change_only_what_they_set() -> None:
    for name in presets():
        file = Path(str(resources.files("arpo"))) / "config" / "presets" / f"{name}.toml"
        said = {f"{section}.{key}" for section, keys in tomllib.loads(file.read_text()).items() for key in keys}
        config = load_config(None, [f"preset={name}"])
        if config.branching.policy == "never":
            said.add("rollout.num_initial")
        changed = {line.partition(":")[0] for line in differences(Config().resolved(), config.resolved())}
        assert changed - {"preset"} <= said
        assert said - changed <= STATED  # else it says nothing new
        assert config.preset == name
    found = differences(Config().resolved(), load_config(None, ["preset=grpo"]).resolved())
    assert found == [
        'preset: "arpo" -> "grpo"',
        "rollout.num_initial: 8 -> 16",
        'branching.policy: "entropy" -> "never"',
        'loss.aggregation: "token-mean" -> "sequence-mean"',
    ]


def test_an_algorithm_decides_where_to_branch_whatever_the_file_says(tmp_path: Path) -> None:
    other = 'entropy_unit = "sum"\nprobe = "first_token"\nround_size = 9\nper_call = true\nfill = "none"\npenalty = 0.9'
    path = _file(tmp_path, f"[branching]\n{other}\nbeta = 3.0\nprobe_tokens = 7\n")
    plain = Config().branching
    assert load_config(path, [], "arpo").branching == plain.model_copy(update={"beta": 3.0, "probe_tokens": 7})
    code = {"rule": "stochastic", "entropy_unit": "sum", "beta": 0.2, "probe_tokens": 7}
    assert load_config(path, [], "arpo-code").branching == plain.model_copy(update=code)


def test_a_preset_may_be_a_file(tmp_path: Path) -> None:
    mine = tmp_path / "mine.toml"
    mine.write_text("[branching]\nalpha = 0.7\n[loss]\nclip_high = 0.5\n")
    path = _file(tmp_path, f'preset = "{mine}"\n[branching]\nalpha = 0.1\n')
    config = load_config(path)
    assert (config.preset, config.branching.alpha, config.loss.clip_high) == (str(mine), 0.1, 0.5)
    above = load_config(path, ["branching.tau=0.2"], str(mine))
    assert (above.preset, above.branching.alpha, above.branching.tau) == (str(mine), 0.7, 0.2)
    grpo = load_config(path, ["preset=arpo", "branching.alpha=0.4"], "grpo")
    assert (grpo.branching.policy, grpo.branching.alpha, grpo.loss.clip_high) == ("never", 0.4, 0.2)
    assert grpo.preset == "grpo"
    saved = tmp_path / "config.json"
    saved.write_text(json.dumps(config.resolved()))
    mine.unlink()
    assert load_config(saved) == config  # complete without the preset
    assert "there is no such file" in _error(path)
    mine.write_text('preset = "dapo"\n')
    assert "a preset cannot be based on another" in _error(path)
    with pytest.raises(ArpoError, match=r'got the algorithm "grop", expected one of .*did you mean "grpo".*TOML file'):
        load_config(None, [], "grop")


@pytest.mark.parametrize(
    ("overrides", "initial"),
    [
        (["rollout.num_trajectories=1"], 1),
        (["rollout.num_trajectories=5"], 2),
        (["rollout.num_trajectories=5", "rollout.num_initial=5"], 5),
        (["rollout.num_trajectories=5", "branching.policy=never"], 5),
        (["rollout.num_trajectories=5", "branching.policy=never", "rollout.num_initial=3"], 3),
    ],
)
def test_initial_is_resolved_to_a_number(overrides: list[str], initial: int) -> None:
    assert load_config(None, overrides).rollout.num_initial == initial


def test_override_values_are_toml_or_text() -> None:
    config = load_config(
        None,
        [
            "model.path=Qwen/Qwen3-0.6B",
            'data.train="a b.jsonl"',
            " run.dir =2025-01-01",
            "data.question=7",
            "train.lr=1",
            "train.mask_infra_faults=false",
            'tools.enabled=["search"]',
            "loss={clip_low=0.1, dual_clip=2}",
            "loss.dual_clip=none",
            'data.answer="a"\nseed = 3',
        ],
    )
    assert (config.model.path, config.run.dir) == ("Qwen/Qwen3-0.6B", "2025-01-01")
    assert config.data.train == str(Path.cwd() / "a b.jsonl")
    assert (config.data.question, config.train.lr, config.train.mask_infra_faults) == ("7", 1.0, False)
    assert (config.tools.enabled, config.loss.clip_low, config.loss.dual_clip) == (("search",), 0.1, None)
    assert (config.data.answer, config.seed) == ('"a"\nseed = 3', 0)


def test_resolved_goes_through_json_and_back() -> None:
    config = load_config(None, ["preset=grpo", "tools.search=docs.jsonl", "loss.dual_clip=none", "train.lr=3e-7"])
    text = json.dumps(config.resolved(), allow_nan=False)
    assert config_from_resolved(json.loads(text)) == config


def test_saved_configuration_with_an_unknown_key_is_refused() -> None:
    with pytest.raises(ArpoError, match=r"^saved configuration: rollout\.leafs: there is no such setting"):
        config_from_resolved({"rollout": {"leafs": 3}})


def test_config_cannot_be_changed() -> None:
    with pytest.raises(ValidationError):
        Config().rollout.num_trajectories = 3


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("seed = true", "seed: got true, expected whole number >= 0 and <= 4294967295"),
        (
            "[rollout]\nnum_trajectories = 3.5",
            "rollout.num_trajectories: got 3.5, expected whole number >= 1 and <= 4096",
        ),
        (
            "[rollout]\nnum_trajectories = 3.0",
            "rollout.num_trajectories: got 3.0, expected whole number >= 1 and <= 4096",
        ),
        (
            '[rollout]\nnum_trajectories = "3"',
            'rollout.num_trajectories: got "3", expected whole number >= 1 and <= 4096',
        ),
        ("[rollout]\nnum_trajectories = 0", "rollout.num_trajectories: got 0, expected whole number >= 1 and <= 4096"),
        ('[train]\nlr = "1e-6"', 'train.lr: got "1e-6", expected number > 0 and <= 1000000'),
        ("[train]\nlr = true", "train.lr: got true, expected number > 0 and <= 1000000"),
        ("[train]\nlr = inf", "train.lr: got Infinity, expected number > 0 and <= 1000000"),
        ("[train]\nmask_infra_faults = 1", "train.mask_infra_faults: got 1, expected true or false"),
        ("[model]\npath = 3", "model.path: got 3, expected non-empty text"),
        ("[data]\ntrain = 2020-01-01", 'data.train: got 2020-01-01, expected non-empty text or "none"'),
        ('[tools]\nenabled = ["a", 3, 4]', 'tools.enabled: got ["a", 3, 4], expected list of texts, like ["search"]'),
        ('[tools]\nenabled = "a"', 'tools.enabled: got "a", expected list of texts, like ["search"]'),
        ("[loss]\ndual_clip = 1", 'loss.dual_clip: got 1, expected number > 1 and <= 1000000 or "none"'),
        (
            '[model]\ndevice = "cudda"',
            'model.device: got "cudda", expected one of "auto", "cpu", "cuda" (did you mean "cuda"?)',
        ),
        (
            "[rollout]\nnum_trajectories = 4\nnum_initial = 9",
            "rollout.num_initial: got 9, expected at most rollout.num_trajectories, which is 4",
        ),
        ("[train]\nminibatches = 17", "train.minibatches: got 17, expected at most train.batch_size, which is 16"),
        (
            "[rollout]\nnum_trajectory = 4",
            "rollout.num_trajectory: there is no such setting; did you mean rollout.num_trajectories?",
        ),
        (
            "num_trajectories = 4",
            "num_trajectories: there is no such setting; did you mean rollout.num_trajectories?",
        ),
        (
            '"rollout.num_trajectories" = 4',
            "rollout.num_trajectories: there is no such setting; did you mean rollout.num_trajectories?",
        ),
        ("[rolout]\nx = 4", "rolout: there is no such setting; did you mean rollout?"),
        (
            "[advantage]\nzzz = 4",
            "advantage.zzz: there is no such setting; there are advantage.baseline, advantage.scale, "
            "advantage.attribution, advantage.gamma, advantage.step_weight, advantage.entropy_weight",
        ),
        ("model = 3", "model: got 3, expected a section with model.path, model.adapter, model.device, model.dtype"),
        (
            'preset = "gppo"',
            f'preset: got "gppo", expected one of {PRESETS} (did you mean "gspo"?), or a TOML file',
        ),
        ("preset = 3", "preset: got 3, expected non-empty text"),
    ],
)
def test_one_mistake_gives_one_exact_line(tmp_path: Path, toml: str, message: str) -> None:
    path = _file(tmp_path, toml)
    assert _error(path) == f"{path}: {message}"


@pytest.mark.parametrize(("old", "new"), RENAMED.items())
def test_the_error_for_an_old_setting_gives_its_new_name(old: str, new: str) -> None:
    assert new in {row[0] for row in settings_table()}
    assert old not in {row[0] for row in settings_table()}
    assert _error(None, [f"{old}=1"]) == f"command line: {old}: was renamed to {new}"


@pytest.mark.parametrize(("old", "new"), RENAMED_VALUES.items())
def test_the_error_for_an_old_value_gives_its_new_name(old: tuple[str, str], new: str) -> None:
    key, value = old
    assert load_config(None, [f"{key}={new}"])
    assert _error(None, [f"{key}={value}"]) == f'command line: {key}: the value "{value}" was renamed to "{new}"'


def test_old_names_in_files_and_saved_runs(tmp_path: Path) -> None:
    path = _file(tmp_path, '[rollout]\nleaves = 4\n[train]\nbudget_of = "paths"\n')
    assert _error(path) == (
        f"{path}: rollout.leaves: was renamed to rollout.num_trajectories\n"
        f'{path}: train.budget_of: was renamed to train.budget_unit, and its value "paths" to "trajectories"'
    )
    with pytest.raises(ArpoError, match=r"^saved configuration: loss\.kl: was renamed to loss\.kl_coef$"):
        config_from_resolved({"loss": {"kl": 0.1}})


def test_all_mistakes_are_reported_at_once_each_with_its_source(tmp_path: Path) -> None:
    path = _file(
        tmp_path,
        'preset = "nope"\n[rollout]\nnum_trajectories = 4\ntemperature = 0\n[train]\nminibatches = 99\nlr = -1\n',
    )
    lines = _error(path, ["rollout.num_initial=5", "novalue", "=3", "model.device=tpu"]).split("\n")
    assert lines == [
        'command line: got "novalue", expected key=value, like rollout.num_trajectories=8',
        'command line: got "=3", expected key=value, like rollout.num_trajectories=8',
        f'{path}: preset: got "nope", expected one of {PRESETS}, or a TOML file',
        'command line: model.device: got "tpu", expected one of "auto", "cpu", "cuda" (did you mean "cpu"?)',
        f"command line and {path}: rollout.num_initial: got 5, expected at most rollout.num_trajectories, which is 4",
        f"{path}: rollout.temperature: got 0, expected number > 0 and <= 100",
        f"{path}: train.minibatches: got 99, expected at most train.batch_size, which is 16",
        f"{path}: train.lr: got -1, expected number > 0 and <= 1000000",
    ]


def test_an_invalid_num_trajectories_is_not_also_an_error_of_num_initial() -> None:
    assert (
        _error(None, ["rollout.num_trajectories=0"])
        == "command line: rollout.num_trajectories: got 0, expected whole number >= 1 and <= 4096"
    )


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    missing = tmp_path / "none.toml"
    assert _error(missing) == f"{missing}: there is no such file"
    assert _error(tmp_path) == f"{tmp_path}: is a directory, expected a TOML file"
    broken = _file(tmp_path, "seed = 1\nnonsense\n")
    assert re.fullmatch(rf"{re.escape(str(broken))}: not valid TOML: .*line 2.*", _error(broken))
    broken.write_bytes(b'seed = 1\npreset = "\xe4"\n')
    assert _error(broken) == f"{broken}: line 2 is not UTF-8 text; save the file as UTF-8"


def test_byte_order_mark_is_harmless(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(b"\xef\xbb\xbfseed = 3\n")
    assert load_config(path).seed == 3


def test_messages_can_always_be_printed() -> None:
    message = _error(None, ["model.device=\udcff" + "x" * 500])
    message.encode("utf-8")
    assert len(message) < 200


def test_differences_name_both_values() -> None:
    a = {"seed": 0, "loss": {"dual_clip": None, "clip_low": 0.2}, "old": 1}
    b = {"seed": 0, "loss": {"dual_clip": 3.0, "clip_low": 0.2}, "new": [1]}
    assert differences(a, b) == ['loss.dual_clip: "none" -> 3.0', "old: 1 -> unset", "new: unset -> [1]"]


def test_settings_table_has_every_setting_once_and_described() -> None:
    table = settings_table()
    keys = [row[0] for row in table]
    flat = [
        f"{s}.{k}" if k else s for s, v in Config().resolved().items() for k in (v if isinstance(v, dict) else [""])
    ]
    assert [key for key in keys if not key.startswith(("tools.mcp.", "data.mix."))] == flat
    assert {f"tools.mcp.{key}" for key in Mcp.model_fields} == {key for key in keys if key.startswith("tools.mcp.")}
    assert all(description and "\n" not in description for *_, description in table)
    assert ("rollout.num_trajectories", "whole number >= 1 and <= 4096", "16", "M: trajectories per task") in table
    assert [row[2] for row in table if row[0] in ("rollout.num_initial", "tools.search")] == ['"none"', "unset"]


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        (
            '[[tools.mcp]]\ncommand = "a"\nurl = "b"',
            'tools.mcp: got [{"command": "a", "url": "b"}], expected either command',
        ),
        (
            '[[tools.mcp]]\nurl = "a"\n[[tools.mcp]]\ncomand = "b"',
            "tools.mcp.comand: there is no such setting",
        ),
        ("[[tools.mcp]]\ncommand = 3", 'tools.mcp.command: got 3, expected non-empty text or "none"'),
        ('[[tools.mcp]]\ncommand = "a"\nenv = {A = 3}', 'tools.mcp.env: got {"A": "(masked) int"}, expected table of'),
        ('[[tools.mcp]]\ncommand = "a"\nargs = [1]', 'tools.mcp.args: got ["(masked) int"], expected list of texts'),
        ('[tools.mcp]\ncommand = "a"', 'tools.mcp: got {"command": "a"}, expected list of tables'),
    ],
)
def test_mistakes_in_a_list_of_tables_are_named(tmp_path: Path, toml: str, message: str) -> None:
    (tmp_path / "run.toml").write_text(toml)
    with pytest.raises(ArpoError) as error:
        load_config(tmp_path / "run.toml")
    assert message in str(error.value)


def test_mcp_servers_are_tables(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(
        '[[tools.mcp]]\ncommand = "node"\nargs = ["a.js"]\n[[tools.mcp]]\nurl = "http://b"'
    )
    servers = load_config(tmp_path / "run.toml").tools.mcp
    assert servers == (Mcp(command="node", args=("a.js",)), Mcp(url="http://b"))


@pytest.mark.parametrize(
    ("name", "policy", "trajectories"),
    [("grpo_token_mean", "never", 8), ("one_root", "posthoc_outcome", 4), ("informative", "posthoc_outcome", 4)],
)
def test_algorithms_among_the_examples(name: str, policy: str, trajectories: int) -> None:
    examples = Path(__file__).parents[2] / "examples"
    config = load_config(examples / "compare_world.toml", [], str(examples / f"{name}.toml"))
    assert (config.branching.policy, config.rollout.num_trajectories) == (policy, trajectories)
    assert config.loss.aggregation == "token-mean"
