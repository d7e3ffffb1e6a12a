"""Evaluate an agent on sets of questions: several answers per question, all saved, statistics with intervals.

    plan = EvalPlan(Path("evals/mine"), samples=5, ks=(1, 5))
    sets = benchmark_sets(config, ("gsm8k",))       # or [held_out_set(config, tools)], of arpo.training.context
    with build_toolset(config) as tools, open_evaluation(config, plan, sets, tools) as run:
        asyncio.run(run.answer_all())
        write_results(plan.out, run.results())

Guarantees: an answer's seed is derived from the run's seed, the set, the question and the answer's number, so an
evaluation that was stopped and resumed gives the same answers (on a CPU with deterministic tools and up to rounding; an
endpoint may ignore seeds). Answers spoiled by the endpoint, a broken tool or the judge are not counted, and are asked
for again next time. Adding sets, questions or samples keeps the answers that exist. Settings, weights or Python files
that answers depend on must not change meanwhile; if they do, the evaluation is refused.
Not covered: branching, which is for training; every answer is a trajectory of its own. Modules that are imported by
name, and hub models that change, are not noticed.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from arpo.agent.agent import build_agent, fit_prompts
from arpo.algorithm.rollout import ScoreFn, sample_tree
from arpo.config.algorithm import Branching
from arpo.config.files import expand_user
from arpo.config.masking import masked
from arpo.config.plugins import names_object
from arpo.config.schema import SCENES, Config, Eval, Rewards
from arpo.data.benchmarks import BENCHMARKS, load_benchmark
from arpo.data.task_set import MODEL_PLUGINS, TaskSet
from arpo.errors import ArpoError
from arpo.evaluation.endpoint import EndpointAgent, endpoint_trajectory, open_endpoint_agent
from arpo.evaluation.evaluate import evaluation_rollout
from arpo.evaluation.report import Results
from arpo.evaluation.samples import Key, Sample, SampleStore, build_sample, open_samples, require_same_settings
from arpo.evaluation.statistics import summarize
from arpo.models.resolve import load_policy, resolve_model
from arpo.net.chat import ChatClient
from arpo.net.http import HttpError
from arpo.rewards import RewardFn, Scorer, build_reward, wants_environment
from arpo.runs.reporter import SILENT, Progress, Reporter
from arpo.tools.executor import Toolset
from arpo.types import ScoredTree, Task, derive_seed

HELD_OUT = "test"  # the name of the set of held-out questions
MAX_CONSECUTIVE_FAILURES = 20
ENDPOINT_CONCURRENCY = 8  # unless rollout.concurrency is set
SUFFIXES = (".jsonl", ".json", ".parquet")
WEIGHTS = (".safetensors", ".gguf")
AnswerFn = Callable[[Task, int, ScoreFn], Awaitable[tuple[ScoredTree, int | None]]]
"""From a question, a seed and what scores trees to a tree with one trajectory, and the number of tokens generated."""


@dataclass(frozen=True, slots=True)
class QuestionSet:
    """Questions that are asked and reported together: a benchmark, or the held-out questions of a configuration.

    `metric` is how answers are compared with the right ones, or "reward" if only a reward of the user's own judges.
    """

    name: str
    tasks: tuple[Task, ...]
    reward: RewardFn
    metric: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "tasks", _with_unique_ids(self.tasks))


@dataclass(frozen=True, slots=True)
class EvalPlan:
    """The output directory, the number of answers per question, and every k for pass@k."""

    out: Path
    samples: int = 1
    ks: tuple[int, ...] = (1,)

    def __post_init__(self) -> None:
        if max(self.ks) > self.samples:
            raise ArpoError(f"--k {max(self.ks)} needs at least as many --samples; there are {self.samples}")


@dataclass(frozen=True, slots=True)
class _Job:
    """An answer to sample: of which set, to which question, and its number."""

    of: QuestionSet
    task: Task
    number: int


@contextmanager
def open_evaluation(
    config: Config, plan: EvalPlan, sets: Sequence[QuestionSet], tools: Toolset, reporter: Reporter = SILENT
) -> Iterator[EvaluationRun]:
    """Load the model, and lock the output directory inside the block; `tools` are the caller's to close."""
    endpoint = build_endpoint(config.eval)
    settings = answer_settings(config, held_out=any(each.name == HELD_OUT for each in sets))
    require_same_settings(plan.out, settings)
    if endpoint is not None:
        answer = _endpoint_answers(config, endpoint, tools, sets, reporter)
    else:
        answer = _model_answers(config, tools, sets, reporter)
    with open_samples(plan.out, settings) as store:
        yield EvaluationRun(config, plan, sets, answer, tools, store, reporter)


