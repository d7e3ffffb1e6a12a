"""Compiles every Triton kernel for one kind of GPU (compute capability 9.0); no GPU is needed.

python tests/support/compile_kernels.py      # needs Triton; prints one line per kernel
"""

from __future__ import annotations

import time
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from arpo.engine.local import fused, kernels
from arpo.trainer import kernels as training

POINTER = {"bf16": "*bf16", "fp32": "*fp32"}


def build(kernel: Any, types: list[str], constants: dict[str, Any], **options: Any) -> None:
    """Compile one kernel for arguments of these types, or raise."""
    names, given = kernel.arg_names, iter(types)
    signature = {name: "constexpr" if name in constants else next(given) for name in names}
    places = {(names.index(name),): value for name, value in constants.items()}
    started = time.monotonic()
    source = ASTSource(fn=kernel, signature=signature, constexprs=places)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    shared = made.metadata.shared
    if shared > 227 * 1024:
        raise SystemExit(f"{kernel.__name__} wants {shared} bytes of shared memory")
    print(f"{kernel.__name__} {time.monotonic() - started:.1f} s, {shared} bytes shared")


def main() -> None:
    """Compile them all, for models of several shapes."""
    for dtype, pointer in POINTER.items():
        exact = dtype == "fp32"
        sizes = {"H": 3, "BLOCK_SIZE": 32}
        build(kernels._store_kv, [pointer] * 4 + ["*i64"] * 2 + ["i32"] * 6, {**sizes, "D": 64, "WIDTH": 256})
        for group, width in ((2, 6), (3, 64), (7, 64), (3, 96), (4, 128), (4, 256)):
            for rows, splits, window in ((16, 1, False), (16, 8, True), (16 if exact else 64, 1, True)):
                shape = {
                    **sizes,
                    "G": group,
                    "D": width,
                    "WIDTH": max(16, triton.next_power_of_2(width)),
                    "M": rows,
                    "N": 32 if exact else 64,
                }
                how = {"SPLITS": splits, "WINDOW": window, "PRECISION": "ieee" if exact else "tf32"}
                pointers = [pointer] * 2 + ["*fp32"] * 3 + [pointer] * 2 + ["*i32"] + ["*i64"] * 4
                build(kernels._paged_attention, [*pointers, "fp32", *["i32"] * 6], {**shape, **how})
        build(kernels._combine_splits, [pointer] + ["*fp32"] * 3, {"F": 9, "D": 64, "WIDTH": 64, "SPLITS": 8})
        types = [pointer, "*fp64", "*fp64", "*i64", "*fp32", "*fp32", "i32", "i32"]
        build(kernels._sample, types, {"CHUNK": kernels.VOCAB_CHUNK}, num_warps=8)
        types = [pointer, "*i64", "*fp32", "*fp32", "*fp32", "fp32", "i32"]
        build(training._logprob_forward, types, {"CHUNK": training.CHUNK}, num_warps=8)
        types = [pointer, "*i64", *["*fp32"] * 4, pointer, "fp32", "i32"]
        build(training._logprob_backward, types, {"CHUNK": training.CHUNK}, num_warps=8)
        build(fused._rms_norm, [pointer] * 3 + ["fp32"], {"N": 576, "SIZE": 1024, "PLUS_ONE": False})
        build(fused._rms_norm, [pointer] * 3 + ["fp32"], {"N": 576, "SIZE": 1024, "PLUS_ONE": True})
        build(fused._rotate, [pointer] * 4 + ["i32"] * 3, {"H": 9, "D": 64, "HEADS": 16, "HALF": 32})


if __name__ == "__main__":
    main()
