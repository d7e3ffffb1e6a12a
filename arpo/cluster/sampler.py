"""Growing trees with a crew of actors: handing out work, giving new weights, doing again what was lost.

`Board` (`queue`) decides who does what; this does it, over any crew (`Crew`, of which `ray_crew` is the real one).

Promises: every tree that is asked for comes back once, whoever dies meanwhile, or an error says why not. What an actor
has finished is here at once and is not lost with it. New machines get actors while the work goes on.
Does not cover: an actor that neither answers nor dies. What a path does takes a bounded time (`rollout.max_seconds`),
and the crew must notice machines that fall silent.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Protocol

from arpo.cluster.scheduler import LOSSES, Assign, Machine, Place, PoisonTask, Scheduler, places
from arpo.cluster.worker import MISTAKE, Reply, encode_request, weights_of
from arpo.config.schema import Config
from arpo.errors import ArpoError
from arpo.evaluation.evaluate import Evaluation
from arpo.runs.reporter import SILENT, Reporter
from arpo.runs.trees import unpack_tree
from arpo.training.sampler import OnTree, ignore
from arpo.types import ScoredTree, Task

LOOK = 3.0  # seconds between looks at which machines there are
LONELY, STARTING = 300.0, 1800.0  # seconds without an actor, when none is starting and when one is
STARTS = 3  # failed starts in a row after which a machine is left out
MACHINE_DIED = "node has died"  # in what Ray says of an actor that was lost with its machine


class WorkerDied(Exception):
    """The actor is gone; the text says what is known of it."""


class WorkerHandle(Protocol):
    """One actor."""

    async def call(self, method: str, *given: Any) -> Reply:
        """Have it do something (`Worker`); raises `Lost`."""
        ...

    def kill(self) -> None:
        """End it, if it is still there."""
        ...


class WorkerBackend(Protocol):
    """Machines on which actors can be started."""

    def machines(self) -> list[Machine]:
        """Those that are there now."""
        ...

    def start(self, place: Place, slots: int) -> WorkerHandle:
        """A new actor there, which may take its time; for so many calls at the same time."""
        ...

    def put(self, data: bytes) -> Any:
        """Keep something where all actors can have it; what is returned may be given to `call`, and is data there."""
        ...


@dataclass(slots=True)
class _Job:
    order: bytes
    task: Task
    step: int | None  # none: it is tested
    result: asyncio.Future[ScoredTree]


class RaySampler:
    """A `Sampler` whose trees are sampled by workers on other machines; `model` holds the trained weights."""

    def __init__(
        self, backend: WorkerBackend, config: Config, model: Any, address: str, reporter: Reporter = SILENT
    ) -> None:
        self._backend, self._config, self._model = backend, config, model
        self._address, self._reporter = address, reporter
        self._settings = json.dumps(config.resolved()).encode()
        self._slots = config.rollout.concurrency
        self._board, self._jobs, self._count = Scheduler(), dict[int, _Job](), 0
        self._hands: dict[str, tuple[WorkerHandle, Machine]] = {}
        self._machines: dict[str, Machine] = {}
        self.pids: dict[str, int] = {}  # of the actors that are ready, each on its own machine
        self._failed: Counter[str] = Counter()  # starts in a row, by machine
        self._ready = set[str]()  # actors that had weights once
        self._reason = "no machine has a free CPU or GPU for one"
        self._error: BaseException | None = None
        self._weights: Any = None
        self._doing: set[asyncio.Task[None]] = set()
        self._wake = asyncio.Event()
        self._looked, self._since, self._last = -LOOK, time.monotonic(), time.monotonic()
        self._busy = self._there = 0.0  # actors' seconds: growing trees, and all
        self._redone = 0
        self._engine: dict[str, list[float]] = {}
        self._grown: Counter[int] = Counter()  # by step, of what was not told yet
        self._calls: Counter[int] = Counter()

    async def sync_weights(self, version: int) -> None:
        """Workers get the model's current weights as soon as they are idle."""
        if version == self._board.version:
            return
        first = self._weights is None
        self._weights = self._backend.put(weights_of(self._model))
        self._tick()
        self._board.newest(version)
        if first:
            self._since = time.monotonic()
            self._look()
            self._do(self._drive())
        self._wake.set()

    async def sample(self, tasks: Sequence[Task], seeds: Sequence[int], step: int) -> list[ScoredTree]:
        """The scored trees of a step's tasks, in their order."""
        need = max(0, step - 1 - self._config.cluster.max_off_policy_steps)
        return await self._all(tasks, seeds, step, need, ignore)

    async def evaluate(self, tasks: Sequence[Task], seeds: Sequence[int], on_tree: OnTree = ignore) -> Evaluation:
        """Answer these tasks with the newest weights."""
        return Evaluation(tuple(await self._all(tasks, seeds, None, self._board.version, on_tree)))

    def step_metrics(self, step: int) -> dict[str, float]:
        """How many actors there are, the share of their time in which they grew trees, what was done again."""
        self._tick()
        for done in [number for number in self._grown if number <= step]:
            del self._grown[done], self._calls[done]
        redone, self._redone = self._board.redone - self._redone, self._board.redone
        busy = self._busy / self._there if self._there else 0.0
        engine, self._busy, self._there = together(self._engine), 0.0, 0.0
        self._engine = {}
        seen = {"cluster_actors": len(self._board.actors), "cluster_retried": redone, "cluster_busy": busy}
        return {**{f"engine_{name}": value for name, value in engine.items()}, **seen}

    def discarded_metrics(self) -> dict[str, float]:
        """What was sampled ahead and never trained on."""
        trees, calls = sum(self._grown.values()), sum(self._calls.values())
        if not self._config.cluster.max_off_policy_steps:
            return {}
        if trees:
            self._reporter.message(
                f"cluster: {trees} trees with {calls} tool calls were sampled ahead and not trained on"
            )
        return {"cluster_discarded_trees": trees, "cluster_discarded_calls": calls}

    def close(self) -> None:
        """End all actors."""
        for hand, _ in self._hands.values():
            hand.kill()
        self._hands.clear()

    # --- trees

    async def _all(
        self, tasks: Sequence[Task], seeds: Sequence[int], step: int | None, need: int, on_tree: OnTree
    ) -> list[ScoredTree]:
        if self._error is not None:
            raise self._error
        loop, mine = asyncio.get_running_loop(), dict[int, asyncio.Future[ScoredTree]]()
        for task, seed in zip(tasks, seeds, strict=True):
            self._count += 1
            job = _Job(encode_request(task, seed, step is None), task, step, loop.create_future())
            job.result.add_done_callback(
                lambda future: None if future.cancelled() or future.exception() else on_tree(future.result())
            )
            self._jobs[self._count], mine[self._count] = job, job.result
            # A test comes before all that is to be trained on later.
            paths = self._config.rollout.num_trajectories if step is not None else self._config.eval.samples
            self._board.add(self._count, self._board.version if step is None else step, need, paths)
        self._wake.set()
        try:
            return await asyncio.gather(*mine.values())
        finally:
            for number in mine:
                del self._jobs[number]  # whoever is to grow one that is not there has it done at once

    async def _grow(self, name: str, number: int) -> None:
        job = self._jobs.get(number)
        reply = await self._ask(name, "sample", job.order) if job else None
        self._tick()
        if not self._board.finished(name, number) or reply is None:
            return
        frame, engine = reply
        for what, value in engine.items():
            self._engine.setdefault(what, []).append(value)
        scored = unpack_tree(frame)
        if job is not None and job.step is not None:
            self._grown[job.step] += 1
            self._calls[job.step] += scored.tree.tool_calls
        if job is not None and not job.result.done():
            job.result.set_result(scored)

    async def _update(self, name: str, version: int) -> None:
        if await self._ask(name, "update", version, self._weights) is not None:
            self._ready.add(name)
            if name in self._hands:
                self._failed[self._hands[name][1].id] = 0
            self._board.updated(name, version)

    async def _ask(self, name: str, method: str, *given: Any) -> Any:
        """What an actor answers; None if it is gone."""
        if name not in self._hands:  # gone before it could be asked
            return None
        hand, machine = self._hands[name]
        try:
            how, value = await hand.call(method, *given)
        except WorkerDied as error:
            self._lost(name, str(error), MACHINE_DIED not in str(error))
            return None
        if name not in self._hands:  # it was given up meanwhile
            return None
        if how == MISTAKE:
            raise ArpoError(f"{value} (on the machine {machine.address})")
        if how != "done":
            raise RuntimeError(f"in an actor on {machine.address}:\n{value}")
        return True if value is None else value

    # --- actors

    async def _drive(self) -> None:
        """The only task that decides."""
        while True:
            if time.monotonic() - self._looked >= LOOK:
                self._look()
            self._tick()
            while (action := self._board.next()) is not None:
                if isinstance(action, Assign):
                    self._do(self._grow(action.actor, action.job))
                else:
                    self._do(self._update(action.actor, action.version))
            self._wake.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK):
                    await self._wake.wait()

    def _look(self) -> None:
        """Start actors where some are missing; give up after a long time without any."""
        now, first = time.monotonic(), not self._machines
        self._looked = now
        seen = {machine.id: machine for machine in self._backend.machines()}
        for name, (_, machine) in list(self._hands.items()):
            if machine.id not in seen:
                self._lost(name, "its machine is gone", alone=False)
        usable = [machine for machine in seen.values() if self._failed[machine.id] < STARTS]
        if seen.keys() - self._machines.keys() and not first:
            self._let_go_of_those_that_wait()
        there = [machine.id for _, machine in self._hands.values()]
        missing = places(usable, there, self._config.cluster.actors, self._config.model.device)
        starting = Counter(place.machine for place in missing)
        if first:
            self._reporter.message(f"The Ray cluster {self._address}:")
        for machine in seen.values():
            if machine.id not in self._machines:
                joined = "" if first else "cluster: joined: "
                actors = f"{starting[machine.id]} sampling"
                self._reporter.message(
                    f"  {joined}{machine.address}  {machine.cpus} CPUs  {machine.gpus} GPUs  {actors}"
                )
        self._machines = seen
        for place in missing:
            self._count += 1
            name = f"actor-{self._count}"
            self._hands[name] = self._backend.start(place, self._slots), seen[place.machine]
            self._do(self._open(name, place))
        if self._board.actors:
            self._since = now
        elif seen and not usable:
            raise ArpoError(f"cluster: on no machine an actor could be started {STARTS} times: {self._reason}")
        elif now - self._since > (STARTING if self._hands else LONELY):
            raise ArpoError(
                f"cluster: for {(now - self._since) / 60:.0f} minutes nobody could sample: {self._reason}. "
                "What was trained is saved; go on with --resume"
            )

    def _let_go_of_those_that_wait(self) -> None:
        """A machine has joined: actors that wait for room elsewhere may be better off there."""
        for name in self._hands.keys() - self._board.actors.keys():
            self._hands.pop(name)[0].kill()

    async def _open(self, name: str, place: Place) -> None:
        pid = await self._ask(name, "open", self._settings, os.getcwd(), place.cpus)
        if pid is None:
            return
        self._tick()
        self._board.joined(name, self._slots)
        self.pids[name] = pid
        self._since = time.monotonic()

    def _lost(self, name: str, why: str, alone: bool = True) -> None:
        hand, machine = self._hands.pop(name, (None, None))
        if hand is None or machine is None:
            return
        hand.kill()
        self._failed[machine.id] += name not in self._ready
        if self._failed[machine.id] == STARTS:
            self._reporter.message(
                f"cluster: {machine.address} is left out: {STARTS} actors in a row were lost at their start"
            )
        self._ready.discard(name)
        self.pids.pop(name, None)
        self._tick()
        if not self._board.actors.keys() - {name}:
            self._since = time.monotonic()
        self._reason = f"the last actor was lost: {why}"
        self._looked = -LOOK  # look at once
        self._wake.set()
        try:
            again = self._board.lost(name, alone)
        except PoisonTask as deadly:
            question = self._jobs[deadly.job].task if deadly.job in self._jobs else None
            raise ArpoError(
                f"cluster: {LOSSES} actors died while they grew the tree of question "
                f"{question.id if question else '?'!r}, the last one while it grew nothing else: {why}. Its tools, its "
                "length, or memory may be the cause"
            ) from None
        self._reporter.message(
            f"cluster: an actor on {machine.address} is lost ({why}); {len(again)} trees are grown again"
        )

    # --- the rest

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        """In the background; whatever goes wrong there ends all that is asked for."""

        def done(task: asyncio.Task[None]) -> None:
            self._doing.discard(task)
            if not task.cancelled() and task.exception() is not None:
                self._fail(task.exception())
            self._wake.set()

        task = asyncio.get_running_loop().create_task(work)
        self._doing.add(task)
        task.add_done_callback(done)

    def _fail(self, error: BaseException | None) -> None:
        self._error = self._error or error
        for job in self._jobs.values():
            if not job.result.done() and self._error is not None:
                job.result.set_exception(self._error)

    def _tick(self) -> None:
        """Account for the time since the last change."""
        now, loads = time.monotonic(), self._board.actors.values()
        self._busy += (now - self._last) * sum(load > 0 for load in loads)
        self._there += (now - self._last) * len(loads)
        self._last = now


def together(told: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """What several engines tell, as one would: counts are added, of errors the mean and of maxima the largest taken."""
    ways = {name: max if name.endswith("_max") else fmean if name.endswith("_error") else sum for name in told}
    return {name: float(ways[name](values)) for name, values in told.items()}
