"""An exported agent in vLLM, started as a user would start it, makes the greedy turns of arpo's own engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not here; `make test-vllm` brings it")

from tool_models import save_tool_agent

from arpo.engine.vllm.engine import require_vllm


@pytest.mark.parametrize("end", ["<|im_end|>", "<|endoftext|>"])
def test_an_exported_agent_makes_the_same_greedy_turns_in_vllm(end: str, tmp_path: Path) -> None:
    turns = save_tool_agent(tmp_path / "agent", end)
    require_vllm()
    from vllm import LLM, SamplingParams

    llm: Any = LLM(
        str(tmp_path / "agent"),
        dtype="float32",
        max_model_len=1024,
        max_num_seqs=4,
        enforce_eager=True,
        kv_cache_memory_bytes=64 << 20,
    )
    prompts = [{"prompt_token_ids": before} for before, _ in turns]
    written = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=60), use_tqdm=False)
    tokenizer = llm.get_tokenizer()
    llm.llm_engine.engine_core.shutdown()
    assert len(turns) == 2
    assert [tokenizer.decode(tokens[-1:]) for _, tokens in turns] == ["<|im_end|>", end]
    assert [tuple(output.outputs[0].token_ids) for output in written] == [tokens for _, tokens in turns]
    assert [output.outputs[0].finish_reason for output in written] == ["stop", "stop"]
