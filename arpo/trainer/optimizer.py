"""AdamW over float32 master weights, so that small updates count in whatever number format the model computes.

The master of a float32 parameter is the parameter itself. A parameter in another format (bfloat16) has a float32 copy:
the gradient of every backward pass is added to the copy's, the copy is stepped, and then written into the parameter, in
place, so that whoever reads the parameter's memory (an engine's CUDA graphs) reads the new weights. Parameters that do
not require a gradient are left alone; tied ones are stepped once.

    optimizer = Optimizer(model, lr=1e-6, weight_decay=0.0)
    for micro in batch:
        loss(model, micro).backward()
    norm = optimizer.step(lr=1e-6, max_grad_norm=1.0)

Does not cover: two optimizers of one bfloat16 model at a time; what is rounded inside of one backward pass (where it
uses a parameter several times, PyTorch adds up in the parameter's own format).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_

from arpo.errors import Diverged

BETAS = (0.9, 0.99)
_STATE = ("step", "exp_avg", "exp_avg_sq")  # what AdamW remembers of a parameter


class Optimizer:
    """Steps the trainable parameters of `model`; `steps` counts how often it did."""

    def __init__(self, model: Any, lr: float, weight_decay: float) -> None:
        self._parameters: dict[str, Tensor] = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if not self._parameters:
            raise ValueError("the model has nothing to train")
        self._masters = {name: _master(parameter) for name, parameter in self._parameters.items()}
        fused = True if all(master.is_cuda for master in self._masters.values()) else None
        self._adamw = torch.optim.AdamW(
            self._masters.values(), lr=lr, betas=BETAS, weight_decay=weight_decay, fused=fused
        )
        self.steps = 0

    @torch.no_grad()
    def step(self, lr: float, max_grad_norm: float) -> float:
        """Change the weights by the gradients gathered so far, and forget these; returns the norm before clipping."""
        try:
            norm = float(_whole(clip_grad_norm_(self._masters.values(), max_grad_norm)))
            if not math.isfinite(norm):
                raise Diverged(
                    f"the gradient's norm is {norm}: training diverged; "
                    "--resume from the last checkpoint with a lower learning rate (train.lr, or sft.lr)"
                )
            for group in self._adamw.param_groups:
                group["lr"] = lr
            self._adamw.step()
        finally:
            self._adamw.zero_grad(set_to_none=True)
        for name, master in self._masters.items():
            if master is not self._parameters[name]:
                self._parameters[name].copy_(master)
        self.steps += 1
        return norm

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint needs besides the model: `exp_avg/NAME` and the like, `master/NAME`. Valid until a step."""
        return {key: value.cpu().contiguous() for key, value in self.state().items()}

    def state(self) -> dict[str, Tensor]:
        """The same where it lies, in shards if the parameters are."""
        found: dict[str, Tensor] = {}
        for name, master in self._masters.items():
            found |= {f"{key}/{name}": value for key, value in self._adamw.state.get(master, {}).items()}
            if master is not self._parameters[name]:
                found[f"master/{name}"] = master
        return {key: torch.as_tensor(value).detach() for key, value in found.items()}

    @property
    def parameters(self) -> Mapping[str, Tensor]:
        """What it trains, by name."""
        return self._parameters

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over what `tensors` gave, for a model with the weights of that time; raises ValueError if it misfits."""
        self._check(tensors)
        for name, master in self._masters.items():
            if master is not self._parameters[name]:
                master.copy_(tensors[f"master/{name}"])
                self._parameters[name].copy_(master)
            self._adamw.state.pop(master, None)
            if f"step/{name}" in tensors:
                fused = self._adamw.param_groups[0]["fused"]
                self._adamw.state[master] = {
                    key: tensors[f"{key}/{name}"].to("cpu" if key == "step" and not fused else master.device, copy=True)
                    for key in _STATE
                }

    def _check(self, tensors: Mapping[str, Tensor]) -> None:
        expected: dict[str, tuple[int, ...]] = {}
        for name, master in self._masters.items():
            shapes = {"step": (), "exp_avg": master.shape, "exp_avg_sq": master.shape}
            if any(f"{key}/{name}" in tensors for key in _STATE):  # a parameter that was never stepped has none
                expected |= {f"{key}/{name}": tuple(shape) for key, shape in shapes.items()}
            if master is not self._parameters[name]:
                expected[f"master/{name}"] = tuple(master.shape)
        odd = sorted(expected.keys() ^ tensors.keys())
        if odd:
            raise ValueError(f"only one of model and optimizer state has {odd[0]!r}")
        for key, shape in expected.items():
            if tuple(tensors[key].shape) != shape or tensors[key].dtype != torch.float32:
                found = f"{tensors[key].dtype} {tuple(tensors[key].shape)}"
                raise ValueError(f"{key!r} is {found}, not torch.float32 {shape}")


def _whole(number: Tensor) -> Tensor:
    """A number that sharded gradients have together."""
    return number.full_tensor() if isinstance(number, DTensor) else number


def _master(parameter: Tensor) -> Tensor:
    """The float32 tensor that is stepped in place of `parameter`, and gets its gradients."""
    if parameter.dtype == torch.float32:
        return parameter
    master = parameter.detach().float().requires_grad_()
    parameter.register_post_accumulate_grad_hook(_handing_over(master))  # type: ignore[no-untyped-call]
    return master


def _handing_over(master: Tensor) -> Callable[[Tensor], None]:
    def hand_over(parameter: Tensor) -> None:
        assert parameter.grad is not None
        if master.grad is None:
            master.grad = parameter.grad.float()
        else:
            master.grad += parameter.grad
        parameter.grad = None

    return hand_over
