"""Makes the built-in vision model: `python -m arpo.builtin.vision arpo/builtin/vision_model`.

A small Idefics3: a Llama that reads a picture as 4 x 4 tokens, one for each cell of a scene. It is trained from nothing
on scenes of its own, which are no training or test tasks. The vision tower learns what pictures show, then the text
model learns to say where things are, to read digits in crops, and to imitate traces that use the tool `crop`. These
have the habits to unlearn: most answer without looking, and those that look often do so at the wrong place. The weights
are part of the package.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from tokenizers import Regex, pre_tokenizers
from torch.nn import functional
from transformers import Idefics3Config, Idefics3ForConditionalGeneration
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

from arpo.builtin.cold_start import build_optimizers
from arpo.builtin.model import train_tokenizer
from arpo.builtin.scenes import COLOURS, GRID, SHAPES, SMALL, THINGS, Thing, draw_scene, sample_scene, sample_task
from arpo.data.images import encode_image, open_image
from arpo.environments.images import ImageEnvironment
from arpo.types import Image, Task

PATCH, SCALE = 8, 2
IMAGE_TOKENS = (SMALL // PATCH // SCALE) ** 2
TAGS = tuple(f"<{slash}{tag}>" for tag in ("think", "crop", "rotate", "result", "answer") for slash in ("", "/"))
IMAGE_SPECIALS = ("<fake_token_around_image>", "<image>", "<global-img>", "<end_of_utterance>")
SPECIALS = ("<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", *IMAGE_SPECIALS)
IMAGE_TEXT = f"<fake_token_around_image><global-img>{'<image>' * IMAGE_TOKENS}<fake_token_around_image>"
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' %}<|user|>{% elif m.role == 'assistant' %}<|assistant|>{% endif %}"
    "{% if m.role != 'system' %}{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
HIDDEN, LAYERS, VISION_HIDDEN, VISION_LAYERS, MAX_CONTEXT = 96, 3, 64, 2, 512
SEED, ROWS, STEPS, BATCH, LR = 1, 3000, 1500, 32, 2e-3
ALIGN_STEPS, ALIGN_LR, CROPS = 700, 2e-3, 3  # crops in a lesson
LESSONS = 0.6  # share of batches
GUESS, RIGHT, AGAIN = 0.55, 0.4, 0.4  # rates: to answer without looking, to look at the right cell, and again if not
EMPTY = (len(COLOURS), len(SHAPES))  # colour and shape of nothing
CELL_SIZES, CROP_SIZES = (len(COLOURS) + 1, len(SHAPES) + 1, GRID, GRID), (len(COLOURS), len(SHAPES), 10)


class Row(NamedTuple):
    """One sequence: token ids, which of them are trained on, and its pictures as the model sees them."""

    tokens: list[int]
    trained: list[bool]
    pictures: np.ndarray[Any, Any]  # pixels [N, C, H, W], or features [N, P, E]
    seen: tuple[list[list[int]], list[list[int]]] = ([], [])  # of a lesson: what is in each cell, and in each crop


class _Writer:
    """Text and pictures of one sequence, so far; `<image>` in a text stands for a picture."""

    def __init__(self) -> None:
        self.parts: list[tuple[str, bool]] = []
        self.images: list[Image] = []
        self.cells: list[list[int]] = []
        self.crops: list[list[int]] = []

    def add(self, text: str, trained: bool = False, image: Image | None = None) -> None:
        self.images += [] if image is None else [image]
        self.parts.append((text, trained))


def write_trace(task: Task, rng: random.Random, guess: float = GUESS, right: float = RIGHT) -> _Writer:
    """The question, calls of the real tool, and an answer; guessed if what it needs was not seen."""
    writer, state = _Writer(), ImageEnvironment(min_side=SMALL, blocking=True)
    state.reset(task)
    writer.add(f"<|user|>{'<image>'}{task.question}<|assistant|>", image=task.images[0])
    if rng.random() < guess:
        writer.add(f"<think> I guess.</think>{_answer(task, [], rng)}", True)
        return writer
    seen: list[int] = []
    thought = ""
    for box, digit in zip(task.meta["boxes"], task.meta["digits"], strict=True):
        found = False
        while not found:
            found = rng.random() < right
            place = box if found else _other_cell(box, rng)
            writer.add(f"<think>{thought} Look.</think><crop>[{', '.join(f'{side:g}' for side in place)}]</crop>", True)
            text, image = asyncio.run(state.crop(place))
            writer.add(f"<result>{text}<image></result>\n", image=image)
            thought = f" It is {digit}." if found else " Not there."
            if not found and rng.random() >= AGAIN:
                writer.add(f"<think>{thought} I guess.</think>{_answer(task, [], rng)}", True)
                return writer
        seen.append(digit)
    writer.add(f"<think>{thought} {_reason(seen)}</think>{_answer(task, seen, rng)}", True)
    return writer


def _reason(seen: list[int]) -> str:
    return "Done." if len(seen) == 1 else f"{seen[0]} and {seen[1]}."


def _answer(task: Task, seen: list[int], rng: random.Random) -> str:
    """The right answer if everything was seen, else a guess."""
    guesses = {
        "read": lambda: str(rng.randrange(10)),
        "sum": lambda: str(rng.randrange(10) + rng.randrange(10)),
        "compare": lambda: rng.choice(_names(task.question)),
    }
    answer = task.answers[0] if len(seen) == len(task.meta["digits"]) else guesses[task.kind]()
    return f"<answer>\\boxed{{ {answer}}}</answer>"


def _names(question: str) -> list[str]:
    return [name for colour in COLOURS for shape in SHAPES if (name := f"{colour} {shape}") in question]


def _other_cell(box: list[float], rng: random.Random) -> list[float]:
    while True:
        column, row = rng.randrange(GRID), rng.randrange(GRID)
        place = [side / GRID for side in (column, row, column + 1, row + 1)]
        if place != box:
            return place


def write_lesson(rng: random.Random) -> _Writer:
    """A picture, and where each of its things is; then crops of it, and what is in them.

    Some pictures have a single thing, so that where it is can be learned before which one is asked for.
    """
    writer, things = _Writer(), list(sample_scene(rng, rng.choice((1, 1, 2, 3, THINGS, THINGS))))
    picture = encode_image(draw_scene(tuple(things)))
    rng.shuffle(things)
    there = {(thing.column, thing.row): _look(thing) for thing in things}
    writer.cells = [[*there.get((n % GRID, n // GRID), EMPTY), n % GRID, n // GRID] for n in range(GRID**2)]
    writer.add("<|user|><image>", image=picture)
    for thing in things:
        box = f"[{', '.join(f'{side:g}' for side in thing.box)}]"
        writer.add(f" the {thing.name}:")
        writer.add(f"<crop>{box}</crop>", True)
    for thing in rng.choices(things, k=CROPS):
        left, top = (int(side * GRID * SMALL) for side in thing.box[:2])
        crop = encode_image(open_image(picture).crop((left, top, left + SMALL, top + SMALL)))
        writer.crops.append([*_look(thing), thing.digit])
        writer.add("<result><image></result>\n", image=crop)
        writer.add(f" the {thing.name} {thing.digit}.", True)
    return writer


def _look(thing: Thing) -> list[int]:
    return [list(COLOURS).index(thing.colour), SHAPES.index(thing.shape)]


def align(model: Any, lessons: list[Row], steps: int, lr: float) -> None:
    """Train the vision tower alone, with heads that are thrown away: what is in each cell of a picture, and in a crop.

    A small model that has to find out everything at once stays for thousands of steps where it looks at nothing.
    """
    rng = random.Random(f"{SEED} alignment")
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        cells, crops = torch.nn.Linear(HIDDEN, sum(CELL_SIZES)), torch.nn.Linear(HIDDEN, sum(CROP_SIZES))
    parts = torch.nn.ModuleList([model.model.vision_model, model.model.connector, cells, crops])
    optimizer = torch.optim.AdamW(parts.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(steps):
        batch = rng.sample(lessons, BATCH)
        pixels_BICHW = torch.from_numpy(np.stack([row.pictures for row in batch])).float()
        features_NPE = _features(model, pixels_BICHW.flatten(0, 1))
        features_BIPE = features_NPE.view(BATCH, 1 + CROPS, *features_NPE.shape[1:])
        whole = _head_loss(cells(features_BIPE[:, 0]), [row.seen[0] for row in batch], CELL_SIZES)
        part = _head_loss(crops(features_BIPE[:, 1:].mean(dim=2)), [row.seen[1] for row in batch], CROP_SIZES)
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, (step + 1) / 50) * (1 - step / steps)
        (whole + part).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(parts.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 50 == 0:
            print(f"alignment, step {step} of {steps}, loss {whole.item():.3f} and {part.item():.3f}", flush=True)


def _head_loss(logits_BNC: torch.Tensor, labels: list[list[list[int]]], sizes: tuple[int, ...]) -> torch.Tensor:
    labels_BNL = torch.tensor(labels)
    losses = [
        functional.cross_entropy(some.flatten(0, 1), labels_BNL[..., number].flatten())
        for number, some in enumerate(torch.split(logits_BNC, list(sizes), dim=-1))
    ]
    return torch.stack(losses).sum()


def _features(model: Any, pixels_NCHW: torch.Tensor) -> torch.Tensor:
    """The features [N, P, E] of pictures."""
    features: torch.Tensor = model.model.connector(model.model.vision_model(pixel_values=pixels_NCHW).last_hidden_state)
    return features


def build_row(writer: _Writer, tokenizer: Any, processor: Any) -> Row:
    """A sequence as the model gets it."""
    tokens: list[int] = []
    trained: list[bool] = []
    for text, is_trained in writer.parts:
        ids = tokenizer(text.replace("<image>", IMAGE_TEXT), add_special_tokens=False).input_ids
        tokens += ids
        trained += [is_trained] * len(ids)
    pixels = processor(images=[[open_image(image) for image in writer.images]], return_tensors="np")["pixel_values"][0]
    return Row(tokens, trained, pixels.astype(np.float16), (writer.cells, writer.crops))


def build_tokenizer() -> Any:
    """A byte-level tokenizer in which every word of the scenes and every coordinate is one token."""
    words = pre_tokenizers.Split(Regex(r" ?\p{L}+| ?\d(\.\d+)?| ?[^\s\p{L}\d]|\s"), "isolated")
    rng = random.Random(0)
    texts = [text for _ in range(200) for text, _ in write_trace(sample_task(rng), rng).parts]
    texts += [f"{gap}{number / 8:g}" for gap in ("", " ") for number in range(9) for _ in range(100)]
    texts += [f"{gap}{digit}" for gap in ("", " ") for digit in range(10) for _ in range(100)]
    trainer = {"vocab_size": 512, "min_frequency": 20, "special_tokens": list(SPECIALS)}
    splits = [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    return train_tokenizer(texts, splits, trainer, TAGS, CHAT_TEMPLATE)


def build_model(tokenizer: Any, seed: int) -> Any:
    """A randomly initialized model; the same seed gives the same weights."""
    text = {
        "model_type": "llama",
        "vocab_size": len(tokenizer),
        "hidden_size": HIDDEN,
        "intermediate_size": HIDDEN * 5 // 2,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HIDDEN // 32,
        "num_key_value_heads": HIDDEN // 32,
        "max_position_embeddings": MAX_CONTEXT,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    vision = {
        "hidden_size": VISION_HIDDEN,
        "intermediate_size": VISION_HIDDEN * 4,
        "num_hidden_layers": VISION_LAYERS,
        "num_attention_heads": VISION_HIDDEN // 16,
        "image_size": SMALL,
        "patch_size": PATCH,
    }
    config = Idefics3Config(
        text_config=text,
        vision_config=vision,
        scale_factor=SCALE,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Idefics3ForConditionalGeneration(config)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    return model


def build_processor() -> Any:
    """The image processor: every picture becomes 64 x 64 pixels, and is not split."""
    sides = {"size": {"longest_edge": SMALL}, "max_image_size": {"longest_edge": SMALL}}
    return Idefics3ImageProcessorPil(**sides, do_image_splitting=False)


def encode_pictures(model: Any, rows: list[Row]) -> Iterator[Row]:
    """The rows with the features of their pictures in place of pixels."""
    for row in rows:
        with torch.no_grad():
            yield row._replace(pictures=_features(model, torch.from_numpy(row.pictures).float()).numpy())


def imitate(model: Any, lessons: list[Row], traces: list[Row], steps: int, lr: float) -> None:
    """Train the text model on rows with features, with a short warmup and a linear decay to 0."""
    rng = random.Random(f"{SEED} batches")
    sources = {"lessons": _batches(lessons, rng), "traces": _batches(traces, rng)}
    text = model.model.text_model
    optimizers = build_optimizers(text, lr)
    for step in range(steps):
        kind = "lessons" if rng.random() < LESSONS else "traces"
        loss = _loss(model, next(sources[kind]))
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(text.parameters(), 1.0)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group.setdefault("base_lr", group["lr"])
                group["lr"] = group["base_lr"] * min(1.0, (step + 1) / 50) * (1 - step / steps)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if step % 25 == 0:
            print(f"step {step} of {steps}, loss {loss.item():.3f} ({kind})", flush=True)


def _loss(model: Any, batch: list[Row]) -> torch.Tensor:
    width = max(len(row.tokens) for row in batch)
    tokens_BT = torch.tensor([row.tokens + [0] * (width - len(row.tokens)) for row in batch])
    mask_BT = torch.tensor([row.trained + [False] * (width - len(row.trained)) for row in batch])[:, 1:]
    features_NPE = torch.from_numpy(np.concatenate([row.pictures for row in batch]))
    rows_BTE = model.get_input_embeddings()(tokens_BT)
    places_BT = (tokens_BT == model.config.image_token_id).unsqueeze(-1)
    rows_BTE = rows_BTE.masked_scatter(places_BT, features_NPE.flatten(0, 1))
    hidden_BTH = model.model.text_model(inputs_embeds=rows_BTE, use_cache=False).last_hidden_state
    logits_NV = model.lm_head(hidden_BTH[:, :-1][mask_BT])
    return functional.cross_entropy(logits_NV, tokens_BT[:, 1:][mask_BT])


def _batches(rows: list[Row], rng: random.Random) -> Iterator[list[Row]]:
    """Endless batches of rows of similar length."""
    while True:
        order = sorted(rows, key=lambda row: (len(row.tokens), rng.random()))
        chunks = [order[start : start + BATCH] for start in range(0, len(order), BATCH)]
        rng.shuffle(chunks)
        yield from chunks


def main(directory: Path) -> None:
    """Make the model and write it as a Hugging Face directory."""
    tokenizer, processor = build_tokenizer(), build_processor()
    model = build_model(tokenizer, SEED)
    print(f"{sum(p.numel() for p in model.parameters()):,} weights, {len(tokenizer)} tokens", flush=True)
    lessons = build_lessons(tokenizer, processor)
    align(model, lessons, ALIGN_STEPS, ALIGN_LR)
    traces = build_traces(tokenizer, processor)
    imitate(model, [*encode_pictures(model, lessons)], [*encode_pictures(model, traces)], STEPS, LR)
    save(model, tokenizer, processor, directory)


def build_lessons(tokenizer: Any, processor: Any) -> list[Row]:
    """The lessons to learn from."""
    rng = random.Random(f"{SEED} lessons")
    return [build_row(write_lesson(rng), tokenizer, processor) for _ in range(ROWS)]


def build_traces(tokenizer: Any, processor: Any) -> list[Row]:
    """The traces to imitate."""
    rng = random.Random(f"{SEED} traces")
    return [build_row(write_trace(sample_task(rng), rng), tokenizer, processor) for _ in range(ROWS)]


def save(model: Any, tokenizer: Any, processor: Any, directory: Path) -> None:
    """Write the model as a Hugging Face directory."""
    model.to(torch.bfloat16).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    processor.save_pretrained(directory)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
