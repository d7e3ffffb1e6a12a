"""The local engine against plain forward passes: exact numbers whatever is batched, forked, preempted or evicted."""

from __future__ import annotations

import asyncio
import math
import random
import threading
from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import CONTEXT, EOS, FAMILIES, VOCAB, WINDOW, Letters, logits_of, make_model, plain_numbers

from arpo.builtin.model import build_model
from arpo.engine.local.engine import LocalEngine
from arpo.engine.local.kv_cache import BLOCK_SIZE
from arpo.engine.local.runner import StepOutput
from arpo.engine.local.scheduler import Batch
from arpo.engine.stops import MAX_FINDERS, StopFinder, TurnEnds
from arpo.errors import ArpoError
from arpo.types import Completion, SamplingParams

GREEDY = SamplingParams(max_tokens=12, temperature=0.0)
plain_model = cache(make_model)  # no engine ever touches these


def run(engine: LocalEngine, *requests: tuple[list[int], SamplingParams]) -> list[Completion]:
    async def all_of_them() -> list[Completion]:
        return list(await asyncio.gather(*(engine.generate(prefix, params) for prefix, params in requests)))

    return asyncio.run(all_of_them())


def small(family: str = "llama-gqa", **options: Any) -> LocalEngine:
    return LocalEngine(
        make_model(family), Letters(), **{"max_num_seqs": 8, "kv_cache_tokens": 1024, "threaded": False, **options}
    )


def prompts(count: int, seed: int = 0, longest: int = 40) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(4, VOCAB) for _ in range(rng.randint(1, longest))] for _ in range(count)]


def watch(engine: LocalEngine, steps: threading.Semaphore | None = None) -> list[Batch]:
    """Record every batch that the engine computes; with `steps`, each waits for a permit."""
    seen: list[Batch] = []
    compute = engine._runner.run

    def watching(batch: Batch) -> Any:
        seen.append(batch)
        if steps is not None and not steps.acquire(timeout=60):
            raise AssertionError("no permit for the step: the event loop was blocked")
        return compute(batch)

    engine._runner.run = watching  # type: ignore[method-assign]
    return seen


def force(engine: LocalEngine, said: list[list[int]]) -> None:
    """Whatever the model says, the request with seed i yields `said[i]`."""
    compute = engine._runner.run

    def forced(batch: Batch) -> Any:
        asking = [batch.requests[i] for i in batch.sampling_rows]
        return StepOutput(
            [said[r.params.seed][len(r.tokens) - r.num_prefix_tokens] for r in asking], *compute(batch)[1:]
        )

    engine._runner.run = forced  # type: ignore[method-assign]


def assert_exact(model: Any, prefix: list[int], params: SamplingParams, done: Completion) -> None:
    logprobs, entropies, most_likely = plain_numbers(model, prefix, done.tokens, params.temperature)
    assert done.logprobs == pytest.approx(logprobs, abs=1e-4)
    assert done.entropies == pytest.approx(entropies, abs=1e-4)
    if params.temperature == 0:
        assert list(done.tokens) == most_likely


def assert_idle(engine: LocalEngine) -> None:
    scheduler = engine._scheduler
    assert not scheduler.running and not scheduler.waiting
    assert scheduler.tree.num_available * BLOCK_SIZE == engine.kv_cache_tokens


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_generate(family: str) -> None:
    """Ragged prompts in one batch, prefilled in small chunks, some longer than a block and than a window."""
    model, engine = plain_model(family), small(family, max_num_seqs=3, prefill_tokens=17)
    given = [*prompts(3, seed=3), *((prompt * 40)[: 2 * BLOCK_SIZE + 9] for prompt in prompts(2, seed=4))]
    assert any(len(prompt) > 2 * BLOCK_SIZE > WINDOW for prompt in given)
    for prefix, done in zip(given, run(engine, *((p, GREEDY) for p in given)), strict=True):
        tokens = torch.tensor([prefix])
        expected = model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=12, do_sample=False)
        assert list(done.tokens) == expected[0, len(prefix) :].tolist()
        assert_exact(model, prefix, GREEDY, done)


