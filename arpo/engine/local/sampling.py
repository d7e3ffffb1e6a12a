"""Drawing tokens from logits: pure tensors.

B rows, V vocabulary. Log-probs and entropies are of softmax(logits / temperature) over the full vocabulary. Where top-k
or top-p cut it (top-k first), those of what was left, normalised again, are given beside them. A temperature of 0 takes
the most likely token and reports the numbers of temperature 1. The uniform numbers come from outside, one per row, so
that a row's token depends on nothing but its own logits and its own number.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

CHUNK = 256  # tokens whose probabilities are added up before one is looked for among them


class Drawn(NamedTuple):
    """One of each per row; those of the cut distribution only if cuts were asked for."""

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
) -> Drawn:
    """Draw one token per row. `top_p` and `top_k` (0: all) come together or not at all."""
    greedy_B = temperature_B == 0
    scale_B1 = torch.where(greedy_B, 1.0, temperature_B).float().unsqueeze(1)
    scores_BV = logits_BV.float() / scale_B1
    scores_BV -= scores_BV.amax(-1, keepdim=True)
    scores_BV.clamp_min_(-1e4)  # exp gives 0 all the same, and 0 * -inf would not
    weights_BV = scores_BV.exp()
    total_B = weights_BV.sum(-1)
    entropy_B = total_B.log() - torch.linalg.vecdot(weights_BV, scores_BV) / total_B
    cuts = top_p_B is not None and top_k_B is not None
    kept_BV = cut(weights_BV, top_p_B, top_k_B) if top_p_B is not None and top_k_B is not None else weights_BV
    token_B = draw(kept_BV, uniform_B)
    if greedy_B.is_cuda or greedy_B.any():  # looking would make a GPU wait
        token_B = torch.where(greedy_B, logits_BV.argmax(-1), token_B)
    score_B = scores_BV.gather(1, token_B.unsqueeze(1)).squeeze(1)
    numbers = token_B, score_B - total_B.log(), entropy_B
    if not cuts:
        return Drawn(*numbers)
    kept_B = kept_BV.sum(-1)
    cut_entropy_B = kept_B.log() - torch.linalg.vecdot(kept_BV, scores_BV) / kept_B
    return Drawn(*numbers, score_B - kept_B.log(), cut_entropy_B)


def draw(weights_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """For each row the token at which the running sum of its weights passes `uniform` times their total."""
    missing = -weights_BV.shape[1] % CHUNK
    if missing:
        weights_BV = torch.nn.functional.pad(weights_BV, (0, missing))
    weights_BCK = weights_BV.view(len(weights_BV), -1, CHUNK)
    chunk_B1, rest_B1 = _pass(weights_BCK.sum(-1, dtype=torch.float64), uniform_B.double().unsqueeze(1), share=True)
    inside_BK = weights_BCK.gather(1, chunk_B1.unsqueeze(2).expand(-1, -1, CHUNK)).squeeze(1).double()
    token_B1, _ = _pass(inside_BK, rest_B1, share=False)
    return (chunk_B1 * CHUNK + token_B1).squeeze(1)


def _pass(weights_BN: Tensor, target_B1: Tensor, share: bool) -> tuple[Tensor, Tensor]:
    """Where the running sum passes `target` (as a `share` of the total, or as it is), and what is left of it there.

    Rounding may put the target past the end: then it is the last one with any weight.
    """
    sums_BN = weights_BN.cumsum(-1)
    target_B1 = target_B1 * sums_BN[:, -1:] if share else target_B1
    at_B1 = (sums_BN <= target_B1).sum(-1, keepdim=True)
    last_B1 = (sums_BN < sums_BN[:, -1:]).sum(-1, keepdim=True)
    at_B1 = torch.minimum(at_B1, last_B1)
    return at_B1, (target_B1 - (sums_BN - weights_BN).gather(1, at_B1)).clamp_min(0)


def cut(weights_BV: Tensor, top_p_B: Tensor, top_k_B: Tensor) -> Tensor:
    """Zero all but the k likeliest tokens (0: all), then all but the smallest set of them whose share reaches top-p."""
    sorted_BV, order_BV = weights_BV.sort(dim=-1, descending=True, stable=True)
    k_B1 = torch.where(top_k_B > 0, top_k_B, weights_BV.shape[1]).unsqueeze(1)
    rank_V = torch.arange(weights_BV.shape[1], device=weights_BV.device)
    sorted_BV = torch.where(rank_V < k_B1, sorted_BV, 0.0)
    sums_BV = sorted_BV.double().cumsum(-1)
    kept_BV = torch.where(sums_BV - sorted_BV < top_p_B.unsqueeze(1) * sums_BV[:, -1:], sorted_BV, 0.0)
    return torch.zeros_like(weights_BV).scatter(1, order_BV, kept_BV)
