"""Connecting a run to the Ray cluster that the section `cluster` names."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from arpo.cluster.ray_backend import connect_ray
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
    address = config.cluster.address
    if address is None:
        raise ValueError("cluster.address is not set")
    if launch.world_size() > 1:
        raise ArpoError("cluster.address: leave out torchrun, and give cluster.trainers instead")
    check_settings(config, on_cluster=True)
    with connect_ray(address, reporter) as backend, ExitStack() as stack:
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
