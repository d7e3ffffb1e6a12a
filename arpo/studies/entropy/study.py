"""Token entropies by where a turn starts, and the branching decisions made there: the pilot study behind ARPO.

    found = study(scored_trees, config.branching, tokens=50)

A turn starts at the prompt or after a tool result. Entropies are those stored in the tree's nodes: nats, over the full
vocabulary, at the sampling temperature.

Guarantees: every turn start counts once. Turns that start at the same node (several trajectories at the prompt,
branches after a result) are averaged first; otherwise results with branches, where entropy was high, would count more
than others. Standard errors are clustered by question, because trajectories of one question are correlated.
Not covered: results that exist only because an earlier result was branched from. They count like all others. Rewards
of trajectories that share more than the turn after a branch point count as if they shared no more.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
import numpy.typing as npt

from arpo.config.algorithm import Branching
from arpo.rewards import unjudged
from arpo.types import Decision, Kind, Node, RolloutTree, ScoredTree

Floats = npt.NDArray[np.float64]
ROUNDING = 1e-9  # rewards that differ by less count as equal
Continuations = Sequence[Sequence[float]]
"""The rewards below a branch point, one group for each node that follows it."""
_Sums = dict[Hashable, Floats]  # by question: the sum and the count of each column
_Seen = tuple[Hashable, Decision, bool | None]  # question, decision, whether the branch point is informative


@dataclass(frozen=True, slots=True)
class TurnStart:
    """Where a turn starts: `TurnStart("prompt")`, `TurnStart("tool", "search")`, or `TurnStart("failed")` for any call
    that failed."""

    kind: str
    tool: str = ""

    @property
    def label(self) -> str:
        """The turn start in words; the tool's name is not escaped."""
        return {"prompt": "start of the reasoning", "failed": "after a failed call"}.get(
            self.kind, f"after {self.tool}"
        )


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean over `count` values, and its standard error over questions, which is None for a single question."""

    value: float
    error: float | None
    count: int
    questions: int


@dataclass(frozen=True, slots=True)
class Curve:
    """Entropy of the turns with one kind of start: mean over the first k tokens, and token by token."""

    turns: int
    first: Mean
    positions: tuple[Mean, ...]


@dataclass(frozen=True, slots=True)
class BranchStats:
    """The branching decisions after one kind of tool result.

    `rise` is H - H_initial in nats and `risen` the fraction with dH > 0; both are None if no tokens were generated
    after any of the results. `compared` counts the branch points with valid rewards on two or more continuations, and
    `informative` those of them whose continuations have different mean rewards. `auc` is the probability that an
    informative branch point has a larger dH than an uninformative one (ties count half): 0.5 if dH predicts nothing,
    None without one of each.
    """

    decisions: int
    rise: Mean | None
    risen: Mean | None
    not_branched: Mapping[str, int]  # by reason
    branched_deltas: tuple[float, ...]
    other_deltas: tuple[float, ...]
    compared: int
    informative: int
    auc: float | None

    @property
    def branched(self) -> int:
        """The number of branch points."""
        return len(self.branched_deltas)


@dataclass(frozen=True, slots=True)
class RewardCorrelation:
    """How alike trajectories earn that share the turn after a branch point: `icc` is the intraclass correlation.

    It is 1 if that turn decides the reward, and about 0 if it makes no difference. `branch_points` are those with a
    continuation of two or more trajectories; `trajectories` are counted once for each of them.
    """

    icc: float | None
    branch_points: int
    trajectories: int


@dataclass(frozen=True, slots=True)
class Study:
    """The whole study; `threshold` is the dH above which the threshold rule branches, None for other rules.

    `groups` counts the trees with two or more valid rewards, and `informative_groups` those with unequal ones.
    """

    trees: int
    questions: int
    groups: int
    informative_groups: int
    probe_tokens: int
    threshold: float | None
    curves: Mapping[TurnStart, Curve]
    by_tool: Mapping[TurnStart, BranchStats]
    by_call: Mapping[int, BranchStats]  # by the number of the call in its trajectory
    by_depth: Mapping[int, RewardCorrelation]  # by the number of calls above the branch point; 0: the prompt


def study(trees: Iterable[ScoredTree], settings: Branching, tokens: int) -> Study:
    """Study trees that were sampled with these settings; at most `tokens` tokens of each turn."""
    count, questions, turn_counts = 0, set[Hashable](), Counter[TurnStart]()
    curves: dict[TurnStart, _Sums] = {}
    by_tool: dict[TurnStart, list[_Seen]] = {}
    by_call: dict[int, list[_Seen]] = {}
    by_depth: dict[int, list[Continuations]] = {}
    groups = informative_groups = 0
    for scored in trees:
        tree = scored.tree
        question = (tree.task.id, tree.task.question)
        count += 1
        questions.add(question)
        for index, turns in _turns(tree).items():
            start = _turn_start(tree.nodes[index])
            turn_counts[start] += len(turns)
            entropies = _entropies(turns, settings.probe_length, tokens)
            _add(curves.setdefault(start, {}), question, entropies)
        continuations = rewards_by_continuation(scored)
        earned = [reward for group in continuations.get(0, ()) for reward in group]
        groups += len(earned) > 1
        informative_groups += _unequal(earned)
        for index, node in enumerate(tree.nodes):
            depth = sum(tree.nodes[i].kind is Kind.TOOL for i in tree.prefix(index))
            if node.decision is not None:
                seen = question, node.decision, _informative(node.decision, continuations.get(index, ()))
                by_tool.setdefault(_turn_start(node), []).append(seen)
                by_call.setdefault(depth, []).append(seen)
            if _comparable(continuations.get(index, ())):
                by_depth.setdefault(depth, []).append(continuations[index])
    return Study(
        count,
        len(questions),
        groups,
        informative_groups,
        settings.probe_length,
        threshold(settings),
        {start: _curve(curves[start], turn_counts[start]) for start in sorted(curves, key=_order)},
        {start: _branch_stats(by_tool[start]) for start in sorted(by_tool, key=_order)},
        {call: _branch_stats(by_call[call]) for call in sorted(by_call)},
        {depth: _reward_correlation(by_depth[depth]) for depth in sorted(by_depth)},
    )


def threshold(settings: Branching) -> float | None:
    """The dH above which P exceeds tau, if that alone decides about branching."""
    decides = settings.policy == "entropy" and settings.rule == "threshold" and settings.beta > 0
    if not decides or settings.penalty:
        return None
    return (settings.tau - settings.alpha) / settings.beta


def _add(sums: _Sums, question: Hashable, row: Sequence[float] | Floats) -> None:
    """Add a row of numbers; NaN stands for a missing number."""
    values = np.asarray(row, dtype=np.float64)
    present = ~np.isnan(values)
    found = sums.setdefault(question, np.zeros((2, len(values))))
    found += np.stack([np.where(present, values, 0.0), present])


def _means(sums: _Sums) -> list[Mean | None]:
    """The mean of each column and its standard error, clustered by question."""
    totals_QC, counts_QC = np.stack(list(sums.values()), axis=1)  # questions x columns
    means: list[Mean | None] = []
    for total, count in zip(totals_QC.T, counts_QC.T, strict=True):
        clusters, n = int((count > 0).sum()), int(count.sum())
        if n == 0:
            means.append(None)
            continue
        mean = float(total.sum() / n)
        spread = float(((total - mean * count) ** 2).sum())
        error = math.sqrt(spread * clusters / (clusters - 1)) / n if clusters > 1 else None
        means.append(Mean(mean, error, n, clusters))
    return means


def _curve(sums: _Sums, turns: int) -> Curve:
    *positions, first = _means(sums)
    assert first is not None
    return Curve(turns, first, tuple(mean for mean in positions if mean is not None))


def _branch_stats(seen: Sequence[_Seen]) -> BranchStats:
    sums: _Sums = {}
    probed = [(question, decision) for question, decision, _ in seen if decision.probed_tokens]
    for question, decision in probed:
        _add(sums, question, [decision.entropy - decision.initial_entropy, decision.delta > 0])
    rise, risen = _means(sums) if sums else (None, None)
    positives = [decision.delta for _, decision, informative in seen if informative]
    negatives = [decision.delta for _, decision, informative in seen if informative is False]
    reasons = Counter(decision.reason.partition(" (")[0] for _, decision, _ in seen if not decision.branches)
    return BranchStats(
        decisions=len(seen),
        rise=rise,
        risen=risen,
        not_branched=dict(sorted(reasons.items())),
        branched_deltas=tuple(decision.delta for _, decision in probed if decision.branches),
        other_deltas=tuple(decision.delta for _, decision in probed if not decision.branches),
        compared=len(positives) + len(negatives),
        informative=len(positives),
        auc=auc(positives, negatives),
    )


def auc(positives: Sequence[float], negatives: Sequence[float]) -> float | None:
    """The probability that a random positive is larger than a random negative; ties count half."""
    if not positives or not negatives:
        return None
    ordered = np.sort(np.asarray(negatives))
    below = np.searchsorted(ordered, positives, side="left") + np.searchsorted(ordered, positives, side="right")
    return float(below.mean() / 2 / len(negatives))


def _turns(tree: RolloutTree) -> dict[int, list[Node]]:
    """The model's turns by the node that they follow."""
    turns: dict[int, list[Node]] = {}
    for node in tree.nodes:
        parent = node.parent
        if parent is None or node.kind is not Kind.MODEL or not node.tokens:
            continue
        if tree.nodes[parent].kind is not Kind.MODEL:
            turns.setdefault(parent, []).append(node)
    return turns


