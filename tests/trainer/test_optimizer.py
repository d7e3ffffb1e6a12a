"""AdamW with float32 master weights: against plain AdamW, against AdamW by hand, and against what bfloat16 would do."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import VOCAB, make_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from arpo.errors import ArpoError
from arpo.models.load import gradient_checkpointing
from arpo.trainer.optimizer import Optimizer

BF16 = torch.bfloat16


def loss_of(model: Any, number: int) -> Tensor:
    """The loss of a made-up micro-batch."""
    tokens = torch.randint(VOCAB, (2, 7), generator=torch.Generator().manual_seed(number))
    return model(input_ids=tokens, labels=tokens, use_cache=False).loss  # type: ignore[no-any-return]


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def train(model: Any, optimizer: Optimizer, steps: range, lr: float = 1e-3) -> None:
    for step in steps:
        for micro in range(3):
            loss_of(model, 10 * step + micro).backward()  # type: ignore[no-untyped-call]
        optimizer.step(lr, max_grad_norm=1.0)


def masters_of(optimizer: Optimizer) -> dict[str, Tensor]:
    found = optimizer.tensors().items()
    return {key.removeprefix("master/"): value.clone() for key, value in found if key.startswith("master/")}


@pytest.mark.parametrize("family", ["smollm2", "qwen2"])  # with tied embeddings, and with biases
def test_in_float32_it_is_plain_adamw_to_the_last_bit(family: str) -> None:
    model, plain = make_model(family), make_model(family)
    places = [parameter.data_ptr() for parameter in model.parameters()]
    betas = (0.9, 0.99) if family == "qwen2" else (0.7, 0.9)
    optimizer = Optimizer(model, 1e-3, 0.1) if family == "qwen2" else Optimizer(model, 1e-3, 0.1, betas)
    adamw = torch.optim.AdamW(plain.parameters(), lr=1e-3, betas=betas, weight_decay=0.1)
    for step in range(4):
        for micro in range(3):
            for each in (model, plain):
                loss_of(each, 10 * step + micro).backward()  # type: ignore[no-untyped-call]
        lr = 1e-3 * (step + 1)
        adamw.param_groups[0]["lr"] = lr
        norm = float(clip_grad_norm_(plain.parameters(), 0.5))
        adamw.step()
        adamw.zero_grad()
        assert optimizer.step(lr, max_grad_norm=0.5) == norm > 0.5
    assert same(weights_of(model), weights_of(plain))
    assert optimizer.steps == 4
    assert places == [parameter.data_ptr() for parameter in model.parameters()]
    assert masters_of(optimizer) == {}


def adamw_by_hand(w: Tensor, g: Tensor, m: Tensor, v: Tensor, t: int, lr: float, decay: float) -> list[Tensor]:
    """One step straight from the paper, in float64."""
    m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g**2
    return [w * (1 - lr * decay) - lr * (m / (1 - 0.9**t)) / ((v / (1 - 0.99**t)).sqrt() + 1e-8), m, v]


@pytest.mark.slow
@pytest.mark.parametrize("lr", [1e-6, 1e-4])
def test_masters_move_as_float32_does_where_bfloat16_would_stand_still(lr: float) -> None:
    model, twin = make_model("smollm2").to(BF16), make_model("smollm2").to(BF16)
    begun = weights_of(model)
    optimizer = Optimizer(model, lr, weight_decay=0.1)
    names = [name for name, _ in twin.named_parameters()]
    hand = {name: [p.detach().double(), *torch.zeros(2, *p.shape).double()] for name, p in twin.named_parameters()}
    for step in range(1, 51):
        total = {name: torch.zeros(p.shape, dtype=torch.float64) for name, p in twin.named_parameters()}
        for micro in range(2):
            loss_of(model, 10 * step + micro).backward()  # type: ignore[no-untyped-call]
            gradients = torch.autograd.grad(loss_of(twin, 10 * step + micro), list(twin.parameters()))
            for name, gradient in zip(names, gradients, strict=True):
                total[name] += gradient
        norm = math.sqrt(sum(float((g**2).sum()) for g in total.values()))
        assert optimizer.step(lr, max_grad_norm=1.0) == pytest.approx(norm, rel=1e-6)
        for name in names:
            clipped = total[name] * min(1.0, 1.0 / (norm + 1e-6))
            hand[name] = adamw_by_hand(*[hand[name][0], clipped, *hand[name][1:]], step, lr, 0.1)
        masters, rounded = masters_of(optimizer), weights_of(model)
        assert same(rounded, {name: masters[name].to(BF16) for name in names})
        with torch.no_grad():
            for name, parameter in twin.named_parameters():
                parameter.copy_(rounded[name])  # the same gradients for both, all along
    still = [float((rounded[name] == begun[name]).float().mean()) for name in names]
    for name in names:
        moved, expected = (x - begun[name].double() for x in (masters[name].double(), hand[name][0]))
        # A weight near 1 has steps of 1e-7 in float32: all 50 together may be that often half a step off.
        torch.testing.assert_close(moved, expected, rtol=1e-3, atol=50 * 2**-24 * float(begun[name].abs().max()))
        assert expected.abs().mean() > 5 * lr
    if lr == 1e-6:  # an update is far below what bfloat16 can tell apart; yet the masters have moved, as seen above
        assert min(still) > 0.9


def test_plain_adamw_in_bfloat16_does_stand_still() -> None:
    """The reason for all this; if it ever fails, the test above proves less than it says."""
    model = make_model("smollm2").to(BF16)
    begun, adamw = weights_of(model), torch.optim.AdamW(model.parameters(), lr=1e-6, betas=(0.9, 0.99))
    for step in range(50):
        loss_of(model, step).backward()  # type: ignore[no-untyped-call]
        adamw.step()
        adamw.zero_grad()
    now = weights_of(model)
    stands = [float((now[name] == begun[name]).float().mean()) for name in begun]
    assert min(stands) > 0.9


class Weights(nn.Module):
    """A few numbers."""

    def __init__(self, size: int, dtype: torch.dtype = BF16, device: str = "cpu") -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(size, dtype=dtype, device=device))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(st.floats(-8, 8, width=16), min_size=3, max_size=3), min_size=1, max_size=40))
def test_gradients_of_micro_batches_add_up_in_float32(rows: list[list[float]]) -> None:
    model = Weights(3)
    optimizer = Optimizer(model, 1e-3, 0.0)
    gradients = torch.tensor(rows).to(BF16)
    total = torch.zeros(3)
    for gradient in gradients:
        (model.w * gradient).sum().backward()
        assert model.w.grad is None
        total += gradient
    norm = float(torch.linalg.vector_norm(total))
    assert optimizer.step(1e-3, max_grad_norm=1e9) == pytest.approx(norm, rel=1e-6, abs=1e-30)


def test_a_thousand_micro_batches_count_a_thousand_times() -> None:
    model = Weights(1)
    optimizer = Optimizer(model, 1e-3, 0.0)
    for _ in range(1000):
        model.w.sum().backward()
    assert optimizer.step(1e-3, max_grad_norm=1e9) == 1000  # in bfloat16, 256 + 1 is 256


def test_the_model_stays_where_it_is_and_no_gradient_is_left() -> None:
    model = make_model("qwen2").to(BF16)
    places = [parameter.data_ptr() for parameter in model.parameters()]
    optimizer, begun = Optimizer(model, 1e-2, 0.0), weights_of(model)
    train(model, optimizer, range(1), lr=1e-2)
    now = weights_of(model)
    assert all(not torch.equal(now[name], begun[name]) for name in now)
    assert places == [parameter.data_ptr() for parameter in model.parameters()]
    assert all(parameter.grad is None for parameter in model.parameters())
    assert {parameter.dtype for parameter in model.parameters()} == {BF16}
    train(model, optimizer, range(1, 2), lr=0.0)  # an old gradient would be added to the next
    assert same(weights_of(model), now)


def test_what_is_frozen_is_left_alone_and_what_is_tied_is_stepped_once() -> None:
    model = make_model("smollm2").to(BF16)
    frozen = model.model.layers[0].mlp.up_proj.weight.requires_grad_(False)
    begun = frozen.clone()
    optimizer = Optimizer(model, 1e-2, 0.5)
    train(model, optimizer, range(2))
    assert torch.equal(frozen, begun)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    expected = {name for name, _ in model.named_parameters()} - {"model.layers.0.mlp.up_proj.weight"}
    assert masters_of(optimizer).keys() == expected
    assert "lm_head.weight" not in expected
    assert len(optimizer.tensors()) == 4 * len(expected)


def test_number_formats_may_be_mixed() -> None:
    model = nn.Sequential(Weights(2, torch.float32), Weights(2))
    optimizer = Optimizer(model, 1e-3, 0.0)
    (model[0].w.sum() + model[1].w.sum().float()).backward()  # type: ignore[union-attr,operator]
    assert optimizer.step(1e-3, 1e9) == pytest.approx(2)
    assert list(masters_of(optimizer)) == ["1.w"]
    assert torch.equal(model[0].w, masters_of(optimizer)["1.w"])


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_gradient_that_is_no_number_changes_nothing(dtype: torch.dtype, bad: float) -> None:
    model = make_model("qwen2").to(dtype)
    optimizer = Optimizer(model, 1e-3, 0.1)
    train(model, optimizer, range(2))
    weights = weights_of(model)
    state = {key: value.clone() for key, value in optimizer.tensors().items()}
    (loss_of(model, 1) * bad).backward()
    with pytest.raises(ArpoError, match=r"the gradient's norm is (inf|nan): training diverged; .* lower learning rate"):
        optimizer.step(1e-3, 1.0)
    assert same(weights_of(model), weights)
    assert same(optimizer.tensors(), state)
    assert optimizer.steps == 2
    train(model, optimizer, range(2, 3))
    assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_resumed_equals_not_stopped(dtype: torch.dtype, tmp_path: Path) -> None:
    straight = make_model("smollm2").to(dtype)
    whole = Optimizer(straight, 1e-4, 0.1)
    train(straight, whole, range(6), lr=1e-4)

    first = make_model("smollm2").to(dtype)
    begun = Optimizer(first, 1e-4, 0.1)
    train(first, begun, range(3), lr=1e-4)
    save_file(begun.tensors(), tmp_path / "optimizer.safetensors")
    second = make_model("smollm2", seed=5).to(dtype)
    second.load_state_dict(first.state_dict())
    resumed = Optimizer(second, 1e-4, 0.1)
    saved = load_file(tmp_path / "optimizer.safetensors")
    resumed.load(saved)
    for tensor in saved.values():
        tensor.zero_()  # it was copied
    train(second, resumed, range(3, 6), lr=1e-4)
    assert same(weights_of(second), weights_of(straight))
    assert same(resumed.tensors(), whole.tensors())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_on_a_gpu_it_resumes_too_and_stays_close_to_the_cpu(dtype: torch.dtype) -> None:
    def push(model: Weights, optimizer: Optimizer, steps: range) -> None:
        for step in steps:
            (model.w * torch.linspace(-1, step, 999, device=model.w.device)).sum().backward()
            optimizer.step(1e-3, max_grad_norm=1.0)

    models = [Weights(999, dtype, device) for device in ("cuda", "cuda", "cpu")]
    straight, halves, slow = models
    place = halves.w.data_ptr()
    optimizers = [Optimizer(model, 1e-3, 0.1) for model in models]
    push(straight, optimizers[0], range(6))
    push(slow, optimizers[2], range(6))
    push(halves, optimizers[1], range(3))
    assert halves.w.data_ptr() == place
    second = Weights(999, dtype, "cuda")
    second.load_state_dict(halves.state_dict())
    resumed = Optimizer(second, 1e-3, 0.1)
    resumed.load(optimizers[1].tensors())
    push(second, resumed, range(3, 6))
    assert same(weights_of(second), weights_of(straight))
    assert same(resumed.tensors(), optimizers[0].tensors())
    for key, value in optimizers[2].tensors().items():
        torch.testing.assert_close(resumed.tensors()[key], value, rtol=1e-5, atol=1e-6)


def test_state_of_another_model_is_refused() -> None:
    model = Weights(3)
    optimizer = Optimizer(model, 1e-3, 0.0)
    optimizer.load(optimizer.tensors())  # not stepped yet: nothing but masters
    model.w.sum().backward()
    optimizer.step(1e-3, 1.0)
    good = optimizer.tensors()
    assert good.keys() == {"step/w", "exp_avg/w", "exp_avg_sq/w", "master/w"}
    odd = {
        "only one of model and optimizer state has 'exp_avg/w'": {k: v for k, v in good.items() if k != "exp_avg/w"},
        "only one of model and optimizer state has 'master/w'": {k: v for k, v in good.items() if k != "master/w"},
        "only one of model and optimizer state has 'step/x'": good | {"step/x": torch.ones(())},
        r"'master/w' is torch\.float32 \(4,\), not torch\.float32 \(3,\)": good | {"master/w": torch.ones(4)},
        r"'exp_avg/w' is torch\.bfloat16": good | {"exp_avg/w": good["exp_avg/w"].to(BF16)},
    }
    before = {key: value.clone() for key, value in good.items()}
    for message, tensors in odd.items():
        with pytest.raises(ValueError, match=message):
            optimizer.load(tensors)
    assert same(optimizer.tensors(), before)
    with pytest.raises(ValueError, match="nothing to train"):
        Optimizer(model.requires_grad_(False), 1e-3, 0.0)


@pytest.mark.parametrize("family", ["smollm2", "gemma3"])
def test_gradient_checkpointing_changes_no_gradient(family: str) -> None:
    kept, model = make_model(family), make_model(family)
    calls: list[int] = []
    model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    loss_of(kept, 0).backward()  # type: ignore[no-untyped-call]
    with gradient_checkpointing(model):
        loss = loss_of(model, 0)
    assert len(calls) == 1
    loss.backward()  # type: ignore[no-untyped-call]
    assert len(calls) == 2
    for a, b in zip(kept.parameters(), model.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)
    loss_of(model, 0).backward()  # type: ignore[no-untyped-call]
    assert len(calls) == 3  # not outside
    assert not any(module.training for module in model.modules())
    assert not model.is_gradient_checkpointing


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_gradients_are_taken_without_a_step(dtype: torch.dtype) -> None:
    model = Weights(2, dtype)
    optimizer = Optimizer(model, 1e-3, 0.0)
    for _ in range(300):
        (model.w * torch.tensor([1.0, 2.0], dtype=dtype)).sum().backward()
    taken = optimizer.take_gradients()
    assert taken.keys() == {"w"}
    assert taken["w"].dtype == torch.float32
    assert taken["w"].tolist() == [300, 600]
    assert optimizer.take_gradients() == {}
    assert (model.w.tolist(), optimizer.steps) == ([1, 1], 0)
    model.w.sum().backward()
    assert optimizer.take_gradients()["w"].tolist() == [1, 1]
