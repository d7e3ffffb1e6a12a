"""The policy loss on a tree, each shared token once. Pure functions of tensors.

For one path i, with weight w and advantage A (which may differ from token to token under hard attribution):

    ppo     term = min(r A, clip(r, 1 - low, 1 + high) A);   where A < 0 also term = max(term, c A), the dual clip
            with clip_keeps_gradient r in place of 1 + high above it, its gradient scaled to the size of 1 + high
    gspo    the same, with the path's ratio s = exp(mean of log r over its model tokens) in place of r
    cispo   term = clip(r, 1 - low, 1 + high) A logprob, the clipped ratio without gradient
    loss  = - sum over paths and their model tokens of w (f term + entropy H - kl k3)

where r = exp(logprob - old logprob), f = the token's boost (see the batch), with a cap times
min(exp(old - engine's log-prob), cap) without gradient, and k3 = exp(d) - d - 1 with d = reference - logprob.

On a shared token all paths have the same r, so the sum over paths of their terms is that of two numbers, P the sum of
the positive and Q that of the negative w A:  P min(r, 1 + high) + Q min(max(r, 1 - low), c).  This is exact also where
clipping bites; one minimum with the summed advantage would not be.

Promises: losses and metrics of disjoint targets add up to those of all (under gspo, if no path is torn apart). All
log-ratios are cut at +-20 so that no gradient overflows.

Letters: K targets, M model nodes, X pairs of a model node and a path, I paths.
"""

from __future__ import annotations

from torch import Tensor

from arpo.config.schema import Loss
from arpo.types import TreeBatch

_LARGEST_LOG_RATIO = 20.0
ADDITIVE = ("ppo", "cispo")  # losses that are sums over tokens


def policy_loss(
    logprobs_K: Tensor,
    entropies_K: Tensor,
    old_K: Tensor,
    reference_K: Tensor | None,
    batch: TreeBatch,
    rows_K: Tensor,
    settings: Loss,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of the targets `rows_K`, whose numbers are given, and metrics as sums: divide them by "tokens"."""
    node_K = batch.node_K[rows_K]
    log_ratio_K = _cut(logprobs_K - old_K)
    ratio_K = log_ratio_K.exp()
    engine_K = batch.engine_logprobs_K[rows_K]
    factor_K = batch.entropy_weight_K[rows_K].to(old_K.dtype)
    if settings.importance_cap is not None:
        factor_K = factor_K * _cut(old_K - engine_K).exp().clamp(max=settings.importance_cap)
    gain_X = batch.pair_weight_X * batch.pair_advantage_X
    up_K, down_K, weight_K = (
        _per_node(batch, value_X)[node_K].to(logprobs_K.dtype)
        for value_X in (gain_X.clamp(min=0), gain_X.clamp(max=0), batch.pair_weight_X)
    )
    if settings.kind == "ppo":
        term_K, clipped_K = _clipped(ratio_K, up_K, down_K, settings)
        objective = (factor_K * term_K).sum()
    elif settings.kind == "cispo":
        fixed_K = ratio_K.detach().clamp(1 - settings.clip_low, 1 + settings.clip_high)
        clipped_K = (fixed_K != ratio_K.detach()) & (up_K - down_K != 0)
        objective = (factor_K * fixed_K * (up_K + down_K) * logprobs_K).sum()
    else:
        ratio_X = _path_ratios(logprobs_K - old_K, batch, node_K)[batch.pair_path_X]
        gain_X = gain_X.to(logprobs_K.dtype)
        term_X, clipped_X = _clipped(ratio_X, gain_X.clamp(min=0), gain_X.clamp(max=0), settings)
        factor_M = factor_K.new_zeros(batch.nodes).index_add(0, node_K, factor_K)
        objective = (factor_M[batch.pair_node_X] * term_X).sum()
        clipped_K = _per_node(batch, clipped_X.float())[node_K] > 0
    metrics = {
        "tokens": logprobs_K.new_tensor(len(logprobs_K)),
        "clip_fraction": clipped_K.sum(),
        "ratio": ratio_K.sum(),
        "kl_k1": -log_ratio_K.sum(),
        "kl_k3": (ratio_K - 1 - log_ratio_K).sum(),
        "train_entropy": entropies_K.sum(),
        "engine_mismatch": (old_K - engine_K).abs().sum(),
    }
    if settings.entropy_coef:
        objective = objective + settings.entropy_coef * (weight_K * entropies_K).sum()
    if reference_K is not None:
        apart_K = _cut(reference_K - logprobs_K)
        far_K = apart_K.exp() - apart_K - 1
        objective = objective - settings.kl_coef * (weight_K * far_K).sum()
        metrics["reference_kl"] = far_K.sum()
    metrics["loss"] = -objective
    return -objective, {name: value.detach() for name, value in metrics.items()}


def _cut(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-_LARGEST_LOG_RATIO, _LARGEST_LOG_RATIO)


def _clipped(ratio: Tensor, up: Tensor, down: Tensor, settings: Loss) -> tuple[Tensor, Tensor]:
    """P min(r, 1 + high) + Q min(max(r, 1 - low), c), and where something was clipped."""
    good = ratio.clamp(max=1 + settings.clip_high)
    if settings.clip_keeps_gradient:
        good = good.detach() * (ratio / ratio.detach())
    bad = ratio.clamp(1 - settings.clip_low, settings.dual_clip)
    over, under = ratio > 1 + settings.clip_high, bad != ratio
    return up * good + down * bad, ((up != 0) & over) | ((down != 0) & under)


def _per_node(batch: TreeBatch, value_X: Tensor) -> Tensor:
    """Pairs summed over the paths through each model node."""
    return value_X.new_zeros(batch.nodes).index_add(0, batch.pair_node_X, value_X)


def _path_ratios(log_ratio_K: Tensor, batch: TreeBatch, node_K: Tensor) -> Tensor:
    """exp(mean log-ratio) over the model tokens of each path [I]."""
    sum_M = log_ratio_K.new_zeros(batch.nodes).index_add(0, node_K, log_ratio_K)
    sum_I = log_ratio_K.new_zeros(len(batch.path_tokens_I)).index_add(0, batch.pair_path_X, sum_M[batch.pair_node_X])
    return _cut(sum_I / batch.path_tokens_I).exp()
