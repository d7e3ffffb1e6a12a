"""Records and tree pictures of a run, sent to trackers as well: TensorBoard, W&B, MLflow, Trackio.

Promises: a package is imported only if `run.tracker` names its tracker; one that is missing, or does not start, is
told before the first step; one that fails or hangs later is warned about once and left alone, and training goes on as
without it. A tracker has no step twice: a resumed run goes on in the same tracker run, gets what that has missed, and
steps that were taken back are overwritten (TensorBoard) or begin a new tracker run (the others).
Does not cover: the one step at which a tracker fails, which is not sent again as it may have arrived; pictures of steps
that are sent again; what a tracker keeps of steps that were taken back.
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
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from arpo.cli.display import console, printable
from arpo.config.loading import shareable
from arpo.config.schema import Config
from arpo.errors import ArpoError
from arpo.figures.tree import tree_png, tree_svg
from arpo.runs.run_dir import RunDir
from arpo.types import ScoredTree

PATIENCE = 60.0  # seconds that a tracker has, at the end, for what it was not given yet
PROJECT = "arpo"


@dataclass(frozen=True, slots=True)
class Start:
    """What a tracker run begins with, or goes on with: then `id` names it, and it has the steps up to `step`."""

    config: Mapping[str, Any]
    directory: Path
    name: str
    id: str | None = None
    step: int = 0


class Tracker(Protocol):
    """A service, or a folder, that shows the numbers of runs."""

    package: str  # the package to import; `pip install NAME` installs it
    raster: bool  # whether it shows PNG pictures and no SVG
    overwrites: bool  # whether a run that goes on at an earlier step replaces what came later

    def start(self, start: Start) -> str:
        """Begin or go on; returns the id by which it can be gone on with."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """The numbers of one step."""

    def picture(self, step: int, name: str, content: bytes) -> None:
        """A picture of a step: PNG, or SVG in UTF-8."""

    def close(self) -> None:
        """Send what is left."""


class TensorBoard:
    """Event files in the run's own directory: `tensorboard --logdir RUNS` finds them."""

    package, raster, overwrites = "tensorboard", True, True

    def start(self, start: Start) -> str:
        """Later steps of an earlier writer are passed over by TensorBoard."""
        writer = import_module("torch.utils.tensorboard").SummaryWriter
        folder = start.directory / "tensorboard"
        self._writer = writer(str(folder), purge_step=start.step + 1 if start.id else None)
        return folder.name

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """As scalars."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def picture(self, step: int, name: str, content: bytes) -> None:
        """As an image, in the bytes that came."""
        summary = import_module("tensorboard.compat.proto.summary_pb2").Summary
        width, height = (int.from_bytes(content[at : at + 4]) for at in (16, 20))  # where PNG has them
        image = summary.Image(encoded_image_string=content, colorspace=4, width=width, height=height)
        self._writer._get_file_writer().add_summary(summary(value=[summary.Value(tag=name, image=image)]), step)

    def close(self) -> None:
        """Flush."""
        self._writer.close()


class Wandb:
    """Weights & Biases; its own variables (WANDB_MODE, WANDB_PROJECT, WANDB_ENTITY) say where and how."""

    package, raster, overwrites = "wandb", False, False

    def start(self, start: Start) -> str:
        """Its files lie in the run's directory."""
        self._wandb = import_module("wandb")
        self._run = self._wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=start.name,
            dir=str(start.directory),
            config=dict(start.config),
            id=start.id,
            resume="allow" if start.id else None,
            reinit="create_new",
            allow_val_change=True,
            settings=self._wandb.Settings(console="off"),
        )
        return str(self._run.id)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """As history."""
        self._run.log(dict(values), step=step)

    def picture(self, step: int, name: str, content: bytes) -> None:
        """As HTML, which SVG is a part of."""
        html = self._wandb.Html(content.decode(), inject=False, data_is_not_path=True)
        self._run.log({name: html}, step=step)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


