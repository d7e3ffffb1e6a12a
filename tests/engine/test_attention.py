"""Attention over the KV cache against a double-precision loop; models with and without the installed attention."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from models import FAMILIES, VOCAB, Letters, make_model

from arpo.engine.local.attention import BlockPlan
from arpo.engine.local.engine import LocalEngine
from arpo.engine.local.kv_cache import BLOCK_SIZE, KVCache
from arpo.models.network import install_attention

HEADS, GROUP, WIDTH, BLOCKS = 2, 3, 4, 60


def slow_attend(
    data: torch.Tensor, table: Any, starts: Any, counts: Any, q: Any, k: Any, v: Any, scaling: float, window: int | None
) -> torch.Tensor:
    """Write every token, then compute the attention of each over the positions it sees, one by one."""
    places = [(row, start + i) for row, (start, n) in enumerate(zip(starts, counts, strict=True)) for i in range(n)]
    keys, values = data
    for t, (row, position) in enumerate(places):
        keys[table[row, position // BLOCK_SIZE], :, position % BLOCK_SIZE] = k[t]
        values[table[row, position // BLOCK_SIZE], :, position % BLOCK_SIZE] = v[t]
    out = []
    for t, (row, position) in enumerate(places):
        seen = range(0 if window is None else max(0, position - window + 1), position + 1)
        k_LHD = torch.stack([keys[table[row, i // BLOCK_SIZE], :, i % BLOCK_SIZE] for i in seen]).double()
        v_LHD = torch.stack([values[table[row, i // BLOCK_SIZE], :, i % BLOCK_SIZE] for i in seen]).double()
        weights = (torch.einsum("hgd,lhd->hgl", q[t].double(), k_LHD) * scaling).softmax(-1)
        out.append(torch.einsum("hgl,lhd->hgd", weights, v_LHD))
    return torch.stack(out)


def random_rows(rng: random.Random) -> tuple[Any, Any, Any]:
    """Block tables with shared prefixes and gaps in the cache; rows that decode and rows that prefill."""
    rows, free = rng.randint(1, 6), list(range(BLOCKS))
    if rng.random() < 0.5:
        rng.shuffle(free)
    else:
        free = [number for number in free if rng.random() < 0.7][::-1]
    trunk = [free.pop() for _ in range(rng.randint(0, 3))]
    table = np.full((rows, 8), BLOCKS, dtype=np.int32)  # entries after a row's own blocks are never read
    starts, counts = [], []
    for row in range(rows):
        shared, own = rng.randint(0, len(trunk)), rng.randint(1, 3)
        table[row, : shared + own] = [*trunk[:shared], *(free.pop() for _ in range(own))]
        end = (shared + own) * BLOCK_SIZE
        starts.append(
            rng.choice([end - 1, end - BLOCK_SIZE, shared * BLOCK_SIZE, rng.randrange(shared * BLOCK_SIZE, end)])
        )
        counts.append(rng.choice([1, 1, end - starts[-1], rng.randint(1, end - starts[-1])]))
    return table, np.array(starts), np.array(counts)


@pytest.mark.slow
@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6), window=st.sampled_from([None, 1, 5, BLOCK_SIZE, BLOCK_SIZE + 1, 70]))
@example(seed=0, window=None)
def test_attention_equals_a_loop_over_positions(seed: int, window: int | None) -> None:
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    table, starts, counts = random_rows(rng)
    tokens = int(counts.sum())
    data = torch.randn(2, 2, BLOCKS + 1, HEADS, BLOCK_SIZE, WIDTH, generator=generator)
    q = torch.randn(tokens, HEADS, GROUP, WIDTH, generator=generator) * rng.choice([1.0, 20.0])
    k, v = torch.randn(2, tokens, HEADS, WIDTH, generator=generator)
    expected = data.clone()
    wanted = slow_attend(expected[1], table, starts, counts, q, k, v, 0.5, window)
    plan = BlockPlan(data, table, starts, counts)
    got = plan.attend(1, q, k, v, 0.5, window)
    assert torch.equal(data, expected)  # the new keys and values are stored, and nothing else has changed
    assert (got - wanted).abs().max() < 1e-5
    positions = [start + i for start, n in zip(starts, counts, strict=True) for i in range(n)]
    assert plan.position_T.tolist() == positions


def test_a_plan_serves_layers_with_and_without_a_window() -> None:
    rng, generator = random.Random(5), torch.Generator().manual_seed(5)
    table, starts, counts = random_rows(rng)
    data = torch.randn(3, 2, BLOCKS + 1, HEADS, BLOCK_SIZE, WIDTH, generator=generator)
    plan = BlockPlan(data, table, starts, counts)
    for layer, window in enumerate([7, None, 7]):
        q = torch.randn(int(counts.sum()), HEADS, GROUP, WIDTH, generator=generator)
        k, v = torch.randn(2, len(q), HEADS, WIDTH, generator=generator)
        wanted = slow_attend(data[layer].clone(), table, starts, counts, q, k, v, 0.5, window)
        assert (plan.attend(layer, q, k, v, 0.5, window) - wanted).abs().max() < 1e-5


def test_scores_of_any_size_stay_finite() -> None:
    """A maximum is taken out of each block's scores and out of the row's: nothing overflows, nothing becomes 0 / 0."""
    table, starts, counts = np.array([[3, 1, 2]], dtype=np.int32), np.array([2 * BLOCK_SIZE]), np.array([3])
    data = torch.zeros(1, 2, 5, 1, BLOCK_SIZE, 2)
    data[0, 0, 3], data[0, 0, 1], data[0, 1] = -5e3, 5e3, 1.0
    data[0, 1, 3] = 7.0
    q, zero = torch.ones(3, 1, 1, 2), torch.zeros(3, 1, 2)
    got = BlockPlan(data, table, starts, counts).attend(0, q, zero, zero, 1.0, None)
    assert torch.equal(got, torch.ones(3, 1, 1, 2))  # all weight on block 1
    far = BlockPlan(data, table, starts, counts).attend(0, -q, zero, zero, 1.0, None)
    assert torch.equal(far, torch.full((3, 1, 1, 2), 7.0))
    data[0, 0], data[0, 1, 2] = -5e3, 100.0  # whatever may be seen scores far below zero, but what may not stays hidden
    low = BlockPlan(data, table, starts, counts).attend(0, q, zero - 5e3, zero, 1.0, 2)
    assert torch.equal(low[:, 0, 0, 0], torch.tensor([0.5, 0.0, 0.0]))


def test_low_precision_caches_are_computed_in_single_precision() -> None:
    rng, generator = random.Random(2), torch.Generator().manual_seed(2)
    table, starts, counts = random_rows(rng)
    data = torch.randn(1, 2, BLOCKS + 1, HEADS, BLOCK_SIZE, WIDTH, generator=generator).bfloat16()
    q = torch.randn(int(counts.sum()), HEADS, GROUP, WIDTH, generator=generator).bfloat16()
    k, v = torch.randn(2, len(q), HEADS, WIDTH, generator=generator).bfloat16()
    wanted = slow_attend(data[0].clone(), table, starts, counts, q, k, v, 0.5, None)
    got = BlockPlan(data, table, starts, counts).attend(0, q, k, v, 0.5, None)
    assert got.dtype == torch.bfloat16
    assert (got.double() - wanted).abs().max() <= wanted.abs().max() * 2**-8  # nothing but the last rounding


@pytest.mark.parametrize("chain", [False, True])
def test_copies_are_done_one_after_the_other(chain: bool) -> None:
    config = make_model("llama-gqa").config
    pool = KVCache(config, 6, torch.float32, torch.device("cpu"))
    pool.data.normal_(generator=torch.Generator().manual_seed(0))
    pairs = [(0, 3), (3, 4), (1, 3)] if chain else [(0, 3), (0, 4), (1, 5)]
    expected = pool.data.clone()
    for source, target in pairs:
        expected[:, :, target] = expected[:, :, source].clone()
    pool.copy_blocks(pairs)
    assert torch.equal(pool.data, expected)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_that_an_engine_uses_computes_as_before(family: str, attention: str) -> None:
    """Forward with padding on either side, gradients, and `generate`: to the last bit."""
    plain, used = make_model(family, attention), make_model(family, attention)
    LocalEngine(used, Letters(), max_num_seqs=2, kv_cache_tokens=128)
    tokens = torch.randint(4, VOCAB, (3, 30), generator=torch.Generator().manual_seed(0))
    for mask in (torch.ones(3, 30), torch.arange(30) < torch.tensor([[30], [12], [21]])):
        for side in (mask.long(), mask.long().flip(1)):
            results = []
            for model in (plain, used):
                loss = model(tokens, attention_mask=side, labels=tokens).loss
                model.zero_grad()
                loss.backward()
                results.append((loss.detach(), model.model.layers[0].self_attn.k_proj.weight.grad.clone()))
                model.zero_grad()
            assert torch.equal(results[0][0], results[1][0])
            assert torch.equal(results[0][1], results[1][1])
    mask = (torch.arange(30) >= torch.tensor([[0], [12], [21]])).long()
    options = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False}
    assert torch.equal(plain.generate(tokens, **options), used.generate(tokens, **options))


def test_installing_twice_changes_nothing_and_is_not_saved_with_the_model() -> None:
    model = make_model("llama")
    install_attention(model)
    name = model.config._attn_implementation
    install_attention(model)
    LocalEngine(model, Letters(), max_num_seqs=1, kv_cache_tokens=64)
    assert model.config._attn_implementation == name == "arpo-sdpa"
    assert "arpo" not in model.config.to_json_string()
    assert copy.deepcopy(model)(torch.tensor([[5, 6]])).logits.isfinite().all()
