"""Training on trees against the plain way, one trajectory at a time: structure, losses, gradients, budgets.

Trees are random, and their engine log-probs lie around the true ones of the model, so that clips bite in both
directions and differently on the trajectories through a shared node. Old log-probs are a fixed function of the
engine's, so a test has them in whatever order a batch keeps its tokens.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from forests import (
    ENDLESS,
    MAX_TOKENS,
    SHARP,
    TEMPERATURE,
    Forest,
    assert_same,
    engine_of,
    expected_of,
    gradients,
    learnt,
    old_logprob,
    old_of,
    random_forest,
    reference_model,
    rich_forest,
    sampled_by,
    shared_model,
    trained_with,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from models import FAMILIES, VOCAB, WINDOW, make_model
from plain import logprobs_and_entropies, padded_backward, plain_loss, plain_trajectories
from torch import Tensor
from trees import model as model_node
from trees import prompt, tool, tree, two_branches, with_credits, with_rewards

from arpo.algorithm.batch import MicroBatch, build_batch, split_microbatches
from arpo.config.algorithm import Advantage, Loss
from arpo.trainer.attention import _attn_backward, _attn_forward
from arpo.trainer.forward_backward import compute_logprobs, forward_backward
from arpo.types import RolloutTree

# --- random forests ---


# --- the two ways ---


@contextmanager
def passes_of(model: Any) -> Iterator[list[int]]:
    """Tokens of each forward pass of the decoder."""
    sizes: list[int] = []

    def hook(_: Any, args: Any, kwargs: Any) -> None:
        given_ids = kwargs.get("input_ids", args[0] if args else None)
        sizes.append(given_ids.numel() if given_ids is not None else math.prod(kwargs["inputs_embeds"].shape[:-1]))

    handle = model.get_decoder().register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield sizes
    finally:
        handle.remove()


# --- structure ---


@pytest.mark.slow
@settings(deadline=None, max_examples=150)
@given(st.randoms(use_true_random=False), st.booleans(), st.booleans())
def test_the_structure_equals_brute_force(rng: random.Random, shared: bool, all_tokens: bool) -> None:
    """Every token has an id of its own, so each place in the batch says which token it is."""
    ids = count(1)
    forest = random_forest(rng, rng.choice(["soft", "hard"]), lambda: next(ids))
    batch = build_batch(forest.trees, Loss(entropy_coef=0.1 if all_tokens else 0.0), MAX_TOKENS, shared=shared)
    chains = forest.trained_tokens(all_tokens)
    tokens = batch.tokens_N.tolist()
    walks = []
    for n in range(len(tokens)):
        walk, at = [], n
        while at >= 0:
            walk.append(at)
            assert len(walk) <= len(tokens)
            at = int(batch.parent_N[at])
        walks.append(walk)
    texts = [tuple(tokens[n] for n in reversed(walk)) for walk in walks]
    prefixes = [chain[: end + 1] for chain in chains for end in range(len(chain))]
    assert sorted(texts) == sorted(set(prefixes) if shared else prefixes)
    assert (batch.unique_tokens, batch.total_tokens) == (len(tokens), len(prefixes))
    assert [len(walk) - 1 for walk in walks] == batch.depth_N.tolist()
    ends = batch.end_N.tolist()
    for q, walk in enumerate(walks):
        assert [k for k in range(q + 1) if q < ends[k]] == sorted(walk)
    assert all(n < end <= len(tokens) for n, end in enumerate(ends))
    engine = {
        token: logprob
        for scored in forest.trees
        for node in scored.tree.nodes
        for token, logprob in zip(node.tokens, node.logprobs, strict=bool(node.logprobs))
    }
    targets = batch.targets_K.tolist()
    assert sorted(targets) == [n for n, token in enumerate(tokens) if token in engine]
    assert batch.engine_logprobs_K.tolist() == [engine[tokens[n]] for n in targets]


@pytest.mark.slow
@settings(deadline=None, max_examples=100)
@given(st.randoms(use_true_random=False), st.integers(1, 25), st.booleans())
def test_parts_hold_every_token_once_below_its_own_path(rng: random.Random, budget: int, shared: bool) -> None:
    forest = random_forest(rng, "soft")
    batch = build_batch(forest.trees, Loss(entropy_coef=0.1), MAX_TOKENS, shared=shared)
    parents, found = batch.parent_N.tolist(), []

    def check(part: MicroBatch, context: list[int]) -> None:
        tokens = part.tokens.tolist()
        found.extend(tokens)
        assert tokens == sorted(tokens)
        one_path = [parents[n] for n in tokens[1:]] == tokens[:-1]
        assert one_path or (len(tokens) <= budget and not part.children)
        for n in tokens:
            assert parents[n] in tokens or parents[n] == (context[-1] if context else -1)
        for child in part.children:
            check(child, context + tokens[: child.prefix_length])

    for part in split_microbatches(batch, budget):
        assert part.prefix_length == 0
        check(part, [])
    assert sorted(found) == list(range(batch.unique_tokens))


def test_a_branch_begins_after_the_tokens_that_it_shares() -> None:
    rollout = two_branches()
    forest = Forest((with_credits(rollout, [2.0, -1.0, -1.0]),))
    batch = build_batch(forest.trees, Loss(), MAX_TOKENS)
    assert batch.unique_tokens == 13
    places = {tokens: [n for n, token in enumerate(batch.tokens_N.tolist()) if token == tokens] for tokens in (5, 8, 9)}
    assert batch.parent_N[places[5] + places[8]].tolist() == places[9] * 2
    packed = build_batch(forest.trees, Loss(), MAX_TOKENS, shared=False)
    assert packed.unique_tokens == 8 + 6 + 6
    assert packed.parent_N.tolist().count(-1) == 3
    assert sorted(packed.end_N[packed.parent_N == -1].diff(prepend=torch.zeros(1, dtype=torch.long)).tolist()) == [
        6,
        6,
        8,
    ]


def test_a_prompt_without_tokens_predicts_nothing() -> None:
    rollout = tree([prompt([]), model_node(0, [3, 4]), model_node(0, [5])], [1, 2])
    with pytest.raises(ValueError, match="prompt is empty"):
        build_batch([with_credits(rollout, [1.0, -1.0])], Loss(), MAX_TOKENS)


# --- losses and gradients ---

EXTRAS: dict[str, dict[str, Any]] = {
    "plain": {},
    "importance": {"importance_cap": 1.1},
    "kl": {"kl_coef": 0.3},
    "entropy": {"entropy_coef": 0.2},
    "no dual clip": {"dual_clip": None},
    "all": {"importance_cap": 1.2, "kl_coef": 0.2, "entropy_coef": 0.1},
}
CASES = [
    (kind, attribution, aggregation, extra)
    for kind in ("ppo", "turn", "gspo", "cispo")
    for attribution in ("soft", "unbiased" if kind in ("turn", "cispo") else "hard")
    for aggregation in ("token-mean", "sequence-mean", "constant")
    for extra in EXTRAS
]
BUDGETS = (1, ENDLESS, 9, 25)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "case"), list(enumerate(CASES)), ids=[" ".join(case) for case in CASES])
def test_every_loss_equals_the_oracle(number: int, case: tuple[str, str, str, str]) -> None:
    kind, attribution, aggregation, extra = case
    model = shared_model(FAMILIES[number % len(FAMILIES)])
    reference = reference_model(FAMILIES[number % len(FAMILIES)])
    loss = Loss(**{**SHARP, "kind": kind, "aggregation": aggregation, **EXTRAS[extra]})
    forest = sampled_by(model, rich_forest(number, attribution), number)
    expected = expected_of(model, forest, loss, reference)
    budget, packed = BUDGETS[number % len(BUDGETS)], (ENDLESS, 25)[number // 2 % 2]
    with trained_with(model, checkpointing=number % 5 == 0):
        assert_same(learnt(model, forest, loss, budget, True, reference), expected)
        assert_same(learnt(model, forest, loss, packed, False, reference), expected)


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "checkpointed"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_and_every_cut_equals_the_oracle(family: str, checkpointing: bool) -> None:
    model = shared_model(family)
    forest = sampled_by(model, rich_forest(1000, "soft"), 1)
    loss = Loss(**SHARP)
    expected = expected_of(model, forest, loss)
    with trained_with(model, checkpointing):
        for budget in (1, 12, 30, ENDLESS):
            assert_same(learnt(model, forest, loss, budget), expected)
        assert_same(learnt(model, forest, loss, 12, shared=False), expected)


@pytest.mark.parametrize("family", ["llama-gqa", "gemma3"])
def test_long_trees_equal_the_oracle(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of tokens, logits in many chunks."""
    monkeypatch.setattr("arpo.trainer.forward_backward.LOGITS_CHUNK", 7)
    model, loss = shared_model(family), Loss(**SHARP, entropy_coef=0.1)
    forest = sampled_by(model, rich_forest(90, times=8), 90)
    assert longest_path(forest) > 150
    expected = expected_of(model, forest, loss)
    for budget in (150, ENDLESS):
        assert_same(learnt(model, forest, loss, budget), expected)


