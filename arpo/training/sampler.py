"""What plays and what judges: a session, and how its trees are grown and scored.

Promises: whatever grows the trees (`Grower`), they depend on the question, the seed and the weights, up to what the
engine and the tools leave open.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from arpo.agent.agent import Agent, build_agent, call_format, fit_prompts
from arpo.agent.examples import read_examples
from arpo.algorithm.rollout import sample_trees
from arpo.cli.display import cold_start_progress, console
from arpo.config.schema import Config
from arpo.data.task_set import TaskSet, load_task_set
from arpo.engine.local.kv_cache import BLOCK
from arpo.errors import ArpoError
from arpo.evaluation.evaluate import Evaluation, evaluate, select_tasks
from arpo.figures.text import printable
from arpo.models.resolve import load_policy
from arpo.rewards import RewardFn, Scorer, overlong, reward_from
from arpo.tools.build import build_tools
from arpo.tools.executor import Toolset
from arpo.types import ScoredTree, Task


class Grower(Protocol):
    """What grows and scores the trees of a session: this process (`Here`), or others (`arpo.cluster`)."""

    async def sync_weights(self, session: Session, step: int) -> None:
        """The session's model now has the weights of this step: sample from these."""
        ...

    async def grow(self, session: Session, tasks: Sequence[Task], seeds: Sequence[int], step: int) -> list[ScoredTree]:
        """The scored trees of a step's tasks, in their order."""
        ...

    async def test(self, session: Session, done: Callable[[], None]) -> Evaluation:
        """Ask the newest weights the held-out questions; `done` is called after each."""
        ...

    def step_metrics(self, session: Session, step: int) -> dict[str, float]:
        """Metrics of the step whose trees were just grown."""
        ...

    def discarded_metrics(self) -> dict[str, float]:
        """Metrics of what was grown for steps that were not told of."""
        ...


class Here:
    """Grows trees in this process, one step at a time."""

    async def sync_weights(self, session: Session, step: int) -> None:
        """The engine shares the session's model: it only has to forget what it computed."""
        await session.agent.engine.sync_weights(step)

    async def grow(self, session: Session, tasks: Sequence[Task], seeds: Sequence[int], step: int) -> list[ScoredTree]:
        """All at the same time, `rollout.concurrency` trajectories of them."""
        return await grow_here(session, tasks, seeds)

    async def test(self, session: Session, done: Callable[[], None]) -> Evaluation:
        """With the session's own agent."""
        config = session.config
        tasks, seeds = select_tasks(session.tasks.test, config.eval, config.seed)
        return await evaluate(
            session.agent,
            tasks,
            seeds,
            config.eval,
            config.rollout,
            session.reward,
            config.reward.workers,
            on_tree=lambda scored: done(),
        )

    def step_metrics(self, session: Session, step: int) -> dict[str, float]:
        """What the engine did."""
        return {f"engine_{name}": value for name, value in session.agent.engine.stats().items()}

    def discarded_metrics(self) -> dict[str, float]:
        """Nothing ever is."""
        return {}


@dataclass(frozen=True, slots=True)
class Session:
    """What plays and what judges: questions, agent, reward; and, for a curriculum, the outcomes of the steps done."""

    config: Config
    tasks: TaskSet
    tools: Toolset
    model: Any
    agent: Agent
    reward: RewardFn
    outcomes: list[str] = field(default_factory=list)
    grower: Grower = field(default_factory=Here)

    def close(self) -> None:
        """Let go of what the tools hold: servers, connections, stored answers."""
        self.tools.close()


def load_tasks_and_tools(config: Config) -> tuple[TaskSet, Toolset]:
    """Load the tasks and build the tools, with all checks that need no model; close the tools when done."""
    tasks = load_task_set(config)
    _print_notes(tasks)
    tools = build_tools(config)
    try:
        read_examples(config.rollout.examples, call_format(config, tools))
    except ArpoError:
        tools.close()
        raise
    return tasks, tools


def open_session(
    config: Config, tasks: TaskSet | None = None, tools: Toolset | None = None, threaded: bool | None = None
) -> Session:
    """Load the model that the config names, and the tasks and tools if not given; `threaded` as in `build_agent`."""
    if tasks is None or tools is None:
        tasks, tools = load_tasks_and_tools(config)
    reward = reward_from(config.reward)
    if config.reward.overlong:
        reward = overlong(reward, config.reward.overlong, config.rollout.max_tokens)
    with cold_start_progress(config.coldstart.steps) as progress:
        model, tokenizer = load_policy(config, progress)
    agent = build_agent(config, tools, model, tokenizer, threaded)
    fitted = fit_prompts(tasks, agent, config.data.max_prompt_tokens)
    if fitted is not tasks:
        _print_notes(fitted)
    return Session(config, fitted, tools, model, agent, reward)


def _print_notes(tasks: TaskSet) -> None:
    for note in tasks.notes:
        console.print(printable(note))


async def grow_here(
    session: Session, tasks: Sequence[Task], seeds: Sequence[int], slots: asyncio.Semaphore | None = None
) -> list[ScoredTree]:
    """Sample trees with the session's own agent and score them, each while others are still being sampled."""
    config = session.config
    with Scorer(session.reward, config.reward.workers, config.train.mask_infra_faults) as scorer:
        return await sample_trees(session.agent, tasks, config.rollout, config.branching, seeds, scorer.score, slots)


def minimal_engine_config(config: Config) -> Config:
    """The same settings with an engine that takes no memory, since it samples nothing."""
    small = {"engine": "local", "servers": (), "kv_cache_tokens": 2 * BLOCK, "concurrency": 1}
    rollout = config.rollout.model_copy(update=small)
    return config.model_copy(update={"rollout": rollout})
