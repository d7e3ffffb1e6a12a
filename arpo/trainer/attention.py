"""Attention over a tree in training: every token attends to its ancestors and itself, and to nothing else.

A `TreePlan` is built once per forward pass and passed to the model as `attention_plan=` (see `arpo.models.network`).
It splits the tokens into runs: contiguous tokens in which each one is the child of the one before it. The keys of a run
are its own tokens (causally) and a few segments of ancestors, each contiguous in memory. A token's position is its
depth, so sliding windows are counted in depth.

On a CPU each (run, segment) is one call of PyTorch's attention kernel without a mask (with a sliding window, runs are
split to about one window, and masks are no larger than two of them). Partial results are combined by their
log-sum-exps, and the backward pass gives each call the combined ones, which makes it exact; nothing is copied. On a GPU
in 16 bits all runs are one call of variable-length flash attention, over keys and values gathered for each run; their
gradients are added up in float32, always in the same order. Otherwise (float32 on a GPU) it works as on a CPU, by plain
matrix products of at most 1,024 queries.

Shape suffixes: T tokens, C tokens of the context, L tokens of the context and T together, H key/value heads, G query
heads per key/value head, F = H x G query heads, D head width, R gathered tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from arpo.models.network import MASKED

Ints = npt.NDArray[np.int64]
MAX_QUERIES = 1024  # per call where scores are materialized
MIN_QUERIES = 128  # per call with a sliding window
UNLIMITED = 1 << 62
KV = tuple[Tensor, Tensor]


class Segment(NamedTuple):
    """Keys [first, last) among the context and the pass's own tokens; `depth` is that of the first."""

    first: int
    last: int
    depth: int


class Run(NamedTuple):
    """Tokens [first, last) of the pass, the depth of the first, and their keys: the last segment is their own."""

    first: int
    last: int
    depth: int
    segments: tuple[Segment, ...]


def find_runs(parent_T: Ints, depth_T: Ints, context: int) -> tuple[Run, ...]:
    """The runs of a pass. `parent_T` is the parent's index in the pass, -1 if it is in the context or absent."""
    size = len(parent_T)
    starts = np.flatnonzero(parent_T != np.arange(size) - 1) if size else np.empty(0, dtype=np.int64)
    if size and (not len(starts) or starts[0] != 0):
        starts = np.concatenate([[0], starts])
    begin_T = np.repeat(starts, np.diff(starts, append=size))
    runs = []
    for first, last in zip(starts.tolist(), [*starts[1:].tolist(), size], strict=True):
        segments, at = [Segment(context + first, context + last, int(depth_T[first]))], int(parent_T[first])
        while at >= 0:
            begin = int(begin_T[at])
            segments.append(Segment(context + begin, context + at + 1, int(depth_T[begin])))
            at = int(parent_T[begin])
        if context:
            segments.append(Segment(0, context, 0))
        runs.append(Run(first, last, int(depth_T[first]), tuple(reversed(segments))))
    return tuple(runs)


class TreePlan:
    """One forward pass over tokens of a tree, after a `context` whose keys and values are given per layer.

    With `keep`, the pass's own keys and values are stored in `kept`, for the passes of its children.
    """

    def __init__(self, parent_T: Ints, depth_T: Ints, context: list[KV] | None = None, keep: bool = False) -> None:
        self._context = context or []
        self.context_tokens = len(self._context[0][0]) if self._context else 0
        self.runs = find_runs(parent_T, depth_T, self.context_tokens)
        self.kept: dict[int, KV] = {}
        self._keep = keep
        self._split: dict[int, list[Run]] = {}
        self._gathered: _Gathered | None = None

    def attend(
        self, layer: int, q_THGD: Tensor, k_THD: Tensor, v_THD: Tensor, scaling: float, window: int | None
    ) -> Tensor:
        """The attention output [T, H, G, D]."""
        if self._keep and layer not in self.kept:  # recomputed activations come here a second time
            self.kept[layer] = k_THD, v_THD
        if self._context:
            k_C, v_C = self._context[layer]
            k_THD, v_THD = torch.cat([k_C, k_THD]), torch.cat([v_C, v_THD])
        function = _Flash if _has_flash(q_THGD) else _Segmented
        return function.apply(q_THGD, k_THD, v_THD, self, scaling, window)  # type: ignore[no-any-return, no-untyped-call]

    def take(self) -> list[KV]:
        """The stored keys and values, layer by layer. They are released here: their graph refers back to this plan."""
        kept, self.kept, self._keep = self.kept, {}, False
        return [kept[layer] for layer in range(len(kept))]

    def short_runs(self, max_tokens: int) -> list[Run]:
        """The runs, split into ones of at most `max_tokens` tokens."""
        if max_tokens not in self._split:
            self._split[max_tokens] = [part for run in self.runs for part in _split_run(run, max_tokens)]
        return self._split[max_tokens]

    def gathered(self, device: torch.device) -> _Gathered:
        """The layout of all runs for one call of flash attention."""
        if self._gathered is None:
            self._gathered = _gather(self.runs, self.context_tokens + self.runs[-1].last, device)
        return self._gathered


