"""Every preset against a slow reference: advantage, terms and weights written out, one trajectory at a time.

The numbers (clips, weights) stand here as literals, so that a preset that drifts from its algorithm is noticed.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from forests import TEMPERATURE, Forest, gradients, old_logprob, old_of, reference_model, rich_forest, sampled_by
from models import make_model
from plain import PlainTrajectory, logprobs_and_entropies, plain_trajectories
from torch import Tensor
from trees import nested_branches, two_branches

from arpo.algorithm.advantage import compute_credits
from arpo.algorithm.batch import build_batch
from arpo.config.loading import load_config, presets
from arpo.config.schema import Config
from arpo.trainer.forward_backward import compute_logprobs, forward_backward
from arpo.types import Kind, Node, Reward, RolloutTree, ScoredTree

MAX_TOKENS = 50
Groups = Sequence[Sequence[float]]
Trees = Sequence[RolloutTree]
Rewarded = tuple[Trees, Groups, int, int]  # ..., the tree and the leaf that are meant


def group(given: Rewarded) -> float:
    """Compared with all trajectories of the task, in standard deviations."""
    _, rewards, number, leaf = given
    std = statistics.pstdev(rewards[number])
    return (rewards[number][leaf] - statistics.fmean(rewards[number])) / std if std else 0.0


def unscaled(given: Rewarded) -> float:
    """Compared with all trajectories of the task."""
    _, rewards, number, leaf = given
    return rewards[number][leaf] - statistics.fmean(rewards[number])


def leave_one_out(given: Rewarded) -> float:
    """Compared with the other trajectories of the task."""
    _, rewards, number, leaf = given
    rest = [reward for i, reward in enumerate(rewards[number]) if i != leaf]
    return rewards[number][leaf] - statistics.fmean(rest) if rest else 0.0


def batch(given: Rewarded) -> float:
    """Compared with all trajectories of the step, in standard deviations."""
    _, rewards, number, leaf = given
    every = [reward for own in rewards for reward in own]
    return (rewards[number][leaf] - statistics.fmean(every)) / statistics.pstdev(every)


def tree_and_group(given: Rewarded) -> float:
    """As in a group, and once more among the trajectories that share its first turn."""
    trees, rewards, number, leaf = given
    tree = trees[number]
    ways = [tree.prefix(end.node)[:2] for end in tree.leaves]
    same = [reward for way, reward in zip(ways, rewards[number], strict=True) if way == ways[leaf]]
    std = statistics.pstdev(same)
    return group(given) + ((rewards[number][leaf] - statistics.fmean(same)) / std if std else 0.0)


def over_the_step(given: Rewarded) -> float:
    """Compared with all trajectories of the task, in standard deviations of what that gives over the whole step."""
    trees, rewards, _, _ = given
    every = [unscaled((trees, rewards, n, leaf)) for n, own in enumerate(rewards) for leaf in range(len(own))]
    return unscaled(given) / statistics.pstdev(every)


def leaves_through(tree: RolloutTree, node: int) -> list[int]:
    """The leaves of the trajectories through a node."""
    return [leaf for leaf, end in enumerate(tree.leaves) if node in tree.prefix(end.node)]


def parent_of(tree: RolloutTree, node: int) -> int:
    """The node before it, of one that is not the prompt."""
    parent = tree.nodes[node].parent
    assert parent is not None
    return parent


def mean_of_trajectories(given: Rewarded, node: int) -> float:
    """The mean advantage of the trajectories through the turn."""
    trees, rewards, number, _ = given
    return statistics.fmean(group((trees, rewards, number, leaf)) for leaf in leaves_through(trees[number], node))


def temporal_difference(given: Rewarded, node: int) -> float:
    """TEMPO: the trajectory's advantage, and by how much the mean advantage changes with the turn."""
    parent = parent_of(given[0][given[2]], node)
    return group(given) + mean_of_trajectories(given, node) - mean_of_trajectories(given, parent)


def backed_up(given: Rewarded, node: int) -> float:
    """AT2PO: the mean of the values of what follows the turn; the value of an end is its trajectory's advantage."""
    trees, rewards, number, _ = given
    tree = trees[number]
    ends = [group((trees, rewards, number, leaf)) for leaf, end in enumerate(tree.leaves) if end.node == node]
    children = [i for i, other in enumerate(tree.nodes) if other.parent == node and leaves_through(tree, i)]
    return statistics.fmean([*ends, *(backed_up(given, child) for child in children)])


