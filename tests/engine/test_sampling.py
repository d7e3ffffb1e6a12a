"""Sampling tokens, against sums and sorts that are written out one by one."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from arpo.engine.local.sampling import CHUNK, cut_distribution, sample, sample_categorical

ALMOST_ONE = math.nextafter(1.0, 0.0)
FAST = settings(max_examples=120, deadline=None, derandomize=True)


def doubles(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def slow_draw(weights: list[float], uniform: float) -> int:
    """The first token whose running sum is above the target; past the end, the last one with any weight."""
    target, total = uniform * math.fsum(weights), 0.0
    for token, weight in enumerate(weights):
        total += weight
        if total > target:
            return token
    return max(token for token, weight in enumerate(weights) if weight > 0)


def slow_cut(weights: list[float], top_p: float, top_k: int) -> list[float]:
    """Keep the k heaviest, then take from the top until the share is reached."""
    order = sorted(range(len(weights)), key=lambda i: -weights[i])[: top_k or len(weights)]
    total, taken, kept = math.fsum(weights[i] for i in order), 0.0, [0.0] * len(weights)
    for i in order:
        if taken >= top_p * total:
            break
        kept[i] = weights[i]
        taken += weights[i]
    return kept


def numbers_of(weights: list[float], token: int) -> tuple[float, float]:
    """Log-prob of the token, and entropy, of the weights as a distribution."""
    total = math.fsum(weights)
    shares = [weight / total for weight in weights]
    return math.log(shares[token]), -sum(p * math.log(p) for p in shares if p > 0)


WEIGHTS = st.lists(st.sampled_from([0.0, 0.0, 0.25, 0.5, 1.0, 3.0]), min_size=1, max_size=40).filter(any)


@FAST
@given(
    weights=WEIGHTS,
    uniform=st.sampled_from([0.0, 5e-324, 0.25, 0.5, 1 - 1e-9, ALMOST_ONE]) | st.floats(0, 1, exclude_max=True),
    before=st.sampled_from([0, 1, CHUNK - 1, CHUNK, 2 * CHUNK + 3]),
    after=st.sampled_from([0, 5, CHUNK]),
)
def test_sample_categorical_equals_a_plain_running_sum(
    weights: list[float], uniform: float, before: int, after: int
) -> None:
    """All sums of these weights are exact, so there is one right answer, also where the target is one of the sums."""
    weights = [0.0] * before + weights + [0.0] * after
    assert sample_categorical(torch.tensor([weights]), doubles(uniform)).item() == slow_draw(weights, uniform)


def test_rows_are_sampled_independently() -> None:
    rng = random.Random(3)
    rows = [[rng.choice([0.0, 0.5, 1.0, 2.0]) for _ in range(700)] for _ in range(60)]
    uniform = [rng.random() for _ in rows]
    assert sample_categorical(torch.tensor(rows), doubles(*uniform)).tolist() == list(map(slow_draw, rows, uniform))


def test_a_token_without_weight_is_never_sampled() -> None:
    """Targets at and beside the sum of a whole chunk, with zeros on both sides of the border."""
    rng = random.Random(0)
    rows, uniform = [], []
    for _ in range(3000):
        row = [0.0] * (3 * CHUNK)
        for _ in range(rng.randint(2, 5)):
            row[rng.randint(1, 3 * CHUNK - 2)] = 10 ** rng.uniform(-15, 0)
        sums = [math.fsum(row[: CHUNK * (i + 1)]) for i in range(3)]
        share = sums[rng.randrange(2)] / sums[2]
        rows.append(row)
        uniform.append(min(rng.choice([share, math.nextafter(share, 0), math.nextafter(share, 1)]), ALMOST_ONE))
    weights = torch.tensor(rows)
    drawn = sample_categorical(weights, doubles(*uniform))
    assert weights.gather(1, drawn.unsqueeze(1)).min() > 0


def test_a_target_past_the_end_of_a_chunk_is_its_last_token_with_weight() -> None:
    """A chunk's sum and its running sum may differ in the last bit; behind the last weight there are only zeros."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.zeros(2000, 2 * CHUNK)
    for start in (0, CHUNK):
        weights[:, start : start + 150] = 10 ** (torch.rand(2000, 150, generator=generator) * -9)
    share = weights[:, :CHUNK].double().sum(1) / weights.double().sum(1)
    drawn = sample_categorical(weights, torch.nextafter(share, torch.zeros_like(share)))
    assert set(drawn.tolist()) <= {148, 149, CHUNK}
    drawn = sample_categorical(weights, torch.full_like(share, ALMOST_ONE))
    assert set(drawn.tolist()) <= {CHUNK + 148, CHUNK + 149}


