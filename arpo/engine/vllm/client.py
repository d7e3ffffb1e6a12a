"""Talking to one vLLM server: its weights, and its token-in, token-out endpoint.

Guarantees: replies are bounded and checked. What may pass by itself is `arpo.net.http.Unavailable`; a server that lacks
an endpoint or refuses a request is an ArpoError that says what to do. Leaving a stream ends the request on the server.
Not covered: servers that want an API key.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from arpo.engine.vllm.completion import Sampled
from arpo.errors import ArpoError
from arpo.net.http import HttpClient, Rejected, TooLarge, Unavailable

MAX_REPLY_BYTES = 1_000_000  # of replies that are not turns
ANSWER_SECONDS = 60.0
RELOAD_SECONDS = 1800.0
_NO_ENDPOINT = (401, 403, 404, 405)
HOW = (
    "start it as VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --tokens-only, without an API key, from vLLM 0.32 on "
    "(docs/vllm.md)"
)


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
        self._http = HttpClient(
            url,
            setting="rollout.servers",
            example="http://localhost:8000",
            timeout=ANSWER_SECONDS,
            max_bytes=MAX_REPLY_BYTES,
        )
        self.url, self.silence = url, silence

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
            raise Unavailable(f"{self.url} does not say how it was started") from None
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
        max_bytes = (most + 16) * (1024 + 256 * (top + 1))
        async with (
            self._stream(
                "POST",
                "/inference/v1/generate",
                json=body,
                headers={"Accept": "text/event-stream"},
                idle_timeout=self.silence,
                max_bytes=max_bytes,
            ) as chunks,
            aclosing(_lines(chunks)) as lines,
        ):
            async for line in lines:
                if not line.startswith(b"data:") or line == b"data: [DONE]":
                    continue
                try:
                    sampled, labels = read_event(line[5:])
                except (LookupError, TypeError, AttributeError, ValueError, OverflowError, RecursionError):
                    raise Unavailable(f"{self.url} does not answer in the form of its endpoint") from None
                if labels - {label}:
                    raise ArpoError(
                        f"rollout.servers: the weights of {self.url} changed while it sampled; is it shared?"
                    )
                for one in sampled:
                    yield one

    async def _ask(self, method: str, path: str, body: Any, timeout: float = ANSWER_SECONDS) -> dict[str, Any]:
        """Return the JSON object in a short reply; an empty reply is an empty object."""
        async with self._stream(method, path, json=body, timeout=timeout) as chunks:
            reply = b"".join([chunk async for chunk in chunks])
        try:
            answer = json.loads(reply) if reply else {}
        except (ValueError, RecursionError):
            raise Unavailable(f"{self.url} does not answer with JSON") from None
        return answer if isinstance(answer, dict) else {}

    @asynccontextmanager
    async def _stream(self, method: str, path: str, **request: Any) -> AsyncIterator[AsyncIterator[bytes]]:
        """The chunks of a reply, as `HttpClient.stream` yields them."""
        try:
            async with self._http.stream(method, path, **request) as chunks:
                yield chunks
        except TooLarge as error:  # another server may behave
            raise Unavailable(str(error)) from None
        except Rejected as error:
            if error.status in _NO_ENDPOINT:
                raise ArpoError(
                    f"rollout.servers: {self.url} answers {path} with HTTP status {error.status}; {HOW}"
                ) from None
            raise ArpoError(f"rollout.servers: {error}") from None


async def _lines(chunks: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    """The lines of a stream."""
    rest = b""
    async for chunk in chunks:
        *whole, rest = (rest + chunk).split(b"\n")
        for line in whole:
            yield line.strip()


def read_event(text: bytes) -> tuple[list[Sampled], set[str]]:
    """The tokens in one event of a stream, and the labels of the weights that they come from, where it tells them."""
    (choice,) = json.loads(text)["choices"]
    content = (choice.get("logprobs") or {}).get("content") or []
    sampled = [_sampled(token, place) for token, place in zip(choice["token_ids"] or [], content, strict=True)]
    return sampled, {str(span["version"]) for span in choice.get("weight_versions") or []}


def _sampled(token: Any, place: Any) -> Sampled:
    if place["token_id"] != token:
        raise ValueError("the log-prob of another token")
    known = {one["token_id"]: float(one["logprob"]) for one in place["top_logprobs"]}
    if len(known) != len(place["top_logprobs"]):
        raise ValueError("a token twice")
    known[token] = float(place["logprob"])
    return Sampled(token, known[token], tuple(known.values()))
