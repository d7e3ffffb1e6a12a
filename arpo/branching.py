"""Whether to branch after a tool result: pure functions of entropies, the budget and one random number.

H_initial is the mean entropy of the first k tokens of a trajectory, H that of the first k tokens after a tool result.
dH = (H - H_initial) / ln V lies in [-1, 1] (V: vocabulary size; entropies are per-token means over the full vocabulary)
and P = alpha + beta * dH. The threshold rule branches when P > tau; the stochastic rule branches with probability
P clipped to [0, 1]. A policy that never branches is GRPO.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from arpo.settings import Branching
from arpo.types import Decision


def decide(
    settings: Branching,
    initial_entropies: Sequence[float],
    entropies: Sequence[float],
    vocab_size: int,
    budget: int,
    uniform: float,
) -> Decision:
    """Look at the entropies after one tool result and say how many branches to open there, and why."""
    probe = entropies[: settings.probe_tokens]
    initial = _mean(initial_entropies[: settings.probe_tokens])
    entropy = _mean(probe)
    delta = (entropy - initial) / math.log(vocab_size)
    probability = settings.alpha + settings.beta * delta
    branches, reason = _verdict(settings, probability, len(probe), budget, uniform)
    return Decision(initial, entropy, delta, probability, branches, reason, len(probe))


def _verdict(settings: Branching, probability: float, probed: int, budget: int, uniform: float) -> tuple[int, str]:
    if settings.policy == "never":
        return 0, "the policy never branches"
    if probed == 0:
        return 0, "nothing was generated after the result"
    if settings.rule == "threshold" and not probability > settings.tau:
        return 0, "P is not above the threshold"
    if settings.rule == "stochastic" and not uniform < probability:
        return 0, "not drawn"
    if budget <= 0:
        return 0, "the leaf budget is used up"
    return min(settings.width, budget), "branched"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
