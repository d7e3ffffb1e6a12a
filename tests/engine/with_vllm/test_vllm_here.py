"""vLLM in a process of its own against the local engine with the same weights."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not here; `make test-vllm` brings it")

from models import plain_numbers
from vllm_models import change, make_model

from arpo.config.loading import load_config
from arpo.engine.local.engine import LocalEngine
from arpo.engine.stops import TurnEnds
from arpo.engine.vllm.engine import BLOCK_SIZE, VllmEngine
from arpo.models.save import save_for_vllm
from arpo.runs.run_dir import open_run_dir as read_run
from arpo.training.loop import open_training, train
from arpo.types import Completion, Kind, SamplingParams

NEAR = 2e-4  # of log-probs in float32; entropies may differ by their bound and this
GREEDY = SamplingParams(max_tokens=40, temperature=0.0)


class Pair:
    """The two engines, over one model."""

    def __init__(self, tokenizer: Any) -> None:
        self.model, self.tokenizer = make_model(tokenizer)
        write = partial(save_for_vllm, self.model, self.tokenizer)
        room = self.model.config.max_position_embeddings + 8192
        self.vllm = VllmEngine(self.model, self.tokenizer, write, max_num_seqs=16, kv_cache_tokens=room)
        self.local = LocalEngine(self.model, self.tokenizer, max_num_seqs=16, kv_cache_tokens=room, threaded=False)

    def prefixes(self, count: int, longest: int = 200, seed: int = 0) -> list[list[int]]:
        rng, vocab = random.Random(seed), min(300, self.model.config.vocab_size)
        return [[rng.randrange(4, vocab) for _ in range(rng.randint(1, longest))] for _ in range(count)]

    def update(self, version: int) -> None:
        for engine in (self.vllm, self.local):
            asyncio.run(engine.sync_weights(version))


@pytest.fixture(scope="module")
def pair(tokenizer: Any) -> Iterator[Pair]:
    pair = Pair(tokenizer)
    yield pair
    pair.vllm.close()


def run(engine: Any, *requests: tuple[list[int], SamplingParams]) -> list[Completion]:
    async def all_of_them() -> list[Completion]:
        return list(await asyncio.gather(*(engine.generate(prefix, params) for prefix, params in requests)))

    return asyncio.run(all_of_them())


def assert_near(pair: Pair, prefix: list[int], done: Completion, temperature: float, error: float) -> None:
    logprobs, entropies, _ = plain_numbers(pair.model, prefix, done.tokens, temperature)
    assert done.logprobs == pytest.approx(logprobs, abs=NEAR)
    assert done.entropies == pytest.approx(entropies, abs=error + NEAR)


def test_greedy_turns_are_those_of_the_local_engine(pair: Pair) -> None:
    requests = [(prefix, GREEDY) for prefix in pair.prefixes(12)]
    pair.vllm.stats()
    ours, theirs = run(pair.local, *requests), run(pair.vllm, *requests)
    told = pair.vllm.stats()
    assert [done.tokens for done in theirs] == [done.tokens for done in ours]
    assert [(done.finish, done.stop) for done in theirs] == [(done.finish, done.stop) for done in ours]
    apart = [abs(a - b) for x, y in zip(ours, theirs, strict=True) for a, b in zip(x.logprobs, y.logprobs, strict=True)]
    off = [abs(a - b) for x, y in zip(ours, theirs, strict=True) for a, b in zip(x.entropies, y.entropies, strict=True)]
    assert max(apart) < NEAR
    assert max(off) < told["entropy_error_max"] + NEAR
    print(f"\n{len(apart)} tokens: log-probs differ by {max(apart):.1e} at most, entropies by {max(off):.2e}, {told}")


def test_sampled_turns_have_the_numbers_of_a_plain_forward_pass(pair: Pair) -> None:
    prefixes = pair.prefixes(6, seed=1)
    requests = [(prefix, SamplingParams(30, seed=2**63 - 1 - i)) for i, prefix in enumerate(prefixes)]
    pair.vllm.stats()
    first = run(pair.vllm, *requests)
    error = pair.vllm.stats()["entropy_error_max"]
    for prefix, done in zip(prefixes, first, strict=True):
        assert_near(pair, prefix, done, 1.0, error)
    again = [run(pair.vllm, request)[0] for request in requests]
    assert [done.tokens for done in again] == [done.tokens for done in first]  # whatever else is being sampled
    (other,) = run(pair.vllm, (prefixes[0], SamplingParams(30, seed=5)))
    assert other.tokens != first[0].tokens


def test_a_cut_does_not_change_the_numbers(pair: Pair) -> None:
    prefix = pair.prefixes(1, seed=2)[0]
    pair.vllm.stats()
    (done,) = run(pair.vllm, (prefix, SamplingParams(30, top_k=1, seed=1)))
    assert_near(pair, prefix, done, 1.0, pair.vllm.stats()["entropy_error_max"])
    assert done.tokens == run(pair.local, (prefix, SamplingParams(30, temperature=0.0)))[0].tokens


def test_stop_strings_end_turns_at_the_same_token(pair: Pair) -> None:
    prefixes = pair.prefixes(8, seed=3)
    whole = run(pair.local, *((prefix, GREEDY) for prefix in prefixes))
    requests = []
    for prefix, done in zip(prefixes, whole, strict=True):
        text = pair.tokenizer.decode(list(done.tokens))
        middle = len(text) // 2
        requests.append((prefix, SamplingParams(40, temperature=0.0, stop=(text[middle : middle + 3], "</never>"))))
    ours, theirs = run(pair.local, *requests), run(pair.vllm, *requests)
    assert [(x.tokens, x.finish, x.stop) for x in theirs] == [(x.tokens, x.finish, x.stop) for x in ours]
    assert sum(done.finish == "stop" for done in theirs) >= 4


def test_eos_tokens_end_turns(pair: Pair) -> None:
    prefix = pair.prefixes(1, seed=4)[0]
    (whole,) = run(pair.local, (prefix, GREEDY))
    builder = pair.vllm._builder
    before, builder.turn_ends = builder.turn_ends, TurnEnds(pair.model, pair.tokenizer, frozenset({whole.tokens[3]}))
    try:
        (done,) = run(pair.vllm, (prefix, GREEDY))
    finally:
        builder.turn_ends = before
    assert done.tokens == whole.tokens[: whole.tokens.index(whole.tokens[3]) + 1]
    assert done.finish == "eos"


def test_a_branch_reuses_its_prefix(pair: Pair) -> None:
    prefix = [5 + i % 200 for i in range(150)]
    (trunk,) = run(pair.vllm, (prefix, SamplingParams(20, seed=1)))
    pair.vllm.stats()
    longer = [*prefix, *trunk.tokens, 7, 8, 9]
    run(pair.vllm, (longer, SamplingParams(4, seed=1)), (longer, SamplingParams(4, seed=2)))
    told = pair.vllm.stats()
    assert told["prefill_tokens"] + told["cached_tokens"] == 2 * len(longer)
    assert told["cached_tokens"] >= 2 * (150 // BLOCK_SIZE["cpu"] * BLOCK_SIZE["cpu"])
    print(f"\nof 2 x {len(longer)} tokens {told['cached_tokens']} were re-used")


def test_tokens_arrive_one_by_one_in_order(pair: Pair) -> None:
    seen: list[tuple[int, float, float]] = []

    async def ask() -> Completion:
        return await pair.vllm.generate([5, 6, 7], SamplingParams(20), on_token=lambda *one: seen.append(one))

    done = asyncio.run(ask())
    assert seen == list(zip(done.tokens, done.logprobs, done.entropies, strict=True))


def test_new_weights_are_used_and_nothing_of_the_old_ones(pair: Pair) -> None:
    prefixes = pair.prefixes(6, seed=5)
    requests = [(prefix, GREEDY) for prefix in prefixes]
    before = run(pair.vllm, *requests)
    change(pair.model, 1)
    pair.update(3)
    pair.vllm.stats()
    ours, theirs = run(pair.local, *requests), run(pair.vllm, *requests)
    told = pair.vllm.stats()
    assert [done.tokens for done in theirs] == [done.tokens for done in ours]
    assert [done.tokens for done in theirs] != [done.tokens for done in before]
    assert {done.policy_version for done in theirs} == {pair.vllm.version} == {3}
    assert told["cached_tokens"] == 0
    for prefix, done in zip(prefixes, theirs, strict=True):
        assert_near(pair, prefix, done, 1.0, told["entropy_error_max"])
    started = time.monotonic()
    pair.update(4)
    print(f"\nan update took {time.monotonic() - started:.2f} s")
    assert [done.tokens for done in run(pair.vllm, *requests)] == [done.tokens for done in ours]


def test_weights_may_not_change_during_a_turn_and_cancelling_frees(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[Any] = []
    abort = pair.vllm._llm[0].abort

    async def watched(*names: Any, **how: Any) -> None:
        ended.append(names)
        await abort(*names, **how)

    monkeypatch.setattr(pair.vllm._llm[0], "abort", watched)

    async def try_it() -> None:
        began = asyncio.Event()
        long = SamplingParams(300, seed=1)
        turn = asyncio.create_task(pair.vllm.generate([5, 6], long, on_token=lambda *_: began.set()))
        await began.wait()
        with pytest.raises(RuntimeError, match="may not change"):
            await pair.vllm.sync_weights(9)
        turn.cancel()
        with pytest.raises(asyncio.CancelledError):
            await turn
        for _ in range(500):
            if not pair.vllm._llm[0].get_num_unfinished_requests():
                break
            await asyncio.sleep(0.02)
        else:
            raise AssertionError("a cancelled turn goes on")
        assert len(ended) == 1
        await pair.vllm.sync_weights(9)

    asyncio.run(try_it())
    assert run(pair.vllm, ([5, 6], GREEDY))[0].policy_version == 9


def test_an_error_of_the_callers_reaches_it_and_harms_no_other(pair: Pair) -> None:
    def fails(*_: Any) -> None:
        raise KeyError("mine")

    async def both() -> list[Any]:
        asked = pair.vllm.generate([5, 6], GREEDY, on_token=fails), pair.vllm.generate([5, 6], GREEDY)
        return list(await asyncio.gather(*asked, return_exceptions=True))

    failed, done = asyncio.run(both())
    assert isinstance(failed, KeyError)
    assert done.tokens == run(pair.local, ([5, 6], GREEDY))[0].tokens


def test_another_temperature(tokenizer: Any) -> None:
    pair = Pair.__new__(Pair)
    pair.model, pair.tokenizer = make_model(tokenizer)
    write = partial(save_for_vllm, pair.model, pair.tokenizer)
    pair.vllm = VllmEngine(pair.model, pair.tokenizer, write, max_num_seqs=4, temperature=0.7)
    try:
        for seed, prefix in enumerate(pair.prefixes(3, seed=6)):
            (done,) = run(pair.vllm, (prefix, SamplingParams(30, temperature=0.7, seed=seed)))
            assert_near(pair, prefix, done, 0.7, pair.vllm.stats()["entropy_error_max"])
    finally:
        pair.vllm.close()


WORLD = [
    *(
        "train.steps=2",
        "train.batch_size=4",
        "rollout.num_trajectories=6",
        "rollout.max_tokens=160",
        "model.device=cpu",
    ),
    *("branching.rule=stochastic", "train.lr=1e-3", "rollout.engine=vllm", "rollout.kv_cache_tokens=32768"),
    *("rollout.concurrency=16", "rollout.max_tool_calls=6", "branching.probe_tokens=6"),
]


@pytest.mark.parametrize("more", [(), ("train.lora_rank=4",)], ids=["all weights", "lora"])
def test_training_on_the_built_in_world(tmp_path: Path, more: tuple[str, ...]) -> None:
    config = load_config(None, [*WORLD, f"run.dir={tmp_path / 'run'}", *more])
    with open_training(config) as training:
        assert asyncio.run(train(training)) == 2
        training.sampler.context.agent.engine.close()  # type: ignore[attr-defined]
    log = read_run(tmp_path / "run")
    rows = log.read_metrics()
    assert len(rows) == 2
    for row in rows:
        assert row["engine_mismatch"] < 1e-4  # in step 2, vLLM had the weights that step 1 made
        assert row["tool_calls"] > 0
        assert row["engine_cached_tokens"] > 0
        assert math.isfinite(row["loss"])
        assert 0 <= row["engine_entropy_error"] <= row["engine_entropy_error_max"]
        names = ("engine_mismatch", "tool_calls", "branches", "engine_prefill_tokens", "engine_cached_tokens")
        print("\n", {name: row[name] for name in (*names, "engine_entropy_error", "engine_entropy_error_max")})
    trees = [scored.tree for step in log.tree_steps() for scored in log.read_trees(step)]
    assert sum(row["branches"] for row in rows) == sum(t.branch_points > 0 and _branches(t) for t in trees) > 0
    versions = {node.policy_version for tree in trees for node in tree.nodes if node.kind is Kind.MODEL}
    assert versions == {0, 1}


def _branches(tree: Any) -> int:
    return sum(node.decision.branches for node in tree.nodes if node.decision is not None)
