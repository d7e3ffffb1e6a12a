"""Keys and values of all sequences, in blocks of equal size in one piece of memory.

[layer, key/value, block, head, offset, head_dim]: the keys of one block and head lie together, which is what attention
reads. There is one block more than asked for, `trash`, for what is computed only to fill up a batch.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

BLOCK = 32
"""Tokens per block: small enough to waste little, large enough for a matrix product of its own."""


class KVPool:
    """`blocks` blocks for a model of this shape, allocated at once and never grown."""

    def __init__(self, config: Any, blocks: int, dtype: torch.dtype, device: torch.device) -> None:
        shape = (config.num_hidden_layers, 2, blocks + 1, config.num_key_value_heads, BLOCK, head_dim(config))
        # Zero, so that what is masked is finite. On a CPU, memory that nothing was written to is never taken.
        self.data = _untouched(shape, dtype) if device.type == "cpu" else torch.zeros(shape, dtype=dtype, device=device)
        self.trash = blocks

    def clear(self) -> None:
        """Zero again, where a step went wrong: a value that is not finite would spoil whoever gets its block next."""
        if self.data.is_cuda:
            self.data.zero_()  # in place: recorded graphs know where it lies
        else:
            self.data = _untouched(tuple(self.data.shape), self.data.dtype)

    @property
    def tokens(self) -> int:
        """Tokens that fit."""
        return self.trash * BLOCK

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """Copy whole blocks, (from, to) one after the other: what a fork costs."""
        sources, targets = [a for a, _ in pairs], [b for _, b in pairs]
        if set(sources).isdisjoint(targets):
            self.data[:, :, targets] = self.data[:, :, sources]
        else:
            for source, target in pairs:
                self.data[:, :, target] = self.data[:, :, source]


def _untouched(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)).view(dtype).view(shape)


def head_dim(config: Any) -> int:
    """Width of one attention head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def token_bytes(config: Any, dtype: torch.dtype) -> int:
    """Memory that the keys and values of one token take."""
    return int(2 * config.num_hidden_layers * config.num_key_value_heads * head_dim(config) * dtype.itemsize)
