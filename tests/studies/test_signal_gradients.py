"""Gradients of a frozen model: those of a training step, the closed form of the reference, and sketches of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from models import make_model
from trees import model, prompt, tree, two_branches, with_rewards

from arpo.config.loading import load_config
from arpo.config.schema import Config
from arpo.errors import ArpoError
from arpo.studies.signal import gradients
from arpo.studies.signal.gradients import GradientTrainer, gram_matrix, sketch_dimension, to_vector
from arpo.studies.signal.runner import block_sizes, reference_settings
from arpo.trainer.trainer import Trainer
from arpo.types import ScoredTree


def trees_for(config: Config) -> list[ScoredTree]:
    alone = tree([prompt([4, 5]), model(0, [6, 7]), model(0, [8])], [1, 2])
    return [with_rewards(two_branches(), [1, 0, 0.5], config.advantage), with_rewards(alone, [0, 1], config.advantage)]


@pytest.mark.parametrize("preset", ["arpo", "grpo", "dapo", "aepo", "reinforce++", "gspo", "cispo", "rloo", "arpo+"])
def test_the_gradient_is_what_a_training_step_would_use(preset: str) -> None:
    """One step of plain gradient descent stands in for AdamW, and is compared with the gradient."""
    config = load_config(None, ["train.max_grad_norm=1e9", "train.minibatches=2", "train.batch_size=2"], preset)
    network = make_model("llama")
    before = {name: weight.detach().clone() for name, weight in network.named_parameters()}
    found = GradientTrainer(network, None, config).gradient(trees_for(config), config)
    assert all(torch.equal(before[name], weight) for name, weight in network.named_parameters())
    assert all(weight.grad is None for weight in network.parameters())
    whole = config.model_copy(update={"train": config.train.model_copy(update={"minibatches": 1})})
    twin = make_model("llama")
    trainer = Trainer(twin, None, whole, make_model("llama"))
    taken: dict[str, torch.Tensor] = {}

    def step(*_: Any) -> float:
        taken.update({name: weight.grad.clone() for name, weight in twin.named_parameters() if weight.grad is not None})
        return 0.0

    trainer.optimizer.step = step  # type: ignore[method-assign]
    trainer.update(trees_for(config))
    assert found.keys() == taken.keys()
    assert max(float(value.abs().max()) for value in found.values()) > 0
    for name, value in found.items():
        torch.testing.assert_close(value, taken[name])


def test_the_reference_is_rloo_by_hand() -> None:
    """Minus the mean over trajectories of (R - mean of the others) grad log p, over max_tokens: by a loop."""
    base = load_config(None, ["rollout.max_tokens=10", "loss.entropy_coef=1", "loss.kl_coef=1", "advantage.scale=std"])
    config = reference_settings(base, 3)
    assert (config.rollout.num_trajectories, config.rollout.num_initial) == (3, 3)
    nodes = [prompt([4, 5]), model(0, [6, 7, 9]), model(0, [8]), model(0, [3, 3])]
    rewards = [1.0, 0.0, 0.25]
    scored = with_rewards(tree(nodes, [1, 2, 3]), rewards, config.advantage)
    network = make_model("qwen3")
    trainer = GradientTrainer(network, None, config)
    found = to_vector(trainer.gradient([scored], config), trainer.sizes, None)
    twin = make_model("qwen3")
    total = torch.zeros(())
    for number, node in enumerate(nodes[1:]):
        logits = twin(torch.tensor([[4, 5, *node.tokens]])).logits[0, 1:-1]
        logprob = logits.log_softmax(-1)[range(len(node.tokens)), list(node.tokens)].sum()
        others = sum(rewards) - rewards[number]
        total = total - (rewards[number] - others / 2) * logprob / (3 * 10)
    total.backward()  # type: ignore[no-untyped-call]
    expected = torch.cat([weight.grad.reshape(-1) for weight in twin.parameters() if weight.grad is not None])
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-4, atol=1e-6)
    assert np.abs(found).max() > 1e-3


def test_blocks_of_the_reference() -> None:
    assert block_sizes(64) == [8] * 8
    assert block_sizes(20) == [2, 3, 2, 3, 2, 3, 2, 3]
    assert (block_sizes(4), block_sizes(5), block_sizes(7)) == ([2, 2], [2, 3], [2, 2, 3])


def test_equal_rewards_have_no_gradient() -> None:
    config = load_config(None, [], "grpo")
    trainer = GradientTrainer(make_model("llama"), None, config)
    assert trainer.gradient([with_rewards(two_branches(), [1, 1, 0])], config)
    found = trainer.gradient([with_rewards(two_branches(), [1, 1, 1])], config)
    assert found == {}
    assert not to_vector(found, trainer.sizes, None).any()
    assert len(to_vector(found, trainer.sizes, None)) == sum(trainer.sizes.values())
    assert not to_vector(found, trainer.sizes, 64).any()


def random_gradients(seed: int, count: int) -> tuple[list[dict[str, torch.Tensor]], dict[str, int]]:
    """Gradients that share a part; one parameter is missing in the first."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"a": (30, 20), "b": (7,), "c": (5, 33)}
    shared = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    each = [
        {name: shared[name] + 2 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        for _ in range(count)
    ]
    del each[0]["b"]
    return each, {name: shared[name].numel() for name in shapes}


def test_inner_products_of_whole_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    each, sizes = random_gradients(0, 4)
    vectors = [to_vector(gradient, sizes, None) for gradient in each]
    assert all(vector.shape == (772,) and vector.dtype == np.float32 for vector in vectors)
    expected = [
        [
            sum(float((x[name].double() * y[name].double()).sum()) for name in sizes if name in x and name in y)
            for y in each
        ]
        for x in each
    ]
    np.testing.assert_allclose(gram_matrix(vectors), expected, rtol=1e-6)
    monkeypatch.setattr(gradients, "_COLUMNS", 100)
    np.testing.assert_allclose(gram_matrix(vectors), expected, rtol=1e-6)


def test_inner_products_of_sketches_are_unbiased() -> None:
    """Over 400 seeds; with 64 places for 772 weights a single sketch is far off, their mean is not."""
    each, sizes = random_gradients(1, 3)
    exact = gram_matrix([to_vector(gradient, sizes, None) for gradient in each])
    sketched = np.stack(
        [gram_matrix([to_vector(gradient, sizes, 64, seed) for gradient in each]) for seed in range(400)]
    )
    scale = np.sqrt(np.outer(exact.diagonal(), exact.diagonal()))
    assert np.abs((sketched.mean(axis=0) - exact) / scale).max() < 5 * np.sqrt(2 / 64 / 400)
    spread = ((sketched - exact) / scale).std(axis=0)
    assert 0.5 / np.sqrt(64) < spread.min()
    assert spread.max() < 2 / np.sqrt(64)


def test_a_wide_sketch_is_close_and_the_same_each_time() -> None:
    each, sizes = random_gradients(2, 3)
    exact = gram_matrix([to_vector(gradient, sizes, None) for gradient in each])
    sketches = [to_vector(gradient, sizes, 2**20, seed=5) for gradient in each]
    scale = np.sqrt(np.outer(exact.diagonal(), exact.diagonal()))
    assert np.abs((gram_matrix(sketches) - exact) / scale).max() < 0.01
    assert all((sketch == to_vector(x, sizes, 2**20, seed=5)).all() for sketch, x in zip(sketches, each, strict=True))
    assert (sketches[0] != to_vector(each[0], sizes, 2**20, seed=6)).any()


def test_gradients_are_sketched_only_where_they_do_not_fit() -> None:
    assert sketch_dimension(2**25, 16) is None  # 2 GiB
    assert sketch_dimension(2**25, 17) == 2**20


def test_a_gradient_that_is_not_finite_is_reported() -> None:
    for dimension in (None, 8):
        with pytest.raises(ArpoError, match="not finite"):
            to_vector({"a": torch.tensor([1.0, float("nan")])}, {"a": 2}, dimension)
