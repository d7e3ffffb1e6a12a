"""The shape of a model: layers, hidden size, heads, vocabulary, and the counts that follow from them.

    shape = find_shape("14B")                    # or a directory with a Hugging Face config.json

Counts are those of decoder-only models with gated feed-forward layers (Llama, Qwen 2 and 3). Biases and norms, less
than 0.1 % of the parameters, are left out. Mixture-of-experts models are refused.
"""

from __future__ import annotations

import json
import math
from contextlib import suppress
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache

from arpo.config.files import expand_user
from arpo.errors import ArpoError
from arpo.models.checks import check_sizes, read_object
from arpo.models.gguf_file import read_gguf


@dataclass(frozen=True, slots=True)
class Shape:
    """A model's architecture in numbers."""

    name: str
    layers: int
    hidden: int  # hidden size
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int  # intermediate size of the feed-forward layers
    vocab: int
    tied: bool  # whether the input embedding is also the output layer

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return attention + 3 * self.hidden * self.intermediate

    @property
    def parameters(self) -> int:
        """All parameters."""
        return self.matmul_parameters + (0 if self.tied else self.vocab * self.hidden)

    @property
    def matmul_parameters(self) -> int:
        """Parameters that every token is multiplied with: all but an untied input embedding."""
        return self.layers * self.layer_parameters + self.vocab * self.hidden

    @property
    def kv_size(self) -> int:
        """Numbers in the KV cache for each token, over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim

    def kv_size_per_gpu(self, tensor_parallel: int) -> int:
        """The same on each GPU of a replica; a head is never divided."""
        return self.kv_size // self.kv_heads * math.ceil(self.kv_heads / tensor_parallel)

    def forward_flops(self, context: float) -> float:
        """FLOPs to compute one token that attends to `context` others."""
        return 2 * self.matmul_parameters + 4 * self.layers * self.heads * self.head_dim * context

    def adapter_parameters(self, rank: int) -> int:
        """Parameters of a LoRA adapter of this rank on all linear layers."""
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        sides = 2 * (self.hidden + query) + 2 * (self.hidden + key) + 3 * (self.hidden + self.intermediate)
        return self.layers * rank * sides


# From the models' published configurations.
SHAPES = {
    shape.name.lower(): shape
    for shape in (
        Shape("SmolLM2-135M", 30, 576, 9, 3, 64, 1536, 49152, True),
        Shape("Qwen2.5-0.5B", 24, 896, 14, 2, 64, 4864, 151936, True),
        Shape("Qwen2.5-1.5B", 28, 1536, 12, 2, 128, 8960, 151936, True),
        Shape("Qwen2.5-3B", 36, 2048, 16, 2, 128, 11008, 151936, True),
        Shape("Qwen2.5-7B", 28, 3584, 28, 4, 128, 18944, 152064, False),
        Shape("Llama-3.1-8B", 32, 4096, 32, 8, 128, 14336, 128256, False),
        Shape("Qwen3-8B", 36, 4096, 32, 8, 128, 12288, 151936, False),
        Shape("Qwen3-14B", 40, 5120, 40, 8, 128, 17408, 151936, False),
        Shape("Qwen3-32B", 64, 5120, 64, 8, 128, 25600, 151936, False),
        Shape("Llama-3.1-70B", 80, 8192, 64, 8, 128, 28672, 128256, False),
    )
}
SIZES = {shape.name.rpartition("-")[2]: shape.name for shape in SHAPES.values()}  # of two models of a size, the last


def find_shape(model: str) -> Shape:
    """The shape of a model by size (14B), by name (Qwen3-14B, Qwen/Qwen3-14B), or from its directory or GGUF file."""
    if model == "tiny":
        text = resources.files("arpo").joinpath("builtin", "base", "config.json").read_text(encoding="utf-8")
        return shape_from_config("tiny", json.loads(text))
    sizes = {size.lower(): name for size, name in SIZES.items()}
    name = sizes.get(model.lower(), model).lower().rpartition("/")[2].removesuffix("-instruct")
    name = name.replace("qwen2.5-coder-", "qwen2.5-")  # the same shapes
    if name in SHAPES:
        return SHAPES[name]
    path = expand_user(model)
    if path.suffix == ".gguf" and path.is_file():
        return _shape_from_gguf(path)
    path = path / "config.json" if path.is_dir() else path
    cached = None if path.exists() else _cached_config(model)
    path = path if cached is None else cached
    if path.name != "config.json" or not path.is_file():
        raise ArpoError(
            f"{model}: the shape of this model is not known; give --model one of {', '.join(SIZES)}, a name like "
            "Qwen3-14B, or a directory with a Hugging Face config.json"
        )
    try:
        values = read_object(path)
    except (OSError, ValueError) as error:
        raise ArpoError(f"{path}: cannot be read: {error}") from None
    return shape_from_config(model if cached is not None else path.parent.name or model, values)


def _shape_from_gguf(path: Path) -> Shape:
    """The shape that the head of a GGUF file tells; its weights are not read."""
    try:
        file = read_gguf(path)
        family = file.string("general.architecture")

        def integer(key: str, default: int | None = None) -> int:
            return file.integer(f"{family}.{key}", default)

        hidden, heads = integer("embedding_length"), integer("attention.head_count")
        return Shape(
            path.stem,
            layers=integer("block_count"),
            hidden=hidden,
            heads=heads,
            kv_heads=integer("attention.head_count_kv", heads),
            head_dim=integer("attention.key_length", hidden // heads),
            intermediate=integer("feed_forward_length"),
            vocab=file.tensors["token_embd.weight"].shape[0],
            tied="output.weight" not in file.tensors,
        )
    except (OSError, ValueError, KeyError) as error:
        raise ArpoError(f"{path}: its shape cannot be read: {error}") from None


def _cached_config(model: str) -> Path | None:
    """The config.json of a model of the hub, if it was downloaded before."""
    with suppress(ValueError):  # no name that the hub could have
        found = try_to_load_from_cache(model, "config.json")
        return Path(found) if isinstance(found, str) else None
    return None


def shape_from_config(name: str, config: Any) -> Shape:
    """The shape in a Hugging Face config.json."""
    if not isinstance(config, dict):
        raise ArpoError(f"{name}: config.json holds no model settings")
    if any(config.get(key) for key in ("num_experts", "num_local_experts", "n_routed_experts")):
        raise ArpoError(f"{name}: mixture-of-experts models are not supported by arpo plan")
    try:
        check_sizes(config)
        hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
        return Shape(
            name,
            layers=int(config["num_hidden_layers"]),
            hidden=hidden,
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or hidden // heads),
            intermediate=int(config["intermediate_size"]),
            vocab=int(config["vocab_size"]),
            tied=bool(config.get("tie_word_embeddings", False)),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ArpoError(f"{name}: config.json is not that of a decoder-only model: {error}") from None
