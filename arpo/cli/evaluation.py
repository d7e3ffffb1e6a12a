"""`arpo eval`: accuracy on held-out questions or on benchmarks."""

from __future__ import annotations

import asyncio
import re
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from arpo.cli.display import ConsoleReporter, console, print_table, tool_lines
from arpo.cli.options import Overrides, load_model_config, load_target_config
from arpo.config.loading import load_config
from arpo.errors import ArpoError
from arpo.training.interrupt import run_async

if TYPE_CHECKING:
    from arpo.config.schema import Config
    from arpo.evaluation.benchmarks import BenchmarkPlan


def evaluate(
    target: Annotated[
        str,
        typer.Argument(
            help="a run directory (its last checkpoint is used) or a TOML file; with --benchmarks also a Hugging "
            "Face directory, a hub name or a .gguf file; with --endpoint only settings, if any"
        ),
    ] = "",
    overrides: Overrides = None,
    benchmarks: Annotated[str | None, typer.Option(help="names, like gsm8k,hotpotqa: docs/evaluation.md")] = None,
    k: Annotated[str | None, typer.Option(help="pass@k for these, like 1,3,5; default: 1")] = None,
    samples: Annotated[int | None, typer.Option(min=1, help="answers per question (eval.samples)")] = None,
    questions: Annotated[int | None, typer.Option(min=1, help="only the first questions of each set")] = None,
    data_dir: Annotated[Path | None, typer.Option(help="folder of NAME.jsonl or .parquet; default: the hub")] = None,
    out: Annotated[Path | None, typer.Option(help="directory for answers and results; default: evals/MODEL")] = None,
    endpoint: Annotated[str | None, typer.Option(help="evaluate the model at this OpenAI-compatible endpoint")] = None,
    model: Annotated[str | None, typer.Option(help="the model's name at the endpoint")] = None,
) -> None:
    """Accuracy on held-out questions or on benchmarks; the same command continues a stopped run of benchmarks."""
    given = {"eval.samples": samples, "eval.endpoint": endpoint, "eval.endpoint_model": model}
    settings = [*(overrides or []), *(f"{name}={value}" for name, value in given.items() if value is not None)]
    if endpoint is not None and target.partition("=")[0].replace(".", "").isidentifier() and "=" in target:
        target, settings = "", [target, *settings]  # without a model, the first argument is a setting
    if not target and endpoint is None:
        raise ArpoError("name what to evaluate: a run, a TOML file or a model; or give --endpoint and --model")
    if benchmarks is not None:
        config = load_model_config(target, settings) if target else load_config(None, settings)
        _run_benchmarks(config, plan_from_options(config, target, benchmarks, k or "1", questions, data_dir, out))
        return
    if k or endpoint or model or data_dir or out:
        raise ArpoError("--k, --data-dir, --out, --endpoint and --model need --benchmarks")
    if questions is not None:
        settings.append(f"eval.questions={questions}")
    if not Path(target).exists() and not target.endswith(".toml"):
        raise ArpoError(f"{target}: a model alone has no questions: give a run or a TOML file, or name --benchmarks")
    _evaluate_held_out(load_target_config(Path(target), settings))


def plan_from_options(
    config: Config, target: str, names: str, k: str, questions: int | None, data_dir: Path | None, out: Path | None
) -> BenchmarkPlan:
    """The plan that the options of `arpo eval` describe."""
    from arpo.evaluation.benchmarks import BenchmarkPlan, agent_name

    benchmarks = tuple(dict.fromkeys(names.replace(",", " ").split()))
    if not benchmarks:
        raise ArpoError("--benchmarks: name some, like gsm8k,hotpotqa")
    ks = k.replace(",", " ").split()
    if not ks or not all(each.isascii() and each.isdigit() and int(each) for each in ks):
        raise ArpoError(f"--k: got {k!r}, expected numbers from 1 on, like 1,3,5")
    if data_dir is not None and not data_dir.is_dir():
        raise ArpoError(f"--data-dir: there is no folder {str(data_dir)!r}")
    return BenchmarkPlan(
        benchmarks=benchmarks,
        out=out or Path("evals", "-".join(re.findall(r"[\w.-]+", target or agent_name(config)))),
        samples=config.eval.samples,
        ks=tuple(sorted(set(map(int, ks)))),
        questions=questions,
        data_dir=data_dir,
    )


def _run_benchmarks(config: Config, plan: BenchmarkPlan) -> None:
    from arpo.evaluation.benchmarks import open_benchmark_run
    from arpo.evaluation.report import results_notes, results_table, write_results

    with open_benchmark_run(config, plan, ConsoleReporter()) as run:
        try:
            run_async(run.answer_all())
        except asyncio.CancelledError:
            console.print(f"The answers so far are in {plan.out}; the same command continues from there.")
            raise
        results = run.results()
        files = write_results(plan.out, results)
        print_table(*results_table(results))
        for line in [*tool_lines(run.tools.stats()), *results_notes(results)]:
            console.print(line)
    console.print(f"{', '.join(files)} and all answers are in {plan.out}")
    if results.failures:
        raise typer.Exit(1)


def _evaluate_held_out(config: Config) -> None:
    from arpo.training.context import open_context
    from arpo.training.loop import evaluate_policy
    from arpo.training.sampler import LocalSampler

    reporter = ConsoleReporter()
    with closing(open_context(config, reporter)) as context:
        result = run_async(evaluate_policy(LocalSampler(context), context.tasks, config, reporter))
        console.print(f"accuracy {result.accuracy:.1%} over {len(result.trees)} questions")
        for kind, accuracy in result.by_kind().items():
            console.print(f"  {kind:<12} {accuracy:.1%}")
        trajectories = [trajectory for one in result.trees for trajectory in one.tree.trajectories]
        if spoiled := sum(trajectory.infra_fault for trajectory in trajectories):
            console.print(f"  {spoiled} of {len(trajectories)} answers were given although a tool had failed")
        for name, count in result.faults.items():
            console.print(f"  {count:.0f} answers count as wrong because they could not be judged: {name}")
        console.print(f"correct format {result.format_rate:.1%}, {result.tool_calls:.2f} tool calls per trajectory")
        for line in tool_lines(context.tools.stats()):
            console.print(line)
