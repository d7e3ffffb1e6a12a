"""The plain batch: whole tensors written out by hand, and what cutting into micro-batches must keep."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from trees import model, nested_branches, prompt, tool, tree, two_branches

from arpo.advantage import attribute
from arpo.batch import micro_batches, plain_batch
from arpo.types import Credit, PathBatch

PAD = 0


def test_whole_batch_by_hand() -> None:
    rollout = two_branches()
    batch = plain_batch([rollout], [attribute(rollout, [2.0, -1.0, -1.0], "hard")], "token-mean", PAD)
    assert batch.tokens_BT.tolist() == [
        [1, 2, 3, 4, 9, 5, 6, 7],
        [1, 2, 3, 4, 9, 8, PAD, PAD],
        [1, 2, 3, 3, 3, 3, PAD, PAD],
    ]
    mask = [[0, 0, 1, 1, 0, 1, 1, 1], [0, 0, 1, 1, 0, 1, 0, 0], [0, 0, 1, 1, 1, 1, 0, 0]]
    assert batch.loss_mask_BT.int().tolist() == mask
    assert batch.attention_BT.sum(dim=1).tolist() == [8, 6, 6]
    assert batch.attention_BT[1].tolist() == [True] * 6 + [False] * 2
    assert batch.advantages_BT.tolist() == [
        [0, 0, 0.5, 0.5, 0, 2, 2, 2],
        [0, 0, 0.5, 0.5, 0, -1, 0, 0],
        [0, 0, -1, -1, -1, -1, 0, 0],
    ]
    torch.testing.assert_close(batch.weights_BT, torch.tensor(mask) / 12)
    logprobs = [
        [0, 0, -0.1, -0.2, 0, -0.3, -0.4, -0.5],
        [0, 0, -0.1, -0.2, 0, -0.6, 0, 0],
        [0, 0, -0.7, -0.8, -0.9, -1.0, 0, 0],
    ]
    torch.testing.assert_close(batch.engine_logprobs_BT, torch.tensor(logprobs))
    dtypes = [getattr(batch, field.name).dtype for field in fields(batch)]
    assert dtypes == [torch.long, torch.bool, torch.bool, torch.float32, torch.float32, torch.float32]


def test_sequence_mean_weighs_every_path_the_same() -> None:
    rollout = two_branches()
    batch = plain_batch([rollout], [attribute(rollout, [2.0, -1.0, -1.0], "soft")], "sequence-mean", PAD)
    mask = torch.tensor([[0, 0, 1, 1, 0, 1, 1, 1], [0, 0, 1, 1, 0, 1, 0, 0], [0, 0, 1, 1, 1, 1, 0, 0]])
    torch.testing.assert_close(batch.weights_BT, mask / torch.tensor([[3 * 5.0], [3 * 3.0], [3 * 4.0]]))


def test_paths_without_gradient_have_no_row_but_count_and_paths_left_out_do_not_count() -> None:
    first, second = two_branches(), two_branches()
    credits = [
        attribute(first, [2.0, 0.0, -1.0], "soft"),  # path B adds nothing
        attribute(second, [1.0, 1.0, 1.0], "soft", [False, True, True]),
    ]
    by_token = plain_batch([first, second], credits, "token-mean", PAD)
    assert by_token.attention_BT.sum(dim=1).tolist() == [8, 6, 6, 6]
    assert by_token.weights_BT.max().item() == pytest.approx(1 / (12 + 7))
    by_path = plain_batch([first, second], credits, "sequence-mean", PAD)
    torch.testing.assert_close(by_path.weights_BT.sum(dim=1), torch.full((4,), 1 / 5))


def test_a_path_without_model_tokens_counts_as_a_path() -> None:
    rollout = tree([prompt(), model(0, []), model(0, [3, 4])], [1, 2])
    batch = plain_batch([rollout], [attribute(rollout, [-1.0, 1.0], "soft")], "sequence-mean", PAD)
    assert batch.tokens_BT.tolist() == [[1, 2, 3, 4]]
    assert batch.weights_BT.tolist() == [[0, 0, 0.25, 0.25]]


def test_a_row_with_one_nonzero_advantage_stays() -> None:
    rollout = two_branches()
    batch = plain_batch([rollout], [attribute(rollout, [0.0, 1.0, 0.0], "hard")], "token-mean", PAD)
    assert batch.advantages_BT.tolist() == [[0, 0, 0.5, 0.5, 0, 0, 0, 0], [0, 0, 0.5, 0.5, 0, 1, 0, 0]]


def test_empty_batch() -> None:
    rollout = two_branches()
    batch = plain_batch([rollout], [attribute(rollout, [0.0] * 3, "soft")], "token-mean", PAD)
    assert batch.tokens_BT.shape == (0, 0)
    assert list(micro_batches(batch, 100)) == []
    assert plain_batch([], [], "sequence-mean", PAD).weights_BT.shape == (0, 0)


def test_mistakes_are_named() -> None:
    rollout = two_branches()
    credits = attribute(rollout, [1.0, 0.0, -1.0], "soft")
    with pytest.raises(ValueError, match="unknown aggregation"):
        plain_batch([rollout], [credits], "mean", PAD)
    with pytest.raises(ValueError, match="shorter"):
        plain_batch([rollout], [credits[:2]], "token-mean", PAD)
    bare = tree([prompt([]), model(0, [3])], [1])
    with pytest.raises(ValueError, match="the prompt is empty"):
        plain_batch([bare], [(Credit(1.0, {1: 1.0}),)], "token-mean", PAD)
    whole = plain_batch([rollout], [credits], "token-mean", PAD)
    with pytest.raises(ValueError, match="differ in shape"):
        PathBatch(*[getattr(whole, field.name) for field in fields(whole)][:5], torch.zeros(1, 1))


def _lengths_batch(lengths: list[int]) -> PathBatch:
    """Paths of these lengths (2 prompt tokens included), all kept; the first model token tells the row."""
    nodes = [prompt()]
    nodes += [model(0, [100 + row, *[5] * (length - 3)]) for row, length in enumerate(lengths)]
    rollout = tree(nodes, range(1, len(nodes)))
    return plain_batch([rollout], [attribute(rollout, [1.0] * len(lengths), "soft")], "token-mean", PAD)


def test_micro_batches_by_hand() -> None:
    pieces = list(micro_batches(_lengths_batch([4, 7, 4, 3, 5, 4]), max_tokens=10))
    rows = [[row - 100 for row in piece.tokens_BT[:, 2].tolist()] for piece in pieces]
    assert rows == [[1], [4, 0], [2, 5], [3]]
    assert [tuple(piece.weights_BT.shape) for piece in pieces] == [(1, 7), (2, 5), (2, 4), (1, 3)]


@given(st.lists(st.integers(3, 12), min_size=1, max_size=12), st.integers(1, 40))
def test_micro_batches_keep_every_row_and_the_limit(lengths: list[int], max_tokens: int) -> None:
    batch = _lengths_batch(lengths)
    pieces = list(micro_batches(batch, max_tokens))
    seen = [row for piece in pieces for row in (piece.tokens_BT[:, 2] - 100).tolist()]
    assert seen == sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    for piece in pieces:
        assert piece.tokens_BT.shape[0] == 1 or piece.tokens_BT.numel() <= max_tokens
        assert piece.attention_BT.any(dim=0).all()
        for field in fields(piece):
            value_BT = getattr(piece, field.name)
            for at, row in enumerate((piece.tokens_BT[:, 2] - 100).tolist()):
                length = lengths[row]
                assert torch.equal(value_BT[at, :length], getattr(batch, field.name)[row, :length])


@given(st.sampled_from(["token-mean", "sequence-mean"]), st.lists(st.booleans(), min_size=5, max_size=5))
def test_weights_of_all_kept_paths_add_up_to_one(aggregation: str, keep: list[bool]) -> None:
    rollout = nested_branches()
    batch = plain_batch([rollout], [attribute(rollout, [1.0] * 5, "soft", keep)], aggregation, PAD)
    assert batch.weights_BT.sum().item() == pytest.approx(1.0 if any(keep) else 0.0)
    assert batch.tokens_BT.shape[0] == sum(keep)


def test_tool_tokens_are_never_trained_on() -> None:
    rollout = tree([prompt(), model(0, [3]), tool(1, [7, 7]), model(2, [4])], [3])
    batch = plain_batch([rollout], [attribute(rollout, [1.0], "soft")], "token-mean", PAD)
    assert batch.tokens_BT[batch.loss_mask_BT].tolist() == [3, 4]
    assert batch.weights_BT.tolist() == [[0, 0, 0.5, 0, 0, 0.5]]
