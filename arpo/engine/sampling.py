"""Drawing tokens from logits: pure tensors.

B rows, V vocabulary. Log-probs and entropies are of softmax(logits / temperature) over the full vocabulary, before any
top-p cut. A temperature of 0 takes the most likely token and reports the numbers of temperature 1. The uniform numbers
come from outside, one per row, so that a row's token depends on nothing but its own logits and its own number.
"""

from __future__ import annotations

import torch
from torch import Tensor


def sample(
    logits_BV: Tensor, temperature_B: Tensor, top_p_B: Tensor, uniform_B: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, log-probs and entropies, one of each per row."""
    greedy_B = temperature_B == 0
    scale_B1 = torch.where(greedy_B, 1.0, temperature_B).unsqueeze(1)
    logprobs_BV = torch.log_softmax(logits_BV.float() / scale_B1, dim=-1)
    probs_BV = logprobs_BV.exp()
    entropy_B = -(probs_BV * logprobs_BV.clamp_min(torch.finfo(torch.float32).min)).sum(-1)
    drawn_BV = cut_top_p(probs_BV, top_p_B) if bool((top_p_B < 1).any()) else probs_BV
    cumulative_BV = drawn_BV.double().cumsum(-1)
    target_B1 = uniform_B.double().unsqueeze(1) * cumulative_BV[:, -1:]
    token_B = torch.searchsorted(cumulative_BV, target_B1, right=True).squeeze(1).clamp_max(logits_BV.shape[1] - 1)
    token_B = torch.where(greedy_B, logits_BV.argmax(-1), token_B)
    return token_B, logprobs_BV.gather(1, token_B.unsqueeze(1)).squeeze(1), entropy_B


def cut_top_p(probs_BV: Tensor, top_p_B: Tensor) -> Tensor:
    """Zero all but the smallest set of tokens whose probability reaches top-p (at least one); not renormalised."""
    sorted_BV, order_BV = probs_BV.sort(dim=-1, descending=True, stable=True)
    before_BV = sorted_BV.cumsum(-1) - sorted_BV
    kept_BV = torch.where(before_BV < top_p_B.unsqueeze(1), sorted_BV, 0.0)
    return torch.zeros_like(probs_BV).scatter(1, order_BV, kept_BV)
