"""Whether to branch after a tool result: pure functions of entropies, the budget and one random number.

    H_initial = mean entropy of the first k tokens of a trajectory
    H         = mean entropy of the first k tokens after a tool result
    dH        = (H - H_initial) / ln V                       in [-1, 1]; V is the vocabulary size
    P         = (alpha + beta * dH) * (1 - penalty * l)      l: branch points in a row just above

With `entropy_unit = "sum"`, dH is the difference of the sums over the k tokens, divided by ln V. With
`probe = "first_token"`, k is 1. The threshold rule branches if P > tau; the stochastic rule branches with probability
P, clipped to [0, 1].

Other policies: "random" branches with probability alpha, "always" wherever the budget allows, "never" not at all, as
in GRPO. "shuffled" is "entropy" with the dH of another result, "oracle" branches where the environment says that the
next choice is decisive. The posthoc policies branch when all trajectories have ended (`arpo.algorithm.posthoc`). H, dH
and P are recorded under every policy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from arpo.config.algorithm import Branching
from arpo.types import Decision

POSTHOC_POLICIES = ("posthoc_random", "posthoc_entropy", "posthoc_top_entropy", "posthoc_outcome", "posthoc_tail")
BUDGET_USED_UP = "the budget of trajectories is used up"  # the reason of a decision
REWARD_POLICIES = ("posthoc_outcome", "posthoc_tail")  # those of them that look at rewards


@dataclass(frozen=True, slots=True)
class Donor:
    """The tool result whose dH decides about another one, under the policy "shuffled"."""

    node: int
    delta: float  # its dH


def fill_unscored(settings: Branching) -> Branching:
    """The settings for trees without rewards: those that would be filled only if rewards differ are filled."""
    return settings.model_copy(update={"fill": "all"}) if settings.fill == "informative" else settings


def decide(
    settings: Branching,
    initial_entropies: Sequence[float],
    entropies: Sequence[float],
    vocab_size: int,
    budget: int,
    uniform: float,
    consecutive_branches: int = 0,
    *,
    donor: Donor | None = None,
    decisive: bool | None = None,
) -> Decision:
    """How many branches to open after one tool result, and why.

    `budget` is how many trajectories may still be started, `uniform` a random number in [0, 1), and
    `consecutive_branches` the number l of branch points in a row, up to the trajectory's previous tool result. The
    dH of a `donor` takes the place of the result's own. `decisive` is what the environment says, for "oracle".
    """
    probe = entropies[: settings.probe_length]
    delta = entropy_change(settings, initial_entropies, entropies, vocab_size)
    deciding = delta if donor is None else donor.delta
    by_entropy = (settings.alpha + settings.beta * deciding) * (1 - min(1.0, settings.penalty * consecutive_branches))
    known = {"random": settings.alpha, "always": 1.0, "oracle": float(bool(decisive))}
    probability = known.get(settings.policy, by_entropy)
    branches, reason = _num_branches(settings, probability, len(probe), budget, uniform)
    if donor is not None:
        reason += f" (by the dH of node {donor.node})"
    elif settings.policy == "oracle" and decisive is None:
        reason = "the environment could not say whether the next choice is decisive"
    initial = _mean(initial_entropies[: settings.probe_length])
    return Decision(initial, _mean(probe), delta, probability, branches, reason, len(probe))


def _num_branches(settings: Branching, probability: float, probed: int, budget: int, uniform: float) -> tuple[int, str]:
    if settings.policy == "never":
        return 0, "the policy never branches"
    if settings.policy in POSTHOC_POLICIES:
        return 0, "the policy branches when all trajectories have ended"
    if probed == 0:
        return 0, "nothing was sampled after the result"
    if settings.policy == "oracle" and not probability:
        return 0, "the next choice is not decisive"
    by_threshold = settings.policy in ("entropy", "shuffled") and settings.rule == "threshold"
    if by_threshold and not probability > settings.tau:
        return 0, "P is not above the threshold"
    if not by_threshold and not uniform < probability:
        return 0, "not drawn"
    if budget <= 0:
        return 0, BUDGET_USED_UP
    return min(settings.branch_width, budget), "branched"


def entropy_change(
    settings: Branching, initial_entropies: Sequence[float], entropies: Sequence[float], vocab_size: int
) -> float:
    """The change dH from the first tokens of a trajectory to those after a tool result, in `entropy_unit`."""
    return (_level(settings, entropies) - _level(settings, initial_entropies)) / math.log(vocab_size)


def balanced_num_initial(
    settings: Branching,
    num_trajectories: int,
    initial_entropies: Sequence[float],
    after_results: Sequence[Sequence[float]],
    vocab_size: int,
) -> int:
    """AEPO's N = M * sigmoid(balance * (H_root - H_tool)), rounded, at least 1; both in the unit of dH.

    H_root is that of a trajectory's initial entropies; H_tool the mean over its tool results of that after each, 0
    without results.
    """
    assert settings.balance is not None
    h_tool = _mean([_level(settings, entropies) for entropies in after_results])
    difference = (_level(settings, initial_entropies) - h_tool) / math.log(vocab_size)
    share = 1 / (1 + math.exp(min(700.0, -settings.balance * difference)))  # no overflow
    return min(num_trajectories, max(1, round(num_trajectories * share)))


def _level(settings: Branching, entropies: Sequence[float]) -> float:
    """The mean entropy of the probed tokens, or their sum."""
    probe = entropies[: settings.probe_length]
    return sum(probe) if settings.entropy_unit == "sum" else _mean(probe)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
