"""The loss on hand-made trees: terms worked out by hand, one at a time. Whole models are in test_tree_training.py."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from trees import model, prompt, tool, tree, two_branches, with_credits

from arpo.algorithm.batch import build_batch
from arpo.algorithm.loss import policy_loss
from arpo.config.algorithm import Loss
from arpo.types import RolloutTree, TreeBatch

OLD = -1.0  # the old log-prob of every token here
ENGINE = -1.5


def loss_of(
    batch: TreeBatch,
    moves: Sequence[float],
    options: Loss,
    entropies: Sequence[float] | None = None,
    reference: Sequence[float] | None = None,
    rows: Sequence[int] | None = None,
) -> tuple[float, list[float], dict[str, float]]:
    """Loss, its slope in each log-prob, and metrics, where the log-probs are the old ones plus `moves`."""
    new_K = (OLD + torch.tensor(moves, dtype=torch.float64)).requires_grad_()
    entropies_K = torch.zeros_like(new_K) if entropies is None else torch.tensor(entropies, dtype=torch.float64)
    reference_K = None if reference is None else torch.tensor(reference, dtype=torch.float64)
    rows_K = torch.arange(len(new_K)) if rows is None else torch.tensor(rows)
    old_K = torch.full_like(new_K, OLD)
    loss, metrics = policy_loss(new_K, entropies_K, old_K, reference_K, batch, rows_K, options)
    (slope_K,) = torch.autograd.grad(loss, new_K)
    return loss.item(), slope_K.tolist(), {name: value.item() for name, value in metrics.items()}


def single(advantage: float, options: Loss) -> TreeBatch:
    """A trajectory of a prompt and one model token; a second one, without model tokens, makes its weight a half."""
    rollout = tree([prompt(), model(0, [3], logprobs=[ENGINE]), model(0, [])], [1, 2])
    by_trajectory = options.model_copy(update={"aggregation": "sequence-mean"})
    return build_batch([with_credits(rollout, [advantage, 0.0])], by_trajectory, 1)


@pytest.mark.parametrize(
    ("ratio", "advantage", "term", "slope"),
    [
        (1.0, 2.0, 2.0, 2.0),
        (1.1, 2.0, 2.2, 2.2),
        (1.5, 2.0, 2.6, 0.0),  # 1 + 0.3 bites
        (0.5, 2.0, 1.0, 1.0),  # a good token that became rarer is pulled back
        (0.5, -2.0, -1.8, 0.0),  # 1 - 0.1 bites
        (1.5, -2.0, -3.0, -3.0),  # a bad token that became likelier is pushed back
        (3.5, -2.0, -6.0, 0.0),  # the dual clip bites
        (3.5, 2.0, 2.6, 0.0),
    ],
)
@pytest.mark.parametrize("kind", ["ppo", "gspo"])
def test_one_token_by_hand(kind: Any, ratio: float, advantage: float, term: float, slope: float) -> None:
    options = Loss(kind=kind, clip_low=0.1, clip_high=0.3, dual_clip=3.0)
    loss, slopes, metrics = loss_of(single(advantage, options), [math.log(ratio)], options)
    assert loss == metrics["loss"] == pytest.approx(-0.5 * term, rel=1e-5)
    assert slopes == pytest.approx([-0.5 * slope], rel=1e-5)
    assert metrics["clip_fraction"] == float(slope == 0)
    assert metrics["tokens"] == 1
    assert metrics["ratio"] == pytest.approx(ratio, rel=1e-5)
    assert metrics["kl_k1"] == pytest.approx(-math.log(ratio), abs=1e-5)
    assert metrics["kl_k3"] == pytest.approx(ratio - 1 - math.log(ratio), abs=1e-5)
    assert metrics["engine_mismatch"] == pytest.approx(0.5)


@pytest.mark.parametrize(("ratio", "factor"), [(1.0, 1.0), (1.2, 1.2), (1.5, 1.3), (0.5, 0.9)])
@pytest.mark.parametrize("advantage", [2.0, -2.0])
def test_cispo_always_has_a_gradient(ratio: float, factor: float, advantage: float) -> None:
    options = Loss(kind="cispo", clip_low=0.1, clip_high=0.3)
    loss, slopes, metrics = loss_of(single(advantage, options), [math.log(ratio)], options)
    assert loss == pytest.approx(-0.5 * factor * advantage * (OLD + math.log(ratio)), rel=1e-5)
    assert slopes == pytest.approx([-0.5 * factor * advantage], rel=1e-5)
    assert metrics["clip_fraction"] == float(ratio != factor)


def test_without_dual_clip_a_bad_token_is_pushed_back_in_full() -> None:
    options = Loss(dual_clip=None)
    loss, slopes, metrics = loss_of(single(-2.0, options), [math.log(3.5)], options)
    assert (loss, slopes, metrics["clip_fraction"]) == (pytest.approx(3.5), [pytest.approx(3.5)], 0)


@pytest.mark.parametrize("kind", ["ppo", "gspo", "cispo"])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("move", [-500.0, 500.0])
def test_extreme_ratios_give_finite_numbers(kind: Any, advantage: float, move: float) -> None:
    for dual_clip in (3.0, None):
        options = Loss(kind=kind, dual_clip=dual_clip, importance_cap=2.0, kl_coef=0.1)
        loss, slopes, metrics = loss_of(single(advantage, options), [move], options, reference=[0.0])
        assert all(map(math.isfinite, (loss, *slopes, *metrics.values())))


def test_importance_weighs_the_policy_term_alone() -> None:
    """The engine's probability was exp(-1.5), the trainer's exp(-1): a factor of e^0.5, or the cap."""
    for cap, factor in ((1.2, 1.2), (9.0, math.exp(0.5))):
        options = Loss(importance_cap=cap, entropy_coef=0.1, kl_coef=0.2)
        loss, slopes, _ = loss_of(single(2.0, options), [0.0], options, [1.7], [-0.7])
        far = math.exp(0.3) - 0.3 - 1
        # With an entropy bonus or KL both trajectories are trained, but the second has no model token.
        assert loss == pytest.approx(-0.5 * (factor * 2.0 + 0.1 * 1.7 - 0.2 * far), rel=1e-5)
        assert slopes == pytest.approx([-0.5 * (factor * 2.0 - 0.2 * (1 - math.exp(0.3)))], rel=1e-5)


def shared() -> RolloutTree:
    """A model token that a good trajectory (one token more) and a bad one (three tokens more) share."""
    nodes = [prompt(), model(0, [3]), tool(1, []), model(2, [4]), model(2, [5, 6, 7])]
    return tree(nodes, [3, 4])


def by_token(batch: TreeBatch, values: dict[int, float]) -> list[float]:
    """One value per target, by token id."""
    return [values[int(token)] for token in batch.tokens_N[batch.targets_K]]


def test_a_shared_token_is_clipped_for_each_trajectory_by_itself() -> None:
    """The bad trajectory has twice the advantage. One minimum with the sum of both would clip at 0.8, or not at all."""
    options = Loss(clip_low=0.2, clip_high=0.2, dual_clip=None, aggregation="token-mean")
    batch = build_batch([with_credits(shared(), [1.0, -2.0])], options, 1)
    for ratio, term, slope in ((1.5, 1.2 - 3.0, -3.0), (0.5, 0.5 - 1.6, 0.5), (1.1, -1.1, -1.1)):
        moves = by_token(batch, {3: math.log(ratio), 4: 0.0, 5: 0.0, 6: 0.0, 7: 0.0})
        loss, slopes, metrics = loss_of(batch, moves, options)
        assert loss == pytest.approx(-(term + 1.0 - 3 * 2.0) / 6, rel=1e-5)
        assert slopes[moves.index(math.log(ratio))] == pytest.approx(-slope / 6, rel=1e-5)
        assert metrics["clip_fraction"] == float(ratio != 1.1)


def test_gspo_has_one_ratio_for_each_trajectory() -> None:
    """Trajectory one: tokens 3, 4. Trajectory two: 3, 5, 6, 7. The shared token pulls both ratios along."""
    options = Loss(kind="gspo", clip_low=0.2, clip_high=0.2, dual_clip=None, aggregation="sequence-mean")
    batch = build_batch([with_credits(shared(), [1.0, -2.0])], options, 1)
    moves = by_token(batch, {3: 0.1, 4: 0.05, 5: -0.2, 6: 0.3, 7: 0.4})
    good, bad = math.exp(0.15 / 2), math.exp(0.6 / 4)
    loss, slopes, metrics = loss_of(batch, moves, options)
    assert loss == pytest.approx(-(good - 2 * bad) / 2, rel=1e-5)
    assert metrics["clip_fraction"] == 0
    expected = by_token(
        batch,
        {3: -good / 4 + 2 * bad / 8, 4: -good / 4, 5: bad / 4, 6: bad / 4, 7: bad / 4},
    )
    assert slopes == pytest.approx(expected, rel=1e-5)
    moves = by_token(batch, {3: 0.4, 4: 0.05, 5: -0.2, 6: 0.0, 7: 0.0})  # the good trajectory's ratio is clipped, alone
    loss, slopes, metrics = loss_of(batch, moves, options)
    bad = math.exp(0.2 / 4)
    assert loss == pytest.approx(-(1.2 - 2 * bad) / 2, rel=1e-5)
    assert metrics["clip_fraction"] == 2  # its tokens
    assert slopes == pytest.approx([bad / 4 if slope else 0 for slope in slopes], rel=1e-5)


def test_a_turn_has_one_ratio() -> None:
    """Turns: token 3, shared; token 4; tokens 5, 6, 7. A ratio belongs to the turn, not to the trajectories."""
    options = Loss(kind="turn", clip_low=0.2, clip_high=0.2, dual_clip=None, aggregation="token-mean")
    batch = build_batch([with_credits(shared(), [1.0, -2.0])], options, 1)
    moves = by_token(batch, {3: 0.1, 4: 0.05, 5: -0.2, 6: 0.3, 7: 0.2})
    first, last, other = math.exp(0.1), math.exp(0.05), math.exp(0.1)
    loss, slopes, metrics = loss_of(batch, moves, options)
    assert loss == pytest.approx(-(first - 2 * first + last - 3 * 2 * other) / 6, rel=1e-5)
    assert metrics["clip_fraction"] == 0
    expected = {3: first / 6, 4: -last / 6, 5: 2 * other / 6, 6: 2 * other / 6, 7: 2 * other / 6}
    assert slopes == pytest.approx(by_token(batch, expected), rel=1e-5)
    moves = by_token(batch, {3: 0.4, 4: 0.05, 5: -1.2, 6: 0.3, 7: 0.0})  # 3 is clipped above, 5 to 7 below
    loss, slopes, metrics = loss_of(batch, moves, options)
    assert loss == pytest.approx(-(1.2 - 2 * math.exp(0.4) + last - 3 * 2 * 0.8) / 6, rel=1e-5)
    assert metrics["clip_fraction"] == 4
    expected = {3: 2 * math.exp(0.4) / 6, 4: -last / 6, 5: 0.0, 6: 0.0, 7: 0.0}
    assert slopes == pytest.approx(by_token(batch, expected), rel=1e-5)


@pytest.mark.parametrize("kind", ["ppo", "cispo"])
def test_disjoint_targets_add_up(kind: Any) -> None:
    options = Loss(kind=kind, kl_coef=0.1, entropy_coef=0.2, importance_cap=1.1, dual_clip=1.5)
    rollout = two_branches()
    batch = build_batch([with_credits(rollout, [2.0, -1.0, -1.0])], options, 1)
    torch.manual_seed(0)
    given = [torch.randn(len(batch.targets_K)).tolist() for _ in range(3)]
    whole_loss, whole_slopes, whole = loss_of(batch, given[0], options, given[1], given[2])
    slopes: dict[int, float] = {}
    parts: list[dict[str, float]] = []
    for rows in ([0, 5, 2], [1, 3, 4], [6, 7, 8, 9]):
        mine = [[values[row] for row in rows] for values in given]
        _, part, metrics = loss_of(batch, mine[0], options, mine[1], mine[2], rows)
        slopes.update(zip(rows, part, strict=True))
        parts.append(metrics)
    assert [slopes[row] for row in range(10)] == pytest.approx(whole_slopes)
    assert {name: sum(part[name] for part in parts) for name in whole} == pytest.approx(whole)
    assert whole["loss"] == whole_loss


def test_numbers_are_those_of_the_given_tensors() -> None:
    """Nothing is computed in a wider or narrower format than that of the log-probs."""
    options = Loss(kind="gspo", kl_coef=0.1, entropy_coef=0.1, importance_cap=2.0)
    batch = single(1.0, options)
    one = torch.zeros(1, requires_grad=True)
    loss: Tensor = policy_loss(one, one, one.detach(), one.detach(), batch, torch.arange(1), options)[0]
    assert loss.dtype == torch.float32
