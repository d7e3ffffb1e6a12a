"""The HTTP client for every server that a setting names.

    client = HttpClient("http://localhost:8000/v1", setting="reward.judge_url", timeout=60, max_bytes=1_000_000)
    reply = await client.request_json("POST", "/chat/completions", json={...})

Guarantees: a reply is bounded in time and in size, compressed and decompressed. Redirects are not followed, and proxies
from the environment are used only on request. Every failure is an HttpError: `Unavailable` may pass by itself (5xx,
408, 409, 425, 429, timeouts, lost connections, replies in an unexpected form), `Rejected` and `TooLarge` will not. The
API key and the secrets of the URL are in no error, repr or log record.
Not covered: checking where a URL leads (`arpo.tools.browse.fetch` does that for the URLs of a model).
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import zlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any, TypeVar
from urllib.parse import urlsplit

from arpo.config.masking import hide, mask_message, masked, secrets_in
from arpo.errors import ArpoError
from arpo.net.keys import expand_variables

PAUSE_SECONDS = 1.0  # before the second attempt; doubled before each further one
MAX_PAUSE_SECONDS = 60.0
MAX_DETAIL_CHARS = 300
_RETRY_STATUSES = (408, 409, 425, 429)
_HEADERS = {"Accept": "application/json", "Accept-Encoding": "gzip"}
_jitter = random.Random()
_T = TypeVar("_T")


class HttpError(Exception):
    """A request without a usable reply; `status` is the HTTP status, if there was one."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class Unavailable(HttpError):
    """Another attempt may succeed, after `retry_after` seconds if the server asks for a pause."""

    def __init__(self, message: str, status: int | None = None, retry_after: float | None = None) -> None:
        super().__init__(message, status)
        self.retry_after = retry_after


class Unreachable(Unavailable):
    """No connection could be made."""


class Rejected(HttpError):
    """The server refuses this request (HTTP status 4xx) and would refuse it again."""


class TooLarge(HttpError):
    """The reply is larger than allowed."""


