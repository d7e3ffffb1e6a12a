"""Signal and noise of gradients from their inner products alone. Pure functions of Gram matrices.

For independent gradients g_1 .. g_n of one algorithm, with G_ij = g_i . g_j:

    |E g|^2   mean of G_ij over i != j: without bias, as independent gradients do not share their noise
    tr Cov    mean of G_ii minus |E g|^2: the trace of the covariance, without bias
    SNR       |E g|^2 / tr Cov

For independent gradients r_1 .. r_m of the reference:

    cosine    mean of g_i . r_j / sqrt(|E g|^2 |E r|^2), with both norms estimated as above

SNR and cosine do not depend on the scale of a gradient. The noise of the reference lowers none of them: an unbiased
algorithm has a cosine of 1, up to the noise of the estimate, which may exceed 1. Where a squared norm is estimated at
0 or less, there is too much noise to say anything, and the cosine is None.

Intervals are at 95 %, by a jackknife: the statistic is computed without each of the n gradients in turn (and, for a
cosine, without each of the m), and Student's t has one degree of freedom less than there are gradients. That of an SNR
is computed for its logarithm, so it is a factor up and down: one gradient with a rare outlier can halve an SNR.
The ratio of two algorithms' SNR by cost is paired: repeat i, which has the same seeds, is left out of both at a time.
Not covered: other tasks. All gradients are of the same tasks, so intervals are about these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp, log, sqrt
from statistics import fmean

import numpy as np
import numpy.typing as npt

from arpo.evaluation.student import student_t

Floats = npt.NDArray[np.float64]
MIN_JACKKNIFE = 3  # gradients: two must remain when one is left out
Statistic = Callable[[Floats, int], float | None]
"""(Gram matrix, n) -> value; the first n rows are the algorithm's gradients, the others the reference's."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value with its 95 % interval, which is None where there are too few gradients, or too much noise, for one."""

    value: float
    low: float | None
    high: float | None

    def scaled(self, factor: float) -> Estimate:
        """The estimate in another unit."""
        low, high = (None if bound is None else bound * factor for bound in (self.low, self.high))
        return Estimate(self.value * factor, low, high)


def squared_mean_norm(gram: Floats) -> float:
    """|E g|^2, without bias, from the inner products of two or more independent gradients."""
    n = len(gram)
    if n < 2:
        raise ValueError("the norm of a mean needs two gradients or more")
    return float(gram.sum() - np.trace(gram)) / (n * (n - 1))


def noise(gram: Floats) -> float:
    """The trace of the covariance of one gradient, without bias."""
    return float(np.trace(gram)) / len(gram) - squared_mean_norm(gram)


def signal_to_noise(gram: Floats, repeats: int) -> float | None:
    """|E g|^2 / tr Cov of the first `repeats` gradients; None if they do not differ, as where all are 0."""
    own = gram[:repeats, :repeats]
    spread = noise(own)
    return squared_mean_norm(own) / spread if spread > 1e-12 * float(np.trace(own)) else None


def cosine(gram: Floats, repeats: int) -> float | None:
    """The cosine of the mean of the first `repeats` gradients to the mean of the others, corrected for noise."""
    own, reference = squared_mean_norm(gram[:repeats, :repeats]), squared_mean_norm(gram[repeats:, repeats:])
    if own <= 0 or reference <= 0:
        return None
    return float(gram[:repeats, repeats:].mean()) / sqrt(own * reference)


def estimate_signal(gram: Floats, repeats: int) -> Estimate | None:
    """The signal-to-noise ratio; it has an interval only if it is above 0 without each of the gradients, too."""
    own = gram[:repeats, :repeats]
    value, half_width = signal_to_noise(own, repeats), _half_width(_log_signal, own, repeats)
    if value is None or value <= 0 or half_width is None:
        return None if value is None else Estimate(value, None, None)
    return Estimate(value, value * exp(-half_width), value * exp(half_width))


def estimate_cosine(gram: Floats, repeats: int) -> Estimate | None:
    """The cosine with its interval, which includes the noise of the reference."""
    value, half_width = cosine(gram, repeats), _half_width(cosine, gram, repeats)
    if value is None or half_width is None:
        return None if value is None else Estimate(value, None, None)
    return Estimate(value, value - half_width, value + half_width)


def estimate_ratio(
    own: Floats, own_costs: Sequence[float], other: Floats, other_costs: Sequence[float]
) -> Estimate | None:
    """SNR by cost of one algorithm over that of another, both from the same number of repeats with the same seeds.

    The matrices hold the inner products of the repeats alone. None if an SNR is not above 0, or nothing was spent.
    """
    repeats = len(own_costs)

    def log_ratio(left_out: Sequence[int]) -> float | None:
        logs = []
        for gram, costs in ((own, own_costs), (other, other_costs)):
            value = _log_signal(_without(gram, left_out), repeats - len(left_out))
            spent = fmean(np.delete(costs, left_out))
            if value is None or spent <= 0:
                return None
            logs.append(value - log(spent))
        return logs[0] - logs[1]

    value = log_ratio(())
    if value is None:
        return None
    without = [log_ratio((repeat,)) for repeat in range(repeats)] if repeats >= MIN_JACKKNIFE else []
    values = [each for each in without if each is not None]
    if len(values) < repeats:
        return Estimate(exp(value), None, None)
    half_width = student_t(repeats - 1) * sqrt(_jackknife_variance(values))
    return Estimate(exp(value), exp(value - half_width), exp(value + half_width))


def _log_signal(gram: Floats, repeats: int) -> float | None:
    snr = signal_to_noise(gram, repeats)
    return log(snr) if snr is not None and snr > 0 else None


def _half_width(statistic: Statistic, gram: Floats, repeats: int) -> float | None:
    groups = [rows for rows in (range(repeats), range(repeats, len(gram))) if rows]
    if min(map(len, groups)) < MIN_JACKKNIFE:
        return None
    variance = 0.0
    for rows in groups:
        without = [statistic(_without(gram, [row]), repeats - (row < repeats)) for row in rows]
        values = [value for value in without if value is not None]
        if len(values) < len(without):
            return None
        variance += _jackknife_variance(values)
    return student_t(min(map(len, groups)) - 1) * sqrt(variance)


def _jackknife_variance(values: Sequence[float]) -> float:
    """The variance of a statistic from its values without each of the gradients in turn."""
    mean = fmean(values)
    return (len(values) - 1) / len(values) * sum((value - mean) ** 2 for value in values)


def _without(gram: Floats, rows: Sequence[int]) -> Floats:
    return np.delete(np.delete(gram, rows, axis=0), rows, axis=1)
