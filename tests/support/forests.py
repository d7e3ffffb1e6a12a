"""Random trees to train on, and the loss and gradients of both ways: on the tree, and one trajectory at a time.

Engine log-probs lie around the true ones of the model, so that clips act in both directions and differently on the
trajectories through a shared node. Old log-probs are a fixed function of the engine's, so a test has them in whatever
order a batch keeps its tokens.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from itertools import count
from typing import Any

import pytest
import torch
from models import VOCAB, WINDOW, make_model
from plain import Old, logprobs_and_entropies, plain_loss, plain_trajectories
from torch import Tensor
from trees import model as model_node
from trees import prompt, tool, tree, with_rewards

from arpo.algorithm.batch import build_batch
from arpo.config.algorithm import Advantage, Loss
from arpo.trainer.forward_backward import compute_logprobs, forward_backward
from arpo.types import Node, RolloutTree, ScoredTree

TEMPERATURE, MAX_TOKENS, ENDLESS = 0.8, 50, 10**9


SHARP: dict[str, Any] = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 1.5}


LENGTHS = (0, 1, 1, 2, 3, 5, 8)


REWARDS = (0.0, 0.4, 1.0, 1.1)


shared_model = cache(make_model)


@cache
def reference_model(family: str) -> Any:
    """The model of that family some training ago: a little different everywhere."""
    model = make_model(family)
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
            parameter.mul_(1 + 0.05 * noise)
    return model


@dataclass(frozen=True)
class Forest:
    """What a step trains on."""

    trees: tuple[ScoredTree, ...]

    def trained_tokens(self, all_tokens: bool = False) -> list[tuple[int, ...]]:
        """The tokens of every kept trajectory that adds something, up to its last model token.

        With `all_tokens` trajectories without advantages add something too.
        """
        found = []
        for scored in self.trees:
            rollout = scored.tree
            for leaf, its, used in zip(rollout.leaves, scored.credits, scored.mask, strict=True):
                sampled = [i for i in rollout.prefix(leaf.node) if rollout.nodes[i].logprobs]
                if used and sampled and (all_tokens or any(its.by_node.values())):
                    found.append(rollout.tokens(sampled[-1]))
        return found


def random_tree(rng: random.Random, token: Callable[[], int], times: int = 1) -> RolloutTree:
    """Any shape: empty nodes, leaves above other leaves, two leaves at one node, a prompt alone; `times` as long."""
    made: list[Node] = [prompt([token() for _ in range(times * rng.randint(1, 5))])]
    for index in range(1, 1 + rng.randint(0, 13)):
        parent = rng.choice((0, rng.randrange(index), index - 1))
        tokens = [token() for _ in range(times * rng.choice(LENGTHS))]
        if rng.random() < 0.65:
            made.append(model_node(parent, tokens, logprobs=[-rng.randint(1, 2**20) / 2**18 for _ in tokens]))
        else:
            made.append(tool(parent, tokens))
    inner = {node.parent for node in made}
    outer = [index for index in range(len(made)) if index not in inner]
    ends = [rng.choice(outer) if rng.random() < 0.7 else rng.randrange(len(made)) for _ in range(rng.randint(1, 9))]
    return tree(made, ends)


def random_credit(rng: random.Random, rollout: RolloutTree, attribution: str) -> ScoredTree:
    """Rewards with ties, now and then all the same; some leaves masked."""
    few = REWARDS if rng.random() < 0.9 else REWARDS[:1]
    rewards = [rng.choice(few) for _ in rollout.leaves]
    mask = [rng.random() < 0.85 for _ in rollout.leaves]
    exact = {"baseline": "leave_one_out", "scale": "none"} if attribution == "unbiased" else {}
    return with_rewards(rollout, rewards, Advantage.model_validate({**exact, "attribution": attribution}), mask)


def random_forest(
    rng: random.Random, attribution: str, token: Callable[[], int] | None = None, times: int = 1
) -> Forest:
    """One to three trees and their credits."""
    draw = token or (lambda: rng.randrange(VOCAB))
    trees = tuple(random_tree(rng, draw, times) for _ in range(rng.randint(1, 3)))
    return Forest(tuple(random_credit(rng, rollout, attribution) for rollout in trees))


@cache
def rich_forest(seed: int, attribution: str = "soft", times: int = 1) -> Forest:
    """A random forest with long shared prefixes: trajectories of both signs go through one of its model nodes."""
    for attempt in count():
        forest = random_forest(random.Random(f"{seed} {attempt}"), attribution, times=times)
        chains = set(forest.trained_tokens())
        enough = len(forest.trees) > 1 and len(chains) > 2 and max(map(len, chains)) >= 2 * WINDOW * times
        if enough and any(map(disputed, forest.trees)):
            return forest
    raise AssertionError


def disputed(scored: ScoredTree) -> bool:
    """Whether some model node is shared by a good trajectory and a bad one."""
    rollout, credits = scored.tree, scored.credits
    trajectories = [{i for i in rollout.prefix(leaf.node) if rollout.nodes[i].logprobs} for leaf in rollout.leaves]
    good, bad = (
        set().union(
            *(trajectory for trajectory, its in zip(trajectories, credits, strict=True) if sign * its.advantage > 0)
        )
        for sign in (1, -1)
    )
    return bool(good & bad)


def sampled_by(model: Any, forest: Forest, seed: int, spread: float = 0.5) -> Forest:
    """The forest with engine log-probs within `spread` of the model's own, each of them another number."""
    rng, found = random.Random(seed), {}
    with torch.no_grad():
        for trajectory in plain_trajectories(forest.trees):
            if trajectory.positions:
                true_T, _ = logprobs_and_entropies(model, trajectory, TEMPERATURE)
                found.update(dict(zip(trajectory.sources, true_T.tolist(), strict=True)))

    def near(number: int, index: int, node: Node) -> Node:
        values = [
            found.get((number, index, at), -1.0) + rng.uniform(-spread, spread) for at in range(len(node.logprobs))
        ]
        return replace(node, logprobs=tuple(torch.tensor(values).tolist()))  # numbers that float32 can hold

    trees = []
    for number, scored in enumerate(forest.trees):
        nodes = tuple(near(number, index, node) for index, node in enumerate(scored.tree.nodes))
        trees.append(replace(scored, tree=replace(scored.tree, nodes=nodes)))
    return Forest(tuple(trees))