class Mlflow:
    """MLflow; MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME say where."""

    package, raster, overwrites = "mlflow", False, False

    def start(self, start: Start) -> str:
        """The settings become parameters."""
        mlflow = import_module("mlflow")
        self._client, self._entities = mlflow.MlflowClient(), import_module("mlflow.entities")
        if start.id:
            self._client.update_run(start.id, "RUNNING")
            self._id = start.id
            return self._id
        experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        found = self._client.get_experiment_by_name(experiment)
        where = found.experiment_id if found else self._client.create_experiment(experiment)
        self._id = str(self._client.create_run(where, run_name=start.name).info.run_id)
        params = [self._entities.Param(key, str(value)[:500]) for key, value in _flat(start.config).items()]
        for first in range(0, len(params), 100):  # as many as it takes at once
            self._client.log_batch(self._id, params=params[first : first + 100])
        return self._id

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """As metrics."""
        now = int(time.time() * 1000)
        metrics = [self._entities.Metric(name, float(value), now, step) for name, value in values.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def picture(self, step: int, name: str, content: bytes) -> None:
        """As an artifact, which its page shows."""
        self._client.log_text(self._id, content.decode(), f"{name}/step_{step:06d}.svg")

    def close(self) -> None:
        """Mark the run as finished."""
        self._client.set_terminated(self._id)


class Trackio:
    """Trackio, on this machine unless TRACKIO_SPACE_ID or TRACKIO_SERVER_URL says otherwise."""

    package, raster, overwrites = "trackio", False, False

    def start(self, start: Start) -> str:
        """Runs are known by their names."""
        self._trackio = import_module("trackio")
        self._run = self._trackio.init(
            project=PROJECT,
            name=start.id or start.name,
            config=dict(start.config),
            resume="must" if start.id else "never",
            embed=False,
        )
        return str(self._run.name)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """As metrics."""
        self._run.log(dict(values), step=step)

    def picture(self, step: int, name: str, content: bytes) -> None:
        """As HTML, which SVG is a part of."""
        self._run.log({name: self._trackio.Html(content.decode())}, step=step)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


TRACKERS: dict[str, Callable[[], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "mlflow": Mlflow,
    "trackio": Trackio,
}


def require_trackers(names: Sequence[str]) -> None:
    """Say what to install if one of them is not there; to be called before anything that takes long."""
    for name in names:
        tracker = TRACKERS[name]()
        try:
            import_module(tracker.package)
        except ImportError as error:
            raise ArpoError(f"run.tracker: {name} cannot be used ({error}): pip install {name}") from None


class Trackers:
    """Those of one run. Each has a thread of its own, so that a slow one holds up nothing."""

    def __init__(self, config: Config, log: RunDir, step: int) -> None:
        """Start them; the run is at `step`, and what they lack of its records is sent."""
        self._log, self._every, self._feeds = log, config.run.tracker_trees, list[_Feed]()
        records = log.read_metrics() if config.run.tracker else []
        _take_back([name for name in TRACKERS if name not in config.run.tracker], log, step)
        try:
            for name in config.run.tracker:
                self._feeds.append(_start(name, config, log, step))
                for record in records:
                    self._feeds[-1].record(record["step"], record)
        except BaseException:
            self.close()
            raise

    def record(self, step: int, values: Mapping[str, Any]) -> None:
        """Send a step's numbers, and now and then the picture of a tree of it."""
        for feed in self._feeds:
            feed.record(step, values)
        if self._feeds and self._every and step % self._every == 0:
            try:
                drawn = _drawn(telling_tree(self._log, step), {feed.raster for feed in self._feeds})
            except Exception as error:  # a picture is not worth a run
                console.print(printable(f"warning: the tree of step {step} could not be drawn: {error}"))
                return
            for feed in self._feeds:
                if feed.raster in drawn:
                    feed.picture(step, "tree", drawn[feed.raster])

    def amend(self, step: int, values: Mapping[str, float]) -> None:
        """Send numbers that a step they have got later."""
        for feed in self._feeds:
            feed.amend(step, values)

    def close(self) -> None:
        """Let them send what is left, for a minute at most."""
        end = time.monotonic() + PATIENCE
        for feed in self._feeds:
            feed.close()
        for feed in self._feeds:
            feed.wait(max(0.0, end - time.monotonic()))
        self._feeds = []


def telling_tree(log: RunDir, step: int) -> ScoredTree | None:
    """Of a step's saved trees the first with the most branch points; none where none are saved."""
    try:
        points = [entry.branch_points for entry in log.tree_index(step)]
    except ArpoError:
        return None
    return log.read_tree(step, points.index(max(points))) if points else None


def _drawn(scored: ScoredTree | None, rasters: set[bool]) -> dict[bool, bytes]:
    """The picture of a tree as PNG (True) and SVG (False), where it is wanted and can be made."""
    if scored is None:
        return {}
    made = {False: tree_svg(scored).encode()} if False in rasters else {}
    return made | ({True: tree_png(scored)} if True in rasters and find_spec("matplotlib") else {})


class _Feed:
    """What one tracker is still to get, and the thread that gives it."""

    def __init__(self, name: str, tracker: Tracker, log: RunDir, identity: str, step: int) -> None:
        self.raster = tracker.raster
        self._name, self._tracker, self._log, self._id, self._given = name, tracker, log, identity, step
        self._waiting: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def record(self, step: int, values: Mapping[str, Any]) -> None:
        """Numbers, unless it has those of this step; what is no finite number stays out."""
        if step <= self._given:
            return
        self._given = step
        numbers = _numbers(values)

        def send() -> None:
            self._log.write_tracker(self._name, self._id, step)  # first: better never than twice
            self._tracker.log(step, numbers)

        self._waiting.put(send)

    def amend(self, step: int, values: Mapping[str, Any]) -> None:
        """More numbers of a step whose numbers it was given."""
        numbers = _numbers(values)
        self._waiting.put(lambda: self._tracker.log(step, numbers))

    def picture(self, step: int, name: str, content: bytes) -> None:
        """A picture of a step whose numbers it was given."""
        self._waiting.put(lambda: self._tracker.picture(step, name, content))

    def close(self) -> None:
        """Nothing more will come."""
        self._waiting.put(None)

    def wait(self, seconds: float) -> None:
        """Until it has everything, or for so long."""
        self._thread.join(seconds)
        if self._thread.is_alive():
            self._warn(f"has not taken everything after {PATIENCE:.0f} seconds; what is missing is sent on --resume")

    def _work(self) -> None:
        try:
            while (send := self._waiting.get()) is not None:
                send()
            self._tracker.close()
        except (Exception, SystemExit) as error:
            self._warn(f"failed and gets nothing more: {type(error).__name__}: {error}")
            with suppress(Exception, SystemExit):
                self._tracker.close()

    def _warn(self, what: str) -> None:
        console.print(printable(f"warning: run.tracker: {self._name} {what}"))


def _start(name: str, config: Config, log: RunDir, step: int) -> _Feed:
    """A tracker of a run that is at `step`: where it was, or new."""
    tracker, known = TRACKERS[name](), log.tracker(name)
    start = Start(shareable(config.resolved()), log.directory, run_name(log.directory))
    if known is not None and (known[1] <= step or tracker.overwrites):
        start = replace(start, id=known[0], step=min(known[1], step))
    elif known is not None:  # it has steps that were taken back
        start = replace(start, name=f"{start.name}-from-{step}")
    try:
        identity = tracker.start(start)
    except Exception as error:
        raise ArpoError(
            f"run.tracker: {name} did not start: {printable(str(error)) or type(error).__name__}\n"
            "see to that, or go on without it (run.tracker=none); the run is there, so with --resume"
        ) from error
    log.write_tracker(name, identity, start.step)
    return _Feed(name, tracker, log, identity, start.step)


def _take_back(names: Sequence[str], log: RunDir, step: int) -> None:
    """See to it that trackers which are off now notice later that steps they have were taken back."""
    for name in names:
        known = log.tracker(name)
        if known is not None and known[1] > step:
            if TRACKERS[name]().overwrites:
                log.write_tracker(name, known[0], step)
            else:
                log.forget_tracker(name)


def run_name(directory: Path) -> str:
    """What a run is called: the end of its path, `runs-mine`."""
    return "-".join(re.findall(r"[\w.-]+", "/".join(directory.parts[-4:]))).lstrip(".-") or "run"


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return {_tag(key): value for key, value in flat.items()}


def _tag(name: str) -> str:
    """A name that every tracker takes; tools name themselves."""
    return re.sub(r"[^\w./ -]", "_", name, flags=re.ASCII)[:200]


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    return {_tag(name): value for name, value in values.items() if name != "step" and _is_number(value)}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
