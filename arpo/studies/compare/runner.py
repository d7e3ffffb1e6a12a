"""Run a comparison: the same model, questions, seeds and budget for every algorithm, one process for each run.

    plan = plan_from_options(Path("world.toml"), algorithms="arpo,grpo", seeds=5)
    comparison = asyncio.run(compare(plan))

    OUT/compare.json                  what is compared; a later call may add algorithms or seeds
    OUT/cold-start/seed-0/            the model before training: result.json, log.txt
    OUT/arpo/seed-0/                  config.json (repeats the run), run/ (a run directory), result.json, log.txt
    OUT/arpo/M=4,lr=0.0002/seed-0/    the same if settings are tuned; seeds from 1000 on are those of tuning
    OUT/results.json, results.md, ... the results, written by `report`

The budget is what the baseline spends in `train.steps` steps with the same seed, or a given number. Every other
algorithm trains until it has spent as much, its last step included. What a run spent is read from its metrics, where a
call on a shared prefix counts once.

With a grid of settings, every algorithm first tries them all on the tuning seeds, and runs the reported seeds with its
best (`tuning`). This needs a given budget, the same for all runs.

Guarantees: a run that dies is resumed, up to two times. A run that still fails is part of the result, with the reason,
and the next call tries it again. Finished runs are not repeated.
Not covered: several machines; equal wall time (runs that share a machine slow each other down).
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from arpo.config.files import expand_user
from arpo.config.loading import config_from_resolved, differences, load_config
from arpo.config.schema import Config
from arpo.config.section import MAX_COUNT
from arpo.data.task_set import require_test_source
from arpo.errors import ArpoError
from arpo.figures.text import printable
from arpo.models.threads import usable_cores
from arpo.runs.locks import acquire_lock
from arpo.runs.reporter import SILENT, Progress, Reporter
from arpo.runs.run_dir import open_run_dir, read_json, write_atomically
from arpo.studies.compare.results import (
    ArmSettings,
    Choice,
    Comparison,
    Point,
    TrialResult,
    TuningRun,
    choice_label,
)
from arpo.studies.compare.stats import tuning_results
from arpo.studies.compare.tuning import FIRST_TUNING_SEED, Grid, choice_overrides, choices, parse_grid
from arpo.training.checks import require_files

COLD_START = "cold-start"
RETRIES = 2  # of a run that dies
MAX_STEPS_FACTOR = 10  # times train.steps: a run that stops calling tools would never spend its budget
EVALUATIONS = 8  # during a run, if eval.every is not set
# The costs of a point, and the metrics that each is the sum of.
COST_METRICS = {
    "tool_calls": ("tool_calls",),
    "trajectories": ("trajectories",),
    "tokens": ("sampled_tokens",),
    "optimizer_steps": ("optimizer_steps",),
    "seconds": ("rollout_seconds", "train_seconds"),
}
BUDGET_UNITS = {"tool-calls": "tool_calls", "trajectories": "trajectories", "tokens": "sampled_tokens"}
MATCH_COSTS = {"tool_calls": "tool_calls", "trajectories": "trajectories", "sampled_tokens": "tokens"}
UNIT_NAMES = {"tool_calls": "tool calls", "trajectories": "trajectories", "sampled_tokens": "tokens"}


@dataclass(frozen=True, slots=True)
class ComparisonPlan:
    """What is compared, and how."""

    config: Path
    overrides: tuple[str, ...] = field(repr=False)
    algorithms: tuple[str, ...]
    seeds: tuple[int, ...]
    match: str  # tool_calls, trajectories or sampled_tokens
    budget: int | None
    baseline: str
    samples: int
    jobs: int
    out: Path
    drop_models: bool = False
    levels: tuple[float, ...] = ()
    grid: Grid | None = None
    tuning_seeds: tuple[int, ...] = ()

    def settings(self, algorithm: str | None, seed: int, *more: str, choice: Choice = ()) -> Config:
        """The settings of one run; with algorithm None, of the model before training."""
        run_dir = f"run.dir={self.directory(algorithm or COLD_START, seed, choice) / 'run'}"
        overrides = [*self.overrides, f"seed={seed}", run_dir, f"train.budget_unit={self.match}", *more]
        if choice:
            overrides += choice_overrides(choice, load_config(self.config, self.overrides, algorithm))
        config = load_config(self.config, overrides, algorithm)
        if config.eval.every:
            return config
        return load_config(self.config, [*overrides, f"eval.every={max(1, self.steps // EVALUATIONS)}"], algorithm)

    @property
    def steps(self) -> int:
        """The steps that the baseline trains for if no budget is given."""
        return load_config(self.config, self.overrides).train.steps

    @property
    def choices(self) -> tuple[Choice, ...]:
        """The settings that every algorithm tries on the tuning seeds."""
        return choices(self.grid) if self.grid else ()

    def directory(self, algorithm: str, seed: int, choice: Choice = ()) -> Path:
        """The directory of a run and its result."""
        return self.out / short_name(algorithm) / choice_label(choice) / f"seed-{seed}"

    def result(self, algorithm: str, seed: int, choice: Choice = ()) -> dict[str, Any]:
        """The result.json of a finished run."""
        return read_json(self.directory(algorithm, seed, choice) / "result.json")

    def has_result(self, algorithm: str, seed: int, choice: Choice = ()) -> bool:
        """Whether a run is finished."""
        return (self.directory(algorithm, seed, choice) / "result.json").exists()

    def metrics(self, algorithm: str, seed: int, choice: Choice = ()) -> list[dict[str, Any]]:
        """The metrics of a run's steps."""
        return open_run_dir(self.directory(algorithm, seed, choice) / "run").read_metrics()

    def spent(self, algorithm: str, seed: int, choice: Choice = ()) -> int:
        """How much of the budget's unit a run has spent."""
        return sum(record[self.match] for record in self.metrics(algorithm, seed, choice))