@dataclass(frozen=True, slots=True)
class _Gathered:
    cu_queries: Tensor  # cumulative number of queries per run, from 0
    cu_keys: Tensor  # cumulative number of gathered keys per run, from 0
    max_lengths: tuple[int, int]  # of queries and keys of one run
    index_R: Tensor | None  # the key at each gathered place; None: all keys in order
    order_R: Tensor  # gathered places sorted by key
    offsets_L: Tensor  # where each key's places begin in that order, and the end


def _gather(runs: tuple[Run, ...], length: int, device: torch.device) -> _Gathered:
    index_R = np.concatenate([np.arange(s.first, s.last) for run in runs for s in run.segments])
    num_keys = [sum(s.last - s.first for s in run.segments) for run in runs]
    num_queries = [run.last - run.first for run in runs]
    index = torch.from_numpy(index_R).to(device)
    sorted_R, order_R = torch.sort(index, stable=True)
    return _Gathered(
        torch.tensor([0, *np.cumsum(num_queries)], dtype=torch.int32).to(device),
        torch.tensor([0, *np.cumsum(num_keys)], dtype=torch.int32).to(device),
        (max(num_queries), max(num_keys)),
        None if np.array_equal(index_R, np.arange(length)) else index,
        order_R,
        torch.searchsorted(sorted_R, torch.arange(length + 1, device=device)),
    )


def _has_flash(q_THGD: Tensor) -> bool:
    width = q_THGD.shape[-1]
    return q_THGD.is_cuda and q_THGD.dtype in (torch.bfloat16, torch.float16) and width % 8 == 0 and width <= 256


class _Flash(torch.autograd.Function):
    """All runs in one call on a GPU. Keys and values are gathered again in the backward pass instead of stored."""

    @staticmethod
    def forward(
        ctx: Any, q_THGD: Tensor, k_LHD: Tensor, v_LHD: Tensor, plan: TreePlan, scaling: float, window: int | None
    ) -> Tensor:
        layout = plan.gathered(q_THGD.device)
        q_TFD = q_THGD.flatten(1, 2)
        k_RHD, v_RHD = (_pick(x, layout.index_R) for x in (k_LHD, v_LHD))
        ctx.lengths = layout.cu_queries, layout.cu_keys, *layout.max_lengths
        ctx.options = {"scale": scaling, "window_size_left": -1 if window is None else window - 1}
        ctx.options["window_size_right"] = -1 if window is None else 0
        ctx.causal = window is None
        out_TFD, sums, *random, _ = torch.ops.aten._flash_attention_forward(
            q_TFD, k_RHD, v_RHD, *ctx.lengths, 0.0, ctx.causal, False, **ctx.options
        )
        ctx.save_for_backward(q_TFD, k_LHD, v_LHD, out_TFD, sums, *random)
        ctx.plan, ctx.shape = plan, q_THGD.shape
        return out_TFD.view(q_THGD.shape)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad_THGD: Tensor) -> tuple[Tensor | None, ...]:
        q_TFD, k_LHD, v_LHD, out_TFD, sums, *random = ctx.saved_tensors
        layout = ctx.plan.gathered(q_TFD.device)
        k_RHD, v_RHD = (_pick(x, layout.index_R) for x in (k_LHD, v_LHD))
        dq_TFD, dk_RHD, dv_RHD = torch.ops.aten._flash_attention_backward(
            grad_THGD.flatten(1, 2).contiguous(),
            q_TFD,
            k_RHD,
            v_RHD,
            out_TFD,
            sums,
            *ctx.lengths,
            0.0,
            ctx.causal,
            *random,
            **ctx.options,
        )
        return dq_TFD.view(ctx.shape), _add_up(dk_RHD, layout), _add_up(dv_RHD, layout), None, None, None


