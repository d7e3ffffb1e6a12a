"""Turns from a model behind any OpenAI-compatible chat endpoint.

    endpoint = Endpoint("http://localhost:8000/v1", "some-model", key_env="MY_KEY")
    reply = await endpoint.chat([{"role": "user", "content": "..."}], SamplingParams(512, stop=("</search>",)))

Promises: a reply is cut right after the first stop string and says which it was, whether the endpoint leaves the string
out (as most do), keeps it, or ignores the request to stop; what is thought apart comes back in <think> tags. What
comes back is bounded and taken as hostile. 408, 409, 425, 429, 5xx, timeouts, lost connections and nonsense are tried
again, after growing random pauses or what `Retry-After` asks for; then, and where the request is refused, it is an
EndpointFailure. A wrong key, address or name is an ArpoError. The key shows in no error and no repr.
Does not cover: log-probs and entropies, so nothing can be trained on it; streaming; an endpoint that drops the stop
string and does not name it, where a call or answer that was begun and not ended counts as ended.
"""

from __future__ import annotations

import asyncio
import json
import random
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from arpo.config.keys import key_from
from arpo.errors import ArpoError
from arpo.types import SamplingParams

MAX_REPLY_BYTES = 8_000_000
MAX_STOPS = 4  # what the protocol allows; text after any other one is cut off here
RETRIES = 4
PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 60.0
_SETTINGS_ARE_WRONG = (401, 403, 404)
_TRY_AGAIN = (408, 409, 425, 429)
_jitter = random.Random()


class EndpointFailure(Exception):
    """No turn could be had, through no fault of the model's."""


class _Unavailable(Exception):
    """Worth another attempt, after `pause` seconds if the endpoint says so."""

    def __init__(self, cause: str, pause: float | None = None) -> None:
        super().__init__(cause)
        self.pause = pause


@dataclass(frozen=True, slots=True)
class Reply:
    """One turn: its text with the stop string that ended it, `finish` as in `Completion`, the endpoint's counts."""

    text: str
    finish: str
    stop: str | None = None
    prompt_tokens: int | None = None
    tokens: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Endpoint:
    """Asks `model` at `url`; the key is in the environment variable `key_env`."""

    url: str
    model: str
    key_env: str | None = None
    timeout: float = 300.0
    _key: str = field(init=False, repr=False)
    _tls: ssl.SSLContext = field(init=False, repr=False)

    def __post_init__(self) -> None:
        try:
            import httpx2
        except ImportError:
            raise ArpoError("asking an endpoint needs httpx2: pip install 'arpo[web]'") from None
        try:
            parts, host = urlsplit(self.url), httpx2.URL(self.url).host
            valid = parts.scheme in ("http", "https") and parts.port != 0 and bool(host) and "@" not in parts.netloc
        except (ValueError, httpx2.InvalidURL):
            valid = False
        if not valid:
            shown = self.url.rpartition("@")[2]
            raise ArpoError(
                f"eval.endpoint: got {shown!r}, expected an address without a key in it, like http://localhost:8000/v1"
            )
        key = "" if self.key_env is None else key_from(self.key_env, "eval.endpoint_key_env")
        object.__setattr__(self, "_key", key)
        object.__setattr__(self, "_tls", httpx2.create_ssl_context())

    async def chat(self, messages: Sequence[Mapping[str, str]], params: SamplingParams) -> Reply:
        """The model's next turn after these messages."""
        request = {
            "model": self.model,
            "messages": list(messages),
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "stop": list(params.stop[:MAX_STOPS]),
            "seed": params.seed % 2**31,
            **({"top_k": params.top_k} if params.top_k else {}),
        }
        cause, pause = "", None
        for attempt in range(RETRIES + 1):
            if attempt:
                usual = _jitter.uniform(0.5, 1.0) * PAUSE_SECONDS * 2 ** (attempt - 1)
                await asyncio.sleep(min(LONGEST_PAUSE_SECONDS, usual if pause is None else pause))
            try:
                return read_reply(await self._post(request), params.stop)
            except _Unavailable as error:
                cause, pause = str(error), error.pause
        raise EndpointFailure(f"{cause}, after {RETRIES + 1} attempts")

    async def _post(self, request: Mapping[str, Any]) -> Any:
        import httpx2

        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        body = bytearray()
        try:
            async with (
                asyncio.timeout(self.timeout),
                httpx2.AsyncClient(verify=self._tls, trust_env=False, timeout=None) as client,
                client.stream(
                    "POST", f"{self.url.rstrip('/')}/chat/completions", json=request, headers=headers
                ) as response,
            ):
                async for chunk in response.aiter_bytes():
                    body += chunk
                    if len(body) > MAX_REPLY_BYTES:
                        raise EndpointFailure(f"the endpoint's reply has more than {MAX_REPLY_BYTES:,} bytes")
                self._check(response.status_code, response.headers.get("Retry-After"), bytes(body))
        except TimeoutError:
            raise _Unavailable(f"the endpoint did not answer within {self.timeout:g} seconds") from None
        except (httpx2.HTTPError, httpx2.InvalidURL, OSError) as error:
            raise _Unavailable(f"the endpoint cannot be reached ({type(error).__name__})") from None
        try:
            return json.loads(body)
        except (ValueError, RecursionError):
            raise _Unavailable("the endpoint did not answer with JSON") from None

    def _check(self, status: int, retry_after: str | None, body: bytes) -> None:
        if status == 200:
            return
        if status in _SETTINGS_ARE_WRONG:
            raise ArpoError(
                f"the endpoint answers with HTTP status {status}; check eval.endpoint, eval.endpoint_model and the key "
                f"in {self.key_env or 'eval.endpoint_key_env (none is set)'}"
            )
        if 400 <= status < 500 and status not in _TRY_AGAIN:
            said = " ".join(body[:2000].decode("utf-8", "replace").split())
            said = "".join(letter for letter in said if letter.isprintable())
            said = said.replace(self._key, "***") if self._key else said
            raise EndpointFailure(f"the endpoint refuses the request with HTTP status {status}: {said[:300]}")
        raise _Unavailable(f"the endpoint answers with HTTP status {status}", _seconds(retry_after))


