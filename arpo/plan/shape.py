"""The size of a model: layers, widths, heads, vocabulary, and what follows from them.

Counts are those of decoder-only models with gated feed-forward layers (Llama, Qwen 2 and 3); biases and norms, well
below 0.1 %, are left out. Mixtures of experts are not covered and refused.

    shape = find_shape("14B")                    # or a directory with a Hugging Face config.json
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from arpo.errors import ArpoError


@dataclass(frozen=True, slots=True)
class Shape:
    """A model's architecture in numbers."""

    name: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    head: int  # width of a head
    inner: int  # width of the feed-forward layers
    vocabulary: int
    tied: bool  # whether the input embedding is the output layer

    @property
    def layer_weights(self) -> int:
        """Weights of one layer."""
        attention = self.width * self.head * (2 * self.heads + 2 * self.kv_heads)
        return attention + 3 * self.width * self.inner

    @property
    def parameters(self) -> int:
        """All weights."""
        return self.matrix_weights + (0 if self.tied else self.vocabulary * self.width)

    @property
    def matrix_weights(self) -> int:
        """Weights that every token is multiplied with: all but an input embedding of its own."""
        return self.layers * self.layer_weights + self.vocabulary * self.width

    @property
    def kv_numbers(self) -> int:
        """Numbers kept for each token: keys and values of all layers."""
        return 2 * self.layers * self.kv_heads * self.head

    def kv_on_each(self, ways: int) -> int:
        """How many of these are on each of so many GPUs that share the model: a head is never divided."""
        return self.kv_numbers // self.kv_heads * math.ceil(self.kv_heads / ways)

    def forward_flops(self, context: float) -> float:
        """FLOPs to compute one token that sees `context` others."""
        return 2 * self.matrix_weights + 4 * self.layers * self.heads * self.head * context

    def adapter(self, rank: int) -> int:
        """Weights of a LoRA adapter of this rank on all linear layers."""
        query, key = self.heads * self.head, self.kv_heads * self.head
        sides = 2 * (self.width + query) + 2 * (self.width + key) + 3 * (self.width + self.inner)
        return self.layers * rank * sides


# The configurations that were published with the models.
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
SIZES = {
    "135M": "SmolLM2-135M",
    "0.5B": "Qwen2.5-0.5B",
    "1.5B": "Qwen2.5-1.5B",
    "3B": "Qwen2.5-3B",
    "7B": "Qwen2.5-7B",
    "8B": "Qwen3-8B",
    "14B": "Qwen3-14B",
    "32B": "Qwen3-32B",
    "70B": "Llama-3.1-70B",
}


def find_shape(model: str) -> Shape:
    """The shape of a model by size (14B), name (Qwen3-14B, Qwen/Qwen3-14B), or from its directory."""
    if model == "tiny":
        text = resources.files("arpo.builtin").joinpath("base", "config.json").read_text(encoding="utf-8")
        return shape_of("tiny", json.loads(text))
    sizes = {size.lower(): name for size, name in SIZES.items()}
    name = sizes.get(model.lower(), model).lower().rpartition("/")[2].removesuffix("-instruct")
    name = name.replace("qwen2.5-coder-", "qwen2.5-")  # the same shapes
    if name in SHAPES:
        return SHAPES[name]
    path = Path(model).expanduser()
    path = path / "config.json" if path.is_dir() else path
    if path.name != "config.json" or not path.is_file():
        raise ArpoError(
            f"{model}: its shape is not known; give --model one of {', '.join(SIZES)}, a name like Qwen3-14B, "
            "or a directory with a Hugging Face config.json"
        )
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ArpoError(f"{path}: cannot be read: {error}") from None
    return shape_of(path.parent.name or model, values)


def shape_of(name: str, config: Any) -> Shape:
    """The shape that a Hugging Face configuration tells."""
    if not isinstance(config, dict):
        raise ArpoError(f"{name}: config.json holds no settings of a model")
    if any(config.get(key) for key in ("num_experts", "num_local_experts", "n_routed_experts")):
        raise ArpoError(f"{name}: mixtures of experts are not covered by the plan")
    try:
        width, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
        return Shape(
            name,
            int(config["num_hidden_layers"]),
            width,
            heads,
            int(config.get("num_key_value_heads") or heads),
            int(config.get("head_dim") or width // heads),
            int(config["intermediate_size"]),
            int(config["vocab_size"]),
            bool(config.get("tie_word_embeddings", False)),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ArpoError(f"{name}: its config.json is not that of a decoder-only model: {error}") from None
