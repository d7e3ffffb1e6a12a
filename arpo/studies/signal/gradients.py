"""Gradients of a frozen model, through the same code as a training step, and their inner products.

    trainer = GradientTrainer(model, tokenizer, config)
    vectors = [to_vector(trainer.gradient(trees, config), trainer.sizes, dimension=None) for trees in sets]
    products = gram_matrix(vectors)

A gradient is kept as float32 on the CPU: whole where all of them fit into `MAX_BYTES`, else as a sketch of
`SKETCH_DIMENSION` numbers. In the sketch every weight has a random sign and is added to one place: piece by piece, each
piece as long as the sketch and shifted by a random offset. Inner products of sketches are those of the gradients
without bias, with an error of about |x| |y| / sqrt(dimension), 0.1 %.

Guarantees: no weight is changed. Signs and offsets depend only on the seed and the place of a weight in the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from arpo.config.schema import Config
from arpo.errors import ArpoError
from arpo.studies.signal.estimates import Floats
from arpo.trainer.trainer import Trainer
from arpo.types import ScoredTree, derive_seed

Vector = npt.NDArray[np.float32]
MAX_BYTES = 2 << 30  # of all gradients that are kept at a time
SKETCH_DIMENSION = 2**20
_COLUMNS = 2**18  # of the vectors, as float64 at a time


class GradientTrainer(Trainer):
    """A trainer that returns the gradient of a batch and makes no step.

    The frozen model is its own reference: where it stands, the KL term has no gradient.
    """

    def __init__(self, model: Any, tokenizer: Any, config: Config) -> None:
        super().__init__(model, tokenizer, config, model)
        self._gradient: dict[str, Tensor] = {}

    @property
    def sizes(self) -> dict[str, int]:
        """The number of weights of each trained parameter."""
        return {name: parameter.numel() for name, parameter in self.optimizer.parameters.items()}

    def gradient(self, trees: Sequence[ScoredTree], config: Config) -> dict[str, Tensor]:
        """The gradient of the loss of `config` on trees with credits, as one mini-batch, by parameter.

        Parameters without a gradient are missing; all are if no trajectory has one.
        """
        self._config = config.model_copy(update={"train": config.train.model_copy(update={"minibatches": 1})})
        self._gradient = {}
        self.update(trees)
        return self._gradient

    def _step(self) -> float:
        self._gradient = self.optimizer.take_gradients()
        return 0.0


def sketch_dimension(parameters: int, vectors: int) -> int | None:
    """The dimension to which gradients are sketched; None if they fit into memory whole."""
    return None if 4 * parameters * vectors <= MAX_BYTES else SKETCH_DIMENSION


def to_vector(
    gradients: Mapping[str, Tensor], sizes: Mapping[str, int], dimension: int | None, seed: int = 0
) -> Vector:
    """The gradient as one vector, whole or sketched to `dimension`; missing parameters count as 0."""
    if dimension is None:
        parts = [
            gradients[name].detach().reshape(-1).to("cpu", torch.float32) if name in gradients else torch.zeros(size)
            for name, size in sizes.items()
        ]
        vector = torch.cat(parts)
    else:
        vector = _sketch(gradients, sizes, dimension, seed)
    if not bool(torch.isfinite(vector).all()):
        raise ArpoError("the gradient is not finite: this model cannot be trained as it is; check model.path")
    return vector.numpy()


def _sketch(gradients: Mapping[str, Tensor], sizes: Mapping[str, int], dimension: int, seed: int) -> Tensor:
    total = torch.zeros(dimension, dtype=torch.float64)
    for number, (name, size) in enumerate(sizes.items()):
        if name not in gradients:
            continue
        flat = gradients[name].detach().reshape(-1)
        for start in range(0, size, dimension):
            piece = flat[start : start + dimension].to("cpu", torch.float64)
            generator = torch.Generator().manual_seed(derive_seed(seed, "sketch", number, start))
            offset = int(torch.randint(dimension, (1,), generator=generator))
            signs = 2 * torch.randint(2, (len(piece),), generator=generator, dtype=torch.int8) - 1
            signed, before_end = piece * signs, min(len(piece), dimension - offset)
            total[offset : offset + before_end] += signed[:before_end]
            total[: len(piece) - before_end] += signed[before_end:]
    return total.float()


def gram_matrix(vectors: Sequence[Vector]) -> Floats:
    """All inner products of the vectors, summed in float64."""
    gram = np.zeros((len(vectors), len(vectors)))
    for start in range(0, len(vectors[0]), _COLUMNS):
        rows = np.stack([vector[start : start + _COLUMNS] for vector in vectors]).astype(np.float64)
        gram += rows @ rows.T
    return gram