def _turn_start(node: Node) -> TurnStart:
    if node.call is None or node.result is None:
        return TurnStart("prompt")
    failed = node.call.error is not None or node.result.fault is not None
    return TurnStart("failed") if failed else TurnStart("tool", node.call.name)


def _entropies(turns: Sequence[Node], k: int, tokens: int) -> Floats:
    """By position, the mean over the turns that are long enough; last, the mean over turns of their first k tokens."""
    rows = np.full((len(turns), tokens), np.nan)
    for row, turn in zip(rows, turns, strict=True):
        row[: len(turn.tokens)] = turn.entropies[:tokens]
    counts = (~np.isnan(rows)).sum(axis=0)
    with np.errstate(invalid="ignore"):
        positions = np.nansum(rows, axis=0) / counts
    return np.append(positions, fmean(fmean(turn.entropies[:k]) for turn in turns))


def rewards_by_continuation(scored: ScoredTree) -> dict[int, Continuations]:
    """By branch point (the prompt or a tool result that a turn follows), the valid rewards below each continuation."""
    rewards: dict[int, dict[int, list[float]]] = {}  # by branch point and the node that follows it
    for number, (trajectory, reward) in enumerate(zip(scored.tree.trajectories, scored.rewards, strict=True)):
        if trajectory.infra_fault or unjudged(reward):
            continue
        indices = trajectory.indices
        # A trajectory that ends at the branch point is a continuation of its own: its key is -1, -2, ...
        for index, following in zip(indices, [*indices[1:], -1 - number], strict=True):
            if scored.tree.nodes[index].kind is not Kind.MODEL:
                rewards.setdefault(index, {}).setdefault(following, []).append(reward.total)
    return {index: list(groups.values()) for index, groups in rewards.items()}


