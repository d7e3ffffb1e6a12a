"""The sampler of a cluster: it assigns trees to workers, sends them weights and repeats what was lost.

`Scheduler` decides which worker does what; `RaySampler` carries it out, over any `WorkerBackend`.

Guarantees: every tree that is asked for comes back once, whichever workers die, or an error says why not. A finished
tree is returned at once and is not lost with its worker. Machines that join get workers while sampling goes on.
Not covered: a worker that neither answers nor dies. A trajectory takes a bounded time (`rollout.max_seconds`), and the
backend must notice machines that stop responding.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import time
from collections import Counter
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from arpo.cluster.scheduler import MAX_DEATHS, Assign, Machine, Placement, PoisonTask, Scheduler, missing_workers
from arpo.cluster.worker import weights_of
from arpo.config.masking import masked
from arpo.config.schema import Config
from arpo.errors import ArpoError
from arpo.evaluation.evaluate import Evaluation
from arpo.runs.reporter import SILENT, Reporter
from arpo.runs.trees import unpack_tree
from arpo.training.requests import DONE, MISTAKE, Reply, encode_request, merge_stats, restore_columns
from arpo.training.sampler import OnTree, ignore, report_tree
from arpo.types import ScoredTree, Task

SCAN_SECONDS = 3.0  # between looks at which machines there are
IDLE_SECONDS, STARTING_SECONDS = 300.0, 1800.0  # without a worker, when none is starting and when one is
MAX_FAILED_STARTS = 3  # in a row, after which a machine is left out
MACHINE_DIED = "node has died"  # in Ray's message about an actor that was lost with its machine


class WorkerDied(Exception):
    """The worker is gone; the text says what is known about it."""


class WorkerHandle(Protocol):
    """One worker process."""

    async def call(self, method: str, *args: Any) -> Reply:
        """The reply of a method of `Worker`; raises `WorkerDied`."""
        ...

    def kill(self) -> None:
        """End the process, if it is still there."""
        ...


class WorkerBackend(Protocol):
    """Machines on which workers can be started."""

    def machines(self) -> list[Machine]:
        """The machines that are there now."""
        ...

    def start(self, placement: Placement, slots: int) -> WorkerHandle:
        """Start a worker for so many calls at a time; the handle may be used before the worker runs."""
        ...

    def put(self, data: bytes) -> Any:
        """Store data where all workers can read it; the result may be an argument of `call`."""
        ...


@dataclass(slots=True)
class _Worker:
    handle: WorkerHandle
    machine: Machine
    pid: int | None = None  # None until it has opened the run
    has_weights: bool = False


@dataclass(slots=True)
class _Job:
    request: bytes
    task: Task
    step: int | None  # None: an evaluation
    result: asyncio.Future[ScoredTree]


class RaySampler:
    """A `Sampler` whose trees are sampled by workers on other machines; `model` holds the trained weights."""

    def __init__(
        self, backend: WorkerBackend, config: Config, model: Any, address: str, reporter: Reporter = SILENT
    ) -> None:
        self._backend, self._config, self._model = backend, config, model
        self._address, self._reporter = address, reporter
        self._settings = json.dumps(config.resolved(reveal=True)).encode()  # workers call the tools
        self._slots = config.rollout.concurrency
        self._scheduler = Scheduler()
        self._jobs: dict[int, _Job] = {}
        self._workers: dict[str, _Worker] = {}
        self._count = 0  # of jobs and workers
        self._machines: dict[str, Machine] = {}
        self._failed_starts: Counter[str] = Counter()  # in a row, by machine
        self._last_failure = "no machine has a free CPU or GPU for one"
        self._error: BaseException | None = None
        self._weights: Any = None
        self._background: set[asyncio.Task[None]] = set()
        self._wake = asyncio.Event()
        self._last_scan = -math.inf
        self._last_worker = self._last_tick = time.monotonic()  # when a worker was last there, and time was counted
        self._busy_seconds = self._worker_seconds = 0.0
        self._retried = 0  # trees, up to the last step
        self._worker_stats: dict[str, list[float]] = {}
        self._tool_calls: dict[int, list[int]] = {}  # of each tree of a step that was not trained on yet

    @property
    def pids(self) -> dict[str, int]:
        """The process of each worker that is ready, on its own machine."""
        return {name: worker.pid for name, worker in list(self._workers.items()) if worker.pid is not None}

    async def sync_weights(self, version: int) -> None:
        """Workers get the model's current weights as soon as they are idle."""
        if version == self._scheduler.version:
            return
        first = self._weights is None
        self._weights = self._backend.put(weights_of(self._model))
        self._tick()
        self._scheduler.set_version(version)
        if first:
            self._last_worker = time.monotonic()
            self._scan_machines()
            self._spawn(self._dispatch())
        self._wake.set()

    async def sample(self, tasks: Sequence[Task], seeds: Sequence[int], step: int) -> list[ScoredTree]:
        """The scored trees of a step's tasks, in their order."""
        min_version = max(0, step - 1 - self._config.cluster.max_off_policy_steps)
        return await self._sample_all(tasks, seeds, step, min_version, ignore)

    async def evaluate(self, tasks: Sequence[Task], seeds: Sequence[int], on_tree: OnTree = ignore) -> Evaluation:
        """Answer these tasks with the newest weights."""
        return Evaluation(tuple(await self._sample_all(tasks, seeds, None, self._scheduler.version, on_tree)))

    def step_metrics(self, step: int) -> dict[str, float]:
        """The workers' counters, the number of workers, trees sampled again and the share of time spent sampling."""
        self._tick()
        self._tool_calls = {number: calls for number, calls in self._tool_calls.items() if number > step}
        merged = merge_stats(self._worker_stats)
        metrics = {
            "cluster_actors": len(self._scheduler.workers),
            "cluster_retried": self._scheduler.retried - self._retried,
            "cluster_busy": self._busy_seconds / self._worker_seconds if self._worker_seconds else 0.0,
        }
        self._worker_stats, self._retried = {}, self._scheduler.retried
        self._busy_seconds = self._worker_seconds = 0.0
        return merged | metrics

    def discarded_metrics(self) -> dict[str, float]:
        """Rollouts discarded at shutdown: sampled ahead and never trained on."""
        if not self._config.cluster.max_off_policy_steps:
            return {}
        trees, calls = sum(map(len, self._tool_calls.values())), sum(map(sum, self._tool_calls.values()))
        if trees:
            self._reporter.message(
                f"cluster: {trees} trees with {calls} tool calls were sampled ahead and not trained on"
            )
        return {"cluster_discarded_trees": trees, "cluster_discarded_calls": calls}

    def close(self) -> None:
        """End all workers."""
        for worker in self._workers.values():
            worker.handle.kill()
        self._workers.clear()

    # --- trees

    async def _sample_all(
        self, tasks: Sequence[Task], seeds: Sequence[int], step: int | None, min_version: int, on_tree: OnTree
    ) -> list[ScoredTree]:
        if self._error is not None:
            raise self._error
        results: dict[int, asyncio.Future[ScoredTree]] = {}
        # An evaluation goes before the trees of later steps.
        priority = self._scheduler.version if step is None else step
        trajectories = self._config.eval.samples if step is None else self._config.rollout.num_trajectories
        for task, seed in zip(tasks, seeds, strict=True):
            self._count += 1
            result = results[self._count] = asyncio.get_running_loop().create_future()
            result.add_done_callback(
                lambda future: None if future.cancelled() or future.exception() else on_tree(future.result())
            )
            self._jobs[self._count] = _Job(encode_request(task, seed, step is None), task, step, result)
            self._scheduler.add(self._count, priority, min_version, trajectories)
        self._wake.set()
        try:
            return await asyncio.gather(*results.values())
        finally:
            for number in results:
                del self._jobs[number]  # `_sample` finishes a job that is not there at once

    async def _sample(self, name: str, number: int) -> None:
        job = self._jobs.get(number)
        reply = await self._call(name, "sample", job.request) if job else None
        self._tick()
        if not self._scheduler.finished(name, number) or job is None or reply is None:
            return
        frame, stats = reply
        for counter, value in stats.items():
            self._worker_stats.setdefault(counter, []).append(value)
        scored = restore_columns(unpack_tree(frame), job.task)
        if job.step is not None:
            self._tool_calls.setdefault(job.step, []).append(scored.tree.tool_calls)
        if not job.result.done():
            if job.step is not None:
                report_tree(self._reporter, scored)
            job.result.set_result(scored)

    # --- workers

    async def _dispatch(self) -> None:
        """Do what the scheduler says, and look for machines now and then."""
        while True:
            if time.monotonic() - self._last_scan >= SCAN_SECONDS:
                self._scan_machines()
            self._tick()
            while (action := self._scheduler.next()) is not None:
                if isinstance(action, Assign):
                    self._spawn(self._sample(action.worker, action.job))
                else:
                    self._spawn(self._update(action.worker, action.version))
            self._wake.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(SCAN_SECONDS):
                    await self._wake.wait()

    def _scan_machines(self) -> None:
        """Start missing workers; raise an error after a long time without any."""
        now, known = time.monotonic(), self._machines
        self._last_scan = now
        self._machines = {machine.id: machine for machine in self._backend.machines()}
        joined = [machine for machine in self._machines.values() if machine.id not in known]
        for name, worker in list(self._workers.items()):
            if worker.machine.id not in self._machines:
                self._remove(name, "its machine is gone", machine_died=True)
        if known and joined:  # workers that wait for resources elsewhere may be better off on a new machine
            for name in self._workers.keys() - self._scheduler.workers.keys():
                self._workers.pop(name).handle.kill()
        usable = [m for m in self._machines.values() if self._failed_starts[m.id] < MAX_FAILED_STARTS]
        running = [worker.machine.id for worker in self._workers.values()]
        missing = missing_workers(usable, running, self._config.cluster.actors, self._config.model.device)
        if not known:
            self._reporter.message(f"The Ray cluster {masked(self._address, 'address')}:")
        for machine in joined:
            count = sum(placement.machine == machine.id for placement in missing)
            address = f"cluster: joined: {machine.address}" if known else machine.address
            self._reporter.message(f"  {address}  {machine.cpus} CPUs  {machine.gpus} GPUs  {count} sampling")
        for placement in missing:
            self._count += 1
            name, handle = f"actor-{self._count}", self._backend.start(placement, self._slots)
            self._workers[name] = _Worker(handle, self._machines[placement.machine])
            self._spawn(self._open(name, placement))
        if self._scheduler.workers:
            self._last_worker = now
        elif self._machines and not usable:
            raise ArpoError(
                f"cluster: actors failed to start {MAX_FAILED_STARTS} times on every machine: {self._last_failure}"
            )
        elif now - self._last_worker > (STARTING_SECONDS if self._workers else IDLE_SECONDS):
            raise ArpoError(
                f"cluster: no actor could sample for {(now - self._last_worker) / 60:.0f} minutes: "
                f"{self._last_failure}. What was trained is saved; continue with --resume"
            )

    async def _open(self, name: str, placement: Placement) -> None:
        pid = await self._call(name, "open", self._settings, os.getcwd(), placement.cpus)
        if pid is not None:
            self._tick()
            self._scheduler.add_worker(name, self._slots)
            self._workers[name].pid = pid
            self._last_worker = time.monotonic()

    async def _update(self, name: str, version: int) -> None:
        if await self._call(name, "update", version, self._weights) is not None:
            worker = self._workers[name]
            worker.has_weights = True
            self._failed_starts[worker.machine.id] = 0
            self._scheduler.updated(name, version)

    async def _call(self, name: str, method: str, *args: Any) -> Any:
        """The value that a worker returns; None if the worker is gone."""
        if name not in self._workers:
            return None
        worker = self._workers[name]
        try:
            outcome, value = await worker.handle.call(method, *args)
        except WorkerDied as error:
            self._remove(name, str(error), MACHINE_DIED in str(error))
            return None
        if name not in self._workers:  # it was removed meanwhile
            return None
        if outcome == MISTAKE:
            raise ArpoError(f"{value} (on the machine {worker.machine.address})")
        if outcome != DONE:
            raise RuntimeError(f"in an actor on {worker.machine.address}:\n{value}")
        return value

    def _remove(self, name: str, reason: str, machine_died: bool) -> None:
        """Remove a dead worker; its trees are sampled again."""
        worker = self._workers.pop(name, None)
        if worker is None:
            return
        worker.handle.kill()
        machine = worker.machine
        self._failed_starts[machine.id] += not worker.has_weights
        if self._failed_starts[machine.id] == MAX_FAILED_STARTS:
            self._reporter.message(
                f"cluster: {machine.address} is left out: {MAX_FAILED_STARTS} actors in a row died at their start"
            )
        self._tick()
        if not self._scheduler.workers.keys() - {name}:
            self._last_worker = time.monotonic()
        self._last_failure = f"the last actor died: {reason}"
        self._last_scan = -math.inf  # look at once
        self._wake.set()
        try:
            retried = self._scheduler.remove_worker(name, machine_died)
        except PoisonTask as poison:
            job = self._jobs.get(poison.job)
            raise ArpoError(
                f"cluster: {MAX_DEATHS} actors died while they sampled the tree of question "
                f"{job.task.id if job else '?'!r}, the last one while it sampled nothing else: {reason}. Its tools, "
                "its length, or memory may be the cause"
            ) from None
        self._reporter.message(
            f"cluster: an actor on {machine.address} died ({reason}); {len(retried)} trees are sampled again"
        )

    # --- the rest

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run in the background; an error there fails all pending jobs."""

        def done(task: asyncio.Task[None]) -> None:
            self._background.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None:
                self._error = self._error or error
                for job in self._jobs.values():
                    if not job.result.done():
                        job.result.set_exception(self._error)
            self._wake.set()

        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(done)

    def _tick(self) -> None:
        """Count the time since the last change."""
        now, loads = time.monotonic(), self._scheduler.workers.values()
        self._busy_seconds += (now - self._last_tick) * sum(load > 0 for load in loads)
        self._worker_seconds += (now - self._last_tick) * len(loads)
        self._last_tick = now
