"""Runs one step of the model: a batch of tokens in, one new token for every sampling row out.

`Runner` runs steps on a CPU, `arpo.engine.local.cuda.CudaRunner` on a GPU.

Shape suffixes: T tokens, E hidden size, A sampling rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from arpo.engine.local.attention import BlockPlan
from arpo.engine.local.kv_cache import KVCache
from arpo.engine.local.sampling import sample
from arpo.engine.local.scheduler import Batch
from arpo.errors import ArpoError
from arpo.models.network import Network, install_attention


class StepOutput(NamedTuple):
    """One entry per sampling row; `cut_` lists only if the batch uses top-p or top-k."""

    tokens: list[int]
    logprobs: list[float]
    entropies: list[float]
    cut_logprobs: list[float] | None = None
    cut_entropies: list[float] | None = None


NO_OUTPUT = StepOutput([], [], [])


def build_runner(model: Any, cache: KVCache, max_num_seqs: int) -> Runner:
    """Return the runner for the model's device."""
    if cache.data.is_cuda:
        try:
            from arpo.engine.local.cuda import CudaRunner
        except ModuleNotFoundError as error:
            raise ArpoError("the engine on a GPU needs Triton: pip install triton") from error

        return CudaRunner(model, cache, max_num_seqs)
    return Runner(model, cache)


class Runner:
    """Runs steps on a CPU."""

    def __init__(self, model: Any, cache: KVCache) -> None:
        install_attention(model)
        self._model, self._network, self._cache = model, Network(model), cache

    @torch.inference_mode()
    def run(self, batch: Batch) -> StepOutput:
        """Compute the batch and sample."""
        if batch.block_copies:
            self._cache.copy_blocks(batch.block_copies)
        plan = BlockPlan(self._cache.data, batch.block_table, batch.starts, batch.counts)
        hidden_TE = self._network.hidden(torch.from_numpy(batch.tokens), plan.position_T, plan)
        if not len(batch.sampling_rows):
            return NO_OUTPUT
        last_A = torch.from_numpy(batch.counts.cumsum()[batch.sampling_rows] - 1)
        temperature_A, uniform_A, top_p_A, top_k_A = torch.from_numpy(batch.sampling_params)
        cuts = (top_p_A, top_k_A) if batch.has_cuts else ()
        sampled = sample(self._network.logits(hidden_TE[last_A]), temperature_A, uniform_A, *cuts)
        return StepOutput(*(column.tolist() for column in sampled if column is not None))

    def sync_weights(self) -> None:
        """Adapt to the model's new weights."""

    def graph_stats(self) -> tuple[int, float]:
        """Return the CUDA graphs captured since the last call, and the seconds it took."""
        return 0, 0.0
