"""Attention over the KV cache on a CPU, as the `attention_plan` of a forward pass (`arpo.models.network`).

For every block there is one matrix product with all queries that see it: one query in decoding, several where sequences
share a prefix. Nothing is gathered, padded or expanded per sequence, and a shared block is read once. Partial results
are combined by their log-sum-exps. Rows that prefill many tokens use ordinary attention, one row at a time.

Shape suffixes: T tokens, C new tokens of one row, L cached tokens of one row, H key/value heads, G query heads per
key/value head, D head dimension, n blocks, W queries per block, S tokens per block, A = T * H queries (a token and a
head), P = n * H * W pairs of a query and a block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from arpo.engine.local.kv_cache import BLOCK_SIZE
from arpo.models.network import MASKED

Ints = npt.NDArray[np.integer[Any]]
BLOCKS_PER_RUN = 16  # blocks in runs shorter than that, on average, are copied together if many queries see them
MAX_GAP = 4  # unused blocks between two used ones that are computed along rather than skipped
PREFILL_MIN_TOKENS = 16  # new tokens from which on a row uses ordinary attention


@dataclass(frozen=True, slots=True)
class _BlockGroup:
    """Blocks with at most W queries each, in runs of consecutive blocks, or scattered."""

    runs: list[tuple[int, int]]  # first block, and one past the last
    scattered: Tensor | None  # block indices, where copying them together is cheaper than many small products
    token_nW: Tensor  # the token whose query it is
    last_offset_nW: Tensor  # the last offset in the block that it sees; -1 where there is no query

    def matrices(self, cache_BHSD: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yield each run's (block, head) matrices, with their positions among those of the group."""
        heads, position = cache_BHSD.shape[1], 0
        if self.scattered is not None:
            yield slice(None), cache_BHSD.index_select(0, self.scattered).flatten(0, 1).float()
            return
        matrices = cache_BHSD.flatten(0, 1)
        for first, last in self.runs:
            size = (last - first) * heads
            yield slice(position, position + size), matrices[first * heads : last * heads].float()
            position += size


@dataclass(frozen=True, slots=True)
class _PrefillRow:
    """A row with many new tokens."""

    tokens: slice  # its new tokens
    blocks: Tensor
    position_C: Tensor
    masks: dict[int | None, Tensor]  # by window

    def attend(self, q_CHGD: Tensor, keys: Tensor, values: Tensor, window: int | None) -> Tensor:
        """Return the attention output of its tokens, computed over a copy of its keys and values."""
        k_H1LD, v_H1LD = (
            x.index_select(0, self.blocks).transpose(0, 1).flatten(1, 2).unsqueeze(1).float() for x in (keys, values)
        )
        q_HGCD, group = q_CHGD.permute(1, 2, 0, 3), q_CHGD.shape[2]
        k, v = k_H1LD.expand(-1, group, -1, -1), v_H1LD.expand(-1, group, -1, -1)
        mask_CL = self._mask(k.shape[2], window)
        return torch.nn.functional.scaled_dot_product_attention(q_HGCD, k, v, mask_CL, scale=1.0).permute(2, 0, 1, 3)

    def _mask(self, length: int, window: int | None) -> Tensor:
        if window not in self.masks:
            distance_CL = self.position_C.unsqueeze(1) - torch.arange(length)
            masked_CL = distance_CL < 0
            if window is not None:
                masked_CL |= distance_CL >= window
            self.masks[window] = torch.zeros(masked_CL.shape, dtype=torch.float32).masked_fill_(masked_CL, -torch.inf)
        return self.masks[window]


