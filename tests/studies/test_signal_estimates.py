"""Signal, noise and cosine from inner products: by hand, by enumeration, and by seeded simulation."""

from __future__ import annotations

from itertools import product
from math import exp, log, sqrt
from statistics import fmean

import numpy as np
import pytest

from arpo.evaluation.student import student_t
from arpo.studies.signal.estimates import (
    Estimate,
    Floats,
    cosine,
    estimate_cosine,
    estimate_ratio,
    estimate_signal,
    noise,
    signal_to_noise,
    squared_mean_norm,
)


def gram_of(*vectors: object) -> Floats:
    rows = np.array(vectors, dtype=np.float64)
    return rows @ rows.T


def test_two_gradients_by_hand() -> None:
    # (3, 1) . (1, 2) = 5; the mean of the squared norms is (10 + 5) / 2; the deviations are +-(1, -0.5)
    gram = gram_of([3, 1], [1, 2])
    assert squared_mean_norm(gram) == 5
    assert noise(gram) == 2.5
    assert signal_to_noise(gram, 2) == 2
    assert estimate_signal(gram, 2) == Estimate(2, None, None)
    assert estimate_signal(9 * gram, 2) == Estimate(2, None, None)
    # to the reference (1, 0), (3, 0): its squared norm is 3, the mean of g . r is (3 + 9 + 1 + 3) / 4 = 4
    with_reference = gram_of([3, 1], [1, 2], [1, 0], [3, 0])
    assert cosine(with_reference, 2) == pytest.approx(4 / sqrt(5 * 3))
    assert estimate_signal(with_reference, 2) == Estimate(2, None, None)


def test_norm_and_noise_are_unbiased_over_all_draws() -> None:
    """A gradient takes each of four values with probability 1/4; all 64 triples of draws are enumerated."""
    values = np.array([[2.0, 0.0, 1.0], [0.0, 1.0, 1.0], [-1.0, 1.0, 0.0], [1.0, -3.0, 2.0]])
    mean = values.mean(axis=0)
    variance = ((values - mean) ** 2).mean(axis=0).sum()
    triples = [gram_of(*values[list(drawn)]) for drawn in product(range(4), repeat=3)]
    assert fmean(map(squared_mean_norm, triples)) == pytest.approx(mean @ mean)
    assert fmean(map(noise, triples)) == pytest.approx(variance)
    naive = fmean(float(gram.mean()) for gram in triples)  # the squared norm of the mean of three
    assert naive == pytest.approx(mean @ mean + variance / 3)


def draw(rng: np.random.Generator, count: int, mean: Floats, spread: float) -> Floats:
    return mean + spread * rng.standard_normal((count, len(mean)))


def test_noise_of_the_reference_does_not_lower_the_cosine() -> None:
    """An unbiased algorithm has a cosine of 1, a biased one that of its mean; noise exceeds the signal many times."""
    rng, size = np.random.default_rng(0), 400
    reference = np.zeros(size)
    reference[0] = 1.0
    biased = np.zeros(size)
    biased[:2] = 3.0, 4.0  # cosine 0.6, and five times as long
    plain: list[float] = []
    found: dict[str, list[float]] = {"unbiased": [], "biased": []}
    for _ in range(300):
        blocks = draw(rng, 8, reference, 0.1)  # its noise is four times its squared norm
        for name, mean, spread in (("unbiased", reference, 0.1), ("biased", biased, 0.5)):
            gradients = draw(rng, 8, mean, spread)
            value = cosine(gram_of(*gradients, *blocks), 8)
            assert value is not None
            found[name].append(value)
        mine, theirs = draw(rng, 8, reference, 0.1).mean(axis=0), blocks.mean(axis=0)
        plain.append(float(mine @ theirs / np.linalg.norm(mine) / np.linalg.norm(theirs)))
    assert fmean(found["unbiased"]) == pytest.approx(1, abs=0.03)
    assert fmean(found["biased"]) == pytest.approx(0.6, abs=0.03)
    assert fmean(plain) < 0.75  # without the correction


def test_intervals_hold_the_true_value_in_most_simulations() -> None:
    rng, size, hits = np.random.default_rng(1), 300, {"snr": 0, "cosine": 0}
    reference, mean = np.zeros(size), np.zeros(size)
    reference[0], mean[:2] = 1.0, (0.8, 0.6)
    for _ in range(200):
        gram = gram_of(*draw(rng, 8, mean, 0.1), *draw(rng, 8, reference, 0.1))
        for name, estimate, true in (
            ("snr", estimate_signal(gram, 8), 1 / (size * 0.01)),
            ("cosine", estimate_cosine(gram, 8), 0.8),
        ):
            assert estimate is not None
            assert estimate.low is not None
            assert estimate.high is not None
            hits[name] += estimate.low <= true <= estimate.high
    assert 175 <= hits["snr"] <= 200
    assert 175 <= hits["cosine"] <= 200


