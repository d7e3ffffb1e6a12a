"""Loading settings: sparse TOML in, one frozen and fully resolved `Config` out.

Later layers win: defaults, preset, file, command line. A preset is one of the package's or a TOML file of the user's
(`preset = "mine.toml"`). The preset of an algorithm in a comparison lies above the file, and so does one that is named
with a complete configuration, which has the settings of another.

Relative paths become absolute: those of a TOML file start in its folder, those of the command line and of Python in the
current directory (`arpo.config.paths`).

Guarantees: every value is checked for type and range, and none is converted silently. All mistakes are reported
together in one `ArpoError`, one line each, with the source of the value. No secret is in a message, and a secret that
was masked when the settings were saved must be given again.
Not covered: whether a path, model or tool that a setting names exists.

    config = load_config(Path("run.toml"), ["rollout.num_trajectories=8", "model.path=Qwen/Qwen3-0.6B"])
"""

from __future__ import annotations

import datetime
import difflib
import functools
import json
from collections.abc import Mapping, Sequence
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError

from arpo.config.files import expand_user, nesting_depth, parse_json, parse_toml, read_limited
from arpo.config.masking import MASK, has_mask, mask_message, masked
from arpo.config.paths import absolute_paths
from arpo.config.schema import DERIVED, Config
from arpo.errors import ArpoError

COMMAND_LINE = "command line"
ARGUMENTS = "arguments"
MAX_DEPTH = 10  # of tables and lists in a file of settings; environments of MCP servers are the deepest, with 4
_ABSENT = object()
Layers = Sequence[tuple[str, Mapping[str, Any]]]  # (source, values), highest precedence first

RENAMED = {
    "rollout.leaves": "rollout.num_trajectories",
    "rollout.initial": "rollout.num_initial",
    "rollout.max_calls": "rollout.max_tool_calls",
    "rollout.kv_tokens": "rollout.kv_cache_tokens",
    "tools.result_tokens": "tools.max_result_tokens",
    "branching.width": "branching.branch_width",
    "train.prompts": "train.batch_size",
    "train.resample": "train.dynamic_sampling_rounds",
    "train.micro_tokens": "train.max_microbatch_tokens",
    "train.checkpointing": "train.gradient_checkpointing",
    "train.budget_of": "train.budget_unit",
    "train.drop_infra": "train.mask_infra_faults",
    "train.warmup": "train.warmup_steps",
    "sft.warmup": "sft.warmup_steps",
    "loss.kl": "loss.kl_coef",
    "loss.entropy": "loss.entropy_coef",
    "advantage.entropy": "advantage.entropy_weight",
    "cluster.ahead": "cluster.max_off_policy_steps",
}
"""Old names of settings; the error message gives the new one."""
RENAMED_VALUES = {
    ("branching.policy", "later"): "posthoc_random",
    ("branching.policy", "top"): "posthoc_entropy",
    ("branching.fill", "mixed"): "informative",
    ("advantage.baseline", "others"): "leave_one_out",
    ("train.budget_unit", "paths"): "trajectories",
}
"""Old values by the new name of the setting, likewise."""