@pytest.mark.slow
@pytest.mark.parametrize("between", range(WINDOW - 3, WINDOW + 1))
def test_a_sliding_window_ends_where_it_should(between: int) -> None:
    """Trajectories about as long as it; and a branch that sees the prompt over another branch, or just does not."""
    rng, model, loss = random.Random(between), shared_model("gemma3"), Loss(**SHARP)

    def made(parents: Sequence[int], sizes: Sequence[int], leaves: Sequence[int]) -> RolloutTree:
        tokens = [[rng.randrange(VOCAB) for _ in range(size)] for size in (4, *sizes)]
        own = (model_node(parent, its) for parent, its in zip(parents, tokens[1:], strict=True))
        return tree([prompt(tokens[0]), *own], leaves)

    over = made((0, 0, 2, 2), (40, between, 20, 3), (1, 3, 4))
    short = made((0, 0), (between - 2, between - 2), (1, 2))
    trees = with_credits(over, [-0.4, -1.0, 1.4]), with_credits(short, [1.0, -1.0])
    forest = sampled_by(model, Forest(trees), between)
    expected = expected_of(model, forest, loss)
    for budget in (1, 25, ENDLESS):
        assert_same(learnt(model, forest, loss, budget), expected)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ppo", "turn", "gspo"])
def test_many_small_branches_beside_large_ones_equal_the_oracle(kind: str) -> None:
    rng, model = random.Random(1), shared_model("llama-gqa")
    loss = Loss(**SHARP, kind=kind)  # type: ignore[arg-type]
    parents, sizes = (0, 0, 0, 0, 1, 5, 5, 5, 5, 1), (6, 2, 3, 2, 1, 9, 2, 2, 3, 1)
    grown = [[rng.randrange(VOCAB) for _ in range(size)] for size in sizes]
    nodes = [prompt([5, 6, 7]), *(model_node(parent, own) for parent, own in zip(parents, grown, strict=True))]
    rollout = tree(nodes, [2, 3, 4, 6, 7, 8, 9, 10])
    advantages = [1.2, -0.3, 0.8, -1.5, 0.4, 0.9, -1.1, -0.4]
    forest = sampled_by(model, Forest((with_credits(rollout, advantages),)), 1)
    expected = expected_of(model, forest, loss)
    for budget in (1, 3, 4, 5, 7, 12, 20):
        assert_same(learnt(model, forest, loss, budget), expected)


