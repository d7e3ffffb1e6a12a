"""The crew of a Ray cluster, and the only place that knows Ray.

    with ray_crew(address) as crew: ...

Actors end with the process that started them. They import the same `arpo`, which every machine must have, and find
files under the same paths.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from arpo.cluster.sampler import WorkerDied
from arpo.cluster.scheduler import Machine, Place
from arpo.cluster.worker import DONE, MISTAKE, Reply, Worker
from arpo.errors import ArpoError
from arpo.figures.text import printable
from arpo.runs.reporter import SILENT, Reporter

GRACE = 10.0  # seconds that a trainer has to end by itself
SEAT_SECONDS = 60.0  # in which a GPU that Ray counts must be free


@contextmanager
def ray_crew(address: str, reporter: Reporter = SILENT) -> Iterator[RayBackend]:
    """Connect to a running cluster; all that was started there ends with the block."""
    try:
        import ray
    except ImportError:
        raise ArpoError("cluster.address: Ray is missing; pip install ray") from None
    if address.startswith("ray://"):
        raise ArpoError("cluster.address: start `arpo train` on a machine of the cluster, with cluster.address=auto")
    if address != "auto":
        _require_answer(address)
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError) as error:
        first = str(error).strip().partition("\n")[0][:200]
        raise ArpoError(
            f"cluster.address: there is no Ray cluster at {address!r} ({first}); `ray start --head` starts one"
        ) from error
    crew = RayBackend(reporter)
    try:
        yield crew
    finally:
        crew.end()
        ray.shutdown()


def _require_answer(address: str) -> None:
    """Raise if nobody listens there: Ray itself would try for minutes, and then end the process."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=10).close()
    except (OSError, ValueError, OverflowError) as error:
        raise ArpoError(
            f'cluster.address: nobody answers at {address!r} ({error}); give host:port of a Ray head, or "auto" on '
            "one of its machines"
        ) from None


class RayBackend:
    """Machines of the cluster, and actors there."""

    def __init__(self, reporter: Reporter = SILENT) -> None:
        self.reporter = reporter
        self.seats: Counter[str] = Counter()  # trainers, by machine
        self.held: list[Any] = []  # actors beside those that sample
        self.watchers: list[threading.Thread] = []

    def machines(self) -> list[Machine]:
        """Those that are alive; without the GPUs that trainers hold."""
        import ray

        return [
            Machine(
                node["NodeID"],
                node["NodeManagerAddress"],
                int(node["Resources"].get("CPU", 0)),
                max(0, int(node["Resources"].get("GPU", 0)) - self.seats[node["NodeID"]]),
            )
            for node in ray.nodes()
            if node["Alive"]
        ]

    def start(self, place: Place, slots: int) -> RayWorkerHandle:
        """A new actor there."""
        return RayWorkerHandle(_started(Worker, place, max_concurrency=slots + 4))

    def end(self) -> None:
        """End trainers that did not end by themselves; nobody may still ask Ray for anything when it is left."""
        for watcher in self.watchers:
            watcher.join(GRACE)
        for actor in self.held:
            RayWorkerHandle(actor).kill()
        for watcher in self.watchers:
            watcher.join()

    def put(self, data: bytes) -> Any:
        """Into the object store, once for all."""
        import ray

        return ray.put(np.frombuffer(data, dtype=np.uint8))


class RayWorkerHandle:
    """One actor."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    async def call(self, method: str, *given: Any) -> Reply:
        """Have it do something; raises `Lost` if it dies, or its answer is lost."""
        from ray import exceptions

        try:
            reply: Reply = await getattr(self._actor, method).remote(*given)
        except exceptions.RayTaskError:
            raise  # a bug that the worker did not tell of
        except exceptions.RayError as error:
            raise WorkerDied(reason(error)) from error
        return reply

    def kill(self) -> None:
        """End it, if it is still there."""
        import ray

        with suppress(Exception):
            ray.kill(self._actor)


def _started(what: type, place: Place, **more: Any) -> Any:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    there = NodeAffinitySchedulingStrategy(place.machine, soft=False)
    given = {"num_cpus": place.cpus, "num_gpus": place.gpus, "max_restarts": 0, "scheduling_strategy": there}
    return ray.remote(what).options(**given, **more).remote()


def reason(error: Exception) -> str:
    """The line of Ray's message that says most."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
    lines = [printable(line.strip()) for line in plain.splitlines() if line.strip()]
    if "creation task" in plain:  # the last line is the error that was raised there
        return lines[-1][:200]
    telling = [line for line in lines if "died" in line or "exit" in line.lower() or "lost" in line.lower()]
    return (telling or lines or [type(error).__name__])[-1].partition(". ")[0][:200]


