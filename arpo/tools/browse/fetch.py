"""Fetches one page over HTTP.

Guarantees: connects only to addresses that `address` has checked, again for each redirect and without a second
look-up in between; the Host header and the TLS certificate go by the name. Sends no cookies and no credentials, and
uses no proxy of the environment. Redirects, headers and the decompressed body are bounded.
Not covered: time, which `call_tool` limits; pages that need scripts, cookies or a login; redirects inside a page.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from arpo.net.http import TooLarge, Unavailable, decode
from arpo.tools.base import ToolError, ToolUnavailable
from arpo.tools.browse.address import Address, Resolver, find_addresses, host_of, parse_url

if TYPE_CHECKING:
    import httpx2

MAX_REDIRECTS = 5
MAX_ADDRESSES = 4  # tried in turn
CONNECT_SECONDS = 5.0
_REDIRECTS = (301, 302, 303, 307, 308)
_TEMPORARY = (408, 429)  # as well as 5xx
_MEDIA_TYPE = re.compile(r"[a-z0-9.+-]+/[a-z0-9.+-]+")
_TEXT = re.compile(r"text/.*|application/(.*\+)?(json|xml)")
_HTML = ("text/html", "application/xhtml+xml")
_HEADERS = {
    "User-Agent": "Mozilla/5.0 (compatible; arpo)",
    "Accept": "text/html, application/xhtml+xml, text/plain, application/json;q=0.9, */*;q=0.1",
    "Accept-Encoding": "gzip",
    "Connection": "close",
}


@dataclass(frozen=True, slots=True)
class Page:
    """The body of a page, whether it is HTML (or plain text), and the charset that the server names, if any."""

    html: bool
    charset: str
    body: bytes


@dataclass(frozen=True, slots=True)
class Fetcher:
    """Fetches pages. `Fetcher(5_000_000, False, system_resolver, httpx2.create_ssl_context())`."""

    max_bytes: int  # of the decompressed body
    allow_private: bool
    resolve: Resolver
    tls: ssl.SSLContext

    async def fetch(self, url: str) -> Page:
        """Return the page at a URL, after redirects."""
        at = parse_url(url.strip())
        for _ in range(MAX_REDIRECTS + 1):
            answer = await self._request_any(at, await find_addresses(at, self.resolve, self.allow_private))
            if isinstance(answer, Page):
                return answer
            at = parse_url(answer, base=at)
        raise ToolError(f"the page redirects more than {MAX_REDIRECTS} times")

    async def _request_any(self, url: httpx2.URL, addresses: tuple[Address, ...]) -> Page | str:
        """Return the page, or where it redirects to, from the first address that answers."""
        import httpx2

        failure: Exception | None = None
        for address in addresses[:MAX_ADDRESSES]:
            try:
                return await self._request(url, address)
            except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
                failure = error
            except httpx2.TransportError as error:
                raise ToolUnavailable(f"the connection to {host_of(url)} broke off") from error
        assert failure is not None
        causes = list(_causes(failure))
        if any(isinstance(cause, ssl.SSLError) for cause in causes):
            raise ToolError(f"there is no secure connection to {host_of(url)}")
        if any(isinstance(cause, ConnectionRefusedError) for cause in causes):
            raise ToolError(f"{host_of(url)} refused the connection")
        raise ToolUnavailable(f"{host_of(url)} cannot be reached") from failure

    async def _request(self, url: httpx2.URL, address: Address) -> Page | str:
        """Send one request to one address, on its own connection.

        Without an httpx2 client, which would keep cookies, look for credentials and follow redirects.
        """
        import httpx2

        host = host_of(url)
        request = httpx2.Request(
            "GET",
            url.copy_with(host=str(address)),
            headers={"Host": url.copy_with(host=host).netloc.decode("ascii"), **_HEADERS},
            extensions={"sni_hostname": host, "timeout": {"connect": CONNECT_SECONDS}},
        )
        async with httpx2.AsyncHTTPTransport(verify=self.tls, trust_env=False) as transport:
            response = await transport.handle_async_request(request)
            try:
                return await self._read_response(response)
            finally:
                await response.aclose()

    async def _read_response(self, response: httpx2.Response) -> Page | str:
        status, location = response.status_code, response.headers.get("Location")
        if status in _REDIRECTS and location:
            return location
        if status in _TEMPORARY or status >= 500:
            raise ToolUnavailable(f"the server answered with HTTP status {status}")
        if not 200 <= status < 300:
            raise ToolError(f"the server answered with HTTP status {status}")
        media, _, parameters = response.headers.get("Content-Type", "").lower().partition(";")
        media = media.strip()
        if media and not _TEXT.fullmatch(media) and media not in _HTML:
            kind = f"of type {media[:60]}" if _MEDIA_TYPE.fullmatch(media) else "of an unknown type"
            raise ToolError(f"the page is {kind}; only web pages and plain text can be read")
        try:
            async with aclosing(decode(response, self.max_bytes, "the page")) as chunks:
                body = b"".join([chunk async for chunk in chunks])
        except TooLarge:
            raise ToolError(f"the page is larger than {self.max_bytes} bytes") from None
        except Unavailable:
            raise ToolError("the page is compressed in a way that cannot be read") from None
        if not media and b"\0" in body[:1000]:
            raise ToolError("the page is of an unknown type; only web pages and plain text can be read")
        charset = re.search(r"charset\s*=\s*[\"']?([\w.:-]{1,40})", parameters)
        html = media in _HTML or (not media and body.lstrip()[:1] == b"<")
        return Page(html, charset[1] if charset else "", body)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
