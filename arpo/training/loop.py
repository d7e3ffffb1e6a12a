"""The training loop: sample trees, score, credit, update, log; again.

A step depends only on the config, the step's number, the weights and the optimizer state: its tasks and all random
numbers are derived from the seed. So a resumed run equals one that was never stopped, bit for bit on a CPU with
deterministic tools.
"""

from __future__ import annotations

import asyncio
import copy
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from arpo.agent.agent import build_prompts
from arpo.algorithm.advantage import compute_credits
from arpo.algorithm.metrics import (
    bias_warnings,
    format_warnings,
    limit_warnings,
    rollout_metrics,
    staleness_metrics,
    tool_metrics,
)
from arpo.config.files import expand_user
from arpo.config.plugins import NO_OBJECTS, Objects
from arpo.config.schema import Config
from arpo.data.order import batch_tasks, task_outcome
from arpo.data.task_set import TaskSet, require_test_tasks
from arpo.environments.states import pool_of
from arpo.errors import Diverged
from arpo.evaluation.evaluate import Evaluation, select_tasks
from arpo.models.resolve import load_policy, resolve_model
from arpo.models.threads import describe_threads
from arpo.rewards import fault_metrics, unjudged
from arpo.runs.reporter import SILENT, Reporter
from arpo.tools.executor import Toolset
from arpo.trainer.dist.process_group import ProcessGroup
from arpo.trainer.dist.sharded import ShardedTrainer, ranks_sample
from arpo.trainer.trainer import Trainer
from arpo.training.checkpoints import CheckpointManager, RunStart, find_start
from arpo.training.checks import check_settings
from arpo.training.collapse import CollapseMonitor
from arpo.training.context import build_context, build_reward_fn, fit_tasks, load_tasks_and_tools
from arpo.training.ranks import RankSampler, open_message
from arpo.training.sampler import LocalSampler, Sampler, count_events, report_tree
from arpo.types import Fault, ScoredTree, ToolResult, derive_seed

# Settings that may change when a training run is resumed.
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
RUN_KIND_METRIC = "reward"  # every record of a training run has it
BuildSampler = Callable[[Config, Any], Sampler]
"""Builds the sampler, for example on a cluster, from the settings and the loaded model."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Training:
    """An open training run: what `train` needs."""

    config: Config
    tasks: TaskSet
    sampler: Sampler
    trainer: Trainer
    checkpoints: CheckpointManager
    reporter: Reporter


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a training run needs, loaded; the run itself is not open yet, and a new one has no directory."""

    start: RunStart
    tasks: TaskSet
    tools: Toolset
    sampler: Sampler
    model: Any
    tokenizer: Any
    objects: Objects
    reporter: Reporter

    def with_steps(self, steps: int) -> Prepared:
        """The same with `train.steps` set."""
        start = self.start
        config, requested = _with_steps(start.config, steps), _with_steps(start.requested, steps)
        return replace(self, start=replace(start, config=config, requested=requested))

    @contextmanager
    def open(self, group: ProcessGroup | None = None) -> Iterator[Training]:
        """Open the run: a new one gets its directory.

        With a process `group`, of which this is rank 0, all ranks train, and with the local engine all sample.
        """
        start, sampler = self.start, self.sampler
        trainer = build_trainer(
            start.requested, start.config, self.model, self.tokenizer, group, self.objects, self.reporter
        )
        if group is not None and ranks_sample(start.config) and isinstance(sampler, LocalSampler):
            sampler = RankSampler(sampler, group, partial(report_tree, self.reporter))
        with start.open(trainer, self.reporter) as checkpoints:
            yield Training(start.config, self.tasks, sampler, trainer, checkpoints, self.reporter)