def uncancelled(model: Any, forest: Forest, loss: Loss) -> float:
    """The gradient's largest entry if all advantages were positive and nothing was clipped: the scale of rounding."""
    trees = []
    for scored in forest.trees:
        by_node = [{node: abs(value) for node, value in its.by_node.items()} for its in scored.credits]
        credits = tuple(replace(its, by_node=own) for its, own in zip(scored.credits, by_node, strict=True))
        trees.append(replace(scored, credits=credits))
    wide = Loss(kind=loss.kind, entropy_coef=loss.entropy_coef, clip_low=1.0, clip_high=99.0, dual_clip=None)
    _, found = expected_of(model, Forest(tuple(trees)), wide)
    return max(value.abs().max().item() for value in found.values())


@pytest.mark.slow
@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.too_slow])
@given(st.randoms(use_true_random=False), st.sampled_from([1, 6, 15, 40, ENDLESS]), st.booleans())
def test_every_shape_equals_the_oracle(rng: random.Random, budget: int, shared: bool) -> None:
    model = shared_model(rng.choice(["gemma3", "qwen2"]))
    loss = Loss(**SHARP, kind=rng.choice(["ppo", "turn", "gspo", "cispo"]), entropy_coef=rng.choice([0.0, 0.1]))
    forest = sampled_by(model, random_forest(rng, rng.choice(["soft", "hard", "unbiased"])), 2)
    expected = expected_of(model, forest, loss)
    assert_same(learnt(model, forest, loss, budget, shared), expected, rest=3e-6 * uncancelled(model, forest, loss))


