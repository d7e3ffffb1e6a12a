"""The command line. A mistake of the user's ends with one clear message and exit code 2, a run that
stopped because it collapsed with 3, Ctrl-C with 130."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import io
import json
import random
import sys
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from arpo.cli.base import Overrides, config_of, model_config, run_async
from arpo.cli.data import data_app, index_app
from arpo.cli.display import ConsoleReporter, console, print_tree, tool_lines
from arpo.cli.plan import plan
from arpo.cli.study import compare, entropy
from arpo.cli.view import show, view
from arpo.config.loading import load_config
from arpo.errors import ArpoError, Collapsed
from arpo.trainer.dist import launch
from arpo.types import ScoredTree, Task, derive_seed

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from arpo.evaluation.evaluate import Evaluation
    from arpo.tools.executor import Toolset

HELP = "Train language models that use tools, with ARPO. Start with `arpo demo`."
app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=HELP)
app.add_typer(index_app, name="index")
app.add_typer(data_app, name="data")
app.command()(compare)
app.command()(entropy)
app.command()(plan)
app.command()(view)
app.command()(show)
ConfigFile = Annotated[Path, typer.Argument(help="a TOML file with settings")]
# Of a chat, below what the user gives: calmer than in training, one path at a time, and nothing is rewarded.
CHAT_SETTINGS = ("rollout.temperature=0.7", "rollout.concurrency=1", "reward.bonus=0")


def main() -> None:
    """Run the command line."""
    try:
        if launch.world_size() > 1 and "train" not in sys.argv[1:2]:
            raise ArpoError("only `arpo train` runs on several ranks: leave out torchrun, or use --nproc-per-node 1")
        app()
    except Collapsed as collapse:
        print(f"stopped: {collapse}", file=sys.stderr)
        sys.exit(3)
    except ArpoError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:  # a folder that may not be read, a full disk
        if error.filename is None:
            raise
        print(f"error: {error.filename}: {error.strerror}", file=sys.stderr)
        sys.exit(2)
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("stopped", file=sys.stderr)
        sys.exit(130)


@app.command()
def train(
    config: ConfigFile,
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option(help="go on from the run's last checkpoint")] = False,
) -> None:
    """Train a model as CONFIG says; everything goes to run.dir."""
    settings = load_config(config, overrides or ())  # before all that takes seconds to import
    from arpo.training.loop import open_training
    from arpo.training.loop import train as run_training

    reporter = ConsoleReporter()
    with ExitStack() as stack:
        group = build_sampler = None
        if settings.cluster.address is not None:
            from arpo.cluster.connect import connect

            build_sampler = stack.enter_context(connect(settings, reporter))
        if launch.world_size() > 1:
            from arpo.models.load import pick_device
            from arpo.trainer.dist.process_group import join_process_group
            from arpo.trainer.dist.worker import worker_loop

            group = stack.enter_context(join_process_group(pick_device(settings.model.device)))
            if not group.is_leader:
                return worker_loop(group)
        with open_training(settings, resume, group, build_sampler, reporter) as training:
            _run_to_the_end(run_training(training), training.checkpoints.run.directory)


@app.command()
def sft(
    config: ConfigFile,
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option(help="go on from the run's last checkpoint")] = False,
) -> None:
    """Teach a model the traces in sft.data, as a cold start; everything goes to run.dir."""
    settings = load_config(config, overrides or ())
    from arpo.training.sft import open_sft, train_sft

    with open_sft(settings, resume, ConsoleReporter()) as run:
        _run_to_the_end(train_sft(run), run.checkpoints.run.directory)


def _run_to_the_end(work: Coroutine[None, None, int], directory: Path) -> None:
    """Train; whoever stops it is told how to go on."""
    try:
        last = run_async(work)
    except asyncio.CancelledError:
        print(f"stopped; what was trained is saved in {directory}, go on with --resume", file=sys.stderr)
        raise typer.Exit(130) from None
    console.print(f"done: {last} steps; the run is in {directory}")


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="a run's directory")],
    directory: Annotated[Path, typer.Argument(help="where the model goes: a new or empty directory")],
    step: Annotated[int | None, typer.Option(min=1, help="the checkpoint of this step; the last if not given")] = None,
) -> None:
    """Write the model of a checkpoint as a plain Hugging Face directory; an adapter is merged into its base."""
    from arpo.models.export import export_model

    done = export_model(run, directory, step)
    console.print(f"the model of step {done} is in {directory}")


@app.command(name="eval")
def evaluate(
    target: Annotated[
        str,
        typer.Argument(
            help="a run's directory (its last checkpoint is used) or a TOML file; with --benchmarks also a Hugging "
            "Face directory, a hub name or a .gguf file; with --endpoint only settings, if any"
        ),
    ] = "",
    overrides: Overrides = None,
    benchmarks: Annotated[str | None, typer.Option(help="names, like gsm8k,hotpotqa: docs/evaluation.md")] = None,
    k: Annotated[str | None, typer.Option(help="pass@k for these, like 1,3,5; 1 if not given")] = None,
    samples: Annotated[int | None, typer.Option(min=1, help="answers per question (eval.samples)")] = None,
    questions: Annotated[int | None, typer.Option(min=1, help="the first so many of each set")] = None,
    data_dir: Annotated[Path | None, typer.Option(help="folder of NAME.jsonl or .parquet; else the hub")] = None,
    out: Annotated[Path | None, typer.Option(help="directory for answers and results; evals/MODEL if none")] = None,
    endpoint: Annotated[str | None, typer.Option(help="ask this OpenAI-compatible endpoint, not a model")] = None,
    model: Annotated[str | None, typer.Option(help="the model's name at the endpoint")] = None,
) -> None:
    """Accuracy on held-out questions, or on benchmarks, where a stopped evaluation goes on if started again."""
    settings = {"eval.samples": samples, "eval.endpoint": endpoint, "eval.endpoint_model": model}
    given = [*(overrides or []), *(f"{name}={value}" for name, value in settings.items() if value is not None)]
    if endpoint is not None and target.partition("=")[0].replace(".", "").isidentifier() and "=" in target:
        target, given = "", [target, *given]  # no model, so what stands in its place is a setting
    if not target and endpoint is None:
        raise ArpoError("name what is to be evaluated: a run, a TOML file or a model; or give --endpoint and --model")
    if benchmarks is not None:
        from arpo.evaluation.benchmarks import run_benchmarks, the_plan

        config = model_config(target, given) if target else load_config(None, given)
        plan = the_plan(config, target, benchmarks, k or "1", questions, data_dir, out)
        if run_benchmarks(config, plan, run_async).failures:
            raise typer.Exit(1)
        return
    if k or endpoint or model or data_dir or out:
        raise ArpoError("--k, --data-dir, --out, --endpoint and --model need --benchmarks")
    given += [] if questions is None else [f"eval.questions={questions}"]
    if not Path(target).exists() and not target.endswith(".toml"):
        raise ArpoError(f"{target}: a model alone has no questions: give a run or a TOML file, or name --benchmarks")
    config = config_of(Path(target), given)
    from arpo.training.context import open_context
    from arpo.training.loop import evaluate_policy
    from arpo.training.sampler import LocalSampler

    reporter = ConsoleReporter()
    with closing(open_context(config, reporter)) as context:
        work = evaluate_policy(LocalSampler(context), context.tasks, config, reporter)
        _show_evaluation(run_async(work), context.tools)


@app.command()
def rollout(
    target: Annotated[Path, typer.Argument(help="a run's directory (its last checkpoint is used) or a TOML file")],
    overrides: Overrides = None,
    number: Annotated[int, typer.Option(min=0, help="which held-out question")] = 0,
    ask: Annotated[
        str | None, typer.Option(help="ask this instead (the answer is not known, so nothing is right)")
    ] = None,
) -> None:
    """Grow the tree of one question and show it."""
    from arpo.algorithm.rollout import rollout as grow
    from arpo.training.context import open_context
    from arpo.training.loop import require_test_tasks

    with closing(open_context(config_of(target, overrides or []), ConsoleReporter())) as context:
        held_out = context.tasks.test
        if ask is None and number >= len(held_out) > 0:
            raise ArpoError(f"--number {number}: there are {len(held_out)} held-out questions, counted from 0")
        if ask is None:
            require_test_tasks(context.tasks)
        try:
            task = held_out[number] if ask is None else Task("asked", ask, ("unknown",))
        except ValueError as error:
            raise ArpoError(f"--ask: {error}") from None
        config = context.config
        seed = derive_seed(config.seed, "show", number)
        tree = run_async(grow(context.agent, task, config.rollout, config.branching, seed))
        print_tree(ScoredTree(tree, tuple(map(context.reward, tree.trajectories))))
        shared = 1 - tree.unique_tokens / tree.total_tokens
        console.print(
            f"{len(tree.leaves)} trajectories, {tree.tool_calls} tool calls, {tree.branch_points} branch points, "
            f"{shared:.0%} of tokens shared"
        )


@app.command()
def chat(
    model: Annotated[
        str,
        typer.Argument(
            help='"tiny" (built in), a Hugging Face directory, a hub name, a .gguf file, a run\'s directory (its last '
            "checkpoint is used) or a TOML file"
        ),
    ],
    overrides: Overrides = None,
    tools: Annotated[str | None, typer.Option(help='tools the model may call, like python,search; "" for none')] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="repeats a conversation; fresh if not given")] = None,
) -> None:
    """Talk to a model and watch it call tools. The temperature is 0.7 unless rollout.temperature=... is given here."""
    from arpo.agent.conversation import Conversation
    from arpo.cli.chat import Screen, open_agent
    from arpo.cli.chat import chat as run_chat

    given = [] if tools is None else [f"tools.enabled={json.dumps(tools.replace(',', ' ').split())}"]
    config = model_config(model, [*CHAT_SETTINGS, *(overrides or []), *given])
    seed = random.SystemRandom().randrange(2**32) if seed is None else seed
    try:
        with open_agent(config) as agent:
            screen = Screen(console, agent.tokenizer)
            names = ", ".join(agent.tools) or "none"
            screen.note(f"{model}; tools: {names}; temperature {config.rollout.temperature:g}; seed {seed}; /help")
            conversation = Conversation(agent, config.rollout, config.branching.probe_tokens, seed)
            run_chat(conversation, screen, *_reader())
    except KeyboardInterrupt:  # typer would swallow it, and with it the message of `main`
        raise asyncio.CancelledError from None


def _reader() -> tuple[Callable[[], str], bool]:
    """Reads one line of what the user types, or of what is piped in; and whether there is a person to go on with."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    if not sys.stdin.isatty():
        return input, False
    with contextlib.suppress(ImportError):
        importlib.import_module("readline")  # makes `input` edit lines and remember them
    return lambda: input("> "), True


@app.command()
def doctor() -> None:
    """What is here: versions, devices, memory, which engines and tools can run, and why not."""
    from arpo.cli.doctor import report

    for what, usable, details in report():
        console.print("ok " if usable else "no ", style="green" if usable else "yellow", end="")
        console.print(f" {what:<18} {details}")


@app.command()
def demo(seed: Annotated[int, typer.Option(min=0, help="decides all randomness of the run")] = 0) -> None:
    """Watch a small agent learn to use tools: a few minutes on a laptop."""
    from arpo.builtin.demo import run_demo

    run_demo(seed, run_async, ConsoleReporter())


def _show_evaluation(result: Evaluation, tools: Toolset) -> None:
    console.print(f"accuracy {result.accuracy:.1%} over {len(result.trees)} questions")
    for kind, accuracy in result.by_kind().items():
        console.print(f"  {kind:<12} {accuracy:.1%}")
    for name, count in result.faults.items():
        console.print(f"  {count:.0f} answers count as wrong because they could not be judged: {name}")
    console.print(f"right format {result.format_rate:.1%}, {result.tool_calls:.2f} tool calls per trajectory")
    for line in tool_lines(tools.stats()):
        console.print(line)