def read_reply(answer: Any, stops: Sequence[str]) -> Reply:
    """The turn in an endpoint's JSON; _Unavailable if there is none."""
    try:
        choice = answer["choices"][0]
        message = choice["message"]
        content, reason = message["content"], choice.get("finish_reason")
        thought = message.get("reasoning_content") or message.get("reasoning")
        usage = answer.get("usage")
    except (LookupError, TypeError, AttributeError):
        raise _Unavailable("the endpoint did not answer in the form of chat completions") from None
    text = _clean(content)
    found = [(text.find(stop), -len(stop), stop) for stop in stops if stop in text]
    stop = min(found)[2] if found else None
    if stop is not None:
        text = text[: text.find(stop) + len(stop)]
    elif reason == "stop":
        stop = _left_out(text, choice, stops)
        text += stop or ""
    if isinstance(thought, str) and thought.strip():
        text = f"<think>{_clean(thought).strip()}</think>{text}"
    finish = "stop" if stop is not None else "length" if reason == "length" else "eos"
    return Reply(text, finish, stop, _count(usage, "prompt_tokens"), _count(usage, "completion_tokens"))


def _left_out(text: str, choice: Mapping[str, Any], stops: Sequence[str]) -> str | None:
    """The stop string that ended the text and is not in it: as the endpoint says, or what was begun last."""
    if "stop_reason" in choice:
        named = choice["stop_reason"]
        return named if isinstance(named, str) and named in stops else None
    begun = [(text.rfind(stop.replace("</", "<", 1)), stop) for stop in stops]
    place, stop = max(begun, default=(-1, ""))
    return stop if place >= 0 else None


def _clean(text: Any) -> str:
    """Valid Unicode; no text is an empty one."""
    return text.encode("utf-8", "replace").decode() if isinstance(text, str) else ""


def _count(usage: Any, name: str) -> int | None:
    value = usage.get(name) if isinstance(usage, dict) else None
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _seconds(header: str | None) -> float | None:
    return float(header) if header is not None and header.isascii() and header.isdigit() else None
