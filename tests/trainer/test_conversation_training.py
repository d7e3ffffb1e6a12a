"""Trajectories of several conversations: each is trained in its own context, with the credit of the whole run."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from forests import MAX_TOKENS, TEMPERATURE, Forest, assert_same, gradients, learnt, old_of, random_credit, shared_model
from fruit import PRICES, price
from models import VOCAB
from plain import plain_conversations, plain_loss
from programs import program_agent, tool_loop
from trees import model, prompt, tool, tree, with_rewards

from arpo.agent.agent import Agent
from arpo.agent.formats import build_format
from arpo.algorithm.advantage import compute_credits
from arpo.algorithm.batch import build_batch
from arpo.algorithm.rollout import sample_tree
from arpo.builtin.model import build_model
from arpo.config.algorithm import Advantage, Branching, Loss
from arpo.config.schema import Rollout
from arpo.engine.scripted import ScriptedEngine
from arpo.rewards import Scorer
from arpo.tools.executor import Toolset
from arpo.trainer.forward_backward import forward_backward
from arpo.types import NO_CONTEXT, Kind, Node, Reward, RolloutTree, Task

TASK = Task("q1", "What do two pears cost?", ("110",))
LOSS = Loss(aggregation="token-mean")


def random_runs(rng: random.Random) -> RolloutTree:
    """Runs that branch off each other; requests follow any earlier node of their run, or nothing."""
    made: list[Node] = [prompt([rng.randrange(VOCAB) for _ in range(3)])]

    def prefix(index: int) -> list[int]:
        parent = made[index].parent
        return [index] if parent is None else [*prefix(parent), index]

    def draw(least: int) -> list[int]:
        return [rng.randrange(VOCAB) for _ in range(rng.randint(least, 4))]

    for _ in range(rng.randint(3, 9)):
        above = rng.choice([i for i, node in enumerate(made) if node.kind is not Kind.MODEL])
        tokens = draw(1)
        made.append(model(above, tokens, logprobs=[-rng.uniform(0.5, 4.0) for _ in tokens]))
        context = rng.choice([NO_CONTEXT, None, *prefix(len(made) - 1)])
        asked = tool(len(made) - 1, draw(1 if context == NO_CONTEXT else 0))
        made.append(replace(asked, context=context))
    inner = {node.parent for node in made}
    return tree(made, [index for index in range(len(made)) if index not in inner])


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("budget", [10**9, 12])
def test_gradients_are_those_of_the_conversations_one_by_one(shared: bool, budget: int) -> None:
    network = shared_model("qwen3")
    contexts = 0
    for seed in range(12):
        rng = random.Random(seed)
        scored = [random_credit(rng, random_runs(rng), "soft") for _ in range(2)]
        contexts += sum(node.context is not None for one in scored for node in one.tree.nodes)
        forest = Forest(tuple(scored))
        total = plain_loss(
            network, forest.trees, LOSS, TEMPERATURE, MAX_TOKENS, old_of(forest), split=plain_conversations
        )
        if total.requires_grad:
            total.backward()  # type: ignore[no-untyped-call]
        expected = total.item(), gradients(network)
        assert_same(learnt(network, forest, LOSS, budget, shared), expected)
    assert contexts > 20


def test_a_run_counts_once_in_its_group_however_many_conversations_it_has() -> None:
    """Two runs, one of three conversations: advantages are those of two trajectories, and every turn gets its own."""
    nodes = [prompt(), model(0, (3,)), replace(tool(1, (4, 5)), context=NO_CONTEXT), model(2, (6,))]
    nodes += [replace(tool(3, (7,)), context=1), model(4, (8,)), model(0, (9,))]
    scored = with_rewards(tree(nodes, [5, 6]), [1.0, 0.0], Advantage())
    assert [dict(credit.by_node) for credit in scored.credits] == [{1: 1.0, 3: 1.0, 5: 1.0}, {6: -1.0}]
    batch = build_batch([scored], LOSS, MAX_TOKENS)
    assert batch.tokens_N.tolist() == [1, 2, 3, 7, 8, 9, 4, 5, 6]
    assert batch.parent_N.tolist() == [-1, 0, 1, 2, 3, 1, -1, 6, 7]


def by_seed(prefix: str, seed: int) -> tuple[str, list[float]]:
    """A model that looks up a price, perhaps a second one, and is right with every second seed."""
    looked = prefix.count("</result>")
    if looked == 0 or (looked == 1 and seed % 3):
        return f"<think>{seed % 89}</think><price>{'pear' if seed % 2 else 'apple'}</price>", [0.3 + looked]
    return f"<think>{seed % 97}</think><answer>\\boxed{{{110 if seed % 2 else 55}}}</answer>", [2.0]


def test_credits_and_gradients_of_a_programs_tree_are_those_of_arpos_own_loop(tokenizer: Any) -> None:
    network = build_model(tokenizer, 32, 1, 512, seed=2).eval()
    spec = {"name": "price", "description": price.spec.description, "parameters": dict(price.spec.schema)}
    program = tool_loop([{"type": "function", "function": spec}], lambda name, given: str(PRICES[given["item"]]))
    engine = ScriptedEngine(tokenizer, by_seed)
    own = Agent(engine, tokenizer, Toolset([price]), build_format("tags", [price.spec], tokenizer))
    how = Rollout(num_trajectories=8, num_initial=3, concurrency=1, max_tool_calls=4)
    found = []
    for agent in (own, program_agent(engine, tokenizer, program)):
        with Scorer(lambda trajectory: Reward(float(trajectory.answer == "110")), 1) as scorer:
            scored = asyncio.run(sample_tree(agent, TASK, how, Branching(policy="always"), 5, scorer.score))
        (credited,) = compute_credits([scored], Advantage())
        forward_backward(network, build_batch([credited], LOSS, MAX_TOKENS), LOSS, 1.0, 10**9)
        found.append((credited, gradients(network)))
    (expected, by_name), (got, got_by_name) = found
    assert expected.has_learning_signal and expected.tree.branch_points > 1
    assert got.credits == expected.credits and got.rewards == expected.rewards and got.mask == expected.mask
    assert all(torch.equal(got_by_name[name], value) for name, value in by_name.items())
    assert max(value.abs().max() for value in by_name.values()) > 0
