"""A model whose call markers were never trained cannot call tools in that format, and the user is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from templates import make_tokenizer
from tokenizers import AddedToken

from arpo.builtin.model import build_model
from arpo.config.loading import load_config
from arpo.models.untrained import untrained_tokens
from arpo.runs.reporter import Reporter
from arpo.training.context import open_context

CALL = '<tool_call>\n{"name": "python", "arguments": {}}\n</tool_call>'


class Warnings(Reporter):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def warning(self, text: str) -> None:
        self.texts.append(text)


def model_with_markers(trained: bool) -> tuple[Any, Any]:
    """A model with <tool_call> and </tool_call>; untrained, their embeddings are equal but for quantization."""
    tokenizer = make_tokenizer()
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in ("<tool_call>", "</tool_call>")])
    model = build_model(tokenizer, hidden=64, layers=1, max_context=2048, seed=0)
    if not trained:
        with torch.no_grad():
            rows = model.get_input_embeddings().weight
            start, end = (tokenizer.convert_tokens_to_ids(text) for text in ("<tool_call>", "</tool_call>"))
            rows[end] = 1.5 * rows[start] + 1e-4 * torch.randn(64, generator=torch.Generator().manual_seed(0))
    return model, tokenizer


def test_tokens_with_the_same_embedding_are_found() -> None:
    model, tokenizer = model_with_markers(trained=False)
    assert untrained_tokens(model, tokenizer, CALL) == ("<tool_call>", "</tool_call>")
    assert untrained_tokens(model, tokenizer, "<tool_call> once more <tool_call>") == ()
    assert untrained_tokens(model, tokenizer, "") == ()
    assert untrained_tokens(*model_with_markers(trained=True), CALL) == ()


@pytest.mark.parametrize(
    ("call_format", "trained", "warned"), [("json", False, True), ("json", True, False), ("tags", False, False)]
)
def test_the_user_is_told(tmp_path: Path, call_format: str, trained: bool, warned: bool) -> None:
    model, tokenizer = model_with_markers(trained)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "tasks.jsonl").write_text('{"question": "What is 1 plus 2?", "answer": "3"}\n')
    settings = [f"model.path={tmp_path / 'model'}", f"data.train={tmp_path / 'tasks.jsonl'}"]
    config = load_config(
        None, [*settings, f"rollout.format={call_format}", 'tools.enabled=["python"]', "reward.bonus=0"]
    )
    reporter = Warnings()
    open_context(config, reporter).close()
    told = [text for text in reporter.texts if "<tool_call> and </tool_call> have the same embedding" in text]
    assert len(told) == warned
