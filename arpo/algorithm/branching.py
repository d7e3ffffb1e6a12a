"""Whether to branch after a tool result: pure functions of entropies, the budget and one random number.

    H_initial = mean entropy of the first k tokens of a trajectory
    H         = mean entropy of the first k tokens after a tool result
    dH        = (H - H_initial) / ln V                       in [-1, 1]; V is the vocabulary size
    P         = (alpha + beta * dH) * (1 - penalty * l)      l: branch points in a row just above

The threshold rule branches if P > tau; the stochastic rule branches with probability P, clipped to [0, 1].

Other policies: "random" branches with probability alpha, "always" wherever the budget allows, "never" not at all, as
in GRPO. "posthoc_random" and "posthoc_entropy" branch when all trajectories have ended, at results drawn at random or
at those with the largest dH (see `arpo.algorithm.rollout`). H, dH and P are recorded under every policy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from arpo.config.schema import Branching
from arpo.types import Decision

POSTHOC_POLICIES = ("posthoc_random", "posthoc_entropy")


def decide(
    settings: Branching,
    initial_entropies: Sequence[float],
    entropies: Sequence[float],
    vocab_size: int,
    budget: int,
    uniform: float,
    consecutive_branches: int = 0,
) -> Decision:
    """How many branches to open after one tool result, and why.

    `budget` is how many trajectories may still be started, `uniform` a random number in [0, 1), and
    `consecutive_branches` the number l of branch points in a row, up to the trajectory's previous tool result.
    """
    probe = entropies[: settings.probe_tokens]
    initial = _mean(initial_entropies[: settings.probe_tokens])
    entropy = _mean(probe)
    delta = (entropy - initial) / math.log(vocab_size)
    by_entropy = (settings.alpha + settings.beta * delta) * (1 - min(1.0, settings.penalty * consecutive_branches))
    probability = {"random": settings.alpha, "always": 1.0}.get(settings.policy, by_entropy)
    branches, reason = _num_branches(settings, probability, len(probe), budget, uniform)
    return Decision(initial, entropy, delta, probability, branches, reason, len(probe))


def _num_branches(settings: Branching, probability: float, probed: int, budget: int, uniform: float) -> tuple[int, str]:
    if settings.policy == "never":
        return 0, "the policy never branches"
    if settings.policy in POSTHOC_POLICIES:
        return 0, "the policy branches when all trajectories have ended"
    if probed == 0:
        return 0, "nothing was sampled after the result"
    by_threshold = settings.policy == "entropy" and settings.rule == "threshold"
    if by_threshold and not probability > settings.tau:
        return 0, "P is not above the threshold"
    if not by_threshold and not uniform < probability:
        return 0, "not drawn"
    if budget <= 0:
        return 0, "the budget of trajectories is used up"
    return min(settings.branch_width, budget), "branched"


def balanced_num_initial(
    num_trajectories: int, weight: float, initial_entropies: Sequence[float], after_results: Sequence[Sequence[float]]
) -> int:
    """AEPO's N = M * sigmoid(weight * (H_root - H_tool)), rounded, at least 1.

    H_root is the mean of a trajectory's initial entropies; H_tool the mean over its tool results of the mean entropy
    after each, 0 without results.
    """
    h_tool = _mean([_mean(entropies) for entropies in after_results])
    share = 1 / (1 + math.exp(min(700.0, -weight * (_mean(initial_entropies) - h_tool))))  # no overflow
    return min(num_trajectories, max(1, round(num_trajectories * share)))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
