"""What plays and what judges: a session, and how its trees are grown and scored.

Promises: whatever grows the trees (`Grower`), they depend on the question, the seed and the weights, up to what the
engine and the tools leave open.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from arpo.algorithm.rollout import Agent, sample_trees
from arpo.cli.display import console, progress_bar
from arpo.config.schema import Config
from arpo.engine.local.kv_cache import BLOCK
from arpo.evaluation.evaluate import Evaluation, evaluate, select_tasks
from arpo.rewards import RewardFn, Scorer, overlong, reward_from
from arpo.training.setup import Bench, build_agent, build_bench, build_model, fit_prompts
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
        tasks, seeds = select_tasks(session.bench.test, config.eval, config.seed)
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
    bench: Bench
    model: Any
    agent: Agent
    reward: RewardFn
    outcomes: list[str] = field(default_factory=list)
    grower: Grower = field(default_factory=Here)

    def close(self) -> None:
        """Let go of what the tools hold: servers, connections, stored answers."""
        self.bench.tools.close()


def open_session(config: Config, bench: Bench | None = None, threaded: bool | None = None) -> Session:
    """Load (or make) the model that the config names and all that goes with it; `threaded` as in `make_agent`."""
    bench = bench or build_bench(config)
    reward = reward_from(config.reward)
    if config.reward.overlong:
        reward = overlong(reward, config.reward.overlong, config.rollout.max_tokens)
    model, tokenizer = load_shown(config, bench)
    agent = build_agent(config, bench, model, tokenizer, threaded)
    return Session(config, fit_prompts(bench, agent, config.data.max_prompt_tokens), model, agent, reward)


def load_shown(config: Config, bench: Bench) -> tuple[Any, Any]:
    """The model and its tokenizer; if the built-in model must be made first, that is shown."""
    with progress_bar("cold start", config.coldstart.steps) as bar:
        bar.update(bar.task_ids[0], visible=False)  # nothing to see unless the built-in model must be made

        def show(step: int, steps: int, loss: float) -> None:
            if step == 0:
                console.print("Cold start: teaching the built-in model how to call its tools (once; it is kept).")
            elif step % 50 == 0 and not console.is_terminal:  # no bar there
                console.print(f"  step {step} of {steps}, loss {loss:.3f}")
            note = f"loss {loss:.3f}" if step else "writing examples"
            bar.update(bar.task_ids[0], completed=step, total=steps, note=note, visible=True)

        return build_model(config, bench, show)


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