class BlockPlan:
    """Attention of one step: built once per step, used by every layer.

    Row r has `counts[r]` new tokens, the first at position `starts[r]`; `block_table[r]` lists its blocks in order.
    """

    def __init__(self, data: Tensor, block_table: Ints, starts: Ints, counts: Ints) -> None:
        self._data, heads = data, data.shape[3]
        row_T = np.repeat(np.arange(len(counts)), counts)
        first = np.cumsum(counts) - counts
        position_T = starts[row_T] + np.arange(len(row_T)) - first[row_T]
        self._block_T = torch.from_numpy(block_table[row_T, position_T // BLOCK_SIZE].astype(np.int64))
        self._offset_T = torch.from_numpy(position_T % BLOCK_SIZE)
        self.position_T = torch.from_numpy(position_T)
        ends = starts + counts
        self._prefill_rows = [
            _PrefillRow(
                slice(first[row], first[row] + counts[row]),
                torch.from_numpy(block_table[row, : -(-ends[row] // BLOCK_SIZE)].astype(np.int64)),
                self.position_T[first[row] : first[row] + counts[row]],
                {},
            )
            for row in np.flatnonzero(counts >= PREFILL_MIN_TOKENS)
        ]
        few = counts < PREFILL_MIN_TOKENS
        self._groups = _groups(block_table[few], ends[few], counts[few], first[few], position_T) if few.any() else []
        if not self._groups:
            return
        head_H1 = torch.arange(heads).unsqueeze(1)
        queries = [(group.token_nW.unsqueeze(1) * heads + head_H1).flatten() for group in self._groups]
        self._query_P = torch.cat(queries)
        self._sizes = [len(part) for part in queries]
        # The pairs sorted by query, and where those of each query begin.
        self._order_P = torch.argsort(self._query_P, stable=True)
        self._begins = torch.searchsorted(self._query_P[self._order_P], torch.arange(len(row_T) * heads + 1))
        self._masks: dict[tuple[int, int | None], Tensor] = {}

    def attend(
        self, layer: int, q_THGD: Tensor, k_THD: Tensor, v_THD: Tensor, scaling: float, window: int | None
    ) -> Tensor:
        """Store the new keys and values, and return the attention output [T, H, G, D]."""
        keys, values = self._data[layer]
        keys[self._block_T, :, self._offset_T] = k_THD
        values[self._block_T, :, self._offset_T] = v_THD
        q_THGD = q_THGD.float() * scaling
        out_THGD = self._decode(q_THGD, keys, values, window) if self._groups else torch.empty_like(q_THGD)
        for row in self._prefill_rows:
            out_THGD[row.tokens] = row.attend(q_THGD[row.tokens], keys, values, window)
        return out_THGD.to(k_THD.dtype)

    def _decode(self, q_THGD: Tensor, keys: Tensor, values: Tensor, window: int | None) -> Tensor:
        """Return the attention output of all rows; that of prefill rows is meaningless."""
        q_AGD = q_THGD.flatten(0, 1)
        q_PGD = q_AGD.index_select(0, self._query_P)
        out_PGD, top_PG = torch.empty_like(q_PGD), q_PGD.new_empty(q_PGD.shape[:2])
        sum_PG = torch.empty_like(top_PG)
        parts = (torch.split(x, self._sizes) for x in (q_PGD, top_PG, sum_PG, out_PGD))
        for number, part in enumerate(zip(*parts, strict=True)):
            self._attend_group(number, keys, values, window, *part)
        index_PG = self._query_P.unsqueeze(1).expand_as(top_PG)
        top_AG = q_AGD.new_full(q_AGD.shape[:2], MASKED).scatter_reduce_(0, index_PG, top_PG, "amax")
        weight_PG = top_PG.sub_(top_AG.index_select(0, self._query_P)).exp_()
        sum_AG = self._sum_by_query(sum_PG.mul_(weight_PG))
        out_AGD = self._sum_by_query(out_PGD.mul_(weight_PG.unsqueeze(2)).flatten(1)).view_as(q_AGD)
        return out_AGD.div_(sum_AG.unsqueeze(2)).view(q_THGD.shape)

    def _attend_group(
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
        (n, width), heads, (_, G, D) = group.token_nW.shape, keys.shape[1], q_PGD.shape
        q, out = (x.view(n * heads, width * G, D) for x in (q_PGD, out_PGD))
        score = q.new_empty(n * heads, width * G, BLOCK_SIZE)
        for at, keys_run in group.matrices(keys):
            torch.bmm(q[at], keys_run.transpose(1, 2), out=score[at])
        score_nHWGS = score.view(n, heads, width, G, BLOCK_SIZE)
        score_nHWGS.masked_fill_(self._mask(number, window), MASKED)
        score_PGS = score.view(-1, G, BLOCK_SIZE)
        torch.amax(score_PGS, -1, out=top_PG)
        score_PGS.sub_(top_PG.unsqueeze(-1)).exp_()
        for at, values_run in group.matrices(values):
            torch.bmm(score[at], values_run, out=out[at])
        torch.sum(score_PGS, -1, out=sum_PG)

    def _mask(self, number: int, window: int | None) -> Tensor:
        """Return [n, 1, W, 1, S]: true where the query does not see that offset of the block."""
        if (number, window) not in self._masks:
            last_nW1, offset_S = self._groups[number].last_offset_nW.unsqueeze(-1), torch.arange(BLOCK_SIZE)
            masked_nWS = offset_S > last_nW1
            if window is not None:
                masked_nWS |= offset_S <= last_nW1 - window
            self._masks[number, window] = masked_nWS[:, None, :, None, :]
        return self._masks[number, window]

    def _sum_by_query(self, x_PF: Tensor) -> Tensor:
        """Return the sums [A, F] over the pairs of each query."""
        return torch.nn.functional.embedding_bag(
            self._order_P, x_PF, self._begins, mode="sum", include_last_offset=True
        )


def _groups(block_table: Ints, ends: Ints, counts: Ints, first: Ints, position_T: Ints) -> list[_BlockGroup]:
    """Return all (block, token) pairs in which the token sees the block, by block, in groups of similar width."""
    num_blocks = -(-ends // BLOCK_SIZE)
    row = np.repeat(np.arange(len(counts)), num_blocks)  # per (row, block) from here on
    index = np.arange(len(row)) - (np.cumsum(num_blocks) - num_blocks)[row]
    block = block_table[row, index]
    order = np.argsort(block, kind="stable")
    row, index, block = row[order], index[order], block[order]
    count = counts[row]
    token = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count - first[row], count)  # per pair from here on
    last_offset = position_T[token] - np.repeat(index, count) * BLOCK_SIZE
    visible = last_offset >= 0
    block, token, last_offset = np.repeat(block, count)[visible], token[visible], last_offset[visible]
    blocks, begins, widths = np.unique(block, return_index=True, return_counts=True)
    slot = np.arange(len(block)) - np.repeat(begins, widths)
    groups, narrower = [], 0
    widest = 1
    while narrower < widths.max():
        chosen = (widths > narrower) & (widths <= widest)
        if chosen.any():
            pairs = np.repeat(chosen, widths)
            groups.append(_group(blocks[chosen], widths[chosen], slot[pairs], token[pairs], last_offset[pairs]))
        narrower, widest = widest, widest * 4
    return groups


def _group(blocks: Ints, widths: Ints, slot: Ints, token: Ints, last_offset: Ints) -> _BlockGroup:
    gap = MAX_GAP if widths.max() == 1 else 0
    new_run = np.diff(blocks, prepend=-2 - gap) > gap + 1
    starts = blocks[new_run]
    ends = np.append(blocks[:-1][new_run[1:]], blocks[-1]) + 1
    sizes = ends - starts
    run = np.cumsum(new_run) - 1
    place = np.repeat((np.cumsum(sizes) - sizes)[run] + blocks - starts[run], widths)
    token_nW = np.zeros((sizes.sum(), widths.max()), dtype=np.int64)
    last_offset_nW = np.full(token_nW.shape, -1)
    token_nW[place, slot] = token
    last_offset_nW[place, slot] = last_offset
    runs = list(zip(starts.tolist(), ends.tolist(), strict=True))
    scattered = widths.max() > 1 and len(runs) > 1 + len(blocks) // BLOCKS_PER_RUN
    indices = torch.from_numpy(blocks.astype(np.int64)) if scattered else None
    return _BlockGroup(runs, indices, torch.from_numpy(token_nW), torch.from_numpy(last_offset_nW))
