"""Dense and hybrid search with a tiny random BERT: exact, and the same from disk."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from arpo.errors import ArpoError
from arpo.tools.base import Tool
from arpo.tools.search import Document, Embedder, Mode, build_index, index_search, open_index
from arpo.tools.search import dense as dense_module
from arpo.tools.search.index import fuse
from arpo.tools.search.tool import format_document

WORDS = [f"w{number}" for number in range(40)]
DOCUMENTS = [
    Document(f"w{number % 40}", " ".join(f"w{number * step % 40}" for step in range(1, number % 30 + 2)))
    for number in range(100)
] + [Document("w3", "w5 w7")] * 2
QUERIES = ["w1", "w3 w5 w7", "w9 w8 w2 w30"]
EMBEDDER = Embedder("", "w38 ", "w39 ")


def make_model(folder: Path, width: int = 16) -> str:
    """A random BERT of one layer over WORDS."""
    vocabulary = {word: number for number, word in enumerate(["[PAD]", "[UNK]", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", model_max_length=64
    ).save_pretrained(folder)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=width,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=64,
        initializer_range=1.0,
    )
    BertModel(config).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The tiny model's directory."""
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def built(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense index over DOCUMENTS; tests must not change it."""
    folder = tmp_path_factory.mktemp("built")
    rows = [json.dumps({"title": document.title, "text": document.text}) for document in DOCUMENTS]
    (folder / "docs.jsonl").write_text("\n".join(rows))
    told: list[tuple[str, float]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dense_module, "BATCH", 7)
        patch.setattr(dense_module, "WINDOW", 21)
        embedder = Embedder(model, EMBEDDER.query_prefix, EMBEDDER.passage_prefix)
        build_index(folder / "docs.jsonl", folder / "index", embedder, progress=lambda *now: told.append(now))
    embedding = [share for what, share in told if what == "embedding"]
    assert embedding == sorted(embedding) and embedding[-1] == 1.0
    return folder / "index"


def slow_vector(model: str, text: str) -> Any:
    """One text at a time, no padding: the mean of the last hidden states, scaled to length 1."""
    tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(model)
    bert: Any = BertModel.from_pretrained(model)
    with torch.inference_mode():
        hidden = bert.eval()(**tokenizer([text], return_tensors="pt")).last_hidden_state[0]
    mean = hidden.mean(0).double().numpy()
    return mean / np.linalg.norm(mean)


def test_vectors_are_means_of_length_one(model: str, built: Path) -> None:
    vectors = np.load(built / "embeddings.npy")
    assert vectors.shape == (102, 16) and vectors.dtype == np.float16
    for number in (0, 29, 57, 101):
        expected = slow_vector(model, EMBEDDER.passage_prefix + format_document(DOCUMENTS[number]))
        assert np.allclose(vectors[number], expected, atol=1e-3)


def test_dense_search_is_exact(model: str, built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense_module, "ROWS", 10)
    index = open_index(built, device="cpu")
    vectors = np.load(built / "embeddings.npy").astype(np.float64)
    for query in QUERIES:
        scores = vectors @ slow_vector(model, EMBEDDER.query_prefix + query)
        expected = sorted(range(102), key=lambda number: (-round(scores[number], 6), number))
        assert index.dense is not None
        assert index.dense.top(query, 8) == expected[:8]
        assert sorted(index.dense.top(query, 1000)) == list(range(102))


def test_equal_passages_keep_their_order(built: Path) -> None:
    index = open_index(built)
    assert index.dense is not None
    ranking = index.dense.top("w3 w5 w7", 102)
    assert ranking.index(101) == ranking.index(100) + 1


def test_fusion_adds_reciprocal_ranks() -> None:
    assert fuse([[5, 3, 1], [3, 9]], 4) == [3, 5, 9, 1]  # 1/62 + 1/61, 1/61, 1/62, 1/63
    assert fuse([[5, 6, 3], [7, 8, 3]], 2) == [3, 5]  # third twice beats first once
    assert fuse([[2], [1]], 2) == [1, 2]  # equal: by number
    assert fuse([[], [4]], 3) == [4]


def ask(tool: Tool, query: str) -> str:
    async def wait() -> str:
        return await tool.run(query=query)

    return asyncio.run(wait())


def test_modes(built: Path) -> None:
    index = open_index(built)
    assert index.dense is not None
    for query in QUERIES:
        both = fuse([index.bm25.top(query, 100), index.dense.top(query, 100)], 5)
        assert index.search(query, 5, "hybrid") == [index.document(number) for number in both]
        assert index.search(query, 5, "dense") == [index.document(number) for number in index.dense.top(query, 5)]
    modes: tuple[Mode, ...] = ("bm25", "dense", "hybrid")
    texts = [ask(index_search(index, 3, mode), QUERIES[1]) for mode in modes]
    assert all(len(text.split("\n")) == 3 for text in texts) and texts[0] != texts[1]
    assert len({index.version(mode) for mode in modes}) == 3


def test_an_index_without_vectors_and_modes_that_do_not_exist(tmp_path: Path) -> None:
    (tmp_path / "docs.jsonl").write_text('{"text": "w1"}')
    build_index(tmp_path / "docs.jsonl", tmp_path / "index")
    index = open_index(tmp_path / "index")
    with pytest.raises(ArpoError, match="can only be searched by bm25; for dense and hybrid, build it with --dense"):
        index_search(index, mode="hybrid")
    with pytest.raises(ArpoError, match="no search mode 'fuzzy'; there are: bm25, dense, hybrid"):
        index_search(index, mode="fuzzy")  # type: ignore[arg-type]


def test_a_model_that_is_missing_or_has_changed(built: Path, model: str, tmp_path: Path) -> None:
    (tmp_path / "docs.jsonl").write_text('{"text": "w1"}')
    (tmp_path / "empty").mkdir()
    with pytest.raises(ArpoError, match=r"embedding model .* could not be loaded"):
        build_index(tmp_path / "docs.jsonl", tmp_path / "index", Embedder(str(tmp_path / "empty")))
    assert not (tmp_path / "index").exists()
    changed = make_model(tmp_path / "changed", width=8)
    build_index(tmp_path / "docs.jsonl", tmp_path / "index", Embedder(changed))
    make_model(tmp_path / "changed", width=16)
    with pytest.raises(ArpoError, match="gives vectors of 16 numbers, but the index has 8: the model has changed"):
        index_search(open_index(tmp_path / "index"), mode="dense")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_where_there_is_none(built: Path) -> None:
    with pytest.raises(ArpoError, match="torch sees no CUDA device"):
        index_search(open_index(built, device="cuda"), mode="dense")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_cuda_finds_the_same(built: Path) -> None:
    on_cpu, on_gpu = open_index(built, device="cpu"), open_index(built, device="cuda")
    for query in QUERIES:
        assert on_gpu.search(query, 5, "dense") == on_cpu.search(query, 5, "dense")
