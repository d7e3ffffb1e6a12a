"""The local engine against plain forward passes: exact numbers whatever is batched, forked or evicted."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections import Counter
from typing import Any

import pytest
import torch

from arpo.engine.local import LocalEngine, _common
from arpo.engine.sampling import cut_top_p, sample
from arpo.engine.stops import StopFinder
from arpo.trainer.tiny import build_model
from arpo.types import ArpoError, Completion, SamplingParams

GREEDY = SamplingParams(max_tokens=12, temperature=0.0)


def run(engine: LocalEngine, *requests: tuple[list[int], SamplingParams]) -> list[Completion]:
    async def all_of_them() -> list[Completion]:
        return list(await asyncio.gather(*(engine.generate(prefix, params) for prefix, params in requests)))

    return asyncio.run(all_of_them())


def prompts(count: int, seed: int = 0, longest: int = 40) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(4, 300) for _ in range(rng.randint(1, longest))] for _ in range(count)]


def plain(model: Any, prefix: list[int], completion: Completion, temperature: float) -> tuple[list[float], list[float]]:
    """Log-probs and entropies from one forward pass over everything, straight from the definitions."""
    tokens = torch.tensor([[*prefix, *completion.tokens]])
    with torch.no_grad():
        logits = model(tokens).logits[0, len(prefix) - 1 : -1].double() / (temperature or 1.0)
    probs = logits.softmax(-1)
    logprobs = [math.log(probs[i, token]) for i, token in enumerate(completion.tokens)]
    return logprobs, [-sum(p * math.log(p) for p in row.tolist() if p > 0) for row in probs]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_numbers_equal_a_plain_forward_pass(tiny_model: Any, tokenizer: Any, temperature: float) -> None:
    engine = LocalEngine(tiny_model, tokenizer, rows=6)
    asked = [(p, SamplingParams(15, temperature, seed=i)) for i, p in enumerate(prompts(12))]
    for (prefix, _), completion in zip(asked, run(engine, *asked), strict=True):
        logprobs, entropies = plain(tiny_model, prefix, completion, temperature)
        assert completion.logprobs == pytest.approx(logprobs, abs=1e-4)
        assert completion.entropies == pytest.approx(entropies, abs=1e-4)
        assert len(completion.tokens) == 15 or completion.finish == "eos"


def test_greedy_tokens_equal_generate(tiny_model: Any, tokenizer: Any) -> None:
    given = prompts(5, seed=3)
    got = run(LocalEngine(tiny_model, tokenizer, rows=3), *((p, GREEDY) for p in given))
    for prefix, completion in zip(given, got, strict=True):
        expected = tiny_model.generate(
            torch.tensor([prefix]), attention_mask=torch.ones(1, len(prefix)), max_new_tokens=12, do_sample=False
        )
        assert list(completion.tokens) == expected[0, len(prefix) :].tolist()


def test_forks_pauses_and_evictions_change_nothing(tiny_model: Any, tokenizer: Any) -> None:
    """Conversations that go on after pauses and branch at random points, through a pool far too small for them."""
    engine = LocalEngine(tiny_model, tokenizer, rows=4)
    rng = random.Random(7)

    async def conversation(prefix: list[int], depth: int) -> None:
        await asyncio.sleep(rng.random() * 0.01)
        params = SamplingParams(rng.randint(1, 9), 1.0, seed=rng.randrange(10**6))
        completion = await engine.generate(prefix, params)
        logprobs, entropies = plain(tiny_model, prefix, completion, 1.0)
        assert completion.logprobs == pytest.approx(logprobs, abs=1e-4)
        assert completion.entropies == pytest.approx(entropies, abs=1e-4)
        if depth:
            after = [*prefix, *completion.tokens, *(rng.randrange(4, 300) for _ in range(rng.randint(0, 12)))]
            await asyncio.gather(*(conversation(after, depth - 1) for _ in range(rng.randint(1, 3))))

    async def many() -> None:
        await asyncio.gather(*(conversation(prefix, 3) for prefix in prompts(6, seed=1, longest=30)))

    asyncio.run(many())


def test_prefixes_are_computed_once(tiny_model: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = LocalEngine(tiny_model, tokenizer, rows=8)
    computed: list[int] = []
    forward = engine._forward

    def counting(tokens_BQ: torch.Tensor, starts_B: torch.Tensor, first: int, logits: bool) -> Any:
        if not logits:
            computed.append(tokens_BQ.numel())
        return forward(tokens_BQ, starts_B, first, logits)

    monkeypatch.setattr(engine, "_forward", counting)
    prefix = prompts(1, seed=5, longest=40)[0] * 3
    done = run(engine, *((prefix, SamplingParams(4, seed=i)) for i in range(5)))
    assert sum(computed) == len(prefix) - 1  # one request computes, the others copy
    computed.clear()
    result = [7, 8, 9]
    run(engine, ([*prefix, *done[0].tokens, *result], SamplingParams(4)), ([*prefix, *result], SamplingParams(4)))
    assert sum(computed) <= 2 * (1 + len(result))  # the last sampled token and the new ones


def test_seeds_decide_whatever_else_is_batched(tiny_model: Any, tokenizer: Any) -> None:
    given = prompts(8, seed=2)
    asked = [(p, SamplingParams(20, 1.0, seed=i)) for i, p in enumerate(given)]
    alone = [run(LocalEngine(tiny_model, tokenizer, rows=1), request)[0].tokens for request in asked]
    together = [c.tokens for c in run(LocalEngine(tiny_model, tokenizer, rows=8), *asked)]
    assert alone == together
    assert run(LocalEngine(tiny_model, tokenizer), (given[0], SamplingParams(20, 1.0, seed=99)))[0].tokens != alone[0]


def test_the_same_requests_give_the_same_bits(tiny_model: Any, tokenizer: Any) -> None:
    asked = [(p, SamplingParams(20, 1.0, seed=i)) for i, p in enumerate(prompts(8, seed=2))]
    assert run(LocalEngine(tiny_model, tokenizer), *asked) == run(LocalEngine(tiny_model, tokenizer), *asked)


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


def test_length_and_eos_and_the_callback(tiny_model: Any, tokenizer: Any) -> None:
    heard: list[tuple[int, float, float]] = []

    async def listen() -> Completion:
        engine = LocalEngine(tiny_model, tokenizer)
        return await engine.generate([5, 6], SamplingParams(9, seed=4), on_token=lambda *t: heard.append(t))

    done = asyncio.run(listen())
    assert done.finish == "length"
    assert heard == list(zip(done.tokens, done.logprobs, done.entropies, strict=True))


def test_eos_is_kept_as_sampled(tokenizer: Any) -> None:
    model = build_model(tokenizer, hidden=32, layers=1, max_context=64, seed=0).eval()
    with torch.no_grad():  # make eos nearly certain: its embedding points where the last hidden state points
        hidden = model.model(torch.tensor([[5]])).last_hidden_state[0, -1]
        model.lm_head.weight[tokenizer.eos_token_id] = hidden * 100
    [done] = run(LocalEngine(model, tokenizer), ([5], SamplingParams(9, 0.0)))
    assert (done.tokens, done.finish) == ((tokenizer.eos_token_id,), "eos")


def test_the_context_is_never_exceeded(tiny_model: Any, tokenizer: Any) -> None:
    engine = LocalEngine(tiny_model, tokenizer, rows=2)
    limit = engine.capabilities.max_context
    [done] = run(engine, ([5] * (limit - 3), SamplingParams(50, seed=1)))
    assert (len(done.tokens), done.finish) in [(3, "length"), *((n, "eos") for n in range(1, 4))]
    with pytest.raises(ValueError, match="context"):
        run(engine, ([5] * limit, SamplingParams(1)))


def test_many_requests_through_few_rows_all_finish(tiny_model: Any, tokenizer: Any) -> None:
    engine = LocalEngine(tiny_model, tokenizer, rows=3)
    done = run(engine, *((p, SamplingParams(3, seed=i)) for i, p in enumerate(prompts(60))))
    assert all(1 <= len(completion.tokens) <= 3 for completion in done)
    assert engine._pool.data.shape[2] == 3


def test_cancelled_requests_free_their_rows(tiny_model: Any, tokenizer: Any) -> None:
    async def cancel_some() -> tuple[int, Completion]:
        engine = LocalEngine(tiny_model, tokenizer, rows=2)
        doomed = [asyncio.create_task(engine.generate([5, i], SamplingParams(200))) for i in range(4)]
        await asyncio.sleep(0.05)
        for task in doomed:
            task.cancel()
        await asyncio.gather(*doomed, return_exceptions=True)
        completion = await engine.generate([5, 6], GREEDY)  # needs a row of theirs
        return engine._active, completion

    active, completion = asyncio.run(cancel_some())
    assert active == 0
    assert completion.tokens == run(LocalEngine(tiny_model, tokenizer), ([5, 6], GREEDY))[0].tokens


def test_with_and_without_a_thread_the_bits_are_the_same(tiny_model: Any, tokenizer: Any) -> None:
    asked = [(p, SamplingParams(20, 1.0, seed=i)) for i, p in enumerate(prompts(20, seed=2))]
    engines = (LocalEngine(tiny_model, tokenizer, rows=6, threaded=threaded) for threaded in (True, False))
    with_thread, without = (run(engine, *asked) for engine in engines)
    assert with_thread == without


def test_timers_and_tools_go_on_while_the_model_computes(
    tiny_model: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step takes 0.2 s; a tool that takes 0.02 s must not be seen to take longer."""
    engine = LocalEngine(tiny_model, tokenizer)
    compute = engine._compute

    def slow(first: int) -> Any:
        time.sleep(0.2)
        return compute(first)

    monkeypatch.setattr(engine, "_compute", slow)

    async def tool() -> float:
        started = time.monotonic()
        await asyncio.sleep(0.02)
        return time.monotonic() - started

    async def both() -> float:
        turn = asyncio.create_task(engine.generate([5, 6], SamplingParams(3)))
        await asyncio.sleep(0.01)
        longest = max([await tool() for _ in range(5)])
        await turn
        return longest

    assert asyncio.run(both()) < 0.15


