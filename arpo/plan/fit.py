"""The chance to branch, found so that simulated questions get as many branches as those of a run.

A run's metrics tell branches, not chances: branches stop when there are enough paths, and shared results are looked at
once for each path that goes on from them. Times hardly matter here.
"""

from __future__ import annotations

from dataclasses import replace

from arpo.plan.cost import Decoder
from arpo.plan.hardware import GPUS
from arpo.plan.load import Load
from arpo.plan.shape import SHAPES
from arpo.plan.simulate import simulate

QUESTIONS = 64  # simulated
HALVINGS = 10


def fit(load: Load, branches: float) -> Load:
    """The load with the chance that gives `branches` branches a question; 1 if none gives so many."""
    if load.posthoc or not branches:
        return load
    decoder = Decoder(SHAPES["qwen2.5-0.5b"], GPUS["h200"])
    low, high = 0.0, 1.0
    for _ in range(HALVINGS):
        tried = replace(load, branch_rate=(low + high) / 2, questions=QUESTIONS)
        if simulate(tried, decoder).branches < branches * QUESTIONS:
            low = tried.branch_rate
        else:
            high = tried.branch_rate
    return replace(load, branch_rate=high)
