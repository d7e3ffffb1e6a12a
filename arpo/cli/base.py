"""What the commands share: settings from a file or a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from arpo.config.loading import load_config
from arpo.config.schema import Config
from arpo.errors import ArpoError
from arpo.models.resolve import checkpoint_model_settings
from arpo.runs.run_dir import is_run_dir, open_run_dir
from arpo.training.interrupt import run_async as run_async

Overrides = Annotated[list[str] | None, typer.Argument(help="settings as key=value, like train.steps=50")]


def config_of(target: Path, overrides: list[str]) -> Config:
    """The settings in a TOML file, or those of a run with its last checkpoint as the model."""
    if not target.is_dir():
        return load_config(target, overrides)
    log = open_run_dir(target)
    checkpoint = log.latest_checkpoint()
    if checkpoint is None:
        raise ArpoError(f"{target} has no checkpoint yet")
    trained = [f"model.{key}={value or 'none'}" for key, value in checkpoint_model_settings(checkpoint[1]).items()]
    return load_config(target / "config.json", [*trained, *overrides])


def model_config(model: str, overrides: list[str]) -> Config:
    """The settings that `arpo chat`, `arpo entropy` and `arpo eval --benchmarks` mean by MODEL."""
    path = Path(model).expanduser()
    if path.suffix == ".toml" or is_run_dir(path):
        return config_of(path, overrides)
    return load_config(None, [f"model.path={model}", *overrides])