@contextmanager
def open_training(
    config: Config,
    resume: bool = False,
    group: ProcessGroup | None = None,
    build_sampler: BuildSampler | None = None,
    reporter: Reporter = SILENT,
) -> Iterator[Training]:
    """A new run in `run.dir`, or the run there from its last checkpoint. The directory is locked inside the block.

    With a process `group`, of which this is rank 0, all ranks train, and without `build_sampler` they sample, too.
    """
    with prepare_training(config, resume, build_sampler, reporter) as prepared, prepared.open(group) as training:
        yield training


@contextmanager
def prepare_training(
    config: Config,
    resume: bool = False,
    build_sampler: BuildSampler | None = None,
    reporter: Reporter = SILENT,
    objects: Objects = NO_OBJECTS,
) -> Iterator[Prepared]:
    """Load what a run needs: tasks, tools, the model. With `resume`, the run's directory is locked inside the block."""
    check_settings(config, on_cluster=build_sampler is not None)
    with ExitStack() as stack:
        tasks, tools = load_tasks_and_tools(config, reporter, objects)
        stack.callback(tools.close)
        if config.eval.every:
            require_test_tasks(tasks)
        # on a cluster only for its checks: the workers build their own
        reward = build_reward_fn(config, objects, pool_of(tools))
        start = stack.enter_context(find_start(config, resume, RESUMABLE_KEYS, RUN_KIND_METRIC, reporter))
        model, tokenizer = load_policy(start.config, reporter, start.checkpoint, objects)
        sampler: Sampler
        if build_sampler is None:
            context = build_context(start.config, tasks, tools, reward, model, tokenizer, reporter, objects)
            tasks, sampler = context.tasks, LocalSampler(context, reporter.tree, count_events(reporter))
        else:
            prompts = build_prompts(config, tools, tokenizer, model.config.max_position_embeddings, objects)
            tasks = fit_tasks(tasks, prompts, config, reporter)
            sampler = build_sampler(config, model)  # not the checkpoint's: it may be deleted while workers start
        yield Prepared(start, tasks, tools, sampler, model, tokenizer, objects, reporter)


def build_trainer(
    config: Config,
    latest: Config,
    model: Any,
    tokenizer: Any,
    group: ProcessGroup | None,
    objects: Objects = NO_OBJECTS,
    reporter: Reporter = SILENT,
) -> Trainer:
    """The trainer of `model`, which `latest` names; `config` names the model before training, the KL reference."""
    needs_reference = bool(config.loss.kl_coef and not config.train.lora_rank)
    reference = None
    if needs_reference:
        loaded = expand_user(resolve_model(latest).path).parent  # where `model` comes from
        reference = load_policy(config, checked=loaded, objects=objects)[0]
        if reference is model:  # one that was given: it is trained, so the reference is a copy
            reference = copy.deepcopy(model)
    if group is None:
        return Trainer(model, tokenizer, config, reference, reporter)
    before = resolve_model(config) if needs_reference else None
    with group.collective("open", open_message(config, resolve_model(latest), before)):
        return ShardedTrainer(model, tokenizer, config, reference, group)


def extend_training(training: Training, step: int, steps: int) -> Training:
    """The same open run, of which `step` steps are done, to be trained on until `train.steps` are."""
    checkpoints, config = training.checkpoints, _with_steps(training.config, steps)
    if steps != training.config.train.steps:
        recorded = checkpoints.run.config()
        checkpoints.run.update_config(step, {**recorded, "train": {**recorded["train"], "steps": steps}})
    checkpoints.start_step = step
    return replace(training, config=config)


def _with_steps(config: Config, steps: int) -> Config:
    return config.model_copy(update={"train": config.train.model_copy(update={"steps": steps})})


