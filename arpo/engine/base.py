"""The Engine protocol: what rollouts need from whatever runs the model.

A rollout always passes the full prefix; reusing earlier computation is up to the engine. Log-probs and entropies are
those of softmax(logits / temperature), before top-k or top-p. `capabilities.exact_entropy` says whether entropies cover
the full vocabulary or are estimates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from arpo.types import Completion, SamplingParams

OnToken = Callable[[int, float, float], None]
"""Called with (token, log-prob, entropy) as each token is sampled."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Limits of an engine: longest prefix + completion, size of the vocabulary, and whether entropies are exact."""

    max_context: int
    vocab_size: int
    exact_entropy: bool


class Engine(Protocol):
    """Anything that can sample a turn."""

    @property
    def capabilities(self) -> Capabilities:
        """The engine's limits."""
        ...

    @property
    def version(self) -> int:
        """Policy version of the weights in use."""
        ...

    @property
    def unreachable(self) -> bool:
        """True while the backend is unreachable; timeouts then do not count against the model."""
        ...

    async def generate(
        self, prefix: Sequence[int], params: SamplingParams, *, on_token: OnToken | None = None
    ) -> Completion:
        """Sample one turn after `prefix`. Cancelling the call frees everything it holds."""
        ...

    def stats(self) -> dict[str, float]:
        """Return the engine's counters since the last call, for the metrics."""
        ...

    async def sync_weights(self, version: int) -> None:
        """Use the current weights from now on; nothing computed with older ones is reused."""
        ...


def check_request(
    capabilities: Capabilities, prefix: Sequence[int], params: SamplingParams, num_ids: int | None = None
) -> None:
    """Raise ValueError if the request exceeds the context or the vocabulary.

    An engine that sees knows `num_ids`, which are those of the vocabulary and of images (`arpo.models.vision`).
    """
    context, vocab = capabilities.max_context, capabilities.vocab_size
    if not prefix or params.max_tokens < 1 or len(prefix) >= context:
        raise ValueError(f"cannot sample {params.max_tokens} tokens after {len(prefix)} within a context of {context}")
    if not 0 <= min(prefix) <= max(prefix) < (num_ids or vocab):
        raise ValueError(f"the prefix holds token {max(prefix)}, but the model's vocabulary ends before {vocab}")
