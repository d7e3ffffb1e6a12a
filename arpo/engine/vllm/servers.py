"""Sampling by vLLM servers that someone else started: the Engine protocol over their token-in, token-out endpoint.

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --tokens-only --max-logprobs 64

Promises: ids, log-probs and ends of turns are as in `arpo.engine.vllm.engine`. A server that is lost, busy or talks nonsense
costs no path: the request is tried again, elsewhere first, and goes on after the tokens that were sampled already; when
nothing helps for `patience` seconds, an ArpoError names the servers and what was wrong. A server samples only with the
current weights: each has a label, which a restarted server has lost, and one without the right label loads them first.
If no server answers from the beginning, that is said at once.
Does not cover: how many prefix tokens were re-used; servers that do not see the file system that weights are written to
(TMPDIR says where that is).
"""

from __future__ import annotations

import asyncio
import random
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from arpo.engine.base import OnToken
from arpo.engine.vllm.client import HOW, Needs, Wire
from arpo.engine.vllm.completion import BadToken, Terms, Turn, logprobs_mode
from arpo.errors import ArpoError
from arpo.net.http import Unavailable, Unreachable
from arpo.types import Completion, SamplingParams, derive_seed

PATIENCE_SECONDS = 300.0
PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 30.0
SILENCE_SECONDS = 300.0  # after which a server that says nothing counts as lost
BLOCK = 64  # tokens by which it is remembered what a server has read
MAX_BLOCKS = 100_000
_jitter = random.Random()


@dataclass(slots=True, eq=False)
class Server:
    """One server: its requests under way, when it may be tried again, and what it has read of late."""

    wire: Wire
    busy: int = 0
    failures: int = 0
    resting_until: float = 0.0
    loading: asyncio.Task[None] | None = None
    met: bool = False  # it has answered once
    read: set[int] = field(default_factory=set)

    def known(self, blocks: Sequence[int]) -> int:
        """How many of these blocks, from the first on, it has read."""
        return next((number for number, block in enumerate(blocks) if block not in self.read), len(blocks))

    def failed(self, pause: float, asked: float) -> None:
        """Leave it alone for a while that grows with each time; what fails together counts as once."""
        now = time.monotonic()
        if now >= self.resting_until:
            self.failures += 1
            usual = _jitter.uniform(0.5, 1.0) * pause * 2 ** min(self.failures - 1, 16)
            self.resting_until = now + max(asked, min(LONGEST_PAUSE_SECONDS, usual))

    def served(self, blocks: Sequence[int]) -> None:
        """It has read these."""
        if len(self.read) > MAX_BLOCKS:
            self.read.clear()
        self.read.update(blocks)