@pytest.mark.parametrize("kind", ["ppo", "turn", "gspo", "cispo"])
@pytest.mark.parametrize("budget", [10, ENDLESS])
def test_without_old_log_probs_the_ratio_is_1(kind: str, budget: int) -> None:
    model = shared_model("qwen3")
    forest = sampled_by(model, rich_forest(7), 7)
    loss = Loss(**SHARP, kind=kind, importance_cap=1.2)  # type: ignore[arg-type]
    got = learnt(model, forest, loss, budget, on_policy=True)
    assert_same(got, expected_of(model, forest, loss, on_policy=True))
    assert got[0]["ratio"] == pytest.approx(got[0]["tokens"], rel=1e-6)


@pytest.mark.parametrize("kind", ["ppo", "cispo"])
def test_log_ratios_are_cut_at_20(kind: str) -> None:
    """Old log-probs that are off by 40 leave a loss that is finite, and no gradient through the ratio."""
    model, loss = shared_model("llama"), Loss(kind=kind, dual_clip=None)  # type: ignore[arg-type]
    forest = sampled_by(model, rich_forest(8), 8)
    batch = build_batch(forest.trees, loss, MAX_TOKENS)
    off = {
        key: [value - 40 * math.copysign(1, math.cos(100 * value)) for value in node]
        for key, node in engine_of(forest).items()
    }
    total = plain_loss(model, forest.trees, loss, TEMPERATURE, MAX_TOKENS, off)
    total.backward()  # type: ignore[no-untyped-call]
    expected = gradients(model)
    engine_K = batch.engine_logprobs_K.double()
    old_K = (engine_K - 40 * torch.cos(100 * engine_K).sign()).float()
    sums = forward_backward(model, batch, loss, TEMPERATURE, 20, old_K)
    assert sums["loss"] == pytest.approx(total.item(), rel=1e-5)
    assert math.isfinite(sums["loss"]) and any(value.any() for value in expected.values()) == (kind == "cispo")
    assert_same(({"loss": 0.0}, gradients(model)), (0.0, expected))


