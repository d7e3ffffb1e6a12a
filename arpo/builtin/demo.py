"""The demo: a small agent learns to use its tools better, in plain words and on any machine."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from importlib import resources
from itertools import count
from pathlib import Path
from typing import Any

from arpo.builtin import scenes
from arpo.builtin.world import KINDS
from arpo.config.loading import load_config
from arpo.evaluation.statistics import evaluation_record
from arpo.runs.reporter import Reporter
from arpo.training.loop import Training, evaluate_policy, open_training, train
from arpo.types import Task

INTRODUCTION = """\
A small language model must answer questions about a made-up world. It knows none of the facts: it has a search tool for
the world's documents and Python in a sandbox. Its cold start taught it how to call them, from examples full of
mistakes. Now ARPO lets it try each question several times, with more tries where it was unsure after a tool result,
and makes what led to right answers likelier."""
VISION_INTRODUCTION = """\
A small model that sees must read digits in pictures. It sees a picture in 64 x 64 pixels, which show where things are,
but no digits: for these it has to zoom in with the tool crop. Its examples taught it how; most of them guess instead,
or look at the wrong place. Now ARPO lets it try each question several times, and makes what led to right answers
likelier."""


def run_demo(
    seed: int, run_async: Callable[[Coroutine[Any, Any, Any]], Any], reporter: Reporter, vision: bool = False
) -> None:
    """ARPO on the world, or with `vision` on the scenes, and accuracy on held-out questions of each kind before and
    after; the run keeps both."""
    name = "vision_demo" if vision else "demo"
    with resources.as_file(resources.files("arpo.builtin").joinpath(f"{name}.toml")) as path:
        config = load_config(path, [f"seed={seed}", f"run.dir={_free_directory(name)}"])
    reporter.message((VISION_INTRODUCTION if vision else INTRODUCTION) + "\n")
    with open_training(config, reporter=reporter) as training:
        before, after = run_async(_learn(training))
        reporter.message(_conclusion(training, before, after))


async def _learn(training: Training) -> tuple[dict[str, Any], dict[str, Any]]:
    """Test, train, test again; returns the two evaluations as they are recorded."""
    tested = choose_held_out(training.tasks.test, training.config.eval.questions)
    training.reporter.message(f"For example: {tested[0].question} (Answer: {tested[0].answers[0]})")
    before = await _test(training, tested, 0)
    right = before["accuracy"]
    training.reporter.message(f"Before: {right['value']:.0%} right on {right['questions']} held-out questions.\n")
    return before, await _test(training, tested, await train(training))


async def _test(training: Training, tasks: Sequence[Task], step: int) -> dict[str, Any]:
    """Test the weights after `step` on these tasks; returns the evaluation as it is recorded."""
    held_out = replace(training.tasks, test=tuple(tasks))
    record = evaluation_record(await evaluate_policy(training.sampler, held_out, training.config, training.reporter))
    training.checkpoints.run.write_evaluation(step, record)
    return record


def choose_held_out(tasks: Sequence[Task], questions: int) -> list[Task]:
    """The first tasks of each kind, equally many and `questions` in all, so that rare kinds are tested, too."""
    kinds = [kind for kind in dict.fromkeys((*KINDS, *scenes.KINDS)) if any(task.kind == kind for task in tasks)]
    each = max(1, questions // max(1, len(kinds)))
    return [task for kind in kinds for task in [task for task in tasks if task.kind == kind][:each]]


def _conclusion(training: Training, before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    run = training.checkpoints.run
    calls = sum(record["tool_calls"] for record in run.read_metrics())
    gain = after["accuracy"]["value"] - before["accuracy"]["value"]
    return "\n".join(
        [
            "",
            *comparison_table(before, after),
            f"\nARPO changed held-out accuracy by {100 * gain:+.0f} points with {calls:,.0f} tool calls.",
            loss_line(before, after),
            f"The run, with every tree it sampled, is in {run.directory}; look at it, or ask it something:",
            f"  arpo view {run.directory}",
            f"  arpo rollout {run.directory} --number 3",
        ]
    )


def comparison_table(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """The lines of a table of two evaluations (`evaluation_record`) of the same questions."""
    pairs = {f"  {kind}": (found, after["by_kind"][kind]) for kind, found in before["by_kind"].items()}
    pairs["all"] = (before["accuracy"], after["accuracy"])
    return [
        f"{'held-out questions':<22}{'n':>5}{'before, %':>23}{'after, %':>23}",
        *(
            f"{name:<22}{one['questions']:>5}{_interval(one):>23}{_interval(other):>23}"
            for name, (one, other) in pairs.items()
        ),
        f"{'right format, %':<27}{100 * before['format']:>23.1f}{100 * after['format']:>23.1f}",
        f"{'tool calls per answer':<27}{before['tool_calls']:>23.2f}{after['tool_calls']:>23.2f}",
        f"{before['accuracy']['questions']:,} questions with {before['answers']:,} answers; in brackets 95 % Wilson "
        "intervals over questions.",
    ]


def _interval(found: Mapping[str, float]) -> str:
    value, low, high = (100 * found[name] for name in ("value", "low", "high"))
    return f"{value:.1f} ({low:.1f} to {high:.1f})"


def loss_line(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """Says which kinds of question are answered worse than before."""
    changes = {kind: (found["value"], after["by_kind"][kind]["value"]) for kind, found in before["by_kind"].items()}
    worse = [f"{kind} ({one:.1%} before, {other:.1%} after)" for kind, (one, other) in changes.items() if other < one]
    return f"Worse than before: {', '.join(worse)}." if worse else "No kind of question is answered worse than before."


def _free_directory(name: str) -> Path:
    """runs/NAME, or runs/NAME-2, ... if that is taken."""
    names = (Path("runs") / (f"{name}-{n}" if n > 1 else name) for n in count(1))
    return next(path for path in names if not path.exists())
