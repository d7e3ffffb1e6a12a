"""Fetches one page over HTTP, from a public web site.

Guarantees: a URL is parsed once, by one parser, and its host, however written, is resolved to addresses before
anything is connected to. Unless private ones are allowed, every address must be public: not private, local, shared,
multicast, reserved, nor one of these inside an IPv6 address, nor one of this machine. One bad address refuses the
host. Connects only to the addresses that were checked, again for each redirect and without a second look-up in between;
the Host header and the TLS certificate go by the name. Sends no cookies and no credentials, and uses no proxy of the
environment. Redirects, headers and the decompressed body are bounded.
Not covered: time, which `call_tool` limits; NAT64 prefixes of a network's own, private services at public addresses, a
resolver thread that hangs (until the system's resolver gives up); pages that need scripts, cookies or a login;
redirects inside a page.
"""

from __future__ import annotations

import asyncio
import re
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from typing import TYPE_CHECKING

from arpo.net.http import TooLarge, Unavailable, decode
from arpo.tools.base import ToolError, ToolUnavailable

if TYPE_CHECKING:
    import httpx2

Address = IPv4Address | IPv6Address
Resolver = Callable[[str, int], Awaitable[Sequence[str]]]
"""Host name and port -> addresses as text. Raises `socket.gaierror` like `socket.getaddrinfo`."""

MAX_URL_CHARS = 4000
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
_NAME = re.compile(r"[a-z0-9_][a-z0-9_-]{0,62}(\.[a-z0-9_][a-z0-9_-]{0,62})*")
_NUMBER_AT_END = re.compile(r"(.*\.)?([0-9]+|0x[0-9a-f]*)")
_NO_SUCH_HOST = (socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME))

# The registries of special-purpose addresses, written out because `ipaddress.is_global` differs between Pythons.
# 168.63.129.16 is internal to a large cloud, although it looks public.
_SPECIAL_4 = """
0.0.0.0/8 10.0.0.0/8 100.64.0.0/10 127.0.0.0/8 168.63.129.16/32 169.254.0.0/16 172.16.0.0/12 192.0.0.0/24 192.0.2.0/24
192.88.99.0/24 192.168.0.0/16 198.18.0.0/15 198.51.100.0/24 203.0.113.0/24 224.0.0.0/4 240.0.0.0/4
"""
_NOT_PUBLIC_4 = tuple(map(IPv4Network, _SPECIAL_4.split()))
_PUBLIC_6 = IPv6Network("2000::/3")  # the only block that is allocated from
_NOT_PUBLIC_6 = tuple(IPv6Network(text) for text in ("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20"))
_NAT64 = IPv6Network("64:ff9b::/96")


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


# Which URLs may be opened, and at which addresses.


def parse_url(text: str, base: httpx2.URL | None = None) -> httpx2.URL:
    """Return a URL without fragment and with its host in ASCII; `base` is where a redirect came from."""
    import httpx2

    if len(text) > MAX_URL_CHARS:
        raise ToolError(f"the URL is longer than {MAX_URL_CHARS} characters")
    if not text.isprintable() or " " in text or "\\" in text:
        raise ToolError("the URL has a space, a backslash or an unprintable character in it")
    try:
        url = httpx2.URL(text) if base is None else base.join(text)
    except (httpx2.InvalidURL, ValueError):
        raise ToolError("this is not a valid URL") from None
    if url.scheme not in ("http", "https"):
        raise ToolError("only URLs that begin with http:// or https:// can be opened")
    if url.userinfo:
        raise ToolError("a URL with a user name or password cannot be opened")
    if not url.raw_host:
        raise ToolError("the URL names no host")
    if url.port is not None and not 1 <= url.port <= 65535:
        raise ToolError("the URL has a port that does not exist")
    return url.copy_with(fragment=None)


def host_of(url: httpx2.URL) -> str:
    """Return the host in ASCII, without a trailing dot."""
    return url.raw_host.decode("ascii").removesuffix(".")


async def find_addresses(url: httpx2.URL, resolve: Resolver, allow_private: bool) -> tuple[Address, ...]:
    """Return the addresses of a URL's host, all of them checked."""
    host = host_of(url)
    literal = literal_address(host)
    port = url.port or (443 if url.scheme == "https" else 80)
    addresses = (literal,) if literal is not None else await _resolve(host, port, resolve)
    for address in addresses:
        if isinstance(address, IPv6Address) and address.scope_id is not None:
            raise ToolError("the host's address holds only on one network; it cannot be opened")
        if not allow_private:
            if not is_public_address(address):
                raise ToolError("the host's address is not public; only public web sites can be opened")
            if is_own_address(address):
                raise ToolError("the host is the machine itself; only public web sites can be opened")
    return addresses


def literal_address(host: str) -> Address | None:
    """Return the address that a host spells out (IPv6, or IPv4 in any notation), or None for a name."""
    try:
        if ":" in host:
            return IPv6Address(host)
        if _NUMBER_AT_END.fullmatch(host):
            return IPv4Address(socket.inet_aton(host))
    except (OSError, ValueError):
        raise ToolError("the URL's host is a malformed address") from None
    if len(host) > 253 or not _NAME.fullmatch(host):
        raise ToolError("the URL's host is not a valid name")
    return None


def is_public_address(address: Address) -> bool:
    """Return whether an address is public; of an IPv4 address inside IPv6, the inner one counts."""
    address = _embedded_ipv4(address)
    if isinstance(address, IPv4Address):
        return not any(address in network for network in _NOT_PUBLIC_4)
    return address in _PUBLIC_6 and not any(address in network for network in _NOT_PUBLIC_6)


def is_own_address(address: Address) -> bool:
    """Return whether an address belongs to this machine: only those can be bound to. Sends nothing."""
    address = _embedded_ipv4(address)
    try:
        with socket.socket(socket.AF_INET6 if address.version == 6 else socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.bind((str(address), 0))
    except OSError:
        return False
    return True


async def system_resolver(host: str, port: int) -> list[str]:
    """Return addresses from the system's resolver."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(sockaddr[0]) for *_, sockaddr in found]


def _embedded_ipv4(address: Address) -> Address:
    if isinstance(address, IPv6Address):
        if address.ipv4_mapped is not None:
            return address.ipv4_mapped
        if address in _NAT64:
            return IPv4Address(int(address) & 0xFFFFFFFF)
    return address


async def _resolve(host: str, port: int, resolve: Resolver) -> tuple[Address, ...]:
    try:
        found = await resolve(host, port)
    except socket.gaierror as error:
        if error.errno in _NO_SUCH_HOST:
            raise ToolError(f"there is no host {host}") from None
        raise ToolUnavailable("host names cannot be looked up at the moment") from error
    if not found:
        raise ToolError(f"there is no host {host}")
    return tuple(dict.fromkeys(ip_address(text) for text in found))
