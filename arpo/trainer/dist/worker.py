"""The worker loop of every rank but the first: load the model that rank 0 names, then execute its commands.

Guarantees: a worker writes nothing but its shards of checkpoints. SIGINT, SIGTERM and SIGHUP are left to rank 0, which
saves and then ends all; a worker whose rank 0 is gone ends too.
"""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

from arpo.config.loading import config_from_resolved
from arpo.config.schema import Config, Model
from arpo.errors import Diverged
from arpo.models.load import load_trainable
from arpo.trainer.checkpoint import load_checkpoint
from arpo.trainer.dist.process_group import ProcessGroup
from arpo.trainer.dist.sharded import ShardedTrainer, trees_from_bytes


def worker_loop(group: ProcessGroup) -> None:
    """Execute the commands of rank 0 until it ends the run."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    trainer: ShardedTrainer | None = None
    while True:
        command, payload = group.receive()
        if command == "end":
            return
        if command == "open":
            trainer = _open(json.loads(payload), group)
        elif trainer is None:
            raise ValueError(f"command {command!r} before a model was opened")
        elif command == "update":
            try:
                trainer.update(trees_from_bytes(payload))
            except Diverged:
                continue  # rank 0 raised the same and decides
        elif command == "save":
            trainer.save_optimizer(Path(payload.decode()))
        elif command == "load":
            load_checkpoint(trainer, Path(payload.decode()))


def open_message(config: Config, model: Model, reference: Model | None) -> bytes:
    """The payload of "open": the settings, without secrets, the model, and the reference model of the KL term."""
    models = {"model": model.model_dump(mode="json"), "reference": reference and reference.model_dump(mode="json")}
    return json.dumps({"config": config.resolved(), **models}).encode()


def _open(message: dict[str, Any], group: ProcessGroup) -> ShardedTrainer:
    config = config_from_resolved(message["config"])
    model, tokenizer = load_trainable(Model(**message["model"]), config.train, config.seed)
    reference = message["reference"] and load_trainable(Model(**message["reference"]), config.train, config.seed)[0]
    with group.collective("open"):
        return ShardedTrainer(model, tokenizer, config, reference, group)
