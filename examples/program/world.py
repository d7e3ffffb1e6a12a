"""What the agents of this folder share: questions about the built-in toy world, a search over it, and the training.

The questions need two searches or three. An agent is a function of (task, endpoint); `train` is all that arpo does.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import arpo
from arpo.builtin.world import World, build_world
from arpo.config.schema import World as WorldSettings
from arpo.tools.search import build_search

DIFFICULTY = 0.7  # how often the built-in model makes mistakes before training
KINDS = ("hop2", "hop3")
TEST_QUESTIONS = 120


@lru_cache
def world() -> World:
    """The toy world, which has people, firms and towns."""
    return build_world(WorldSettings(difficulty=DIFFICULTY, test_questions=600))


@lru_cache
def index() -> Callable[..., str]:
    """The search over all documents of the world; with two results, as the built-in model knows it."""
    function = build_search(world().documents, results=2).function
    assert function is not None
    return function


def search(query: str) -> str:
    """Search the document collection with a few key words; returns the best matching documents."""
    try:
        return index()(query)
    except Exception as error:  # an empty query
        return f"Error: {error}"


def read_answer(text: str) -> str:
    r"""What the model wrote into \boxed{...}."""
    found = re.findall(r"\\boxed\{(.*?)\}", text)
    return found[-1].strip() if found else ""


def train(agent: Callable[..., Any], steps: int = 20, seed: int = 0, **settings: Any) -> tuple[float, float]:
    """Train the built-in model with an agent; returns its accuracy on held-out questions before and after."""
    tasks = [task for task in world().train if task.kind in KINDS]
    test = [task for task in world().test if task.kind in KINDS][:TEST_QUESTIONS]
    sections: dict[str, Any] = {
        "world": {"difficulty": DIFFICULTY},
        "train": {"batch_size": 8, "lr": 5e-4},
        "rollout": {"num_trajectories": 8, "max_tokens": 300, "max_tool_calls": 6},
        **settings,
    }
    with arpo.Trainer("tiny", program=agent, tasks=tasks, test=test, reward="em", seed=seed, **sections) as trainer:
        before = trainer.evaluate(test).accuracy
        records = trainer.train(steps=steps)
        after = trainer.evaluate(test).accuracy
    for record in records:
        spoilt = {name: value for name, value in record.items() if name.startswith("program_")}
        print(record["step"], f"accuracy {record['accuracy']:.2f}", f"branches {record['branches']:.0f}", spoilt or "")
    calls = sum(record["tool_calls"] for record in records)
    print(
        f"{len(test)} held-out questions: {before:.0%} right before, {after:.0%} after {steps} steps "
        f"with {calls:,.0f} tool calls (seed {seed})"
    )
    return before, after


def main(agent: Callable[..., Any]) -> None:
    """Train an agent with the options of the command line."""
    parser = argparse.ArgumentParser(description="train the built-in model with this agent, on a CPU")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    train(agent, options.steps, options.seed)
