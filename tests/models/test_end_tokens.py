"""Which tokens end a turn: all that a model's files name, and control tokens that are known to."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from templates import CHATML, UNCLOSED, make_tokenizer
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from arpo.agent.turn_end import closing_token, turn_end_tokens
from arpo.builtin.model import build_model
from arpo.engine.local.engine import LocalEngine
from arpo.engine.stops import StopFinder
from arpo.engine.vllm.completion import CompletionBuilder, SampledToken
from arpo.models.end_tokens import end_texts, end_tokens
from arpo.types import SamplingParams

ENDOFTEXT, IM_START, IM_END = 0, 1, 2


def chat_model(tokenizer: Any, **sizes: Any) -> Any:
    return build_model(tokenizer, **{"hidden": 32, "layers": 1, "max_context": 256, "seed": 0, **sizes}).eval()


def always_write(model: Any, token: int) -> None:
    """Give a model weights that make it write one token whatever the context."""
    with torch.no_grad():
        model.get_input_embeddings().weight.zero_()
        model.get_input_embeddings().weight[:, 0] = 1.0
        model.get_input_embeddings().weight[token, 0] = 9.0
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()


def add(tokenizer: Any, text: str, special: bool) -> int:
    tokenizer.add_tokens([AddedToken(text, special=special, normalized=False)], special_tokens=special)
    return int(tokenizer.convert_tokens_to_ids(text))


@pytest.mark.parametrize("declared", [IM_END, [IM_END, 7], None])
def test_all_sources_count(declared: int | list[int] | None) -> None:
    tokenizer = make_tokenizer()
    model = chat_model(tokenizer)
    model.generation_config.eos_token_id = declared
    assert end_tokens(model, tokenizer) == {ENDOFTEXT, IM_END} | ({7} if isinstance(declared, list) else set())


@pytest.mark.parametrize("special", [True, False])
def test_known_texts_count_only_as_control_tokens(special: bool) -> None:
    tokenizer = make_tokenizer()
    added = {add(tokenizer, text, special) for text in ("<|eot_id|>", "<eos>", "<turn|>")}
    assert end_tokens(chat_model(tokenizer), tokenizer) == {ENDOFTEXT, IM_END} | (added if special else set())


def test_one_of_several_messages_does_not_end_a_turn() -> None:
    tokenizer = make_tokenizer()
    for text in ("<|end|>", "<|return|>", "<|call|>"):
        add(tokenizer, text, special=True)
    assert "<|end|>" not in end_texts(tokenizer)
    assert {"<|return|>", "<|call|>", "<|im_end|>"} <= set(end_texts(tokenizer))


def test_the_built_in_model_has_one(tokenizer: Any, tiny_model: Any) -> None:
    assert turn_end_tokens(tiny_model, tokenizer) == {tokenizer.eos_token_id} == {1}
    assert tokenizer.pad_token_id not in turn_end_tokens(tiny_model, tokenizer)


def test_the_token_that_the_template_writes() -> None:
    tokenizer = make_tokenizer(CHATML.replace("<|im_end|>", "<|over|>"))
    assert closing_token(tokenizer) is None  # ordinary text
    over = add(tokenizer, "<|over|>", special=True)
    assert closing_token(tokenizer) == over
    assert turn_end_tokens(chat_model(tokenizer), tokenizer) == {ENDOFTEXT, IM_END, over}
    assert closing_token(make_tokenizer(CHATML)) == IM_END
    assert closing_token(make_tokenizer(UNCLOSED)) is closing_token(make_tokenizer(None)) is None
    assert closing_token(make_tokenizer("{{ raise_exception('never') }}")) is None


@pytest.mark.parametrize("token", [ENDOFTEXT, IM_END, IM_START])
def test_both_engines_end_a_turn_at_every_end_token(token: int) -> None:
    tokenizer = make_tokenizer()
    assert tokenizer.eos_token == "<|im_end|>"
    model = chat_model(tokenizer)
    always_write(model, token)
    engine = LocalEngine(model, tokenizer, max_num_seqs=1, kv_cache_tokens=256, threaded=False)
    params = SamplingParams(4, temperature=0.0)
    local = asyncio.run(engine.generate([IM_START, 30, 31], params))
    partial = CompletionBuilder(model, tokenizer, 4).start([IM_START, 30, 31], params, None)
    while partial.finish is None:
        partial.add(SampledToken(token, -0.1, (-0.1,)))
    expected = ((token,) * 4, "length") if token == IM_START else ((token,), "eos")
    assert (local.tokens, local.finish) == (tuple(partial.tokens), partial.finish) == expected


@pytest.mark.parametrize("special", [True, False])
def test_special_tokens_can_be_part_of_a_call(special: bool) -> None:
    tokenizer: PreTrainedTokenizerFast = make_tokenizer()
    opening, closing = (add(tokenizer, text, special) for text in ("<call>", "</call>"))
    inside = tokenizer("{}", add_special_tokens=False)["input_ids"]
    finder = StopFinder(tokenizer, ("</call>",))
    assert finder.find([opening, *inside]) is None
    assert finder.find([opening, *inside, closing]) == "</call>"
    assert not {opening, closing} & turn_end_tokens(chat_model(tokenizer), tokenizer)
