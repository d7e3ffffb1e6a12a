"""Starting, resuming and saving a training run, RL or SFT.

    with find_start(config, resume, RESUMABLE_KEYS, RUN_KIND_METRIC) as start:
        trainer = Trainer(*load_policy(start.config), config)
        with start.open(trainer) as checkpoints:
            ...

Guarantees: a mistake in settings, data or model leaves no run behind; a resumed run has the settings it began with,
except for the resumable keys, and was begun by the same command; it continues from the newest checkpoint that is not
damaged, and says so if that is not the newest one; inside `save_on_error`, Ctrl-C or an error saves the last complete
step first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from arpo.config.files import expand_user
from arpo.config.loading import config_from_resolved, differences
from arpo.config.schema import Config
from arpo.errors import ArpoError
from arpo.models.resolve import checkpoint_model_settings
from arpo.runs import run_dir
from arpo.runs.manifest import find_damage, unverified
from arpo.runs.reporter import SILENT, Reporter
from arpo.runs.run_dir import CONFIG_FILE, RUN_FILES, RunDir, read_json
from arpo.runs.trackers import Trackers, require_trackers
from arpo.trainer.checkpoint import load_checkpoint, save_checkpoint
from arpo.trainer.trainer import Trainer
from arpo.training.checks import require_start

# Settings that may change when any kind of run is resumed.
ALWAYS_RESUMABLE_KEYS = (
    "run.",
    "eval.",
    "train.max_microbatch_tokens:",
    "train.gradient_checkpointing:",
    "train.on_collapse:",
    "model.device:",
)


@dataclass(slots=True)
class CheckpointManager:
    """Writes a run's metrics and checkpoints."""

    trainer: Trainer
    run: RunDir
    trackers: Trackers
    reporter: Reporter
    start_step: int  # steps done when the run was opened
    every: int  # steps between checkpoints
    keep: int  # newest checkpoints that are kept
    saved: int = field(init=False)  # step of the last checkpoint
    protected: tuple[int, ...] = ()  # checkpoints that are not deleted, however old

    def __post_init__(self) -> None:
        self.saved = self.start_step

    def record(self, step: int, metrics: Mapping[str, float | int | str]) -> None:
        """Write the metrics of a step to the run directory and the trackers."""
        if not self.run.append_metrics(step, metrics):
            self.reporter.warning(f"{self.run.directory}: another program changed the records; they are written again")
        self.trackers.record(step, metrics)

    def amend(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add metrics to the last record, which must be that of `step`, in the run directory and the trackers."""
        self.run.update_metrics(step, metrics)
        self.trackers.amend(step, metrics)

    def save(self, step: int) -> None:
        """Write a checkpoint of this step."""
        self.run.commit_checkpoint(
            step, lambda directory: save_checkpoint(self.trainer, step, directory), self.keep, self.protected
        )
        self.saved = step

    def save_if_due(self, step: int, last_step: int) -> None:
        """Write a checkpoint every `run.checkpoint_every` steps and after the last one."""
        if step % self.every == 0 or step == last_step:
            self.save(step)

    @contextmanager
    def save_on_error(self, step: int) -> Iterator[None]:
        """Write a checkpoint of `step` if the block raises, KeyboardInterrupt included."""
        try:
            yield
        except BaseException:
            if self.saved != step:
                self.save(step)
            raise


@dataclass(frozen=True, slots=True)
class RunStart:
    """Where a run starts: from scratch, or from the last checkpoint of an existing run directory."""

    config: Config  # with the model of the checkpoint, if there is one
    requested: Config  # as given by the user
    run: RunDir | None  # None for a new run
    checkpoint: Path | None

    @property
    def step(self) -> int:
        """The step of the checkpoint; 0 from scratch."""
        return 0 if self.checkpoint is None else run_dir.checkpoint_step(self.checkpoint) or 0

    @contextmanager
    def open(self, trainer: Trainer, reporter: Reporter = SILENT) -> Iterator[CheckpointManager]:
        """Restore the trainer, create the run directory or roll it back, and yield its checkpoint manager."""
        config = self.requested
        with ExitStack() as stack:
            step = load_checkpoint(trainer, self.checkpoint) if self.checkpoint else 0
            run = self.run
            if run is None:  # only now: a mistake in data or model leaves no run behind
                run = stack.enter_context(run_dir.create_run_dir(_directory(config), config.resolved()))
            run.roll_back(step)
            changed = differences(run.config(), config.resolved())
            if any(not line.startswith("run.dir:") for line in changed):
                run.update_config(step, config.resolved())
            trackers = stack.enter_context(closing(Trackers(config, run, step, reporter)))
            yield CheckpointManager(
                trainer, run, trackers, reporter, step, config.run.checkpoint_every, config.run.keep_checkpoints
            )


@contextmanager
def find_start(
    config: Config, resume: bool, resumable_keys: tuple[str, ...], kind_metric: str, reporter: Reporter = SILENT
) -> Iterator[RunStart]:
    """Find where the run in `run.dir` starts; an existing run directory is locked inside the block.

    `resumable_keys` are the settings that may differ from those the run began with; `kind_metric` is a metric that all
    records of this kind of run have.
    """
    require_trackers(config.run.tracker)
    directory, resumable = require_start(config, resume), ALWAYS_RESUMABLE_KEYS + resumable_keys
    if not resume:
        yield RunStart(config, config, None, None)
        return
    with run_dir.open_run_dir(directory, write=True) as run:
        checkpoint = _last_good_checkpoint(run, config, resumable, reporter)
        if any(kind_metric not in record for record in run.intact_records()[:1]):
            raise ArpoError(f"{directory} was begun by another command (arpo train, arpo sft): resume it with that one")
        model = config.model.model_copy(update=checkpoint_model_settings(checkpoint) if checkpoint else {})
        yield RunStart(config.model_copy(update={"model": model}), config, run, checkpoint)


def _directory(config: Config) -> Path:
    return expand_user(config.run.dir)


def _changed(recorded: Mapping[str, Any], config: Config, resumable: tuple[str, ...]) -> list[str]:
    """The settings that differ from recorded ones, though they must not."""
    before = config_from_resolved(recorded).resolved()  # with the defaults of settings added since
    return [line for line in differences(before, config.resolved()) if not line.startswith(resumable)]


def _changed_since(checkpoint: Path, config: Config, resumable: tuple[str, ...]) -> list[str] | None:
    """The same for the settings that a checkpoint has a copy of; None if it has none, or a damaged one."""
    try:
        return _changed(read_json(checkpoint / RUN_FILES / CONFIG_FILE), config, resumable)
    except (ArpoError, OSError):
        return None


def _last_good_checkpoint(run: RunDir, config: Config, resumable: tuple[str, ...], reporter: Reporter) -> Path | None:
    """The newest checkpoint that is not damaged, with the run's records restored to it; None if the run has none yet.

    Newer ones, which are damaged, are set aside. Raises ArpoError if the run was begun with other settings.
    """
    try:
        changed = _changed(run.config(), config, resumable)
    except (ArpoError, OSError) as error:  # a checkpoint has a copy
        if not run.checkpoint_steps():
            raise
        changed = [str(error)]
    copies = {step: _changed_since(run.checkpoint_path(step), config, resumable) for step in run.checkpoint_steps()}
    if changed and [] not in copies.values():  # before files are hashed
        raise _other_settings(run, next((other for other in reversed(copies.values()) if other), changed))
    damaged: dict[int, str] = {}
    for step in reversed(copies):
        path = run.checkpoint_path(step)
        problem = find_damage(path, step)
        if problem is None and (other := copies[step]):
            problem = f"it is of another run, with {other[0]}"
        if problem is None:
            break
        damaged[step] = problem
    else:
        if damaged:
            listed = [f"  step {step}: {problem}" for step, problem in damaged.items()]
            advice = "put the files back from a copy, or begin again in another run.dir"
            raise ArpoError("\n".join([f"{run.directory} has only damaged checkpoints:", *listed, advice]))
        _require_early(run)
        return None
    for number, problem in damaged.items():
        reporter.warning(
            f"the checkpoint of step {number} is damaged: {problem}. It is now {run.set_aside(number)}, and the run "
            f"continues from step {step}"
        )
    if note := unverified(path):
        reporter.warning(note)
        return path
    for note in run.restore_records(step, with_config=bool(changed)):
        reporter.warning(note)
    return path


def _other_settings(run: RunDir, changed: Sequence[str]) -> ArpoError:
    head = f"{run.directory} was begun with other settings, so it can't be resumed:"
    advice = "give these as they were (a default may have changed with the version), or choose another run.dir"
    return ArpoError("\n".join([head, *changed, advice]))


def _require_early(run: RunDir) -> None:
    """Raise if a run without checkpoints has done steps after its first checkpoint: it would begin again."""
    every, records = config_from_resolved(run.config()).run.checkpoint_every, run.intact_records()
    if records and records[-1]["step"] > every:
        raise ArpoError(
            f"{run.directory}: {records[-1]['step']} steps are recorded, but the checkpoints are gone: put the folder "
            "checkpoints back, or begin again in another run.dir"
        )
