"""The training loop: sample trees, reward, credit, update, log; again.

A step depends on nothing but the config, the step's number, the weights and the optimizer: which questions it takes and
every random number are derived from the seed. So a run that was stopped and resumed equals one that was not (to the
last bit on a CPU with deterministic tools).
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

from arpo.algorithm.advantage import compute_credits
from arpo.algorithm.metrics import rollout_metrics, staleness_metrics, tool_metrics
from arpo.cli.display import HEADER, console, progress_bar, step_line
from arpo.config.schema import Config
from arpo.data.order import batch_of, outcome
from arpo.data.task_set import TaskSet
from arpo.errors import ArpoError, Diverged
from arpo.evaluation.evaluate import Evaluation
from arpo.models.resolve import load_policy, resolve_model
from arpo.rewards import fault_metrics, unjudged
from arpo.runs.run_dir import RunDir
from arpo.trainer.dist.process_group import ProcessGroup
from arpo.trainer.dist.sharded import ShardedTrainer
from arpo.trainer.dist.worker import open_message
from arpo.trainer.trainer import Trainer
from arpo.training.checkpoints import CheckpointManager, open_directory
from arpo.training.monitor import CollapseMonitor
from arpo.training.sampler import Grower, Here, Session, load_tasks_and_tools, minimal_engine_config, open_session
from arpo.types import ScoredTree, derive_seed

# What may change when a run is resumed.
RESUMABLE_KEYS = (
    "train.steps:",
    "train.budget:",
    "train.budget_unit:",
    "train.lr:",
    "loss.entropy_coef:",
    "loss.kl_coef:",
    "rollout.kv_cache_tokens:",
    "rollout.servers:",
    "sft.",
    "cluster.",
)
RUN_KIND_METRIC = "reward"  # what every record of such a run has
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Run:
    """A session that is being trained and logged."""

    session: Session
    keeper: CheckpointManager

    @property
    def trainer(self) -> Trainer:
        """What trains it."""
        return self.keeper.trainer

    @property
    def log(self) -> RunDir:
        """Its directory."""
        return self.keeper.log

    @property
    def step(self) -> int:
        """Steps that were done when it was opened."""
        return self.keeper.step


@contextmanager
def open_run(
    config: Config, resume: bool = False, ranks: ProcessGroup | None = None, grower: Grower | None = None
) -> Iterator[Run]:
    """A new run in `run.dir`, or one that goes on there from its last checkpoint. Holds the directory until left.

    With `ranks`, of which this is the first, the others train along. With a `grower`, that samples.
    """
    with ExitStack() as stack:
        require_cluster_settings(config, grower)
        tasks, tools = load_tasks_and_tools(config)
        stack.callback(tools.close)
        if config.eval.every:
            require_test_tasks(tasks)
        if config.loss.kl_coef and config.train.lora_rank and config.model.adapter is not None:
            raise ArpoError(
                "loss.kl_coef: the adapter that is trained on is not part of the model it would be compared with; "
                "use loss.kl_coef=0, or train.lora_rank=0 to train all weights"
            )
        if config.train.dynamic_sampling_rounds and config.data.curriculum:
            raise ArpoError(
                "train.dynamic_sampling_rounds: use 0 with data.curriculum, which passes over settled questions already"
            )
        if config.train.dynamic_sampling_rounds and config.advantage.baseline == "batch":
            raise ArpoError(
                'train.dynamic_sampling_rounds: use 0 with advantage.baseline="batch", under which questions whose paths all earned '
                "the same teach something too"
            )
        sessions: list[Session] = []

        def load(latest: Config) -> Trainer:
            opened = open_session(latest if grower is None else minimal_engine_config(latest), tasks, tools)
            sessions.append(replace(opened, config=latest, grower=grower or Here()))
            apart = (
                config.loss.kl_coef and not config.train.lora_rank
            )  # from a model of its own, the one before training
            reference = load_policy(config)[0] if apart else None
            given = sessions[0].model, sessions[0].agent.tokenizer, config, reference
            if ranks is None:
                return Trainer(*given)
            first, now = (resolve_model(of) for of in (config, latest))
            with ranks.collective("open", open_message(config, now, first if apart else None)):
                return ShardedTrainer(*given, ranks)

        keeper = stack.enter_context(open_directory(config, resume, load, RESUMABLE_KEYS, RUN_KIND_METRIC))
        session = sessions[0]
        if config.data.curriculum:
            session.outcomes.extend(record["outcomes"] for record in keeper.log.read_metrics())
        yield Run(session, keeper)


async def train(run: Run) -> int:
    """Train to the configured number of steps or the end of the budget; returns the last step done."""
    session, step = run.session, run.step
    config, grower = session.config, session.grower
    guard = CollapseMonitor(run.keeper, config.train.on_collapse)
    guard.check()
    limit, spending = config.train.budget or math.inf, config.train.budget_unit
    spent = sum(record[spending] for record in run.log.read_metrics()) if config.train.budget else 0
    if step >= config.train.steps:
        console.print(f"Nothing to do: the run is at step {step}, train.steps is {config.train.steps}.")
        return step
    if spent >= limit:
        console.print(f"Nothing to do: the run has spent {spent:,} of {limit:,} {spending}.")
        return step
    await grower.sync_weights(session, step)
    console.print(HEADER)
    if step and config.eval.every and step % config.eval.every == 0:
        await _make_up_test(run, step)
    learnt, sampling = 0.0, Sampling(session)
    try:
        with progress_bar("training", config.train.steps) as bar:
            while step < config.train.steps and spent < limit:
                bar.update(bar.task_ids[0], completed=step)
                started = time.monotonic()
                with run.keeper.saving(step):
                    trees = await sampling.of(step + 1)
                seconds = {"rollout_seconds": time.monotonic() - started}
                told = grower.step_metrics(session, step + 1)
                try:
                    if config.cluster.max_off_policy_steps:
                        metrics = await in_thread(lambda: learn_step(run, step + 1, trees))  # noqa: B023
                    else:
                        metrics = learn_step(run, step + 1, trees)
                except Diverged:
                    guard.diverged(step + 1)
                    raise
                metrics |= {**seconds, **told}
                step += 1
                with run.keeper.saving(step):
                    try:
                        await grower.sync_weights(session, step)
                        if config.eval.every and step % config.eval.every == 0:
                            metrics |= await _tested(run, step)
                    finally:  # a step that was learnt is logged, tested or not
                        seen = {"outcomes": session.outcomes[-1]} if config.data.curriculum else {}
                        run.keeper.record(step, guard.seen(step, {**metrics, **seen}))
                console.print(step_line(step, metrics))
                guard.check()
                learnt += metrics["optimizer_steps"]
                spent += metrics[spending]
                run.keeper.step_done(step, config.train.steps if spent < limit else step)
    finally:
        await sampling.stop()
    if discarded_metrics := grower.discarded_metrics():
        run.keeper.amend(step, discarded_metrics)
    if not learnt:
        console.print("Nothing was learnt: for every question, all paths earned the same. `arpo rollout` shows why.")
    return step


class Sampling:
    """The steps that are being sampled: the one that is asked for, and `cluster.max_off_policy_steps` more behind it."""

    def __init__(self, session: Session) -> None:
        self._session, self._tasks = session, dict[int, asyncio.Task[list[ScoredTree]]]()

    async def of(self, step: int) -> list[ScoredTree]:
        """The trees of a step; the next ones are begun, too."""
        config = self._session.config
        if not config.cluster.max_off_policy_steps:
            return await sample_step(self._session, step)
        for number in range(step, min(step + config.cluster.max_off_policy_steps, config.train.steps) + 1):
            if number not in self._tasks:
                self._tasks[number] = asyncio.create_task(sample_step(self._session, number))
        return await self._tasks.pop(step)

    async def stop(self) -> None:
        """Give up what is not needed any more."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)


