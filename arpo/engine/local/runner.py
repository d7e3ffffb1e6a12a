"""One step of the model: a batch of tokens in, one new token with its numbers for every row that asks.

`Runner` is the plain way, on a CPU. `build_runner` picks the way of the model's device.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from arpo.engine.local.attention import BlockPlan
from arpo.engine.local.kv_cache import KVPool
from arpo.engine.local.sampling import Drawn, sample
from arpo.engine.local.scheduler import Batch
from arpo.errors import ArpoError
from arpo.models.network import Network, install_attention

Columns = tuple[list[int], list[float], list[float], list[float] | None, list[float] | None]
"""Tokens, log-probs, entropies, and the last two once more after cuts."""


NOTHING: Columns = [], [], [], None, None


class StepRunner(Protocol):
    """What computes steps."""

    def run(self, batch: Batch) -> Columns:
        """Compute the batch; one entry in each column per asking row."""
        ...

    def weights_changed(self) -> None:
        """The model's weights were updated."""
        ...

    def recorded(self) -> tuple[int, float]:
        """CUDA graphs recorded since the last call, and the seconds it took."""
        ...


def build_runner(model: Any, pool: KVPool, rows: int) -> StepRunner:
    """The way of the model's device."""
    if pool.data.is_cuda:
        try:
            from arpo.engine.local.cuda import CudaRunner
        except ModuleNotFoundError as error:
            raise ArpoError("the engine on a GPU needs Triton: pip install triton") from error

        return CudaRunner(model, pool, rows)
    return Runner(model, pool)


class Runner:
    """Steps on a CPU."""

    def __init__(self, model: Any, pool: KVPool) -> None:
        install_attention(model)
        self._network, self._pool = Network(model), pool

    @torch.inference_mode()
    def run(self, batch: Batch) -> Columns:
        """Compute the batch; one entry in each column per asking row."""
        if batch.copies:
            self._pool.copy(batch.copies)
        plan = BlockPlan(self._pool.data, batch.table, batch.starts, batch.counts)
        hidden_TE = self._network.hidden(torch.from_numpy(batch.tokens), plan.position_T, plan)
        if not len(batch.asking):
            return NOTHING
        ends_A = torch.from_numpy(batch.counts.cumsum()[batch.asking] - 1)
        temperature_A, uniform_A, top_p_A, top_k_A = torch.from_numpy(batch.sampling)
        cuts = (top_p_A, top_k_A) if batch.cuts else ()
        return columns(sample(self._network.logits(hidden_TE[ends_A]), temperature_A, uniform_A, *cuts))

    def weights_changed(self) -> None:
        """Nothing here depends on the weights."""

    def recorded(self) -> tuple[int, float]:
        """Nothing is recorded here."""
        return 0, 0.0


def columns(drawn: Drawn) -> Columns:
    """Off the device, as plain lists."""
    token, logprob, entropy, *cut = (x.tolist() for x in drawn if x is not None)
    cut_logprob, cut_entropy = cut or (None, None)
    return token, logprob, entropy, cut_logprob, cut_entropy
