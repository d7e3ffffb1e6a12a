"""Things that many tests share: a small tokenizer and a small random model, made on the spot."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

from arpo.builtin.model import build_model, build_tokenizer

sys.path[:0] = [str(path) for path in sorted(Path(__file__).parent.iterdir()) if path.is_dir()]
torch.set_num_threads(1)  # these models are too small for more to help
settings.register_profile(
    "any machine", parent=settings.default, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")  # no example fails for being slow
TEXTS = [
    "Where was Mira Tolven born? The birthplace of Mira Tolven is Upper Kelso.",
    "<think> Find the birthplace.</think><search> birthplace of Mira Tolven</search>",
    "<think> Done.</think><answer>\\boxed{ Upper Kelso}</answer>",
]


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """The built-in model's kind of tokenizer, over a handful of sentences."""
    return build_tokenizer(TEXTS)


@pytest.fixture(scope="session")
def tiny_model(tokenizer: Any) -> Any:
    """A random Llama with two layers; tests must not change it."""
    return build_model(tokenizer, hidden=64, layers=2, max_context=256, seed=0).eval()
