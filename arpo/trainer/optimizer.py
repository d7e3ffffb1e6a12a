"""AdamW over float32 master weights, so that small updates are not rounded away in bfloat16.

The master of a float32 parameter is the parameter itself. A parameter in another dtype (bfloat16) has a float32 copy:
the gradient of every backward pass is added to the copy's gradient, the copy is stepped, and then written into the
parameter in place, so that the engine's CUDA graphs read the new weights. Frozen parameters are left alone; tied ones
are stepped once.

    optimizer = Optimizer(model, lr=1e-6, weight_decay=0.0)
    for micro in batch:
        loss(model, micro).backward()
    norm = optimizer.step(lr=1e-6, max_grad_norm=1.0)

Not covered: two optimizers of one bfloat16 model at a time; rounding inside one backward pass (where it uses a
parameter several times, PyTorch adds up in the parameter's own dtype).
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
_STATE = ("step", "exp_avg", "exp_avg_sq")  # AdamW's state of a parameter


class Optimizer:
    """Steps the trainable parameters of `model`; `steps` counts the steps made."""

    def __init__(self, model: Any, lr: float, weight_decay: float, betas: tuple[float, float] = BETAS) -> None:
        self._parameters: dict[str, Tensor] = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if not self._parameters:
            raise ValueError("the model has nothing to train")
        self._masters = {name: _master(parameter) for name, parameter in self._parameters.items()}
        fused = True if all(master.is_cuda for master in self._masters.values()) else None
        self._adamw = torch.optim.AdamW(
            self._masters.values(), lr=lr, betas=betas, weight_decay=weight_decay, fused=fused
        )
        self.steps = 0

    @torch.no_grad()
    def step(self, lr: float, max_grad_norm: float) -> float:
        """Update the weights with the accumulated gradients, and clear them; returns the norm before clipping."""
        try:
            norm = float(_full(clip_grad_norm_(self._masters.values(), max_grad_norm)))
            if not math.isfinite(norm):
                raise Diverged(
                    f"the gradient's norm is {norm}: training diverged; "
                    "--resume from the last checkpoint with a lower learning rate (train.lr, or sft.lr)"
                )
            for group in self._adamw.param_groups:
                group["lr"] = lr
            self._adamw.step()
        finally:
            self.zero_grad()
        for name, master in self._masters.items():
            if master is not self._parameters[name]:
                self._parameters[name].copy_(master)
        self.steps += 1
        return norm

    def take_gradients(self) -> dict[str, Tensor]:
        """The accumulated gradients in float32, by parameter, which are cleared; no step is made."""
        taken = {name: master.grad for name, master in self._masters.items() if master.grad is not None}
        self.zero_grad()
        return taken

    def zero_grad(self) -> None:
        """Clear the gradients, also those that a pass which failed has not added to the master weights' yet."""
        self._adamw.zero_grad(set_to_none=True)
        for parameter in self._parameters.values():
            parameter.grad = None

    def tensors(self) -> dict[str, Tensor]:
        """The state for a checkpoint, on the CPU: `exp_avg/NAME`, `master/NAME` etc. Valid until the next step."""
        return {key: value.cpu().contiguous() for key, value in self.state().items()}

    def state(self) -> dict[str, Tensor]:
        """The state on its device, sharded if the parameters are."""
        found: dict[str, Tensor] = {}
        for name, master in self._masters.items():
            found |= {f"{key}/{name}": value for key, value in self._adamw.state.get(master, {}).items()}
            if master is not self._parameters[name]:
                found[f"master/{name}"] = master
        return {key: torch.as_tensor(value).detach() for key, value in found.items()}

    @property
    def parameters(self) -> Mapping[str, Tensor]:
        """The trained parameters by name."""
        return self._parameters

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore what `tensors` returned, for a model with the weights of that time; ValueError if it does not fit."""
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


def _full(number: Tensor) -> Tensor:
    """The value of a tensor that may be sharded."""
    return number.full_tensor() if isinstance(number, DTensor) else number


def _master(parameter: Tensor) -> Tensor:
    """The float32 tensor that is stepped in place of `parameter` and receives its gradients."""
    if parameter.dtype == torch.float32:
        return parameter
    master = parameter.detach().float().requires_grad_()
    parameter.register_post_accumulate_grad_hook(_move_gradient(master))  # type: ignore[no-untyped-call]
    return master


def _move_gradient(master: Tensor) -> Callable[[Tensor], None]:
    def move(parameter: Tensor) -> None:
        assert parameter.grad is not None
        if master.grad is None:
            master.grad = parameter.grad.float()
        else:
            master.grad += parameter.grad
        parameter.grad = None

    return move
