"""Attention over the block pool, as a Hugging Face attention function.

`install` makes a model call `attention` below: with a `step=` among the forward pass's keyword arguments (the engine)
it reads and writes the pool, without one (training, `generate`) it does what the model did before. A forward pass of
the engine is one flat row of tokens [1, T], whatever sequences they belong to.

The CPU's way (`BlockPlan`): for every block, one matrix product of all queries that see it, wherever they come from:
one per path in decoding, many for a prefix that paths share, many for a prompt being read. Nothing is gathered, padded
or expanded per path, and a shared block is read once.

Letters: T tokens, H key/value heads, G query heads per key/value head, D head width, n blocks, W queries per block,
S tokens per block, P = n * W pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from arpo.engine.kvpool import BLOCK

Ints = npt.NDArray[np.integer[Any]]
BLOCKS_PER_RUN = 16  # blocks in runs shorter than that, on average, are copied together if many queries ask
GAP = 4  # unused blocks between two used ones that are computed along rather than skipped
HIDDEN = -1e30  # the score of what a query may not see; finite, so that nothing becomes NaN


class Step(Protocol):
    """One forward pass over the pool."""

    def attend(
        self, layer: int, q_THGD: Tensor, k_THD: Tensor, v_THD: Tensor, scaling: float, window: int | None
    ) -> Tensor:
        """Store keys and values, return what the queries see: [T, H, G, D]."""
        ...


def install(model: Any) -> None:
    """Let the model's attention follow a `step=` where one is given."""
    before = model.config._attn_implementation or "eager"
    if before.startswith("arpo-"):
        return
    name = f"arpo-{before}"
    if name not in ALL_ATTENTION_FUNCTIONS:
        usual = ALL_ATTENTION_FUNCTIONS.get(before)
        AttentionInterface.register(name, partial(_attention, usual))
        AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[before])
    model.config._attn_implementation = name


