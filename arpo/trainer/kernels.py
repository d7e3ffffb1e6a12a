"""Triton kernels of `arpo.trainer.logprobs`. Imported only where there is a CUDA device."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from arpo.models.kernels import MASKED, online_softmax

CHUNK = 4096


def numbers(logits_NV: Tensor, tokens_N: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs, entropies, and the logs of the sums of exponentials."""
    logits_NV = logits_NV.contiguous()
    rows, vocab = logits_NV.shape
    logprob_N, entropy_N, total_N = (torch.empty(rows, device=logits_NV.device) for _ in range(3))
    with torch.cuda.device_of(logits_NV):  # type: ignore[no-untyped-call]
        _numbers[(rows,)](
            logits_NV, tokens_N, logprob_N, entropy_N, total_N, 1 / temperature, vocab, CHUNK=CHUNK, num_warps=8
        )
    return logprob_N, entropy_N, total_N


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
    logits_NV = logits_NV.contiguous()
    rows, vocab = logits_NV.shape
    grad_NV = torch.empty_like(logits_NV)
    nothing_N = torch.zeros_like(entropy_N)
    with torch.cuda.device_of(logits_NV):  # type: ignore[no-untyped-call]
        _gradient[(rows, triton.cdiv(vocab, CHUNK))](
            logits_NV,
            tokens_N,
            total_N,
            entropy_N,
            nothing_N if for_logprob_N is None else for_logprob_N,
            nothing_N if for_entropy_N is None else for_entropy_N,
            grad_NV,
            1 / temperature,
            vocab,
            CHUNK=CHUNK,
            num_warps=8,
        )
    return grad_NV


@triton.jit
def _numbers(logits, tokens_N, logprob_N, entropy_N, total_N, scale, vocab, CHUNK: tl.constexpr):
    row = tl.program_id(0)
    logits += row.to(tl.int64) * vocab
    i = tl.arange(0, CHUNK)
    top = tl.full([], MASKED, tl.float32)
    total = tl.full([], 0.0, tl.float32)
    mean = tl.full([], 0.0, tl.float32)
    for start in range(0, vocab, CHUNK):
        score = tl.load(logits + start + i, mask=start + i < vocab, other=float("-inf")).to(tl.float32) * scale
        top, total, mean = online_softmax(top, total, mean, score)
    all_of_it = top + tl.log(total)
    own = tl.load(logits + tl.load(tokens_N + row)).to(tl.float32) * scale
    tl.store(logprob_N + row, own - all_of_it)
    tl.store(entropy_N + row, tl.log(total) - mean / total)
    tl.store(total_N + row, all_of_it)


@triton.jit
def _gradient(
    logits, tokens_N, total_N, entropy_N, for_logprob_N, for_entropy_N, grad, scale, vocab, CHUNK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0)
    i = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    place = row.to(tl.int64) * vocab + i
    log = tl.load(logits + place, mask=i < vocab, other=float("-inf")).to(tl.float32) * scale - tl.load(total_N + row)
    for_logprob = tl.load(for_logprob_N + row)
    share = tl.exp(log)
    inner = tl.where(share > 0.0, log + tl.load(entropy_N + row), 0.0)
    value = -share * (for_logprob + tl.load(for_entropy_N + row) * inner)
    value += tl.where(i == tl.load(tokens_N + row), for_logprob, 0.0)
    tl.store(grad + place, (value * scale).to(grad.dtype.element_ty), mask=i < vocab)
