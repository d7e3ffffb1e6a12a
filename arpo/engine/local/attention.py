"""Attention over the KV cache on a CPU, as the `attention_plan` of a forward pass (`arpo.models.network`).

For every block, one matrix product of all queries that see it, wherever they come from:
one in decoding, several where paths share a prefix. Nothing is gathered, padded or expanded per path, and a shared
block is read once. Rows that read a piece of a prompt have queries enough for the usual attention, one row at a time.

Letters: T tokens, H key/value heads, G query heads per key/value head, D head width, n blocks, W queries per block,
S tokens per block, A = T * H askers, P = n * H * W pairs of one asker and one block's head.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from arpo.engine.local.kv_cache import BLOCK

Ints = npt.NDArray[np.integer[Any]]
BLOCKS_PER_RUN = 16  # blocks in runs shorter than that, on average, are copied together if many queries ask
GAP = 4  # unused blocks between two used ones that are computed along rather than skipped
READS = 16  # new tokens from which on a row is a reader
HIDDEN = -1e30  # the score of what a query may not see; finite, so that nothing becomes NaN


@dataclass(frozen=True, slots=True)
class _Group:
    """Blocks with at most W queries each, in runs of blocks that lie together in the pool, or one by one."""

    runs: list[tuple[int, int]]  # first block, and one past the last
    scattered: Tensor | None  # the blocks' numbers where copying them together is cheaper than many small products
    query_nW: Tensor  # which token asks
    reach_nW: Tensor  # the last offset in the block that it may see; -1 where nobody asks

    def over(self, blocks_BHSD: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Each run's place among the group's (block, head) matrices, and its matrices."""
        heads, at = blocks_BHSD.shape[1], 0
        if self.scattered is not None:
            yield slice(None), blocks_BHSD.index_select(0, self.scattered).flatten(0, 1).float()
            return
        matrices = blocks_BHSD.flatten(0, 1)
        for first, last in self.runs:
            size = (last - first) * heads
            yield slice(at, at + size), matrices[first * heads : last * heads].float()
            at += size


@dataclass(frozen=True, slots=True)
class _Reader:
    """A row that reads a piece of a prompt."""

    tokens: slice  # its new tokens
    blocks: Tensor
    position_C: Tensor
    masks: dict[int | None, Tensor]

    def attend(self, q_CHGD: Tensor, keys: Tensor, values: Tensor, window: int | None) -> Tensor:
        """What its tokens see, by the usual attention over a copy of its keys and values."""
        k_H1LD, v_H1LD = (
            x.index_select(0, self.blocks).transpose(0, 1).flatten(1, 2).unsqueeze(1).float() for x in (keys, values)
        )
        q_HGCD, group = q_CHGD.permute(1, 2, 0, 3), q_CHGD.shape[2]
        k, v = k_H1LD.expand(-1, group, -1, -1), v_H1LD.expand(-1, group, -1, -1)
        mask_CL = self._mask(k.shape[2], window)
        return torch.nn.functional.scaled_dot_product_attention(q_HGCD, k, v, mask_CL, scale=1.0).permute(2, 0, 1, 3)

    def _mask(self, length: int, window: int | None) -> Tensor:
        if window not in self.masks:
            behind_CL = self.position_C.unsqueeze(1) - torch.arange(length)
            hidden_CL = behind_CL < 0
            if window is not None:
                hidden_CL |= behind_CL >= window
            self.masks[window] = torch.zeros(hidden_CL.shape).masked_fill_(hidden_CL, -torch.inf)
        return self.masks[window]


