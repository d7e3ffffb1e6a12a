"""Log-prob and entropy of tokens given their logits, with a backward pass that stores nothing but the logits.

On a GPU this is one kernel for each pass, which reads every logit once; otherwise plain tensor operations. All sums are
in float32, or in the logits' dtype if that is wider.

Shape suffixes: N tokens, V vocabulary.
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
        logprob_N, entropy_N, total_N = _functions(logits_NV)[0](logits_NV, tokens_N, temperature)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(logits_NV, tokens_N, total_N, entropy_N)
        return logprob_N, entropy_N

    @staticmethod
    def backward(ctx: Any, grad_logprob_N: Tensor | None, grad_entropy_N: Tensor | None) -> tuple[Tensor, None, None]:
        logits_NV, tokens_N, total_N, entropy_N = ctx.saved_tensors
        grads = (x if x is None else x.contiguous() for x in (grad_logprob_N, grad_entropy_N))
        backward = _functions(logits_NV)[1]
        return backward(logits_NV, tokens_N, total_N, entropy_N, *grads, ctx.temperature), None, None


def _functions(logits_NV: Tensor) -> tuple[Any, Any]:
    if not logits_NV.is_cuda:
        return logprob_forward, logprob_backward
    from arpo.trainer import kernels

    return kernels.logprob_forward, kernels.logprob_backward


def logprob_forward(logits_NV: Tensor, tokens_N: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs, entropies, and log-sum-exps."""
    score_NV = logits_NV.to(wide_type(logits_NV)) / temperature
    total_N1 = score_NV.logsumexp(-1, keepdim=True)
    logprob_N1 = score_NV.gather(-1, tokens_N.unsqueeze(-1)) - total_N1
    log_NV = score_NV.sub_(total_N1)
    prob_NV = log_NV.exp()
    entropy_N = -(prob_NV * log_NV.masked_fill_(prob_NV == 0, 0.0)).sum(-1)  # a probability of 0 adds nothing
    return logprob_N1.squeeze(-1), entropy_N, total_N1.squeeze(-1)


def logprob_backward(
    logits_NV: Tensor,
    tokens_N: Tensor,
    total_N: Tensor,
    entropy_N: Tensor,
    grad_logprob_N: Tensor | None,
    grad_entropy_N: Tensor | None,
    temperature: float,
) -> Tensor:
    """The gradient of the logits."""
    grad_logprob_N1 = (torch.zeros_like(entropy_N) if grad_logprob_N is None else grad_logprob_N).unsqueeze(-1)
    log_NV = (logits_NV.to(wide_type(logits_NV)) / temperature).sub_(total_N.unsqueeze(-1))
    grad_NV = log_NV.exp()
    if grad_entropy_N is None:
        grad_NV.mul_(-grad_logprob_N1)
    else:
        inner_NV = log_NV.masked_fill_(grad_NV == 0, 0.0).add_(entropy_N.unsqueeze(-1))
        grad_NV.mul_(inner_NV.mul_(-grad_entropy_N.unsqueeze(-1)).sub_(grad_logprob_N1))
    grad_NV.scatter_add_(-1, tokens_N.unsqueeze(-1), grad_logprob_N1)
    return grad_NV.div_(temperature).to(logits_NV.dtype)
