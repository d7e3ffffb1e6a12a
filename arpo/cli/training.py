"""`arpo train`, `arpo sft`, `arpo export`, `arpo demo`: train a model and write it out."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from arpo.cli.display import ConsoleReporter, console
from arpo.cli.options import ConfigFile, Overrides
from arpo.config.loading import load_config
from arpo.trainer.dist import launch
from arpo.training.checks import check_settings, require_files, require_start
from arpo.training.interrupt import run_async

Resume = Annotated[bool, typer.Option(help="continue from the run's last checkpoint")]


def train(config: ConfigFile, overrides: Overrides = None, resume: Resume = False) -> None:
    """Train a model as CONFIG says; everything is written to run.dir."""
    settings = load_config(config, overrides or ())  # this and the checks come before imports that take seconds
    if launch.world_size() == 1:  # another rank may have made the directory already
        check_settings(settings, on_cluster=settings.cluster.address is not None)
        require_start(settings, resume)
        require_files(settings)
    from arpo.training.loop import open_training
    from arpo.training.loop import train as run_training

    reporter = ConsoleReporter()
    with ExitStack() as stack:
        group = build_sampler = None
        if settings.cluster.address is not None:
            from arpo.cluster.ray_backend import connect

            build_sampler = stack.enter_context(connect(settings, reporter))
        if launch.world_size() > 1:
            from arpo.models.load import pick_device
            from arpo.trainer.dist.process_group import join_process_group
            from arpo.training.ranks import worker_loop

            group = stack.enter_context(join_process_group(pick_device(settings.model.device)))
            if not group.is_leader:
                return worker_loop(group, settings)
        with open_training(settings, resume, group, build_sampler, reporter) as training:
            _run_to_the_end(run_training(training), training.checkpoints.run.directory)


def sft(config: ConfigFile, overrides: Overrides = None, resume: Resume = False) -> None:
    """Fine-tune a model on the traces in sft.data, as a cold start; everything is written to run.dir."""
    settings = load_config(config, overrides or ())
    require_start(settings, resume)
    from arpo.training.sft import open_sft, train_sft

    with open_sft(settings, resume, ConsoleReporter()) as run:
        _run_to_the_end(train_sft(run), run.checkpoints.run.directory)


def _run_to_the_end(training: Coroutine[None, None, int], directory: Path) -> None:
    try:
        last = run_async(training)
    except asyncio.CancelledError:
        print(f"stopped; the run is saved in {directory}, continue with --resume", file=sys.stderr)
        raise typer.Exit(130) from None
    console.print(f"done: {last} step{'' if last == 1 else 's'}; the run is in {directory}")


def export(
    run: Annotated[Path, typer.Argument(help="a run directory")],
    directory: Annotated[Path, typer.Argument(help="where to write the model: a new or empty directory")],
    step: Annotated[int | None, typer.Option(min=1, help="the checkpoint of this step; default: the last")] = None,
) -> None:
    """Write the agent of a checkpoint as a directory for transformers, vLLM, `arpo chat` and `arpo eval`.

    It has the model, with any adapter merged into its base, the tokenizer with its chat template, a generation config
    with all end tokens, and arpo_agent.json: system prompt, tools, call format, limits and settings.
    """
    from arpo.training.export import export_model

    done = export_model(run, directory, step, ConsoleReporter())
    console.print(f"the agent of step {done} is in {directory}")


def demo(
    seed: Annotated[int, typer.Option(min=0, help="the seed of the run")] = 0,
    vision: Annotated[bool, typer.Option("--vision", help="a model that sees, and learns to zoom in")] = False,
) -> None:
    """Watch a small agent learn to use tools: a few minutes on a laptop."""
    from arpo.builtin.demo import run_demo

    run_demo(seed, run_async, ConsoleReporter(), vision)
