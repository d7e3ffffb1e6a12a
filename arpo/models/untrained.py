"""Tokens that a model was never trained on.

A tokenizer may have tokens that training never met: in Qwen2.5-Coder `<tool_call>` and `</tool_call>` have the same
embedding, so the model can neither tell them apart nor choose between them.
"""

from __future__ import annotations

from itertools import combinations
from typing import Any

import torch

EQUAL = 0.9995  # cosine; the same rows differ a little when they were quantized


def untrained_tokens(model: Any, tokenizer: Any, text: str) -> tuple[str, ...]:
    """The added tokens in `text` whose embedding is that of another one in it, in the order of the text."""
    added = tokenizer.added_tokens_decoder
    ids = [token for token in dict.fromkeys(tokenizer.encode(text, add_special_tokens=False)) if token in added]
    rows = torch.nn.functional.normalize(model.get_input_embeddings().weight[ids].detach().float(), dim=-1)
    equal = {
        place
        for pair in combinations(range(len(ids)), 2)
        if float(rows[pair[0]] @ rows[pair[1]]) > EQUAL
        for place in pair
    }
    return tuple(added[ids[place]].content for place in sorted(equal))