def old_logprob(engine: Tensor) -> Tensor:
    """Another number near the engine's, for every number that it gives."""
    return (engine.double() + 0.4 * torch.cos(100 * engine.double())).float()


def engine_of(forest: Forest) -> Old:
    """The engine's log-probs by tree and node."""
    return {
        (number, index): node.logprobs
        for number, scored in enumerate(forest.trees)
        for index, node in enumerate(scored.tree.nodes)
    }


def old_of(forest: Forest) -> Old:
    """Old ones by tree and node."""
    return {key: old_logprob(torch.tensor(values)).tolist() for key, values in engine_of(forest).items()}


def gradients(model: Any) -> dict[str, Tensor]:
    """All of them, taken off the model."""
    found = {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return found


def expected_of(
    model: Any, forest: Forest, loss: Loss, reference: Any = None, on_policy: bool = False
) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of the oracle."""
    old = None if on_policy else old_of(forest)
    total = plain_loss(model, forest.trees, loss, TEMPERATURE, MAX_TOKENS, old, reference)
    if total.requires_grad:
        total.backward()  # type: ignore[no-untyped-call]
    return total.item(), gradients(model)


def learnt(
    model: Any,
    forest: Forest,
    loss: Loss,
    budget: int = ENDLESS,
    shared: bool = True,
    reference: Any = None,
    on_policy: bool = False,
) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Sums and gradients of the tree."""
    batch = build_batch(forest.trees, loss, MAX_TOKENS, shared=shared)
    old_K = None if on_policy else old_logprob(batch.engine_logprobs_K)
    reference_K = compute_logprobs(reference, batch, TEMPERATURE, budget)[0] if loss.kl_coef else None
    sums = forward_backward(model, batch, loss, TEMPERATURE, budget, old_K, reference_K)
    return sums, gradients(model)


def assert_same(
    got: tuple[dict[str, float], dict[str, Tensor]], expected: tuple[float, dict[str, Tensor]], rest: float = 1e-7
) -> None:
    """The loss to 3e-6; each parameter's gradient to 2e-5 of its own largest entry.

    Where that is itself a small rest of large numbers, 4e-6 of the model's largest entry and `rest` are allowed. Two
    plain passes, in float32 and in float64, differ by as much.
    """
    (sums, got_by_name), (loss, by_name) = got, expected
    assert sums.get("loss", 0.0) == pytest.approx(loss, abs=3e-6 * (1 + abs(loss)) + rest)
    largest = max(value.abs().max().item() for value in by_name.values())
    for name, value in by_name.items():
        error, own = (got_by_name[name] - value).abs().max().item(), value.abs().max().item()
        assert error <= 2e-5 * own + 4e-6 * largest + rest, f"{name}: {error:.2e} of {own:.2e}, largest {largest:.2e}"


@contextmanager
def trained_with(model: Any, checkpointing: bool) -> Iterator[None]:
    """In training mode, with or without gradient checkpointing."""
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    try:
        yield
    finally:
        model.eval()
        if checkpointing:
            model.gradient_checkpointing_disable()
