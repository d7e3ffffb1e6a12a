"""Learning to imitate token rows: the machinery that the built-in model's pretraining and cold start share.

Only tokens marked as trained count; rows of similar length are batched together and padded on the right.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.nn import functional

from arpo.agent.formats import CallFormat
from arpo.data.traces import Trace
from arpo.training.sft_examples import encode_trace
from arpo.types import Kind

Row = tuple[list[int], list[bool]]  # token ids, and which of them are trained on
Progress = Callable[[int, int, float], None]  # (step, steps, loss)


def imitate(model: Any, batches: Iterator[list[Row]], steps: int, lr: float, progress: Progress) -> None:
    """Train on `steps` batches, with a short warm-up and a linear decay to 0."""
    optimizers = _optimizers(model, lr)
    for step in range(steps):
        scale = min(1.0, (step + 1) / 30) * (1 - step / steps)
        progress(step + 1, steps, _learn(model, optimizers, next(batches), scale))


def trace_rows(traces: Sequence[Trace], tokenizer: Any, fmt: CallFormat) -> list[Row]:
    """Traces as token rows, tokenised piece by piece exactly as a rollout would."""
    examples = (encode_trace(trace, tokenizer, fmt) for trace in traces)
    return [
        (
            [token for _, ids in example.segments for token in ids],
            [kind is Kind.MODEL for kind, ids in example.segments for _ in ids],
        )
        for example in examples
    ]


def batches_of(fill: Callable[[], list[Row]], batch_tokens: int, rng: random.Random) -> Iterator[list[Row]]:
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


def _optimizers(model: Any, lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, where it learns faster here than AdamW; AdamW for the rest."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    rest = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    return [
        torch.optim.Muon(matrices, lr=7.5 * lr, weight_decay=0.0, momentum=0.95),
        torch.optim.AdamW(rest, lr=lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def _learn(model: Any, optimizers: list[torch.optim.Optimizer], batch: list[Row], scale: float) -> float:
    """One step of imitation at `scale` times the base learning rate; returns the loss per token."""
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
            group["lr"] = group["base_lr"] * scale
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return loss.item()
