"""Forward and backward passes over a forest: log-probs of its targets, and the gradient of the policy loss.

Every unique token goes through the model once. A forest larger than the budget is computed part by part (`arpo.algorithm.batch`):
the keys and values of a part stay while what hangs below it is computed; the gradients that those get flow into the
part's own backward pass, at its end. So the gradient is that of the whole, and no token is computed twice.

Ranks that share a sharded model must all do the same passes in the same order (`arpo.trainer.dist.balance.matched`). Then
none is left out: an empty part is a pass over one token that counts nothing, and every pass goes through all weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from arpo.algorithm.batch import Part, cut
from arpo.algorithm.loss import ADDITIVE, policy_loss
from arpo.config.schema import Loss
from arpo.models.network import Network, check_supported, install_attention
from arpo.trainer.attention import KV, TreePlan
from arpo.trainer.logprobs import token_logprobs
from arpo.types import TreeBatch

LOGITS_CHUNK = 2048  # tokens whose logits exist at the same time
Visit = Callable[[Tensor, Tensor, Tensor], Tensor | None]  # (which targets, log-probs, entropies) -> loss to descend on


@torch.no_grad()
def evaluate(
    model: Any, batch: TreeBatch, temperature: float, budget: int, matched: Sequence[Part] | None = None
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies [K] of the batch's targets, on the model's device; `matched` as in `accumulate`."""
    kind = torch.promote_types(model.dtype, torch.float32)
    logprobs_K = torch.zeros(len(batch.targets_K), device=model.device, dtype=kind)
    entropies_K = torch.zeros_like(logprobs_K)

    def note(rows_k: Tensor, logprobs_k: Tensor, entropies_k: Tensor) -> None:
        logprobs_K[rows_k], entropies_K[rows_k] = logprobs_k, entropies_k

    parts = cut(batch, budget) if matched is None else matched
    _Passes(model, batch.to(model.device), temperature, note, matched is not None).run(parts)
    return logprobs_K, entropies_K


def accumulate(
    model: Any,
    batch: TreeBatch,
    loss: Loss,
    temperature: float,
    budget: int,
    old_K: Tensor | None = None,
    reference_K: Tensor | None = None,
    matched: Sequence[Part] | None = None,
) -> dict[str, float]:
    """Add the loss's gradient to that of the model's weights; returns metrics as sums: divide them by "tokens".

    Without `old_K` the weights are still those that sampled: the old log-probs are the new ones, and all ratios 1.
    `matched`: the batch's parts where other ranks do the same passes.
    """
    parts, here = cut(batch, budget) if matched is None else matched, batch.to(model.device)
    old_K, reference_K = (x if x is None else x.to(model.device) for x in (old_K, reference_K))
    sums: dict[str, Tensor] = {}

    def learn(rows_k: Tensor, logprobs_k: Tensor, entropies_k: Tensor) -> Tensor:
        old_k = logprobs_k.detach() if old_K is None else old_K[rows_k]
        reference_k = None if reference_K is None else reference_K[rows_k]
        value, told = policy_loss(logprobs_k, entropies_k, old_k, reference_k, here, rows_k, loss)
        for name, number in told.items():
            sums[name] = sums.get(name, torch.zeros_like(number)) + number
        return value

    if matched is not None:  # a rank without a target has the same metrics
        none_k, zero_k = (torch.zeros(0, device=model.device, dtype=kind) for kind in (torch.long, torch.float32))
        learn(none_k, zero_k, zero_k)
    visit: Visit = learn
    if loss.kind not in ADDITIVE and any(part.children for part in parts):  # some path is cut
        visit = _linear(learn, *evaluate(model, batch, temperature, budget, matched))
    if len(batch.targets_K) or matched is not None:
        _Passes(model, here, temperature, visit, matched is not None).run(parts)
    return {name: float(number) for name, number in sums.items()}


def _linear(learn: Visit, logprobs_K: Tensor, entropies_K: Tensor) -> Visit:
    """The same gradient target by target, for a loss that is no sum over targets: its slopes at the present numbers."""
    logprobs_K.requires_grad_()
    entropies_K.requires_grad_()
    with torch.enable_grad():
        value = learn(torch.arange(len(logprobs_K), device=logprobs_K.device), logprobs_K, entropies_K)
        assert value is not None
        slope_K, entropy_slope_K = torch.autograd.grad(
            value, (logprobs_K, entropies_K), allow_unused=True, materialize_grads=True
        )

    def visit(rows_k: Tensor, logprobs_k: Tensor, entropies_k: Tensor) -> Tensor:
        return (slope_K[rows_k] * logprobs_k + entropy_slope_K[rows_k] * entropies_k).sum()

    return visit