def _pick(x_LHD: Tensor, index_R: Tensor | None) -> Tensor:
    return x_LHD.contiguous() if index_R is None else x_LHD.index_select(0, index_R)


def _add_up(x_RHD: Tensor, layout: _Gathered) -> Tensor:
    """The sum over the gathered copies of each key."""
    if layout.index_R is None:
        return x_RHD
    x_LF = torch.nn.functional.embedding_bag(
        layout.order_R, x_RHD.flatten(1), layout.offsets_L, mode="sum", include_last_offset=True
    )
    return x_LF.view(-1, *x_RHD.shape[1:])


class _Segmented(torch.autograd.Function):
    """One run and one segment at a time."""

    @staticmethod
    def forward(
        ctx: Any, q_THGD: Tensor, k_LHD: Tensor, v_LHD: Tensor, plan: TreePlan, scaling: float, window: int | None
    ) -> Tensor:
        out_THGD = torch.empty_like(q_THGD, memory_format=torch.contiguous_format)
        sums = []
        for run in plan.short_runs(_max_queries(q_THGD, window)):
            q = _heads_first(q_THGD[run.first : run.last])
            out: Tensor | None = None
            total: Tensor | None = None
            for segment in _in_window(run, window):
                keys, mask = _keys(k_LHD, v_LHD, segment, q), _mask(run, segment, window, q)
                part, part_total = _attn_forward(q, *keys, *mask, scaling)
                if out is None or total is None:
                    out, total = part, part_total
                    continue
                combined = torch.logaddexp(total, part_total)
                out = _wide(out) * _weight(total, combined) + _wide(part) * _weight(part_total, combined)
                total = combined
            assert out is not None and total is not None
            out_THGD[run.first : run.last] = out.permute(2, 0, 1, 3)
            sums.append(total)
        ctx.save_for_backward(q_THGD, k_LHD, v_LHD, out_THGD, *sums)
        ctx.plan, ctx.scaling, ctx.window = plan, scaling, window
        return out_THGD

    @staticmethod
    def backward(ctx: Any, grad_THGD: Tensor) -> tuple[Tensor | None, ...]:
        q_THGD, k_LHD, v_LHD, out_THGD, *sums = ctx.saved_tensors
        dq_THGD, dk_LHD, dv_LHD = (
            torch.zeros(x.shape, dtype=wide_type(x), device=x.device) for x in (q_THGD, k_LHD, v_LHD)
        )
        for run, total in zip(ctx.plan.short_runs(_max_queries(q_THGD, ctx.window)), sums, strict=True):
            own = slice(run.first, run.last)
            grad, q, out = (_heads_first(x[own]) for x in (grad_THGD, q_THGD, out_THGD))
            for segment in _in_window(run, ctx.window):
                k, v = _keys(k_LHD, v_LHD, segment, q)
                mask, causal = _mask(run, segment, ctx.window, q)
                dq, dk, dv = _attn_backward(grad, q, k, v, out, total, mask, causal, ctx.scaling)
                seen = slice(segment.first, segment.last)
                dq_THGD[own] += dq.permute(2, 0, 1, 3)
                dk_LHD[seen] += dk.sum(1).transpose(0, 1)
                dv_LHD[seen] += dv.sum(1).transpose(0, 1)
        return dq_THGD.to(q_THGD.dtype), dk_LHD.to(k_LHD.dtype), dv_LHD.to(v_LHD.dtype), None, None, None


def _max_queries(q_THGD: Tensor, window: int | None) -> int:
    """Queries per call: few where scores are materialized, and about one window where there is one."""
    limit = MAX_QUERIES if q_THGD.device.type != "cpu" else UNLIMITED
    return limit if window is None else min(limit, max(window, MIN_QUERIES))


