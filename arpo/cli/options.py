"""Arguments that several commands have, and the settings that they name."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from arpo.config.files import expand_user
from arpo.config.loading import load_config
from arpo.config.schema import Config
from arpo.errors import ArpoError
from arpo.models.resolve import checkpoint_model_settings
from arpo.runs.run_dir import CONFIG_FILE, is_run_dir, open_run_dir

ConfigFile = Annotated[Path, typer.Argument(help="a TOML file with settings")]
Overrides = Annotated[list[str] | None, typer.Argument(help="settings as key=value, like train.steps=50")]
Target = Annotated[Path, typer.Argument(help="a run directory (its last checkpoint is used) or a TOML file")]


def load_target_config(target: Path, overrides: list[str]) -> Config:
    """The settings in a TOML file, or those of a run with its last checkpoint as the model."""
    if not target.is_dir():
        return load_config(target, overrides)
    checkpoint = open_run_dir(target).latest_checkpoint()
    if checkpoint is None:
        raise ArpoError(f"{target} has no checkpoint yet")
    trained = [f"model.{key}={value or 'none'}" for key, value in checkpoint_model_settings(checkpoint[1]).items()]
    return load_config(target / CONFIG_FILE, [*trained, *overrides])


def load_model_config(model: str, overrides: list[str]) -> Config:
    """The settings for MODEL: a run directory, a TOML file, or a model's directory, file or name."""
    path = expand_user(model)
    if path.suffix == ".toml" or is_run_dir(path):
        return load_target_config(path, overrides)
    return load_config(None, [f"model.path={model}", *overrides])