def load_config(
    path: Path | Config | None,
    overrides: Sequence[str] = (),
    algorithm: str | None = None,
    *,
    arguments: Mapping[str, Any] = MappingProxyType({}),
    allow_masked: bool = False,
) -> Config:
    """Load the configuration in `path` (TOML, or a run's config.json; None: defaults) with `key.sub=value` overrides.

    `arguments` are settings as Python values, by section, that take precedence over the file. In place of a file there
    may be a whole configuration.

    The preset `algorithm`, and the defaults of the settings that define an algorithm, take precedence over the file.
    With `allow_masked`, for use without tools and servers, secrets that the file lacks need not be given again.
    """
    problems: list[str] = []
    from_file: Mapping[str, Any] = {}
    if path is not None:
        from_file = path.resolved(reveal=True) if isinstance(path, Config) else _read_settings(path)
    complete = isinstance(path, Config) or (path is not None and path.suffix == ".json")  # with those of its preset
    if complete:
        from_file = _without_derived(from_file)
    from_command: dict[str, Any] = {}
    for text in overrides:
        key, equals, value = text.partition("=")
        key = key.strip()
        if not equals or not key or key.count(".") > MAX_DEPTH:
            problems.append(f"{COMMAND_LINE}: got {_show(text)}, expected key=value, like rollout.num_trajectories=8")
            continue
        from_command = _merge(from_command, _nest(key, _parse(key, value)))
    from_command, arguments = absolute_paths(from_command, Path()), absolute_paths(arguments, Path())
    name = "config" if isinstance(path, Config) else str(path)
    layers: list[tuple[str, Mapping[str, Any]]] = [
        (COMMAND_LINE, from_command),
        (ARGUMENTS, arguments),
        (name, from_file),
    ]
    if algorithm is not None:
        values = _preset(algorithm)
        if values is None:
            raise ArpoError(f"got the algorithm {_show(algorithm)}, expected {_preset_choices(algorithm)}")
        from_command["preset"] = algorithm
        layers[2:2] = [(f'preset "{algorithm}"', values), ("defaults of an algorithm", _algorithm_defaults())]
    else:
        given = from_command.get("preset", arguments.get("preset"))
        preset = from_file.get("preset", "arpo") if given is None else given
        values = _preset(preset) if isinstance(preset, str) and not (complete and given is None) else {}
        if values is None:
            expected = _preset_choices(preset)
            problems.append(f"{_source(layers, ['preset'])}: preset: got {_show(preset)}, expected {expected}")
        elif not complete:
            layers.append((f"preset {_show(preset)}", values))
        elif given not in (None, from_file.get("preset")):  # a complete file has the settings of its own preset
            layers[2:2] = [(f"preset {_show(preset)}", values), ("defaults of an algorithm", _algorithm_defaults())]
    return _check(layers, problems, allow_masked)


def presets() -> list[str]:
    """Names of the presets that come with the package."""
    return sorted(entry.name[:-5] for entry in _preset_folder().iterdir() if entry.name.endswith(".toml"))


def _preset(name: str) -> dict[str, Any] | None:
    """The settings of a preset of the package or of a TOML file; None if it is neither."""
    if name in presets():
        return parse_toml(_preset_folder().joinpath(f"{name}.toml").read_text(encoding="utf-8"))
    if not name.endswith(".toml"):
        return None
    values = _read_settings(expand_user(name))
    if "preset" in values:
        raise ArpoError(f"{name}: preset: a preset cannot be based on another; copy the settings that you need from it")
    return values


def _algorithm_defaults() -> dict[str, Any]:
    """The defaults of the settings that define an algorithm; a preset that does not set them means these."""
    plain = Config()
    return {
        "branching": plain.branching.model_dump(
            mode="json", exclude={"alpha", "beta", "tau", "probe_tokens", "branch_width"}
        ),
        "advantage": plain.advantage.model_dump(mode="json"),
        "loss": plain.loss.model_dump(mode="json", exclude={"kl_coef", "entropy_coef", "importance_cap"}),
        "train": {"dynamic_sampling_rounds": plain.train.dynamic_sampling_rounds},
        "reward": {"overlong": plain.reward.overlong},
    }


def is_derived(config: Config, section: str, name: str) -> bool:
    """Whether a setting has the default that follows from other settings."""
    return name not in _without_derived(config.resolved(reveal=True))[section]