@dataclass(slots=True)
class EvaluationRun:
    """Samples and scores all answers of a plan that do not exist yet, `rollout.concurrency` at a time."""

    config: Config
    plan: EvalPlan
    sets: Sequence[QuestionSet]
    answer: AnswerFn
    tools: Toolset
    store: SampleStore
    reporter: Reporter
    samples: dict[str, dict[Key, Sample]] = field(default_factory=dict)
    consecutive_failures: int = 0

    async def answer_all(self) -> None:
        """Sample the missing answers; raises ArpoError after too many failures in a row."""
        missing = [job for each in self.sets for job in self._missing(each)]
        existing = sum(map(len, self.samples.values()))
        total = existing + len(missing)
        if existing:
            self.reporter.message(f"{existing:,} of {total:,} answers already exist")
        unset = self.config.eval.endpoint is not None and "concurrency" not in self.config.rollout.model_fields_set
        concurrency = ENDPOINT_CONCURRENCY if unset else self.config.rollout.concurrency
        jobs = iter(missing)
        with ExitStack() as stack:
            workers = self.config.reward.workers
            scorers = {each.name: stack.enter_context(Scorer(each.reward, workers)) for each in self.sets}
            progress = stack.enter_context(self.reporter.progress("answering", total))
            progress.update(existing)
            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(min(concurrency, len(missing))):
                        group.create_task(self._work(jobs, total, scorers, progress))
            except ExceptionGroup as several:
                raise several.exceptions[0] from several

    def results(self) -> Results:
        """Statistics of all answers of the plan."""
        summaries = {name: summarize(samples.values(), self.plan.ks) for name, samples in self.samples.items()}
        every = [sample for samples in self.samples.values() for _, sample in sorted(samples.items())]
        failures = [sample for sample in every if sample.failed is not None]
        return Results(agent_name(self.config), summaries, failures, {each.name: each.metric for each in self.sets})

    def _missing(self, of: QuestionSet) -> list[_Job]:
        """The answers of a set that the plan has and the store lacks; the others become `samples`."""
        stored = {key: sample for key, sample in self.store.read(of.name, of.tasks).items() if sample.failed is None}
        jobs = {(task.id, number): _Job(of, task, number) for task in of.tasks for number in range(self.plan.samples)}
        self.samples[of.name] = {key: stored[key] for key in jobs if key in stored}
        return [job for key, job in jobs.items() if key not in stored]

    async def _work(self, jobs: Iterator[_Job], total: int, scorers: Mapping[str, Scorer], progress: Progress) -> None:
        for job in jobs:
            sample = await self._sample(job, scorers[job.of.name])
            self.samples[job.of.name][sample.key] = sample
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

    async def _sample(self, job: _Job, scorer: Scorer) -> Sample:
        name, task = job.of.name, job.task
        seed = derive_seed(self.config.seed, "benchmark", name, task.id, job.number)
        try:
            scored, tokens = await self.answer(task, seed, scorer.score)
        except HttpError as failure:
            return Sample(name, task.id, job.number, task.kind, failed=str(failure))
        sample = build_sample(name, task, job.number, scored, tokens)
        self.store.append(sample, scored)
        return sample


