"""Arguments that several commands have, and the settings that they name."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from arpo.config.files import expand_user
from arpo.config.loading import load_config
from arpo.config.schema import Config
from arpo.data.task_set import MODEL_PLUGINS
from arpo.errors import ArpoError
from arpo.models.agent_file import find_agent

ConfigFile = Annotated[Path, typer.Argument(help="a TOML file with settings")]
Overrides = Annotated[list[str] | None, typer.Argument(help="settings as key=value, like train.steps=50")]
MODEL_HELP = (
    "a run directory (its last checkpoint is used), a TOML file, a directory that `arpo export` or `Trainer.save` "
    'wrote, a Hugging Face directory, a hub name, a .gguf file, or "tiny" (built in)'
)
ModelTarget = Annotated[str, typer.Argument(help=MODEL_HELP)]


def load_model_config(model: str | os.PathLike[str], overrides: list[str], *, allow_masked: bool = False) -> Config:
    """The settings of a run, a TOML file, a saved agent, or a model alone, which has only Python for a tool."""
    found = find_agent(model)
    settings = found.settings
    tasks_or_search = ("data.", "environment.", "tools.search=")
    if (
        found.model_alone
        and model not in MODEL_PLUGINS
        and not any(text.startswith(tasks_or_search) for text in overrides)
    ):
        settings = {**settings, "tools": {"enabled": ["python"]}}  # not a search of the built-in world
    return load_config(found.config, overrides, arguments=settings, allow_masked=allow_masked)


def require_questions(model: str, config: Config, choices: str = "data.test=... or data.train=...") -> None:
    """Raise if MODEL is a model or a saved agent and no setting names questions for it; `choices` are what would."""
    named = config.data.train or config.data.mix or config.data.test
    if not named and find_agent(model).config is None and config.model.path not in MODEL_PLUGINS:
        here = "" if os.path.exists(expand_user(model)) else "there is no such file or folder, and "
        raise ArpoError(f"{model}: {here}a model has no questions of its own; name some with {choices}")
