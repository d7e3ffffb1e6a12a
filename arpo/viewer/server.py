"""The viewer's server: a page, its files, and what it asks for, to this machine and nobody else unless told so.

    server = make_server(Folder(Path("runs")), "127.0.0.1", 8765)
    server.serve_forever()

Promises: nothing is changed, and nothing read but the viewer's own files and the runs that the folder holds; every
answer, mistakes included, is JSON or one of the page's files. A page of another site can't ask: neither directly, as no
answer allows it, nor by pointing its own name here, as the name in a request must be ours.
Does not cover: passwords, encryption. Who can reach the port can read the runs.
"""

from __future__ import annotations

import ipaddress
import json
import re
import socket
import sys
from collections.abc import Callable, Mapping
from functools import cache
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from math import isfinite
from typing import Any
from urllib.parse import parse_qs, unquote

from arpo.errors import ArpoError
from arpo.viewer import data
from arpo.viewer.folder import Folder, NotThere

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
    "png": "image/png",
}
JSON = "application/json"
IDLE_SECONDS = 30.0  # after which a connection that asks nothing is closed
LOCAL = ("localhost", "127.0.0.1", "::1")
ANY_HOST = ("", "0.0.0.0", "::")


class BadRequest(ArpoError):
    """A request that lacks something or says what no page of ours says."""


class Query:
    """The parameters of a request."""

    def __init__(self, text: str) -> None:
        try:
            self._values = parse_qs(text, keep_blank_values=True, max_num_fields=20)
        except ValueError:
            raise BadRequest("too many parameters") from None

    def text(self, name: str) -> str:
        """A parameter that must be there."""
        if name not in self._values:
            raise BadRequest(f"the parameter {name} is missing")
        return self._values[name][0]

    def maybe(self, name: str) -> str | None:
        """A parameter that may be there."""
        return self._values.get(name, [None])[0] or None

    def number(self, name: str, otherwise: int | None = None) -> int:
        """A whole number."""
        if name not in self._values and otherwise is not None:
            return otherwise
        text = self.text(name)
        if not re.fullmatch("[0-9]{1,15}", text):
            raise BadRequest(f"{name}: got {text[:50]!r}, expected a whole number")
        return int(text)


ROUTES: Mapping[str, Callable[[Folder, Query], dict[str, Any]]] = {
    "runs": lambda folder, query: data.runs(folder),
    "metrics": lambda folder, query: data.metrics(folder, query.text("run"), query.number("after", 0)),
    "config": lambda folder, query: data.config(folder, query.text("run")),
    "diff": lambda folder, query: data.diff(folder, query.text("a"), query.text("b")),
    "steps": lambda folder, query: data.steps(folder, query.text("run")),
    "prompts": lambda folder, query: data.prompts(folder, query.text("run"), query.number("step")),
    "tree": lambda folder, query: data.tree(folder, query.text("run"), query.number("step"), query.number("n")),
    "search": lambda folder, query: data.search(folder, query.text("run"), query.number("step"), query.text("q")),
    "entropy": lambda folder, query: data.entropy(folder, query.text("run"), query.maybe("steps")),
    "comparison": lambda folder, query: data.comparison(folder, query.text("id")),
}


