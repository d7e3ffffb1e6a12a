"""Weights and parts of a forest, by hand and by brute force. Its structure is in test_tree_training.py too."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from forests import random_forest
from hypothesis import given, settings
from hypothesis import strategies as st
from trees import model, nested_branches, prompt, tree, two_branches, with_credits

from arpo.algorithm.advantage import attribute
from arpo.algorithm.batch import MicroBatch, build_batch, split_microbatches
from arpo.config.algorithm import Loss
from arpo.types import Credit, ScoredTree, TreeBatch


def test_two_branches_by_hand() -> None:
    rollout = two_branches()
    batch = build_batch([with_credits(rollout, [2.0, -1.0, -1.0], "hard")], Loss(aggregation="token-mean"), 1)
    assert batch.tokens_N.tolist() == [1, 2, 3, 4, 9, 5, 6, 7, 8, 3, 3, 3, 3]
    assert batch.depth_N.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 5, 2, 3, 4, 5]
    assert batch.parent_N.tolist() == [-1, 0, 1, 2, 3, 4, 5, 6, 4, 1, 9, 10, 11]
    assert batch.end_N.tolist() == [13, 13, 9, 9, 9, 8, 8, 8, 9, 13, 13, 13, 13]
    assert batch.targets_K.tolist() == [2, 3, 5, 6, 7, 8, 9, 10, 11, 12]
    logprobs = [-0.1, -0.2, -0.3, -0.4, -0.5, -0.6, -0.7, -0.8, -0.9, -1.0]
    torch.testing.assert_close(batch.engine_logprobs_K, torch.tensor(logprobs))
    assert batch.node_K.tolist() == [0, 0, 1, 1, 1, 2, 3, 3, 3, 3]
    pairs = list(zip(batch.pair_node_X.tolist(), batch.pair_trajectory_X.tolist(), strict=True))
    assert pairs == [(0, 0), (0, 1), (1, 0), (2, 1), (3, 2)]
    assert batch.pair_advantage_X.tolist() == [0.5, 0.5, 2.0, -1.0, -1.0]
    assert batch.pair_weight_X.tolist() == pytest.approx([1 / 12] * 5)
    assert batch.trajectory_tokens_I.tolist() == [5, 3, 4]
    assert (batch.unique_tokens, batch.total_tokens, batch.nodes) == (13, 8 + 6 + 6, 4)


@pytest.mark.parametrize(
    ("aggregation", "weights"), [("sequence-mean", [1 / 15, 1 / 9, 1 / 12]), ("constant", [1 / 60, 1 / 60, 1 / 60])]
)
def test_what_the_tokens_of_each_trajectory_weigh(aggregation: str, weights: list[float]) -> None:
    rollout = two_branches()
    options = Loss(aggregation=aggregation)  # type: ignore[arg-type]
    batch = build_batch([with_credits(rollout, [2.0, -1.0, -1.0])], options, 20)
    assert batch.pair_weight_X.tolist() == pytest.approx([weights[path] for path in batch.pair_trajectory_X.tolist()])


def test_trajectories_without_gradient_are_left_out_but_count_and_masked_ones_do_not_count() -> None:
    first, second = two_branches(), two_branches()
    mask = (False, True, True)
    trees = [
        with_credits(first, [2.0, 0.0, -1.0]),  # trajectory B adds nothing
        ScoredTree(second, credits=attribute(second, [1.0, 1.0, 1.0], "soft", mask), mask=mask),
    ]
    by_token = build_batch(trees, Loss(aggregation="token-mean"), 1)
    assert by_token.unique_tokens == 12 + 10
    assert by_token.trajectory_tokens_I.tolist() == [5, 4, 3, 4]
    assert set(by_token.pair_weight_X.tolist()) == {1 / (12 + 7)}
    by_path = build_batch(trees, Loss(aggregation="sequence-mean"), 1)
    assert by_path.pair_weight_X.tolist() == pytest.approx(
        [1 / 5 / int(by_path.trajectory_tokens_I[path]) for path in by_path.pair_trajectory_X]
    )
    with_kl = build_batch(trees, Loss(kl_coef=0.1), 1)
    assert with_kl.trajectory_tokens_I.tolist() == [5, 3, 4, 3, 4]


def test_a_trajectory_without_model_tokens_counts_as_a_trajectory() -> None:
    rollout = tree([prompt(), model(0, []), model(0, [3, 4])], [1, 2])
    batch = build_batch([with_credits(rollout, [-1.0, 1.0])], Loss(aggregation="sequence-mean"), 1)
    assert batch.tokens_N.tolist() == [1, 2, 3, 4]
    assert batch.pair_weight_X.tolist() == [0.25]


def test_empty_batch() -> None:
    rollout = two_branches()
    for trees in ([rollout], []):
        batch = build_batch([with_credits(tree, [0.0] * 3) for tree in trees], Loss(), 1)
        assert (batch.unique_tokens, batch.total_tokens, len(batch.targets_K)) == (0, 0, 0)
        assert split_microbatches(batch, 100) == []


def test_mistakes_are_named() -> None:
    rollout = two_branches()
    with pytest.raises(ValueError, match="shorter"):
        build_batch([ScoredTree(rollout)], Loss(), 1)  # no credits
    with pytest.raises(ValueError, match="3 leaves, 2 credits"):
        ScoredTree(rollout, credits=attribute(rollout, [1.0, 0.0, -1.0], "soft")[:2])
    bare = tree([prompt([]), model(0, [3])], [1])
    with pytest.raises(ValueError, match="the prompt is empty"):
        build_batch([ScoredTree(bare, credits=(Credit(1.0, {1: 1.0}),))], Loss(), 1)


# --- parts ---


def nested() -> TreeBatch:
    """Nodes of 3, 2, 2, 1, 1, then 3, 2, 1 below the last; 2 more below the third, 1 more below the first."""
    rollout = nested_branches()
    return build_batch([with_credits(rollout, [1.3, 0.2, -0.4, -1.7, 0.6])], Loss(), 1)


def shape(part: MicroBatch) -> tuple[int, int, list]:  # type: ignore[type-arg]
    """Its tokens, where it hangs, and the same of what hangs below it."""
    return len(part.tokens), part.prefix_length, [shape(child) for child in part.children]


def test_cutting_by_hand() -> None:
    batch = nested()
    assert batch.unique_tokens == 18
    assert [shape(part) for part in split_microbatches(batch, 18)] == [(18, 0, [])]
    # 3 and 2+2 are above more than 8 tokens: one trunk of 7, below which the rest hangs in two places.
    assert [shape(part) for part in split_microbatches(batch, 8)] == [(7, 0, [(1, 3, []), (8, 7, []), (2, 7, [])])]
    assert [shape(part) for part in split_microbatches(batch, 9)] == [(7, 0, [(1, 3, []), (8, 7, []), (2, 7, [])])]
    assert [shape(part) for part in split_microbatches(batch, 10)] == [(7, 0, [(1, 3, []), (10, 7, [])])]
    assert [shape(part) for part in split_microbatches(batch, 5)] == [
        (9, 0, [(1, 3, []), (2, 7, []), (5, 9, []), (1, 9, [])]),
    ]


def parts_below(part: MicroBatch) -> list[MicroBatch]:
    return [part, *(below for child in part.children for below in parts_below(child))]


@pytest.mark.slow
@settings(deadline=None, max_examples=200)
@given(st.randoms(use_true_random=False), st.integers(1, 40), st.booleans())
def test_parts_hold_every_token_once_and_fit(rng: random.Random, budget: int, shared: bool) -> None:
    forest = random_forest(rng, "soft")
    batch = build_batch(forest.trees, Loss(entropy_coef=0.1), 1, shared)
    parent_N = batch.parent_N.numpy()

    def check(part: MicroBatch, path: list[int]) -> int:
        """The context is the prefix of every first token; returns the most tokens held at a time."""
        inside = set(part.tokens.tolist())
        assert all(np.diff(part.tokens) > 0)
        for token in inside:
            if parent_N[token] not in inside:
                assert parent_N[token] == (path[-1] if path else -1)
        most = len(inside)
        one_path = (parent_N[part.tokens[1:]] == part.tokens[:-1]).all()
        assert one_path or (len(inside) <= budget and not part.children)
        for child in part.children:
            below = [*path, *part.tokens[: child.prefix_length].tolist()]
            most = max(most, len(inside) + check(child, below))
        return most

    parts = split_microbatches(batch, budget)
    every = [token for top in parts for part in parts_below(top) for token in part.tokens.tolist()]
    assert sorted(every) == list(range(batch.unique_tokens))
    longest = int(batch.depth_N.max()) + 1 if batch.unique_tokens else 0
    for part in parts:
        assert check(part, []) <= longest + budget
