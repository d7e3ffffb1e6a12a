"""`arpo eval`: accuracy on held-out questions or on benchmarks."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from arpo.cli.display import ConsoleReporter, console, print_table, tool_lines
from arpo.cli.options import MODEL_HELP, Overrides, load_model_config, require_questions
from arpo.config.loading import load_config
from arpo.data.task_set import require_test_source
from arpo.errors import ArpoError
from arpo.training.interrupt import run_async

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from arpo.config.schema import Config
    from arpo.evaluation.question_sets import EvalPlan, QuestionSet
    from arpo.evaluation.report import Results
    from arpo.tools.executor import Toolset

EVALS_DIR = Path("evals")  # in the current directory; `arpo view` looks there, too


def evaluate(
    target: Annotated[str, typer.Argument(help=f"{MODEL_HELP}; with --endpoint only settings, if any")] = "",
    overrides: Overrides = None,
    benchmarks: Annotated[
        str | None, typer.Option(help="names, like gsm8k,hotpotqa, instead of held-out questions: docs/evaluation.md")
    ] = None,
    k: Annotated[str | None, typer.Option(help="pass@k for these, like 1,3,5; default: 1")] = None,
    samples: Annotated[int | None, typer.Option(min=1, help="answers per question (eval.samples)")] = None,
    questions: Annotated[int | None, typer.Option(min=1, help="only the first questions of each set")] = None,
    data_dir: Annotated[
        Path | None, typer.Option(help="folder of benchmarks, as NAME.jsonl or .parquet; default: the hub")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="directory for answers and results; default: in evals")] = None,
    endpoint: Annotated[str | None, typer.Option(help="evaluate the model at this OpenAI-compatible endpoint")] = None,
    model: Annotated[str | None, typer.Option(help="the model's name at the endpoint")] = None,
) -> None:
    """Accuracy and pass@k on held-out questions (data.test) or benchmarks; the same command continues a stopped one."""
    given = {"eval.samples": samples, "eval.endpoint": endpoint, "eval.endpoint_model": model}
    if benchmarks is None:
        given["eval.questions"] = questions
    settings = [*(overrides or []), *(f"{name}={value}" for name, value in given.items() if value is not None)]
    if endpoint is not None and target.partition("=")[0].replace(".", "").isidentifier() and "=" in target:
        target, settings = "", [target, *settings]  # without a model, the first argument is a setting
    if not target and endpoint is None:
        raise ArpoError("name what to evaluate: a run, a TOML file or a model; or give --endpoint and --model")
    if benchmarks is None and data_dir is not None:
        raise ArpoError("--data-dir: this goes with --benchmarks; data.test=... names a file of questions")
    ks = parse_ks(k or "1")
    config = load_model_config(target, settings) if target else load_config(None, settings)
    if benchmarks is None:
        _require_held_out(target, config)
        plan = _plan(config, target, out, ks, held_out=True)
        _run(config, plan, lambda tools, reporter: [_held_out(config, tools, reporter)])
        return
    names = tuple(dict.fromkeys(benchmarks.replace(",", " ").split()))
    if not names:
        raise ArpoError("--benchmarks: name some, like gsm8k,hotpotqa")
    if data_dir is not None and not data_dir.is_dir():
        raise ArpoError(f"--data-dir: there is no folder {str(data_dir)!r}")
    from arpo.evaluation.question_sets import benchmark_config, benchmark_sets

    plan = _plan(config, target, out, ks, held_out=False)
    sets = benchmark_sets(config, names, questions, data_dir, ConsoleReporter())
    _run(benchmark_config(config), plan, lambda tools, reporter: sets)


def parse_ks(text: str) -> tuple[int, ...]:
    """The numbers of `--k`, like "1,3,5"."""
    ks = text.replace(",", " ").split()
    if not ks or not all(each.isascii() and each.isdigit() and int(each) for each in ks):
        raise ArpoError(f"--k: got {text!r}, expected numbers from 1 on, like 1,3,5")
    return tuple(sorted(set(map(int, ks))))


def _require_held_out(target: str, config: Config) -> None:
    choices = "data.test=..., or benchmarks with --benchmarks"
    if target:
        require_questions(target, config, choices)
    elif not (config.data.test or config.data.train or config.data.mix):
        raise ArpoError(f"name questions for the endpoint: {choices}")
    require_test_source(config.data)


def _held_out(config: Config, tools: Toolset, reporter: ConsoleReporter) -> QuestionSet:
    from arpo.training.context import held_out_set

    return held_out_set(config, tools, reporter)


def _plan(config: Config, target: str, out: Path | None, ks: tuple[int, ...], held_out: bool) -> EvalPlan:
    """The plan of an evaluation, with a directory whose answers it can continue, if it holds any."""
    from arpo.evaluation.question_sets import EvalPlan, agent_name, answer_settings, build_endpoint
    from arpo.evaluation.samples import first_usable, require_same_settings

    build_endpoint(config.eval)  # before anything is loaded: are its settings complete?
    settings = answer_settings(config, held_out)
    if out is None:
        parts = re.findall(r"[\w.-]+", target or agent_name(config))
        name = "-".join(part for part in parts if part.strip("."))  # not those of ../runs
        default = EVALS_DIR / (f"{name}-test" if held_out else name)
        out = first_usable(default, settings)
        if out != default:
            console.print(f"{default} holds answers of other settings or weights; these go to {out}")
    require_same_settings(out, settings)
    return EvalPlan(out, config.eval.samples, ks)


def _run(
    config: Config, plan: EvalPlan, load_sets: Callable[[Toolset, ConsoleReporter], Sequence[QuestionSet]]
) -> None:
    """Ask, save and report; with the exit code 1 if answers failed."""
    from arpo.environments.build import build_toolset
    from arpo.evaluation.question_sets import open_evaluation
    from arpo.evaluation.report import write_results

    reporter = ConsoleReporter()
    with (
        build_toolset(config) as tools,
        open_evaluation(config, plan, load_sets(tools, reporter), tools, reporter) as run,
    ):
        try:
            run_async(run.answer_all())
        except asyncio.CancelledError:
            console.print(f"The answers so far are in {plan.out}; the same command continues from there.")
            raise
        results = run.results()
        files = write_results(plan.out, results)
        _show(results, config, tools)
    console.print(f"{', '.join(files)} and all answers are in {plan.out}")
    if results.failures:
        raise typer.Exit(1)


def _show(results: Results, config: Config, tools: Toolset) -> None:
    from arpo.algorithm.metrics import stop_warnings
    from arpo.evaluation.question_sets import HELD_OUT
    from arpo.evaluation.report import headline, parts_line, results_notes, results_table

    held_out = results.summaries.get(HELD_OUT)
    if held_out is not None:
        console.print(headline(held_out))
    print_table(*results_table(results))
    if held_out is not None and (line := parts_line(held_out)):
        console.print(line)
    for summary in results.summaries.values():
        for line in stop_warnings(summary.stops, config.rollout).values():
            console.print(line)
    for line in [*tool_lines(tools.stats()), *results_notes(results)]:
        console.print(line)