def benchmark_config(config: Config) -> Config:
    """The settings for benchmarks: their metrics give no bonus for tools, which may so be left out."""
    return config.model_copy(update={"reward": _scored_by(config.reward, "f1")})


def benchmark_sets(
    config: Config,
    names: Sequence[str],
    questions: int | None = None,
    data_dir: Path | None = None,
    reporter: Reporter = SILENT,
) -> list[QuestionSet]:
    """The first `questions` of each benchmark, from DIR/NAME.jsonl (.json, .parquet) or from the hub."""
    loaded = {name: _load_benchmark(name, data_dir, config.data.bad_rows, reporter)[:questions] for name in names}
    sets = []
    for name, tasks in loaded.items():
        metric = BENCHMARKS[name].metric
        reward = build_reward(_scored_by(config.reward, metric), parse=config.answer.parse)
        sets.append(QuestionSet(name, tasks, reward, metric))
    if "search" in config.tools.enabled and config.tools.search is None:
        raise ArpoError(
            "tools.search: name where to search for these questions (documents, an index, a server, the web: "
            'docs/tools.md), or leave search out, like tools.enabled=["python"]'
        )
    return sets


def _load_benchmark(name: str, data_dir: Path | None, bad_rows: str, reporter: Reporter) -> tuple[Task, ...]:
    path = None
    if data_dir is not None and name in BENCHMARKS:
        files = [data_dir / f"{name}{suffix}" for suffix in SUFFIXES]
        path = next((str(file) for file in files if file.is_file()), None)
        if path is None:
            reporter.message(f"{name}: {data_dir} has no {name}.jsonl or .parquet; loading it from the hub")
    return load_benchmark(name, path, bad_rows)


def _with_unique_ids(tasks: Sequence[Task]) -> tuple[Task, ...]:
    count: Counter[str] = Counter()
    unique = []
    for task in tasks:
        count[task.id] += 1
        unique.append(task if count[task.id] == 1 else replace(task, id=f"{task.id}#{count[task.id]}"))
    return tuple(unique)


def answer_settings(config: Config, held_out: bool = False) -> dict[str, Any]:
    """What answers and their scores depend on: settings, and digests of the weights and files that these name.

    Benchmarks are scored by metrics of their own, and held-out questions by `reward`.
    """
    resolved = config.resolved()
    chosen: dict[str, Any] = {
        "rollout": ("format", "examples", "max_tool_calls", "max_tokens", "max_seconds"),
        "reward": ("math_seconds", "judge_url", "judge_model"),
        "eval": ("temperature", "top_p", "top_k", "endpoint", "endpoint_model"),
    }
    if held_out:
        chosen["reward"] = [name for name in resolved["reward"] if name not in ("workers", "judge_key_env")]
    parts = {section: {name: resolved[section][name] for name in names} for section, names in chosen.items()}
    parts |= {name: resolved[name] for name in ("prompt", "answer", "tools")}
    if config.environment.name is not None:
        parts["environment"] = resolved["environment"]
    if config.program.name is not None:
        parts["program"] = resolved["program"]
    if SCENES in config.data.sources:
        parts["scenes"] = resolved["scenes"]
    files = _digests(parts)
    if config.eval.endpoint is None:
        parts |= {name: resolved[name] for name in ("model", "world", "labyrinth", "coldstart")}
        files |= _weights(config)
    return {"seed": config.seed, **parts, **({"files": files} if files else {})}


def _digests(values: Any) -> dict[str, str]:
    """Digests of the Python files among these settings, as in "path/to/file.py:name"."""
    if isinstance(values, Mapping):
        return {name: digest for pair in values.items() for each in pair for name, digest in _digests(each).items()}
    if isinstance(values, list | tuple):
        return {name: digest for each in values for name, digest in _digests(each).items()}
    if not isinstance(values, str) or not names_object(values):
        return {}
    place = values.rpartition(":")[0]
    path = expand_user(place)
    if path.suffix != ".py" or not path.is_file():
        return {}
    return {place: hashlib.sha256(path.read_bytes()).hexdigest()[:12]}


