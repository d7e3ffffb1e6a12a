"""Which worker samples which tree, with which weights, and where workers are started. Pure: it performs no action.

    scheduler.add(job, step, min_version)      a tree of this step, for weights of version `min_version` or newer
    scheduler.next()                           what to do now: assign a tree, update a worker's weights, or nothing
    scheduler.add_worker(worker, slots)        and `remove_worker`, `updated`, `finished`: what has happened

Guarantees: trees of earlier steps go first. A worker gets new weights only while it samples nothing, so a tree comes
from one version; an idle worker gets the newest before it gets a tree; one that is too old for the next tree gets none
until it is idle. The trees of a dead worker are assigned again, before all others of their step. A tree whose worker
died twice is sampled alone, so that a third death is its own doing: `remove_worker` then raises `PoisonTask`.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

MAX_DEATHS = 3  # workers that die of one tree before it is to blame


@dataclass(frozen=True, slots=True)
class Assign:
    """Have this worker sample this tree."""

    worker: str
    job: int


@dataclass(frozen=True, slots=True)
class Update:
    """Send this worker the weights of this version."""

    worker: str
    version: int


class PoisonTask(Exception):
    """A tree whose worker dies whenever it is sampled."""

    def __init__(self, job: int) -> None:
        super().__init__(job)
        self.job = job


@dataclass(slots=True, order=True)
class _Job:
    step: int
    id: int
    min_version: int = field(compare=False)
    trajectories: int = field(compare=False)
    deaths: int = field(default=0, compare=False)  # workers that died while they sampled it

    @property
    def isolated(self) -> bool:
        return self.deaths >= MAX_DEATHS - 1


@dataclass(slots=True)
class _Worker:
    slots: int  # trajectories at the same time
    version: int | None = None  # None until it has weights
    updating: bool = False
    jobs: dict[int, _Job] = field(default_factory=dict)

    @property
    def load(self) -> int:
        return sum(job.trajectories for job in self.jobs.values())


class Scheduler:
    """The trees that wait, and the workers with what they sample."""

    def __init__(self) -> None:
        self.version = -1  # the newest
        self.retried = 0  # trees that had to be assigned again
        self._workers: dict[str, _Worker] = {}
        self._waiting: list[_Job] = []  # a heap

    @property
    def workers(self) -> Mapping[str, int]:
        """The number of trees that each worker is sampling."""
        return {name: len(worker.jobs) for name, worker in self._workers.items()}

    def add(self, job: int, step: int, min_version: int, trajectories: int = 1) -> None:
        """Add a tree of so many trajectories; `job` is its unique number, and lower ones of a step go first."""
        if min_version > self.version:
            raise ValueError(f"tree {job} needs version {min_version}, but the newest is {self.version}")
        heapq.heappush(self._waiting, _Job(step, job, min_version, trajectories))

    def set_version(self, version: int) -> None:
        """Announce new weights."""
        if version < self.version:
            raise ValueError(f"version {version} comes after {self.version}")
        self.version = version

    def add_worker(self, worker: str, slots: int) -> None:
        """Add a worker that waits for weights and takes so many trajectories at a time, or a single larger tree."""
        if worker in self._workers:
            raise ValueError(f"{worker} is here already")
        self._workers[worker] = _Worker(slots)

    def remove_worker(self, worker: str, machine_died: bool = False) -> list[int]:
        """Remove a dead worker; returns the trees that it was sampling, which wait again.

        They may have caused its death, unless the whole machine died.
        """
        removed = self._workers.pop(worker, None)
        jobs = sorted(removed.jobs.values(), key=lambda job: job.id) if removed else []
        for job in jobs:
            job.deaths += not machine_died
            heapq.heappush(self._waiting, job)
        self.retried += len(jobs)
        for job in jobs:
            if job.deaths >= MAX_DEATHS:
                raise PoisonTask(job.id)
        return [job.id for job in jobs]

    def updated(self, worker: str, version: int) -> None:
        """A worker has loaded these weights."""
        if worker in self._workers:
            self._workers[worker].version, self._workers[worker].updating = version, False

    def finished(self, worker: str, job: int) -> bool:
        """A worker has sampled a tree; False if the tree was taken from it before."""
        return worker in self._workers and self._workers[worker].jobs.pop(job, None) is not None

    def next(self) -> Assign | Update | None:
        """The next action, which then counts as begun; call it until it returns None."""
        for name, worker in self._workers.items():
            if not worker.jobs and not worker.updating and self.version >= 0 and worker.version != self.version:
                worker.updating = True
                return Update(name, self.version)
        if not self._waiting:
            return None
        job = self._waiting[0]
        free = [
            (worker.load, -worker.version, index, name)
            for index, (name, worker) in enumerate(self._workers.items())
            if not worker.updating and worker.version is not None and worker.version >= job.min_version
            if not worker.jobs or (not job.isolated and worker.load + job.trajectories <= worker.slots)
            if not any(other.isolated for other in worker.jobs.values())
        ]
        if not free:
            return None
        name = min(free)[-1]
        self._workers[name].jobs[job.id] = heapq.heappop(self._waiting)
        return Assign(name, job.id)


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine of the cluster and its resources."""

    id: str
    address: str
    cpus: int
    gpus: int


@dataclass(frozen=True, slots=True)
class Placement:
    """The machine on which to start a worker, and the resources it gets."""

    machine: str
    cpus: int
    gpus: int


def missing_workers(machines: Sequence[Machine], running: Sequence[str], count: int, device: str) -> list[Placement]:
    """Where to start workers; `running` has the machine of each that runs or starts.

    One per GPU, or per machine where no machine has any (or `device` is "cpu"). With a `count`, so many in all, spread
    evenly; on CPUs they share those of their machine.
    """
    use_gpus = device == "cuda" or (device == "auto" and any(machine.gpus for machine in machines))
    usable = [machine for machine in machines if (machine.gpus if use_gpus else machine.cpus)]
    if not usable:
        return []
    share = -(-count // len(usable)) if count else 1  # workers that share a machine's CPUs
    room = {m.id: m.gpus if use_gpus else min(share, m.cpus) for m in usable}
    taken = Counter(running)
    missing: list[Placement] = []
    while not count or taken.total() < count:
        free = [m for m in usable if taken[m.id] < room[m.id]]
        if not free:
            break
        chosen = min(free, key=lambda m: taken[m.id])
        taken[chosen.id] += 1
        missing.append(Placement(chosen.id, 1 if use_gpus else max(1, chosen.cpus // share), int(use_gpus)))
    return missing
