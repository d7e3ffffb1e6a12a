"""An agent on benchmarks: every question asked several times, every answer kept, numbers with intervals at the end.

    run_benchmarks(config, Plan(("gsm8k",), Path("evals/mine"), samples=5, ks=(1, 5)), asyncio.run)

Promises: an answer's seed follows from the run's seed, the benchmark, the question and the answer's number, so an
evaluation that was stopped and goes on gives the answers that it would have given (on a CPU with deterministic tools
and up to rounding; an endpoint may ignore seeds). Answers that the endpoint, a broken tool or the judge spoilt are not
counted, and asked for again next time. More benchmarks, questions or samples go on from what is there.
Does not cover: branching, which is for training: every answer is a path of its own.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from arpo.agent.agent import Agent, build_agent, call_format, fit_prompts
from arpo.agent.examples import read_examples
from arpo.algorithm.rollout import rollout
from arpo.cli.display import ConsoleReporter, console, print_table, progress_bar, tool_lines
from arpo.config.schema import Branching, Config, Eval, Rewards, Rollout
from arpo.data.benchmarks import BENCHMARKS, load_benchmark
from arpo.data.task_set import TaskSet
from arpo.errors import ArpoError
from arpo.evaluation.endpoint import EndpointAgent, endpoint_trajectory
from arpo.evaluation.evaluate import evaluation_rollout
from arpo.evaluation.report import Results, results_notes, results_table, write_results
from arpo.evaluation.samples import Key, Sample, SampleLog, completion_tokens, open_samples, refuse_other, sample_of
from arpo.evaluation.statistics import summarize
from arpo.models.resolve import load_policy
from arpo.net.chat import ChatClient
from arpo.net.http import HttpError
from arpo.rewards import RewardFn, Scorer, reward_from
from arpo.tools.build import build_tools
from arpo.tools.executor import Toolset
from arpo.types import RolloutTree, Task, derive_seed

GIVE_UP = 20  # answers in a row that fail
ENDPOINT_AT_ONCE = 8  # answers that an endpoint is asked for, unless rollout.concurrency is set
SUFFIXES = (".jsonl", ".json", ".parquet")
Play = Callable[[Task, int], Awaitable[tuple[RolloutTree, int | None]]]
"""From a question and a seed to a tree with one path, and the tokens that the model wrote."""
Runner = Callable[[Coroutine[None, None, None]], None]


@dataclass(frozen=True, slots=True)
class Plan:
    """What is asked: which benchmarks, how many questions of each (None: all), how often, and where all of it goes."""

    benchmarks: tuple[str, ...]
    out: Path
    samples: int = 1
    ks: tuple[int, ...] = (1,)
    questions: int | None = None
    data_dir: Path | None = None

    def __post_init__(self) -> None:
        if max(self.ks) > self.samples:
            raise ArpoError(f"--k {max(self.ks)} needs at least as many --samples; there are {self.samples}")


@dataclass(frozen=True, slots=True)
class Job:
    """One answer that is to be given."""

    benchmark: str
    task: Task
    number: int

    @property
    def key(self) -> Key:
        """Which answer of the benchmark it is."""
        return self.task.id, self.number


def the_plan(
    config: Config, target: str, names: str, k: str, questions: int | None, data_dir: Path | None, out: Path | None
) -> Plan:
    """What the options of `arpo eval` ask for."""
    chosen = tuple(dict.fromkeys(names.replace(",", " ").split()))
    if not chosen:
        raise ArpoError("--benchmarks: name some, like gsm8k,hotpotqa")
    ks = k.replace(",", " ").split()
    if not ks or not all(each.isascii() and each.isdigit() and int(each) for each in ks):
        raise ArpoError(f"--k: got {k!r}, expected numbers from 1 on, like 1,3,5")
    if data_dir is not None and not data_dir.is_dir():
        raise ArpoError(f"--data-dir: there is no folder {str(data_dir)!r}")
    name = "-".join(re.findall(r"[\w.-]+", target or agent_name(config)))
    numbers = tuple(sorted(set(map(int, ks))))
    return Plan(chosen, out or Path("evals", name), config.eval.samples, numbers, questions, data_dir)


def run_benchmarks(config: Config, plan: Plan, run: Runner) -> Results:
    """Ask what has not been answered yet, write the results and show them; `run` runs the work."""
    endpoint, settings = _endpoint(config.eval), identity(config)
    questions = load_questions(plan, config.data.bad_rows)
    rewards = {name: reward_from(_judged_by(config.reward, BENCHMARKS[name].metric)) for name in plan.benchmarks}
    refuse_other(plan.out, settings)
    if "search" in config.tools.enabled and config.tools.search is None:
        raise ArpoError(
            "tools.search: name where to look for these questions (documents, an index, a server, the web: "
            'docs/tools.md), or leave search out, like tools.enabled=["python"]'
        )
    with ExitStack() as opened:
        play, tools = _player(config, endpoint, questions, opened)
        log = opened.enter_context(open_samples(plan.out, settings))
        work = _Work(config, plan, questions, rewards, play, log)
        try:
            run(work.all())
        except asyncio.CancelledError:
            console.print(f"The answers so far are in {plan.out}; the same command goes on from there.")
            raise
        results = work.results()
        written = write_results(plan.out, results)
        print_table(*results_table(results))
        for line in [*tool_lines(tools.stats()), *results_notes(results)]:
            console.print(line)
    console.print(f"{', '.join(written)} and all answers are in {plan.out}")
    return results


def load_questions(plan: Plan, bad_rows: str) -> dict[str, tuple[Task, ...]]:
    """The questions of each benchmark, from DIR/NAME.jsonl (.json, .parquet) or from the hub; each id once."""
    found = {}
    for name in plan.benchmarks:
        path = None
        if plan.data_dir is not None and name in BENCHMARKS:
            files = [plan.data_dir / f"{name}{suffix}" for suffix in SUFFIXES]
            path = next((str(file) for file in files if file.is_file()), None)
            if path is None:
                console.print(f"{name}: {plan.data_dir} has no {name}.jsonl or .parquet; taken from the hub")
        tasks = load_benchmark(name, path, bad_rows)[: plan.questions]
        found[name] = _unique(tasks)
    return found


def identity(config: Config) -> dict[str, Any]:
    """The settings that decide an answer."""
    whole = config.resolved()
    chosen: dict[str, Any] = {
        "rollout": ("format", "examples", "max_tool_calls", "max_tokens", "max_seconds"),
        "reward": ("math_seconds", "judge_url", "judge_model"),
        "eval": ("temperature", "top_p", "top_k", "endpoint", "endpoint_model"),
    }
    parts = {section: {name: whole[section][name] for name in names} for section, names in chosen.items()}
    if config.eval.endpoint is None:
        parts |= {name: whole[name] for name in ("model", "world", "coldstart")}
    return {"seed": config.seed, "tools": whole["tools"], **parts}


def agent_name(config: Config) -> str:
    """What the results call the agent."""
    return f"{config.eval.endpoint_model} at {config.eval.endpoint}" if config.eval.endpoint else config.model.path


def _judged_by(settings: Rewards, metric: str) -> Rewards:
    return settings.model_copy(update={"accuracy": metric, "function": None, "bonus": 0.0})


def _unique(tasks: tuple[Task, ...]) -> tuple[Task, ...]:
    seen: Counter[str] = Counter()
    found = []
    for task in tasks:
        seen[task.id] += 1
        found.append(task if seen[task.id] == 1 else replace(task, id=f"{task.id}#{seen[task.id]}"))
    return tuple(found)


def _player(
    config: Config, endpoint: ChatClient | None, questions: Mapping[str, tuple[Task, ...]], opened: ExitStack
) -> tuple[Play, Toolset]:
    """What answers: the model that the config names, or an endpoint; and its tools."""
    how = evaluation_rollout(config.eval, config.rollout, 1)
    config = config.model_copy(update={"reward": _judged_by(config.reward, "f1")})  # it is not this one that judges
    tools = opened.enter_context(build_tools(config))
    if endpoint is not None:
        fmt = call_format(config, tools)
        examples = read_examples(config.rollout.examples, fmt)
        remote = EndpointAgent(endpoint, tools, fmt, config.tools.max_result_tokens, examples)
        return lambda task, seed: endpoint_trajectory(remote, task, how, seed), tools
    asked = tuple(task for tasks in questions.values() for task in tasks)
    agent = build_agent(config, tools, *load_policy(config, ConsoleReporter()))
    fit_prompts(TaskSet(test=asked), agent.prompts, config.data.max_prompt_tokens)
    return lambda task, seed: _local_path(agent, task, how, seed), tools


def _endpoint(settings: Eval) -> ChatClient | None:
    if settings.endpoint is None and settings.endpoint_model is None:
        return None
    if settings.endpoint is None or settings.endpoint_model is None:
        raise ArpoError("eval.endpoint and eval.endpoint_model (--endpoint and --model) go together; give both")
    return ChatClient(settings.endpoint, settings.endpoint_model, settings.endpoint_key_env, settings.endpoint_timeout)


async def _local_path(agent: Agent, task: Task, how: Rollout, seed: int) -> tuple[RolloutTree, int | None]:
    tree = await rollout(agent, task, how, Branching(policy="never"), seed)
    return tree, completion_tokens(tree)


@dataclass(slots=True)
class _Work:
    """Goes through all answers that are still to be given, `rollout.concurrency` at a time."""

    config: Config
    plan: Plan
    questions: Mapping[str, tuple[Task, ...]]
    rewards: Mapping[str, RewardFn]
    play: Play
    log: SampleLog
    given: dict[str, dict[Key, Sample]] = field(default_factory=dict)
    failures_in_a_row: int = 0
    scoring: asyncio.Semaphore = field(init=False)

    async def all(self) -> None:
        """Give them all."""
        self.scoring = asyncio.Semaphore(self.config.reward.workers)
        left = [job for name, tasks in self.questions.items() for job in self._unanswered(name, tasks)]
        there = sum(map(len, self.given.values()))
        total = there + len(left)
        if there:
            console.print(f"{there:,} of {total:,} answers are there already")
        with progress_bar("answering", total) as bar:
            bar.update(bar.task_ids[0], completed=there)
            count = _counter(total, there)

            def advance() -> None:
                bar.update(bar.task_ids[0], completed=count())

            jobs = iter(left)
            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(min(_at_once(self.config), len(left))):
                        group.create_task(self._worker(jobs, advance))
            except ExceptionGroup as several:
                raise several.exceptions[0] from several

    def _unanswered(self, name: str, tasks: tuple[Task, ...]) -> list[Job]:
        """The answers that the plan wants and the log does not have."""
        good = {key: sample for key, sample in self.log.read(name, tasks).items() if sample.failed is None}
        wanted = [Job(name, task, number) for task in tasks for number in range(self.plan.samples)]
        self.given[name] = {job.key: good[job.key] for job in wanted if job.key in good}
        return [job for job in wanted if job.key not in good]

    async def _worker(self, jobs: Iterator[Job], advance: Callable[[], None]) -> None:
        for job in jobs:
            sample = await self._answer(job)
            self.given[job.benchmark][sample.key] = sample
            self.failures_in_a_row = 0 if sample.failed is None else self.failures_in_a_row + 1
            if self.failures_in_a_row >= GIVE_UP:
                raise ArpoError(
                    f"{GIVE_UP} answers in a row failed, the last because {sample.failed}\n"
                    f"What was done before is kept in {self.plan.out}; the same command goes on from there"
                )
            advance()

    async def _answer(self, job: Job) -> Sample:
        seed = derive_seed(self.config.seed, "benchmark", job.benchmark, job.task.id, job.number)
        try:
            tree, tokens = await self.play(job.task, seed)
        except HttpError as failure:
            return Sample(job.benchmark, job.task.id, job.number, job.task.kind, failed=str(failure))
        async with self.scoring:
            with Scorer(self.rewards[job.benchmark], 1) as scorer:
                scored = await scorer.score(tree)
        sample = sample_of(job.benchmark, job.number, scored, tokens)
        self.log.append(sample, scored)
        return sample

    def results(self) -> Results:
        """The numbers of all answers that the plan asks for."""
        summaries = {name: summarize(given.values(), self.plan.ks) for name, given in self.given.items()}
        every = [sample for given in self.given.values() for _, sample in sorted(given.items())]
        failures = [sample for sample in every if sample.failed is not None]
        return Results(agent_name(self.config), summaries, failures)


def _at_once(config: Config) -> int:
    unset = config.eval.endpoint is not None and "concurrency" not in config.rollout.model_fields_set
    return ENDPOINT_AT_ONCE if unset else config.rollout.concurrency


def _counter(total: int, start: int) -> Callable[[], int]:
    """Counts answers; where there is no bar, a line tells of every tenth of them."""
    count, shown = start, 10 * start // total

    def done() -> int:
        nonlocal count, shown
        count += 1
        if 10 * count // total > shown and not console.is_terminal:
            shown = 10 * count // total
            console.print(f"{count:,} of {total:,} answers")
        return count

    return done
