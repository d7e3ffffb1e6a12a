"""Trees as rows: one row per trajectory, as trainers of flat trajectories take them. Pure functions.

    row = tree_row(scored, leaf=0)
    row.tokens        # what follows the prompt: turns and tool results
    row.mask          # 1 where the model sampled the token, 0 in tool results
    row.advantages    # one number per token: 0 in tool results

Guarantees: prompt and row tokens are those of the trajectory, up to its last sampled token. A masked leaf has a mask of
zeros. The advantage of a token is that of its turn, multiplied by its entropy weight if there is one.
Not covered: the mean over rows or tokens, which the trainer's loss takes; `weight` is for that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from arpo.errors import ArpoError
from arpo.types import Kind, Node, RolloutTree, ScoredTree

TokenWeights = Callable[[Node], Any]
"""From a model node to the weights of its tokens."""


@dataclass(frozen=True, slots=True)
class Row:
    """One trajectory after its prompt: `nodes` are the indices of its nodes there, the lists have one entry a token.

    `weight` is how much the trajectory counts in the loss relative to others, 0 if it is masked. `advantages` are zeros
    if the tree has no credits.
    """

    nodes: tuple[int, ...]
    tokens: tuple[int, ...]
    mask: tuple[int, ...]
    logprobs: tuple[float, ...]
    advantages: tuple[float, ...]
    weight: float


def _one(node: Node) -> Any:
    return np.ones(len(node.tokens))


def require_one_context(tree: RolloutTree) -> None:
    """Refuse a tree in which a program began conversations of their own: a trajectory there is not one row."""
    if any(node.context is not None for node in tree.nodes):
        raise ArpoError(
            "a program began conversations of their own in this tree (docs/programs.md), so a trajectory is not one "
            "row of tokens; such trees can only be trained by arpo.Trainer"
        )


def row_nodes(tree: RolloutTree, leaf: int) -> tuple[int, ...]:
    """The indices of a trajectory's nodes after the prompt, up to the last turn: what follows it is not trained."""
    indices = tree.prefix(tree.leaves[leaf].node)[1:]
    turns = [place for place, index in enumerate(indices) if tree.nodes[index].kind is Kind.MODEL]
    return indices[: turns[-1] + 1] if turns else ()


def tree_row(scored: ScoredTree, leaf: int, token_weights: TokenWeights = _one) -> Row:
    """The row of a leaf; `token_weights` are factors of the advantages (`arpo.algorithm.batch.entropy_weights`)."""
    tree, used = scored.tree, scored.mask[leaf]
    credit = scored.credits[leaf] if scored.credits else None
    indices = row_nodes(tree, leaf)
    tokens: list[int] = []
    mask: list[int] = []
    logprobs: list[float] = []
    advantages: list[float] = []
    for index in indices:
        node = tree.nodes[index]
        count, sampled = len(node.tokens), node.kind is Kind.MODEL
        tokens += node.tokens
        mask += [int(sampled and used)] * count
        logprobs += node.logprobs if sampled else [0.0] * count
        own = credit.by_node.get(index, 0.0) if credit is not None and sampled and used else 0.0
        advantages += (own * token_weights(node)).tolist() if own else [0.0] * count
    weight = 0.0 if not used else 1.0 if credit is None else credit.weight
    return Row(indices, tuple(tokens), tuple(mask), tuple(logprobs), tuple(advantages), weight)