class _Passes:
    """One forward pass per part, one backward pass where `visit` returns a loss."""

    def __init__(self, model: Any, batch: TreeBatch, temperature: float, visit: Visit, matched: bool) -> None:
        check_supported(model.config)
        install_attention(model)
        self._model, self._network, self._batch = model, Network(model), batch
        self._temperature, self._visit, self._matched = temperature, visit, matched
        self._parent_N, self._depth_N = batch.parent_N.cpu().numpy(), batch.depth_N.cpu().numpy()
        predicted_at_K = self._parent_N[batch.targets_K.cpu().numpy()]
        self._by_place = np.argsort(predicted_at_K, kind="stable")
        self._places = predicted_at_K[self._by_place]

    def run(self, parts: Sequence[Part]) -> None:
        """Compute these parts and all below them."""
        for part in parts:
            self._run(part, [])

    def _run(self, part: Part, context: list[KV]) -> None:
        rows_k, at_k = self._targets(part)
        if not len(rows_k) and not part.children and not self._matched:
            return
        if not len(part.tokens):
            self._run_empty(part)
            return
        parent_T = np.searchsorted(part.tokens, self._parent_N[part.tokens])
        inside_T = part.tokens[np.minimum(parent_T, len(part.tokens) - 1)] == self._parent_N[part.tokens]
        depth_T = self._depth_N[part.tokens]
        plan = TreePlan(np.where(inside_T, parent_T, -1), depth_T, context, keep=bool(part.children))
        device = self._model.device
        tokens = torch.from_numpy(part.tokens).to(device)
        hidden_TE = self._network.hidden(self._batch.tokens_N[tokens], self._batch.depth_N[tokens], plan)
        loss = self._look(hidden_TE, torch.from_numpy(rows_k).to(device), torch.from_numpy(at_k).to(device))
        if loss is None and self._matched:
            loss = self._nothing(hidden_TE)
        own = plan.take()
        leaves = [(k.detach(), v.detach()) for k, v in own]
        if torch.is_grad_enabled():
            for leaf in (x for pair in leaves for x in pair):
                leaf.requires_grad_()
        for child in part.children:
            self._run(child, _extended(context, leaves, child.above) if len(child.tokens) else [])
        if torch.is_grad_enabled():
            flowing = [
                (x, leaf.grad)
                for pair, leaf_pair in zip(own, leaves, strict=True)
                for x, leaf in zip(pair, leaf_pair, strict=True)
                if x.requires_grad and leaf.grad is not None
            ]
            roots = [(loss, None)] if loss is not None else []
            both = [*roots, *flowing]
            torch.autograd.backward([x for x, _ in both], [grad for _, grad in both])

    def _run_empty(self, part: Part) -> None:
        """The same passes as other ranks, over one token that counts nothing."""
        zero = torch.zeros(1, dtype=torch.long, device=self._model.device)
        loss = self._nothing(self._network.hidden(zero, zero, TreePlan(np.array([-1]), np.array([0]))))
        for child in part.children:
            self._run(child, [])
        if loss is not None:
            loss.backward()  # type: ignore[no-untyped-call]

    def _nothing(self, hidden_TE: Tensor) -> Tensor | None:
        """A loss of 0 that gives all weights a gradient of 0."""
        return 0.0 * self._network.logits(hidden_TE[:1]).float().sum() if torch.is_grad_enabled() else None

    def _targets(self, part: Part) -> tuple[np.ndarray, np.ndarray]:
        """The targets that are predicted in this part: which they are, and where in the part they are predicted."""
        first = np.searchsorted(self._places, part.tokens, side="left")
        last = np.searchsorted(self._places, part.tokens, side="right")
        count = last - first
        at_k = np.repeat(np.arange(len(part.tokens)), count)
        place_k = np.repeat(first, count) + np.arange(len(at_k)) - np.repeat(np.cumsum(count) - count, count)
        return self._by_place[place_k], at_k

    def _look(self, hidden_TE: Tensor, rows_k: Tensor, at_k: Tensor) -> Tensor | None:
        """Log-probs and entropies of targets, logits a chunk at a time, made again in the backward pass."""
        if not len(rows_k):
            return None
        tokens_k = self._batch.tokens_N[self._batch.targets_K[rows_k]]
        parts = [
            checkpoint(self._head, hidden_cE, tokens_c, use_reentrant=False)
            for hidden_cE, tokens_c in zip(
                torch.split(hidden_TE[at_k], LOGITS_CHUNK), torch.split(tokens_k, LOGITS_CHUNK), strict=True
            )
        ]
        logprobs_k, entropies_k = (torch.cat(values) for values in zip(*parts, strict=True))
        return self._visit(rows_k, logprobs_k, entropies_k)

    def _head(self, hidden_cE: Tensor, tokens_c: Tensor) -> tuple[Tensor, Tensor]:
        return token_logprobs(self._network.logits(hidden_cE), tokens_c, self._temperature)


def _extended(context: list[KV], leaves: list[KV], above: int) -> list[KV]:
    """The context of what hangs below the first `above` tokens of a part: what the part sees, and these."""
    below = [(k[:above], v[:above]) for k, v in leaves]
    if not context:
        return below
    return [(torch.cat([k_C, k]), torch.cat([v_C, v])) for (k_C, v_C), (k, v) in zip(context, below, strict=True)]
