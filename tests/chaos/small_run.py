"""A small training run of the command line: the built-in model, search and sandboxed Python, a checkpoint each step."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import warm_process
from training_runs import metrics_of, trees_of

import arpo
from arpo.errors import ArpoError
from arpo.runs.run_dir import RunDir, is_run_dir, open_run_dir

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
    """Everything that a finished run leaves behind, except for what a clock measured; None for what cannot be read."""
    run = open_run_dir(directory)
    step, checkpoint = run.latest_checkpoint() or (0, directory)
    weights = {
        str(path.relative_to(checkpoint)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in checkpoint.rglob("*.safetensors")
    }
    return {"step": step, "weights": weights, "metrics": _readable(metrics_of, run), "trees": _readable(trees_of, run)}


def _readable(read: Callable[[RunDir], list[Any]], run: RunDir) -> list[Any] | None:
    try:
        return read(run)
    except ArpoError:
        return None