async def train(training: Training) -> int:
    """Train to the configured number of steps or the end of the budget; returns the last step done."""
    config, sampler = training.config, training.sampler
    checkpoints, reporter = training.checkpoints, training.reporter
    step, last_step, unit = checkpoints.start_step, config.train.steps, config.train.budget_unit
    monitor = CollapseMonitor(checkpoints, config.train.on_collapse, reporter)
    monitor.check()
    budget = config.train.budget or math.inf
    records = checkpoints.run.read_metrics()
    spent = sum(record[unit] for record in records) if config.train.budget else 0
    if step >= last_step:
        reporter.message(f"Nothing to do: the run is at step {step}, train.steps is {last_step}.")
        return step
    if spent >= budget:
        reporter.message(f"Nothing to do: the run has spent {spent:,} of {budget:,} {unit}.")
        return step
    await sampler.sync_weights(step)
    if training.trainer.model.device.type == "cpu":
        reporter.message(f"Computing on the CPU with {describe_threads()}.")
    reporter.training_starts("train")
    tested = bool(records) and any(name.startswith("test_") for name in records[-1])
    if step and config.eval.every and step % config.eval.every == 0 and not tested:
        checkpoints.amend(step, await _evaluate_step(training, step))  # the run was stopped before this evaluation
    faults = _FaultReport(reporter, config)
    optimizer_steps, sampling = 0.0, _SamplingAhead(training, [record.get("outcomes", "") for record in records])
    try:
        with reporter.progress("training", last_step) as bar:
            while step < last_step and spent < budget:
                bar.update(step)
                started = time.monotonic()
                reporter.sampling_starts(config.train.batch_size * config.rollout.num_trajectories)
                with checkpoints.save_on_error(step):
                    trees = await sampling.trees_of(step + 1)
                bar.update(step, note="updating the weights")
                sampled = {"rollout_seconds": time.monotonic() - started, **sampler.step_metrics(step + 1)}
                try:
                    if config.cluster.max_off_policy_steps:
                        metrics = await in_thread(lambda: learn_step(training, step + 1, trees))  # noqa: B023
                    else:
                        metrics = learn_step(training, step + 1, trees)
                except Diverged:
                    monitor.diverged(step + 1)
                    raise
                metrics |= sampled
                step += 1
                bar.update(step)
                with checkpoints.save_on_error(step):
                    try:
                        await sampler.sync_weights(step)
                        if config.eval.every and step % config.eval.every == 0:
                            metrics |= await _evaluate_step(training, step)
                    finally:  # log a trained step even if its evaluation fails
                        curriculum = {"outcomes": sampling.add_outcomes(trees)} if config.data.curriculum else {}
                        checkpoints.record(step, monitor.annotate(step, {**metrics, **curriculum}))
                with checkpoints.save_on_error(step):  # whoever read the output may be gone
                    reporter.training_step("train", step, metrics)
                    monitor.report()
                    faults.report(step, trees)
                monitor.check()
                optimizer_steps += metrics["optimizer_steps"]
                spent += metrics[unit]
                checkpoints.save_if_due(step, last_step if spent < budget else step)
    finally:
        await sampling.stop()
    if discarded := sampler.discarded_metrics():
        checkpoints.amend(step, discarded)
    if not optimizer_steps:
        reporter.warning(f"nothing was learned: {faults.reason}")
    return step


