"""Models that see: the vision tower of a SmolVLM or Idefics3 model, and images as ids of further embedding rows.

    model, tokenizer = load_model(...)              # a plain LlamaForCausalLM ...
    tower = vision_tower(model)                     # ... and its tower; None if the model cannot see
    tokens = tower.expand(tokenizer, image)         # what stands for an image in a node's tokens
    ids = tower.embed_ids(tokens, [image])          # the same as engine and trainer get it
    rows_TE = tower.embed(ids_T, embedding)         # what the decoder gets

Such a model is a causal LM of which some input embeddings are computed from images. Everything but those embeddings is
the text model's: positions, masks, gradients. The tower is frozen, and no submodule of the text model, so optimizers,
adapters and checkpoints of weights do not see it.

In a node's tokens, image positions hold the checkpoint's image token. Engine and trainer get *virtual ids* in their
place, from the size of the vocabulary on: each image (by the hash of its content) has a range of its own, as long as
something holds it, and no range is given twice. So whatever compares ids, like the prefix cache, tells images apart,
and needs not know of them.

Guarantees: the features of an image depend on nothing but the image; they are computed once and kept while there is
room (`FEATURE_BYTES`), and again under the same ids when they are needed later. Only nodes have images: an image token
that the model itself samples has its ordinary embedding.
Not covered: video; training the tower.
"""

from __future__ import annotations

import copy
import math
import threading
import weakref
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from arpo.data.images import open_image, require_pillow
from arpo.errors import ArpoError
from arpo.types import Image

VISION_FAMILIES = ("idefics3", "smolvlm")
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
TEMPLATE_FILE = "chat_template.json"  # in older directories, the chat template of the processor
FEATURE_BYTES = 1 << 30  # of features that are kept
IMAGE_BYTES = 1 << 28  # of images that are kept, beyond those that a tree or a task still holds
FORGET_AT = 4096  # known images: those that nothing holds are then forgotten, and again when the rest has doubled
MAX_SIDE = 4096  # of an image after resizing, in pixels; the image processors' own limit
MAX_TILES = 1024  # of an image
TILES_AT_ONCE = 16  # of one image in a pass of the encoder
T = TypeVar("T")
_TOWER = "_arpo_vision_tower"  # attribute of a text model

_THREE = "its positions have three dimensions (time, height, width), so a token's position is not its depth in the tree"
_BOTH = "the tokens of an image attend to each other in both directions, so attention is not causal"
_CROSS = "images enter through cross-attention layers, not as tokens"
_OTHER = "its images are not laid out as those of SmolVLM and Idefics3"
REFUSED = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen2_5_omni", "qwen3_omni_moe"), _THREE),
    **dict.fromkeys(("glm4v", "glm4v_moe", "ernie4_5_vl_moe", "qwen3_5", "qwen3_5_moe"), _THREE),
    **dict.fromkeys(("gemma3", "gemma3n", "gemma4", "paligemma"), _BOTH),
    **dict.fromkeys(("mllama", "idefics"), _CROSS),
    **dict.fromkeys(("llava", "llava_next", "llava_onevision", "idefics2", "internvl", "pixtral", "mistral3"), _OTHER),
}
"""Families of vision models that are not supported, and why."""


def refuse_family(config: dict[str, Any]) -> None:
    """Raise ValueError, with the reason, for a vision model of another family."""
    kind = config.get("model_type")
    if kind in VISION_FAMILIES:
        return
    reason = REFUSED.get(kind) if isinstance(kind, str) else None
    if reason is None and isinstance(config.get("vision_config"), dict):
        reason = _OTHER
    if reason is not None:
        raise ValueError(
            f"it is a {kind!r:.60} model, which sees images in a way that is not supported: {reason}; of the models "
            "that see, SmolVLM and Idefics3 are supported"
        )


def vision_tower(model: Any) -> VisionTower | None:
    """The tower of a model that was loaded with one; None if the model cannot see."""
    return getattr(model, _TOWER, None)


def attach_tower(model: Any, tower: VisionTower | None) -> None:
    """Let a text model see with this tower."""
    setattr(model, _TOWER, tower)


@dataclass(slots=True)
class _Known:
    """An image that has ids: the first of them, how many, and all objects with its content that something holds."""

    first: int
    count: int
    held: weakref.WeakValueDictionary[int, Image] = field(default_factory=weakref.WeakValueDictionary)


class _Recent(Generic[T]):
    """The values that were used last, as many as have `limit` bytes together, and at least one."""

    def __init__(self, limit: int) -> None:
        self.limit, self._size = limit, 0
        self._values: OrderedDict[str, tuple[T, int]] = OrderedDict()

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def get(self, name: str) -> T | None:
        """The value of this name, which is then the last one used."""
        if name not in self._values:
            return None
        self._values.move_to_end(name)
        return self._values[name][0]

    def put(self, name: str, value: T, size: int) -> None:
        """Store a value of so many bytes."""
        self._size -= self._values.pop(name, (value, 0))[1]
        self._values[name] = value, size
        self._size += size
        while self._size > self.limit and len(self._values) > 1:
            self._size -= self._values.popitem(last=False)[1][1]


