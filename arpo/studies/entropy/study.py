"""Where a model is unsure: token entropies by place, and what was decided there. The pilot study behind ARPO.

    found = study([(tree, rewards), ...], config.branching, tokens=50)

A place is where the model begins to write: at the prompt, or after a tool result. Entropies are those of the tree's
nodes: nats, over the full vocabulary, at the temperature of sampling.

Promises: every place counts once. What was written from the same place, by several paths from a prompt or by branches
after a result, is averaged first; else results that were branched from, which are those where entropy was high, would
count more than others. Standard errors are over questions, as paths of one question resemble each other.
Does not cover: results that exist only because an earlier one was branched from. They count like others.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

import numpy as np
import numpy.typing as npt

from arpo.config.schema import Branching
from arpo.rewards import unjudged
from arpo.types import Decision, Kind, Node, Reward, RolloutTree, Trajectory

Floats = npt.NDArray[np.float64]
SAME = 1e-9  # rewards that differ by less are the same


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """A kind of place: `Place("start")`, `Place("tool", "search")`, or `Place("failed")`, after a call that failed."""

    kind: str
    tool: str = ""

    @property
    def label(self) -> str:
        """In words; a tool's name is as it came."""
        return {"start": "start of the reasoning", "failed": "after a failed call"}.get(self.kind, f"after {self.tool}")


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean over `count` places, and its standard error over questions; None if there is only one of them."""

    value: float
    error: float | None
    count: int
    questions: int


@dataclass(frozen=True, slots=True)
class Curve:
    """Entropy after one kind of place: of the first k tokens, and token by token as far as any turn goes."""

    turns: int
    first: Mean
    positions: tuple[Mean, ...]


@dataclass(frozen=True, slots=True)
class BranchStats:
    """What was seen and decided after tool results of one kind.

    `rise` is H - H_initial in nats and `rose` the share with dH > 0, both None if nothing was generated after any of
    them. Of the branch points, `compared` had two continuations or more whose rewards count, and `different` is how
    many of these had continuations with different mean rewards. `foretold` is the chance that one of those has a higher
    dH than one of the others (equal: half), None without one of each: 0.5 if dH says nothing about it.
    """

    looked: int
    rise: Mean | None
    rose: Mean | None
    reasons: Mapping[str, int]
    branched_deltas: tuple[float, ...]
    other_deltas: tuple[float, ...]
    compared: int
    different: int
    auc: float | None

    @property
    def branched(self) -> int:
        """Results from which paths were opened."""
        return len(self.branched_deltas)


@dataclass(frozen=True, slots=True)
class Study:
    """All of it: `threshold` is the dH above which the threshold rule branches, None if there is none."""

    trees: int
    questions: int
    probe: int
    threshold: float | None
    curves: Mapping[Place, Curve]
    looks: Mapping[Place, BranchStats]
    by_call: Mapping[int, BranchStats]


def study(grown: Iterable[tuple[RolloutTree, Sequence[Reward]]], settings: Branching, tokens: int) -> Study:
    """Look at trees, each with a reward per leaf, that were grown with these settings; `tokens` of a turn at most."""
    k, trees, questions = settings.probe_tokens, 0, set[Hashable]()
    curves: dict[Place, _Curve] = {}
    looks: dict[Place, _Looks] = {}
    by_call: dict[int, _Looks] = {}
    for tree, rewards in grown:
        question = (tree.task.id, tree.task.question)
        trees += 1
        questions.add(question)
        for source, turns in _turns(tree).items():
            curve = curves.setdefault(_place(tree.nodes[source]), _Curve(_Sums(tokens + 1)))
            curve.turns += len(turns)
            curve.sums.add(question, _entropies(turns, k, tokens))
        told = _told(tree, rewards)
        for index, node in enumerate(tree.nodes):
            if node.decision is not None:
                number = sum(tree.nodes[i].kind is Kind.TOOL for i in tree.prefix(index))
                for seen in (looks.setdefault(_place(node), _Looks()), by_call.setdefault(number, _Looks())):
                    seen.add(question, node.decision, told.get(index))
    return Study(
        trees,
        len(questions),
        k,
        threshold(settings),
        {place: curves[place].done() for place in _ordered(curves)},
        {place: looks[place].done() for place in _ordered(looks)},
        {number: by_call[number].done() for number in sorted(by_call)},
    )


def threshold(settings: Branching) -> float | None:
    """The dH above which P is above tau, where that decides."""
    decides = settings.policy == "entropy" and settings.rule == "threshold" and settings.beta > 0
    if not decides or settings.penalty:
        return None
    return (settings.tau - settings.alpha) / settings.beta


class _Sums:
    """Rows of numbers, added up by question; NaN stands for none."""

    def __init__(self, columns: int) -> None:
        self._columns = columns
        self._by_question: dict[Hashable, Floats] = {}

    def add(self, question: Hashable, row: Sequence[float] | Floats) -> None:
        """Count one row."""
        values = np.asarray(row, dtype=np.float64)
        there = ~np.isnan(values)
        held = self._by_question.setdefault(question, np.zeros((2, self._columns)))
        held += np.stack([np.where(there, values, 0.0), there])

    def means(self) -> list[Mean | None]:
        """The mean of each column and its standard error, with questions as clusters."""
        if not self._by_question:
            return [None] * self._columns
        sums, number = np.stack(list(self._by_question.values()), axis=1)  # both: questions x columns
        found: list[Mean | None] = []
        for total, count in zip(sums.T, number.T, strict=True):
            clusters, n = int((count > 0).sum()), int(count.sum())
            if n == 0:
                found.append(None)
                continue
            mean = float(total.sum() / n)
            spread = float(((total - mean * count) ** 2).sum())
            error = math.sqrt(spread * clusters / (clusters - 1)) / n if clusters > 1 else None
            found.append(Mean(mean, error, n, clusters))
        return found


@dataclass(slots=True)
class _Curve:
    sums: _Sums
    turns: int = 0

    def done(self) -> Curve:
        *positions, first = self.sums.means()
        assert first is not None
        return Curve(self.turns, first, tuple(mean for mean in positions if mean is not None))


@dataclass(slots=True)
class _Looks:
    looked: int = 0
    sums: _Sums = field(default_factory=lambda: _Sums(2))
    reasons: Counter[str] = field(default_factory=Counter)
    deltas: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))  # not branched, branched
    told: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))  # dH: nothing, something

    def add(self, question: Hashable, decision: Decision, told: bool | None) -> None:
        self.looked += 1
        if not decision.branches:
            self.reasons[decision.reason] += 1
        if decision.probed_tokens:
            self.sums.add(question, [decision.entropy - decision.initial_entropy, decision.delta > 0])
            self.deltas[decision.branches > 0].append(decision.delta)
        if told is not None:
            self.told[told].append(decision.delta)

    def done(self) -> BranchStats:
        rise, rose = self.sums.means()
        reasons = dict(sorted(self.reasons.items()))
        others, branched = map(tuple, self.deltas)
        nothing, something = self.told
        compared = len(nothing) + len(something)
        auc = _chance_of_higher(something, nothing)
        return BranchStats(self.looked, rise, rose, reasons, branched, others, compared, len(something), auc)


def _chance_of_higher(some: Sequence[float], others: Sequence[float]) -> float | None:
    """That one of `some`, drawn at random, is higher than one of `others`; equal ones count half."""
    if not some or not others:
        return None
    ordered = np.sort(np.asarray(others))
    below = np.searchsorted(ordered, some, side="left") + np.searchsorted(ordered, some, side="right")
    return float(below.mean() / 2 / len(others))


def _turns(tree: RolloutTree) -> dict[int, list[Node]]:
    """What the model wrote at each place, by the node it follows."""
    found: dict[int, list[Node]] = {}
    for node in tree.nodes:
        at = node.parent
        if at is not None and node.kind is Kind.MODEL and node.tokens and tree.nodes[at].kind is not Kind.MODEL:
            found.setdefault(at, []).append(node)
    return found


def _place(node: Node) -> Place:
    if node.call is None or node.result is None:
        return Place("start")
    failed = node.call.error is not None or node.result.fault is not None
    return Place("failed") if failed else Place("tool", node.call.name)


def _entropies(turns: Sequence[Node], k: int, tokens: int) -> Floats:
    """By position, the mean over the turns that go so far; last, the mean over turns of that of their first k."""
    rows = np.full((len(turns), tokens), np.nan)
    for row, turn in zip(rows, turns, strict=True):
        row[: len(turn.tokens)] = turn.entropies[:tokens]
    reach = (~np.isnan(rows)).sum(axis=0)
    with np.errstate(invalid="ignore"):
        positions = np.nansum(rows, axis=0) / reach
    return np.append(positions, fmean(fmean(turn.entropies[:k]) for turn in turns))


def _told(tree: RolloutTree, rewards: Sequence[Reward]) -> dict[int, bool]:
    """For branch points with rewards on two continuations or more: whether these have different means."""
    earned: dict[int, dict[int, list[float]]] = {}
    for number, (leaf, reward) in enumerate(zip(tree.leaves, rewards, strict=True)):
        if Trajectory(tree, leaf).infra_fault or unjudged(reward):
            continue
        path = tree.prefix(leaf.node)
        for index, following in zip(path, [*path[1:], -1 - number], strict=True):  # cut off there: all by itself
            decision = tree.nodes[index].decision
            if decision is not None and decision.branches:
                earned.setdefault(index, {}).setdefault(following, []).append(reward.total)
    means = {index: [fmean(group) for group in groups.values()] for index, groups in earned.items()}
    return {index: max(found) - min(found) > SAME for index, found in means.items() if len(found) > 1}


def _ordered(found: Iterable[Place]) -> list[Place]:
    """The start, the tools by name, failed calls."""
    return sorted(found, key=lambda place: (("start", "tool", "failed").index(place.kind), place.tool))