def test_sampling_is_exact_far_beyond_single_precision() -> None:
    weights = torch.ones(1, 1000)
    for inside in (1e-7, 1 - 1e-7):
        uniform = doubles(*((token + inside) / 1000 for token in range(1000)))
        assert sample_categorical(weights.expand(1000, 1000), uniform).tolist() == list(range(1000))


@FAST
@given(
    logits=st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=30),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    uniform=st.floats(0, 1, exclude_max=True),
    top_p=st.sampled_from([0.1, 0.5, 0.9, 0.999, 1.0]),
    top_k=st.integers(0, 32),
)
def test_logprobs_before_and_after_a_cut(
    logits: list[float], temperature: float, uniform: float, top_p: float, top_k: int
) -> None:
    row = torch.tensor([logits])
    got = sample(row, doubles(temperature), doubles(uniform), doubles(top_p), torch.tensor([float(top_k)]))
    scale, top = temperature or 1.0, max(logits)
    weights = [math.exp((logit - top) / scale) for logit in logits]
    token = int(got.token_B)
    logprob, entropy = numbers_of(weights, token)
    assert (got.logprob_B.item(), got.entropy_B.item()) == pytest.approx((logprob, entropy), abs=2e-5, rel=1e-5)
    assert got.cut_logprob_B is not None and got.cut_entropy_B is not None
    single = [float(w) for w in torch.tensor(weights, dtype=torch.float32).tolist()]
    kept = cut_distribution(torch.tensor([single]), doubles(top_p), doubles(top_k))[0].tolist()
    if temperature == 0:
        assert logits[token] == top
    assert kept[token] > 0
    after = numbers_of(kept, token)
    assert (got.cut_logprob_B.item(), got.cut_entropy_B.item()) == pytest.approx(after, abs=1e-4, rel=1e-4)
    uncut = sample(row, doubles(temperature), doubles(uniform))
    assert uncut.cut_logprob_B is None and uncut.cut_entropy_B is None
    assert torch.equal(uncut.entropy_B, got.entropy_B)


@FAST
@given(
    weights=st.lists(st.sampled_from([0.0, 0.125, 0.25, 0.5, 1.0, 2.0]), min_size=1, max_size=20).filter(any),
    top_p=st.sampled_from([1e-9, 0.25, 0.5, 0.75, 0.875, 1.0]),
    top_k=st.integers(0, 22),
)
def test_cut_equals_taking_the_heaviest_one_by_one(weights: list[float], top_p: float, top_k: int) -> None:
    """Exact weights, so that shares which just reach top-p count as reaching it."""
    assert cut_distribution(torch.tensor([weights]), doubles(top_p), doubles(top_k))[0].tolist() == slow_cut(
        weights, top_p, top_k
    )


@pytest.mark.parametrize(("top_p", "kept"), [(0.4, 1), (0.5, 1), (0.6, 2), (0.75, 2), (0.8, 3), (0.96, 4)])
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p: float, kept: int) -> None:
    probs = torch.tensor([[0.5, 0.25, 0.125, 0.125]])
    assert int((cut_distribution(probs, torch.tensor([top_p]), torch.tensor([0])) > 0).sum()) == kept


