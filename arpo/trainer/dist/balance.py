"""Load balancing: a forest divided among ranks, with matching forward passes. Pure functions.

    tree_costs(batch, attention_cost)  the cost of each tree of the forest, in tokens
    balance(costs, world_size)         which trees each rank takes
    select_trees(batch, trees)         the forest of these trees alone
    match_microbatches(per rank)       micro-batches of equal number and shape, with empty ones where a rank has fewer

Guarantees: everything follows from the batch alone, so every rank computes the same result without communication. The
weight of a target stays that in the whole batch: losses and gradients of all ranks add up to those of the whole.
Not covered: dividing one tree. A forward pass takes as long as on the rank where it is longest.

Shape suffixes as in `arpo.algorithm.batch`; R trees (roots) of the forest.
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


def tree_costs(batch: TreeBatch, attention_cost: float) -> list[float]:
    """Per tree: its unique tokens, plus `attention_cost` for every pair of a query and a key."""
    keys_N = np.cumsum(np.concatenate([[0], batch.depth_N.numpy() + 1]))
    return [
        float(last - first + attention_cost * (keys_N[last] - keys_N[first])) for first, last in _token_ranges(batch)
    ]


def attention_cost(model_parameters: int, layers: int, width: int) -> float:
    """The cost of one query-key pair in units of one token's pass through the weights, counted in multiplications."""
    return 2 * layers * width / model_parameters


def balance(costs: Sequence[float], world_size: int) -> list[list[int]]:
    """Which trees each rank takes, so that the largest load is small: at most 4/3 of the smallest possible.

    Greedy, the most expensive tree first to the least loaded rank; then trees are moved or swapped while that helps.
    """
    shares: list[list[int]] = [[] for _ in range(world_size)]
    load = [0.0] * world_size
    for tree in sorted(range(len(costs)), key=lambda tree: (-costs[tree], tree)):
        least = min(range(world_size), key=lambda rank: (load[rank], rank))
        shares[least].append(tree)
        load[least] += costs[tree]
    while _improve(costs, shares):
        pass
    return [sorted(share) for share in shares]


def _improve(costs: Sequence[float], shares: list[list[int]]) -> bool:
    """Move a tree from the busiest rank to another, or swap it, if that lowers the larger of both loads."""
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


def select_trees(batch: TreeBatch, trees: Sequence[int]) -> TreeBatch:
    """The forest of these trees (ascending), each token with its weight in the whole batch."""
    root_S = np.flatnonzero(batch.parent_S < 0)
    edge_R = np.append(root_S, len(batch.parent_S))
    ranges = _token_ranges(batch)
    keep_N = _concatenated_ranges([ranges[tree] for tree in trees])
    keep_S = _concatenated_ranges([(int(edge_R[tree]), int(edge_R[tree + 1])) for tree in trees])
    place_N = _new_indices(batch.unique_tokens, keep_N)
    span_S = _new_indices(len(batch.parent_S), keep_S)
    shift_N = torch.from_numpy(place_N[keep_N] - keep_N)
    parent_N = batch.parent_N[keep_N]
    at_K = place_N[batch.targets_K.numpy()]
    keep_K = np.flatnonzero(at_K >= 0)
    keep_M, node_K = np.unique(batch.node_K.numpy()[keep_K], return_inverse=True)
    node_M = _new_indices(batch.nodes, keep_M)
    pair_X = node_M[batch.pair_node_X.numpy()]
    keep_X = np.flatnonzero(pair_X >= 0)
    keep_I, trajectory_X = np.unique(batch.pair_trajectory_X.numpy()[keep_X], return_inverse=True)
    depth_N = batch.depth_N[keep_N]
    last_M = np.zeros(len(keep_M), dtype=np.int64)  # tokens from the root to the end of a model node
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


def match_microbatches(ranks: Sequence[Sequence[MicroBatch]]) -> list[list[MicroBatch]]:
    """The micro-batches of every rank, padded so that all ranks have the same number at every level.

    The largest come first, so that they run at the same time. A rank's missing micro-batches are empty: they and their
    children have no tokens.
    """
    return [[*own] for own in _padded([_ordered(own) for own in ranks])]


def _ordered(micro_batches: Sequence[MicroBatch]) -> list[MicroBatch]:
    inside = [MicroBatch(m.tokens, m.prefix_length, tuple(_ordered(m.children))) for m in micro_batches]
    return sorted(inside, key=lambda micro: (_count(micro), len(micro.tokens)), reverse=True)


def _count(micro: MicroBatch) -> int:
    return 1 + sum(map(_count, micro.children))


def _padded(ranks: Sequence[Sequence[MicroBatch]]) -> list[tuple[MicroBatch, ...]]:
    empty = MicroBatch(np.empty(0, dtype=np.int64), 0, ())
    columns = []
    for column in zip_longest(*ranks, fillvalue=empty):
        children = _padded([micro.children for micro in column])
        columns.append([MicroBatch(m.tokens, m.prefix_length, own) for m, own in zip(column, children, strict=True)])
    return list(zip(*columns, strict=True)) if columns else [() for _ in ranks]


def _token_ranges(batch: TreeBatch) -> list[tuple[int, int]]:
    """The first token of each tree, and one past its last."""
    first_R = batch.first_S[batch.parent_S < 0]
    last_R = first_R + batch.size_S[batch.parent_S < 0]
    return list(zip(first_R.tolist(), last_R.tolist(), strict=True))


def _concatenated_ranges(ranges: Sequence[tuple[int, int]]) -> Ints:
    return np.concatenate([np.empty(0, dtype=np.int64), *(np.arange(first, last) for first, last in ranges)])


def _new_indices(count: int, kept: Ints) -> Ints:
    """The index of each of `count` items among those kept; -1 if it is not kept."""
    index = np.full(count, -1, dtype=np.int64)
    index[kept] = np.arange(len(kept))
    return index
