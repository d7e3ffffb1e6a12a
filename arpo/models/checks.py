"""Checks of a model from outside, before it is loaded: its files, the sizes in its config, and the memory it needs.

Guarantees: nothing here allocates more than a file's header, executes anything or unpickles. What fails is a ValueError
that names the file. Weights are read from safetensors only, and only from files of the model's own directory.
Not covered: what the values of the weights compute, and regular expressions of an adapter.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from arpo.config.files import nesting_depth, parse_json, read_limited, require_regular_file

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
GENERATION_CONFIG = "generation_config.json"
TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model")
SMALL_FILES = (
    *(CONFIG, GENERATION_CONFIG, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.jinja", "chat_template.json", "preprocessor_config.json", "processor_config.json"),
)
STORED_DTYPES = {"F32": "float32", "BF16": "bfloat16"}  # names in safetensors, and of `model.dtype`
MAX_TOKENIZER_BYTES = 2**28
MAX_NESTING = 32
MAX_SIZES = {  # ten times those of the largest models, or more
    **dict.fromkeys(("hidden_size", "n_embd", "d_model"), 2**18),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "moe_intermediate_size"), 2**22),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers"), 2**10),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "n_head"), 2**13),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 2**14),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 2**27),
    "head_dim": 2**14,
    "vocab_size": 2**24,
}


def check_directory(directory: Path) -> None:
    """Check the files of a model's directory that loading it would read."""
    for name in (*SMALL_FILES, *TOKENIZER_FILES):
        path = directory / name
        if not os.path.lexists(path):
            continue
        if name in TOKENIZER_FILES:
            if require_regular_file(path).stat().st_size > MAX_TOKENIZER_BYTES:
                raise ValueError(f"{name} is larger than {MAX_TOKENIZER_BYTES / 1e6:.0f} MB")
        elif name.endswith(".json"):
            read_object(path)
        else:
            read_limited(path)
    check_sizes(read_object(directory / CONFIG))
    for path in weight_files(directory):
        require_regular_file(path)


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a small file."""
    try:
        value = parse_json(read_limited(path))
    except ValueError as error:
        raise ValueError(f"{path.name} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path.name} holds no JSON object")
    if nesting_depth(value) > MAX_NESTING:
        raise ValueError(f"{path.name} is nested too deeply")
    return value


def check_sizes(config: dict[str, Any]) -> None:
    """Check the numbers in a config.json; a null or absent one means the family's default."""
    for key, value in _items(config):
        limit = MAX_SIZES.get(key)
        if limit is not None and value is not None and not (type(value) is int and 1 <= value <= limit):
            raise ValueError(f"{CONFIG} has {key} = {_short(value)}, expected a whole number from 1 to {limit}")
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{CONFIG} has {key} = {value}, expected a finite number")


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a model, as its index names them; they must be in its own directory."""
    if os.path.lexists(directory / WEIGHTS):
        return [directory / WEIGHTS]
    if not os.path.lexists(directory / INDEX):
        pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in directory.glob(pattern))
        found = f"{pickles[0]} is a pickle" if pickles else f"it has no {WEIGHTS}, perhaps only a pickle (*.bin)"
        raise ValueError(
            f"{found}, which can run code when it is read: if you trust it, load it with transformers and write it "
            "with save_pretrained, which gives safetensors"
        )
    names = read_object(directory / INDEX).get("weight_map")
    if not isinstance(names, dict) or not names or not all(isinstance(name, str) for name in names.values()):
        raise ValueError(f"{INDEX} has no weight_map of file names")
    for name in names.values():
        if name in ("", ".", "..") or "/" in name or "\\" in name or "\0" in name or not name.endswith(".safetensors"):
            raise ValueError(f"{INDEX} names {_short(name)}, which is not a safetensors file of this directory")
    return [directory / name for name in sorted(set(names.values()))]


def num_stored_values(files: list[Path]) -> Counter[str]:
    """The number of values in safetensors files by dtype (float32, bfloat16, or safetensors' name of another).

    ValueError for a file that is damaged.
    """
    from safetensors import SafetensorError, safe_open

    total: Counter[str] = Counter()
    for path in files:
        try:
            with safe_open(path, framework="np") as tensors:
                for part in map(tensors.get_slice, tensors.keys()):
                    kind = part.get_dtype()
                    total[STORED_DTYPES.get(kind, kind)] += math.prod(part.get_shape())
        except FileNotFoundError:
            raise ValueError(f"{path.name} is missing") from None
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{path.name} is damaged: {error}") from None
    return total


def available_memory() -> int:
    """Bytes of memory that can still be used: what the kernel says, or less if the control group has less."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        found = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines)}
        free = found["MemAvailable"] + found["SwapFree"]
    except (OSError, LookupError, ValueError):
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):  # no control group, or no limit ("max")
        free = min(free, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return free


def require_memory(num_values: int, dtype: Any, device: Any) -> None:
    """Raise ValueError unless a model with so many weights fits into the memory of a torch device."""
    if device.type == "cuda":
        import torch

        size = torch.cuda.mem_get_info(device)[1]
        found = f"the GPU has {show_bytes(size)}"
    else:
        size = available_memory()
        found = f"this machine has {show_bytes(size)} of RAM free"
    needed = num_values * dtype.itemsize
    if needed > size:
        kind = str(dtype).removeprefix("torch.")
        raise ValueError(f"it needs about {show_bytes(needed)} of memory as {kind}, and {found}")


def show_bytes(count: float) -> str:
    """A number of bytes for people: "3.2 TB"."""
    units = ("bytes", "kB", "MB", "GB", "TB", "PB")
    power = min(len(units) - 1, int(math.log10(max(1, count)) / 3))
    return f"{count / 1000**power:,.1f} {units[power]}" if power else f"{count:.0f} bytes"


def _items(value: Any) -> Iterator[tuple[str, Any]]:
    """The keys and values of an object and of those inside it."""
    for key, inner in value.items():
        yield key, inner
        if isinstance(inner, dict):
            yield from _items(inner)


def _short(value: Any) -> str:
    try:
        return f"{value!r:.60}"
    except ValueError:  # Python writes no number of more than 4300 digits
        return "a number of thousands of digits"
