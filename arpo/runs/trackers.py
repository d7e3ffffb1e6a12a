"""Sends a run's metrics and pictures of its trees to TensorBoard, W&B, MLflow or Trackio.

Guarantees: a package is imported only if `run.tracker` names its tracker. A missing package, or a tracker that does not
start, is an error before the first step; one that fails or hangs later is reported once and gets nothing more, and
training goes on. A tracker run gets no step twice: a resumed run continues in the same tracker run, which first gets
the records it missed. Steps that were rolled back are overwritten (TensorBoard) or start a new tracker run (others).
Not covered: the step at which a tracker fails, which is not sent again because it may have arrived; pictures of steps
that are sent again; what a service keeps of steps that were rolled back.
"""

from __future__ import annotations

import math
import os
import queue
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Protocol

from arpo.config.masking import mask_message
from arpo.config.schema import Config
from arpo.errors import ArpoError
from arpo.figures.style import has_matplotlib
from arpo.figures.text import printable
from arpo.figures.tree import tree_png, tree_svg
from arpo.runs.reporter import SILENT, Reporter
from arpo.runs.run_dir import RunDir, TrackerState
from arpo.types import ScoredTree

CLOSE_SECONDS = 60.0  # that trackers have at the end to send what is left
PROJECT = "arpo"


@dataclass(frozen=True, slots=True)
class TrackerRun:
    """What a tracker is started with. To resume a tracker run, `id` names it, and it has the steps up to `step`."""

    config: Mapping[str, Any]
    directory: Path
    name: str
    id: str | None = None
    step: int = 0


class Tracker(Protocol):
    """A service, or a folder, that shows the metrics of runs."""

    package: ClassVar[str]  # the package to import; `pip install NAME` installs it
    image_format: ClassVar[str] = "svg"  # or "png"
    overwrites: ClassVar[bool] = False  # whether resuming at an earlier step replaces the later ones

    def start(self, run: TrackerRun) -> str:
        """Start or resume a tracker run; returns its id."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Send metrics of a step."""

    def picture(self, step: int, name: str, content: bytes) -> None:
        """Send a picture of a step in this tracker's format; SVG is encoded in UTF-8."""

    def close(self) -> None:
        """Send what is left and finish the tracker run."""


class TensorBoard(Tracker):
    """Event files in the run directory: `tensorboard --logdir RUNS` finds them."""

    package, image_format, overwrites = "tensorboard", "png", True

    def start(self, run: TrackerRun) -> str:
        writer = import_module("torch.utils.tensorboard").SummaryWriter
        folder = run.directory / "tensorboard"
        self._writer = writer(str(folder), purge_step=run.step + 1 if run.id else None)
        return folder.name

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def picture(self, step: int, name: str, content: bytes) -> None:
        summary = import_module("tensorboard.compat.proto.summary_pb2").Summary
        width, height = (int.from_bytes(content[at : at + 4]) for at in (16, 20))  # from the PNG header
        image = summary.Image(encoded_image_string=content, colorspace=4, width=width, height=height)
        self._writer._get_file_writer().add_summary(summary(value=[summary.Value(tag=name, image=image)]), step)

    def close(self) -> None:
        self._writer.close()


class Wandb(Tracker):
    """Weights & Biases, configured by its own variables: WANDB_MODE, WANDB_PROJECT, WANDB_ENTITY."""

    package = "wandb"
    _html: Callable[[str], Any]

    def start(self, run: TrackerRun) -> str:
        wandb = import_module("wandb")
        self._html = partial(wandb.Html, inject=False, data_is_not_path=True)
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=run.name,
            dir=str(run.directory),
            config=dict(run.config),
            id=run.id,
            resume="allow" if run.id else None,
            reinit="create_new",
            allow_val_change=True,
            settings=wandb.Settings(console="off"),
        )
        return str(self._run.id)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def picture(self, step: int, name: str, content: bytes) -> None:
        self._run.log({name: self._html(content.decode())}, step=step)

    def close(self) -> None:
        self._run.finish()