def test_the_jackknife_by_a_loop() -> None:
    rng = np.random.default_rng(2)
    gradients, blocks = draw(rng, 4, np.ones(5), 0.5), draw(rng, 3, np.ones(5), 0.5)
    found = estimate_cosine(gram_of(*gradients, *blocks), 4)

    def corrected(g: Floats, r: Floats) -> float:
        norms = [squared_mean_norm(rows @ rows.T) for rows in (g, r)]
        return float(g.mean(axis=0) @ r.mean(axis=0)) / sqrt(norms[0] * norms[1])

    variance = 0.0
    for values in (
        [corrected(np.delete(gradients, i, axis=0), blocks) for i in range(4)],
        [corrected(gradients, np.delete(blocks, i, axis=0)) for i in range(3)],
    ):
        n = len(values)
        variance += (n - 1) / n * sum((value - fmean(values)) ** 2 for value in values)
    assert found is not None
    assert found.value == pytest.approx(corrected(gradients, blocks))
    assert (found.low, found.high) == pytest.approx(
        (found.value - student_t(2) * sqrt(variance), found.value + student_t(2) * sqrt(variance))
    )
    assert found.scaled(2) == Estimate(2 * found.value, 2 * (found.low or 0), 2 * (found.high or 0))


def test_the_interval_of_a_signal_is_a_factor() -> None:
    gradients = draw(np.random.default_rng(3), 5, np.ones(6), 0.5)
    found = estimate_signal(gradients @ gradients.T, 5)

    def snr(rows: Floats) -> float:
        mean = rows.mean(axis=0)
        spread = ((rows - mean) ** 2).sum() / (len(rows) - 1)
        return float(mean @ mean - spread / len(rows)) / float(spread)  # |mean|^2 without its bias

    logs = [log(snr(np.delete(gradients, i, axis=0))) for i in range(5)]
    factor = exp(student_t(4) * sqrt(4 / 5 * sum((value - fmean(logs)) ** 2 for value in logs)))
    assert found is not None
    assert (found.value, found.low, found.high) == pytest.approx(
        (snr(gradients), snr(gradients) / factor, snr(gradients) * factor)
    )
    # products 3, -1.5 and -0.5, so |E g|^2 is 1/3, but -0.5 without the first; tr Cov is 10.25 / 3 - 1/3
    assert estimate_signal(gram_of([3], [1], [-0.5]), 3) == Estimate(pytest.approx(1 / 9.25), None, None)


def test_what_cannot_be_estimated() -> None:
    zero = gram_of([0, 0], [0, 0], [1, 0], [2, 0])
    assert estimate_signal(zero, 2) is None
    assert estimate_cosine(zero, 2) is None
    opposite = gram_of([1, 0], [-1, 0.1], [1, 0], [2, 0])  # the estimate of |E g|^2 is -1
    assert signal_to_noise(opposite, 2) == pytest.approx(-1 / 2.005)
    assert cosine(opposite, 2) is None
    assert signal_to_noise(gram_of([0.1, 0.3], [0.1, 0.3], [0.1, 0.3]), 3) is None  # equal, but for rounding
    with pytest.raises(ValueError, match="two gradients or more"):
        squared_mean_norm(gram_of([1, 0]))


def test_a_paired_ratio_by_a_loop() -> None:
    """Noise that both share cancels: the ratio is far more certain than either SNR."""
    rng = np.random.default_rng(4)
    shared = draw(rng, 6, np.ones(40), 1.0)
    own, other = shared + draw(rng, 6, np.zeros(40), 0.05), 3 * (shared + draw(rng, 6, np.zeros(40), 0.05))
    calls, other_calls = [10.0, 12, 11, 9, 10, 14], [22.0, 23, 22, 20, 20, 25]
    found = estimate_ratio(own @ own.T, calls, other @ other.T, other_calls)

    def by_cost(rows: Floats, costs: list[float], left_out: int | None) -> float:
        kept = [i for i in range(6) if i != left_out]
        snr = signal_to_noise(rows[kept] @ rows[kept].T, len(kept))
        assert snr is not None
        return snr / fmean(costs[i] for i in kept)

    def ratio(left_out: int | None = None) -> float:
        return by_cost(own, calls, left_out) / by_cost(other, other_calls, left_out)

    logs = [log(ratio(i)) for i in range(6)]
    factor = exp(student_t(5) * sqrt(5 / 6 * sum((value - fmean(logs)) ** 2 for value in logs)))
    assert found is not None
    assert (found.value, found.low, found.high) == pytest.approx((ratio(), ratio() / factor, ratio() * factor))
    assert found.value == pytest.approx(2, rel=0.1)  # half of the calls
    alone = estimate_signal(own @ own.T, 6)
    assert alone is not None
    assert alone.high is not None
    assert factor - 1 < (alone.high / alone.value - 1) / 3


def test_ratios_that_cannot_be_estimated() -> None:
    good, bad = gram_of([1, 0], [1, 0.1]), gram_of([1, 0], [-1, 0.1])
    assert estimate_ratio(good, [1, 1], good, [2, 2]) == Estimate(pytest.approx(2), None, None)  # two repeats
    assert estimate_ratio(good, [1, 1], bad, [1, 1]) is None
    assert estimate_ratio(good, [0, 0], good, [1, 1]) is None
