"""Algorithms side by side: the same cold start, questions and seeds, the same budget, one process for each run.

    comparison = run_async(compare(the_plan(Path("world.toml"), (), "arpo,grpo", 5, "tool-calls", ...)))

    OUT/compare.json                  what is compared; the same command goes on, also with more algorithms or seeds
    OUT/cold-start/seed-0/            the model before training: result.json, log.txt
    OUT/arpo/seed-0/                  config.json (repeats the run), run/ (a run's directory), result.json, log.txt
    OUT/results.json, results.md, ... what came out

The budget is what the baseline spends in `train.steps` steps with the same seed, or a number; every other algorithm
trains until it has spent as much, its last step included. What is spent is read from the runs' own logs, where a call
on a shared prefix stands once.

Promises: a run that dies is started again where it was, twice; what still fails, and why, is part of the result, and
the next call tries it again. Nothing that is finished is done again.
Does not cover: runs on several machines; equal wall time for each (runs that share a machine slow each other down).
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from arpo.cli.display import console, printable, progress_bar
from arpo.config.loading import config_from_resolved, differences, load_config
from arpo.config.schema import Config
from arpo.errors import ArpoError
from arpo.runs.locks import take_lock
from arpo.runs.run_dir import is_run, open_run, write_atomically
from arpo.studies.compare.stats import Comparison, Point, Trial

COLD_START = "cold-start"
RETRIES = 2  # of a run that dies
MOST_STEPS = 10  # times train.steps: a run that stops calling tools never spends its budget
# A cost of a point, and the metrics that it is the sum of.
SUMS = {
    "tool_calls": ("tool_calls",),
    "trajectories": ("trajectories",),
    "tokens": ("sampled_tokens",),
    "seconds": ("rollout_seconds", "train_seconds"),
}
WORDS = {"tool_calls": "tool calls", "trajectories": "trajectories", "sampled_tokens": "tokens"}
POINTS = 8  # evaluations on the way, if eval.every is not set


@dataclass(frozen=True, slots=True)
class Plan:
    """What is compared, and how."""

    config: Path
    overrides: tuple[str, ...]
    algorithms: tuple[str, ...]
    seeds: tuple[int, ...]
    match: str  # tool_calls, trajectories or sampled_tokens
    budget: int | None
    baseline: str
    samples: int
    jobs: int
    out: Path
    drop_models: bool = False

    def settings(self, algorithm: str | None, seed: int, *more: str) -> Config:
        """The settings of one run; None: the model before training."""
        run = f"run.dir={self.directory(algorithm or COLD_START, seed) / 'run'}"
        given = [*self.overrides, f"seed={seed}", run, f"train.budget_unit={self.match}", *more]
        config = load_config(self.config, given, algorithm)
        if config.eval.every:
            return config
        return load_config(self.config, [*given, f"eval.every={max(1, self.steps // POINTS)}"], algorithm)

    @property
    def steps(self) -> int:
        """What the baseline trains for, if no budget is given."""
        return load_config(self.config, self.overrides).train.steps

    def spending(self, budget: int) -> tuple[str, str]:
        """The settings of a run that ends when it has spent so much."""
        return f"train.budget={budget}", f"train.steps={MOST_STEPS * self.steps}"

    def directory(self, algorithm: str, seed: int) -> Path:
        """Where a run and its result are kept."""
        return self.out / short(algorithm) / f"seed-{seed}"


def short(algorithm: str) -> str:
    """The name of an algorithm, which may be a file."""
    return Path(algorithm).stem if algorithm.endswith(".toml") else algorithm


def the_plan(
    config: Path,
    overrides: Sequence[str],
    algorithms: str,
    seeds: int,
    match: str,
    budget: int | None,
    baseline: str | None,
    samples: int,
    jobs: int,
    out: Path | None,
    drop_models: bool,
) -> Plan:
    """The plan that the command line means; every setting of every run is checked here."""
    counted = {"tool-calls": "tool_calls", "trajectories": "trajectories", "tokens": "sampled_tokens"}
    if match not in counted:
        raise ArpoError(f"--match: got {match}, expected one of {', '.join(counted)}")
    names = tuple(dict.fromkeys(name.strip() for name in algorithms.split(",") if name.strip()))
    if not names:
        raise ArpoError("--algorithms: name at least one, like arpo,grpo")
    if len({short(name) for name in names} | {COLD_START}) <= len(names):
        raise ArpoError(f"--algorithms: two of {', '.join(names)} have the same short name; rename a file")
    if odd := [name for name in names if "." in short(name)]:
        raise ArpoError(f"--algorithms: {odd[0]} has a dot in its name, which a result may have too; rename the file")
    if any(text.partition("=")[0].strip() == "preset" for text in overrides):
        raise ArpoError("preset: --algorithms names the presets")
    first = baseline or ("grpo" if "grpo" in names else names[0])
    if first not in names:
        raise ArpoError(f"--baseline: {first} is not among the algorithms {', '.join(names)}")
    settings = load_config(config, overrides, first)
    if settings.train.budget:
        raise ArpoError("train.budget: a comparison sets it; give --budget, or leave it out")
    start = settings.seed
    plan = Plan(
        config,
        tuple(overrides),
        names,
        tuple(range(start, start + seeds)),
        counted[match],
        budget,
        first,
        samples,
        jobs,
        (out or Path("runs") / f"compare-{config.stem}").expanduser(),
        drop_models,
    )
    for name in names:
        for seed in plan.seeds:
            plan.settings(name, seed)
    return plan


async def compare(plan: Plan) -> Comparison:
    """Do all that is missing, and read what there is."""
    with _held(plan), progress_bar("runs", len(plan.seeds) * (len(plan.algorithms) + 1)) as bar:
        slots, watched = asyncio.Semaphore(plan.jobs), set[Path]()
        problems: dict[tuple[str, int], str] = {}

        async def one(algorithm: str, seed: int, *more: str) -> None:
            cold = algorithm == COLD_START
            problem = await _finish(plan, None if cold else algorithm, seed, slots, watched, more)
            problems[algorithm, seed] = problem
            bar.advance(bar.task_ids[0])
            console.print(_line(plan, algorithm, seed, problem))

        async def one_seed(seed: int) -> None:
            def give_up(why: str) -> None:
                problems.update({(name, seed): why for name in plan.algorithms if (name, seed) not in problems})

            if seed != plan.seeds[0]:
                await one(COLD_START, seed)
            if problem := problems[COLD_START, seed]:
                return give_up(f"the model before training could not be evaluated: {problem}")
            budget, others = plan.budget, plan.algorithms
            if budget is None:
                await one(plan.baseline, seed)
                if problems[plan.baseline, seed]:
                    return give_up(f"{plan.baseline}, whose spending is the budget, did not finish")
                budget = _spent(plan, plan.baseline, seed)
                if not budget:
                    return give_up(f"{plan.baseline}, whose spending is the budget, spent nothing")
                others = tuple(name for name in others if name != plan.baseline)
            await _all([one(name, seed, *plan.spending(budget)) for name in others])

        watching = asyncio.ensure_future(_watch(plan, bar, watched))
        try:
            await one(COLD_START, plan.seeds[0])  # alone: it makes what is cached, and meets mistakes in the settings
            if problem := problems[COLD_START, plan.seeds[0]]:
                raise ArpoError(f"the model could not be evaluated: {problem}")
            await _all([one_seed(seed) for seed in plan.seeds])
        finally:
            watching.cancel()
        return read_comparison(plan, problems)


async def _all(work: Sequence[Coroutine[Any, Any, None]]) -> None:
    try:
        async with asyncio.TaskGroup() as group:
            for each in work:
                group.create_task(each)
    except ExceptionGroup as several:
        raise several.exceptions[0] from several


@contextmanager
def _held(plan: Plan) -> Iterator[None]:
    """The directory, for this process alone; refused if something else is compared there."""
    plan.out.mkdir(parents=True, exist_ok=True)
    with take_lock(plan.out, "comparison", "--out"):
        path = plan.out / "compare.json"
        told: dict[str, Any] = {
            "match": plan.match,
            "budget": plan.budget,
            "baseline": plan.baseline,
            "samples": plan.samples,
            "settings": load_config(plan.config, plan.overrides).resolved(),
        }
        if path.exists():
            before = json.loads(path.read_bytes())
            before["settings"] = config_from_resolved(
                before["settings"]
            ).resolved()  # some settings may have come later
            changed = [key for key in told if before.get(key) != told[key]]
            if changed:
                raise ArpoError(
                    f"{plan.out} holds a comparison with other {', '.join(changed)}: give these as they were, or "
                    "choose another --out"
                )
        write_atomically(path, (json.dumps(told, indent=2) + "\n").encode("ascii"))
        yield


async def _finish(
    plan: Plan,
    algorithm: str | None,
    seed: int,
    slots: asyncio.Semaphore,
    watched: set[Path],
    more: Sequence[str],
) -> str:
    """Run until there is a result; returns what is wrong, if there is none."""
    directory, config = plan.directory(algorithm or COLD_START, seed), plan.settings(algorithm, seed, *more)
    if (directory / "result.json").exists():
        begun = config_from_resolved(json.loads((directory / "config.json").read_bytes())).resolved()
        if changed := differences(begun, config.resolved()):
            lines = [f"{directory} was done with other settings:", *changed, "move it away, or choose another --out"]
            raise ArpoError("\n".join(lines))
        return ""
    directory.mkdir(parents=True, exist_ok=True)
    write_atomically(directory / "config.json", (json.dumps(config.resolved(), indent=2) + "\n").encode("ascii"))
    for _ in range(1 + RETRIES):
        async with slots:
            watched.add(directory)
            try:
                code = await _spawn(plan, directory, untrained=algorithm is None)
            finally:
                watched.discard(directory)
        if (directory / "result.json").exists():
            return ""
        if code in (2, 3):  # a mistake in the settings, or a collapse: it would come again
            break
    return f"{'collapsed' if code == 3 else f'exit code {code}'}: {_last_words(directory)}"


async def _spawn(plan: Plan, directory: Path, untrained: bool) -> int:
    """One attempt; a stop of this process stops it, and waits until it has saved."""
    command = [
        sys.executable,
        "-m",
        "arpo.studies.compare.trial",
        str(directory / "config.json"),
        str(directory / "result.json"),
    ]
    command += ["--samples", str(plan.samples)]
    command += ["--untrained"] if untrained else ["--drop-models"] if plan.drop_models else []
    threads = str(max(1, (os.cpu_count() or 1) // plan.jobs))
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
            return await process.wait()
        except asyncio.CancelledError:
            with suppress(ProcessLookupError):
                process.terminate()
            await process.wait()  # however long saving takes; who does not want to wait stops this process again
            raise
        finally:
            with suppress(ProcessLookupError):
                process.kill()


def _last_words(directory: Path) -> str:
    """The last error that a run printed, else its last line."""
    lines = (directory / "log.txt").read_text(encoding="utf-8", errors="replace").strip().splitlines()
    errors = [number for number, line in enumerate(lines) if line.startswith("error: ")]
    words = " ".join(lines[errors[-1] :] if errors else lines[-1:]) or "it said nothing"
    return f"{printable(words)[:400]} (all of it: {directory / 'log.txt'})"


async def _watch(plan: Plan, bar: Any, watched: set[Path]) -> None:
    """Show what the running ones have spent."""
    while True:
        notes = []
        for directory in sorted(watched):
            if is_run(directory / "run"):
                records = open_run(directory / "run").read_metrics()
                spent = sum(record[plan.match] for record in records)
                notes.append(f"{directory.parent.name} {directory.name}: step {len(records)}, {spent:,.0f}")
        bar.update(bar.task_ids[0], note="; ".join(notes))
        await asyncio.sleep(1.0)


def _line(plan: Plan, algorithm: str, seed: int, problem: str) -> str:
    head = f"{short(algorithm)} seed {seed}:"
    if problem:
        return f"{head} FAILED, {problem}"
    result = _result(plan, algorithm, seed)
    spent = "" if algorithm == COLD_START else f" after {_spent(plan, algorithm, seed):,} {WORDS[plan.match]}"
    return f"{head} held-out accuracy {result['accuracy']:.1%}{spent}"


def _result(plan: Plan, algorithm: str, seed: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((plan.directory(algorithm, seed) / "result.json").read_bytes())
    return found


def _records(plan: Plan, algorithm: str, seed: int) -> list[dict[str, Any]]:
    return open_run(plan.directory(algorithm, seed) / "run").read_metrics()


def _spent(plan: Plan, algorithm: str, seed: int) -> int:
    return sum(record[plan.match] for record in _records(plan, algorithm, seed))


def read_comparison(plan: Plan, problems: dict[tuple[str, int], str]) -> Comparison:
    """What the directories say; `problems` holds why a run has no result."""
    trials = [
        _trial(plan, algorithm, seed, problems.get((algorithm, seed), "not done"))
        for algorithm in plan.algorithms
        for seed in plan.seeds
    ]
    names = tuple(map(short, plan.algorithms))
    match = {"sampled_tokens": "tokens"}.get(plan.match, plan.match)
    return Comparison(plan.config.stem, match, short(plan.baseline), names, plan.seeds, tuple(trials))


def _trial(plan: Plan, algorithm: str, seed: int, problem: str) -> Trial:
    if any(not (plan.directory(name, seed) / "result.json").exists() for name in (COLD_START, algorithm)):
        return Trial(short(algorithm), seed, (), {}, None, None, problem or "not done")
    start, result = _result(plan, COLD_START, seed), _result(plan, algorithm, seed)
    records = _records(plan, algorithm, seed)
    points, costs = [Point(0, 0, 0, 0, 0.0, start["accuracy"])], dict.fromkeys(SUMS, 0.0)
    for record in records:
        costs = {name: costs[name] + sum(record[part] for part in parts) for name, parts in SUMS.items()}
        at_end = record is records[-1]
        if at_end or "test_accuracy" in record:
            accuracy = result["accuracy"] if at_end else record["test_accuracy"]
            calls, trajectories, tokens, seconds = costs.values()
            points.append(Point(record["step"], int(calls), int(trajectories), int(tokens), seconds, accuracy))
    return Trial(
        short(algorithm),
        seed,
        tuple(points),
        {int(k): value for k, value in result["pass_at"].items()},
        result["format"],
        result["calls_per_question"],
        _unmatched(plan, algorithm, seed, records),
    )


def _unmatched(plan: Plan, algorithm: str, seed: int, records: Sequence[dict[str, Any]]) -> str:
    """What is wrong with a run that did not spend its budget, or spent more than the step in which it was reached."""
    if plan.budget is None and algorithm == plan.baseline:
        return ""
    if plan.budget is None and not (plan.directory(plan.baseline, seed) / "result.json").exists():
        return "the budget is not known"
    budget = plan.budget or _spent(plan, plan.baseline, seed)
    spent = sum(record[plan.match] for record in records)
    last = records[-1][plan.match] if records else 0
    if spent - last < budget <= spent:
        return ""
    return f"spent {spent:,} {WORDS[plan.match]} where the budget is {budget:,}"
