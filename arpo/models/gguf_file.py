"""Parsing a GGUF file: its metadata, and where its tensors lie.

Guarantees: every length is checked against the size of the file before it is used, and tensors may not overlap, so the
memory that a file can make us allocate is bounded by its size. Invalid files raise ValueError.

Not covered: big-endian files, nested arrays, split models.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_DAMAGED = "it is damaged or incomplete"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Position and format of one tensor in the file."""

    kind: Any  # gguf.GGMLQuantizationType
    shape: tuple[int, ...]  # in the order of torch
    start: int
    size: int  # bytes
    bits: float  # per value


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A parsed file. `data` is memory-mapped, so tensors are read only when needed."""

    data: Array
    metadata: dict[str, Any]
    tensors: dict[str, StoredTensor]

    def dequantize(self, name: str, first: int = 0, last: int | None = None) -> Array:
        """Return rows `first` to `last` (default: all) of a tensor as float32."""
        from gguf import dequantize

        tensor = self.tensors[name]
        raw = self.data[tensor.start : tensor.start + tensor.size].reshape(math.prod(tensor.shape[:-1]), -1)
        try:
            rows = np.array(dequantize(raw[first:last], tensor.kind), dtype=np.float32)
        except NotImplementedError:
            raise ValueError(f"its tensor {name!r} is stored as {tensor.kind.name}, which cannot be read") from None
        return rows.reshape(-1, *tensor.shape[1:])

    def integer(self, key: str, default: int | None = None) -> int:
        """Return a metadata value that must be an integer >= 1."""
        value = self.metadata.get(key, default)
        if type(value) is not int or not 1 <= value < 2**31:
            raise ValueError(f"its {key} is {value!r}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return a metadata value that must be a float > 0."""
        value = self.metadata.get(key, default)
        if type(value) is not float or not 0 < value < 1e30:
            raise ValueError(f"its {key} is {value!r}")
        return float(str(np.float32(value)))  # 1e-05, not 9.999999747378752e-06

    def string(self, key: str, default: str | None = None) -> str:
        """Return a metadata value that must be a string."""
        value = self.metadata.get(key, default)
        if not isinstance(value, str):
            raise ValueError(f"its {key} is {value!r}")
        return value

    def array(self, key: str, kind: type, default: list[Any] | None = None) -> list[Any]:
        """Return a metadata value that must be a list of `kind`."""
        value = self.metadata.get(key, default)
        if not isinstance(value, list) or not all(type(item) is kind for item in value):
            raise ValueError(f"its {key} is not a list of {kind.__name__}")
        return value


def read_gguf(path: Path) -> GgufFile:
    """Parse the header of a file and check it."""
    if path.stat().st_size < 24:
        raise ValueError("it is not a GGUF file")
    data = np.memmap(path, mode="r")
    cursor = _Cursor(data.data)
    if bytes(cursor.take(4)) != b"GGUF":
        raise ValueError("it is not a GGUF file")
    version = cursor.scalar("<I")
    if version not in (2, 3):
        raise ValueError(f"its GGUF version is {version}; supported are 2 and 3, little-endian")
    num_tensors, num_keys = cursor.scalar("<Q"), cursor.scalar("<Q")
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        key = cursor.string()
        if key in metadata:
            raise ValueError(f"it has {key!r} twice")
        metadata[key] = cursor.value()
    if metadata.get("split.count", 0) not in (0, 1):
        raise ValueError("it is one part of a split model: merge the parts first, with `llama-gguf-split --merge`")
    infos = [_tensor_info(cursor) for _ in range(num_tensors)]
    alignment = GgufFile(data, metadata, {}).integer("general.alignment", 32)
    start = -(-cursor.position // alignment) * alignment
    tensors = {name: _stored_tensor(shape, kind, start + offset, len(data)) for name, shape, kind, offset in infos}
    ordered = sorted(tensors.values(), key=lambda tensor: tensor.start)
    if len(tensors) != len(infos) or any(a.start + a.size > b.start for a, b in pairwise(ordered)):
        raise ValueError("two of its tensors share a name or overlap")
    return GgufFile(data, metadata, tensors)


class _Cursor:
    """Reads bytes in order and never past their end."""

    def __init__(self, data: memoryview) -> None:
        self.data, self.position = data, 0

    def take(self, count: int) -> memoryview:
        if count > len(self.data) - self.position:
            raise ValueError(_DAMAGED)
        self.position += count
        return self.data[self.position - count : self.position]

    def scalar(self, layout: str) -> Any:
        return struct.unpack(layout, self.take(struct.calcsize(layout)))[0]

    def string(self) -> str:
        try:
            return str(self.take(self.scalar("<Q")), "utf-8")
        except UnicodeDecodeError:
            raise ValueError(_DAMAGED) from None

    def value(self) -> Any:
        kind = self.scalar("<I")
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array()
        return self.scalar(_scalar_layout(kind))

    def array(self) -> list[Any]:
        kind, count = self.scalar("<I"), self.scalar("<Q")
        if kind == _STRING:
            return [self.string() for _ in range(count)]  # raises at the end of the file, whatever the count
        layout = _scalar_layout(kind)
        data = self.take(count * struct.calcsize(layout))
        return [value for (value,) in struct.iter_unpack(layout, data)]


def _scalar_layout(kind: int) -> str:
    if kind not in _SCALARS:
        raise ValueError(f"it has a value of the unknown type {kind}")
    return _SCALARS[kind]


def _tensor_info(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name, num_dims = cursor.string(), cursor.scalar("<I")
    if not 1 <= num_dims <= 4:
        raise ValueError(f"its tensor {name!r} has {num_dims} dimensions")
    shape = struct.unpack(f"<{num_dims}Q", cursor.take(8 * num_dims))
    return name, shape[::-1], cursor.scalar("<I"), cursor.scalar("<Q")


def _stored_tensor(shape: tuple[int, ...], kind: int, start: int, end: int) -> StoredTensor:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    if kind not in {int(known) for known in GGML_QUANT_SIZES}:
        raise ValueError(f"it has tensors of type {kind}, which the gguf package does not know")
    block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    size = math.prod(shape) // block * block_bytes
    if min(shape) < 1 or shape[-1] % block or start + size > end:
        raise ValueError(_DAMAGED)
    return StoredTensor(GGMLQuantizationType(kind), shape, start, size, 8 * block_bytes / block)