def _attention(
    usual: Callable[..., Any] | None,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    step: Step | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    if step is None:
        if usual is None:  # eager attention is a function of each model's own file
            usual = __import__(type(module).__module__, fromlist=["_"]).eager_attention_forward
        return usual(  # type: ignore[no-any-return]
            module,
            query,
            key,
            value,
            attention_mask,
            scaling=scaling,
            dropout=dropout,
            sliding_window=sliding_window,
            **kwargs,
        )
    heads = key.shape[1]
    q_THGD = query[0].view(heads, -1, *query.shape[2:]).permute(2, 0, 1, 3)
    k_THD, v_THD = key[0].transpose(0, 1), value[0].transpose(0, 1)
    out_THGD = step.attend(module.layer_idx, q_THGD, k_THD, v_THD, scaling, sliding_window)
    return out_THGD.flatten(1, 2).unsqueeze(0), None


@dataclass(frozen=True, slots=True)
class _Group:
    """Blocks with at most W queries each, in runs of blocks that lie together in the pool, or one by one."""

    runs: list[tuple[int, int]]  # first block, and one past the last
    scattered: Tensor | None  # the blocks' numbers where copying them together is cheaper than many small products
    query_nW: Tensor  # which token asks
    reach_nW: Tensor  # the last offset in the block that it may see; -1 where nobody asks

    def over(self, blocks: Tensor) -> Iterator[tuple[tuple[int, int], Tensor]]:
        """Each run's place among the group's (block, head) matrices, and its matrices."""
        heads, at = blocks.shape[1], 0
        if self.scattered is not None:
            yield (0, len(self.scattered) * heads), blocks.index_select(0, self.scattered).flatten(0, 1).float()
            return
        for first, last in self.runs:
            size = (last - first) * heads
            yield (at, at + size), blocks[first:last].flatten(0, 1).float()
            at += size


class BlockPlan:
    """What one forward pass on a CPU reads: made once per step, used by every layer.

    Row r has `counts[r]` new tokens, the first at position `starts[r]`; `table[r]` names its blocks in order.
    """

    def __init__(self, data: Tensor, table: Ints, starts: Ints, counts: Ints) -> None:
        self._data = data
        row_T = np.repeat(np.arange(len(counts)), counts)
        first = np.cumsum(counts) - counts
        position_T = starts[row_T] + np.arange(len(row_T)) - first[row_T]
        self._block_T = torch.from_numpy(table[row_T, position_T // BLOCK].astype(np.int64))
        self._offset_T = torch.from_numpy(position_T % BLOCK)
        self.position_T = torch.from_numpy(position_T)
        self._groups = _groups(table, starts + counts, counts, first, position_T)
        self._query_P = torch.cat([group.query_nW.flatten() for group in self._groups])
        # For each token, the pairs that it takes part in: sorted by token, with the first of each.
        self._order_P = torch.argsort(self._query_P, stable=True)
        self._offset_T1 = torch.searchsorted(self._query_P[self._order_P], torch.arange(len(row_T) + 1))
        self._hidden: dict[tuple[int, int | None], Tensor] = {}

    def attend(
        self, layer: int, q_THGD: Tensor, k_THD: Tensor, v_THD: Tensor, scaling: float, window: int | None
    ) -> Tensor:
        """Store keys and values, return what the queries see."""
        keys, values = self._data[layer]
        keys[self._block_T, :, self._offset_T] = k_THD
        values[self._block_T, :, self._offset_T] = v_THD
        q_THGD = q_THGD.float() * scaling
        parts = [self._part(number, q_THGD, keys, values, window) for number in range(len(self._groups))]
        top_PF, sum_PF, out_PFD = (torch.cat(column) if len(parts) > 1 else column[0] for column in zip(*parts))  # noqa: B905
        tokens, heads = len(q_THGD), top_PF.shape[1]
        index_PF = self._query_P.unsqueeze(1).expand_as(top_PF)
        top_TF = torch.full((tokens, heads), HIDDEN).scatter_reduce_(0, index_PF, top_PF, "amax")
        weight_PF = top_PF.sub_(top_TF[self._query_P]).exp_()
        sum_TF = self._sum(sum_PF.mul_(weight_PF))
        out_TFD = self._sum(out_PFD.mul_(weight_PF.unsqueeze(2)).flatten(1)).view(tokens, heads, -1)
        return out_TFD.div_(sum_TF.unsqueeze(2)).view_as(q_THGD).to(k_THD.dtype)

    def _part(
        self, number: int, q_THGD: Tensor, keys: Tensor, values: Tensor, window: int | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Of one group, per pair and query head: the highest score, the sum of exponentials, the weighted values."""
        group = self._groups[number]
        (n, width), (_, H, G, D) = group.query_nW.shape, q_THGD.shape
        q_nHWGD = q_THGD[group.query_nW].transpose(1, 2).reshape(n * H, width * G, D)
        score = q_THGD.new_empty(n * H, width * G, BLOCK)
        out = q_THGD.new_empty(n * H, width * G, D)
        for (a, b), keys_run in group.over(keys):
            torch.bmm(q_nHWGD[a:b], keys_run.transpose(1, 2), out=score[a:b])
        score_nHWGS = score.view(n, H, width, G, BLOCK)
        score_nHWGS.masked_fill_(self._hides(number, window), HIDDEN)
        top_nHWG = score_nHWGS.amax(-1)
        score_nHWGS.sub_(top_nHWG.unsqueeze(-1)).exp_()
        for (a, b), values_run in group.over(values):
            torch.bmm(score[a:b], values_run, out=out[a:b])
        sum_nHWG = score_nHWGS.sum(-1)
        by_pair = (x.transpose(1, 2).reshape(n * width, H * G) for x in (top_nHWG, sum_nHWG))
        return *by_pair, out.view(n, H, width, G, D).transpose(1, 2).reshape(n * width, H * G, D)  # type: ignore[return-value]

    def _hides(self, number: int, window: int | None) -> Tensor:
        """[n, 1, W, 1, S]: true where the query may not see that offset of the block."""
        if (number, window) not in self._hidden:
            reach_nW1, offset_S = self._groups[number].reach_nW.unsqueeze(-1), torch.arange(BLOCK)
            hidden_nWS = offset_S > reach_nW1
            if window is not None:
                hidden_nWS |= offset_S <= reach_nW1 - window
            self._hidden[number, window] = hidden_nWS[:, None, :, None, :]
        return self._hidden[number, window]

    def _sum(self, x_PF: Tensor) -> Tensor:
        """Add up what belongs to the same token."""
        return torch.nn.functional.embedding_bag(
            self._order_P, x_PF, self._offset_T1, mode="sum", include_last_offset=True
        )


def _groups(table: Ints, ends: Ints, counts: Ints, first: Ints, position_T: Ints) -> list[_Group]:
    """All (block, token) pairs in which the token may see the block, by block, in groups of similar width."""
    blocks = -(-ends // BLOCK)
    row = np.repeat(np.arange(len(counts)), blocks)  # per (row, block) from here on
    index = np.arange(len(row)) - (np.cumsum(blocks) - blocks)[row]
    number = table[row, index]
    order = np.argsort(number, kind="stable")
    row, index, number = row[order], index[order], number[order]
    count = counts[row]
    token = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count - first[row], count)  # per pair from here on
    reach = position_T[token] - np.repeat(index, count) * BLOCK
    number, token, reach = np.repeat(number, count)[reach >= 0], token[reach >= 0], reach[reach >= 0]
    numbers, begins, widths = np.unique(number, return_index=True, return_counts=True)
    slot = np.arange(len(number)) - np.repeat(begins, widths)
    groups, low = [], 0
    for high in _widths(int(widths.max())):
        mine = (widths > low) & (widths <= high)
        low = high
        if mine.any():
            inside = np.repeat(mine, widths)
            groups.append(_group(numbers[mine], widths[mine], slot[inside], token[inside], reach[inside]))
    return groups


def _widths(widest: int) -> Iterator[int]:
    width = 1
    yield width
    while width < widest:
        width *= 4
        yield width


def _group(numbers: Ints, widths: Ints, slot: Ints, token: Ints, reach: Ints) -> _Group:
    gap = GAP if widths.max() == 1 else 0
    new_run = np.diff(numbers, prepend=-2 - gap) > gap + 1
    starts = numbers[new_run]
    ends = np.append(numbers[:-1][new_run[1:]], numbers[-1]) + 1
    sizes = ends - starts
    run = np.cumsum(new_run) - 1
    place = np.repeat((np.cumsum(sizes) - sizes)[run] + numbers - starts[run], widths)
    query_nW = np.zeros((sizes.sum(), widths.max()), dtype=np.int64)
    reach_nW = np.full(query_nW.shape, -1)
    query_nW[place, slot] = token
    reach_nW[place, slot] = reach
    runs = list(zip(starts.tolist(), ends.tolist(), strict=True))
    scattered = widths.max() > 1 and len(runs) > 1 + len(numbers) // BLOCKS_PER_RUN
    together = torch.from_numpy(numbers.astype(np.int64)) if scattered else None
    return _Group(runs, together, torch.from_numpy(query_nW), torch.from_numpy(reach_nW))
