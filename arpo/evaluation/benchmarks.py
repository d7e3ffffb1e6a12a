"""Evaluate an agent on benchmarks: several answers per question, all saved, statistics with intervals.

    plan = BenchmarkPlan(("gsm8k",), Path("evals/mine"), samples=5, ks=(1, 5))
    with open_benchmark_run(config, plan) as run:
        asyncio.run(run.answer_all())
        write_results(plan.out, run.results())

Guarantees: an answer's seed is derived from the run's seed, the benchmark, the question and the answer's number, so an
evaluation that was stopped and resumed gives the same answers (on a CPU with deterministic tools and up to rounding; an
endpoint may ignore seeds). Answers spoiled by the endpoint, a broken tool or the judge are not counted, and are asked
for again next time. Adding benchmarks, questions or samples keeps the answers that exist.
Not covered: branching, which is for training; every answer is a trajectory of its own.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from arpo.agent.agent import build_agent, call_format, fit_prompts
from arpo.agent.examples import read_examples
from arpo.algorithm.rollout import rollout
from arpo.config.masking import masked
from arpo.config.schema import Branching, Config, Eval, Rewards
from arpo.data.benchmarks import BENCHMARKS, load_benchmark
from arpo.data.task_set import TaskSet
from arpo.errors import ArpoError
from arpo.evaluation.endpoint import EndpointAgent, endpoint_trajectory
from arpo.evaluation.evaluate import evaluation_rollout
from arpo.evaluation.report import Results
from arpo.evaluation.samples import Key, Sample, SampleStore, build_sample, open_samples, require_same_settings
from arpo.evaluation.statistics import summarize
from arpo.models.resolve import load_policy
from arpo.net.chat import ChatClient
from arpo.net.http import HttpError
from arpo.rewards import RewardFn, Scorer, build_reward
from arpo.runs.reporter import SILENT, Progress, Reporter
from arpo.tools.build import build_tools
from arpo.tools.executor import Toolset
from arpo.types import RolloutTree, Task, derive_seed

MAX_CONSECUTIVE_FAILURES = 20
ENDPOINT_CONCURRENCY = 8  # unless rollout.concurrency is set
SUFFIXES = (".jsonl", ".json", ".parquet")
AnswerFn = Callable[[Task, int], Awaitable[tuple[RolloutTree, int | None]]]
"""From a question and a seed to a tree with one trajectory, and the number of tokens that the model generated."""
Job = tuple[str, Task, int]
"""An answer to sample: the benchmark, the question, and the number of the answer."""


@dataclass(frozen=True, slots=True)
class BenchmarkPlan:
    """The benchmarks to run, the number of questions of each (None: all), of answers per question, and the output."""

    benchmarks: tuple[str, ...]
    out: Path
    samples: int = 1
    ks: tuple[int, ...] = (1,)
    questions: int | None = None
    data_dir: Path | None = None

    def __post_init__(self) -> None:
        if max(self.ks) > self.samples:
            raise ArpoError(f"--k {max(self.ks)} needs at least as many --samples; there are {self.samples}")


@contextmanager
def open_benchmark_run(config: Config, plan: BenchmarkPlan, reporter: Reporter = SILENT) -> Iterator[BenchmarkRun]:
    """Load the questions, the tools and the model, and lock the output directory inside the block."""
    endpoint, settings = _endpoint(config.eval), answer_settings(config)
    questions = load_questions(plan, config.data.bad_rows, reporter)
    rewards = {name: build_reward(_scored_by(config.reward, BENCHMARKS[name].metric)) for name in plan.benchmarks}
    require_same_settings(plan.out, settings)
    if "search" in config.tools.enabled and config.tools.search is None:
        raise ArpoError(
            "tools.search: name where to search for these questions (documents, an index, a server, the web: "
            'docs/tools.md), or leave search out, like tools.enabled=["python"]'
        )
    config = config.model_copy(update={"reward": _scored_by(config.reward, "f1")})  # `rewards` are used instead
    with ExitStack() as stack:
        tools = stack.enter_context(build_tools(config))
        if endpoint is not None:
            answer = _endpoint_answers(config, endpoint, tools)
        else:
            answer = _model_answers(config, tools, questions, reporter)
        store = stack.enter_context(open_samples(plan.out, settings))
        yield BenchmarkRun(config, plan, questions, rewards, answer, tools, store, reporter)


@dataclass(slots=True)
class BenchmarkRun:
    """Samples and scores all answers of a plan that do not exist yet, `rollout.concurrency` at a time."""

    config: Config
    plan: BenchmarkPlan
    questions: Mapping[str, tuple[Task, ...]]
    rewards: Mapping[str, RewardFn]
    answer: AnswerFn
    tools: Toolset
    store: SampleStore
    reporter: Reporter
    samples: dict[str, dict[Key, Sample]] = field(default_factory=dict)
    consecutive_failures: int = 0

    async def answer_all(self) -> None:
        """Sample the missing answers; raises ArpoError after too many failures in a row."""
        missing = [job for name, tasks in self.questions.items() for job in self._missing(name, tasks)]
        existing = sum(map(len, self.samples.values()))
        total = existing + len(missing)
        if existing:
            self.reporter.message(f"{existing:,} of {total:,} answers already exist")
        unset = self.config.eval.endpoint is not None and "concurrency" not in self.config.rollout.model_fields_set
        concurrency = ENDPOINT_CONCURRENCY if unset else self.config.rollout.concurrency
        jobs, scoring = iter(missing), asyncio.Semaphore(self.config.reward.workers)
        with self.reporter.progress("answering", total) as progress:
            progress.update(existing)
            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(min(concurrency, len(missing))):
                        group.create_task(self._work(jobs, total, scoring, progress))
            except ExceptionGroup as several:
                raise several.exceptions[0] from several

    def results(self) -> Results:
        """Statistics of all answers of the plan."""
        summaries = {name: summarize(samples.values(), self.plan.ks) for name, samples in self.samples.items()}
        every = [sample for samples in self.samples.values() for _, sample in sorted(samples.items())]
        return Results(agent_name(self.config), summaries, [sample for sample in every if sample.failed is not None])

    def _missing(self, name: str, tasks: tuple[Task, ...]) -> list[Job]:
        """The answers of a benchmark that the plan has and the store lacks; the others become `samples`."""
        stored = {key: sample for key, sample in self.store.read(name, tasks).items() if sample.failed is None}
        jobs = {(task.id, number): (name, task, number) for task in tasks for number in range(self.plan.samples)}
        self.samples[name] = {key: stored[key] for key in jobs if key in stored}
        return [job for key, job in jobs.items() if key not in stored]

    async def _work(self, jobs: Iterator[Job], total: int, scoring: asyncio.Semaphore, progress: Progress) -> None:
        for benchmark, task, number in jobs:
            sample = await self._sample(benchmark, task, number, scoring)
            self.samples[benchmark][sample.key] = sample
            self.consecutive_failures = 0 if sample.failed is None else self.consecutive_failures + 1
            if self.consecutive_failures >= MAX_CONSECUTIVE_FAILURES:
                raise ArpoError(
                    f"{MAX_CONSECUTIVE_FAILURES} answers in a row failed, the last because {sample.failed}\n"
                    f"All earlier answers are saved in {self.plan.out}; the same command continues from there"
                )
            progress.advance()
            done = sum(map(len, self.samples.values()))
            if 10 * done // total > 10 * (done - 1) // total and not self.reporter.has_bars:  # a tenth more
                self.reporter.message(f"{done:,} of {total:,} answers")

    async def _sample(self, benchmark: str, task: Task, number: int, scoring: asyncio.Semaphore) -> Sample:
        seed = derive_seed(self.config.seed, "benchmark", benchmark, task.id, number)
        try:
            tree, tokens = await self.answer(task, seed)
        except HttpError as failure:
            return Sample(benchmark, task.id, number, task.kind, failed=str(failure))
        async with scoring:
            with Scorer(self.rewards[benchmark], 1) as scorer:
                scored = await scorer.score(tree)
        sample = build_sample(benchmark, number, scored, tokens)
        self.store.append(sample, scored)
        return sample


def load_questions(plan: BenchmarkPlan, bad_rows: str, reporter: Reporter = SILENT) -> dict[str, tuple[Task, ...]]:
    """The questions of each benchmark, from DIR/NAME.jsonl (.json, .parquet) or from the hub; ids are made unique."""
    questions = {}
    for name in plan.benchmarks:
        path = None
        if plan.data_dir is not None and name in BENCHMARKS:
            files = [plan.data_dir / f"{name}{suffix}" for suffix in SUFFIXES]
            path = next((str(file) for file in files if file.is_file()), None)
            if path is None:
                reporter.message(f"{name}: {plan.data_dir} has no {name}.jsonl or .parquet; loading it from the hub")
        count: Counter[str] = Counter()
        unique = []
        for task in load_benchmark(name, path, bad_rows)[: plan.questions]:
            count[task.id] += 1
            unique.append(task if count[task.id] == 1 else replace(task, id=f"{task.id}#{count[task.id]}"))
        questions[name] = tuple(unique)
    return questions


def answer_settings(config: Config) -> dict[str, Any]:
    """The settings that answers depend on."""
    resolved = config.resolved()
    chosen: dict[str, Any] = {
        "rollout": ("format", "examples", "max_tool_calls", "max_tokens", "max_seconds"),
        "reward": ("math_seconds", "judge_url", "judge_model"),
        "eval": ("temperature", "top_p", "top_k", "endpoint", "endpoint_model"),
    }
    parts = {section: {name: resolved[section][name] for name in names} for section, names in chosen.items()}
    if config.eval.endpoint is None:
        parts |= {name: resolved[name] for name in ("model", "world", "coldstart")}
    return {"seed": config.seed, "tools": resolved["tools"], **parts}


def agent_name(config: Config) -> str:
    """The agent's name in the results."""
    endpoint: str | None = masked(config.eval.endpoint, "endpoint")
    return f"{config.eval.endpoint_model} at {endpoint}" if endpoint else config.model.path


