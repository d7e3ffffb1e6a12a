"""The bytes of a GGUF file: its metadata, and where its tensors lie.

Every length in the file is checked against its size before anything is made of it, and tensors may not overlap: what a
file can make us allocate is bounded by what it holds. Mistakes are ValueErrors whose text goes on after "the file:".

Does not cover: big-endian files, nested arrays, models in several files.
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
_DAMAGED = "it is damaged or not complete"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where one tensor lies, how its numbers are stored, and how many bits one takes."""

    kind: Any  # gguf.GGMLQuantizationType
    shape: tuple[int, ...]  # as torch has it
    start: int
    size: int
    bits: float


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A whole file: its bytes (mapped, not read), metadata and tensors."""

    data: Array
    meta: dict[str, Any]
    tensors: dict[str, StoredTensor]

    def numbers(self, name: str, first: int = 0, last: int | None = None) -> Array:
        """A tensor's numbers as float32; of the rows from `first` up to `last` if given."""
        from gguf import dequantize

        tensor = self.tensors[name]
        raw = self.data[tensor.start : tensor.start + tensor.size].reshape(math.prod(tensor.shape[:-1]), -1)
        try:
            rows = np.array(dequantize(raw[first:last], tensor.kind), dtype=np.float32)
        except NotImplementedError:
            raise ValueError(f"its tensor {name!r} is stored as {tensor.kind.name}, which can't be read") from None
        return rows.reshape(-1, *tensor.shape[1:])

    def whole(self, key: str, default: int | None = None) -> int:
        """A whole number of the metadata, at least 1."""
        value = self.meta.get(key, default)
        if type(value) is not int or not 1 <= value < 2**31:
            raise ValueError(f"its {key} is {value!r}")
        return value

    def real(self, key: str, default: float | None = None) -> float:
        """A number of the metadata, above 0."""
        value = self.meta.get(key, default)
        if type(value) is not float or not 0 < value < 1e30:
            raise ValueError(f"its {key} is {value!r}")
        return float(str(np.float32(value)))  # 1e-05, not 9.999999747378752e-06

    def word(self, key: str, default: str | None = None) -> str:
        """A text of the metadata."""
        value = self.meta.get(key, default)
        if not isinstance(value, str):
            raise ValueError(f"its {key} is {value!r}")
        return value

    def items(self, key: str, kind: type, default: list[Any] | None = None) -> list[Any]:
        """A list of the metadata, all of one kind."""
        value = self.meta.get(key, default)
        if not isinstance(value, list) or not all(type(item) is kind for item in value):
            raise ValueError(f"its {key} is no list of {kind.__name__}")
        return value


def read_gguf(path: Path) -> GgufFile:
    """Metadata and tensors of a file."""
    if path.stat().st_size < 24:
        raise ValueError("it is no GGUF file")
    data = np.memmap(path, mode="r")
    cursor = _Cursor(data.data)
    if bytes(cursor.take(4)) != b"GGUF":
        raise ValueError("it is no GGUF file")
    version = cursor.scalar("<I")
    if version not in (2, 3):
        raise ValueError(f"its GGUF version is {version}; supported are 2 and 3, little-endian")
    num_tensors, num_values = cursor.scalar("<Q"), cursor.scalar("<Q")
    meta: dict[str, Any] = {}
    for _ in range(num_values):
        key = cursor.text()
        if key in meta:
            raise ValueError(f"it has {key!r} twice")
        meta[key] = cursor.value()
    if meta.get("split.count", 0) not in (0, 1):
        raise ValueError("it is one of several pieces: join them first, with `llama-gguf-split --merge`")
    infos = [_tensor_info(cursor) for _ in range(num_tensors)]
    align = GgufFile(data, meta, {}).whole("general.alignment", 32)
    start = -(-cursor.at // align) * align
    tensors = {name: _stored(shape, kind, start + offset, len(data)) for name, shape, kind, offset in infos}
    ordered = sorted(tensors.values(), key=lambda tensor: tensor.start)
    if len(tensors) != len(infos) or any(a.start + a.size > b.start for a, b in pairwise(ordered)):
        raise ValueError("two of its tensors share a name or a place")
    return GgufFile(data, meta, tensors)


class _Cursor:
    """Reads forward through bytes and never past their end."""

    def __init__(self, data: memoryview) -> None:
        self.data, self.at = data, 0

    def take(self, count: int) -> memoryview:
        if count > len(self.data) - self.at:
            raise ValueError(_DAMAGED)
        self.at += count
        return self.data[self.at - count : self.at]

    def scalar(self, layout: str) -> Any:
        return struct.unpack(layout, self.take(struct.calcsize(layout)))[0]

    def text(self) -> str:
        try:
            return str(self.take(self.scalar("<Q")), "utf-8")
        except UnicodeDecodeError:
            raise ValueError(_DAMAGED) from None

    def value(self) -> Any:
        kind = self.scalar("<I")
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            return self.array()
        return self.scalar(_layout(kind))

    def array(self) -> list[Any]:
        kind, count = self.scalar("<I"), self.scalar("<Q")
        if kind == _STRING:
            return [self.text() for _ in range(count)]  # ends with the file, whatever the count
        layout = _layout(kind)
        data = self.take(count * struct.calcsize(layout))
        return [value for (value,) in struct.iter_unpack(layout, data)]


def _layout(kind: int) -> str:
    if kind not in _SCALARS:
        raise ValueError(f"it holds a value of kind {kind}, which is not known")
    return _SCALARS[kind]


def _tensor_info(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name, num_axes = cursor.text(), cursor.scalar("<I")
    if not 1 <= num_axes <= 4:
        raise ValueError(f"its tensor {name!r} has {num_axes} axes")
    shape = struct.unpack(f"<{num_axes}Q", cursor.take(8 * num_axes))
    return name, shape[::-1], cursor.scalar("<I"), cursor.scalar("<Q")


def _stored(shape: tuple[int, ...], kind: int, start: int, end: int) -> StoredTensor:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    if kind not in {int(known) for known in GGML_QUANT_SIZES}:
        raise ValueError(f"it holds tensors of kind {kind}, which the gguf package does not know")
    block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    size = math.prod(shape) // block * block_bytes
    if min(shape) < 1 or shape[-1] % block or start + size > end:
        raise ValueError(_DAMAGED)
    return StoredTensor(GGMLQuantizationType(kind), shape, start, size, 8 * block_bytes / block)