def short_name(algorithm: str) -> str:
    """The name of an algorithm, which may be a TOML file."""
    return Path(algorithm).stem if algorithm.endswith(".toml") else algorithm


def plan_from_options(
    config: Path,
    overrides: Sequence[str] = (),
    *,
    algorithms: str,
    seeds: int = 3,
    match: str = "tool-calls",
    budget: int | None = None,
    baseline: str | None = None,
    samples: int = 5,
    jobs: int = 1,
    out: Path | None = None,
    drop_models: bool = False,
    levels: str | None = None,
    tune: str | None = None,
    tuning_seeds: int = 1,
) -> ComparisonPlan:
    """The plan that the options of `arpo compare` ask for; the settings of every run are checked here."""
    if match not in BUDGET_UNITS:
        raise ArpoError(f"--match: got {match}, expected one of {', '.join(BUDGET_UNITS)}")
    names = tuple(dict.fromkeys(name.strip() for name in algorithms.split(",") if name.strip()))
    if not names:
        raise ArpoError("--algorithms: name at least one, like arpo,grpo")
    if len({short_name(name) for name in names} | {COLD_START}) <= len(names):
        raise ArpoError(f"--algorithms: two of {', '.join(names)} have the same short name; rename a file")
    if dotted := next((name for name in names if "." in short_name(name)), ""):
        raise ArpoError(f"--algorithms: {dotted} has a dot in its name and could clash with a results file; rename it")
    if any(text.partition("=")[0].strip() == "preset" for text in overrides):
        raise ArpoError("preset: use --algorithms to name presets")
    baseline = baseline or ("grpo" if "grpo" in names else names[0])
    if baseline not in names:
        raise ArpoError(f"--baseline: {baseline} is not among the algorithms {', '.join(names)}")
    settings = load_config(config, overrides, baseline)
    require_test_source(settings.data)
    require_files(settings, needs_test=True)
    if settings.train.budget:
        raise ArpoError("train.budget: a comparison sets it; use --budget, or leave it out")
    if tune is not None and budget is None:
        raise ArpoError("--tune: needs a --budget, since what train.steps steps spend depends on the settings")
    grid = None if tune is None else parse_grid(tune, load_config(config, overrides))
    plan = ComparisonPlan(
        config=config,
        overrides=tuple(overrides),
        algorithms=names,
        seeds=tuple(range(settings.seed, settings.seed + seeds)),
        match=BUDGET_UNITS[match],
        budget=budget,
        baseline=baseline,
        samples=samples,
        jobs=jobs,
        out=expand_user(out or Path("runs") / f"compare-{config.stem}"),
        drop_models=drop_models,
        levels=() if levels is None else parse_levels(levels),
        grid=grid,
        tuning_seeds=tuple(range(FIRST_TUNING_SEED, FIRST_TUNING_SEED + tuning_seeds)) if grid else (),
    )
    if set(plan.seeds) & set(plan.tuning_seeds):
        raise ArpoError(f"seed: seeds from {FIRST_TUNING_SEED} on are those of tuning; choose a smaller one")
    for name in names:
        for choice in plan.choices or ((),):
            for seed in plan.seeds:
                plan.settings(name, seed, choice=choice)
    return plan


