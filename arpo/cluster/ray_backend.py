"""A Ray cluster: connecting to it, its machines, workers and trainers. The only module that knows Ray.

    with connect(config) as build_sampler, open_training(config, build_sampler=build_sampler) as training: ...

Actors end with the process that started them. They import `arpo`, which every machine must have in the same version,
and find files under the same paths.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import numpy as np

from arpo.cluster.sampler import RaySampler, WorkerDied
from arpo.cluster.scheduler import Machine, Placement
from arpo.cluster.worker import Worker
from arpo.config.masking import mask_message, masked
from arpo.config.schema import Config
from arpo.errors import ArpoError
from arpo.figures.text import printable
from arpo.runs.reporter import SILENT, Reporter
from arpo.trainer.dist import launch
from arpo.training.checks import check_settings
from arpo.training.requests import DONE, MISTAKE, Reply

EXIT_SECONDS = 10.0  # that a trainer has to end by itself
RESERVE_SECONDS = 60.0  # in which a GPU that Ray counts must be free


@contextmanager
def connect(config: Config, reporter: Reporter = SILENT) -> Iterator[Callable[[Config, Any], RaySampler]]:
    """Connect to the cluster and start the other trainers; yields the function that builds the sampler.

    Inside, this process is rank 0 of `cluster.trainers`. Everything started on the cluster ends with the block.
    """
    address = config.cluster.address
    if address is None:
        raise ValueError("cluster.address is not set")
    if launch.world_size() > 1:
        raise ArpoError("cluster.address: leave out torchrun, and give cluster.trainers instead")
    check_settings(config, on_cluster=True)
    with ExitStack() as stack:
        stack.callback(_init_ray(address).shutdown)
        backend = RayBackend(reporter)
        stack.callback(backend.close)
        environment = backend.start_trainers(config.cluster.trainers, config.model.device)
        before = {name: os.environ[name] for name in environment if name in os.environ}

        def build_sampler(latest: Config, model: Any) -> RaySampler:
            sampler = RaySampler(backend, latest, model, address, reporter)
            stack.callback(sampler.close)
            return sampler

        os.environ.update(environment)
        try:
            yield build_sampler
        finally:
            for name in environment:
                del os.environ[name]
            os.environ.update(before)


def _init_ray(address: str) -> Any:
    """Connect to a running cluster; returns the module `ray`."""
    try:
        import ray
    except ImportError:
        raise ArpoError("cluster.address: Ray is missing; pip install ray") from None
    if address.startswith("ray://"):
        raise ArpoError("cluster.address: start `arpo train` on a machine of the cluster, with cluster.address=auto")
    if address != "auto":
        _require_listener(address)
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError) as error:
        shown, first = masked(address, "address"), mask_message(str(error).strip().partition("\n")[0])[:200]
        raise ArpoError(
            f"cluster.address: there is no Ray cluster at {shown!r} ({first}); `ray start --head` starts one"
        ) from error
    return ray


def _require_listener(address: str) -> None:
    """Raise if nothing listens there: Ray would retry for minutes and then end the process."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=10).close()
    except (OSError, ValueError, OverflowError) as error:
        shown = masked(address, "address")
        raise ArpoError(
            f'cluster.address: no answer from {shown!r} ({error}); give host:port of a Ray head, or "auto" on one of '
            "its machines"
        ) from None


