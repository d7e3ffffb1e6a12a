"""The client of one vLLM server: its weights, and its token-in, token-out endpoint.

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

from arpo.engine.vllm.completion import SampledToken
from arpo.errors import ArpoError
from arpo.net.http import HttpClient, Rejected, TooLarge, Unavailable

MAX_REPLY_BYTES = 1_000_000  # of replies other than completions
REPLY_SECONDS = 60.0
RELOAD_SECONDS = 1800.0
_NO_ENDPOINT = (401, 403, 404, 405)
HOW_TO_START = (
    "start it as VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --tokens-only, without an API key, from vLLM 0.32 on "
    "(docs/vllm.md)"
)


@dataclass(frozen=True, slots=True)
class ServerRequirements:
    """The options that a server must have been started with."""

    context: int
    top_logprobs: int
    logprobs_mode: str
    dtype: str


class VllmClient:
    """Client of the server at `url`; a stream may be idle for `idle_timeout` seconds."""

    def __init__(self, url: str, idle_timeout: float) -> None:
        self._http = HttpClient(
            url,
            setting="rollout.servers",
            example="http://localhost:8000",
            timeout=REPLY_SECONDS,
            max_bytes=MAX_REPLY_BYTES,
        )
        self.url, self.name, self.idle_timeout = url, self._http.name, idle_timeout

    async def weight_version(self) -> str | None:
        """Return the version that the server's weights were given, if any."""
        version = (await self._request("GET", "/weight_info", None)).get("weight_version")
        return version if isinstance(version, str) else None

    async def check(self, required: ServerRequirements) -> None:
        """Raise if the server was started with other options."""
        info = await self._request("GET", "/server_info?config_format=json", None)
        try:
            model = info["vllm_config"]["model_config"]
            context, max_logprobs, mode = (model[key] for key in ("max_model_len", "max_logprobs", "logprobs_mode"))
            dtype = str(model["dtype"]).removeprefix("torch.")
            lacks = {
                f"--max-model-len {required.context}": context < required.context,
                f"--max-logprobs {required.top_logprobs}": 0 <= max_logprobs < required.top_logprobs,
                f"--logprobs-mode {required.logprobs_mode}": mode != required.logprobs_mode,
                f"--dtype {required.dtype}": dtype != required.dtype,
            }
        except (LookupError, TypeError):
            raise Unavailable(f"{self.name} does not say how it was started") from None
        missing = [option for option, lacking in lacks.items() if lacking]
        if missing:
            raise ArpoError(f"rollout.servers: {self.name} must be started with {' '.join(missing)}")

    async def load_weights(self, directory: Path, version: str) -> None:
        """Make the server load the weights in `directory`, empty its prefix cache, and report this version."""
        reload = {"method": "reload_weights", "kwargs": {"weights_path": str(directory)}}
        try:
            await self._request("POST", "/collective_rpc", reload, RELOAD_SECONDS)
        except Unavailable as error:
            raise Unavailable(f"{error} when it should load {directory}; does it see that directory?") from None
        await self._request("POST", "/reset_prefix_cache", {})
        await self._request("POST", "/update_weight_version", {"new_version": version})

    async def generate(
        self, request: Mapping[str, Any], max_tokens: int, version: str
    ) -> AsyncGenerator[SampledToken, None]:
        """Yield the tokens of a completion as they arrive, sampled from the weights of this version."""
        body = {**request, "stream": True, "cache_salt": version}
        top = int(request["sampling_params"]["logprobs"])
        async with (
            self._stream(
                "POST",
                "/inference/v1/generate",
                json=body,
                headers={"Accept": "text/event-stream"},
                idle_timeout=self.idle_timeout,
                max_bytes=(max_tokens + 16) * (1024 + 256 * (top + 1)),
            ) as chunks,
            aclosing(_lines(chunks)) as lines,
        ):
            async for line in lines:
                if not line.startswith(b"data:") or line == b"data: [DONE]":
                    continue
                try:
                    tokens, versions = parse_event(line[5:])
                except (LookupError, TypeError, AttributeError, ValueError, OverflowError, RecursionError):
                    raise Unavailable(f"{self.name} does not answer in the form of its endpoint") from None
                if versions - {version}:
                    raise ArpoError(
                        f"rollout.servers: the weights of {self.name} changed while it sampled; is it shared?"
                    )
                for token in tokens:
                    yield token

    async def _request(self, method: str, path: str, body: Any, timeout: float = REPLY_SECONDS) -> dict[str, Any]:
        """Return the JSON object in a short reply; an empty reply is an empty object."""
        async with self._stream(method, path, json=body, timeout=timeout) as chunks:
            reply = b"".join([chunk async for chunk in chunks])
        try:
            answer = json.loads(reply) if reply else {}
        except (ValueError, RecursionError):
            raise Unavailable(f"{self.name} does not answer with JSON") from None
        return answer if isinstance(answer, dict) else {}

    @asynccontextmanager
    async def _stream(self, method: str, path: str, **request: Any) -> AsyncIterator[AsyncIterator[bytes]]:
        """Yield the chunks of a reply, as `HttpClient.stream` does."""
        try:
            async with self._http.stream(method, path, **request) as chunks:
                yield chunks
        except TooLarge as error:  # another server may behave
            raise Unavailable(str(error)) from None
        except Rejected as error:
            if error.status in _NO_ENDPOINT:
                raise ArpoError(
                    f"rollout.servers: {self.name} answers {path} with HTTP status {error.status}; {HOW_TO_START}"
                ) from None
            raise ArpoError(f"rollout.servers: {error}") from None


async def _lines(chunks: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    """Yield the lines of a stream."""
    rest = b""
    async for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line.strip()


def parse_event(text: bytes) -> tuple[list[SampledToken], set[str]]:
    """Return the tokens in one event of a stream, and the weight versions they come from, where the event has them."""
    (choice,) = json.loads(text)["choices"]
    content = (choice.get("logprobs") or {}).get("content") or []
    tokens = [_sampled_token(token, entry) for token, entry in zip(choice["token_ids"] or [], content, strict=True)]
    return tokens, {str(span["version"]) for span in choice.get("weight_versions") or []}


def _sampled_token(token: Any, entry: Any) -> SampledToken:
    if entry["token_id"] != token:
        raise ValueError("the log-prob of another token")
    logprobs = {top["token_id"]: float(top["logprob"]) for top in entry["top_logprobs"]}
    if len(logprobs) != len(entry["top_logprobs"]):
        raise ValueError("a token twice")
    logprobs[token] = float(entry["logprob"])
    return SampledToken(token, logprobs[token], tuple(logprobs.values()))
