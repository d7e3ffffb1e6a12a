"""Steps on a GPU: decode steps are replayed from CUDA graphs, prefill steps run eagerly.

A graph holds the whole step, from token ids to sampled tokens and log-probs, for one batch size out of a few (powers of
two). A batch is padded to the next size with rows that write into the cache's null block. Graphs are captured when
first needed, at most one per size and kind of sampling. Updating the weights in place, as optimizers do, leaves them
valid; if `sync_weights` finds that the weights have moved, they are captured again.

Shape suffixes: T tokens, A sampling rows, E hidden size, H key/value heads, G query heads per key/value head, D head
dimension.
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
from arpo.engine.local.kv_cache import BLOCK_SIZE, KVCache
from arpo.engine.local.runner import NO_OUTPUT, Runner, StepOutput
from arpo.engine.local.scheduler import Batch

MIN_PROGRAMS = 264  # two per multiprocessor of a large GPU: with fewer rows, the keys of a row are split


@dataclass(frozen=True, slots=True)
class _CudaPlan:
    """Attention of one step: where it reads and writes."""

    cache: KVCache
    block_T: Tensor
    offset_T: Tensor
    block_table: Tensor
    tiles: Tiles
    splits: int
    decoding: bool

    def attend(
        self, layer: int, q_THGD: Tensor, k_THD: Tensor, v_THD: Tensor, scaling: float, window: int | None
    ) -> Tensor:
        """Store the new keys and values, and return the attention output [T, H, G, D]."""
        keys, values = self.cache.data[layer]
        kernels.store_kv(k_THD, v_THD, keys, values, self.block_T, self.offset_T)
        return kernels.paged_attention(
            q_THGD,
            keys,
            values,
            self.block_table,
            self.tiles,
            scaling,
            window,
            decoding=self.decoding,
            splits=self.splits,
        )


class CudaRunner(Runner):
    """Runs steps on the model's GPU, for at most `max_num_seqs` rows."""

    def __init__(self, model: Any, cache: KVCache, max_num_seqs: int) -> None:
        super().__init__(model, cache)
        rows = max_num_seqs
        config = model.config
        self._group = config.num_attention_heads // config.num_key_value_heads
        self._kv_heads = config.num_key_value_heads
        device, width = cache.data.device, -(-config.max_position_embeddings // BLOCK_SIZE)
        self._block_table = torch.full((rows, width), cache.null_block, dtype=torch.int32, device=device)
        self._ints = torch.zeros(4, rows, dtype=torch.int64, device=device)  # token, position, block, offset
        self._floats = torch.zeros(4, rows, dtype=torch.float64, device=device)  # temperature, uniform, top-p, top-k
        self._row = torch.arange(rows, device=device)
        self._ones = torch.ones(rows, dtype=torch.int64, device=device)
        self._sizes = sorted({*(2**i for i in range(rows.bit_length()) if 2**i < rows), rows})
        self._graph_pool = torch.cuda.graph_pool_handle()
        self._capture_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # cuBLAS: workspace per stream
        self._graphs: dict[tuple[int, bool], tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._addresses = _weight_addresses(model)
        self._num_captured, self._capture_seconds = 0, 0.0

    @torch.inference_mode()
    def run(self, batch: Batch) -> StepOutput:
        """Compute the batch and sample."""
        with torch.cuda.device(self._cache.data.device):
            if batch.block_copies:
                self._cache.copy_blocks(batch.block_copies)
            sampled = self._replay(batch) if batch.is_decode else self._prefill(batch)
            if sampled is None:
                return NO_OUTPUT
            tokens, *others = sampled.tolist()
        return StepOutput(list(map(int, tokens)), *others)

    def sync_weights(self) -> None:
        """Drop the graphs if the weights have moved: a graph holds their addresses."""
        if _weight_addresses(self._model) != self._addresses:
            self._drop_graphs()
            self._addresses = _weight_addresses(self._model)

    def graph_stats(self) -> tuple[int, float]:
        """Return the CUDA graphs captured since the last call, and the seconds it took."""
        stats = self._num_captured, self._capture_seconds
        self._num_captured, self._capture_seconds = 0, 0.0
        return stats

    def _replay(self, batch: Batch) -> Tensor:
        rows = len(batch.tokens)
        size = next(size for size in self._sizes if size >= rows)
        ints = np.zeros((4, size), dtype=np.int64)
        ints[2] = self._cache.null_block
        block = batch.block_table[np.arange(rows), batch.starts // BLOCK_SIZE]
        ints[:, :rows] = batch.tokens, batch.starts, block, batch.starts % BLOCK_SIZE
        floats = np.ones((4, size))
        floats[:, :rows] = batch.sampling_params
        self._ints[:, :size] = torch.from_numpy(ints).to(self._ints.device)
        self._floats[:, :size] = torch.from_numpy(floats).to(self._ints.device)
        self._block_table[:rows, : batch.block_table.shape[1]] = torch.from_numpy(batch.block_table).to(
            self._ints.device
        )
        self._block_table[rows:size, 0] = self._cache.null_block
        graph, sampled = self._graph(size, batch.has_cuts)
        graph.replay()
        return sampled[:, :rows]

    def _drop_graphs(self) -> None:
        """Drop all graphs: they share memory and a workspace, and memory once released cannot be used again."""
        self._graphs.clear()
        self._graph_pool = torch.cuda.graph_pool_handle()

    def _graph(self, size: int, cuts: bool) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        if (size, cuts) not in self._graphs:
            started = time.monotonic()
            try:
                self._graphs[size, cuts] = self._capture(size, cuts)
            except BaseException:
                self._drop_graphs()
                raise
            self._num_captured += 1
            self._capture_seconds += time.monotonic() - started
        return self._graphs[size, cuts]

    def _capture(self, size: int, cuts: bool) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        current, side, graph = torch.cuda.current_stream(), self._capture_stream, torch.cuda.CUDAGraph()
        with fused(self._model):
            side.wait_stream(current)
            with torch.cuda.stream(side):
                self._decode(size, cuts)  # warm-up: compiles kernels; the replay stores the same keys and values again
            current.wait_stream(side)
            with torch.cuda.graph(graph, pool=self._graph_pool, stream=side, capture_error_mode="thread_local"):
                sampled = self._decode(size, cuts)
        return graph, sampled

    def _decode(self, size: int, cuts: bool) -> Tensor:
        """Run the step that a graph holds, over the first `size` rows of the fixed inputs."""
        token, position, block, offset = self._ints[:, :size]
        tiles = Tiles(self._row[:size], self._row[:size], self._ones[:size], position)
        splits = _splits(size * self._kv_heads)
        plan = _CudaPlan(self._cache, block, offset, self._block_table[:size], tiles, splits, True)
        hidden = self._network.hidden(token, position, plan, has_images=False)  # sampled tokens are no images
        return self._sample(hidden, self._floats[:, :size], cuts)

    def _prefill(self, batch: Batch) -> Tensor | None:
        """Run a step with prefill; None if no row has reached the end of its prompt."""
        device = self._cache.data.device
        first = np.cumsum(batch.counts) - batch.counts
        row = np.repeat(np.arange(len(batch.counts)), batch.counts)
        position = batch.starts[row] + np.arange(len(row)) - first[row]
        block, offset = batch.block_table[row, position // BLOCK_SIZE], position % BLOCK_SIZE
        token_T, position_T, block_T, offset_T = _to_device(np.stack([batch.tokens, position, block, offset]), device)
        per_tile = kernels.rows_per_tile(self._group, False, self._cache.data.dtype) // self._group
        tiles = _to_device(_tiles(batch.starts, batch.counts, first, per_tile), device)
        block_table = torch.from_numpy(batch.block_table).to(device)
        plan = _CudaPlan(self._cache, block_T, offset_T, block_table, Tiles(*tiles), 1, False)
        # All copies go before the forward pass, since a copy waits for the kernels launched before it.
        last = torch.from_numpy(first[batch.sampling_rows] + batch.counts[batch.sampling_rows] - 1).to(device)
        floats = _to_device(batch.sampling_params, device)
        with fused(self._model):
            hidden = self._network.hidden(token_T, position_T, plan)
        return self._sample(hidden[last], floats, batch.has_cuts) if len(last) else None

    def _sample(self, hidden_AE: Tensor, floats: Tensor, cuts: bool) -> Tensor:
        """Sample, and return the columns of a SamplerOutput as one tensor [3 or 5, A]."""
        temperature, uniform, top_p, top_k = floats
        logits = self._network.logits(hidden_AE)
        if cuts:
            output = sampling.sample(logits, temperature, uniform, top_p, top_k)
        else:
            output = kernels.sample(logits, temperature, uniform)
        return torch.stack([x.double() for x in output if x is not None])


def _to_device(rows: np.ndarray, device: torch.device) -> Tensor:
    """Copy to the device, each row at an address that is a multiple of 16: for others, Triton would compile again."""
    length = rows.shape[1]
    return torch.from_numpy(np.pad(rows, ((0, 0), (0, length % 2)))).to(device)[:, :length]


def _tiles(starts: np.ndarray, counts: np.ndarray, first: np.ndarray, per_tile: int) -> np.ndarray:
    """Return the rows split into tiles of at most `per_tile` tokens: [row, first token, count, position] x tiles."""
    tiles = -(-counts // per_tile)
    row = np.repeat(np.arange(len(counts)), tiles)
    skip = (np.arange(len(row)) - (np.cumsum(tiles) - tiles)[row]) * per_tile
    return np.stack([row, first[row] + skip, np.minimum(per_tile, counts[row] - skip), starts[row] + skip])


def _splits(programs: int) -> int:
    """Return into how many parts the keys of a row are split, given one program per row and head: a power of two."""
    return min(16, 1 << max(1, MIN_PROGRAMS // programs).bit_length() - 1)


def _weight_addresses(model: Any) -> list[int]:
    return [parameter.data_ptr() for parameter in model.parameters()]
