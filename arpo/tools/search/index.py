"""An index of passages, in memory or in a directory that is memory-mapped.

    open_index("wiki-index").search("birthplace of Mira Tolven", 3)

Guarantees: opening a directory takes milliseconds whatever its size, and processes share its pages. A missing or
truncated file is noticed at opening.
Not covered: adding or removing passages (rebuild the index); damage inside a file.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from arpo.config.files import expand_user, parse_json, read_limited
from arpo.errors import ArpoError
from arpo.tools.search.bm25 import Bm25, Longs
from arpo.tools.search.dense import EMBEDDINGS, Dense, Embedder
from arpo.types import Document

FORMAT = 1
MANIFEST = "manifest.json"
FUSION_DEPTH = 100  # results of each ranking that a hybrid search fuses
RANK_OFFSET = 60  # a passage gets 1 / (60 + rank) from each ranking

Mode = Literal["bm25", "dense", "hybrid"]


@dataclass(frozen=True, slots=True, eq=False)
class Index:
    """Searchable passages. Title and text of passage `i` begin at `text_starts[2 * i]` and `[2 * i + 1]`."""

    texts: memoryview
    text_starts: Longs  # 2 * passages + 1
    bm25: Bm25
    fingerprint: str  # of the passages and the BM25 parameters
    split_underscores: bool  # no passage has underscores, so those of a query become spaces
    dense: Dense | None = None

    def __len__(self) -> int:
        return self.bm25.size

    def document(self, number: int) -> Document:
        """Return passage `number`, counted from 0."""
        start, middle, end = self.text_starts[2 * number : 2 * number + 3].tolist()
        return Document(str(self.texts[start:middle], "utf-8"), str(self.texts[middle:end], "utf-8"))

    def search(self, query: str, count: int, mode: Mode = "bm25") -> list[Document]:
        """Return the `count` best passages for a query, best first; fewer if fewer match."""
        if self.split_underscores:
            query = query.replace("_", " ")
        if mode == "bm25":
            found = self.bm25.top(query, count)
        elif mode == "dense":
            found = self._dense().top(query, count)
        else:
            depth = max(FUSION_DEPTH, count)
            found = fuse([self.bm25.top(query, depth), self._dense().top(query, depth)], count)
        return [self.document(number) for number in found]

    def version(self, mode: str) -> str:
        """Return a string that changes with anything that affects results; ArpoError if the mode is not available."""
        if mode not in get_args(Mode):
            raise ArpoError(f"there is no search mode {mode!r}; there are: {', '.join(get_args(Mode))}")
        return self.fingerprint if mode == "bm25" else f"{self.fingerprint} {mode} {self._dense().digest}"

    def _dense(self) -> Dense:
        if self.dense is None:
            raise ArpoError("this index can only be searched by bm25; for dense and hybrid, build it with --dense")
        return self.dense


def fuse(rankings: Sequence[Sequence[int]], count: int) -> list[int]:
    """Reciprocal rank fusion: return the `count` best of several rankings, ties by number."""
    scores: dict[int, float] = {}
    for ranking in rankings:
        for rank, number in enumerate(ranking, 1):
            scores[number] = scores.get(number, 0.0) + 1 / (RANK_OFFSET + rank)
    return sorted(scores, key=lambda number: (-scores[number], number))[:count]


def open_index(directory: str | Path, device: str = "auto") -> Index:
    """Open an index on disk. `device` is where dense search computes; auto: CUDA if available."""
    folder = expand_user(directory)
    manifest = _manifest(folder)
    for name, size in manifest["files"].items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != size:
            raise ArpoError(f"{path} is missing or truncated; rebuild the index")
    arrays = (_array(folder, name) for name in ("word_starts", "lists", "starts", "peaks", "passages", "impacts"))
    bm25 = Bm25(manifest["passages"], _bytes(folder, "words"), *arrays)
    texts, text_starts = _bytes(folder, "texts"), _array(folder, "text_starts")
    dense, about = None, manifest["dense"]
    if about is not None:
        embedder = Embedder(about["model"], about["query_prefix"], about["passage_prefix"])
        dense = Dense(_array(folder, EMBEDDINGS), embedder, about["digest"], device)
    return Index(texts, text_starts, bm25, manifest["fingerprint"], manifest["split_underscores"], dense)


def _manifest(folder: Path) -> dict[str, Any]:
    try:
        manifest = parse_json(read_limited(folder / MANIFEST))
    except (FileNotFoundError, NotADirectoryError):
        raise ArpoError(f"{folder} is not a search index; build one with `arpo index build CORPUS -o DIR`") from None
    except (OSError, ValueError) as error:
        raise ArpoError(f"cannot read {folder / MANIFEST}: {error}") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT or "files" not in manifest:
        raise ArpoError(f"{folder} was not built by this version of arpo; rebuild the index")
    return manifest


def _array(folder: Path, name: str) -> NDArray[Any]:
    return np.asarray(np.load(folder / f"{name}.npy", mmap_mode="r"))


def _bytes(folder: Path, name: str) -> memoryview:
    with (folder / f"{name}.bin").open("rb") as file:
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
