"""Tiny random models that see, as Hugging Face directories, and pictures for them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoModelForImageTextToText, Idefics3Config, SmolVLMConfig
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from arpo.data.images import encode_image, open_image, require_pillow
from arpo.types import Image, Node

SIDE, PATCH, SCALE = 8, 2, 2  # a tile of 4 x 4 patches becomes 2 x 2 tokens
TILE_TOKENS = 4
IMAGE_TEXTS = ("<fake_token_around_image>", "<image>", "<global-img>", "<end_of_utterance>")
GRID_TEXTS = tuple(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7))


def picture(seed: int, width: int = 6, height: int = 6) -> Image:
    """A picture of random pixels."""
    noise = torch.randint(0, 256, (height * width * 3,), generator=torch.Generator().manual_seed(seed))
    return encode_image(require_pillow().frombytes("RGB", (width, height), bytes(noise.tolist())))


def save_seeing_model(
    directory: Path,
    tokenizer: Any,
    kind: str = "idefics3",
    *,
    split: bool = False,
    tied: bool = False,
    context: int = 320,
    seed: int = 0,
) -> Path:
    """Write a model of a few thousand weights; `split` ones cut each picture into 2 x 2 tiles or fewer."""
    if "<image>" not in tokenizer.get_vocab():
        tokenizer.add_special_tokens({"additional_special_tokens": [*IMAGE_TEXTS, *GRID_TEXTS]})
    text = {
        "model_type": "llama",
        "vocab_size": len(tokenizer),
        "hidden_size": 24,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": context,
        "initializer_range": 0.3,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": 0,
    }
    vision = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": SIDE,
        "patch_size": PATCH,
        "initializer_range": 0.3,
    }
    build = {"idefics3": Idefics3Config, "smolvlm": SmolVLMConfig}[kind]
    config = build(
        text_config=text,
        vision_config=vision,
        scale_factor=SCALE,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        tie_word_embeddings=tied,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("bias") or parameter.std() == 0:
                    parameter.normal_(std=0.5)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    processors = {"idefics3": Idefics3ImageProcessorPil, "smolvlm": SmolVLMImageProcessorPil}
    processors[kind](
        size={"longest_edge": 2 * SIDE if split else SIDE},
        max_image_size={"longest_edge": SIDE},
        do_image_splitting=split,
    ).save_pretrained(directory)
    return directory


class PlainSeeing:
    """The whole model as transformers compute it, on token ids and the pictures that belong to them.

    It stands for a model in the oracles: called with the ids of a trajectory, it returns logits. Which pictures belong
    to a trajectory is told before (`show`). Shares no code with `arpo.models.vision`.
    """

    def __init__(self, directory: Path, dtype: torch.dtype = torch.float32) -> None:
        self.full = AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32).to(dtype).eval()
        kinds = {"idefics3": Idefics3ImageProcessorPil, "smolvlm": SmolVLMImageProcessorPil}
        self.processor = kinds[self.full.config.model_type].from_pretrained(directory)
        self.device, self.shown = torch.device("cpu"), dict[tuple[int, ...], list[Node]]()

    def show(self, nodes: Sequence[Node]) -> tuple[int, ...]:
        """Remember the nodes of a trajectory; returns its ids."""
        tokens = tuple(token for node in nodes for token in node.tokens)
        self.shown[tokens] = list(nodes)
        return tokens

    def pixels(self, images: Sequence[Image]) -> dict[str, torch.Tensor]:
        """What the whole model takes of these pictures."""
        given = self.processor(images=[[open_image(image) for image in images]], return_tensors="pt")
        return {"pixel_values": given["pixel_values"], "pixel_attention_mask": given["pixel_attention_mask"]}

    def __call__(self, ids: torch.Tensor) -> Any:
        rows = []
        for node in self.shown[tuple(ids[0].tolist())]:
            tokens = torch.tensor(node.tokens, dtype=torch.long)
            embedded = self.full.get_input_embeddings()(tokens)
            if node.images:
                features = self.full.model.get_image_features(**self.pixels(node.images)).pooler_output
                places = (tokens == self.full.config.image_token_id).nonzero()[:, 0]
                embedded = embedded.index_put((places,), torch.cat(list(features)))
            rows.append(embedded)
        hidden = self.full.model.text_model(inputs_embeds=torch.cat(rows)[None], use_cache=False).last_hidden_state
        return SimpleNamespace(logits=self.full.lm_head(hidden))
