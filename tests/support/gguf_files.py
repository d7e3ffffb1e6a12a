"""Writing small GGUF files from Hugging Face models, as llama.cpp's converter does. Independent of the loader, so that
it can be checked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

FAMILIES = ("llama", "qwen2", "qwen3", "gemma3")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEXTS = [
    "The quick brown fox jumps over the lazy dog, and they're 12345 metres away in 2024; it's 3.14159.",
    "Where was Mira Tolven born? The birthplace of Mira Tolven is Upper Kelso.  Two  spaces.\n\n\tTabs\r\nline",
    "naïve café, Ångström, 日本語のテキスト, Привет мир, 1000000 2000000 1234 5678 90",
    "def f(x):\n    return x + 1\n        # deeper!\n\nNo!\n\n" * 3,
]


@dataclass(frozen=True)
class Vocabulary:
    """The part of a file that describes a tokenizer: its metadata without the prefix, each under `tokenizer.ggml.`."""

    tokens: list[str]
    kinds: list[int]
    values: Mapping[str, Any] = field(default_factory=dict)


def byte_level(pre: str, size: int = 420) -> Vocabulary:
    """A byte-level vocabulary with merges, trained here, after three special tokens and a user-defined one.

    Its merges know no bounds of words or numbers, so that every rule for cutting text shows.
    """
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(
        TEXTS, trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    )
    state = json.loads(core.to_str())["model"]
    words = sorted(state["vocab"], key=state["vocab"].__getitem__)
    tokens = [*SPECIALS, *words, "<tool_call>", "[PAD0]", "[PAD1]"]
    kinds = [3, 3, 3, *[1] * len(words), 4, 5, 5]
    merges = [" ".join(merge) for merge in state["merges"]]
    values = {"bos_token_id": 0, "eos_token_id": 2, "padding_token_id": 0}
    return Vocabulary(tokens, kinds, values | {"model": "gpt2", "pre": pre, "merges": merges})


def sentencepiece(prefix: bool, size: int = 160) -> Vocabulary:
    """A SentencePiece vocabulary: special tokens, bytes, then learnt pieces by falling score, and a run of spaces."""
    core = Tokenizer(models.BPE())
    texts = [text.replace(" ", "\u2581") for text in TEXTS[:2]]
    core.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=size, show_progress=False))
    words = sorted(core.get_vocab(), key=core.get_vocab().__getitem__)
    words = [word for word in words if word not in ("\n", "\t", "\r") and word != "\u2581\u2581"]
    words += [word for word in ("aa", "aaa", "aaaa") if word not in words]  # can be merged in several ways
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    head = ["<pad>", "<eos>", "<bos>", "<unk>", "<end_of_turn>"]
    tokens = [*head, *bytes_, "  ", *words]
    kinds = [3, 3, 3, 2, 3, *[6] * 256, 4, *[1] * len(words)]
    scores = [0.0] * (len(tokens) - len(words)) + [-float(rank) for rank in range(len(words))]
    values = {"bos_token_id": 2, "eos_token_id": 1, "unknown_token_id": 3, "padding_token_id": 0}
    values |= {"add_space_prefix": prefix, "add_bos_token": True}
    return Vocabulary(tokens, kinds, values | {"model": "llama", "scores": scores})


def small_model(family: str, vocab: int, seed: int = 0, **more: Any) -> Any:
    """A random model of a family, in which no two sizes that could be mixed up are the same."""
    sizes = {
        "vocab_size": vocab,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    sizes |= {"num_hidden_layers": 2, "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "tie_word_embeddings": True}
    sizes |= {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 0}
    rope = {"rope_type": "default", "rope_theta": 50000.0}
    torch.manual_seed(seed)
    if family == "llama":
        model = LlamaForCausalLM(LlamaConfig(**(sizes | {"rope_parameters": rope} | more)))
    elif family == "qwen2":
        model = Qwen2ForCausalLM(Qwen2Config(**(sizes | {"rope_parameters": rope} | more)))
    elif family == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**(sizes | {"rope_parameters": rope, "head_dim": 32} | more)))
    else:
        full = {"rope_type": "linear", "factor": 8.0, "rope_theta": 50000.0}
        local = {"rope_type": "default", "rope_theta": 10000.0}
        both = {"full_attention": full, "sliding_attention": local}
        sizes |= {"head_dim": 32, "num_hidden_layers": 7, "sliding_window": 4, "query_pre_attn_scalar": 32}
        sizes |= {"bos_token_id": 2, "eos_token_id": 1}
        model = Gemma3ForCausalLM(Gemma3TextConfig(**(sizes | {"rope_parameters": both} | more)))
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms too, or mixing them up would not show
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def tensors_of(family: str, model: Any) -> dict[str, np.ndarray[Any, Any]]:
    """The model's tensors under the names, and in the layout, of a GGUF file."""
    config = model.config
    found: dict[str, np.ndarray[Any, Any]] = {}
    for name, value in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        numbers = value.numpy().copy()
        if family == "llama" and "q_proj" in name:
            numbers = permuted(numbers, config.num_attention_heads)
        if family == "llama" and "k_proj" in name:
            numbers = permuted(numbers, config.num_key_value_heads)
        if family == "gemma3" and name.endswith("norm.weight"):
            numbers = numbers + 1
        found[tensor_name(family, name)] = numbers
    return found


