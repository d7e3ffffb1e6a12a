"""Names and addresses of this machine, for servers: what to listen on, and which Host headers to accept."""

from __future__ import annotations

import ipaddress
import re
import socket

from arpo.errors import ArpoError

LOCAL = ("localhost", "127.0.0.1", "::1")
ANY_HOST = ("", "0.0.0.0", "::")


def server_url(host: str, port: int) -> str:
    """The address of a server that listens there."""
    name = "localhost" if host in ANY_HOST else host
    return f"http://{f'[{name}]' if ':' in name else name}:{port}/"


def known_host(given: str, host: str, port: int) -> bool:
    """Whether a Host header names this server: its host, this machine or, if it listens everywhere, any IP address."""
    match = re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[^:\[\]]+)(?::([0-9]{1,5}))?", given)
    if match is None or int(match[2] or 80) != port:
        return False
    name = match[1].strip("[]").lower()
    if name in (*LOCAL, host.lower()):
        return True
    return host in ANY_HOST and (name == socket.gethostname().lower() or _is_address(name))


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def listen_address(host: str, port: int) -> tuple[socket.AddressFamily, tuple[str, int]]:
    """The family and address to listen on; ArpoError if `host` is no address of this machine."""
    try:
        found = socket.getaddrinfo(host or "0.0.0.0", port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise ArpoError(f"--host {host}: is not an address of this machine ({error})") from None
    family, _, _, _, address = found[0]
    return family, (str(address[0]), port)
