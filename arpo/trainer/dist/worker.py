"""What every rank but the first does: load the model that rank 0 names, then train as it says, until it ends.

Promises: it writes nothing but its shards of checkpoints. Ctrl-C and a polite kill are for rank 0, which saves and then
ends all; a rank 0 that is gone ends this too.
"""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

from arpo.config.loading import config_from_resolved
from arpo.config.schema import Config, Model
from arpo.trainer.checkpoint import load_checkpoint
from arpo.models.load import load_trainable
from arpo.trainer.dist.process_group import ProcessGroup
from arpo.trainer.dist.sharded import ShardedTrainer, trees_from_bytes
from arpo.errors import Diverged


def worker_loop(ranks: ProcessGroup) -> None:
    """Do what rank 0 says, until it has nothing more to do."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    trainer: ShardedTrainer | None = None
    while True:
        kind, payload = ranks.receive()
        if kind == "end":
            return
        if kind == "open":
            trainer = _open(json.loads(payload), ranks)
        elif trainer is None:
            raise ValueError(f"rank 0 says {kind!r} before it opened a model")
        elif kind == "learn":
            try:
                trainer.update(trees_from_bytes(payload))
            except Diverged:
                continue  # rank 0 saw the same and decides
        elif kind == "save":
            trainer.save_optimizer(Path(payload.decode()))
        elif kind == "load":
            load_checkpoint(trainer, Path(payload.decode()))


def order(config: Config, model: Model, reference: Model | None) -> bytes:
    """What `follow` needs to open the trainer that rank 0 opens: settings, model, and what a KL term compares with."""
    models = {"model": model.model_dump(mode="json"), "reference": reference and reference.model_dump(mode="json")}
    return json.dumps({"config": config.resolved(), **models}).encode()


def _open(given: dict[str, Any], ranks: ProcessGroup) -> ShardedTrainer:
    config = config_from_resolved(given["config"])
    model, tokenizer = load_trainable(Model(**given["model"]), config.train, config.seed)
    reference = given["reference"] and load_trainable(Model(**given["reference"]), config.train, config.seed)[0]
    with ranks.collective("open"):
        return ShardedTrainer(model, tokenizer, config, reference, ranks)
