"""What a GPU can do: memory, speeds, and how much of them is reached.

Peak figures are those of the makers' data sheets. How much of them is reached, and what launching costs, was fitted to
measurements of this package on one H200 (docs/scaling.md) and is assumed to hold for the others. Links inside a node
and networks between nodes were not measured at all.

    hardware = find_hardware("h200")            # or a TOML file, or "here": this machine, measured now
"""

from __future__ import annotations

import os
import time
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from arpo.errors import ArpoError


@dataclass(frozen=True, slots=True)
class Hardware:
    """One GPU (or CPU) and how it is connected. Bytes, seconds, FLOPs; `link` and `network` are one way."""

    name: str
    memory: float  # bytes
    bandwidth: float  # bytes a second between memory and processor
    flops: float  # a second, in 16-bit numbers, dense
    flops32: float  # the same in float32
    link: float  # bytes a second from one GPU to others of its node
    network: float  # bytes a second into a node
    node: int = 8  # GPUs in a node
    flops_reached: float = 0.6
    bandwidth_reached: float = 0.6
    network_reached: float = 0.7  # of link and network
    decode_layer: float = 6e-5  # seconds a layer of a decode step takes beside reading and arithmetic
    eager_layer: float = 4e-4  # seconds to launch one layer's forward pass, operation by operation
    step_host: float = 1.5e-4  # seconds between two decode steps
    token_host: float = 5e-6  # seconds of the host for each sampled token
    patience: int = 8  # decode steps for which the engine holds back what is to be read
    layer_sync: float = 2e-5  # seconds a layer waits for the other GPUs of its replica, beside what is sent

    def __post_init__(self) -> None:
        """All sizes and speeds are positive."""
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name != "name" and not (isinstance(value, int | float) and value >= 0):
                raise ArpoError(f"{self.name}: {field.name}: got {value!r}, expected a number, not negative")
        for name in ("memory", "bandwidth", "flops", "flops32", "link", "network", "node"):
            if not getattr(self, name):
                raise ArpoError(f"{self.name}: {name}: must be more than 0")
        for name in ("flops_reached", "bandwidth_reached", "network_reached"):
            if not 0 < getattr(self, name) <= 1:
                raise ArpoError(f"{self.name}: {name}: must be above 0 and at most 1")

    @property
    def reading(self) -> float:
        """Bytes a second that are really read."""
        return self.bandwidth * self.bandwidth_reached

    def arithmetic(self, number_bytes: int) -> float:
        """FLOPs a second that are really done in numbers of so many bytes."""
        return (self.flops if number_bytes == 2 else self.flops32) * self.flops_reached

    def sending(self, gpus: int) -> float:
        """Bytes a second to each of so many GPUs: over the network as soon as they are more than a node has."""
        return self.network_reached * (self.link if gpus <= self.node else min(self.link, self.network))

    def shared(self, runs: int) -> Hardware:
        """What one of several runs gets if they take turns on the GPU: a share of its time, and of its memory."""
        part = {name: getattr(self, name) / runs for name in ("memory", "bandwidth", "flops", "flops32")}
        return replace(self, name=f"{self.name} / {runs}", decode_layer=self.decode_layer * runs, **part)


GB, TERA = 1e9, 1e12
GPUS = {
    gpu.name: gpu
    for gpu in (
        Hardware("a100", 80 * GB, 2039 * GB, 312 * TERA, 19.5 * TERA, 300 * GB, 200 * GB),
        Hardware("h100", 80 * GB, 3350 * GB, 989 * TERA, 67 * TERA, 450 * GB, 400 * GB),
        Hardware("h200", 141 * GB, 4800 * GB, 989 * TERA, 67 * TERA, 450 * GB, 400 * GB),
        Hardware("l40s", 48 * GB, 864 * GB, 362 * TERA, 91.6 * TERA, 32 * GB, 50 * GB),
    )
}
# Names and units of a hardware file; what is not there is as in `Hardware`.
UNITS = {
    "memory_gb": ("memory", GB),
    "bandwidth_gbs": ("bandwidth", GB),
    "tflops": ("flops", TERA),
    "tflops32": ("flops32", TERA),
    "link_gbs": ("link", GB),
    "network_gbs": ("network", GB),
}
PLAIN = tuple(field.name for field in fields(Hardware) if field.name not in {"name", *(n for n, _ in UNITS.values())})


