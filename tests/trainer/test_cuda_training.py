"""Training on trees on a GPU: against the plain way, and against the same attention on a CPU. Skipped without a GPU."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from forests import SHARP, assert_same, expected_of, learnt, rich_forest, sampled_by, trained_with
from models import FAMILIES, make_model
from torch import Tensor

from arpo.config.algorithm import Loss
from arpo.trainer.attention import TreePlan, _has_flash
from arpo.trainer.optimizer import Optimizer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def random_places(seed: int, tokens: int, context: int) -> tuple[np.ndarray, np.ndarray]:
    """Parents and depths of a random tree in depth-first order, below a context or not."""
    rng = random.Random(seed)
    parent, depth, path = [-1], [context], [0]
    for token in range(1, tokens):
        if rng.random() < 0.05:
            path = path[: rng.randint(0, len(path))]  # a branch, or another tree
        parent.append(path[-1] if path else -1)
        depth.append(context + len(path))
        path.append(token)
    return np.array(parent), np.array(depth)


def attended(
    device: str, places: tuple[np.ndarray, np.ndarray], given: dict[str, Tensor], context: int, window: int | None
) -> dict[str, Tensor]:
    """What comes out, and all gradients, as float32 on the CPU; on a CPU it is computed in float32."""
    kind = torch.float32 if device == "cpu" else torch.bfloat16
    here = {name: x.to(device, kind).requires_grad_(name != "grad") for name, x in given.items()}
    plan = TreePlan(*places, [(here["context_k"], here["context_v"])] if context else None)
    assert _has_flash(here["q"]) == (device == "cuda")
    out = plan.attend(0, here["q"], here["k"], here["v"], 0.2, window)
    inputs = [name for name in given if name != "grad" and (context or not name.startswith("context"))]
    found = torch.autograd.grad(out, [here[name] for name in inputs], here["grad"])
    return {name: x.float().cpu() for name, x in zip(["out", *inputs], [out, *found], strict=True)}


@pytest.mark.parametrize("window", [None, 37])
@pytest.mark.parametrize("context", [0, 50])
@pytest.mark.parametrize(("heads", "group", "width"), [(1, 4, 8), (2, 7, 64), (3, 1, 128), (1, 4, 256)])
def test_flash_attention_over_a_tree(heads: int, group: int, width: int, context: int, window: int | None) -> None:
    tokens = 400
    places = random_places(width, tokens, context)
    generator = torch.Generator().manual_seed(1)
    shapes = {
        "q": (tokens, heads, group, width),
        "k": (tokens, heads, width),
        "v": (tokens, heads, width),
        "context_k": (context, heads, width),
        "context_v": (context, heads, width),
        "grad": (tokens, heads, group, width),
    }
    given = {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}
    expected = attended("cpu", places, given, context, window)
    for name, value in attended("cuda", places, given, context, window).items():
        error = (value - expected[name]).norm() / expected[name].norm()
        assert error < 0.01, f"{name}: {error}"


@pytest.mark.parametrize("family", FAMILIES)
def test_float32_equals_the_oracle(family: str) -> None:
    model = make_model(family).to("cuda")
    forest = sampled_by(model, rich_forest(1000, "soft"), 1)
    for kind in ("ppo", "gspo", "cispo"):
        loss = Loss(**SHARP, kind=kind)  # type: ignore[arg-type]
        expected = expected_of(model, forest, loss)
        for checkpointing in (False, True):
            with trained_with(model, checkpointing):
                for budget in (12, 10**9):
                    assert_same(learnt(model, forest, loss, budget), expected)
                assert_same(learnt(model, forest, loss, 12, shared=False), expected)


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_bfloat16_is_as_near_as_packed_rows(family: str) -> None:
    """Errors against the float32 oracle, over several forests: but for luck, no larger than those of packing."""
    exact, model = make_model(family).to("cuda"), make_model(family).to("cuda", torch.bfloat16)
    exact.load_state_dict(model.state_dict())
    errors = {True: 0.0, False: 0.0}
    for seed in range(8):
        forest = sampled_by(exact, rich_forest(seed), seed)
        _, expected = expected_of(exact, forest, Loss(), on_policy=True)
        for shared in errors:
            for budget in (15, 10**9):
                _, found = learnt(model, forest, Loss(), budget, shared, on_policy=True)
                errors[shared] += distance(found, expected)
    assert errors[True] < 1.3 * errors[False] < 13  # all of it, 16 times, would be 16


def distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Of two gradients, relative to the second."""
    a, b = (torch.cat([x[name].float().flatten() for name in expected]) for x in (found, expected))
    return float((a - b).norm() / b.norm())


def test_masters_are_stepped_on_the_device() -> None:
    model: Any = make_model("qwen3").to("cuda", torch.bfloat16)
    places = [p.data_ptr() for p in model.parameters()]
    optimizer = Optimizer(model, 1e-3, 0.0)
    forest = rich_forest(3)
    before = [p.detach().clone() for p in model.parameters()]
    for _ in range(3):
        learnt_once(model, forest)
        optimizer.step(1e-3, 1.0)
    assert [p.data_ptr() for p in model.parameters()] == places
    assert all(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def learnt_once(model: Any, forest: Any) -> None:
    """Gradients stay where they are."""
    from forests import MAX_TOKENS, TEMPERATURE

    from arpo.algorithm.batch import build_batch
    from arpo.trainer.forward_backward import forward_backward

    forward_backward(model, build_batch(forest.trees, Loss(), MAX_TOKENS), Loss(), TEMPERATURE, 20)
