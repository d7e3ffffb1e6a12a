"""Forward and backward passes over a forest: log-probs of its targets, and the gradient of the policy loss.

Every unique token goes through the model once. A forest larger than the token budget is computed in micro-batches
(`arpo.algorithm.batch`). The keys and values of a micro-batch stay in memory while its children are computed; the
gradients that they receive there flow into the micro-batch's own backward pass, which comes last. So the gradient is
that of the whole forest, and no token is computed twice.

Ranks that share a sharded model must do the same passes in the same order (`arpo.trainer.dist.balance`). For them the
micro-batches are given (`matched`) and none is skipped: an empty one is a pass over a single token with loss 0.

Shape suffixes: K targets of the batch, k targets of one micro-batch, T its tokens, E hidden width, c a chunk of k.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from arpo.algorithm.batch import MicroBatch, split_microbatches
from arpo.algorithm.loss import ADDITIVE, policy_loss
from arpo.config.algorithm import Loss
from arpo.models.network import Network, check_supported, install_attention
from arpo.trainer.attention import KV, TreePlan
from arpo.trainer.logprobs import token_logprobs
from arpo.types import TreeBatch

LOGITS_CHUNK, LOGITS_BYTES = 2048, 1 << 29  # the most tokens and float32 bytes of logits that exist at the same time
Visit = Callable[[Tensor, Tensor, Tensor], Tensor | None]
"""(target rows, log-probs, entropies) of one micro-batch -> its loss, or None if no gradient is wanted."""


@torch.no_grad()
def compute_logprobs(
    model: Any, batch: TreeBatch, temperature: float, budget: int, matched: Sequence[MicroBatch] | None = None
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies [K] of the batch's targets on the model's device; `matched` as in `forward_backward`."""
    dtype = torch.promote_types(model.dtype, torch.float32)
    logprobs_K = torch.zeros(len(batch.targets_K), device=model.device, dtype=dtype)
    entropies_K = torch.zeros_like(logprobs_K)

    def store(rows_k: Tensor, logprobs_k: Tensor, entropies_k: Tensor) -> None:
        logprobs_K[rows_k], entropies_K[rows_k] = logprobs_k, entropies_k

    micro_batches = split_microbatches(batch, budget) if matched is None else matched
    _Passes(model, batch.to(model.device), temperature, store, matched is not None).run(micro_batches)
    return logprobs_K, entropies_K


def forward_backward(
    model: Any,
    batch: TreeBatch,
    loss: Loss,
    temperature: float,
    budget: int,
    old_K: Tensor | None = None,
    reference_K: Tensor | None = None,
    matched: Sequence[MicroBatch] | None = None,
) -> dict[str, float]:
    """Add the gradient of the loss to the model's gradients; returns metrics as sums (divide them by "tokens").

    Without `old_K` the weights are still those that sampled: old log-probs equal new ones, and all ratios are 1.
    `matched` holds the micro-batches where other ranks do the same passes.
    """
    micro_batches = split_microbatches(batch, budget) if matched is None else matched
    on_device = batch.to(model.device)
    old_K, reference_K = (x if x is None else x.to(model.device) for x in (old_K, reference_K))
    sums: dict[str, Tensor] = {}

    def compute_loss(rows_k: Tensor, logprobs_k: Tensor, entropies_k: Tensor) -> Tensor:
        old_k = logprobs_k.detach() if old_K is None else old_K[rows_k]
        reference_k = None if reference_K is None else reference_K[rows_k]
        value, metrics = policy_loss(logprobs_k, entropies_k, old_k, reference_k, on_device, rows_k, loss)
        for name, number in metrics.items():
            sums[name] = sums.get(name, torch.zeros_like(number)) + number
        return value

    if matched is not None:  # a rank without targets must report the same metrics
        none_k, zero_k = (torch.zeros(0, device=model.device, dtype=dtype) for dtype in (torch.long, torch.float32))
        compute_loss(none_k, zero_k, zero_k)
    visit: Visit = compute_loss
    if loss.kind not in ADDITIVE and any(micro.children for micro in micro_batches):  # some trajectory is split
        visit = _linearized(compute_loss, *compute_logprobs(model, batch, temperature, budget, matched))
    if len(batch.targets_K) or matched is not None:
        _Passes(model, on_device, temperature, visit, matched is not None).run(micro_batches)
    return {name: float(number) for name, number in sums.items()}


def _linearized(compute_loss: Visit, logprobs_K: Tensor, entropies_K: Tensor) -> Visit:
    """A loss that is a sum over targets and has the same gradient: linear, with the slopes at the current values."""
    logprobs_K.requires_grad_()
    entropies_K.requires_grad_()
    with torch.enable_grad():
        value = compute_loss(torch.arange(len(logprobs_K), device=logprobs_K.device), logprobs_K, entropies_K)
        assert value is not None
        slope_K, entropy_slope_K = torch.autograd.grad(
            value, (logprobs_K, entropies_K), allow_unused=True, materialize_grads=True
        )

    def visit(rows_k: Tensor, logprobs_k: Tensor, entropies_k: Tensor) -> Tensor:
        return (slope_K[rows_k] * logprobs_k + entropy_slope_K[rows_k] * entropies_k).sum()

    return visit


