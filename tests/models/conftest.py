"""What tests of loading share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from arpo.builtin.model import build_model


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    """The directory of a small model."""
    path = tmp_path_factory.mktemp("base")
    build_model(tokenizer, hidden=64, layers=2, max_context=256, seed=1).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path
