"""Processes that start with torch and the package loaded: forks of a server that imported them once.

    process = warm_process.start("from arpo.cli.main import main; main()", "train", "config.toml", output=file)
    os.kill(process.pid, signal.SIGINT)

As `python -c CODE ARGUMENTS > file 2>&1` in a session of its own, some seconds faster. For tests of what a process
does, not of how an interpreter starts.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import sys
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    ["arpo.cli.main", "arpo.training.loop", "arpo.training.ranks", "arpo.builtin.model", "peft"]
)
CLI = "from arpo.cli.main import main; main()"


def start(code: str, *arguments: str, output: Path, stdin: Connection | None = None) -> BaseProcess:
    """A process that runs the code with the environment and the directory of this one."""
    given = (code, arguments, dict(os.environ), os.getcwd(), output, stdin)
    process = FORKS.Process(target=_run, args=given)
    process.start()
    return process


def _run(
    code: str, arguments: tuple[str, ...], environment: dict[str, str], cwd: str, output: Path, stdin: Connection | None
) -> None:
    os.setsid()
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for number in (1, 2):
        os.dup2(file, number)
    if stdin is not None:
        os.dup2(stdin.fileno(), 0)
        stdin.close()
    sys.stdin = os.fdopen(0)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the server ignores it
    sys.argv = ["-c", *arguments]
    try:
        exec(code, {"__name__": "__main__"})
    finally:
        atexit._run_exitfuncs()  # which the end of a fork leaves out
