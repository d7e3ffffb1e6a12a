"""The loss against references written straight from its formula, one token at a time.

Shapes: B rows, T positions, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from trees import nested_branches, two_branches

from arpo.advantage import attribute, credit
from arpo.batch import micro_batches, plain_batch
from arpo.loss import policy_loss, token_logprobs
from arpo.settings import Loss
from arpo.types import PathBatch, Reward, RolloutTree

VOCABULARY = 11


def single(advantage: float, weight: float = 1.0) -> PathBatch:
    """One row: a prompt token and one model token."""
    return PathBatch(
        torch.tensor([[1, 2]]),
        torch.ones(1, 2, dtype=torch.bool),
        torch.tensor([[False, True]]),
        torch.tensor([[0.0, advantage]]),
        torch.tensor([[0.0, weight]]),
        torch.zeros(1, 2),
    )


def loss_and_slope(batch: PathBatch, log_ratio: float, options: Loss) -> tuple[float, float, dict[str, float]]:
    logprobs_BT = torch.tensor([[0.0, -1.0 + log_ratio]], requires_grad=True)
    loss, metrics = policy_loss(logprobs_BT, torch.tensor([[0.0, -1.0]]), batch, options)
    loss.backward()  # type: ignore[no-untyped-call]
    assert logprobs_BT.grad is not None
    return loss.item(), logprobs_BT.grad[0, 1].item(), {name: value.item() for name, value in metrics.items()}


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
def test_one_token_by_hand(ratio: float, advantage: float, term: float, slope: float) -> None:
    options = Loss(clip_low=0.1, clip_high=0.3, dual_clip=3.0)
    loss, gradient, metrics = loss_and_slope(single(advantage, weight=0.5), math.log(ratio), options)
    assert loss == pytest.approx(-0.5 * term, rel=1e-5)
    assert gradient == pytest.approx(-0.5 * slope, rel=1e-5)
    assert metrics["clip_fraction"] == float(slope == 0)
    assert metrics["tokens"] == 1
    assert metrics["ratio"] == pytest.approx(ratio, rel=1e-5)
    assert metrics["kl_k1"] == pytest.approx(-math.log(ratio), abs=1e-5)
    assert metrics["kl_k3"] == pytest.approx(ratio - 1 - math.log(ratio), abs=1e-5)


def test_without_dual_clip_a_bad_token_is_pushed_back_in_full() -> None:
    loss, gradient, metrics = loss_and_slope(single(-2.0), math.log(3.5), Loss(dual_clip=None))
    assert (loss, gradient, metrics["clip_fraction"]) == (pytest.approx(7.0), pytest.approx(7.0), 0)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("log_ratio", [-500.0, 500.0])
def test_extreme_ratios_give_finite_numbers(advantage: float, log_ratio: float) -> None:
    for options in (Loss(), Loss(dual_clip=None)):
        loss, gradient, metrics = loss_and_slope(single(advantage), log_ratio, options)
        assert all(map(math.isfinite, (loss, gradient, *metrics.values())))


def reference_terms(
    rollout: RolloutTree, rewards: list[float], new: dict[int, list[float]], attribution: str, options: Loss
) -> list[list[float]]:
    """Per path, the term of each model token, from the rewards and the new log-probs of each model node."""
    mean = sum(rewards) / len(rewards)
    std = math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / len(rewards))
    own = [(reward - mean) / std for reward in rewards]
    paths = [rollout.path(leaf.node) for leaf in rollout.leaves]
    result = []
    for advantage, path in zip(own, paths, strict=True):
        terms = []
        for node in path:
            through = [own[i] for i, other in enumerate(paths) if node in other]
            a = sum(through) / len(through) if attribution == "hard" else advantage
            for old_logprob, new_logprob in zip(rollout.nodes[node].logprobs, new.get(node, []), strict=True):
                r = math.exp(new_logprob - old_logprob)
                term = min(r * a, min(max(r, 1 - options.clip_low), 1 + options.clip_high) * a)
                if a < 0 and options.dual_clip is not None:
                    term = max(term, options.dual_clip * a)
                terms.append(term)
        result.append(terms)
    return result


def reference_loss(terms: list[list[float]], aggregation: str) -> float:
    if aggregation == "token-mean":
        return -sum(map(sum, terms)) / sum(map(len, terms))
    return -sum(sum(path) / len(path) for path in terms) / len(terms)


def node_logprobs_to_rows(rollout: RolloutTree, new: dict[int, list[float]]) -> Tensor:
    rows = []
    for leaf in rollout.leaves:
        nodes = [(index, rollout.nodes[index]) for index in rollout.path(leaf.node)]
        rows.append([v for index, node in nodes for v in new.get(index, [0.0] * len(node.tokens))])
    longest = max(map(len, rows))
    return torch.tensor([row + [0.0] * (longest - len(row)) for row in rows])


@settings(deadline=None, max_examples=60)
@given(
    st.data(),
    st.sampled_from([two_branches, nested_branches]),
    st.sampled_from(["soft", "hard"]),
    st.sampled_from(["token-mean", "sequence-mean"]),
    st.sampled_from(
        [Loss(), Loss(clip_low=0.1, clip_high=0.28, dual_clip=None), Loss(clip_low=0.3, clip_high=0.1, dual_clip=1.5)]
    ),
)
def test_loss_equals_the_reference(data, make, attribution, aggregation, options) -> None:  # type: ignore[no-untyped-def]
    rollout = make()
    count = len(rollout.leaves)
    # Distinct irregular rewards: no advantage is exactly 0, so every path has a row.
    rewards = [0.37 * i**1.5 - 0.61 for i in data.draw(st.permutations(range(count)))]
    moves = st.floats(-1.5, 1.5)
    new = {
        index: [old + data.draw(moves) for old in node.logprobs]
        for index, node in enumerate(rollout.nodes)
        if node.logprobs
    }
    credits = credit(rollout, [Reward(reward) for reward in rewards], attribution)
    batch = plain_batch([rollout], [credits], aggregation, 0)
    loss, metrics = policy_loss(node_logprobs_to_rows(rollout, new), batch.engine_logprobs_BT, batch, options)
    terms = reference_terms(rollout, rewards, new, attribution, options)
    assert loss.item() == pytest.approx(reference_loss(terms, aggregation), rel=1e-4, abs=1e-5)
    assert metrics["tokens"].item() == sum(map(len, terms))


# --- gradients through a model ---


class Toy(torch.nn.Module):
    """Logits from the running mean of embeddings: every token depends on its whole prefix, and on nothing after it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(VOCABULARY, 6, dtype=torch.float64)
        self.head = torch.nn.Linear(6, VOCABULARY, dtype=torch.float64)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        counts_T = torch.arange(1, tokens_BT.shape[1] + 1)
        mean_BTD = self.embed(tokens_BT).cumsum(dim=1) / counts_T[:, None]
        return self.head(torch.tanh(mean_BTD))  # type: ignore[no-any-return]

    def gradient(self, loss: Tensor) -> Tensor:
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(self.parameters()))])