def _weights(config: Config) -> dict[str, str]:
    """A digest of the names, sizes and times of the weight files on this machine; reading them would take long."""
    if config.model.path in MODEL_PLUGINS:
        return {}
    model = resolve_model(config)
    found = []
    for given in filter(None, (model.path, model.adapter)):
        path = expand_user(given)
        files = sorted(path.iterdir()) if path.is_dir() else [path]
        states = [(file.name, file.stat()) for file in files if file.suffix in WEIGHTS and file.is_file()]
        found += [(name, state.st_size, state.st_mtime_ns) for name, state in states]
    return {"weights": hashlib.sha256(repr(found).encode()).hexdigest()[:12]} if found else {}


def agent_name(config: Config) -> str:
    """The agent's name in the results."""
    endpoint: str | None = masked(config.eval.endpoint, "endpoint")
    return f"{config.eval.endpoint_model} at {endpoint}" if endpoint else config.model.path


def build_endpoint(settings: Eval) -> ChatClient | None:
    """The client of the endpoint that is evaluated; None for a local model."""
    if settings.endpoint is None and settings.endpoint_model is None:
        return None
    if settings.endpoint is None or settings.endpoint_model is None:
        raise ArpoError("eval.endpoint and eval.endpoint_model (--endpoint and --model) go together; give both")
    return ChatClient(settings.endpoint, settings.endpoint_model, settings.endpoint_key_env, settings.endpoint_timeout)


def _endpoint_answers(
    config: Config, endpoint: ChatClient, tools: Toolset, sets: Sequence[QuestionSet], reporter: Reporter
) -> AnswerFn:
    """Answers by the model behind an endpoint."""
    if any(wants_environment(each.reward) for each in sets):
        raise ArpoError(
            "eval.endpoint: the reward looks at the final state of the environment, which is not known for a model "
            "behind an endpoint; give a reward.function of the trajectory alone"
        )
    if config.program.name is not None:
        raise ArpoError("eval.endpoint: a program asks arpo's own endpoint; leave out program, or eval.endpoint")
    settings = evaluation_rollout(config.eval, config.rollout, 1)
    agents: list[EndpointAgent] = []
    opening = asyncio.Lock()

    async def answer(task: Task, seed: int, score: ScoreFn) -> tuple[ScoredTree, int | None]:
        async with opening:  # the first question finds out which format the endpoint takes
            if not agents:
                agents.append(await open_endpoint_agent(config, endpoint, tools, reporter))
        tree, tokens = await endpoint_trajectory(agents[0], task, settings, seed)
        return await score(tree, ()), tokens

    return answer


def _model_answers(config: Config, tools: Toolset, sets: Sequence[QuestionSet], reporter: Reporter) -> AnswerFn:
    """Answers by the model that the config names."""
    model, tokenizer = load_policy(config, reporter)
    agent = build_agent(config, tools, model, tokenizer)
    tasks = TaskSet(test=tuple(task for each in sets for task in each.tasks))
    fit_prompts(tasks, agent.prompts, config.data.max_prompt_tokens)
    settings, never = evaluation_rollout(config.eval, config.rollout, 1), Branching(policy="never")

    async def answer(task: Task, seed: int, score: ScoreFn) -> tuple[ScoredTree, int | None]:
        scored = await sample_tree(agent, task, settings, never, seed, score)
        return scored, scored.tree.trajectories[0].completion_tokens

    return answer


def _scored_by(settings: Rewards, metric: str) -> Rewards:
    return settings.model_copy(update={"accuracy": metric, "function": None, "bonus": 0.0})
