"""What the agents of this folder share: questions about the built-in toy world, a search over it, and the training.

The questions need one search or two. An agent is a function of (task, endpoint); `train` is all that arpo does.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import arpo
from arpo.builtin.world import World, build_world
from arpo.config.schema import World as WorldSettings
from arpo.tools.search import build_search

KINDS = ("hop1", "hop2")


@lru_cache
def world() -> World:
    """The toy world, which has people, firms and towns."""
    return build_world(WorldSettings())


@lru_cache
def index() -> Callable[..., str]:
    """The search over all documents of the world."""
    function = build_search(world().documents).function
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


def train(agent: Callable[..., Any], steps: int = 20, **settings: Any) -> tuple[float, float]:
    """Train the built-in model with an agent; returns its accuracy on held-out questions before and after."""
    tasks = [task for task in world().train if task.kind in KINDS]
    test = [task for task in world().test if task.kind in KINDS][:60]
    sections: dict[str, Any] = {
        "train": {"batch_size": 8, "lr": 5e-4},
        "rollout": {"num_trajectories": 8, "max_tokens": 300, "max_tool_calls": 6},
        **settings,
    }
    with arpo.Trainer("tiny", program=agent, tasks=tasks, test=test, reward="em", **sections) as trainer:
        before = trainer.evaluate(test).accuracy
        for record in trainer.train(steps=steps):
            spoilt = {name: value for name, value in record.items() if name.startswith("program_")}
            print(record["step"], f"accuracy {record['accuracy']:.2f}", f"branches {record['branches']:.0f}", spoilt)
        after = trainer.evaluate(test).accuracy
    print(f"held out: {before:.0%} before, {after:.0%} after {steps} steps")
    return before, after