def batch_gradient(toy: Toy, batch: PathBatch, options: Loss, shift: float) -> Tensor:
    """Gradient of the loss; the old log-probs are the new ones moved by up to `shift`, the same for the same prefix."""
    shifted, _ = token_logprobs(toy(batch.tokens_BT)[:, :-1], batch.tokens_BT[:, 1:], 1.0)
    logprobs_BT = torch.nn.functional.pad(shifted, (1, 0))
    old_BT = logprobs_BT.detach() + shift * torch.sin(37 * batch.tokens_BT.cumsum(dim=1))
    return toy.gradient(policy_loss(logprobs_BT, old_BT, batch, options)[0])


def reference_gradient(
    toy: Toy, rollout: RolloutTree, advantages: list[float], attribution: str, options: Loss, shift: float
) -> Tensor:
    """Token mean, one token at a time, each log-prob from the prefix alone; `if` instead of min and max."""
    paths = [rollout.path(leaf.node) for leaf in rollout.leaves]
    total, num_tokens = torch.zeros((), dtype=torch.float64), 0
    for advantage, path in zip(advantages, paths, strict=True):
        prefix: list[int] = []
        for index in path:
            node = rollout.nodes[index]
            through = [advantages[i] for i, other in enumerate(paths) if index in other]
            a = sum(through) / len(through) if attribution == "hard" else advantage
            for token in node.tokens:
                if node.logprobs:
                    new = torch.log_softmax(toy(torch.tensor([prefix]))[0, -1], dim=-1)[token]
                    r = (new - (new.detach() + shift * math.sin(37 * (sum(prefix) + token)))).exp()
                    num_tokens += 1
                    too_high = a > 0 and r.item() > 1 + options.clip_high
                    too_low = a < 0 and r.item() < 1 - options.clip_low
                    too_bad = a < 0 and options.dual_clip is not None and r.item() > options.dual_clip
                    if not (too_high or too_low or too_bad):
                        total = total - r * a
                prefix.append(token)
    return toy.gradient(total / num_tokens)


