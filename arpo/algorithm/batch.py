"""Trees and credits as one forest in which every unique token stands once. Pure functions.

    tree_batch(trees, credits, ...)    all tokens in depth-first order, and what each trained one is worth
    cut(batch, budget)                 the same in parts that fit a budget of tokens per forward pass

Promises: the loss is a plain sum over targets, however the batch is cut. A target is a token that the model sampled on
a path that teaches; it is predicted at its parent, the token before it on its path, so a branch point predicts several.
Leaves that are not kept are left out altogether. Kept leaves that teach nothing (no model tokens, or advantages all
exactly 0 while neither KL nor entropy counts) are not in the forest but count in the weights.
Does not cover: splitting trees into mini-batches, devices, the loss itself.

Letters: N tokens, S spans (nodes with tokens), K targets, I paths, M model nodes, X pairs of a model node and a path.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from arpo.config.schema import Loss
from arpo.types import Credit, Kind, Node, RolloutTree, TreeBatch

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
_SMALLEST_STD = 1e-8


@dataclass(slots=True)
class _Path:
    """A kept path that teaches: its nodes, what each gives, and what each of its model tokens weighs."""

    nodes: tuple[int, ...]
    credit: Credit
    weight: float
    model_tokens: int


@dataclass(slots=True)
class _Span:
    """A node's place in the forest."""

    node: Node
    parent: int  # span, -1 for a root
    pairs: list[tuple[int, float, float]]  # of a model node: path, weight, advantage


def tree_batch(
    trees: Sequence[RolloutTree],
    credits: Sequence[Sequence[Credit]],
    loss: Loss,
    max_tokens: int,
    shared: bool = True,
    entropy: float = 0.0,
) -> TreeBatch:
    """The forest of all paths that teach; `credits` holds, per tree, one credit per leaf.

    `max_tokens` is what "constant" aggregation divides by. Without `shared`, every path is a tree of its own: packed
    rows. A target counts max(0, 1 + `entropy` z) times, z being how many standard deviations its entropy when it was
    sampled lies above the mean over all sampled tokens of kept leaves, a shared one counted once.
    """
    kept = [
        (number, tree.path(leaf.node), credit)
        for number, (tree, tree_credits) in enumerate(zip(trees, credits, strict=True))
        for leaf, credit in zip(tree.leaves, tree_credits, strict=True)
        if credit.kept
    ]
    counts = [sum(len(node.tokens) for node in _sampled(trees[number], path)) for number, path, _ in kept]
    always = loss.kl_coef > 0 or loss.entropy_coef > 0
    paths: list[list[_Path]] = [[] for _ in trees]
    for (number, path, credit), count in zip(kept, counts, strict=True):
        if count and (always or any(credit.by_node.values())):
            weight = {
                "token-mean": 1 / sum(counts),
                "sequence-mean": 1 / (len(kept) * count),
                "constant": 1 / (len(kept) * max_tokens),
            }[loss.aggregation]
            paths[number].append(_Path(path, credit, weight, count))
    spans: list[_Span] = []
    path_tokens: list[int] = []
    total = 0
    for tree, own in zip(trees, paths, strict=True):
        for together in [own] if shared else [[path] for path in own]:
            if together:
                total += _add_tree(spans, tree, together, len(path_tokens))
                path_tokens.extend(path.model_tokens for path in together)
    return _flatten(spans, path_tokens, total, _boost(trees, [(number, path) for number, path, _ in kept], entropy))


def _boost(
    trees: Sequence[RolloutTree], paths: Sequence[tuple[int, tuple[int, ...]]], weight: float
) -> Callable[[Node], Floats]:
    """How many times each token of a model node counts."""
    if not weight:
        return lambda node: np.ones(len(node.tokens))
    nodes = [trees[number].nodes[i] for number, i in sorted({(number, i) for number, path in paths for i in path})]
    every = np.concatenate([*(np.asarray(node.entropies) for node in nodes), np.empty(0)])
    mean, std = (every.mean(), max(every.std(), _SMALLEST_STD)) if len(every) else (0.0, 1.0)
    return lambda node: np.maximum(0.0, 1 + weight * (np.asarray(node.entropies) - mean) / std)


def _sampled(tree: RolloutTree, path: Sequence[int]) -> list[Node]:
    return [tree.nodes[i] for i in path if tree.nodes[i].kind is Kind.MODEL]