def test_top_k_comes_before_top_p() -> None:
    """Of 0.4 0.3 0.2 0.1 the two most likely are 4/7 and 3/7: top-p of 0.5 then keeps the first alone."""
    probs = torch.tensor([[0.1, 0.4, 0.2, 0.3]])
    assert cut_distribution(probs, doubles(0.5), doubles(2))[0].tolist() == pytest.approx([0, 0.4, 0, 0])
    assert cut_distribution(probs, doubles(0.5), doubles(0))[0].tolist() == pytest.approx([0, 0.4, 0, 0.3])


def test_rows_with_and_without_cuts_go_together() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    uniform = doubles(0.7, 0.7, 0.7)
    mixed = sample(logits, torch.ones(3), uniform, doubles(1.0, 0.3, 1.0), doubles(0, 0, 2))
    plain = sample(logits, torch.ones(3), uniform)
    assert mixed.token_B[0] == plain.token_B[0]
    assert torch.equal(mixed.logprob_B[0], plain.logprob_B[0])
    assert mixed.cut_logprob_B is not None
    assert mixed.cut_logprob_B[0] == pytest.approx(plain.logprob_B[0].item(), abs=1e-6)
    assert (mixed.cut_logprob_B[1:] > mixed.logprob_B[1:]).all()


@pytest.mark.parametrize("cuts", [False, True])
def test_sampled_tokens_follow_the_softmax(cuts: bool) -> None:
    """Chi-square of 20,000 draws over 8 tokens; 24.3 is the 0.1 % quantile with 7 degrees of freedom, 18.5 with 4."""
    logits = torch.randn(8, generator=torch.Generator().manual_seed(0)) * 1.5
    rng, draws = random.Random(1), 20_000
    uniform = doubles(*(rng.random() for _ in range(draws)))
    ones = torch.ones(draws)
    options = (ones * 0.99, ones * 5) if cuts else ()
    tokens = sample(logits.expand(draws, 8), ones * 0.8, uniform, *options).token_B
    weights = [math.exp(logit / 0.8) for logit in logits.tolist()]
    if cuts:
        weights = slow_cut(weights, 0.99, 5)
    probs = [weight / sum(weights) for weight in weights]
    counts = Counter(tokens.tolist())
    assert {*counts} == {i for i, p in enumerate(probs) if p}
    chi_square = sum((counts[i] - draws * p) ** 2 / (draws * p) for i, p in enumerate(probs) if p)
    assert chi_square < (18.5 if cuts else 24.3)


def test_forbidden_tokens_give_no_nan() -> None:
    logits = torch.tensor([[0.0, float("-inf"), 1.0]])
    for uniform in (0.0, 0.2689, 0.2690, ALMOST_ONE):
        got = sample(logits, torch.ones(1), doubles(uniform))
        assert got.token_B.item() != 1
        assert got.entropy_B.item() == pytest.approx(0.5822, abs=1e-3)


def test_greedy_takes_the_most_likely_token_and_reports_temperature_one() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0], [5.0, 0.0, 1.0]])
    got = sample(logits, doubles(0, 0), doubles(ALMOST_ONE, ALMOST_ONE))
    assert got.token_B.tolist() == [1, 0]
    expected = logits.double().log_softmax(-1)
    assert got.logprob_B.tolist() == pytest.approx([expected[0, 1].item(), expected[1, 0].item()], abs=1e-6)


def test_low_precision_logits_are_converted_to_float32_first() -> None:
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(2)).bfloat16()
    uniform = doubles(0.1, 0.4, 0.6, 0.9)
    low, high = (sample(x, doubles(0.7, 0.7, 0.7, 0.7), uniform) for x in (logits, logits.float()))
    assert all(torch.equal(a, b) for a, b in zip(low[:3], high[:3], strict=True) if a is not None and b is not None)
    assert low.logprob_B.dtype == torch.float32
