"""Two small things that Hugging Face models do in twenty kernels, each done in one: RMS norm and rotary embedding.

`fused(model)` puts them in place for the engine's own steps, rounding to the model's number format where the originals
do. In other threads, and outside inference mode, the originals are used all along.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_ONE_AT_A_TIME = threading.RLock()  # engines of one family patch the same file


@contextmanager
def fused(model: Any) -> Iterator[None]:
    """Within, the model's norms and rotary embeddings are single kernels."""
    with _ONE_AT_A_TIME:
        yield from _patched(model, threading.get_ident())


def _patched(model: Any, thread: int) -> Iterator[None]:
    norms = [m for m in model.modules() if type(m).__name__.endswith("RMSNorm") and m.weight.dtype == model.dtype]
    files = {sys.modules[type(m).__module__] for m in model.modules()}
    rotary = {file: file.apply_rotary_pos_emb for file in files if hasattr(file, "apply_rotary_pos_emb")}
    try:
        for norm in norms:
            norm.forward = _norm(norm, thread)
        for file, original in rotary.items():
            file.apply_rotary_pos_emb = _rotary(original, thread)  # type: ignore[attr-defined]
        yield
    finally:
        for norm in norms:
            vars(norm).pop("forward", None)
        for file, original in rotary.items():
            file.apply_rotary_pos_emb = original  # type: ignore[attr-defined]


def _norm(module: Any, thread: int) -> Callable[[Tensor], Tensor]:
    original = type(module).forward
    gemma = type(module).__name__.startswith("Gemma")
    eps = module.eps if gemma else module.variance_epsilon

    def forward(x: Tensor) -> Tensor:
        if threading.get_ident() != thread or not torch.is_inference_mode_enabled():
            return original(module, x)  # type: ignore[no-any-return]
        return rms_norm(x, module.weight, eps, plus_one=gemma)

    return forward


def _rotary(original: Callable[..., tuple[Tensor, Tensor]], thread: int) -> Callable[..., tuple[Tensor, Tensor]]:
    def apply(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if (
            threading.get_ident() != thread
            or not torch.is_inference_mode_enabled()
            or q.shape[0] != 1
            or args
            or kwargs
        ):
            return original(q, k, cos, sin, *args, **kwargs)
        return rotate(q, cos, sin), rotate(k, cos, sin)

    return apply


def rms_norm(x: Tensor, weight: Tensor, eps: float, plus_one: bool) -> Tensor:
    """x / rms(x) * weight over the last dimension; Gemma's weights count from 1."""
    x = x.contiguous()
    out, width = torch.empty_like(x), x.shape[-1]
    size = triton.next_power_of_2(width)
    _rms_norm[(x.numel() // width,)](x, weight, out, eps, N=width, SIZE=size, PLUS_ONE=plus_one)
    return out


def rotate(x_1HTD: Tensor, cos_1TD: Tensor, sin_1TD: Tensor) -> Tensor:
    """Rotary embedding of [1, heads, T, D], as [1, heads, T, D] with the heads of a token lying together."""
    _, heads, tokens, width = x_1HTD.shape
    out_1THD = x_1HTD.new_empty(1, tokens, heads, width)
    _rotate[(tokens,)](
        x_1HTD,
        cos_1TD.contiguous(),
        sin_1TD.contiguous(),
        out_1THD,
        *x_1HTD.stride()[1:],
        H=heads,
        D=width,
        HEADS=triton.next_power_of_2(heads),
        HALF=triton.next_power_of_2(width // 2),
    )
    return out_1THD.transpose(1, 2)


@triton.jit
def _rms_norm(x, weight, out, eps, N: tl.constexpr, SIZE: tl.constexpr, PLUS_ONE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * N
    i = tl.arange(0, SIZE)
    value = tl.load(x + row + i, mask=i < N, other=0.0).to(tl.float32)
    value = value * tl.rsqrt(tl.sum(value * value, 0) / N + eps)
    factor = tl.load(weight + i, mask=i < N, other=0.0).to(tl.float32)
    if PLUS_ONE:  # noqa: SIM108
        value = value * (1.0 + factor)
    else:
        value = value.to(out.dtype.element_ty).to(tl.float32) * factor
    tl.store(out + row + i, value.to(out.dtype.element_ty), mask=i < N)


@triton.jit
def _rotate(x, cos, sin, out, x_h, x_t, x_d, H: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    h, d = tl.arange(0, HEADS)[:, None], tl.arange(0, HALF)[None, :]
    there = (h < H) & (d < D // 2)
    place = x + t * x_t + h * x_h + d * x_d
    first = tl.load(place, mask=there, other=0.0).to(tl.float32)
    second = tl.load(place + (D // 2) * x_d, mask=there, other=0.0).to(tl.float32)
    kind = out.dtype.element_ty
    for half in tl.static_range(2):
        at = t * D + half * (D // 2) + d
        c = tl.load(cos + at, mask=d < D // 2, other=0.0).to(tl.float32)
        s = tl.load(sin + at, mask=d < D // 2, other=0.0).to(tl.float32)
        if half == 0:
            straight, turned = first * c, -second * s
        else:
            straight, turned = second * c, first * s
        result = straight.to(kind).to(tl.float32) + turned.to(kind).to(tl.float32)
        tl.store(out + (t * H + h) * D + half * (D // 2) + d, result.to(kind), mask=there)