TURN = st.tuples(
    st.integers(0, 5),  # the earlier turn that it continues; 0: none
    st.integers(0, 100),  # with how much of its text, in percent
    st.integers(0, 60),  # new tokens of the prompt: a question, a tool's result
    st.integers(1, 14),  # tokens to sample
    st.sampled_from([0.0, 0.7, 1.0]),
    st.none() | st.integers(0, 8),  # cancelled after so many tokens
)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    turns=st.lists(TURN, min_size=4, max_size=10),
    blocks=st.integers(6, 9),
    rows=st.integers(1, 6),
    prefill=st.sampled_from([11, 40, 512]),
    threaded=st.booleans(),
)
def test_forks_pauses_cancellations_and_evictions_change_nothing(
    family: str, turns: list[Any], blocks: int, rows: int, prefill: int, threaded: bool
) -> None:
    """Conversations that pause, continue, branch and are cancelled, with a KV cache far too small for them."""
    model = plain_model(family)
    engine = small(
        family, max_num_seqs=rows, kv_cache_tokens=blocks * BLOCK_SIZE, prefill_tokens=prefill, threaded=threaded
    )

    async def turn(number: int, before: list[asyncio.Task[list[int]]]) -> list[int]:
        back, share, new, length, temperature, cancel = turns[number]
        known = await before[-back] if 0 < back <= len(before) else []
        rng = random.Random(number)
        prefix = [*known[: len(known) * share // 100], *(rng.randrange(4, VOCAB) for _ in range(new)), 5]
        prefix = prefix[: blocks * BLOCK_SIZE - length]
        stop = (">",) if number % 2 else ()
        params = SamplingParams(length, temperature, stop=stop, seed=number)
        heard: list[tuple[int, float, float]] = []

        def receive(*token: Any) -> None:
            heard.append(token)
            if len(heard) == cancel:
                asyncio.get_running_loop().call_soon(task.cancel)

        task = asyncio.create_task(engine.generate(prefix, params, on_token=receive))
        if cancel == 0:
            asyncio.get_running_loop().call_soon(task.cancel)
        try:
            done = await task
        except asyncio.CancelledError:
            tokens, logprobs, entropies = zip(*heard, strict=True) if heard else ((), (), ())
            done = Completion(tokens, logprobs, entropies, "cancelled")
        assert heard == list(zip(done.tokens, done.logprobs, done.entropies, strict=True))
        assert_exact(model, prefix, params, done)
        if done.finish != "cancelled":
            ends = {EOS: "eos", **({3: "stop"} if stop else {})}
            assert done.finish == ends.get(done.tokens[-1], "length")
            assert len(done.tokens) == length or done.finish != "length"
            assert not {*done.tokens[:-1]} & {*ends}
        return [*prefix, *done.tokens]

    async def story() -> None:
        tasks: list[asyncio.Task[list[int]]] = []
        for number in range(len(turns)):
            tasks.append(asyncio.create_task(turn(number, list(tasks))))
        await asyncio.gather(*tasks)
        if engine._loop_task is not None:  # the step of a cancelled request may still run
            await engine._loop_task

    asyncio.run(story())
    assert_idle(engine)


@pytest.mark.slow
def test_preempted_requests_yield_what_they_would_have_yielded() -> None:
    asked = [(p, SamplingParams(60, 1.0, seed=i)) for i, p in enumerate(prompts(6, seed=8, longest=30))]
    roomy, tight = small(), small(kv_cache_tokens=5 * BLOCK_SIZE)
    expected = run(roomy, *asked)
    got = run(tight, *asked)
    assert roomy._scheduler.preemptions == 0 < tight._scheduler.preemptions
    assert [done.tokens for done in got] == [done.tokens for done in expected]
    for (prefix, params), done in zip(asked, got, strict=True):
        assert_exact(plain_model("llama-gqa"), prefix, params, done)


@pytest.mark.slow
def test_a_thousand_requests_through_a_small_kv_cache() -> None:
    """Each takes one block; all finish, and the checked ones have the right log-probs."""
    engine = small(max_num_seqs=128, kv_cache_tokens=50 * BLOCK_SIZE)
    assert (
        engine.kv_cache_tokens == 50 * BLOCK_SIZE == engine._cache.data.shape[2] * BLOCK_SIZE - BLOCK_SIZE
    )  # one more, for padding
    asked = [(p, SamplingParams(3, seed=i)) for i, p in enumerate(prompts(1000, longest=25))]
    done = run(engine, *asked)
    assert all(1 <= len(completion.tokens) <= 3 for completion in done)
    for i in range(0, 1000, 61):
        assert_exact(plain_model("llama-gqa"), *asked[i], done[i])
    assert_idle(engine)


def test_the_kv_cache_has_the_requested_size() -> None:
    assert small(kv_cache_tokens=70).kv_cache_tokens == 64  # whole blocks
    with pytest.raises(ArpoError, match=r"rollout.kv_cache_tokens: .* tokens take .* TB, and this device has .* GB"):
        small(kv_cache_tokens=10**12)
    with pytest.raises(ArpoError, match="at least 64 tokens"):
        small(kv_cache_tokens=40)


@pytest.mark.parametrize(("rows", "context"), [(1, 40), (1, 100), (2, 90)])
def test_by_default_every_row_can_be_as_long_as_the_context(rows: int, context: int) -> None:
    model = make_model("llama")
    model.config.max_position_embeddings = context
    engine = LocalEngine(model, Letters(), max_num_seqs=rows, threaded=False)
    done = run(engine, *(([5] * (context - 3), SamplingParams(50, seed=i)) for i in range(rows)))
    assert all(len(completion.tokens) == 3 or completion.finish == "eos" for completion in done)
    assert engine._scheduler.preemptions == 0


def test_what_can_never_fit_is_refused_with_the_numbers() -> None:
    engine = small(kv_cache_tokens=3 * BLOCK_SIZE)
    with pytest.raises(ArpoError, match=r"60 tokens and up to 37 new ones can never fit into the KV cache of 96"):
        run(engine, ([5] * 60, SamplingParams(37)))
    [done] = run(engine, ([5] * 60, SamplingParams(36, seed=1)))
    assert len(done.tokens) == 36 or done.finish == "eos"


def test_forks_compute_a_few_tokens_and_store_shared_blocks_once() -> None:
    engine = small(max_num_seqs=16)
    batches, prefix = watch(engine), (prompts(1, seed=5)[0] * 9)[:200]
    done = run(engine, *((prefix, SamplingParams(4, seed=i)) for i in range(5)))
    tokens = [int(batch.counts.sum()) for batch in batches]
    assert tokens[0] == len(prefix)  # one request reads it
    assert sum(tokens[1:]) <= 4 + 4 * 4  # the others compute its last token, and then what they sample
    assert max(len({*batch.block_table.flat}) for batch in batches) <= len(prefix) // BLOCK_SIZE + 5
    batches.clear()
    result = [7, 8, 9]
    run(engine, ([*prefix, *done[0].tokens, *result], SamplingParams(1)), ([*prefix, *result], SamplingParams(1)))
    assert sum(int(batch.counts.sum()) for batch in batches) == 1 + 2 * len(result)  # the last sampled one, and these


def test_sequences_with_equal_beginnings_continue_from_the_cache() -> None:
    """Three sequences sample the same tokens for more than a block, each into its own blocks, and then differ."""
    engine, said = small(max_num_seqs=4), [[7] * 40 + [8 + i] * 40 for i in range(3)]
    force(engine, said)
    run(engine, *(([5, 6], SamplingParams(80, seed=i)) for i in range(3)))
    batches = watch(engine)
    run(engine, *(([5, 6, *said[i], 9], SamplingParams(1, seed=i)) for i in range(3)))
    assert [batch.counts.tolist() for batch in batches] == [[2, 2, 2]]  # the last sampled one, and the new one


def test_a_long_prompt_does_not_block_decoding() -> None:
    engine = small(prefill_tokens=32)
    batches, long = watch(engine), prompts(1, seed=9)[0] * 30

    async def meanwhile() -> list[Completion]:
        others = [asyncio.create_task(engine.generate([5 + i], SamplingParams(30, 0.0))) for i in range(3)]
        while not batches:
            await asyncio.sleep(0)
        return [await engine.generate(long[:300], SamplingParams(2)), *await asyncio.gather(*others)]

    done = asyncio.run(meanwhile())
    reading = [batch for batch in batches if batch.counts.max() > 1]
    assert [int(batch.counts.max()) for batch in reading] == [32] * 9 + [300 - 9 * 32]
    alive = sum(len(completion.tokens) > 12 for completion in done[1:])
    assert alive and all((batch.counts == 1).sum() >= alive for batch in reading)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sampled_tokens_follow_the_softmax(temperature: float) -> None:
    """Chi-square over 3,000 requests with different seeds; rare tokens are pooled."""
    engine, prefix, draws = small(max_num_seqs=128, kv_cache_tokens=300 * BLOCK_SIZE), [5, 6, 7, 8], 3000
    done = run(engine, *((prefix, SamplingParams(1, temperature, seed=i)) for i in range(draws)))
    counts = Counter(completion.tokens[0] for completion in done)
    probs = (logits_of(plain_model("llama-gqa"), prefix)[-1] / temperature).softmax(-1).tolist()
    common = [token for token, p in enumerate(probs) if p * draws >= 8]
    bins = [(counts[token], probs[token] * draws) for token in common]
    bins.append((draws - sum(n for n, _ in bins), draws - sum(p for _, p in bins)))
    chi_square, freedom = sum((n - p) ** 2 / p for n, p in bins), len(bins) - 1
    assert freedom > 8
    assert chi_square < freedom + 3.3 * math.sqrt(2 * freedom) + 4  # above the 0.1 % quantile for all such freedoms


def test_cuts_are_reported_beside_the_full_numbers() -> None:
    model, engine = plain_model("llama-gqa"), small()
    given = prompts(6, seed=4)
    cuts: list[dict[str, Any]] = [{}, {"top_k": 3}, {"top_p": 0.6}, {"top_k": 5, "top_p": 0.8}, {"top_k": 1}, {}]
    asked = [(p, SamplingParams(9, 1.0, seed=i, **cut)) for i, (p, cut) in enumerate(zip(given, cuts, strict=True))]
    for (prefix, params), done in zip(asked, run(engine, *asked), strict=True):
        assert_exact(model, prefix, params, done)
        if params.top_p == 1 and params.top_k == 0:
            assert done.cut_logprobs == done.cut_entropies == ()
            continue
        rows = logits_of(model, [*prefix, *done.tokens])[len(prefix) - 1 : -1].softmax(-1).tolist()
        expected = []
        for row, token in zip(rows, done.tokens, strict=True):
            order = sorted(row, reverse=True)[: params.top_k or None]
            kept = [p for i, p in enumerate(order) if sum(order[:i]) < params.top_p * sum(order)]
            shares = [p / sum(kept) for p in kept]
            assert row[token] >= kept[-1]
            expected.append((math.log(row[token] / sum(kept)), -sum(p * math.log(p) for p in shares)))
        assert done.cut_logprobs == pytest.approx([logprob for logprob, _ in expected], abs=1e-4)
        assert done.cut_entropies == pytest.approx([entropy for _, entropy in expected], abs=1e-4)


def test_seeds_decide_whatever_else_is_batched() -> None:
    given = prompts(8, seed=2)
    asked = [(p, SamplingParams(20, 1.0, seed=i)) for i, p in enumerate(given)]
    alone = [run(small(max_num_seqs=1), request)[0].tokens for request in asked]
    together = [c.tokens for c in run(small(), *asked, (given[0], SamplingParams(9, top_k=3)))]
    assert alone == together[:-1]
    assert run(small(), (given[0], SamplingParams(20, 1.0, seed=99)))[0].tokens != alone[0]


@pytest.mark.slow
def test_the_same_requests_give_the_same_bits_with_and_without_a_thread() -> None:
    asked = [(p, SamplingParams(20, 1.0, seed=i)) for i, p in enumerate(prompts(20, seed=2))]
    first, again, threaded = (
        run(small(max_num_seqs=6, threaded=threaded), *asked) for threaded in (False, False, True)
    )
    assert first == again == threaded


def test_stop_strings_end_a_turn_and_keep_their_tokens(tokenizer: Any) -> None:
    said = "<think> Find it.</think><search> Mira</search> and more"
    tokens = tokenizer(said, add_special_tokens=False).input_ids
    finder = StopFinder(tokenizer, ("</search>", "</answer>"))
    found = [finder.find(tokens[: i + 1]) for i in range(len(tokens))]
    assert [stop for stop in found if stop] == ["</search>"] * sum(bool(stop) for stop in found)
    first = next(i for i, stop in enumerate(found) if stop)
    assert tokenizer.decode(tokens[: first + 1]).endswith("</search>")


@pytest.mark.parametrize("stop", ["kelso", "é!", "→", "birth place", ">\n"])
def test_stop_strings_over_several_tokens(tokenizer: Any, stop: str) -> None:
    text = f"some words {stop} and others"
    tokens = tokenizer(text, add_special_tokens=False).input_ids
    finder = StopFinder(tokenizer, (stop,))
    shortest = next(i for i in range(1, len(tokens) + 1) if stop in tokenizer.decode(tokens[:i]))
    assert next(i for i in range(1, len(tokens) + 1) if finder.find(tokens[:i])) == shortest


def test_a_stop_string_must_have_been_sampled_as_a_whole() -> None:
    engine = small()
    force(engine, [[3, 2, 3, 9]])
    [done] = run(engine, ([5, 2], SamplingParams(4, stop=("<>",))))  # the prefix ends in "<", and ">" comes first
    assert (done.tokens, done.finish, done.stop) == ((3, 2, 3), "stop", "<>")


def test_stop_strings_may_end_in_a_token_that_is_one_byte() -> None:
    """Vocabularies made of characters have a token for each byte, whose name does not hold its character."""

    class Bytes(Letters):
        def convert_ids_to_tokens(self, ids: Any) -> list[str]:
            return [
                "<0x65>" if i == 7 else piece for i, piece in zip(ids, super().convert_ids_to_tokens(ids), strict=True)
            ]

        def decode(self, ids: Any, **_: Any) -> str:
            return "".join("e" if i == 7 else self.alphabet[i] for i in ids)

    assert StopFinder(Bytes(), ("<e",)).find([5, 2, 7]) == "<e"


def test_stats_count_prefill_and_cached_tokens() -> None:
    engine, prefix = small(), prompts(1, seed=5, longest=80)[0] * 2
    run(engine, (prefix, SamplingParams(1)))
    run(engine, ([*prefix, 7, 8], SamplingParams(1)))
    stats = engine.stats()
    assert (stats["prefill_tokens"], stats["cached_tokens"], stats["preemptions"]) == (
        len(prefix) - 1 + 1,
        len(prefix),
        0,
    )
    assert engine.stats()["prefill_tokens"] == 0  # since the last call
    tight = small(kv_cache_tokens=3 * BLOCK_SIZE)
    run(tight, *(([5 + i] * 20, SamplingParams(70, seed=i)) for i in range(3)))
    assert tight.stats()["preemptions"] > 0


def test_the_callback_gets_every_token(tiny_model: Any, tokenizer: Any) -> None:
    heard: list[tuple[int, float, float]] = []

    async def listen() -> Completion:
        engine = LocalEngine(tiny_model, tokenizer, max_num_seqs=2)
        return await engine.generate([5, 6], SamplingParams(9, seed=4), on_token=lambda *t: heard.append(t))

    done = asyncio.run(listen())
    assert done.finish == "length"
    assert heard == list(zip(done.tokens, done.logprobs, done.entropies, strict=True))


def test_eos_is_kept_as_sampled(tokenizer: Any) -> None:
    model = build_model(tokenizer, hidden=32, layers=1, max_context=64, seed=0).eval()
    with torch.no_grad():  # make eos nearly certain: its embedding points where the last hidden state points
        hidden = model.model(torch.tensor([[5]])).last_hidden_state[0, -1]
        model.lm_head.weight[tokenizer.eos_token_id] = hidden * 100
    [done] = run(LocalEngine(model, tokenizer, max_num_seqs=2), ([5], SamplingParams(9, 0.0)))
    assert (done.tokens, done.finish) == ((tokenizer.eos_token_id,), "eos")


def test_the_context_is_never_exceeded() -> None:
    engine = small()
    [done] = run(engine, ([5] * (CONTEXT - 3), SamplingParams(50, seed=1)))
    assert (len(done.tokens), done.finish) in [(3, "length"), *((n, "eos") for n in range(1, 4))]
    for prefix, params in [([5] * CONTEXT, SamplingParams(1)), ([], SamplingParams(1)), ([5], SamplingParams(0))]:
        with pytest.raises(ValueError, match="context"):
            run(engine, (prefix, params))


def test_cancelled_requests_release_everything_at_once() -> None:
    engine = small(max_num_seqs=2, prefill_tokens=16)

    async def cancel_some() -> Completion:
        doomed = [asyncio.create_task(engine.generate([5, i] * 40, SamplingParams(200))) for i in range(4)]
        for _ in range(8):
            await asyncio.sleep(0)
        assert engine._scheduler.running and engine._scheduler.waiting
        for task in doomed:
            task.cancel()
        await asyncio.gather(*doomed, return_exceptions=True)
        assert_idle(engine)
        return await engine.generate([5, 6], GREEDY)  # needs a row of theirs

    assert_exact(plain_model("llama-gqa"), [5, 6], GREEDY, asyncio.run(cancel_some()))


def test_requests_cancelled_during_a_step_are_removed_after_it() -> None:
    """Requests that decode, one whose prompt waits for prefill, and one in the queue."""
    engine, steps = small(max_num_seqs=3, threaded=True, prefill_tokens=32), threading.Semaphore(1)
    batches = watch(engine, steps)

    async def cancel_in_the_middle() -> Completion:
        kept = asyncio.create_task(engine.generate([9], SamplingParams(6, 0.0)))
        long = [[5, i] * 70 for i in range(3)]
        doomed = [asyncio.create_task(engine.generate(prefix, SamplingParams(100))) for prefix in long]
        while len(batches) < 2:
            await asyncio.sleep(0.002)
        for task in doomed:
            task.cancel()
        await asyncio.gather(*doomed, return_exceptions=True)
        assert len(batches) == 2 and not kept.done()
        steps.release()
        while len(batches) == 2:
            await asyncio.sleep(0.002)
        assert len(batches[-1].requests) == 1
        assert len(engine._scheduler.running) == 1 and not engine._scheduler.waiting
        steps.release(100)
        return await kept

    assert asyncio.run(cancel_in_the_middle()).tokens == run(small(), ([9], SamplingParams(6, 0.0)))[0].tokens
    assert_idle(engine)


def test_weights_may_change_right_after_a_cancellation() -> None:
    """A trajectory that reached its time limit during a step must not make the update fail."""
    engine, steps = small(threaded=True), threading.Semaphore(0)
    batches = watch(engine, steps)

    async def cancel_and_update() -> Completion:
        task = asyncio.create_task(engine.generate([5, 6], SamplingParams(50)))
        while not batches:
            await asyncio.sleep(0.002)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        asyncio.get_running_loop().call_later(0.02, steps.release, 100)  # the update has to wait for the step
        await engine.sync_weights(1)
        return await engine.generate([5, 6, 7], GREEDY)

    done = asyncio.run(cancel_and_update())
    assert done.policy_version == 1
    assert_exact(plain_model("llama-gqa"), [5, 6, 7], GREEDY, done)
    assert_idle(engine)


@pytest.mark.parametrize("during", [True, False])
def test_an_event_loop_that_ends_early_leaves_the_engine_usable(during: bool) -> None:
    """As with Ctrl-C, during a step or near its end: unfinished requests are dropped."""
    engine, steps = small(threaded=True), threading.Semaphore(0)
    batches = watch(engine, steps)

    async def interrupted() -> None:
        tasks = [asyncio.create_task(engine.generate([5, i], SamplingParams(200))) for i in range(12)]
        while not batches:
            await asyncio.sleep(0.001)
        assert not any(task.done() for task in tasks)
        if not during:
            steps.release(100)
        raise KeyError("enough")

    with pytest.raises(KeyError, match="enough"):
        asyncio.run(interrupted())
    steps.release(1000)
    assert_idle(engine)
    asyncio.run(engine.sync_weights(1))
    batches.clear()
    assert run(engine, ([5, 6], GREEDY))[0].tokens == run(small(), ([5, 6], GREEDY))[0].tokens
    assert all(len(batch.requests) == 1 for batch in batches)


def test_timers_and_tools_go_on_while_the_model_computes() -> None:
    """A step that ends only after five tools have: with a blocked event loop, none of them would."""
    engine, steps = small(threaded=True), threading.Semaphore(0)
    batches = watch(engine, steps)

    async def both() -> None:
        turn = asyncio.create_task(engine.generate([5, 6], SamplingParams(2)))
        while not batches:
            await asyncio.sleep(0.002)
        for _ in range(5):
            await asyncio.sleep(0.02)
        assert len(batches) == 1 and not turn.done()
        steps.release(2)
        await turn

    asyncio.run(both())


def test_new_weights_invalidate_old_prefixes() -> None:
    model, prefix = make_model("qwen2"), [5, 6, 7, 8, 9] * 9
    engine = LocalEngine(model, Letters(), max_num_seqs=2, kv_cache_tokens=256)

    async def change() -> Completion:
        before = await engine.generate(prefix, SamplingParams(4, seed=1))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.2)
        await engine.sync_weights(3)
        assert before.policy_version == 0
        return await engine.generate(prefix, SamplingParams(4, seed=1))

    after = asyncio.run(change())
    assert (after.policy_version, engine.version) == (3, 3)
    assert_exact(model, prefix, SamplingParams(4), after)


def test_weights_may_not_change_during_a_request() -> None:
    async def change_too_early() -> None:
        engine = small()
        request = asyncio.create_task(engine.generate([5], SamplingParams(50)))
        await asyncio.sleep(0)
        try:
            await engine.sync_weights(1)
        finally:
            request.cancel()

    with pytest.raises(RuntimeError, match="while requests"):
        asyncio.run(change_too_early())


@pytest.mark.parametrize("threaded", [True, False])
def test_a_failing_model_fails_every_request_instead_of_hanging(threaded: bool) -> None:
    engine = small(max_num_seqs=2, threaded=threaded)
    compute, steps = engine._runner.run, []

    def broken(batch: Batch) -> Any:
        steps.append(batch)
        if len(steps) == 3:
            raise RuntimeError("out of memory")
        return compute(batch)

    engine._runner.run = broken  # type: ignore[method-assign]

    async def all_of_them() -> list[Any]:
        requests = (engine.generate([5, 6, i], GREEDY) for i in range(5))
        return list(await asyncio.gather(*requests, return_exceptions=True))

    assert [str(error) for error in asyncio.run(all_of_them())] == ["out of memory"] * 5
    assert_idle(engine)
    assert run(engine, ([5, 6, 7], GREEDY)) == run(small(), ([5, 6, 7], GREEDY))


def test_errors_of_the_loop_task_reach_the_callers() -> None:
    """Also what is no `Exception`, as a test's time limit or `sys.exit` in a signal handler."""
    engine = small()

    class Enough(BaseException):
        pass

    def broken(_: Batch) -> Any:
        raise Enough

    engine._runner.run = broken  # type: ignore[method-assign]
    with pytest.raises(Enough):
        asyncio.run(asyncio.wait_for(engine.generate([5, 6], GREEDY), 60))


@pytest.mark.parametrize(
    "broken", ["model.embed_tokens.weight", "lm_head.weight", "model.layers.0.self_attn.v_proj.weight"]
)
def test_weights_that_are_not_finite_raise_and_can_be_repaired(broken: str) -> None:
    model = make_model("llama-gqa")
    engine = LocalEngine(model, Letters(), max_num_seqs=2, kv_cache_tokens=128)
    weight = dict(model.named_parameters())[broken]
    right = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(math.nan)
    for temperature in (0.0, 1.0):
        with pytest.raises(ArpoError, match="not a number: its weights are broken"):
            run(engine, *(([5, 6, i] * 20, SamplingParams(9, temperature)) for i in range(4)))
    with torch.no_grad():
        weight.copy_(right)
    asyncio.run(engine.sync_weights(1))
    [done] = run(engine, ([5, 6, 7], GREEDY))
    assert_exact(plain_model("llama-gqa"), [5, 6, 7], GREEDY, done)


def test_a_failing_callback_fails_its_own_request_only() -> None:
    engine = small()

    async def both() -> list[Any]:
        def broken(*_: Any) -> None:
            raise RuntimeError("mine")

        bad = engine.generate([5, 6], GREEDY, on_token=broken)
        return list(await asyncio.gather(bad, engine.generate([7, 8], GREEDY), return_exceptions=True))

    bad, good = asyncio.run(both())
    assert isinstance(bad, RuntimeError)
    assert good.tokens == run(small(), ([7, 8], GREEDY))[0].tokens
    assert_idle(engine)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"model_type": "mamba"}, "mamba"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "chunked_attention"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "dynamic RoPE"),
        ({"rope_parameters": {"full_attention": {"rope_type": "longrope"}}}, "dynamic RoPE"),
        ({"attn_logit_softcapping": 50.0}, "capped attention scores"),
        ({"use_bidirectional_attention": True}, "bidirectional"),
    ],
)
def test_unsupported_models_are_refused_by_name(changes: dict[str, Any], told: str) -> None:
    class Other:
        config = type("C", (), {"model_type": "llama", **changes})()

    with pytest.raises(ArpoError, match=told):
        LocalEngine(Other(), Letters())


