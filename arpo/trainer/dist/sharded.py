"""Sharded training (FSDP2): every rank holds a part of the weights, gradients and optimizer state.

Every rank that samples also has the whole model in its own dtype (`ranks_sample`): its engine samples from it, and
checkpoints hold that of rank 0. It receives the new weights after every step. The ranks train another copy, with
trainable weights in float32 that are gathered layer by layer in the model's dtype; gradients are summed over ranks in
float32.

Guarantees: every rank builds the whole batch and takes its trees from it (`arpo.trainer.dist.balance`), so all weights
and means are those of the batch; gradients are sums, never means over ranks. All ranks do the same passes in the same
order. A checkpoint can be resumed by any number of ranks, and by a single process.
Not covered: models that do not fit one device.
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
from arpo.data.images import refuse_images
from arpo.errors import ArpoError
from arpo.models.network import SHARDED_DECODER
from arpo.runs.trees import images_of, pack_trees, unpack_tree
from arpo.trainer.dist.balance import attention_cost, balance, match_microbatches, select_trees, tree_costs
from arpo.trainer.dist.process_group import ProcessGroup
from arpo.trainer.dist.shards import SHARDS, read_into, shard_sizes, write_shards
from arpo.trainer.trainer import OPTIMIZER, Share, Trainer
from arpo.types import ScoredTree, TreeBatch


def ranks_sample(config: Config) -> bool:
    """Whether every rank samples: with the local engine, and not where a cluster does.

    vLLM on rank 0 or on servers of its own serves the whole run.
    """
    return config.rollout.engine == "local" and config.cluster.address is None


class ShardedTrainer(Trainer):
    """A trainer in a process group: rank 0 leads, the others run `arpo.training.ranks.worker_loop`."""

    def __init__(self, model: Any, tokenizer: Any, config: Config, reference: Any, group: ProcessGroup) -> None:
        self._group, self._keeps_whole = group, group.is_leader or ranks_sample(config)
        self._has_masters = model.dtype != torch.float32
        self._attention_cost = _attention_cost(model)
        super().__init__(model, tokenizer, config, reference)

    def _prepare(self, model: Any, reference: Any) -> tuple[Any, Any]:
        mesh = init_device_mesh(model.device.type, (self._group.world_size,))
        policy = shard(copy.deepcopy(model) if self._keeps_whole else model, mesh)
        return policy, None if reference is None else shard(reference.requires_grad_(False), mesh)

    def update(self, trees: Sequence[ScoredTree]) -> dict[str, float]:
        """Train on one batch of trees with all ranks; returns the step's metrics."""
        for scored in trees:
            refuse_images(images_of(scored.tree), "a tree", "several ranks cannot train on them")
        with self._group.collective("update", trees_to_bytes(trees) if self._group.is_leader else b""):
            metrics = super().update(trees)
            self._publish()
        return metrics

    def save_optimizer(self, directory: Path) -> None:
        """Write the optimizer's state into a checkpoint, each rank its shards."""
        with self._group.collective("save", str(directory).encode()):
            masters = {
                f"master/{name}": p.detach() for name, p in self.optimizer.parameters.items() if self._has_masters
            }
            write_shards({**self.optimizer.state(), **masters}, directory, self._group.handle)

    @torch.no_grad()
    def load_optimizer(self, directory: Path) -> None:
        """Read the optimizer's state from a checkpoint, each rank its shards; ValueError if it does not fit."""
        with self._group.collective("load", str(directory).encode()):
            folder = directory if (directory / OPTIMIZER).is_file() else directory / SHARDS
            sizes, parameters = shard_sizes(folder), self.optimizer.parameters
            wanted = {key: _empty_for(key, parameters, size) for key, size in sizes.items()}
            read_into(wanted, folder, self._group.handle)
            masters = {f"master/{name}": p for name, p in parameters.items() if self._has_masters}
            for key, parameter in masters.items():
                if key not in wanted:
                    raise ValueError(f"only one of model and optimizer state has {key!r}")
                parameter.copy_(wanted.pop(key))
            self.optimizer.load(wanted)

    def _share(self, batch: TreeBatch) -> Share:
        trees = balance(tree_costs(batch, self._attention_cost), self._group.world_size)
        batches = [select_trees(batch, own) for own in trees]
        matched = match_microbatches([split_microbatches(own, self._budget) for own in batches])
        return batches[self._group.rank], matched[self._group.rank]

    def _shrink(self, tokens: int, problem: str) -> None:
        """End the run: the other ranks are in the middle of the same passes."""
        raise ArpoError(
            f"rank {self._group.rank}: memory ran out in a pass over {tokens:,} tokens ({problem}); use a smaller "
            f"train.max_microbatch_tokens, {max(1, tokens // 2)} for example, and --resume"
        )

    def _step(self) -> float:
        self._policy.reshard()
        return super()._step()

    def _reduce(self, sums: dict[str, float]) -> dict[str, float]:
        return self._group.all_sum(sums)

    @torch.no_grad()
    def _publish(self) -> None:
        """Copy the new weights into the whole models, in place."""
        whole = dict(self.model.named_parameters()) if self._keeps_whole else {}
        for name, parameter in self.optimizer.parameters.items():
            gathered = parameter.full_tensor()  # type: ignore[attr-defined]
            if self._keeps_whole:
                whole[name].copy_(gathered)


def shard(model: Any, mesh: DeviceMesh) -> Any:
    """Shard the model in place: layer by layer, and everything around the layers as one unit.

    Trained weights become float32, each layer just before it is sharded, so no more than one layer is whole in float32.
    """
    dtype: torch.dtype = model.dtype
    policy = MixedPrecisionPolicy(
        param_dtype=None if dtype == torch.float32 else dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    decoder = model.get_decoder()
    for layer in decoder.layers:
        _to_float32(layer)
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    # The embeddings and the output layer (which may be tied) stay gathered until the optimizer's step: the output layer
    # is called many times in forward and backward passes.
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


def _empty_for(key: str, parameters: Any, size: torch.Size) -> Tensor:
    """An empty tensor to read a checkpoint's tensor into: this rank's shard if it belongs to a parameter."""
    kind, _, name = key.partition("/")
    if name not in parameters:
        raise ValueError(f"only one of model and optimizer state has {key!r}")
    expected = torch.Size() if kind == "step" else parameters[name].shape
    if size != expected:
        raise ValueError(f"{key!r} is {tuple(size)}, not {tuple(expected)}")
    return torch.zeros(()) if kind == "step" else torch.zeros_like(parameters[name])


def _attention_cost(model: Any) -> float:
    config, decoder = model.config, model.get_decoder()
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    weights = sum(parameter.numel() for parameter in decoder.layers.parameters())
    return attention_cost(weights, config.num_hidden_layers, config.num_attention_heads * width)
