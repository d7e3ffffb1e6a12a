"""The clipped policy loss on plain trajectories. Pure functions of tensors.

    r    = exp(logprob - old logprob)
    term = min(r A, clip(r, 1 - low, 1 + high) A);   where A < 0 also term = max(term, c A), the dual clip
    loss = - sum over model tokens of weight * term

Promises: positions outside the mask contribute exactly zero to loss and gradient, whatever stands there. Losses and
metrics of micro-batches add up to those of the batch. The log-ratio is cut at +-20 so that no gradient overflows.
Does not cover: KL to a reference model, entropy bonus, sequence-level ratios.

Shapes: B rows, T positions, N tokens, V vocabulary; position t speaks of token t.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from arpo.settings import Loss
from arpo.types import PathBatch

_LARGEST_LOG_RATIO = 20.0


def policy_loss(
    logprobs_BT: Tensor, old_logprobs_BT: Tensor, batch: PathBatch, settings: Loss
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss, and metrics as sums over model tokens: add them up, then divide all by "tokens"."""
    mask_BT, advantages_BT = batch.loss_mask_BT, batch.advantages_BT
    # Masked before exp: an exp that overflows turns a zero gradient into NaN.
    log_ratio_BT = torch.where(mask_BT, logprobs_BT.float() - old_logprobs_BT.float(), 0.0)
    ratio_BT = log_ratio_BT.clamp(-_LARGEST_LOG_RATIO, _LARGEST_LOG_RATIO).exp()
    clipped_ratio_BT = ratio_BT.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    plain_BT = ratio_BT * advantages_BT
    term_BT = torch.minimum(plain_BT, clipped_ratio_BT * advantages_BT)
    if settings.dual_clip is not None:
        floor_BT = settings.dual_clip * advantages_BT
        term_BT = torch.where(advantages_BT < 0, torch.maximum(term_BT, floor_BT), term_BT)
    loss = -torch.where(mask_BT, batch.weights_BT * term_BT, 0.0).sum()
    with torch.no_grad():
        log_ratio, ratio = log_ratio_BT[mask_BT], ratio_BT[mask_BT]
        metrics = {
            "tokens": mask_BT.sum(),
            "clip_fraction": (term_BT != plain_BT)[mask_BT].sum(),
            "ratio": ratio.sum(),
            "kl_k1": -log_ratio.sum(),
            "kl_k3": (ratio - 1 - log_ratio).sum(),
        }
    return loss, metrics


def token_logprobs(logits_NV: Tensor, tokens_N: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-prob of each token under its own logits, and the entropy there (without gradient), in float32."""
    if temperature <= 0:
        raise ValueError(f"temperature must be positive, not {temperature}")
    all_NV = functional.log_softmax(logits_NV.float() / temperature, dim=-1)
    with torch.no_grad():
        probs_NV = all_NV.exp()
        entropy_N = -(probs_NV * all_NV.masked_fill(probs_NV == 0, 0.0)).sum(dim=-1)
    return all_NV.gather(-1, tokens_N.unsqueeze(-1)).squeeze(-1), entropy_N
