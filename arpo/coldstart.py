"""Making the built-in model: tokenizer, warm-up, imitation of the world's traces. About a minute on two cores.

A fresh transformer learns to copy only slowly from traces alone, so it first recites: passages of names and numbers,
twice in a row. Then it imitates cold-start traces; tokens of questions and tool results are not trained on. The result
is a Hugging Face directory in the cache, named by a hash of all that it depends on, and made once.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

import arpo.data.traces
import arpo.data.world
import arpo.render
import arpo.trainer.tiny
from arpo.data.traces import Trace, write_traces
from arpo.data.world import World, world_vocabulary
from arpo.render import CallFormat, encode_prompt, encode_result, make_format
from arpo.settings import Coldstart
from arpo.tools.base import Tool, call_tool
from arpo.trainer.checkpoint import save_pretrained
from arpo.trainer.tiny import build_model, build_tokenizer
from arpo.types import Kind, ToolCall

Row = tuple[list[int], list[bool]]  # token ids, and which of them are trained on
MAX_CONTEXT = 512


def cache_directory() -> Path:
    """Where made models are kept: $ARPO_CACHE, else the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(os.environ.get("ARPO_CACHE") or Path(base) / "arpo")


def coldstart(
    settings: Coldstart, world: World, tools: Mapping[str, Tool], progress: Callable[[int, int, float], None]
) -> Path:
    """The built-in model's directory, made now if the cache does not hold it; `progress(step, steps, loss)`."""
    directory = cache_directory() / f"tiny-{_fingerprint(settings, world, tools)}"
    if not (directory / "config.json").is_file():
        model, tokenizer = train_tiny(settings, world, tools, progress)
        unfinished = directory.with_name(f"{directory.name}.{os.getpid()}.tmp")
        save_pretrained(model, tokenizer, unfinished)
        if directory.exists():  # another process was faster, or died half-way
            shutil.rmtree(directory)
        unfinished.rename(directory)
    return directory


