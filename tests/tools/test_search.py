"""Search by words: exactly BM25, the same on disk and in memory; the text that the model sees."""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import re
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from arpo.builtin.world import build_world
from arpo.config import schema as settings
from arpo.errors import ArpoError
from arpo.tools.base import CHARS_PER_TOKEN, Tool
from arpo.tools.executor import Toolset, call_tool
from arpo.tools.search import (
    Document,
    build_index,
    build_search,
    index_search,
    memory_index,
    open_index,
)
from arpo.tools.search import bm25 as bm25_module
from arpo.tools.search import build as build_module
from arpo.tools.search.bm25 import Postings, split_words
from arpo.tools.search.tool import format_document, format_results, shorten, split_budget
from arpo.types import Fault, ToolCall, ToolResult

DOCUMENTS = [
    Document("Mira Tolven", "Mira Tolven was born in Upper Kelso."),
    Document("Upper Kelso", "A town on the\n river Anwen."),
    Document("", "The river Anwen is long."),
    Document("Twin B", "identical words"),
    Document("Twin A", "identical words"),
]


def call(tool: Tool, query: str) -> ToolResult:
    return asyncio.run(call_tool(Toolset([tool]), ToolCall("search", {"query": query})))


# The slow oracle: score every passage, in plain Python.


def plain_words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def plain_top(documents: Sequence[Document], query: str, count: int) -> list[int]:
    """What bm25s computes by default: Lucene's BM25 in float64, rounded to float32 per word and summed in float32."""
    texts = [plain_words(f"{document.title} {document.text}") for document in documents]
    mean = sum(map(len, texts)) / len(texts)
    totals: dict[int, Any] = {}
    known = [word for word in dict.fromkeys(plain_words(query)) if any(word in text for text in texts)]
    for word in known[: bm25_module.MAX_QUERY_WORDS]:
        frequency = sum(word in text for text in texts)
        rarity = float(np.float32(math.log(1 + (len(texts) - frequency + 0.5) / (frequency + 0.5))))
        for number, text in enumerate(texts):
            times = Counter(text)[word]
            if times:
                share = times / (1.5 * ((1 - 0.75) + 0.75 * len(text) / mean) + times)
                totals[number] = totals.get(number, np.float32(0)) + np.float32(rarity * share)
    return sorted(totals, key=lambda number: (-totals[number], number))[:count]


def made_up(size: int, seed: int) -> list[Document]:
    """Passages in which some words are everywhere and most are rare."""
    rng = random.Random(seed)
    return [
        Document("", " ".join(f"w{int(rng.paretovariate(0.6)) % 200}" for _ in range(rng.randint(1, 12))))
        for _ in range(size)
    ]


@given(st.text())
@example("Groß STRASSE_1 naïve İstanbul ΟΔΟΣ Σ x\u0301y 東京 ²³ \u2028a\x1cb \ud800c")
def test_words_are_what_the_pattern_finds(text: str) -> None:
    assert [word.decode() for word in split_words(text)] == plain_words(text.encode("utf-8", "replace").decode())


@given(
    st.lists(st.lists(st.sampled_from("abcdef"), max_size=8), min_size=1, max_size=12),
    st.lists(st.sampled_from("abcdefg"), max_size=6),
    st.integers(1, 5),
)
def test_ranks_are_those_of_scoring_every_passage(texts: list[list[str]], query: list[str], count: int) -> None:
    documents = [Document("t", " ".join(text)) for text in texts]
    found = memory_index(documents).bm25.top(" ".join(query), count)
    assert found == plain_top(documents, " ".join(query), count)


def test_impacts_equal_the_formula_to_the_last_bit() -> None:
    documents = made_up(40, seed=5)
    texts = [plain_words(document.text) for document in documents]
    mean = sum(map(len, texts)) / len(texts)
    index = memory_index(documents).bm25
    for word in {word for text in texts for word in text}:
        numbers = [number for number, text in enumerate(texts) if word in text]
        rarity = float(np.float32(math.log(1 + (40 - len(numbers) + 0.5) / (len(numbers) + 0.5))))
        times = [texts[number].count(word) for number in numbers]
        norms = [1.5 * ((1 - 0.75) + 0.75 * len(texts[number]) / mean) for number in numbers]
        impacts = [np.float32(rarity * (n / (norm + n))) for n, norm in zip(times, norms, strict=True)]
        found = index.postings(word.encode())
        assert found is not None
        assert (found.passages.tolist(), found.impacts.tolist(), found.peak) == (
            numbers,
            [*map(float, impacts)],
            float(max(impacts)),
        )