def _split_run(run: Run, max_tokens: int) -> Iterator[Run]:
    own = run.segments[-1]
    for start in range(0, run.last - run.first, max_tokens):
        stop, depth = min(start + max_tokens, run.last - run.first), run.depth + start
        before = (Segment(own.first, own.first + start, own.depth),) if start else ()
        segments = (*run.segments[:-1], *before, Segment(own.first + start, own.first + stop, depth))
        yield Run(run.first + start, run.first + stop, depth, segments)


def _in_window(run: Run, window: int | None) -> list[Segment]:
    """The run's segments, without keys that lie before the window of its first query."""
    if window is None:
        return list(run.segments)
    first = run.depth - window + 1
    clipped = (Segment(s.first + max(0, first - s.depth), s.last, max(s.depth, first)) for s in run.segments)
    return [segment for segment in clipped if segment.first < segment.last]


def wide_type(x: Tensor) -> torch.dtype:
    """The dtype for sums: float32, or that of x if it is wider."""
    return torch.promote_types(x.dtype, torch.float32)


def _wide(x: Tensor) -> Tensor:
    return x.to(wide_type(x))


def _weight(total: Tensor, combined: Tensor) -> Tensor:
    return (total - combined).exp().unsqueeze(-1)


def _heads_first(x_THGD: Tensor) -> Tensor:
    return x_THGD.permute(1, 2, 0, 3)


def _keys(k_LHD: Tensor, v_LHD: Tensor, segment: Segment, q_HGTD: Tensor) -> KV:
    """[H, G, S, D]: each key/value head for all its query heads, without a copy."""
    k, v = (x[segment.first : segment.last].transpose(0, 1).unsqueeze(1) for x in (k_LHD, v_LHD))
    return k.expand(-1, q_HGTD.shape[1], -1, -1), v.expand(-1, q_HGTD.shape[1], -1, -1)


def _mask(run: Run, segment: Segment, window: int | None, q: Tensor) -> tuple[Tensor | None, bool]:
    """The additive mask [T, S], None if none is needed, and whether the kernel's causal mask applies."""
    own = segment.depth == run.depth
    last = segment.depth + segment.last - segment.first - 1
    if window is None or (run.depth + run.last - run.first - 1 - segment.depth < window):
        return None, own
    query_depth = torch.arange(run.depth, run.depth + run.last - run.first, device=q.device).unsqueeze(1)
    key_depth = torch.arange(segment.depth, last + 1, device=q.device)
    masked = (key_depth > query_depth) | (query_depth - key_depth >= window)
    return torch.zeros(masked.shape, device=q.device, dtype=q.dtype).masked_fill_(masked, MASKED), False


def _attn_forward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scaling: float) -> KV:
    """The attention output over these keys [H, G, T, D], and the log-sum-exp [H, G, T] in float32."""
    if q.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(  # type: ignore[no-any-return]
            q, k, v, 0.0, causal, attn_mask=mask, scale=scaling
        )
    score = _scores(q, k, mask, causal, scaling)
    total = score.logsumexp(-1)
    return ((score - total.unsqueeze(-1)).exp() @ _wide(v)).to(q.dtype), total


def _attn_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    total: Tensor,
    mask: Tensor | None,
    causal: bool,
    scaling: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of `_attn_forward`; `out` and `total` are those over all keys of the queries."""
    if q.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(  # type: ignore[no-any-return]
            grad, q, k, v, out, total, 0.0, causal, attn_mask=mask, scale=scaling
        )
    probs = (_scores(q, k, mask, causal, scaling) - total.unsqueeze(-1)).exp()
    grad = _wide(grad)
    inner = probs * (grad @ _wide(v).transpose(-1, -2) - (grad * _wide(out)).sum(-1, keepdim=True)) * scaling
    return inner @ _wide(k), inner.transpose(-1, -2) @ _wide(q), probs.transpose(-1, -2) @ grad


def _scores(q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, scaling: float) -> Tensor:
    score = _wide(q) @ _wide(k).transpose(-1, -2) * scaling
    if causal:
        score = score.masked_fill(torch.ones_like(score[0, 0], dtype=torch.bool).triu(1), MASKED)
    return score if mask is None else score + _wide(mask)
