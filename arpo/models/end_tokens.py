"""The tokens at which a model ends its turn.

A model may have several, and its files need not name them all: a chat model of the Qwen family declares `<|im_end|>`,
and where it samples `<|endoftext|>` it goes on with another document. So all control tokens count that are known to
end a turn or a text. An ordinary token never does, whatever its text. `arpo.agent.turn_end` adds the token that the
chat template writes at the end of a message.
"""

from __future__ import annotations

from typing import Any

END_TEXTS = frozenset(
    {
        *("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "<|end|>", "<EOT>"),
        *("<|eot_id|>", "<|eom_id|>", "<|eot|>", "<|eom|>", "<end_of_turn>", "<turn|>", "<|END_OF_TURN_TOKEN|>"),
        *("<|return|>", "<|call|>", "<|tool_response>", "<|observation|>"),
        *("<\uff5cend\u2581of\u2581sentence\uff5c>", "<|end\u2581of\u2581sentence|>"),
    }
)
"""Well-known texts of tokens that end a turn or a text. They count only where they are control tokens."""


def end_texts(tokenizer: Any) -> tuple[str, ...]:
    """The texts of the tokenizer's control tokens that end a turn."""
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    special |= set(tokenizer.all_special_tokens)
    if {"<|return|>", "<|call|>"} <= special:
        special.discard("<|end|>")  # of the harmony format: ends one of several messages in a turn
    eos = tokenizer.eos_token
    return tuple(sorted({*(special & END_TEXTS), *([eos] if isinstance(eos, str) else [])}))


def end_tokens(model: Any, tokenizer: Any) -> frozenset[int]:
    """The ids of the generation config, the tokenizer's eos, and all control tokens that are known to end a turn."""
    declared = getattr(model.generation_config, "eos_token_id", None)
    ids = declared if isinstance(declared, list | tuple) else [declared]
    known = [tokenizer.convert_tokens_to_ids(text) for text in end_texts(tokenizer)]
    return frozenset(int(token) for token in (*ids, tokenizer.eos_token_id, *known) if token is not None)