def _endpoint(settings: Eval) -> ChatClient | None:
    if settings.endpoint is None and settings.endpoint_model is None:
        return None
    if settings.endpoint is None or settings.endpoint_model is None:
        raise ArpoError("eval.endpoint and eval.endpoint_model (--endpoint and --model) go together; give both")
    return ChatClient(settings.endpoint, settings.endpoint_model, settings.endpoint_key_env, settings.endpoint_timeout)


def _endpoint_answers(config: Config, endpoint: ChatClient, tools: Toolset) -> AnswerFn:
    """Answers by the model behind an endpoint."""
    fmt = call_format(config, tools)
    examples = read_examples(config.rollout.examples, fmt)
    agent = EndpointAgent(endpoint, tools, fmt, config.tools.max_result_tokens, examples)
    settings = evaluation_rollout(config.eval, config.rollout, 1)
    return lambda task, seed: endpoint_trajectory(agent, task, settings, seed)


def _model_answers(
    config: Config, tools: Toolset, questions: Mapping[str, tuple[Task, ...]], reporter: Reporter
) -> AnswerFn:
    """Answers by the model that the config names."""
    model, tokenizer = load_policy(config, reporter)
    agent = build_agent(config, tools, model, tokenizer)
    tasks = TaskSet(test=tuple(task for tasks in questions.values() for task in tasks))
    fit_prompts(tasks, agent.prompts, config.data.max_prompt_tokens)
    settings, never = evaluation_rollout(config.eval, config.rollout, 1), Branching(policy="never")

    async def answer(task: Task, seed: int) -> tuple[RolloutTree, int | None]:
        tree = await rollout(agent, task, settings, never, seed)
        return tree, tree.trajectories[0].completion_tokens

    return answer


def _scored_by(settings: Rewards, metric: str) -> Rewards:
    return settings.model_copy(update={"accuracy": metric, "function": None, "bonus": 0.0})