def _without_derived(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """A complete configuration without the defaults that follow from other settings, so that overrides change both."""
    for section, name in DERIVED:
        if not isinstance(values.get(section), Mapping) or name not in values[section]:
            continue
        rest = {**values, section: {key: value for key, value in values[section].items() if key != name}}
        try:
            derived = Config.model_validate(rest).model_dump(mode="json", context={"reveal": True})
        except ValidationError:
            return values  # reported when everything is merged
        if derived[section][name] == values[section][name]:
            values = rest
    return values


def _preset_choices(given: str) -> str:
    return f"{_choices(given, presets())}, or a TOML file"


def _preset_folder() -> Traversable:
    return resources.files("arpo.config").joinpath("presets")


def config_from_resolved(values: Mapping[str, Any], *, allow_masked: bool = True) -> Config:
    """The configuration whose `resolved()` is `values`; without `allow_masked`, for use, it must have its secrets."""
    return _check([("saved configuration", dict(values))], [], allow_masked)


def mask_override(text: str) -> str:
    """An argument of the command line without secrets."""
    key, _, value = text.partition("=")
    given = _parse(key, value)
    try:
        shown = _lookup(masked(_nest(key, given)), key.split("."))
    except RecursionError:
        return MASK
    if shown == given:
        return mask_message(text)
    return f"{key}={shown if isinstance(shown, str) else json.dumps(shown, default=str)}"


def differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """The settings in which two resolved configurations differ, as lines: `train.lr: 1e-06 -> 1e-05`.

    Secrets are masked, so settings that differ in nothing else are equal. A relative path, as older runs have, is one
    in the current directory.
    """
    return [f"{key}: {left} -> {right}" for key, left, right in changes(a, b)]


def changes(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """The same as (key, old value, new value), with values as written in a settings file, or "unset"."""
    left, right = (_flatten(masked(absolute_paths(values, Path()))) for values in (a, b))
    return [
        (key, _show(left[key]) if key in left else "unset", _show(right[key]) if key in right else "unset")
        for key in dict.fromkeys([*left, *right])
        if key not in left or key not in right or left[key] != right[key]
    ]


def settings_table() -> list[tuple[str, str, str, str]]:
    """(dotted key, type, default, description) of every setting, for the documentation."""
    return [
        (key, _type_name(schema), _show(schema["default"]) if "default" in schema else "unset", schema["description"])
        for key, schema in _settings().items()
    ]


@functools.cache
def _settings() -> dict[str, dict[str, Any]]:
    """The JSON schema of every setting by its dotted key."""
    found: dict[str, dict[str, Any]] = {}
    top = Config.model_json_schema()["properties"]
    for name, field in Config.model_fields.items():
        if isinstance(field.annotation, type) and hasattr(field.annotation, "model_json_schema"):
            section = field.annotation.model_json_schema()
            for key, schema in section["properties"].items():
                found[f"{name}.{key}"] = schema
                if "$ref" in schema.get("items", {}):  # a list of tables
                    inner = section["$defs"][schema["items"]["$ref"].rpartition("/")[2]]["properties"]
                    found |= {f"{name}.{key}.{sub}": described for sub, described in inner.items()}
        else:
            found[name] = top[name]
    return found


def _type_name(schema: Mapping[str, Any]) -> str:
    """The type and range of a setting for messages: "whole number >= 1"."""
    if "anyOf" in schema:
        return " or ".join(_type_name(option) for option in schema["anyOf"])
    if "enum" in schema:
        return "one of " + ", ".join(_show(choice) for choice in schema["enum"])
    if schema["type"] == "array":
        if "prefixItems" in schema:
            return f"list of {len(schema['prefixItems'])}, each a {_type_name(schema['prefixItems'][0])}"
        return "list of tables" if "$ref" in schema["items"] else 'list of texts, like ["search"]'
    if schema["type"] == "object":
        values = schema["additionalProperties"] if isinstance(schema["additionalProperties"], dict) else {}
        if values.get("type") == "number":
            return 'table of weights, like {"file.py:name" = 0.5}'
        return f'table{" of texts" if values.get("type") == "string" else ""}, like {{KEY = "value"}}'
    kind = {"integer": "whole number", "string": "non-empty text", "boolean": "true or false", "null": '"none"'}
    bounds = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    limits = " and ".join(f"{sign} {schema[bound]}" for bound, sign in bounds.items() if bound in schema)
    return " ".join(filter(None, [kind.get(schema["type"], schema["type"]), limits]))


def _read_settings(path: Path) -> dict[str, Any]:
    """Read a TOML file, with absolute paths, or the `config.json` of a run as it is."""
    values = _read_file(path)
    return values if path.suffix == ".json" else absolute_paths(values, path.parent)


def _read_file(path: Path) -> dict[str, Any]:
    try:
        text = read_limited(path).decode("utf-8-sig")
        values = parse_json(text) if path.suffix == ".json" else parse_toml(text)
        if nesting_depth(values) > MAX_DEPTH:
            raise ValueError(f"it is nested too deeply; settings have at most {MAX_DEPTH} levels")
    except FileNotFoundError:
        raise ArpoError(f"{path}: there is no such file") from None
    except IsADirectoryError:
        raise ArpoError(f"{path}: is a directory, expected a TOML file") from None
    except OSError as error:
        raise ArpoError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ArpoError(f"{path}: line {line} is not UTF-8 text; save the file as UTF-8") from None
    except ValueError as error:  # of tomllib, with the line, or of int() for absurdly long numbers
        raise ArpoError(f"{path}: not valid {'JSON' if path.suffix == '.json' else 'TOML'}: {error}") from None
    if not isinstance(values, dict):
        raise ArpoError(f"{path}: expected settings by name, got {type(values).__name__}")
    return values


def _parse(key: str, text: str) -> Any:
    """The value of an override: TOML if it is valid TOML of the setting's type (run.dir=2025-01-01 is text)."""
    try:
        parsed = parse_toml(f"value = {text}")
    except ValueError:
        return text
    if nesting_depth(parsed) > MAX_DEPTH:
        return text  # no setting is a text with brackets in it only, so this is reported as one of the wrong type
    schema = _settings().get(key, {})
    types = {option.get("type") for option in [schema, *schema.get("anyOf", ())]}
    taken = str if "object" not in types else (str, dict)
    if parsed.keys() != {"value"} or ("string" in types and not isinstance(parsed["value"], taken)):
        return text
    return parsed["value"]


def _nest(key: str, value: Any) -> dict[str, Any]:
    """The layer that sets one setting."""
    nested: dict[str, Any] = functools.reduce(lambda inner, part: {part: inner}, reversed(key.split(".")), value)
    return nested


def _check(layers: Layers, problems: list[str], allow_masked: bool) -> Config:
    """Merge the layers and validate; raise with all problems, including those found earlier."""
    merged: dict[str, Any] = functools.reduce(_merge, (values for _, values in reversed(layers)), {})
    if not allow_masked:
        problems = [*problems, *_masked_problems(merged, layers)]
    try:
        config = Config.model_validate(merged)
    except ValidationError as error:
        lines = [_problem(dict(detail), layers, merged) for detail in error.errors(include_url=False)]
        problems = list(dict.fromkeys([*problems, *filter(None, lines)]))
    if problems:
        raise ArpoError(mask_message("\n".join(problems)).encode("utf-8", "backslashreplace").decode())
    return config


def _masked_problems(merged: Mapping[str, Any], layers: Layers) -> list[str]:
    lost = [key for key, value in _flatten(merged).items() if key in _settings() and has_mask(value)]
    return [
        f"{_source(layers, key.split('.'))}: {key}: secrets are not saved with a run; give this setting again in a "
        "settings file, with ${NAME} in place of the secret, which is read from the environment variable NAME and need "
        "not be given again"
        for key in lost
    ]


def _problem(detail: Mapping[str, Any], layers: Layers, merged: Any) -> str | None:
    path = detail["loc"] if detail["type"] == "extra_forbidden" else _setting_path(detail["loc"])
    path = detail.get("ctx", {}).get("path", path)
    key, value = _key(path), _lookup(merged, path)
    source, given = _source(layers, path), _show(masked(value, key.rpartition(".")[2]))
    if detail["type"] == "conflict":
        return f"{_source(layers, path, detail['ctx']['other'])}: {key}: got {given}, expected {detail['msg']}"
    if detail["type"] == "one_way":
        hint = _did_you_mean(value, detail.get("ctx", {}).get("choices", ()))
        return f"{source}: {key}: got {given}, expected {detail['msg']}{hint}"
    if detail["type"] == "missing":
        return f"{_source(layers, path[:-1])}: {key}: is missing, expected {_type_name(_settings()[key])}"
    if detail["type"] == "default_factory_not_called":
        return None  # follows from another error, which is reported
    renamed = RENAMED.get(key, key)
    renamed_value = RENAMED_VALUES.get((renamed, value)) if isinstance(value, str) else None
    if renamed != key and detail["type"] == "extra_forbidden":
        also = f", and its value {given} to {_show(renamed_value)}" if renamed_value else ""
        return f"{source}: {key}: was renamed to {renamed}{also}"
    if renamed_value:
        return f"{source}: {key}: the value {given} was renamed to {_show(renamed_value)}"
    if detail["type"] == "extra_forbidden":
        return f"{source}: {key}: there is no such setting; {_nearest_setting(key)}"  # its value may be a key
    schema = _settings().get(key)
    if schema is None:
        return f"{source}: {key}: got {given}, expected a section with {', '.join(_siblings(key + '.'))}"
    if "enum" in schema:
        return f"{source}: {key}: got {given}, expected {_choices(value, schema['enum'])}"
    return f"{source}: {key}: got {given}, expected {_type_name(schema)}"


def _key(path: Sequence[str | int]) -> str:
    key = ".".join(part for part in path if isinstance(part, str))  # numbers are list indices
    return key if len(key) <= 200 else key[:197] + "..."


def _setting_path(path: tuple[str | int, ...]) -> tuple[str | int, ...]:
    """The part of the path that names a setting: an error inside a list is reported for the whole list."""
    starts = (path[:end] for end in range(len(path), 0, -1))
    return next((part for part in starts if isinstance(part[-1], str) and _key(part) in _settings()), path)


def _choices(given: Any, valid: Sequence[str]) -> str:
    return "one of " + ", ".join(_show(choice) for choice in valid) + _did_you_mean(given, valid)


def _did_you_mean(given: Any, valid: Sequence[str]) -> str:
    """The choice that is nearest to a text, or to one of several, that is none; empty if none is near."""
    several = given.values() if isinstance(given, Mapping) else given if isinstance(given, list | tuple) else [given]
    for text in (each[:100].lower() for each in several if isinstance(each, str) and each not in valid):
        swapped = [name for name in valid if sorted(name) == sorted(text)]  # gpro: two letters in the wrong order
        if near := swapped or difflib.get_close_matches(text, valid, 1):
            return f" (did you mean {_show(near[0])}?)"
    return ""


def _siblings(key: str) -> list[str]:
    """Full names of the settings and sections on the same level as `key`."""
    prefix = key.rpartition(".")[0]
    if not prefix:
        return list(dict.fromkeys(name.partition(".")[0] for name in _settings()))
    return [name for name in _settings() if name.rpartition(".")[0] == prefix]


def _nearest_setting(key: str) -> str:
    siblings, last = _siblings(key), key.rpartition(".")[2]
    same_name = [name for name in _settings() if name.rpartition(".")[2] == last]  # right name, wrong section
    near = difflib.get_close_matches(last, [name.rpartition(".")[2] for name in siblings], 1)
    if near:
        return f"did you mean {next(name for name in siblings if name.rpartition('.')[2] == near[0])}?"
    if same_name:
        return f"did you mean {' or '.join(same_name)}?"
    return f"there are {', '.join(siblings)}"


def _source(layers: Layers, *paths: Sequence[str | int]) -> str:
    """The sources of the values at these paths, highest precedence first."""
    found = [[name for name, values in layers if _lookup(values, path) is not _ABSENT][:1] for path in paths]
    return " and ".join(name for name, _ in layers if [name] in found) or "defaults"


def _lookup(values: Any, path: Sequence[str | int]) -> Any:
    for part in path:
        try:
            values = values[part]
        except (LookupError, TypeError):
            return _ABSENT
    return values


def _merge(low: Mapping[str, Any], high: Mapping[str, Any]) -> dict[str, Any]:
    """Two layers as one. Tables are merged, but not `reward.function`: its weights belong together."""
    tables = [k for k in high if isinstance(high[k], Mapping) and isinstance(low.get(k), Mapping) and k != "function"]
    return {**low, **high, **{key: _merge(low[key], high[key]) for key in tables}}


def _flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return flat


def _show(value: Any) -> str:
    """A value as the user would write it, on one line, shortened if long; URLs are masked."""
    value = masked(value)
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    try:
        text = json.dumps("none" if value is None else value, ensure_ascii=False, default=str)
    except ValueError:  # Python writes no number of more than 4300 digits
        return "a number of thousands of digits"
    return text if len(text) <= 80 else text[:77] + "..."