class Server(ThreadingHTTPServer):
    """Answers for one folder."""

    daemon_threads = True

    def __init__(self, folder: Folder, host: str, port: int) -> None:
        family, address = _address(host, port)
        self.address_family = family
        self.folder, self.host = folder, host
        super().__init__(address, Handler)
        self.port = int(self.server_address[1])

    @property
    def url(self) -> str:
        """Where to find the page."""
        host = "localhost" if self.host in ANY_HOST else self.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that hangs up is no error."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    server: Server
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "arpo", ""
    timeout = IDLE_SECONDS
    disable_nagle_algorithm = True  # headers and content are written apart, and must not wait for each other

    def do_GET(self) -> None:
        """Answer; also what a HEAD asks for, whose content is not sent."""
        if not known_host(self.headers.get("Host", ""), self.server.host, self.server.port):
            self._send_json(HTTPStatus.FORBIDDEN, {"error": "this server is asked by its own address only"})
            return
        address, _, query = self.path.partition("?")
        path = unquote(address)
        if path.startswith("/api/"):
            status, found = answer(self.server.folder, path.removeprefix("/api/"), query)
            self._send(status, JSON, found)
            return
        content = static_files().get("index.html" if path == "/" else path.removeprefix("/static/"))
        if content is None or not (path == "/" or path.startswith("/static/")):
            self._send_json(HTTPStatus.NOT_FOUND, {"error": "there is no such page"})
        else:
            self._send(HTTPStatus.OK, TYPES["html" if path == "/" else path.rpartition(".")[2]], content)

    do_HEAD = do_GET

    def do_POST(self) -> None:
        """Refuse everything that is no question."""
        self.close_connection = True
        self._send_json(HTTPStatus.METHOD_NOT_ALLOWED, {"error": "only GET and HEAD are answered"}, Allow="GET, HEAD")

    do_PUT = do_DELETE = do_PATCH = do_OPTIONS = do_TRACE = do_CONNECT = do_POST

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Refuse what is no request, as JSON too."""
        self.close_connection = True
        said = {"error": message or "this is no request that can be answered"}
        self._send_json(HTTPStatus(code), said, Connection="close")

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing on the terminal."""

    def _send_json(self, status: HTTPStatus, value: Mapping[str, Any], **headers: str) -> None:
        self._send(status, JSON, dump(value), **headers)

    def _send(self, status: HTTPStatus, kind: str, content: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in {**HEADERS, "Content-Type": kind, "Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


def build_server(folder: Folder, host: str, port: int) -> Server:
    """A server that listens already; port 0 takes a free one."""
    try:
        return Server(folder, host, port)
    except OSError as error:
        hint = "choose another --port, or 0 for a free one" if port else "choose another --host"
        raise ArpoError(f"{host}:{port}: cannot be listened on ({error.strerror}); {hint}") from None


def answer(folder: Folder, name: str, query: str) -> tuple[HTTPStatus, bytes]:
    """What is asked for, or what is wrong, as JSON; nothing raises."""
    try:
        if name not in ROUTES:
            raise NotThere("there is no such thing to ask for")
        return HTTPStatus.OK, dump(ROUTES[name](folder, Query(query)))
    except NotThere as error:
        status, said = HTTPStatus.NOT_FOUND, str(error)
    except BadRequest as error:
        status, said = HTTPStatus.BAD_REQUEST, str(error)
    except ArpoError as error:
        status, said = HTTPStatus.UNPROCESSABLE_ENTITY, str(error)
    except Exception as error:  # files that other programs damaged can fail in any way
        status = HTTPStatus.UNPROCESSABLE_ENTITY
        said = f"this part of the run cannot be read ({type(error).__name__}: {str(error)[:200]})"
    return status, dump({"error": said})


def dump(value: Any) -> bytes:
    """JSON in ASCII, so that no text in it can be broken; numbers that JSON lacks become null."""
    try:
        text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    except ValueError:  # rare, and looking for them beforehand would take as long as all the rest
        text = json.dumps(_finite(value), allow_nan=False, separators=(",", ":"))
    return text.encode("ascii")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not isfinite(value) else value


def known_host(given: str, host: str, port: int) -> bool:
    """Whether a request names this server: its host, this machine, or, if it listens on all addresses, any of them."""
    match = re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[^:\[\]]+)(?::([0-9]{1,5}))?", given)
    if match is None or int(match[2] or 80) != port:
        return False
    name = match[1].strip("[]").lower()
    if name in (*LOCAL, host.lower()):
        return True
    return host in ANY_HOST and (name == socket.gethostname().lower() or _is_address(name))


@cache
def static_files() -> dict[str, bytes]:
    """The page's files by name."""
    folder = resources.files("arpo.viewer").joinpath("static")
    return {entry.name: entry.read_bytes() for entry in folder.iterdir() if entry.name.rpartition(".")[2] in TYPES}


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _address(host: str, port: int) -> tuple[socket.AddressFamily, tuple[str, int]]:
    try:
        found = socket.getaddrinfo(host or "0.0.0.0", port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise ArpoError(f"--host {host}: is no address of this machine ({error})") from None
    family, _, _, _, address = found[0]
    return family, (str(address[0]), port)
