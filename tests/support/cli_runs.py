"""The command line, run in this process."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

from arpo.cli.main import main

SMALL_TOML = """
[world]
entities = 60
train_questions = 20
test_questions = 6

[rollout]
num_trajectories = 4
max_tokens = 60

[train]
steps = 2
batch_size = 2

[eval]
questions = 4

[run]
dir = "run"
"""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a command came to."""

    code: int
    out: str
    err: str


Arpo = Callable[..., Outcome]


def call(*arguments: object) -> int:
    """Run the command line in this process; returns its exit code."""
    given, sys.argv = sys.argv, ["arpo", *map(str, arguments)]
    try:
        main()
    except SystemExit as stop:
        return int(stop.code or 0)
    finally:
        sys.argv = given
    return 0


def mistake(outcome: Outcome) -> str:
    """The message of a command that ended in a mistake of the user's."""
    assert outcome.code == 2, outcome
    assert outcome.err.startswith("error: ")
    assert "Traceback" not in outcome.err + outcome.out
    return outcome.err.removeprefix("error: ").rstrip("\n")
