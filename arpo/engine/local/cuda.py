"""Steps on a GPU: decoding is replayed from CUDA graphs, steps that read prompts run as they come.

A graph holds the whole step, from token ids to the drawn tokens and their numbers, for one batch size out of a few
(powers of two); a batch is filled up to the next with rows that write into the pool's trash block. Graphs are recorded
when first needed, at most one per size and kind of sampling; what that took is counted (`recorded`).
Updating the weights in place, as optimizers do, leaves them valid; where `weights_changed` finds that they moved, they
are recorded again.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from arpo.engine.local import kernels, sampling
from arpo.engine.local.fused import fused
from arpo.engine.local.kernels import Tiles
from arpo.engine.local.kv_cache import BLOCK, KVPool
from arpo.engine.local.runner import NOTHING, Columns
from arpo.engine.local.sampling import Drawn
from arpo.engine.local.scheduler import Batch
from arpo.models.network import Network, install_attention

PROGRAMS = 264  # two for each multiprocessor of a large GPU: with fewer rows, a row's keys are shared out


@dataclass(frozen=True, slots=True)
class _Step:
    """Where one forward pass reads and writes."""

    pool: KVPool
    block_T: Tensor
    offset_T: Tensor
    table: Tensor
    tiles: Tiles
    splits: int
    decoding: bool

    def attend(
        self, layer: int, q_THGD: Tensor, k_THD: Tensor, v_THD: Tensor, scaling: float, window: int | None
    ) -> Tensor:
        """Store keys and values, return what the queries see."""
        keys, values = self.pool.data[layer]
        kernels.store(k_THD, v_THD, keys, values, self.block_T, self.offset_T)
        return kernels.attend(
            q_THGD, keys, values, self.table, self.tiles, scaling, window, decoding=self.decoding, splits=self.splits
        )


class CudaRunner:
    """Steps on the model's GPU, for at most `rows` rows."""

    def __init__(self, model: Any, pool: KVPool, rows: int) -> None:
        install_attention(model)
        self._model, self._network, self._pool = model, Network(model), pool
        config = model.config
        self._group = config.num_attention_heads // config.num_key_value_heads
        self._kv_heads = config.num_key_value_heads
        device, width = pool.data.device, -(-config.max_position_embeddings // BLOCK)
        self._table = torch.full((rows, width), pool.trash, dtype=torch.int32, device=device)
        self._ints = torch.zeros(4, rows, dtype=torch.int64, device=device)  # token, position, block, offset
        self._floats = torch.zeros(4, rows, dtype=torch.float64, device=device)  # temperature, uniform, top-p, top-k
        self._order = torch.arange(rows, device=device)
        self._ones = torch.ones(rows, dtype=torch.int64, device=device)
        self._sizes = sorted({*(2**i for i in range(rows.bit_length()) if 2**i < rows), rows})
        self._memory = torch.cuda.graph_pool_handle()
        self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # cuBLAS has a workspace per stream
        self._recorded: dict[tuple[int, bool], tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._places = _places(model)
        self._graphs, self._seconds = 0, 0.0

    @torch.inference_mode()
    def run(self, batch: Batch) -> Columns:
        """Compute the batch; one entry in each column per asking row."""
        with torch.cuda.device(self._pool.data.device):
            if batch.copies:
                self._pool.copy(batch.copies)
            got = self._replay(batch) if batch.decoding else self._read(batch)
            if got is None:
                return NOTHING
            token, logprob, entropy, *cut = got.tolist()
        cut_logprob, cut_entropy = cut or (None, None)
        return list(map(int, token)), logprob, entropy, cut_logprob, cut_entropy

    def weights_changed(self) -> None:
        """Graphs read the weights where they were: recorded again only if they moved."""
        if _places(self._model) != self._places:
            self._forget()
            self._places = _places(self._model)

    def recorded(self) -> tuple[int, float]:
        """CUDA graphs recorded since the last call, and the seconds it took."""
        got = self._graphs, self._seconds
        self._graphs, self._seconds = 0, 0.0
        return got

    def _replay(self, batch: Batch) -> Tensor:
        rows = len(batch.tokens)
        size = next(size for size in self._sizes if size >= rows)
        ints = np.zeros((4, size), dtype=np.int64)
        ints[2] = self._pool.trash
        at = batch.table[np.arange(rows), batch.starts // BLOCK]
        ints[:, :rows] = batch.tokens, batch.starts, at, batch.starts % BLOCK
        floats = np.ones((4, size))
        floats[:, :rows] = batch.sampling
        self._ints[:, :size] = torch.from_numpy(ints).to(self._ints.device)
        self._floats[:, :size] = torch.from_numpy(floats).to(self._ints.device)
        self._table[:rows, : batch.table.shape[1]] = torch.from_numpy(batch.table).to(self._ints.device)
        self._table[rows:size, 0] = self._pool.trash
        graph, got = self._graph(size, batch.cuts)
        graph.replay()
        return got[:, :rows]

    def _forget(self) -> None:
        """Graphs go all together: they share memory and a workspace, and memory once left cannot be used again."""
        self._recorded.clear()
        self._memory = torch.cuda.graph_pool_handle()

    def _graph(self, size: int, cuts: bool) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        if (size, cuts) not in self._recorded:
            started = time.monotonic()
            try:
                self._recorded[size, cuts] = self._record(size, cuts)
            except BaseException:
                self._forget()
                raise
            self._graphs += 1
            self._seconds += time.monotonic() - started
        return self._recorded[size, cuts]

    def _record(self, size: int, cuts: bool) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        here, graph = torch.cuda.current_stream(), torch.cuda.CUDAGraph()
        with fused(self._model):
            self._side.wait_stream(here)
            with torch.cuda.stream(self._side):
                self._decode(size, cuts)  # compiles what was not compiled yet; what it stores is stored again
            here.wait_stream(self._side)
            with torch.cuda.graph(graph, pool=self._memory, stream=self._side, capture_error_mode="thread_local"):
                got = self._decode(size, cuts)
        return graph, got

    def _decode(self, size: int, cuts: bool) -> Tensor:
        """The step that a graph holds, over the first `size` rows of the fixed inputs."""
        token, position, block, offset = self._ints[:, :size]
        tiles = Tiles(self._order[:size], self._order[:size], self._ones[:size], position)
        splits = _splits(size * self._kv_heads)
        step = _Step(self._pool, block, offset, self._table[:size], tiles, splits, True)
        hidden = self._network.hidden(token, position, step)
        return self._draw(hidden, self._floats[:, :size], cuts)

    def _read(self, batch: Batch) -> Tensor | None:
        """A step that reads prompts; None if no row is at the end of its own."""
        device = self._pool.data.device
        first = np.cumsum(batch.counts) - batch.counts
        row = np.repeat(np.arange(len(batch.counts)), batch.counts)
        position = batch.starts[row] + np.arange(len(row)) - first[row]
        places = batch.table[row, position // BLOCK], position % BLOCK
        token_T, position_T, block_T, offset_T = _send(np.stack([batch.tokens, position, *places]), device)
        per_tile = kernels.rows_per_tile(self._group, False, self._pool.data.dtype) // self._group
        tiles = _send(_tiles(batch.starts, batch.counts, first, per_tile), device)
        table = torch.from_numpy(batch.table).to(device)
        step = _Step(self._pool, block_T, offset_T, table, Tiles(*tiles), 1, False)
        # All that is sent goes before the pass, since sending waits for what was launched.
        ends = torch.from_numpy(first[batch.asking] + batch.counts[batch.asking] - 1).to(device)
        floats = _send(batch.sampling, device)
        with fused(self._model):
            hidden = self._network.hidden(token_T, position_T, step)
        return self._draw(hidden[ends], floats, batch.cuts) if len(ends) else None

    def _draw(self, hidden_AE: Tensor, floats: Tensor, cuts: bool) -> Tensor:
        """Drawn tokens and their numbers, packed into one tensor [3 or 5, A]."""
        temperature, uniform, top_p, top_k = floats
        logits = self._network.logits(hidden_AE)
        drawn: Drawn
        if cuts:
            drawn = sampling.sample(logits, temperature, uniform, top_p, top_k)
        else:
            drawn = kernels.sample(logits, temperature, uniform)
        return torch.stack([x.double() for x in drawn if x is not None])


def _send(rows: np.ndarray, device: torch.device) -> Tensor:
    """On the device, each row at an address that is a multiple of 16: for others, Triton would compile anew."""
    length = rows.shape[1]
    return torch.from_numpy(np.pad(rows, ((0, 0), (0, length % 2)))).to(device)[:, :length]


def _tiles(starts: np.ndarray, counts: np.ndarray, first: np.ndarray, per_tile: int) -> np.ndarray:
    """Rows cut into tiles of at most `per_tile` tokens: [row, first token, count, position] x tiles."""
    tiles = -(-counts // per_tile)
    row = np.repeat(np.arange(len(counts)), tiles)
    skip = (np.arange(len(row)) - (np.cumsum(tiles) - tiles)[row]) * per_tile
    return np.stack([row, first[row] + skip, np.minimum(per_tile, counts[row] - skip), starts[row] + skip])


def _splits(programs: int) -> int:
    """Into how many parts a row's keys are cut where there is one program for each row and head: a power of two."""
    return min(16, 1 << max(1, PROGRAMS // programs).bit_length() - 1)


def _places(model: Any) -> list[int]:
    return [parameter.data_ptr() for parameter in model.parameters()]
