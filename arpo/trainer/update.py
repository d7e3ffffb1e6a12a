"""One training step: trees and credits in, changed weights and metrics out.

The plain path: every trajectory is a row of its own. New and old log-probs come from the same code on the same batch
(with a single optimiser step they are equal by definition and the ratio is exactly 1); the engine's own log-probs are
only compared with them. Everything is deterministic on a CPU: no dropout, no random numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from arpo.batch import micro_batches, plain_batch
from arpo.loss import policy_loss, token_logprobs
from arpo.settings import Config
from arpo.types import ArpoError, Credit, PathBatch, RolloutTree

LOGITS_CHUNK = 2048  # tokens whose logits exist at the same time


class Trainer:
    """Owns the optimiser of `model`; `optimiser_steps` counts what the learning-rate warm-up needs."""

    def __init__(self, model: Any, tokenizer: Any, config: Config) -> None:
        if model.dtype != torch.float32:
            raise ArpoError(f"model.dtype: small updates would be rounded away in {model.dtype}; train in float32")
        self.model, self.tokenizer, self._config = model, tokenizer, config
        train = config.train
        self.optimiser = torch.optim.AdamW(
            model.parameters(), lr=train.lr, betas=(0.9, 0.99), weight_decay=train.weight_decay
        )
        self.optimiser_steps = 0

    def update(self, trees: Sequence[RolloutTree], credits: Sequence[Sequence[Credit]]) -> dict[str, float]:
        """Train on one batch of trees; returns the step's metrics."""
        batches = [
            self._batch(trees[part], credits[part]) for part in _parts(len(trees), self._config.train.minibatches)
        ]
        micros = [
            list(micro_batches(batch, self._config.train.micro_tokens)) for batch in batches if batch.tokens_BT.numel()
        ]
        # With one optimiser step the policy that is trained IS the one that sampled: old = new, at no cost.
        old = [[self._logprobs(m)[0] for m in part] if len(batches) > 1 else [None] * len(part) for part in micros]
        sums: dict[str, float] = {"tokens": 0.0}
        norms: list[float] = []
        for part, old_part in zip(micros, old, strict=True):
            for micro, old_BT in zip(part, old_part, strict=True):
                for name, value in self._accumulate(micro, old_BT).items():
                    sums[name] = sums.get(name, 0.0) + value
            norms.append(self._step())
        tokens = sums.pop("tokens")
        loss = sums.pop("loss", 0.0)
        return {
            "loss": loss,
            "grad_norm": max(norms, default=0.0),
            "trained_tokens": tokens,
            "optimiser_steps": float(len(norms)),
            **{name: value / tokens for name, value in sums.items()},
        }

    def _batch(self, trees: Sequence[RolloutTree], credits: Sequence[Sequence[Credit]]) -> PathBatch:
        return plain_batch(trees, credits, self._config.loss.aggregation, self.tokenizer.pad_token_id)

    @torch.no_grad()
    def _logprobs(self, batch: PathBatch) -> tuple[Tensor, Tensor]:
        return self._forward(batch)

    def _forward(self, batch: PathBatch) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies [B, T] of the model's own tokens, 0 elsewhere.

        Rows are padded on the right, so causal attention alone never sees the padding. Logits are made only for trained
        tokens, a chunk at a time, and made again in the backward pass: there is never a logits tensor of the batch.
        """
        tokens_BT = batch.tokens_BT.to(self.model.device)
        mask_BT = batch.loss_mask_BT.to(self.model.device)
        hidden_BTH = self.model.get_decoder()(input_ids=tokens_BT, use_cache=False).last_hidden_state
        before_NH, tokens_N = hidden_BTH[:, :-1][mask_BT[:, 1:]], tokens_BT[mask_BT]
        parts = [
            checkpoint(self._head, part_NH, part_N, use_reentrant=False)
            for part_NH, part_N in zip(
                torch.split(before_NH, LOGITS_CHUNK), torch.split(tokens_N, LOGITS_CHUNK), strict=True
            )
        ]
        empty_BT = torch.zeros(mask_BT.shape, device=self.model.device)
        logprobs_N, entropy_N = (torch.cat(values) for values in zip(*parts, strict=True))
        return empty_BT.masked_scatter(mask_BT, logprobs_N), empty_BT.masked_scatter(mask_BT, entropy_N)

    def _head(self, hidden_NH: Tensor, tokens_N: Tensor) -> tuple[Tensor, Tensor]:
        logits_NV = self.model.get_output_embeddings()(hidden_NH)
        return token_logprobs(logits_NV, tokens_N, self._config.rollout.temperature)

    def _accumulate(self, batch: PathBatch, old_BT: Tensor | None) -> dict[str, float]:
        """Add one micro-batch's gradient; returns sums over its tokens."""
        logprobs_BT, entropy_BT = self._forward(batch)
        on_device = PathBatch(*(getattr(batch, name).to(self.model.device) for name in PathBatch.__slots__))
        loss, sums = policy_loss(
            logprobs_BT, logprobs_BT.detach() if old_BT is None else old_BT, on_device, self._config.loss
        )
        loss.backward()  # type: ignore[no-untyped-call]
        mask_BT = on_device.loss_mask_BT
        reference_BT = logprobs_BT.detach() if old_BT is None else old_BT
        mismatch = (reference_BT - on_device.engine_logprobs_BT)[mask_BT].abs().sum()
        extra = {
            "loss": loss.detach(),
            "train_entropy": entropy_BT.detach()[mask_BT].sum(),
            "engine_mismatch": mismatch,
        }
        return {name: float(value) for name, value in {**sums, **extra}.items()}

    def _step(self) -> float:
        train = self._config.train
        self.optimiser_steps += 1
        for group in self.optimiser.param_groups:
            group["lr"] = train.lr * min(1.0, self.optimiser_steps / max(1, train.warmup))
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), train.max_grad_norm))
        if not torch.isfinite(torch.tensor(norm)):
            raise ArpoError(
                f"the gradient's norm is {norm}: training diverged; go on from a checkpoint with a lower train.lr"
            )
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        return norm


def _parts(count: int, parts: int) -> list[slice]:
    """Cut range(count) into `parts` runs of nearly equal length."""
    edges = [count * i // parts for i in range(parts + 1)]
    return [slice(a, b) for a, b in pairwise(edges) if a < b]