def parse_levels(text: str) -> tuple[float, ...]:
    """The accuracies that `--levels` names, in ascending order."""
    try:
        found = sorted({float(level) for level in text.split(",")})
    except ValueError:
        found = []
    if not found or not all(0 < level <= 1 for level in found):
        raise ArpoError(f"--levels: got {text!r}, expected accuracies above 0 and up to 1, like 0.7,0.8,0.85")
    return tuple(found)


async def compare(plan: ComparisonPlan, reporter: Reporter = SILENT) -> Comparison:
    """Do the runs that are missing and read all results. Progress counts runs."""
    total = len(plan.seeds) * (len(plan.algorithms) + 1)
    total += len(plan.tuning_seeds) * (len(plan.algorithms) * len(plan.choices) + 1)
    plan.out.mkdir(parents=True, exist_ok=True)
    with acquire_lock(plan.out, "comparison", "--out"), reporter.progress("runs", total) as progress:
        _write_identity(plan)
        return await _Runner(plan, reporter, progress).run()


def _write_identity(plan: ComparisonPlan) -> None:
    """Write what is compared; refuse an output directory that holds runs of a different comparison."""
    path = plan.out / "compare.json"
    identity: dict[str, Any] = {name: getattr(plan, name) for name in ("match", "budget", "baseline", "samples")}
    identity["tune"] = None if plan.grid is None else {name: list(values) for name, values in plan.grid.items()}
    identity["tuning_seeds"] = list(plan.tuning_seeds) or None
    identity["settings"] = load_config(plan.config, plan.overrides).resolved()
    if path.exists() and any(file.name in ("result.json", "run") for file in plan.out.rglob("*")):
        before = read_json(path)
        before["settings"] = config_from_resolved(before.get("settings", {})).resolved()  # settings may have been added
        if changed := [key for key in identity if before.get(key) != identity[key]]:
            raise ArpoError(
                f"{plan.out} holds a comparison with other {', '.join(changed)}: use the same values, or choose "
                "another --out"
            )
    write_atomically(path, (json.dumps(identity, indent=2) + "\n").encode("ascii"))


