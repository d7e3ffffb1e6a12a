"""Triton kernels of `arpo.trainer.logprobs`. Imported only where there is a CUDA device."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from arpo.models.kernels import MASKED, online_softmax

CHUNK = 4096


def logprob_forward(logits_NV: Tensor, tokens_N: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs, entropies, and log-sum-exps."""
    logits_NV = logits_NV.contiguous()
    rows, vocab = logits_NV.shape
    logprob_N, entropy_N, total_N = (torch.empty(rows, device=logits_NV.device) for _ in range(3))
    with torch.cuda.device_of(logits_NV):  # type: ignore[no-untyped-call]
        _logprob_forward[(rows,)](
            logits_NV, tokens_N, logprob_N, entropy_N, total_N, 1 / temperature, vocab, CHUNK=CHUNK, num_warps=8
        )
    return logprob_N, entropy_N, total_N


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
    logits_NV = logits_NV.contiguous()
    rows, vocab = logits_NV.shape
    grad_NV = torch.empty_like(logits_NV)
    zeros_N = torch.zeros_like(entropy_N)
    with torch.cuda.device_of(logits_NV):  # type: ignore[no-untyped-call]
        _logprob_backward[(rows, triton.cdiv(vocab, CHUNK))](
            logits_NV,
            tokens_N,
            total_N,
            entropy_N,
            zeros_N if grad_logprob_N is None else grad_logprob_N,
            zeros_N if grad_entropy_N is None else grad_entropy_N,
            grad_NV,
            1 / temperature,
            vocab,
            CHUNK=CHUNK,
            num_warps=8,
        )
    return grad_NV


@triton.jit
def _logprob_forward(logits, tokens_N, logprob_N, entropy_N, total_N, scale, vocab, CHUNK: tl.constexpr):
    row = tl.program_id(0)
    logits += row.to(tl.int64) * vocab
    i = tl.arange(0, CHUNK)
    top = tl.full([], MASKED, tl.float32)
    total = tl.full([], 0.0, tl.float32)
    mean = tl.full([], 0.0, tl.float32)
    for start in range(0, vocab, CHUNK):
        score = tl.load(logits + start + i, mask=start + i < vocab, other=float("-inf")).to(tl.float32) * scale
        top, total, mean = online_softmax(top, total, mean, score)
    log_sum_exp = top + tl.log(total)
    own = tl.load(logits + tl.load(tokens_N + row)).to(tl.float32) * scale
    tl.store(logprob_N + row, own - log_sum_exp)
    tl.store(entropy_N + row, tl.log(total) - mean / total)
    tl.store(total_N + row, log_sum_exp)


@triton.jit
def _logprob_backward(
    logits, tokens_N, total_N, entropy_N, grad_logprob_N, grad_entropy_N, grad, scale, vocab, CHUNK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0)
    i = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    place = row.to(tl.int64) * vocab + i
    log = tl.load(logits + place, mask=i < vocab, other=float("-inf")).to(tl.float32) * scale - tl.load(total_N + row)
    grad_logprob = tl.load(grad_logprob_N + row)
    prob = tl.exp(log)
    inner = tl.where(prob > 0.0, log + tl.load(entropy_N + row), 0.0)
    value = -prob * (grad_logprob + tl.load(grad_entropy_N + row) * inner)
    value += tl.where(i == tl.load(tokens_N + row), grad_logprob, 0.0)
    tl.store(grad + place, (value * scale).to(grad.dtype.element_ty), mask=i < vocab)
