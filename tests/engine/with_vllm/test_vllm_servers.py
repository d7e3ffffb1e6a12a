"""Real vLLM servers: one is killed in the middle of a turn, restarted, and must not sample with what it began with."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not here; `make test-vllm` brings it")

from models import plain_numbers
from vllm_models import VllmServer, change, make_model

from arpo.engine.local.engine import LocalEngine
from arpo.engine.vllm.servers import ServerEngine
from arpo.models.save import save_for_vllm, save_pretrained
from arpo.types import Completion, SamplingParams

GREEDY = SamplingParams(max_tokens=60, temperature=0.0)
LONG = SamplingParams(max_tokens=400, temperature=0.0)
NEAR = 2e-4


@pytest.fixture(scope="module")
def ground(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any, list[VllmServer]]]:
    model, tokenizer = make_model(tokenizer)
    folder = tmp_path_factory.mktemp("served")
    save_pretrained(model, tokenizer, folder / "model")  # as it is found elsewhere, tied
    context = model.config.max_position_embeddings
    servers = [VllmServer(folder / "model", folder / f"log{i}", context) for i in range(2)]
    try:
        for server in servers:
            server.wait()
        yield model, tokenizer, servers
    finally:
        for server in servers:
            if server.process.poll() is None:
                server.kill()


def engine_for(ground: Any, which: slice = slice(None), **options: Any) -> ServerEngine:
    model, tokenizer, servers = ground
    urls = [server.url for server in servers[which]]
    return ServerEngine(urls, model, tokenizer, partial(save_for_vllm, model, tokenizer), **options)


def local(ground: Any, *prefixes: list[int], params: SamplingParams = GREEDY) -> list[tuple[int, ...]]:
    engine = LocalEngine(ground[0], ground[1], max_num_seqs=8, kv_cache_tokens=8192, threaded=False)

    async def ask() -> list[Completion]:
        return list(await asyncio.gather(*(engine.generate(prefix, params) for prefix in prefixes)))

    return [done.tokens for done in asyncio.run(ask())]


PREFIXES = [[5 + (i * j) % 200 for i in range(10 * j)] for j in range(1, 9)]


def test_turns_and_weights_of_servers(ground: Any) -> None:
    model = ground[0]
    engine = engine_for(ground)

    async def ask() -> list[Completion]:
        return list(await asyncio.gather(*(engine.generate(prefix, GREEDY) for prefix in PREFIXES)))

    before = asyncio.run(ask())
    assert [done.tokens for done in before] == local(ground, *PREFIXES)
    told = engine.stats()
    assert (told["weight_loads"], told["retries"]) == (2, 0)
    for prefix, done in zip(PREFIXES, before, strict=True):
        logprobs, entropies, _ = plain_numbers(model, prefix, done.tokens, 0.0)
        assert done.logprobs == pytest.approx(logprobs, abs=NEAR)
        assert done.entropies == pytest.approx(entropies, abs=told["entropy_error_max"] + NEAR)
    change(model, 2)
    asyncio.run(engine.sync_weights(1))
    after = asyncio.run(ask())
    assert [done.tokens for done in after] == local(ground, *PREFIXES)
    assert [done.tokens for done in after] != [done.tokens for done in before]
    assert engine.stats()["weight_loads"] == 2


def test_a_turn_that_is_cancelled_or_stopped_ends_on_the_server(ground: Any) -> None:
    server = ground[2][0]
    engine = engine_for(ground, slice(0, 1))

    async def cancel() -> None:
        began = asyncio.Event()
        turn = asyncio.create_task(engine.generate([5], SamplingParams(400), on_token=lambda *_: began.set()))
        await began.wait()
        turn.cancel()
        with pytest.raises(asyncio.CancelledError):
            await turn
        for _ in range(200):
            if not await asyncio.to_thread(server.running):
                return
            await asyncio.sleep(0.02)
        raise AssertionError("it goes on")

    asyncio.run(cancel())


def test_a_killed_server_costs_no_turn_and_comes_back_with_the_current_weights(ground: Any) -> None:
    servers = ground[2]
    engine = engine_for(ground, pause=0.1)
    change(ground[0], 3)
    asyncio.run(engine.sync_weights(1))
    expected = local(ground, *PREFIXES, params=LONG)

    async def warm_up() -> None:
        await asyncio.gather(*(engine.generate(prefix, SamplingParams(1)) for prefix in PREFIXES))

    asyncio.run(warm_up())
    assert engine.stats()["weight_loads"] == 2  # both are ready
    killed = threading.Event()
    seen: dict[int, list[int]] = {i: [] for i in range(len(PREFIXES))}

    def on_token(number: int, token: int, *_: Any) -> None:
        seen[number].append(token)
        if len(seen[number]) == 3 and not killed.is_set():  # long before the others are done
            killed.set()
            servers[0].kill()

    async def ask() -> list[Completion]:
        turns = (engine.generate(p, LONG, on_token=partial(on_token, i)) for i, p in enumerate(PREFIXES))
        return list(await asyncio.gather(*turns))

    done = asyncio.run(ask())
    assert killed.is_set()
    told = engine.stats()
    assert told["retries"] >= 1
    assert [one.tokens for one in done] == expected
    assert [tuple(tokens) for tokens in seen.values()] == expected
    print(f"\nkilled in the middle of {len(PREFIXES)} turns: {told}")
    servers[0].start()
    servers[0].wait()
    back = engine_for(ground, slice(0, 1))  # the first engine may have left it for the time being
    assert asyncio.run(back.generate(PREFIXES[0], LONG)).tokens == expected[0]
    engine._servers[1].retry_at = float("inf")
    engine._servers[0].retry_at = 0.0
    assert asyncio.run(engine.generate(PREFIXES[1], LONG)).tokens == expected[1]
    assert engine.stats()["weight_loads"] == 1  # it had lost this engine's label
