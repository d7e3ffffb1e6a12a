"""Log-prob and entropy of tokens under their logits, with a backward pass that keeps nothing but the logits.

On a GPU by one kernel each way, which reads every logit once; elsewhere by plain tensor operations. All sums are in
float32, or in the logits' format if that is wider.

Letters: N tokens, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from arpo.trainer.attention import wide_type


def token_logprobs(logits_NV: Tensor, tokens_N: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-prob of each token under softmax(logits / temperature), and the entropy there."""
    if temperature <= 0:
        raise ValueError(f"temperature must be positive, not {temperature}")
    return _TokenLogprobs.apply(logits_NV, tokens_N, temperature)  # type: ignore[no-any-return, no-untyped-call]


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, tokens_N: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        logprob_N, entropy_N, total_N = _ways(logits_NV)[0](logits_NV, tokens_N, temperature)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(logits_NV, tokens_N, total_N, entropy_N)
        return logprob_N, entropy_N

    @staticmethod
    def backward(ctx: Any, for_logprob_N: Tensor | None, for_entropy_N: Tensor | None) -> tuple[Tensor, None, None]:
        logits_NV, tokens_N, total_N, entropy_N = ctx.saved_tensors
        grads = (x if x is None else x.contiguous() for x in (for_logprob_N, for_entropy_N))
        back = _ways(logits_NV)[1]
        return back(logits_NV, tokens_N, total_N, entropy_N, *grads, ctx.temperature), None, None


def _ways(logits_NV: Tensor) -> tuple[Any, Any]:
    if not logits_NV.is_cuda:
        return numbers, gradient
    from arpo.trainer import kernels

    return kernels.numbers, kernels.gradient


def numbers(logits_NV: Tensor, tokens_N: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs, entropies, and the logs of the sums of exponentials."""
    score_NV = logits_NV.to(wide_type(logits_NV)) / temperature
    total_N1 = score_NV.logsumexp(-1, keepdim=True)
    logprob_N1 = score_NV.gather(-1, tokens_N.unsqueeze(-1)) - total_N1
    log_NV = score_NV.sub_(total_N1)
    share_NV = log_NV.exp()
    entropy_N = -(share_NV * log_NV.masked_fill_(share_NV == 0, 0.0)).sum(-1)  # a probability of 0 adds nothing
    return logprob_N1.squeeze(-1), entropy_N, total_N1.squeeze(-1)


def gradient(
    logits_NV: Tensor,
    tokens_N: Tensor,
    total_N: Tensor,
    entropy_N: Tensor,
    for_logprob_N: Tensor | None,
    for_entropy_N: Tensor | None,
    temperature: float,
) -> Tensor:
    """That of the logits."""
    for_logprob_N1 = (torch.zeros_like(entropy_N) if for_logprob_N is None else for_logprob_N).unsqueeze(-1)
    log_NV = (logits_NV.to(wide_type(logits_NV)) / temperature).sub_(total_N.unsqueeze(-1))
    grad_NV = log_NV.exp()
    if for_entropy_N is None:
        grad_NV.mul_(-for_logprob_N1)
    else:
        inner_NV = log_NV.masked_fill_(grad_NV == 0, 0.0).add_(entropy_N.unsqueeze(-1))
        grad_NV.mul_(inner_NV.mul_(-for_entropy_N.unsqueeze(-1)).sub_(for_logprob_N1))
    grad_NV.scatter_add_(-1, tokens_N.unsqueeze(-1), for_logprob_N1)
    return grad_NV.div_(temperature).to(logits_NV.dtype)