async def in_thread(work: Callable[[], T]) -> T:
    """Do something that must not be left half done beside the event loop: who is cancelled meanwhile waits for it."""
    doing, cancelled = asyncio.get_running_loop().run_in_executor(None, work), False
    while not doing.done():
        try:
            await asyncio.wait([doing])
        except asyncio.CancelledError:
            cancelled = True
    task = asyncio.current_task()
    if cancelled and task is not None and doing.exception() is None:  # an error says more
        task.cancel()  # again, when something can be left
    return doing.result()


async def _tested(run: Run, step: int) -> dict[str, float]:
    """The metrics of a test on the way."""
    result = await test(run.session)
    await run.session.grower.sync_weights(run.session, step)  # what testing left in its memory must not matter
    return {"test_accuracy": result.accuracy, "test_format": result.format_rate}


async def _make_up_test(run: Run, step: int) -> None:
    """Do the test that a stop left out: a resumed run has the same records as one that was not stopped."""
    if "test_accuracy" not in run.log.read_metrics()[-1]:
        run.keeper.amend(step, await _tested(run, step))


async def sample_step(session: Session, step: int) -> list[ScoredTree]:
    """The trees of one step's questions, with their rewards: a tree is scored while others grow. Changes nothing.

    With `train.dynamic_sampling_rounds`, the trees of questions that replace such as teach nothing come after these.
    """
    config, sources = session.config, session.tasks.sources
    count, again = config.train.batch_size, config.train.dynamic_sampling_rounds
    trees: list[ScoredTree] = []
    for turn in range(again + 1):
        missing = count - sum(scored.has_learning_signal for scored in trees)
        if not missing:
            break
        if turn:
            asked = {scored.tree.task.id for scored in trees}
            more = batch_of(sources, count, (step - 1) * again + turn, derive_seed(config.seed, "resample"))
            tasks = [task for task in more if task.id not in asked][:missing]
        else:
            tasks = batch_of(sources, count, step, config.seed, config.data.curriculum, session.outcomes)
        seeds = [derive_seed(config.seed, "rollout", step, len(trees) + number) for number in range(len(tasks))]
        trees += await session.grower.grow(session, tasks, seeds, step)
    return trees


