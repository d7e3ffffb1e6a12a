"""Which URLs may be opened, and at which addresses.

Guarantees: a URL is parsed once, by one parser, and its host, however written, is resolved to addresses before
anything is connected to. Unless private ones are allowed, every address must be public: not private, local, shared,
multicast, reserved, nor one of these inside an IPv6 address, nor one of this machine. One bad address refuses the
host.
Not covered: NAT64 prefixes of a network's own, private services at public addresses, a resolver thread that hangs
(until the system's resolver gives up).
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Awaitable, Callable, Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from typing import TYPE_CHECKING

from arpo.tools.base import ToolError, ToolUnavailable

if TYPE_CHECKING:
    import httpx2

Address = IPv4Address | IPv6Address
Resolver = Callable[[str, int], Awaitable[Sequence[str]]]
"""Host name and port -> addresses as text. Raises `socket.gaierror` like `socket.getaddrinfo`."""

MAX_URL_CHARS = 4000
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
