"""Connecting a run to the Ray cluster that the section `cluster` names."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from arpo.cluster.ray_backend import ray_crew, start_trainers
from arpo.cluster.sampler import RaySampler
from arpo.config.schema import Config
from arpo.errors import ArpoError
from arpo.runs.reporter import SILENT, Reporter
from arpo.trainer.dist import launch
from arpo.training.loop import check_settings


@contextmanager
def connect(config: Config, reporter: Reporter = SILENT) -> Iterator[Callable[[Config, Any], RaySampler]]:
    """Connect to the cluster and start the other trainers; yields the function that builds the sampler.

    Inside, this process is rank 0 of `cluster.trainers`.
    """
    settings = config.cluster
    address = settings.address
    if address is None:
        raise ValueError("no cluster is named")
    if launch.world_size() > 1:
        raise ArpoError("cluster.address: leave out torchrun, and give cluster.trainers instead")
    check_settings(config, on_cluster=True)
    with ray_crew(address, reporter) as backend, ExitStack() as stack:
        environment = start_trainers(backend, settings.trainers, config.model.device)
        before = {name: os.environ.get(name) for name in environment}
        os.environ.update(environment)

        def build_sampler(latest: Config, model: Any) -> RaySampler:
            sampler = RaySampler(backend, latest, model, address, reporter)
            stack.callback(sampler.close)
            return sampler

        try:
            yield build_sampler
        finally:
            for name, value in before.items():
                os.environ.pop(name)
                os.environ.update({} if value is None else {name: value})
