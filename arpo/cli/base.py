"""What the commands share: settings from a file or a run, and running to the end or to Ctrl-C."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from arpo.config.loading import load_config
from arpo.config.schema import Config
from arpo.errors import ArpoError
from arpo.models.resolve import checkpoint_model_settings
from arpo.runs.run_dir import is_run, open_run
from arpo.trainer.dist import launch

if TYPE_CHECKING:
    from collections.abc import Coroutine

T = TypeVar("T")
Overrides = Annotated[list[str] | None, typer.Argument(help="settings as key=value, like train.steps=50")]


def config_of(target: Path, overrides: list[str]) -> Config:
    """The settings in a TOML file, or those of a run with its last checkpoint as the model."""
    if not target.is_dir():
        return load_config(target, overrides)
    log = open_run(target)
    checkpoint = log.latest_checkpoint()
    if checkpoint is None:
        raise ArpoError(f"{target} has no checkpoint yet")
    trained = [f"model.{key}={value or 'none'}" for key, value in checkpoint_model_settings(checkpoint[1]).items()]
    return load_config(target / "config.json", [*trained, *overrides])


def model_config(model: str, overrides: list[str]) -> Config:
    """The settings that `arpo chat`, `arpo entropy` and `arpo eval --benchmarks` mean by MODEL."""
    path = Path(model).expanduser()
    if path.suffix == ".toml" or is_run(path):
        return config_of(path, overrides)
    return load_config(None, [f"model.path={model}", *overrides])


def run_async(work: Coroutine[None, None, T]) -> T:
    """Run to the end; Ctrl-C and a polite kill cancel the work, which then saves what it has."""

    async def with_signals() -> T:
        loop, task = asyncio.get_running_loop(), asyncio.ensure_future(work)

        def stop(number: signal.Signals) -> None:
            loop.remove_signal_handler(number)  # whoever asks twice does not want to wait
            if launch.world_size() > 1:  # but torchrun only passes on what this process was told already
                for each in (signal.SIGINT, signal.SIGTERM):
                    loop.remove_signal_handler(each)
                    signal.signal(each, signal.SIG_IGN)
            task.cancel()

        with contextlib.suppress(NotImplementedError, RuntimeError):  # not on Windows, not outside the main thread
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(number, stop, number)
        return await task

    try:
        return asyncio.run(with_signals())
    except KeyboardInterrupt:  # typer would swallow it, and with it the message of `main`
        raise asyncio.CancelledError from None