@pytest.mark.parametrize("attribution", ["soft", "hard"])
@pytest.mark.parametrize(
    "options",
    [Loss(), Loss(clip_low=0.1, clip_high=0.3, dual_clip=None), Loss(clip_low=0.2, clip_high=0.2, dual_clip=1.5)],
)
def test_gradient_equals_the_reference(attribution: str, options: Loss) -> None:
    toy, rollout, advantages = Toy(), nested_branches(), [1.3, 0.2, -0.4, -1.7, 0.6]
    batch = plain_batch([rollout], [attribute(rollout, advantages, attribution)], "token-mean", 0)
    expected = reference_gradient(toy, rollout, advantages, attribution, options, shift=0.7)
    unclipped = reference_gradient(
        toy, rollout, advantages, attribution, Loss(clip_low=1.0, clip_high=9.0, dual_clip=None), shift=0.7
    )
    assert not torch.allclose(expected, unclipped, rtol=1e-2)  # the clip really bites here
    torch.testing.assert_close(batch_gradient(toy, batch, options, shift=0.7), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("keep", [[True] * 5, [True, False, True, True, True]])
def test_hard_and_soft_have_the_same_gradient_at_ratio_1(keep: list[bool]) -> None:
    toy, rollout, advantages = Toy(), nested_branches(), [1.3, 0.2, -0.4, -1.7, 0.6]

    def gradient(attribution: str, aggregation: str, shift: float) -> Tensor:
        batch = plain_batch([rollout], [attribute(rollout, advantages, attribution, keep)], aggregation, 0)
        return batch_gradient(toy, batch, Loss(), shift)

    soft, hard = gradient("soft", "token-mean", 0.0), gradient("hard", "token-mean", 0.0)
    assert soft.abs().max() > 1e-3
    torch.testing.assert_close(soft, hard, rtol=1e-5, atol=1e-7)
    # Neither away from ratio 1 nor with weights that differ between the paths through a node.
    for aggregation, shift in (("token-mean", 0.7), ("sequence-mean", 0.0)):
        assert not torch.allclose(gradient("soft", aggregation, shift), gradient("hard", aggregation, shift), rtol=1e-2)


def test_micro_batches_add_up_to_the_batch() -> None:
    toy, rollout = Toy(), nested_branches()
    batch = plain_batch([rollout], [attribute(rollout, [1.3, 0.2, -0.4, -1.7, 0.6], "soft")], "sequence-mean", 0)
    pieces = list(micro_batches(batch, 16))
    assert len(pieces) > 2
    parts = [batch_gradient(toy, piece, Loss(), 0.7) for piece in pieces]
    torch.testing.assert_close(sum(parts), batch_gradient(toy, batch, Loss(), 0.7), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("rubbish", [math.nan, math.inf, -math.inf, 1e30])
def test_positions_outside_the_mask_contribute_nothing(rubbish: float) -> None:
    rollout = two_branches()
    batch = plain_batch([rollout], [attribute(rollout, [2.0, -1.0, -1.0], "soft")], "token-mean", 0)
    clean_BT = (batch.engine_logprobs_BT + 0.1 * batch.loss_mask_BT).requires_grad_()
    dirty_BT = torch.where(batch.loss_mask_BT, clean_BT.detach(), rubbish).requires_grad_()
    dirty = replace(batch, advantages_BT=batch.advantages_BT.masked_fill(~batch.loss_mask_BT, rubbish))
    dirty = replace(dirty, weights_BT=batch.weights_BT.masked_fill(~batch.loss_mask_BT, rubbish))
    results = []
    for logprobs_BT, given_batch in ((clean_BT, batch), (dirty_BT, batch), (clean_BT, dirty), (dirty_BT, dirty)):
        loss, metrics = policy_loss(logprobs_BT, batch.engine_logprobs_BT, given_batch, Loss())
        (gradient_BT,) = torch.autograd.grad(loss, logprobs_BT)
        assert (gradient_BT[~batch.loss_mask_BT] == 0).all()
        results.append((loss.item(), metrics, gradient_BT.tolist()))
    assert all(result == results[0] for result in results)


# --- log-probs of tokens ---


def test_token_logprobs_by_hand() -> None:
    logits_NV = torch.tensor([[math.log(3.0), 0.0], [0.0, 0.0]])
    logprobs_N, entropy_N = token_logprobs(logits_NV, torch.tensor([0, 1]), 1.0)
    torch.testing.assert_close(logprobs_N, torch.tensor([math.log(0.75), math.log(0.5)]))
    first = -0.75 * math.log(0.75) - 0.25 * math.log(0.25)
    torch.testing.assert_close(entropy_N, torch.tensor([first, math.log(2.0)]))


def test_token_logprobs_at_a_temperature_in_float32() -> None:
    torch.manual_seed(1)
    logits_NV, tokens_N = torch.randn(9, VOCABULARY).bfloat16(), torch.randint(VOCABULARY, (9,))
    logprobs_N, entropy_N = token_logprobs(logits_NV, tokens_N, 0.6)
    assert logprobs_N.dtype == entropy_N.dtype == torch.float32
    for n in range(9):
        scaled = [value / 0.6 for value in logits_NV[n].tolist()]
        total = sum(math.exp(value) for value in scaled)
        probs = [math.exp(value) / total for value in scaled]
        assert logprobs_N[n].item() == pytest.approx(math.log(probs[tokens_N[n]]), abs=1e-5)
        assert entropy_N[n].item() == pytest.approx(-sum(p * math.log(p) for p in probs), abs=1e-5)


def test_impossible_tokens_leave_entropy_and_gradient_finite() -> None:
    logits_NV = torch.tensor([[0.0, 0.0, -math.inf]], requires_grad=True)
    logprobs_N, entropy_N = token_logprobs(logits_NV, torch.tensor([1]), 1.0)
    assert entropy_N.item() == pytest.approx(math.log(2.0))
    (gradient_NV,) = torch.autograd.grad(logprobs_N.sum(), logits_NV)
    assert gradient_NV.isfinite().all()


def test_temperature_must_be_positive() -> None:
    with pytest.raises(ValueError, match="temperature"):
        token_logprobs(torch.zeros(2, 3), torch.zeros(2, dtype=torch.long), 0.0)
