"""The entropy of a distribution of which only the k likeliest tokens are known: bounds that hold, and their middle.

What is left for the other V - k tokens is r = 1 - (p_1 + ... + p_k), and none of them is likelier than p_k. Their part
of the entropy is largest when they share r evenly, r log((V - k) / r), and smallest when as many as possible are as
likely as p_k and one has the rest. Both can happen, so no tighter bounds exist without knowing more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple


class EntropyBounds(NamedTuple):
    """The entropy lies from `low` to `high`, in nats, up to rounding of the log-probs."""

    low: float
    high: float

    @property
    def estimate(self) -> float:
        """The middle, which is off by `error` at most."""
        return (self.low + self.high) / 2

    @property
    def error(self) -> float:
        """Half the width."""
        return (self.high - self.low) / 2


def entropy_bounds(top_logprobs: Sequence[float], vocab_size: int) -> EntropyBounds:
    """Bounds from the log-probs of the likeliest tokens, in any order; -inf is a token that was cut off."""
    known = sorted(map(math.exp, top_logprobs), reverse=True)
    if not 0 < len(known) <= vocab_size:
        raise ValueError(f"{len(known)} log-probs of a vocabulary of {vocab_size}")
    entropy = -sum(map(_plogp, known))
    rest, others, most = max(0.0, 1.0 - math.fsum(known)), vocab_size - len(known), known[-1]
    if not others or not rest or not most:
        return EntropyBounds(entropy, entropy)
    high = rest * math.log(others / rest)
    full = min(int(rest / most), others)
    low = -full * _plogp(most) - _plogp(max(0.0, rest - full * most))
    return EntropyBounds(entropy + min(low, high), entropy + high)


def _plogp(p: float) -> float:
    return p * math.log(p) if p > 0 else 0.0
