"""The page docs/trl.md and the example for TRL run, with a small random model."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM
from trl_doors import doors_tokenizer

ROOT = Path(__file__).parents[2]
SMALLER = {
    "max_steps=200": 'max_steps=1, report_to=[], bf16=False, use_cpu=True, save_strategy="no", disable_tqdm=True',
    "num_generations=8": "num_generations=2",
    "per_device_train_batch_size=16": "per_device_train_batch_size=4",
    "max_completion_length=1024": "max_completion_length=8",
}
"""What the test replaces in the page, besides the name of the model, so that it takes seconds."""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with a context long enough for the description of other tools."""
    tokenizer, folder = doors_tokenizer(), tmp_path_factory.mktemp("model")
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=2048,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_the_examples_of_the_page_run(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "trl.md").read_text(encoding="utf-8")
    code = "\n".join(re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE))
    for shown, smaller in {**SMALLER, "Qwen/Qwen3-0.6B": str(model_dir)}.items():
        assert shown in code
        code = code.replace(shown, smaller)
    variables: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(code, "trl.md", "exec"), variables)
    assert variables["trainer"].state.global_step == 1
    assert variables["trees"] == variables["trainer"].trees
    assert [len(scored.tree.leaves) for scored in variables["trees"]] == [2, 2]


@pytest.mark.slow
def test_the_example_runs(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("trl_tree_grpo", ROOT / "examples" / "trl_tree_grpo.py")
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    given = ["--model", str(model_dir), "--steps", "1", "--generations", "2", "--max-completion-length", "6"]
    trainer = example.main([*given, "--output", str(tmp_path)])
    assert trainer.state.global_step == 1
    assert len((tmp_path / "trees.jsonl").read_text().splitlines()) == 2 * 4  # completions of four prompts
    said = [[{"role": "assistant", "content": "40 and 55 are 95."}], [{"role": "assistant", "content": "no idea"}]]
    assert example.correct(said, answer=[95, 95]) == [1.0, 0.0]
