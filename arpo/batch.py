"""Trees and credits as one padded row of tensors per trajectory. Pure functions.

This is the plain form: shared prefixes are written out once per path. It is the reference that any faster way of
training on a tree must agree with.

Promises: the loss is a plain sum over `loss_mask_BT` of weight times term, however the rows are cut into micro-batches;
position t speaks of token t, which is predicted from the tokens before it. Leaves that are not kept are left out
altogether. Kept leaves that add no gradient (no model tokens, or advantages all exactly 0) have no row but count in the
weights.
Does not cover: splitting trees into mini-batches, devices, sharing of prefixes.

Shapes: B rows (trajectories), T positions (longest row).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from arpo.types import Credit, Kind, PathBatch, RolloutTree


@dataclass(frozen=True, slots=True)
class _Row:
    tokens: list[int]
    mask: list[bool]
    advantages: list[float]
    logprobs: list[float]

    @property
    def num_model_tokens(self) -> int:
        return sum(self.mask)


def plain_batch(
    trees: Sequence[RolloutTree], credits: Sequence[Sequence[Credit]], aggregation: str, pad_id: int
) -> PathBatch:
    """One row per trajectory that has something to teach; `credits` holds, per tree, one credit per leaf.

    `aggregation` is "token-mean" (every model token of every kept path weighs the same) or "sequence-mean" (every kept
    path weighs the same, and so do the model tokens within it).
    """
    if aggregation not in ("token-mean", "sequence-mean"):
        raise ValueError(f"unknown aggregation {aggregation!r}; use token-mean or sequence-mean")
    kept = [
        _row(tree, leaf.node, credit)
        for tree, tree_credits in zip(trees, credits, strict=True)
        for leaf, credit in zip(tree.leaves, tree_credits, strict=True)
        if credit.kept
    ]
    num_tokens = sum(row.num_model_tokens for row in kept)
    rows = [row for row in kept if any(row.advantages)]
    longest = max((len(row.tokens) for row in rows), default=0)
    weights = [
        1 / num_tokens if aggregation == "token-mean" else 1 / (len(kept) * row.num_model_tokens) for row in rows
    ]

    def padded(values: Sequence[Sequence[float]], pad: float, dtype: torch.dtype) -> Tensor:
        full = [[*row, *[pad] * (longest - len(row))] for row in values]
        return torch.tensor(full, dtype=dtype).reshape(len(rows), longest)

    return PathBatch(
        tokens_BT=padded([row.tokens for row in rows], pad_id, torch.long),
        attention_BT=padded([[True] * len(row.tokens) for row in rows], False, torch.bool),
        loss_mask_BT=padded([row.mask for row in rows], False, torch.bool),
        advantages_BT=padded([row.advantages for row in rows], 0.0, torch.float32),
        weights_BT=padded(
            [[weight * own for own in row.mask] for row, weight in zip(rows, weights, strict=True)], 0.0, torch.float32
        ),
        engine_logprobs_BT=padded([row.logprobs for row in rows], 0.0, torch.float32),
    )


def micro_batches(batch: PathBatch, max_tokens: int) -> Iterator[PathBatch]:
    """The rows in pieces of at most `max_tokens` padded tokens (but at least one row), longest rows first."""
    lengths = batch.attention_BT.sum(dim=1).tolist()
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    start = 0
    while start < len(order):
        longest = lengths[order[start]]
        stop = start + max(1, max_tokens // longest)
        rows = torch.tensor(order[start:stop], device=batch.tokens_BT.device)
        yield PathBatch(*(getattr(batch, field.name)[rows, :longest] for field in fields(batch)))
        start = stop


def _row(tree: RolloutTree, leaf_node: int, credit: Credit) -> _Row:
    row = _Row([], [], [], [])
    for index in tree.path(leaf_node):
        node = tree.nodes[index]
        own, num = node.kind is Kind.MODEL, len(node.tokens)
        row.tokens.extend(node.tokens)
        row.mask.extend([own] * num)
        row.advantages.extend([credit.by_node[index] if own else 0.0] * num)
        row.logprobs.extend(node.logprobs if own else [0.0] * num)
    if row.mask and row.mask[0]:
        raise ValueError("a trajectory starts with a model token, which nothing predicts: the prompt is empty")
    return row