class _FaultReport:
    """Tells the user about tools that fail: each tool when it first does, and steps that lose all trajectories.

    It also tells once of each limit that cuts off most trajectories of a step, why most of a step's trajectories have a
    wrong format, and that a gradient is not as unbiased as it should be.
    """

    def __init__(self, reporter: Reporter, config: Config) -> None:
        self._reporter, self._config = reporter, config
        self._warned: set[str] = set()  # limits, reasons why formats are wrong, "attribution"
        self._reported: set[str] = set()  # tools, and "" for lost steps
        self._masked = self._trajectories = 0
        self._outcomes: set[str] = set()  # of all trees: "1" all right, "0" all wrong, else neither

    def report(self, step: int, trees: Sequence[ScoredTree]) -> None:
        """Warn of what is new in the trees of a step."""
        limits, bias = limit_warnings(trees, self._config.rollout), bias_warnings(trees, self._config)
        for name, text in {**limits, **format_warnings(trees), **bias}.items():
            if name not in self._warned:
                self._warned.add(name)
                self._reporter.warning(f"step {step}: {text}")
        masked, total = sum(one.mask.count(False) for one in trees), sum(len(one.mask) for one in trees)
        self._masked, self._trajectories = self._masked + masked, self._trajectories + total
        self._outcomes |= set(map(_correctness, trees))
        results: dict[str, list[ToolResult]] = {}
        for node in (node for one in trees for node in one.tree.nodes):
            if node.call is not None and node.result is not None:
                results.setdefault(node.call.name, []).append(node.result)
        failed = {name: [each for each in made if each.fault is Fault.INFRA] for name, made in results.items()}
        new = {name for name, faults in failed.items() if faults} | ({""} if masked == total else set())
        new -= self._reported
        if not new:
            return
        self._reported |= new
        for name in sorted(new - {""}):
            self._reporter.warning(
                f"step {step}: {len(failed[name])} of {len(results[name])} calls of {name} failed: "
                f"{failed[name][0].text.removeprefix('Error: ')}"
            )
        self._reporter.warning(
            f"step {step}: {masked} of {total} trajectories are masked, so nothing is learned from them "
            "(masked_trajectories and infra_faults in metrics.jsonl count them)"
        )

    @property
    def reason(self) -> str:
        """Why a run has learned nothing."""
        if self._masked == self._trajectories:
            return "all trajectories are masked: a tool, the environment, the engine or the judge failed in each one"
        masked = (
            f", apart from {self._masked} that are masked because a tool or the judge failed" if self._masked else ""
        )
        if self._outcomes == {"1"}:
            return f"all trajectories were right{masked}. The questions are too easy for this model: take harder ones."
        look = "`arpo rollout`, in Python trainer.rollout(row), shows examples."
        if self._outcomes == {"0"}:
            return f"all trajectories were wrong{masked}, and all of a question earned the same. {look}"
        return f"for every question, all trajectories earned the same{masked}. {look}"


class _SamplingAhead:
    """Samples the requested step and up to `cluster.max_off_policy_steps` after it.

    A curriculum chooses tasks by `outcomes`: a string per finished step, with a letter per task.
    """

    def __init__(self, training: Training, outcomes: list[str]) -> None:
        self._training, self._outcomes = training, outcomes
        self._running: dict[int, asyncio.Task[list[ScoredTree]]] = {}

    async def trees_of(self, step: int) -> list[ScoredTree]:
        """The trees of a step; also starts to sample the steps after it."""
        config = self._training.config
        ahead = config.cluster.max_off_policy_steps
        if not ahead:
            return await sample_step(self._training, step, self._outcomes)
        for number in range(step, min(step + ahead, config.train.steps) + 1):
            if number not in self._running:
                self._running[number] = asyncio.create_task(sample_step(self._training, number, self._outcomes))
        return await self._running.pop(step)

    def add_outcomes(self, trees: Sequence[ScoredTree]) -> str:
        """Remember the outcomes of the step just trained; returns them."""
        self._outcomes.append("".join(map(_outcome, trees)))
        return self._outcomes[-1]

    async def stop(self) -> None:
        """Cancel what is still being sampled."""
        for task in self._running.values():
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)


async def in_thread(work: Callable[[], T]) -> T:
    """Run `work` in a thread to its end: a cancellation meanwhile takes effect when the work is done."""
    future, cancelled = asyncio.get_running_loop().run_in_executor(None, work), False
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError:
            cancelled = True
    task = asyncio.current_task()
    if cancelled and task is not None and future.exception() is None:  # else the error is raised
        task.cancel()
    return future.result()


