"""Loading a model and its tokenizer from one GGUF file: the families of Llama (SmolLM2 too), Qwen2, Qwen3 and Gemma 3.

What comes back is an ordinary dense Hugging Face model with its tokenizer, which can be trained and saved. The file is
data, read by `gguf_file` within bounds; names, shapes and settings must be exactly those that the family has. What is
not known (a pre-tokenizer, a kind of rope scaling, a tensor, a setting of the architecture) is refused by its name
rather than loaded wrongly.

Does not cover: other architectures, experts, models in several files, GGUF adapters, big-endian files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
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

from arpo.errors import ArpoError
from arpo.models.gguf_file import Array, GgufFile, read_gguf
from arpo.models.gguf_tokenizer import read_tokenizer, special_ids, turn_ends

_CLASSES: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "gemma3": (Gemma3TextConfig, Gemma3ForCausalLM),
}
_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_BLOCK = {
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
_GEMMA_BLOCK = _BLOCK | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_KEYS = {
    *("context_length", "block_count", "embedding_length", "feed_forward_length", "vocab_size"),
    *("attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length"),
    *("attention.layer_norm_rms_epsilon", "rope.freq_base", "rope.dimension_count", "rope.scaling.type"),
    *("rope.scaling.factor", "rope.scaling.original_context_length", "rope.scaling.finetuned"),
}
_GEMMA_KEYS = {"attention.sliding_window", "attention.sliding_window_pattern", "rope.freq_base_swa"}
_ROWS = 4096  # dequantised at a time where a whole matrix is not needed


def load_gguf(path: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    """The causal LM in a GGUF file, dequantised to `dtype`, and its tokenizer."""
    try:
        import gguf  # noqa: F401
    except ImportError:
        raise ArpoError("model.path: a GGUF file needs one more package: pip install 'arpo[gguf]'") from None
    try:
        file = read_gguf(path)
        tokenizer = read_tokenizer(file)
        model = _model(file, dtype)
    except (OSError, ValueError) as error:
        raise ArpoError(f"model.path: {str(path)!r} could not be loaded: {error}") from error
    model.generation_config.eos_token_id = turn_ends(tokenizer)
    return model, tokenizer


def _model(file: GgufFile, dtype: torch.dtype) -> Any:
    family = file.word("general.architecture")
    if family not in _CLASSES:
        raise ValueError(f"its architecture is {family!r}; supported are {', '.join(_CLASSES)}")
    tied, head = _tied(file)
    config = _config(file, family, tied)
    names = _names(file, family, config)
    state: dict[str, torch.Tensor] = {}
    for target, source in names.items():
        numbers = file.numbers(head if source == "token_embd.weight" and tied else source)
        if family == "llama" and ".self_attn.q_proj." in target:
            numbers = _half_by_half(numbers, config.num_attention_heads)
        elif family == "llama" and ".self_attn.k_proj." in target:
            numbers = _half_by_half(numbers, config.num_key_value_heads)
        elif family == "gemma3" and target.endswith("norm.weight"):
            numbers = numbers - np.float32(1)  # the file has what is multiplied, the model adds 1 itself
        state[target] = torch.from_numpy(numbers).to(dtype)
    return _CLASSES[family][1].from_pretrained(None, config=config, state_dict=state, dtype=dtype)


def _tied(file: GgufFile) -> tuple[bool, str]:
    """Whether input and output embeddings are one matrix, and the tensor that has it best.

    A file has no flag for it. Without an output matrix they are one; with one, they are if the two are no further apart
    than the rounding of the coarser one explains.
    """
    known = [name for name in ("token_embd.weight", "output.weight") if name in file.tensors]
    if len(known) < 2:
        return True, "token_embd.weight"
    best = max(known, key=lambda name: (file.tensors[name].bits, name == "output.weight"))
    limit = min(0.5, max(2**-8, 4 * 2 ** -min(file.tensors[name].bits for name in known)))
    shapes = [file.tensors[name].shape for name in known]
    if shapes[0] != shapes[1] or len(shapes[0]) != 2:
        return False, best
    apart = size = 0.0
    for first in range(0, file.tensors[best].shape[0], _ROWS):
        inputs, outputs = (file.numbers(name, first, first + _ROWS) for name in known)
        apart += float(np.square(inputs - outputs).sum())
        size += float(np.square(outputs).sum())
    return apart <= limit**2 * size, best


def _config(file: GgufFile, family: str, tied: bool) -> Any:
    meta = file.meta
    known = _KEYS | _GEMMA_KEYS if family == "gemma3" else _KEYS
    unknown = [key for key in meta if key.startswith(f"{family}.") and key.partition(".")[2] not in known]
    if unknown:
        raise ValueError(f"it has {unknown[0]!r}, which is not supported")

    def whole(key: str, default: int | None = None) -> int:
        return file.whole(f"{family}.{key}", default)

    hidden, heads = whole("embedding_length"), whole("attention.head_count")
    head_size = whole("attention.key_length", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if whole(key, head_size) != head_size:
            raise ValueError(f"its {family}.{key} is not the size of a head, {head_size}")
    if whole("block_count") * len(_BLOCK) > 2 * len(file.tensors) or "token_embd.weight" not in file.tensors:
        raise ValueError("it lacks tensors")
    if heads % whole("attention.head_count_kv", heads):
        raise ValueError("its heads can't share keys and values evenly")
    settings: dict[str, Any] = dict(
        vocab_size=file.tensors["token_embd.weight"].shape[0],
        hidden_size=hidden,
        intermediate_size=whole("feed_forward_length"),
        num_hidden_layers=whole("block_count"),
        num_attention_heads=heads,
        num_key_value_heads=whole("attention.head_count_kv", heads),
        head_dim=head_size,
        max_position_embeddings=whole("context_length"),
        rms_norm_eps=file.real(f"{family}.attention.layer_norm_rms_epsilon"),
        rope_parameters=_rope(file, family, head_size),
        tie_word_embeddings=tied,
        **{f"{name}_token_id": special_ids(file).get(name) for name in ("bos", "eos", "pad")},
    )
    if family == "gemma3":
        settings |= _gemma_settings(file, settings)
    if len(file.items("tokenizer.ggml.tokens", str)) > settings["vocab_size"]:
        raise ValueError("it has more tokens than embeddings")
    try:
        return _CLASSES[family][0](**settings)
    except Exception as error:  # the classes of these errors differ between versions of transformers
        raise ValueError(f"its settings are impossible: {error}") from error


def _gemma_settings(file: GgufFile, settings: dict[str, Any]) -> dict[str, Any]:
    layers, hidden, heads = (settings[key] for key in ("num_hidden_layers", "hidden_size", "num_attention_heads"))
    windowed = "gemma3.attention.sliding_window" in file.meta
    window = file.whole("gemma3.attention.sliding_window") if windowed else None
    every = 1 if window is None else file.whole("gemma3.attention.sliding_window_pattern", 6)
    local = {"rope_type": "default", "rope_theta": file.real("gemma3.rope.freq_base_swa", 10000.0)}
    return {
        "layer_types": ["sliding_attention" if (i + 1) % every else "full_attention" for i in range(layers)],
        "sliding_window": window,
        "rope_parameters": {"full_attention": settings["rope_parameters"], "sliding_attention": local},
        # only the model with 62 layers divides by something else than the size of a head; no file says so
        "query_pre_attn_scalar": hidden // heads if layers == 62 else settings["head_dim"],
    }


def _rope(file: GgufFile, family: str, head_size: int) -> dict[str, Any]:
    meta = file.meta
    theta = file.real(f"{family}.rope.freq_base", 1_000_000.0 if family == "gemma3" else 10_000.0)
    scaling = meta.get(f"{family}.rope.scaling.type", "none")
    if "rope_freqs.weight" in file.tensors:
        if family != "llama" or scaling != "none":
            raise ValueError("its rope_freqs.weight is not supported")
        return _llama3_rope(file.numbers("rope_freqs.weight"), theta, head_size)
    if scaling == "linear":
        factor = file.real(f"{family}.rope.scaling.factor")
        return {"rope_type": "linear", "factor": factor, "rope_theta": theta}
    if scaling != "none":
        raise ValueError(f"its rope scaling is {scaling!r}; supported are none and linear")
    return {"rope_type": "default", "rope_theta": theta}


def _llama3_rope(factors: Array, theta: float, head_size: int) -> dict[str, Any]:
    """The rope settings of Llama 3.1 and later that give these factors; the file has only the factors."""
    context, low, high, factor = 8192, 1.0, 4.0, float(factors.max())
    turns = context / (2 * np.pi * theta ** (np.arange(0, head_size, 2) / head_size))
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    if factors.shape != turns.shape or not np.allclose(factors, 1 / ((1 - smooth) / factor + smooth), rtol=1e-4):
        raise ValueError("its rope_freqs.weight is not that of Llama 3, the only one supported")
    return {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": context,
    }


def _names(file: GgufFile, family: str, config: Any) -> dict[str, str]:
    """For each of the model's parameters its tensor in the file; all of them are there and have their shape."""
    with torch.device("meta"):
        shapes = {name: tuple(value.shape) for name, value in _CLASSES[family][1](config).state_dict().items()}
    block = _GEMMA_BLOCK if family == "gemma3" else _BLOCK
    names: dict[str, str] = {}
    for target, shape in shapes.items():
        if target == "lm_head.weight" and config.tie_word_embeddings:
            continue
        module, _, leaf = target.rpartition(".")
        if module.startswith("model.layers."):
            number, _, part = module.removeprefix("model.layers.").partition(".")
            source = f"blk.{number}.{block[part]}.{leaf}"
        else:
            source = f"{_TOP[module]}.{leaf}"
        if source not in file.tensors:
            raise ValueError(f"it lacks the tensor {source!r}")
        if file.tensors[source].shape != shape:
            raise ValueError(f"its tensor {source!r} has the shape {file.tensors[source].shape}, not {shape}")
        names[target] = source
    extra = file.tensors.keys() - names.values() - {"output.weight", "rope_freqs.weight"}
    if extra:
        raise ValueError(f"it has the tensor {min(extra)!r}, which the {family} family has not")
    return names


def _half_by_half(rows: Array, heads: int) -> Array:
    """Rows of a head in the order of Hugging Face: the file has the two halves of a rotation side by side."""
    pairs = rows.reshape(heads, -1, 2, *rows.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)
