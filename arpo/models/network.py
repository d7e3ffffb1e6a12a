"""The parts of a Hugging Face causal LM that trainer and engine share: which families are supported, how attention is
replaced, and how the decoder and the output layer are called.

`install_attention` makes a model call `_attention` below. With an `attention_plan=` among the keyword arguments of the
forward pass, the plan computes attention; without one, the model does what it did before. A forward pass with a plan is
one flat row of tokens [1, T], whichever sequences they belong to.

Shape suffixes: T tokens, A selected tokens, E hidden size, V vocabulary, H key/value heads, G query heads per key/value
head, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from arpo.errors import ArpoError
from arpo.models.vision import vision_tower

SUPPORTED_FAMILIES = ("llama", "qwen2", "qwen3", "gemma3_text")
SUPPORTED_LAYERS = ("full_attention", "sliding_attention")
MASKED = -1e30  # score of a masked key in attention; finite, so that nothing becomes NaN
SHARDED_DECODER = "sharded_decoder"  # attribute of a sharded model: the method that calls its decoder


class AttentionPlan(Protocol):
    """Attention of one forward pass, used by every layer."""

    def attend(
        self, layer: int, q_THGD: Tensor, k_THD: Tensor, v_THD: Tensor, scaling: float, window: int | None
    ) -> Tensor:
        """Return the attention output [T, H, G, D] of the new tokens, given their queries, keys and values."""
        ...


class Network:
    """Decoder and output layer of a causal LM, called on one flat row of tokens."""

    def __init__(self, model: Any) -> None:
        self._decoder = getattr(model, SHARDED_DECODER, None) or model.get_decoder()
        self._embedding, self._head = model.get_input_embeddings(), model.get_output_embeddings()
        self._tower = vision_tower(model)
        self._softcap = getattr(model.config, "final_logit_softcapping", None)
        self._no_mask = torch.empty(1, 1, 1, 1, device=model.device)  # a 4-d mask stops transformers from building one

    def hidden(self, tokens_T: Tensor, position_T: Tensor, plan: AttentionPlan, has_images: bool = True) -> Tensor:
        """Return the last hidden states [T, E]. Only if it `has_images` may a row hold virtual ids."""
        out = self._decoder(
            **self._inputs(tokens_T, has_images),
            position_ids=position_T.unsqueeze(0),
            attention_mask=self._no_mask,
            use_cache=False,
            attention_plan=plan,
        )
        return out.last_hidden_state[0]  # type: ignore[no-any-return]

    def _inputs(self, tokens_T: Tensor, has_images: bool) -> dict[str, Tensor]:
        """Ids, or embeddings where some are those of an image (`arpo.models.vision`)."""
        if self._tower is None or not has_images or not bool((tokens_T >= self._tower.vocab_size).any()):
            return {"input_ids": tokens_T.unsqueeze(0)}
        return {"inputs_embeds": self._tower.embed(tokens_T, self._embedding).unsqueeze(0)}

    def logits(self, hidden_AE: Tensor) -> Tensor:
        """Return the logits [A, V] of these hidden states."""
        logits_AV: Tensor = self._head(hidden_AE)
        return logits_AV if self._softcap is None else torch.tanh(logits_AV / self._softcap) * self._softcap


def install_attention(model: Any) -> None:
    """Make the model's attention use an `attention_plan=` where one is passed."""
    before = model.config._attn_implementation or "eager"
    if before.startswith("arpo-"):
        return
    name = f"arpo-{before}"
    if name not in ALL_ATTENTION_FUNCTIONS:
        AttentionInterface.register(name, partial(_attention, ALL_ATTENTION_FUNCTIONS.get(before)))
        AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[before])
    model.config._attn_implementation = name


def _attention(
    original: Callable[..., Any] | None,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    attention_plan: AttentionPlan | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    if attention_plan is None:
        if original is None:  # eager attention is a function in each model's own file
            original = __import__(type(module).__module__, fromlist=["_"]).eager_attention_forward
        return original(  # type: ignore[no-any-return]
            module, query, key, value, attention_mask, scaling=scaling, sliding_window=sliding_window, **kwargs
        )
    heads = key.shape[1]
    q_THGD = query[0].view(heads, -1, *query.shape[2:]).permute(2, 0, 1, 3)
    k_THD, v_THD = key[0].transpose(0, 1), value[0].transpose(0, 1)
    out_THGD = attention_plan.attend(module.layer_idx, q_THGD, k_THD, v_THD, scaling, sliding_window)
    return out_THGD.flatten(1, 2).unsqueeze(0), None


def check_supported(config: Any) -> None:
    """Raise if the model's architecture is not one that is computed exactly here."""
    layers = {*(getattr(config, "layer_types", None) or ["full_attention"])}
    if config.model_type not in SUPPORTED_FAMILIES or not layers <= {*SUPPORTED_LAYERS}:
        raise ArpoError(
            f"the local engine cannot run a {config.model_type!r} model with layers {sorted(layers)}: "
            f"it supports {', '.join(SUPPORTED_FAMILIES)} with full or sliding attention"
        )
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = {rope.get("rope_type")} | {part.get("rope_type") for part in rope.values() if isinstance(part, dict)}
    if kinds & {"dynamic", "longrope"}:
        raise ArpoError(
            "the local engine cannot run models whose rotary embedding changes with the length (dynamic RoPE)"
        )
    if getattr(config, "use_bidirectional_attention", False) or getattr(config, "attn_logit_softcapping", None):
        raise ArpoError("the local engine cannot run models with bidirectional attention or capped attention scores")