def find_hardware(name: str, width: int = 1024, inner: int = 4096) -> Hardware:
    """A GPU by its name, from a TOML file, or this machine ("here"), measured with a model's widths."""
    if name.lower() in GPUS:
        return GPUS[name.lower()]
    if name == "here":
        return measure(width, inner)
    if name.endswith(".toml"):
        return read_hardware(Path(name).expanduser())
    known = ", ".join(GPUS)
    raise ArpoError(f"--gpu: got {name!r}, expected one of {known}, here (this machine, measured now) or a TOML file")


def read_hardware(path: Path) -> Hardware:
    """Hardware from a TOML file: `base = "h100"` and what differs, or all of it."""
    try:
        values: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ArpoError(f"{path}: there is no such file") from None
    except (OSError, ValueError) as error:
        raise ArpoError(f"{path}: cannot be read as TOML: {error}") from None
    base = values.pop("base", None)
    unknown = sorted(set(values) - set(UNITS) - set(PLAIN) - {"name"})
    if unknown:
        raise ArpoError(f"{path}: {unknown[0]}: unknown; known are base, name, {', '.join([*UNITS, *PLAIN])}")
    if base is not None and base not in GPUS:
        raise ArpoError(f"{path}: base: got {base!r}, expected one of {', '.join(GPUS)}")
    missing = sorted(set(UNITS) - set(values)) if base is None else []
    if missing:
        raise ArpoError(f'{path}: needs {", ".join(missing)}, or base = "h100" and what differs from that')
    wrong = [key for key in (*UNITS, *PLAIN) if key in values and not _is_number(values[key])]
    if wrong:
        raise ArpoError(f"{path}: {wrong[0]}: got {values[wrong[0]]!r}, expected a number")
    given = {field: values[key] * unit for key, (field, unit) in UNITS.items() if key in values}
    given |= {key: values[key] for key in PLAIN if key in values}
    given["name"] = str(values.get("name", path.stem))
    return replace(GPUS[base], **given) if base else Hardware(**given)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


LAYER_OPERATIONS = {"cpu": 600, "cuda": 50}  # small ones that a layer's forward pass is as long as; fitted


def measure(width: int = 1024, inner: int = 4096) -> Hardware:
    """This machine, from a matrix product of a model's width, a copy and a small operation, a few seconds in all."""
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = 16384 if device.type == "cuda" else 512
    flops = {}
    for dtype in (torch.bfloat16, torch.float32):
        left = torch.randn(rows, width, device=device, dtype=dtype)
        right = torch.randn(width, inner, device=device, dtype=dtype)
        flops[dtype] = 2 * rows * width * inner / _seconds(torch.matmul, left, right)
    much = torch.empty(2**28 if device.type == "cuda" else 2**24, device=device)
    target = torch.empty_like(much)
    copied = 2 * much.nbytes / _seconds(target.copy_, much)
    few = torch.randn(16, 16, device=device)
    small = _seconds(torch.matmul, few, few)
    cuda = device.type == "cuda"
    nominal, layer = GPUS["h200"], LAYER_OPERATIONS[device.type] * small
    return Hardware(
        "here",
        memory=float(torch.cuda.get_device_properties(0).total_memory) if cuda else _main_memory(),
        bandwidth=copied,
        flops=flops[torch.bfloat16],
        flops32=flops[torch.float32],
        link=nominal.link,
        network=nominal.network,
        flops_reached=1.0,  # what was measured is what was reached
        bandwidth_reached=1.0,
        decode_layer=nominal.decode_layer if cuda else layer,
        eager_layer=layer,
        patience=nominal.patience if cuda else 0,
    )


def _seconds(operation: Callable[..., object], *given: Any) -> float:
    """Of one call: the best of five rounds of at least 50 ms.

    On a CPU these are CPU seconds, shared out to the threads: what the machine does beside does not count.
    """
    import torch

    cuda, large = given[0].is_cuda, given[0].numel() > 10_000
    wait: Callable[[], None] = torch.cuda.synchronize if cuda else lambda: None
    threads = 1 if cuda or not large else torch.get_num_threads()
    clock = time.perf_counter if cuda else time.process_time
    operation(*given)
    best = float("inf")
    for _ in range(5):
        wait()
        begin, calls = clock(), 0
        while clock() - begin < 0.05:
            operation(*given)
            calls += 1
            if large:
                wait()
        wait()
        best = min(best, (clock() - begin) / calls / threads)
    return best


def _main_memory() -> float:
    return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
