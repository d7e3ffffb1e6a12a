"""Several passes over a batch (`train.epochs`) against a plain loop: a loss and an AdamW step for each mini-batch."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from forests import reference_model, rich_forest
from models import make_model
from plain import Old, logprobs_and_entropies, plain_loss, plain_trajectories
from torch.nn.utils import clip_grad_norm_

from arpo.config.loading import load_config
from arpo.config.schema import Config
from arpo.trainer.trainer import Trainer
from arpo.types import ScoredTree

SETTINGS = (
    "train.lr=1e-2", "train.betas=[0.8, 0.95]", "train.max_grad_norm=0.5", "train.warmup_steps=4",
    "rollout.temperature=0.8", "rollout.max_tokens=50", "loss.importance_cap=1.1",
)  # fmt: skip


def old_logprobs(model: Any, trees: Sequence[ScoredTree], temperature: float) -> Old:
    """By tree and node, as the model is now."""
    found: dict[tuple[int, int], list[float]] = {}
    for trajectory in plain_trajectories(trees):
        if trajectory.positions:
            with torch.no_grad():
                values_T, _ = logprobs_and_entropies(model, trajectory, temperature)
            own: dict[tuple[int, int], list[float]] = {}
            for (tree, node, _), value in zip(trajectory.sources, values_T.tolist(), strict=True):
                own.setdefault((tree, node), []).append(value)
            found |= own
    return found


def slow_update(model: Any, parts: Sequence[Sequence[ScoredTree]], config: Config, reference: Any) -> list[float]:
    """The same training; returns the loss of every optimizer step."""
    train, loss, temperature = config.train, config.loss, config.rollout.temperature
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.8, 0.95), weight_decay=0.0)
    old = [old_logprobs(model, part, temperature) for part in parts]
    losses = []
    for step in range(train.epochs * len(parts)):
        part = step % len(parts)
        value = plain_loss(model, parts[part], loss, temperature, 50, old[part], reference)
        value.backward()  # type: ignore[no-untyped-call]
        clip_grad_norm_(model.parameters(), 0.5)
        adamw.param_groups[0]["lr"] = 1e-2 * min(1.0, (step + 1) / 4)
        adamw.step()
        adamw.zero_grad()
        losses.append(value.item())
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("more", [("loss.kl_coef=0.1",), ("loss.kind=turn", "train.minibatches=2")], ids=["kl", "turn"])
def test_epochs_are_passes_with_the_old_log_probs_of_before_the_first(more: tuple[str, ...]) -> None:
    config = load_config(None, [*SETTINGS, "train.epochs=3", *more])
    trees = [tree for seed in (31, 32) for tree in rich_forest(seed).trees]
    half = len(trees) // 2 if config.train.minibatches == 2 else len(trees)
    parts = [part for part in (trees[:half], trees[half:]) if part]
    model, reference = make_model("llama"), reference_model("llama") if config.loss.kl_coef else None
    slow, before = copy.deepcopy(model), copy.deepcopy(model)
    losses = slow_update(slow, parts, config, reference)
    trainer = Trainer(model, None, config, reference)
    metrics = trainer.update(trees)
    assert metrics["optimizer_steps"] == trainer.optimizer.steps == 3 * len(parts)
    assert metrics["loss"] == pytest.approx(sum(losses) / 3, rel=1e-4)  # the mean of the passes
    first = Trainer(before, None, load_config(None, [*SETTINGS, *more]), reference)
    begun = {name: p.detach().clone() for name, p in before.named_parameters()}
    once = first.update(trees)
    counts = ("trained_tokens", "computed_tokens", "unshared_tokens")
    assert [metrics[name] for name in counts] == [once[name] for name in counts]
    assert metrics["kl_k3"] > once["kl_k3"]
    for (name, got), expected in zip(model.named_parameters(), slow.parameters(), strict=True):
        assert (got - expected).norm() <= 1e-2 * (expected - begun[name]).norm(), name


def test_one_pass_over_one_minibatch_needs_no_old_log_probs(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(Trainer, "_logprobs", lambda self, model, share: asked.append(1))
    Trainer(make_model("llama"), None, load_config(None, SETTINGS)).update(rich_forest(31).trees)
    assert not asked