def random_lists(rng: random.Random, size: int) -> list[Postings]:
    """Some words, rare ones with much weight and common ones with little; sums are often equal but for rounding."""
    lists = []
    for _ in range(rng.randint(1, 8)):
        share = rng.choice([0.02, 0.1, 0.5, 0.9])
        passages = [number for number in range(size) if rng.random() < share] or [rng.randrange(size)]
        impacts = [rng.choice([0.1, 0.2, 0.3, 0.7]) * rng.choice([0.05, 0.05, 0.1]) / share for _ in passages]
        lists.append(
            Postings(np.array(passages, np.int32), np.array(impacts, np.float32), float(np.float32(max(impacts))))
        )
    return lists


@pytest.mark.parametrize("lookup", [0, 3, 10**9], ids=["looks up", "looks up at times", "adds up"])
def test_leaving_out_postings_changes_nothing(lookup: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bm25_module, "SHORT", 0)
    monkeypatch.setattr(bm25_module, "SAMPLE", 5)
    monkeypatch.setattr(bm25_module, "LOOKUP_COST", lookup)
    taken = Counter[str]()
    for name in ("_candidates", "_prune"):
        monkeypatch.setattr(bm25_module, name, counting(getattr(bm25_module, name), taken, name))
    rng = random.Random(lookup)
    for _ in range(1000):
        size, count = rng.choice([5, 60, 60]), rng.choice([1, 2, 3, 9])
        lists = random_lists(rng, size)
        sums = [np.float32(0)] * size
        for postings in lists:
            for number, impact in zip(postings.passages.tolist(), postings.impacts, strict=True):
                sums[number] += impact
        ranked = sorted((number for number in range(size) if sums[number]), key=lambda number: (-sums[number], number))
        assert bm25_module.top(lists, size, count) == ranked[:count]
    assert taken["_candidates"] > 100
    assert taken["_prune"] > 50 if lookup < 10**9 else taken["_prune"] == 0


def counting(function: Any, calls: Counter[str], name: str) -> Any:
    def counted(*args: Any) -> Any:
        calls[name] += 1
        return function(*args)

    return counted


def test_only_the_first_known_words_of_a_query_count() -> None:
    documents = [Document("", f"word{number}") for number in range(40)]
    query = " ".join(["unknown"] + [f"word{number}" for number in range(40)])
    assert memory_index(documents).bm25.top(query, 100) == list(range(32))


def test_bm25s_scores_the_same() -> None:
    bm25s = pytest.importorskip("bm25s")
    world = build_world(settings.World(entities=100, train_questions=50, test_questions=10))
    texts = [plain_words(document.text) for document in world.documents]
    vocabulary = {word: number for number, word in enumerate(dict.fromkeys(word for text in texts for word in text))}
    theirs = bm25s.BM25()
    theirs.index(
        ([[vocabulary[word] for word in text] for text in texts], vocabulary),
        create_empty_token=False,
        show_progress=False,
    )
    ours = memory_index(world.documents).bm25
    for task in world.train:
        known = [word for word in dict.fromkeys(plain_words(task.question)) if word in vocabulary]
        scores = theirs.get_scores_from_ids([vocabulary[word] for word in known])
        assert ours.top(task.question, 3) == bm25_module.top_indices(scores, 3)


# The tool.


def test_search_ranks_and_formats() -> None:
    search = build_search(DOCUMENTS)
    assert (search.spec.name, search.spec.main_argument, search.quick) == ("search", "query", True)
    assert call(search, "born: MIRA?").text == "Mira Tolven was born in Upper Kelso."
    assert call(search, "upper kelso").text.split("\n") == [
        "Upper Kelso: A town on the river Anwen.",
        "Mira Tolven was born in Upper Kelso.",
    ]
    assert call(search, "river long").text.startswith("The river Anwen is long.\n")


def test_equal_scores_keep_the_order_of_the_documents() -> None:
    assert call(build_search(DOCUMENTS), "identical words").text == "Twin B: identical words\nTwin A: identical words"
    assert call(build_search(DOCUMENTS, results=1), "words identical").text == "Twin B: identical words"


def test_search_without_a_match_or_a_query() -> None:
    search = build_search(DOCUMENTS)
    assert call(search, "zebra").text == "No results."
    for query in ("", " ?!", "." * 1000 + "mira"):
        result = call(search, query)
        assert (result.text, result.fault) == ("Error: the query is empty; give the words to search for", Fault.MODEL)


def test_search_limits() -> None:
    assert len(call(build_search(DOCUMENTS * 9, results=7), "mira " * 9000).text.split("\n")) == 7
    for documents in ([], [Document("", "?")]):
        with pytest.raises(ArpoError, match="at least one document"):
            build_search(documents)
    with pytest.raises(ArpoError, match="at least 1 result"):
        build_search(DOCUMENTS, results=0)
    with pytest.raises(ArpoError, match="at least 1 token"):
        build_search(DOCUMENTS, max_tokens=0)


