"""The demo: a small agent learns to use its tools better, in plain words and on any machine."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from importlib import resources
from itertools import count
from pathlib import Path
from typing import Any

from arpo.config.loading import load_config
from arpo.evaluation.evaluate import Evaluation
from arpo.runs.reporter import Reporter
from arpo.training.loop import Training, evaluate_policy, open_training, train

INTRODUCTION = """\
A small language model must answer questions about a made-up world. It knows none of the facts: it has a search tool for
the world's documents and Python in a sandbox. Its cold start taught it how to call them, from examples full of
mistakes. Now ARPO lets it try each question several times, with more tries where it was unsure after a tool result,
and makes what led to right answers likelier."""


def run_demo(seed: int, run_async: Callable[[Coroutine[Any, Any, Any]], Any], reporter: Reporter) -> None:
    """Cold start, ARPO, and accuracy on held-out questions before and after."""
    with resources.as_file(resources.files("arpo.builtin").joinpath("demo.toml")) as path:
        config = load_config(path, [f"seed={seed}", f"run.dir={_free_directory()}"])
    reporter.message(INTRODUCTION + "\n")
    with open_training(config, reporter=reporter) as training:
        before, after = run_async(_learn(training))
        reporter.message(_conclusion(training, before, after))


async def _learn(training: Training) -> tuple[Evaluation, Evaluation]:
    tasks, reporter = training.tasks, training.reporter
    reporter.message(f"For example: {tasks.test[0].question} (Answer: {tasks.test[0].answers[0]})")
    before = await evaluate_policy(training.sampler, tasks, training.config, reporter)
    reporter.message(f"Before: {before.accuracy:.0%} of {len(before.trees)} held-out questions right.\n")
    await train(training)
    return before, await evaluate_policy(training.sampler, tasks, training.config, reporter)


def _conclusion(training: Training, before: Evaluation, after: Evaluation) -> str:
    run = training.checkpoints.run
    calls, gain = sum(record["tool_calls"] for record in run.read_metrics()), after.accuracy - before.accuracy
    by_kind = after.by_kind()
    return "\n".join(
        [
            f"\n{'held-out questions':<20} {'before':>7} {'after':>7}",
            *(f"  {kind:<18} {accuracy:>7.0%} {by_kind[kind]:>7.0%}" for kind, accuracy in before.by_kind().items()),
            f"{'all':<20} {before.accuracy:>7.1%} {after.accuracy:>7.1%}",
            f"{'right format':<20} {before.format_rate:>7.0%} {after.format_rate:>7.0%}",
            f"{'tool calls a question':<20} {before.tool_calls:>6.2f} {after.tool_calls:>7.2f}",
            f"\nARPO changed held-out accuracy by {100 * gain:+.0f} points with {calls:,.0f} tool calls.",
            f"The run, with every tree it sampled, is in {run.directory}; look at it, or ask it something:",
            f"  arpo view {run.directory}",
            f"  arpo rollout {run.directory} --number 3",
        ]
    )


def _free_directory() -> Path:
    """runs/demo, or runs/demo-2, ... if that is taken."""
    names = (Path("runs") / (f"demo-{n}" if n > 1 else "demo") for n in count(1))
    return next(path for path in names if not path.exists())
