"""What a name means as an agent: a run, a file of settings, a saved agent, or a model alone.

    found = find_agent("my-agent")                        # what `Trainer.save` wrote
    config = load_config(found.config, overrides, arguments=found.settings)

A saved agent is a model's directory with one file more, `AGENT_FILE`: the settings that the model is used with, and
those that it is evaluated with.

Guarantees: nothing is loaded. No secret is written; one that was masked must be given again.
Not covered: Python objects and files that the settings name; a saved agent does not hold them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from arpo.config.files import expand_user
from arpo.config.plugins import GIVEN
from arpo.config.schema import COLUMNS, Config
from arpo.data.task_set import TASK_PLUGINS
from arpo.errors import ArpoError
from arpo.models.checks import read_object
from arpo.models.resolve import ADAPTER_CONFIG, checkpoint_model_settings
from arpo.runs.run_dir import CONFIG_FILE, is_run_dir, open_run_dir

AGENT_FILE = "arpo_agent.json"
USE = ("prompt", "answer", "tools", "environment", "rollout", "branching", "eval")
"""The sections that an agent is used with."""
SETTINGS_FILES = (".toml", ".json")


class FoundAgent(NamedTuple):
    """The file of settings that a name means, if any, and settings by section that take precedence over it.

    `model_alone` says that nothing but a model is named, so that there are neither tasks nor tools.
    """

    config: Path | None
    settings: dict[str, Any]
    model_alone: bool = False


def find_agent(name: str | os.PathLike[str]) -> FoundAgent:
    """What a run's directory (its last checkpoint), a file of settings, a saved agent, or any other model means."""
    given = os.fspath(name)
    path = expand_user(given)
    if path.suffix in SETTINGS_FILES:
        return FoundAgent(path, {})
    if is_run_dir(path):
        checkpoint = open_run_dir(path).latest_checkpoint()
        if checkpoint is None:
            raise ArpoError(f"{given} has no checkpoint yet")
        return FoundAgent(path / CONFIG_FILE, {"model": checkpoint_model_settings(checkpoint[1])})
    if (path / AGENT_FILE).is_file():
        return FoundAgent(None, {**_read_agent_file(path), "model": {"path": given}})
    if path.is_dir() and not any((path / name).exists() for name in (CONFIG_FILE, ADAPTER_CONFIG)):
        raise ArpoError(f"{given}: neither a run nor a model (it has no {CONFIG_FILE})")
    return FoundAgent(None, {"model": {"path": given}}, model_alone=True)


def agent_settings(config: Config, description: Mapping[str, Any]) -> str:
    """What `AGENT_FILE` holds: a description for other programs, and the settings that a saved agent is used and
    evaluated with, without secrets."""
    values = config.resolved()
    sections = {name: values[name] for name in (*USE, "reward")}
    test = config.data.test or next((source for source in config.data.sources if source in TASK_PLUGINS), None)
    data = {name: values["data"][name] for name in (*COLUMNS, "bad_rows")}
    if test is not None and not test.startswith(GIVEN):
        data["test"] = test
    if test in TASK_PLUGINS:
        sections[test] = values[test]
    content = {"version": 1, **description, "settings": {**sections, "data": data}}
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def _read_agent_file(directory: Path) -> dict[str, Any]:
    try:
        settings = read_object(directory / AGENT_FILE)["settings"]
        return {name: dict(section) for name, section in settings.items()}
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        raise ArpoError(f"{directory / AGENT_FILE}: is damaged; save the agent again") from None
