"""How fast an index is built, opened and searched, on made-up text whose words are as unevenly spread as real ones.

    python benchmarks/bench_search.py --passages 1000000

A passage has about 100 words, drawn from 2,000,000 as in English (the 32 commonest make up a third of it). A query
takes 6 words of one passage, so some are rare and most are common; the hardest one is made of the 32 commonest words.
Results of 51 queries are compared with those of scoring every passage. The last line is a JSON object.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from arpo.tools.search import Index, build_index, open_index
from arpo.tools.search.bm25 import Bm25, split_words, top_indices

VOCABULARY = 2_000_000
LETTERS = "etaoinshrdlu"
RESULTS = 3


def write_corpus(path: Path, passages: int, seed: int) -> None:
    """Made-up passages as JSON lines."""
    rng = np.random.default_rng(seed)
    cumulative = np.cumsum(1 / (np.arange(VOCABULARY) + 11) ** 1.3)
    spelled = [spell(rank) for rank in range(VOCABULARY)]
    with path.open("w", encoding="utf-8") as file:
        for first in range(0, passages, 10_000):
            lengths = rng.integers(60, 140, min(10_000, passages - first))
            ranks = np.searchsorted(cumulative, rng.random(int(lengths.sum())) * cumulative[-1])
            for chosen in np.split(ranks, np.cumsum(lengths)[:-1]):
                text = [spelled[rank] for rank in chosen.tolist()]
                row = {"title": " ".join(text[:2]).title(), "text": " ".join(text[2:]).capitalize() + "."}
                file.write(json.dumps(row) + "\n")


def spell(rank: int) -> str:
    """A word of its own for each rank, shorter for the commoner ones."""
    letters = LETTERS[rank % 12]
    while rank := rank // 12:
        letters += LETTERS[rank % 12]
    return letters


def build(corpus: Path, directory: Path) -> tuple[float, float]:
    """Build the index; returns seconds and the peak of memory in MB. Runs in a process of its own."""
    started = time.perf_counter()
    build_index(corpus, directory)
    return time.perf_counter() - started, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def slow_top(bm25: Bm25, query: str) -> list[int]:
    """The best passages, found by scoring all of them."""
    scores = np.zeros(bm25.size, dtype=np.float32)
    for word in dict.fromkeys(split_words(query)):
        postings = bm25.postings(word)
        if postings is not None:
            scores[postings.passages] += postings.impacts
    return top_indices(scores, RESULTS)


def make_queries(index: Index, count: int, seed: int) -> list[str]:
    """Queries of 6 words out of one passage each."""
    rng = np.random.default_rng(seed)
    texts = [index.document(int(number)).text.split() for number in rng.integers(len(index), size=count)]
    return [" ".join(rng.choice(text, 6, replace=False)) for text in texts]


def milliseconds(work: Callable[[], Any]) -> float:
    """How long a piece of work takes."""
    started = time.perf_counter()
    work()
    return 1000 * (time.perf_counter() - started)


def measure(folder: Path, passages: int, queries: int, seed: int) -> dict[str, float]:
    """Do everything once; prints as it goes."""
    corpus, directory = folder / "corpus.jsonl", folder / "index"
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        pool.apply(write_corpus, (corpus, passages, seed))
        print(f"corpus: {passages:,} passages, {corpus.stat().st_size / 1e6:,.0f} MB", flush=True)
        seconds, peak = pool.apply(build, (corpus, directory))
    print(f"build: {seconds:.1f} s, {passages / seconds:,.0f} passages/s, peak memory {peak:,.0f} MB", flush=True)
    size = sum(path.stat().st_size for path in directory.iterdir()) / 1e6
    opened = float(np.median([milliseconds(partial(open_index, directory)) for _ in range(5)]))
    index = open_index(directory)
    print(f"index: {size:,.0f} MB, {len(index.bm25.impacts):,} postings, {len(index.bm25.lists):,} words")
    print(f"open: {opened:.2f} ms")
    asked = make_queries(index, queries, seed)
    for query in asked:  # the first time, pages come from disk
        index.search(query, RESULTS)
    times = [milliseconds(partial(index.search, query, RESULTS)) for query in asked]
    p50, p95, slowest = np.percentile(times, [50, 95, 100])
    print(f"query: p50 {p50:.2f} ms, p95 {p95:.2f} ms, slowest {slowest:.2f} ms, over {len(times)}")
    hardest = " ".join(spell(rank) for rank in range(32))
    print(f"the 32 commonest words: {milliseconds(partial(index.search, hardest, RESULTS)):.2f} ms")
    checked = [*asked[:50], hardest]
    assert all(index.bm25.top(query, RESULTS) == slow_top(index.bm25, query) for query in checked)
    print(f"{len(checked)} queries gave exactly what scoring every passage gives")
    return {
        "passages": passages,
        "build_seconds": round(seconds, 2),
        "passages_per_second": round(passages / seconds),
        "peak_rss_mb": round(peak),
        "open_ms": round(opened, 3),
        "query_p50_ms": round(float(p50), 3),
        "query_p95_ms": round(float(p95), 3),
        "index_mb": round(size),
    }


def main() -> None:
    """Read the arguments, measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--passages", type=int, default=100_000, help="passages in the corpus")
    parser.add_argument("--queries", type=int, default=500, help="queries timed")
    parser.add_argument("--seed", type=int, default=0, help="decides corpus and queries")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(measure(Path(folder), options.passages, options.queries, options.seed)))


if __name__ == "__main__":
    main()