async def sample_step(training: Training, step: int, outcomes: Sequence[str] = ()) -> list[ScoredTree]:
    """The scored trees of one step's tasks; the run is not changed.

    With `train.dynamic_sampling_rounds`, trees of extra tasks follow until there are `batch_size` informative ones.
    """
    config, sources = training.config, training.tasks.sources
    count, rounds = config.train.batch_size, config.train.dynamic_sampling_rounds
    trees: list[ScoredTree] = []
    for round_ in range(rounds + 1):
        missing = count - sum(scored.has_learning_signal for scored in trees)
        if not missing:
            break
        if round_:
            sampled = {scored.tree.task.id for scored in trees}
            more = batch_tasks(sources, count, (step - 1) * rounds + round_, derive_seed(config.seed, "resample"))
            tasks = [task for task in more if task.id not in sampled][:missing]
        else:
            tasks = batch_tasks(sources, count, step, config.seed, config.data.curriculum, outcomes)
        seeds = [derive_seed(config.seed, "rollout", step, len(trees) + number) for number in range(len(tasks))]
        trees += await training.sampler.sample(tasks, seeds, step)
    return trees


def learn_step(training: Training, step: int, scored: Sequence[ScoredTree]) -> dict[str, float]:
    """Compute credits, save the trees and train on them; returns the step's metrics."""
    config, started = training.config, time.monotonic()
    trees = [one.tree for one in scored]
    stale = staleness_metrics(trees, step, config.cluster.max_off_policy_steps) if config.cluster.address else {}
    credited = compute_credits(scored, config.advantage)
    if config.run.save_trees:
        warning = training.checkpoints.run.write_trees(step, credited)
        if warning is not None:
            training.checkpoints.reporter.warning(warning)
    if config.train.dynamic_sampling_rounds:
        credited = [one for one in credited if one.has_learning_signal]
    update = training.trainer.update(credited)
    sampled = {
        **rollout_metrics(scored, config.branching.probe_length),
        **fault_metrics(scored),
        **tool_metrics(trees),
        **stale,
    }
    return {**sampled, **update, "train_seconds": time.monotonic() - started}


def _correctness(scored: ScoredTree) -> str:
    """The letter 1 if all trajectories that count were right, 0 if all were wrong, else nothing."""
    valid = [reward.parts.get("correct") for reward, used in zip(scored.rewards, scored.mask, strict=True) if used]
    if not valid or None in valid:
        return ""
    return task_outcome([value for value in valid if value is not None]).replace("m", "")


def _outcome(scored: ScoredTree) -> str:
    """The outcome letter of a task for the curriculum, without trajectories that a broken tool or judge spoiled.

    Rewards that do not say what is correct are settled if all trajectories earned the same.
    """
    valid = [
        reward
        for trajectory, reward in zip(scored.tree.trajectories, scored.rewards, strict=True)
        if not trajectory.infra_fault and not unjudged(reward)
    ]
    if any("correct" in reward.parts for reward in valid):
        return task_outcome([reward.parts.get("correct", 0.0) for reward in valid])
    earned = {reward.total for reward in valid}
    return task_outcome([0.0] if len(earned) == 1 else [])


async def _evaluate_step(training: Training, step: int) -> dict[str, float]:
    """Evaluate the policy after a step; returns the metrics."""
    result = await evaluate_policy(training.sampler, training.tasks, training.config, training.reporter)
    await training.sampler.sync_weights(step)  # clears the prefix cache: a resumed run starts without it
    return {f"test_{name}": value for name, value in result.metrics.items()}


async def evaluate_policy(sampler: Sampler, tasks: TaskSet, config: Config, reporter: Reporter = SILENT) -> Evaluation:
    """Evaluate the sampler's current weights on the test tasks."""
    require_test_tasks(tasks)
    chosen, seeds = select_tasks(tasks.test, config.eval, config.seed)
    with reporter.progress("evaluating", len(chosen)) as bar:
        bar.update(0)
        result = await sampler.evaluate(chosen, seeds, lambda scored: bar.advance())
    reporter.evaluation(result)
    return result
