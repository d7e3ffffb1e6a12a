"""Sampling tokens from logits: pure tensor operations.

Log-probs and entropies are those of softmax(logits / temperature) over the full vocabulary. Where top-k or top-p cuts
the distribution (top-k first), those of the renormalized rest are returned as well (`cut_`). Temperature 0 takes the
most likely token and reports the log-probs of temperature 1. The uniform random numbers are passed in, one per row, so
that a row's token depends only on its own logits and number.

Shape suffixes: B rows, V vocabulary, C chunks of the vocabulary, K tokens per chunk, N either.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

CHUNK = 256  # tokens per chunk: a chunk is chosen by its total weight, then a token within it


class SamplerOutput(NamedTuple):
    """One entry per row; those of the cut distribution only if top-p and top-k were passed."""

    token_B: Tensor
    logprob_B: Tensor
    entropy_B: Tensor
    cut_logprob_B: Tensor | None = None
    cut_entropy_B: Tensor | None = None


def sample(
    logits_BV: Tensor,
    temperature_B: Tensor,
    uniform_B: Tensor,
    top_p_B: Tensor | None = None,
    top_k_B: Tensor | None = None,
) -> SamplerOutput:
    """Sample one token per row. `top_p` and `top_k` (0: off) come together or not at all."""
    greedy_B = temperature_B == 0
    scale_B1 = torch.where(greedy_B, 1.0, temperature_B).float().unsqueeze(1)
    scores_BV = logits_BV.float() / scale_B1
    scores_BV -= scores_BV.amax(-1, keepdim=True)
    scores_BV.clamp_min_(-1e4)  # exp is 0 anyway, and 0 * -inf would be NaN
    weights_BV = scores_BV.exp()
    total_B = weights_BV.sum(-1)
    entropy_B = total_B.log() - torch.linalg.vecdot(weights_BV, scores_BV) / total_B
    cut_weights_BV = weights_BV
    if top_p_B is not None and top_k_B is not None:
        cut_weights_BV = cut_distribution(weights_BV, top_p_B, top_k_B)
    token_B = sample_categorical(cut_weights_BV, uniform_B)
    if greedy_B.is_cuda or greedy_B.any():  # on a GPU, any() would synchronize
        token_B = torch.where(greedy_B, logits_BV.argmax(-1), token_B)
    score_B = scores_BV.gather(1, token_B.unsqueeze(1)).squeeze(1)
    output = SamplerOutput(token_B, score_B - total_B.log(), entropy_B)
    if top_p_B is None or top_k_B is None:
        return output
    cut_total_B = cut_weights_BV.sum(-1)
    cut_entropy_B = cut_total_B.log() - torch.linalg.vecdot(cut_weights_BV, scores_BV) / cut_total_B
    return output._replace(cut_logprob_B=score_B - cut_total_B.log(), cut_entropy_B=cut_entropy_B)


def sample_categorical(weights_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """Return for each row the token at which the running sum of its weights passes `uniform` times their total."""
    missing = -weights_BV.shape[1] % CHUNK
    if missing:
        weights_BV = torch.nn.functional.pad(weights_BV, (0, missing))
    weights_BCK = weights_BV.view(len(weights_BV), -1, CHUNK)
    chunk_totals_BC = weights_BCK.sum(-1, dtype=torch.float64)
    chunk_B1, rest_B1 = _locate(chunk_totals_BC, uniform_B.double().unsqueeze(1), relative=True)
    inside_BK = weights_BCK.gather(1, chunk_B1.unsqueeze(2).expand(-1, -1, CHUNK)).squeeze(1).double()
    token_B1, _ = _locate(inside_BK, rest_B1, relative=False)
    return (chunk_B1 * CHUNK + token_B1).squeeze(1)


def _locate(weights_BN: Tensor, target_B1: Tensor, relative: bool) -> tuple[Tensor, Tensor]:
    """Return the index at which the running sum passes `target`, and what is left of the target there.

    A `relative` target is a share of the total. If rounding puts it past the end, it is the last index with any weight.
    """
    sums_BN = weights_BN.cumsum(-1)
    target_B1 = target_B1 * sums_BN[:, -1:] if relative else target_B1
    index_B1 = (sums_BN <= target_B1).sum(-1, keepdim=True)
    last_B1 = (sums_BN < sums_BN[:, -1:]).sum(-1, keepdim=True)
    index_B1 = torch.minimum(index_B1, last_B1)
    return index_B1, (target_B1 - (sums_BN - weights_BN).gather(1, index_B1)).clamp_min(0)


def cut_distribution(weights_BV: Tensor, top_p_B: Tensor, top_k_B: Tensor) -> Tensor:
    """Zero all but the k most likely tokens (0: all), then all but the smallest set whose share reaches top-p."""
    sorted_BV, order_BV = weights_BV.sort(dim=-1, descending=True, stable=True)
    k_B1 = torch.where(top_k_B > 0, top_k_B, weights_BV.shape[1]).unsqueeze(1)
    rank_V = torch.arange(weights_BV.shape[1], device=weights_BV.device)
    sorted_BV = torch.where(rank_V < k_B1, sorted_BV, 0.0)
    sums_BV = sorted_BV.double().cumsum(-1)
    cut_BV = torch.where(sums_BV - sorted_BV < top_p_B.unsqueeze(1) * sums_BV[:, -1:], sorted_BV, 0.0)
    return torch.zeros_like(weights_BV).scatter(1, order_BV, cut_BV)
