"""Where memory runs out in a training pass: the result is exactly that of a run with smaller micro-batches.

There is no GPU here. The memory is made up: a pass over more than so many tokens raises what CUDA would, when its
gradients have been added already, and leaves others half done.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from forests import rich_forest
from models import VOCAB, make_model

from arpo.config.loading import load_config
from arpo.errors import ArpoError
from arpo.plan import cost
from arpo.plan.shape import SHAPES
from arpo.runs.reporter import Reporter
from arpo.trainer import forward_backward, trainer
from arpo.trainer.dist.sharded import ShardedTrainer
from arpo.trainer.forward_backward import logits_chunk
from arpo.trainer.trainer import Trainer

STEPS = [[one for seed in seeds for one in rich_forest(seed).trees] for seeds in ((1, 2, 3), (4, 5, 6))]


class Warnings(Reporter):
    """Keeps the warnings."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def warning(self, text: str) -> None:
        self.texts.append(text)


@dataclass
class Memory:
    """So many tokens of one pass fit; `most` is the largest pass so far."""

    room: float
    most: int = 0


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Memory:
    """Enough at first. Small parts are allowed."""
    memory, run = Memory(math.inf), forward_backward._Passes._run

    def limited(self: Any, micro: Any, context: Any) -> None:
        run(self, micro, context)
        memory.most = max(memory.most, len(micro.tokens))
        if len(micro.tokens) > memory.room:
            for parameter in self._model.parameters():
                parameter.grad = torch.ones_like(parameter)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has ...")

    monkeypatch.setattr(forward_backward._Passes, "_run", limited)
    monkeypatch.setattr(trainer, "MIN_MICROBATCH_TOKENS", 20)
    return memory


def learn(settings: tuple[str, ...], budget: int, dtype: str, reporter: Reporter) -> tuple[list[Any], dict[str, Any]]:
    """The metrics of two steps; then the weights and the optimizer's state."""
    model, reference = (make_model("qwen2", seed=seed).to(getattr(torch, dtype)) for seed in (0, 1))
    config = load_config(None, ["train.lr=1e-3", f"train.max_microbatch_tokens={budget}", *settings])
    learner = Trainer(model, None, config, reference, reporter)
    metrics = [learner.update(trees) for trees in STEPS]
    return metrics, {**learner.optimizer.tensors(), **dict(model.named_parameters())}


@pytest.mark.parametrize(
    ("settings", "dtype", "budget"),
    [
        ((), "float32", 80),
        ((), "bfloat16", 80),
        (("train.minibatches=2", "train.epochs=2", "train.gradient_checkpointing=true"), "float32", 40),
        (("loss.kl_coef=0.1", "loss.kind=gspo"), "float32", 80),
    ],
)
def test_less_memory_gives_the_weights_of_smaller_parts(
    settings: tuple[str, ...], dtype: str, budget: int, memory: Memory
) -> None:
    undisturbed, disturbed = Warnings(), Warnings()
    expected, state = learn(settings, 20, dtype, undisturbed)
    memory.room = memory.most
    found, reached = learn(settings, budget, dtype, disturbed)
    assert found == expected
    assert reached.keys() == state.keys() and all(torch.equal(reached[name], state[name]) for name in state)
    assert undisturbed.texts == []
    told = [text.split("train.max_microbatch_tokens=")[1].split()[0] for text in disturbed.texts]
    assert told == (["40", "20"] if budget == 80 else ["20"])


def test_a_budget_beyond_the_batch_is_halved_from_what_was_computed(memory: Memory) -> None:
    learn((), 10**6, "float32", Reporter())
    memory.room, whole = memory.most - 1, memory.most
    reporter = Warnings()
    learn((), 10**6, "float32", reporter)
    assert (
        f"memory ran out in a pass over {whole} tokens; it is repeated with at most {whole // 2} at"
        in reporter.texts[0]
    )
    assert len(reporter.texts) == 1


def test_too_little_memory_for_the_smallest_part_is_told(memory: Memory) -> None:
    memory.room = 0
    with pytest.raises(ArpoError) as told:
        learn(("train.gradient_checkpointing=true",), 300, "float32", Reporter())
    text = str(told.value)
    assert "tokens does not fit into memory (CUDA out of memory. Tried to allocate 2.00 GiB.)" in text
    assert "model.dtype=bfloat16" in text and "gradient_checkpointing" not in text and "--resume" in text


def test_several_ranks_end_with_what_to_do() -> None:
    of_rank: Any = SimpleNamespace(_group=SimpleNamespace(rank=1))
    with pytest.raises(ArpoError, match=r"rank 1: memory ran out .* train.max_microbatch_tokens, 250 for example"):
        ShardedTrainer._shrink(of_rank, 500, "CUDA out of memory.")


# --- logits


def test_logits_take_no_more_than_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert logits_chunk(344) == logits_chunk(65_536) == 2048
    assert logits_chunk(151_936) == 883 and 883 * 151_936 * 4 <= forward_backward.LOGITS_BYTES < 884 * 151_936 * 4
    assert logits_chunk(10**10) == 1
    sizes, compute = [], forward_backward.token_logprobs

    def watched(logits_NV: Any, *given: Any) -> Any:
        sizes.append(len(logits_NV))
        return compute(logits_NV, *given)

    monkeypatch.setattr(forward_backward, "token_logprobs", watched)
    monkeypatch.setattr(forward_backward, "LOGITS_BYTES", 4 * VOCAB * 7 + 3)
    learn((), 10**6, "float32", Reporter())
    assert max(sizes) == 7


@pytest.mark.parametrize("name", ["qwen2.5-0.5b", "smollm2-135m"])
def test_the_planner_counts_the_same_logits(name: str) -> None:
    shape, config = SHAPES[name], load_config(None, ["model.dtype=bfloat16"])
    logits = cost.training_memory(config, shape, 1).logits
    assert logits == logits_chunk(shape.vocab) * shape.vocab * cost.LOGITS_BYTES
