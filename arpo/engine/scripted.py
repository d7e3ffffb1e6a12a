"""An engine whose model is a Python function: for tests, and for trying out a rollout by hand.

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
    """Engine over a script. `delay` seconds pass before each turn."""

    unreachable = False

    def __init__(self, tokenizer: Any, script: Script, *, max_context: int = 4096, delay: float = 0.0) -> None:
        self._tokenizer, self._script, self._delay = tokenizer, script, delay
        self.capabilities = Capabilities(max_context, len(tokenizer), exact_entropy=True)
        self.version = 0

    async def generate(
        self, prefix: Sequence[int], params: SamplingParams, *, on_token: OnToken | None = None
    ) -> Completion:
        """Return the script's turn after `prefix`."""
        await asyncio.sleep(self._delay)
        turn = self._script(self._tokenizer.decode(list(prefix)), params.seed)
        text, script_entropies = turn if isinstance(turn, tuple) else (turn, (0.0,))
        finder = StopFinder(self._tokenizer, params.stop)
        tokens: list[int] = []
        entropies: list[float] = []
        finish, stop = "eos", None
        for token in self._tokenizer(text, add_special_tokens=False).input_ids:
            if len(tokens) == params.max_tokens:
                finish = "length"
                break
            entropies.append(script_entropies[min(len(tokens), len(script_entropies) - 1)])
            tokens.append(token)
            if on_token is not None:
                on_token(token, 0.0, entropies[-1])
                await asyncio.sleep(0)
            stop = finder.find(tokens)
            if stop is not None:
                finish = "stop"
                break
        return Completion(tuple(tokens), (0.0,) * len(tokens), tuple(entropies), finish, stop, self.version)

    def stats(self) -> dict[str, float]:
        """Return no counters."""
        return {}

    async def sync_weights(self, version: int) -> None:
        """Set the version; a script has no weights."""
        self.version = version
