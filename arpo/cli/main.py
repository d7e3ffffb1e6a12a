"""The `arpo` command. Exit codes: 2 for a user's mistake, with one message; 3 for a collapsed run; 130 for Ctrl-C."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from arpo import __version__
from arpo.cli.data import data_app, index_app
from arpo.cli.doctor import doctor
from arpo.cli.evaluation import evaluate
from arpo.cli.init import init
from arpo.cli.plan import plan
from arpo.cli.sampling import chat, rollout
from arpo.cli.serve import serve
from arpo.cli.signal import signal
from arpo.cli.study import compare, entropy
from arpo.cli.training import demo, export, sft, train
from arpo.cli.view import show, view
from arpo.config.loading import mask_override
from arpo.config.masking import mask_message
from arpo.errors import ArpoError, Collapsed
from arpo.runs.storage import disk_error
from arpo.trainer.dist import launch

HELP = "Train language models that use tools, with ARPO. Start with `arpo demo`, then `arpo init`."


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"arpo {__version__}")
        raise typer.Exit()


app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=HELP)
for command in (
    demo,
    init,
    train,
    sft,
    evaluate,
    rollout,
    chat,
    serve,
    show,
    view,
    compare,
    entropy,
    signal,
    plan,
    export,
    doctor,
):
    app.command(name="eval" if command is evaluate else None)(command)


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="print the version and exit", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    pass


app.add_typer(index_app, name="index")
app.add_typer(data_app, name="data")


def _fail(problem: object) -> NoReturn:
    """Print what is wrong, with paths inside the current directory as relative ones, and exit."""
    here = os.path.join(os.getcwd(), "")
    text = mask_message(str(problem))
    errors = Console(stderr=True, highlight=False, markup=False, emoji=False)
    errors.print(f"error: {text.replace(here, '') if here != '/' else text}", soft_wrap=not errors.is_terminal)
    sys.exit(2)


def main() -> None:
    """Run the command line."""
    try:
        if launch.world_size() > 1 and "train" not in sys.argv[1:2]:
            raise ArpoError("only `arpo train` runs on several ranks: leave out torchrun, or use --nproc-per-node 1")
        arguments = sys.argv[1:]
        sys.argv[1:] = map(mask_override, arguments)  # trackers upload them
        app(arguments)
    except Collapsed as collapse:
        print(f"stopped: {collapse}", file=sys.stderr)
        sys.exit(3)
    except ArpoError as error:
        _fail(error)
    except Exception as error:  # a full disk, a folder without permission
        problem: object = disk_error(error)
        if problem is None and isinstance(error, OSError) and error.filename is not None:
            problem = f"{error.filename}: {error.strerror}"
        if problem is None:
            raise
        _fail(problem)
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("stopped", file=sys.stderr)
        sys.exit(130)