def discounted(given: Rewarded, node: int) -> float:
    """The mean over the trajectories through the turn of 0.95^(turns after it) R."""
    trees, rewards, number, _ = given
    tree, found = trees[number], []
    for leaf in leaves_through(tree, node):
        way = tree.prefix(tree.leaves[leaf].node)
        turns_left = sum(tree.nodes[i].kind is Kind.MODEL for i in way[way.index(node) + 1 :])
        found.append(0.95**turns_left * rewards[number][leaf])
    return statistics.fmean(found)


def same_state(given: Rewarded, node: int) -> float:
    """GiGPO: the trajectory's advantage, and that of the turn among all turns of the task after the same text."""
    tree = given[0][given[2]]
    before = tree.nodes[parent_of(tree, node)].text
    turns = [i for i, n in enumerate(tree.nodes) if n.kind is Kind.MODEL and leaves_through(tree, i)]
    returns = [discounted(given, i) for i in turns if tree.nodes[parent_of(tree, i)].text == before]
    std = statistics.pstdev(returns)
    return group(given) + ((discounted(given, node) - statistics.fmean(returns)) / std if std > 1e-8 else 0.0)


def clipped(low: float, high: float, dual: float = math.inf) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """PPO's term for each token."""

    def term(new_T: Tensor, old_T: Tensor, advantage_T: Tensor) -> Tensor:
        rows = []
        for new, old, advantage in zip(new_T, old_T, advantage_T, strict=True):
            ratio = (new - old).exp()
            least = torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)
            rows.append(torch.maximum(least, dual * advantage) if advantage < 0 and dual < math.inf else least)
        return torch.stack(rows)

    return term


def one_ratio(new_T: Tensor, old_T: Tensor, advantage_T: Tensor) -> Tensor:
    """GSPO and AT2PO: the ratio of the trajectory, or of the turn, for every token."""
    ratio = (new_T - old_T).mean().exp()
    return torch.minimum(ratio * advantage_T, ratio.clamp(1 - 3e-3, 1 + 4e-3) * advantage_T)


def turn_by_turn(term: Callable[[Tensor, Tensor, Tensor], Tensor], turns: Sequence[int], *given: Tensor) -> Tensor:
    """The terms of each turn's tokens by themselves."""
    rows = [torch.tensor([i for i, other in enumerate(turns) if other == turn]) for turn in dict.fromkeys(turns)]
    return torch.cat([term(*(values_T[own] for values_T in given)) for own in rows])


def weighted(new_T: Tensor, old_T: Tensor, advantage_T: Tensor) -> Tensor:
    """CISPO: the ratio, at most 5, is a weight."""
    return (new_T - old_T).exp().clamp(max=5).detach() * advantage_T * new_T


def gradient_kept(new_T: Tensor, old_T: Tensor, advantage_T: Tensor) -> Tensor:
    """AEPO: (1 + 0.2) r / stop(r) above the upper clip."""
    ratio_T = (new_T - old_T).exp()
    high_T = 1.2 / ratio_T.detach() * ratio_T
    term_T = clipped(0.2, 0.2, 3.0)(new_T, old_T, advantage_T)
    return torch.where((advantage_T > 0) & (ratio_T > 1.2), high_T * advantage_T, term_T)


PPO = clipped(0.2, 0.2, 3.0)


@dataclass(frozen=True)
class Reference:
    """An algorithm written out."""

    advantage: Callable[[Rewarded], float]
    term: Callable[[Tensor, Tensor, Tensor], Tensor] = PPO
    weigh: str = "trajectory"  # all trajectories weigh the same; "token": all tokens do; "sum": nothing is divided
    turn: Callable[[Rewarded, int], float] | None = None  # the advantage of a turn, if not its trajectory's
    per_turn: bool = False  # whether the terms of a turn depend on that turn alone
    kl: float = 0.0
    entropy_weight: float = 0.0