def _add_tree(spans: list[_Span], tree: RolloutTree, paths: Sequence[_Path], first_path: int) -> int:
    """Append the nodes that these paths need, depth first, the longest way down first; returns the paths' tokens."""
    total = 0
    pairs: dict[int, list[tuple[int, float, float]]] = defaultdict(list)
    needed: set[int] = set()
    for number, path in enumerate(paths, first_path):
        taught = [i for i in path.nodes if tree.nodes[i].kind is Kind.MODEL and tree.nodes[i].tokens]
        used = path.nodes[: path.nodes.index(taught[-1]) + 1]
        needed.update(used)
        total += sum(len(tree.nodes[i].tokens) for i in used)
        for i in taught:
            pairs[i].append((number, path.weight, path.credit.by_node[i]))
    below = dict.fromkeys(needed, 0)  # tokens on the longest way down, without its own
    children: dict[int, list[int]] = defaultdict(list)
    for i in sorted(needed, reverse=True):
        parent = tree.nodes[i].parent
        if parent is not None:
            below[parent] = max(below[parent], below[i] + len(tree.nodes[i].tokens))
            children[parent].append(i)
    stack = [(0, -1)]
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
    spans: Sequence[_Span], path_tokens: Sequence[int], total: int, boost: Callable[[Node], Floats]
) -> TreeBatch:
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
    above_S = np.where(parent_S >= 0, first_S[parent_S] + count_S[parent_S] - 1, -1) if len(spans) else first_S
    trained = [(s, span) for s, span in enumerate(spans) if span.pairs]
    count_M = count_S[[s for s, _ in trained]]
    targets = [np.arange(first_S[s], first_S[s] + count_S[s]) for s, _ in trained]
    pairs = [(m, *pair) for m, (_, span) in enumerate(trained) for pair in span.pairs]
    node, path, weight, advantage = (np.array(column) for column in zip(*pairs, strict=True)) if pairs else [[]] * 4
    return TreeBatch(
        tokens_N=_joined([span.node.tokens for span in spans], torch.long),
        depth_N=torch.from_numpy(depth_S[span_N] + inside_N),
        parent_N=torch.from_numpy(np.where(inside_N == 0, above_S[span_N], np.arange(len(span_N)) - 1)),
        end_N=torch.from_numpy((first_S + size_S)[span_N]),
        first_S=first_S,
        parent_S=parent_S,
        size_S=size_S,
        targets_K=_joined(targets, torch.long),
        engine_logprobs_K=_joined([span.node.logprobs for _, span in trained], torch.float32),
        entropy_weight_K=_joined([boost(span.node) for _, span in trained], torch.float32),
        node_K=torch.from_numpy(np.repeat(np.arange(len(trained)), count_M)),
        pair_node_X=torch.as_tensor(node, dtype=torch.long),
        pair_path_X=torch.as_tensor(path, dtype=torch.long),
        pair_weight_X=torch.as_tensor(weight, dtype=torch.float64),
        pair_advantage_X=torch.as_tensor(advantage, dtype=torch.float64),
        path_tokens_I=torch.tensor(path_tokens, dtype=torch.long),
        nodes=len(trained),
        total_tokens=total,
    )


def _joined(values: Sequence[npt.ArrayLike], dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([*map(np.asarray, values), np.empty(0)])).to(dtype)


@dataclass(frozen=True, slots=True)
class Part:
    """What one forward pass computes: some of the tokens, after the `context` tokens of its parent's path.

    A part with children is one path. Its children hang somewhere along it: each sees what the part sees, and the first
    `above` of the part's own tokens.
    """

    tokens: Ints  # ascending
    above: int
    children: tuple[Part, ...]


def cut(batch: TreeBatch, budget: int) -> list[Part]:
    """The forest in parts of at most `budget` tokens, as long as no path alone is longer.

    Trees are kept whole where they fit, several in one part. In a tree that does not fit, every node above more than
    `budget` tokens (its own included) stays in memory while what hangs below it is computed, group by group: there is
    never more in memory than a path and one part.
    """
    stop_S = batch.first_S + batch.size_S
    count_S = np.diff(batch.first_S, append=batch.unique_tokens)
    children: dict[int, list[int]] = defaultdict(list)
    for s, parent in enumerate(batch.parent_S.tolist()):
        children[parent].append(s)

    def below(spans: Sequence[int], above: int) -> Iterator[Part]:
        """The parts of sibling subtrees, small ones together."""
        group: list[Ints] = []
        for s in spans:
            if batch.size_S[s] > budget:
                yield trunk(s, above)
                continue
            if group and sum(map(len, group)) + batch.size_S[s] > budget:
                yield Part(np.concatenate(group), above, ())
                group = []
            group.append(np.arange(batch.first_S[s], stop_S[s]))
        if group:
            yield Part(np.concatenate(group), above, ())

    def trunk(s: int, above: int) -> Part:
        """A node that is too large with what is below it, followed down while one child alone is, or there is one."""
        own: list[Ints] = []
        hanging: list[tuple[int, list[int]]] = []
        length = 0
        while True:
            own.append(np.arange(batch.first_S[s], batch.first_S[s] + count_S[s]))
            length += int(count_S[s])
            large = [child for child in children[s] if batch.size_S[child] > budget] or children[s]
            if len(large) != 1:
                hanging.append((length, children[s]))
                break
            hanging.append((length, [child for child in children[s] if child != large[0]]))
            s = large[0]
        parts = tuple(part for length, spans in hanging for part in below(spans, length))
        return Part(np.concatenate(own), above, parts)

    return list(below(children[-1], 0))
