"""Token entropies by where a turn starts, and the branching decisions made there: the pilot study behind ARPO.

    found = study(scored_trees, config.branching, tokens=50)

A turn starts at the prompt or after a tool result. Entropies are those stored in the tree's nodes: nats, over the full
vocabulary, at the sampling temperature.

Guarantees: every turn start counts once. Turns that start at the same node (several trajectories at the prompt,
branches after a result) are averaged first; otherwise results with branches, where entropy was high, would count more
than others. Standard errors are clustered by question, because trajectories of one question are correlated.
Not covered: results that exist only because an earlier result was branched from. They count like all others.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
import numpy.typing as npt

from arpo.config.schema import Branching
from arpo.rewards import unjudged
from arpo.types import Decision, Kind, Node, RolloutTree, ScoredTree

Floats = npt.NDArray[np.float64]
ROUNDING = 1e-9  # rewards that differ by less count as equal
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
class Study:
    """The whole study; `threshold` is the dH above which the threshold rule branches, None for other rules."""

    trees: int
    questions: int
    probe_tokens: int
    threshold: float | None
    curves: Mapping[TurnStart, Curve]
    by_tool: Mapping[TurnStart, BranchStats]
    by_call: Mapping[int, BranchStats]  # by the number of the call in its trajectory


def study(trees: Iterable[ScoredTree], settings: Branching, tokens: int) -> Study:
    """Study trees that were sampled with these settings; at most `tokens` tokens of each turn."""
    count, questions, turn_counts = 0, set[Hashable](), Counter[TurnStart]()
    curves: dict[TurnStart, _Sums] = {}
    by_tool: dict[TurnStart, list[_Seen]] = {}
    by_call: dict[int, list[_Seen]] = {}
    for scored in trees:
        tree = scored.tree
        question = (tree.task.id, tree.task.question)
        count += 1
        questions.add(question)
        for index, turns in _turns(tree).items():
            start = _turn_start(tree.nodes[index])
            turn_counts[start] += len(turns)
            entropies = _entropies(turns, settings.probe_tokens, tokens)
            _add(curves.setdefault(start, {}), question, entropies)
        informative = _informative(scored)
        for index, node in enumerate(tree.nodes):
            if node.decision is not None:
                seen = question, node.decision, informative.get(index)
                by_tool.setdefault(_turn_start(node), []).append(seen)
                call = sum(tree.nodes[i].kind is Kind.TOOL for i in tree.prefix(index))
                by_call.setdefault(call, []).append(seen)
    return Study(
        count,
        len(questions),
        settings.probe_tokens,
        threshold(settings),
        {start: _curve(curves[start], turn_counts[start]) for start in sorted(curves, key=_order)},
        {start: _branch_stats(by_tool[start]) for start in sorted(by_tool, key=_order)},
        {call: _branch_stats(by_call[call]) for call in sorted(by_call)},
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
    reasons = Counter(decision.reason for _, decision, _ in seen if not decision.branches)
    return BranchStats(
        decisions=len(seen),
        rise=rise,
        risen=risen,
        not_branched=dict(sorted(reasons.items())),
        branched_deltas=tuple(decision.delta for _, decision in probed if decision.branches),
        other_deltas=tuple(decision.delta for _, decision in probed if not decision.branches),
        compared=len(positives) + len(negatives),
        informative=len(positives),
        auc=_auc(positives, negatives),
    )


def _auc(positives: Sequence[float], negatives: Sequence[float]) -> float | None:
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


def _informative(scored: ScoredTree) -> dict[int, bool]:
    """For branch points with valid rewards on two or more continuations: whether the mean rewards differ."""
    rewards: dict[int, dict[int, list[float]]] = {}  # by branch point and the node that follows it
    for number, (trajectory, reward) in enumerate(zip(scored.tree.trajectories, scored.rewards, strict=True)):
        if trajectory.infra_fault or unjudged(reward):
            continue
        indices = trajectory.indices
        # A trajectory that ends at the branch point is a continuation of its own: its key is -1, -2, ...
        for index, following in zip(indices, [*indices[1:], -1 - number], strict=True):
            decision = scored.tree.nodes[index].decision
            if decision is not None and decision.branches:
                rewards.setdefault(index, {}).setdefault(following, []).append(reward.total)
    means = {index: [fmean(group) for group in groups.values()] for index, groups in rewards.items()}
    return {index: max(found) - min(found) > ROUNDING for index, found in means.items() if len(found) > 1}


def _order(start: TurnStart) -> tuple[int, str]:
    """Sort key: the prompt, the tools by name, failed calls."""
    return ("prompt", "tool", "failed").index(start.kind), start.tool