def test_an_underscore_joins_words_only_where_passages_have_one() -> None:
    assert call(build_search(DOCUMENTS, 1), "upper_kelso town").text == "Upper Kelso: A town on the river Anwen."
    assert call(build_search([*DOCUMENTS, Document("", "a_b")]), "upper_kelso").text == "No results."


def test_the_version_names_all_that_an_answer_depends_on() -> None:
    versions = [
        build_search(documents, results, max_tokens).version
        for documents, results, max_tokens in [
            (DOCUMENTS, 3, 512),
            (DOCUMENTS, 2, 512),
            (DOCUMENTS, 3, 511),
            (DOCUMENTS[1:], 3, 512),
            ([Document("Mira Tolv", "en" + DOCUMENTS[0].text), *DOCUMENTS[1:]], 3, 512),
        ]
    ]
    assert len(set(versions)) == 5
    assert build_search(DOCUMENTS).version == versions[0]
    assert build_search(DOCUMENTS).cacheable


# What is shown.


def test_the_budget_is_shared_fairly() -> None:
    assert split_budget([5, 100, 100], 50) == [5, 22, 23]
    assert split_budget([100, 5, 10], 50) == [35, 5, 10]
    assert split_budget([3, 4], 50) == [3, 4]
    assert split_budget([], 50) == []


@given(st.lists(st.integers(0, 100), max_size=6), st.integers(0, 300))
def test_shares_use_the_whole_budget_and_no_more(wanted: list[int], total: int) -> None:
    shares = split_budget(wanted, total)
    assert sum(shares) == min(total, sum(wanted))
    cut_short = [share for share, want in zip(shares, wanted, strict=True) if share < want]
    assert all(share <= min(cut_short) + 1 for share in shares) if cut_short else True


def test_a_passage_is_cut_after_a_word() -> None:
    assert shorten("one two three", 13) == "one two three"
    assert shorten("one two three", 12) == "one two..."
    assert shorten("one two three", 10) == "one two..."
    assert shorten("one two three", 9) == "one..."
    assert shorten("abcdefgh", 6) == "abc..."
    assert [shorten("abcdefgh", size) for size in (3, 2, 0)] == ["...", "..", ""]


@given(st.lists(st.builds(Document, st.text(max_size=30), st.text(min_size=1, max_size=300)), max_size=5))
def test_results_stay_within_the_budget(documents: list[Document]) -> None:
    for max_tokens in (10, 50, 1000):
        text = format_results(documents, max_tokens)
        assert len(text) <= max_tokens * CHARS_PER_TOKEN
        whole = "\n".join(format_document(document) for document in documents)
        if documents and len(whole) <= max_tokens * CHARS_PER_TOKEN:
            assert text == whole


def test_results_are_cut_to_the_budget() -> None:
    documents = [Document("A", "word " * 200), Document("B", "word short")]
    first, second = call(build_search(documents, max_tokens=50), "word").text.split("\n")
    assert first.startswith("A: word word") and first.endswith(" word...")
    assert second == "B: word short" and 190 < len(first + "\n" + second) <= 200


# On disk.


def write_lines(path: Path, documents: Sequence[Document]) -> Path:
    rows = [json.dumps({"title": document.title, "text": document.text}) for document in documents]
    path.write_text("\n".join(rows), encoding="utf-8")
    return path