class _Seat:
    """Holds a GPU for the process that leads, which Ray does not know."""

    def gpu(self) -> str:
        """Which GPU of its machine."""
        import ray

        return str(ray.get_gpu_ids()[0])


class _Trainer:
    """One of the processes that train along; it does nothing else."""

    def worker_loop(self, environment: dict[str, str], device: str) -> Reply:
        """Train as rank 0 says, to its end."""
        os.environ.update(environment)
        from arpo.models.load import pick_device
        from arpo.trainer.dist.process_group import join_process_group
        from arpo.trainer.dist.worker import worker_loop

        try:
            with join_process_group(pick_device(device)) as ranks:
                worker_loop(ranks)
        except ArpoError as error:
            return MISTAKE, str(error)
        return DONE, None


def start_trainers(crew: RayBackend, count: int, device: str) -> dict[str, str]:
    """Start all ranks but the first, one GPU each if there are any; returns the environment that this one needs."""
    import ray

    machines, own = crew.machines(), ray.get_runtime_context().get_node_id()
    gpus = int(device != "cpu" and any(machine.gpus for machine in machines))
    mine = {}
    if gpus and any(machine.id == own and machine.gpus for machine in machines):
        seat = _started(_Seat, Place(own, 0, 1))
        crew.held.append(seat)
        try:
            mine["CUDA_VISIBLE_DEVICES"] = ray.get(seat.gpu.remote(), timeout=SEAT_SECONDS)
        except ray.exceptions.GetTimeoutError:
            raise ArpoError("cluster.address: all GPUs of this machine are taken by others on the cluster") from None
        crew.seats[own] += 1
    if gpus and not mine:
        raise ArpoError("cluster.address: this machine has no GPU to train on; start the run on one that has")
    if gpus and sum(machine.gpus for machine in machines) <= count:
        raise ArpoError(
            f"cluster.trainers: {count} of {sum(machine.gpus for machine in machines)} GPUs would train, and none is "
            "left to sample; on a single GPU use cluster.address=none"
        )
    if count == 1:
        return mine
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    world = {"MASTER_ADDR": ray.util.get_node_ip_address(), "MASTER_PORT": str(port), "WORLD_SIZE": str(count)}
    for rank in range(1, count):
        room = [m for m in machines if not gpus or m.gpus > crew.seats[m.id]]
        if not room:
            raise ArpoError(f"cluster.trainers: the cluster has no free GPU for the {rank + 1}. of {count} trainers")
        chosen = min(room, key=lambda m: (crew.seats[m.id] / (m.gpus or 1), m.id != own))
        crew.seats[chosen.id] += 1
        trainer = _started(_Trainer, Place(chosen.id, 0, gpus))
        told = trainer.worker_loop.remote({**world, "RANK": str(rank), "LOCAL_RANK": "0"}, device)
        crew.held.append(trainer)
        crew.watchers.append(
            threading.Thread(target=_tell, args=(rank, chosen.address, told, crew.reporter), daemon=True)
        )
        crew.watchers[-1].start()
    return {"RANK": "0", "LOCAL_RANK": "0", **world, **mine}


def _tell(rank: int, address: str, told: Any, reporter: Reporter) -> None:
    """Say why a trainer ended before its time."""
    import ray

    try:
        how, text = ray.get(told)
    except ray.exceptions.RayError as error:
        how, text = MISTAKE, reason(error)
    if how != DONE:
        reporter.message(f"cluster: rank {rank} on {address} ended: {text}")
