"""Triton kernels: storing keys and values, paged attention, sampling. Imported only where there is a CUDA device.

Attention reads each block once per group of query heads that share it (nothing is expanded), visits only as many blocks
as a row has, and serves prefill and decoding alike: a tile is a run of new tokens of one row.

Shape suffixes: T tokens, X tiles, H key/value heads, G query heads per key/value head, D head dimension, B rows, V
vocabulary. In kernels: m rows of a tile (token and query head), n keys, d head dimension.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from arpo.engine.local.kv_cache import BLOCK_SIZE
from arpo.engine.local.sampling import SamplerOutput
from arpo.models.kernels import MASKED, online_softmax

VOCAB_CHUNK = 4096


class Tiles(NamedTuple):
    """Runs of new tokens: row in the block table, first token, number of tokens, position of the first."""

    row_X: Tensor
    first_X: Tensor
    count_X: Tensor
    position_X: Tensor


def rows_per_tile(group: int, decoding: bool, dtype: torch.dtype) -> int:
    """Return the matrix rows of a tile, query heads of one group times tokens: at least 16, for the tensor cores.

    Exact float32 products are unrolled: large tiles of them take minutes to compile.
    """
    small = decoding or dtype == torch.float32
    return max(16 if small else 64, int(triton.next_power_of_2(group)))


def store_kv(k_THD: Tensor, v_THD: Tensor, keys: Tensor, values: Tensor, block_T: Tensor, offset_T: Tensor) -> None:
    """Write new keys and values into their blocks."""
    T, H, D = k_THD.shape
    width = triton.next_power_of_2(H * D)
    _store_kv[(T,)](
        k_THD,
        v_THD,
        keys,
        values,
        block_T,
        offset_T,
        *k_THD.stride(),
        *v_THD.stride(),
        H=H,
        D=D,
        BLOCK_SIZE=BLOCK_SIZE,
        WIDTH=width,
    )


def paged_attention(
    q_THGD: Tensor,
    keys: Tensor,
    values: Tensor,
    block_table: Tensor,
    tiles: Tiles,
    scaling: float,
    window: int | None,
    *,
    decoding: bool,
    splits: int = 1,
) -> Tensor:
    """Return the attention output of each query over its row's blocks; the keys of a row are split among `splits`."""
    T, H, G, D = q_THGD.shape
    out_THGD = torch.empty((T, H, G, D), dtype=q_THGD.dtype, device=q_THGD.device)
    is_split, width = splits > 1, max(16, triton.next_power_of_2(D))  # tl.dot needs at least 16
    parts = q_THGD.new_empty((T, H, G, splits, D), dtype=torch.float32) if is_split else out_THGD
    tops = q_THGD.new_empty((T, H, G, splits), dtype=torch.float32) if is_split else out_THGD
    sums = torch.empty_like(tops) if is_split else out_THGD
    _paged_attention[(len(tiles.row_X), H, splits)](
        q_THGD,
        out_THGD,
        parts,
        tops,
        sums,
        keys,
        values,
        block_table,
        *tiles,
        scaling,
        window or 0,
        *q_THGD.stride(),
        block_table.stride(0),
        H=H,
        G=G,
        D=D,
        WIDTH=width,
        BLOCK_SIZE=BLOCK_SIZE,
        M=rows_per_tile(G, decoding, q_THGD.dtype),
        N=32 if q_THGD.dtype == torch.float32 else 64,
        SPLITS=splits,
        WINDOW=window is not None,
        PRECISION="ieee" if q_THGD.dtype == torch.float32 else "tf32",
    )
    if is_split:
        _combine_splits[(T, H * G)](out_THGD, parts, tops, sums, F=H * G, D=D, WIDTH=width, SPLITS=splits)
    return out_THGD


