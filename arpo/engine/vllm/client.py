"""Talking to one vLLM server: its weights, and its token-in, token-out endpoint.

Promises: what comes back is bounded and checked; what may pass by itself (5xx, 408, 409, 425, 429, timeouts, lost
connections, nonsense) is Unavailable, what will not (a server that lacks the endpoint or refuses the request) is an
ArpoError that says what to do. Leaving a stream ends the request on the server.
Does not cover: servers that want a key.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from arpo.engine.vllm.completion import Sampled
from arpo.errors import ArpoError

MAX_REPLY_BYTES = 1_000_000  # of replies that are not turns
ANSWER_SECONDS = 60.0
RELOAD_SECONDS = 1800.0
LONGEST_WAIT_SECONDS = 60.0
_TRY_AGAIN = (408, 409, 425, 429)
_NO_ENDPOINT = (401, 403, 404, 405)
HOW = (
    "start it as VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --tokens-only, without an API key, from vLLM 0.32 on "
    "(docs/vllm.md)"
)


class Unavailable(Exception):
    """Worth another attempt, after `pause` seconds if the server says so."""

    def __init__(self, cause: str, pause: float = 0.0) -> None:
        super().__init__(cause)
        self.pause = pause


class Unreachable(Unavailable):
    """Nobody answers at all."""


@dataclass(frozen=True, slots=True)
class Needs:
    """What a server must have been started with."""

    context: int
    top_logprobs: int
    logprobs_mode: str
    dtype: str


class Wire:
    """The way to the server at `url`, which may be silent for so many seconds."""

    def __init__(self, url: str, silence: float) -> None:
        try:
            import httpx2
        except ImportError:
            raise ArpoError("rollout.servers: asking a server needs httpx2: pip install 'arpo[web]'") from None
        try:
            parts, host = urlsplit(url), httpx2.URL(url).host
            valid = parts.scheme in ("http", "https") and parts.port != 0 and bool(host) and "@" not in parts.netloc
        except (ValueError, httpx2.InvalidURL):
            valid = False
        if not valid:
            shown = url.rpartition("@")[2]
            raise ArpoError(f"rollout.servers: got {shown!r}, expected an address like http://localhost:8000")
        self.url, self.silence = url, silence
        self._tls: ssl.SSLContext = httpx2.create_ssl_context()

    async def label(self) -> str | None:
        """That of the server's weights."""
        label = (await self._ask("GET", "/weight_info", None)).get("weight_version")
        return label if isinstance(label, str) else None

    async def check(self, needs: Needs) -> None:
        """Raise if the server was not started as is needed."""
        said = await self._ask("GET", "/server_info?config_format=json", None)
        try:
            model = said["vllm_config"]["model_config"]
            context, most, mode = (model[key] for key in ("max_model_len", "max_logprobs", "logprobs_mode"))
            dtype = str(model["dtype"]).removeprefix("torch.")
            wrong = {
                f"--max-model-len {needs.context}": context < needs.context,
                f"--max-logprobs {needs.top_logprobs}": 0 <= most < needs.top_logprobs,
                f"--logprobs-mode {needs.logprobs_mode}": mode != needs.logprobs_mode,
                f"--dtype {needs.dtype}": dtype != needs.dtype,
            }
        except (LookupError, TypeError):
            raise Unavailable("does not say how it was started") from None
        missing = [option for option, lacks in wrong.items() if lacks]
        if missing:
            raise ArpoError(f"rollout.servers: {self.url} must be started with {' '.join(missing)}")

    async def load(self, directory: Path, label: str) -> None:
        """Have the server load the weights there, forget what it computed with others, and bear this label."""
        reload = {"method": "reload_weights", "kwargs": {"weights_path": str(directory)}}
        try:
            await self._ask("POST", "/collective_rpc", reload, RELOAD_SECONDS)
        except Unavailable as error:
            raise Unavailable(f"{error} when it should load {directory}; does it see that directory?") from None
        await self._ask("POST", "/reset_prefix_cache", {})
        await self._ask("POST", "/update_weight_version", {"new_version": label})

    async def sample(self, request: Mapping[str, Any], most: int, label: str) -> AsyncGenerator[Sampled, None]:
        """The tokens of a turn as they come, from weights with this label."""
        body = {**request, "stream": True, "cache_salt": label}
        top = int(request["sampling_params"]["logprobs"])
        async with (
            self._reply("POST", "/inference/v1/generate", body, None) as reply,
            aclosing(_lines(reply, (most + 16) * (1024 + 256 * (top + 1)))) as lines,
        ):
            async for line in lines:
                if not line.startswith(b"data:") or line == b"data: [DONE]":
                    continue
                sampled, labels = read_event(line[5:])
                if labels - {label}:
                    raise ArpoError(
                        f"rollout.servers: the weights of {self.url} changed while it sampled; is it shared?"
                    )
                for one in sampled:
                    yield one

    async def _ask(self, method: str, path: str, body: Any, seconds: float = ANSWER_SECONDS) -> dict[str, Any]:
        """One short answer."""
        async with self._reply(method, path, body, seconds) as reply:
            found = bytearray()
            async for chunk in reply.aiter_bytes():
                found += chunk
                if len(found) > MAX_REPLY_BYTES:
                    raise Unavailable("answers without end")
        try:
            answer = json.loads(found) if found else {}
        except (ValueError, RecursionError):
            raise Unavailable("does not answer with JSON") from None
        return answer if isinstance(answer, dict) else {}

    @asynccontextmanager
    async def _reply(self, method: str, path: str, body: Any, seconds: float | None) -> AsyncIterator[Any]:
        """A reply with status 200, to be read within so many seconds, or without ever being silent for too long."""
        import httpx2

        limit = self.silence if seconds is None else seconds
        try:
            async with (
                asyncio.timeout(seconds),
                httpx2.AsyncClient(verify=self._tls, trust_env=False, timeout=httpx2.Timeout(limit)) as client,
                client.stream(method, f"{self.url}{path}", json=body) as reply,
            ):
                await self._check_status(reply, path)
                yield reply
        except httpx2.ConnectTimeout:
            raise Unreachable(f"cannot be reached within {limit:g} seconds") from None
        except (TimeoutError, httpx2.TimeoutException):
            raise Unavailable(f"did not answer within {limit:g} seconds") from None
        except (httpx2.HTTPError, httpx2.InvalidURL, httpx2.StreamError, OSError) as error:
            lost = Unreachable if isinstance(error, httpx2.ConnectError) else Unavailable
            raise lost(f"cannot be reached ({type(error).__name__})") from None

    async def _check_status(self, reply: Any, path: str) -> None:
        status = reply.status_code
        if status == 200:
            return
        if status in _NO_ENDPOINT:
            raise ArpoError(f"rollout.servers: {self.url} answers {path} with HTTP status {status}; {HOW}")
        if 400 <= status < 500 and status not in _TRY_AGAIN:
            said = bytearray()
            async for chunk in reply.aiter_bytes():
                said += chunk
                if len(said) > 2000:
                    break
            text = " ".join(said[:2000].decode("utf-8", "replace").split())
            shown = "".join(letter for letter in text if letter.isprintable())[:300]
            raise ArpoError(f"rollout.servers: {self.url} refuses a request with HTTP status {status}: {shown}")
        after = reply.headers.get("Retry-After", "")
        pause = float(after[:4]) if after.isascii() and after.isdigit() else 0.0
        raise Unavailable(f"answers with HTTP status {status}", min(pause, LONGEST_WAIT_SECONDS))


