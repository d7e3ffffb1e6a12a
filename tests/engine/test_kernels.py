"""The Triton kernels and the whole GPU step, in Triton's interpreter on a CPU.

Needs Triton, which a CPU build of torch does not bring along: `make test-kernels` installs it beside the environment
and runs this file. What is left to a real GPU is in test_cuda.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("only under TRITON_INTERPRET=1: make test-kernels", allow_module_level=True)

from models import FAMILIES, VOCAB, Letters, make_model, plain_numbers

from arpo.engine.local import cuda, kernels
from arpo.engine.local import engine as local
from arpo.engine.local.attention import BlockPlan
from arpo.engine.local.fused import fused
from arpo.engine.local.kernels import Tiles, paged_attention, rows_per_tile, store_kv
from arpo.engine.local.kv_cache import BLOCK_SIZE
from arpo.engine.local.sampling import sample
from arpo.trainer import kernels as training
from arpo.trainer import logprobs
from arpo.types import SamplingParams


@pytest.mark.parametrize("seed", range(10))
def test_attention_equals_the_cpu_implementation(seed: int) -> None:
    rng, decoding = random.Random(seed), seed % 2 == 0
    heads, group, width, blocks = 2, rng.choice([1, 3, 7]), rng.choice([16, 24]), 40
    torch.manual_seed(seed)
    data = torch.randn(1, 2, blocks + 1, heads, BLOCK_SIZE, width)
    free = rng.sample(range(blocks), blocks)
    shared = [free.pop() for _ in range(rng.randint(0, 3))]
    rows = rng.randint(1, 5)
    table, starts, counts = np.zeros((rows, 10), dtype=np.int32), [], []
    for row in range(rows):
        common, own = rng.randint(0, len(shared)), rng.randint(1, 4)
        table[row, : common + own] = shared[:common] + [free.pop() for _ in range(own)]
        starts.append(common * BLOCK_SIZE + rng.randrange(own * BLOCK_SIZE))
        counts.append(1 if decoding else rng.randint(1, (common + own) * BLOCK_SIZE - starts[-1]))
    tokens = sum(counts)
    q, k, v = (
        torch.randn(tokens, heads, group, width),
        torch.randn(tokens, heads, width),
        torch.randn(tokens, heads, width),
    )
    window = rng.choice([None, 5, 40, 100])
    other = data.clone()
    plan = BlockPlan(data, table, np.array(starts), np.array(counts))
    expected = plan.attend(0, q, k, v, 0.3, window)
    store_kv(k, v, other[0, 0], other[0, 1], plan._block_T, plan._offset_T)
    assert torch.equal(other, data)
    first = np.cumsum(counts) - counts
    per_tile = rows_per_tile(group, decoding, torch.float32) // group
    tiles = Tiles(*torch.from_numpy(cuda._tiles(np.array(starts), np.array(counts), first, per_tile)))
    for splits in (1, 4) if decoding else (1,):
        got = paged_attention(
            q, other[0, 0], other[0, 1], torch.from_numpy(table), tiles, 0.3, window, decoding=decoding, splits=splits
        )
        assert (got - expected).abs().max() < 2e-5


def test_keys_are_split_only_where_programs_are_few() -> None:
    assert [cuda._splits(n) for n in (1, 3, 16, 17, 66, 132, 133, 264, 265, 5000)] == [16, 16, 16, 8, 4, 2, 1, 1, 1, 1]


@pytest.mark.parametrize("vocab", [40, 64, 300])
def test_sampling_equals_the_cpu_implementation(vocab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "VOCAB_CHUNK", 64)
    torch.manual_seed(0)
    logits = torch.randn(50, vocab) * 3
    logits[3, 5] = float("-inf")
    temperature, uniform = torch.rand(50).double() + 0.1, torch.rand(50).double()
    temperature[::7], uniform[1], uniform[2] = 0, 0, 0.999
    expected, got = sample(logits, temperature, uniform), kernels.sample(logits, temperature, uniform)
    assert got.token_B.tolist() == expected.token_B.tolist()
    assert (got.logprob_B - expected.logprob_B).abs().max() < 1e-5
    assert (got.entropy_B - expected.entropy_B).abs().max() < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_fused_modules_equal_the_originals(family: str) -> None:
    model, tokens = make_model(family), torch.randint(0, VOCAB, (1, 9))
    original = model(tokens).logits
    with fused(model):
        assert torch.equal(model(tokens).logits, original)  # outside inference mode nothing changes
        with torch.inference_mode():
            assert (model(tokens).logits - original).abs().max() < 1e-4
        with ThreadPoolExecutor(1) as other:  # nor in another thread, whatever its mode
            assert torch.equal(other.submit(torch.inference_mode()(lambda: model(tokens).logits)).result(), original)
    assert torch.equal(model(tokens).logits, original)


class _NoGraphs(cuda.CudaRunner):
    """Steps as on a GPU, but computed instead of replayed."""

    def _graph(self, size: int, cuts: bool) -> Any:
        with fused(self._model):
            got = self._decode(size, cuts)
        return type("Replayed", (), {"replay": lambda self: None})(), got


@pytest.mark.timeout(600)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_gpu_step_equals_a_plain_forward_pass(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: None)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(local, "build_runner", _NoGraphs)
    monkeypatch.setitem(local.MAX_PREFILL_DELAY, "cpu", 8)
    model = make_model(family)
    engine = local.LocalEngine(model, Letters(), max_num_seqs=5, kv_cache_tokens=400, prefill_tokens=64)
    rng = random.Random(1)

    async def conversation(prefix: list[int], depth: int) -> None:
        cuts = {"top_p": 0.8, "top_k": 9} if rng.random() < 0.2 else {}
        params = SamplingParams(rng.randint(1, 5), rng.choice([0.7, 1.0]), seed=rng.randrange(10**6), **cuts)
        done = await engine.generate(prefix, params)
        logprobs, entropies, _ = plain_numbers(model, prefix, done.tokens, params.temperature)
        assert done.logprobs == pytest.approx(logprobs, abs=1e-4)
        assert done.entropies == pytest.approx(entropies, abs=1e-4)
        assert len(done.cut_logprobs) == (len(done.tokens) if cuts else 0)
        if depth:
            after = [*prefix, *done.tokens, *(rng.randrange(VOCAB) for _ in range(rng.randint(0, 20)))]
            await asyncio.gather(*(conversation(after, depth - 1) for _ in range(rng.randint(1, 2))))

    async def many() -> None:
        starts = [[rng.randrange(VOCAB) for _ in range(rng.randint(1, 90))] for _ in range(3)]
        await asyncio.gather(*(conversation(prefix, 1) for prefix in starts))

    asyncio.run(many())


@pytest.mark.parametrize("vocab", [7, 300])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_of_tokens_equal_the_plain_ones(vocab: int, temperature: float, monkeypatch: Any) -> None:
    monkeypatch.setattr(training, "CHUNK", 64)
    torch.manual_seed(0)
    logits_NV, tokens_N = 3 * torch.randn(9, vocab), torch.randint(0, vocab, (9,))
    logits_NV[1, 0], logits_NV[2, :3] = -torch.inf, 500.0
    tokens_N[1:3] = torch.tensor([1, 2])
    expected = logprobs.logprob_forward(logits_NV, tokens_N, temperature)
    torch.testing.assert_close(training.logprob_forward(logits_NV, tokens_N, temperature), expected)
    _, entropy_N, total_N = expected
    for grads in ((torch.randn(9), torch.randn(9)), (torch.randn(9), None), (None, torch.randn(9))):
        given = logits_NV, tokens_N, total_N, entropy_N, *grads, temperature
        torch.testing.assert_close(training.logprob_backward(*given), logprobs.logprob_backward(*given))
