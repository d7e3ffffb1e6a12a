"""One step of the model: a batch of tokens in, one new token with its numbers for every row that asks.

`Runner` is the plain way, on a CPU. `make_runner` picks the way of the model's
device. Which models can be run at all is decided here (`check_supported`), by name.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from arpo.engine.local.attention import BlockPlan, Step, install
from arpo.engine.local.kv_cache import KVPool
from arpo.engine.local.sampling import Drawn, sample
from arpo.engine.local.scheduler import Batch
from arpo.errors import ArpoError

SUPPORTED = ("llama", "qwen2", "qwen3", "gemma3_text")
LAYERS = ("full_attention", "sliding_attention")
ENTRY = "sharded_decoder"  # a sharded model's way into its decoder, if it has one
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
        install(model)
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


class Network:
    """The two halves of a causal LM, over one flat row of tokens."""

    def __init__(self, model: Any) -> None:
        self._decoder, self._head = getattr(model, ENTRY, None) or model.get_decoder(), model.get_output_embeddings()
        self._softcap = getattr(model.config, "final_logit_softcapping", None)
        self._no_mask = torch.empty(
            1, 1, 1, 1, device=model.device
        )  # 4-d masks are passed on as they are: none is made

    def hidden(self, tokens_T: Tensor, position_T: Tensor, step: Step) -> Tensor:
        """Last hidden states [T, E]; keys and values go where the step says."""
        out = self._decoder(
            input_ids=tokens_T.unsqueeze(0),
            position_ids=position_T.unsqueeze(0),
            attention_mask=self._no_mask,
            use_cache=False,
            step=step,
        )
        return out.last_hidden_state[0]  # type: ignore[no-any-return]

    def logits(self, hidden_AE: Tensor) -> Tensor:
        """Logits of these hidden states [A, V]."""
        logits_AV: Tensor = self._head(hidden_AE)
        return logits_AV if self._softcap is None else torch.tanh(logits_AV / self._softcap) * self._softcap


def columns(drawn: Drawn) -> Columns:
    """Off the device, as plain lists."""
    token, logprob, entropy, *cut = (x.tolist() for x in drawn if x is not None)
    cut_logprob, cut_entropy = cut or (None, None)
    return token, logprob, entropy, cut_logprob, cut_entropy


def check_supported(config: Any) -> None:
    """Refuse, by name, a model whose numbers would not be exact here."""
    layers = {*(getattr(config, "layer_types", None) or ["full_attention"])}
    if config.model_type not in SUPPORTED or not layers <= {*LAYERS}:
        raise ArpoError(
            f"the local engine cannot run a {config.model_type!r} model with layers {sorted(layers)}: "
            f"it supports {', '.join(SUPPORTED)} with full or sliding attention"
        )
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = {rope.get("rope_type")} | {part.get("rope_type") for part in rope.values() if isinstance(part, dict)}
    if kinds & {"dynamic", "longrope"}:
        raise ArpoError(
            "the local engine cannot run models whose rotary embedding changes with the length (dynamic RoPE)"
        )
    if getattr(config, "use_bidirectional_attention", False) or getattr(config, "attn_logit_softcapping", None):
        raise ArpoError("the local engine cannot run models with bidirectional attention or capped attention scores")
