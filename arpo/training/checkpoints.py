"""What every kind of training run does alike: it is opened new or where it stopped, and loses no finished step.

Promises: a mistake in settings, data or model leaves no run behind; a resumed run has the settings it began with, but
for those that may change, and was begun by the same command; whatever ends the work, Ctrl-C or an error, the last whole
step is saved first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from arpo.config.loading import config_from_resolved, differences
from arpo.config.schema import Config
from arpo.errors import ArpoError
from arpo.models.resolve import checkpoint_model_settings
from arpo.runs import run_dir
from arpo.runs.run_dir import RunDir
from arpo.runs.trackers import Trackers, require_trackers
from arpo.trainer.checkpoint import load_checkpoint, save_checkpoint
from arpo.trainer.trainer import Trainer

# Settings that any resumed run may have other than it began with.
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
    """Keeps a run's records and checkpoints; `saved` is the step of the last one."""

    trainer: Trainer
    log: RunDir
    trackers: Trackers
    step: int  # that was done when the run was opened
    every: int
    keep: int
    saved: int = field(init=False)
    spare: tuple[int, ...] = ()  # checkpoints that are not dropped, however old

    def __post_init__(self) -> None:
        self.saved = self.step

    def record(self, step: int, values: Mapping[str, float | int | str]) -> None:
        """Log a step that was done, here and wherever the run is tracked."""
        self.log.append_metrics(step, values)
        self.trackers.record(step, values)

    def amend(self, step: int, values: Mapping[str, float]) -> None:
        """Add to the last record, which is that of this step, here and wherever the run is tracked."""
        self.log.update_metrics(step, values)
        self.trackers.amend(step, values)

    def save(self, step: int) -> None:
        """Write a checkpoint of this step."""
        self.log.commit_checkpoint(
            step, lambda directory: save_checkpoint(self.trainer, step, directory), self.keep, self.spare
        )
        self.saved = step

    def step_done(self, step: int, last: int) -> None:
        """Save if it is time to."""
        if step % self.every == 0 or step == last:
            self.save(step)

    @contextmanager
    def saving(self, step: int) -> Iterator[None]:
        """Whatever ends the work inside, Ctrl-C or an error, costs no finished step: they are saved first."""
        try:
            yield
        except BaseException:
            if self.saved != step:
                self.save(step)
            raise


@contextmanager
def open_directory(
    config: Config, resume: bool, load: Callable[[Config], Trainer], may_change: tuple[str, ...], sign: str
) -> Iterator[CheckpointManager]:
    """A new run in `run.dir`, or one that goes on there from its last checkpoint. Holds the directory until left.

    `load` gets the settings with the model to start from; `sign` is a metric that all records of such a run have.
    """
    directory = Path(config.run.dir).expanduser()
    require_trackers(config.run.tracker)
    with ExitStack() as stack:
        log = stack.enter_context(_resume(directory, config, may_change, sign)) if resume else None
        if log is None:
            run_dir.require_unused(directory)
        checkpoint = log.latest_checkpoint() if log else None
        model = config.model.model_copy(update=checkpoint_model_settings(checkpoint[1]) if checkpoint else {})
        trainer = load(config.model_copy(update={"model": model}))
        step = load_checkpoint(trainer, checkpoint[1]) if checkpoint else 0
        if log is None:  # only now: a mistake in data or model leaves no run behind
            log = stack.enter_context(run_dir.create_run_dir(directory, config.resolved()))
        log.roll_back(step)
        if [line for line in differences(log.config(), config.resolved()) if not line.startswith("run.dir:")]:
            log.update_config(step, config.resolved())
        trackers = stack.enter_context(closing(Trackers(config, log, step)))
        yield CheckpointManager(trainer, log, trackers, step, config.run.checkpoint_every, config.run.keep_checkpoints)


def _resume(directory: Path, config: Config, may_change: tuple[str, ...], sign: str) -> RunDir:
    if not run_dir.is_run_dir(directory):
        raise ArpoError(f"{directory}: there is no run yet; leave out --resume to begin one")
    log = run_dir.open_run_dir(directory, write=True)
    try:
        begun = config_from_resolved(log.config()).resolved()  # with the defaults of settings that came later
        changed = [
            line
            for line in differences(begun, config.resolved())
            if not line.startswith(ALWAYS_RESUMABLE_KEYS + may_change)
        ]
        if changed:
            message = f"{directory} was begun with other settings, so it can't be resumed:\n"
            raise ArpoError(
                "\n".join([message.rstrip(), *changed, "give these as they were, or choose another run.dir"])
            )
        if any(sign not in record for record in log.read_metrics()):
            raise ArpoError(f"{directory} was begun by another command (arpo train, arpo sft): resume it with that one")
    except BaseException:
        log.close()
        raise
    return log
