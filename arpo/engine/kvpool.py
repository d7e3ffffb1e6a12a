"""Keys and values of many sequences in one block of memory, one row each.

Rows 0..A-1 are the ones being decoded, so a decode step reads a plain slice; the rest are idle prefixes kept for
re-use. `PoolView` is what a Hugging Face model gets as `past_key_values`: it writes the new keys and values of rows
[first, first + B) at the given positions and returns all that those rows hold. What lies beyond a row's length is
garbage that the attention mask hides.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class KVPool:
    """[layer, key/value, row, head, position, head_dim], grown in length as needed."""

    def __init__(self, config: Any, rows: int, dtype: torch.dtype, device: torch.device) -> None:
        heads = config.num_key_value_heads
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self._shape = (config.num_hidden_layers, 2, rows, heads, 0, dim)
        self._limit = config.max_position_embeddings
        self.data = torch.zeros(self._shape, dtype=dtype, device=device)

    @property
    def length(self) -> int:
        """Positions a row can hold now."""
        return self.data.shape[4]

    def clear(self) -> None:
        """Give the memory back; whatever was held is gone."""
        self.data = self.data.new_zeros(self._shape)

    @torch.inference_mode()
    def reserve(self, length: int) -> None:
        """Make every row hold at least `length` positions."""
        if length <= self.length:
            return
        new_length = max(length, min(self._limit, max(2 * self.length, 64)))
        grown = self.data.new_zeros((*self._shape[:4], new_length, self._shape[5]))
        grown[:, :, :, :, : self.length] = self.data
        self.data = grown

    @torch.inference_mode()
    def swap(self, a: int, b: int, length: int) -> None:
        """Exchange the first `length` positions of two rows."""
        if a != b:
            self.data[:, :, [a, b], :, :length] = self.data[:, :, [b, a], :, :length]

    @torch.inference_mode()
    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of one row to another: what a fork costs."""
        if source != target:
            self.data[:, :, target, :, :length] = self.data[:, :, source, :, :length]


class PoolView:
    """Rows [first, first + B) of a pool during one forward pass, in the shape of a Hugging Face cache."""

    is_compileable = False

    def __init__(self, pool: KVPool, first: int, positions_BQ: Tensor, longest: int) -> None:
        self._rows = slice(first, first + positions_BQ.shape[0])
        self._index_B1 = torch.arange(positions_BQ.shape[0], device=positions_BQ.device).unsqueeze(1)
        self._pool, self._positions_BQ, self._longest = pool, positions_BQ, longest

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Store the new keys and values [B, head, Q, dim]; return those of all positions up to the longest row."""
        both = self._pool.data[layer_idx, :, self._rows]
        both[0][self._index_B1, :, self._positions_BQ] = keys.transpose(1, 2)
        both[1][self._index_B1, :, self._positions_BQ] = values.transpose(1, 2)
        return both[0, :, :, : self._longest], both[1, :, :, : self._longest]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions are always given explicitly; nothing may be derived from this."""
        return 0
