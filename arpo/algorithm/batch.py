"""Batches: trees with credits packed into one forest that holds every unique token once. Pure functions.

    build_batch(trees, ...)            all tokens in depth-first order, with the advantages and weights of trained ones
    split_microbatches(batch, budget)  the forest in micro-batches of at most `budget` tokens per forward pass

Guarantees: the loss is a plain sum over targets, however the batch is split. A target is a token that the model sampled
on a trained trajectory; it is predicted at its parent, the token before it, so a branch point predicts several targets.
Masked leaves are left out altogether. Leaves without a gradient (no model tokens, or all advantages exactly 0 while
neither the KL nor the entropy term is used) are not in the forest but count in the weights.
Not covered: splitting trees into mini-batches, devices, the loss itself.

Shape suffixes: N tokens, S spans (nodes with tokens), K targets, I trajectories, M model nodes, X pairs of a model node
and a trajectory through it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import compress

import numpy as np
import numpy.typing as npt
import torch

from arpo.algorithm.advantage import MIN_STD
from arpo.config.algorithm import Loss
from arpo.types import NO_CONTEXT, Credit, Kind, Node, RolloutTree, ScoredTree, TreeBatch, context_of

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class _Trained:
    """A trajectory with a gradient: its node indices, its credit, and the weight of each of its model tokens."""

    indices: tuple[int, ...]
    credit: Credit
    weight: float
    model_tokens: int


@dataclass(frozen=True, slots=True)
class _Span:
    """A node that has tokens, in the forest."""

    node: Node
    parent: int  # index of the span above it; -1 for a root
    pairs: Sequence[tuple[int, float, float]]  # of a trained model node: (trajectory, weight, advantage)


def build_batch(
    trees: Sequence[ScoredTree],
    loss: Loss,
    max_tokens: int,
    shared: bool = True,
    entropy_weight: float = 0.0,
    embed_ids: Callable[[Node], Sequence[int]] = lambda node: node.tokens,
) -> TreeBatch:
    """The forest of all trajectories with a gradient; the trees must have credits.

    "constant" aggregation divides by `max_tokens`. Without `shared`, prefixes are not shared: every trajectory is a
    tree of its own. The policy term of a target is multiplied by max(0, 1 + `entropy_weight` z), where z is its entropy
    at sampling time, normalized over all sampled tokens of unmasked leaves, shared ones counted once. `embed_ids` gives
    the ids of a node's tokens as the model gets them, where some stand for images.
    """
    used = [
        (number, trajectory, credit)
        for number, scored in enumerate(trees)
        for trajectory, credit, use in zip(scored.tree.trajectories, scored.credits, scored.mask, strict=True)
        if use
    ]
    counts = [trajectory.completion_tokens for _, trajectory, _ in used]
    trajectories = sum(credit.weight for _, _, credit in used)
    tokens = sum(credit.weight * count for (_, _, credit), count in zip(used, counts, strict=True))
    regularized = loss.kl_coef > 0 or loss.entropy_coef > 0  # then advantage 0 has a gradient, too
    trained: list[list[_Trained]] = [[] for _ in trees]
    for (number, trajectory, credit), count in zip(used, counts, strict=True):
        if count and (regularized or any(credit.by_node.values())):
            divisor = {
                "token-mean": tokens,
                "sequence-mean": trajectories * count,
                "constant": trajectories * max_tokens,
            }[loss.aggregation]
            trained[number].append(_Trained(trajectory.indices, credit, credit.weight / divisor, count))
    spans: list[_Span] = []
    trajectory_tokens: list[int] = []
    total = 0
    for scored, own in zip(trees, trained, strict=True):
        for group in [own] if shared else [[one] for one in own]:
            if group:
                total += _add_tree(spans, scored.tree, group, len(trajectory_tokens))
                trajectory_tokens.extend(one.model_tokens for one in group)
    return _flatten(spans, trajectory_tokens, total, entropy_weights(trees, entropy_weight), embed_ids)


def entropy_weights(trees: Sequence[ScoredTree], weight: float) -> Callable[[Node], Floats]:
    """A function from a model node to the weights of its tokens, normalized over all nodes of unmasked leaves."""
    if not weight:
        return lambda node: np.ones(len(node.tokens))
    visited = {
        (number, index)
        for number, scored in enumerate(trees)
        for trajectory in compress(scored.tree.trajectories, scored.mask)
        for index in trajectory.indices
    }
    nodes = [trees[number].tree.nodes[index] for number, index in sorted(visited)]
    every = np.concatenate([*(np.asarray(node.entropies) for node in nodes), np.empty(0)])
    mean, std = (every.mean(), max(every.std(), MIN_STD)) if len(every) else (0.0, 1.0)
    return lambda node: np.maximum(0.0, 1 + weight * (np.asarray(node.entropies) - mean) / std)


def _add_tree(spans: list[_Span], tree: RolloutTree, trained: Sequence[_Trained], first: int) -> int:
    """Append the nodes of these trajectories to `spans`, depth first, the longest subtree first.

    `first` is the index of the first trajectory in the batch. Returns the token count, shared ones once per trajectory.
    """
    total = 0
    pairs: dict[int, list[tuple[int, float, float]]] = defaultdict(list)
    needed: set[int] = set()
    for number, one in enumerate(trained, first):
        targets = [i for i in one.indices if tree.nodes[i].kind is Kind.MODEL and tree.nodes[i].tokens]
        used = one.indices[: one.indices.index(targets[-1]) + 1]
        needed.update(used)
        total += sum(len(tree.nodes[i].tokens) for i in used)
        for i in targets:
            pairs[i].append((number, one.weight, one.credit.by_node[i]))
    below = dict.fromkeys(needed, 0)  # tokens on the longest walk down, without the node's own
    children: dict[int, list[int]] = defaultdict(list)
    for i in sorted(needed, reverse=True):
        if i not in pairs and not children[i]:
            continue  # in the context of no trained token
        before = context_of(tree.nodes[i])
        if before != NO_CONTEXT:
            below[before] = max(below[before], below[i] + len(tree.nodes[i].tokens))
        children[before].append(i)
    roots = sorted(children[NO_CONTEXT], key=lambda root: (below[root] + len(tree.nodes[root].tokens), -root))
    stack = [(root, -1) for root in roots]
    while stack:
        i, parent = stack.pop()
        node = tree.nodes[i]
        if node.tokens:
            if parent < 0 and i in pairs:
                raise ValueError("a trajectory starts with a model token, which nothing predicts: the prompt is empty")
            spans.append(_Span(node, parent, pairs[i]))
            parent = len(spans) - 1
        ordered = sorted(children[i], key=lambda child: (below[child] + len(tree.nodes[child].tokens), -child))
        stack.extend((child, parent) for child in ordered)  # the last one is taken first
    return total


def _flatten(
    spans: Sequence[_Span],
    trajectory_tokens: Sequence[int],
    total: int,
    entropy_weights: Callable[[Node], Floats],
    embed_ids: Callable[[Node], Sequence[int]],
) -> TreeBatch:
    """The tensors of the spans, which are in depth-first order."""
    count_S = np.array([len(span.node.tokens) for span in spans], dtype=np.int64)
    first_S = np.cumsum(count_S) - count_S
    parent_S = np.array([span.parent for span in spans], dtype=np.int64)
    depth_S, size_S = np.zeros_like(count_S), count_S.copy()
    for s in range(len(spans)):
        if parent_S[s] >= 0:
            depth_S[s] = depth_S[parent_S[s]] + count_S[parent_S[s]]
    for s in reversed(range(len(spans))):
        if parent_S[s] >= 0:
            size_S[parent_S[s]] += size_S[s]
    span_N = np.repeat(np.arange(len(spans)), count_S)
    inside_N = np.arange(len(span_N)) - first_S[span_N]
    last_above_S = np.where(parent_S >= 0, first_S[parent_S] + count_S[parent_S] - 1, -1) if len(spans) else first_S
    trained = [(s, span) for s, span in enumerate(spans) if span.pairs]
    count_M = count_S[[s for s, _ in trained]]
    targets = [np.arange(first_S[s], first_S[s] + count_S[s]) for s, _ in trained]
    pairs = [(m, *pair) for m, (_, span) in enumerate(trained) for pair in span.pairs]
    node, trajectory, weight, advantage = (
        (np.array(column) for column in zip(*pairs, strict=True)) if pairs else [[]] * 4
    )
    return TreeBatch(
        tokens_N=_joined([embed_ids(span.node) for span in spans], torch.long),
        depth_N=torch.from_numpy(depth_S[span_N] + inside_N),
        parent_N=torch.from_numpy(np.where(inside_N == 0, last_above_S[span_N], np.arange(len(span_N)) - 1)),
        end_N=torch.from_numpy((first_S + size_S)[span_N]),
        first_S=first_S,
        parent_S=parent_S,
        size_S=size_S,
        targets_K=_joined(targets, torch.long),
        engine_logprobs_K=_joined([span.node.logprobs for _, span in trained], torch.float32),
        entropy_weight_K=_joined([entropy_weights(span.node) for _, span in trained], torch.float32),
        node_K=torch.from_numpy(np.repeat(np.arange(len(trained)), count_M)),
        pair_node_X=torch.as_tensor(node, dtype=torch.long),
        pair_trajectory_X=torch.as_tensor(trajectory, dtype=torch.long),
        pair_weight_X=torch.as_tensor(weight, dtype=torch.float64),
        pair_advantage_X=torch.as_tensor(advantage, dtype=torch.float64),
        trajectory_tokens_I=torch.tensor(trajectory_tokens, dtype=torch.long),
        nodes=len(trained),
        total_tokens=total,
    )


def _joined(values: Sequence[npt.ArrayLike], dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([*map(np.asarray, values), np.empty(0)])).to(dtype)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The tokens of one forward pass, and the micro-batches that continue from them.

    The context of a micro-batch is the earlier tokens whose keys and values it attends to: its parent's context and the
    first `prefix_length` of its parent's own tokens. A micro-batch with children is a single chain of tokens, and
    its keys and values stay in memory while the children are computed.
    """

    tokens: Ints  # ascending indices into the batch
    prefix_length: int
    children: tuple[MicroBatch, ...]