@pytest.mark.parametrize("budget", [1, 14, ENDLESS])
@pytest.mark.parametrize(
    "loss", [Loss(), Loss(entropy_coef=0.1), Loss(kl_coef=0.1, kind="gspo")], ids=["ppo", "entropy", "kl"]
)
def test_nothing_to_teach_is_no_gradient(loss: Loss, budget: int) -> None:
    """Equal rewards, all masked, or no model token anywhere: only the entropy and KL terms are left, if they count."""
    model, reference = shared_model("llama-gqa"), reference_model("llama-gqa")
    same = two_branches()
    trees = (same, same, tree([prompt([1, 2]), tool(0, [3])], [0, 1, 1]))
    keep = ([True] * 3, [False] * 3, [True] * 3)
    rewards = ([1.0] * 3, [0.0, 1.0, 2.0], [1.0, 0.0, 0.0])
    scored = tuple(map(with_rewards, trees, rewards, [Advantage()] * 3, keep))
    forest = sampled_by(model, Forest(scored), 3)
    sums, found = learnt(model, forest, loss, budget, reference=reference)
    assert_same((sums, found), expected_of(model, forest, loss, reference))
    assert any(value.any() for value in found.values()) == bool(loss.entropy_coef or loss.kl_coef)
    nothing = Forest(scored[1:])
    sums, found = learnt(model, nothing, loss, budget, reference=reference)
    assert not any(sums.values()) and not any(value.any() for value in found.values())


