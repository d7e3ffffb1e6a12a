"""Bounds on the entropy of a distribution of which only the k most likely tokens are known.

The other V - k tokens share r = 1 - (p_1 + ... + p_k), and none of them is more likely than p_k. Their part of the
entropy is largest when they share r evenly, r log((V - k) / r), and smallest when as many as possible have probability
p_k and one has the rest. Both can happen, so these bounds are tight.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple


class EntropyBounds(NamedTuple):
    """The entropy lies between `low` and `high`, in nats, up to rounding of the log-probs."""

    low: float
    high: float

    @property
    def estimate(self) -> float:
        """The middle, which is off by at most `error`."""
        return (self.low + self.high) / 2

    @property
    def error(self) -> float:
        """Half the width."""
        return (self.high - self.low) / 2


def entropy_bounds(top_logprobs: Sequence[float], vocab_size: int) -> EntropyBounds:
    """Return bounds from the log-probs of the most likely tokens, in any order; -inf is a token that was cut off."""
    probs = sorted(map(math.exp, top_logprobs), reverse=True)
    if not 0 < len(probs) <= vocab_size:
        raise ValueError(f"{len(probs)} log-probs of a vocabulary of {vocab_size}")
    entropy = -sum(map(_plogp, probs))
    rest, others, largest = max(0.0, 1.0 - math.fsum(probs)), vocab_size - len(probs), probs[-1]
    if not others or not rest or not largest:
        return EntropyBounds(entropy, entropy)
    high = rest * math.log(others / rest)
    full = min(int(rest / largest), others)
    low = -full * _plogp(largest) - _plogp(max(0.0, rest - full * largest))
    return EntropyBounds(entropy + min(low, high), entropy + high)


def _plogp(p: float) -> float:
    return p * math.log(p) if p > 0 else 0.0
