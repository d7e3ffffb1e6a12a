"""Sharded tensors in a checkpoint, written by all ranks together and read by any number of them.

This is `torch.distributed.checkpoint` with its safetensors storage: every rank writes one file, whose JSON header says
where its pieces belong. (The default storage is not used: its `.metadata` file is a pickle.) No file is unpickled.
While reading and writing, the ranks of a run exchange their plans as pickles over their own connections, as that
library does.

Not covered: ranks that do not share a file system.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from arpo.errors import ArpoError
from arpo.trainer.dist.process_group import is_lost_rank

SHARDS = "optimizer"  # the folder in a checkpoint


def write_shards(tensors: Mapping[str, Tensor], directory: Path, group: Any) -> None:
    """Write each rank's shards of these tensors into `directory`/optimizer."""
    writer = HuggingFaceStorageWriter(str(directory / SHARDS), save_distributed=True)
    with _translate_errors(directory / SHARDS, "written"):
        save(dict(tensors), storage_writer=writer, process_group=group)


def read_shards(directory: Path) -> dict[str, Tensor]:
    """All tensors, whole, in one process; ValueError if the files are damaged."""
    tensors = {name: torch.empty(size) for name, size in shard_sizes(directory / SHARDS).items()}
    read_into(tensors, directory / SHARDS, None)
    return tensors


def shard_sizes(folder: Path) -> dict[str, torch.Size]:
    """The names and sizes of the tensors in a folder of safetensors."""
    try:
        found = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    except Exception as error:  # the error types differ between versions of the library
        raise ValueError(f"{folder} cannot be read: {error}") from error
    return {name: item.size for name, item in found.items() if isinstance(item, TensorStorageMetadata)}


def read_into(tensors: Mapping[str, Tensor], folder: Path, group: Any) -> None:
    """Fill these tensors, or this rank's shards of them, from a folder of safetensors, sharded or not."""
    reader = HuggingFaceStorageReader(str(folder))
    with _translate_errors(folder, "read"):
        load(dict(tensors), storage_reader=reader, process_group=group, no_dist=group is None)


@contextmanager
def _translate_errors(folder: Path, done: str) -> Iterator[None]:
    """Silence the library's warnings, and raise the first rank's failure as an ArpoError on all ranks."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except CheckpointException as error:
        if is_lost_rank(error):
            raise
        seen = [f"rank {rank}: {failure}" for rank, (failure, _) in error.failures.items()]
        raise ArpoError(f"{folder} cannot be {done} ({seen[0] if seen else error})") from error