class Trackio(Wandb):
    """Trackio, on this machine unless TRACKIO_SPACE_ID or TRACKIO_SERVER_URL is set. Runs are identified by name."""

    package = "trackio"

    def start(self, run: TrackerRun) -> str:
        trackio = import_module("trackio")
        self._html = trackio.Html
        self._run = trackio.init(
            project=PROJECT,
            name=run.id or run.name,
            config=dict(run.config),
            resume="must" if run.id else "never",
            embed=False,
        )
        return str(self._run.name)


class Mlflow(Tracker):
    """MLflow, configured by MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME; the settings become parameters."""

    package = "mlflow"

    def start(self, run: TrackerRun) -> str:
        self._client, self._entities = import_module("mlflow").MlflowClient(), import_module("mlflow.entities")
        if run.id:
            self._client.update_run(run.id, "RUNNING")
            self._id = run.id
            return self._id
        experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        found = self._client.get_experiment_by_name(experiment)
        experiment_id = found.experiment_id if found else self._client.create_experiment(experiment)
        self._id = str(self._client.create_run(experiment_id, run_name=run.name).info.run_id)
        params = [self._entities.Param(key, str(value)[:500]) for key, value in _flatten(run.config).items()]
        for first in range(0, len(params), 100):  # the most that one request may have
            self._client.log_batch(self._id, params=params[first : first + 100])
        return self._id

    def log(self, step: int, values: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        metrics = [self._entities.Metric(name, float(value), now, step) for name, value in values.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def picture(self, step: int, name: str, content: bytes) -> None:
        self._client.log_text(self._id, content.decode(), f"{name}/step_{step:06d}.svg")

    def close(self) -> None:
        self._client.set_terminated(self._id)


TRACKERS: dict[str, Callable[[], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "mlflow": Mlflow,
    "trackio": Trackio,
}


def require_trackers(names: Sequence[str]) -> None:
    """Raise ArpoError with what to install if a tracker's package is missing."""
    for name in names:
        try:
            import_module(TRACKERS[name]().package)
        except ImportError as error:
            raise ArpoError(f"run.tracker: {name} cannot be used ({error}): pip install {name}") from None


class Trackers:
    """All trackers of a run, each with a thread of its own, so that a slow one holds up nothing."""

    def __init__(self, config: Config, run: RunDir, step: int, reporter: Reporter = SILENT) -> None:
        """Start the trackers of a run that has done `step` steps, and send them the records that they lack."""
        self._run, self._picture_every, self._reporter = run, config.run.tracker_trees, reporter
        self._senders: list[_Sender] = []
        records = run.read_metrics() if config.run.tracker else []
        for name in TRACKERS.keys() - config.run.tracker:  # their next start must know that steps were rolled back
            state = run.tracker_state(name)
            valid = _valid_state(state, step, TRACKERS[name]())
            if valid != state:
                run.write_tracker_state(name, valid)
        try:
            for name in config.run.tracker:
                sender = _start(name, config, run, step, reporter)
                self._senders.append(sender)
                for record in records:
                    sender.record(record["step"], record)
        except BaseException:
            self.close()
            raise

    def record(self, step: int, values: Mapping[str, Any]) -> None:
        """Send the metrics of a step and, every `run.tracker_trees` steps, the picture of one of its trees."""
        for sender in self._senders:
            sender.record(step, values)
        if self._senders and self._picture_every and step % self._picture_every == 0:
            try:
                pictures = _draw(most_branched_tree(self._run, step), {sender.image_format for sender in self._senders})
            except Exception as error:  # a picture is not worth a run
                self._reporter.warning(f"the tree of step {step} could not be drawn: {error}")
                return
            for sender in self._senders:
                if sender.image_format in pictures:
                    sender.picture(step, "tree", pictures[sender.image_format])

    def amend(self, step: int, values: Mapping[str, float]) -> None:
        """Send more metrics of a step that was already sent."""
        for sender in self._senders:
            sender.amend(step, values)

    def close(self) -> None:
        """Let the trackers send what is left, for a minute at most."""
        deadline = time.monotonic() + CLOSE_SECONDS
        for sender in self._senders:
            sender.close()
        for sender in self._senders:
            sender.join(max(0.0, deadline - time.monotonic()))
        self._senders = []


class _Sender:
    """The queue of one tracker, and the thread that sends it."""

    def __init__(self, name: str, tracker: Tracker, run: RunDir, state: TrackerState, reporter: Reporter) -> None:
        self.image_format = tracker.image_format
        self._name, self._tracker, self._run, self._state, self._reporter = name, tracker, run, state, reporter
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._send_all, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def record(self, step: int, values: Mapping[str, Any]) -> None:
        if step <= self._state.step:
            return
        self._state = state = TrackerState(self._state.id, step)
        numbers = _finite_numbers(values)

        def send() -> None:
            self._run.write_tracker_state(self._name, state)  # before sending: a step may be lost, but never sent twice
            self._tracker.log(step, numbers)

        self._queue.put(send)

    def amend(self, step: int, values: Mapping[str, Any]) -> None:
        numbers = _finite_numbers(values)
        self._queue.put(lambda: self._tracker.log(step, numbers))

    def picture(self, step: int, name: str, content: bytes) -> None:
        self._queue.put(lambda: self._tracker.picture(step, name, content))

    def close(self) -> None:
        self._queue.put(None)

    def join(self, seconds: float) -> None:
        self._thread.join(seconds)
        if self._thread.is_alive():
            self._warn(f"was still sending after {CLOSE_SECONDS:.0f} seconds; --resume sends what is missing")

    def _send_all(self) -> None:
        try:
            while (send := self._queue.get()) is not None:
                send()
            self._tracker.close()
        except (Exception, SystemExit) as error:
            self._warn(f"failed and gets nothing more: {type(error).__name__}: {mask_message(str(error))}")
            with suppress(Exception, SystemExit):
                self._tracker.close()

    def _warn(self, what: str) -> None:
        self._reporter.warning(f"run.tracker: {self._name} {what}")


def _start(name: str, config: Config, run: RunDir, step: int, reporter: Reporter) -> _Sender:
    """Resume the tracker run of a run that has done `step` steps, or start a new one."""
    tracker, known = TRACKERS[name](), run.tracker_state(name)
    state = _valid_state(known, step, tracker)
    title = run_name(run.directory) + (f"-from-{step}" if known and not state else "")
    run_id, last_step = state if state else (None, 0)
    try:
        run_id = tracker.start(TrackerRun(config.resolved(), run.directory, title, run_id, last_step))
    except Exception as error:
        raise ArpoError(
            f"run.tracker: {name} did not start: {printable(mask_message(str(error))) or type(error).__name__}\n"
            "fix this, or do without it (run.tracker=none); the run directory exists, so add --resume"
        ) from error
    state = TrackerState(run_id, last_step)
    run.write_tracker_state(name, state)
    return _Sender(name, tracker, run, state, reporter)


def _valid_state(state: TrackerState | None, step: int, tracker: Tracker) -> TrackerState | None:
    """Where a tracker run can be resumed if the run is at `step`; None if it has steps that were rolled back."""
    if state is None or state.step <= step:
        return state
    return TrackerState(state.id, step) if tracker.overwrites else None


def most_branched_tree(run: RunDir, step: int) -> ScoredTree | None:
    """The first of a step's saved trees with the most branch points; None if there are none."""
    try:
        points = [entry.branch_points for entry in run.tree_index(step)]
    except ArpoError:
        return None
    return run.read_tree(step, points.index(max(points))) if points else None


def _draw(scored: ScoredTree | None, formats: set[str]) -> dict[str, bytes]:
    """The picture of a tree in these formats; PNG is left out without matplotlib."""
    pictures: dict[str, bytes] = {}
    if scored is not None and "svg" in formats:
        pictures["svg"] = tree_svg(scored).encode()
    if scored is not None and "png" in formats and has_matplotlib():
        pictures["png"] = tree_png(scored)
    return pictures


def run_name(directory: Path) -> str:
    """A name for a run, from the end of its path: `runs-mine`."""
    return "-".join(re.findall(r"[\w.-]+", "/".join(directory.parts[-4:]))).lstrip(".-") or "run"


def _flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {_tag(prefix + key): value}
    return flat


def _tag(name: str) -> str:
    """A metric's name with characters that every tracker accepts; tools may have any name."""
    return re.sub(r"[^\w./ -]", "_", name, flags=re.ASCII)[:200]


def _finite_numbers(values: Mapping[str, Any]) -> dict[str, float]:
    return {
        _tag(name): value
        for name, value in values.items()
        if name != "step" and isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }
