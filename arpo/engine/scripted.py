"""A model that is a Python function: for tests and for trying out a rollout by hand.

`script(prefix_text, seed)` returns the text of the next turn, or (text, entropies) with one entropy per token (the last
one is repeated as needed). Log-probs are all 0. Stop strings and token limits work as in a real engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from arpo.engine.base import Capabilities, OnToken
from arpo.engine.stops import StopFinder
from arpo.types import Completion, SamplingParams

Script = Callable[[str, int], str | tuple[str, Sequence[float]]]


class ScriptedEngine:
    """Plays a script through the Engine protocol. `delay` seconds pass before each turn."""

    down = False

    def __init__(self, tokenizer: Any, script: Script, *, max_context: int = 4096, delay: float = 0.0) -> None:
        self._tokenizer, self._script, self._delay = tokenizer, script, delay
        self.capabilities = Capabilities(max_context, len(tokenizer), exact_entropy=True)
        self.version = 0

    async def generate(
        self, prefix: Sequence[int], params: SamplingParams, *, on_token: OnToken | None = None
    ) -> Completion:
        """The script's turn after `prefix`, token by token."""
        await asyncio.sleep(self._delay)
        said = self._script(self._tokenizer.decode(list(prefix)), params.seed)
        text, entropies = said if isinstance(said, tuple) else (said, (0.0,))
        finder = StopFinder(self._tokenizer, params.stop)
        tokens: list[int] = []
        finish, stop = "eos", None
        for token in self._tokenizer(text, add_special_tokens=False).input_ids:
            if len(tokens) == params.max_tokens:
                finish = "length"
                break
            tokens.append(token)
            if on_token is not None:
                on_token(token, 0.0, entropies[min(len(tokens), len(entropies)) - 1])
                await asyncio.sleep(0)
            stop = finder.find(tokens)
            if stop is not None:
                finish = "stop"
                break
        filled = tuple(entropies[min(i, len(entropies) - 1)] for i in range(len(tokens)))
        return Completion(tuple(tokens), (0.0,) * len(tokens), filled, finish, stop, self.version)

    def stats(self) -> dict[str, float]:
        """Nothing to tell."""
        return {}

    async def sync_weights(self, version: int) -> None:
        """A script has no weights; only the version changes."""
        self.version = version
