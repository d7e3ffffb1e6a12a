"""The Engine protocol: the one seam between rollouts and whatever runs the model.

A rollout always passes the full prefix; re-using what was computed before is the engine's business. Log-probs and
entropies are those of softmax(logits / temperature) before any top-p cut; `capabilities.exact_entropy` says whether the
entropy covers the full vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from arpo.types import Completion, SamplingParams

OnToken = Callable[[int, float, float], None]
"""Called with (token, log-prob, entropy) as each token is sampled: the probe after a tool result, or a live display."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What an engine promises: the longest prefix + completion, the vocabulary, and whether entropies are exact."""

    max_context: int
    vocab_size: int
    exact_entropy: bool


class Engine(Protocol):
    """Anything that can sample a turn."""

    @property
    def capabilities(self) -> Capabilities:
        """What this engine promises."""
        ...

    @property
    def version(self) -> int:
        """Of the weights in use."""
        ...

    @property
    def down(self) -> bool:
        """Whether it cannot sample now, through nobody's fault who asks: a path whose time ends so is not to blame."""
        ...

    async def generate(
        self, prefix: Sequence[int], params: SamplingParams, *, on_token: OnToken | None = None
    ) -> Completion:
        """Sample one turn after `prefix`. Cancelling the call frees all it held."""
        ...

    def stats(self) -> dict[str, float]:
        """What the engine has to tell of its work since the last call, for the metrics."""
        ...

    async def sync_weights(self, version: int) -> None:
        """Tell the engine that the weights changed: nothing computed with older ones may be used again."""
        ...
