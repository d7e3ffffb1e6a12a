"""Tiny random models of every family that the local engine supports, and their log-probs from plain forward passes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, Qwen2Config, Qwen3Config

VOCAB, CONTEXT, EOS, WINDOW = 41, 320, 1, 11
FAMILIES = ("llama", "llama-gqa", "smollm2", "qwen2", "qwen3", "gemma3")


class Letters:
    """A tokenizer of one character per token: token 2 is `<` , token 3 is `>`, the others are letters."""

    eos_token, eos_token_id = "$", EOS
    added_tokens_decoder: ClassVar[dict[int, Any]] = {}
    all_special_tokens = ("$",)
    alphabet = "~$<>" + "".join(map(chr, range(0x41, 0x41 + VOCAB - 4)))

    def __len__(self) -> int:
        return VOCAB

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str]:
        """The pieces of these tokens."""
        return [self.alphabet[i] for i in ids]

    def convert_tokens_to_ids(self, piece: str) -> int:
        """The token of a piece."""
        return self.alphabet.index(piece)

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        """Their text."""
        return "".join(self.convert_ids_to_tokens(ids))


def make_model(family: str, attention: str = "sdpa", seed: int = 0, context: int = CONTEXT) -> Any:
    """A model of a few thousand weights, large enough that a wrong position or mask changes every log-prob."""
    shape: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 24,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": context,
        "initializer_range": 0.3,
        "bos_token_id": None,
        "eos_token_id": EOS,
        "pad_token_id": 0,
        "attn_implementation": attention,
    }
    wide = {"head_dim": 8}
    configs: dict[str, Any] = {
        "llama": lambda: LlamaConfig(**shape, num_key_value_heads=4),
        "llama-gqa": lambda: LlamaConfig(**shape, num_key_value_heads=2),
        "smollm2": lambda: LlamaConfig(
            **{**shape, "num_attention_heads": 3, "num_key_value_heads": 1, "num_hidden_layers": 3},
            tie_word_embeddings=True,
            rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        ),
        "qwen2": lambda: Qwen2Config(**shape, num_key_value_heads=1, tie_word_embeddings=False),
        "qwen3": lambda: Qwen3Config(**shape, **wide, num_key_value_heads=2),
        "gemma3": lambda: Gemma3TextConfig(
            **{**shape, "num_hidden_layers": 3},
            **wide,
            num_key_value_heads=1,
            query_pre_attn_scalar=5,
            sliding_window=WINDOW,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            final_logit_softcapping=9.0,
        ),
    }
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(configs[family](), attn_implementation=attention)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("bias"):  # these start at zero, where forgetting them would not show
                    parameter.normal_(std=0.5)
    return model.eval()


def logits_of(model: Any, tokens: Sequence[int]) -> torch.Tensor:
    """Logits of one plain forward pass over a sequence; row i predicts token i + 1."""
    with torch.no_grad():
        return model(torch.tensor([list(tokens)], device=model.device)).logits[0].double().cpu()  # type: ignore[no-any-return]


def plain_numbers(
    model: Any, prefix: Sequence[int], sampled: Sequence[int], temperature: float
) -> tuple[list[float], list[float], list[int]]:
    """Log-probs, entropies and most likely tokens of a sampled turn, straight from the definitions."""
    logits = logits_of(model, [*prefix, *sampled])[len(prefix) - 1 : -1] / (temperature or 1.0)
    probs = logits.softmax(-1).tolist()
    logprobs = [math.log(row[token]) for row, token in zip(probs, sampled, strict=True)]
    entropies = [-sum(p * math.log(p) for p in row if p > 0) for row in probs]
    return logprobs, entropies, logits.argmax(-1).tolist()
