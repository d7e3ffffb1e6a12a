"""The model that sees: small, trained on what a rollout shows it, and able to find things and read digits."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from arpo.agent.formats import build_format
from arpo.builtin import plugin
from arpo.builtin.scenes import sample_task
from arpo.builtin.vision import TAGS, build_processor, build_row, build_tokenizer, write_lesson, write_trace
from arpo.config.loading import load_config
from arpo.config.schema import Model
from arpo.data.tasks import Trace
from arpo.environments.images import ImageEnvironment
from arpo.models.load import load_model
from arpo.models.vision import VisionTower, vision_tower
from arpo.training.sft_examples import encode_trace
from arpo.types import Kind

DIRECTORY = Path(plugin.__file__).with_name("vision_model")


@cache
def loaded() -> tuple[Any, Any, VisionTower]:
    model, tokenizer = load_model(Model(path=str(DIRECTORY), device="cpu", dtype="float32"))
    tower = vision_tower(model)
    assert tower is not None
    return model, tokenizer, tower


def test_the_plugin_has_the_model_of_the_package() -> None:
    assert plugin.SCENES.model(load_config(None, ["data.train=scenes"]), lambda *_: None) == DIRECTORY
    assert sum(path.stat().st_size for path in DIRECTORY.iterdir()) < 3_000_000


def test_the_tokenizer_can_be_made_again() -> None:
    made, tokenizer = build_tokenizer(), loaded()[1]
    assert made.get_vocab() == tokenizer.get_vocab()
    assert made.chat_template == tokenizer.chat_template
    for tag in TAGS:
        assert len(tokenizer(tag, add_special_tokens=False).input_ids) == 1
    box = "[0.25, 0.5, 0.5, 1]"
    assert tokenizer.decode(tokenizer(box).input_ids) == box and len(tokenizer(box).input_ids) == 9


def test_it_was_trained_on_what_a_rollout_shows() -> None:
    """A row of its training has the tokens that the same trace has in a rollout, and trains on the same of them."""
    _, tokenizer, tower = loaded()
    fmt = build_format("tags", [one.spec for one in ImageEnvironment().tools()], tokenizer)
    rng = random.Random(5)
    for _ in range(10):
        task = sample_task(rng)
        writer = write_trace(task, rng, guess=0.2)
        row = build_row(writer, tokenizer, build_processor())
        segments = [
            (Kind.MODEL if trained else Kind.TOOL, text.removeprefix("<result>").removesuffix("<image></result>\n"))
            for text, trained in writer.parts[1:]
        ]
        images = iter(writer.images[1:])
        shown = tuple((next(images),) if kind is Kind.TOOL else () for kind, _ in segments)
        example = encode_trace(Trace(task, tuple(segments), shown), tokenizer, fmt, vision=tower)
        assert row.tokens == [token for _, ids in example.segments for token in ids]
        assert row.trained == [kind is Kind.MODEL for kind, ids in example.segments for _ in ids]


def predictions(row_tokens: list[int], images: list[Any]) -> list[int]:
    """The likeliest next token after each token of a sequence."""
    model, _, tower = loaded()
    ids = torch.tensor(tower.embed_ids(row_tokens, images))
    rows_TE = tower.embed(ids, model.get_input_embeddings())
    with torch.no_grad():
        logits_TV = model(inputs_embeds=rows_TE.unsqueeze(0)).logits[0]
    return [int(token) for token in logits_TV.argmax(dim=-1)]


@pytest.mark.slow
def test_it_knows_where_things_are_and_reads_digits_in_crops() -> None:
    _, tokenizer, _ = loaded()
    rng = random.Random(7)
    coordinates, digits = [], []
    names = {tokenizer(f" {digit}", add_special_tokens=False).input_ids[0] for digit in range(10)}
    opening, comma, dot = (tokenizer(text, add_special_tokens=False).input_ids[0] for text in ("[", ",", "."))
    for _ in range(20):
        writer = write_lesson(rng)
        row = build_row(writer, tokenizer, build_processor())
        found = predictions(row.tokens, writer.images)
        for place, (token, trained) in enumerate(zip(row.tokens, row.trained, strict=True)):
            if trained and row.tokens[place - 1] in (opening, comma):
                coordinates.append(found[place - 1] == token)
            elif trained and token in names and row.tokens[place + 1] == dot:
                digits.append(found[place - 1] == token)
    assert len(coordinates) > 150 and len(digits) == 20 * 3
    assert sum(coordinates) / len(coordinates) > 0.95
    assert sum(digits) / len(digits) > 0.95
