"""One training step: trees and credits in, changed weights and metrics out.

Each minibatch of trees is one forest in which every unique token is computed once (`arpo.algorithm.batch`, `arpo.trainer.forward_backward`);
where paths share too little for that to pay, every path is a row of its own. New, old and reference log-probs come from
the same code (with a single optimizer step old and new are equal by definition and the ratio is exactly 1); the
engine's own are compared with them. Everything is deterministic on a CPU: no dropout, no random numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from arpo.algorithm.batch import MicroBatch, build_batch
from arpo.config.schema import Config
from arpo.models.load import gradient_checkpointing
from arpo.models.lora import disable_adapter, has_adapter
from arpo.trainer.dist.shards import read_shards
from arpo.trainer.forward_backward import compute_logprobs, forward_backward
from arpo.trainer.optimizer import Optimizer
from arpo.types import ScoredTree, TreeBatch

Work = tuple[TreeBatch, Sequence[MicroBatch] | None]
"""What this process computes of a minibatch, and in which parts if others do the same passes."""
OPTIMIZER = "optimizer.safetensors"
SHARING_PAYS = 0.95  # unique over total tokens; above, a tree takes no less time than its paths one by one


class Trainer:
    """Owns the optimizer of `model`; `reference` is what a KL term compares with (unless an adapter is trained)."""

    def __init__(self, model: Any, tokenizer: Any, config: Config, reference: Any = None) -> None:
        self.model, self.tokenizer, self._config, self._reference = model, tokenizer, config, reference
        self._policy = model
        if config.loss.kl_coef and reference is None and not has_adapter(model):
            raise ValueError("a KL term needs the model before training")
        self.optimizer = Optimizer(model, config.train.lr, config.train.weight_decay)

    def update(self, trees: Sequence[ScoredTree]) -> dict[str, float]:
        """Train on one batch of trees with credits; returns the step's metrics."""
        every = [self._batch(trees[part]) for part in _parts(len(trees), self._config.train.minibatches)]
        batches = [batch for batch in every if len(batch.targets_K)]
        # With one optimizer step the policy that is trained IS the one that sampled: old = new, at no cost.
        works = [self._work(batch) for batch in batches]
        old = [self._logprobs(self._policy, work) if len(every) > 1 else None for work in works]
        sums: dict[str, float] = {"tokens": 0.0, "loss": 0.0}
        norms: list[float] = []
        for work, old_K in zip(works, old, strict=True):
            for name, value in self._accumulate(work, old_K, self._reference_logprobs(work)).items():
                sums[name] = sums.get(name, 0.0) + value
            norms.append(self._step())
        sums = self._summed(sums)
        tokens, loss = sums.pop("tokens"), sums.pop("loss")
        unique, total = (sum(getattr(b, name) for b in batches) for name in ("unique_tokens", "total_tokens"))
        return {
            "loss": loss,
            "grad_norm": max(norms, default=0.0),
            "trained_tokens": tokens,
            "computed_tokens": float(unique),
            "unshared_tokens": float(total),
            "optimizer_steps": float(len(norms)),
            **{name: value / tokens for name, value in sums.items()},
        }

    def save_optimizer(self, directory: Path) -> None:
        """Write the optimizer's state into a checkpoint."""
        save_file(self.optimizer.tensors(), directory / OPTIMIZER)

    def load_optimizer(self, directory: Path) -> None:
        """Take it over from there; raises ValueError if it misfits."""
        if (directory / OPTIMIZER).is_file():
            self.optimizer.load(load_file(directory / OPTIMIZER))
        else:
            self.optimizer.load(read_shards(directory))

    def _work(self, batch: TreeBatch) -> Work:
        """All of a minibatch; a rank among several does its share."""
        return batch, None

    def _summed(self, sums: dict[str, float]) -> dict[str, float]:
        """Over all that share the work."""
        return sums

    def _batch(self, trees: Sequence[ScoredTree]) -> TreeBatch:
        config = self._config
        loss, max_tokens, entropy_weight = config.loss, config.rollout.max_tokens, config.advantage.entropy_weight
        batch = build_batch(trees, loss, max_tokens, entropy_weight=entropy_weight)
        if batch.unique_tokens <= SHARING_PAYS * batch.total_tokens:
            return batch
        return build_batch(trees, loss, max_tokens, shared=False, entropy_weight=entropy_weight)

    def _logprobs(self, model: Any, work: Work) -> Tensor:
        batch, matched = work
        return compute_logprobs(
            model, batch, self._config.rollout.temperature, self._config.train.max_microbatch_tokens, matched
        )[0]

    def _reference_logprobs(self, work: Work) -> Tensor | None:
        if not self._config.loss.kl_coef:
            return None
        if has_adapter(self._policy):
            with disable_adapter(self._policy):
                return self._logprobs(self._policy, work)
        return self._logprobs(self._reference, work)

    def _accumulate(self, work: Work, old_K: Tensor | None, reference_K: Tensor | None) -> dict[str, float]:
        config, (batch, matched) = self._config, work
        with gradient_checkpointing(self._policy) if config.train.gradient_checkpointing else nullcontext():
            return forward_backward(
                self._policy,
                batch,
                config.loss,
                config.rollout.temperature,
                config.train.max_microbatch_tokens,
                old_K,
                reference_K,
                matched,
            )

    def _step(self) -> float:
        train = self._config.train
        lr = train.lr * min(1.0, (self.optimizer.steps + 1) / max(1, train.warmup_steps))
        return self.optimizer.step(lr, train.max_grad_norm)


def _parts(count: int, parts: int) -> list[slice]:
    """Cut range(count) into `parts` runs of nearly equal length."""
    edges = [count * i // parts for i in range(parts + 1)]
    return [slice(a, b) for a, b in pairwise(edges) if a < b]
