"""Loading a model and its tokenizer from one GGUF file: the families of Llama (SmolLM2 too), Qwen2, Qwen3 and Gemma 3.

The result is an ordinary dense Hugging Face model with its tokenizer, which can be trained and saved. Names, shapes and
settings in the file must be exactly those of the family. Anything unknown (a pre-tokenizer, a kind of rope scaling, a
tensor, a setting) is refused by name rather than loaded wrongly. That is why transformers' own GGUF loader is not used:
it ignores rope scaling and unknown settings, fills missing tensors with random numbers, and splits digits differently.

Not covered: other architectures, experts, split models, GGUF adapters, big-endian files.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from arpo.errors import ArpoError
from arpo.models.checks import require_memory
from arpo.models.end_tokens import end_tokens
from arpo.models.gguf_file import Array, GgufFile, read_gguf
from arpo.models.gguf_tokenizer import declared_end_ids, read_tokenizer, special_ids

_MODEL_TYPES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3": "gemma3_text"}
_KEYS = {
    *("context_length", "block_count", "embedding_length", "feed_forward_length", "vocab_size"),
    *("attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length"),
    *("attention.layer_norm_rms_epsilon", "rope.freq_base", "rope.dimension_count", "rope.scaling.type"),
    *("rope.scaling.factor", "rope.scaling.original_context_length", "rope.scaling.finetuned"),
}
_GEMMA_KEYS = {"attention.sliding_window", "attention.sliding_window_pattern", "rope.freq_base_swa"}
_CHUNK_ROWS = 4096  # rows dequantized at a time when two matrices are compared


def load_gguf(path: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    """Return the causal LM in a GGUF file, dequantized to `dtype`, and its tokenizer."""
    try:
        import gguf  # noqa: F401
    except ImportError:
        raise ArpoError("model.path: a GGUF file needs one more package: pip install gguf") from None
    try:
        file = read_gguf(path)
        tokenizer = read_tokenizer(file)
        model = _build_model(file, dtype)
        model.generation_config.eos_token_id = declared_end_ids(file)
    except (OSError, ValueError) as error:
        raise ArpoError(f"model.path: {str(path)!r} could not be loaded: {error}") from error
    model.generation_config.eos_token_id = sorted(end_tokens(model, tokenizer))
    return model, tokenizer


def _build_model(file: GgufFile, dtype: torch.dtype) -> Any:
    family = file.string("general.architecture")
    if family not in _MODEL_TYPES:
        raise ValueError(f"its architecture is {family!r}; supported are {', '.join(_MODEL_TYPES)}")
    tied, best_embeddings = _tied_embeddings(file)
    config = _build_config(file, family, tied)
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config)
    state: dict[str, torch.Tensor] = {}
    names = _tensor_names(file, family, skeleton)
    require_memory(sum(math.prod(file.tensors[name].shape) for name in names.values()), dtype, torch.device("cpu"))
    for parameter, name in names.items():
        values = file.dequantize(best_embeddings if name == "token_embd.weight" and tied else name)
        if family == "llama" and ".self_attn.q_proj." in parameter:
            values = _unpermute(values, config.num_attention_heads)
        elif family == "llama" and ".self_attn.k_proj." in parameter:
            values = _unpermute(values, config.num_key_value_heads)
        elif family == "gemma3" and parameter.endswith("norm.weight"):
            values = values - np.float32(1)  # the file stores 1 + weight, the model adds the 1 itself
        state[parameter] = torch.from_numpy(values).to(dtype)
    return type(skeleton).from_pretrained(None, config=config, state_dict=state, dtype=dtype)


def _tied_embeddings(file: GgufFile) -> tuple[bool, str]:
    """Return whether input and output embeddings are tied, and the tensor that stores them with most bits.

    A file has no flag for it. Without an output matrix they are tied; with one, they are tied if the two differ by no
    more than the quantization error of the coarser one.
    """
    names = [name for name in ("token_embd.weight", "output.weight") if name in file.tensors]
    if len(names) < 2:
        return True, "token_embd.weight"
    best = max(names, key=lambda name: (file.tensors[name].bits, name == "output.weight"))
    limit = min(0.5, max(2**-8, 4 * 2 ** -min(file.tensors[name].bits for name in names)))
    shapes = [file.tensors[name].shape for name in names]
    if shapes[0] != shapes[1] or len(shapes[0]) != 2:
        return False, best
    difference = norm = 0.0
    for first in range(0, file.tensors[best].shape[0], _CHUNK_ROWS):
        inputs, outputs = (file.dequantize(name, first, first + _CHUNK_ROWS) for name in names)
        difference += float(np.square(inputs - outputs).sum())
        norm += float(np.square(outputs).sum())
    return difference <= limit**2 * norm, best


def _build_config(file: GgufFile, family: str, tied: bool) -> Any:
    known = _KEYS | _GEMMA_KEYS if family == "gemma3" else _KEYS
    unknown = [key for key in file.metadata if key.startswith(f"{family}.") and key.partition(".")[2] not in known]
    if unknown:
        raise ValueError(f"it has {unknown[0]!r}, which is not supported")

    def integer(key: str, default: int | None = None) -> int:
        return file.integer(f"{family}.{key}", default)

    hidden, heads = integer("embedding_length"), integer("attention.head_count")
    head_dim = integer("attention.key_length", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if integer(key, head_dim) != head_dim:
            raise ValueError(f"its {family}.{key} is not the head dimension, {head_dim}")
    # A block has at least nine tensors; this bounds the model that is built before the names are compared.
    if integer("block_count") * 5 > len(file.tensors) or "token_embd.weight" not in file.tensors:
        raise ValueError("tensors are missing")
    if heads % integer("attention.head_count_kv", heads):
        raise ValueError(f"its {family}.attention.head_count is not a multiple of head_count_kv")
    settings: dict[str, Any] = dict(
        vocab_size=file.tensors["token_embd.weight"].shape[0],
        hidden_size=hidden,
        intermediate_size=integer("feed_forward_length"),
        num_hidden_layers=integer("block_count"),
        num_attention_heads=heads,
        num_key_value_heads=integer("attention.head_count_kv", heads),
        head_dim=head_dim,
        max_position_embeddings=integer("context_length"),
        rms_norm_eps=file.number(f"{family}.attention.layer_norm_rms_epsilon"),
        rope_parameters=_rope_parameters(file, family, head_dim),
        tie_word_embeddings=tied,
        **{f"{name}_token_id": special_ids(file).get(name) for name in ("bos", "eos", "pad")},
    )
    if family == "gemma3":
        settings |= _gemma_settings(file, settings)
    if len(file.array("tokenizer.ggml.tokens", str)) > settings["vocab_size"]:
        raise ValueError("it has more tokens than embeddings")
    try:
        return AutoConfig.for_model(_MODEL_TYPES[family], **settings)
    except Exception as error:  # the classes of these errors differ between versions of transformers
        raise ValueError(f"its settings are invalid: {error}") from error


def _gemma_settings(file: GgufFile, settings: dict[str, Any]) -> dict[str, Any]:
    layers, hidden, heads = (settings[key] for key in ("num_hidden_layers", "hidden_size", "num_attention_heads"))
    windowed = "gemma3.attention.sliding_window" in file.metadata
    window = file.integer("gemma3.attention.sliding_window") if windowed else None
    period = 1 if window is None else file.integer("gemma3.attention.sliding_window_pattern", 6)
    sliding = {"rope_type": "default", "rope_theta": file.number("gemma3.rope.freq_base_swa", 10000.0)}
    return {
        "layer_types": ["sliding_attention" if (i + 1) % period else "full_attention" for i in range(layers)],
        "sliding_window": window,
        "rope_parameters": {"full_attention": settings["rope_parameters"], "sliding_attention": sliding},
        # The model with 62 layers is the only one that does not scale by the head dimension; no file says so.
        "query_pre_attn_scalar": hidden // heads if layers == 62 else settings["head_dim"],
    }


def _rope_parameters(file: GgufFile, family: str, head_dim: int) -> dict[str, Any]:
    theta = file.number(f"{family}.rope.freq_base", 1_000_000.0 if family == "gemma3" else 10_000.0)
    scaling = file.metadata.get(f"{family}.rope.scaling.type", "none")
    if "rope_freqs.weight" in file.tensors:
        if family != "llama" or scaling != "none":
            raise ValueError("its rope_freqs.weight is not supported")
        return _llama3_rope(file.dequantize("rope_freqs.weight"), theta, head_dim)
    if scaling == "linear":
        factor = file.number(f"{family}.rope.scaling.factor")
        return {"rope_type": "linear", "factor": factor, "rope_theta": theta}
    if scaling != "none":
        raise ValueError(f"its rope scaling is {scaling!r}; supported are none and linear")
    return {"rope_type": "default", "rope_theta": theta}


def _llama3_rope(factors: Array, theta: float, head_dim: int) -> dict[str, Any]:
    """Return the rope parameters of Llama 3.1 and later that give these factors, which are all that the file has."""
    context, low, high, factor = 8192, 1.0, 4.0, float(factors.max())
    turns = context / (2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim))
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


def _tensor_names(file: GgufFile, family: str, model: Any) -> dict[str, str]:
    """Return the tensor in the file for each of the model's parameters, checked for presence and shape."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    architecture = next(number for number, name in MODEL_ARCH_NAMES.items() if name == family)
    mapping = get_tensor_name_map(architecture, model.config.num_hidden_layers)
    names: dict[str, str] = {}
    for parameter, value in model.state_dict().items():
        if parameter == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        name = mapping.get_name(parameter, try_suffixes=(".weight", ".bias"))
        if name is None or name not in file.tensors:
            raise ValueError(f"it has no tensor {name or parameter!r}")
        if file.tensors[name].shape != tuple(value.shape):
            shapes = f"{file.tensors[name].shape}, not {tuple(value.shape)}"
            raise ValueError(f"its tensor {name!r} has the shape {shapes}")
        names[parameter] = name
    extra = file.tensors.keys() - names.values() - {"output.weight", "rope_freqs.weight"}
    if extra:
        raise ValueError(f"it has the tensor {min(extra)!r}, which the {family} family does not have")
    return names


def _unpermute(rows: Array, heads: int) -> Array:
    """Return the rows of each head in Hugging Face order: a GGUF file interleaves the two halves of a rotation."""
    pairs = rows.reshape(heads, -1, 2, *rows.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)
