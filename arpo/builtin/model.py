"""The architecture of the built-in model: a small Llama with a small byte-level tokenizer, as Hugging Face objects.

The tokenizer covers any text. Every name word of the toy world (with its leading space) and every number below 100 is
one token, so a name is two tokens and a number is one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TAGS = tuple(f"<{slash}{tag}>" for tag in ("think", "search", "python", "result", "answer") for slash in ("", "/"))
SPECIALS = ("<|pad|>", "<|end|>", "<|user|>", "<|assistant|>")
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' %}<|user|> {{ m.content }}"
    "{% elif m.role == 'assistant' %}<|assistant|>{{ m.content }}"
    "{% elif m.role == 'system' %}{# the tools are learnt, not told #}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def build_tokenizer(texts: Iterable[str], max_vocab: int = 2048) -> Any:
    """Train the small tokenizer on `texts`. Its chat template contains only the question."""
    numbers = pre_tokenizers.Split(Regex(r"\p{N}{1,2}"), "isolated")
    trainer = {"vocab_size": max_vocab, "special_tokens": list(SPECIALS)}
    return train_tokenizer(texts, [numbers, pre_tokenizers.ByteLevel(add_prefix_space=False)], trainer, TAGS)


def train_tokenizer(
    texts: Iterable[str],
    splits: Sequence[Any],
    trainer: Mapping[str, Any],
    tags: Sequence[str],
    chat_template: str = CHAT_TEMPLATE,
) -> Any:
    """Train a byte-level tokenizer on `texts`, which these pre-tokenizers split; each of the tags is one token."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(list(splits))
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(texts, trainers.BpeTrainer(initial_alphabet=alphabet, show_progress=False, **trainer))
    core.add_tokens([AddedToken(tag, normalized=False) for tag in tags])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<|pad|>", eos_token="<|end|>")
    tokenizer.chat_template = chat_template
    return tokenizer


def build_model(tokenizer: Any, hidden: int, layers: int, max_context: int, seed: int) -> Any:
    """A randomly initialized Llama for `tokenizer`; the same seed gives the same weights."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=hidden * 8 // 3 // 16 * 16,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 32,
        max_position_embeddings=max_context,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def add_words(model: Any, tokenizer: Any, words: Mapping[str, str], seed: int) -> None:
    """Make each of these words one token; its embedding starts near that of the token it is mapped to."""
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in words])
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    table_VH = model.get_input_embeddings().weight.data
    like_W = [_single_token(tokenizer, word) for word in words.values()]
    noise_WH = torch.randn((len(words), table_VH.shape[1]), generator=torch.Generator().manual_seed(seed))
    table_VH[-len(words) :] = table_VH[like_W] + 0.3 * table_VH.std(dim=0) * noise_WH


def _single_token(tokenizer: Any, word: str) -> int:
    (token,) = tokenizer(word, add_special_tokens=False).input_ids
    return int(token)
