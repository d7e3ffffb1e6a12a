"""The viewer's server: the page, its files and the API; by default for this machine only.

    server = build_server(Folder(Path("runs")), "127.0.0.1", 8765)
    server.serve_forever()

Guarantees: nothing is changed, and nothing is read except the viewer's own files and what `Folder` finds. Every
reply, errors included, is JSON, a PNG image or a file of the page. Pages of other sites cannot read anything: no reply
allows other origins, and requests that name another host are refused (DNS rebinding). A question for the Playground,
the only POST request, must come from our own page: it needs that origin, and a token that only our page can read.
Not covered: passwords, encryption. Everyone who can reach the port can read the runs and, where the Playground is on,
use it.
"""

from __future__ import annotations

import hmac
import select
import sys
from collections.abc import Callable, Mapping
from functools import cache
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from typing import Any
from urllib.parse import unquote

from arpo.errors import ArpoError
from arpo.net.hosts import LOCAL, known_host, listen_address, server_url
from arpo.viewer import api, evals
from arpo.viewer.folder import Folder, NotFound
from arpo.viewer.messages import MAX_BODY, BadRequest, Query, dump, read_ask
from arpo.viewer.playground import Busy, Off, Playground

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
JSON, JSON_LINES, PNG = "application/json", "application/x-ndjson", "image/png"
TOKEN_HEADER = "X-Arpo-Token"
OFF_FOR_OTHERS = (
    "The Playground is off, because other machines can reach this page. `arpo view --playground` turns it on."
)
IDLE_SECONDS = 30.0  # until an idle connection is closed


Route = Callable[[Folder, Query], dict[str, Any]]
ROUTES: Mapping[str, Route] = {
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
    "eval": lambda folder, query: evals.evaluation(folder, query.text("id")),
    "answers": lambda folder, query: evals.answers(
        folder,
        query.text("id"),
        query.text("set"),
        query.number("after", 0),
        query.optional("kind"),
        query.optional("wrong") is not None,
    ),
    "answer": lambda folder, query: evals.answer(folder, query.text("id"), query.text("set"), query.number("at")),
}


class Refused(ArpoError):
    """A question that is not taken, whatever it asks."""

    def __init__(self, status: HTTPStatus, message: str, **headers: str) -> None:
        super().__init__(message)
        self.status, self.headers = status, headers


