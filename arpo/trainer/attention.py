"""Attention over a tree in training: every token attends to the tokens above it on its path, and to nothing else.

A `TreePlan` is made once per forward pass and passed to the model as `attention_plan=` (see `arpo.models.network`). It cuts
the tokens into runs: stretches in which each token follows the one before it. What a run sees is its own tokens, causally,
and all of a few stretches above it, which lie together in memory; a token's place along its path is its depth, so
sliding windows are counted in depth.

On a CPU each (run, stretch) is one call of the usual attention kernel without a mask (with windows, runs are cut to
about a window, and masks are no larger than two of them). The results are joined by their log-sum-exps, and the
backward pass gives each call the joined ones, which makes it exact; nothing is copied. On a GPU with 16-bit numbers all
runs are one call of flash attention for ragged batches, over keys and values gathered along each run's path; the
gradients of these are added up in float32, always in the same order. Elsewhere (float32 on a GPU) it goes as on a CPU,
by plain matrix products of at most 1,024 queries.

Letters: T tokens, C tokens of the context, L tokens in the context and T together, H key/value heads, G query heads per
key/value head, D head width, R gathered tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Ints = npt.NDArray[np.int64]
QUERIES = 1024  # in one piece where its scores are written out
SHORT = 128  # with a window, pieces are not shorter than that
ENDLESS = 1 << 62
HIDDEN = -1e30  # the score of what a query may not see; finite, so that nothing becomes NaN
KV = tuple[Tensor, Tensor]


class Stretch(NamedTuple):
    """Keys [first, last) of the context and the pass's own tokens; the first has this depth."""

    first: int
    last: int
    depth: int


class Run(NamedTuple):
    """Tokens [first, last) of the pass, the first at this depth, and what they see: the last stretch is their own."""

    first: int
    last: int
    depth: int
    sees: tuple[Stretch, ...]


def find_runs(parent_T: Ints, depth_T: Ints, context: int) -> tuple[Run, ...]:
    """The runs of a pass. `parent_T` is the place in the pass, -1 where the parent is none or ends the context."""
    size = len(parent_T)
    starts = np.flatnonzero(parent_T != np.arange(size) - 1) if size else np.empty(0, dtype=np.int64)
    if size and (not len(starts) or starts[0] != 0):
        starts = np.concatenate([[0], starts])
    begin_T = np.repeat(starts, np.diff(starts, append=size))
    runs = []
    for first, last in zip(starts.tolist(), [*starts[1:].tolist(), size], strict=True):
        sees, at = [Stretch(context + first, context + last, int(depth_T[first]))], int(parent_T[first])
        while at >= 0:
            begin = int(begin_T[at])
            sees.append(Stretch(context + begin, context + at + 1, int(depth_T[begin])))
            at = int(parent_T[begin])
        if context:
            sees.append(Stretch(0, context, 0))
        runs.append(Run(first, last, int(depth_T[first]), tuple(reversed(sees))))
    return tuple(runs)