def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many runs and blocks out of few passages."""
    for name, value in (("RUN_WORDS", 7), ("BATCH_WORDS", 7), ("BLOCK_POSTINGS", 40)):
        monkeypatch.setattr(build_module, name, value)


@pytest.mark.slow
def test_an_index_on_disk_is_the_one_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    documents = [*made_up(200, seed=3), Document("Größe", "naïve 東京 a_b c d e f g h"), Document("", "?")]
    memory = memory_index(documents)
    small_steps(monkeypatch)
    told: list[tuple[str, float]] = []
    manifest = build_index(
        write_lines(tmp_path / "docs.jsonl", documents), tmp_path / "index", progress=lambda *now: told.append(now)
    )
    disk = open_index(tmp_path / "index")
    for name in ("word_starts", "lists", "starts", "peaks", "passages", "impacts"):
        assert np.array_equal(getattr(disk.bm25, name), getattr(memory.bm25, name)), name
    assert bytes(disk.bm25.words) == bytes(memory.bm25.words)
    assert [disk.document(number) for number in range(len(disk))] == documents
    assert (disk.fingerprint, len(disk)) == (memory.fingerprint, len(memory)) == (manifest["fingerprint"], 202)
    assert call(index_search(disk), "größe w1").text == call(build_search(documents), "größe w1").text
    assert told[0][0] == "reading" and told[-1] == ("sorting", 1.0)
    assert ("reading", 1.0) in told and told == sorted(told, key=lambda now: (now[0] == "sorting", now[1]))
    assert not index_search(disk).quick
    assert (disk.split_underscores, memory.split_underscores) == (False, False)


def test_the_same_corpus_gives_the_same_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_steps(monkeypatch)
    corpus = write_lines(tmp_path / "docs.jsonl", made_up(60, seed=4))
    for name in ("one", "two"):
        build_index(corpus, tmp_path / name)
    files = {path.name: path.read_bytes() for path in (tmp_path / "one").iterdir()}
    assert files == {path.name: path.read_bytes() for path in (tmp_path / "two").iterdir()}
    assert json.loads(files["manifest.json"])["passages"] == 60


def test_an_existing_directory(tmp_path: Path) -> None:
    corpus, index = write_lines(tmp_path / "docs.jsonl", DOCUMENTS), tmp_path / "deep" / "index"
    build_index(corpus, index)
    with pytest.raises(ArpoError, match="exists already; give another name, or --force"):
        build_index(corpus, index)
    build_index(write_lines(tmp_path / "docs.jsonl", DOCUMENTS[:2]), index, force=True)
    assert len(open_index(index)) == 2
    with pytest.raises(ArpoError, match="is not a search index, so it is not replaced"):
        build_index(corpus, index.parent, force=True)
    assert [path.name for path in index.parent.iterdir()] == ["index"]


def test_a_failed_build_leaves_nothing_and_keeps_what_was_there(tmp_path: Path) -> None:
    index = tmp_path / "index"
    build_index(write_lines(tmp_path / "docs.jsonl", DOCUMENTS), index)
    (tmp_path / "docs.jsonl").write_text('{"text": "fine"}\n{')
    for directory in (index, tmp_path / "other"):
        with pytest.raises(ArpoError, match="line 2: not JSON"):
            build_index(tmp_path / "docs.jsonl", directory, force=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["docs.jsonl", "index"]
    assert len(open_index(index)) == 5


def test_a_killed_build_is_cleared_away_a_day_later(tmp_path: Path) -> None:
    corpus = write_lines(tmp_path / "docs.jsonl", DOCUMENTS)
    folder, days_ago = tmp_path / "indexes", time.time() - 2 * 86_400

    def stop(what: str, share: float) -> None:
        raise KeyboardInterrupt

    def beside() -> list[str]:
        return sorted(path.name for path in folder.iterdir())

    first, second, third, fourth = (letter * 16 for letter in "abcd")
    for name in (
        f".index.{first}",
        f".index.{second}.old",
        f".index.{third}",
        f".index.{fourth}",
        ".index.2024",
        ".index.other",
        f".indexes.{first}",
    ):
        (folder / name / "runs").mkdir(parents=True)
        (folder / name / "texts.bin").touch()
        for path in (folder / name / "texts.bin", folder / name / "runs", folder / name):
            os.utime(path, (days_ago, days_ago))
    os.utime(folder / f".index.{third}", None)  # begun now
    os.utime(folder / f".index.{fourth}" / "texts.bin", None)  # written to now
    others = sorted([".index.2024", f".index.{third}", f".index.{fourth}", ".index.other", f".indexes.{first}"])
    with pytest.raises(KeyboardInterrupt):
        build_index(corpus, folder / "index", progress=stop)
    assert beside() == sorted(
        [f".index.{second}.old", *others]
    )  # the only index that there is: its successor is missing
    build_index(corpus, folder / "index")
    build_index(corpus, folder / "index", force=True)
    assert beside() == [*others, "index"]


def test_a_damaged_index(tmp_path: Path) -> None:
    with pytest.raises(ArpoError, match="is not a search index; build one with"):
        open_index(tmp_path)
    build_index(write_lines(tmp_path / "docs.jsonl", DOCUMENTS), tmp_path / "index")
    with pytest.raises(ArpoError, match="is not a search index"):
        open_index(tmp_path / "index" / "texts.bin")
    impacts = tmp_path / "index" / "impacts.npy"
    impacts.write_bytes(impacts.read_bytes()[:-1])
    with pytest.raises(ArpoError, match=r"impacts\.npy is missing or truncated"):
        open_index(tmp_path / "index")
    manifest = tmp_path / "index" / "manifest.json"
    newer = json.dumps({**json.loads(manifest.read_text()), "format": 99})
    for content, message in (("{", "cannot read"), (newer, "not built by this version"), ("[]", "not built")):
        manifest.write_text(content)
        with pytest.raises(ArpoError, match=message):
            open_index(tmp_path / "index")