def split_microbatches(batch: TreeBatch, budget: int) -> list[MicroBatch]:
    """The forest in micro-batches of at most `budget` tokens, unless a single chain of tokens is longer.

    Trees that fit stay whole, several in one micro-batch. In a tree that does not fit, every node with more than
    `budget` tokens in its subtree stays in memory while its subtrees are computed group by group: memory never holds
    more than one chain and one micro-batch.
    """
    stop_S = batch.first_S + batch.size_S
    count_S = np.diff(batch.first_S, append=batch.unique_tokens)
    children: dict[int, list[int]] = defaultdict(list)
    for s, parent in enumerate(batch.parent_S.tolist()):
        children[parent].append(s)

    def siblings(spans: Sequence[int], prefix_length: int) -> Iterator[MicroBatch]:
        """The micro-batches of sibling subtrees, small ones together."""
        group: list[Ints] = []
        for s in spans:
            if batch.size_S[s] > budget:
                yield chain(s, prefix_length)
                continue
            if group and sum(map(len, group)) + batch.size_S[s] > budget:
                yield MicroBatch(np.concatenate(group), prefix_length, ())
                group = []
            group.append(np.arange(batch.first_S[s], stop_S[s]))
        if group:
            yield MicroBatch(np.concatenate(group), prefix_length, ())

    def chain(s: int, prefix_length: int) -> MicroBatch:
        """A node whose subtree is too large, followed down as long as one child is too large or an only child."""
        own: list[Ints] = []
        subtrees: list[tuple[int, list[int]]] = []
        length = 0
        while True:
            own.append(np.arange(batch.first_S[s], batch.first_S[s] + count_S[s]))
            length += int(count_S[s])
            large = [child for child in children[s] if batch.size_S[child] > budget] or children[s]
            if len(large) != 1:
                subtrees.append((length, children[s]))
                break
            subtrees.append((length, [child for child in children[s] if child != large[0]]))
            s = large[0]
        below = tuple(micro for length, spans in subtrees for micro in siblings(spans, length))
        return MicroBatch(np.concatenate(own), prefix_length, below)

    return list(siblings(children[-1], 0))
