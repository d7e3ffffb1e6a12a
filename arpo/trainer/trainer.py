"""One training step: scored trees in, updated weights and metrics out.

Each mini-batch of trees is one forest in which every unique token is computed once (`arpo.algorithm.batch`,
`arpo.trainer.forward_backward`); where trajectories share too little for that to pay, every trajectory is a row of its
own. New, old and reference log-probs come from the same code. With a single optimizer step old and new log-probs are
equal by definition and the ratio is exactly 1. The engine's log-probs are compared with the trainer's.

Several epochs are passes over the same mini-batches in the same order, with the old log-probs of before the first.

Where a GPU's memory runs out in a pass over a mini-batch, the pass begins again with half as many tokens in a
micro-batch, and so do all later ones. Gradients are exact: those of the pass that failed are dropped.

Guarantees: deterministic on a CPU (no dropout, no random numbers).
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from arpo.algorithm.batch import MicroBatch, build_batch
from arpo.config.schema import Config
from arpo.data.images import refuse_images
from arpo.errors import ArpoError
from arpo.models.load import gradient_checkpointing
from arpo.models.lora import disable_adapter, has_adapter
from arpo.models.vision import attach_tower, vision_tower
from arpo.runs.reporter import SILENT, Reporter
from arpo.trainer.dist.shards import read_shards
from arpo.trainer.forward_backward import compute_logprobs, forward_backward
from arpo.trainer.optimizer import Optimizer
from arpo.types import Node, ScoredTree, TreeBatch

Share = tuple[TreeBatch, Sequence[MicroBatch] | None]
"""What this process computes of a mini-batch, and its micro-batches if other ranks do the same passes."""
OPTIMIZER = "optimizer.safetensors"
MIN_MICROBATCH_TOKENS = 256  # below this, a pass that needs less memory would hardly be smaller, and very slow
SHARING_PAYS = 0.95  # unique over total tokens; above this, a tree takes as long as its trajectories one by one
T = TypeVar("T")


class Trainer:
    """Owns the optimizer of `model`; `reference` is the model of the KL term (none is needed with a LoRA adapter)."""

    def __init__(
        self, model: Any, tokenizer: Any, config: Config, reference: Any = None, reporter: Reporter = SILENT
    ) -> None:
        if config.loss.kl_coef and reference is None and not has_adapter(model):
            raise ValueError("a KL term needs the model before training")
        self.model, self.tokenizer, self._config = model, tokenizer, config
        self._reporter, self._fitting_tokens = reporter, math.inf  # in a micro-batch, since memory ran out
        if reference is not None:
            attach_tower(reference, vision_tower(model))  # frozen, so it is the same, and so are its ids
        self._policy, self._reference = self._prepare(model, reference)
        train = config.train
        self.optimizer = Optimizer(self._policy, train.lr, train.weight_decay, train.betas)

    def update(self, trees: Sequence[ScoredTree]) -> dict[str, float]:
        """Train on one batch of trees with credits; returns the step's metrics."""
        every = [self._batch(trees[part]) for part in _split_evenly(len(trees), self._config.train.minibatches)]
        batches = [batch for batch in every if len(batch.targets_K)]
        shares = [self._share(batch) for batch in batches]
        epochs = self._config.train.epochs
        # With one optimizer step the trained policy IS the one that sampled: old = new, at no cost.
        old = [self._logprobs(self._policy, share) if len(every) * epochs > 1 else None for share in shares]
        reference = [self._reference_logprobs(share) for share in shares]
        sums: dict[str, float] = {"tokens": 0.0, "loss": 0.0}
        norms: list[float] = []
        for _ in range(epochs):
            for share, old_K, reference_K in zip(shares, old, reference, strict=True):
                for name, value in self._forward_backward(share, old_K, reference_K).items():
                    sums[name] = sums.get(name, 0.0) + value
                norms.append(self._step())
        sums = {name: value / epochs for name, value in self._reduce(sums).items()}
        tokens, loss = sums.pop("tokens"), sums.pop("loss")
        return {
            "loss": loss,
            "grad_norm": max(norms, default=0.0),
            "trained_tokens": tokens,
            "computed_tokens": float(sum(batch.unique_tokens for batch in batches)),
            "unshared_tokens": float(sum(batch.total_tokens for batch in batches)),
            "optimizer_steps": float(len(norms)),
            **{name: value / tokens for name, value in sums.items()},
        }

    def save_optimizer(self, directory: Path) -> None:
        """Write the optimizer's state into a checkpoint."""
        save_file(self.optimizer.tensors(), directory / OPTIMIZER)

    def load_optimizer(self, directory: Path) -> None:
        """Read the optimizer's state from a checkpoint; ValueError if it does not fit the model."""
        if (directory / OPTIMIZER).is_file():
            self.optimizer.load(load_file(directory / OPTIMIZER))
        else:
            self.optimizer.load(read_shards(directory))

    def _prepare(self, model: Any, reference: Any) -> tuple[Any, Any]:
        """The policy that is trained and the reference, made from the models that were given."""
        return model, reference

    def _share(self, batch: TreeBatch) -> Share:
        """The part of a mini-batch that this process computes."""
        return batch, None

    def _reduce(self, sums: dict[str, float]) -> dict[str, float]:
        """The metrics summed over all processes."""
        return sums

    def _batch(self, trees: Sequence[ScoredTree]) -> TreeBatch:
        config = self._config
        loss, max_tokens, entropy_weight = config.loss, config.rollout.max_tokens, config.advantage.entropy_weight
        embed_ids = self._embed_ids
        batch = build_batch(trees, loss, max_tokens, entropy_weight=entropy_weight, embed_ids=embed_ids)
        if batch.unique_tokens <= SHARING_PAYS * batch.total_tokens:
            return batch
        return build_batch(trees, loss, max_tokens, False, entropy_weight, embed_ids)

    def _embed_ids(self, node: Node) -> Sequence[int]:
        """A node's tokens as the model gets them: at the places of its images, the ids of their features."""
        tower = vision_tower(self.model)
        if tower is None:
            refuse_images(node.images, "a tree", "this model cannot see")
            return node.tokens
        return tower.embed_ids(node.tokens, node.images)

    @property
    def _budget(self) -> int:
        """Tokens in a micro-batch."""
        return int(min(self._config.train.max_microbatch_tokens, self._fitting_tokens))

    def _logprobs(self, model: Any, share: Share) -> Tensor:
        (batch, matched), temperature = share, self._config.rollout.temperature
        return self._fit(batch, lambda: compute_logprobs(model, batch, temperature, self._budget, matched)[0])

    def _reference_logprobs(self, share: Share) -> Tensor | None:
        if not self._config.loss.kl_coef:
            return None
        if has_adapter(self._policy):
            with disable_adapter(self._policy):
                return self._logprobs(self._policy, share)
        return self._logprobs(self._reference, share)

    def _forward_backward(self, share: Share, old_K: Tensor | None, reference_K: Tensor | None) -> dict[str, float]:
        (batch, matched), config = share, self._config

        def run() -> dict[str, float]:
            with gradient_checkpointing(self._policy) if config.train.gradient_checkpointing else nullcontext():
                return forward_backward(
                    self._policy,
                    batch,
                    config.loss,
                    config.rollout.temperature,
                    self._budget,
                    old_K,
                    reference_K,
                    matched,
                )

        return self._fit(batch, run)

    def _fit(self, batch: TreeBatch, run: Callable[[], T]) -> T:
        """The result of passes over a mini-batch; while memory runs out, they are repeated in smaller micro-batches."""
        while True:
            try:
                return run()
            except torch.OutOfMemoryError as error:
                problem = str(error).partition("\n")[0]
            # not in the handler, where the error holds what the passes had in memory
            self.optimizer.zero_grad()
            gc.collect()
            torch.cuda.empty_cache()
            self._shrink(min(self._budget, batch.unique_tokens), problem)

    def _shrink(self, tokens: int, problem: str) -> None:
        """Use half of `tokens` in micro-batches from now on: for so many there is not enough memory."""
        if tokens // 2 < MIN_MICROBATCH_TOKENS:
            train, model = self._config.train, self._config.model
            remedies = {
                "train.gradient_checkpointing=true": not train.gradient_checkpointing,
                "model.dtype=bfloat16": model.dtype != "bfloat16",
                "train.lora_rank=16": not train.lora_rank,
            }
            helps = [remedy for remedy, applies in remedies.items() if applies]
            raise ArpoError(
                f"a pass over {tokens} tokens does not fit into memory ({problem}): use "
                f"{', '.join([*helps, 'a smaller rollout.kv_cache_tokens'])}, or several GPUs, and --resume"
            )
        self._fitting_tokens = tokens // 2
        self._reporter.warning(
            f"memory ran out in a pass over {tokens:,} tokens; it is repeated with at most {tokens // 2:,} at a time, "
            f"and so are later ones. train.max_microbatch_tokens={tokens // 2} does that from the start"
        )

    def _step(self) -> float:
        """One optimizer step; returns the gradient norm before clipping."""
        train = self._config.train
        lr = train.lr * min(1.0, (self.optimizer.steps + 1) / max(1, train.warmup_steps))
        return self.optimizer.step(lr, train.max_grad_norm)


def _split_evenly(count: int, parts: int) -> list[slice]:
    """range(count) in at most `parts` slices of nearly equal length, none empty."""
    edges = [count * i // parts for i in range(parts + 1)]
    return [slice(a, b) for a, b in pairwise(edges) if a < b]
