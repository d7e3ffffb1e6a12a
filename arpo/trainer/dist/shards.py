"""Tensors that lie in shards on several ranks, written together and read by any number of them.

It is `torch.distributed.checkpoint` with its safetensors storage: every rank writes one file, whose header says as JSON
where its pieces belong. (Its default storage is not used: that one's `.metadata` file is a pickle.) No file is
unpickled. While they write or read, the ranks of a run tell each other their plans in pickles, over their own
connections, as that library does.

Does not cover: ranks that do not see the same directory.
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

from arpo.trainer.dist.process_group import is_loss
from arpo.errors import ArpoError

SHARDS = "optimizer"  # the folder in a checkpoint


def write_shards(tensors: Mapping[str, Tensor], directory: Path, group: Any) -> None:
    """Write what all ranks of the group hold of these tensors into `directory`/optimizer."""
    writer = HuggingFaceStorageWriter(str(directory / SHARDS), save_distributed=True)
    with _told_plainly(directory / SHARDS, "written"):
        save(dict(tensors), storage_writer=writer, process_group=group)


def read_shards(directory: Path) -> dict[str, Tensor]:
    """All of them, whole, in one process; ValueError if they are damaged."""
    tensors = {name: torch.empty(size) for name, size in shard_sizes(directory / SHARDS).items()}
    read_into(tensors, directory / SHARDS, None)
    return tensors


def shard_sizes(folder: Path) -> dict[str, torch.Size]:
    """The names and sizes of what a folder of safetensors holds."""
    try:
        found = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    except Exception as error:  # whatever is wrong with the files: it differs between versions
        raise ValueError(f"{folder} cannot be read: {error}") from error
    return {name: item.size for name, item in found.items() if isinstance(item, TensorStorageMetadata)}


def read_into(tensors: Mapping[str, Tensor], folder: Path, group: Any) -> None:
    """Fill these tensors, or this rank's shards of them, from a folder of safetensors, in shards or not."""
    reader = HuggingFaceStorageReader(str(folder))
    with _told_plainly(folder, "read"):
        load(dict(tensors), storage_reader=reader, process_group=group, no_dist=group is None)


@contextmanager
def _told_plainly(folder: Path, done: str) -> Iterator[None]:
    """No warnings of the library; what went wrong on some rank is told on all, unless it is that one is lost."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except CheckpointException as error:
        if is_loss(error):
            raise
        seen = [f"rank {rank}: {failure}" for rank, (failure, _) in error.failures.items()]
        raise ArpoError(f"{folder} cannot be {done} ({seen[0] if seen else error})") from error
