"""A chat endpoint on this machine: answers with what a function makes of each request, and keeps what was asked."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = tuple[int, Any] | tuple[int, Any, dict[str, str]]
"""Status, body (bytes as they are, anything else as JSON) and, if any, headers."""


def said(content: Any, finish: str = "stop", usage: tuple[int, int] | None = None, **choice: Any) -> Answer:
    """A turn as an OpenAI-compatible endpoint sends it."""
    body: dict[str, Any] = {"choices": [{"message": {"content": content}, "finish_reason": finish, **choice}]}
    if usage is not None:
        body["usage"] = {"prompt_tokens": usage[0], "completion_tokens": usage[1]}
    return 200, body


@dataclass
class ChatServer:
    """What the server does next, and what it was asked."""

    url: str = ""
    reply: Callable[[dict[str, Any]], Answer] = lambda request: said("")
    delay: float = 0.0
    over: threading.Event = field(default_factory=threading.Event)
    requests: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    at_once: int = 0
    most: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


@contextlib.contextmanager
def chat_server() -> Iterator[ChatServer]:
    """A server that lives as long as the block."""
    served = ChatServer()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with served.lock:
                served.requests.append(request)
                served.keys.append(self.headers.get("Authorization"))
                served.paths.append(self.path)
                served.at_once += 1
                served.most = max(served.most, served.at_once)
            served.over.wait(served.delay)
            status, body, *headers = served.reply(request)
            with served.lock:
                served.at_once -= 1
            with contextlib.suppress(ConnectionError):
                self.send_response(status)
                for name, value in (headers[0] if headers else {}).items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body if isinstance(body, bytes) else json.dumps(body).encode())

        def log_message(self, *args: Any) -> None: ...

    class Server(ThreadingHTTPServer):
        def handle_error(self, *args: Any) -> None:
            """A caller that hangs up is none of this server's business."""

    http = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    served.url = f"http://127.0.0.1:{http.server_port}/v1"
    try:
        yield served
    finally:
        served.over.set()
        http.shutdown()
        http.server_close()
        thread.join()
