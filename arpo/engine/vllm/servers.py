"""Sampling on vLLM servers that run already: the Engine protocol over their token-in, token-out endpoint.

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --tokens-only --max-logprobs 64

Guarantees: token ids, log-probs and ends of turns are as in `arpo.engine.vllm.engine`. A server that is lost, busy or
sends invalid replies costs no trajectory: the request is retried, on another server first, and continues after the
tokens that were sampled already. When nothing helps for `patience` seconds, an ArpoError names the servers and their
errors; if no server answers from the start, at once. A server samples only with the current weights: they have a
version, which a restarted server has lost, and a server without the right version loads them first.
Not covered: how many prefix tokens were cached; servers that do not see the file system that weights are written to
(set TMPDIR to choose where).
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
from arpo.engine.vllm.client import HOW_TO_START, ServerRequirements, VllmClient
from arpo.engine.vllm.completion import CompletionBuilder, InvalidToken, PartialCompletion, logprobs_mode
from arpo.errors import ArpoError
from arpo.net.http import Unavailable, Unreachable
from arpo.types import Completion, SamplingParams, derive_seed

PATIENCE_SECONDS = 300.0
PAUSE_SECONDS = 1.0
MAX_PAUSE_SECONDS = 30.0
IDLE_TIMEOUT_SECONDS = 300.0
BLOCK_SIZE = 64  # tokens; the unit in which we remember what a server has in its prefix cache
MAX_BLOCKS = 100_000
_jitter = random.Random()


@dataclass(slots=True, eq=False)
class Server:
    """One server: its requests in flight, when it may be tried again, and which blocks it has computed."""

    client: VllmClient
    in_flight: int = 0
    failures: int = 0  # in a row
    retry_at: float = 0.0
    loading: asyncio.Task[None] | None = None
    has_answered: bool = False
    cached_blocks: set[int] = field(default_factory=set)

    def num_cached(self, blocks: Sequence[int]) -> int:
        """Return how many of these blocks, from the first on, the server has computed."""
        return next((i for i, block in enumerate(blocks) if block not in self.cached_blocks), len(blocks))

    def record_failure(self, pause: float, retry_after: float) -> None:
        """Back off exponentially; failures during a pause count once."""
        now = time.monotonic()
        if now >= self.retry_at:
            self.failures += 1
            backoff = _jitter.uniform(0.5, 1.0) * pause * 2 ** min(self.failures - 1, 16)
            self.retry_at = now + max(retry_after, min(MAX_PAUSE_SECONDS, backoff))

    def record_blocks(self, blocks: Sequence[int]) -> None:
        """Remember that the server has computed these blocks."""
        if len(self.cached_blocks) > MAX_BLOCKS:
            self.cached_blocks.clear()
        self.cached_blocks.update(blocks)


class ServerEngine:
    """Engine over the servers at `urls`; `save_weights` writes the weights they load, `model` only gives its config.

    `temperature` is that of the requests whose log-probs are trained on.
    """

    def __init__(
        self,
        urls: Sequence[str],
        model: Any,
        tokenizer: Any,
        save_weights: Callable[[Path], None],
        *,
        top_logprobs: int = 64,
        temperature: float = 1.0,
        end_tokens: frozenset[int] | None = None,
        patience: float = PATIENCE_SECONDS,
        pause: float = PAUSE_SECONDS,
        idle_timeout: float = IDLE_TIMEOUT_SECONDS,
    ) -> None:
        unique_urls = dict.fromkeys(url.rstrip("/") for url in urls)
        self._servers = [Server(VllmClient(url, idle_timeout)) for url in unique_urls]
        self._builder = CompletionBuilder(model, tokenizer, top_logprobs, end_tokens)
        self.capabilities = self._builder.capabilities
        dtype = str(model.dtype).removeprefix("torch.")
        self._requirements = ServerRequirements(
            self.capabilities.max_context, self._builder.top_logprobs, logprobs_mode(temperature), dtype
        )
        self._save_weights, self._patience, self._pause = save_weights, patience, pause
        self._temp_dir = tempfile.TemporaryDirectory(prefix="arpo-vllm-")
        self._nonce, self._updates = secrets.token_hex(8), 0
        self._in_flight = self._retries = self._weight_loads = 0
        self.version = 0
        save_weights(self._weights_dir(0))

    @property
    def unreachable(self) -> bool:
        """Whether every server has failed and not sampled since, or is loading weights."""
        return all(server.failures or server.loading is not None for server in self._servers)

    async def generate(
        self, prefix: Sequence[int], params: SamplingParams, *, on_token: OnToken | None = None
    ) -> Completion:
        """Sample one turn after `prefix`."""
        partial = self._builder.start(prefix, params, on_token)
        blocks = _block_hashes(partial.prefix)
        errors: dict[str, str] = {}
        deadline, num_tokens = time.monotonic() + self._patience, 0
        self._in_flight += 1
        try:
            while True:
                server = self._pick_server(blocks)
                server.in_flight += 1
                try:
                    await asyncio.sleep(max(0.0, server.retry_at - time.monotonic()))
                    started = time.monotonic()
                    await self._ensure_weights(server)
                    deadline += time.monotonic() - started  # a load may take long
                    await self._sample(server, partial)
                    server.record_blocks(blocks)
                    return partial.completion(self.version)
                except Unavailable as error:
                    errors[server.client.url] = str(error)
                    server.record_failure(self._pause, error.retry_after or 0.0)
                    self._retries += 1
                    none_answered = not any(server.has_answered for server in self._servers)
                    if isinstance(error, Unreachable) and len(errors) == len(self._servers) and none_answered:
                        message = f"no server answers: {'; '.join(errors.values())}"
                        raise ArpoError(f"rollout.servers: {message}; {HOW_TO_START}") from None
                finally:
                    server.in_flight -= 1
                if len(partial.tokens) > num_tokens:  # there is progress
                    num_tokens, deadline = len(partial.tokens), time.monotonic() + self._patience
                if time.monotonic() >= deadline:
                    message = f"nothing was sampled for {self._patience:g} seconds"
                    raise ArpoError(f"rollout.servers: {message}: {'; '.join(errors.values())}")
        finally:
            self._in_flight -= 1

    async def sync_weights(self, version: int) -> None:
        """Write the current weights. Each server loads them before it samples again."""
        if self._in_flight:
            raise RuntimeError("weights may not change while requests are being sampled")
        await asyncio.to_thread(self._save_weights, self._weights_dir(self._updates + 1))
        self._updates += 1
        self.version = version
        await asyncio.gather(*map(self._try_load, self._servers))
        await asyncio.to_thread(shutil.rmtree, self._weights_dir(self._updates - 1), ignore_errors=True)

    def stats(self) -> dict[str, float]:
        """Return counters since the last call: retries, loads of weights, mean and largest error of entropies."""
        counts = {"retries": self._retries, "weight_loads": self._weight_loads}
        self._retries = self._weight_loads = 0
        return {**counts, **self._builder.entropy_stats()}

    @property
    def _weight_version(self) -> str:
        """Version of the current weights; no server has it that did not get them from this engine."""
        return f"arpo-{self._nonce}-{self._updates}"

    def _weights_dir(self, update: int) -> Path:
        return Path(self._temp_dir.name) / str(update)

    def _pick_server(self, blocks: Sequence[int]) -> Server:
        """Return, of the servers that are ready and hardly busier than others, the one with the most cached blocks."""
        now = time.monotonic()
        ready = [server for server in self._servers if server.retry_at <= now]
        if not ready:
            return min(self._servers, key=lambda server: server.retry_at)
        least = min(server.in_flight for server in ready)
        free = [server for server in ready if server.in_flight <= least + 1 + least // 4]
        return max(free, key=lambda server: (server.num_cached(blocks), -server.in_flight))

    async def _try_load(self, server: Server) -> None:
        """Load new weights while no request waits; if it fails, the next request tries again."""
        with suppress(Unavailable):
            await self._ensure_weights(server)

    async def _ensure_weights(self, server: Server) -> None:
        """Return when the server has the current weights."""
        while server.loading is not None or await self._version_of(server) != self._weight_version:
            if server.loading is None:
                server.loading = asyncio.create_task(self._load(server))
                # Retrieve its exception, so that asyncio does not complain if nobody awaits it.
                server.loading.add_done_callback(lambda task: task.cancelled() or task.exception())
            await asyncio.shield(server.loading)  # the load continues if the waiting request is cancelled

    async def _version_of(self, server: Server) -> str | None:
        version = await server.client.weight_version()
        server.has_answered = True
        return version

    async def _load(self, server: Server) -> None:
        try:
            await server.client.check(self._requirements)
            await server.client.load_weights(self._weights_dir(self._updates), self._weight_version)
            server.cached_blocks.clear()
            self._weight_loads += 1
        finally:
            server.loading = None

    async def _sample(self, server: Server, partial: PartialCompletion) -> None:
        """Sample what is missing of the completion on this server."""
        client, params = server.client, partial.params
        done, missing = len(partial.tokens), partial.max_tokens - len(partial.tokens)
        request = {
            "token_ids": [*partial.prefix, *partial.tokens],
            "sampling_params": {
                "max_tokens": missing,
                "temperature": params.temperature,
                "top_p": params.top_p,
                "top_k": params.top_k,
                "seed": derive_seed(params.seed, "goes on", done) if done else params.seed % 2**63,
                "ignore_eos": True,
                "stop_token_ids": sorted(self._builder.turn_ends.eos),
                "detokenize": False,
                "logprobs": self._builder.top_logprobs,
            },
        }
        try:
            async with aclosing(client.generate(request, missing, self._weight_version)) as tokens:
                while partial.finish is None:
                    async with asyncio.timeout(client.idle_timeout):
                        partial.add(await anext(tokens))
                    server.failures = 0
        except TimeoutError:
            raise Unavailable(f"{client.name} sampled nothing for {client.idle_timeout:g} seconds") from None
        except StopAsyncIteration:
            raise Unavailable(f"{client.name} broke off in the middle of a turn") from None
        except InvalidToken as error:
            raise Unavailable(f"{client.name} sends {error}") from None


def _block_hashes(prefix: Sequence[int]) -> list[int]:
    """Return a hash for each full block of a prefix, which depends on all blocks before it."""
    hashes, previous = [], 0
    for start in range(0, len(prefix) - BLOCK_SIZE + 1, BLOCK_SIZE):
        previous = hash((previous, tuple(prefix[start : start + BLOCK_SIZE])))
        hashes.append(previous)
    return hashes
