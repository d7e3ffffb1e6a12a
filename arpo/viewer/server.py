"""The viewer's server: the page, its files and the API; by default for this machine only.

    server = build_server(Folder(Path("runs")), "127.0.0.1", 8765)
    server.serve_forever()

Guarantees: nothing is changed, and nothing is read except the viewer's own files and the runs in the folder. Every
reply, errors included, is JSON, a PNG image or a file of the page. Pages of other sites cannot read anything: no reply
allows other origins, and requests that name another host are refused (DNS rebinding).
Not covered: passwords, encryption. Everyone who can reach the port can read the runs.
"""

from __future__ import annotations

import json
import re
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
from arpo.net.hosts import known_host, listen_address, server_url
from arpo.viewer import api
from arpo.viewer.folder import Folder, NotFound

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
}
JSON, PNG = "application/json", "image/png"
IDLE_SECONDS = 30.0  # until an idle connection is closed


class BadRequest(ArpoError):
    """A request with a missing or invalid parameter."""


class Query:
    """The parameters of a request."""

    def __init__(self, text: str) -> None:
        try:
            self._values = parse_qs(text, keep_blank_values=True, max_num_fields=20)
        except ValueError:
            raise BadRequest("too many parameters") from None

    def text(self, name: str) -> str:
        """A required parameter."""
        if name not in self._values:
            raise BadRequest(f"the parameter {name} is missing")
        return self._values[name][0]

    def optional(self, name: str) -> str | None:
        """An optional parameter."""
        return self._values.get(name, [None])[0] or None

    def number(self, name: str, default: int | None = None) -> int:
        """A whole number; required unless there is a default."""
        if name not in self._values and default is not None:
            return default
        text = self.text(name)
        if not re.fullmatch("[0-9]{1,15}", text):
            raise BadRequest(f"{name}: got {text[:50]!r}, expected a whole number")
        return int(text)


ROUTES: Mapping[str, Callable[[Folder, Query], dict[str, Any]]] = {
    "runs": lambda folder, query: api.runs(folder),
    "metrics": lambda folder, query: api.metrics(folder, query.text("run"), query.number("after", 0)),
    "config": lambda folder, query: api.config(folder, query.text("run")),
    "diff": lambda folder, query: api.diff(folder, query.text("a"), query.text("b")),
    "steps": lambda folder, query: api.steps(folder, query.text("run")),
    "prompts": lambda folder, query: api.prompts(folder, query.text("run"), query.number("step")),
    "tree": lambda folder, query: api.tree(folder, query.text("run"), query.number("step"), query.number("n")),
    "search": lambda folder, query: api.search(folder, query.text("run"), query.number("step"), query.text("q")),
    "evaluations": lambda folder, query: api.evaluations(folder, query.text("run")),
    "entropy": lambda folder, query: api.entropy(folder, query.text("run"), query.optional("steps")),
    "comparison": lambda folder, query: api.comparison(folder, query.text("id")),
}


class Server(ThreadingHTTPServer):
    """Serves one folder."""

    daemon_threads = True
    request_queue_size = 1024  # connections that wait to be accepted; beyond it, clients wait for seconds or are reset

    def __init__(self, folder: Folder, host: str, port: int) -> None:
        family, address = listen_address(host, port)
        self.address_family = family
        self.folder, self.host = folder, host
        super().__init__(address, Handler)
        self.port = int(self.server_address[1])

    @property
    def url(self) -> str:
        """The address of the page."""
        return server_url(self.host, self.port)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore browsers that close the connection."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    server: Server
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "arpo", ""
    timeout = IDLE_SECONDS
    disable_nagle_algorithm = True  # headers and content are separate writes

    def do_GET(self) -> None:
        """Reply to GET and HEAD."""
        if not known_host(self.headers.get("Host", ""), self.server.host, self.server.port):
            self._send_json(HTTPStatus.FORBIDDEN, {"error": "use the address that `arpo view` printed"})
            return
        address, _, query = self.path.partition("?")
        path = unquote(address)
        if path.startswith("/api/"):
            name = path.removeprefix("/api/")
            status, content = answer(self.server.folder, name, query)
            self._send(status, PNG if name == "image" and status == HTTPStatus.OK else JSON, content)
            return
        file = static_files().get("index.html" if path == "/" else path.removeprefix("/static/"))
        if file is None or not (path == "/" or path.startswith("/static/")):
            self._send_json(HTTPStatus.NOT_FOUND, {"error": "there is no such page"})
        else:
            self._send(HTTPStatus.OK, TYPES["html" if path == "/" else path.rpartition(".")[2]], file)

    do_HEAD = do_GET

    def do_POST(self) -> None:
        """Refuse all other methods."""
        self.close_connection = True
        self._send_json(HTTPStatus.METHOD_NOT_ALLOWED, {"error": "only GET and HEAD are supported"}, Allow="GET, HEAD")

    do_PUT = do_DELETE = do_PATCH = do_OPTIONS = do_TRACE = do_CONNECT = do_POST

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Refuse an invalid request, in JSON."""
        self.close_connection = True
        self._send_json(HTTPStatus(code), {"error": message or "invalid request"}, Connection="close")

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""

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
    """A listening server; port 0 takes any free port."""
    try:
        return Server(folder, host, port)
    except OSError as error:
        hint = "choose another --port, or 0 for a free one" if port else "choose another --host"
        raise ArpoError(f"{host}:{port}: cannot listen ({error.strerror}); {hint}") from None


def answer(folder: Folder, name: str, query: str) -> tuple[HTTPStatus, bytes]:
    """The reply to an API request: JSON, or a PNG to "image"; an error is JSON. Never raises."""
    try:
        if name == "image":
            asked = Query(query)
            return HTTPStatus.OK, api.image(folder, asked.text("run"), asked.text("sha256"))
        if name not in ROUTES:
            raise NotFound("there is no such request")
        return HTTPStatus.OK, dump(ROUTES[name](folder, Query(query)))
    except NotFound as error:
        status, message = HTTPStatus.NOT_FOUND, str(error)
    except BadRequest as error:
        status, message = HTTPStatus.BAD_REQUEST, str(error)
    except ArpoError as error:
        status, message = HTTPStatus.UNPROCESSABLE_ENTITY, str(error)
    except Exception as error:  # damaged files can fail in any way
        status = HTTPStatus.UNPROCESSABLE_ENTITY
        message = f"this part of the run cannot be read ({type(error).__name__}: {str(error)[:200]})"
    return status, dump({"error": message})


def dump(value: Any) -> bytes:
    """JSON in ASCII, with null for NaN and infinity."""
    try:
        text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    except ValueError:  # rare; replacing them always would be slow
        text = json.dumps(_finite(value), allow_nan=False, separators=(",", ":"))
    return text.encode("ascii")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not isfinite(value) else value


@cache
def static_files() -> dict[str, bytes]:
    """The page's files by name."""
    folder = resources.files("arpo.viewer").joinpath("static")
    return {entry.name: entry.read_bytes() for entry in folder.iterdir() if entry.name.rpartition(".")[2] in TYPES}