class BlockPlan:
    """What one forward pass on a CPU reads: made once per step, used by every layer.

    Row r has `counts[r]` new tokens, the first at position `starts[r]`; `table[r]` names its blocks in order.
    """

    def __init__(self, data: Tensor, table: Ints, starts: Ints, counts: Ints) -> None:
        self._data, heads = data, data.shape[3]
        row_T = np.repeat(np.arange(len(counts)), counts)
        first = np.cumsum(counts) - counts
        position_T = starts[row_T] + np.arange(len(row_T)) - first[row_T]
        self._block_T = torch.from_numpy(table[row_T, position_T // BLOCK].astype(np.int64))
        self._offset_T = torch.from_numpy(position_T % BLOCK)
        self.position_T = torch.from_numpy(position_T)
        ends = starts + counts
        self._readers = [
            _Reader(
                slice(first[row], first[row] + counts[row]),
                torch.from_numpy(table[row, : -(-ends[row] // BLOCK)].astype(np.int64)),
                self.position_T[first[row] : first[row] + counts[row]],
                {},
            )
            for row in np.flatnonzero(counts >= READS)
        ]
        few = counts < READS
        self._groups = _groups(table[few], ends[few], counts[few], first[few], position_T) if few.any() else []
        if not self._groups:
            return
        head_H1 = torch.arange(heads).unsqueeze(1)
        askers = [(group.query_nW.unsqueeze(1) * heads + head_H1).flatten() for group in self._groups]  # token and head
        self._asker_P = torch.cat(askers)
        self._sizes = [len(part) for part in askers]
        # For each token and head, the pairs that it takes part in: sorted, with the first of each.
        self._order_P = torch.argsort(self._asker_P, stable=True)
        self._begins = torch.searchsorted(self._asker_P[self._order_P], torch.arange(len(row_T) * heads + 1))
        self._hidden: dict[tuple[int, int | None], Tensor] = {}

    def attend(
        self, layer: int, q_THGD: Tensor, k_THD: Tensor, v_THD: Tensor, scaling: float, window: int | None
    ) -> Tensor:
        """Store keys and values, return what the queries see."""
        keys, values = self._data[layer]
        keys[self._block_T, :, self._offset_T] = k_THD
        values[self._block_T, :, self._offset_T] = v_THD
        q_THGD = q_THGD.float() * scaling
        out_THGD = self._decode(q_THGD, keys, values, window) if self._groups else torch.empty_like(q_THGD)
        for reader in self._readers:
            out_THGD[reader.tokens] = reader.attend(q_THGD[reader.tokens], keys, values, window)
        return out_THGD.to(k_THD.dtype)

    def _decode(self, q_THGD: Tensor, keys: Tensor, values: Tensor, window: int | None) -> Tensor:
        """What the tokens of all but the reading rows see; for the others, nothing of any use."""
        q_AGD = q_THGD.flatten(0, 1)
        q_PGD = q_AGD.index_select(0, self._asker_P)
        out_PGD, top_PG = torch.empty_like(q_PGD), q_PGD.new_empty(q_PGD.shape[:2])
        sum_PG = torch.empty_like(top_PG)
        parts = (torch.split(x, self._sizes) for x in (q_PGD, top_PG, sum_PG, out_PGD))
        for number, part in enumerate(zip(*parts, strict=True)):
            self._part(number, keys, values, window, *part)
        index_PG = self._asker_P.unsqueeze(1).expand_as(top_PG)
        top_AG = torch.full(q_AGD.shape[:2], HIDDEN).scatter_reduce_(0, index_PG, top_PG, "amax")
        weight_PG = top_PG.sub_(top_AG.index_select(0, self._asker_P)).exp_()
        sum_AG = self._sum(sum_PG.mul_(weight_PG))
        out_AGD = self._sum(out_PGD.mul_(weight_PG.unsqueeze(2)).flatten(1)).view_as(q_AGD)
        return out_AGD.div_(sum_AG.unsqueeze(2)).view(q_THGD.shape)

    def _part(
        self,
        number: int,
        keys: Tensor,
        values: Tensor,
        window: int | None,
        q_PGD: Tensor,
        top_PG: Tensor,
        sum_PG: Tensor,
        out_PGD: Tensor,
    ) -> None:
        """Fill in, for the pairs of one group: the highest score, the sum of exponentials, the weighted values."""
        group = self._groups[number]
        (n, width), heads, (_, G, D) = group.query_nW.shape, keys.shape[1], q_PGD.shape
        q, out = (x.view(n * heads, width * G, D) for x in (q_PGD, out_PGD))
        score = q.new_empty(n * heads, width * G, BLOCK)
        for at, keys_run in group.over(keys):
            torch.bmm(q[at], keys_run.transpose(1, 2), out=score[at])
        score_nHWGS = score.view(n, heads, width, G, BLOCK)
        score_nHWGS.masked_fill_(self._hides(number, window), HIDDEN)
        score_PGS = score.view(-1, G, BLOCK)
        torch.amax(score_PGS, -1, out=top_PG)
        score_PGS.sub_(top_PG.unsqueeze(-1)).exp_()
        for at, values_run in group.over(values):
            torch.bmm(score[at], values_run, out=out[at])
        torch.sum(score_PGS, -1, out=sum_PG)

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
        """Add up what belongs to the same token and head."""
        return torch.nn.functional.embedding_bag(
            self._order_P, x_PF, self._begins, mode="sum", include_last_offset=True
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
