"""Attention along a tree against a dense mask, outputs and gradients; and that plans do not outlive their pass."""

from __future__ import annotations

import gc
import random
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from forests import MAX_TOKENS, TEMPERATURE, gradients, rich_forest, trained_with
from models import make_model
from torch import Tensor

from arpo.algorithm.batch import build_batch, split_microbatches
from arpo.config.algorithm import Loss
from arpo.trainer import attention
from arpo.trainer.attention import TreePlan
from arpo.trainer.forward_backward import forward_backward


def random_places(rng: random.Random, tokens: int, context: int) -> tuple[np.ndarray, np.ndarray]:
    """Parents and depths of random trees in depth-first order, all below a context or none."""
    parent, depth, path = [-1], [context], [0]
    for token in range(1, tokens):
        if rng.random() < 0.15:
            path = path[: rng.randint(0, len(path))]
        parent.append(path[-1] if path else -1)
        depth.append(context + len(path))
        path.append(token)
    return np.array(parent), np.array(depth)


def dense(
    q: Tensor, k: Tensor, v: Tensor, places: tuple[np.ndarray, np.ndarray], context: int, window: int | None
) -> Tensor:
    """All scores at once, hidden one by one."""
    parent, depth = places
    depths = [*range(context), *depth]
    visible = torch.zeros(len(q), len(k), dtype=torch.bool)
    for token in range(len(q)):
        above, at = [*range(context)], token
        while at >= 0:
            above.append(context + at)
            at = parent[at]
        for key in above:
            visible[token, key] = window is None or bool(depth[token] - depths[key] < window)
    score = torch.einsum("thgd,lhd->thgl", q, k) * 0.4
    return torch.einsum("thgl,lhd->thgd", score.masked_fill(~visible[:, None, None], -torch.inf).softmax(-1), v)


@pytest.mark.parametrize("window", [None, 1, 4, 9])
@pytest.mark.parametrize("context", [0, 6])
@pytest.mark.parametrize("longest", [3, 5, 10**9])
def test_it_equals_a_dense_mask(
    window: int | None, context: int, longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where runs are cut into short ones, which real trees only are from 128 or 1,024 tokens on."""
    monkeypatch.setattr(attention, "UNLIMITED", longest)
    monkeypatch.setattr(attention, "MIN_QUERIES", 2)
    rng = random.Random(f"{window} {context} {longest}")
    for heads, group, width in ((2, 3, 6), (1, 1, 8)):
        tokens = 40
        places = random_places(rng, tokens, context)
        torch.manual_seed(0)
        q = torch.randn(tokens, heads, group, width, dtype=torch.float64, requires_grad=True)
        own = [torch.randn(tokens, heads, width, dtype=torch.float64, requires_grad=True) for _ in range(2)]
        above = [torch.randn(context, heads, width, dtype=torch.float64, requires_grad=True) for _ in range(2)]
        k, v = (torch.cat(pair) for pair in zip(above, own, strict=True))
        expected = dense(q, k, v, places, context, window)
        plan = TreePlan(*places, [(above[0], above[1])] if context else None)
        found = plan.attend(0, q, own[0], own[1], 0.4, window)
        torch.testing.assert_close(found, expected)
        grad = torch.randn_like(expected)
        inputs = [q, *own, *(above if context else [])]
        for a, b in zip(*(torch.autograd.grad(x, inputs, grad) for x in (found, expected)), strict=True):
            torch.testing.assert_close(a, b)


def test_with_a_window_no_mask_is_larger_than_two_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[tuple[int, ...]] = []
    sight = attention._mask

    def record(*given: Any) -> Any:
        mask, causal = sight(*given)
        sizes.append((0, 0) if mask is None else tuple(mask.shape))
        return mask, causal

    monkeypatch.setattr(attention, "_mask", record)
    tokens, window = 1500, 200
    plan = TreePlan(np.arange(tokens) - 1, np.arange(tokens))
    q, k = torch.randn(tokens, 1, 1, 8), torch.randn(tokens, 1, 8)
    plan.attend(0, q, k, k, 1.0, window)
    assert max(a for a, _ in sizes) == window and max(b for _, b in sizes) < 2 * window


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
def test_nothing_stays_in_memory_when_a_tree_was_cut(checkpointing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    plans: list[weakref.ref[TreePlan]] = []
    original = TreePlan.__init__

    def remember(plan: TreePlan, *args: Any, **kwargs: Any) -> None:
        plans.append(weakref.ref(plan))
        original(plan, *args, **kwargs)

    monkeypatch.setattr(TreePlan, "__init__", remember)
    model, forest = make_model("llama"), rich_forest(5)
    batch = build_batch(forest.trees, Loss(), MAX_TOKENS)
    assert any(part.children for part in split_microbatches(batch, 10))
    with trained_with(model, checkpointing):
        forward_backward(model, batch, Loss(), TEMPERATURE, 10)
    gradients(model)
    gc.collect()
    assert len(plans) > 2 and not any(plan() for plan in plans)
