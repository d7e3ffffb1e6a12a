"""What a GPU can do: memory, speeds, and what fraction of the peak speeds is achieved.

    hardware = find_hardware("h200")            # or a TOML file, or "here": this machine, measured now

Peak numbers are from the vendors' data sheets. The achieved fractions and the launch costs were fitted to measurements
of this package on one H200 (docs/scaling.md) and are assumed to hold for the others. Links inside a node and networks
between nodes were not measured.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from arpo.config.files import expand_user, parse_toml, read_limited
from arpo.errors import ArpoError


@dataclass(frozen=True, slots=True)
class Hardware:
    """One GPU (or CPU) and how it is connected. Bytes, seconds, FLOPs; `link` and `network` are one way."""

    name: str
    memory: float  # bytes
    bandwidth: float  # bytes per second between memory and processor
    flops: float  # per second, dense, in 16-bit numbers
    flops32: float  # the same in float32
    link: float  # bytes per second from one GPU to others of its node
    network: float  # bytes per second into a node
    node: int = 8  # GPUs in a node
    flops_reached: float = 0.6  # achieved fractions of the peak
    bandwidth_reached: float = 0.6
    network_reached: float = 0.7  # of link and network
    decode_layer: float = 6e-5  # seconds per layer of a decode step beside memory reads and compute
    eager_layer: float = 4e-4  # seconds to launch one layer's forward pass, kernel by kernel
    step_host: float = 1.5e-4  # seconds between two decode steps
    token_host: float = 5e-6  # host seconds per sampled token
    patience: int = 8  # decode steps for which the engine delays a prefill
    layer_sync: float = 2e-5  # latency per layer of the all-reduces of a replica

    def __post_init__(self) -> None:
        """Check the ranges."""
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name != "name" and not (isinstance(value, int | float) and value >= 0):
                raise ArpoError(f"{self.name}: {field.name}: got {value!r}, expected a number that is not negative")
        for name in ("memory", "bandwidth", "flops", "flops32", "link", "network", "node"):
            if not getattr(self, name):
                raise ArpoError(f"{self.name}: {name}: must be greater than 0")
        for name in ("flops_reached", "bandwidth_reached", "network_reached"):
            if not 0 < getattr(self, name) <= 1:
                raise ArpoError(f"{self.name}: {name}: must be greater than 0 and at most 1")

    @property
    def memory_speed(self) -> float:
        """Achieved memory bandwidth, in bytes per second."""
        return self.bandwidth * self.bandwidth_reached

    def compute_speed(self, number_bytes: int) -> float:
        """Achieved FLOPs per second in numbers of this size."""
        return (self.flops if number_bytes == 2 else self.flops32) * self.flops_reached

    def link_speed(self, gpus: int) -> float:
        """Achieved bytes per second to each of this many GPUs; over the network if they are more than a node has."""
        return self.network_reached * (self.link if gpus <= self.node else min(self.link, self.network))

    def shared_by(self, runs: int) -> Hardware:
        """What one of several runs gets if they share the GPU evenly: a fraction of its time and memory."""
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
# Keys of a hardware file with a unit. All other keys are the fields of `Hardware`.
UNITS = {
    "memory_gb": ("memory", GB),
    "bandwidth_gbs": ("bandwidth", GB),
    "tflops": ("flops", TERA),
    "tflops32": ("flops32", TERA),
    "link_gbs": ("link", GB),
    "network_gbs": ("network", GB),
}
PLAIN = tuple(field.name for field in fields(Hardware) if field.name not in {"name", *(n for n, _ in UNITS.values())})


def find_hardware(name: str, hidden: int = 1024, intermediate: int = 4096) -> Hardware:
    """A GPU by name, from a TOML file, or this machine ("here"), measured with matrices of these sizes."""
    if name.lower() in GPUS:
        return GPUS[name.lower()]
    if name == "here":
        return measure(hidden, intermediate)
    if name.endswith(".toml"):
        return read_hardware(expand_user(name))
    known = ", ".join(GPUS)
    raise ArpoError(f"--gpu: got {name!r}, expected one of {known}, here (this machine, measured now) or a TOML file")


def read_hardware(path: Path) -> Hardware:
    """Hardware from a TOML file: `base = "h100"` and the differences, or everything."""
    try:
        values: dict[str, Any] = parse_toml(read_limited(path).decode())
    except FileNotFoundError:
        raise ArpoError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:
        raise ArpoError(f"{path}: cannot be read as TOML: {error}") from None
    base = values.pop("base", None)
    if unknown := sorted(set(values) - set(UNITS) - set(PLAIN) - {"name"}):
        raise ArpoError(f"{path}: {unknown[0]}: unknown key; the keys are base, name, {', '.join([*UNITS, *PLAIN])}")
    if base is not None and base not in GPUS:
        raise ArpoError(f"{path}: base: got {base!r}, expected one of {', '.join(GPUS)}")
    if missing := sorted(set(UNITS) - set(values)) if base is None else []:
        raise ArpoError(f'{path}: needs {", ".join(missing)}, or base = "h100" and the differences')
    for key, value in values.items():
        if key != "name" and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise ArpoError(f"{path}: {key}: got {value!r}, expected a number")
    given = {field: values[key] * unit for key, (field, unit) in UNITS.items() if key in values}
    given |= {key: values[key] for key in PLAIN if key in values}
    given["name"] = str(values.get("name", path.stem))
    return replace(GPUS[base], **given) if base else Hardware(**given)


LAYER_KERNELS = {"cpu": 600, "cuda": 50}  # small operations that take as long as a layer's forward pass; fitted


def measure(hidden: int = 1024, intermediate: int = 4096) -> Hardware:
    """Measure this machine in a few seconds: matmuls of a model's sizes, a copy and a small operation."""
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    cuda = device.type == "cuda"
    rows = 16384 if cuda else 512
    flops = {}
    for dtype in (torch.bfloat16, torch.float32):
        left = torch.randn(rows, hidden, device=device, dtype=dtype)
        right = torch.randn(hidden, intermediate, device=device, dtype=dtype)
        flops[dtype] = 2 * rows * hidden * intermediate / _seconds(torch.matmul, left, right)
    source = torch.empty(2**28 if cuda else 2**24, device=device)
    target = torch.empty_like(source)
    copied = 2 * source.nbytes / _seconds(target.copy_, source)
    small = torch.randn(16, 16, device=device)
    memory = (
        torch.cuda.get_device_properties(0).total_memory
        if cuda
        else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    )
    h200, layer = GPUS["h200"], LAYER_KERNELS[device.type] * _seconds(torch.matmul, small, small)
    return Hardware(
        "here",
        memory=float(memory),
        bandwidth=copied,
        flops=flops[torch.bfloat16],
        flops32=flops[torch.float32],
        link=h200.link,
        network=h200.network,
        flops_reached=1.0,  # these are achieved speeds already
        bandwidth_reached=1.0,
        decode_layer=h200.decode_layer if cuda else layer,
        eager_layer=layer,
        patience=h200.patience if cuda else 0,
    )


def _seconds(operation: Callable[..., object], *args: Any) -> float:
    """The time of one call: the best of five rounds of at least 50 ms.

    On a CPU this is CPU time divided by the number of threads, so other work on the machine does not count.
    """
    import torch

    cuda, large = args[0].is_cuda, args[0].numel() > 10_000
    wait: Callable[[], None] = torch.cuda.synchronize if cuda else lambda: None
    threads = 1 if cuda or not large else torch.get_num_threads()
    clock = time.perf_counter if cuda else time.process_time
    operation(*args)
    best = float("inf")
    for _ in range(5):
        wait()
        begin, calls = clock(), 0
        while clock() - begin < 0.05:
            operation(*args)
            calls += 1
            if large:
                wait()
        wait()
        best = min(best, (clock() - begin) / calls / threads)
    return best
