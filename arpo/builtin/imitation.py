"""Supervised training on token rows, shared by the pretraining and the cold start of the built-in model.

Only marked tokens are trained on; rows of similar length are batched together and padded on the right.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.nn import functional

from arpo.agent.formats import CallFormat
from arpo.data.plugin import Progress
from arpo.data.traces import Trace
from arpo.training.sft_examples import encode_trace
from arpo.types import Kind

Row = tuple[list[int], list[bool]]
"""Token ids, and which of them are trained on."""


def imitate(model: Any, batches: Iterator[list[Row]], steps: int, lr: float, progress: Progress) -> None:
    """Train on `steps` batches, with a short warmup and a linear decay to 0."""
    optimizers = _build_optimizers(model, lr)
    for step in range(steps):
        lr_scale = min(1.0, (step + 1) / 30) * (1 - step / steps)
        progress(step + 1, steps, _train_step(model, optimizers, next(batches), lr_scale))


def trace_rows(traces: Sequence[Trace], tokenizer: Any, fmt: CallFormat) -> list[Row]:
    """Traces as token rows, tokenized segment by segment as in a rollout."""
    examples = (encode_trace(trace, tokenizer, fmt) for trace in traces)
    return [
        (
            [token for _, ids in example.segments for token in ids],
            [kind is Kind.MODEL for kind, ids in example.segments for _ in ids],
        )
        for example in examples
    ]


def batch_rows(next_rows: Callable[[], list[Row]], batch_tokens: int, rng: random.Random) -> Iterator[list[Row]]:
    """Endless batches of rows of similar length, at most `batch_tokens` padded tokens each, in random order."""
    while True:
        rows = sorted(next_rows(), key=lambda row: len(row[0]))
        batches: list[list[Row]] = [[]]
        for row in rows:
            if (len(batches[-1]) + 1) * len(row[0]) > batch_tokens and batches[-1]:
                batches.append([])
            batches[-1].append(row)
        rng.shuffle(batches)
        yield from batches


def _build_optimizers(model: Any, lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, where it learns faster here than AdamW; AdamW for the rest."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    rest = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    return [
        torch.optim.Muon(matrices, lr=7.5 * lr, weight_decay=0.0, momentum=0.95),
        torch.optim.AdamW(rest, lr=lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def _train_step(model: Any, optimizers: list[torch.optim.Optimizer], batch: list[Row], lr_scale: float) -> float:
    """One optimizer step at `lr_scale` times the base learning rate; returns the loss per token."""
    width = max(len(tokens) for tokens, _ in batch)
    tokens_BT = torch.tensor([tokens + [0] * (width - len(tokens)) for tokens, _ in batch], device=model.device)
    mask_BT = torch.tensor([trained + [False] * (width - len(trained)) for _, trained in batch], device=model.device)
    hidden_BTH = model.get_decoder()(input_ids=tokens_BT, use_cache=False).last_hidden_state
    trained_BT = mask_BT[:, 1:]
    logits_NV = model.get_output_embeddings()(hidden_BTH[:, :-1][trained_BT])
    loss = functional.cross_entropy(logits_NV, tokens_BT[:, 1:][trained_BT])
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group.setdefault("base_lr", group["lr"])
            group["lr"] = group["base_lr"] * lr_scale
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return loss.item()
