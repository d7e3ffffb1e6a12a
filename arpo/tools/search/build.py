"""Building an index, in memory or on disk.

    build_index("corpus.jsonl", "wiki-index")

Guarantees: a corpus on disk is read as a stream; only the vocabulary and a few bytes per passage are kept in memory.
The same corpus gives the same files. A directory appears under its name only when it is complete.
Not covered: what a killed build leaves behind (a hidden directory beside the index, which may be removed).
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import ArrayLike, NDArray

from arpo.errors import ArpoError
from arpo.tools.search.bm25 import K1, B, Bm25, Ints, Longs
from arpo.tools.search.corpus import read_corpus
from arpo.tools.search.dense import Embedder, embed_passages
from arpo.tools.search.index import FORMAT, MANIFEST, Index, open_index
from arpo.tools.search.inverter import Inverter
from arpo.tools.search.tool import format_document
from arpo.types import Document

Progress = Callable[[str, float], None]  # stage, and the share of it that is done


def memory_index(documents: Iterable[Document]) -> Index:
    """Return an index in memory, for search by words."""
    inverter, texts, ends = Inverter(), bytearray(), array("q", [0])
    for document in documents:
        for text in (document.title, document.text):
            texts += text.encode("utf-8", "replace")
            ends.append(len(texts))
        inverter.add(f"{document.title} {document.text}")
    lengths, frequencies = inverter.finish()
    blocks = list(inverter.blocks(lengths, frequencies))
    words, word_starts, lists = _sorted_words(inverter)
    peaks, passages, impacts = (
        np.concatenate([getattr(block, name) for block in blocks]) for name in ("peaks", "passages", "impacts")
    )
    bm25 = Bm25(len(lengths), memoryview(words), word_starts, lists, _starts(frequencies), peaks, passages, impacts)
    text_starts = np.array(ends, dtype=np.int64)
    fingerprint = _fingerprint(hashlib.sha256(texts), text_starts)
    return Index(memoryview(texts), text_starts, bm25, fingerprint, b"_" not in words)


def build_index(
    corpus: str | Path,
    directory: str | Path,
    embedder: Embedder | None = None,
    force: bool = False,
    progress: Progress = lambda what, share: None,
) -> dict[str, Any]:
    """Index the passages of a file and return the manifest. With `force`, an existing index is replaced."""
    corpus, directory = Path(corpus).expanduser(), Path(directory).expanduser()
    try:
        with _new_folder(directory, force) as folder:
            manifest = _write_words(read_corpus(corpus), folder, progress)
            _write_manifest(manifest, folder)
            if embedder is not None:
                index = open_index(folder)
                texts = (format_document(index.document(number)) for number in range(len(index)))
                manifest["dense"] = embed_passages(embedder, texts, len(index), folder, partial(progress, "embedding"))
                _write_manifest(manifest, folder)
    except OSError as error:
        raise ArpoError(f"cannot write the index {directory}: {error.strerror or error}") from error
    return manifest


@contextmanager
def _new_folder(directory: Path, force: bool) -> Iterator[Path]:
    """Yield a new directory that is renamed to `directory` on success, and removed otherwise."""
    if directory.exists():
        if not force:
            raise ArpoError(f"{directory} exists already; give another name, or --force to replace it")
        if not (directory / MANIFEST).is_file():
            raise ArpoError(f"{directory} is not a search index, so it is not replaced; give another name")
    folder, old = (directory.parent / f".{directory.name}.{os.getpid()}{end}" for end in ("", ".old"))
    folder.mkdir(parents=True)
    try:
        yield folder
        if directory.exists():
            directory.rename(old)
        folder.rename(directory)
    finally:
        for rest in (folder, old):
            shutil.rmtree(rest, ignore_errors=True)


def _write_words(documents: Iterator[tuple[Document, float]], folder: Path, progress: Progress) -> dict[str, Any]:
    """Write texts and postings, and return the manifest."""
    runs = folder / "runs"
    runs.mkdir()
    inverter = Inverter(runs)
    text_starts, digest = _write_texts(documents, folder, inverter, progress)
    lengths, frequencies = inverter.finish()
    _write_postings(inverter, lengths, frequencies, folder, progress)
    shutil.rmtree(runs)
    words, word_starts, lists = _sorted_words(inverter)
    (folder / "words.bin").write_bytes(words)
    arrays: dict[str, NDArray[Any]] = {
        "text_starts": text_starts,
        "word_starts": word_starts,
        "lists": lists,
        "starts": _starts(frequencies),
    }
    for name, values in arrays.items():
        np.save(folder / f"{name}.npy", values)
    return {
        "format": FORMAT,
        "passages": len(lengths),
        "words": len(lists),
        "postings": int(frequencies.sum()),
        "fingerprint": _fingerprint(digest, text_starts),
        "k1": K1,
        "b": B,
        "split_underscores": b"_" not in words,
        "dense": None,
    }


def _write_texts(
    documents: Iterator[tuple[Document, float]], folder: Path, inverter: Inverter, progress: Progress
) -> tuple[Longs, Any]:
    digest, ends, end = hashlib.sha256(), array("q", [0]), 0
    with (folder / "texts.bin").open("wb", buffering=1 << 20) as file:
        for document, share in documents:
            for text in (document.title, document.text):
                data = text.encode()
                digest.update(data)
                file.write(data)
                end += len(data)
                ends.append(end)
            inverter.add(f"{document.title} {document.text}")
            progress("reading", share)
    return np.array(ends, dtype=np.int64), digest


def _write_postings(inverter: Inverter, lengths: Ints, frequencies: Longs, folder: Path, progress: Progress) -> None:
    total, done = int(frequencies.sum()), 0
    peaks: list[NDArray[Any]] = []
    with _npy(folder / "passages.npy", "<i4", total) as passages, _npy(folder / "impacts.npy", "<f4", total) as impacts:
        for block in inverter.blocks(lengths, frequencies):
            passages.write(block.passages.data)
            impacts.write(block.impacts.data)
            peaks.append(block.peaks)
            done += len(block.passages)
            progress("sorting", done / total)
    np.save(folder / "peaks.npy", np.concatenate(peaks))


def _npy(path: Path, kind: str, length: int) -> BinaryIO:
    """Open a file for an array, positioned after its header."""
    file = path.open("wb")
    np.lib.format.write_array_header_1_0(file, {"descr": kind, "fortran_order": False, "shape": (length,)})
    return file


def _write_manifest(manifest: dict[str, Any], folder: Path) -> None:
    sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.name != MANIFEST}
    text = json.dumps({**manifest, "files": sizes}, indent=2)
    (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")


def _sorted_words(inverter: Inverter) -> tuple[bytes, Longs, Ints]:
    """Return all words in the order of their bytes, where each starts, and the number of each."""
    words = sorted(inverter.vocabulary)
    numbers = map(inverter.vocabulary.__getitem__, words)
    return b"".join(words), _starts([*map(len, words)]), np.fromiter(numbers, dtype=np.int32, count=len(words))


def _starts(lengths: ArrayLike) -> Longs:
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])


def _fingerprint(texts: Any, text_starts: Longs) -> str:
    texts.update(text_starts.tobytes())
    texts.update(json.dumps([FORMAT, K1, B]).encode())
    return str(texts.hexdigest())
