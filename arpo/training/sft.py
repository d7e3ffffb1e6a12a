"""Supervised fine-tuning on traces: the cold start of a model that has not used tools before.

A trace is trained on like the only trajectory of a rollout, by the same code: packed rows of tokens, of which only
those that the model is to write count. With every advantage 1 and no ratio to clip, the policy loss is the mean
negative log-likelihood of these tokens.

Guarantees: each epoch goes through all traces once, in an order that follows from the seed, so a run that was stopped
and resumed equals one that was not (to the last bit on a CPU).
Not covered: `train.steps`, `train.batch_size`, `train.minibatches` and `train.epochs`, which belong to `arpo train`;
evaluation during training (`arpo eval RUN` does it afterwards).
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import accumulate, groupby

from arpo.agent.agent import build_prompts, call_format
from arpo.agent.formats import CallFormat
from arpo.agent.traces import TraceReading, read_traces
from arpo.config.algorithm import Loss
from arpo.config.schema import Config
from arpo.data.rows import list_problems, refuse_bad_rows
from arpo.environments.build import build_toolset
from arpo.models.resolve import load_policy
from arpo.models.threads import describe_threads
from arpo.models.vision import vision_tower
from arpo.runs.reporter import SILENT, Reporter
from arpo.trainer.trainer import Trainer
from arpo.training.checkpoints import CheckpointManager, find_start
from arpo.training.sft_examples import SFTExample, encode_trace
from arpo.types import derive_seed

RESUMABLE_KEYS = (  # when a run is resumed; an algorithm is not used
    "sft.epochs:",
    "sft.lr:",
    "train.steps:",
    "branching.",
    "advantage.",
    "loss.",
)
RUN_KIND_METRIC = "epoch"  # every record of such a run has it
UPDATE_METRICS = ("loss", "grad_norm", "trained_tokens", "computed_tokens", "train_entropy")  # that are logged


@dataclass(frozen=True, slots=True)
class SFTRun:
    """An open run of supervised fine-tuning."""

    examples: Sequence[SFTExample]
    batches: Sequence[tuple[float, Sequence[int]]]  # per step: epochs done after it, and the examples it takes
    checkpoints: CheckpointManager
    reporter: Reporter


@contextmanager
def open_sft(config: Config, resume: bool = False, reporter: Reporter = SILENT) -> Iterator[SFTRun]:
    """A new run in `run.dir`, or the run there from its last checkpoint. The directory is locked inside the block."""
    with ExitStack() as stack:
        tools = stack.enter_context(build_toolset(config))
        reading = None
        if config.rollout.format in ("tags", "json") and config.answer.parse in (None, "tag"):
            # other formats and ends of answers depend on the tokenizer
            reading = _read_traces(config, call_format(config, tools))
        start = stack.enter_context(find_start(config, resume, RESUMABLE_KEYS, RUN_KIND_METRIC, reporter))
        model, tokenizer = load_policy(start.config, reporter, start.checkpoint)
        prompts = build_prompts(config, tools, tokenizer, model.config.max_position_embeddings)
        traces, problems = reading or _read_traces(config, prompts.format)
        limit, tower = config.tools.max_result_tokens, vision_tower(model)
        encoded = [
            encode_trace(trace, tokenizer, prompts.format, limit, prompts.system_prompt(trace.task), tower)
            for trace in traces
        ]
        examples = _fitting(encoded, model.config.max_position_embeddings, config, problems, reporter)
        trainer = Trainer(model, tokenizer, objective(config), reporter=reporter)
        checkpoints = stack.enter_context(start.open(trainer, reporter))
        counts = [example.num_tokens for example in examples]
        batches = plan_steps(counts, config.sft.batch_tokens, config.sft.epochs, config.seed)
        yield SFTRun(examples, batches, checkpoints, reporter)


def _read_traces(config: Config, fmt: CallFormat) -> TraceReading:
    reading = read_traces(config.sft.data, fmt)
    refuse_bad_rows(config.sft.data, "traces", reading.traces, reading.problems, config.data.bad_rows)
    return reading


def _fitting(
    examples: Sequence[SFTExample], max_context: int, config: Config, problems: Sequence[str], reporter: Reporter
) -> list[SFTExample]:
    """The examples that fit into the model's context; what is left out, here and when reading, is reported."""
    too_long = [
        f"{config.sft.data}, {example.task.id}: has {example.num_tokens} tokens, but the model's context holds "
        f"{max_context}"
        for example in examples
        if example.num_tokens > max_context
    ]
    fitting = [example for example in examples if example.num_tokens <= max_context]
    refuse_bad_rows(config.sft.data, "traces", fitting, too_long, config.data.bad_rows)
    left_out = [*problems, *too_long]
    if left_out:
        reporter.message(f"{len(left_out):,} of {len(examples) + len(problems):,} traces are left out:")
        reporter.message(list_problems(left_out))
    return fitting


def objective(config: Config) -> Config:
    """The settings under which a training step on trees is supervised fine-tuning."""
    train = config.train.model_copy(
        update={"lr": config.sft.lr, "warmup_steps": config.sft.warmup_steps, "minibatches": 1, "epochs": 1}
    )
    rollout = config.rollout.model_copy(update={"temperature": 1.0})
    loss = Loss(kind="cispo", aggregation="token-mean")
    return config.model_copy(update={"train": train, "rollout": rollout, "loss": loss})


def plan_steps(counts: Sequence[int], batch_tokens: int, epochs: int, seed: int) -> list[tuple[float, list[int]]]:
    """For every step the epochs done after it, and its examples, which have `counts` tokens.

    An epoch is divided into steps of nearly equal size: the fewest that have `batch_tokens` on average, or less.
    """
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
    checkpoints, reporter, last = run.checkpoints, run.reporter, len(run.batches)
    step = checkpoints.start_step
    if step >= last:
        reporter.message(f"Nothing to do: the run is at step {step} of {last}.")
        return step
    reporter.message(f"{len(run.examples):,} traces, {last:,} steps")
    if run.checkpoints.trainer.model.device.type == "cpu":
        reporter.message(f"Computing on the CPU with {describe_threads()}.")
    reporter.training_starts("sft")
    with reporter.progress("training", last) as bar:
        while step < last:
            bar.update(step)
            with checkpoints.save_on_error(step):
                await asyncio.sleep(0.001)  # long enough for a Ctrl-C to get through
            metrics = _train_step(run, step)
            step += 1
            with checkpoints.save_on_error(step):  # whoever read the output may be gone
                checkpoints.record(step, metrics)
                reporter.training_step("sft", step, metrics)
            checkpoints.save_if_due(step, last)
    return step


def _train_step(run: SFTRun, step: int) -> dict[str, float]:
    started = time.monotonic()
    epoch, numbers = run.batches[step]
    update = run.checkpoints.trainer.update([run.examples[number].scored_tree() for number in numbers])
    metrics = {name: update[name] for name in UPDATE_METRICS}
    return {"epoch": epoch, "traces": len(numbers), **metrics, "train_seconds": time.monotonic() - started}
