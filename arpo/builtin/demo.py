"""The demo: a small agent learns to use its tools better, in plain words and on any machine."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from importlib import resources
from itertools import count
from pathlib import Path
from typing import Any

from arpo.cli.display import console
from arpo.config.loading import load_config
from arpo.evaluation.evaluate import Evaluation
from arpo.training.loop import Run, open_run, test, train

INTRODUCTION = """\
A small language model must answer questions about a made-up world. It knows none of the facts: it has a search tool for
the world's documents and Python in a sandbox. Its cold start taught it how to call them, from examples full of
mistakes. Now ARPO lets it try each question along several paths, with more of them where it was unsure after a tool
result, and makes what led to right answers likelier."""


def run_demo(seed: int, run_async: Callable[[Coroutine[Any, Any, Any]], Any]) -> None:
    """Cold start, ARPO, and accuracy on held-out questions before and after."""
    with resources.as_file(resources.files("arpo.builtin").joinpath("demo.toml")) as path:
        config = load_config(path, [f"seed={seed}", f"run.dir={_free_directory()}"])
    console.print(INTRODUCTION + "\n")
    with open_run(config) as run:
        before, after = run_async(_learn(run))
        _conclude(run, before, after)


async def _learn(run: Run) -> tuple[Evaluation, Evaluation]:
    tests = run.session.tasks.test
    console.print(f"For example: {tests[0].question} (Answer: {tests[0].answers[0]})")
    before = await test(run.session)
    console.print(f"Before: {before.accuracy:.0%} of {len(before.trees)} held-out questions right.\n")
    await train(run)
    return before, await test(run.session)


def _conclude(run: Run, before: Evaluation, after: Evaluation) -> None:
    console.print(f"\n{'held-out questions':<20} {'before':>7} {'after':>7}")
    for kind, accuracy in before.by_kind().items():
        console.print(f"  {kind:<18} {accuracy:>7.0%} {after.by_kind()[kind]:>7.0%}")
    console.print(f"{'all':<20} {before.accuracy:>7.1%} {after.accuracy:>7.1%}", style="bold")
    console.print(f"{'right format':<20} {before.format_rate:>7.0%} {after.format_rate:>7.0%}")
    console.print(f"{'tool calls a question':<20} {before.tool_calls:>6.2f} {after.tool_calls:>7.2f}")
    calls = sum(line["tool_calls"] for line in run.log.read_metrics())
    console.print(
        f"\nARPO changed held-out accuracy by {100 * (after.accuracy - before.accuracy):+.0f} points with {calls:,.0f}"
        f" tool calls.\nThe run, with every tree it sampled, is in {run.log.directory}; see it, or ask it something:"
        f"\n  arpo view {run.log.directory}"
        f"\n  arpo rollout {run.log.directory} --number 3"
    )


def _free_directory() -> Path:
    """runs/demo, or runs/demo-2, ... if that is taken."""
    names = (Path("runs") / (f"demo-{n}" if n > 1 else "demo") for n in count(1))
    return next(path for path in names if not path.exists())
