"""RMS norm and rotary embedding as single Triton kernels, in place of the twenty that Hugging Face models launch.

`fused(model)` patches them in for the engine's own steps; they round to the model's dtype where the originals do. Other
threads, and code outside inference mode, keep using the originals.

Shape suffixes: T tokens, H heads, D head dimension.
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

_LOCK = threading.RLock()  # engines of one family patch the same module


@contextmanager
def fused(model: Any) -> Iterator[None]:
    """Within the context, the model's norms and rotary embeddings are single kernels in this thread."""
    thread = threading.get_ident()
    norms = [m for m in model.modules() if type(m).__name__.endswith("RMSNorm") and m.weight.dtype == model.dtype]
    modules = {sys.modules[type(m).__module__] for m in model.modules()}
    with _LOCK:
        rotary = {module: module.apply_rotary_pos_emb for module in modules if hasattr(module, "apply_rotary_pos_emb")}
        try:
            for norm in norms:
                norm.forward = _fused_norm(norm, thread)
            for module, original in rotary.items():
                module.apply_rotary_pos_emb = _fused_rotary(original, thread)  # type: ignore[attr-defined]
            yield
        finally:
            for norm in norms:
                vars(norm).pop("forward", None)
            for module, original in rotary.items():
                module.apply_rotary_pos_emb = original  # type: ignore[attr-defined]


def _fused_norm(module: Any, thread: int) -> Callable[[Tensor], Tensor]:
    original = type(module).forward
    gemma = type(module).__name__.startswith("Gemma")
    eps = module.eps if gemma else module.variance_epsilon

    def forward(x: Tensor) -> Tensor:
        if threading.get_ident() != thread or not torch.is_inference_mode_enabled():
            return original(module, x)  # type: ignore[no-any-return]
        return rms_norm(x, module.weight, eps, plus_one=gemma)

    return forward


def _fused_rotary(original: Callable[..., tuple[Tensor, Tensor]], thread: int) -> Callable[..., tuple[Tensor, Tensor]]:
    def apply(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        own = threading.get_ident() == thread and torch.is_inference_mode_enabled()
        if not own or q.shape[0] != 1 or args or kwargs:
            return original(q, k, cos, sin, *args, **kwargs)
        return rotate(q, cos, sin), rotate(k, cos, sin)

    return apply


def rms_norm(x: Tensor, weight: Tensor, eps: float, plus_one: bool) -> Tensor:
    """Return x / rms(x) * weight over the last dimension; with `plus_one` (Gemma) the factor is 1 + weight."""
    x = x.contiguous()
    out, width = torch.empty_like(x), x.shape[-1]
    size = triton.next_power_of_2(width)
    _rms_norm[(x.numel() // width,)](x, weight, out, eps, N=width, SIZE=size, PLUS_ONE=plus_one)
    return out


def rotate(x_1HTD: Tensor, cos_1TD: Tensor, sin_1TD: Tensor) -> Tensor:
    """Return the rotary embedding of [1, H, T, D]; in memory, the heads of a token are contiguous."""
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
    valid = (h < H) & (d < D // 2)
    place = x + t * x_t + h * x_h + d * x_d
    first = tl.load(place, mask=valid, other=0.0).to(tl.float32)
    second = tl.load(place + (D // 2) * x_d, mask=valid, other=0.0).to(tl.float32)
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
        tl.store(out + (t * H + h) * D + half * (D // 2) + d, result.to(kind), mask=valid)