@dataclass(slots=True)
class _Runner:
    """Starts the runs of a plan, `jobs` at a time, and remembers why a run has no result."""

    plan: ComparisonPlan
    reporter: Reporter
    progress: Progress
    problems: dict[tuple[str, int, Choice], str] = field(default_factory=dict)  # "" for a finished run
    running: set[Path] = field(default_factory=set)
    done: int = 0
    slots: asyncio.Semaphore = field(init=False)

    async def run(self) -> Comparison:
        """Do all runs that are missing, and read the results."""
        plan, first = self.plan, self.plan.seeds[0]
        self.slots = asyncio.Semaphore(plan.jobs)
        watcher = asyncio.ensure_future(self._watch())
        try:
            # The first one runs alone: it fills the caches, and mistakes in the settings show up here.
            if problem := await self._one(COLD_START, first):
                raise ArpoError(f"the model could not be evaluated: {problem}")
            tuning = await self._tune()
            chosen = self._choose(tuning)
            await _gather([self._one_seed(seed, chosen) for seed in plan.seeds])
        finally:
            watcher.cancel()
        trials = [self._trial(name, seed, chosen.get(name, ())) for name in plan.algorithms for seed in plan.seeds]
        return Comparison(
            title=plan.config.stem,
            match=MATCH_COSTS[plan.match],
            baseline=short_name(plan.baseline),
            algorithms=tuple(map(short_name, plan.algorithms)),
            seeds=plan.seeds,
            trials=tuple(trials),
            levels=plan.levels,
            budget=plan.budget,
            settings={short_name(name): _arm_settings(plan, name, choice) for name, choice in chosen.items()},
            tuning=tuning,
        )

    async def _tune(self) -> tuple[TuningRun, ...]:
        """Run every algorithm with every setting of the grid on the tuning seeds."""
        plan = self.plan

        async def one_seed(seed: int) -> None:
            if problem := await self._one(COLD_START, seed):
                why = f"the model before training could not be evaluated: {problem}"
                self.problems |= {(name, seed, choice): why for name in plan.algorithms for choice in plan.choices}
                return
            runs = [(name, choice) for name in plan.algorithms for choice in plan.choices]
            await _gather([self._one(name, seed, *self._limits(), choice=choice) for name, choice in runs])

        await _gather([one_seed(seed) for seed in plan.tuning_seeds])
        return tuple(
            TuningRun(choice, self._trial(name, seed, choice))
            for name in plan.algorithms
            for choice in plan.choices
            for seed in plan.tuning_seeds
        )

    def _choose(self, tuning: Sequence[TuningRun]) -> dict[str, Choice]:
        """The settings that each algorithm runs with; algorithms without a finished tuning run are missing."""
        plan = self.plan
        if plan.budget is None or not plan.grid:
            return dict.fromkeys(plan.algorithms, ())
        results = tuning_results(tuning, MATCH_COSTS[plan.match], plan.budget)
        best = {each.algorithm: each.choice for each in results if each.chosen}
        for algorithm, choice in best.items():
            self.reporter.message(f"{algorithm}: tuned to {choice_label(choice)}")
        for name in plan.algorithms:
            if short_name(name) not in best:
                self.problems |= {(name, seed, ()): "none of its tuning runs finished" for seed in plan.seeds}
        return {name: best[short_name(name)] for name in plan.algorithms if short_name(name) in best}

    def _limits(self, budget: int | None = None) -> tuple[str, str]:
        """The overrides that make a run spend a budget: the given one, by default the plan's."""
        steps = min(MAX_COUNT, MAX_STEPS_FACTOR * self.plan.steps)
        return f"train.budget={budget or self.plan.budget}", f"train.steps={steps}"

    def _trial(self, algorithm: str, seed: int, choice: Choice) -> TrialResult:
        return _trial_result(self.plan, algorithm, seed, choice, self.problems.get((algorithm, seed, choice), ""))

    async def _one_seed(self, seed: int, chosen: Mapping[str, Choice]) -> None:
        """Run the reported runs of a seed: every algorithm with the settings chosen for it."""
        plan = self.plan
        if seed != plan.seeds[0] and (problem := await self._one(COLD_START, seed)):
            return self._skip(seed, chosen, f"the model before training could not be evaluated: {problem}")
        budget, others = plan.budget, dict(chosen)
        if budget is None:
            if await self._one(plan.baseline, seed):
                return self._skip(seed, chosen, f"{plan.baseline}, whose spending is the budget, did not finish")
            budget = plan.spent(plan.baseline, seed)
            if not budget:
                spent = f"spent no {UNIT_NAMES[plan.match]}; --match names another unit, --budget a budget"
                return self._skip(seed, chosen, f"{plan.baseline}, whose spending is the budget, {spent}")
            del others[plan.baseline]
        limits = self._limits(budget)
        await _gather([self._one(name, seed, *limits, choice=choice) for name, choice in others.items()])

    def _skip(self, seed: int, chosen: Mapping[str, Choice], why: str) -> None:
        for name, choice in chosen.items():
            self.problems.setdefault((name, seed, choice), why)

    async def _one(self, algorithm: str, seed: int, *more: str, choice: Choice = ()) -> str:
        """Run until there is a result; returns why there is none, or an empty string."""
        problem = self.problems[algorithm, seed, choice] = await self._finish(algorithm, seed, choice, more)
        self.done += 1
        head = f"{' '.join(filter(None, (short_name(algorithm), choice_label(choice))))} seed {seed}:"
        if problem:
            self.reporter.message(f"{head} FAILED, {problem}")
            return problem
        spent = ""
        if algorithm != COLD_START:
            spent = f" after {self.plan.spent(algorithm, seed, choice):,} {UNIT_NAMES[self.plan.match]}"
        accuracy = self.plan.result(algorithm, seed, choice)["accuracy"]
        self.reporter.message(f"{head} held-out accuracy {accuracy:.1%}{spent}")
        return ""

    async def _finish(self, algorithm: str, seed: int, choice: Choice, more: Sequence[str]) -> str:
        plan, trained = self.plan, algorithm != COLD_START
        directory = plan.directory(algorithm, seed, choice)
        config = plan.settings(algorithm if trained else None, seed, *more, choice=choice)
        if plan.has_result(algorithm, seed, choice):
            before = config_from_resolved(read_json(directory / "config.json")).resolved()
            if changed := differences(before, config.resolved()):
                head, hint = f"{directory} was made with other settings:", "move it away, or choose another --out"
                raise ArpoError("\n".join([head, *changed, hint]))
            return ""
        directory.mkdir(parents=True, exist_ok=True)
        write_atomically(directory / "config.json", (json.dumps(config.resolved(), indent=2) + "\n").encode("ascii"))
        for _ in range(1 + RETRIES):
            async with self.slots:
                self.running.add(directory)
                try:
                    code = await _spawn(plan, directory, config, untrained=not trained)
                finally:
                    self.running.discard(directory)
            if plan.has_result(algorithm, seed, choice):
                return ""
            if code in (2, 3):  # a mistake in the settings, or a collapse: it would happen again
                break
        return f"{'collapsed' if code == 3 else f'exit code {code}'}: {_last_error(directory)}"

    async def _watch(self) -> None:
        """Show every second how many runs are done and what the running ones have spent."""
        while True:
            notes = []
            for directory in sorted(self.running):
                with suppress(ArpoError, OSError, LookupError):  # not begun, or damaged: its end will say so
                    records = open_run_dir(directory / "run").read_metrics()
                    spent = sum(record[self.plan.match] for record in records)
                    name = " ".join(directory.relative_to(self.plan.out).parts)
                    notes.append(f"{name}: step {len(records)}, {spent:,.0f} {UNIT_NAMES[self.plan.match]}")
            self.progress.update(self.done, note="; ".join(notes))
            await asyncio.sleep(1.0)


