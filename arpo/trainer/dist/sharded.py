"""Training in shards (FSDP2): every rank holds a part of the weights, gradients and optimizer's state, and does its
share of the trees.

Rank 0 also has the whole model, in the number format that it computes in: the engine samples from it, and it is what
checkpoints hold. It gets the new weights after every step. What the ranks train is another copy, its trainable weights
in float32 and gathered layer by layer in the model's own format; gradients are summed over ranks in float32.

Promises: every rank makes the whole batch and takes its trees from it (`arpo.trainer.dist.balance`), so that all weights and
means are those of the batch; gradients are sums, never means over ranks. All ranks do the same passes in the same
order. A checkpoint goes on with any number of ranks, and one process reads those of several and the other way round.
Does not cover: models that do not fit rank 0's device whole; sampling on the other ranks.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

from arpo.algorithm.batch import split_microbatches
from arpo.config.schema import Config
from arpo.trainer.dist.balance import balance, costs, matched, per_seen, take
from arpo.models.lora import has_adapter
from arpo.models.network import SHARDED_DECODER
from arpo.trainer.optimizer import Optimizer
from arpo.trainer.dist.process_group import ProcessGroup
from arpo.trainer.dist.shards import SHARDS, read_into, shard_sizes, write_shards
from arpo.trainer.trainer import OPTIMIZER, Trainer, Work
from arpo.runs.trees import pack_trees, unpack_tree
from arpo.types import ScoredTree, TreeBatch


class ShardedTrainer(Trainer):
    """A trainer among others: on rank 0 it leads, and the others follow (`arpo.trainer.dist.worker`)."""

    def __init__(self, model: Any, tokenizer: Any, config: Config, reference: Any, ranks: ProcessGroup) -> None:
        self._ranks = ranks
        self._rounded = model.dtype != torch.float32
        self._per_seen = _per_seen(model)
        device: torch.device = model.device
        mesh = init_device_mesh(device.type, (ranks.count,))
        if config.loss.kl_coef and reference is None and not has_adapter(model):
            raise ValueError("a KL term needs the model before training")
        policy = shard(copy.deepcopy(model) if ranks.leads else model, mesh)
        self.model, self.tokenizer, self._config = model, tokenizer, config
        self._policy = policy
        self._reference = None if reference is None else shard(reference.requires_grad_(False), mesh)
        self.optimizer = Optimizer(policy, config.train.lr, config.train.weight_decay)

    def update(self, trees: Sequence[ScoredTree]) -> dict[str, float]:
        """Train on one batch of trees, together with the other ranks; returns the step's metrics."""
        with self._ranks.collective("learn", trees_to_bytes(trees) if self._ranks.leads else b""):
            metrics = super().update(trees)
            self._publish()
        return metrics

    def save_optimizer(self, directory: Path) -> None:
        """Write the optimizer's state into a checkpoint, each rank its shards."""
        with self._ranks.collective("save", str(directory).encode()):
            masters = {f"master/{name}": p.detach() for name, p in self.optimizer.parameters.items() if self._rounded}
            write_shards({**self.optimizer.state(), **masters}, directory, self._ranks.group)

    @torch.no_grad()
    def load_optimizer(self, directory: Path) -> None:
        """Take it over from there, each rank its shards; raises ValueError if it misfits."""
        with self._ranks.collective("load", str(directory).encode()):
            folder = directory if (directory / OPTIMIZER).is_file() else directory / SHARDS
            sizes, parameters = shard_sizes(folder), self.optimizer.parameters
            wanted = {key: _place_for(key, parameters, size) for key, size in sizes.items()}
            read_into(wanted, folder, self._ranks.group)
            masters = {f"master/{name}": p for name, p in parameters.items() if self._rounded}
            for key, parameter in masters.items():
                if key not in wanted:
                    raise ValueError(f"only one of model and optimizer state has {key!r}")
                parameter.copy_(wanted.pop(key))
            self.optimizer.load(wanted)

    def _work(self, batch: TreeBatch) -> Work:
        shares = balance(costs(batch, self._per_seen), self._ranks.count)
        batches = [take(batch, share) for share in shares]
        parts = matched([split_microbatches(own, self._config.train.max_microbatch_tokens) for own in batches])
        return batches[self._ranks.rank], parts[self._ranks.rank]

    def _step(self) -> float:
        self._policy.reshard()
        return super()._step()

    def _summed(self, sums: dict[str, float]) -> dict[str, float]:
        return self._ranks.summed(sums)

    @torch.no_grad()
    def _publish(self) -> None:
        """Give rank 0's whole model the new weights, in place."""
        whole = dict(self.model.named_parameters()) if self._ranks.leads else {}
        for name, parameter in self.optimizer.parameters.items():
            gathered = parameter.full_tensor()  # type: ignore[attr-defined]
            if self._ranks.leads:
                whole[name].copy_(gathered)


def shard(model: Any, mesh: DeviceMesh) -> Any:
    """The model in shards, in place: layer by layer, and what lies around the layers as one.

    What is trained becomes float32, each layer just before it is divided: never more than that of it is whole.
    """
    kind: torch.dtype = model.dtype
    policy = MixedPrecisionPolicy(
        param_dtype=None if kind == torch.float32 else kind, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    decoder = model.get_decoder()
    for layer in decoder.layers:
        _to_float32(layer)
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    # Around the layers are the embeddings and the output layer, which may be one. They stay gathered until the
    # optimizer's step: the head is called again and again, in forward and backward passes.
    _to_float32(model)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    model.set_reshard_after_backward(False, recurse=False)
    for module in model.modules():
        if hasattr(module, "set_gradient_divide_factor"):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    setattr(model, SHARDED_DECODER, MethodType(lambda _, **given: decoder(**given), model))
    register_fsdp_forward_method(model, SHARDED_DECODER)
    return model


def _to_float32(module: Any) -> None:
    for parameter in module.parameters():
        if parameter.requires_grad and parameter.dtype != torch.float32:
            parameter.data = parameter.data.float()


def trees_to_bytes(trees: Sequence[ScoredTree]) -> bytes:
    """Scored trees as packed JSON."""
    content, entries = pack_trees(trees)
    lengths = json.dumps([entry.length for entry in entries]).encode("ascii")
    return lengths + b"\n" + content


def trees_from_bytes(data: bytes) -> list[ScoredTree]:
    """The inverse of `trees_to_bytes`."""
    head, _, content = data.partition(b"\n")
    edges = accumulate(json.loads(head), initial=0)
    return [unpack_tree(content[start:end]) for start, end in pairwise(edges)]


def _place_for(key: str, parameters: Any, size: torch.Size) -> Tensor:
    """Where a tensor of a checkpoint is read to: this rank's shard, where it is one of a parameter."""
    kind, _, name = key.partition("/")
    if name not in parameters:
        raise ValueError(f"only one of model and optimizer state has {key!r}")
    expected = torch.Size() if kind == "step" else parameters[name].shape
    if size != expected:
        raise ValueError(f"{key!r} is {tuple(size)}, not {tuple(expected)}")
    return torch.zeros(()) if kind == "step" else torch.zeros_like(parameters[name])


def _per_seen(model: Any) -> float:
    config, decoder = model.config, model.get_decoder()
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    weights = sum(parameter.numel() for parameter in decoder.layers.parameters())
    return per_seen(weights, config.num_hidden_layers, config.num_attention_heads * width)
