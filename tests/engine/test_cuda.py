"""The engine on a GPU, with CUDA graphs and Triton kernels, against plain forward passes. Skipped without a GPU."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
import torch
from models import FAMILIES, VOCAB, Letters, make_model, plain_numbers

from arpo.engine.local.engine import LocalEngine
from arpo.engine.local.kv_cache import BLOCK_SIZE
from arpo.types import Completion, SamplingParams

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def build(family: str, dtype: torch.dtype = torch.float32) -> Any:
    return make_model(family, context=2048).to("cuda", dtype)


def check(model: Any, prefix: list[int], done: Completion, temperature: float, tolerance: float) -> None:
    logprobs, entropies, most_likely = plain_numbers(model, prefix, done.tokens, temperature)
    assert done.logprobs == pytest.approx(logprobs, abs=tolerance)
    assert done.entropies == pytest.approx(entropies, abs=tolerance)
    if temperature == 0 and tolerance < 1e-3:
        assert list(done.tokens) == most_likely


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kv_cache_tokens", [100_000, 1_600])
def test_numbers_equal_a_plain_forward_pass(family: str, kv_cache_tokens: int) -> None:
    """Conversations that pause, fork and continue, with enough room and with far too little; prompts in chunks."""
    model = build(family)
    engine = LocalEngine(model, Letters(), max_num_seqs=24, kv_cache_tokens=kv_cache_tokens, prefill_tokens=64)
    rng = random.Random(3)

    async def conversation(prefix: list[int], depth: int) -> None:
        params = SamplingParams(rng.randint(1, 120), rng.choice([0.0, 0.7, 1.0]), seed=rng.randrange(10**6))
        done = await engine.generate(prefix, params)
        check(model, prefix, done, params.temperature, 1e-4)
        if depth:
            after = [*prefix, *done.tokens, *(rng.randrange(VOCAB) for _ in range(rng.randint(0, 50)))]
            await asyncio.gather(*(conversation(after, depth - 1) for _ in range(rng.randint(1, 3))))

    async def many() -> None:
        starts = [[rng.randrange(VOCAB) for _ in range(rng.randint(1, 300))] for _ in range(12)]
        await asyncio.gather(*(conversation(prefix, 2) for prefix in starts))

    asyncio.run(many())
    assert engine._scheduler.tree.num_available == engine.kv_cache_tokens // BLOCK_SIZE


def test_preempted_requests_resume() -> None:
    model = build("llama-gqa")
    engine = LocalEngine(model, Letters(), max_num_seqs=24, kv_cache_tokens=1_600, end_tokens=frozenset())
    rng = random.Random(4)
    asked = [([rng.randrange(VOCAB) for _ in range(30)], SamplingParams(120, 1.0, seed=i)) for i in range(12)]

    async def many() -> list[Completion]:
        return list(await asyncio.gather(*(engine.generate(*request) for request in asked)))

    for (prefix, _), done in zip(asked, asyncio.run(many()), strict=True):
        assert len(done.tokens) == 120
        check(model, prefix, done, 1.0, 1e-4)
    assert engine.stats()["preemptions"] > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_stays_close(family: str) -> None:
    model = build(family, torch.bfloat16)
    engine = LocalEngine(model, Letters(), max_num_seqs=24, kv_cache_tokens=100_000)
    rng = random.Random(3)
    prefix = [rng.randrange(VOCAB) for _ in range(500)]

    async def many() -> None:
        asked = [(prefix[: 20 * i + 1], SamplingParams(30, 1.0, seed=i)) for i in range(24)]
        done = await asyncio.gather(*(engine.generate(*request) for request in asked))
        for (given, _), completion in zip(asked, done, strict=True):
            check(model, given, completion, 1.0, 0.15)

    asyncio.run(many())


def test_split_keys_of_a_long_context_stay_exact() -> None:
    model = build("llama")
    engine = LocalEngine(model, Letters(), max_num_seqs=4, kv_cache_tokens=20_000)
    rng = random.Random(1)
    prefix = [rng.randrange(VOCAB) for _ in range(1900)]
    done = asyncio.run(engine.generate(prefix, SamplingParams(60, 1.0, seed=1)))
    check(model, prefix, done, 1.0, 1e-4)


def test_cuts_report_full_and_cut_logprobs() -> None:
    model = build("llama")
    engine = LocalEngine(model, Letters(), max_num_seqs=4, kv_cache_tokens=20_000)

    async def both() -> list[Completion]:
        plain = SamplingParams(20, 1.0, seed=1)
        cut = SamplingParams(20, 1.0, top_p=0.5, top_k=5, seed=1)
        return list(await asyncio.gather(engine.generate([5, 6], plain), engine.generate([5, 6], cut)))

    plain, cut = asyncio.run(both())
    check(model, [5, 6], plain, 1.0, 1e-4)
    check(model, [5, 6], cut, 1.0, 1e-4)
    assert plain.cut_logprobs == () and len(cut.cut_logprobs) == len(cut.tokens)
    assert all(after > before for after, before in zip(cut.cut_logprobs, cut.logprobs, strict=True))
    assert all(after < before for after, before in zip(cut.cut_entropies, cut.entropies, strict=True))


def test_graphs_are_captured_once_and_follow_the_weights() -> None:
    model = build("llama")
    engine = LocalEngine(model, Letters(), max_num_seqs=8, kv_cache_tokens=20_000)

    async def ask(count: int) -> list[Completion]:
        asked = (engine.generate([5, i], SamplingParams(10, 1.0, seed=i)) for i in range(count))
        return list(await asyncio.gather(*asked))

    async def change() -> None:
        await ask(8)
        assert engine.stats()["graphs"] > 0
        before = await ask(8)
        assert engine.stats()["graphs"] == 0
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.3)  # in place, as an optimizer does
        await engine.sync_weights(1)
        after = await ask(8)
        assert engine.stats()["graphs"] == 0
        assert after != before
        for i, done in enumerate(after):
            check(model, [5, i], done, 1.0, 1e-4)
        for parameter in model.parameters():
            parameter.data = parameter.data.clone() * 0.7  # somewhere else
        await engine.sync_weights(2)
        for i, done in enumerate(await ask(8)):
            check(model, [5, i], done, 1.0, 1e-4)
        assert engine.stats()["graphs"] > 0

    asyncio.run(change())


def test_training_beside_the_engine_uses_the_original_modules() -> None:
    """While the engine samples in its thread, a training pass here has gradients and the usual loss."""
    model = build("llama")
    engine = LocalEngine(model, Letters(), max_num_seqs=8, kv_cache_tokens=20_000, threaded=True)
    tokens = torch.randint(0, VOCAB, (2, 20), device="cuda")
    expected = model(tokens, labels=tokens).loss.item()

    async def both() -> None:
        sampling = [asyncio.create_task(engine.generate([5, i], SamplingParams(300, 1.0, seed=i))) for i in range(8)]
        for _ in range(30):
            await asyncio.sleep(0)
            model.zero_grad()
            loss = model(tokens, labels=tokens).loss
            loss.backward()
            assert loss.item() == pytest.approx(expected, rel=1e-5)
            assert all(parameter.grad is not None for parameter in model.parameters())
        for i, done in enumerate(await asyncio.gather(*sampling)):
            check(model, [5, i], done, 1.0, 1e-4)

    asyncio.run(both())


def test_many_rows_need_no_splitting_of_keys() -> None:
    model = build("llama")
    engine = LocalEngine(model, Letters(), max_num_seqs=80, kv_cache_tokens=100_000)
    rng = random.Random(2)
    asked = [
        ([rng.randrange(VOCAB) for _ in range(rng.randint(1, 90))], SamplingParams(40, 1.0, seed=i)) for i in range(80)
    ]

    async def many() -> list[Completion]:
        return list(await asyncio.gather(*(engine.generate(*request) for request in asked)))

    for (prefix, _), done in zip(asked, asyncio.run(many()), strict=True):
        check(model, prefix, done, 1.0, 1e-4)
