"""Building an index, in memory or on disk.

    build_index("corpus.jsonl", "wiki-index")

Guarantees: a corpus on disk is read as a stream; only the vocabulary and a few bytes per passage are kept in memory.
The same corpus gives the same files. A directory appears under its name only when it is complete.
What a killed build leaves behind, a hidden directory beside the index, is removed by the next build a day later.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import re
import secrets
import shutil
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import ArrayLike, NDArray

from arpo.config.files import expand_user, remove_abandoned
from arpo.errors import ArpoError
from arpo.tools.search.bm25 import K1, B, Bm25, Floats, Ints, Longs, split_words
from arpo.tools.search.corpus import read_corpus
from arpo.tools.search.dense import Embedder, embed_passages
from arpo.tools.search.index import FORMAT, MANIFEST, Index, open_index
from arpo.tools.search.tool import format_document
from arpo.types import Document

RUN_WORDS = 1 << 24
BATCH_WORDS = 1 << 16
BLOCK_POSTINGS = 1 << 23

Progress = Callable[[str, float], None]  # stage, and the share of it that is done


def memory_index(documents: Iterable[Document]) -> Index:
    """Return an index in memory, for search by words."""
    inverter, texts = Inverter(), io.BytesIO()
    text_starts, fingerprint = _write_texts(documents, texts, inverter)
    lengths, frequencies = inverter.finish()
    passages, impacts, peaks = map(np.concatenate, zip(*inverter.blocks(lengths, frequencies), strict=True))
    words, word_starts, lists = _sorted_words(inverter)
    bm25 = Bm25(len(lengths), memoryview(words), word_starts, lists, _starts(frequencies), peaks, passages, impacts)
    return Index(texts.getbuffer(), text_starts, bm25, fingerprint, b"_" not in words)


def build_index(
    corpus: str | Path,
    directory: str | Path,
    embedder: Embedder | None = None,
    force: bool = False,
    progress: Progress = lambda what, share: None,
) -> dict[str, Any]:
    """Index the passages of a file and return the manifest. With `force`, an existing index is replaced."""
    corpus, directory = expand_user(corpus), expand_user(directory)
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
    unfinished = f".{directory.name}.{secrets.token_hex(8)}"  # no pid: those of containers are often the same
    folder, old = (directory.parent / f"{unfinished}{end}" for end in ("", ".old"))
    folder.mkdir(parents=True)
    remove_abandoned(_leftovers(directory))
    try:
        yield folder
        if directory.exists():
            directory.rename(old)
        folder.rename(directory)
    finally:
        for rest in (folder, old):
            shutil.rmtree(rest, ignore_errors=True)


def _leftovers(directory: Path) -> list[Path]:
    """What other builds of an index have beside it; one that was replaced counts if there is another now."""
    replaced = r"(\.old)?" if directory.exists() else ""
    name = re.compile(rf"\.{re.escape(directory.name)}\.[0-9a-f]{{16}}{replaced}")
    return [path for path in directory.parent.iterdir() if name.fullmatch(path.name)]


def _write_words(corpus: Iterator[tuple[Document, float]], folder: Path, progress: Progress) -> dict[str, Any]:
    """Write texts and postings, and return the manifest."""

    def documents() -> Iterator[Document]:
        for document, share in corpus:
            yield document
            progress("reading", share)

    runs = folder / "runs"
    runs.mkdir()
    inverter = Inverter(runs)
    with (folder / "texts.bin").open("wb", buffering=1 << 20) as file:
        text_starts, fingerprint = _write_texts(documents(), file, inverter)
    lengths, frequencies = inverter.finish()
    total, done, peaks = int(frequencies.sum()), 0, []
    with _npy(folder / "passages.npy", "<i4", total) as passages, _npy(folder / "impacts.npy", "<f4", total) as impacts:
        for some_passages, some_impacts, some_peaks in inverter.blocks(lengths, frequencies):
            passages.write(some_passages.data)
            impacts.write(some_impacts.data)
            peaks.append(some_peaks)
            done += len(some_passages)
            progress("sorting", done / total)
    shutil.rmtree(runs)
    words, word_starts, lists = _sorted_words(inverter)
    (folder / "words.bin").write_bytes(words)
    arrays: dict[str, NDArray[Any]] = {"text_starts": text_starts, "word_starts": word_starts, "lists": lists}
    arrays |= {"starts": _starts(frequencies), "peaks": np.concatenate(peaks)}
    for name, values in arrays.items():
        np.save(folder / f"{name}.npy", values)
    return {
        "format": FORMAT,
        "passages": len(lengths),
        "words": len(lists),
        "postings": total,
        "fingerprint": fingerprint,
        "k1": K1,
        "b": B,
        "split_underscores": b"_" not in words,
        "dense": None,
    }


def _write_texts(documents: Iterable[Document], file: BinaryIO, inverter: Inverter) -> tuple[Longs, str]:
    """Write all texts and add them to the inverter; return where each starts, and the fingerprint of the index."""
    digest, ends = hashlib.sha256(), array("q", [0])
    for document in documents:
        for text in (document.title, document.text):
            data = text.encode("utf-8", "replace")
            digest.update(data)
            file.write(data)
            ends.append(ends[-1] + len(data))
        inverter.add(f"{document.title} {document.text}")
    text_starts = np.array(ends, dtype=np.int64)
    digest.update(text_starts.tobytes())
    digest.update(json.dumps([FORMAT, K1, B]).encode())
    return text_starts, digest.hexdigest()


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


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """The postings of consecutive passages by word: those of `words[i]` begin at `starts[i]`."""

    words: Ints
    starts: Longs
    passages: Ints | Path
    counts: Ints | Path


class Inverter:
    """Takes passages one by one, then yields the postings of all words in the order of their first occurrence.

    Words are collected in runs of `RUN_WORDS`, each sorted and spilled (to disk, if a directory is given). A run holds
    later passages than the one before it, so runs are merged by concatenation, word by word. Only the vocabulary and a
    few bytes per passage grow with the collection. There can be fewer than 2**31 passages.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self.vocabulary: defaultdict[bytes, int] = defaultdict(count().__next__)
        self._directory = directory
        self._words: list[bytes] = []  # not yet numbered
        self._numbers: list[Ints] = []  # of the run being filled
        self._lengths: list[int] = []  # of its passages
        self._all_lengths: list[Ints] = []
        self._runs: list[Run] = []

    def add(self, text: str) -> None:
        """Add the next passage."""
        found = split_words(text)
        self._words += found
        self._lengths.append(len(found))
        if len(self._words) >= BATCH_WORDS:
            self._number_words()
            if sum(map(len, self._numbers)) >= RUN_WORDS:
                self._end_run()

    def finish(self) -> tuple[Ints, Longs]:
        """Return the length of each passage in words, and the number of passages of each word. Ends adding."""
        self._number_words()
        self._end_run()
        if not self.vocabulary:
            raise ArpoError("search needs at least one document with a word in it")
        frequencies = np.zeros(len(self.vocabulary), dtype=np.int64)
        for run in self._runs:
            frequencies[run.words] += np.diff(run.starts)
        return np.concatenate(self._all_lengths), frequencies

    def blocks(self, lengths: Ints, frequencies: Longs) -> Iterator[tuple[Ints, Floats, Floats]]:
        """Yield the postings of consecutive words: passages, impacts, and the maximum impact (peak) of each word."""
        starts = _starts(frequencies)
        mean = int(lengths.sum(dtype=np.int64)) / len(lengths)
        norms = K1 * ((1 - B) + (B * lengths.astype(np.float64)) / mean)
        idf = _idf(frequencies, len(lengths))
        first = 0
        while first < len(frequencies):
            last = max(first + 1, int(np.searchsorted(starts, starts[first] + BLOCK_POSTINGS, "right")) - 1)
            passages, counts = self._merge(first, last, starts)
            times = counts.astype(np.float32)
            shares = times / (norms[passages] + times)
            impacts = (np.repeat(idf[first:last], frequencies[first:last]) * shares).astype(np.float32)
            yield passages, impacts, np.maximum.reduceat(impacts, starts[first:last] - starts[first])
            first = last

    def _merge(self, first: int, last: int, starts: Longs) -> tuple[Ints, Ints]:
        """Return passages and counts of the words from number `first` up to `last`."""
        free = starts[first:last] - starts[first]  # position of the next posting of each word
        passages = np.empty(int(starts[last] - starts[first]), dtype=np.int32)
        counts = np.empty_like(passages)
        for run in self._runs:
            low, high = np.searchsorted(run.words, [first, last])
            numbers, ends = run.words[low:high] - first, run.starts[low : high + 1]
            lengths = np.diff(ends)
            to = np.repeat(free[numbers] - (ends[:-1] - ends[0]), lengths) + np.arange(ends[-1] - ends[0])
            passages[to] = _read_range(run.passages, ends[0], ends[-1])
            counts[to] = _read_range(run.counts, ends[0], ends[-1])
            free[numbers] += lengths
        return passages, counts

    def _number_words(self) -> None:
        numbers = map(self.vocabulary.__getitem__, self._words)  # a new word gets the next number
        self._numbers.append(np.fromiter(numbers, dtype=np.int32, count=len(self._words)))
        self._words = []

    def _end_run(self) -> None:
        lengths = np.array(self._lengths, dtype=np.int32)
        first = sum(map(len, self._all_lengths))
        passages = np.repeat(np.arange(first, first + len(lengths)), lengths)
        pairs = (np.concatenate(self._numbers).astype(np.int64) << 32) | passages  # of word and passage
        pairs, counts = np.unique(pairs, return_counts=True)
        words = (pairs >> 32).astype(np.int32)
        starts = np.flatnonzero(np.diff(words, prepend=-1))
        passages, counts = (pairs & 0xFFFFFFFF).astype(np.int32), counts.astype(np.int32)
        run = Run(words[starts], np.append(starts, len(pairs)), passages, counts)
        self._runs.append(run if self._directory is None else _spill(run, self._directory, len(self._runs)))
        self._all_lengths.append(lengths)
        self._numbers, self._lengths = [], []


def _spill(run: Run, directory: Path, number: int) -> Run:
    passages, counts = directory / f"{number}-passages.npy", directory / f"{number}-counts.npy"
    np.save(passages, run.passages)  # type: ignore[arg-type]
    np.save(counts, run.counts)  # type: ignore[arg-type]
    return replace(run, passages=passages, counts=counts)


def _read_range(values: Ints | Path, start: int, end: int) -> Ints:
    if isinstance(values, Path):
        return np.array(np.load(values, mmap_mode="r")[start:end])  # mapped only here, so that no page stays in memory
    return values[start:end]


def _idf(frequencies: Longs, size: int) -> NDArray[np.float64]:
    """Return inverse document frequencies, rounded to float32."""
    distinct, where = np.unique(frequencies, return_inverse=True)
    logs = [math.log(1 + (size - n + 0.5) / (n + 0.5)) for n in distinct.tolist()]
    return np.array(logs, dtype=np.float32).astype(np.float64)[where]
