"""Student's t distribution, without scipy: two-sided quantiles at 95 % and p-values, for whole degrees of freedom."""

from __future__ import annotations

from functools import cache
from math import atan, cos, pi, sin, sqrt, tan

LEVEL = 0.95


@cache
def student_t(degrees: int) -> float:
    """The two-sided 95 % quantile of Student's t distribution, by bisection."""
    low, high = 0.0, pi / 2
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if _probability_within(middle, degrees) < LEVEL else (low, middle)
    return sqrt(degrees) * tan(high)


def two_sided_p(t: float, degrees: int) -> float:
    """P(|T| >= |t|) of Student's t distribution; exact to about 1e-15, so smaller values come out as about 0."""
    return min(1.0, max(0.0, 1.0 - _probability_within(atan(abs(t) / sqrt(degrees)), degrees)))


def _probability_within(angle: float, degrees: int) -> float:
    """P(|t| < sqrt(degrees) tan(angle)) of Student's t: a finite sum for whole degrees of freedom."""
    odd = degrees % 2
    term, total = cos(angle) if odd else 1.0, 0.0
    for power in range(odd, degrees - 1, 2):
        total += term
        term *= (power + 1) / (power + 2) * cos(angle) ** 2
    return 2 / pi * (angle + sin(angle) * total) if odd else sin(angle) * total