REFERENCES = {
    "arpo": Reference(group, weigh="token"),
    "arpo-code": Reference(group, weigh="token"),
    "arpo-paper": Reference(group),
    "arpo-random": Reference(group, weigh="token"),
    "arpo-always": Reference(group, weigh="token"),
    "arpo-shuffled": Reference(group, weigh="token"),
    "oracle": Reference(group, weigh="token"),
    "arpo-hard": Reference(group, weigh="token", turn=mean_of_trajectories),
    "trace": Reference(group, weigh="token"),
    "branpo": Reference(group, weigh="token"),
    "grpo": Reference(group),
    "dapo": Reference(group, clipped(0.2, 0.28), "token"),
    "reinforce++": Reference(batch, weigh="token", kl=0.001),
    "reinforce++-baseline": Reference(over_the_step, weigh="token", kl=0.001),
    "rloo": Reference(leave_one_out, weigh="sum"),
    "dr-grpo": Reference(unscaled, weigh="sum"),
    "gspo": Reference(group, one_ratio),
    "cispo": Reference(group, weighted, "token"),
    "tree-grpo": Reference(tree_and_group),
    "tempo": Reference(group, weigh="token", turn=temporal_difference),
    "at2po": Reference(group, one_ratio, "token", turn=backed_up, per_turn=True),
    "gigpo": Reference(group, weigh="token", turn=same_state),
    "arpo+": Reference(tree_and_group, clipped(0.2, 0.28), "token"),
    "aepo": Reference(group, gradient_kept, "token", entropy_weight=0.2),
}
BRANCHING = {  # policy, and what else is not as in ARPO
    "arpo": {},
    "arpo-hard": {},
    "arpo-random": {"policy": "random"},
    "arpo-always": {"policy": "always"},
    "arpo-shuffled": {"policy": "shuffled"},
    "oracle": {"policy": "oracle"},
    "arpo-code": {"rule": "stochastic", "entropy_unit": "sum", "alpha": 0.5, "beta": 0.2},
    "arpo-paper": {"rule": "threshold"},
    "at2po": {"policy": "posthoc_top_entropy", "penalty": 0.1, "round_size": 4},
    "trace": {"policy": "posthoc_outcome", "round_size": 2},
    "branpo": {"policy": "posthoc_tail", "round_size": 4},
    "tree-grpo": {"policy": "posthoc_random"},
    "tempo": {"policy": "posthoc_random"},
    "arpo+": {"policy": "posthoc_random", "fill": "informative"},
    "aepo": {
        "rule": "stochastic",
        "entropy_unit": "sum",
        "alpha": 0.5,
        "beta": 0.2,
        "balance": 0.5,
        "penalty": 0.05,
    },
}


def preset(name: str) -> Config:
    """Its settings, with short trajectories."""
    return load_config(None, [f"preset={name}", f"rollout.max_tokens={MAX_TOKENS}"])


def with_entropies(tree: RolloutTree, rng: random.Random) -> RolloutTree:
    """The tree with entropies that differ."""

    def other(node: Node) -> Node:
        return replace(node, entropies=tuple(rng.uniform(0, 3) for _ in node.entropies))

    return replace(tree, nodes=tuple(map(other, tree.nodes)))


def entropy_weights(trees: Trees, weight: float) -> dict[tuple[int, int, int], float]:
    """AEPO: 1 + a z for every token, z over all trained tokens, each once."""
    trained = {
        (number, index, at): entropy
        for number, tree in enumerate(trees)
        for index in {i for leaf in tree.leaves for i in tree.prefix(leaf.node)}
        if tree.nodes[index].kind is Kind.MODEL
        for at, entropy in enumerate(tree.nodes[index].entropies)
    }
    mean, std = statistics.fmean(trained.values()), statistics.pstdev(trained.values())
    return {key: max(0.0, 1 + weight * (entropy - mean) / std) for key, entropy in trained.items()}


