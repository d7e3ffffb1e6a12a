"""Dense search: passages and queries as unit vectors; a query is compared with every passage.

Guarantees: search is exact. Ties are ordered by passage number. The vector of a query does not depend on other
queries. A vector is the mean of a model's last hidden states over the real tokens; those of passages are stored in
float16.
Not covered: approximate search. A query reads all vectors, 0.8 GB for a million passages of 384 numbers; beyond that it
needs a GPU that holds them.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from arpo.config.files import expand_user
from arpo.errors import ArpoError
from arpo.tools.search.bm25 import top_indices

if TYPE_CHECKING:
    from torch import Tensor

EMBEDDINGS = "embeddings"
BATCH = 64  # passages in one forward pass
WINDOW = 64 * BATCH  # passages sorted by length together, to reduce padding
ROWS = 8192  # vectors compared at a time
MAX_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Embedder:
    """The embedding model, and the prefixes it expects (E5 models: "query: " and "passage: ")."""

    model: str
    query_prefix: str = ""
    passage_prefix: str = ""


class Encoder:
    """A loaded embedding model."""

    def __init__(self, name: str, device: str = "auto") -> None:
        import torch
        from safetensors import SafetensorError
        from transformers import AutoModel, AutoTokenizer
        from transformers.utils import logging as transformers_logging

        if device == "cuda" and not torch.cuda.is_available():
            raise ArpoError("dense search is to run on cuda, but torch sees no CUDA device; use cpu or auto")
        cuda = device == "cuda" or (device == "auto" and torch.cuda.is_available())
        self.device = torch.device("cuda" if cuda else "cpu")
        transformers_logging.disable_progress_bar()
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
            model = AutoModel.from_pretrained(name, dtype=torch.float32, trust_remote_code=False)
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            reason = str(error).strip().partition("\n")[0][:300]
            raise ArpoError(f"the embedding model {name!r} could not be loaded: {reason}") from error
        self._model = model.to(self.device).eval()
        self._max_tokens = min(MAX_TOKENS, self._tokenizer.model_max_length, model.config.max_position_embeddings)
        self.width = int(model.config.hidden_size)

    def encode(self, texts: list[str]) -> Tensor:
        """Return one unit vector per text."""
        import torch

        batch = self._tokenizer(
            texts, padding=True, truncation=True, max_length=self._max_tokens, return_tensors="pt"
        ).to(self.device)
        with torch.inference_mode():
            hidden_NTD = self._model(**batch).last_hidden_state
            mask_NT1 = batch["attention_mask"].unsqueeze(-1).to(hidden_NTD.dtype)
            mean_ND = (hidden_NTD * mask_NT1).sum(1) / mask_NT1.sum(1)
            return torch.nn.functional.normalize(mean_ND, dim=-1)


class Dense:
    """The vectors of all passages; the model is loaded at the first query."""

    def __init__(self, vectors: NDArray[np.float16], embedder: Embedder, digest: str, device: str = "auto") -> None:
        self.embedder = embedder
        self.digest = digest  # of the model's name and the vectors
        self._vectors = vectors
        self._device = device
        self._lock = threading.Lock()
        self._encoder: Encoder | None = None
        self._on_gpu: Tensor | None = None

    def top(self, query: str, count: int) -> list[int]:
        """Return the numbers of the `count` passages nearest to a query, nearest first."""
        import torch

        encoder = self.load()
        with self._lock:  # a tokenizer cannot be used by two threads at once
            vector_D = encoder.encode([self.embedder.query_prefix + query])[0]
        with torch.inference_mode():
            scores_N = torch.cat([rows_KD.float() @ vector_D for rows_KD in self._rows()])
            count = min(count, len(scores_N))
            near_K = torch.nonzero(scores_N >= scores_N.topk(count).values[-1])[:, 0]
            scores_K = scores_N[near_K].cpu().numpy()
        return [int(near_K[at]) for at in top_indices(scores_K, count, -math.inf)]

    def load(self) -> Encoder:
        """Return the model, loaded by the first call."""
        import torch

        with self._lock:
            if self._encoder is not None:
                return self._encoder
            encoder = Encoder(self.embedder.model, self._device)
            if encoder.width != self._vectors.shape[1]:
                raise ArpoError(
                    f"{self.embedder.model!r} gives vectors of {encoder.width} numbers, but the index has "
                    f"{self._vectors.shape[1]}: the model has changed, so rebuild the index"
                )
            if encoder.device.type == "cuda":
                self._on_gpu = torch.tensor(self._vectors, device=encoder.device)
            self._encoder = encoder
            return encoder

    def _rows(self) -> Iterator[Tensor]:
        import torch

        for start in range(0, len(self._vectors), ROWS):
            if self._on_gpu is None:
                yield torch.from_numpy(np.array(self._vectors[start : start + ROWS]))
            else:
                yield self._on_gpu[start : start + ROWS]


def embed_passages(
    embedder: Embedder, texts: Iterable[str], size: int, folder: Path, progress: Callable[[float], None]
) -> dict[str, Any]:
    """Write the vectors of all passages to `folder` and return their entry in the manifest."""
    path = expand_user(embedder.model)
    if path.is_dir():
        embedder = replace(embedder, model=str(path.resolve()))
    encoder = Encoder(embedder.model)
    digest, done, stream = hashlib.sha256(str(asdict(embedder)).encode()), 0, iter(texts)
    with (folder / f"{EMBEDDINGS}.npy").open("wb") as file:
        header = {"descr": "<f2", "fortran_order": False, "shape": (size, encoder.width)}
        np.lib.format.write_array_header_1_0(file, header)
        while window := [embedder.passage_prefix + text for text in islice(stream, WINDOW)]:
            vectors = np.empty((len(window), encoder.width), dtype=np.float16)
            by_length = sorted(range(len(window)), key=lambda at: len(window[at]))
            for start in range(0, len(window), BATCH):
                chosen = by_length[start : start + BATCH]
                vectors[chosen] = encoder.encode([window[at] for at in chosen]).cpu().numpy()
                progress((done + start + len(chosen)) / size)
            data = vectors.tobytes()
            file.write(data)
            digest.update(data)
            done += len(window)
    return {**asdict(embedder), "width": encoder.width, "digest": digest.hexdigest()}
