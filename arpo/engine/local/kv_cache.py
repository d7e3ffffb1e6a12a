"""The KV cache: keys and values of all sequences, in blocks of equal size in one tensor.

Layout: [layer, key/value, block, head, offset, head_dim]. The keys of one block and head are contiguous, which is what
attention reads. There is one more block than asked for, `null_block`, for rows that only pad a batch.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

BLOCK_SIZE = 32
"""Tokens per block: small enough to waste little, large enough for a matrix product of its own."""


class KVCache:
    """`num_blocks` blocks for a model of this shape, allocated at once and never grown."""

    def __init__(self, config: Any, num_blocks: int, dtype: torch.dtype, device: torch.device) -> None:
        shape = (config.num_hidden_layers, 2, num_blocks + 1, config.num_key_value_heads, BLOCK_SIZE, head_dim(config))
        on_cpu = device.type == "cpu"
        # Zeros, so that masked entries are finite.
        self.data = _lazy_zeros(shape, dtype) if on_cpu else torch.zeros(shape, dtype=dtype, device=device)
        self.null_block = num_blocks

    def reset(self) -> None:
        """Zero the cache after a failed step: values that are not finite would spoil the next user of their block."""
        if self.data.is_cuda:
            self.data.zero_()  # in place: captured graphs hold its address
        else:
            self.data = _lazy_zeros(tuple(self.data.shape), self.data.dtype)

    @property
    def num_tokens(self) -> int:
        """Tokens that fit."""
        return self.null_block * BLOCK_SIZE

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copy whole blocks, (source, target) one after the other. This is what a fork costs."""
        sources, targets = [a for a, _ in pairs], [b for _, b in pairs]
        if set(sources).isdisjoint(targets):
            self.data[:, :, targets] = self.data[:, :, sources]
        else:
            for source, target in pairs:
                self.data[:, :, target] = self.data[:, :, source]


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return zeros whose memory is taken only when it is written to, as numpy allocates them."""
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)).view(dtype).view(shape)


def head_dim(config: Any) -> int:
    """Return the dimension of one attention head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def kv_bytes_per_token(config: Any, dtype: torch.dtype) -> int:
    """Return the memory that the keys and values of one token take."""
    return int(2 * config.num_hidden_layers * config.num_key_value_heads * head_dim(config) * dtype.itemsize)
