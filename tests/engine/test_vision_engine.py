"""The local engine with images, against transformers' whole model: forks, preemption, eviction, the prefix cache."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from vision_models import PlainSeeing, picture, save_seeing_model

from arpo.builtin.model import build_tokenizer
from arpo.config.schema import Model
from arpo.engine.local.engine import LocalEngine
from arpo.engine.local.kv_cache import BLOCK_SIZE
from arpo.models import vision
from arpo.models.load import load_model
from arpo.models.vision import VisionTower, vision_tower
from arpo.types import Completion, Image, Kind, Node, SamplingParams, ToolCall, ToolResult

SAMPLED = SamplingParams(max_tokens=6, temperature=1.3, seed=1)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = build_tokenizer(["What is in the picture? A cat and a dog."])
    return save_seeing_model(tmp_path_factory.mktemp("model"), tokenizer, split=True)


class Bench:
    """An engine, its tower, and the plain way."""

    def __init__(self, directory: Path, **options: Any) -> None:
        model, self.tokenizer = load_model(Model(path=str(directory), device="cpu"))
        tower = vision_tower(model)
        assert tower is not None
        self.tower: VisionTower = tower
        given = {"max_num_seqs": 8, "kv_cache_tokens": 2048, "threaded": False, "end_tokens": frozenset()}
        self.engine = LocalEngine(model, self.tokenizer, **{**given, **options})
        self.plain = PlainSeeing(directory)

    def prompt(self, *images: Image, start: int = 5) -> Node:
        tokens = [*range(start, start + 40)]
        for image in images:
            tokens += [*self.tower.expand(self.tokenizer, image), 7]
        return Node(None, Kind.PROMPT, tuple(tokens), "", images=images)

    def result(self, parent: int, *images: Image) -> Node:
        tokens = [9, 10, *(token for image in images for token in self.tower.expand(self.tokenizer, image)), 11]
        call = ToolCall("look", {})
        return Node(parent, Kind.TOOL, tuple(tokens), "", call=call, result=ToolResult(""), images=images)

    def ids(self, nodes: list[Node]) -> list[int]:
        return [token for node in nodes for token in self.tower.embed_ids(node.tokens, node.images)]

    def generate(self, *requests: tuple[list[Node], SamplingParams]) -> list[Completion]:
        async def all_of_them() -> list[Completion]:
            given = [self.engine.generate(self.ids(nodes), params) for nodes, params in requests]
            return list(await asyncio.gather(*given))

        return asyncio.run(all_of_them())

    def assert_exact(self, nodes: list[Node], params: SamplingParams, done: Completion) -> None:
        """Log-probs and entropies are those of a plain forward pass of the whole model over the trajectory."""
        turn = turn_of(len(nodes) - 1, done)
        tokens = self.plain.show([*nodes, turn])
        with torch.no_grad():
            logits = self.plain(torch.tensor([tokens])).logits[0].double()[-len(done.tokens) - 1 : -1]
        rows = (logits / params.temperature).softmax(-1).tolist()
        logprobs = [math.log(row[token]) for row, token in zip(rows, done.tokens, strict=True)]
        assert done.logprobs == pytest.approx(logprobs, abs=1e-4)
        entropies = [-sum(p * math.log(p) for p in row if p > 0) for row in rows]
        assert done.entropies == pytest.approx(entropies, abs=1e-4)


def turn_of(parent: int, done: Completion) -> Node:
    return Node(parent, Kind.MODEL, done.tokens, "", done.logprobs, done.entropies)


def grow(bench: Bench) -> list[Completion]:
    """A prompt with two pictures, two turns, results with other pictures, and forks; each turn is compared."""
    prompt = bench.prompt(picture(1, 9, 5), picture(2))
    [first] = bench.generate(([prompt], SAMPLED))
    bench.assert_exact([prompt], SAMPLED, first)
    paths = [
        [prompt, turn_of(0, first), bench.result(1, picture(3, 5, 9))],
        [prompt, turn_of(0, first), bench.result(1, picture(4, 5, 9))],
        [prompt, turn_of(0, first), bench.result(1, picture(4, 5, 9), picture(1, 9, 5))],
    ]
    requests = [(path, SamplingParams(12, 1.3, seed=seed)) for path in paths for seed in range(3)]  # forks of each
    done = bench.generate(*requests)
    for (path, params), one in zip(requests, done, strict=True):
        bench.assert_exact(path, params, one)
    return [first, *done]


def test_every_turn_is_that_of_a_plain_forward_pass(directory: Path) -> None:
    grow(Bench(directory))


def test_preemption_and_eviction_change_nothing(directory: Path) -> None:
    expected = grow(Bench(directory))
    small = Bench(directory, kv_cache_tokens=12 * BLOCK_SIZE, prefill_tokens=16)
    small.tower._features = vision._Recent(1)  # room for the features of one picture
    found = grow(small)
    assert small.engine.stats()["preemptions"] > 0
    assert [one.tokens for one in found] == [one.tokens for one in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


def test_blocks_are_shared_by_equal_images_and_never_by_different_ones(directory: Path) -> None:
    bench = Bench(directory)
    one, other = bench.prompt(picture(1)), bench.prompt(picture(2))
    assert one.tokens == other.tokens
    before = 40 // BLOCK_SIZE * BLOCK_SIZE  # whole blocks of text before the picture
    cached = []
    for node in (one, other, bench.prompt(picture(1))):
        [done] = bench.generate(([node], SAMPLED))
        bench.assert_exact([node], SAMPLED, done)
        cached.append(bench.engine.stats()["cached_tokens"])
    assert cached[0] == 0 and before <= cached[1] <= 42  # up to the first token of the picture
    assert cached[2] >= len(one.tokens) - BLOCK_SIZE > 42


def test_a_sampled_image_token_is_an_ordinary_token(directory: Path) -> None:
    """It has its own embedding, and the pictures of later nodes stay at their places."""
    bench = Bench(directory)
    prompt, token = bench.prompt(picture(1)), bench.tower.image_token_id
    written = Node(0, Kind.MODEL, (5, token, token), "", (-1.0,) * 3, (0.0,) * 3)
    nodes = [prompt, written, bench.result(1, picture(2))]
    assert bench.ids(nodes)[len(prompt.tokens) :][:3] == [5, token, token]
    [done] = bench.generate((nodes, SAMPLED))
    bench.assert_exact(nodes, SAMPLED, done)


def test_ids_that_no_image_has_are_refused(directory: Path) -> None:
    bench = Bench(directory)
    bench.ids([bench.prompt(picture(1))])
    with pytest.raises(ValueError, match="the prefix holds token"):
        asyncio.run(bench.engine.generate([5, bench.tower.num_ids], SAMPLED))
