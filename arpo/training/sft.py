"""Supervised fine-tuning on traces: the cold start of a model that has not used tools before.

A trace is trained on as a rollout's only path would be, by the same code: packed rows of tokens, of which those that
the model is to write count and nothing else. With every advantage 1 and no ratio to clip, the policy loss is the mean
negative log-likelihood of these tokens.

Promises: each epoch goes through all traces once, in an order of its own that follows from the seed, so a run that was
stopped and resumed equals one that was not (to the last bit on a CPU).
Does not cover: `train.steps`, `train.batch_size` and `train.minibatches`, which are those of `arpo train`; evaluation on
the way (`arpo eval RUN` does it afterwards).
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import accumulate, groupby

from arpo.agent.formats import build_format
from arpo.agent.traces import read_traces
from arpo.cli.display import SFT_HEADER, cold_start_progress, console, printable, progress_bar, sft_line
from arpo.config.schema import Config, Loss
from arpo.data.rows import list_problems, refuse_bad_rows
from arpo.models.resolve import load_policy
from arpo.tools.build import build_tools
from arpo.trainer.trainer import Trainer
from arpo.training.checkpoints import CheckpointManager, open_directory
from arpo.training.sft_examples import SFTExample, encode_trace
from arpo.types import derive_seed

RESUMABLE_KEYS = ("sft.epochs:", "sft.lr:", "train.steps:")  # when a run is resumed
RUN_KIND_METRIC = "epoch"  # what every record of such a run has
KEPT = ("loss", "grad_norm", "trained_tokens", "computed_tokens", "train_entropy")  # of a training step's metrics


@dataclass(frozen=True, slots=True)
class SFTRun:
    """A run of supervised fine-tuning: what is taught in each step, and what keeps it."""

    examples: Sequence[SFTExample]
    batches: Sequence[tuple[float, Sequence[int]]]  # per step: epochs done after it, and the indices of its examples
    keeper: CheckpointManager


@contextmanager
def open_sft(config: Config, resume: bool = False) -> Iterator[SFTRun]:
    """A new run in `run.dir`, or one that goes on there from its last checkpoint. Holds the directory until left."""
    with ExitStack() as stack:
        tools = stack.enter_context(build_tools(config))
        fmt = build_format(config.rollout.format, [tool.spec for tool in tools.values()])
        traces, problems = read_traces(config.sft.data, fmt)
        refuse_bad_rows(config.sft.data, "traces", traces, problems, config.data.bad_rows)
        examples: list[SFTExample] = []

        def load(latest: Config) -> Trainer:
            with cold_start_progress(latest.coldstart.steps) as progress:
                model, tokenizer = load_policy(latest, progress)
            encoded = [encode_trace(trace, tokenizer, fmt, config.tools.result_tokens) for trace in traces]
            examples.extend(_fitting(encoded, model.config.max_position_embeddings, config, problems))
            return Trainer(model, tokenizer, objective(config))

        keeper = stack.enter_context(open_directory(config, resume, load, RESUMABLE_KEYS, RUN_KIND_METRIC))
        counts = [example.num_tokens for example in examples]
        yield SFTRun(examples, plan(counts, config.sft.batch_tokens, config.sft.epochs, config.seed), keeper)


def _fitting(examples: Sequence[SFTExample], context: int, config: Config, problems: Sequence[str]) -> list[SFTExample]:
    """The examples that fit into the model's context; what is left out is printed, bad rows included."""
    too_long = [
        f"{config.sft.data}, {example.task.id}: has {example.num_tokens} tokens, but the model's context holds {context}"
        for example in examples
        if example.num_tokens > context
    ]
    fitting = [example for example in examples if example.num_tokens <= context]
    refuse_bad_rows(config.sft.data, "traces", fitting, too_long, config.data.bad_rows)
    left_out = [*problems, *too_long]
    if left_out:
        console.print(f"{len(left_out):,} of {len(examples) + len(problems):,} traces are left out:")
        console.print(printable(list_problems(left_out)))
    return fitting


def objective(config: Config) -> Config:
    """The settings under which a training step on trees is one of supervised fine-tuning."""
    train = config.train.model_copy(
        update={"lr": config.sft.lr, "warmup_steps": config.sft.warmup_steps, "minibatches": 1}
    )
    rollout = config.rollout.model_copy(update={"temperature": 1.0})
    loss = Loss(kind="cispo", aggregation="token-mean")
    return config.model_copy(update={"train": train, "rollout": rollout, "loss": loss})


def plan(counts: Sequence[int], batch_tokens: int, epochs: int, seed: int) -> list[tuple[float, list[int]]]:
    """For every step the epochs done after it, and its traces. An epoch is cut into steps of nearly equal size: the
    fewest that have `batch_tokens` on average, or less."""
    steps: list[tuple[float, list[int]]] = []
    total = sum(counts)
    parts = -(-total // batch_tokens)
    for epoch in range(epochs):
        order = list(range(len(counts)))
        random.Random(derive_seed(seed, "sft", epoch)).shuffle(order)
        starts = accumulate((counts[number] for number in order), initial=0)
        before = 0
        for _, group in groupby(zip(order, starts, strict=False), key=lambda item: item[1] * parts // total):
            batch = [number for number, _ in group]
            before += len(batch)
            steps.append((epoch + before / len(order), batch))
    return steps


async def train_sft(run: SFTRun) -> int:
    """Train to the end of the last epoch; returns the last step done."""
    keeper, step, last = run.keeper, run.keeper.step, len(run.batches)
    if step >= last:
        console.print(f"Nothing to do: the run is at step {step} of {last}.")
        return step
    console.print(f"{len(run.examples):,} traces, {last:,} steps")
    console.print(SFT_HEADER)
    with progress_bar("teaching", last) as bar:
        while step < last:
            bar.update(bar.task_ids[0], completed=step)
            with keeper.saving(step):
                await asyncio.sleep(0.001)  # long enough for a Ctrl-C to get through
            metrics = _step(run, step)
            step += 1
            keeper.record(step, metrics)
            console.print(sft_line(step, metrics))
            keeper.step_done(step, last)
    return step


def _step(run: SFTRun, step: int) -> dict[str, float]:
    started = time.monotonic()
    epoch, numbers = run.batches[step]
    examples = [run.examples[number] for number in numbers]
    learnt = run.keeper.trainer.update([example.scored_tree() for example in examples])
    numbers_of = {name: learnt[name] for name in KEPT}
    return {"epoch": epoch, "traces": len(examples), **numbers_of, "train_seconds": time.monotonic() - started}