async def _gather(work: Sequence[Coroutine[Any, Any, object]]) -> None:
    """Run all; the first error cancels the others and is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            for each in work:
                group.create_task(each)
    except ExceptionGroup as several:
        raise several.exceptions[0] from several


async def _spawn(plan: ComparisonPlan, directory: Path, config: Config, untrained: bool) -> int:
    """Start one attempt and return its exit code. Cancellation stops it and waits until it has saved."""
    command = [sys.executable, "-m", "arpo.studies.compare.trial"]
    command += [str(directory / "result.json"), "--samples", str(plan.samples)]
    command += ["--untrained"] if untrained else ["--drop-models"] if plan.drop_models else []
    threads = str(max(1, usable_cores() // plan.jobs))
    with (directory / "log.txt").open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env={"OMP_NUM_THREADS": threads, **os.environ, "PYTHONUNBUFFERED": "1"},
        )
        try:
            assert process.stdin is not None
            process.stdin.write(json.dumps(config.resolved(reveal=True)).encode() + b"\n")  # then it stays open
            return await process.wait()
        except asyncio.CancelledError:
            with suppress(ProcessLookupError):
                process.terminate()
            await process.wait()  # saving may take long; a second signal to this process ends the wait
            raise
        finally:
            with suppress(ProcessLookupError):
                process.kill()


def _last_error(directory: Path) -> str:
    """The last error in a run's log, or else its last line."""
    lines = (directory / "log.txt").read_text(encoding="utf-8", errors="replace").strip().splitlines()
    errors = [number for number, line in enumerate(lines) if line.startswith("error: ")]
    text = " ".join(lines[errors[-1] :] if errors else lines[-1:]) or "no output"
    return f"{printable(text)[:400]} (full log: {directory / 'log.txt'})"