def test_a_model_with_an_adapter_is_run_unmerged() -> None:
    peft = pytest.importorskip("peft")
    layers = ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj"]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = peft.LoraConfig(r=2, target_modules=layers, init_lora_weights=False)
        model = peft.get_peft_model(make_model("llama-gqa"), config).eval()
    engine = LocalEngine(model, Letters(), max_num_seqs=2, kv_cache_tokens=256, threaded=False)
    [done] = run(engine, ([5, 6, 7] * 15, GREEDY))
    assert_exact(model, [5, 6, 7] * 15, GREEDY, done)
    expected = plain_numbers(plain_model("llama-gqa"), [5, 6, 7] * 15, done.tokens, 1.0)[0]
    assert done.logprobs != pytest.approx(expected, abs=1e-2)  # the adapter does matter


def test_torchs_default_dtype_does_not_matter() -> None:
    """Another thread may change it while it loads a model."""
    given = [(prompt, GREEDY) for prompt in prompts(2, seed=6)]
    expected = run(small(), *given)
    engine = small()
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert run(engine, *given) == expected
    finally:
        torch.set_default_dtype(torch.float32)


def test_stop_strings_that_differ_from_request_to_request_do_not_pile_up(tokenizer: Any) -> None:
    ends = TurnEnds(None, tokenizer, eos=frozenset())
    tokens = tokenizer("<answer>", add_special_tokens=False)["input_ids"]
    for number in range(2 * MAX_FINDERS):
        assert ends.check(tokens, 0, (f"stop {number}>", "answer>"), 100) == ("stop", "answer>")
        assert len(ends._finders) <= MAX_FINDERS