def learn_step(run: Run, step: int, scored: Sequence[ScoredTree]) -> dict[str, float]:
    """Credit and train on one step's trees; returns the step's metrics."""
    config, started = run.session.config, time.monotonic()
    trees = [one.tree for one in scored]
    stale = staleness_metrics(trees, step, config.cluster.max_off_policy_steps) if config.cluster.address else {}
    credited = compute_credits(scored, config.advantage)
    if config.data.curriculum:
        run.session.outcomes.append("".join(map(_outcome, scored)))
    if config.run.save_trees:
        run.log.write_trees(step, credited)
    if config.train.dynamic_sampling_rounds:
        credited = [one for one in credited if one.has_learning_signal]
    update = run.trainer.update(credited)
    sampled = {
        **rollout_metrics(scored, config.branching.probe_tokens),
        **fault_metrics(scored),
        **tool_metrics(trees),
        **stale,
    }
    return {**sampled, **update, "train_seconds": time.monotonic() - started}


def _outcome(scored: ScoredTree) -> str:
    """The outcome of a task for the curriculum, from the trajectories that no broken tool or judge spoiled."""
    valid = [
        reward.parts["correct"]
        for trajectory, reward in zip(scored.tree.trajectories, scored.rewards, strict=True)
        if not trajectory.infra_fault and not unjudged(reward)
    ]
    return outcome(valid)


async def test(session: Session) -> Evaluation:
    """Evaluate the current weights on held-out questions."""
    config = session.config
    require_test_tasks(session.tasks)
    with progress_bar("evaluating", min(config.eval.questions, len(session.tasks.test))) as bar:

        def done() -> None:
            bar.advance(bar.task_ids[0])

        return await session.grower.test(session, done)


def require_test_tasks(tasks: TaskSet) -> None:
    """Raise if there are none."""
    if not tasks.test:
        raise ArpoError("data.test: there are no held-out questions; name a file of them")


def require_cluster_settings(config: Config, grower: Grower | None) -> None:
    """Raise if the settings want a cluster that is not there, or more than it can do."""
    cluster = config.cluster
    if cluster.address is None:
        wrong = [name for name, field in type(cluster).model_fields.items() if getattr(cluster, name) != field.default]
        if wrong:
            default = type(cluster).model_fields[wrong[0]].default
            raise ArpoError(
                f"cluster.{wrong[0]}: needs a cluster; give cluster.address as well, or cluster.{wrong[0]}={default}"
            )
    elif grower is None:
        raise ArpoError("cluster.address: only `arpo train` works on a cluster; use cluster.address=none")
    elif config.rollout.servers:
        raise ArpoError(
            "rollout.servers: every actor would load its own weights there; use rollout.servers=[] on a cluster, where "
            "rollout.engine=vllm starts one vLLM in each actor"
        )
    if cluster.max_off_policy_steps and config.loss.importance_cap is None:
        raise ArpoError(
            "cluster.max_off_policy_steps: trees that older weights sampled must be weighed; give loss.importance_cap=2 as well"
        )
    if cluster.max_off_policy_steps and config.data.curriculum:
        raise ArpoError(
            "cluster.max_off_policy_steps: use 0 with data.curriculum, which waits for the outcomes of every step"
        )