def _arm_settings(plan: ComparisonPlan, algorithm: str, choice: Choice) -> ArmSettings:
    config = plan.settings(algorithm, plan.seeds[0], choice=choice)
    return ArmSettings(
        num_trajectories=config.rollout.num_trajectories,
        num_initial=config.rollout.num_initial,
        branching=config.branching.policy,
        batch_size=config.train.batch_size,
        minibatches=config.train.minibatches,
        lr=config.train.lr,
        bonus=config.reward.bonus,
    )


def _trial_result(plan: ComparisonPlan, algorithm: str, seed: int, choice: Choice, problem: str) -> TrialResult:
    if not (plan.has_result(COLD_START, seed) and plan.has_result(algorithm, seed, choice)):
        return TrialResult(short_name(algorithm), seed, (), {}, None, None, problem or "not done")
    result, records = plan.result(algorithm, seed, choice), plan.metrics(algorithm, seed, choice)
    points = [Point(0, 0, 0, 0, 0, 0.0, plan.result(COLD_START, seed)["accuracy"])]
    costs = dict.fromkeys(COST_METRICS, 0.0)
    for record in records:
        costs = {name: costs[name] + sum(record[metric] for metric in names) for name, names in COST_METRICS.items()}
        at_end = record is records[-1]
        if at_end or "test_accuracy" in record:
            accuracy = result["accuracy"] if at_end else record["test_accuracy"]
            counts: dict[str, Any] = {name: int(cost) for name, cost in costs.items() if name != "seconds"}
            points.append(Point(step=record["step"], **counts, seconds=costs["seconds"], accuracy=accuracy))
    return TrialResult(
        short_name(algorithm),
        seed,
        tuple(points),
        {int(k): value for k, value in result["pass_at"].items()},
        result["format"],
        result["calls_per_question"],
        _budget_problem(plan, algorithm, seed, records),
        tuple((count, right) for count, right in result.get("answers", ())),  # earlier versions did not write them
        _clip_fraction(records),
    )


def _clip_fraction(records: Sequence[dict[str, Any]]) -> float | None:
    """The mean over trained tokens; None if nothing was trained."""
    trained = [record for record in records if "clip_fraction" in record]
    tokens = sum(record["trained_tokens"] for record in trained)
    return sum(record["clip_fraction"] * record["trained_tokens"] for record in trained) / tokens if tokens else None


def _budget_problem(plan: ComparisonPlan, algorithm: str, seed: int, records: Sequence[dict[str, Any]]) -> str:
    """Why a run's spending does not match its budget: it must be reached in the run's last step."""
    if plan.budget is None and algorithm == plan.baseline:
        return ""
    if plan.budget is None and not plan.has_result(plan.baseline, seed):
        return "the budget is not known"
    budget = plan.budget or plan.spent(plan.baseline, seed)
    spent = sum(record[plan.match] for record in records)
    last = records[-1][plan.match] if records else 0
    if spent - last < budget <= spent:
        return ""
    return f"spent {spent:,} {UNIT_NAMES[plan.match]} but the budget is {budget:,}"