class ServerEngine:
    """Engine over the servers at `urls`, for which `write` writes the weights; `model` is only asked what it is.

    `temperature` is that of the requests whose log-probs count.
    """

    def __init__(
        self,
        urls: Sequence[str],
        model: Any,
        tokenizer: Any,
        write: Callable[[Path], None],
        *,
        top_logprobs: int = 64,
        temperature: float = 1.0,
        patience: float = PATIENCE_SECONDS,
        pause: float = PAUSE_SECONDS,
        silence: float = SILENCE_SECONDS,
    ) -> None:
        self._servers = [Server(Wire(url, silence)) for url in dict.fromkeys(url.rstrip("/") for url in urls)]
        self._terms = Terms(model, tokenizer, top_logprobs)
        self.capabilities = self._terms.capabilities
        dtype = str(model.dtype).removeprefix("torch.")
        self._needs = Needs(self.capabilities.max_context, self._terms.top, logprobs_mode(temperature), dtype)
        self._write, self._patience, self._pause = write, patience, pause
        self._home = tempfile.TemporaryDirectory(prefix="arpo-vllm-")
        self._nonce, self._updates = secrets.token_hex(8), 0
        self._under_way = self._retries = self._loads = 0
        self.version = 0
        write(self._directory(0))

    @property
    def down(self) -> bool:
        """Whether every server has failed and not sampled since, or is loading weights."""
        return all(server.failures or server.loading is not None for server in self._servers)

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
                server.busy += 1
                try:
                    await asyncio.sleep(max(0.0, server.resting_until - time.monotonic()))
                    began = time.monotonic()
                    await self._bring_up_to_date(server)
                    give_up += time.monotonic() - began  # a load may take long
                    await self._sample(server, turn)
                    server.served(blocks)
                    return turn.completion(self.version)
                except Unavailable as error:
                    complaints[server.wire.url] = str(error)
                    server.failed(self._pause, error.retry_after or 0.0)
                    self._retries += 1
                    if isinstance(error, Unreachable) and len(complaints) == len(self._servers) and not self._met:
                        raise ArpoError(f"rollout.servers: nobody answers: {_said(complaints)}; {HOW}") from None
                finally:
                    server.busy -= 1
                if len(turn.tokens) > got:  # it goes on, if slowly
                    got, give_up = len(turn.tokens), time.monotonic() + self._patience
                if time.monotonic() >= give_up:
                    what = f"nothing was sampled for {self._patience:g} seconds"
                    raise ArpoError(f"rollout.servers: {what}: {_said(complaints)}")
        finally:
            self._under_way -= 1

    async def sync_weights(self, version: int) -> None:
        """Write the weights as they are now. Each server loads them before it samples again."""
        if self._under_way:
            raise RuntimeError("weights may not change while requests are being sampled")
        await asyncio.to_thread(self._write, self._directory(self._updates + 1))
        self._updates += 1
        self.version = version
        await asyncio.gather(*map(self._load_now, self._servers))
        await asyncio.to_thread(shutil.rmtree, self._directory(self._updates - 1), ignore_errors=True)

    def stats(self) -> dict[str, float]:
        """Since the last call: failed attempts, loads of weights; mean and largest possible error of entropies."""
        told = {"retries": self._retries, "weight_loads": self._loads, **self._terms.tally.tell()}
        self._retries = self._loads = 0
        return told

    @property
    def _label(self) -> str:
        """Of the current weights: no server has it that did not get them from this engine."""
        return f"arpo-{self._nonce}-{self._updates}"

    def _directory(self, update: int) -> Path:
        return Path(self._home.name) / str(update)

    def _pick(self, blocks: Sequence[int]) -> Server:
        """Of the servers that are not resting and hardly busier than others, the one that has read most of this."""
        now = time.monotonic()
        ready = [server for server in self._servers if server.resting_until <= now]
        if not ready:
            return min(self._servers, key=lambda server: server.resting_until)
        least = min(server.busy for server in ready)
        free = [server for server in ready if server.busy <= least + 1 + least // 4]
        return max(free, key=lambda server: (server.known(blocks), -server.busy))

    @property
    def _met(self) -> bool:
        return any(server.met for server in self._servers)

    async def _load_now(self, server: Server) -> None:
        """Have a server load new weights while nobody waits for it; if it cannot, whoever needs it tries again."""
        with suppress(Unavailable):
            await self._bring_up_to_date(server)

    async def _bring_up_to_date(self, server: Server) -> None:
        """See to it that the server has the current weights."""
        while server.loading is not None or await self._label_of(server) != self._label:
            if server.loading is None:
                server.loading = asyncio.create_task(self._load(server))
                server.loading.add_done_callback(lambda done: done.cancelled() or done.exception())  # it was seen
            await asyncio.shield(server.loading)  # it goes on if whoever waits gives up

    async def _label_of(self, server: Server) -> str | None:
        label = await server.wire.label()
        server.met = True
        return label

    async def _load(self, server: Server) -> None:
        try:
            await server.wire.check(self._needs)
            await server.wire.load(self._directory(self._updates), self._label)
            server.read.clear()
            self._loads += 1
        finally:
            server.loading = None

    async def _sample(self, server: Server, turn: Turn) -> None:
        """Have the turn, or what is missing of it, sampled there."""
        params, done, missing = turn.params, len(turn.tokens), turn.limit - len(turn.tokens)
        request = {
            "token_ids": [*turn.prefix, *turn.tokens],
            "sampling_params": {
                "max_tokens": missing,
                "temperature": params.temperature,
                "top_p": params.top_p,
                "top_k": params.top_k,
                "seed": derive_seed(params.seed, "goes on", done) if done else params.seed % 2**63,
                "ignore_eos": True,
                "stop_token_ids": sorted(self._terms.eos),
                "detokenize": False,
                "logprobs": self._terms.top,
            },
        }
        try:
            async with aclosing(server.wire.sample(request, missing, self._label)) as tokens:
                while turn.finish is None:
                    async with asyncio.timeout(server.wire.silence):
                        turn.add(await anext(tokens))
                    server.failures = 0
        except TimeoutError:
            raise Unavailable(f"{server.wire.url} sampled nothing for {server.wire.silence:g} seconds") from None
        except StopAsyncIteration:
            raise Unavailable(f"{server.wire.url} broke off in the middle of a turn") from None
        except BadToken as error:
            raise Unavailable(f"{server.wire.url} sends {error}") from None


def _said(complaints: dict[str, str]) -> str:
    return "; ".join(complaints.values())


def _blocks(prefix: Sequence[int]) -> list[int]:
    """A number for each whole block of a prefix, which depends on all before it."""
    found, before = [], 0
    for start in range(0, len(prefix) - BLOCK + 1, BLOCK):
        before = hash((before, tuple(prefix[start : start + BLOCK])))
        found.append(before)
    return found
