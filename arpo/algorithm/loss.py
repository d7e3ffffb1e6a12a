"""The policy loss on a tree, computed once per unique token. Pure functions of tensors.

For one trajectory i, with token weight w and advantage A (which differs from node to node under hard attribution):

    ppo     term = min(r A, clip(r, 1 - low, 1 + high) A);   where A < 0 also term = max(term, c A), the dual clip
            with clip_keeps_gradient, above 1 + high the value is 1 + high and the gradient that of (1 + high) log r
    turn    the same, with the ratio of the turn (model node): exp(mean of log r over its tokens) in place of r
    gspo    the same, with the trajectory's ratio s = exp(mean of log r over its model tokens) in place of r
    cispo   term = clip(r, 1 - low, 1 + high) A logprob, with no gradient through the clipped ratio
    loss  = - sum over trajectories and their model tokens of w (f term + entropy_coef H - kl_coef k3)

where r = exp(logprob - old logprob), H is the token's entropy, and k3 = exp(d) - d - 1 with d = reference - logprob.
f is the token's entropy weight (see `arpo.algorithm.batch`), multiplied by the truncated importance weight
min(exp(old - engine logprob), importance_cap) if a cap is set; no gradient goes through f.

All trajectories through a shared token have the same r (not so in gspo). So two sums per token are enough, P over the
positive and Q over the negative w A:  P min(r, 1 + high) + Q min(max(r, 1 - low), c).  This is exact also where
clipping is active; a single minimum with the summed advantage is not.

Guarantees: losses and metrics of disjoint targets add up to those of all of them (gspo, turn: if no trajectory is
split). All log-ratios are clamped to +-20 so that no gradient overflows.

Shape suffixes: K targets, M model nodes, X pairs of a model node and a trajectory, I trajectories.
"""

from __future__ import annotations

from torch import Tensor

from arpo.config.algorithm import Loss
from arpo.types import TreeBatch

_MAX_LOG_RATIO = 20.0
ADDITIVE = ("ppo", "cispo")  # kinds that are sums over tokens, so that trajectories may be split


def policy_loss(
    logprobs_K: Tensor,
    entropies_K: Tensor,
    old_K: Tensor,
    reference_K: Tensor | None,
    batch: TreeBatch,
    rows_K: Tensor,
    settings: Loss,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss over the targets `rows_K` of the batch, and metrics as sums (divide them by "tokens").

    All arguments with suffix K hold these targets only; `old_K` are log-probs under the weights before the update.
    """
    node_K = batch.node_K[rows_K]
    log_ratio_K = _clamp(logprobs_K - old_K)
    ratio_K = log_ratio_K.exp()
    engine_K = batch.engine_logprobs_K[rows_K]
    factor_K = batch.entropy_weight_K[rows_K].to(old_K.dtype)
    if settings.importance_cap is not None:
        factor_K = factor_K * _clamp(old_K - engine_K).exp().clamp(max=settings.importance_cap)
    weighted_adv_X = batch.pair_weight_X * batch.pair_advantage_X
    pos_adv_K, neg_adv_K, weight_K = (
        _per_node(batch, value_X)[node_K].to(logprobs_K.dtype)
        for value_X in (weighted_adv_X.clamp(min=0), weighted_adv_X.clamp(max=0), batch.pair_weight_X)
    )
    if settings.kind in ("ppo", "turn"):
        own_ratio_K = ratio_K if settings.kind == "ppo" else _turn_ratios(logprobs_K - old_K, batch, node_K)[node_K]
        term_K, clipped_K = _clipped(own_ratio_K, pos_adv_K, neg_adv_K, settings)
        objective = (factor_K * term_K).sum()
    elif settings.kind == "cispo":
        clamped_K = ratio_K.detach().clamp(1 - settings.clip_low, 1 + settings.clip_high)
        clipped_K = (clamped_K != ratio_K.detach()) & (pos_adv_K - neg_adv_K != 0)
        objective = (factor_K * clamped_K * (pos_adv_K + neg_adv_K) * logprobs_K).sum()
    else:
        ratio_X = _trajectory_ratios(logprobs_K - old_K, batch, node_K)[batch.pair_trajectory_X]
        weighted_adv_X = weighted_adv_X.to(logprobs_K.dtype)
        term_X, clipped_X = _clipped(ratio_X, weighted_adv_X.clamp(min=0), weighted_adv_X.clamp(max=0), settings)
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
        ref_log_ratio_K = _clamp(reference_K - logprobs_K)
        kl_K = ref_log_ratio_K.exp() - ref_log_ratio_K - 1
        objective = objective - settings.kl_coef * (weight_K * kl_K).sum()
        metrics["reference_kl"] = kl_K.sum()
    metrics["loss"] = -objective
    return -objective, {name: value.detach() for name, value in metrics.items()}


def _clamp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)


def _clipped(ratio: Tensor, pos_adv: Tensor, neg_adv: Tensor, settings: Loss) -> tuple[Tensor, Tensor]:
    """P min(r, 1 + high) + Q min(max(r, 1 - low), c), and where the ratio was clipped."""
    pos_ratio = ratio.clamp(max=1 + settings.clip_high)
    if settings.clip_keeps_gradient:
        pos_ratio = pos_ratio.detach() * (ratio / ratio.detach())
    neg_ratio = ratio.clamp(1 - settings.clip_low, settings.dual_clip)
    pos_clipped, neg_clipped = ratio > 1 + settings.clip_high, neg_ratio != ratio
    clipped = ((pos_adv != 0) & pos_clipped) | ((neg_adv != 0) & neg_clipped)
    return pos_adv * pos_ratio + neg_adv * neg_ratio, clipped


def _per_node(batch: TreeBatch, value_X: Tensor) -> Tensor:
    """Values of pairs summed over the trajectories through each model node [M]."""
    return value_X.new_zeros(batch.nodes).index_add(0, batch.pair_node_X, value_X)


def _trajectory_ratios(log_ratio_K: Tensor, batch: TreeBatch, node_K: Tensor) -> Tensor:
    """exp(mean log-ratio) over the model tokens of each trajectory [I]."""
    sum_M = log_ratio_K.new_zeros(batch.nodes).index_add(0, node_K, log_ratio_K)
    sum_X = sum_M[batch.pair_node_X]
    sum_I = log_ratio_K.new_zeros(len(batch.trajectory_tokens_I)).index_add(0, batch.pair_trajectory_X, sum_X)
    return _clamp(sum_I / batch.trajectory_tokens_I).exp()


def _turn_ratios(log_ratio_K: Tensor, batch: TreeBatch, node_K: Tensor) -> Tensor:
    """exp(mean log-ratio) over the tokens of each model node [M]; 1 for nodes without tokens here."""
    sum_M = log_ratio_K.new_zeros(batch.nodes).index_add(0, node_K, log_ratio_K)
    count_M = log_ratio_K.new_zeros(batch.nodes).index_add(0, node_K, log_ratio_K.new_ones(len(node_K)))
    return _clamp(sum_M / count_M.clamp(min=1)).exp()
