"""Pretrains the base of the built-in model: `python -m arpo.builtin.pretrain arpo/builtin/base`.

The base can read: it copies names and numbers from its context, and has seen agents of every quality in many other
worlds. Of the default world it has seen facts of the training half (in recitals), and nothing of the test half. It is
part of the package, because learning to copy takes a small transformer far longer than everything after it; the cold
start, which gives it the habits to unlearn, runs on the user's machine. On a GPU this takes minutes, on a laptop hours.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from arpo.agent.formats import build_format
from arpo.builtin.cold_start import Row, batch_rows, imitate, tool_caller, trace_rows, world_tools
from arpo.builtin.model import build_model, build_tokenizer
from arpo.builtin.traces import write_traces
from arpo.builtin.world import World, build_world, world_vocabulary
from arpo.config.loading import load_config
from arpo.config.schema import Config
from arpo.data.task_set import Progress
from arpo.data.tasks import Trace
from arpo.models.load import pick_device
from arpo.models.save import save_pretrained

STEPS, BATCH_TOKENS, LR, TRACES, HIDDEN, LAYERS, MAX_CONTEXT = 6_000, 16_384, 3e-3, 60_000, 160, 4, 512
SEED = 1  # of four seeds, the one that learned to copy soonest (docs/journal/LOG.md)
RECITALS = 0.25  # share of batches


def main(directory: Path) -> None:
    """Pretrain and save the base."""
    model, tokenizer = pretrain(load_config(None), _print_progress)
    save_pretrained(model.to(device="cpu", dtype=torch.bfloat16), tokenizer, directory)


def pretrain(
    config: Config,
    progress: Progress,
    *,
    steps: int = STEPS,
    traces: int = TRACES,
    hidden: int = HIDDEN,
    layers: int = LAYERS,
) -> tuple[Any, Any]:
    """The base model and its tokenizer, trained from scratch."""
    world = build_world(config.world)
    written = write_traces(world, traces, tool_caller(config), seed=0, difficulty=None)
    tokenizer = build_tokenizer(_texts(written))
    model = build_model(tokenizer, hidden, layers, MAX_CONTEXT, seed=SEED).to(pick_device(config.model.device))
    fmt = build_format("tags", [tool.spec for tool in world_tools(config, world).values()])
    imitate(model, _mixture(tokenizer, world, trace_rows(written, tokenizer, fmt)), steps, LR, progress)
    return model.eval(), tokenizer


def _print_progress(step: int, steps: int, loss: float) -> None:
    if step % 50 == 0:
        print(f"step {step} of {steps}, loss {loss:.3f}", flush=True)


def _mixture(tokenizer: Any, world: World, rows: list[Row]) -> Iterator[list[Row]]:
    rng = random.Random(SEED)
    recitals = batch_rows(lambda: [_recital(tokenizer, world, rng) for _ in range(512)], BATCH_TOKENS, rng)
    imitations = batch_rows(lambda: rows, BATCH_TOKENS, rng)
    while True:
        yield next(recitals if rng.random() < RECITALS else imitations)


def _recital(tokenizer: Any, world: World, rng: random.Random) -> Row:
    """A passage of facts and random words, then three pieces of it again; all but a piece's first token is trained on.

    Pieces start and end anywhere, so the next token can only be predicted by finding the last one in the passage.
    """
    words = (*world_vocabulary(), *map(str, range(100)))
    facts = world.halves[0].facts()
    parts = [rng.choice(facts) if rng.random() < 0.5 else " ".join(rng.choices(words, k=6)) for _ in range(3)]
    passage = tokenizer(" " + " ".join(parts), add_special_tokens=False).input_ids
    tokens, trained = list(passage), [False] * len(passage)
    for _ in range(3):
        start = rng.randrange(len(passage) - 3)
        piece = passage[start : rng.randint(start + 3, len(passage))]
        tokens += piece
        trained += [False] + [True] * (len(piece) - 1)
    return tokens, trained


def _texts(traces: Sequence[Trace]) -> Iterator[str]:
    """The training text of the tokenizer: every name word of any world, numbers, traces."""
    yield from (f" {word}" for word in world_vocabulary() for _ in range(3))
    yield from (str(number) for number in range(100) for _ in range(3))
    for trace in traces[:2000]:
        yield " ".join([trace.task.question, *(text for _, text in trace.segments)])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
