"""A forest divided among ranks, and their forward passes made to match. Pure functions.

    costs(batch, per_seen)             what each tree of the forest costs, in tokens
    balance(costs, ranks)              which trees each rank takes
    take(batch, trees)                 the forest of these trees alone
    matched(parts of every rank)       the same for every rank, with empty parts where one has fewer

Promises: everything is decided from the batch alone, so that every rank decides the same without asking. What a target
weighs stays what it weighs in the whole batch: losses and gradients of all ranks add up to those of the whole.
Does not cover: dividing one tree. A forward pass takes as long as on the rank where it is longest.

Letters as in `arpo.algorithm.batch`; R trees (roots) of the forest.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

import numpy as np
import numpy.typing as npt
import torch

from arpo.algorithm.batch import MicroBatch
from arpo.types import TreeBatch

Ints = npt.NDArray[np.int64]


def costs(batch: TreeBatch, per_seen: float) -> list[float]:
    """Of each tree: its unique tokens, and `per_seen` for every token that one of them attends to, itself included."""
    seen_N = np.cumsum(np.concatenate([[0], batch.depth_N.numpy() + 1]))
    return [float(last - first + per_seen * (seen_N[last] - seen_N[first])) for first, last in _stretches(batch)]


def per_seen(model_parameters: int, layers: int, width: int) -> float:
    """What attending to one token costs, against what a token costs in the weights: multiplications over those."""
    return 2 * layers * width / model_parameters


def balance(costs: Sequence[float], ranks: int) -> list[list[int]]:
    """Which trees each rank takes, so that the largest sum is small: never more than 4/3 of the smallest possible.

    The most expensive first, each to the rank that has least; then trees change places while that helps.
    """
    shares: list[list[int]] = [[] for _ in range(ranks)]
    load = [0.0] * ranks
    for tree in sorted(range(len(costs)), key=lambda tree: (-costs[tree], tree)):
        least = min(range(ranks), key=lambda rank: (load[rank], rank))
        shares[least].append(tree)
        load[least] += costs[tree]
    while _improve(costs, shares):
        pass
    return [sorted(share) for share in shares]


def _improve(costs: Sequence[float], shares: list[list[int]]) -> bool:
    """Give a tree of the busiest rank to another, perhaps against one of its own, if that lowers the higher of both."""
    load = [sum(costs[tree] for tree in share) for share in shares]
    busiest = max(range(len(shares)), key=lambda rank: (load[rank], -rank))
    for mine in shares[busiest]:
        for other in range(len(shares)):
            if other == busiest:
                continue
            for theirs in (None, *shares[other]):
                shift = costs[mine] - (0.0 if theirs is None else costs[theirs])
                if max(load[busiest] - shift, load[other] + shift) < load[busiest] * (1 - 1e-9):
                    shares[busiest].remove(mine)
                    shares[other].append(mine)
                    if theirs is not None:
                        shares[other].remove(theirs)
                        shares[busiest].append(theirs)
                    return True
    return False


def take(batch: TreeBatch, trees: Sequence[int]) -> TreeBatch:
    """The forest of these trees (ascending), each token with the weight that it has in the whole batch."""
    root_S = np.flatnonzero(batch.parent_S < 0)
    edge_R = np.append(root_S, len(batch.parent_S))
    stretches = _stretches(batch)
    keep_N = _ranges([stretches[tree] for tree in trees])
    keep_S = _ranges([(int(edge_R[tree]), int(edge_R[tree + 1])) for tree in trees])
    place_N = _places(batch.unique_tokens, keep_N)
    span_S = _places(len(batch.parent_S), keep_S)
    shift_N = torch.from_numpy(place_N[keep_N] - keep_N)
    parent_N = batch.parent_N[keep_N]
    at_K = place_N[batch.targets_K.numpy()]
    keep_K = np.flatnonzero(at_K >= 0)
    keep_M, node_K = np.unique(batch.node_K.numpy()[keep_K], return_inverse=True)
    node_M = _places(batch.nodes, keep_M)
    pair_X = node_M[batch.pair_node_X.numpy()]
    keep_X = np.flatnonzero(pair_X >= 0)
    keep_I, trajectory_X = np.unique(batch.pair_trajectory_X.numpy()[keep_X], return_inverse=True)
    depth_N = batch.depth_N[keep_N]
    last_M = np.zeros(len(keep_M), dtype=np.int64)  # tokens on the way to the end of a model node
    np.maximum.at(last_M, node_K, depth_N.numpy()[at_K[keep_K]] + 1)
    last_I = np.zeros(len(keep_I), dtype=np.int64)
    np.maximum.at(last_I, trajectory_X, last_M[pair_X[keep_X]])
    return TreeBatch(
        tokens_N=batch.tokens_N[keep_N],
        depth_N=depth_N,
        parent_N=torch.where(parent_N < 0, parent_N, parent_N + shift_N),
        end_N=batch.end_N[keep_N] + shift_N,
        first_S=place_N[batch.first_S[keep_S]] if len(keep_S) else keep_S,
        parent_S=np.where(batch.parent_S[keep_S] < 0, -1, span_S[batch.parent_S[keep_S]]),
        size_S=batch.size_S[keep_S],
        targets_K=torch.from_numpy(at_K[keep_K]),
        engine_logprobs_K=batch.engine_logprobs_K[keep_K],
        entropy_weight_K=batch.entropy_weight_K[keep_K],
        node_K=torch.from_numpy(node_K),
        pair_node_X=torch.from_numpy(pair_X[keep_X]),
        pair_trajectory_X=torch.from_numpy(trajectory_X),
        pair_weight_X=batch.pair_weight_X[keep_X],
        pair_advantage_X=batch.pair_advantage_X[keep_X],
        trajectory_tokens_I=batch.trajectory_tokens_I[keep_I],
        nodes=len(keep_M),
        total_tokens=int(last_I.sum()),
    )


def matched(parts: Sequence[Sequence[MicroBatch]]) -> list[list[MicroBatch]]:
    """The parts of every rank, such that all have the same shape: the first with the first, each with its children.

    The largest come first, so that they meet. A part that only others have is empty: no tokens, and none of its
    children has any.
    """
    ordered = [_ordered(own) for own in parts]
    return [[*own] for own in _filled(ordered)]


def _ordered(parts: Sequence[MicroBatch]) -> list[MicroBatch]:
    sorted_inside = [MicroBatch(part.tokens, part.prefix_length, tuple(_ordered(part.children))) for part in parts]
    return sorted(sorted_inside, key=lambda part: (_count(part), len(part.tokens)), reverse=True)


def _count(part: MicroBatch) -> int:
    return 1 + sum(map(_count, part.children))


def _filled(parts: Sequence[Sequence[MicroBatch]]) -> list[tuple[MicroBatch, ...]]:
    empty = MicroBatch(np.empty(0, dtype=np.int64), 0, ())
    columns = []
    for together in zip_longest(*parts, fillvalue=empty):
        children = _filled([part.children for part in together])
        columns.append([MicroBatch(p.tokens, p.prefix_length, below) for p, below in zip(together, children, strict=True)])
    return list(zip(*columns, strict=True)) if columns else [() for _ in parts]


def _stretches(batch: TreeBatch) -> list[tuple[int, int]]:
    """First token and one past the last of each tree."""
    first_R = batch.first_S[batch.parent_S < 0]
    last_R = first_R + batch.size_S[batch.parent_S < 0]
    return list(zip(first_R.tolist(), last_R.tolist(), strict=True))


def _ranges(stretches: Sequence[tuple[int, int]]) -> Ints:
    return np.concatenate([np.empty(0, dtype=np.int64), *(np.arange(first, last) for first, last in stretches)])


def _places(count: int, kept: Ints) -> Ints:
    """Where each of `count` things stands among those kept; -1 if it is not."""
    place = np.full(count, -1, dtype=np.int64)
    place[kept] = np.arange(len(kept))
    return place