class _Passes:
    """One forward pass per micro-batch, and one backward pass where `visit` returns a loss."""

    def __init__(self, model: Any, batch: TreeBatch, temperature: float, visit: Visit, matched: bool) -> None:
        check_supported(model.config)
        install_attention(model)
        self._model, self._network, self._batch = model, Network(model), batch
        self._temperature, self._visit, self._matched = temperature, visit, matched
        self._parent_N, self._depth_N = batch.parent_N.cpu().numpy(), batch.depth_N.cpu().numpy()
        predicted_at_K = self._parent_N[batch.targets_K.cpu().numpy()]
        self._by_place = np.argsort(predicted_at_K, kind="stable")
        self._places = predicted_at_K[self._by_place]

    def run(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Compute these micro-batches and all their children."""
        for micro in micro_batches:
            self._run(micro, [])

    def _run(self, micro: MicroBatch, context: list[KV]) -> None:
        rows_k, at_k = self._targets(micro)
        if not len(rows_k) and not micro.children and not self._matched:
            return
        if not len(micro.tokens):
            self._run_empty(micro)
            return
        parent_T = np.searchsorted(micro.tokens, self._parent_N[micro.tokens])
        inside_T = micro.tokens[np.minimum(parent_T, len(micro.tokens) - 1)] == self._parent_N[micro.tokens]
        depth_T = self._depth_N[micro.tokens]
        plan = TreePlan(np.where(inside_T, parent_T, -1), depth_T, context, keep=bool(micro.children))
        device = self._model.device
        tokens = torch.from_numpy(micro.tokens).to(device)
        hidden_TE = self._network.hidden(self._batch.tokens_N[tokens], self._batch.depth_N[tokens], plan)
        loss = self._visit_targets(hidden_TE, torch.from_numpy(rows_k).to(device), torch.from_numpy(at_k).to(device))
        if loss is None and self._matched:
            loss = self._zero_loss(hidden_TE)
        own = plan.take()
        detached = [(k.detach(), v.detach()) for k, v in own]
        if torch.is_grad_enabled():
            for tensor in (x for pair in detached for x in pair):
                tensor.requires_grad_()
        for child in micro.children:
            self._run(child, _extended(context, detached, child.prefix_length) if len(child.tokens) else [])
        if torch.is_grad_enabled():
            from_children = [
                (x, copy.grad)
                for pair, copies in zip(own, detached, strict=True)
                for x, copy in zip(pair, copies, strict=True)
                if x.requires_grad and copy.grad is not None
            ]
            roots = [*([(loss, None)] if loss is not None else []), *from_children]
            torch.autograd.backward([x for x, _ in roots], [grad for _, grad in roots])

    def _run_empty(self, micro: MicroBatch) -> None:
        """The same passes as other ranks, over one token with loss 0."""
        zero = torch.zeros(1, dtype=torch.long, device=self._model.device)
        loss = self._zero_loss(self._network.hidden(zero, zero, TreePlan(np.array([-1]), np.array([0]))))
        for child in micro.children:
            self._run(child, [])
        if loss is not None:
            loss.backward()  # type: ignore[no-untyped-call]

    def _zero_loss(self, hidden_TE: Tensor) -> Tensor | None:
        """A loss of 0 with a gradient of 0 for all weights."""
        return 0.0 * self._network.logits(hidden_TE[:1]).float().sum() if torch.is_grad_enabled() else None

    def _targets(self, micro: MicroBatch) -> tuple[np.ndarray, np.ndarray]:
        """The targets predicted in this micro-batch: their rows in the batch, and the tokens that predict them."""
        first = np.searchsorted(self._places, micro.tokens, side="left")
        last = np.searchsorted(self._places, micro.tokens, side="right")
        count = last - first
        at_k = np.repeat(np.arange(len(micro.tokens)), count)
        place_k = np.repeat(first, count) + np.arange(len(at_k)) - np.repeat(np.cumsum(count) - count, count)
        return self._by_place[place_k], at_k

    def _visit_targets(self, hidden_TE: Tensor, rows_k: Tensor, at_k: Tensor) -> Tensor | None:
        """The loss of these targets; logits are computed in chunks, and again in the backward pass."""
        if not len(rows_k):
            return None
        tokens_k = self._batch.tokens_N[self._batch.targets_K[rows_k]]
        size = logits_chunk(self._model.config.vocab_size)
        chunks = [
            checkpoint(self._head, hidden_cE, tokens_c, use_reentrant=False)
            for hidden_cE, tokens_c in zip(torch.split(hidden_TE[at_k], size), torch.split(tokens_k, size), strict=True)
        ]
        logprobs_k, entropies_k = (torch.cat(values) for values in zip(*chunks, strict=True))
        return self._visit(rows_k, logprobs_k, entropies_k)

    def _head(self, hidden_cE: Tensor, tokens_c: Tensor) -> tuple[Tensor, Tensor]:
        return token_logprobs(self._network.logits(hidden_cE), tokens_c, self._temperature)


def logits_chunk(vocabulary: int) -> int:
    """The number of tokens whose logits are computed at a time: fewer with a large vocabulary."""
    return max(1, min(LOGITS_CHUNK, LOGITS_BYTES // (4 * vocabulary)))


def _extended(context: list[KV], own: list[KV], prefix_length: int) -> list[KV]:
    """The context of a child: the micro-batch's context and the first `prefix_length` of its own keys and values."""
    prefix = [(k[:prefix_length], v[:prefix_length]) for k, v in own]
    if not context:
        return prefix
    return [(torch.cat([k_C, k]), torch.cat([v_C, v])) for (k_C, v_C), (k, v) in zip(context, prefix, strict=True)]