async def _lines(reply: Any, most: int) -> AsyncGenerator[bytes, None]:
    """The lines of a stream that has at most so many bytes."""
    rest, size = b"", 0
    async for chunk in reply.aiter_bytes():
        size += len(chunk)
        if size > most:
            raise Unavailable("answers without end")
        *whole, rest = (rest + chunk).split(b"\n")
        for line in whole:
            yield line.strip()


def read_event(text: bytes) -> tuple[list[Sampled], set[str]]:
    """The tokens in one event of a stream, and the labels of the weights that they come from, where it tells them."""
    try:
        (choice,) = json.loads(text)["choices"]
        content = (choice.get("logprobs") or {}).get("content") or []
        sampled = [_sampled(token, place) for token, place in zip(choice["token_ids"] or [], content, strict=True)]
        return sampled, {str(span["version"]) for span in choice.get("weight_versions") or []}
    except (LookupError, TypeError, AttributeError, ValueError, OverflowError, RecursionError):
        raise Unavailable("does not answer in the form of its endpoint") from None


def _sampled(token: Any, place: Any) -> Sampled:
    if place["token_id"] != token:
        raise ValueError("the log-prob of another token")
    known = {one["token_id"]: float(one["logprob"]) for one in place["top_logprobs"]}
    if len(known) != len(place["top_logprobs"]):
        raise ValueError("a token twice")
    known[token] = float(place["logprob"])
    return Sampled(token, known[token], tuple(known.values()))