def sample(logits_BV: Tensor, temperature_B: Tensor, uniform_B: Tensor) -> SamplerOutput:
    """Sample as `sampling.sample` does without cuts, in two passes over the logits and without copying them."""
    rows, vocab = logits_BV.shape
    token_B = torch.empty(rows, dtype=torch.int64, device=logits_BV.device)
    logprob_B = torch.empty(rows, dtype=torch.float32, device=logits_BV.device)
    entropy_B = torch.empty_like(logprob_B)
    _sample[(rows,)](
        logits_BV,
        temperature_B,
        uniform_B,
        token_B,
        logprob_B,
        entropy_B,
        vocab,
        logits_BV.stride(0),
        CHUNK=VOCAB_CHUNK,
        num_warps=8,
    )
    return SamplerOutput(token_B, logprob_B, entropy_B)


@triton.jit
def _store_kv(
    k, v, keys, values, block_T, offset_T, k_t, k_h, k_d, v_t, v_h, v_d,
    H: tl.constexpr, D: tl.constexpr, BLOCK_SIZE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, WIDTH)
    h, d = i // D, i % D
    target = ((tl.load(block_T + t) * H + h) * BLOCK_SIZE + tl.load(offset_T + t)) * D + d
    tl.store(keys + target, tl.load(k + t * k_t + h * k_h + d * k_d, mask=i < H * D), mask=i < H * D)
    tl.store(values + target, tl.load(v + t * v_t + h * v_h + d * v_d, mask=i < H * D), mask=i < H * D)


