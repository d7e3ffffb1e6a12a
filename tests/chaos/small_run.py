"""A small training run of the command line: the built-in model, search and sandboxed Python, a checkpoint each step."""

from __future__ import annotations

import hashlib
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import warm_process
from training_runs import what_it_left

import arpo
from arpo.runs.run_dir import is_run_dir, open_run_dir

BOUND = 300.0  # seconds; only what hangs reaches it
STEPS = 6
CONFIG = f"""
[model]
path = "{Path(arpo.__file__).parent / "builtin" / "base"}"
device = "cpu"
[world]
entities = 60
train_questions = 24
test_questions = 8
[tools]
enabled = ["search", "python"]
python_blocks = true
[rollout]
num_trajectories = 4
num_initial = 2
max_tokens = 120
max_tool_calls = 3
[train]
batch_size = 3
steps = {STEPS}
lr = 1e-4
[eval]
every = 3
questions = 4
[run]
checkpoint_every = 1
"""


def start(directory: Path, *settings: str) -> BaseProcess:
    """Begin the run in `directory`, or resume it if it has begun; its output is in `directory`.txt."""
    config = directory.with_suffix(".toml")
    config.write_text(CONFIG)
    resume = ["--resume"] if is_run_dir(directory) else []
    arguments = ["train", str(config), f"run.dir={directory}", *settings, *resume]
    return warm_process.start(warm_process.CLI, *arguments, output=output_file(directory))


def finish(process: BaseProcess) -> int:
    """Wait for a process and return its exit code; one that hangs is killed and returns -9."""
    process.join(BOUND)
    if process.is_alive():
        process.kill()
        process.join()
    assert process.exitcode is not None
    return process.exitcode


def output_file(directory: Path) -> Path:
    """The file with the output of the last process."""
    return directory.with_suffix(".txt")


def contents(directory: Path) -> dict[str, Any]:
    """Everything that a finished run leaves behind, except for what a clock measured."""
    latest = open_run_dir(directory).latest_checkpoint()
    if latest is None:
        return {}
    _, metrics, trees = what_it_left(directory)
    digests = {
        str(path.relative_to(latest[1])): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in latest[1].rglob("*.safetensors")
    }
    return {"step": latest[0], "weights": digests, "metrics": metrics, "trees": trees}