class TreePlan:
    """One forward pass over tokens of a tree, below a `context` whose keys and values are known (per layer).

    With `keep`, its own keys and values are remembered in `kept`, for passes below it.
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
        """What the queries see: [T, H, G, D]."""
        if self._keep and layer not in self.kept:  # when activations are recomputed it comes by again
            self.kept[layer] = k_THD, v_THD
        if self._context:
            k_C, v_C = self._context[layer]
            k_THD, v_THD = torch.cat([k_C, k_THD]), torch.cat([v_C, v_THD])
        how = _Flash if _has_flash(q_THGD) else _Pieces
        return how.apply(q_THGD, k_THD, v_THD, self, scaling, window)  # type: ignore[no-any-return, no-untyped-call]

    def take(self) -> list[KV]:
        """What was kept, layer by layer. Not kept here any longer: its graph leads back to here, and never would go."""
        kept, self.kept, self._keep = self.kept, {}, False
        return [kept[layer] for layer in range(len(kept))]

    def short_runs(self, longest: int) -> list[Run]:
        """The runs, cut into ones of at most `longest` tokens."""
        if longest not in self._split:
            self._split[longest] = [part for run in self.runs for part in _cut_run(run, longest)]
        return self._split[longest]

    def gathered(self, device: torch.device) -> _Gathered:
        """For flash attention: all runs side by side."""
        if self._gathered is None:
            self._gathered = _gather(self.runs, self.context_tokens + self.runs[-1].last, device)
        return self._gathered


@dataclass(frozen=True, slots=True)
class _Gathered:
    queries: Tensor  # where each run's queries begin, and the end
    keys: Tensor  # where its keys begin among the gathered
    longest: tuple[int, int]
    index_R: Tensor | None  # which key each of the gathered is; None: all of them, in order
    order_R: Tensor  # the gathered, sorted by key
    begins_L: Tensor  # where each key's begin in that order, and the end


def _gather(runs: tuple[Run, ...], length: int, device: torch.device) -> _Gathered:
    index_R = np.concatenate([np.arange(s.first, s.last) for run in runs for s in run.sees])
    counts = [sum(s.last - s.first for s in run.sees) for run in runs]
    asked = [run.last - run.first for run in runs]
    index = torch.from_numpy(index_R).to(device)
    sorted_R, order_R = torch.sort(index, stable=True)
    return _Gathered(
        torch.tensor([0, *np.cumsum(asked)], dtype=torch.int32).to(device),
        torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32).to(device),
        (max(asked), max(counts)),
        None if np.array_equal(index_R, np.arange(length)) else index,
        order_R,
        torch.searchsorted(sorted_R, torch.arange(length + 1, device=device)),
    )


def _has_flash(q_THGD: Tensor) -> bool:
    width = q_THGD.shape[-1]
    return q_THGD.is_cuda and q_THGD.dtype in (torch.bfloat16, torch.float16) and width % 8 == 0 and width <= 256


class _Flash(torch.autograd.Function):
    """All runs in one call on a GPU. Keys and values are gathered again in the backward pass rather than kept."""

    @staticmethod
    def forward(
        ctx: Any, q_THGD: Tensor, k_LHD: Tensor, v_LHD: Tensor, plan: TreePlan, scaling: float, window: int | None
    ) -> Tensor:
        there = plan.gathered(q_THGD.device)
        q_TFD = q_THGD.flatten(1, 2)
        k_RHD, v_RHD = (_pick(x, there.index_R) for x in (k_LHD, v_LHD))
        ctx.places = there.queries, there.keys, *there.longest
        ctx.options = {"scale": scaling, "window_size_left": -1 if window is None else window - 1}
        ctx.options["window_size_right"] = -1 if window is None else 0
        ctx.causal = window is None
        out_TFD, sums, *random, _ = torch.ops.aten._flash_attention_forward(
            q_TFD, k_RHD, v_RHD, *ctx.places, 0.0, ctx.causal, False, **ctx.options
        )
        ctx.save_for_backward(q_TFD, k_LHD, v_LHD, out_TFD, sums, *random)
        ctx.plan, ctx.shape = plan, q_THGD.shape
        return out_TFD.view(q_THGD.shape)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad_THGD: Tensor) -> tuple[Tensor | None, ...]:
        q_TFD, k_LHD, v_LHD, out_TFD, sums, *random = ctx.saved_tensors
        there = ctx.plan.gathered(q_TFD.device)
        k_RHD, v_RHD = (_pick(x, there.index_R) for x in (k_LHD, v_LHD))
        dq_TFD, dk_RHD, dv_RHD = torch.ops.aten._flash_attention_backward(
            grad_THGD.flatten(1, 2).contiguous(),
            q_TFD,
            k_RHD,
            v_RHD,
            out_TFD,
            sums,
            *ctx.places,
            0.0,
            ctx.causal,
            *random,
            **ctx.options,
        )
        return dq_TFD.view(ctx.shape), _add_up(dk_RHD, there), _add_up(dv_RHD, there), None, None, None


def _pick(x_LHD: Tensor, index_R: Tensor | None) -> Tensor:
    return x_LHD.contiguous() if index_R is None else x_LHD.index_select(0, index_R)


def _add_up(x_RHD: Tensor, there: _Gathered) -> Tensor:
    """Of what was gathered, the sum over the copies of each key."""
    if there.index_R is None:
        return x_RHD
    x_LF = torch.nn.functional.embedding_bag(
        there.order_R, x_RHD.flatten(1), there.begins_L, mode="sum", include_last_offset=True
    )
    return x_LF.view(-1, *x_RHD.shape[1:])


class _Pieces(torch.autograd.Function):
    """One run and one stretch at a time."""

    @staticmethod
    def forward(
        ctx: Any, q_THGD: Tensor, k_LHD: Tensor, v_LHD: Tensor, plan: TreePlan, scaling: float, window: int | None
    ) -> Tensor:
        out_THGD = torch.empty_like(q_THGD, memory_format=torch.contiguous_format)
        sums = []
        for run in plan.short_runs(_longest(q_THGD, window)):
            q = _heads_first(q_THGD[run.first : run.last])
            out: Tensor | None = None
            total: Tensor | None = None
            for stretch in _within(run, window):
                part, part_total = _ask(q, *_keys(k_LHD, v_LHD, stretch, q), *_sight(run, stretch, window, q), scaling)
                if out is None or total is None:
                    out, total = part, part_total
                    continue
                both = torch.logaddexp(total, part_total)
                out = _wide(out) * _weight(total, both) + _wide(part) * _weight(part_total, both)
                total = both
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
        for run, total in zip(ctx.plan.short_runs(_longest(q_THGD, ctx.window)), sums, strict=True):
            own = slice(run.first, run.last)
            grad, q, out = (_heads_first(x[own]) for x in (grad_THGD, q_THGD, out_THGD))
            for stretch in _within(run, ctx.window):
                k, v = _keys(k_LHD, v_LHD, stretch, q)
                mask, causal = _sight(run, stretch, ctx.window, q)
                dq, dk, dv = _answer(grad, q, k, v, out, total, mask, causal, ctx.scaling)
                seen = slice(stretch.first, stretch.last)
                dq_THGD[own] += dq.permute(2, 0, 1, 3)
                dk_LHD[seen] += dk.sum(1).transpose(0, 1)
                dv_LHD[seen] += dv.sum(1).transpose(0, 1)
        return dq_THGD.to(q_THGD.dtype), dk_LHD.to(k_LHD.dtype), dv_LHD.to(v_LHD.dtype), None, None, None


def _longest(q_THGD: Tensor, window: int | None) -> int:
    """Queries in one piece: few where scores are written out, and about a window's where there is one."""
    most = QUERIES if q_THGD.device.type != "cpu" else ENDLESS
    return most if window is None else min(most, max(window, SHORT))


