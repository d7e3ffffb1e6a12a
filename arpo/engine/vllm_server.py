"""Sampling by vLLM servers that someone else started: the Engine protocol over their token-in, token-out endpoint.

    VLLM_SERVER_DEV_MODE=1 vllm serve DIRECTORY --tokens-only --max-logprobs 64 --enable-prefix-caching

Promises: ids, log-probs and ends of turns are as in `arpo.engine.vllm`. A server that is lost, busy or talks nonsense
costs no path: the request is tried again, elsewhere first, and goes on after the tokens that were sampled already; when
nothing helps for `patience` seconds, an ArpoError names the servers and what was wrong. A server samples only with the
current weights: each has a label, which a restarted server has lost, and one without the right label loads them first.
What comes back is bounded and taken as hostile.
Does not cover: how many prefix tokens were re-used; servers that do not see the file system that weights are written to
(TMPDIR says where that is); weights that others change while a turn is sampled.
"""

from __future__ import annotations

import asyncio
import json
import random
import secrets
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from arpo.engine.base import OnToken
from arpo.engine.turn import BadToken, Sampled, Terms, Turn
from arpo.types import ArpoError, Completion, SamplingParams, derive_seed

PATIENCE_SECONDS = 300.0
PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 30.0
SILENCE_SECONDS = 300.0  # after which a server that says nothing counts as lost
RELOAD_SECONDS = 1800.0
MAX_REPLY_BYTES = 1_000_000  # of replies that are not turns
BLOCK = 64  # tokens by which it is remembered what a server has read
MAX_BLOCKS = 100_000
_TRY_AGAIN = (408, 409, 425, 429)
_jitter = random.Random()


class Unavailable(Exception):
    """Worth another attempt, after `pause` seconds if the server says so."""

    def __init__(self, cause: str, pause: float = 0.0) -> None:
        super().__init__(cause)
        self.pause = pause


@dataclass(slots=True, eq=False)
class Server:
    """One server: its requests under way, when it may be tried again, and what it has read of late."""

    url: str
    busy: int = 0
    resting_until: float = 0.0
    failures: int = 0
    restoring: asyncio.Future[None] | None = None
    read: set[int] = field(default_factory=set)

    def known(self, blocks: Sequence[int]) -> int:
        """How many of these blocks, from the first on, it has read."""
        return next((number for number, block in enumerate(blocks) if block not in self.read), len(blocks))

    def rest(self, pause: float) -> None:
        """It failed: leave it alone for a while that grows with each time."""
        self.failures += 1
        usual = _jitter.uniform(0.5, 1.0) * pause * 2 ** min(self.failures - 1, 16)
        self.resting_until = time.monotonic() + min(LONGEST_PAUSE_SECONDS, usual)


class ServerEngine:
    """Engine over the servers at `urls`, which `write` writes the weights for."""

    def __init__(
        self,
        urls: Sequence[str],
        model: Any,
        tokenizer: Any,
        write: Callable[[Path], None],
        *,
        top_logprobs: int = 64,
        patience: float = PATIENCE_SECONDS,
        pause: float = PAUSE_SECONDS,
        silence: float = SILENCE_SECONDS,
    ) -> None:
        try:
            import httpx2
        except ImportError:
            raise ArpoError("rollout.servers: asking a server needs httpx2: pip install 'arpo[web]'") from None
        self._tls = httpx2.create_ssl_context()
        self._servers = [Server(_checked(url)) for url in dict.fromkeys(url.rstrip("/") for url in urls)]
        self._terms = Terms(model, tokenizer, top_logprobs)
        self.capabilities = self._terms.capabilities
        self._write, self._patience, self._pause, self._silence = write, patience, pause, silence
        self._home = tempfile.TemporaryDirectory(prefix="arpo-vllm-")
        self._nonce, self._updates, self._under_way = secrets.token_hex(8), 0, 0
        self._retries = self._restored = 0
        self.version = 0

    @property
    def _label(self) -> str:
        """Of the current weights: no server has it that did not get them from this engine."""
        return f"arpo-{self._nonce}-{self._updates}"

    async def generate(
        self, prefix: Sequence[int], params: SamplingParams, *, on_token: OnToken | None = None
    ) -> Completion:
        """Sample one turn after `prefix`."""
        turn = self._terms.turn(prefix, params, on_token)
        blocks = _blocks(turn.prefix)
        complaints: dict[str, str] = {}
        give_up, got = time.monotonic() + self._patience, 0
        self._under_way += 1
        try:
            while True:
                server = self._pick(blocks)
                await asyncio.sleep(max(0.0, server.resting_until - time.monotonic()))
                server.busy += 1
                try:
                    await self._bring_up_to_date(server)
                    await self._sample(server, turn)
                    server.failures = 0
                    server.read = (server.read if len(server.read) < MAX_BLOCKS else set()) | set(blocks)
                    return turn.completion(self.version)
                except Unavailable as error:
                    complaints[server.url] = str(error)
                    server.rest(max(error.pause, self._pause))
                    self._retries += 1
                finally:
                    server.busy -= 1
                if len(turn.tokens) > got:  # it goes on, if slowly
                    got, give_up = len(turn.tokens), time.monotonic() + self._patience
                if time.monotonic() > give_up:
                    said = "; ".join(f"{url} {cause}" for url, cause in complaints.items())
                    raise ArpoError(f"rollout.servers: no vLLM server samples for {self._patience:g} seconds: {said}")
        finally:
            self._under_way -= 1

    async def update_weights(self, version: int) -> None:
        """Write the weights as they are now. Each server loads them before it samples again."""
        if self._under_way:
            raise RuntimeError("weights may not change while requests are being sampled")
        older = self._directory
        self._updates += 1
        await asyncio.to_thread(self._write, self._directory)
        self.version = version
        await asyncio.to_thread(_remove, older)

    def stats(self) -> dict[str, float]:
        """Since the last call: failed attempts, loads of weights; mean and largest possible error of entropies."""
        told = {"retries": self._retries, "restored": self._restored, **self._terms.tally.tell()}
        self._retries = self._restored = 0
        return told
