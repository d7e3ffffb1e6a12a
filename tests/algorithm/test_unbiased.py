"""`advantage.attribution = "unbiased"` against full enumeration: the expectation over all trees is the policy gradient.

The toy has two levels. A trajectory is a first turn a in {0, 1}, a tool result that shows it, and a second turn b in
{0, 1}. The policy is three Bernoulli variables: p of a = 1 with logit THETA[0], q_a of b = 1 with logit THETA[1 + a].
Two roots are sampled; from the result of a, CHILDREN[a] second turns are. So the state decides how often a trajectory
branches. Every outcome is built as a rollout tree, credited and batched by the package; its gradient is that of
`forward_backward` at ratio 1, the sum over trajectories and tokens of weight x advantage x d log pi.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import product

import pytest
import torch
from trees import model, nested_branches, prompt, tool, tree, two_branches

from arpo.algorithm.advantage import compute_credits
from arpo.algorithm.batch import build_batch
from arpo.algorithm.loss import policy_loss
from arpo.config.algorithm import Advantage, Loss
from arpo.config.loading import load_config
from arpo.config.schema import Config
from arpo.errors import ArpoError
from arpo.training.checks import check_settings
from arpo.types import Credit, Node, Reward, ScoredTree

THETA = (0.3, -0.8, 1.1)
REWARDS = {(0, 0): 0.2, (0, 1): 1.0, (1, 0): -0.5, (1, 1): 0.7}
CHILDREN = (1, 3)  # by the first turn
UNBIASED = Advantage(baseline="leave_one_out", scale="none", attribution="unbiased")
CONSTANT = Loss(aggregation="constant")
Vector = tuple[float, float, float]
Roots = Sequence[tuple[int, Sequence[int]]]  # the first turn of each root, and the second turns after it


def probability(state: int, action: int) -> float:
    """pi(action | state); state 0 is the prompt, 1 + a the result after a."""
    one = 1 / (1 + math.exp(-THETA[state]))
    return one if action else 1 - one


def score(state: int, action: int) -> Vector:
    """d log pi(action | state) / d THETA."""
    values = [0.0, 0.0, 0.0]
    values[state] = action - probability(state, 1)
    return values[0], values[1], values[2]


def exact_gradient() -> Vector:
    """d E[R] / d THETA, over the four trajectories."""
    total = [0.0, 0.0, 0.0]
    for (a, b), reward in REWARDS.items():
        chance = probability(0, a) * probability(1 + a, b)
        for k, (first, second) in enumerate(zip(score(0, a), score(1 + a, b), strict=True)):
            total[k] += chance * reward * (first + second)
    return total[0], total[1], total[2]


def outcomes(children: Callable[[int, int], int], count: int = 2) -> Iterator[tuple[float, Roots]]:
    """Every outcome of `count` roots, with its probability; `children` gets the first turn and the first child."""
    subtrees = []
    for a in (0, 1):
        for first in (0, 1):
            for rest in product((0, 1), repeat=children(a, first) - 1):
                seconds = (first, *rest)
                chance = probability(0, a) * math.prod(probability(1 + a, b) for b in seconds)
                subtrees.append((chance, (a, seconds)))
    for chosen in product(subtrees, repeat=count):
        yield math.prod(chance for chance, _ in chosen), [root for _, root in chosen]


def grown(roots: Roots) -> ScoredTree:
    """The outcome as a tree: token 10 x state + action for each turn."""
    nodes: list[Node] = [prompt([1, 2])]
    leaves, rewards = [], []
    for a, seconds in roots:
        nodes += [model(0, [a], "a"), tool(len(nodes), [9], f"result {a}")]
        result = len(nodes) - 1
        for b in seconds:
            leaves.append(len(nodes))
            rewards.append(Reward(REWARDS[a, b]))
            nodes.append(model(result, [10 * (1 + a) + b], "b"))
    return ScoredTree(tree(nodes, leaves), tuple(rewards))


def estimate(scored: ScoredTree, advantage: Advantage, loss: Loss) -> Vector:
    """The gradient of the objective that the package computes for one tree, at ratio 1."""
    batch = build_batch(compute_credits([scored], advantage), loss, 1)
    logprobs_K = torch.zeros(len(batch.targets_K), dtype=torch.float64, requires_grad=True)
    value, _ = policy_loss(
        logprobs_K, torch.zeros_like(logprobs_K), logprobs_K.detach(), None, batch, torch.arange(len(logprobs_K)), loss
    )
    if not value.requires_grad or not len(logprobs_K):
        return 0.0, 0.0, 0.0
    (slope_K,) = torch.autograd.grad(-value, logprobs_K)
    total = [0.0, 0.0, 0.0]
    for token, slope in zip(batch.tokens_N[batch.targets_K].tolist(), slope_K.tolist(), strict=True):
        for k, part in enumerate(score(token // 10, token % 10)):
            total[k] += slope * part
    return total[0], total[1], total[2]


def moments(
    advantage: Advantage, loss: Loss, children: Callable[[int, int], int], count: int = 2
) -> tuple[Vector, float]:
    """The expectation of the estimate over all outcomes, and its total variance."""
    found = [(chance, estimate(grown(roots), advantage, loss)) for chance, roots in outcomes(children, count)]
    assert math.fsum(chance for chance, _ in found) == pytest.approx(1, abs=1e-14)
    mean = [math.fsum(chance * value[k] for chance, value in found) for k in range(3)]
    variance = math.fsum(chance * (value[k] - mean[k]) ** 2 for chance, value in found for k in range(3))
    return (mean[0], mean[1], mean[2]), variance


def by_state(a: int, first: int) -> int:
    return CHILDREN[a]


def never(a: int, first: int) -> int:
    return 1


def by_outcome(a: int, first: int) -> int:
    """A rule that looks at the first child before it opens more."""
    return 3 if first else 1


def distance(mean: Vector) -> float:
    return math.dist(mean, exact_gradient())


def test_the_exact_gradient_is_that_of_the_expected_reward() -> None:
    def value(theta: Sequence[float]) -> float:
        one = [1 / (1 + math.exp(-t)) for t in theta]
        return sum(
            (one[0] if a else 1 - one[0]) * (one[1 + a] if b else 1 - one[1 + a]) * reward
            for (a, b), reward in REWARDS.items()
        )

    step = 1e-6
    for k, expected in enumerate(exact_gradient()):
        up, down = ([t + sign * step * (i == k) for i, t in enumerate(THETA)] for sign in (1, -1))
        assert (value(up) - value(down)) / (2 * step) == pytest.approx(expected, abs=1e-9)


def test_the_expectation_is_the_policy_gradient() -> None:
    mean, _ = moments(UNBIASED, CONSTANT, by_state)
    assert mean == pytest.approx(exact_gradient(), abs=1e-12)


@pytest.mark.parametrize("baseline", ["group", "leave_one_out"])
def test_the_soft_objective_is_biased_where_the_state_decides_how_often_it_branches(baseline: str) -> None:
    soft = Advantage.model_validate({"baseline": baseline, "scale": "none"})
    mean, _ = moments(soft, CONSTANT, by_state)
    assert distance(mean) > 0.03
    direction = [value / math.hypot(*mean) for value in mean]
    wanted = [value / math.hypot(*exact_gradient()) for value in exact_gradient()]
    assert math.dist(direction, wanted) > 0.1  # no step size mends it


def test_without_branches_both_are_exact_and_leave_one_out_is_the_same() -> None:
    plain = Advantage(baseline="leave_one_out", scale="none")
    for advantage in (UNBIASED, plain):
        assert moments(advantage, CONSTANT, never)[0] == pytest.approx(exact_gradient(), abs=1e-12)
    for _, roots in outcomes(never):
        assert estimate(grown(roots), UNBIASED, CONSTANT) == pytest.approx(
            estimate(grown(roots), plain, CONSTANT), abs=1e-15
        )


def test_a_decision_on_the_outcome_is_biased_whatever_the_weights() -> None:
    assert distance(moments(UNBIASED, CONSTANT, by_outcome)[0]) > 0.01


def test_the_figures_in_the_documentation() -> None:
    """docs/method.md has these: bias, variance, and the number of trees from which the exact estimate is better."""
    _, exact = moments(UNBIASED, CONSTANT, by_state)
    soft_mean, soft = moments(Advantage(baseline="leave_one_out", scale="none"), CONSTANT, by_state)
    two, four = (moments(UNBIASED, CONSTANT, never, count)[1] for count in (2, 4))
    assert (exact, soft, two, four) == pytest.approx((0.0589, 0.0387, 0.1176, 0.0393), abs=5e-5)
    assert (distance(soft_mean), math.hypot(*exact_gradient())) == pytest.approx((0.0350, 0.1487), abs=5e-5)
    assert math.ceil((exact - soft) / distance(soft_mean) ** 2) == 17


def test_weights_and_baselines_by_hand() -> None:
    """Weights: half for each root; a quarter for each child of node 2; a twelfth for each child of node 4."""
    scored = ScoredTree(nested_branches(), tuple(map(Reward, (1.0, 0.0, 0.0, 1.0, 0.0))))
    found = compute_credits([scored], UNBIASED)[0].credits
    assert [one.weight for one in found] == pytest.approx([1 / 12, 1 / 12, 1 / 12, 1 / 4, 1 / 2])
    assert found[0].by_node == pytest.approx({1: 1.0, 3: 1 - 1 / 3, 5: 1 - 3 / 11})
    assert found[1].by_node == pytest.approx({1: 0.0, 3: -1 / 3, 6: -4 / 11})
    assert found[3].by_node == pytest.approx({1: 1.0, 8: 1 - 1 / 9})
    assert found[4].by_node == pytest.approx({9: -2 / 3})
    assert found[4].advantage == pytest.approx(-2 / 3)


def test_a_masked_leaf_counts_in_no_weight_and_no_baseline() -> None:
    rewards = tuple(map(Reward, (1.0, 0.0, 0.0, -100.0, 0.5)))
    scored = ScoredTree(nested_branches(), rewards, mask=(True, True, True, False, True))
    found = compute_credits([scored], UNBIASED)[0].credits
    assert found[3] == Credit(0.0, {})
    assert [one.weight for i, one in enumerate(found) if i != 3] == pytest.approx([1 / 6, 1 / 6, 1 / 6, 1 / 2])
    assert found[0].by_node == pytest.approx({1: 0.5, 3: 0.5, 5: 1 - 0.25 / (5 / 6)})
    none = ScoredTree(nested_branches(), rewards, mask=(False,) * 5)
    assert compute_credits([none], UNBIASED)[0].credits == (Credit(0.0, {}),) * 5


def test_equal_rewards_give_nothing_and_a_single_leaf_its_reward() -> None:
    same = ScoredTree(two_branches(), (Reward(0.7),) * 3)
    assert {v for one in compute_credits([same], UNBIASED)[0].credits for v in one.by_node.values()} == {0.0}
    alone = ScoredTree(tree([prompt(), model(0, [3])], [1]), (Reward(0.7),))
    assert compute_credits([alone], UNBIASED)[0].credits == (Credit(0.7, {1: 0.7}, 1.0),)


def test_a_leaf_above_another_is_a_child_of_its_node() -> None:
    rollout = tree([prompt(), model(0, [3]), tool(1), model(2, [4])], [2, 3, 3])
    found = compute_credits([ScoredTree(rollout, tuple(map(Reward, (1.0, 0.0, 0.0))))], UNBIASED)[0].credits
    assert [one.weight for one in found] == [0.5, 0.25, 0.25]
    assert found[1].by_node == {1: 0.0, 3: -1.0}


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        (["advantage.baseline=group"], 'advantage.attribution: .*baseline = "leave_one_out"'),
        (["advantage.scale=std"], 'advantage.attribution: .*scale = "none"'),
        (["loss.aggregation=token-mean"], 'loss.aggregation="constant"'),
        (["branching.policy=entropy", "branching.probe=trajectory"], "decisions on the state alone"),
        (["branching.policy=always", "branching.probe=trajectory"], "decisions on the state alone"),
        (["loss.kind=gspo"], 'loss.kind="ppo" or "cispo"'),
        (["advantage.entropy_weight=0.2", "rollout.top_p=0.9"], "entropy_weight=0 and rollout.top_p=1"),
        (["train.dynamic_sampling_rounds=2"], "dynamic_sampling_rounds=0"),
        (["branching.policy=posthoc_random"], "decisions on the state alone"),
        (["branching.balance=1.0"], "branching.balance=none"),
        (["branching.fill=all"], "fixed number of trajectories from the prompt"),
    ],
)
def test_settings_that_would_make_it_biased_are_refused(more: list[str], problem: str) -> None:
    exact = ["advantage.attribution=unbiased", "advantage.baseline=leave_one_out", "advantage.scale=none"]
    rest = ["loss.aggregation=constant", "branching.policy=random", "branching.fill=none"]
    rest.append("branching.probe=first_token")

    def checked(settings: list[str]) -> Config:
        config = load_config(None, settings)
        check_settings(config, on_cluster=False)
        return config

    assert checked([*exact, *rest]).advantage == UNBIASED
    assert checked([*exact, *rest, "branching.policy=entropy"]).advantage == UNBIASED
    with pytest.raises(ArpoError, match=problem):
        checked([*exact, *rest, *more])
