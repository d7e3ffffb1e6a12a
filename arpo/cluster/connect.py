"""From the section `cluster` of a run's settings to what grows its trees and trains along."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager

from arpo.cluster.ray_backend import ray_crew, start_trainers
from arpo.cluster.sampler import Pool
from arpo.config.schema import Config
from arpo.errors import ArpoError
from arpo.trainer.dist import launch
from arpo.training.loop import require_cluster_settings


@contextmanager
def on_cluster(config: Config) -> Iterator[Pool]:
    """Connect to the cluster, and start what trains along: inside, this process is rank 0 of `cluster.trainers`."""
    settings = config.cluster
    if settings.address is None:
        raise ValueError("no cluster is named")
    if launch.world_size() > 1:
        raise ArpoError("cluster.address: leave out torchrun, and give cluster.trainers instead")
    with ray_crew(settings.address) as crew, closing(Pool(crew, config, settings.address)) as pool:
        require_cluster_settings(config, pool)
        given = start_trainers(crew, settings.trainers, config.model.device)
        before = {name: os.environ.get(name) for name in given}
        os.environ.update(given)
        try:
            yield pool
        finally:
            for name, value in before.items():
                os.environ.pop(name)
                os.environ.update({} if value is None else {name: value})
