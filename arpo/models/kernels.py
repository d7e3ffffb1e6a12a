"""Triton code that the kernels of trainer and engine share. Imported only where Triton is installed."""

from __future__ import annotations

import triton
import triton.language as tl

MASKED = tl.constexpr(-1.0e30)  # score of a masked entry; finite, so that no difference of scores is NaN


@triton.jit
def online_softmax(top, total, mean, score):
    """Update a running maximum, sum of exponentials, and weighted sum of (score - maximum) with more scores."""
    new_top = tl.maximum(top, tl.max(score, 0))
    fade = tl.exp(top - new_top)
    weight = tl.exp(score - new_top)
    more = tl.sum(tl.where(weight > 0.0, weight * (score - new_top), 0.0), 0)
    return new_top, total * fade + tl.sum(weight, 0), fade * (mean + total * (top - new_top)) + more