def slow_loss(
    model: Any,
    trees: Trees,
    rewards: Groups,
    reference: Reference,
    trajectories: Sequence[PlainTrajectory],
    old: Any,
    before: Any,
) -> Tensor:
    """The loss, trajectory by trajectory."""
    leaves = [(number, leaf) for number, tree in enumerate(trees) for leaf in range(len(tree.leaves))]
    own = [reference.advantage((trees, rewards, number, leaf)) for number, leaf in leaves]
    token_weight = entropy_weights(trees, reference.entropy_weight)
    tokens = sum(len(trajectory.positions) for trajectory in trajectories)
    total = torch.zeros((), dtype=torch.float64)
    for trajectory, (number, leaf), advantage in zip(trajectories, leaves, own, strict=True):
        if not trajectory.positions:
            continue
        new_T, _ = logprobs_and_entropies(model, trajectory, TEMPERATURE)
        old_T = new_T.new_tensor([old[tree, node][at] for tree, node, at in trajectory.sources])
        turns = [node for _, node, _ in trajectory.sources]
        by_turn = {
            node: reference.turn((trees, rewards, number, leaf), node) if reference.turn else advantage
            for node in set(turns)
        }
        given = new_T, old_T, new_T.new_tensor([by_turn[node] for node in turns])
        term_T = turn_by_turn(reference.term, turns, *given) if reference.per_turn else reference.term(*given)
        term_T = term_T * new_T.new_tensor([token_weight[source] for source in trajectory.sources])
        if reference.kl:
            with torch.no_grad():
                apart_T = logprobs_and_entropies(before, trajectory, TEMPERATURE)[0]
            apart_T = apart_T - new_T
            term_T = term_T - reference.kl * (apart_T.exp() - 1 - apart_T)
        divided = {
            "trajectory": len(trajectories) * len(trajectory.positions),
            "token": tokens,
            "sum": len(trajectories) * MAX_TOKENS,
        }
        total = total - term_T.sum() / divided[reference.weigh]
    return total


def test_every_preset_has_a_reference() -> None:
    assert set(presets()) == set(REFERENCES)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(REFERENCES))
def test_a_preset_has_the_gradient_of_its_algorithm(name: str) -> None:
    model, before, config = make_model("llama").double(), reference_model("llama").double(), preset(name)
    for seed in range(3):
        rng = random.Random(seed)
        forest = sampled_by(model, rich_forest(seed), seed)
        every = (*(scored.tree for scored in forest.trees), two_branches(), nested_branches())
        trees = [with_entropies(tree, rng) for tree in every]
        rewards = [[rng.choice([-1.0, 0.0, 1.0, 1.1]) for _ in tree.leaves] for tree in trees]
        scored = [ScoredTree(tree, tuple(map(Reward, own))) for tree, own in zip(trees, rewards, strict=True)]
        whole = Forest(tuple(compute_credits(scored, config.advantage)))
        slow_loss(
            model, trees, rewards, REFERENCES[name], plain_trajectories(whole.trees), old_of(whole), before
        ).backward()
        expected = gradients(model)
        for shared in (True, False):
            weight = config.advantage.entropy_weight
            made = build_batch(whole.trees, config.loss, MAX_TOKENS, shared=shared, entropy_weight=weight)
            old_K = old_logprob(made.engine_logprobs_K)
            reference_K = compute_logprobs(before, made, TEMPERATURE, 10**9)[0] if config.loss.kl_coef else None
            forward_backward(model, made, config.loss, TEMPERATURE, 10**9, old_K, reference_K)
            for key, value in gradients(model).items():
                assert (value - expected[key]).abs().max() <= 1e-5 * expected[key].abs().max(), (key, shared)


@pytest.mark.parametrize("name", sorted(REFERENCES))
def test_a_preset_branches_as_its_algorithm_does(name: str) -> None:
    plain, found = load_config(None, []).branching, preset(name).branching
    wanted = BRANCHING.get(name, {"policy": "never"})
    assert found == plain.model_copy(update=wanted)
    assert preset(name).rollout.num_initial == (16 if wanted.get("policy") == "never" else 8)


def test_the_preset_arpo_has_the_defaults() -> None:
    assert preset("arpo") == load_config(None, [f"rollout.max_tokens={MAX_TOKENS}"])
    plain = Config()
    assert (preset("arpo").branching, preset("arpo").advantage, preset("arpo").loss) == (
        plain.branching,
        plain.advantage,
        plain.loss,
    )


@pytest.mark.parametrize("name", ["arpo-random", "arpo-always", "arpo-shuffled", "oracle", "arpo-code"])
def test_controls_differ_from_arpo_in_branching_only(name: str) -> None:
    arpo, other = preset("arpo"), preset(name)
    same = other.model_copy(update={"preset": "arpo", "branching": arpo.branching})
    assert same == arpo and other.branching != arpo.branching


def test_what_only_dapo_does() -> None:
    for name in REFERENCES:
        config = preset(name)
        assert (config.train.dynamic_sampling_rounds, config.reward.overlong) == (
            (3, 0.2) if name == "dapo" else (0, 0.0)
        )
