"""Posting lists from a stream of passages, in bounded memory.

Words are collected in runs of `RUN_WORDS`, each sorted and spilled (to disk, if a directory is given). A run holds
later passages than the one before it, so runs are merged by concatenation, word by word. Only the vocabulary and a
few bytes per passage grow with the collection. There can be fewer than 2**31 passages.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from arpo.errors import ArpoError
from arpo.tools.search.bm25 import K1, B, Floats, Ints, Longs, split_words

RUN_WORDS = 1 << 24
BATCH_WORDS = 1 << 16
BLOCK_POSTINGS = 1 << 23


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """The postings of consecutive passages by word: those of `words[i]` begin at `starts[i]`."""

    words: Ints
    starts: Longs
    passages: Ints | Path
    counts: Ints | Path


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """The postings of consecutive words, and the most that each word adds to a score."""

    passages: Ints
    impacts: Floats
    peaks: Floats


class Inverter:
    """Takes passages one by one, then yields the postings of all words in the order of their first occurrence."""

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

    def blocks(self, lengths: Ints, frequencies: Longs) -> Iterator[Block]:
        """Yield the postings of all words with their impacts."""
        starts = np.concatenate([[0], np.cumsum(frequencies)])
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
            yield Block(passages, impacts, np.maximum.reduceat(impacts, starts[first:last] - starts[first]))
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
        run = _run((np.concatenate(self._numbers).astype(np.int64) << 32) | passages)
        self._runs.append(run if self._directory is None else _spill(run, self._directory, len(self._runs)))
        self._all_lengths.append(lengths)
        self._numbers, self._lengths = [], []


def _run(keys: Longs) -> Run:
    """Count the distinct `keys` (word and passage, packed); sorts them in place."""
    keys.sort()
    firsts = _firsts(keys)
    counts = np.diff(firsts, append=len(keys)).astype(np.int32)
    keys = keys[firsts]
    numbers = (keys >> 32).astype(np.int32)
    starts = _firsts(numbers)
    return Run(numbers[starts], np.append(starts, len(keys)), (keys & 0xFFFFFFFF).astype(np.int32), counts)


def _firsts(values: NDArray[np.integer]) -> Longs:
    """Return the indices where a value differs from the one before."""
    return np.flatnonzero(np.diff(values, prepend=-1))


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