TOP_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
BLOCK_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
GEMMA_NAMES = BLOCK_NAMES | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def tensor_name(family: str, parameter: str) -> str:
    """The name of a Hugging Face parameter in a GGUF file."""
    module, _, leaf = parameter.rpartition(".")
    if not module.startswith("model.layers."):
        return f"{TOP_NAMES[module]}.{leaf}"
    number, _, part = module.removeprefix("model.layers.").partition(".")
    return f"blk.{number}.{(GEMMA_NAMES if family == 'gemma3' else BLOCK_NAMES)[part]}.{leaf}"


def permuted(rows: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Rows as llama.cpp wants them for its kind of rope."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def settings_of(family: str, model: Any) -> dict[str, Any]:
    """The metadata of the architecture, without its prefix."""
    config = model.config
    values: dict[str, Any] = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
    }
    rope = config.rope_parameters
    if getattr(config, "head_dim", 16) * config.num_attention_heads != config.hidden_size:
        values |= {"attention.key_length": config.head_dim, "attention.value_length": config.head_dim}
    if family == "gemma3":
        rope = rope["full_attention"]
        values |= {"attention.sliding_window": config.sliding_window}
    if family == "llama":
        values |= {"rope.dimension_count": config.head_dim, "vocab_size": config.vocab_size}
    if rope["rope_type"] == "linear":
        values |= {"rope.scaling.type": "linear", "rope.scaling.factor": rope["factor"]}
    return values | {"rope.freq_base": rope["rope_theta"]}


def quantised(name: str, numbers: np.ndarray[Any, Any], kind: Kind) -> tuple[np.ndarray[Any, Any], Kind]:
    """The numbers as they are stored: matrices in `kind`, the rest in float32."""
    return (gguf.quantize(numbers, kind), kind) if numbers.ndim == 2 else (numbers, Kind.F32)


def write(
    path: Path,
    family: str,
    settings: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray[Any, Any]],
    vocabulary: Vocabulary,
    kind: Kind = Kind.F32,
    kinds: Mapping[str, Kind] | None = None,
    extra: Mapping[str, Any] | None = None,
) -> Path:
    """A GGUF file with these parts; `kind` is how matrices are stored, `kinds` how single ones are."""
    writer = gguf.GGUFWriter(path, family)
    values: dict[str, Any] = {f"{family}.{key}": value for key, value in settings.items()}
    values |= {f"tokenizer.ggml.{key}": value for key, value in vocabulary.values.items()}
    values |= {"tokenizer.chat_template": TEMPLATE, "general.name": "small"} | dict(extra or {})
    for key, value in values.items():
        if value is None:
            continue
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    writer.add_token_list(vocabulary.tokens)
    writer.add_array("tokenizer.ggml.token_type", vocabulary.kinds)
    for name, numbers in tensors.items():
        data, stored = quantised(name, numbers, (kinds or {}).get(name, kind))
        writer.add_tensor(name, data, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_model(path: Path, family: str, model: Any, vocabulary: Vocabulary, **more: Any) -> Path:
    """The GGUF file of a model."""
    return write(path, family, settings_of(family, model), tensors_of(family, model), vocabulary, **more)


def vocabulary_of(family: str) -> Vocabulary:
    """A vocabulary of the kind that the family has."""
    if family == "gemma3":
        return sentencepiece(prefix=False)
    return byte_level("smollm" if family == "llama" else "qwen2")
