"""Whether to branch after a tool result: pure functions of entropies, the budget and one random number.

H_initial is the mean entropy of the first k tokens of a trajectory, H that of the first k tokens after a tool result.
dH = (H - H_initial) / ln V lies in [-1, 1] (V: vocabulary size; entropies are per-token means over the full vocabulary)
and P = (alpha + beta * dH) * (1 - penalty * l), with l the number of results just above on the path that were all
branched from. The threshold rule branches when P > tau; the stochastic rule branches with probability P clipped to
[0, 1].

Other policies: "random" branches with probability alpha, "always" wherever it can, "posthoc_random" and "posthoc_entropy" only when all
paths have ended (at results drawn at random, or at those with the highest dH, see the rollout), "never" not at all,
which is GRPO. Only "posthoc_entropy" looks at entropies; what the others would have seen is recorded all the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from arpo.config.schema import Branching
from arpo.types import Decision

WHEN_ENDED = ("posthoc_random", "posthoc_entropy")  # policies that branch when all paths have ended


def decide(
    settings: Branching,
    initial_entropies: Sequence[float],
    entropies: Sequence[float],
    vocab_size: int,
    budget: int,
    uniform: float,
    in_a_row: int = 0,
) -> Decision:
    """Look at the entropies after one tool result and say how many branches to open there, and why.

    `in_a_row` counts the results just above on the path that were branched from, without one between that was not.
    """
    probe = entropies[: settings.probe_tokens]
    initial = _mean(initial_entropies[: settings.probe_tokens])
    entropy = _mean(probe)
    delta = (entropy - initial) / math.log(vocab_size)
    chances = {"random": settings.alpha, "always": 1.0}
    by_entropy = (settings.alpha + settings.beta * delta) * (1 - min(1.0, settings.penalty * in_a_row))
    probability = chances.get(settings.policy, by_entropy)
    branches, reason = _verdict(settings, probability, len(probe), budget, uniform)
    return Decision(initial, entropy, delta, probability, branches, reason, len(probe))


def _verdict(settings: Branching, probability: float, probed: int, budget: int, uniform: float) -> tuple[int, str]:
    if settings.policy == "never":
        return 0, "the policy never branches"
    if settings.policy in WHEN_ENDED:
        return 0, "the policy branches when all paths have ended"
    if probed == 0:
        return 0, "nothing was generated after the result"
    by_threshold = settings.policy == "entropy" and settings.rule == "threshold"
    if by_threshold and not probability > settings.tau:
        return 0, "P is not above the threshold"
    if not by_threshold and not uniform < probability:
        return 0, "not drawn"
    if budget <= 0:
        return 0, "the leaf budget is used up"
    return min(settings.branch_width, budget), "branched"


def balanced(total: int, weight: float, root: Sequence[float], after_tools: Sequence[Sequence[float]]) -> int:
    """How many of `total` paths start at the prompt: total * sigmoid(weight * (H_root - H_tool)), at least 1.

    H_root is the mean of the entropies at the start of a path, H_tool the mean over its tool results of the mean after
    each; a path without any counts as one whose tools left no doubt.
    """
    tools = _mean([_mean(entropies) for entropies in after_tools])
    share = 1 / (1 + math.exp(min(700.0, -weight * (_mean(root) - tools))))  # no overflow
    return min(total, max(1, round(total * share)))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
