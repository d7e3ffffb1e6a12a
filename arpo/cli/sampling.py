"""`arpo rollout` and `arpo chat`: let a model answer on the terminal."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import io
import json
import random
import sys
from contextlib import closing
from typing import TYPE_CHECKING, Annotated

import typer

from arpo.cli.display import ConsoleReporter, console, print_tree
from arpo.cli.options import ModelTarget, Overrides, load_model_config, require_questions
from arpo.errors import ArpoError
from arpo.training.interrupt import run_async
from arpo.types import ScoredTree, Task, derive_seed

if TYPE_CHECKING:
    from arpo.config.schema import Config

# Defaults of a chat: a lower temperature than in training, one sequence at a time, no bonus.
CHAT_SETTINGS = ("rollout.temperature=0.7", "rollout.concurrency=1", "reward.bonus=0")


def rollout(
    target: ModelTarget,
    overrides: Overrides = None,
    number: Annotated[
        int,
        typer.Option(min=0, help="which held-out question, from 0; a training question if none is held out"),
    ] = 0,
    ask: Annotated[str | None, typer.Option(help="ask this instead; it is not scored")] = None,
    image: Annotated[list[str] | None, typer.Option(help="an image file that goes with --ask; may be repeated")] = None,
) -> None:
    """Sample the rollout tree of one question and print it."""
    config = load_model_config(target, overrides or [])
    if image and ask is None:
        raise ArpoError("--image goes with --ask; held-out questions have their own images")
    if ask is None:
        require_questions(target, config, "data.test=... or data.train=..., or ask one with --ask")
    scored = _sample_question(config, number) if ask is None else _sample_asked(config, ask, image or [])
    tree = scored.tree
    print_tree(scored)
    shared = 1 - tree.unique_tokens / tree.total_tokens
    console.print(
        f"{len(tree.leaves)} trajectories, {tree.tool_calls} tool calls, {tree.branch_points} branch points, "
        f"{shared:.0%} of tokens shared"
    )


def _sample_question(config: Config, number: int) -> ScoredTree:
    """The scored tree of a held-out question, or of a training question if none is held out."""
    from arpo.training.context import open_context
    from arpo.training.sampler import LocalSampler

    with closing(open_context(config, ConsoleReporter())) as context:
        tasks, what = context.tasks.test, "held-out"
        if not tasks:
            tasks, what = context.tasks.train, "training"
        if number >= len(tasks):
            raise ArpoError(f"--number {number}: there are {len(tasks)} {what} questions, counted from 0")
        seed = derive_seed(config.seed, "show", number)
        [scored] = run_async(LocalSampler(context).sample([tasks[number]], [seed]))
        return scored


def _sample_asked(config: Config, question: str, images: list[str]) -> ScoredTree:
    """The tree of a question that was asked; it needs neither tasks nor a reward."""
    from arpo.algorithm.rollout import rollout as sample_tree
    from arpo.cli.chat import open_agent
    from arpo.data.row_images import given_images

    try:
        task = Task("asked", question, images=given_images(images))
    except ValueError as error:
        raise ArpoError(f"--ask: {error}") from None
    with open_agent(config) as agent:
        seed = derive_seed(config.seed, "show", 0)
        return ScoredTree(run_async(sample_tree(agent, task, config.rollout, config.branching, seed)))


def chat(
    model: ModelTarget,
    overrides: Overrides = None,
    tools: Annotated[str | None, typer.Option(help='tools the model may call, like python,search; "" for none')] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="repeats a conversation; default: random")] = None,
) -> None:
    """Talk to a model and watch it call tools. The temperature is 0.7 unless rollout.temperature=... is given here."""
    from arpo.agent.conversation import Conversation
    from arpo.cli.chat import Screen, open_agent
    from arpo.cli.chat import chat as run_chat

    enabled = [] if tools is None else [f"tools.enabled={json.dumps(tools.replace(',', ' ').split())}"]
    config = load_model_config(model, [*CHAT_SETTINGS, *(overrides or []), *enabled])
    seed = random.SystemRandom().randrange(2**32) if seed is None else seed
    interactive = _prepare_input()
    try:
        with open_agent(config) as agent:
            screen = Screen(console, agent.tokenizer)
            names = ", ".join(agent.tools) or "none"
            screen.note(f"{model}; tools: {names}; temperature {config.rollout.temperature:g}; seed {seed}; /help")
            conversation = Conversation(agent, config.rollout, config.branching.probe_tokens, seed)
            run_chat(conversation, screen, lambda: input("> " if interactive else ""), interactive)
    except KeyboardInterrupt:  # typer would swallow it, and with it the message of `main`
        raise asyncio.CancelledError from None


def _prepare_input() -> bool:
    """Accept any bytes as input, and edit lines if a person types; returns whether a person does."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    if not sys.stdin.isatty():
        return False
    with contextlib.suppress(ImportError):
        importlib.import_module("readline")  # lets `input` edit lines and remember them
    return True