def test_new_weights_invalidate_old_prefixes(tokenizer: Any) -> None:
    model = build_model(tokenizer, hidden=32, layers=2, max_context=64, seed=0).eval()
    engine, prefix = LocalEngine(model, tokenizer), [5, 6, 7, 8, 9]

    async def change() -> Completion:
        before = await engine.generate(prefix, SamplingParams(4, seed=1))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.5)
        await engine.update_weights(3)
        assert before.policy_version == 0
        return await engine.generate(prefix, SamplingParams(4, seed=1))

    after = asyncio.run(change())
    assert after.policy_version == 3
    assert after.logprobs == pytest.approx(plain(model, prefix, after, 1.0)[0], abs=1e-4)


def test_weights_may_not_change_under_a_request(tiny_model: Any, tokenizer: Any) -> None:
    async def change_too_early() -> None:
        engine = LocalEngine(tiny_model, tokenizer)
        request = asyncio.create_task(engine.generate([5], SamplingParams(50)))
        await asyncio.sleep(0)
        try:
            await engine.update_weights(1)
        finally:
            request.cancel()

    with pytest.raises(RuntimeError, match="while requests"):
        asyncio.run(change_too_early())


def test_a_failing_model_fails_the_request_instead_of_hanging(
    tiny_model: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = LocalEngine(tiny_model, tokenizer)

    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(engine, "_forward", broken)
        with pytest.raises(RuntimeError, match="out of memory"):
            run(engine, ([5, 6, 7], GREEDY))
    assert run(engine, ([5, 6, 7], GREEDY)) == run(LocalEngine(tiny_model, tokenizer), ([5, 6, 7], GREEDY))


def test_a_failing_callback_fails_its_own_request_only(tiny_model: Any, tokenizer: Any) -> None:
    async def both() -> list[Any]:
        engine = LocalEngine(tiny_model, tokenizer)

        def broken(*_: Any) -> None:
            raise RuntimeError("mine")

        bad = engine.generate([5, 6], GREEDY, on_token=broken)
        return list(await asyncio.gather(bad, engine.generate([7, 8], GREEDY), return_exceptions=True))

    bad, good = asyncio.run(both())
    assert isinstance(bad, RuntimeError)
    assert good.tokens == run(LocalEngine(tiny_model, tokenizer), ([7, 8], GREEDY))[0].tokens


def test_unsupported_models_are_refused_by_name(tiny_model: Any, tokenizer: Any) -> None:
    class Other:
        config = type("C", (), {"model_type": "mamba"})()

    with pytest.raises(ArpoError, match="mamba"):
        LocalEngine(Other(), tokenizer)


def test_sampled_tokens_follow_the_softmax() -> None:
    """Chi-square of 20,000 draws over 8 tokens; 24.3 is the 0.1 % quantile with 7 degrees of freedom."""
    logits = torch.randn(8, generator=torch.Generator().manual_seed(0)) * 1.5
    rng, draws = random.Random(1), 20_000
    uniform = torch.tensor([rng.random() for _ in range(draws)], dtype=torch.float64)
    ones = torch.ones(draws)
    tokens, logprobs, entropies = sample(logits.expand(draws, 8), ones * 0.8, ones, uniform)
    probs = (logits / 0.8).softmax(-1)
    counts = Counter(tokens.tolist())
    chi_square = sum((counts[i] - draws * p) ** 2 / (draws * p) for i, p in enumerate(probs.tolist()))
    assert chi_square < 24.3
    assert logprobs[0].item() == pytest.approx(math.log(probs[tokens[0]]), abs=1e-6)
    assert entropies[0].item() == pytest.approx(-sum(p * math.log(p) for p in probs.tolist()), abs=1e-6)


def test_top_p_keeps_the_smallest_set_and_reports_uncut_numbers() -> None:
    probs = torch.tensor([[0.5, 0.3, 0.15, 0.05]])
    for top_p, kept in [(0.4, 1), (0.5, 1), (0.6, 2), (0.8, 2), (0.9, 3), (0.96, 4)]:
        assert int((cut_top_p(probs, torch.tensor([top_p])) > 0).sum()) == kept, top_p
    uniform = torch.tensor([0.999], dtype=torch.float64)
    token, logprob, _ = sample(probs.log(), torch.ones(1), torch.tensor([0.6]), uniform)
    assert (token.item(), logprob.item()) == (1, pytest.approx(math.log(0.3), abs=1e-6))


def test_forbidden_tokens_give_no_nan() -> None:
    logits = torch.tensor([[0.0, float("-inf"), 1.0]])
    token, _, entropy = sample(logits, torch.ones(1), torch.ones(1), torch.tensor([0.0], dtype=torch.float64))
    assert token.item() != 1
    assert entropy.item() == pytest.approx(0.5822, abs=1e-3)


def test_common_prefix_length() -> None:
    rng = random.Random(0)
    for _ in range(300):
        a, b = ([rng.randrange(2) for _ in range(rng.randrange(12))] for _ in range(2))
        slow = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        assert _common(a, b) == slow