def test_gradients_are_added_to_those_that_are_there() -> None:
    model, forest = shared_model("llama"), rich_forest(5)
    batch = build_batch(forest.trees, Loss(), MAX_TOKENS)
    forward_backward(model, batch, Loss(), TEMPERATURE, ENDLESS)
    once = {name: p.grad.clone() for name, p in model.named_parameters()}
    forward_backward(model, batch, Loss(), TEMPERATURE, 10)
    for name, twice in gradients(model).items():
        torch.testing.assert_close(twice, 2 * once[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("trained", ["layers.1.mlp.down_proj", "layers.0.self_attn.v_proj", "norm.weight"])
def test_frozen_weights_change_nothing_for_the_others(family: str, trained: str) -> None:
    model, loss = make_model(family), Loss(**SHARP)
    forest = sampled_by(model, rich_forest(6), 6)
    total, everything = expected_of(model, forest, loss)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained in name)
    expected = {name: value * (trained in name) for name, value in everything.items()}
    for budget in (1, 10, ENDLESS):
        assert_same(learnt(model, forest, loss, budget), (total, expected))


def metrics_by_hand(model: Any, forest: Forest, loss: Loss) -> dict[str, float]:
    """Each shared token once; it is clipped if it is on any of its trajectories."""
    old, clipped, numbers = old_of(forest), set(), {}
    for trajectory in plain_trajectories(forest.trees):
        if not any(trajectory.advantages):
            continue
        new_T, entropy_T = (values.tolist() for values in logprobs_and_entropies(model, trajectory, TEMPERATURE))
        old_T = [old[number, node][at] for number, node, at in trajectory.sources]
        mean = sum(new_T) / len(new_T) - sum(old_T) / len(old_T)
        of_turn: dict[int, list[float]] = {}
        for (_, node, _), new, before in zip(trajectory.sources, new_T, old_T, strict=True):
            of_turn.setdefault(node, []).append(new - before)
        for source, new, before, entropy, advantage, engine in zip(
            trajectory.sources, new_T, old_T, entropy_T, trajectory.advantages, trajectory.engine, strict=True
        ):
            turn = of_turn[source[1]]
            ratio = math.exp({"gspo": mean, "turn": sum(turn) / len(turn)}.get(loss.kind, new - before))
            low, high, most = 1 - loss.clip_low, 1 + loss.clip_high, loss.dual_clip or math.inf
            outside = (ratio > high or ratio < low) if loss.kind == "cispo" else None
            bitten = ratio > high if advantage > 0 else ratio < low or ratio > most
            if advantage and (bitten if outside is None else outside):
                clipped.add(source)
            numbers[source] = new - before, entropy, abs(before - engine)
    moves, entropies, mismatches = zip(*numbers.values(), strict=True)
    return {
        "tokens": len(numbers),
        "clip_fraction": len(clipped),
        "ratio": sum(map(math.exp, moves)),
        "kl_k1": -sum(moves),
        "kl_k3": sum(math.exp(move) - 1 - move for move in moves),
        "train_entropy": sum(entropies),
        "engine_mismatch": sum(mismatches),
    }


@pytest.mark.slow
@pytest.mark.parametrize("budget", [1, 20, ENDLESS])
@pytest.mark.parametrize("kind", ["ppo", "turn", "gspo", "cispo"])
def test_metrics_count_every_token_once(kind: str, budget: int) -> None:
    model, loss = shared_model("qwen3"), Loss(**SHARP, kind=kind)  # type: ignore[arg-type]
    for seed in range(3):
        forest = sampled_by(model, rich_forest(80 + seed, "hard" if seed else "soft"), seed)
        sums, _ = learnt(model, forest, loss, budget)
        sums.pop("loss")
        assert sums == pytest.approx(metrics_by_hand(model, forest, loss), rel=1e-5, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_evaluate_equals_a_plain_pass(family: str, temperature: float) -> None:
    model = shared_model(family)
    forest = sampled_by(model, rich_forest(11), 11)
    expected = {}
    with torch.no_grad():
        for trajectory in plain_trajectories(forest.trees):
            if trajectory.positions:
                numbers = torch.stack(logprobs_and_entropies(model, trajectory, temperature), 1)
                expected.update(dict(zip(trajectory.engine, numbers.float(), strict=True)))
    for shared in (True, False):
        batch = build_batch(forest.trees, Loss(entropy_coef=1.0), MAX_TOKENS, shared=shared)
        wanted_K2 = torch.stack([expected[value] for value in batch.engine_logprobs_K.tolist()])
        assert shared == (len(set(batch.engine_logprobs_K.tolist())) == len(batch.engine_logprobs_K))
        for budget in (1, 13, ENDLESS):
            logprobs_K, entropies_K = compute_logprobs(model, batch, temperature, budget)
            assert not logprobs_K.requires_grad and not entropies_K.requires_grad
            got_K2 = torch.stack([logprobs_K, entropies_K], 1)
            torch.testing.assert_close(got_K2, wanted_K2, rtol=1e-5, atol=1e-5)


# --- attention on other devices ---


def fake_flash(
    q_TFD: Tensor, k_RHD: Tensor, v_RHD: Tensor, queries: Tensor, keys: Tensor, *rest: Any, **options: Any
) -> tuple[Tensor, ...]:
    """Flash attention over ragged rows as its makers define it: the last query sees the last key."""
    causal, left, right = rest[3], options["window_size_left"], options["window_size_right"]
    assert rest[:2] == (max(queries.diff()), max(keys.diff())) and rest[2] == 0 and (causal or right == 0)
    group = q_TFD.shape[1] // k_RHD.shape[1]
    out = []
    for row in range(len(queries) - 1):
        q = q_TFD[queries[row] : queries[row + 1]].transpose(0, 1)
        k, v = (x[keys[row] : keys[row + 1]].repeat_interleave(group, 1).transpose(0, 1) for x in (k_RHD, v_RHD))
        at = torch.arange(q.shape[1]).unsqueeze(1) + k.shape[1] - q.shape[1]
        ahead = torch.arange(k.shape[1]) - at
        hidden = (ahead > 0) | (ahead < -left if left >= 0 else torch.zeros_like(ahead, dtype=torch.bool))
        scores = (q @ k.transpose(1, 2) * options["scale"]).masked_fill(hidden, -torch.inf)
        out.append((scores.softmax(-1) @ v).transpose(0, 1))
    return torch.cat(out), torch.zeros(1), torch.zeros(1), torch.zeros(1), torch.zeros(1)


def fake_flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, *rest: Any, **options: Any
) -> tuple[Tensor, ...]:
    """Its gradients, by autograd."""
    *places, dropout, causal, _, _ = rest
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    with torch.enable_grad():
        again = fake_flash(*inputs, *places, dropout, causal, False, **options)[0]
    torch.testing.assert_close(again, out)
    return torch.autograd.grad(again, inputs, grad)


@pytest.mark.slow
@pytest.mark.parametrize("shared", [True, False], ids=["tree", "packed"])
@pytest.mark.parametrize("family", ["llama-gqa", "gemma3"])
def test_ragged_flash_attention_is_given_every_path(family: str, shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU's way, with a slow stand-in for its kernel."""
    monkeypatch.setattr("arpo.trainer.attention._has_flash", lambda q: True)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", fake_flash)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", fake_flash_backward)
    model, loss = shared_model(family), Loss(**SHARP)
    forest = sampled_by(model, rich_forest(30), 30)
    expected = expected_of(model, forest, loss)
    for budget in (1, 20, ENDLESS):
        assert_same(learnt(model, forest, loss, budget, shared), expected)


class Elsewhere(Tensor):
    """On a device that is neither a CPU nor has flash attention, as far as one asks."""

    device = property(lambda self: SimpleNamespace(type="other"))  # type: ignore[assignment]


@pytest.mark.parametrize("sight", ["all", "causal", "window"])
def test_plain_products_equal_the_kernel_of_the_cpu(sight: str) -> None:
    torch.manual_seed(0)
    tokens = (5, 5 if sight == "causal" else 9)
    q, grad = torch.randn(2, 2, 2, tokens[0], 8)
    k, v = (torch.randn(2, 1, tokens[1], 8).expand(2, 2, -1, -1) for _ in range(2))
    mask = None
    if sight == "window":
        behind = torch.arange(4, 4 + tokens[0]).unsqueeze(1) - torch.arange(tokens[1])
        mask = torch.zeros(behind.shape).masked_fill_((behind < 0) | (behind >= 3), -1e30)
    how = (mask, sight == "causal", 0.3)
    expected = _attn_forward(q, k, v, *how)
    found = _attn_forward(*(x.as_subclass(Elsewhere) for x in (q, k, v)), *how)
    for got, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(got.as_subclass(Tensor), wanted)
    wider = expected[1] + 0.5  # as if the queries saw other keys, too
    expected_grads = _attn_backward(grad, q, k, v, expected[0], wider, *how)
    found_grads = _attn_backward(*(x.as_subclass(Elsewhere) for x in (grad, q, k, v, expected[0], wider)), *how)
    for got, wanted in zip(found_grads, expected_grads, strict=True):
        torch.testing.assert_close(got.as_subclass(Tensor), wanted)


# --- what a budget promises ---


def longest_path(forest: Forest) -> int:
    return max(map(len, forest.trained_tokens()))


@pytest.mark.parametrize("kind", ["ppo", "turn", "gspo", "cispo"])
@pytest.mark.parametrize("seed", range(4))
def test_every_token_is_read_once_within_the_budget(kind: str, seed: int) -> None:
    """No pass exceeds the budget or a trajectory; what predicts nothing may be absent. Split ratios read twice."""
    model, forest = shared_model("llama"), rich_forest(20 + seed)
    loss = Loss(kind=kind)  # type: ignore[arg-type]
    batch = build_batch(forest.trees, loss, MAX_TOKENS)
    all_tokens, longest = batch.unique_tokens, longest_path(forest)
    needed = len(set(batch.parent_N.tolist()) - {-1})
    most = 0
    for budget in (1, 8, longest, all_tokens - 1, all_tokens):
        with passes_of(model) as sizes:
            compute_logprobs(model, batch, TEMPERATURE, budget)
        assert needed <= sum(sizes) <= all_tokens and max(sizes) <= max(budget, longest)
        with passes_of(model) as sizes:
            forward_backward(model, batch, loss, TEMPERATURE, budget, old_logprob(batch.engine_logprobs_K))
        times = 2 if kind in ("gspo", "turn") and sum(sizes) > all_tokens else 1
        assert times * needed <= sum(sizes) <= times * all_tokens and max(sizes) <= max(budget, longest)
        most = max(most, len(sizes) // times)
    gradients(model)
    assert (times, len(sizes), most > 1) == (1, 1, True)  # the last budget holds it all


# --- bfloat16 ---


@pytest.mark.slow
def test_in_bfloat16_the_tree_is_as_exact_as_packed_rows() -> None:
    """Distance of all gradients from float32, over several forests and families: at most twice that of packed rows."""
    errors = {True: 0.0, False: 0.0}
    for number, family in enumerate(("llama-gqa", "qwen3", "gemma3")):
        coarse = make_model(family).bfloat16()
        exact = make_model(family)
        exact.load_state_dict({name: value.float() for name, value in coarse.state_dict().items()})
        forest = sampled_by(exact, rich_forest(40 + number), number, spread=0.1)
        _, wanted = expected_of(exact, forest, Loss(), on_policy=True)
        size = math.sqrt(sum(value.square().sum().item() for value in wanted.values()))
        for shared in errors:
            for budget in (15, ENDLESS):
                _, found = learnt(coarse, forest, Loss(), budget, shared, on_policy=True)
                away = sum((found[name].float() - value).square().sum().item() for name, value in wanted.items())
                errors[shared] += math.sqrt(away) / size
    assert 0 < errors[True] < 2 * errors[False]


# --- the oracle itself ---


@pytest.mark.slow
@pytest.mark.parametrize("aggregation", ["token-mean", "sequence-mean", "constant"])
@pytest.mark.parametrize("family", ["smollm2", "gemma3"])
def test_padded_rows_equal_the_oracle(family: str, aggregation: str) -> None:
    model, loss = shared_model(family), Loss(aggregation=aggregation)  # type: ignore[arg-type]
    forest = sampled_by(model, rich_forest(60), 0)
    expected = expected_of(model, forest, loss, on_policy=True)
    for max_microbatch_tokens in (1, 60, ENDLESS):
        total = padded_backward(model, forest.trees, loss, TEMPERATURE, MAX_TOKENS, max_microbatch_tokens)
        assert_same(({"loss": total}, gradients(model)), expected)


@pytest.mark.slow
def test_the_forests_are_hard_enough() -> None:
    """Both clips, the dual clip and the cap change the gradient of most of them by more than a tenth."""
    model = shared_model("llama")
    changes = ({"clip_low": 1.0}, {"clip_high": 9.0}, {"dual_clip": None}, {"importance_cap": 1.1})
    moved = torch.zeros(len(changes))
    for seed in range(70, 80):
        forest = sampled_by(model, rich_forest(seed), seed)
        plain, *others = (
            expected_of(model, forest, Loss(**{**SHARP, **change}))[1]["model.embed_tokens.weight"]
            for change in ({}, *changes)
        )
        moved += torch.tensor([float((other - plain).norm() > 0.1 * plain.norm()) for other in others])
    assert moved.min() >= 7


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["ppo", "turn", "gspo", "cispo"])
def test_in_float64_it_is_exact(family: str, kind: str) -> None:
    """The loss to 1e-9, each gradient to 1e-5 of its own largest entry (norms round to float32 in these models)."""
    model = make_model(family).double()
    cases = [(a, b) for a in ("soft", "hard") for b in ("token-mean", "sequence-mean", "constant")]
    for number, (attribution, aggregation) in enumerate(cases):
        loss = Loss(**SHARP, kind=kind, aggregation=aggregation, entropy_coef=0.1)  # type: ignore[arg-type]
        forest = sampled_by(model, rich_forest(number, attribution), number)
        expected_loss, expected = expected_of(model, forest, loss)
        sums, found = learnt(model, forest, loss, (1, 12, ENDLESS)[number % 3])
        assert sums["loss"] == pytest.approx(expected_loss, abs=1e-9)
        for name, value in expected.items():
            assert (found[name] - value).abs().max() <= 1e-5 * value.abs().max(), name