def train_tiny(
    settings: Coldstart, world: World, tools: Mapping[str, Tool], progress: Callable[[int, int, float], None]
) -> tuple[Any, Any]:
    """Make the built-in model and its tokenizer from nothing."""
    traces = write_traces(world, settings.traces, _caller(tools), settings.seed)
    tokenizer = build_tokenizer(_texts(world, traces))
    model = build_model(tokenizer, settings.hidden, settings.layers, MAX_CONTEXT, settings.seed)
    rows = trace_rows(traces, tokenizer, make_format("tags", [tool.spec for tool in tools.values()]))
    rng = random.Random(f"{settings.seed} coldstart")
    recitals = _batches(lambda: [_recital(tokenizer, world, rng) for _ in range(256)], settings.batch_tokens, rng)
    imitations = _batches(lambda: rows, settings.batch_tokens, rng)
    optimisers = _optimisers(model, settings.lr)
    for step in range(settings.steps):
        batch = next(recitals if rng.random() < (0.6 if step < settings.steps // 4 else 0.2) else imitations)
        scale = min(1.0, (step + 1) / 30) * (1 - step / settings.steps)
        progress(step + 1, settings.steps, _learn(model, optimisers, batch, scale))
    return model.eval(), tokenizer


def trace_rows(traces: Sequence[Trace], tokenizer: Any, fmt: CallFormat) -> list[Row]:
    """Traces as token rows, tokenised piece by piece exactly as a rollout would."""
    return [_trace_row(trace, tokenizer, fmt) for trace in traces]


def _trace_row(trace: Trace, tokenizer: Any, fmt: CallFormat) -> Row:
    tokens = list(encode_prompt(tokenizer, trace.task.question, fmt.instructions))
    trained = [False] * len(tokens)
    for kind, text in trace.segments:
        if kind is Kind.MODEL:
            part = tokenizer(text, add_special_tokens=False).input_ids
        else:
            part = encode_result(tokenizer, fmt, text, MAX_CONTEXT)[0]
        tokens.extend(part)
        trained.extend([kind is Kind.MODEL] * len(part))
    return tokens, trained


def _recital(tokenizer: Any, world: World, rng: random.Random) -> Row:
    """A passage of facts and loose words, then three pieces of it again; all but the first token of each is trained on.

    Pieces start and end anywhere: nothing but looking the last token up in the passage predicts the next one.
    """
    words = (*world_vocabulary(), *map(str, range(100)))
    facts = tuple(world.halves[0].facts.values())
    parts = [rng.choice(facts).text if rng.random() < 0.5 else " ".join(rng.choices(words, k=6)) for _ in range(3)]
    passage = tokenizer(" " + " ".join(parts), add_special_tokens=False).input_ids
    tokens, trained = list(passage), [False] * len(passage)
    for _ in range(3):
        start = rng.randrange(len(passage) - 3)
        piece = passage[start : rng.randint(start + 3, len(passage))]
        tokens += piece
        trained += [False] + [True] * (len(piece) - 1)
    return tokens, trained


def _batches(fill: Callable[[], list[Row]], batch_tokens: int, rng: random.Random) -> Iterator[list[Row]]:
    """Endless batches of rows of similar length, at most `batch_tokens` padded tokens each, in random order."""
    while True:
        rows = sorted(fill(), key=lambda row: len(row[0]))
        batches: list[list[Row]] = [[]]
        for row in rows:
            if (len(batches[-1]) + 1) * len(row[0]) > batch_tokens and batches[-1]:
                batches.append([])
            batches[-1].append(row)
        rng.shuffle(batches)
        yield from batches


def _optimisers(model: Any, lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers (twice as fast here as AdamW alone), AdamW for the rest."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    rest = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    return [
        torch.optim.Muon(matrices, lr=7.5 * lr, weight_decay=0.0, momentum=0.95),
        torch.optim.AdamW(rest, lr=lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def _learn(model: Any, optimisers: list[torch.optim.Optimizer], batch: list[Row], scale: float) -> float:
    """One step of imitation at `scale` times the base learning rate; returns the loss per token."""
    width = max(len(tokens) for tokens, _ in batch)
    tokens_BT = torch.tensor([tokens + [0] * (width - len(tokens)) for tokens, _ in batch])
    mask_BT = torch.tensor([trained + [False] * (width - len(trained)) for _, trained in batch])
    hidden_BTH = model.get_decoder()(input_ids=tokens_BT, use_cache=False).last_hidden_state
    trained_BT = mask_BT[:, 1:]
    logits_NV = model.get_output_embeddings()(hidden_BTH[:, :-1][trained_BT])
    loss = functional.cross_entropy(logits_NV, tokens_BT[:, 1:][trained_BT])
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimiser in optimisers:
        for group in optimiser.param_groups:
            group.setdefault("base_lr", group["lr"])
            group["lr"] = group["base_lr"] * scale
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
    return loss.item()


def _texts(world: World, traces: Sequence[Trace]) -> Iterator[str]:
    """What the tokenizer is trained on: every name word of any world, numbers, the documents, the traces."""
    yield from (f" {word}" for word in world_vocabulary() for _ in range(3))
    yield from (str(number) for number in range(100) for _ in range(3))
    yield from (document.text for document in world.documents)
    for trace in traces[:2000]:
        yield " ".join([trace.task.question, *(text for _, text in trace.segments)])


def _caller(tools: Mapping[str, Tool]) -> Callable[[str, str], str]:
    """Calls a real tool and remembers its answers: the same look-ups come up again and again in traces."""
    known: dict[tuple[str, str], str] = {}

    def call(name: str, argument: str) -> str:
        if (name, argument) not in known:
            made = ToolCall(name, {tools[name].spec.main_argument: argument})
            known[name, argument] = asyncio.run(call_tool(tools, made)).text
        return known[name, argument]

    return call


def _fingerprint(settings: Coldstart, world: World, tools: Mapping[str, Tool]) -> str:
    sources = [arpo.data.world, arpo.data.traces, arpo.render, arpo.trainer.tiny]
    text = [settings.model_dump_json(), world.settings.model_dump_json(), torch.__version__, *sorted(tools)]
    text += [Path(str(module.__file__)).read_text(encoding="utf-8") for module in sources]
    text += [Path(__file__).read_text(encoding="utf-8")]
    return hashlib.sha256("\0".join(text).encode()).hexdigest()[:16]
