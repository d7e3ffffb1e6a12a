"""Where to branch when trajectories have ended: pure functions of what is known of every tool result.

A round chooses tool results, one trajectory starts at each, and when all have ended the next round chooses among the
old results and the new ones, until the budget is spent.

    posthoc_random       per first turn, a result below it, drawn at random
    posthoc_entropy      per first turn, the result below it with the fewest branches, then the largest dH
    posthoc_top_entropy  the results with the largest H - penalty * branches opened there
    posthoc_outcome      the results with the largest expected p (1 - p), where p is the chance of success below them
    posthoc_tail         the last results of the trajectories, those with the fewest branches first

The last three take up to `round_size` results per round from the whole tree, each at most once. Between equal ones (to
12 digits) those with fewer branches come first, then those sampled earlier.

"shuffled" also decides when trajectories have ended: `shuffled_donors` says whose dH decides about each result.
"""

from __future__ import annotations

import math
import random
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from arpo.config.algorithm import Branching
from arpo.types import Kind, RolloutTree

PRIOR_WEIGHT = 2.0  # of the whole tree's share of successes, in trajectories
REASONS = {
    "posthoc_random": "drawn at random",
    "posthoc_entropy": "largest entropy rise",
    "posthoc_top_entropy": "largest entropy",
    "posthoc_outcome": "most uncertain outcome",
    "posthoc_tail": "last result of a trajectory",
}
"""Why a result was chosen, by policy."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A tool result that a turn follows, and what is known of it now."""

    node: int
    first_turn: int  # the node below the prompt that it descends from
    entropy: float  # H
    delta: float  # dH
    branches: int  # opened here so far
    rewards: tuple[float, ...] = ()  # of the unmasked trajectories through it, if the tree is scored
    further_calls: float = 0.0  # mean number of calls after it, over the trajectories through it
    is_last: bool = False  # no result with a turn after it follows on some trajectory


def candidates(
    tree: RolloutTree, rewards: Sequence[float] | None = None, mask: Sequence[bool] | None = None
) -> list[Candidate]:
    """The tool results of a tree where a branch can open, in their order. `rewards` and `mask` are those of leaves."""
    rewards_below: dict[int, list[float]] = {}
    calls_below: dict[int, list[int]] = {}
    last: set[int] = set()
    for number, leaf in enumerate(tree.leaves):
        calls = [index for index in tree.prefix(leaf.node) if tree.nodes[index].kind is Kind.TOOL]
        for position, index in enumerate(calls):
            calls_below.setdefault(index, []).append(len(calls) - position - 1)
            if rewards is not None and (mask is None or mask[number]):
                rewards_below.setdefault(index, []).append(rewards[number])
        last.update([index for index in calls if tree.nodes[index].decision is not None][-1:])
    found: list[Candidate] = []
    for index, node in enumerate(tree.nodes):
        if node.kind is Kind.TOOL and node.decision is not None:
            below = calls_below.get(index, [0])
            found.append(
                Candidate(
                    index,
                    tree.prefix(index)[1],
                    node.decision.entropy,
                    node.decision.delta,
                    node.decision.branches,
                    tuple(rewards_below.get(index, ())),
                    sum(below) / len(below),
                    index in last,
                )
            )
    return found


def first_turns(tree: RolloutTree) -> list[int]:
    """The turns that follow the prompt."""
    return [index for index, node in enumerate(tree.nodes) if node.parent == 0]


def choose_per_first_turn(
    settings: Branching, turns: Sequence[int], results: Sequence[Candidate], budget: int, rng: random.Random
) -> list[int]:
    """A node per first turn for "posthoc_random" and "posthoc_entropy": a result, or the prompt if there is none."""
    chosen: list[int] = []
    for turn in turns:
        below = [result for result in results if result.first_turn == turn]
        if not below:
            chosen.append(0)
        elif settings.policy == "posthoc_random":
            chosen.append(rng.choice(below).node)
        else:
            chosen.append(min(below, key=lambda result: (result.branches, -result.delta)).node)
    return (chosen or [0])[:budget]


def choose_best(settings: Branching, results: Sequence[Candidate], rewards: Sequence[float], budget: int) -> list[int]:
    """The results of the whole tree where the next round branches. `rewards` are those of its unmasked leaves."""
    if settings.policy == "posthoc_tail":
        scores = {result.node: 0.0 for result in results if result.is_last}
    elif settings.policy == "posthoc_outcome":
        scores = outcome_scores(results, rewards, settings.per_call)
    else:
        scores = {result.node: result.entropy - settings.penalty * result.branches for result in results}
    eligible = [result for result in results if result.node in scores]
    best = sorted(eligible, key=lambda result: (-round(scores[result.node], 12), result.branches, result.node))
    return [result.node for result in best[: min(settings.round_size, budget)]]


def outcome_scores(results: Sequence[Candidate], rewards: Sequence[float], per_call: bool = False) -> dict[int, float]:
    """The posterior mean of p (1 - p) per result, where p is the chance that a trajectory through it succeeds.

    A success is a reward above the midpoint of the tree's lowest and highest. With s successes and f failures below a
    result, p is Beta(a + s, b + f), where a + b is 2 and a / 2 the share of successes in the whole tree. With
    `per_call` the score is divided by 1 + the mean number of calls after the result: what a sibling costs.
    """
    midpoint = (min(rewards) + max(rewards)) / 2 if rewards else math.inf
    share = sum(reward > midpoint for reward in rewards) / len(rewards) if rewards else 0.5
    scores: dict[int, float] = {}
    for result in results:
        successes = sum(reward > midpoint for reward in result.rewards)
        a = PRIOR_WEIGHT * share + successes
        b = PRIOR_WEIGHT * (1 - share) + len(result.rewards) - successes
        expected = a * b / ((a + b) * (a + b + 1))
        scores[result.node] = expected / (1 + result.further_calls) if per_call else expected
    return scores


def tail_budget(budget: int, rewards: Sequence[float]) -> int:
    """How many trajectories of the budget a task gets under "posthoc_tail": the share 1 - its mean reward, rounded up.

    Rewards count as cut to [0, 1]. A task without a reward gets all.
    """
    mean = sum(min(1.0, max(0.0, reward)) for reward in rewards) / len(rewards) if rewards else 0.0
    return math.ceil(budget * (1 - mean) - 1e-9)  # 10 * (1 - 0.7) is a little more than 3


def shuffled_donors(
    undecided: Mapping[int, Hashable], decided: Mapping[int, Hashable], rng: random.Random
) -> dict[int, int]:
    """Whose dH decides about each undecided result, by node. The mappings give the class of every result.

    Within a class with several undecided results, the dH move on by a random number of places, so that none keeps its
    own and each is used once. A single one gets that of a result of its class that was decided before, drawn at
    random; its own if there is none.
    """
    classes: dict[Hashable, list[int]] = {}
    for node, kind in undecided.items():
        classes.setdefault(kind, []).append(node)
    donors: dict[int, int] = {}
    for kind, nodes in classes.items():
        if len(nodes) > 1:
            shift = rng.randrange(1, len(nodes))
            donors |= {node: nodes[(place + shift) % len(nodes)] for place, node in enumerate(nodes)}
        else:
            donors[nodes[0]] = rng.choice([node for node, other in decided.items() if other == kind] or nodes)
    return donors