class VisionTower:
    """Encoder, connector and image processor of a model that sees. `files` are the processor's, as they were read."""

    def __init__(self, full: Any, processor: Any, files: dict[str, bytes]) -> None:
        config = full.config
        self.image_token_id: int = config.image_token_id
        self.vocab_size: int = config.text_config.vocab_size
        vision = config.vision_config
        self.tile_tokens: int = (vision.image_size // vision.patch_size // config.scale_factor) ** 2
        self.files = files
        self._encoder = full.model.vision_model.requires_grad_(False).eval()
        self._connector = full.model.connector.requires_grad_(False).eval()
        self._processor = processor
        with torch.device("meta"):
            self._skeleton = type(full)(copy.deepcopy(config)).to(full.dtype)
        self._tied = full.lm_head.weight is full.get_input_embeddings().weight
        self._lock = threading.RLock()  # the event loop, the engine's thread and the trainer's use it; never for long
        self._encoding = threading.Lock()  # held while features are computed
        self._known: dict[str, _Known] = {}
        self._firsts: list[int] = []  # ascending
        self._names: list[str] = []  # of the same images
        self._next: int = self.vocab_size
        self._forget_at = FORGET_AT  # so many known images
        self._features: _Recent[Tensor] = _Recent(FEATURE_BYTES)
        self._kept: _Recent[Image] = _Recent(IMAGE_BYTES)
        self._grid = lru_cache(maxsize=4096)(self._compute_grid)
        self._expansions: dict[tuple[int, int], tuple[int, ...]] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> VisionTower:
        return self  # frozen, and its ids must stay the same

    def to(self, device: torch.device) -> VisionTower:
        """Move the weights; returns the tower."""
        for part in self.parts:
            part.to(device)
        return self

    @property
    def parts(self) -> tuple[Any, Any]:
        """The modules that hold its weights: encoder and connector."""
        return self._encoder, self._connector

    # --- images as tokens

    def expand(self, tokenizer: Any, image: Image) -> tuple[int, ...]:
        """The token ids that stand for an image in a node, as the model's own processor writes them."""
        grid = self._grid(image.width, image.height)
        if grid not in self._expansions:
            ids = tuple(tokenizer(self.expanded_text(image), add_special_tokens=False, verbose=False)["input_ids"])
            if ids.count(self.image_token_id) != self._num_rows(grid):
                raise ArpoError("the model's tokenizer does not write an image as the image tokens that stand for it")
            self._expansions[grid] = ids
        return self._expansions[grid]

    def expanded_text(self, image: Image) -> str:
        """The text of these tokens."""
        rows, columns = self._grid(image.width, image.height)
        tile, fake = "<image>" * self.tile_tokens, "<fake_token_around_image>"
        text = ""
        for row in range(1, rows + 1):
            text += "".join(f"{fake}<row_{row}_col_{column}>{tile}" for column in range(1, columns + 1)) + "\n"
        return f"{text}{chr(10) if rows else ''}{fake}<global-img>{tile}{fake}"

    def embed_ids(self, tokens: Sequence[int], images: Sequence[Image]) -> tuple[int, ...]:
        """A node's tokens with virtual ids at the places of its images."""
        if not images:
            return tuple(tokens)
        with self._lock:
            known = [self._register(image) for image in images]
        ids = [number for one in known for number in range(one.first, one.first + one.count)]
        places = [place for place, token in enumerate(tokens) if token == self.image_token_id]
        if len(places) != len(ids):
            raise ValueError(f"{len(places)} image tokens for {len(images)} images of {len(ids)} tokens")
        embedded = list(tokens)
        for place, number in zip(places, ids, strict=True):
            embedded[place] = number
        return tuple(embedded)

    @property
    def num_ids(self) -> int:
        """All ids below it are known: those of the vocabulary, and those of images so far."""
        return self._next

    def _register(self, image: Image) -> _Known:
        known = self._known.get(image.sha256)
        if known is None:
            if len(self._known) >= self._forget_at:
                self._forget()
            known = _Known(self._next, self._num_rows(self._grid(image.width, image.height)))
            self._known[image.sha256] = known
            self._firsts.append(known.first)
            self._names.append(image.sha256)
            self._next += known.count
        if image.data:
            known.held[id(image)] = image
            self._kept.put(image.sha256, image, len(image.data))
        elif not known.held and self._features.get(image.sha256) is None:
            raise ArpoError(
                "an image is known only by its hash, and its content is needed: trees that were read from a run "
                "directory, or sampled by another process, cannot be continued or trained on"
            )
        return known

    def _forget(self) -> None:
        """Drop the images that nothing can use any more; their ids are not given again."""
        self._known = {name: known for name, known in self._known.items() if known.held or name in self._features}
        self._firsts, self._names = [known.first for known in self._known.values()], [*self._known]
        self._forget_at = max(FORGET_AT, 2 * len(self._known))

    def _num_rows(self, grid: tuple[int, int]) -> int:
        return (grid[0] * grid[1] + 1) * self.tile_tokens

    def _compute_grid(self, width: int, height: int) -> tuple[int, int]:
        """Rows and columns of the tiles of an image, (0, 0) if it is not split, as the image processor says."""
        blank = require_pillow().new("RGB", (width, height))
        plain = {"do_rescale": False, "do_normalize": False, "return_row_col_info": True}
        found = self._processor(images=[[blank]], return_tensors="np", **plain)
        rows, columns = int(found["rows"][0][0]), int(found["cols"][0][0])
        if rows * columns > MAX_TILES:
            raise ArpoError(f"an image of {width} x {height} pixels becomes {rows * columns} tiles, over {MAX_TILES}")
        return rows, columns

    # --- features

    def embed(self, ids_T: Tensor, embedding: Any) -> Tensor:
        """The input embeddings [T, E] of ids: rows of the table, and features at virtual ids."""
        virtual_T = ids_T >= self.vocab_size
        rows_TE: Tensor = embedding(ids_T.masked_fill(virtual_T, self.image_token_id))
        if not bool(virtual_T.any()):
            return rows_TE
        features_VE = self._rows(ids_T[virtual_T].tolist()).to(rows_TE.device, rows_TE.dtype)
        return rows_TE.masked_scatter(virtual_T.unsqueeze(-1), features_VE)

    def _rows(self, ids: list[int]) -> Tensor:
        """The features of virtual ids, in their order."""
        parts: list[Tensor] = []
        start = 0
        with self._encoding:
            while start < len(ids):
                name, known = self._image_of(ids[start])
                stop = start + 1
                while stop < len(ids) and known.first <= ids[stop] < known.first + known.count:
                    stop += 1
                places = torch.tensor(ids[start:stop]) - known.first
                features_NE = self._image_features(name, known)
                parts.append(features_NE[places.to(features_NE.device)])
                start = stop
        return torch.cat(parts)

    def _image_of(self, number: int) -> tuple[str, _Known]:
        """The image that has this virtual id, and its name."""
        with self._lock:
            name = self._names[bisect_right(self._firsts, number) - 1]
            known = self._known[name]
        if not known.first <= number < known.first + known.count:
            raise RuntimeError("an image was forgotten, and is still being used")
        return name, known

    def _image_features(self, name: str, known: _Known) -> Tensor:
        with self._lock:
            features_NE = self._features.get(name)
            image = next(iter(known.held.values()), None)
        if features_NE is None:
            if image is None:
                raise RuntimeError("the content of an image is gone, and the image is still being used")
            features_NE = self.encode(image)
            with self._lock:
                self._features.put(name, features_NE, features_NE.nbytes)
        return features_NE

    @torch.inference_mode(False)
    @torch.no_grad()
    def encode(self, image: Image) -> Tensor:
        """The features [N, E] of one image, computed by itself."""
        parameter = next(self._encoder.parameters())
        found = self._processor(images=[[open_image(image)]], return_tensors="pt", return_row_col_info=True)
        pixels = found["pixel_values"][0].to(parameter.device, parameter.dtype)  # [tiles, 3, side, side]
        parts = [
            self._connector(self._encoder(pixel_values=tiles.contiguous()).last_hidden_state).flatten(0, 1)
            for tiles in pixels.split(TILES_AT_ONCE)
        ]
        features_NE = torch.cat(parts)
        if len(features_NE) != self._num_rows(self._grid(image.width, image.height)):
            raise ArpoError(f"an image of {image.width} x {image.height} pixels has {len(features_NE)} features")
        return features_NE

    # --- saving

    def save(self, text_state: dict[str, Tensor], generation_config: Any, directory: Path) -> None:
        """Write the whole model as a Hugging Face directory, with these weights of the text model."""
        state = {_full_name(name): tensor for name, tensor in text_state.items() if name != "lm_head.weight"}
        if not self._tied:
            state["lm_head.weight"] = text_state["lm_head.weight"]
        for prefix, part in (("model.vision_model.", self._encoder), ("model.connector.", self._connector)):
            state |= {prefix + name: tensor for name, tensor in part.state_dict().items()}
        self._skeleton.generation_config = copy.deepcopy(generation_config)
        self._skeleton.save_pretrained(directory, state_dict={n: t.cpu().contiguous() for n, t in state.items()})
        for name, content in self.files.items():
            (directory / name).write_bytes(content)


def split_model(full: Any, tokenizer: Any, directory: Path) -> Any:
    """The text model of a whole one, a plain causal LM with the same weights, and with the tower attached.

    ValueError, or what broken files make the libraries raise, if something does not fit.
    """
    from transformers import LlamaForCausalLM

    config = full.config
    processor = _read_processor(config, directory)
    if tokenizer.convert_tokens_to_ids("<image>") != config.image_token_id:
        raise ValueError(f"its tokenizer has no token <image> with the id {config.image_token_id}, its image_token_id")
    files = {name: (directory / name).read_bytes() for name in PROCESSOR_FILES if (directory / name).is_file()}
    tower = VisionTower(full, processor, files)
    config.text_config.tie_word_embeddings = full.lm_head.weight is full.get_input_embeddings().weight
    with torch.device("meta"):
        model = LlamaForCausalLM(config.text_config)
    model.model, model.lm_head = full.model.text_model, full.lm_head
    model.generation_config = full.generation_config
    model.config.name_or_path = config.name_or_path
    attach_tower(model, tower)
    return model


def check_vision_config(config: dict[str, Any]) -> None:
    """Raise ValueError unless the sizes in a config.json belong together."""
    text, vision = config.get("text_config"), config.get("vision_config")
    if not isinstance(text, dict) or not isinstance(vision, dict):
        raise ValueError("config.json has no text_config and vision_config")
    if text.get("model_type", "llama") != "llama":
        raise ValueError(f"its text model is a {text['model_type']!r:.60}, and only llama is supported")
    side, patch = (vision.get(key) for key in ("image_size", "patch_size"))
    scale = config.get("scale_factor", 2)
    for key, value in (("image_size", side), ("patch_size", patch), ("scale_factor", scale)):
        if type(value) is not int or not 1 <= value <= MAX_SIDE:
            raise ValueError(f"config.json has {key} = {value!r:.60}, expected a whole number from 1 to {MAX_SIDE}")
    if side % (patch * scale):
        raise ValueError(f"config.json has image_size = {side}, which {patch} x {scale} (patch, scale) does not divide")
    if vision.get("num_channels", 3) != 3:
        raise ValueError("config.json has num_channels other than 3")


def _read_processor(config: Any, directory: Path) -> Any:
    """The image processor of a model; it runs on Pillow, whichever backend is installed."""
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
    from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

    require_pillow()
    found = next((name for name in PROCESSOR_FILES if (directory / name).is_file()), None)
    if found is None:
        raise ValueError(f"it has no {PROCESSOR_FILES[0]}: copy it from the model that this one was made of")
    kinds = {"idefics3": Idefics3ImageProcessorPil, "smolvlm": SmolVLMImageProcessorPil}
    processor = kinds[config.model_type].from_pretrained(directory, local_files_only=True)
    side, size, largest = config.vision_config.image_size, dict(processor.size), dict(processor.max_image_size)
    sides = [value for value in size.values() if value is not None]
    if not sides or any(type(value) is not int or not 1 <= value <= MAX_SIDE for value in sides):
        raise ValueError(f"{found} has size = {size!r:.60}, expected whole numbers from 1 to {MAX_SIDE}")
    if largest.get("longest_edge") != side:
        raise ValueError(f"{found} has max_image_size = {largest!r:.60}, but the model's image_size is {side}")
    if math.ceil(max(sides) / side) ** 2 > MAX_TILES:
        raise ValueError(f"{found} has size = {size!r:.60}: an image would have more than {MAX_TILES} tiles")
    for key in ("do_resize", "do_rescale", "do_normalize", "do_image_splitting", "do_pad"):
        if type(getattr(processor, key)) is not bool:
            raise ValueError(f"{found} has {key} = {getattr(processor, key)!r:.60}, expected true or false")
    if not (processor.do_resize and processor.do_pad):
        raise ValueError(f"{found} turns off do_resize or do_pad, which is not supported")
    for key in ("image_mean", "image_std", "rescale_factor"):
        values = getattr(processor, key)
        values = values if isinstance(values, list | tuple) else [values]
        if not all(isinstance(value, int | float) and math.isfinite(value) for value in values):
            raise ValueError(f"{found} has {key} = {values!r:.60}, expected finite numbers")
    if len(processor.image_mean) != 3 or len(processor.image_std) != 3 or 0 in processor.image_std:
        raise ValueError(f"{found} has an image_mean or image_std that is no list of three numbers")
    return processor


def _full_name(name: str) -> str:
    """The name in the whole model of a weight of the text model."""
    return name.replace("model.", "model.text_model.", 1)