def intraclass_correlation(branch_points: Iterable[Continuations]) -> float | None:
    """ICC(1) of rewards, with the continuations of a branch point as classes, pooled over branch points.

    The share of the variance at a branch point that lies between its continuations, estimated by a one-way analysis of
    variance: (MSB - MSW) / (MSB + (n - 1) MSW), where n is the mean class size, corrected for unequal sizes. None if
    no class has two rewards, no branch point has two classes, or all rewards are equal.
    """
    between = within = size = 0.0
    between_df = within_df = 0
    for classes in branch_points:
        total = sum(map(len, classes))
        mean = sum(map(sum, classes)) / total
        between += sum(len(each) * (fmean(each) - mean) ** 2 for each in classes)
        within += sum((reward - fmean(each)) ** 2 for each in classes for reward in each)
        size += total - sum(len(each) ** 2 for each in classes) / total
        between_df += len(classes) - 1
        within_df += total - len(classes)
    if not between_df or not within_df or between + within < ROUNDING:
        return None
    msb, msw, n = between / between_df, within / within_df, size / between_df
    return (msb - msw) / (msb + (n - 1) * msw)


def _reward_correlation(branch_points: Sequence[Continuations]) -> RewardCorrelation:
    trajectories = sum(len(each) for classes in branch_points for each in classes)
    return RewardCorrelation(intraclass_correlation(branch_points), len(branch_points), trajectories)


def _comparable(classes: Continuations) -> bool:
    """Whether rewards can be compared both between continuations and within one of them."""
    return len(classes) > 1 and max(map(len, classes)) > 1


def _informative(decision: Decision, classes: Continuations) -> bool | None:
    """Whether the continuations of a branch point have different mean rewards; None if there is nothing to compare."""
    return _unequal([fmean(each) for each in classes]) if decision.branches and len(classes) > 1 else None


def _unequal(values: Sequence[float]) -> bool:
    return len(values) > 1 and max(values) - min(values) > ROUNDING


def _order(start: TurnStart) -> tuple[int, str]:
    """Sort key: the prompt, the tools by name, failed calls."""
    return ("prompt", "tool", "failed").index(start.kind), start.tool