class HttpClient:
    """Sends requests to one server.

    `setting` names where the URL comes from, for error messages; `name` is what they call the server, by default its
    URL without user name, password and query. `${NAME}` in the URL is read from the environment. `timeout` is for a
    whole request. Each request opens its own connection, so one client serves several event loops.
    """

    def __init__(
        self,
        url: str,
        *,
        setting: str,
        timeout: float,
        max_bytes: int,
        name: str = "",
        api_key: str = "",
        example: str = "http://localhost:8000/v1",
        trust_env: bool = False,
        allow_userinfo: bool = False,
    ) -> None:
        try:
            import httpx2
        except ImportError:
            raise ArpoError(f"{setting}: HTTP requests need httpx2: pip install httpx2") from None
        mute_http_logs()
        given, url = url, expand_variables(url, setting)
        try:
            parts, host = urlsplit(url), httpx2.URL(url).host
            valid = parts.scheme in ("http", "https") and parts.port != 0 and bool(host)
        except (ValueError, httpx2.InvalidURL):
            valid = False
        if not valid or ("@" in parts.netloc and not allow_userinfo):
            shown, without = masked(given, "url"), "" if allow_userinfo else ", without credentials"
            raise ArpoError(f"{setting}: got {shown!r}, expected an address like {example}{without}")
        self.url, self.timeout, self.max_bytes, self.trust_env = url, timeout, max_bytes, trust_env
        self.name = name or mask_message(f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}")
        self._key, self._tls = api_key, httpx2.create_ssl_context()
        self._secrets = secrets_in({"url": url}) | {api_key} - {""}

    def without_secrets(self, text: str) -> str:
        """A text of the server without the API key and the secrets of the URL."""
        return hide(text, self._secrets)

    async def request_json(self, method: str, path: str = "", **request: Any) -> Any:
        """Send a request and return the JSON in the reply."""
        body = await self.request(method, path, **request)
        try:
            return json.loads(body)
        except (ValueError, RecursionError):
            raise Unavailable(f"{self.name} did not answer with JSON") from None

    async def request(self, method: str, path: str = "", **request: Any) -> bytes:
        """Send a request and return the body of the reply. `request` is what `stream` takes."""
        async with self.stream(method, path, **request) as chunks:
            return b"".join([chunk async for chunk in chunks])

    @asynccontextmanager
    async def stream(
        self,
        method: str,
        path: str = "",
        *,
        timeout: float | None = None,
        idle_timeout: float | None = None,
        max_bytes: int | None = None,
        headers: dict[str, str] | None = None,
        **request: Any,
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """Send a request and yield the chunks of a reply with status 200; leaving the block closes the connection.

        With `idle_timeout` the reply as a whole may take any time, but no single wait may be longer. `request` is
        passed on to httpx2: `json`, `params`.
        """
        import httpx2

        url = self.url.rstrip("/") + path if path else self.url
        limit = idle_timeout or timeout or self.timeout
        authorization = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        try:
            async with (
                asyncio.timeout(None if idle_timeout else limit),
                httpx2.AsyncClient(verify=self._tls, trust_env=self.trust_env, timeout=limit) as client,
                client.stream(
                    method, url, headers={**_HEADERS, **authorization, **(headers or {})}, **request
                ) as response,
            ):
                await self._check_status(response)
                async with aclosing(decode(response, max_bytes or self.max_bytes, self.name)) as chunks:
                    yield chunks
        except httpx2.ConnectTimeout:
            raise Unreachable(f"{self.name} cannot be reached within {limit:g} seconds") from None
        except (TimeoutError, httpx2.TimeoutException):
            raise Unavailable(f"{self.name} did not answer within {limit:g} seconds") from None
        except (httpx2.HTTPError, httpx2.InvalidURL, httpx2.StreamError, OSError) as error:
            kind = Unreachable if isinstance(error, httpx2.ConnectError) else Unavailable
            raise kind(f"{self.name} cannot be reached ({type(error).__name__})") from None

    async def _check_status(self, response: Any) -> None:
        status = response.status_code
        if status == 200:
            return
        if not 400 <= status < 500 or status in _RETRY_STATUSES:
            after = response.headers.get("Retry-After", "")
            retry_after = min(float(after), MAX_PAUSE_SECONDS) if after.isascii() and after.isdigit() else None
            raise Unavailable(f"{self.name} answers with HTTP status {status}", status, retry_after)
        body = b""
        async with aclosing(decode(response, self.max_bytes, self.name)) as chunks:
            async for chunk in chunks:
                body += chunk
                if len(body) > 2000:
                    break
        text = "".join(c for c in " ".join(body[:2000].decode("utf-8", "replace").split()) if c.isprintable())
        detail = mask_message(self.without_secrets(text))[:MAX_DETAIL_CHARS]
        raise Rejected(f"{self.name} refuses the request with HTTP status {status}: {detail}", status)


def mute_http_logs() -> None:
    """Keep the HTTP library from logging requests: its records hold URLs and headers, with keys."""
    for logger in ("httpx2", "httpcore2"):
        logging.getLogger(logger).setLevel(logging.WARNING)


async def decode(response: Any, max_bytes: int, name: str) -> AsyncGenerator[bytes, None]:
    """The body of an httpx2 response in chunks, decompressed piece by piece so that it never exceeds its limit."""
    coding = response.headers.get("Content-Encoding", "").strip().lower()
    if coding not in ("", "identity", "gzip", "x-gzip"):
        raise Unavailable(f"{name} sends a compression that cannot be read")
    unzip = zlib.decompressobj(wbits=31) if coding.endswith("gzip") else None
    received = size = 0
    async for raw in response.aiter_raw():
        received += len(raw)
        try:
            chunk = raw if unzip is None else unzip.decompress(raw, max_bytes + 1 - size)
        except zlib.error:
            raise Unavailable(f"{name} sends a compression that cannot be read") from None
        size += len(chunk)
        if max(received, size) > max_bytes:
            raise TooLarge(f"{name} sends more than {max_bytes:,} bytes")
        yield chunk
        if unzip is not None and unzip.eof:
            return


async def retry(attempt: Callable[[], Awaitable[_T]], retries: int, max_pause: float = MAX_PAUSE_SECONDS) -> _T:
    """The result of `attempt`, repeated up to `retries` times while it is Unavailable.

    Pauses between attempts grow and are random, unless the server asks for one of its own.
    """
    attempts = 0
    while True:
        try:
            return await attempt()
        except Unavailable as error:
            attempts += 1
            if attempts > retries:
                tried = f", after {attempts} attempts" if retries else ""
                raise Unavailable(f"{error}{tried}", error.status) from None
            pause = _jitter.uniform(0.5, 1.0) * PAUSE_SECONDS * 2 ** (attempts - 1)
            await asyncio.sleep(min(max_pause, pause if error.retry_after is None else error.retry_after))
