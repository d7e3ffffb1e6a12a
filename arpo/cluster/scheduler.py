"""Who grows which tree, with which weights. Pure: it knows names and numbers, and does nothing itself.

    board.add(job, step, need)     a tree of this step, to be grown by weights of version `need` or newer
    board.next()                   what to do now: give a tree to an actor, give an actor new weights, or nothing
    board.joined(actor, slots)     and `lost`, `updated`, `finished`: what has happened

Promises: trees of earlier steps go first. An actor gets new weights only while it grows nothing, so all of a tree comes
from one version; an idle actor gets the newest before it gets a tree; one that is too old for the next tree gets none
until it is idle. What a lost actor was growing is given out again, first of all. A tree that was lost twice is grown
alone, so that a third loss is its own doing: then `lost` raises `Deadly`.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

LOSSES = 3  # of one tree, after which it is to blame


@dataclass(frozen=True, slots=True)
class Assign:
    """Have this actor grow this tree."""

    actor: str
    job: int


@dataclass(frozen=True, slots=True)
class Update:
    """Give this actor the weights of this version."""

    actor: str
    version: int


class PoisonTask(Exception):
    """A tree whose actor dies whenever it is grown."""

    def __init__(self, job: int) -> None:
        super().__init__(job)
        self.job = job


@dataclass(slots=True)
class _Actor:
    slots: int  # paths at the same time
    version: int | None = None  # none yet
    updating: bool = False
    jobs: set[int] = field(default_factory=set)


class Scheduler:
    """The trees that wait, and who is busy with what."""

    def __init__(self) -> None:
        self.version = -1  # the newest
        self.redone = 0
        self._actors: dict[str, _Actor] = {}
        self._waiting: list[tuple[int, int, int]] = []  # a heap of step, job, need
        self._given: dict[int, tuple[int, int, int]] = {}
        self._losses: Counter[int] = Counter()
        self._paths: dict[int, int] = {}  # of each tree that waits or grows

    @property
    def actors(self) -> Mapping[str, int]:
        """Those that are there, and how many trees each is growing."""
        return {name: len(actor.jobs) for name, actor in self._actors.items()}

    @property
    def waiting(self) -> int:
        """Trees that nobody grows yet."""
        return len(self._waiting)

    def add(self, job: int, step: int, need: int, paths: int = 1) -> None:
        """A tree of so many paths to be grown; `job` is a number that no other has. Lower ones of a step go first."""
        if need > self.version:
            raise ValueError(f"tree {job} needs version {need}, but the newest is {self.version}")
        heapq.heappush(self._waiting, (step, job, need))
        self._paths[job] = paths

    def newest(self, version: int) -> None:
        """There are new weights."""
        if version < self.version:
            raise ValueError(f"version {version} comes after {self.version}")
        self.version = version

    def joined(self, actor: str, slots: int) -> None:
        """An actor is ready for weights, and then for so many paths at the same time; one tree is never too many."""
        if actor in self._actors:
            raise ValueError(f"{actor} is here already")
        self._actors[actor] = _Actor(slots)

    def lost(self, actor: str, alone: bool = True) -> list[int]:
        """An actor is gone, `alone` or with its machine: returns the trees it was growing, which wait again.

        A tree can be to blame for the loss of an actor, not for that of a machine.
        """
        gone = self._actors.pop(actor, None)
        jobs = sorted(gone.jobs) if gone else []
        for job in jobs:
            heapq.heappush(self._waiting, self._given.pop(job))
            self._losses[job] += alone
        self.redone += len(jobs)
        for job in jobs:
            if self._losses[job] >= LOSSES:
                raise PoisonTask(job)
        return jobs

    def updated(self, actor: str, version: int) -> None:
        """An actor has these weights."""
        if actor in self._actors:
            self._actors[actor].version, self._actors[actor].updating = version, False

    def finished(self, actor: str, job: int) -> bool:
        """An actor has grown a tree; False if that was taken from it before, and counts nothing."""
        if actor not in self._actors or job not in self._actors[actor].jobs:
            return False
        self._actors[actor].jobs.remove(job)
        del self._given[job], self._paths[job]
        self._losses.pop(job, None)
        return True

    def next(self) -> Assign | Update | None:
        """What to do now; it counts as begun. To be asked until it is nothing."""
        for name, actor in self._actors.items():
            if not actor.jobs and not actor.updating and self.version >= 0 and actor.version != self.version:
                actor.updating = True
                return Update(name, self.version)
        if not self._waiting:
            return None
        _, job, need = self._waiting[0]
        alone = self._alone(job)
        free = [
            (self._load(actor), -actor.version, number, name)
            for number, (name, actor) in enumerate(self._actors.items())
            if not actor.updating and actor.version is not None and actor.version >= need
            if not actor.jobs or (not alone and self._load(actor) + self._paths[job] <= actor.slots)
            if not any(map(self._alone, actor.jobs))
        ]
        if not free:
            return None
        name = min(free)[-1]
        self._given[job] = heapq.heappop(self._waiting)
        self._actors[name].jobs.add(job)
        return Assign(name, job)

    def _load(self, actor: _Actor) -> int:
        return sum(self._paths[job] for job in actor.jobs)

    def _alone(self, job: int) -> bool:
        return self._losses[job] >= LOSSES - 1


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine of the cluster, and what it has for us."""

    id: str
    address: str
    cpus: int
    gpus: int


@dataclass(frozen=True, slots=True)
class Place:
    """Where an actor is to be started, and what it may use there."""

    machine: str
    cpus: int
    gpus: int


def places(machines: Sequence[Machine], there: Sequence[str], actors: int, device: str) -> list[Place]:
    """Where actors are missing; `there` names the machine of each that runs or starts.

    One to a GPU, or to a machine where no machine has any (or `device` is "cpu"); with `actors` so many in all, spread
    evenly, and on CPUs they share those of their machine.
    """
    use_gpus = device == "cuda" or (device == "auto" and any(machine.gpus for machine in machines))
    usable = [machine for machine in machines if (machine.gpus if use_gpus else machine.cpus)]
    if not usable:
        return []
    taken = Counter(there)
    room = {m.id: m.gpus if use_gpus else 1 for m in usable}
    share = 1
    if actors and not use_gpus:
        share = -(-actors // len(usable))
        room = {m.id: min(share, m.cpus) for m in usable}
    found: list[Place] = []
    while not actors or sum(taken.values()) < actors:
        open_ = [m for m in usable if taken[m.id] < room[m.id]]
        if not open_:
            break
        chosen = min(open_, key=lambda m: taken[m.id])
        taken[chosen.id] += 1
        found.append(Place(chosen.id, max(1, chosen.cpus // share) if not use_gpus else 1, int(use_gpus)))
    return found