class Server(ThreadingHTTPServer):
    """Serves one folder."""

    daemon_threads = True
    request_queue_size = 1024  # connections that wait to be accepted; beyond it, clients wait for seconds or are reset

    def __init__(self, folder: Folder, host: str, port: int, playground: Playground) -> None:
        family, address = listen_address(host, port)
        self.address_family = family
        self.folder, self.host, self.playground = folder, host, playground
        super().__init__(address, Handler)
        self.port = int(self.server_address[1])

    @property
    def url(self) -> str:
        """The address of the page."""
        return server_url(self.host, self.port)

    def server_close(self) -> None:
        """Stop listening, and end the agent of the Playground."""
        super().server_close()
        self.playground.close()

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
            routes = {**ROUTES, "playground": lambda _, query: self.server.playground.status(query.text("run"))}
            status, content = answer(self.server.folder, name, query, routes)
            self._send(status, PNG if name == "image" and status == HTTPStatus.OK else JSON, content)
            return
        file = static_files().get("index.html" if path == "/" else path.removeprefix("/static/"))
        if file is None or not (path == "/" or path.startswith("/static/")):
            self._send_json(HTTPStatus.NOT_FOUND, {"error": "there is no such page"})
        else:
            self._send(HTTPStatus.OK, TYPES["html" if path == "/" else path.rpartition(".")[2]], file)

    do_HEAD = do_GET

    def do_POST(self) -> None:
        """Reply to a question for the Playground with its events, a JSON object a line."""
        self.close_connection = True
        try:
            ask = read_ask(self._question())
            with self.server.playground.asking(ask) as events:
                self.send_response(HTTPStatus.OK)
                for name, value in {**HEADERS, "Content-Type": JSON_LINES, "Connection": "close"}.items():
                    self.send_header(name, value)
                self.end_headers()
                for event in events:
                    if self._client_is_gone():
                        return
                    if event is not None:
                        self.wfile.write(dump(event) + b"\n")
        except Refused as error:
            self._send_json(error.status, {"error": str(error)}, **error.headers)
        except ArpoError as error:
            self._send_json(_status_of(error), {"error": str(error)})

    def _question(self) -> bytes:
        """The body of a request that our own page sent; Refused if another one may have."""
        headers, server = self.headers, self.server
        host = headers.get("Host", "")
        if not known_host(host, server.host, server.port):
            raise Refused(HTTPStatus.FORBIDDEN, "use the address that `arpo view` printed")
        if self.path != "/api/ask":
            raise Refused(HTTPStatus.METHOD_NOT_ALLOWED, "only GET and HEAD are supported", Allow="GET, HEAD")
        if headers.get("Origin") != f"http://{host}":
            raise Refused(HTTPStatus.FORBIDDEN, "questions are taken from the page of `arpo view` only")
        given, token = headers.get(TOKEN_HEADER, ""), server.playground.token
        if not hmac.compare_digest(given.encode(), token.encode()):
            raise Refused(HTTPStatus.FORBIDDEN, "this page is of an earlier `arpo view`: load it again")
        if headers.get("Content-Type") != JSON:
            raise Refused(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f"send {JSON}")
        length = headers.get("Content-Length", "")
        if not (length.isascii() and length.isdecimal()):
            raise Refused(HTTPStatus.LENGTH_REQUIRED, "say how long the question is")
        if len(length) > len(str(MAX_BODY)) or int(length) > MAX_BODY:
            raise Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a question may have {MAX_BODY:,} bytes")
        return self.rfile.read(int(length))

    def _client_is_gone(self) -> bool:
        """Whether the client closed the connection; one that waits for events has nothing to send."""
        return bool(select.select([self.connection], [], [], 0)[0])

    def _refuse_method(self) -> None:
        self.close_connection = True
        self._send_json(HTTPStatus.METHOD_NOT_ALLOWED, {"error": "only GET and HEAD are supported"}, Allow="GET, HEAD")

    do_PUT = do_DELETE = do_PATCH = do_OPTIONS = do_TRACE = do_CONNECT = _refuse_method

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


def build_server(folder: Folder, host: str, port: int, playground: Playground | None = None) -> Server:
    """A listening server; port 0 takes any free port. By default the Playground is on for this machine only."""
    if playground is None:
        playground = Playground(folder, off="" if host in LOCAL else OFF_FOR_OTHERS)
    try:
        return Server(folder, host, port, playground)
    except OSError as error:
        hint = "choose another --port, or 0 for a free one" if port else "choose another --host"
        raise ArpoError(f"{host}:{port}: cannot listen ({error.strerror}); {hint}") from None


def answer(folder: Folder, name: str, query: str, routes: Mapping[str, Route] = ROUTES) -> tuple[HTTPStatus, bytes]:
    """The reply to an API request: JSON, or a PNG to "image"; an error is JSON. Never raises."""
    try:
        if name == "image":
            asked = Query(query)
            if (evaluation := asked.optional("eval")) is not None:
                return HTTPStatus.OK, evals.image(folder, evaluation, asked.text("sha256"))
            return HTTPStatus.OK, api.image(folder, asked.text("run"), asked.text("sha256"))
        if name not in routes:
            raise NotFound("there is no such request")
        return HTTPStatus.OK, dump(routes[name](folder, Query(query)))
    except ArpoError as error:
        status, message = _status_of(error), str(error)
    except Exception as error:  # damaged files can fail in any way
        status = HTTPStatus.UNPROCESSABLE_ENTITY
        message = f"this part of the run cannot be read ({type(error).__name__}: {str(error)[:200]})"
    return status, dump({"error": message})


def _status_of(error: ArpoError) -> HTTPStatus:
    statuses = {NotFound: HTTPStatus.NOT_FOUND, BadRequest: HTTPStatus.BAD_REQUEST}
    statuses |= {Off: HTTPStatus.FORBIDDEN, Busy: HTTPStatus.CONFLICT}
    return statuses.get(type(error), HTTPStatus.UNPROCESSABLE_ENTITY)


@cache
def static_files() -> dict[str, bytes]:
    """The page's files by name."""
    folder = resources.files("arpo.viewer").joinpath("static")
    return {entry.name: entry.read_bytes() for entry in folder.iterdir() if entry.name.rpartition(".")[2] in TYPES}