class RayBackend:
    """A `WorkerBackend` over Ray, which also starts the trainers."""

    def __init__(self, reporter: Reporter = SILENT) -> None:
        self._reporter = reporter
        self._num_trainers: Counter[str] = Counter()  # by machine
        self._actors: list[RayWorkerHandle] = []  # trainers; that of rank 0 only holds its GPU
        self._watchers: list[threading.Thread] = []

    def machines(self) -> list[Machine]:
        """The machines that are alive, without the GPUs of trainers."""
        import ray

        return [
            Machine(
                node["NodeID"],
                node["NodeManagerAddress"],
                int(node["Resources"].get("CPU", 0)),
                max(0, int(node["Resources"].get("GPU", 0)) - self._num_trainers[node["NodeID"]]),
            )
            for node in ray.nodes()
            if node["Alive"]
        ]

    def start(self, placement: Placement, slots: int) -> RayWorkerHandle:
        """Start a sampling worker."""
        return RayWorkerHandle(_start_actor(Worker, placement, max_concurrency=slots + 4))

    def put(self, data: bytes) -> Any:
        """Store data once in Ray's object store."""
        import ray

        return ray.put(np.frombuffer(data, dtype=np.uint8))

    def close(self) -> None:
        """End trainers that did not end by themselves; no thread may use Ray after its shutdown."""
        for watcher in self._watchers:
            watcher.join(EXIT_SECONDS)
        for actor in self._actors:
            actor.kill()
        for watcher in self._watchers:
            watcher.join()

    def start_trainers(self, count: int, device: str) -> dict[str, str]:
        """Start all ranks but the first, one GPU each if there are any; returns the environment of this one, rank 0."""
        import ray

        machines, own = self.machines(), ray.get_runtime_context().get_node_id()
        num_gpus = sum(machine.gpus for machine in machines) if device != "cpu" else 0
        gpus = min(1, num_gpus)  # per trainer
        environment = {}
        if num_gpus:
            if not any(machine.id == own and machine.gpus for machine in machines):
                raise ArpoError("cluster.address: this machine has no GPU to train on; start the run on one that has")
            if num_gpus <= count:
                raise ArpoError(
                    f"cluster.trainers: {count} of {num_gpus} GPUs would train, and none is left to sample; on a "
                    "single GPU use cluster.address=none"
                )
            environment["CUDA_VISIBLE_DEVICES"] = self._reserve_gpu(own)
        if count == 1:
            return environment
        with socket.socket() as free:
            free.bind(("", 0))
            port = free.getsockname()[1]
        world = {"MASTER_ADDR": ray.util.get_node_ip_address(), "MASTER_PORT": str(port), "WORLD_SIZE": str(count)}
        for rank in range(1, count):
            room = [m for m in machines if not gpus or m.gpus > self._num_trainers[m.id]]
            if not room:
                raise ArpoError(f"cluster.trainers: the cluster has no free GPU for rank {rank} of {count} trainers")
            chosen = min(room, key=lambda m: (self._num_trainers[m.id] / (m.gpus or 1), m.id != own))
            self._num_trainers[chosen.id] += 1
            trainer = _start_actor(_Trainer, Placement(chosen.id, 0, gpus))
            self._actors.append(RayWorkerHandle(trainer))
            ref = trainer.worker_loop.remote({**world, "RANK": str(rank), "LOCAL_RANK": "0"}, device)
            self._watchers.append(
                threading.Thread(target=self._report_exit, args=(rank, chosen.address, ref), daemon=True)
            )
            self._watchers[-1].start()
        return {"RANK": "0", "LOCAL_RANK": "0", **world, **environment}

    def _reserve_gpu(self, machine: str) -> str:
        """Have Ray reserve a GPU of this machine for this process; returns its number."""
        import ray

        actor = _start_actor(_Trainer, Placement(machine, 0, 1))
        self._actors.append(RayWorkerHandle(actor))
        try:
            gpu = ray.get(actor.gpu.remote(), timeout=RESERVE_SECONDS)
        except ray.exceptions.GetTimeoutError:
            raise ArpoError("cluster.address: all GPUs of this machine are taken by others on the cluster") from None
        self._num_trainers[machine] += 1
        return str(gpu)

    def _report_exit(self, rank: int, address: str, ref: Any) -> None:
        """Report why a trainer ended, unless it was done."""
        import ray

        try:
            outcome, text = ray.get(ref)
        except ray.exceptions.RayError as error:
            outcome, text = MISTAKE, failure_reason(error)
        if outcome != DONE:
            self._reporter.message(f"cluster: rank {rank} on {address} ended: {text}")


class RayWorkerHandle:
    """A Ray actor."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    async def call(self, method: str, *args: Any) -> Reply:
        """Call a method of the actor; raises `WorkerDied` if the actor dies, or its reply is lost."""
        from ray import exceptions

        try:
            reply: Reply = await getattr(self._actor, method).remote(*args)
        except exceptions.RayTaskError:
            raise  # a bug that the worker did not report
        except exceptions.RayError as error:
            raise WorkerDied(failure_reason(error)) from error
        return reply

    def kill(self) -> None:
        """End the actor, if it is still there."""
        import ray

        with suppress(Exception):
            ray.kill(self._actor)


def _start_actor(cls: type, placement: Placement, **options: Any) -> Any:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    affinity = NodeAffinitySchedulingStrategy(placement.machine, soft=False)
    resources = {"num_cpus": placement.cpus, "num_gpus": placement.gpus, "max_restarts": 0}
    return ray.remote(cls).options(**resources, scheduling_strategy=affinity, **options).remote()


def failure_reason(error: Exception) -> str:
    """The most informative line of Ray's message."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
    lines = [printable(line.strip()) for line in plain.splitlines() if line.strip()]
    if "creation task" in plain:  # the last line is the error that was raised there
        return lines[-1][:200]
    informative = [line for line in lines if "died" in line or "exit" in line.lower() or "lost" in line.lower()]
    return (informative or lines or [type(error).__name__])[-1].partition(". ")[0][:200]


class _Trainer:
    """Holds the GPU of a rank. It also trains, except for rank 0, which is a process that Ray does not know."""

    def gpu(self) -> str:
        """The number of the GPU on its machine."""
        import ray

        return str(ray.get_gpu_ids()[0])

    def worker_loop(self, environment: dict[str, str], device: str) -> Reply:
        """Train as rank 0 says, until it ends."""
        os.environ.update(environment)
        from arpo.models.load import pick_device
        from arpo.trainer.dist.process_group import join_process_group
        from arpo.training.ranks import worker_loop

        try:
            with join_process_group(pick_device(device)) as ranks:
                worker_loop(ranks)
        except ArpoError as error:
            return MISTAKE, str(error)
        return DONE, None