@triton.jit(do_not_specialize=["table_stride"])
def _paged_attention(
    q, out, parts, tops, sums, keys, values, block_table, row_X, first_X, count_X, position_X, scaling, window,
    q_t, q_h, q_g, q_d, table_stride,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, SPLITS: tl.constexpr, WINDOW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tile, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = tl.load(row_X + tile).to(tl.int64)
    first = tl.load(first_X + tile).to(tl.int64)
    count = tl.load(count_X + tile)
    position = tl.load(position_X + tile).to(tl.int32)
    m, d = tl.arange(0, M), tl.arange(0, WIDTH)
    token, group = m // G, m % G
    valid = (token < count)[:, None] & (d < D)[None, :]
    query = tl.load(
        q + (first + token)[:, None] * q_t + head * q_h + group[:, None] * q_g + d[None, :] * q_d, mask=valid, other=0.0
    )
    query_position = position + token
    end = position + count.to(tl.int32)
    begin = 0
    if WINDOW:
        begin = tl.maximum(position - window + 1, 0) // N * N
    split_size = tl.cdiv(tl.cdiv(end - begin, SPLITS), N) * N
    low = begin + split * split_size
    high = tl.minimum(low + split_size, end)
    top = tl.full([M], MASKED, tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, WIDTH], tl.float32)
    for start in range(low, high, N):
        n = start + tl.arange(0, N)
        block = tl.load(block_table + row * table_stride + n // BLOCK_SIZE, mask=n < high, other=0).to(tl.int64)
        place = ((block * H + head) * BLOCK_SIZE + n % BLOCK_SIZE) * D
        in_range = (n < high)[:, None] & (d < D)[None, :]
        key = tl.load(keys + place[:, None] + d[None, :], mask=in_range, other=0.0)
        value = tl.load(values + place[:, None] + d[None, :], mask=in_range, other=0.0)
        score = tl.dot(query, tl.trans(key), input_precision=PRECISION) * (scaling * 1.4426950408889634)
        visible = (n[None, :] <= query_position[:, None]) & (n < high)[None, :]
        if WINDOW:
            visible = visible & (n[None, :] > query_position[:, None] - window)
        score = tl.where(visible, score, MASKED)
        new_top = tl.maximum(top, tl.max(score, 1))
        weight = tl.where(visible, tl.exp2(score - new_top[:, None]), 0.0)
        fade = tl.exp2(top - new_top)
        total = total * fade + tl.sum(weight, 1)
        acc = acc * fade[:, None] + tl.dot(weight.to(value.dtype), value, input_precision=PRECISION)
        top = new_top
    place_m = ((first + token) * H + head) * G + group
    if SPLITS == 1:
        result = (acc / total[:, None]).to(out.dtype.element_ty)
        tl.store(out + place_m[:, None] * D + d[None, :], result, mask=valid)
    else:
        place_m = place_m * SPLITS + split
        tl.store(parts + place_m[:, None] * D + d[None, :], acc, mask=valid)
        tl.store(tops + place_m, top, mask=token < count)
        tl.store(sums + place_m, total, mask=token < count)


@triton.jit
def _combine_splits(
    out, parts, tops, sums, F: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, SPLITS: tl.constexpr
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64) * F + tl.program_id(1)
    s, d = tl.arange(0, SPLITS), tl.arange(0, WIDTH)
    top = tl.load(tops + place * SPLITS + s)
    weight = tl.exp2(top - tl.max(top, 0))
    part = tl.load(parts + (place * SPLITS + s)[:, None] * D + d[None, :], mask=(d < D)[None, :], other=0.0)
    total = tl.sum(weight * tl.load(sums + place * SPLITS + s), 0)
    result = tl.sum(part * weight[:, None], 0) / total
    tl.store(out + place * D + d, result.to(out.dtype.element_ty), mask=d < D)


@triton.jit
def _sample(
    logits, temperature_B, uniform_B, token_B, logprob_B, entropy_B, vocab, stride, CHUNK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0)
    logits += row.to(tl.int64) * stride
    temperature = tl.load(temperature_B + row).to(tl.float32)
    scale = tl.where(temperature == 0.0, 1.0, temperature)
    i = tl.arange(0, CHUNK)
    top = tl.full([], MASKED, tl.float32)
    total = tl.full([], 0.0, tl.float32)
    mean = tl.full([], 0.0, tl.float32)  # of (score - top), weighted, not yet divided by the total
    argmax = tl.full([], 0, tl.int32)
    for start in range(0, vocab, CHUNK):
        score = tl.load(logits + start + i, mask=start + i < vocab, other=float("-inf")).to(tl.float32) / scale
        best = tl.max(score, 0)
        argmax = tl.where(best > top, start + tl.argmax(score, 0), argmax)
        top, total, mean = online_softmax(top, total, mean, score)
    target = tl.load(uniform_B + row).to(tl.float32) * total
    passed = tl.full([], 0.0, tl.float32)
    before = tl.full([], 0.0, tl.float32)
    chosen = tl.full([], 0, tl.int32)
    found = tl.full([], 0, tl.int32)
    for start in range(0, vocab, CHUNK):
        score = tl.load(logits + start + i, mask=start + i < vocab, other=float("-inf")).to(tl.float32) / scale
        mass = tl.sum(tl.exp(score - top), 0)
        here = (found == 0) & (mass > 0.0)
        chosen = tl.where(here, start, chosen)
        before = tl.where(here, passed, before)
        found = tl.where(passed + mass > target, 1, found)
        passed += mass
    score = tl.load(logits + chosen + i, mask=chosen + i < vocab, other=float("-inf")).to(tl.float32) / scale
    weight = tl.exp(score - top)
    past = (before + tl.cumsum(weight, 0) > target) & (weight > 0.0)
    at = tl.min(tl.where(past, i, CHUNK), 0)
    drawn = tl.where((found == 1) & (at < CHUNK), chosen + at, argmax)  # rounding may put the target past the end
    token = tl.minimum(tl.where(temperature == 0.0, argmax, drawn), vocab - 1)  # with NaNs there is no argmax
    tl.store(token_B + row, token.to(tl.int64))
    tl.store(logprob_B + row, tl.load(logits + token).to(tl.float32) / scale - top - tl.log(total))
    tl.store(entropy_B + row, tl.log(total) - mean / total)