def _cut_run(run: Run, longest: int) -> Iterator[Run]:
    own = run.sees[-1]
    for start in range(0, run.last - run.first, longest):
        stop, depth = min(start + longest, run.last - run.first), run.depth + start
        before = (Stretch(own.first, own.first + start, own.depth),) if start else ()
        sees = (*run.sees[:-1], *before, Stretch(own.first + start, own.first + stop, depth))
        yield Run(run.first + start, run.first + stop, depth, sees)


def _within(run: Run, window: int | None) -> list[Stretch]:
    """What of the path is near enough to be seen by the first query."""
    if window is None:
        return list(run.sees)
    nearest = run.depth - window + 1
    clipped = (Stretch(s.first + max(0, nearest - s.depth), s.last, max(s.depth, nearest)) for s in run.sees)
    return [stretch for stretch in clipped if stretch.first < stretch.last]


def wide_type(x: Tensor) -> torch.dtype:
    """The format in which to add up: float32, or that of x if it is wider."""
    return torch.promote_types(x.dtype, torch.float32)


def _wide(x: Tensor) -> Tensor:
    return x.to(wide_type(x))


def _weight(total: Tensor, both: Tensor) -> Tensor:
    return (total - both).exp().unsqueeze(-1)


def _heads_first(x_THGD: Tensor) -> Tensor:
    return x_THGD.permute(1, 2, 0, 3)


def _keys(k_LHD: Tensor, v_LHD: Tensor, stretch: Stretch, q_HGTD: Tensor) -> KV:
    """[H, G, S, D]: each key/value head for all its query heads, without a copy."""
    k, v = (x[stretch.first : stretch.last].transpose(0, 1).unsqueeze(1) for x in (k_LHD, v_LHD))
    return k.expand(-1, q_HGTD.shape[1], -1, -1), v.expand(-1, q_HGTD.shape[1], -1, -1)


def _sight(run: Run, stretch: Stretch, window: int | None, q: Tensor) -> tuple[Tensor | None, bool]:
    """The mask [T, S] that is needed, if any, and whether it is the causal one."""
    own = stretch.depth == run.depth
    last = stretch.depth + stretch.last - stretch.first - 1
    if window is None or (run.depth + run.last - run.first - 1 - stretch.depth < window):
        return None, own
    asked = torch.arange(run.depth, run.depth + run.last - run.first, device=q.device).unsqueeze(1)
    seen = torch.arange(stretch.depth, last + 1, device=q.device)
    hidden = (seen > asked) | (asked - seen >= window)
    return torch.zeros(hidden.shape, device=q.device, dtype=q.dtype).masked_fill_(hidden, HIDDEN), False


def _ask(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scaling: float) -> KV:
    """What the queries see of these keys [H, G, T, D], and the log of the sum of exponentials [H, G, T] in float32."""
    if q.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(  # type: ignore[no-any-return]
            q, k, v, 0.0, causal, attn_mask=mask, scale=scaling
        )
    score = _scores(q, k, mask, causal, scaling)
    total = score.logsumexp(-1)
    return ((score - total.unsqueeze(-1)).exp() @ _wide(v)).to(q.dtype), total


def _answer(
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
    """The gradients of `_ask`, where `out` and `total` are those over all keys that the queries see."""
    if q.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(  # type: ignore[no-any-return]
            grad, q, k, v, out, total, 0.0, causal, attn_mask=mask, scale=scaling
        )
    share = (_scores(q, k, mask, causal, scaling) - total.unsqueeze(-1)).exp()
    grad = _wide(grad)
    inner = share * (grad @ _wide(v).transpose(-1, -2) - (grad * _wide(out)).sum(-1, keepdim=True)) * scaling
    return inner @ _wide(k), inner.transpose(-1, -2) @ _wide(q), share.transpose(-1, -2) @ grad


def _scores(q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, scaling: float) -> Tensor:
    score = _wide(q) @ _wide(k).transpose(-1, -2) * scaling
    if causal:
        score = score.masked_fill(torch.ones_like(score[0, 0], dtype=torch.bool).triu(1), HIDDEN)
    return score if mask is None else score + _wide(mask)
